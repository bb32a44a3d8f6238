"""The definition of `fastppo.linear_ppo_loss` in plain PyTorch: `linear_logprob`, then `ppo_loss`."""

from typing import Any

import torch
from torch import Tensor

from fastppo.reference.linear_logprob import linear_logprob
from fastppo.reference.ppo_loss import ppo_loss

HEAD = ("bias", "temperature", "softcap", "ignore_index", "with_entropy", "logits_dtype")


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(loss, metrics, logprobs, entropy); see `fastppo.linear_ppo_loss`. `options` are the head's and ppo_loss's."""
    head = {name: options.pop(name) for name in HEAD if name in options}
    targets = targets.long()
    selected = targets != ignore_index
    if mask is not None:
        selected = selected & (mask != 0)
    logprobs, entropy = linear_logprob(
        hidden, weight, torch.where(selected, targets, ignore_index), ignore_index=ignore_index, **head
    )
    loss, metrics = ppo_loss(logprobs, old_logprobs, advantages, mask=selected, entropy=entropy, **options)
    return loss, metrics, logprobs.detach(), None if entropy is None else entropy.detach()
