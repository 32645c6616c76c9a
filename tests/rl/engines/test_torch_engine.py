"""The torch engine against plain `transformers` forwards of the weights that each token is stamped with."""

import asyncio

import numpy as np
import pytest
import torch

import rl.engines.torch_engine as torch_engine
from compaction.protocols import Engine
from rl.engines.torch_engine import TorchEngine
from tests.rl.engines.served import (
    VOCABULARY,
    assert_exact,
    build,
    play,
    prompts,
    request,
    run,
)


@pytest.mark.parametrize("kind", ["llama", "llama3-rope", "qwen2", "qwen3"])
@pytest.mark.parametrize("slots", [9, 4])
def test_logprobs_equal_a_plain_forward_for_ragged_batches_and_reused_prefixes(kind, slots):
    model = build(kind)
    engine = TorchEngine(model, slots=slots, max_length=120)
    assert isinstance(engine, Engine)

    async def all_rollouts():
        await asyncio.gather(*(play(engine, model, f"r{i}", np.random.default_rng(i)) for i in range(9)))

    run(all_rollouts())
    assert engine.generated_tokens > 0
    assert engine.cached_tokens > 0 or slots < 9
    assert engine.busy_seconds > 0


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.7])
def test_logprobs_are_those_of_the_sampling_distribution(temperature):
    model = build()
    engine = TorchEngine(model, slots=4, max_length=120)
    run(play(engine, model, "r", np.random.default_rng(0), temperature=temperature))


def test_greedy_decoding_takes_the_most_likely_token():
    model = build()
    engine = TorchEngine(model, slots=2, max_length=64)
    prompt = [5, 9, 2]
    completion = run(engine.generate(request("r", prompt, n=10, temperature=0.0)))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion.token_ids.tolist()]])).logits[0]
    assert completion.token_ids.tolist() == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_sampled_tokens_follow_the_distribution():
    model = build()
    engine = TorchEngine(model, slots=64, max_length=16)
    prompt, n = [3, 7], 4000

    async def many():
        return await asyncio.gather(*(engine.generate(request(f"r{i}", prompt, n=1, seed=i)) for i in range(n)))

    counts = np.bincount([int(c.token_ids[0]) for c in run(many())], minlength=VOCABULARY)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy() * n
    seen = expected > 5
    assert (((counts - expected) ** 2 / expected)[seen]).sum() < 2 * seen.sum()
    assert counts[~seen].sum() <= 2 * expected[~seen].sum() + 20


def test_resumed_window_reuses_only_what_it_shares_with_the_slot():
    model = build()
    engine = TorchEngine(model, slots=1, max_length=100)
    rng = np.random.default_rng(1)
    window = rng.integers(0, VOCABULARY, 60).tolist()
    resumed = [*window[:5], (window[5] + 1) % VOCABULARY, *window[30:50]]

    async def turns():
        first = await engine.generate(request("r", window))
        second = await engine.generate(request("r", resumed))
        third = await engine.generate(request("r", resumed[:3]))
        return first, second, third

    first, second, third = run(turns())
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 5, 2)
    assert (first.prompt_tokens, second.prompt_tokens, third.prompt_tokens) == (60, 26, 3)
    for prompt, completion in ((window, first), (resumed, second), (resumed[:3], third)):
        assert_exact(model, prompt, completion)


def test_sampled_tokens_are_part_of_the_kept_prefix():
    model = build()
    engine = TorchEngine(model, slots=1, max_length=100)

    async def turns():
        first = await engine.generate(request("r", [1, 2, 3, 4], n=5))
        return await engine.generate(request("r", [1, 2, 3, 4, *first.token_ids.tolist(), 8, 9]))

    second = run(turns())
    # The last sampled token was never fed: its keys and values are computed with the observation.
    assert second.cached_tokens == 4 + 5 - 1


def test_same_prompt_again_computes_its_last_token():
    model = build()
    engine = TorchEngine(model, slots=1, max_length=100)

    async def twice():
        return [await engine.generate(request("r", [4, 5, 6], seed=3)) for _ in range(2)]

    first, second = run(twice())
    assert second.cached_tokens == 2
    np.testing.assert_array_equal(first.token_ids, second.token_ids)


def test_reply_ends_with_the_end_token_or_at_max_tokens():
    model = build(eos=[7, 11])
    engine = TorchEngine(model, slots=8, max_length=100)

    async def many():
        return await asyncio.gather(*(engine.generate(request(f"r{i}", [i], n=40, seed=i)) for i in range(40)))

    completions = run(many())
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        ends = np.isin(completion.token_ids, [7, 11])
        assert not ends[:-1].any()
        assert ends[-1] == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 40
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)
        assert (completion.token_ids.dtype, completion.logprobs.dtype, completion.versions.dtype) == (
            np.int32,
            np.float32,
            np.int32,
        )


