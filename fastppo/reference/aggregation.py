"""What the losses of `reference/` share: sums over tokens and sequences, and their division by global counts.

Sums over a sequence run in float64 in the order of its tokens, so they do not depend on what else is in the batch, nor
on padding against packing.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.packing import segment_ids


class Sums(NamedTuple):
    total: Tensor  # float64 scalar: the loss before its normaliser
    scale: Tensor  # float64 scalar: the normaliser
    metrics: Tensor  # [K] float64
    nll_total: Tensor | None = None  # the same two of the NLL term, which is divided by its own count
    nll_scale: Tensor | None = None


@dataclass(frozen=True)
class Sequences:
    """Which sequence each token belongs to. offsets and ids are None where a flat batch came without cu_seqlens."""

    selected: Tensor
    offsets: Tensor | None = None  # [number + 1] int64
    ids: Tensor | None = None  # [tokens] int64

    @classmethod
    def of(cls, selected: Tensor, cu_seqlens: Tensor | None) -> "Sequences":
        if cu_seqlens is not None:
            return cls(selected, cu_seqlens.long(), segment_ids(cu_seqlens, selected.numel()))
        if selected.dim() == 2:
            rows, length = selected.shape
            index = torch.arange(rows + 1, device=selected.device)
            return cls(selected, index * length, index[:-1, None].expand(rows, length).reshape(-1))
        return cls(selected)

    def sum(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """[number] float64: sum over each sequence's tokens in `where` (default: the selected)."""
        assert self.offsets is not None and self.ids is not None
        x = torch.where(self.selected if where is None else where, x, 0).double().flatten()
        total: Tensor = _SegmentSum.apply(x, self.offsets, self.ids)  # type: ignore[no-untyped-call]
        return total

    def mean(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """x's shape and dtype: each token gets the mean over its sequence; 0 where a sequence has none."""
        return self.spread(self.sum(x, where) / self.lengths(where).clamp_min(1), x)

    def lengths(self, where: Tensor | None = None) -> Tensor:
        return self.sum(torch.ones_like(self.selected, dtype=torch.float64), where)

    def spread(self, per_sequence: Tensor, like: Tensor) -> Tensor:
        """like's shape and dtype: each token gets its sequence's number."""
        assert self.offsets is not None and self.ids is not None
        per_token: Tensor = _Spread.apply(per_sequence, self.offsets, self.ids)  # type: ignore[no-untyped-call]
        return per_token.view(like.shape).to(like.dtype)

    def count(self) -> Tensor:
        """Sequences with at least one selected token; 0 where sequences are unknown."""
        if self.ids is None:
            return torch.zeros((), dtype=torch.float64, device=self.selected.device)
        return (self.lengths() > 0).sum(dtype=torch.float64)


def aggregate(
    loss: Tensor,
    selected: Tensor,
    sequences: Sequences,
    aggregation: str,
    norm: float | None,
    num_tokens: float | Tensor | None,
    num_seqs: float | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(sum over the selected tokens, normaliser), both float64 scalars."""
    if aggregation == "seq_mean_token_mean":
        loss = loss * sequences.spread(1 / sequences.lengths().clamp_min(1), loss)
    total = torch.where(selected, loss, 0.0).sum(dtype=torch.float64)
    if aggregation == "token_mean":
        return total, reciprocal(selected.sum() if num_tokens is None else num_tokens, loss)
    scale = reciprocal(sequences.count() if num_seqs is None else num_seqs, loss)
    if aggregation == "token_sum_norm":
        assert norm is not None
        scale = scale / norm
    return total, scale


def normalised(sums: Sums) -> Tensor:
    loss = sums.total * sums.scale
    if sums.nll_total is not None:
        assert sums.nll_scale is not None
        loss = loss + sums.nll_total * sums.nll_scale
    return loss


def reciprocal(count: float | Tensor, like: Tensor) -> Tensor:
    """1/count on the device, 0 for a count of 0, without reading it on the host."""
    if isinstance(count, Tensor):
        count = count.double()  # a count on the CPU is a scalar to every device, without a copy that would wait
    else:
        count = torch.full((), float(count), dtype=torch.float64, device=like.device)
    return torch.where(count > 0, 1 / count, 0.0)


class _SegmentSum(torch.autograd.Function):
    """Sums over segments, each in the order of its tokens: index_add would add in any order on a GPU.

    The derivative is _Spread, whose derivative this is.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        return torch.segment_reduce(x[:, None], "sum", offsets=offsets, axis=0, unsafe=True, initial=0)[:, 0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Spread.apply(grad, *ctx.saved_tensors), None, None  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(per_segment: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        return per_segment.index_select(0, ids)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SegmentSum.apply(grad, *ctx.saved_tensors), None, None  # type: ignore[no-untyped-call]
