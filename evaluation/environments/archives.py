"""Files on their way into and out of a sandbox, as tar. An agent made what comes out: nothing in it is trusted."""

from __future__ import annotations

import io
import logging
import tarfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path, PurePosixPath
from typing import IO

log = logging.getLogger(__name__)

_SCANNED_PER_BYTE_KEPT = 20
"""An archive is not read further than this many times what may be kept of it"""


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """An archive of files by path, readable by all. Folders are not in it: existing ones stay as they are."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            info = tarfile.TarInfo(path.lstrip("/"))
            info.size, info.mode = len(content), 0o644
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def pack_folder(folder: Path, name: str) -> bytes:
    """An archive of a host folder under another name, owned by root, readable by all, its scripts executable."""

    def for_all(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        info.mode |= 0o755 if info.isdir() or info.name.endswith(".sh") else 0o444
        return info

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, name.strip("/"), filter=for_all)
    return buffer.getvalue()


def regular_files(chunks: Iterator[bytes]) -> Generator[tuple[PurePosixPath, int, IO[bytes]]]:
    """(path below the archive's top, size, content) of each regular file; the top itself, a file, has the path ".".

    Links, devices and paths that lead elsewhere are left out. Raises tarfile.TarError for what is no archive. To be
    closed where not all of it is read: what the archive comes from is ended then.
    """
    source = io.BufferedReader(_Chunks(chunks))
    with closing(source), tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None and path.parts and not path.is_absolute() and ".." not in path.parts:
                yield path.relative_to(path.parts[0]), member.size, content


def unpack(chunks: Iterator[bytes], folder: Path, limit: int) -> None:
    """Writes the regular files of an archive below `folder`, `limit` bytes in all; what is over that is logged."""
    kept = scanned = 0
    with closing(regular_files(chunks)) as files:
        for path, size, content in files:
            scanned += size
            if scanned > limit * _SCANNED_PER_BYTE_KEPT:
                log.warning("%s: the rest of what the sandbox left is not kept, it is too large", folder)
                return
            if kept + size > limit:
                log.warning("%s: %s (%s bytes) is not kept: over %s in all", folder, path, f"{size:,}", f"{limit:,}")
                continue
            with suppress(OSError, ValueError):  # a name that this system does not take
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content.read())
                kept += size


class _Chunks(io.RawIOBase):
    """A file over an iterator of bytes."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if isinstance(self._chunks, Generator):
            self._chunks.close()
        super().close()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        n = min(len(buffer), len(self._rest))
        buffer[:n] = self._rest[:n]
        self._rest = self._rest[n:]
        return n
