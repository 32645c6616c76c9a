from __future__ import annotations

import numpy as np

from compaction.history import History, Message, Turn, ids


def turn(n: int) -> Turn:
    said = ({"role": "assistant", "content": f"do {n}"}, {"role": "user", "content": f"saw {n}"})
    return Turn(said, ids([100]), ids([10 * n, 10 * n + 1]), ids([200 + n]))


def history(turns: int) -> History:
    h = History(Message("system", "s", ids([1, 2])), (Message("user", "u", ids([3])),))
    for n in range(turns):
        h = h.add(turn(n))
    return h


def test_the_history_is_system_task_and_turns_in_order():
    assert history(2).token_ids.tolist() == [1, 2, 3, 100, 0, 1, 200, 100, 10, 11, 201]
    assert history(2).tokens == 11
    assert history(2).token_ids.dtype == np.int32


def test_adding_a_turn_leaves_the_earlier_history_as_it_was():
    h = history(1)
    h.add(turn(1))
    assert len(h.turns) == 1
    assert h.tokens == 7


def test_a_resumed_history_holds_system_resume_message_and_the_last_turns_as_the_same_ids():
    h = history(3)
    resumed = h.resumed((Message("user", "sum", ids([9])),), 2)
    assert resumed.system is h.system
    assert [t is o for t, o in zip(resumed.turns, h.turns[1:], strict=True)] == [True, True]
    assert resumed.token_ids.tolist()[:3] == [1, 2, 9]


def test_keeping_no_turn_drops_all_of_them():
    resumed = history(3).resumed((Message("user", "sum", ids([9])),), 0)
    assert resumed.turns == ()
    assert resumed.token_ids.tolist() == [1, 2, 9]


def test_messages_alternate_and_hold_both_halves_of_every_turn():
    roles = [m["role"] for m in history(2).messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
