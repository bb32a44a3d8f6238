"""However an optimizer step is cut and laid out, it is the same step: loss, raw gradients and metrics.

`outcome(setting, cut)` is one step of one setting (loss, critic, trunk) under one cut (rows, tokens, packing, order,
padding), before any clipping. Every cut is held against the plainest one: all sequences at once, right-padded.
tests/test_dist.py does the same over 2 and 4 ranks.
NeMo-RL #212, verl #6957, OpenRLHF #1216, TRL #3021.
"""

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close as close

from tests import tiny
from trainers import dist
from trainers.batching import count
from trainers.batching import part_of as part_of_step
from trainers.config import LossConfig, ValueLossConfig
from trainers.losses import JointLoss, PolicyLoss, ValueLoss
from trainers.policy.hf import HFPolicy
from trainers.rollout import RolloutBatch
from trainers.value import ScalarHead
from trainers.value.hf import LocalValue

# (prompt, response): the longest has 11 tokens, all have 53. The last, of 25, is not trained: it only pads the others.
LENGTHS = ((2, 4), (3, 1), (1, 9), (2, 3), (4, 2), (1, 1), (6, 5), (2, 7), (5, 20))
UNTRAINED = 8


@dataclass(frozen=True)
class Setting:
    type: str = "ppo"
    aggregation: str = "token_mean"
    critic: str = "shared"  # a head trained with the policy; "local": a critic's own step
    layers: int = -1  # trained ones; fewer than all: over a trunk whose output the batch keeps
    param_dtype: str = "float32"

    def __str__(self) -> str:
        more = ["trunk"] * (self.layers > 0) + ["half"] * (self.param_dtype == "bfloat16")
        return "-".join([self.type, self.aggregation, self.critic, *more])


@dataclass(frozen=True)
class Cut:
    rows: int = 9
    max_tokens: int | None = None
    packing: bool = False
    order: tuple[int, ...] = tuple(range(8))

    def __str__(self) -> str:
        size = f"{self.rows} rows" if self.max_tokens is None else f"{self.max_tokens} tokens"
        return f"{size}, {'packed' if self.packing else 'padded'}, {self.order}"


@dataclass
class Outcome:
    loss: float
    gradients: dict[str, Tensor]
    sums: dict[str, Tensor]


PLAIN = Cut()
SHUFFLED = (5, 2, 7, 0, 3, 6, 1, 4)
LONGER = (5, 2, 7, UNTRAINED, 0, 3, 6, 1, 4)
CUTS = [  # together they have every way of cutting, in another order and among longer rows
    Cut(1, order=LONGER), Cut(3, order=SHUFFLED), Cut(max_tokens=30, order=LONGER), Cut(30, packing=True, order=LONGER),
    Cut(max_tokens=30, packing=True),
]  # fmt: skip
MORE_CUTS = [
    Cut(1), Cut(2), Cut(3), Cut(8), Cut(order=SHUFFLED), Cut(order=LONGER), Cut(max_tokens=11), Cut(max_tokens=1000),
    Cut(1, packing=True), Cut(2, packing=True), Cut(max_tokens=11, packing=True), Cut(packing=True, order=SHUFFLED),
]  # fmt: skip
SETTINGS = [
    Setting(kind, aggregation)
    for kind in ("ppo", "gspo", "reinforce")
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm")
] + [Setting(layers=1), Setting(critic="local"), Setting(critic="local", layers=1)]


def random_head(head: ScalarHead) -> ScalarHead:
    """Away from its zeros, under which no gradient would reach what is below it."""
    with torch.no_grad():
        head.linear.weight.normal_(generator=torch.Generator().manual_seed(1))
    return head


@functools.cache
def policy(layers: int, packing: bool, param_dtype: str = "float32") -> HFPolicy:
    made = tiny.policy(layers, getattr(torch, param_dtype), packing=packing, param_dtype=param_dtype)
    made.heads["critic"] = random_head(ScalarHead(64))
    return made


@functools.cache
def critic(layers: int, packing: bool, param_dtype: str = "float32") -> LocalValue:
    cfg = replace(tiny.config().value, num_layers_unfrozen=layers, packing=packing, param_dtype=param_dtype)
    dtype = getattr(torch, param_dtype)
    made = LocalValue(tiny.tiny_model(), cfg, device=torch.device("cpu"), dtype=dtype, score_batch=9)
    random_head(made.head)
    return made


