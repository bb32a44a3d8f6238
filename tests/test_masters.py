"""Trained parameters in bfloat16: float32 masters beside them, gradients summed in float32, storage shared as it is."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests import tiny
from tests.test_arithmetic import accepted, refused
from tests.test_loss_invariance import LONGER, SHUFFLED, Cut, Setting, assert_same, outcome
from tests.test_offload import equal, snapshot
from tests.test_policy import loss, prepared
from tests.test_ppo import LOCAL, lines, small
from trainers.backbone import name_of, pick_param_dtype
from trainers.batching import count
from trainers.config import LossConfig, OptimizerConfig, PeftConfig, SchedulerConfig
from trainers.engines import Sampling
from trainers.engines.native import NativeEngine
from trainers.losses import PolicyLoss, ValueLoss
from trainers.masters import Masters
from trainers.optim import Optimizer, step_all
from trainers.policy.hf import HFPolicy
from trainers.ppo import PPOTrainer
from trainers.refit import refit
from trainers.reinforce import ReinforceTrainer
from trainers.run import TrainingError
from trainers.settings import load_config
from trainers.value.hf import LocalValue

CPU, HALF = torch.device("cpu"), torch.bfloat16
SETTINGS = {"policy__dtype": "bfloat16", "policy__param_dtype": "bfloat16"}


def policy(num_layers_unfrozen=-1, **options):
    return tiny.policy(num_layers_unfrozen, HALF, param_dtype="bfloat16", **options)


def critic(**options):
    cfg = replace(tiny.config(value__mode="local").value, param_dtype="bfloat16", **options)
    torch.manual_seed(0)
    value = LocalValue(tiny.tiny_model(), cfg, device=CPU, dtype=HALF, score_batch=3)
    nn.init.normal_(value.head.linear.weight)
    return value


def stored(values):
    masters, parameter = Masters(), nn.Parameter(values.clone())
    masters.store(parameter, CPU, HALF)
    return masters, parameter


def test_masters_follow_a_float32_adamw_that_gets_the_same_gradients():
    draw = torch.Generator().manual_seed(0)
    plain = nn.Parameter(torch.randn(40, 3, generator=draw))
    masters, parameter = stored(plain.detach())
    place = parameter.data_ptr()
    how = OptimizerConfig(lr=0.01, weight_decay=0.1), SchedulerConfig(warmup_steps=3)
    optimizers = [Optimizer([plain], *how), Optimizer([parameter], *how, masters)]
    for _ in range(5):
        gradient = torch.randn(40, 3, generator=draw).to(HALF)
        plain.grad = gradient.float()
        (parameter * gradient).sum().backward()
        assert parameter.grad is None and torch.equal(masters.of(parameter).grad, plain.grad)
        reports = [step_all({"it": optimizer})["it"] for optimizer in optimizers]
        assert reports[0] == reports[1] and reports[0]["grad_norm"] > 1  # clipped
        assert torch.equal(masters.of(parameter), plain)
        assert torch.equal(parameter, plain.to(HALF)) and parameter.dtype == HALF
        assert parameter.data_ptr() == place and masters.of(parameter).grad is None


def test_steps_below_bfloat16s_resolution_add_up():
    """Next to 1/64 its numbers are 2**-14 apart below, so a step of 1e-6 is lost and 100 of them are not."""
    masters, parameter = stored(torch.full((4,), 1 / 64))
    rounded = nn.Parameter(torch.full((4,), 1 / 64, dtype=HALF))
    ours = Optimizer([parameter], OptimizerConfig(lr=1e-6), SchedulerConfig(warmup_steps=0), masters)
    plain = torch.optim.AdamW([rounded], lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(100):
        rounded.grad = torch.ones_like(rounded)
        plain.step()
        parameter.sum().backward()
        step_all({"it": ours})
    assert torch.equal(rounded, torch.full((4,), 1 / 64, dtype=HALF))
    assert masters.of(parameter).tolist() == pytest.approx([1 / 64 - 1e-4] * 4, rel=1e-4)
    assert torch.equal(parameter, torch.full((4,), 1 / 64 - 2 * 2**-14, dtype=HALF))


def test_masters_start_as_loaded_and_parameters_as_their_roundings():
    right = dict(AutoModelForCausalLM.from_pretrained(tiny.tiny_model(), dtype=torch.float32).named_parameters())
    for unfrozen, names in ((-1, set(right)), (1, {name for name in right if ".layers.1." in name})):
        mine = policy(unfrozen)
        trained = mine.trained()
        assert trained.keys() == names
        assert all(torch.equal(values, right[name]) for name, values in trained.items())
        for name, parameter in mine.model.named_parameters():
            assert parameter.dtype == HALF and torch.equal(parameter, right[name].to(HALF))
        assert any(not torch.equal(right[name], right[name].to(HALF).float()) for name in names)


def test_a_pass_needs_no_autocast():
    for mine, needed in ((policy(), False), (tiny.policy(dtype=HALF), True)):
        seen = []
        layer = mine.model.model.layers[0]
        layer.register_forward_pre_hook(lambda *_, seen=seen: seen.append(torch.is_autocast_enabled("cpu")))
        mine.train_step(prepared(mine), loss())
        assert len(seen) == 2 and set(seen) == {needed}


@pytest.mark.parametrize("critic", ["shared", "local"])
def test_gradients_are_summed_in_float32_in_whatever_order(critic):
    """Sequence by sequence each gradient is rounded to bfloat16 in the same way; their sums are not."""
    setting = Setting(param_dtype="bfloat16", critic=critic)
    right = outcome(setting, Cut(1))
    assert all(gradient.dtype == torch.float32 for gradient in right.gradients.values())
    for order in (SHUFFLED, LONGER):
        assert_same(outcome(setting, Cut(1, order=order)), right, str(order))
    whole = outcome(setting, Cut())  # eight sequences in a pass: rounded once instead of eight times
    for name, gradient in right.gradients.items():
        assert (whole.gradients[name] - gradient).abs().max() < 0.03 * gradient.abs().max(), name
    assert whole.loss == pytest.approx(right.loss, rel=1e-3)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    config = LlamaConfig.from_pretrained(tiny.tiny_model())
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(folder)
    return folder


def gradients_of(mine, weight_grad_into, min_new_tokens=0):
    """By name, the sums of an optimizer step's gradients, in micro-batches of two sequences."""
    mine.cfg = replace(mine.cfg, train_micro_batch_size=2)
    batch = count(tiny.rollout())
    batch.update(**mine.score(batch, {"old_logprobs"}))
    policy_loss = PolicyLoss(LossConfig(), temperature=1.0, norm_length=4, min_new_tokens=min_new_tokens, stop_ids=(1,))
    given = []

    def wrapped(hidden, weight, rows, bias, into):
        given.append(into)
        return policy_loss(hidden, weight, rows, bias, into if weight_grad_into else None)

    mine.gradients(batch, wrapped)
    master = mine.masters.of(mine.head.weight)
    assert all(into is (None if master is mine.head.weight else master.grad) for into in given) and len(given) == 2
    found = {name: mine.masters.of(p).grad for name, p in mine.model.named_parameters()}
    assert all(p.grad is None for p in mine.masters.pairs)
    mine.optimizers["actor"].zero_grad()
    return found


