"""The losses as the policy and the critic call them, where the output head lives.

`rows` is the RolloutBatch of the selected tokens alone: every [N] field below is one trained token. Losses come
divided by the optimizer step's counts, so the gradients of micro-batches are summed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastppo
from trainers.config import LossConfig, ValueLossConfig
from trainers.config_algorithm import IS_BOUNDS
from trainers.rollout import RolloutBatch


@dataclass
class StepLoss:
    loss: Tensor  # scalar
    metrics: dict[str, Tensor]  # vectors to be added over micro-batches


FIELDS = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "values", "returns")


@dataclass
class SelectedRows:
    """The selected tokens of a micro-batch, back to back. N tokens, B sequences."""

    targets: Tensor  # [N] int64
    cu_seqlens: Tensor  # [B + 1]
    num_tokens: int
    num_seqs: int
    fields: dict[str, Tensor]  # [N] each, those that are known: see FIELDS
    positive: Tensor | None = None  # [N] bool: of a response whose raw reward is above 0
    num_nll_tokens: int = 0  # of the optimizer step's tokens those of such responses
    turn_positions: Tensor | None = None  # [N] int64, on the CPU: place of each token in its turn, for min_new_tokens

    @classmethod
    def of(cls, batch: RolloutBatch, selected: Tensor, device: torch.device) -> "SelectedRows":
        assert batch.num_tokens is not None and batch.num_seqs is not None, "batching.count() sets the counts"
        per_sequence = torch.zeros(len(batch), dtype=torch.int64).index_add(0, batch.sequence_ids, batch.mask.long())
        known = {name: value for name in FIELDS if (value := getattr(batch, name)) is not None}
        positive = torch.zeros(len(batch)) if batch.raw_reward is None else batch.raw_reward
        return cls(
            targets=batch.tokens[selected].to(device),
            cu_seqlens=F.pad(per_sequence.cumsum(0), (1, 0)).to(device),
            num_tokens=batch.num_tokens,
            num_seqs=batch.num_seqs,
            num_nll_tokens=batch.num_nll_tokens or 0,
            positive=(positive > 0)[batch.sequence_ids[selected]].to(device),
            fields={name: value[selected].to(device) for name, value in known.items()},
            turn_positions=batch.turn_positions[selected],
        )


class KLCoefficient(Protocol):
    coef: float  # may change from step to step; see trainers.rewards.KLController


def scored(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    early: Tensor,
    *,
    stop_ids: Sequence[int],
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    weight_grad_into: Tensor | None = None,
    vocab: fastppo.VocabShard | None = None,
    reduce_dhidden: Literal["all_reduce", "reduce_scatter", "none"] = "all_reduce",
) -> fastppo.LogprobOutput:
    """`fastppo.linear_logprob`, but the rows `early` [N] bool (on the CPU) are of the distribution without `stop_ids`.

    What `min_new_tokens` samples: a bias of -inf deletes a column. Differentiable, and without the logits of all rows.
    """
    options = {
        "temperature": temperature,
        "softcap": softcap,
        "weight_grad_into": weight_grad_into,
        "memory": "recompute",
        "vocab": vocab,
        "reduce_dhidden": reduce_dhidden,
    }
    if not stop_ids or not early.any():
        return fastppo.linear_logprob(hidden, weight, targets, bias=bias, **options)
    removed = weight.new_zeros(weight.shape[0]) if bias is None else bias
    start, end = (0, weight.shape[0]) if vocab is None else (vocab.start, vocab.end)
    here = [i - start for i in stop_ids if start <= i < end]
    removed = removed.index_fill(0, torch.tensor(here, dtype=torch.int64, device=weight.device), -torch.inf)
    order = torch.cat([early.nonzero(), (~early).nonzero()]).squeeze(-1)
    first, rest = order.to(weight.device).tensor_split([int(early.sum())])
    parts = (
        fastppo.linear_logprob(hidden[first], weight, targets[first], bias=removed, **options),
        fastppo.linear_logprob(hidden[rest], weight, targets[rest], bias=bias, **options),
    )
    back = order.argsort().to(weight.device)
    return fastppo.LogprobOutput(*(torch.cat(part)[back] for part in zip(*parts, strict=True)))


class PolicyLoss:
    """`__call__(hidden [N, D], weight [V, D], rows) -> StepLoss`: `fastppo.linear_ppo_loss`, chunk by chunk.

    With `min_new_tokens` the log-probs come first, since those of a turn's first tokens are without `stop_ids`.
    Backward adds the weight's gradient to `weight_grad_into`, float32 [V, D], if that is given, and not to the weight.
    `vocab`: the rows of the weight, where each rank has a part of them; what becomes of hidden's gradient then is
    `reduce_dhidden`, see fastppo.linear_logprob.
    """

    def __init__(
        self,
        loss_fn: LossConfig,
        *,
        temperature: float,
        norm_length: float,
        softcap: float | None = None,
        kl: KLCoefficient | None = None,
        min_new_tokens: int = 0,
        stop_ids: Sequence[int] = (),
    ):
        self.loss_fn, self.kl, self.temperature, self.softcap = loss_fn, kl, temperature, softcap
        self.min_new_tokens, self.stop_ids = min_new_tokens, stop_ids
        self.norm = norm_length if loss_fn.norm_length is None else loss_fn.norm_length

    @property
    def ratio_bounds(self) -> tuple[float, float] | None:
        """Between which a token's own ratio is not clipped; None where the loss clips something else, or nothing."""
        low, high = self.loss_fn.ratio_clip_min, self.loss_fn.ratio_clip_max
        return (1 - low, 1 + (low if high is None else high)) if self.loss_fn.type == "ppo" else None

    @property
    def is_bounds(self) -> tuple[float, float]:
        cfg = self.loss_fn.importance_sampling
        low, high = IS_BOUNDS[cfg.type]
        return (low if cfg.min is None else cfg.min, high if cfg.max is None else cfg.max)

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        rows: SelectedRows,
        bias: Tensor | None = None,
        weight_grad_into: Tensor | None = None,
        vocab: fastppo.VocabShard | None = None,
        reduce_dhidden: Literal["all_reduce", "reduce_scatter", "none"] = "all_reduce",
    ) -> StepLoss:
        cfg, correction = self.loss_fn, self.loss_fn.importance_sampling
        kl_coef = 0.0 if cfg.use_kl_in_reward else self.kl.coef if self.kl else cfg.reference_policy_kl_penalty
        corrected, nll = correction.type != "none", cfg.positive_example_nll_weight
        old = None if cfg.force_on_policy_ratio else rows.fields["old_logprobs"]
        advantages = rows.fields["advantages"]
        head = {
            "bias": bias,
            "temperature": self.temperature,
            "softcap": self.softcap,
            "weight_grad_into": weight_grad_into,
            "vocab": vocab,
            "reduce_dhidden": reduce_dhidden,
        }
        options = {
            "loss_type": cfg.type,
            "clip_eps": cfg.ratio_clip_min,
            "clip_eps_high": cfg.ratio_clip_max,
            "dual_clip": cfg.ratio_clip_c,
            "ent_coef": cfg.entropy_bonus,
            "ref_logprobs": rows.fields["ref_logprobs"] if kl_coef else None,
            "kl_coef": kl_coef,
            "kl_type": cfg.reference_policy_kl_type,
            "kl_grad": cfg.reference_policy_kl_gradient,
            "rollout_logprobs": rows.fields["rollout_logprobs"] if corrected else None,
            "is_correction": correction.type if corrected else None,
            "is_bounds": self.is_bounds if corrected else None,
            "nll_coef": nll,
            "nll_mask": rows.positive if nll else None,
            "num_nll_tokens": rows.num_nll_tokens if nll else None,
            "cu_seqlens": rows.cu_seqlens,
            "aggregation": cfg.aggregation,
            "norm": self.norm if cfg.aggregation == "token_sum_norm" else None,
            "num_tokens": rows.num_tokens,
            "num_seqs": rows.num_seqs,
        }
        if self.min_new_tokens and self.stop_ids:
            assert rows.turn_positions is not None
            early = rows.turn_positions < self.min_new_tokens
            logprobs, entropy = scored(hidden, weight, rows.targets, early, stop_ids=self.stop_ids, **head)
            loss, metrics = fastppo.ppo_loss(logprobs, old, advantages, entropy=entropy, **options)
        else:
            loss, metrics, logprobs, _ = fastppo.linear_ppo_loss(
                hidden, weight, rows.targets, old, advantages, num_rows=rows.targets.numel(), **head, **options
            )
        return StepLoss(loss, {"actor": metrics, **ratio_error(logprobs, rows)})


