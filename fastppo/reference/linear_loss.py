"""The definition of `fastppo.linear_loss` in plain PyTorch: `linear_logprob`, then loss_fn of the rows that count."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastppo.reference.linear_logprob import linear_logprob


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_fn: Callable[[Tensor, Tensor | None, dict[str, Tensor]], tuple[Tensor, Tensor]],
    *,
    rows: dict[str, Tensor] | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ignore_index: int = -100,
    **head: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(loss, metrics, logprobs, entropy); see `fastppo.linear_loss`."""
    targets = targets.long()
    selected = targets != ignore_index
    if mask is not None:
        selected = selected & (mask != 0)
    logprobs, entropy = linear_logprob(
        hidden, weight, torch.where(selected, targets, ignore_index), ignore_index=ignore_index, **head
    )
    chosen = selected.flatten()
    given = {name: x.reshape(-1, *x.shape[targets.dim() :])[chosen] for name, x in (rows or {}).items()}
    given["mask"] = chosen[chosen]
    if cu_seqlens is not None:
        given["cu_seqlens"] = F.pad(chosen.cumsum(0), (1, 0))[cu_seqlens.long()]
    loss, metrics = loss_fn(logprobs[selected], None if entropy is None else entropy[selected], given)
    return loss, metrics, logprobs.detach(), None if entropy is None else entropy.detach()