@pytest.mark.parametrize(("min_new_tokens", "limit"), [(0, 1e-6), (2, 2**-7)])
def test_the_output_layers_gradient_goes_straight_into_its_master(min_new_tokens, limit):
    """A micro-batch's is one product, rounded to bfloat16 either way. With min_new_tokens it is the sum of two, which
    autograd makes in bfloat16."""
    mine = policy()
    with_into, without = (gradients_of(mine, into, min_new_tokens) for into in (True, False))
    assert with_into.keys() == without.keys()
    for name, gradient in without.items():
        largest = float(gradient.abs().max())
        assert (with_into[name] - gradient).abs().max() <= (limit if name == "lm_head.weight" else 1e-6) * largest > 0


def test_a_tied_weight_gathers_the_embeddings_gradient_and_the_output_layers(tied):
    """In float32, where without `weight_grad_into` autograd adds the two in bfloat16."""
    cfg = replace(tiny.config().policy, num_layers_unfrozen=-1)
    truth, half = (
        HFPolicy(tied, replace(cfg, param_dtype=name_of(d)), device=CPU, dtype=d) for d in (torch.float32, HALF)
    )
    name = "model.embed_tokens.weight"
    assert half.head.weight is half.model.get_parameter(name) and len(half.masters.pairs) == len(truth.trained())
    right, got, added = gradients_of(truth, True)[name], gradients_of(half, True)[name], gradients_of(half, False)[name]
    largest = float(right.abs().max())
    assert (got - right).abs().max() < 0.03 * largest and (added - got).abs().max() < 2**-7 * largest
    assert not torch.equal(added, got)


def test_gradient_checkpointing_changes_no_bit():
    gradients = []
    for mine in (policy(), policy(gradient_checkpointing=True)):
        mine.gradients(prepared(mine), loss())
        gradients.append([master.grad for master in mine.masters.pairs.values()])
    assert len(gradients[0]) > 10 and all(map(torch.equal, *gradients))


