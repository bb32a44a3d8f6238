"""The row statistics and the logits' gradient of `logprob` in torch, for what no kernel takes: any device and dtype.

The rows are taken in chunks small enough to stay in cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fastppo.dtypes import accumulator
from fastppo.vocab import FLOOR, NOT_HERE

# Elements per chunk. CPU: a few float32 buffers of 4 MB, which stay in cache. Accelerators: enough to fill them.
_CHUNK_CPU = 1 << 20
_CHUNK_ACCELERATOR = 1 << 24


def stats(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    scalar_temperature: float,
    softcap: float | None,
    ignore_index: int,
    with_entropy: bool,
    start: int,
    used: int,
) -> Tensor:
    """[N, 4] = (m, s - 1, t, zy) of this rank's columns. An ignored row holds (-inf, -1, 0, NOT_HERE) or anything."""
    dtype = accumulator(logits)
    result = torch.zeros(targets.numel(), 4, dtype=dtype, device=logits.device)
    result[:, 0] = -torch.inf
    result[:, 1] = -1
    result[:, 3] = NOT_HERE
    if used == 0:
        return result
    for rows, local, (z,) in _row_chunks(targets != ignore_index, logits[..., :used]):
        x = _softcapped(_take(z, local).to(dtype), softcap)[0]
        m = x.amax(1)
        y, here = _columns(targets[rows], start, used)
        zy = torch.where(here, x.gather(1, y)[:, 0], NOT_HERE)
        divisor = scalar_temperature if temperature is None else temperature[rows].to(dtype)
        d = _differences(x, torch.where(m == -torch.inf, 0.0, m), divisor)
        at_m = d == 0
        e = d.exp().masked_fill_(at_m, 0)  # theirs is 1: counted apart, see vocab.py
        excess = at_m.sum(1) - 1 + _row_sum(e)
        t = _row_sum(e.mul_(d)) if with_entropy else torch.zeros_like(excess)
        result[rows] = torch.stack((m, excess, t, zy), 1)
    return result


def write_dlogits(
    out: Tensor,
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    kept: Tensor,
    upstream: Tensor,
    scalar_temperature: float,
    softcap: float | None,
    ignore_index: int,
    with_entropy: bool,
    start: int,
    used: int,
) -> None:
    """out, which may be the logits themselves, becomes their gradient.

    kept: [N, 4] (m, s - 1, t/s, d_y); upstream: [N, 2], the gradients of logprobs and entropy.
    """
    out[..., used:] = 0
    if used == 0:
        return
    dtype = kept.dtype
    wanted = (targets != ignore_index) & (upstream != 0).any(1)
    for rows, local, (z, dz) in _row_chunks(wanted, logits[..., :used], out[..., :used], zero_last=True):
        x, slope = _softcapped(_take(z, local).to(dtype), softcap)
        m, excess, mean_d, d_y = kept[rows].unbind(1)
        s = 1 + excess
        g_lp, g_h = upstream[rows].unbind(1)
        y, here = _columns(targets[rows], start, used)
        divisor = scalar_temperature if temperature is None else temperature[rows].to(dtype)
        a = torch.where(d_y.isnan(), torch.nan, (g_h * mean_d - g_lp) / (s * divisor))
        at_y = g_lp * -torch.expm1(d_y - excess.log1p())
        d = _differences(x, m, divisor)
        e = d.exp()
        factor = a[:, None]
        if with_entropy:
            factor = d.mul_((-g_h / (s * divisor))[:, None]).add_(factor)
            d_y = d_y.clamp_min(FLOOR)
            at_y = at_y - g_h * d_y.exp() / s * (d_y - mean_d)
        at_y = (at_y / divisor)[:, None]
        if slope is not None:
            factor = factor * slope
            at_y = at_y * slope.gather(1, y)
        # The target's element is computed apart and rounded once, never read back from the logits' dtype.
        block = torch.empty(e.shape, dtype=dz.dtype, device=dz.device) if isinstance(local, Tensor) else dz[local]
        torch.mul(e, factor, out=block)
        block.scatter_(1, y, torch.where(here[:, None], at_y.to(block.dtype), block.gather(1, y)))
        if isinstance(local, Tensor):
            dz.index_copy_(0, local, block)
        elif dz.device.type != "cpu":
            block.masked_fill_(~wanted[rows, None], 0)


def _row_chunks(
    wanted: Tensor, *tensors: Tensor, zero_last: bool = False
) -> Iterator[tuple[slice | Tensor, slice | Tensor, tuple[Tensor, ...]]]:
    """Goes through the rows of [..., V] tensors in chunks: (rows of the whole, rows of the block, the 2-d blocks).

    On a CPU the rows that are not wanted are left out, and zeroed in the last tensor if asked; elsewhere knowing
    them would synchronise, so they come too.
    """
    on_cpu = wanted.device.type == "cpu"
    size = max(1, (_CHUNK_CPU if on_cpu else _CHUNK_ACCELERATOR) // tensors[0].shape[-1])
    first = 0
    for blocks in _blocks(tensors):
        count = blocks[0].shape[0]
        chosen = None
        if on_cpu:
            mask = wanted[first : first + count]
            if not bool(mask.all()):
                chosen = mask.nonzero()[:, 0]
                if zero_last:
                    blocks[-1].index_fill_(0, mask.logical_not().nonzero()[:, 0], 0)
        for i in range(0, count if chosen is None else chosen.numel(), size):
            if chosen is None:
                j = min(i + size, count)
                yield slice(first + i, first + j), slice(i, j), blocks
            else:
                yield chosen[i : i + size] + first, chosen[i : i + size], blocks
        first += count


def _blocks(tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Views [n, V] that cover [..., V] tensors of equal shape in row order: one if their strides allow it."""
    try:
        views = tuple(x.view(-1, x.shape[-1]) for x in tensors)
    except RuntimeError:
        for parts in zip(*(x.unbind(0) for x in tensors), strict=True):
            yield from _blocks(parts)
    else:
        yield views


def _take(block: Tensor, rows: slice | Tensor) -> Tensor:
    # Contiguous: over strided columns a row's sums would depend on how many rows come along.
    return (block.index_select(0, rows) if isinstance(rows, Tensor) else block[rows]).contiguous()


def _columns(targets: Tensor, start: int, used: int) -> tuple[Tensor, Tensor]:
    """Each target's column on this rank, [n, 1] and safe to gather with, and whether it is on this rank at all."""
    y = targets - start
    here = (y >= 0) & (y < used)
    return torch.where(here, y, 0)[:, None], here


def _softcapped(x: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """softcap * tanh(x / softcap) and its slope; x itself, not to be written to, without a softcap."""
    if softcap is None:
        return x, None
    tanh = torch.tanh(x / softcap)
    slope = torch.where(x.isinf(), 1.0, 1 - tanh * tanh)  # -inf stays -inf: no cap, no slope of one
    return torch.where(x.isinf(), torch.where(x < 0, x, torch.nan), tanh.mul_(softcap)), slope


def _differences(x: Tensor, m: Tensor, temperature: float | Tensor) -> Tensor:
    """(x - m) / temperature, exact near the maximum, where x / temperature would round to the size of x."""
    d = x - m[:, None]
    if isinstance(temperature, Tensor):
        d = d.div_(temperature[:, None])
    elif temperature != 1.0:
        d = d.div_(temperature)
    return d.clamp_min_(FLOOR)


def _row_sum(x: Tensor) -> Tensor:
    """Row sums in an order that does not depend on the number of rows: torch cuts a lone row over its threads."""
    if x.shape[0] == 1:
        return torch.cat((x, x)).sum(1)[:1]
    return x.sum(1)
