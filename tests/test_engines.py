"""The contract that every generation engine passes. Today one engine: the embedded one on a tiny random Llama."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny
from trainers.engines import Sampling, TensorSpec, sample
from trainers.engines.native import NativeEngine, share_parameters
from trainers.refit import buckets, refit

PROMPTS = [[2, 3], [4], [5, 6, 7, 8], [9, 10], [4]]
SEEDS = [11, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(tiny.tiny_model(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.tiny_model())


@pytest.fixture
def engine(model, tokenizer):
    return NativeEngine(share_parameters(model, torch.float32), tokenizer)


def scored(model, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of a response by one plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0] / temperature
    logprobs = torch.log_softmax(logits.double(), -1)
    return [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(response)]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_of_the_sampling_distribution(engine, model, temperature):
    sampling = Sampling(max_new_tokens=6, temperature=temperature)
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, sampling, SEEDS), strict=True):
        assert completion.logprobs == pytest.approx(scored(model, prompt, completion.tokens, temperature), abs=1e-5)


def test_order_is_kept_and_rows_do_not_depend_on_their_neighbours(engine):
    sampling = Sampling(max_new_tokens=8, ignore_eos=True)
    together = engine.generate(PROMPTS, sampling, SEEDS)
    alone = [engine.generate([p], sampling, [s])[0] for p, s in zip(PROMPTS, SEEDS, strict=True)]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    small = NativeEngine(engine.model, engine.tokenizer, max_batch_size=2)
    assert [c.tokens for c in small.generate(PROMPTS, sampling, SEEDS)] == [c.tokens for c in alone]


def test_seeds_are_reproducible_and_independent_per_request(engine):
    sampling = Sampling(max_new_tokens=12, ignore_eos=True)
    first, again = (engine.generate([[4], [4]], sampling, [1, 2]) for _ in range(2))
    assert [c.tokens for c in first] == [c.tokens for c in again]
    assert first[0].tokens != first[1].tokens
    assert engine.generate([[4]], sampling, [2])[0].tokens == first[1].tokens


def test_stop_token_is_kept_and_said(engine):
    stop = Sampling(max_new_tokens=400, stop_token_ids=(6, 7, 8))
    for completion in engine.generate(PROMPTS, stop, SEEDS):
        ends = {1, 6, 7, 8}  # 1 is </s>
        assert completion.finish == "stop"
        assert completion.tokens[-1] in ends and not ends & set(completion.tokens[:-1])
        assert len(completion.logprobs) == len(completion.tokens)


def test_a_response_cut_at_the_limit_says_so(engine):
    for completion in engine.generate(PROMPTS, Sampling(max_new_tokens=3, ignore_eos=True), SEEDS):
        assert completion.finish == "length" and len(completion.tokens) == 3


def test_stop_strings_end_a_response_and_stay_in_it(engine, tokenizer):
    completions = engine.generate(PROMPTS, Sampling(max_new_tokens=400, ignore_eos=True, stop_strings=("w9",)), SEEDS)
    for completion in completions:
        assert completion.finish == "stop"
        assert completion.tokens[-1] == 9 and 9 not in completion.tokens[:-1]


def test_greedy_takes_the_most_likely_token(engine, model):
    completion = engine.generate([[4, 5]], Sampling(max_new_tokens=4, greedy=True, ignore_eos=True), [0])[0]
    ids = [4, 5]
    for token in completion.tokens:
        with torch.no_grad():
            assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


def test_sampling_follows_the_distribution():
    logits = torch.tensor([0.0, math.log(2), -math.inf, math.log(5)]).expand(80_000, 4)
    chosen, logprobs, _ = sample.draw(logits, (torch.arange(80_000, dtype=torch.float64) + 0.5) / 80_000)
    assert torch.bincount(chosen, minlength=4).tolist() == [10_000, 20_000, 0, 50_000]
    assert logprobs[0].item() == pytest.approx(math.log(1 / 8))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_no_token_of_probability_zero_is_ever_sampled(uniform):
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    chosen, logprob, _ = sample.draw(logits, torch.tensor([uniform], dtype=torch.float64))
    assert chosen.item() in (1, 2) and math.isfinite(logprob.item())


def test_diverged_weights_are_an_error_not_a_token():
    with pytest.raises(FloatingPointError, match="not finite"):
        sample.check_finite(sample.draw(torch.tensor([[0.0, math.nan]]), torch.tensor([0.5]).double())[2])


def test_two_updates_in_a_row_reach_the_completions(tokenizer):
    policy = tiny.policy(num_layers_unfrozen=1, dtype=torch.bfloat16)
    engine = NativeEngine(share_parameters(policy.model, torch.bfloat16), tokenizer)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter))
        refit(policy, engine, version)
        completion = engine.generate([[4, 5]], Sampling(max_new_tokens=5, ignore_eos=True), [3])[0]
        assert completion.weight_version == version
        assert completion.logprobs == pytest.approx(scored(policy_in_bf16(policy), [4, 5], completion.tokens), abs=0.05)


def policy_in_bf16(policy):
    return share_parameters(policy.model, torch.bfloat16)


def test_refit_moves_nothing_where_storage_is_shared_and_only_trained_layers_elsewhere(tokenizer):
    whole = tiny.policy()
    assert refit(whole, NativeEngine(share_parameters(whole.model, torch.float32), tokenizer), 1) == 0
    cut = tiny.policy(num_layers_unfrozen=1, dtype=torch.bfloat16)
    trained = sum(p.numel() for p in cut.model.parameters() if p.requires_grad)
    assert refit(cut, NativeEngine(share_parameters(cut.model, torch.bfloat16), tokenizer), 1) == 2 * trained


def test_a_half_made_update_poisons_until_a_full_one(engine, model):
    manifest = {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
    weights = list(model.named_parameters())
    engine.begin_update(1, manifest)
    engine.put(weights[:2])
    with pytest.raises(RuntimeError, match="begun and not ended"):
        engine.generate(PROMPTS, Sampling(2), SEEDS)
    with pytest.raises(RuntimeError, match=f"{len(weights) - 2} announced tensors never came"):
        engine.end_update()
    with pytest.raises(RuntimeError, match="complete weights"):
        engine.generate(PROMPTS, Sampling(2), SEEDS)
    engine.begin_update(2, manifest)
    engine.put(weights)
    engine.end_update()
    assert engine.generate(PROMPTS, Sampling(2), SEEDS)[0].weight_version == 2


def test_a_manifest_of_another_model_is_refused_before_anything_moves(engine, model):
    manifest = {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
    name = next(iter(manifest))
    with pytest.raises(ValueError, match="unknown: \\['extra'\\]"):
        engine.begin_update(1, manifest | {"extra": TensorSpec((1,), torch.float32)})
    with pytest.raises(ValueError, match=f"{name} must be"):
        engine.begin_update(1, manifest | {name: TensorSpec((3, 3), torch.float32)})
    engine.begin_update(1, manifest)
    with pytest.raises(ValueError, match="not announced, or came twice"):
        engine.put([("nobody", torch.zeros(1))])
    engine.abort_update()


def test_bad_requests(engine):
    with pytest.raises(ValueError, match="one entry per prompt, 1, got 2"):
        engine.generate([[4]], Sampling(2), [1, 2])
    with pytest.raises(ValueError, match=r"prompts\[1\] must have at least one token"):
        engine.generate([[4], []], Sampling(2), [1, 2])
    assert engine.generate([], Sampling(2), []) == []
    engine.close()
    engine.close()


def test_buckets_keep_order_and_stay_under_their_size():
    weights = [(str(i), torch.zeros(n)) for i, n in enumerate((2, 3, 9, 1, 1))]
    assert [[name for name, _ in bucket] for bucket in buckets(weights, 20)] == [["0", "1"], ["2"], ["3", "4"]]


def test_an_engine_that_does_not_end_in_time_says_which_key_bounds_it(model, tokenizer):
    slow = NativeEngine(share_parameters(model, torch.float32), tokenizer, timeout_s=1e-6)
    with pytest.raises(TimeoutError, match=r"policy\.generation\.timeout_s=1e-06"):
        slow.generate(PROMPTS, Sampling(2), SEEDS)
