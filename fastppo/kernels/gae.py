"""Triton kernel of gae, for where the extension has no CUDA: see docs/kernels/gae.md.

What a position hands on to the one before it is an affine map of what it gets, c -> f * c + d, and maps are scanned in
parallel: backward in time, within a tile of rows and steps. f < 0 says that the map is closed: c -> d, whatever c was,
and by a select, so that no NaN passes. A program walks its rows in tiles from their end. Where rows are too few to fill
the card, programs own one tile each and there are three launches: for the map of every tile, for what every tile hands
on, and for the answers. Bytes a token: each input read once, each output written once, and in three launches the inputs
once more.

Legend: b sequence, t position, [ROWS, STEPS] a tile; packed sequences are one row.
"""

# What a kernel's parameters are depends on the call.
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo.dtypes import BYTE_FLAGS
from fastppo.kernels.tiles import GAE

Strided = tuple[Tensor, int, int]  # a tensor and its strides of rows and of time

# Parts of the work.
_WHOLE = tl.constexpr(0)  # walks its rows
_MAPS = tl.constexpr(1)  # the map of one tile
_ANSWERS = tl.constexpr(2)  # one tile, given what the one after it hands on


@triton.jit
def _compose(later_f, later_d, f, d):
    """The map (f, d) of what a later one hands on. Factors are float64: powers of one decay round alike wherever they
    are formed, and dozens of roundings of a power of 100 would go into all sums in the same direction."""
    closed = f < 0
    # Factors above 0 stay above 0, as they do along a walk, also when they become float32: 0 * inf would be a NaN.
    product = tl.maximum(f * later_f, tl.minimum(tl.minimum(f, later_f), 1.1754943508222875e-38))
    product = tl.where(later_f < 0, -1.0, product)
    return tl.where(closed, f, product), tl.where(closed, d, f.to(tl.float32) * later_d + d)


@triton.jit
def _compose_both(later_after_f, later_after_d, later_f, later_d, after_f, after_d, f, d):
    """Of each position: the map of all after it, and that together with its own."""
    after_f, after_d = _compose(later_f, later_d, after_f, after_d)
    f, d = _compose(later_f, later_d, f, d)
    return after_f, after_d, f, d


@triton.jit
def _apply(f, d, c):
    return tl.where(f < 0, d, f.to(tl.float32) * c + d)


@triton.jit
def _first(x, i):
    """[ROWS, N] -> [ROWS, 1], the first column."""
    return tl.sum(tl.where(i == 0, x, 0.0), axis=1)[:, None]


