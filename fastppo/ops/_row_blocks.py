"""How the rows of [..., V] tensors lie in memory, for kernels that take them where they are."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Row r lies at (r // inner) * outer_stride + (r % inner) * inner_stride elements from the first."""

    inner: int
    outer_stride: int
    inner_stride: int


def rows_of(x: Tensor) -> Rows:
    """Of a tensor with at most two leading dimensions."""
    if x.dim() == 1:
        return Rows(1, 0, 0)
    if x.dim() == 2:
        return Rows(max(x.shape[0], 1), 0, x.stride(0))
    return Rows(max(x.shape[1], 1), x.stride(0), x.stride(1))


def for_blocks(call: Callable[..., None], *tensors: Tensor) -> None:
    """Calls call(*blocks, first row, rows) for parts of [..., V] tensors with at most two leading dimensions."""
    first, pending = 0, [tensors]
    while pending:
        blocks = pending.pop()
        if blocks[0].dim() > 3:
            try:
                blocks = tuple(x.view(-1, *x.shape[-2:]) for x in blocks)
            except RuntimeError:
                pending += reversed(list(zip(*(x.unbind(0) for x in blocks), strict=True)))
                continue
        count = blocks[0].shape[:-1].numel()
        if count:
            call(*blocks, first, count)
        first += count


def unit_columns(x: Tensor) -> Tensor:
    """A row's columns are neighbours; a copy where they were not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
