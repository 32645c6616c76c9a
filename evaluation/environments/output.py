"""What is kept of an output that may be larger than memory: its head and its tail, cut between characters."""

from __future__ import annotations


class ClippedOutput:
    """Takes bytes as they come and holds about twice `limit` of them at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head_size = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        room = self._head_size - len(self._head)
        self._head += data[:room]
        tail_size = self._limit - self._head_size
        self._tail += data[room:] if room < len(data) else b""
        if len(self._tail) > self._limit + tail_size:  # rarely, so that small pieces cost no copy each
            del self._tail[:-tail_size]

    def bytes(self) -> bytes:
        """Head and tail; where something was cut, a marker between them says how much."""
        if self._total <= self._limit:
            return bytes(self._head + self._tail)
        tail = self._tail[len(self._tail) - (self._limit - self._head_size) :]
        head = self._head[: _end_of_characters(self._head)]
        tail = tail[_start_of_characters(tail) :]
        cut = self._total - len(head) - len(tail)
        return bytes(head) + f"\n[… {cut:,} bytes cut …]\n".encode() + bytes(tail)

    def text(self) -> str:
        """The same as text; bytes that are not UTF-8 show as replacement characters."""
        return self.bytes().decode("utf-8", "replace")


def _end_of_characters(data: bytearray) -> int:
    """Where to cut so that no character is left begun."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:  # inside a character: look further back for where it begins
            continue
        length = 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4 if byte >> 3 == 0b11110 else 1
        return len(data) - back if length > back else len(data)
    return len(data)


def _start_of_characters(data: bytearray) -> int:
    """Where to begin so that no rest of a character is left: at most three bytes belong to one."""
    for at in range(min(4, len(data))):
        if data[at] & 0xC0 != 0x80:
            return at
    return 0