@triton.jit
def _load(x, row_stride, time_stride, b, t, inside):
    return tl.load(x + b * row_stride + t * time_stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _flag(x, row_stride, time_stride, b, t, inside, default: tl.constexpr):
    if x is not None:
        flag = (tl.load(x + b * row_stride + t * time_stride, mask=inside, other=0) != 0) & inside
    elif default:
        flag = inside
    else:
        flag = inside & (t < 0)
    return flag


@triton.jit(do_not_specialize=["num_chunks"])
def _scan(summaries, final, final_stride, num_chunks, gamma, CHAINS: tl.constexpr, WINDOW: tl.constexpr):
    """A program for each chain of each row: replaces d of every tile's map by what the tile hands on."""
    b = tl.program_id(0).to(tl.int64) // CHAINS
    i = tl.arange(0, WINDOW)[None, :]
    c = tl.zeros([1, 1], tl.float32)
    if final is not None:
        c += gamma * tl.load(final + b * final_stride).to(tl.float32)
    window = tl.cdiv(num_chunks, WINDOW) - 1
    while window >= 0:
        at = window * WINDOW + i
        inside = at < num_chunks
        there = summaries + ((b * num_chunks + at) * CHAINS + tl.program_id(0) % CHAINS) * 2
        f = tl.load(there, mask=inside, other=1.0).to(tl.float64)
        d = tl.load(there + 1, mask=inside, other=0.0)
        f, d = tl.associative_scan((f, d), 1, _compose, reverse=True)
        handed_on = _apply(f, d, c)
        tl.store(there + 1, handed_on, mask=inside)
        c = _first(handed_on, i)
        window -= 1


@triton.jit
def _chain(after_f, after_d, decay, gamma, x, v, selected, cut):
    """(f, d) of every position, with what is after it at its sequence's end taken in."""
    f = tl.where(selected, tl.where(cut, -1.0, decay), 1.0).to(tl.float64)
    d = tl.where(selected, decay * x + gamma * v, 0.0)
    return _compose(after_f, after_d, f, d)


# Not specialised: a number of tiles that is 1 would not be a number to count with.
@triton.jit(do_not_specialize=["num_rows", "num_seqs", "num_chunks"])
def _gae(
    rewards, rewards_row, rewards_time,
    values, values_row, values_time,
    mask, mask_row, mask_time,
    terminated, terminated_row, terminated_time,
    truncated, truncated_row, truncated_time,
    bootstrap, bootstrap_row, bootstrap_time,
    final, final_stride,
    lam_per_seq, lam_returns_per_seq,
    cu_seqlens,
    advantages, returns, out_row, out_time,
    summaries,
    num_rows, num_steps, num_seqs, num_chunks,
    gamma, lam, lam_returns,
    CHAINS: tl.constexpr, SEARCH: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    PACKED: tl.constexpr = cu_seqlens is not None
    if PART == _WHOLE:
        row = tl.program_id(0).to(tl.int64) * ROWS
        chunk = num_chunks - 1
        stop = -1
    else:
        row = (tl.program_id(0) // num_chunks).to(tl.int64) * ROWS
        chunk = num_chunks - 1 - tl.program_id(0) % num_chunks
        stop = chunk - 1
    b = row + tl.arange(0, ROWS)[:, None]
    in_rows = b < num_rows
    j = tl.arange(0, STEPS)[None, :]

    row_decay = gamma * lam
    row_decay_returns = gamma * lam_returns
    c = tl.zeros([ROWS, 1], tl.float32)
    c_returns = c
    if not PACKED:
        if lam_per_seq is not None:
            row_decay = gamma * tl.load(lam_per_seq + b, mask=in_rows, other=0.0)
        if lam_returns_per_seq is not None:
            row_decay_returns = gamma * tl.load(lam_returns_per_seq + b, mask=in_rows, other=0.0)
        if final is not None:
            c = gamma * _load(final, final_stride, 0, b, b, in_rows)
            c_returns = c
    if PART == _ANSWERS:
        handed_on = summaries + (b * num_chunks + chunk + 1) * CHAINS * 2 + 1
        # Compared as a tile: of two scalars newer interpreters make a number, which is no mask.
        later = in_rows & (tl.zeros([ROWS, 1], tl.int32) + chunk + 1 < num_chunks)
        c = tl.where(later, tl.load(handed_on, mask=later, other=0.0), c)
        if CHAINS == 2:
            c_returns = tl.where(later, tl.load(handed_on + 2, mask=later, other=0.0), c_returns)

    while chunk > stop:
        t = chunk.to(tl.int64) * STEPS + j
        inside = in_rows & (t < num_steps)
        after_f = tl.full([ROWS, STEPS], 1.0, tl.float64)
        after_d = tl.zeros([ROWS, STEPS], tl.float32)
        sequence = b
        decay = row_decay
        decay_returns = row_decay_returns
        if PACKED:
            # The last sequence that begins at or before t.
            in_row = t < num_steps
            sequence = t * 0
            for k in tl.static_range(SEARCH):
                candidate = sequence + (1 << (SEARCH - 1 - k))
                begins = tl.load(cu_seqlens + candidate, mask=candidate < num_seqs, other=0)
                sequence = tl.where((candidate < num_seqs) & (begins <= t), candidate, sequence)
            if lam_per_seq is not None:
                decay = gamma * tl.load(lam_per_seq + sequence, mask=in_row, other=0.0)
            if lam_returns_per_seq is not None:
                decay_returns = gamma * tl.load(lam_returns_per_seq + sequence, mask=in_row, other=0.0)
            last = in_row & (tl.load(cu_seqlens + sequence + 1, mask=in_row, other=0) == t + 1)
            after_f = tl.where(last, -1.0, after_f)
            if final is not None:
                after_d = tl.where(last, gamma * _load(final, final_stride, 0, sequence, t, last), 0.0)

        v = _load(values, values_row, values_time, b, t, inside)
        x = _load(rewards, rewards_row, rewards_time, b, t, inside) - v
        selected = _flag(mask, mask_row, mask_time, b, t, inside, True)
        over = _flag(terminated, terminated_row, terminated_time, b, t, inside, False)
        cut = over
        if truncated is not None:
            cut_off = _flag(truncated, truncated_row, truncated_time, b, t, inside, False)
            cut = over | cut_off
            cut_off = cut_off & selected & (over == 0)
            follows = _load(bootstrap, bootstrap_row, bootstrap_time, sequence, t, cut_off)
            x = tl.where(cut_off, x + gamma * follows, x)

        f, d = _chain(after_f, after_d, decay, gamma, x, v, selected, cut)
        if PART == _MAPS:
            there = summaries + (b * num_chunks + chunk) * CHAINS * 2 + j * 0
            first = in_rows & (j == 0)
            f, d = tl.associative_scan((f, d), 1, _compose, reverse=True)
            tl.store(there, f, mask=first)
            tl.store(there + 1, d, mask=first)
            if CHAINS == 2:
                f, d = _chain(after_f, after_d, decay_returns, gamma, x, v, selected, cut)
                f, d = tl.associative_scan((f, d), 1, _compose, reverse=True)
                tl.store(there + 2, f, mask=first)
                tl.store(there + 3, d, mask=first)
        else:
            f2, d2, f, d = tl.associative_scan((after_f, after_d, f, d), 1, _compose_both, reverse=True)
            advantage = tl.where(cut, x, x + _apply(f2, d2, c))
            c = _first(_apply(f, d, c), j)
            returned = advantage
            if CHAINS == 2:
                f, d = _chain(after_f, after_d, decay_returns, gamma, x, v, selected, cut)
                f2, d2, f, d = tl.associative_scan((after_f, after_d, f, d), 1, _compose_both, reverse=True)
                returned = tl.where(cut, x, x + _apply(f2, d2, c_returns))
                c_returns = _first(_apply(f, d, c_returns), j)
            there = b * out_row + t * out_time
            tl.store(advantages + there, tl.where(selected, advantage, 0.0), mask=inside)
            tl.store(returns + there, tl.where(selected, returned + v, 0.0), mask=inside)
        chunk -= 1


def gae(
    inputs: Sequence[Strided | None],
    lams: tuple[Tensor | None, Tensor | None],
    cu_seqlens: Tensor | None,
    advantages: Strided,
    returns: Strided,
    num_seqs: int,
    num_steps: int,
    gamma: float,
    lam: float,
    lam_returns: float,
    separate_returns: bool,
) -> None:
    """Fills advantages and returns, float32, of the same strides.

    inputs: rewards, values, mask, terminated, truncated, bootstrap values, final values; flags are bytes.
    lams: lam and lam_returns per sequence, [B] float32, contiguous, as cu_seqlens is.
    """
    if num_seqs == 0 or num_steps == 0:
        return
    num_rows = 1 if cu_seqlens is not None else num_seqs
    rows, steps = _tile(num_rows, num_steps, inputs[0])
    blocks, chunks = triton.cdiv(num_rows, rows), triton.cdiv(num_steps, steps)
    chains = 2 if separate_returns else 1
    tensors: list[Tensor | int | None] = []
    for strided in inputs:
        tensors += (None, 0, 0) if strided is None else (_bytes(strided[0]), *strided[1:])
    del tensors[-1]  # final values have one stride
    summaries = None

    def launch(part: Any, programs: int) -> None:
        _gae[(programs,)](
            *tensors,
            *lams,
            cu_seqlens,
            advantages[0],
            returns[0],
            *advantages[1:],
            summaries,
            num_rows,
            num_steps,
            num_seqs,
            chunks,
            gamma,
            lam,
            lam_returns,
            CHAINS=chains,
            SEARCH=(num_seqs - 1).bit_length(),
            PART=part,
            ROWS=rows,
            STEPS=steps,
            num_warps=GAE.warps,
        )

    device = advantages[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if chunks == 1 or blocks >= GAE.programs:
            launch(_WHOLE, blocks)
        else:
            summaries = torch.empty(num_rows * chunks * chains * 2, dtype=torch.float32, device=device)
            launch(_MAPS, blocks * chunks)
            last = None if cu_seqlens is not None else inputs[-1]
            _scan[(num_rows * chains,)](
                summaries,
                *((None, 0) if last is None else last[:2]),
                chunks,
                gamma,
                CHAINS=chains,
                WINDOW=min(triton.next_power_of_2(chunks), GAE.window),
                num_warps=GAE.warps,
            )
            launch(_ANSWERS, blocks * chunks)


def _tile(num_rows: int, num_steps: int, rewards: Strided | None) -> tuple[int, int]:
    """Rows and steps of a tile: along what lies side by side in memory, and no larger than what there is."""
    assert rewards is not None
    side_by_side = rewards[1] == 1 and rewards[2] != 1
    rows, steps = (GAE.rows_side_by_side, GAE.steps_of_those) if side_by_side else (1, GAE.steps)
    short = min(steps, triton.next_power_of_2(num_steps))
    return min(rows * steps // short, triton.next_power_of_2(num_rows)), short


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype in BYTE_FLAGS else x
