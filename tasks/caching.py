"""Finished stages, kept by content: run again only what changed.

A stage is named by what decides its result: its settings, the digests of its parents and the sources of the packages
it imports. Its folder is made under `.work/` and renamed into place once its manifest is written, so whatever has a
name without `.work` is whole. Plain files: imports neither Prefect nor MLflow, torch or Ray.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from compaction.files import write_durably
from compaction.pairing import CARD
from tasks.errors import CommandError
from tasks.explain import explain_difference

SOURCES = Path(__file__).resolve().parents[1]
"""The folder that holds compaction/, rl/, evaluation/, tasks/ and flows/"""
SOURCE_SUFFIXES = (".py", ".yaml", ".json", ".j2", ".html", ".css")
MANIFEST = "manifest.json"
WHOLE_DIGEST_BYTES = 64 * 2**20
"""Files up to this size are hashed whole; of larger ones the size and sampled blocks."""
SAMPLED_BLOCKS, BLOCK_BYTES = 64, 64 * 2**10


@dataclass(frozen=True)
class StageSpec:
    """What decides the result of a stage."""

    stage: str
    """For example `sft`, `ppo`, `evaluate`"""
    label: str
    """Which of several runs of that stage, for example `compactionrl/seed 0`; names it and is part of the key"""
    settings: Mapping[str, Any]
    """JSON-able; only what changes the result"""
    parents: Mapping[str, str] = field(default_factory=dict)
    """Role (`checkpoint`, `rollouts`) → digest of the stage it comes from"""
    packages: tuple[str, ...] = ()
    """Source folders or files that the stage imports, relative to the repository: `rl`, `evaluation/tasksets`"""

    @property
    def code(self) -> str:
        return code_digest(self.packages)

    @property
    def digest(self) -> str:
        return sha256_json(
            {
                "stage": self.stage,
                "label": self.label,
                "settings": self.settings,
                "parents": self.parents,
                "code": self.code,
            }
        )

    @property
    def folder_name(self) -> str:
        return f"{self.stage}-{self.digest[:16]}"

    @property
    def title(self) -> str:
        return f"{self.stage} {self.label}".strip()


@dataclass(frozen=True)
class Manifest:
    """What a finished stage says of itself."""

    stage: str
    label: str
    digest: str
    settings: dict[str, Any]
    parents: dict[str, str]
    code: str
    files: dict[str, dict[str, Any]]
    """Relative path → size in bytes and digest"""
    result: dict[str, Any]
    """Small JSON that later stages and the report read"""
    seconds: float
    created: str
    mlflow_run_id: str | None

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        try:
            return cls(**json.loads((folder / MANIFEST).read_text()))
        except (OSError, ValueError, TypeError):
            return None


@dataclass(frozen=True)
class Hit:
    """A finished stage whose files are as its manifest says."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class Miss:
    """The stage has to run."""

    why: str


@dataclass(frozen=True)
class StageOutcome:
    """A finished stage: reused, or just made."""

    folder: Path
    manifest: Manifest
    cached: bool
    why: str
    """Why it ran, or `unchanged`"""
    unfinished: str | None = None

    @property
    def result(self) -> dict[str, Any]:
        return self.manifest.result

    @property
    def digest(self) -> str:
        return self.manifest.digest


@dataclass(frozen=True)
class Produced:
    """What a stage hands over beside its files."""

    result: dict[str, Any]
    seconds: float
    """What it took, waiting for a free place not counted"""
    mlflow_run_id: str | None = None
    unfinished: str | None = None
    """Why the stage is to be gone on with next time, if it is: then it has a result and is not kept as finished"""


