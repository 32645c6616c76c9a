"""The trail world's shell, in this process: a folder of small files, `cat`, `ls`, `grep`, `echo` and redirection.

No host file is read or written and nothing is started. What is supported answers as dash with GNU coreutils and grep
does in the C locale, with standard error merged into the output; the differential test holds it to that. What is not
supported says so. There are no subfolders and no standard input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from compaction.protocols import EnvironmentFailure, Execution
from evaluation.environments.shell_words import Line, ShellError, parse_line

_MISSING = "No such file or directory"
_IS_FOLDER = "Is a directory"
_NOT_FOLDER = "Not a directory"
_DENIED = "Permission denied"
_IFS = re.compile(r"[ \t\n]+")

_BUILTIN_NAMES = (
    ". : [ alias bg break cd chdir command continue eval exec exit export false fg getopts hash jobs kill local printf "
    "pwd read readonly return set shift test times trap true type ulimit umask unalias unset wait"
)
_BUILTINS = frozenset(_BUILTIN_NAMES.split())
_ECHO_ESCAPE = re.compile(r"\\([\\abfnrtvc0-7])")
_ECHO_VALUES = {"\\": "\\", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_QUOTED = frozenset(" '!\"$&()*;<=>[^`|?\\:")
"""Characters for which GNU's messages quote a name"""


class _PathError(Exception):
    pass


class TrailEnvironment:
    """One folder for one rollout. Implements `compaction.protocols.Environment`."""

    def __init__(self, files: Mapping[str, str], out: str, answer: Sequence[str]) -> None:
        """files: name to content. The reward is 1 if the words of the file `out` are `answer`, in order, else 0."""
        self._initial = dict(files)
        self._out = out
        self._answer = list(answer)
        self._files: dict[str, str] | None = None

    async def start(self) -> None:
        self._files = dict(self._initial)

    async def execute(self, command: str) -> Execution:
        """Runs one line of shell. Wrong lines are answered, never raised."""
        files = self._started()
        try:
            line = parse_line(command)
            return _Run(files, line).result()
        except ShellError as error:
            return Execution(f"{error}\n", error.exit_code)

    async def upload(self, path: str, content: bytes) -> None:
        """Writes a file. Raises EnvironmentFailure for a path outside the folder."""
        files = self._started()
        try:
            files[_resolve(files, path, create=True)] = content.decode("utf-8", "surrogateescape")
        except _PathError as error:
            raise EnvironmentFailure(f"cannot upload to {path!r}: {error}") from None

    async def grade(self) -> float:
        written = self._started().get(self._out)
        return float(written is not None and words_of(written) == self._answer)

    async def stop(self) -> None:
        self._files = None

    def _started(self) -> dict[str, str]:
        if self._files is None:
            raise EnvironmentFailure("the trail environment is not running; call start() first")
        return self._files


def words_of(text: str) -> list[str]:
    """Words as the shell splits them: at blanks, tabs and newlines."""
    return [word for word in _IFS.split(text) if word]


class _Run:
    """One command: its output, in the order in which a terminal would show it."""

    def __init__(self, files: dict[str, str], line: Line) -> None:
        self.files = files
        self.line = line
        self.shown: list[str] = []
        self.exit_code = 0

    def result(self) -> Execution:
        """Raises ShellError where the line is refused; then nothing has changed."""
        words = self.line.words
        name = words[0] if words else None
        if name in _BUILTINS and not (name == "exit" and len(words) == 1):
            raise ShellError(f"sh: 1: {name}: not supported")
        if self.line.redirects and name in _COMMANDS:
            raise ShellError(f"sh: 1: {name} with > is not supported")
        text = _echo(words[1:]) if name == "echo" else ""
        target = self._open_redirects()
        if target is not None:
            self.files[target] += text
        else:
            self.shown.append(text)
        if name in _COMMANDS:
            _COMMANDS[name](self, words[1:])
        elif name not in (None, "echo", "exit"):
            self._no_command(name)
        return Execution("".join(self.shown), self.exit_code)

    def fail(self, message: str, exit_code: int) -> None:
        self.shown.append(message + "\n")
        self.exit_code = exit_code

    def _open_redirects(self) -> str | None:
        """Creates or empties the files; the last one takes the output."""
        target = None
        for operator, path in self.line.redirects:
            try:
                target = _resolve(self.files, path, create=True)
            except _PathError as error:
                reason = "Directory nonexistent" if str(error) in (_MISSING, _NOT_FOLDER) else error
                raise ShellError(f"sh: 1: cannot create {path}: {reason}") from None
            if operator == ">" or target not in self.files:
                self.files[target] = ""
        return target

    def _no_command(self, name: str) -> None:
        if not name:
            self.fail("sh: 1: : Permission denied", 127)
            return
        if "/" in name:
            try:
                _resolve(self.files, name)
                denied = True
            except _PathError as error:
                denied = str(error) in (_IS_FOLDER, _DENIED)
            if denied:
                self.fail(f"sh: 1: {name}: {_DENIED}", 126)
                return
        self.fail(f"sh: 1: {name}: not found", 127)

    def cat(self, words: list[str]) -> None:
        _, paths = _options("cat", words, "")
        for path in paths:
            try:
                self.shown.append("" if path == "-" else self.files[_resolve(self.files, path)])
            except _PathError as error:
                self.fail(f"cat: {quoted_where_needed(path)}: {error}", 1)

    def ls(self, words: list[str]) -> None:
        _, paths = _options("ls", words, "1")
        listing = "".join(f"{name}\n" for name in sorted(self.files, key=_bytes) if not name.startswith("."))
        if not paths:
            self.shown.append(listing)
            return
        names: list[str] = []
        folders: list[str] = []
        for path in paths:
            try:
                _resolve(self.files, path)
                names.append(path)
            except _PathError as error:
                if str(error) == _IS_FOLDER:
                    folders.append(path)
                else:
                    self.fail(f"ls: cannot access {quoted(path)}: {error}", 2)
        blocks = ["".join(f"{name}\n" for name in sorted(names, key=_bytes))] if names else []
        for folder in sorted(folders, key=_bytes):
            blocks.append(f"{folder}:\n{listing}" if len(paths) > 1 else listing)
        self.shown.append("\n".join(blocks))

    def grep(self, words: list[str]) -> None:
        flags, rest = _options("grep", words, "lncivw")
        if not rest:
            raise ShellError("grep: which word? usage: grep WORD FILE…")
        matcher = _matcher(rest[0], flags)
        paths = rest[1:] or ["-"]
        found = False
        failed = False
        for path in paths:
            try:
                content = "" if path == "-" else self.files[_resolve(self.files, path)]
            except _PathError as error:
                self.fail(f"grep: {path}: {error}", 2)
                failed = True
                if str(error) != _IS_FOLDER:  # a folder opens, and counts as empty
                    continue
                content = ""
            label = "(standard input)" if path == "-" else path
            hits = self._grep_file(matcher, flags, content, label, with_name=len(paths) > 1)
            found = found or hits > 0
        self.exit_code = 2 if failed else 0 if found else 1

    def _grep_file(self, matcher: re.Pattern[str], flags: str, content: str, label: str, with_name: bool) -> int:
        lines = content.split("\n")
        if lines[-1] == "":
            lines.pop()
        hits = [(i, line) for i, line in enumerate(lines, 1) if (matcher.search(line) is None) == ("v" in flags)]
        prefix = f"{label}:" if with_name else ""
        if "l" in flags:
            self.shown.append(f"{label}\n" if hits else "")
        elif "c" in flags:
            self.shown.append(f"{prefix}{len(hits)}\n")
        else:
            numbered = "n" in flags
            self.shown.extend(f"{prefix}{f'{i}:' if numbered else ''}{line}\n" for i, line in hits)
        return len(hits)


