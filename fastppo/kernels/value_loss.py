"""value_loss on a GPU: what csrc/value_loss/value_loss_cpu.cpp computes, in two kernels as `ppo_loss.py`.

Per token, float32 with mask and clipping: 13 bytes read, 4 written.

Legend: N tokens, numbered row by row; a tile is [G, V] of them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton.language as tl
from torch import Tensor

from fastppo.kernels import tiles
from fastppo.kernels.launch import Launcher, jit, let_next_begin, wait_for_previous
from fastppo.kernels.token_blocks import (
    WEIGHT,
    Sequences,
    add,
    add_rows,
    columns8,
    count,
    count_of,
    count_sequences,
    holder,
    layout_of,
    pick,
    place,
    read_flags,
    read_floats,
    scale_of,
    tiles_of,
    walk_of,
)


@jit
def _token_kernel(
    values, old_values, returns, mask, cu_seqlens, tables, kept, partials,
    n: tl.int64, cols: tl.int64, number: tl.int64, values_row: tl.int64, old_row: tl.int64,
    returns_row: tl.int64, mask_row: tl.int64, clip_eps: tl.float32,
    WEIGHTED: tl.constexpr, GRAD: tl.constexpr, STRIDED: tl.constexpr, EXACT: tl.constexpr, GROUPED: tl.constexpr,
    G: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr, TOLD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    let_next_begin(OVERLAP)
    if EXACT:
        n = n // V * V  # so the compiler knows it is
    program, programs = tl.program_id(0), tl.num_programs(0)
    group = tl.arange(0, G)[:, None] * V
    local = group + tl.arange(0, V)[None, :]  # [G, V]
    doubles, ints = tl.zeros([G], tl.float64), tl.zeros([G], tl.int32)
    loss_sum, err_sum, err_square, ret_sum, ret_square, weighted_sum = (
        doubles,
        doubles,
        doubles,
        doubles,
        doubles,
        doubles,
    )
    tokens, clips = ints, ints

    for i in tl.range(0, tiles_of(n, program, programs, G * V, TOLD), num_stages=STAGES):
        start = (program + i * programs).to(tl.int64) * (G * V)
        here = local < n - start
        # A load per group, not per token.
        near = here
        if GROUPED:
            near = group + tl.zeros([1, V], tl.int32) < n - start
        if EXACT:
            here = near
        selected = here
        if mask is not None:
            selected = here & read_flags(mask, place(start, local, cols, mask_row, STRIDED), near)
        v = read_floats(values, place(start, local, cols, values_row, STRIDED), near)
        v = tl.where(selected, v, 0.0)
        ret = read_floats(returns, place(start, local, cols, returns_row, STRIDED), near)
        ret = tl.where(selected, ret, 0.0)
        error = v - ret
        loss, slope = 0.5 * error * error, error
        if old_values is not None:
            old = read_floats(old_values, place(start, local, cols, old_row, STRIDED), near)
            old = tl.where(selected, old, 0.0)
            moved = v - old
            low, high = moved < -clip_eps, moved > clip_eps
            bounded = old + tl.where(low, -clip_eps, tl.where(high, clip_eps, moved)) - ret
            other = 0.5 * bounded * bounded
            # Inside the range old + (v - old) is v but for its rounding, which may not decide.
            clipped = (low | high) & (other > loss)
            loss = tl.where(clipped, other, loss)
            slope = tl.where(clipped, 0.0, slope)
            clips = count(clips, selected & clipped)
        tokens = count(tokens, selected)
        loss_sum = add(loss_sum, loss)
        wide_error, wide_ret = -error.to(tl.float64), ret.to(tl.float64)
        err_sum, err_square = add(err_sum, wide_error), add(err_square, wide_error * wide_error)
        ret_sum, ret_square = add(ret_sum, wide_ret), add(ret_square, wide_ret * wide_ret)
        if WEIGHTED:
            b = holder(cu_seqlens, start, local, here, cols, number, G * V)
            weight = tl.load(tables + WEIGHT * number + b)
            weighted_sum = add(weighted_sum, tl.where(selected, loss * weight, 0.0))
            slope *= weight
        if GRAD:
            tl.store(kept + start + local, tl.where(selected, slope, 0.0), mask=here)

    row = columns8(
        tokens.to(tl.float64), loss_sum, clips.to(tl.float64), err_sum, err_square, ret_sum, ret_square, weighted_sum
    )
    tl.store(partials + program * 8 + tl.arange(0, 8), tl.sum(row, axis=0))


@jit
def _finish_kernel(
    partials, tables, tokens_tensor, seqs_tensor, loss, metrics, scales,
    programs: tl.int64, number: tl.int64, num_tokens: tl.float64, num_seqs: tl.float64, norm: tl.float64,
    AGGREGATION: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row holds the metrics in their order, and the weighted loss."""
    wait_for_previous(OVERLAP)
    let_next_begin(OVERLAP)
    column = tl.arange(0, 8)
    row = add_rows(partials, programs, 8, ROWS)
    tokens = pick(row, column, 0)
    seqs = count_sequences(tables, number, 1024)
    scale = scale_of(tokens, seqs, num_tokens, num_seqs, norm, tokens_tensor, seqs_tensor, AGGREGATION)
    total = pick(row, column, 7 if AGGREGATION == 1 else 1)
    tl.store(scales, scale.to(tl.float32))
    tl.store(loss, (total * scale).to(tl.float32))
    tl.store(metrics + column, row, mask=column < 7)


_tokens = Launcher(_token_kernel, overlaps=True, early=True)
_finish = Launcher(_finish_kernel, overlaps=True, early=True)


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    num_tokens: Tensor | None,
    num_seqs: Tensor | None,
    aggregation: int,
    numbers: list[float],
    wants_grad: bool,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fills loss, metrics, scales and the gradient kept, as `fastppo/ops/value_loss.py` names them."""
    loss, metrics, scales, kept = outputs
    clip_eps, norm, given_tokens, given_seqs = numbers
    device = values.device
    n, cols = values.numel(), values.shape[-1]
    layout = layout_of((values, old_values, returns, mask), n, cols)
    per_token, rows = layout.tensors, layout.row_strides

    cu, tables, number = None, None, 0
    counted = aggregation > 1 and num_seqs is None and given_seqs < 0
    if (aggregation == 1 or counted) and (cu_seqlens is not None or values.dim() == 2):
        sequences = Sequences(values.shape, cu_seqlens)
        cu, number = sequences.cu_seqlens, sequences.number
        sums = None if mask is None else sequences.new_sums(device)
        sequences.count(per_token[3], sums, rows[3])
        tables = sequences.tables(sums, values, masked=mask is not None)

    tile = tiles.LOSS_TOKENS
    programs, told = walk_of(n, device)
    partials = torch.empty(max(programs, 1), 8, dtype=torch.float64, device=device)
    if programs:
        _tokens(
            programs,
            (*per_token, cu, tables, kept, partials),
            (n, cols, number, *rows, clip_eps),
            (
                aggregation == 1, wants_grad, layout.strided, layout.exact, layout.grouped, tile.groups, tile.vector,
                tile.stages, told,
            ),
            tile.warps,
        )  # fmt: skip
    tokens, tokens_tensor = count_of(given_tokens, num_tokens, device)
    seqs, seqs_tensor = count_of(given_seqs, num_seqs, device)
    _finish(
        1,
        (partials, tables, tokens_tensor, seqs_tensor, loss, metrics, scales),
        (programs, number, tokens, seqs, norm),
        (aggregation, tiles.LOSS_FINISH_ROWS),
        tiles.LOSS_FINISH_WARPS,
    )
