"""vLLM for real, on this machine's CPU: ids in and out, exact logprobs, weights swapped in the middle of a reply."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from compaction.protocols import ContextLengthError, EngineError
from rl.engines.weight_sync import ReloadSync
from rl.settings import VllmSettings
from tests.rl.engines.served import END, VOCABULARY, build, full_logprobs, play, prompts, request, run

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

TOLERANCE = 1e-4
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def started(checkpoint: Path) -> Any:
    from rl.engines.vllm_engine import VllmEngine

    return VllmEngine(checkpoint, VllmSettings(), slots=4, max_length=120)


@pytest.fixture
def engine(started: Any, models: dict[int, Any]) -> Any:
    """The engine with the weights of version 0."""
    started.load_weights(models[0].state_dict(), 0)
    return started


def sampled_exactly(model: Any, prompt: Any, completion: Any, temperature: float = 1.0) -> bool:
    expected = full_logprobs(model, prompt, completion, temperature)
    return bool(np.abs(completion.logprobs - expected).max() < TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_the_distribution_really_sampled(engine: Any, models: Any, temperature: float) -> None:
    texts = prompts(8, np.random.default_rng(0))

    async def all_at_once() -> list[Any]:
        calls = [
            engine.generate(request(f"r{i}", p, n=12, temperature=temperature, seed=i)) for i, p in enumerate(texts)
        ]
        return list(await asyncio.gather(*calls))

    for prompt, completion in zip(texts, run(all_at_once()), strict=True):
        assert sampled_exactly(models[0], prompt, completion, temperature)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == END else "length")
        assert completion.prompt_tokens == len(prompt)
        assert set(completion.versions) == {0}


def test_the_same_requests_in_the_same_order_give_the_same_bits(engine: Any, models: Any) -> None:
    texts = prompts(6, np.random.default_rng(1))

    async def once() -> list[Any]:
        return list(await asyncio.gather(*(engine.generate(request(f"r{i}", p, seed=i)) for i, p in enumerate(texts))))

    first = run(once())
    engine.load_weights(models[0].state_dict(), 0)  # nothing is kept from the first time
    again = run(once())
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in again]
    assert [c.logprobs.tobytes() for c in first] == [c.logprobs.tobytes() for c in again]


def test_turns_of_a_rollout_find_their_prefix_and_stay_exact(engine: Any, models: Any) -> None:
    before = engine.cached_tokens

    async def played() -> None:
        rng = np.random.default_rng(2)
        exact = {"model": models[0], "rng": rng}
        await asyncio.gather(*(play(engine, exact["model"], f"p{i}", rng, turns=4) for i in range(3)))

    run(played())
    assert engine.cached_tokens > before


def test_another_rollouts_prefix_is_not_used(engine: Any) -> None:
    prompt = list(range(20, 90))

    async def two() -> list[int]:
        await engine.generate(request("one", prompt))
        other = await engine.generate(request("two", prompt))
        own = await engine.generate(request("one", prompt))
        return [other.cached_tokens, own.cached_tokens]

    other, own = run(two())
    assert other == 0
    assert own > 0


def test_a_swap_inside_a_reply_stamps_each_token_with_the_version_that_sampled_it(engine: Any, models: Any) -> None:
    texts = prompts(4, np.random.default_rng(6))

    async def swapped() -> list[Any]:
        began = engine.generated_tokens
        calls = [asyncio.create_task(engine.generate(request(f"r{i}", p, n=40, seed=i))) for i, p in enumerate(texts)]
        while engine.generated_tokens < began + 15:
            await asyncio.sleep(0)
        engine.load_weights(models[1].state_dict(), 1)
        return list(await asyncio.gather(*calls))

    mixed = 0
    for prompt, completion in zip(texts, run(swapped()), strict=True):
        assert sorted(completion.versions) == list(completion.versions)
        mixed += len(set(completion.versions)) == 2
        for version in (0, 1):
            # Of either part, every logprob is that of a full forward by the version stamped on it: keys and values
            # of the part before the swap were computed again.
            at = completion.versions == version
            expected = full_logprobs(models[version], prompt, completion)
            assert np.abs(completion.logprobs - expected)[at].max(initial=0) < TOLERANCE
    assert mixed


@pytest.mark.parametrize("left_out", [(), (HEAD,)], ids=["whole", "without the tied head"])
def test_after_an_update_the_served_weights_are_the_trainers_tied_head_included(
    engine: Any, models: Any, left_out: tuple[str, ...]
) -> None:
    prompt = [5, 6, 7, 8]
    state = {name: tensor for name, tensor in models[2].state_dict().items() if name not in left_out}
    engine.load_weights(state, 2)
    completion = run(engine.generate(request("after", prompt, n=20)))
    assert sampled_exactly(models[2], prompt, completion)
    assert set(completion.versions) == {2}


def test_trap_1_plain_loading_does_not_work_once_the_model_has_served(engine: Any, models: Any) -> None:
    """What WeightReceiver is there for; where this passes one day, it can go."""
    run(engine.generate(request("warm", [1, 2, 3])))

    def plainly(worker: Any) -> None:
        worker.model_runner.get_model().load_weights(iter(models[1].state_dict().items()))

    with pytest.raises((AttributeError, RuntimeError, AssertionError)):
        engine._engine.collective_rpc(plainly)
    engine.load_weights(models[0].state_dict(), 0)
    assert sampled_exactly(models[0], [1, 2, 3], run(engine.generate(request("warm", [1, 2, 3], n=8))))


def test_trap_2_without_the_tied_head_under_its_own_name_the_old_head_serves(engine: Any, models: Any) -> None:
    """What CheckpointWeights.checked is there for: vLLM itself says nothing."""
    state = {name: tensor for name, tensor in models[1].state_dict().items() if name != HEAD}
    engine._updates._sync.start_weight_update()
    engine._updates._sync.update_weights({"state_dict": state})
    completion = run(engine.generate(request("stale", [1, 2, 3], n=8)))
    assert not sampled_exactly(models[1], [1, 2, 3], completion)


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(engine: Any, models: Any) -> None:
    good = models[1].state_dict()
    norm = "model.norm.weight"
    for bad, message in [
        (good | {norm: torch.full_like(good[norm], float("nan"))}, "non-finite"),
        (good | {norm: good[norm][:3]}, "expected"),
        ({name: tensor for name, tensor in good.items() if name != norm}, "missing"),
        (good | {"extra": good[norm]}, "unknown"),
    ]:
        with pytest.raises(EngineError, match=message):
            engine.load_weights(bad, 9)
    completion = run(engine.generate(request("old", [1, 2, 3], n=8)))
    assert sampled_exactly(models[0], [1, 2, 3], completion)
    assert set(completion.versions) == {0}


def test_an_update_that_fails_halfway_leaves_the_old_weights_serving(engine: Any, models: Any) -> None:
    class Halfway:
        """Takes the first tensors of an update, then fails, as a lost connection would make it."""

        def __init__(self, whole: Any) -> None:
            self.whole, self.fails = whole, True

        def collective_rpc(self, method: str, args: tuple[dict[str, Any]]) -> None:
            state = dict(args[0])
            if not self.fails:
                self.whole.collective_rpc(method, args=args)
                return
            self.fails = False
            self.whole.collective_rpc(method, args=(dict(list(state.items())[:5]),))
            raise ConnectionError("the line broke")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.whole, name)

    updates = copy.copy(engine._updates)
    updates._sync = ReloadSync(Halfway(engine._engine))
    with pytest.raises(EngineError, match=r"did not take the weights of version 5 .*the line broke.* the old ones"):
        updates.load(models[1].state_dict(), 5)
    assert sampled_exactly(models[0], [1, 2, 3], run(engine.generate(request("old", [1, 2, 3], n=8))))


def test_an_update_that_breaks_inside_vllm_leaves_the_old_weights_serving(engine: Any, models: Any) -> None:
    checkpoint = engine._updates._checkpoint
    bad = checkpoint.checked(models[1].state_dict()) | {"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 3)}
    with patch.object(checkpoint, "checked", lambda _: bad), pytest.raises(EngineError, match="did not take"):
        engine.load_weights(models[1].state_dict(), 5)
    completion = run(engine.generate(request("old", [1, 2, 3], n=8)))
    assert sampled_exactly(models[0], [1, 2, 3], completion)
    assert set(completion.versions) == {0}


def test_a_reply_of_the_end_token_alone_is_a_reply(engine: Any, models: Any) -> None:
    prompt = [3, 4, 5]
    ending = next(
        seed
        for seed in range(5_000)
        if run(engine.generate(request("end", prompt, n=1, seed=seed))).token_ids.tolist() == [END]
    )
    completion = run(engine.generate(request("end", prompt, n=9, seed=ending)))
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([END], "stop")
    assert sampled_exactly(models[0], prompt, completion)


def test_requests_that_cannot_be_served_are_refused(engine: Any) -> None:
    with pytest.raises(ContextLengthError, match="121 tokens, the engine takes 120"):
        run(engine.generate(request("long", [1] * 121)))
    with pytest.raises(EngineError, match="lower max_tokens"):
        run(engine.generate(request("long", [1] * 119, n=6)))
    with pytest.raises(EngineError, match=f"the vocabulary from 0 to {VOCABULARY - 1}"):
        run(engine.generate(request("wide", [1, VOCABULARY])))


def test_a_cancelled_call_makes_room_and_the_engine_goes_on(engine: Any, models: Any) -> None:
    async def cancelled() -> Any:
        call = asyncio.create_task(engine.generate(request("gone", [1, 2, 3], n=100)))
        for _ in range(5):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return await engine.generate(request("next", [1, 2, 3], n=8))

    assert sampled_exactly(models[0], [1, 2, 3], run(cancelled()))
    assert not engine._calls


def test_while_paused_nothing_is_sampled_and_afterwards_the_same_tokens_come(engine: Any, models: Any) -> None:
    async def paused() -> tuple[int, int, Any]:
        call = asyncio.create_task(engine.generate(request("p", [1, 2, 3], n=30, seed=4)))
        while not engine._calls or not next(iter(engine._calls.values())).token_ids:
            await asyncio.sleep(0)
        engine.pause()
        await asyncio.sleep(0)
        at_pause = engine.generated_tokens
        for _ in range(20):
            await asyncio.sleep(0)
        still = engine.generated_tokens
        engine.resume()
        return at_pause, still, await call

    at_pause, still, completion = run(paused())
    assert at_pause == still
    assert (
        completion.token_ids.tolist() == run(engine.generate(request("q", [1, 2, 3], n=30, seed=4))).token_ids.tolist()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [({"logprobs": None}, "0 logprobs for 1 tokens"), ({"finish_reason": "abort", "finished": True}, "'abort'")],
    ids=["without logprobs", "aborted"],
)
def test_a_request_that_vllm_gives_up_is_an_engine_error(
    engine: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    real = engine._engine.step

    def step() -> list[Any]:
        outputs = real()
        for output in outputs:
            for name, value in change.items():
                setattr(output if name == "finished" else output.outputs[0], name, value)
        return outputs

    monkeypatch.setattr(engine._engine, "step", step)
    with pytest.raises(EngineError, match=message):
        run(engine.generate(request("gone", [1, 2, 3])))
    monkeypatch.undo()
    engine._engine.abort_request([str(n) for n in range(10_000)])
    assert run(engine.generate(request("next", [1, 2, 3]))).token_ids.size


def test_a_failing_step_fails_its_requests_and_the_next_are_served(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._engine, "step", lambda: 1 / 0)
    with pytest.raises(EngineError, match="vLLM stopped: ZeroDivisionError"):
        run(engine.generate(request("broken", [1, 2, 3])))
    monkeypatch.undo()
    assert run(engine.generate(request("next", [1, 2, 3]))).token_ids.size


def test_a_model_that_vllm_does_not_serve_is_one_message(tmp_path: Path) -> None:
    from rl.engines.vllm_engine import VllmEngine

    model = build("llama")
    model.config.architectures = ["NoSuchModel"]
    model.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text().replace("LlamaForCausalLM", "NoSuchForCausalLM")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(EngineError, match="vLLM does not serve"):
        VllmEngine(tmp_path, VllmSettings(), slots=1, max_length=32)