def part_of(setting: Setting, cut: Cut) -> HFPolicy | LocalValue:
    """The policy or the critic that the setting trains, told how to cut."""
    part = (critic if setting.critic == "local" else policy)(setting.layers, cut.packing, setting.param_dtype)
    part.cfg = replace(part.cfg, train_micro_batch_size=cut.rows, max_tokens_per_micro_batch=cut.max_tokens)
    return part


@functools.cache
def rollout(layers: int) -> RolloutBatch:
    """Scored, by a policy that has moved since, so that some ratios are clipped."""
    batch, made = tiny.rollout(LENGTHS), policy(layers, packing=False)
    batch.mask &= batch.sequence_ids != UNTRAINED
    batch.update(**made.score(batch, {"old_logprobs", "ref_logprobs"}))
    moved = torch.where(batch.mask, torch.randn(batch.tokens.numel(), generator=torch.Generator().manual_seed(2)), 0.0)
    return batch.update(old_logprobs=batch.old_logprobs + 0.3 * moved, ref_logprobs=batch.ref_logprobs - 0.1 * moved)


class Summed:
    """A loss that remembers the sum of what it returned."""

    def __init__(self, loss):
        self.loss, self.total = loss, 0.0

    def __call__(self, *args):
        step = self.loss(*args)
        self.total += step.loss.item()
        return step


def loss_of(setting: Setting, part: HFPolicy | LocalValue) -> Summed:
    value = ValueLoss(ValueLossConfig(scale=0.5, cliprange=0.5))
    if setting.critic == "local":
        return Summed(value)
    loss_fn = LossConfig(
        type=setting.type, aggregation=setting.aggregation, entropy_bonus=0.1, use_kl_in_reward=False,
        reference_policy_kl_type="k3",
    )  # fmt: skip
    actor = PolicyLoss(loss_fn, temperature=1.0, norm_length=20)
    return Summed(JointLoss(actor, value, part.heads["critic"], coef=0.3, detach_trunk=False))


def outcome(setting: Setting, cut: Cut) -> Outcome:
    """One optimizer step up to where clipping would start."""
    part = part_of(setting, cut)
    loss = loss_of(setting, part)
    head = part.head if setting.critic == "local" else part.heads["critic"]
    named = dict(part.model.named_parameters()) | {f"head.{name}": p for name, p in head.named_parameters()}
    whole = count(rollout(setting.layers).select(cut.order))
    sums = dist.sum_metrics(part.gradients(part_of_step(whole, torch.tensor(dist.rows(whole.lengths))), loss))
    summed = {name: part.masters.of(p) for name, p in named.items()}
    dist.sum_gradients(summed.values())
    gradients = {name: p.grad for name, p in summed.items() if p.grad is not None}
    for parameter in summed.values():
        parameter.grad = None
    return Outcome(sum(dist.gather(loss.total)), gradients, sums)


def assert_same(got: Outcome, right: Outcome, what: str) -> None:
    """To float32's rounding of the sums they are: an element that cancels is as uncertain as the largest one."""
    assert got.loss == pytest.approx(right.loss, rel=1e-6), what
    assert got.gradients.keys() == right.gradients.keys(), what
    for name, gradient in right.gradients.items():
        largest = float(gradient.abs().max())
        assert largest > 1e-5, name
        close(got.gradients[name], gradient, rtol=1e-5, atol=1e-5 * largest, msg=f"{what}: {name}: ".__add__)
    assert got.sums.keys() == right.sums.keys(), what
    for name, value in right.sums.items():
        close(got.sums[name], value, rtol=1e-6, atol=1e-6, msg=f"{what}: {name}: ".__add__)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_step_is_the_same_under_any_cut(setting):
    right = outcome(setting, PLAIN)
    for cut in CUTS + MORE_CUTS * (setting.aggregation == "seq_mean_token_mean" and setting.type == "ppo"):
        assert_same(outcome(setting, cut), right, str(cut))


@pytest.mark.parametrize("layers", [-1, 1])
def test_scores_are_the_same_under_any_cut_and_stay_in_order(layers):
    def score(cut):
        batch = tiny.rollout(LENGTHS)
        scorer, own = part_of(Setting(layers=layers), cut), part_of(Setting(critic="local", layers=layers), cut)
        scorer.cfg.logprob_batch_size = own.score_batch = cut.rows
        values, next_values = own.infer(batch).result()
        found = scorer.score(batch, {"old_logprobs", "ref_logprobs", "values"})
        return found | {"local values": values, "local next_values": next_values}

    right = score(PLAIN)
    assert ("trunk_hidden" in right) == (layers > 0)
    for cut in CUTS:
        for name, found in score(cut).items():
            close(found, right[name], rtol=1e-5, atol=1e-6, msg=f"{cut}: {name}: ".__add__)
