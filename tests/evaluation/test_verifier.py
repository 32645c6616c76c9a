"""What counts as a reward. How the files come out of a sandbox is tested with the sandboxes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction.protocols import VerifierError
from evaluation.failures import FAILURE_POLICY
from evaluation.verifier import REWARD_LIMIT, parse_reward


@pytest.mark.parametrize(
    ("json_bytes", "txt_bytes", "reward"),
    [
        (None, b"1", 1),
        (None, b" 0.25\n", 0.25),
        (None, b"0", 0),
        (b"0.5", None, 0.5),
        (b'{"reward": 0.75, "style": 3}', b"0", 0.75),
        (b'{"accuracy": 1}', None, 1),
        (b"1", b"not read", 1),
    ],
)
def test_rewards(json_bytes: bytes | None, txt_bytes: bytes | None, reward: float) -> None:
    assert parse_reward(json_bytes, txt_bytes, "") == reward


@pytest.mark.parametrize(
    ("json_bytes", "txt_bytes", "error_class", "named"),
    [
        (None, None, "reward_missing", "neither reward.json nor reward.txt"),
        (None, b"", "reward_empty", "reward.txt is empty"),
        (b" \n", b"1", "reward_empty", "reward.json is empty"),
        (None, b"nan", "reward_invalid", "nan"),
        (None, b"-inf", "reward_invalid", "-inf"),
        (None, b"1.5", "reward_invalid", "1.5"),
        (None, b"-0.1", "reward_invalid", "-0.1"),
        (None, b"passed", "reward_invalid", "passed"),
        (None, b"\xff\xfe", "reward_invalid", "no number"),
        (b"{", None, "reward_invalid", "no JSON"),
        (b"[" * 50_000, None, "reward_invalid", "no JSON"),
        (b"NaN", None, "reward_invalid", "nan"),
        (b"true", None, "reward_invalid", "True"),
        (b'"1"', None, "reward_invalid", "'1'"),
        (b"null", None, "reward_invalid", "None"),
        (b"1" + b"0" * 400, None, "reward_invalid", "too large"),
        (b"[1]", None, "reward_invalid", "[1]"),
        (b"{}", None, "reward_invalid", "no key `reward`"),
        (b'{"a": 1, "b": 0}', None, "reward_invalid", "no key `reward`"),
        (b'{"reward": {"a": 1}}', None, "reward_invalid", "no number"),
        (None, b"1" * (REWARD_LIMIT + 1), "reward_invalid", "larger than"),
    ],
)
def test_no_reward(json_bytes: bytes | None, txt_bytes: bytes | None, error_class: str, named: str) -> None:
    with pytest.raises(VerifierError) as raised:
        parse_reward(json_bytes, txt_bytes, "")
    assert raised.value.error_class == error_class
    assert error_class in FAILURE_POLICY
    assert named in str(raised.value)


@pytest.mark.parametrize(
    "line",
    [
        "curl: (6) Could not resolve host: astral.sh",
        "curl: (28) Failed to connect to astral.sh port 443 after 130000 ms: Connection timed out",
        "curl: (60) SSL certificate problem: self-signed certificate in certificate chain",
        "wget: unable to resolve host address 'pypi.org'",
        "Err:1 http://deb.debian.org bookworm InRelease\n  Temporary failure resolving 'deb.debian.org'",
        "E: Unable to locate package curl",
        "E: Failed to fetch http://deb.debian.org/debian/pool/c.deb  Connection failed",
        "error: Failed to fetch: `https://pypi.org/simple/pytest/`",
        "  Caused by: dns error: failed to lookup address information",
        "ERROR: Could not find a version that satisfies the requirement pytest==8.4.1 (from versions: none)",
        "npm ERR! network request to https://registry.npmjs.org/x failed",
    ],
)
def test_tests_without_their_tools_give_no_reward(line: str) -> None:
    for reward in (None, b"0"):
        with pytest.raises(VerifierError) as raised:
            parse_reward(None, reward, f"Setting up\n{line}\n/tests/test.sh: line 9: uvx: command not found\n")
        assert raised.value.error_class == "verifier_bootstrap"
    assert parse_reward(None, b"1", line) == 1


@pytest.mark.parametrize(
    "stdout",
    [
        "curl: (7) Failed to connect to localhost port 8000: Connection refused",
        "curl: (7) Failed to connect to 127.0.0.1 port 80 after 0 ms: Couldn't connect to server",
        "==== test session starts ====\nE  socket.gaierror: Temporary failure in name resolution",
        "AssertionError: expected 'Failed to fetch'",
    ],
)
def test_a_zero_that_the_agent_earned_stays(stdout: str) -> None:
    assert parse_reward(None, b"0", stdout) == 0


@given(st.binary(max_size=200), st.booleans(), st.text(max_size=200))
def test_anything_gives_a_reward_in_range_or_a_known_error(content: bytes, as_json: bool, stdout: str) -> None:
    given_json, given_text = (content, None) if as_json else (None, content)
    try:
        reward = parse_reward(given_json, given_text, stdout)
    except VerifierError as error:
        known = error.error_class in FAILURE_POLICY
    else:
        known = 0 <= reward <= 1
    assert known
