"""The definition of `fastppo.value_loss` in plain differentiable PyTorch: any derivative, float64 too."""

import torch
from torch import Tensor

from fastppo.dtypes import accumulator
from fastppo.reference.aggregation import Sequences, Sums, aggregate, normalised


def value_loss(values: Tensor, old_values: Tensor | None, returns: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """(loss, metrics) with the arguments of `fastppo.value_loss`."""
    sums = value_sums(values, old_values, returns, **options)  # type: ignore[arg-type]
    return normalised(sums).to(accumulator(values, old_values, returns)), sums.metrics


def value_sums(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    *,
    mask: Tensor | None = None,
    clip_eps: float | None = None,
    cu_seqlens: Tensor | None = None,
    aggregation: str = "token_mean",
    norm: float | None = None,
    num_tokens: float | Tensor | None = None,
    num_seqs: float | Tensor | None = None,
) -> Sums:
    dtype = accumulator(values, old_values, returns)
    selected = torch.ones_like(values, dtype=torch.bool) if mask is None else mask != 0
    sequences = Sequences.of(selected, cu_seqlens)

    def read(x: Tensor) -> Tensor:
        return torch.where(selected, x.to(dtype), 0.0)

    v, ret = read(values), read(returns).detach()
    error = v - ret
    loss = 0.5 * error * error
    clipped = torch.zeros_like(selected)
    if clip_eps is not None:
        assert old_values is not None
        old = read(old_values).detach()
        moved = v - old
        bounded = old + moved.clamp(-clip_eps, clip_eps) - ret
        other = 0.5 * bounded * bounded
        # Inside the range old + (v - old) is v but for its rounding, which may not decide.
        clipped = (moved.abs() > clip_eps) & (other > loss)
        loss = torch.where(clipped, other, loss)

    wide = error.detach().double()
    ret = ret.double()
    counts = (selected, loss, clipped, -wide, wide.square(), ret, ret.square())
    # In the order of VALUE_METRICS.
    metrics = torch.stack([torch.where(selected, x.detach(), 0).sum(dtype=torch.float64) for x in counts])
    total, scale = aggregate(loss, selected, sequences, aggregation, norm, num_tokens, num_seqs)
    return Sums(total, scale, metrics)
