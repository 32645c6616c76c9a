"""What an endpoint must know and nobody else may: its key and password. In memory only, cut out of every text."""

from __future__ import annotations

import base64
import os
import re
from urllib.parse import quote, unquote

from compaction.protocols import EngineError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ENDINGS = ("/chat/completions", "/completions", "/models")
"""What people copy along with a base URL"""

_userinfo: dict[str, tuple[str, str]] = {}
"""Base URL without userinfo → (user, password). Of this process; never written anywhere."""


def normal_url(url: str) -> str:
    """A base URL without what follows it in a copied address: `/chat/completions`, the last slash, spaces."""
    url = url.strip().rstrip("/")
    for ending in _ENDINGS:
        url = url.removesuffix(ending)
    return url.rstrip("/")


def take_userinfo(text: str) -> str:
    """`text` without the `user:password@` of the URL in it, which this process keeps for calls to that URL.

    For settings, and for anything that could be shown before settings are read (a command line's arguments). Text
    without such a URL comes back as it is. A raw `/` or `@` in a password is part of it.
    """
    scheme = _SCHEME.search(text)
    if scheme is None:
        return text
    userinfo, at, address = text[scheme.end() :].rpartition("@")
    if not at or re.search(r"[\s\"']", userinfo):  # a URL in a longer text, and an @ somewhere after it
        return text
    url = scheme.group() + address
    user, _, password = userinfo.partition(":")
    _userinfo[normal_url(url)] = (unquote(user), unquote(password))
    return text[: scheme.start()] + url


def authorization(base_url: str, key_variable: str) -> dict[str, str]:
    """The header that a call to `base_url` carries: userinfo given with the URL, else the key, else nothing.

    Raises EngineError (`authentication`) for a key that no header can hold; the message does not show it.
    """
    if base_url in _userinfo:
        return {"Authorization": f"Basic {_basic(*_userinfo[base_url])}"}
    if not _fits_a_header(_key(key_variable)):  # no variable here holds it: a traceback may show them
        raise EngineError(
            f"variable {key_variable} holds characters that no key has (spaces, line ends or non-ASCII); set it anew",
            "authentication",
        )
    return {"Authorization": f"Bearer {_key(key_variable)}"} if _key(key_variable) else {}


def describe_credentials(base_url: str, key_variable: str) -> str:
    """What a call carries, in words, for messages about a refused one."""
    if base_url in _userinfo:
        return "the user and password of the URL were sent"
    return f"the key in {key_variable} was sent" if _key(key_variable) else f"no key was sent: {key_variable} is unset"


def redact(text: str, base_url: str, key_variable: str) -> str:
    """`text` in which the endpoint's secrets, should a server or library repeat them, are stars."""
    secrets = {_key(key_variable)}
    if base_url in _userinfo:
        user, password = _userinfo[base_url]
        secrets |= {password, quote(password, safe=""), _basic(user, password)}
    for secret in sorted(secrets, key=len, reverse=True):
        if secret:
            text = text.replace(secret, "***")
    return text


def _key(variable: str) -> str:
    """Read at every call: it may be renewed while a job runs."""
    return os.environ.get(variable, "").strip()


def _fits_a_header(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key


def _basic(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode("ascii")