@pytest.mark.parametrize("num_layers_unfrozen", [-1, 1])
def test_the_engine_shares_every_parameter_and_a_refit_moves_nothing(num_layers_unfrozen):
    mine = policy(num_layers_unfrozen)
    engine = NativeEngine(mine.engine_model(HALF), mine.tokenizer)
    places = {name: p.data_ptr() for name, p in mine.model.named_parameters()}
    assert {spec.dtype for spec in mine.manifest().values()} == {HALF}
    batch, sampling = prepared(mine), Sampling(6, ignore_eos=True)
    assert refit(mine, engine, 1) == 0
    before = engine.generate([[4, 5]], sampling, [0])[0]
    for _ in range(3):
        mine.train_step(batch, loss())
    assert refit(mine, engine, 2) == 0
    after = engine.generate([[4, 5]], sampling, [0])[0]
    assert before.logprobs != after.logprobs and after.weight_version == 2
    for name, parameter in engine.parameters.items():
        assert parameter.data_ptr() == places[name] == mine.model.get_parameter(name).data_ptr()


@pytest.mark.parametrize("num_layers_unfrozen", [-1, 1])
def test_a_reference_equals_the_first_policy_and_swapping_it_in_leaves_the_masters(num_layers_unfrozen):
    copied, swapped = (policy(num_layers_unfrozen, reference=kind) for kind in ("auto", "cpu_offload"))
    batch = prepared(copied)
    assert torch.equal(batch.ref_logprobs, batch.old_logprobs)
    for _ in range(3):
        masters = {name: values.clone() for name, values in swapped.trained().items()}
        got, right = (p.score(tiny.rollout(), {"old_logprobs", "ref_logprobs"}) for p in (swapped, copied))
        assert equal(got, right) and torch.equal(got["ref_logprobs"], batch.ref_logprobs)
        assert equal(swapped.trained(), masters)
        for each in (copied, swapped):
            each.train_step(batch, loss())
        assert equal(swapped.trained(), copied.trained()) and equal(snapshot(swapped), snapshot(copied))
    assert (got["old_logprobs"] - batch.ref_logprobs).abs().max() > 1e-3


def test_a_step_without_a_finite_gradient_leaves_parameters_and_masters():
    mine = policy()
    parameters, masters = snapshot(mine), {name: values.clone() for name, values in mine.trained().items()}
    report = mine.train_step(prepared(mine, advantages=torch.full((22,), math.nan)), loss())
    assert report.optimizers["actor"]["skipped"] == 1.0
    assert equal(snapshot(mine), parameters) and equal(mine.trained(), masters)
    assert not mine.optimizers["actor"].adamw.state
    assert all(master.grad is None for master in mine.masters.pairs.values())
    report = mine.train_step(prepared(mine), loss())
    assert report.optimizers["actor"]["skipped"] == 0.0 and not equal(mine.trained(), masters)


def test_masters_and_moments_wait_outside_and_come_back(other_sign):
    stay, leave = policy(), policy(offload_optimizer=True)
    batch = prepared(stay)
    count_of = len(leave.masters.pairs)
    for step in range(3):
        before = len(other_sign)
        leave.offload()
        leave.offload()
        assert len(other_sign) - before == count_of * (1 if step == 0 else 4)  # two moments and a step count each
        master = next(iter(leave.masters.pairs.values()))
        assert torch.equal(-master, next(iter(stay.masters.pairs.values())))
        for each in (stay, leave):
            each.train_step(batch, loss())
    assert equal(leave.trained(), stay.trained()) and equal(snapshot(leave), snapshot(stay))
    leave.offload()
    resumed = policy()
    leave.masters.bring_back()
    resumed.load_state_dict(copy.deepcopy(stay.state_dict()))
    assert equal(resumed.trained(), stay.trained()) and equal(snapshot(resumed), snapshot(stay))


def test_a_critic_of_its_own_waits_outside_with_its_masters_and_resumes(other_sign, tmp_path):
    stay, leave = critic(), critic(offload=True)
    batch, value_loss = count(tiny.rollout()), ValueLoss(tiny.config().value_loss_fn)
    assert len(stay.masters.pairs) > 5 and stay.head.linear.weight.dtype == torch.float32
    for _ in range(3):
        leave.offload()
        got, right = leave.infer(batch).result(), stay.infer(batch).result()
        assert torch.equal(got[0], right[0]) and got[0].any()
        for each in (stay, leave):
            each.train_step(batch, value_loss)
    values = [[v.masters.of(p) for p in v.model.parameters()] for v in (stay, leave)]
    assert all(map(torch.equal, *values))
    stay.save(tmp_path / "critic")
    resumed = critic()
    resumed.load(tmp_path / "critic")
    resumed.load_state_dict(copy.deepcopy(stay.state_dict()))
    for each in (stay, resumed):
        each.train_step(batch, value_loss)
    assert all(map(torch.equal, values[0], [resumed.masters.of(p) for p in resumed.model.parameters()]))
    assert all(map(torch.equal, stay.model.parameters(), resumed.model.parameters()))


