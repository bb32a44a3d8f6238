"""What waits in the CPU's memory: the reference, optimizer moments, a local critic. Numbers stay the same, bit for bit.

A run on a CPU refuses these options; the parts take them, so that the bookkeeping is tested without a GPU. There the
"other device" is one whose numbers have the other sign: what is used before it has been brought back cannot pass.
"""

import copy
import weakref
from dataclasses import replace

import pytest
import torch

from tests import tiny
from tests.test_policy import loss, prepared
from tests.test_ppo import LOCAL, lines, small
from trainers import offload
from trainers import trainer as trainer_module
from trainers.arithmetic import ConfigError, check
from trainers.batching import count
from trainers.dry_run import dry_run
from trainers.engines import Sampling
from trainers.engines.native import NativeEngine
from trainers.losses import ValueLoss
from trainers.ppo import PPOTrainer
from trainers.refit import Refit
from trainers.value.hf import LocalValue

MOVED = "policy.reference=cpu_offload", "policy.offload_optimizer=true", "value.offload=true"


def snapshot(policy):
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def equal(mine, theirs):
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(("num_layers_unfrozen", "dtype"), [(-1, torch.float32), (1, torch.bfloat16)])
def test_a_swapped_in_reference_gives_the_frozen_copys_numbers(num_layers_unfrozen, dtype):
    copied, swapped = (tiny.policy(num_layers_unfrozen, dtype, reference=kind) for kind in ("auto", "cpu_offload"))
    batch = prepared(copied)
    for policy in (copied, swapped):
        for _ in range(2):
            policy.train_step(batch, loss())
    before, places = snapshot(swapped), [p.data_ptr() for p in swapped.model.parameters()]
    right = copied.score(tiny.rollout(), {"old_logprobs", "ref_logprobs"})
    got = swapped.score(tiny.rollout(), {"old_logprobs", "ref_logprobs"})
    assert equal(got, right)
    assert (got["ref_logprobs"] - got["old_logprobs"]).abs().max() > 1e-3
    assert equal(snapshot(swapped), before) and [p.data_ptr() for p in swapped.model.parameters()] == places
    with swapped.reference.active() as (top, head):
        assert top is swapped.backbone.top and head is swapped.head  # no second model


def test_emptied_parameters_stay_themselves_with_their_hooks():
    """Views of one storage, a tensor without elements, and a hook on a gradient's accumulator, as megatron-core's."""
    whole = torch.randn(3, 4)
    parameters = [torch.nn.Parameter(x) for x in (whole, whole[1:], torch.randn(5).bfloat16(), torch.empty(0))]
    values, called = [p.detach().clone() for p in parameters], []
    accumulator = parameters[0].expand_as(parameters[0]).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *gradients: called.append(gradients))
    emptied = offload.Emptied(p.data for p in parameters)
    assert [p.untyped_storage().nbytes() for p in parameters] == [0] * 4
    emptied.restore()
    assert [p.untyped_storage().nbytes() for p in parameters] == [48, 48, 10, 0]
    assert all(map(torch.equal, parameters, values))
    with torch.no_grad():
        parameters[1][0] = 7
    assert bool((parameters[0][1] == 7).all())  # still one storage
    parameters[0].sum().backward()
    assert len(called) == 1
    emptied.restore()  # nothing is left to come back
    assert bool((parameters[0][1] == 7).all())


@pytest.mark.parametrize("when", ["in the pass", "while swapping in"])
def test_the_trained_weights_come_back_from_a_pass_that_raises(when):
    policy = tiny.policy(reference="cpu_offload")
    policy.train_step(prepared(policy), loss())
    before = snapshot(policy)
    if when == "while swapping in":
        policy.reference.initial[3] = torch.zeros(1, 2, 3)
    with pytest.raises(RuntimeError), policy.reference.active():
        assert not equal(snapshot(policy), before)
        raise RuntimeError
    assert equal(snapshot(policy), before)
    NativeEngine(policy.engine_model(torch.float32), policy.tokenizer).generate([[4]], Sampling(1), [0])


def test_no_engine_generates_from_the_references_weights():
    policy = tiny.policy(reference="cpu_offload")
    sharing, own = (NativeEngine(policy.engine_model(t), policy.tokenizer) for t in (torch.float32, torch.bfloat16))
    right = own.generate([[4]], Sampling(3), [0])
    with policy.reference.active():
        with pytest.raises(RuntimeError, match="inside a reference pass"):
            sharing.generate([[4]], Sampling(3), [0])
        assert own.generate([[4]], Sampling(3), [0]) == right
    assert len(sharing.generate([[4]], Sampling(3), [0])) == 1


def test_moments_wait_outside_and_come_back_for_the_step(other_sign):
    stay, leave = tiny.policy(), tiny.policy(offload_optimizer=True)
    batch = prepared(stay)
    places = [p.data_ptr() for p in leave.model.parameters()]
    for step in range(3):
        stay.offload()
        leave.offload()
        leave.offload()  # they are out already: not again
        assert len(other_sign) == 3 * step * len(places)  # two moments and a step count each, none before the first
        stay.train_step(batch, loss())
        leave.train_step(batch, loss())
    assert equal(snapshot(leave), snapshot(stay))
    assert [p.data_ptr() for p in leave.model.parameters()] == places