class ValueLoss:
    """`__call__(values [N], rows) -> StepLoss`: `fastppo.value_loss`, a token mean."""

    def __init__(self, value_loss_fn: ValueLossConfig):
        self.cfg = value_loss_fn

    def __call__(self, values: Tensor, rows: SelectedRows) -> StepLoss:
        output = fastppo.value_loss(
            values,
            rows.fields["values"],
            rows.fields["returns"],
            clip_eps=self.cfg.cliprange,
            num_tokens=rows.num_tokens,
            num_seqs=rows.num_seqs,
        )
        return StepLoss(self.cfg.scale * output.loss, {"critic": output.metrics})


class JointLoss:
    """The policy's loss plus that of a value head on the same hidden states (a shared critic)."""

    def __init__(self, policy: PolicyLoss, value: ValueLoss, head: nn.Module, *, coef: float, detach_trunk: bool):
        self.policy, self.value, self.head, self.coef, self.detach_trunk = policy, value, head, coef, detach_trunk

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        rows: SelectedRows,
        bias: Tensor | None = None,
        weight_grad_into: Tensor | None = None,
    ) -> StepLoss:
        actor = self.policy(hidden, weight, rows, bias, weight_grad_into)
        critic = self.value(self.head(hidden.detach() if self.detach_trunk else hidden), rows)
        return StepLoss(actor.loss + self.coef * critic.loss, actor.metrics | critic.metrics)


@torch.no_grad()
def ratio_error(logprobs: Tensor, rows: SelectedRows) -> dict[str, Tensor]:
    """|ratio - 1| over the tokens, its sum and their number, [2] float64, and its maximum; and the same sum of k3.

    In the first minibatch of a rollout it is how far the trainer's log-probs are from those it scored a moment ago. k3,
    ratio - 1 - log ratio, estimates the KL of the policy that sampled to the one that is trained.
    """
    moved = (logprobs - rows.fields["old_logprobs"]).double()
    error, k3 = moved.expm1().abs(), moved.expm1() - moved
    count, largest = error.new_tensor(error.numel()), error.max() if error.numel() else error.new_zeros(())
    return {
        "ratio_error": torch.stack([error.sum(), count]),
        "ratio_error_max": largest,
        "k3": torch.stack([k3.sum(), count]),
    }