class StageStore:
    """The folder `stages/`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, spec: StageSpec) -> Path:
        return self.root / spec.folder_name

    def work_folder(self, spec: StageSpec) -> Path:
        """Where a stage writes. It outlives a killed run, so that a stage finds its own checkpoints there."""
        return self.root / ".work" / spec.folder_name

    def lookup(self, spec: StageSpec, *, force: bool = False) -> Hit | Miss:
        """The finished stage, or why it has to run."""
        if force:
            return Miss("forced")
        folder = self.folder(spec)
        manifest = Manifest.read(folder)
        if manifest is None:
            if folder.exists():
                return Miss(f"files damaged: {folder.name}/{MANIFEST} is missing or unreadable")
            return Miss(self._why_new(spec))
        if damage := damaged_files(folder, manifest):
            return Miss(f"files damaged: {damage}")
        return Hit(folder, manifest)

    async def run(
        self,
        spec: StageSpec,
        produce: Callable[[Path], Awaitable[Produced]],
        *,
        force: bool = False,
        on_wait: Callable[[str], None] = lambda message: None,
    ) -> StageOutcome:
        """Reuse the stage, or make it: `produce(folder)` writes its files and returns its small result.

        Of two runs at once one makes the stage, the other waits for it (`on_wait` is told) and reuses it.
        Raises CommandError when the disk is full; then nothing counts as done.
        """
        if isinstance(hit := self.lookup(spec, force=force), Hit):
            return StageOutcome(hit.folder, hit.manifest, True, "unchanged")
        async with self._lock(spec, on_wait) as waited:
            with explained_disk_full(self.root, spec.title):
                found = self.lookup(spec, force=force and not waited)
                if isinstance(found, Hit):
                    return StageOutcome(found.folder, found.manifest, True, "made by another run at the same time")
                return await self._make(spec, produce, found.why, fresh=force)

    def manifests(self) -> list[tuple[Path, Manifest]]:
        """Every finished stage, oldest first."""
        found = []
        for path in self.root.glob(f"*/{MANIFEST}"):
            if manifest := Manifest.read(path.parent):
                found.append((path.parent, manifest))
        return sorted(found, key=lambda item: item[1].created)

    def is_busy(self, folder_name: str) -> bool:
        """True while a run is making that stage."""
        try:
            with FileLock(self._lock_path(folder_name), timeout=0):
                return False
        except Timeout:
            return True

    async def _make(
        self, spec: StageSpec, produce: Callable[[Path], Awaitable[Produced]], why: str, *, fresh: bool
    ) -> StageOutcome:
        work, final = self.work_folder(spec), self.folder(spec)
        if fresh and work.exists():
            shutil.rmtree(work)
        work.mkdir(parents=True, exist_ok=True)
        produced = await produce(work)
        manifest = Manifest(
            stage=spec.stage,
            label=spec.label,
            digest=spec.digest,
            settings=json.loads(canonical_json(spec.settings)),
            parents=dict(spec.parents),
            code=spec.code,
            files=describe_files(work),
            result=json.loads(canonical_json(produced.result)),
            seconds=round(produced.seconds, 3),
            created=datetime.now(UTC).isoformat(),
            mlflow_run_id=produced.mlflow_run_id,
        )
        if produced.unfinished:
            return StageOutcome(work, manifest, False, why, produced.unfinished)
        write_durably(work / MANIFEST, json.dumps(asdict(manifest), indent=2))
        if final.exists():
            discarded = self.root / ".work" / f"{final.name}.discarded-{os.getpid()}"
            final.rename(discarded)
            work.rename(final)
            shutil.rmtree(discarded, ignore_errors=True)
        else:
            work.rename(final)
        return StageOutcome(final, manifest, False, why)

    def _why_new(self, spec: StageSpec) -> str:
        settings = json.loads(canonical_json(spec.settings))
        earlier = [m for _, m in self.manifests() if (m.stage, m.label) == (spec.stage, spec.label)]
        why = explain_difference(
            settings, dict(spec.parents), spec.code, [(m.settings, m.parents, m.code) for m in earlier]
        )
        return f"{why}; continues what was begun" if self.work_folder(spec).exists() else why

    def _lock_path(self, folder_name: str) -> Path:
        folder = self.root / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{folder_name}.lock"

    @asynccontextmanager
    async def _lock(self, spec: StageSpec, on_wait: Callable[[str], None]) -> AsyncIterator[bool]:
        """Yields whether another run held it."""
        lock = FileLock(self._lock_path(spec.folder_name))
        try:
            lock.acquire(timeout=0)
            waited = False
        except Timeout:
            on_wait(f"{spec.title}: another run is making this stage; waiting for it")
            await _acquired(lock)
            waited = True
        try:
            yield waited
        finally:
            lock.release()


async def _acquired(lock: FileLock) -> None:
    """Waits without holding up the other stages of this run."""
    while True:
        try:
            lock.acquire(timeout=0)
            return
        except Timeout:
            await asyncio.sleep(0.2)


def canonical_json(value: Any) -> str:
    """One text for equal values: keys sorted, no spaces. Raises ValueError for NaN, TypeError for what JSON lacks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def sha256_json(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


@cache
def code_digest(packages: tuple[str, ...]) -> str:
    """sha256 over the source files (and prompts, templates, presets) below `packages`. Raises ValueError for a typo."""
    total = hashlib.sha256()
    for package in sorted(set(packages)):
        path = SOURCES / package
        if not path.exists():
            raise ValueError(f"no sources at {path}: the stage's packages name a folder or file that does not exist")
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in SOURCE_SUFFIXES)
        for file in files:
            total.update(f"{file.relative_to(SOURCES).as_posix()}\0".encode())
            total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Relative path → size and digest of each file below `folder`, without its manifest."""
    # Nor models' cards: they are written again with the scores of each run, and decide no result.
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "digest": file_digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST and path.name != CARD
    }


def damaged_files(folder: Path, manifest: Manifest) -> str | None:
    """What is not as the manifest says, or None."""
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{folder.name}/{name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{folder.name}/{name} has {path.stat().st_size} bytes, not {expected['size']}"
        if file_digest(path) != expected["digest"]:
            return f"{folder.name}/{name} has other contents"
    return None


def file_digest(path: Path) -> str:
    """`sha256:` of the whole file, or `sampled:` of the size and blocks spread over a very large one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_DIGEST_BYTES:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
        total = hashlib.sha256(str(size).encode())
        for i in range(SAMPLED_BLOCKS):
            file.seek((size - BLOCK_BYTES) * i // (SAMPLED_BLOCKS - 1))
            total.update(file.read(BLOCK_BYTES))
        return "sampled:" + total.hexdigest()


@contextmanager
def explained_disk_full(folder: Path, what: str) -> Iterator[None]:
    """Turn whatever a library raises on a full disk into one message."""
    try:
        yield
    except Exception as error:
        free = shutil.disk_usage(folder).free
        if not is_disk_full(error) and free > 2**20:  # torch names only the position it could not write
            raise
        raise CommandError(
            f"{what}: the disk of {folder} is full ({free / 2**20:.0f} MiB free). Nothing half-written counts as done. "
            f"Free some space (`compactionrl clean` lists what can go) and run the same command again."
        ) from error


def is_disk_full(error: BaseException | None) -> bool:
    """torch, safetensors and pyarrow each raise their own kind; SQLite says it in words."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        text = str(error).lower()
        if "no space left on device" in text or "disk is full" in text or "disk quota exceeded" in text:
            return True
        error = error.__cause__ or error.__context__
    return False