def test_a_checkpoint_of_moments_that_wait_outside_resumes():
    stay, leave, resumed = tiny.policy(), tiny.policy(offload_optimizer=True), tiny.policy(offload_optimizer=True)
    batch = prepared(stay)
    for policy in (stay, leave):
        policy.train_step(batch, loss())
    moments = [weakref.ref(m) for state in leave.optimizers["actor"].adamw.state.values() for m in state.values()]
    leave.offload()
    assert not any(moment() is not None for moment in moments)  # the device's memory is free
    resumed.offload()
    resumed.load_state_dict(copy.deepcopy(leave.state_dict()))
    for policy in (stay, resumed):
        policy.train_step(batch, loss())
    assert equal(snapshot(resumed), snapshot(stay))


def critic(**options):
    cfg = replace(tiny.config(value__mode="local", value__num_layers_unfrozen=1).value, **options)
    torch.manual_seed(0)
    value = LocalValue(tiny.tiny_model(), cfg, device=torch.device("cpu"), dtype=torch.bfloat16, score_batch=3)
    torch.nn.init.normal_(value.head.linear.weight)
    return value


def test_a_critic_waits_outside_and_comes_back_for_values_and_for_training(other_sign):
    stay, leave = critic(), critic(offload=True)
    parameters = [*leave.model.parameters(), *leave.head.parameters()]
    batch, value_loss = count(tiny.rollout()), ValueLoss(tiny.config().value_loss_fn)
    for step in range(3):
        stay.offload()
        leave.offload()
        assert leave.model.lm_head.weight.sum() == -stay.model.lm_head.weight.sum()
        assert sum(other_sign) >= sum(p.numel() for p in parameters)
        if step != 1:  # training may come first
            got, right = leave.infer(batch).result(), stay.infer(batch).result()
            assert torch.equal(got[0], right[0]) and torch.equal(got[1], right[1]) and got[0].any()
        stay.train_step(batch, value_loss)
        leave.train_step(batch, value_loss)
    for mine, right in zip(parameters, [*stay.model.parameters(), *stay.head.parameters()], strict=True):
        assert torch.equal(mine, right)


def test_a_run_with_everything_outside_is_the_same_run(tmp_path, other_sign, monkeypatch):
    options = {"value__mode": "local", "ppo__max_num_steps": 2, "checkpointing__enabled": False, **LOCAL}
    PPOTrainer(small(tmp_path / "stay", **options)).fit()
    assert not other_sign
    monkeypatch.setattr(trainer_module, "check_device", lambda config, device: None)
    moved = {"policy__offload_optimizer": True, "value__offload": True, "policy__reference": "cpu_offload"}
    PPOTrainer(small(tmp_path / "leave", **options, **moved)).fit()
    assert len(other_sign) > 100 and lines(tmp_path / "leave") == lines(tmp_path / "stay")


def test_they_have_left_before_the_engine_takes_its_memory(tmp_path, monkeypatch):
    options = {"value__mode": "local", "ppo__max_num_steps": 1, "checkpointing__enabled": False, **LOCAL}
    moved = {"policy__offload_optimizer": True, "value__offload": True}
    monkeypatch.setattr(trainer_module, "check_device", lambda config, device: None)
    trainer, left = PPOTrainer(small(tmp_path, **options, **moved)), []
    sent = Refit._send

    def send(self, version):
        left.append((trainer.policy.optimizers["actor"].offloaded, trainer.value.offloaded))
        return sent(self, version)

    monkeypatch.setattr(Refit, "_send", send)
    trainer.fit()
    assert left == [(True, True)] * 2


def test_what_comes_back_for_a_checkpoint_leaves_again(tmp_path, monkeypatch):
    """Validation generates next. Not where the run ends by an error: nothing may hide that."""
    trainer, events = PPOTrainer(small(tmp_path, **LOCAL)), []
    monkeypatch.setattr(trainer_module.checkpoint, "save", lambda *args: events.append("save"))
    monkeypatch.setattr(trainer, "offload", lambda: events.append("offload"))
    for when in ("end", "failure"):
        trainer.progress.step += 1
        trainer.save(when)
    assert events == ["save", "offload", "save"]


def test_on_a_cpu_there_is_nothing_to_relieve():
    config = tiny.config(
        policy__reference="cpu_offload", policy__offload_optimizer=True, value__mode="local", value__offload=True
    )
    right = "\n".join(f"{option} has no effect on a CPU: it frees a GPU's memory" for option in MOVED)
    for refusing in (PPOTrainer, dry_run):
        with pytest.raises(ConfigError) as error:
            refusing(replace(config, cluster=replace(config.cluster, device="cpu")))
        assert str(error.value) == right
    offload.check_device(config, torch.device("cuda"))
    offload.check_device(tiny.config(), torch.device("cpu"))


def test_without_a_reference_there_is_none_to_put_away():
    config = tiny.config(
        policy__reference="cpu_offload",
        ppo__skip_reference_policy_logprobs_calculation=True,
        loss_fn__reference_policy_kl_penalty=0.0,
    )
    with pytest.raises(ConfigError, match="policy.reference=cpu_offload has no effect with ppo.skip_reference_policy"):
        check(config)


@pytest.mark.parametrize("key", ["offload", "gradient_checkpointing"])
def test_a_shared_critic_has_nothing_of_its_own(key):
    with pytest.raises(ConfigError, match=f"value.{key}=true has no effect with value.mode=shared"):
        check(tiny.config(**{f"value__{key}": True}))
