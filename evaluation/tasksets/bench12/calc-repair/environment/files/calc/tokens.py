"""Splits an expression into tokens: (kind, value) with kind number, name, text or mark."""

MARKS = ["**", "<=", ">=", "==", "!=", "&&", "||", "+", "-", "*", "/", "%", "<", ">", "!", "(", ")", ",", "?", ":"]


def tokens(source):
    at = 0
    while at < len(source):
        char = source[at]
        if char.isspace():
            at += 1
        elif char.isdigit():
            end = at
            while end < len(source) and (source[end].isdigit() or source[end] == "."):
                end += 1
            text = source[at:end]
            yield "number", float(text) if "." in text else int(text)
            at = end
        elif char.isalpha() or char == "_":
            end = at
            while end < len(source) and (source[end].isalpha() or source[end] == "_"):
                end += 1
            yield "name", source[at:end]
            at = end
        elif char == '"':
            end = source.index('"', at + 1)
            yield "text", source[at + 1 : end]
            at = end + 1
        else:
            mark = next((m for m in MARKS if source.startswith(m, at)), None)
            if mark is None:
                raise CalcError(f"unexpected {char!r}")
            yield "mark", mark
            at += len(mark)


class CalcError(Exception):
    """An expression that cannot be read or computed."""
