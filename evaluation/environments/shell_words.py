"""One line of POSIX shell, split as dash splits it: words, quotes, comments, `>` and `>>`.

Everything beyond that (expansions, globs, pipes, lists, keywords) is refused with a message before anything runs, so
that no command is ever half understood.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_PLAIN_LINE = re.compile(r"[A-Za-z0-9_./,+@%: \t-]*")
_BLANK = " \t"
_ALWAYS_REFUSED = frozenset("$`;&|()<*?[")
_KEYWORD_NAMES = "! { } case do done elif else esac fi for if in then until while"
_KEYWORDS = frozenset(_KEYWORD_NAMES.split())
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


class ShellError(Exception):
    """The line is not run; the shell prints the message and exits with the code."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Line:
    """A simple command."""

    words: list[str] = field(default_factory=list)
    redirects: list[tuple[str, str]] = field(default_factory=list)
    """(`>` or `>>`, file), in order"""


def parse_line(text: str) -> Line:
    """Splits one line. Raises ShellError as dash reports a syntax error, or where the syntax is not supported."""
    text = text.rstrip("\n")
    if _PLAIN_LINE.fullmatch(text):  # almost every command: nothing to unquote
        words = text.split()
        _refuse_keyword(words, quoted=False)
        return Line(words)
    if "\n" in text or "\0" in text or "\r" in text:
        raise ShellError("sh: 1: more than one line is not supported")
    return _Splitter(text).split()


def _refuse_keyword(words: list[str], quoted: bool) -> None:
    if words and not quoted and words[0] in _KEYWORDS:
        raise ShellError(f"sh: 1: {words[0]}: not supported")


class _Splitter:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line = Line()
        self.pending: str | None = None
        """A redirection that still waits for its file"""

    def split(self) -> Line:
        while self.at < len(self.text):
            c = self.text[self.at]
            if c in _BLANK:
                self.at += 1
            elif c == "#":
                break
            elif c == ">":
                self._operator()
            else:
                self._word()
        if self.pending is not None:
            raise ShellError("sh: 1: Syntax error: end of file unexpected")
        return self.line

    def _operator(self) -> None:
        if self.pending is not None:
            raise ShellError("sh: 1: Syntax error: redirection unexpected")
        self.pending = ">>" if self.text.startswith(">>", self.at) else ">"
        self.at += len(self.pending)
        following = self.text[self.at : self.at + 1]
        if following in ("&", "|") and following:
            raise ShellError(f"sh: 1: {self.pending}{following}: not supported")

    def _word(self) -> None:
        start = self.at
        word: list[str] = []
        quoted = False
        while self.at < len(self.text):
            c = self.text[self.at]
            if c in _BLANK or c == ">":
                break
            if c == "'":
                quoted = True
                word.append(self._single_quoted())
            elif c == '"':
                quoted = True
                word.append(self._double_quoted())
            elif c == "\\":
                quoted = True
                word.append(self.text[self.at + 1 : self.at + 2] or "\\")
                self.at += 2
            elif c in _ALWAYS_REFUSED or (c == "~" and self.at == start):
                raise ShellError(f"sh: 1: {c}: not supported")
            else:
                word.append(c)
                self.at += 1
        self._take("".join(word), self.text[start : self.at], quoted)

    def _take(self, word: str, source: str, quoted: bool) -> None:
        if self.pending is not None:
            self.line.redirects.append((self.pending, word))
            self.pending = None
            return
        if not quoted and word.isdecimal() and len(word) == 1 and self.text[self.at : self.at + 1] == ">":
            raise ShellError(f"sh: 1: {word}>: not supported")
        if not self.line.words:
            if _ASSIGNMENT.match(source):
                raise ShellError("sh: 1: =: not supported")
            _refuse_keyword([word], quoted)
        self.line.words.append(word)

    def _single_quoted(self) -> str:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise ShellError("sh: 1: Syntax error: Unterminated quoted string")
        inner = self.text[self.at + 1 : end]
        self.at = end + 1
        return inner

    def _double_quoted(self) -> str:
        inner: list[str] = []
        i = self.at + 1
        while i < len(self.text):
            c = self.text[i]
            if c == '"':
                self.at = i + 1
                return "".join(inner)
            if c in "$`":
                raise ShellError(f"sh: 1: {c}: not supported")
            if c == "\\" and self.text[i + 1 : i + 2] in ("$", "`", '"', "\\"):
                i += 1
                c = self.text[i]
            inner.append(c)
            i += 1
        raise ShellError("sh: 1: Syntax error: Unterminated quoted string")
