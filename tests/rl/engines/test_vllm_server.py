"""A running vLLM server as the engine: ids over HTTP, its weights updated through a folder, also in mid-reply."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from compaction.protocols import EngineError
from rl.engines.vllm_server import VllmServer, completion_of
from rl.settings import VllmSettings
from tests.rl.engines.served import full_logprobs, prompts, request, run

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.xdist_group("vllm")]

TOLERANCE = 1e-4
START_SECONDS = 300.0


@pytest.fixture(scope="module")
def address(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("logs") / "server.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)),
        *("--port", str(port), "--host", "127.0.0.1", "--max-model-len", "120", "--max-num-seqs", "4"),
        *("--enforce-eager", "--dtype", "float32", "--skip-tokenizer-init", "--enable-scale-out"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--block-size", "32"),
    ]
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port):
            assert server.poll() is None, log.read_text()[-3_000:]
            assert time.monotonic() < deadline, log.read_text()[-3_000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(300)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def engine(address: str, checkpoint: Path) -> Iterator[Any]:
    """With the checkpoint's weights, whatever the server sampled with before."""
    engine = VllmServer(address, checkpoint, VllmSettings(), max_length=120)
    yield engine
    engine._lease.release()


def test_replies_are_exact_and_bear_the_version_that_sampled_them(engine: Any, models: Any) -> None:
    texts = prompts(4, np.random.default_rng(0))

    async def rounds() -> list[tuple[int, list[int], Any]]:
        found = []
        for version in (0, 1):
            engine.load_weights(models[version].state_dict(), version)
            calls = [engine.generate(request(f"r{i}", p, n=12, temperature=0.7, seed=i)) for i, p in enumerate(texts)]
            found += [(version, p, c) for p, c in zip(texts, await asyncio.gather(*calls), strict=True)]
        await engine.aclose()
        return found

    for version, prompt, completion in run(rounds()):
        expected = full_logprobs(models[version], prompt, completion, 0.7)
        assert np.abs(completion.logprobs - expected).max() < TOLERANCE
        assert set(completion.versions) == {version}


def test_an_update_in_mid_reply_is_stamped_where_it_fell(
    engine: Any, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [3, 4, 5, 6]
    engine.load_weights(models[0].state_dict(), 0)
    flowing, pause = threading.Event(), engine._sync.start_weight_update
    # The update's own preparation takes a second on a busy machine: it comes before.
    monkeypatch.setattr(engine._sync, "start_weight_update", lambda: flowing.wait(600) and pause())

    async def under_traffic() -> list[Any]:
        """Four replies are made at a time, the others wait in vLLM: once a quarter has ended, all have been asked for,
        and it is busy with the rest for a while, however slow this process is."""
        completions: list[Any] = []

        async def lane(number: int) -> None:
            completions.append(await engine.generate(request(f"s{number}", prompt, n=100 - number % 32, seed=number)))
            if len(completions) == 24:
                flowing.set()

        update = asyncio.create_task(asyncio.to_thread(engine.load_weights, models[1].state_dict(), 1))
        await asyncio.gather(*(lane(number) for number in range(96)))
        await update
        await engine.aclose()
        return completions

    completions = run(under_traffic())
    assert any(set(completion.versions) == {0, 1} for completion in completions)
    for completion in completions:
        assert sorted(completion.versions) == list(completion.versions)
        for version in set(completion.versions):
            at = completion.versions == version
            expected = full_logprobs(models[version], prompt, completion)
            assert np.abs(completion.logprobs - expected)[at].max() < TOLERANCE


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(engine: Any, models: Any) -> None:
    bad = dict(models[1].state_dict())
    bad["model.norm.weight"] = bad["model.norm.weight"] * float("nan")
    with pytest.raises(EngineError, match="non-finite"):
        engine.load_weights(bad, 1)

    async def once() -> Any:
        completion = await engine.generate(request("old", [1, 2, 3], n=8))
        await engine.aclose()
        return completion

    completion = run(once())
    assert np.abs(completion.logprobs - full_logprobs(models[0], [1, 2, 3], completion)).max() < TOLERANCE


def test_a_server_that_does_not_answer_or_cannot_be_trained_with_is_refused_at_the_start(
    address: str, checkpoint: Path
) -> None:
    with pytest.raises(EngineError, match=r"does not answer.*VLLM_SERVER_DEV_MODE"):
        VllmServer("http://127.0.0.1:9", checkpoint, VllmSettings(), max_length=120)
    with pytest.raises(EngineError, match="takes 120 tokens, the window needs 4000"):
        VllmServer(address, checkpoint, VllmSettings(), max_length=4_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"finish_reason": "abort"}, "'abort' after 1 tokens"), ({"logprobs": None}, "0 logprobs for 1 tokens")],
    ids=["aborted", "without logprobs"],
)
def test_what_a_server_gives_up_is_an_engine_error(change: dict[str, Any], message: str) -> None:
    choice = {
        "token_ids": [5],
        "finish_reason": "stop",
        "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}]},
        "weight_versions": [{"version": "3", "start": 0, "end": 1}],
    }
    assert completion_of(choice, 4, int).versions.tolist() == [3]
    with pytest.raises(EngineError, match=message):
        completion_of(choice | change, 4, int)


def test_a_server_that_another_run_has_taken_over_is_an_engine_error(engine: Any, models: Any) -> None:
    async def once() -> Any:
        completion = await engine.generate(request("mine", [1, 2, 3]))
        engine._sync._call("POST", "/update_weight_version", {"new_version": "somebody-7"})
        with pytest.raises(EngineError, match="another run has put its weights"):
            await engine.generate(request("theirs", [1, 2, 3]))
        await engine.aclose()
        return completion

    assert set(run(once()).versions) == {0}
