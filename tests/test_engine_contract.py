"""The contract that every engine passes, on a tiny random Llama in float32. An engine is one entry of ENGINES:

    "mine": Maker(make_mine)    # make_mine(model, tokenizer, monkeypatch) -> engine

whose weights are its own, and come with the first refit.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny
from tests.fake_trtllm import make_trtllm_engine
from tests.fake_vllm import make_vllm_engine
from trainers.engines import Engine, Sampling, TensorSpec
from trainers.engines.native import NativeEngine
from trainers.refit import refit

PROMPTS = [[2, 3], [4], [5, 6, 7, 8], [9, 10], [4]]
SEEDS = [11, 12, 13, 14, 15]
LONG = Sampling(max_new_tokens=8, ignore_eos=True)


@dataclass(frozen=True)
class Maker:
    make: Callable[..., Engine]
    device: str = "cpu"  # the policy's
    loses_weights: bool = True  # sleep() without keep_weights gives them up


def make_native(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return NativeEngine(copy.deepcopy(model), tokenizer)


def make_continuous(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """As on a GPU, but for its graphs."""
    return NativeEngine(copy.deepcopy(model), tokenizer, continuous=True, max_batch_size=3)


ENGINES = {
    "native": Maker(make_native, loses_weights=False),
    "native-continuous": Maker(make_continuous, loses_weights=False),
    "trtllm": Maker(make_trtllm_engine),
    "vllm": Maker(make_vllm_engine),
}
ON_GPU = {"native-cuda": Maker(make_native, device="cuda", loses_weights=False)}


@pytest.fixture(params=[*ENGINES, *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_GPU)])
def maker(request) -> Maker:
    return (ENGINES | ON_GPU)[request.param]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.tiny_model())


@pytest.fixture(scope="module")
def loaded():
    return AutoModelForCausalLM.from_pretrained(tiny.tiny_model(), dtype=torch.float32).eval()


class Weights:
    """As much of a policy as a refit needs: a model of its own, whose weights a test may change."""

    def __init__(self, model: Any):
        self.model = model

    def manifest(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in self.weights()}

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, p.detach()) for name, p in self.model.named_parameters()]

    @torch.no_grad()
    def change(self) -> None:
        for parameter in self.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 * float(parameter.std()))

    def scored(self, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
        """Log-probs of a response by one plain forward pass."""
        with torch.no_grad():
            ids = torch.tensor([prompt + response], device=self.model.device)
            logits = self.model(ids).logits[0].double() / temperature
        logprobs = torch.log_softmax(logits, -1)
        return [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(response)]


@pytest.fixture
def policy(maker, loaded) -> Weights:
    return Weights(copy.deepcopy(loaded).to(maker.device))


@pytest.fixture
def engine(maker, policy, tokenizer, monkeypatch) -> Iterator[Engine]:
    engine = maker.make(policy.model, tokenizer, monkeypatch)
    policy.change()  # what it was made with is not what it is given
    refit(policy, engine, 1)
    yield engine
    engine.close()


def assert_generates_with(engine: Engine, policy: Weights, version: int, sampling: Sampling = LONG) -> None:
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, sampling, SEEDS), strict=True):
        right = policy.scored(prompt, completion.tokens, sampling.temperature)
        assert completion.logprobs == pytest.approx(right, abs=1e-4)
        assert completion.weight_version == version


def tokens(engine: Engine, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
    return [completion.tokens for completion in engine.generate(prompts, LONG, seeds)]


def test_order_is_kept(engine, policy):
    """Each row's log-probs are those of its own prompt, so the rows are where their prompts are."""
    assert_generates_with(engine, policy, 1)
    prompts = [[2 + i % 14] * (1 + i % 5) for i in range(20)]  # more than an engine may take at once
    for prompt, completion in zip(prompts, engine.generate(prompts, LONG, list(range(20))), strict=True):
        assert completion.logprobs == pytest.approx(policy.scored(prompt, completion.tokens), abs=1e-4)


