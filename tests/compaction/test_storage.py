from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from compaction.protocols import Usage
from compaction.rollout import CompactionRecord, Outcome, Rollout, Segment, TurnRecord
from compaction.settings import AgentSettings
from compaction.storage import read_rollouts, write_rollouts

ids = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(lambda v: np.array(v, np.int32))


@st.composite
def segments(draw: st.DrawFn) -> tuple[Segment, ...]:
    made = []
    for ordinal in range(draw(st.integers(0, 5))):
        tokens = draw(ids)
        on = np.array(draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))), bool)
        logprobs = np.array([-draw(st.floats(0, 50, width=32)) for _ in tokens], np.float32)
        made.append(
            Segment(
                kind="summary" if ordinal % 2 else "execution",
                ordinal=ordinal,
                context_ids=draw(ids),
                token_ids=tokens,
                optimized=on,
                logprobs=np.where(on, logprobs, np.float32(0)),
                versions=np.where(on, draw(st.integers(0, 99)), -1).astype(np.int32),
            )
        )
    return tuple(made)


rollouts = st.builds(
    Rollout,
    id=st.text(max_size=8),
    task_id=st.text(max_size=8),
    seed=st.integers(0, 2**63 - 1),
    settings=st.just(AgentSettings(temperature=0.3)),
    segments=segments(),
    outcome=st.one_of(
        st.builds(Outcome, st.floats(0, 1), st.sampled_from(["finished", "deadline"]), detail=st.none() | st.text()),
        st.just(Outcome(None, "error", "engine", "gone")),
    ),
    turns=st.lists(st.builds(TurnRecord, st.just(0), st.text(), st.text(), st.integers(0, 9)), max_size=3).map(tuple),
    compactions=st.lists(
        st.builds(
            CompactionRecord,
            st.just(1),
            st.just(2),
            st.just(9),
            st.none() | st.just(5),
            st.just(1),
            st.just(1),
            st.text(),
            st.lists(st.text(), max_size=2).map(tuple),
            st.none() | st.text(),
        ),
        max_size=2,
    ).map(tuple),
    usage=st.builds(Usage, st.integers(0, 9), st.integers(0, 9)),
    seconds=st.just({"generate": 0.25}),
)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=50)
@given(st.lists(rollouts, max_size=3))
def test_rollouts_come_back_from_parquet_as_they_were(tmp_path: Path, made: list[Rollout]):
    read = read_rollouts(write_rollouts(tmp_path / "rollouts.parquet", made))
    assert read == made
    assert [r.seconds for r in read] == [r.seconds for r in made]
    for segment in (s for r in read for s in r.segments):
        types = [getattr(segment, n).dtype for n in ("context_ids", "token_ids", "optimized", "logprobs", "versions")]
        assert types == [np.int32, np.int32, bool, np.float32, np.int32]


def one(n: int = 3) -> Rollout:
    tokens = np.random.default_rng(0).integers(0, 2**31 - 1, n, dtype=np.int32)
    segment = Segment(
        "execution", 0, np.array([], np.int32), tokens, np.ones(n, bool), np.zeros(n, np.float32), np.zeros(n, np.int32)
    )
    return Rollout("r", "t", 0, AgentSettings(), (segment,), Outcome(0.0, "finished"))


def test_empty_segments_keep_their_types(tmp_path: Path):
    (read,) = read_rollouts(write_rollouts(tmp_path / "r.parquet", [one(0)]))
    assert read == one(0)
    assert read.segments[0].optimized.dtype == bool


def test_a_rewritten_file_holds_the_new_rollouts_alone(tmp_path: Path):
    write_rollouts(tmp_path / "r.parquet", [one(), one()])
    write_rollouts(tmp_path / "r.parquet", [one(5)])
    assert read_rollouts(tmp_path / "r.parquet") == [one(5)]
    assert os.listdir(tmp_path) == ["r.parquet"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    write_rollouts(tmp_path / "r.parquet", [one()])
    large = write_rollouts(tmp_path / "large.parquet", [one(200_000)])
    code = (
        "import resource, sys\n"
        "from compaction.storage import read_rollouts, write_rollouts\n"
        "large = read_rollouts(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try:\n    write_rollouts(sys.argv[2], large)\n"
        "except OSError as error:\n    print('refused', error)\n"
    )
    command = [sys.executable, "-c", code, str(large), str(tmp_path / "r.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "refused" in done.stdout, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["large.parquet", "r.parquet"]
    assert read_rollouts(tmp_path / "r.parquet") == [one()]


@pytest.mark.may_skip
@pytest.mark.skipif(
    not Path("/dev/full").exists() or os.geteuid() != 0, reason="mounting a small disk needs root on Linux"
)
def test_a_full_disk_leaves_no_file(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this machine may not mount a tmpfs")
    try:
        with pytest.raises(OSError, match="No space left"):
            write_rollouts(disk / "r.parquet", [one(200_000)])
        assert os.listdir(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_is_no_rollout_file_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_rollouts(tmp_path / "none.parquet")
    pq.write_table(pa.table({"id": ["r"]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"holds no rollouts: columns .*segments"):
        read_rollouts(tmp_path / "other.parquet")
    (tmp_path / "text.parquet").write_text("no parquet at all")
    with pytest.raises(ValueError, match=r"[Pp]arquet"):
        read_rollouts(tmp_path / "text.parquet")
