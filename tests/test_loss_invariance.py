"""However an optimizer step is cut and laid out, it is the same step: loss, raw gradients and metrics.

`outcome(setting, cut)` is one step of one setting (loss, critic, trunk) under one cut (rows, tokens, packing, order,
padding), before any clipping. Every cut is held against the plainest one: all sequences at once, right-padded.
NeMo-RL #212, verl #6957, OpenRLHF #1216, TRL #3021.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests import tiny
from trainers.batching import count
from trainers.policy.hf import HFPolicy
from trainers.rollout import RolloutBatch
from trainers.value import ScalarHead
from trainers.value.hf import LocalValue

CPU = torch.device("cpu")
LENGTHS = ((2, 4), (3, 1), (1, 9), (2, 3), (4, 2), (1, 1), (6, 5), (2, 7))  # the longest of 11, in all 53 tokens


@dataclass(frozen=True)
class Setting:
    type: str = "ppo"
    aggregation: str = "token_mean"
    critic: str = "shared"  # a head trained with the policy; "local": a critic's own step
    layers: int = -1  # trained ones; fewer than all: over a trunk whose output the batch keeps


@dataclass(frozen=True)
class Cut:
    rows: int = 8
    max_tokens: int | None = None
    packing: bool = False
    order: tuple[int, ...] = tuple(range(8))
    longer: bool = False  # one more sequence, longer than all others, of which no token is trained

    def __str__(self) -> str:
        size = f"{self.rows}rows" if self.max_tokens is None else f"{self.max_tokens}tokens"
        flags = [name for name in ("packing", "longer") if getattr(self, name)]
        return "-".join([size, *flags] + ["shuffled"] * (self.order != Cut.order))


@dataclass
class Outcome:
    loss: float
    gradients: dict[str, Tensor]
    sums: dict[str, Tensor]


SHUFFLED = (5, 2, 7, 0, 3, 6, 1, 4)
PLAIN = Cut()
CUTS = [
    Cut(1), Cut(2), Cut(3), Cut(order=SHUFFLED), Cut(3, order=SHUFFLED, longer=True), Cut(1, longer=True),
    Cut(max_tokens=11), Cut(max_tokens=30), Cut(max_tokens=30, longer=True), Cut(max_tokens=1000, order=SHUFFLED),
    Cut(1, packing=True), Cut(3, packing=True), Cut(packing=True), Cut(packing=True, order=SHUFFLED, longer=True),
    Cut(max_tokens=11, packing=True), Cut(max_tokens=30, packing=True, longer=True),
]  # fmt: skip
SETTINGS = [
    Setting(kind, aggregation)
    for kind in ("ppo", "gspo", "reinforce")
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm")
] + [Setting(layers=1), Setting(critic="local"), Setting(critic="local", layers=1)]


def head() -> ScalarHead:
    """A value head away from its zeros, the same every time."""
    made, draw = ScalarHead(64), torch.Generator().manual_seed(1)
    with torch.no_grad():
        made.linear.weight.normal_(generator=draw)
    return made


@functools.cache
def policy(layers: int, packing: bool) -> HFPolicy:
    made = tiny.policy(layers, packing=packing)
    made.heads["critic"] = head()
    return made


@functools.cache
def critic(layers: int, packing: bool) -> LocalValue:
    cfg = replace(tiny.config().value, num_layers_unfrozen=layers, packing=packing)
    made = LocalValue(tiny.tiny_model(), cfg, device=CPU, dtype=torch.float32, score_batch=8)
    made.head.load_state_dict(head().state_dict())
    return made


def cut_to(part: HFPolicy | LocalValue, cut: Cut) -> None:
    part.cfg = replace(part.cfg, train_micro_batch_size=cut.rows, max_tokens_per_micro_batch=cut.max_tokens)
    if isinstance(part, HFPolicy):
        part.cfg.logprob_batch_size = cut.rows
    else:
        part.score_batch = cut.rows


@functools.cache
def scored_rollout(layers: int) -> RolloutBatch:
    batch = tiny.rollout(LENGTHS)
    made = policy(layers, packing=False)
    cut_to(made, PLAIN)
    scored = made.score(batch, {"old_logprobs", "ref_logprobs"})
    moved = torch.where(batch.mask, 0.3 * torch.randn(batch.tokens.numel()), 0.0)  # some ratios are clipped
    return batch.update(**scored, **{"old_logprobs": scored["old_logprobs"] + moved} if False else scored).update(
        old_logprobs=scored["old_logprobs"] + moved, ref_logprobs=scored["ref_logprobs"] + 0.5 * moved
    )


def minibatch(layers: int, cut: Cut) -> RolloutBatch:
    batch = scored_rollout(layers).select(cut.order)
    return count(with_longer(batch) if cut.longer else batch)
