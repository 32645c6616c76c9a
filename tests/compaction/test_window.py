from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from compaction import window
from compaction.settings import CompactionSettings

Overheads = window.Overheads


def settings(**changes: int) -> CompactionSettings:
    return CompactionSettings.model_validate(
        {"window": 1000, "threshold": 300, "max_response": 200, "min_response": 10, "summary_cap": 100, **changes}
    )


OVERHEADS = Overheads(instruction=20, turn=8, resume=15)
sizes = st.integers(1, 400)
any_settings = st.builds(
    lambda window, threshold, least, more, summary_cap, cap, keep: CompactionSettings(
        window=window, threshold=threshold, min_response=least, max_response=least + more, summary_cap=summary_cap,
        cap=cap, keep_recent=keep,
    ),
    st.integers(50, 3000), sizes, st.integers(1, 40), st.integers(0, 400), sizes, st.integers(0, 4), st.integers(0, 4),
)  # fmt: skip
any_overheads = st.builds(Overheads, instruction=st.integers(1, 60), turn=st.integers(1, 40), resume=st.integers(1, 60))


@pytest.mark.parametrize(("tokens", "expected"), [(700, False), (701, True)])
def test_compacts_exactly_when_fewer_than_the_threshold_are_free(tokens: int, expected: bool):
    assert window.should_compact(settings(), tokens, 1) is expected


def test_never_compacts_without_a_compaction_left():
    assert not window.should_compact(settings(), 10_000, 0)


def test_a_response_leaves_room_for_the_summary_request():
    assert window.response_room(settings(), 800, 1, OVERHEADS) == 1000 - 800 - 8 - 20 - 100
    assert window.response_room(settings(), 100, 1, OVERHEADS) == 200, "never above max_response"


def test_with_the_cap_used_up_the_reserve_no_longer_applies():
    assert window.reserve(settings(), 0, OVERHEADS) == 0
    assert window.response_room(settings(), 900, 0, OVERHEADS) == 1000 - 900 - 8
    assert window.observation_room(settings(), 900, 0, OVERHEADS) == 100


@given(any_settings, any_overheads, st.integers(0, 3000), st.integers(1, 4))
def test_a_full_response_and_its_observation_always_leave_the_summary_request_room(
    chosen: CompactionSettings, overheads: Overheads, tokens: int, left: int
):
    action = window.response_room(chosen, tokens, left, overheads)
    assume(action >= chosen.min_response)
    observation = window.observation_room(chosen, tokens + action, left, overheads)
    assert observation >= overheads.turn, "the cheapest observation always fits after the longest action"
    filled = tokens + action + observation
    assert filled + overheads.instruction + chosen.summary_cap <= chosen.window


@given(any_settings, any_overheads, st.integers(1, 200), st.integers(1, 200), st.integers(0, 3000))
def test_accepted_settings_never_leave_a_window_that_can_neither_act_nor_compact(
    chosen: CompactionSettings, overheads: Overheads, system: int, task: int, tokens: int
):
    try:
        window.check_window(chosen, system, task, overheads)
    except window.WindowTooSmall:
        assume(False)
    assert window.response_room(chosen, system + task, chosen.cap, overheads) >= chosen.min_response
    if chosen.cap and not window.should_compact(chosen, tokens, 1):
        assert window.response_room(chosen, tokens, 1, overheads) >= chosen.min_response


@given(any_settings, st.integers(0, 3000), st.integers(0, 1500), st.lists(st.integers(1, 500), max_size=6))
def test_kept_turns_is_the_largest_number_that_frees_the_threshold_and_shrinks(
    chosen: CompactionSettings, tokens: int, base: int, turns: list[int]
):
    def good(keep: int) -> bool:
        resumed = base + sum(turns[len(turns) - keep :])
        return chosen.window - resumed >= chosen.threshold and resumed < tokens

    fitting = [k for k in range(min(chosen.keep_recent, len(turns)) + 1) if good(k)]
    assert window.kept_turns(chosen, tokens, base, turns) == (max(fitting) if fitting else None)


def test_a_resumed_window_that_is_no_smaller_is_refused():
    assert window.kept_turns(settings(keep_recent=2), 300, 300, [50, 50]) is None
    assert window.kept_turns(settings(keep_recent=2), 301, 300, [50, 50]) == 0


