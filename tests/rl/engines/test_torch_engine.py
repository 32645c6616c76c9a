"""The torch engine against plain `transformers` forwards of the weights that each token is stamped with."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import rl.engines.torch_engine as torch_engine
from compaction.protocols import Completion, ContextLengthError, Engine, EngineError, GenerateRequest
from rl.engines.torch_engine import TorchEngine

VOCABULARY = 120
TOLERANCE = 1e-5


def sizes(**more):
    return dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        max_position_embeddings=256,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=None,
        **more,
    )


def build(kind="llama", *, eos=None, seed=0):
    """A model with random weights large enough for peaked, prompt-dependent distributions."""
    torch.manual_seed(seed)
    if kind == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(**sizes(num_attention_heads=2, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True))
        )
    elif kind == "llama3-rope":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        model = LlamaForCausalLM(
            LlamaConfig(
                **sizes(num_attention_heads=2, num_key_value_heads=1, attention_bias=True, rope_parameters=rope)
            )
        )
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes(num_attention_heads=4, num_key_value_heads=2)))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes(num_attention_heads=4, num_key_value_heads=2, head_dim=32)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = eos
    return model.eval()


def weights_of(seed, kind="llama"):
    return build(kind, seed=seed).state_dict()


def request(rollout_id, prompt, *, n=6, temperature=1.0, seed=0):
    return GenerateRequest(rollout_id, np.asarray(prompt, dtype=np.int32), n, temperature, seed)


def run(coroutine):
    return asyncio.run(coroutine)


def full_logprobs(model, prompt, completion: Completion, temperature=1.0):
    """[n] logprobs of the sampled tokens by one plain forward over the whole sequence."""
    ids = torch.tensor([*prompt, *completion.token_ids.tolist()])[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def assert_exact(model, prompt, completion, temperature=1.0):
    np.testing.assert_allclose(
        completion.logprobs, full_logprobs(model, prompt, completion, temperature), atol=TOLERANCE, rtol=0
    )


def prompts(n, rng, low=3, high=40):
    return [rng.integers(0, VOCABULARY, rng.integers(low, high)).tolist() for _ in range(n)]


async def play(engine, model, rollout_id, rng, turns=4, temperature=1.0):
    """A rollout of several turns: what was sampled and an observation go behind the prompt. Each turn is checked."""
    ids = rng.integers(0, VOCABULARY, 8).tolist()
    for turn in range(turns):
        completion = await engine.generate(
            request(rollout_id, ids, n=int(rng.integers(1, 9)), temperature=temperature, seed=turn)
        )
        assert_exact(model, ids, completion, temperature)
        ids += completion.token_ids.tolist() + rng.integers(0, VOCABULARY, int(rng.integers(1, 12))).tolist()
    await engine.release(rollout_id)


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


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_swap_inside_an_action_stamps_each_token_with_the_version_that_sampled_it(kind):
    served = build(kind, seed=0)
    by_version = {3: copy.deepcopy(served), 4: build(kind, seed=1)}
    engine = TorchEngine(served, slots=4, max_length=120, version=3)
    rng = np.random.default_rng(6)
    texts = prompts(6, rng)

    async def swapped():
        calls = [
            asyncio.create_task(engine.generate(request(f"r{i}", p, n=4 + 4 * i, seed=i))) for i, p in enumerate(texts)
        ]
        while engine.generated_tokens < 15:
            await asyncio.sleep(0)
        engine.load_weights(by_version[4].state_dict(), 4)
        return await asyncio.gather(*calls)

    mixed = 0
    for prompt, completion in zip(texts, run(swapped()), strict=True):
        mixed += len(set(completion.versions.tolist())) == 2
        assert (np.diff(completion.versions) >= 0).all()
        for version, model in by_version.items():
            stamped = completion.versions == version
            expected = full_logprobs(model, prompt, completion)
            np.testing.assert_allclose(completion.logprobs[stamped], expected[stamped], atol=TOLERANCE, rtol=0)
    assert mixed >= 2


def test_swap_between_turns_recomputes_the_kept_prefix():
    served, new = build(seed=0), build(seed=1)
    engine = TorchEngine(served, slots=2, max_length=80)

    async def turns():
        first = await engine.generate(request("r", [1, 2, 3]))
        engine.load_weights(new.state_dict(), 1)
        prompt = [1, 2, 3, *first.token_ids.tolist(), 4]
        second = await engine.generate(request("r", prompt))
        third_prompt = [*prompt, *second.token_ids.tolist(), 5]
        return (prompt, second), (third_prompt, await engine.generate(request("r", third_prompt)))

    (prompt, second), (third_prompt, third) = run(turns())
    assert second.cached_tokens == 0
    assert third.cached_tokens > 0
    for text, completion in ((prompt, second), (third_prompt, third)):
        assert set(completion.versions.tolist()) == {1}
        assert_exact(new, text, completion)


def _broken(change):
    weights = {name: value.clone() for name, value in weights_of(1).items()}
    change(weights)
    return weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "missing.*model.norm.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "unknown.*extra"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight is \(3,\), expected \(64,\)"),
        (lambda w: w["model.layers.1.mlp.up_proj.weight"].fill_(float("nan")), "up_proj.weight.*non-finite"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(VOCABULARY, 64)}), "tied but differ"),
    ],
)
def test_bad_weights_are_refused_and_the_old_ones_keep_serving(change, message):
    served = build(seed=0)
    reference = copy.deepcopy(served)
    engine = TorchEngine(served, slots=2, max_length=80, version=7)
    with pytest.raises(EngineError, match=message):
        engine.load_weights(_broken(change), 8)
    completion = run(engine.generate(request("r", [1, 2, 3])))
    assert set(completion.versions.tolist()) == {7}
    assert_exact(reference, [1, 2, 3], completion)


def test_tied_head_may_be_left_out_of_new_weights():
    engine = TorchEngine(build(seed=0), slots=2, max_length=80)
    weights = weights_of(1)
    del weights["lm_head.weight"]
    engine.load_weights(weights, 1)
    assert_exact(build(seed=1), [1, 2, 3], run(engine.generate(request("r", [1, 2, 3]))))


def test_prompt_longer_than_the_engine_is_a_context_length_error():
    engine = TorchEngine(build(), slots=2, max_length=20)
    with pytest.raises(ContextLengthError, match="21 tokens, the engine takes 20"):
        run(engine.generate(request("r", [1] * 21, n=1)))


@pytest.mark.parametrize(
    ("prompt", "n", "message"),
    [
        ([1] * 16, 5, r"prompt \(16\) \+ max_tokens \(5\) = 21 tokens, the engine takes 20"),
        ([], 5, "at least 1, got 0 tokens"),
        ([1], 0, "at least 1, got 1 tokens and 0"),
        ([1, VOCABULARY], 1, "reach from 1 to 120, the vocabulary from 0 to 119"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_alone(prompt, n, message):
    engine = TorchEngine(build(), slots=2, max_length=20)

    async def beside_a_good_one():
        return await asyncio.gather(
            engine.generate(request("good", [1, 2])),
            engine.generate(request("bad", prompt, n=n)),
            return_exceptions=True,
        )

    good, bad = run(beside_a_good_one())
    assert isinstance(good, Completion)
    assert isinstance(bad, EngineError)
    with pytest.raises(EngineError, match=message):
        raise bad


def test_sequence_may_fill_the_engine_to_the_last_token():
    model = build()
    engine = TorchEngine(model, slots=2, max_length=20)
    completion = run(engine.generate(request("r", [1] * 16, n=4)))
    assert len(completion.token_ids) == 4
    assert_exact(model, [1] * 16, completion)


def test_failing_step_reaches_every_waiter_and_the_engine_recovers():
    model = build()
    engine = TorchEngine(model, slots=2, max_length=40)
    good = {name: value.clone() for name, value in model.state_dict().items()}

    async def all_fail():
        with torch.no_grad():
            model.model.norm.weight.fill_(float("inf"))
        calls = (engine.generate(request(f"r{i}", [1, 2, i])) for i in range(5))
        return await asyncio.gather(*calls, return_exceptions=True)

    errors = run(all_fail())
    assert all(isinstance(error, EngineError) and "not finite" in str(error) for error in errors)
    engine.load_weights(good, 1)
    completion = run(engine.generate(request("r0", [1, 2, 3])))
    assert_exact(model, [1, 2, 3], completion)


def test_closing_the_event_loop_leaves_an_engine_that_serves_in_the_next_one():
    model = build()
    engine = TorchEngine(model, slots=1, max_length=40)

    async def gives_up():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await engine.generate(request("r", [1, 2], n=30))

    run(gives_up())
    assert_exact(model, [3, 4], run(engine.generate(request("s", [3, 4]))))


def test_cancelled_call_frees_its_slot():
    model = build()
    engine = TorchEngine(model, slots=1, max_length=60)

    async def cancel_one():
        first = asyncio.create_task(engine.generate(request("a", [1, 2], n=50)))
        second = asyncio.create_task(engine.generate(request("b", [3, 4], n=2)))
        while engine.generated_tokens < 3:
            await asyncio.sleep(0)
        first.cancel()
        completion = await second
        assert first.cancelled()
        return completion

    assert_exact(model, [3, 4], run(cancel_one()))
    assert engine.generated_tokens < 20


def test_release_during_a_call_ends_the_call():
    engine = TorchEngine(build(), slots=1, max_length=60)

    async def released():
        call = asyncio.create_task(engine.generate(request("a", [1, 2], n=50)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.release("a")
        with pytest.raises(EngineError, match="released during its call"):
            await call
        await engine.release("never seen")

    run(released())


def test_unsupported_models_are_refused_at_construction():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"'gpt2' is not supported.*llama.*qwen2.*qwen3"):
        TorchEngine(gpt2, slots=1, max_length=16)
    sliding = Qwen2ForCausalLM(
        Qwen2Config(
            **sizes(num_attention_heads=2, num_key_value_heads=2, use_sliding_window=True, sliding_window=8),
            max_window_layers=1,
        )
    )
    with pytest.raises(ValueError, match="sliding-window"):
        TorchEngine(sliding, slots=1, max_length=16)
    dynamic = LlamaForCausalLM(
        LlamaConfig(
            **sizes(
                num_attention_heads=2,
                num_key_value_heads=2,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0},
            )
        )
    )
    with pytest.raises(ValueError, match="'dynamic' depends on the sequence length"):
        TorchEngine(dynamic, slots=1, max_length=16)
    with pytest.raises(ValueError, match="slots=0"):
        TorchEngine(build(), slots=0, max_length=16)


@pytest.mark.parametrize("kind", ["llama", "llama3-rope", "qwen2", "qwen3"])
def test_served_model_still_saves_and_computes_as_before(kind, tmp_path):
    model = build(kind)
    before = copy.deepcopy(model)
    engine = TorchEngine(model, slots=1, max_length=16)
    engine.load_weights(weights_of(1, kind), 1)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, loaded(ids).logits)
        assert not torch.allclose(model(ids).logits, before(ids).logits)