def test_adapters_stay_float32_over_a_base_in_the_compute_dtype():
    mine = tiny.policy(dtype=HALF, peft=PeftConfig(enabled=True, dim=4))
    assert mine.param_dtype == torch.float32 and not mine.masters.pairs and mine.backbone.mixed
    for parameter in mine.model.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else HALF)


def test_the_export_is_what_generated(tmp_path):
    mine = policy()
    mine.train_step(prepared(mine), loss())
    mine.save(tmp_path / "policy")
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == "bfloat16"
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert equal({name: p.detach() for name, p in reloaded.named_parameters()}, snapshot(mine))


def test_what_auto_means_and_what_is_refused():
    cuda = torch.device("cuda")
    assert pick_param_dtype("auto", HALF, cuda, "policy") == HALF
    assert pick_param_dtype("auto", torch.float32, cuda, "policy") == torch.float32
    assert pick_param_dtype("auto", HALF, CPU, "policy") == torch.float32
    assert pick_param_dtype("float32", HALF, cuda, "policy") == torch.float32
    with pytest.raises(ValueError, match="value.param_dtype=bfloat16 needs policy.dtype=bfloat16: .* is float32 here"):
        pick_param_dtype("bfloat16", torch.float32, CPU, "value")
    half = ("policy.dtype=bfloat16", "policy.param_dtype=bfloat16")
    accepted(*half)
    accepted(*half, "value.mode=local", "value.param_dtype=float32")
    assert refused("policy.dtype=float32", half[1]) == (
        "policy.param_dtype=bfloat16 needs policy.dtype=bfloat16: parameters are multiplied as stored"
    )
    assert "adapters are float32" in refused(*half, "policy.peft.enabled=true")
    assert "value.mode=shared" in refused(half[0], "value.param_dtype=bfloat16")
    head_alone = refused(half[0], "value.mode=local", "value.param_dtype=bfloat16", "value.num_layers_unfrozen=0")
    assert "trains the float32 head alone" in head_alone


def test_a_resume_is_bit_for_bit_and_keeps_to_what_was_stored(tmp_path):
    half = {**SETTINGS, "value__mode": "local", "value__param_dtype": "bfloat16", **LOCAL}
    half["ppo__max_num_steps"] = 3
    whole = PPOTrainer(small(tmp_path / "whole", **half))
    whole.fit()
    PPOTrainer(small(tmp_path / "broken", **half | {"ppo__max_num_steps": 2})).fit()
    with pytest.raises(TrainingError, match="these settings change what is trained: policy.param_dtype"):
        PPOTrainer(small(tmp_path / "broken", **half | {"policy__param_dtype": "float32"}))
    # As a GPU's run writes it, where auto means bfloat16.
    config = tmp_path / "broken" / "checkpoints" / "step_2" / "config.yaml"
    text = config.read_text().replace("param_dtype: bfloat16", "param_dtype: auto")
    config.write_text(text)
    resumed = PPOTrainer(small(tmp_path / "broken", **half | {k: "auto" for k in half if k.endswith("param_dtype")}))
    assert resumed.param_dtypes == {"policy": "bfloat16", "value": "bfloat16"} and resumed.progress.step == 2
    resumed.fit()
    assert lines(tmp_path / "broken") == lines(tmp_path / "whole")
    assert equal(resumed.policy.trained(), whole.policy.trained())
    assert equal(snapshot(resumed.policy), snapshot(whole.policy))
    assert all(map(torch.equal, resumed.value.model.parameters(), whole.value.model.parameters()))
    assert all(row["perf/refit_bytes"] == 0 for row in lines(tmp_path / "broken"))


def test_a_checkpoint_of_parameters_stored_otherwise_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="were stored in bfloat16, .*float32: set policy.param_dtype=bfloat16"):
        tiny.policy(dtype=HALF).load_state_dict(policy().state_dict())


@pytest.mark.slow
def test_it_learns_as_float32_does(tmp_path):
    options = {"logger__run_dir": tmp_path, "reinforce__max_num_steps": 70, **SETTINGS}
    ReinforceTrainer(tiny.config("reinforce", **options)).fit()
    rewards = [row["critic/score/mean"] for row in lines(tmp_path)]
    assert sum(rewards[:3]) / 3 < 0.15 and sum(rewards[-3:]) / 3 > 0.8


def test_recipes_on_a_gpu_share_storage_by_default():
    config = load_config("ppo_qwen3_reasoning_gym")
    assert (config.policy.dtype, config.policy.param_dtype) == ("bfloat16", "auto")