def test_rows_do_not_depend_on_their_neighbours(engine):
    if not engine.capabilities().row_seeds:
        greedy = replace(LONG, greedy=True)
        together = engine.generate(PROMPTS, greedy, SEEDS)
        assert [c.tokens for c in together] == [engine.generate([p], greedy, [0])[0].tokens for p in PROMPTS]
        return
    alone = [tokens(engine, [prompt], [seed])[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    assert tokens(engine, PROMPTS, SEEDS) == alone
    assert tokens(engine, PROMPTS[::-1], SEEDS[::-1]) == alone[::-1]


def test_seeds_are_reproducible_and_independent_per_request(engine):
    first, second = tokens(engine, [[4], [4]], [1, 2])
    assert first != second
    if not engine.capabilities().row_seeds:
        return
    assert tokens(engine, [[4], [4], [4]], [2, 1, 2]) == [second, first, second]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_of_the_sampling_distribution(engine, policy, temperature):
    sampling = replace(LONG, temperature=temperature)
    if engine.capabilities().raw_logprobs_only and temperature != 1:
        with pytest.raises(ValueError, match="temperature"):
            engine.generate(PROMPTS, sampling, SEEDS)
    else:
        assert_generates_with(engine, policy, 1, sampling)


def test_greedy_takes_the_most_likely_token(engine, policy):
    completion = engine.generate([[4, 5]], replace(LONG, greedy=True), [0])[0]
    with torch.no_grad():
        ids = torch.tensor([[4, 5, *completion.tokens]], device=policy.model.device)
        assert completion.tokens == policy.model(ids).logits[0, 1:-1].argmax(-1).tolist()


def test_stop_token_is_kept_and_said(engine):
    ends = {1, 6, 7, 8}  # 1 is </s>
    for completion in engine.generate(PROMPTS, Sampling(max_new_tokens=60, stop_token_ids=(6, 7, 8)), SEEDS):
        assert completion.finish == "stop"
        assert completion.tokens[-1] in ends and not ends & set(completion.tokens[:-1])
        assert len(completion.logprobs) == len(completion.tokens)


def test_stop_strings_end_a_response_and_stay_in_it(engine):
    ends = {7, 8, 9}
    sampling = Sampling(max_new_tokens=60, ignore_eos=True, stop_strings=("w7", "w8", "w9"))
    for completion in engine.generate(PROMPTS, sampling, SEEDS):
        assert completion.finish == "stop"
        assert completion.tokens[-1] in ends and not ends & set(completion.tokens[:-1])


def test_a_response_cut_at_the_limit_says_so(engine):
    for completion in engine.generate(PROMPTS, Sampling(max_new_tokens=3, ignore_eos=True), SEEDS):
        assert completion.finish == "length" and len(completion.tokens) == 3


def test_no_prompts_no_completions(engine):
    assert engine.generate([], LONG, []) == []


def test_bad_requests(engine):
    with pytest.raises(ValueError, match="one entry per prompt, 1, got 2"):
        engine.generate([[4]], LONG, [1, 2])
    with pytest.raises(ValueError, match=r"prompts\[1\] must have at least one token"):
        engine.generate([[4], []], LONG, [1, 2])
    assert tokens(engine, [[4]], [1])


def test_each_update_changes_what_a_repeated_prompt_gives(engine, policy):
    """Prompts that were generated from before: a prefix cached under older weights would show in the log-probs."""
    for version in (2, 3):
        before = [completion.logprobs for completion in engine.generate(PROMPTS, LONG, SEEDS)]
        policy.change()
        refit(policy, engine, version)
        assert [completion.logprobs for completion in engine.generate(PROMPTS, LONG, SEEDS)] != before
        assert_generates_with(engine, policy, version)


def test_a_half_made_update_poisons_until_a_full_one(engine, policy):
    weights = policy.weights()
    engine.begin_update(2, policy.manifest())
    engine.put(weights[:2])
    with pytest.raises(RuntimeError, match="begun and not ended"):
        engine.generate(PROMPTS, LONG, SEEDS)
    with pytest.raises(RuntimeError, match=f"{len(weights) - 2} announced tensors never came"):
        engine.end_update()
    with pytest.raises(RuntimeError, match="complete weights"):
        engine.generate(PROMPTS, LONG, SEEDS)
    engine.begin_update(3, policy.manifest())
    engine.put(weights[2:])
    engine.abort_update()
    engine.abort_update()
    with pytest.raises(RuntimeError, match="complete weights"):
        engine.generate(PROMPTS, LONG, SEEDS)
    refit(policy, engine, 4)
    assert_generates_with(engine, policy, 4)


def test_tensors_may_come_in_any_order_and_split(engine, policy):
    policy.change()
    weights = policy.weights()[::-1]
    engine.begin_update(2, policy.manifest())
    engine.put(weights[:1])
    engine.put([])
    engine.put(iter(weights[1:]))
    engine.end_update()
    assert_generates_with(engine, policy, 2)


def test_another_models_manifest_is_refused_before_anything_moves(engine, policy):
    manifest = policy.manifest()
    name = next(iter(manifest))
    with pytest.raises(ValueError, match="unknown: \\['extra'\\]"):
        engine.begin_update(2, manifest | {"extra": TensorSpec((1,), torch.float32)})
    with pytest.raises(ValueError, match="missing: "):
        engine.begin_update(2, {n: spec for n, spec in manifest.items() if n != name})
    with pytest.raises(ValueError, match=f"{name} must be"):
        engine.begin_update(2, manifest | {name: TensorSpec((3, 3), torch.float32)})
    with pytest.raises(ValueError, match="got none"):
        engine.begin_update(2, {})
    assert_generates_with(engine, policy, 1)  # nothing was begun


def test_what_was_not_announced_is_refused_before_anything_moves(engine, policy):
    weights, manifest = policy.weights(), policy.manifest()
    (name, tensor), *_ = weights
    engine.begin_update(2, manifest)
    for wrong, told in (
        ((name, tensor[:-1]), f"{name} must be"),
        ((name, tensor.double()), "float64"),
        (("nobody", tensor), "not announced"),
    ):
        with pytest.raises(ValueError, match=told):
            engine.put([weights[1], wrong])  # all of the bucket, the good one too
    with pytest.raises(ValueError, match="came twice"):
        engine.put([(name, tensor), (name, tensor)])
    engine.put(weights)
    with pytest.raises(ValueError, match="came twice"):
        engine.put(weights[:1])
    engine.end_update()
    assert_generates_with(engine, policy, 2)


def test_calls_out_of_order(engine, policy):
    with pytest.raises(RuntimeError, match=r"put\(\) needs begin_update"):
        engine.put(policy.weights())
    with pytest.raises(RuntimeError, match=r"end_update\(\) needs begin_update"):
        engine.end_update()
    engine.abort_update()  # of nothing
    assert_generates_with(engine, policy, 1)
    engine.begin_update(2, policy.manifest())
    with pytest.raises(RuntimeError, match="inside an update"):
        engine.begin_update(3, policy.manifest())
    with pytest.raises(RuntimeError, match="inside an update"):
        engine.sleep()
    engine.put(policy.weights())
    engine.end_update()
    assert_generates_with(engine, policy, 2)


def test_an_engine_wakes_in_order_and_generates_again(engine, maker, policy):
    engine.sleep()
    engine.sleep()
    for call in (lambda: engine.generate(PROMPTS, LONG, SEEDS), lambda: engine.begin_update(2, policy.manifest())):
        with pytest.raises(RuntimeError, match="wake"):
            call()
    with pytest.raises(RuntimeError, match="before wake"):
        engine.wake("kv")
    with pytest.raises(ValueError, match="weights, kv"):
        engine.wake("all")
    engine.wake("weights")
    with pytest.raises(RuntimeError, match="kv, asleep"):
        engine.generate(PROMPTS, LONG, SEEDS)
    engine.wake("kv")
    engine.wake("kv")
    if maker.loses_weights:
        with pytest.raises(RuntimeError, match="not sent again"):
            engine.generate(PROMPTS, LONG, SEEDS)
        policy.change()
    else:
        assert_generates_with(engine, policy, 1)
    refit(policy, engine, 2)
    assert_generates_with(engine, policy, 2)


def test_weights_that_were_kept_need_no_update(engine, policy):
    engine.sleep(keep_weights=True)
    engine.wake("weights")
    engine.wake("kv")
    assert_generates_with(engine, policy, 1)


def test_a_refit_wakes_what_sleeps(engine, policy):
    engine.sleep()
    policy.change()
    refit(policy, engine, 2)
    assert_generates_with(engine, policy, 2)


def test_a_cache_that_is_reset_changes_no_answer(engine):
    greedy = replace(LONG, greedy=True)
    before = engine.generate(PROMPTS, greedy, SEEDS)
    engine.reset_prefix_cache()
    assert [c.tokens for c in engine.generate(PROMPTS, greedy, SEEDS)] == [c.tokens for c in before]


def test_an_engine_that_does_not_end_in_time_says_which_key_bounds_it(engine, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(engine, "timeout_s", 1e-6)
        with pytest.raises(TimeoutError, match=r"policy\.generation\.timeout_s=1e-06"):
            engine.generate(PROMPTS, LONG, SEEDS)


def test_a_closed_engine_does_nothing(engine, policy):
    engine.close()
    engine.close()
    engine.abort_update()
    for call in (
        lambda: engine.generate(PROMPTS, LONG, SEEDS),
        lambda: engine.begin_update(2, policy.manifest()),
        lambda: engine.put([]),
        engine.end_update,
        engine.sleep,
        lambda: engine.wake("weights"),
        engine.reset_prefix_cache,
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_what_an_engine_says_of_itself(engine):
    can = engine.capabilities()
    assert can.name and can.version and can.transport in ("inproc", "cuda_ipc")
