"""What is the embedded engine's own, beside the contract of all engines (test_engine_contract.py)."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny
from tests.megatron_models import build_hf, file_names
from trainers.backbone import load_model
from trainers.engines import Sampling, TensorSpec, sample
from trainers.engines.native import NativeEngine, own_copy, share_parameters
from trainers.refit import refit

PROMPTS = [[2, 3], [4], [5, 6, 7, 8], [9, 10], [4]]
SEEDS = [11, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.tiny_model())


def test_rows_do_not_depend_on_the_size_of_a_batch(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny.tiny_model(), dtype=torch.float32)
    large, small = (NativeEngine(model, tokenizer, max_batch_size=size) for size in (64, 2))
    sampling = Sampling(max_new_tokens=8, ignore_eos=True)
    right = [completion.tokens for completion in large.generate(PROMPTS, sampling, SEEDS)]
    assert [completion.tokens for completion in small.generate(PROMPTS, sampling, SEEDS)] == right


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


def test_experts_are_taken_under_their_names_in_memory_or_in_files_not_both(tokenizer):
    right = build_hf("qwen3_moe")
    in_memory = {name: p.detach() for name, p in right.named_parameters()}
    in_files = file_names(in_memory.items())
    layer = "model.layers.0.mlp.experts"
    assert f"{layer}.gate_up_proj" in in_memory and f"{layer}.3.up_proj.weight" in in_files

    def specs(tensors):
        return {name: TensorSpec(tuple(x.shape), x.dtype) for name, x in tensors.items()}

    for version, sent in enumerate((in_memory, in_files, in_memory), 1):
        engine = NativeEngine(build_hf("qwen3_moe").requires_grad_(False), tokenizer, own_weights=True)
        for parameter in engine.parameters.values():
            parameter.zero_()
        engine.sleep()
        engine.wake("weights")
        engine.begin_update(version, specs(sent))
        assert engine.put(list(sent.items())[::-1]) == sum(p.nbytes for p in right.parameters())
        engine.end_update()
        assert all(engine.parameters[name].equal(p) for name, p in in_memory.items())

    mixed = specs(in_memory | {name: x for name, x in in_files.items() if name.startswith(layer)})
    with pytest.raises(ValueError, match=f"unknown: .'{layer}.down_proj'"):
        engine.begin_update(4, mixed)
    narrow = specs(in_files) | {f"{layer}.3.up_proj.weight": TensorSpec((80, 32), torch.float32)}
    with pytest.raises(ValueError, match=rf"{layer}.3.up_proj.weight must be \(40, 32\), got \(80, 32\)"):
        engine.begin_update(4, narrow)
    with pytest.raises(ValueError, match=rf"missing: .'{layer}.3.up_proj.weight'., unknown: ..$"):
        engine.begin_update(4, specs({n: x for n, x in in_files.items() if n != f"{layer}.3.up_proj.weight"}))


def test_refit_moves_nothing_where_storage_is_shared_and_only_trained_layers_elsewhere(tokenizer):
    whole = tiny.policy()
    assert refit(whole, NativeEngine(share_parameters(whole.model, torch.float32), tokenizer), 1) == 0
    cut = tiny.policy(num_layers_unfrozen=1, dtype=torch.bfloat16)
    trained = sum(p.numel() for p in cut.model.parameters() if p.requires_grad)
    engine = NativeEngine(share_parameters(cut.model, torch.bfloat16), tokenizer)
    for version in (1, 2):  # the half-precision copies are made anew, whatever they held
        with torch.no_grad():
            for parameter in cut.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter))
        assert refit(cut, engine, version) == 2 * trained
        fresh = share_parameters(cut.model, torch.bfloat16).state_dict()
        assert all(torch.equal(fresh[name], tensor) for name, tensor in engine.model.state_dict().items())


def test_weights_of_its_own_are_given_up_in_sleep_and_come_with_the_next_refit(tokenizer):
    policy, sampling = tiny.policy(), Sampling(max_new_tokens=4, ignore_eos=True)
    model = own_copy(load_model(tiny.tiny_model()), torch.device("cpu"), torch.float32)
    engine = NativeEngine(model, tokenizer, own_weights=True)
    assert engine.capabilities().can_sleep
    held = lambda: sum(p.untyped_storage().nbytes() for p in model.parameters())  # noqa: E731
    total = held()
    assert refit(policy, engine, 1) == total
    right = engine.generate(PROMPTS, sampling, SEEDS)
    engine.sleep()
    assert held() == 0
    for part in ("weights", "kv"):
        engine.wake(part)
    with pytest.raises(RuntimeError, match="given up in sleep"):
        engine.generate(PROMPTS, sampling, SEEDS)
    assert refit(policy, engine, 1) == held() == total
    assert engine.generate(PROMPTS, sampling, SEEDS) == right
    engine.sleep(keep_weights=True)
    for part in ("weights", "kv"):
        engine.wake(part)
    assert engine.generate(PROMPTS, sampling, SEEDS) == right


def test_a_copy_in_half_precision_computes_as_transformers_own():
    """Rotary frequencies stay float32."""
    ours = own_copy(load_model(tiny.tiny_model()), torch.device("cpu"), torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tiny.tiny_model(), dtype=torch.bfloat16).eval()
    ids = torch.arange(24).view(2, 12) % 16
    assert ours(input_ids=ids).logits.equal(theirs(input_ids=ids).logits)
    assert ours.model.rotary_emb.inv_freq.dtype == torch.float32