def test_the_papers_64k_setting_is_accepted():
    window.check_window(CompactionSettings(), 1_500, 3_000, Overheads(instruction=600, turn=40, resume=120))
    window.check_window(CompactionSettings(window=32_768), 1_500, 3_000, Overheads(600, 40, 120))
    window.check_window(CompactionSettings(window=81_920), 1_500, 3_000, Overheads(600, 40, 120))


@pytest.mark.parametrize(
    ("changes", "system", "said"),
    [
        ({}, 900, r"window=1000 is too small: system 900 \+ task 50 .* = 1088 tokens"),
        ({"summary_cap": 480}, 30, r"too small after a compaction: .* summary 480 .* = 1043 tokens"),
        ({"threshold": 960}, 30, r"could never resume: system 30 \+ resume message 15 \+ threshold 960 = 1005"),
        ({"threshold": 100}, 30, r"threshold=100 cannot hold one turn 18 and the summary reserve 120"),
    ],
)
def test_a_window_that_can_never_fit_is_refused_with_the_arithmetic(changes: dict[str, int], system: int, said: str):
    with pytest.raises(window.WindowTooSmall, match=said):
        window.check_window(settings(**changes), system, 50, OVERHEADS)


def test_the_window_named_by_a_refusal_is_accepted():
    with pytest.raises(window.WindowTooSmall, match="at least 1068"):
        window.check_window(settings(), 30, 900, OVERHEADS)
    window.check_window(settings(window=1068), 30, 900, OVERHEADS)


def test_one_window_alone_needs_no_room_for_summaries():
    window.check_window(settings(cap=0, window=80, threshold=10_240, summary_cap=4_096), 30, 20, OVERHEADS)


def test_a_kept_task_counts_in_the_resumed_window():
    chosen = settings(window=600, threshold=300)
    window.check_window(chosen, 30, 270, OVERHEADS)
    with pytest.raises(window.WindowTooSmall, match="could never resume"):
        window.check_window(chosen.model_copy(update={"keep_task": True}), 30, 270, OVERHEADS)


def byte_clip(text: str, room: int) -> str | None:
    """Clips with bytes for tokens, cut characters shown as a tokenizer's decoder shows them."""
    clipped = bytes_clip([text], room)
    return None if clipped is None else clipped[0]


def bytes_clip(texts: list[str], room: int) -> list[str] | None:
    return window.clip(
        texts,
        lambda ts: sum(len(t.encode()) for t in ts) <= room,
        lambda t: list(t.encode()),
        lambda tokens: bytes(tokens).decode(errors="replace"),
    )


@given(st.text(max_size=300), st.integers(0, 400))
def test_a_clipped_text_fits_and_an_uncut_one_is_unchanged(text: str, room: int):
    clipped = byte_clip(text, room)
    assert clipped is not None
    assert len(clipped.encode()) <= room
    if len(text.encode()) <= room:
        assert clipped == text


def test_clipping_keeps_head_and_tail_and_names_what_was_cut():
    assert byte_clip("abcdefghijklmnopqrstuvwxyz", 18) == "abcd [cut 18] wxyz"


def test_clipping_uses_the_room_it_has():
    clipped = byte_clip("x" * 5000, 1000)
    assert clipped is not None
    assert 995 <= len(clipped) <= 1000


def test_clipping_shows_no_half_characters():
    for room in range(16, 60):
        clipped = byte_clip("漢字🙂" * 40, room)
        assert clipped is not None
        assert "\ufffd" not in clipped


def test_where_not_even_the_mark_fits_the_text_is_empty_and_where_nothing_fits_there_is_none():
    assert byte_clip("abcdefghijklm", 5) == ""
    assert byte_clip("", 0) == ""
    assert byte_clip("abc", -1) is None


@given(st.lists(st.text(max_size=120), min_size=1, max_size=5), st.integers(0, 400))
def test_of_several_texts_the_longest_are_cut_and_all_together_fit(texts: list[str], room: int):
    clipped = bytes_clip(texts, room)
    assert clipped is not None
    assert sum(len(t.encode()) for t in clipped) <= room
    uncut = [len(t.encode()) for t, c in zip(texts, clipped, strict=True) if t == c]
    cut = [len(t.encode()) for t, c in zip(texts, clipped, strict=True) if t != c]
    assert not cut or not uncut or max(uncut) <= min(cut) or clipped == [""] * len(texts)


def test_a_short_text_beside_a_long_one_stays_whole():
    assert bytes_clip(["ok", "x" * 100], 22) == ["ok", "xxxxx [cut 90] xxxxx"]
