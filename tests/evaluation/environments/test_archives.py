"""Archives that an agent could have made."""

from __future__ import annotations

import io
import logging
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluation.environments.archives import pack_files, pack_folder, regular_files, unpack


def archive(*members: tuple[str, bytes | str]) -> Iterator[bytes]:
    """Files by name; text as content: a link to it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    yield from (buffer.getvalue()[at : at + 1000] for at in range(0, len(buffer.getvalue()), 1000))


def test_nothing_is_written_outside_and_no_link_is_made(tmp_path: Path) -> None:
    inside = [("top/link", "/etc"), ("top/link/passwd", b"x"), ("top/ok", b"y")]
    unpack(archive(("top/../../escaped", b"x"), ("/absolute", b"x"), *inside), tmp_path / "in", 1000)
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert written == ["in", "in/link", "in/link/passwd", "in/ok"]
    assert not (tmp_path / "in/link").is_symlink()


def test_what_is_too_large_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        unpack(archive(("t/a", b"1" * 90), ("t/b", b"2" * 20), ("t/c", b"3" * 10)), tmp_path, 100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "c"]
    assert "t/b" in caplog.text or "b (20 bytes)" in caplog.text


def test_reading_ends_far_above_the_limit(tmp_path: Path) -> None:
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        for chunk in archive(*((f"t/{n}", b"0" * 5000) for n in range(100))):
            read += 1
            yield chunk

    unpack(endless(), tmp_path, 100)
    assert read < 30


def test_a_single_file_has_no_path() -> None:
    (found,) = [(str(path), size, content.read()) for path, size, content in regular_files(archive(("x.txt", b"1")))]
    assert found == (".", 1, b"1")


def test_what_is_no_archive_is_an_error() -> None:
    with pytest.raises(tarfile.TarError):
        list(regular_files(iter([b"not a tar" * 100])))


def test_packed_files_are_readable_and_scripts_executable(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("")
    (tmp_path / "data").write_text("")
    (tmp_path / "run.sh").chmod(0o600)
    (tmp_path / "data").chmod(0o600)
    with tarfile.open(fileobj=io.BytesIO(pack_folder(tmp_path, "/tests"))) as tar:
        modes = {m.name: (oct(m.mode), m.uid) for m in tar}
    assert modes["tests/run.sh"] == ("0o755", 0)
    assert modes["tests/data"] == ("0o644", 0)


def test_packed_paths_bring_no_folders() -> None:
    with tarfile.open(fileobj=io.BytesIO(pack_files({"/tmp/x/y": b"1"}))) as tar:
        assert tar.getnames() == ["tmp/x/y"]
