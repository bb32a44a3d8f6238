"""What the memory options of the trainers free on a GPU, and that numbers and storage stay as they are."""

import copy
import gc
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests import tiny
from tests.test_policy import loss, prepared
from tests.test_ppo import LOCAL, lines, small
from trainers.backbone import pick_device
from trainers.batching import count
from trainers.config import PeftConfig
from trainers.engines import Sampling
from trainers.engines.native import NativeEngine
from trainers.losses import ValueLoss
from trainers.policy.hf import HFPolicy
from trainers.ppo import PPOTrainer
from trainers.refit import refit
from trainers.value.hf import LocalValue

pytestmark = pytest.mark.gpu

SLACK = 4 * 2**20  # bytes: the allocator's rounding, rotary tables and a few small tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """6 layers of 512 by 2048, 25 million parameters: weights outweigh everything else that these tests hold."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def workspaces(folder):
    """cuBLAS takes memory of torch's allocator at its first products of a thread and keeps it: before anyone counts."""
    policy, value = policy_of(folder), critic_of(folder)
    policy.train_step(prepared(policy), loss())
    value.train_step(count(tiny.rollout()), ValueLoss(tiny.config().value_loss_fn))


def policy_of(folder, dtype=torch.bfloat16, num_layers_unfrozen=-1, **options):
    cfg = replace(copy.deepcopy(tiny.config().policy), num_layers_unfrozen=num_layers_unfrozen, **options)
    return HFPolicy(folder, cfg, device=pick_device("cuda"), dtype=dtype)


def critic_of(folder, **options):
    cfg = replace(copy.deepcopy(tiny.config(value__mode="local").value), **options)
    torch.manual_seed(0)
    value = LocalValue(folder, cfg, device=pick_device("cuda"), dtype=torch.bfloat16, score_batch=4)
    torch.nn.init.normal_(value.head.linear.weight)
    return value


def allocated():
    gc.collect()
    return torch.cuda.memory_allocated()


def bytes_of(parameters):
    return sum(p.numel() * p.element_size() for p in parameters)


def snapshot(model):
    return [p.detach().cpu() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("num_layers_unfrozen", [-1, 2])
def test_a_reference_on_the_cpu_takes_no_memory_and_gives_the_copys_numbers(folder, num_layers_unfrozen):
    start = allocated()
    swapped = policy_of(folder, num_layers_unfrozen=num_layers_unfrozen, reference="cpu_offload")
    held = bytes_of(swapped.model.parameters()) + bytes_of(swapped.masters.pairs.values())
    assert allocated() - start < held + SLACK
    assert all(p.is_pinned() for p in (*swapped.reference.initial, *swapped.reference.waiting))
    copied = policy_of(folder, num_layers_unfrozen=num_layers_unfrozen)
    batch = prepared(copied)
    for _ in range(2):
        copied.train_step(batch, loss())
    with torch.no_grad():
        for mine, theirs in zip(swapped.model.parameters(), copied.model.parameters(), strict=True):
            mine.copy_(theirs)
    before, places = snapshot(swapped.model), [p.data_ptr() for p in swapped.model.parameters()]
    held = allocated()
    torch.cuda.reset_peak_memory_stats()
    got = swapped.score(tiny.rollout(), {"old_logprobs", "ref_logprobs"})
    assert torch.cuda.max_memory_allocated() - held < 32 * 2**20  # activations of 22 tokens: no second model
    right = copied.score(tiny.rollout(), {"old_logprobs", "ref_logprobs"})
    assert torch.equal(got["ref_logprobs"], right["ref_logprobs"])
    assert (got["ref_logprobs"] - got["old_logprobs"]).abs().max() > 1e-3
    assert same(snapshot(swapped.model), before) and [p.data_ptr() for p in swapped.model.parameters()] == places
    with pytest.raises(KeyError), swapped.reference.active():
        raise KeyError
    assert same(snapshot(swapped.model), before)


def test_bfloat16_parameters_take_six_bytes_loaded_and_eighteen_in_a_step_and_never_move(folder):
    start = allocated()
    torch.cuda.reset_peak_memory_stats()
    policy = policy_of(folder, reference="cpu_offload")
    numbers = sum(p.numel() for p in policy.model.parameters())
    assert policy.param_dtype == torch.bfloat16 and len(policy.masters.pairs) == len(list(policy.model.parameters()))
    assert torch.cuda.max_memory_allocated() - start < (2 + 4) * numbers + SLACK  # never the float32 model beside them
    engine = NativeEngine(policy.engine_model(torch.bfloat16), policy.tokenizer)
    places = {name: p.data_ptr() for name, p in policy.model.named_parameters()}
    batch = prepared(policy)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        policy.train_step(batch, loss())
    # Weights, masters, moments, gradients; 50 MB of bfloat16 gradients would be seen.
    assert torch.cuda.max_memory_allocated() - start < (2 + 4 + 8 + 4) * numbers + 32 * 2**20
    assert allocated() - start < (2 + 4 + 8) * numbers + SLACK
    assert refit(policy, engine, 1) == 0
    for name, parameter in policy.model.named_parameters():
        assert parameter.data_ptr() == places[name] == engine.parameters[name].data_ptr()
        assert torch.equal(parameter, policy.masters.of(parameter).to(torch.bfloat16))


def test_an_engine_over_swapped_storage_refuses_and_goes_on_afterwards(folder):
    policy = policy_of(folder, torch.float32, reference="cpu_offload")
    engine = NativeEngine(policy.engine_model(torch.float32), policy.tokenizer)
    right = engine.generate([[4, 5]], Sampling(4, ignore_eos=True), [0])
    with policy.reference.active(), pytest.raises(RuntimeError, match="inside a reference pass"):
        engine.generate([[4, 5]], Sampling(4, ignore_eos=True), [0])
    assert engine.generate([[4, 5]], Sampling(4, ignore_eos=True), [0]) == right


def test_offloaded_masters_and_moments_free_twelve_bytes_a_parameter_and_come_back_bit_for_bit(folder):
    policy = policy_of(folder, offload_optimizer=True)
    batch, adamw = prepared(policy), policy.optimizers["actor"].adamw
    policy.train_step(batch, loss())
    before = {p: {name: value.cpu() for name, value in state.items()} for p, state in adamw.state.items()}
    places, held = [p.data_ptr() for p in policy.model.parameters()], allocated()
    policy.offload()
    trained = sum(p.numel() for p in policy.model.parameters())
    assert abs(held - allocated() - (4 + 8) * trained) < SLACK
    assert all(master.is_pinned() for master in policy.masters.pairs.values())
    assert all(value.is_pinned() for state in adamw.state.values() for value in state.values())
    policy.optimizers["actor"].step()  # without a gradient AdamW touches nothing: the state has only travelled
    assert abs(held - allocated()) < SLACK
    for p, state in adamw.state.items():
        assert all(value.is_cuda and torch.equal(value.cpu(), before[p][name]) for name, value in state.items())
    assert [p.data_ptr() for p in policy.model.parameters()] == places


def test_an_offloaded_critic_leaves_nothing_behind_and_comes_back_bit_for_bit(folder):
    start = allocated()
    value = critic_of(folder, offload=True)
    batch, value_loss = count(tiny.rollout()), ValueLoss(tiny.config().value_loss_fn)
    value.train_step(batch, value_loss)
    right, weights = value.infer(batch).result(), snapshot(value.model)
    value.offload()
    assert allocated() - start < SLACK
    got = value.infer(batch).result()
    assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True)) and same(snapshot(value.model), weights)
    value.offload()
    assert math.isfinite(value.train_step(batch, value_loss).optimizers["critic"]["grad_norm"])
    assert not same(snapshot(value.model), weights)


