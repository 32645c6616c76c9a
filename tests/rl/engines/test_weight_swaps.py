"""New weights in the middle of rollouts: every token's logprob is that of the version it is stamped with."""

import asyncio
import copy

import numpy as np
import pytest
import torch

from compaction.protocols import EngineError
from rl.engines.torch_engine import TorchEngine
from tests.rl.engines.served import (
    TOLERANCE,
    VOCABULARY,
    assert_exact,
    build,
    full_logprobs,
    prompts,
    request,
    run,
    weights_of,
)


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
