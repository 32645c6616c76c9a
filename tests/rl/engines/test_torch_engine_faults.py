"""Requests and models that cannot be served, failures, cancellations."""

import asyncio
import copy

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from compaction.protocols import Completion, ContextLengthError, EngineError
from rl.engines.torch_engine import TorchEngine
from tests.rl.engines.served import (
    VOCABULARY,
    assert_exact,
    build,
    request,
    run,
    sizes,
    weights_of,
)


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
    with pytest.raises(ValueError, match=r"the model takes 256 tokens, the longest window is 257"):
        TorchEngine(build(), slots=1, max_length=257)
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