def test_what_a_request_samples_does_not_depend_on_its_neighbours():
    model = build()
    rng = np.random.default_rng(2)
    texts = prompts(12, rng)

    async def together(engine):
        return await asyncio.gather(*(engine.generate(request(f"r{i}", p, seed=i)) for i, p in enumerate(texts)))

    batched = run(together(TorchEngine(model, slots=5, max_length=80)))
    for i, prompt in enumerate(texts):
        alone = run(TorchEngine(model, slots=1, max_length=80).generate(request("x", prompt, seed=i)))
        np.testing.assert_array_equal(alone.token_ids, batched[i].token_ids)


def test_same_order_of_requests_gives_the_same_bits():
    def once():
        model = build()
        engine = TorchEngine(model, slots=3, max_length=120)
        bits = []

        async def rollout(i):
            ids = [i, i + 1]
            for turn in range(4):
                c = await engine.generate(request(f"r{i}", ids, n=3 + i % 4, seed=10 * i + turn))
                bits.append((i, c.token_ids.tobytes(), c.logprobs.tobytes(), c.cached_tokens))
                ids += [*c.token_ids.tolist(), 1, 2]
            await engine.release(f"r{i}")

        async def all_of_them():
            await asyncio.gather(*(rollout(i) for i in range(8)))

        run(all_of_them())
        return bits

    assert once() == once()


def test_released_rollouts_leave_no_trace_in_later_ones():
    model = build()
    used, fresh = (TorchEngine(model, slots=2, max_length=80) for _ in range(2))

    async def earlier():
        await used.generate(request("old", [1, 2, 3, 4, 5]))
        await used.release("old")

    run(earlier())
    again = run(used.generate(request("new", [1, 2, 3, 4, 5, 6])))
    reference = run(fresh.generate(request("new", [1, 2, 3, 4, 5, 6])))
    assert again.cached_tokens == 0
    np.testing.assert_array_equal(again.logprobs, reference.logprobs)


def test_idle_rollout_used_longest_ago_gives_its_slot_away():
    model = build()
    engine = TorchEngine(model, slots=2, max_length=80)

    async def turns():
        await engine.generate(request("a", [1, 2, 3, 4]))
        await engine.generate(request("b", [5, 6, 7, 8]))
        await engine.generate(request("a", [1, 2, 3, 4, 9]))
        third = await engine.generate(request("c", [1, 2, 3, 4, 9]))
        a = await engine.generate(request("a", [1, 2, 3, 4, 9, 9]))
        b = await engine.generate(request("b", [5, 6, 7, 8, 9]))
        return third, a, b

    third, a, b = run(turns())
    assert third.cached_tokens == 0  # another rollout's prefix is not its own
    assert a.cached_tokens == 5
    assert b.cached_tokens == 0
    assert_exact(model, [5, 6, 7, 8, 9], b)


def test_second_call_of_a_rollout_waits_for_the_first():
    model = build()
    engine = TorchEngine(model, slots=2, max_length=80)

    async def both():
        return await asyncio.gather(*(engine.generate(request("r", p)) for p in ([1, 2, 3], [1, 2, 4])))

    first, second = run(both())
    assert_exact(model, [1, 2, 3], first)
    assert_exact(model, [1, 2, 4], second)
    assert second.cached_tokens == 2


def test_rows_far_apart_read_their_own_slots():
    model = build()
    engine = TorchEngine(model, slots=12, max_length=80)
    rng = np.random.default_rng(4)

    async def scattered():
        short = [engine.generate(request(f"r{i}", [i, 1], n=1)) for i in range(12)]
        await asyncio.gather(*short)
        texts = {i: [i, 1, *rng.integers(0, VOCABULARY, 4 + i).tolist()] for i in (0, 11)}
        done = await asyncio.gather(*(engine.generate(request(f"r{i}", p)) for i, p in texts.items()))
        return list(zip(texts.values(), done, strict=True))

    for prompt, completion in run(scattered()):
        assert_exact(model, prompt, completion)


def test_long_prompts_are_computed_in_pieces(monkeypatch):
    monkeypatch.setattr(torch_engine, "STEP_TOKENS", 16)
    model = build()
    engine = TorchEngine(model, slots=4, max_length=120)
    rng = np.random.default_rng(5)
    texts = prompts(6, rng, low=2, high=90)

    async def together():
        return await asyncio.gather(*(engine.generate(request(f"r{i}", p, seed=i)) for i, p in enumerate(texts)))

    for prompt, completion in zip(texts, run(together()), strict=True):
        assert_exact(model, prompt, completion)
    assert engine.prefill_tokens == sum(len(p) for p in texts)
