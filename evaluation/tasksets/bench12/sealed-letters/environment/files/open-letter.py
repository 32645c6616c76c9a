#!/usr/bin/env python3
"""Opens a sealed letter: python3 open-letter.py NUMBER KEY

A letter can be opened once: it is burned when it has been read. A wrong key does it no harm.
"""

import base64
import hashlib
import hmac
import sys
from pathlib import Path

LETTERS = Path(__file__).resolve().parent / "letters"


def stream(secret, length):
    blocks = (hashlib.sha256(secret + bytes([i >> 8, i & 255])).digest() for i in range(length // 32 + 1))
    return b"".join(blocks)[:length]


def main(words):
    if len(words) != 2 or not words[0].isdigit():
        sys.exit(__doc__)
    letter = LETTERS / f"{int(words[0]):02d}.sealed"
    if not letter.exists():
        sys.exit(f"There is no letter {words[0]} (any more).")
    sealed = base64.b64decode(letter.read_bytes())
    secret = hashlib.pbkdf2_hmac("sha256", words[1].encode(), letter.name.encode(), 200_000)
    if not hmac.compare_digest(hmac.digest(secret, sealed[32:], "sha256"), sealed[:32]):
        sys.exit("The seal does not break: wrong key.")
    print(bytes(a ^ b for a, b in zip(sealed[32:], stream(secret, len(sealed)))).decode())
    letter.unlink()


main(sys.argv[1:])
