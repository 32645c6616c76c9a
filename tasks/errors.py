"""Errors that end a command with one clear message instead of a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """A run cannot go on for a reason outside the code (disk full, a service that is gone). Exit code 1."""

    exit_code = 1


class UserError(CommandError):
    """Bad input: the message names the value, what is allowed and what to do. Exit code 2."""

    exit_code = 2