def test_gradient_checkpointing_lowers_the_peak(folder):
    peaks = []
    for checkpointing in (False, True):
        policy = policy_of(folder, gradient_checkpointing=checkpointing)
        batch = prepared(policy)
        long = count(tiny.rollout(((8, 1000),) * 4))
        long.update(**policy.score(long, {"old_logprobs"}))
        policy.train_step(batch, loss())  # moments exist
        held = allocated()
        torch.cuda.reset_peak_memory_stats()
        policy.train_step(long, loss())
        peaks.append(torch.cuda.max_memory_allocated() - held)
        del policy
    gradients = 4 * 25_000_000
    assert peaks[1] - gradients < (peaks[0] - gradients) / 2


def test_lora_holds_one_model_in_bfloat16_its_adapters_and_the_engines_merged_matrices(folder):
    start = allocated()
    policy = policy_of(folder, peft=PeftConfig(enabled=True, dim=8))
    parameters = dict(policy.model.named_parameters())
    adapters = sum(p.numel() for p in parameters.values() if p.requires_grad)
    base = sum(p.numel() for p in parameters.values()) - adapters
    assert allocated() - start < 2 * base + 4 * adapters + SLACK
    batch = prepared(policy)
    assert torch.equal(batch.ref_logprobs, batch.old_logprobs)
    for _ in range(3):
        policy.train_step(batch, loss())
    after = policy.score(tiny.rollout(), {"ref_logprobs"})["ref_logprobs"]
    assert torch.equal(after, batch.ref_logprobs)
    engine = NativeEngine(policy.engine_model(torch.bfloat16), policy.tokenizer)
    adapted = 2 * sum(engine.parameters[name].numel() for name in policy.adapters.adapted)
    assert refit(policy, engine, 1) == adapted
    assert allocated() - start < 2 * base + 16 * adapters + adapted + 2 * SLACK


def test_a_run_with_every_option(tmp_path):
    options = {
        "cluster__device": "cuda",
        "policy__dtype": "bfloat16",
        "policy__logprob_batch_size": 8,
        "policy__offload_optimizer": True,
        "policy__gradient_checkpointing": True,
        "value__mode": "local",
        "value__offload": True,
        "value__gradient_checkpointing": True,
        "ppo__max_num_steps": 2,
        **LOCAL,
    }
    for name, own in (("swap", {"policy__reference": "cpu_offload"}), ("lora", {"policy__peft__enabled": True})):
        PPOTrainer(small(tmp_path / name, **options, **own)).fit()
        rows = lines(tmp_path / name)
        assert len(rows) == 2 and rows[0]["actor/first_ratio_err_max"] < 0.05
        assert all(row["actor/skipped_steps"] == 0 and row["critic/skipped_steps"] == 0 for row in rows)