_COMMANDS: dict[str | None, Callable[[_Run, list[str]], None]] = {
    "cat": _Run.cat,
    "ls": _Run.ls,
    "grep": _Run.grep,
}


def _echo(words: list[str]) -> str:
    newline = "\n"
    if words and words[0] == "-n":
        newline, words = "", words[1:]
    text = " ".join(words)
    if "\\" not in text:
        return text + newline
    shown: list[str] = []
    at = 0
    for escape in _ECHO_ESCAPE.finditer(text):
        shown.append(text[at : escape.start()])
        at = escape.end()
        letter = escape[1]
        if letter == "c":  # prints nothing more, not even the newline
            return "".join(shown)
        if letter.isdigit():
            raise ShellError(f"sh: 1: echo: \\{letter}: not supported")
        shown.append(_ECHO_VALUES[letter])
    return "".join(shown) + text[at:] + newline


def _options(command: str, words: list[str], allowed: str) -> tuple[str, list[str]]:
    """(flag letters, operands), permuted as GNU getopt does."""
    flags = ""
    operands: list[str] = []
    for i, word in enumerate(words):
        if word == "--":
            operands.extend(words[i + 1 :])
            break
        if not word.startswith("-") or word == "-":
            operands.append(word)
            continue
        if word.startswith("--"):
            raise ShellError(f"{command}: option {word} is not supported")
        for letter in word[1:]:
            if letter not in allowed:
                raise ShellError(f"{command}: option -{letter} is not supported")
        flags += word[1:]
    return flags, operands


def _matcher(pattern: str, flags: str) -> re.Pattern[str]:
    special = next((c for c in pattern if c in "\\.*[^$"), None)
    if special is not None:
        raise ShellError(f"grep: {special} in a pattern is not supported, only plain words")
    if not pattern and ("w" in flags or "v" in flags):
        raise ShellError("grep: -w and -v with an empty word are not supported")
    literal = re.escape(pattern)
    if "w" in flags:
        literal = f"(?<![A-Za-z0-9_]){literal}(?![A-Za-z0-9_])"
    return re.compile(literal, re.ASCII | (re.IGNORECASE if "i" in flags else 0))


def _resolve(files: Mapping[str, str], path: str, create: bool = False) -> str:
    """The name in the folder that a path means. Raises _PathError with the system's message."""
    if path in files:
        return path
    if path.startswith("/") or ".." in path.split("/"):
        raise _PathError(_IS_FOLDER if path == ".." else _DENIED)
    if not path:
        raise _PathError(_MISSING)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts:
        raise _PathError(_IS_FOLDER)
    name = parts[0]
    as_folder = len(parts) > 1 or path.endswith(("/", "/."))
    if as_folder:
        if create and len(parts) == 1 and path.endswith("/"):
            raise _PathError(_IS_FOLDER)
        raise _PathError(_NOT_FOLDER if name in files else _MISSING)
    if name not in files and not create:
        raise _PathError(_MISSING)
    return name


def quoted(name: str) -> str:
    """GNU's shell-escape-always quoting. Raises ShellError for names that are not printable ASCII."""
    if not (name.isascii() and name.isprintable()) and name:
        raise ShellError("sh: 1: file names with special characters are not supported")
    if "'" in name and not any(c in name for c in _QUOTED - frozenset(" ':")):
        return f'"{name}"'
    return "'" + name.replace("'", "'\\''") + "'"


def quoted_where_needed(name: str) -> str:
    """GNU's shell-escape quoting with the colon as a special character."""
    plain = name.isascii() and name.isprintable() and not any(c in name for c in _QUOTED)
    return name if plain and name and name not in "{}" and name[0] not in "#~" else quoted(name)


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
