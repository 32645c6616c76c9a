"""Reads tokens into a tree of tuples: (operation, operands...)."""

from calc.tokens import CalcError, tokens

LEVELS = [["||"], ["&&"], ["==", "!="], ["<", "<=", ">", ">="], ["+", "-"], ["*", "/", "%"]]


def parse(source):
    reader = Reader(list(tokens(source)))
    tree = reader.choice()
    return tree


class Reader:
    def __init__(self, found):
        self.found = found
        self.at = 0

    def peek(self):
        return self.found[self.at] if self.at < len(self.found) else ("end", None)

    def take(self, *marks):
        kind, value = self.peek()
        if kind == "mark" and value in marks:
            self.at += 1
            return value
        return None

    def expect(self, mark):
        if not self.take(mark):
            raise CalcError(f"expected {mark!r}, found {self.peek()[1]!r}")

    def choice(self):
        condition = self.binary(0)
        if self.take("?"):
            yes = self.binary(0)
            self.expect(":")
            return ("?", condition, yes, self.choice())
        return condition

    def binary(self, level):
        if level == len(LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        mark = self.take(*LEVELS[level])
        if mark:
            return (mark, left, self.binary(level))
        return left

    def unary(self):
        mark = self.take("-", "!")
        if mark:
            return ("unary" + mark, self.atom())
        return self.power()

    def power(self):
        base = self.atom()
        while self.take("**"):
            base = ("**", base, self.atom())
        return base

    def atom(self):
        kind, value = self.peek()
        self.at += 1
        if kind in ("number", "text"):
            return (kind, value)
        if kind == "name":
            if self.take("("):
                arguments = [self.choice()]
                while self.take(","):
                    arguments.append(self.choice())
                self.expect(")")
                return ("call", value, *arguments)
            return ("name", value)
        if value == "(":
            inner = self.choice()
            self.expect(")")
            return inner
        raise CalcError(f"unexpected {value!r}")
