"""Rows: what is optimized where, and the way to segments and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.batching import micro_batches
from rl.rows import Row, gather_segments, rows_of, scatter_segments
from tests.rl.samples import random_batch, random_rollout, random_rows


def rollout_with_a_summary():
    return random_rollout(np.random.default_rng(0), [[3, 2], [4], [2]])


def test_a_window_and_its_summary_share_one_row():
    rollout = rollout_with_a_summary()
    execution, summary, last = rollout.segments
    rows = rows_of(rollout)
    expected = np.concatenate([execution.context_ids, execution.token_ids, summary.context_ids, summary.token_ids])
    assert len(rows) == 2
    assert np.array_equal(rows[0].token_ids, expected)
    assert rows[0].ordinals.tolist() == [0] * 5 + [1] * 4
    assert rows[1].ordinals.tolist() == [2] * 2
    assert np.array_equal(rows[1].token_ids, np.concatenate([last.context_ids, last.token_ids]))


def test_separate_rows_hold_the_same_prefix_and_optimize_each_token_once():
    rollout = rollout_with_a_summary()
    shared = rows_of(rollout)
    separate = rows_of(rollout, share_prefix=False)
    assert len(separate) == 3
    assert np.array_equal(separate[1].token_ids, shared[0].token_ids)
    assert separate[1].ordinals.tolist() == [1] * 4
    assert sum(r.n_optimized for r in separate) == sum(r.n_optimized for r in shared)
    assert not separate[1].observation.any(), "the execution row already carries the observations"


def test_each_sampled_token_keeps_its_logprob_and_version():
    for rollout in random_batch():
        rows = rows_of(rollout)
        for name in ("logprobs", "versions", "token_ids"):
            sampled = np.concatenate([getattr(s, name)[s.optimized] for s in rollout.segments])
            assert np.array_equal(np.concatenate([getattr(r, name)[r.optimized] for r in rows]), sampled)


def test_masked_summaries_are_left_off():
    rows = rows_of(rollout_with_a_summary(), train_summaries=False)
    assert [np.unique(r.ordinals).tolist() for r in rows] == [[0], [2]]
    execution = rollout_with_a_summary().segments[0]
    assert len(rows[0].token_ids) == len(execution.context_ids) + len(execution.token_ids)


def test_windows_without_a_sampled_token_give_no_row():
    rollout = random_rollout(np.random.default_rng(0), [[3], [2], []])
    assert [np.unique(r.ordinals).tolist() for r in rows_of(rollout)] == [[0, 1]]


def test_observations_are_what_stands_between_the_actions():
    row = rows_of(random_rollout(np.random.default_rng(0), [[2, 1], [2], [1]]))[0]
    #        context       action  observation  action  observation  instruction  summary
    expected = [0] * 6 + [0] * 2 + [1] * 3 + [0] * 1 + [1] * 3 + [0] * 2 + [0] * 2
    assert row.observation.astype(int).tolist() == expected


def row(**changes) -> Row:
    fields = {
        "rollout_id": "r",
        "token_ids": np.arange(4, dtype=np.int32),
        "segment": np.array([-1, 0, -1, 1], np.int32),
        "logprobs": np.array([0, -1, 0, -1], np.float32),
        "versions": np.array([-1, 0, -1, 0], np.int32),
        "observation": np.array([0, 0, 1, 0], bool),
    }
    return Row(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": np.zeros(3, np.float32)}, "3 entries for 4 tokens"),
        ({"segment": np.array([-1, 1, -1, 0], np.int32)}, "out of order"),
        ({"logprobs": np.array([-1, -1, 0, -1], np.float32)}, "not optimized"),
        ({"versions": np.array([0, 0, -1, 0], np.int32)}, "not optimized"),
        ({"logprobs": np.array([0, -np.inf, 0, -1], np.float32)}, "finite"),
        ({"observation": np.array([0, 1, 0, 0], bool)}, "both an observation and optimized"),
        ({"segment": np.zeros(4, np.int32), "versions": np.zeros(4, np.int32)}, "nothing stands before it"),
    ],
)
def test_a_malformed_row_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        row(**changes)


@given(seed=st.integers(0, 1000), share=st.booleans())
def test_values_travel_to_segments_and_back(seed, share):
    rollouts = random_batch(seed, 5)
    rows = [r for rollout in rollouts for r in rows_of(rollout, share_prefix=share)]
    per_row = [np.random.default_rng(seed).normal(size=r.n_optimized) for r in rows]
    segments = gather_segments(rows, per_row)
    for rollout in rollouts:
        lengths = [s.n_optimized for s in rollout.segments]
        while lengths and lengths[-1] == 0:
            lengths.pop()
        assert [len(v) for v in segments[rollout.id]] == lengths
    back = scatter_segments(rows, segments)
    assert all(np.array_equal(a, b) for a, b in zip(per_row, back, strict=True))


def test_masked_summaries_keep_their_place_among_the_segments():
    rows = rows_of(rollout_with_a_summary(), train_summaries=False)
    segments = gather_segments(rows, [np.ones(r.n_optimized) for r in rows])["r0"]
    assert [len(v) for v in segments] == [5, 0, 2]


def test_a_segment_spread_over_rows_is_refused():
    rows = rows_of(rollout_with_a_summary())
    with pytest.raises(ValueError, match="more than one row"):
        gather_segments([rows[0], rows[0]], [np.zeros(rows[0].n_optimized)] * 2)


@given(seed=st.integers(0, 1000), budget=st.integers(1, 200))
def test_micro_batches_cover_every_wanted_token_once(seed, budget):
    rows = random_rows(seed)
    batches = micro_batches(rows, [r.optimized for r in rows], budget)
    flat = np.concatenate([r.token_ids[r.optimized] for r in rows])
    places = np.concatenate([b.places.numpy() for b in batches])
    assert sorted(places.tolist()) == list(range(len(flat)))
    for batch in batches:
        assert np.array_equal(batch.targets.numpy(), flat[batch.places.numpy()])
        assert batch.token_ids.numel() <= budget or len(batch.token_ids) == 1


def test_a_wanted_token_is_read_one_position_earlier():
    r = random_rows()[0]
    (batch,) = micro_batches([r], [r.optimized], 1000)
    assert (batch.read.numpy() + 1).tolist() == np.flatnonzero(r.optimized).tolist()
    assert batch.token_ids.shape[1] == np.flatnonzero(r.optimized)[-1], "nothing behind the last read position is run"


def test_rows_with_nothing_wanted_need_no_forward_pass():
    r = random_rows()[0]
    assert micro_batches([r], [np.zeros(len(r.token_ids), bool)], 100) == []
    assert micro_batches([], [], 100) == []
