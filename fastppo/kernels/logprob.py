"""Triton kernels of logprob: row statistics, their combination, and the logits' gradient.

Per row, with x = softcap(logits), m = max x, d = (x - m) / temperature, e = exp(d):

    statistics  (m, s - 1, t, zy):  s = sum e, t = sum e * d, zy = x of the target       one read of the logits
    gradient    e * (a + b * d) * softcap', the target's element apart                   one read, one write

A row is taken in groups of 16 bytes from its first 16-byte boundary on, wherever it starts; the fewer than two groups
of columns before and after them are its edges. A program of the statistics owns a part of one row: all of it where
there are rows enough. Each of its threads sums whole groups in registers; they meet once a tile, for the tile's largest
x, and at the end. Programs are of one warp, which meets without a barrier.

Columns and rows are counted in 32 bits, addresses in 64. Loops whose length is no constant are `while`: of `range`,
Triton's interpreter cannot take a bound from a tensor under numpy 2.4 and later.

Legend: N rows, V columns of this rank, of which `used` are real ids, P parts of a row, R ranks.
"""

# What a kernel's parameters are depends on the call.
# mypy: allow-untyped-defs, allow-incomplete-defs

from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo.kernels import tiles
from fastppo.kernels.launch import Launcher, jit
from fastppo.ops._row_blocks import for_blocks, rows_of, unit_columns

if TYPE_CHECKING:
    from fastppo.ops._logprob_ops import RowOptions

LOG2_E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))
# Stands for -inf in a product with an e of 0: exp(FLOOR) is 0, and 0 * FLOOR too.
FLOOR = tl.constexpr(-1000.0)
# A rank's or part's zy where the target is not among its columns.
NOT_HERE = tl.constexpr(float("inf"))


@triton.jit
def _tanh(x):
    """As tanh of csrc/common/vector_math.h: near 0 an odd polynomial, elsewhere 1 - 2 / (exp(2x) + 1)."""
    size = tl.abs(x)
    square = x * x
    p = square * 0.00232130382 - 0.00837438088
    p = p * square + 0.0217806641
    p = p * square - 0.0539612249
    p = p * square + 0.133333161
    p = p * square - 0.333333343
    near = x + x * square * p
    bounded = tl.where(size > 10.0, 10.0, size)  # 1 - tanh(10) is 4e-9: rounds to 1; NaN stays
    far = 1.0 - 2.0 / (tl.exp2(bounded * (2.0 * LOG2_E)) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _softcapped(x, softcap):
    capped = softcap * _tanh(x / softcap)
    return tl.where(x == -INF, x, tl.where(x == INF, float("nan"), capped))


@triton.jit
def _log1p(x):
    """In float64, for x >= -1: log(1 + x), times what rounding 1 + x took from x."""
    u = 1.0 + x
    exact = (u == 1.0) | (u == INF)
    return tl.where(u == 1.0, x, tl.log(u) * tl.where(exact, 1.0, x / tl.where(exact, 1.0, u - 1.0)))


@triton.jit
def _expm1(x):
    """In float64, for x <= 0: (u - 1) * x / log(u), u = exp(x), where rounding u - 1 cancels."""
    u = tl.exp(x)
    plain = (u == 1.0) | (u < 0.5)
    near = (u - 1.0) * x / tl.log(tl.where(plain, 0.5, u))
    return tl.where(u == 1.0, x, tl.where(u < 0.5, u - 1.0, near))


@triton.jit
def _row(base, row, inner, outer_stride, inner_stride):
    """Where a row starts: rows lie in at most two dimensions, `inner` of them to a step of the outer one."""
    return base + (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride


@triton.jit
def _lead(address, columns, VEC: tl.constexpr):
    """Columns of a row before its first 16-byte boundary, VEC columns to 16 bytes."""
    return tl.minimum((-(address.to(tl.int64) // (16 // VEC)) & (VEC - 1)).to(tl.int32), columns)


@triton.jit
def _edge_columns(index, lead, after):
    """The index-th column outside of the row's groups."""
    return tl.where(index < lead, index, after + index - lead)


@triton.jit
def _load(body, first, count, dtype: tl.constexpr, GROUPS: tl.constexpr, VEC: tl.constexpr):
    """[GROUPS, ...] groups from `first` on as they lie in memory, -inf from `count` on. Of half precision two columns
    stay in one register until they are used: the next tile waits in them while this one is summed."""
    group = first + tl.arange(0, GROUPS)[:, None]
    if VEC == 8:
        words = body.to(tl.pointer_type(tl.int32), bitcast=True) + (group * 4 + tl.arange(0, 4)[None, :])
        # two of -inf
        return tl.load(words, mask=group < count, other=-0x7F0080 if dtype == tl.bfloat16 else -0x3FF0400)
    else:
        return tl.load(body + (group * VEC + tl.arange(0, VEC)[None, :]), mask=group < count, other=-INF)


@triton.jit
def _unpacked(loaded, dtype: tl.constexpr, GROUPS: tl.constexpr, VEC: tl.constexpr):
    if dtype == tl.bfloat16:
        low = (loaded << 16).to(tl.float32, bitcast=True)
        high = (loaded & -65536).to(tl.float32, bitcast=True)
        return tl.join(low, high).reshape(GROUPS, VEC)
    elif dtype == tl.float16:
        low = loaded.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (loaded >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.join(low, high).reshape(GROUPS, VEC)
    else:
        return loaded


@triton.jit
def _add(total, error, x):
    """total + x; what its rounding took goes into `error`: hundreds of equal summands would all be rounded alike."""
    rounded = total + x
    return rounded, error + (x - (rounded - total))


@triton.jit
def _add_tile(x, m, at_m, others, others_error, shifted, shifted_error, to_log2, floor, ENTROPY: tl.constexpr):
    """Adds a tile to the sums for the largest x so far, m: of e = 2^((x - m) * to_log2) at m and elsewhere, apart, as
    in csrc/logprob, and of e * (x - m). Most tiles stay below m."""
    top = tl.max(tl.max(x, 1), 0)  # a NaN in x is not seen here; its e is NaN
    if top >= m:
        reference = tl.where(top == -INF, 0.0, top)
        raised = top > m
        moved = tl.where(raised, m - reference, 0.0)
        scale = tl.exp2(moved * to_log2)
        before = at_m + (others + others_error)
        if ENTROPY:
            shifted = scale * (shifted + shifted_error + tl.maximum(moved, floor) * before)
            shifted_error = tl.zeros_like(shifted_error)
        others = tl.where(raised, scale * before, others)
        others_error = tl.where(raised, 0.0, others_error)
        at_m = tl.where(raised, 0.0, at_m)
        m = top
        d = x - reference
        e = tl.exp2(d * to_log2)
        at_m += tl.sum(tl.where(x == top, e, 0.0), 1)
        e_others = tl.sum(tl.where(x == top, 0.0, e), 1)
    else:
        d = x - m
        e = tl.exp2(d * to_log2)
        e_others = tl.sum(e, 1)
    others, others_error = _add(others, others_error, e_others)
    if ENTROPY:
        shifted, shifted_error = _add(shifted, shifted_error, tl.sum(e * tl.maximum(d, floor), 1))
    return m, at_m, others, others_error, shifted, shifted_error


@triton.jit
def _finish(
    m, excess, t, zy, temperature, used, rows, inside, logprobs, entropy, kept, ENTROPY: tl.constexpr
):  # fmt: skip
    """Writes what forward gives and backward needs, from the statistics of whole rows. `used`: not ignored."""
    m = tl.where(m == -INF, 0.0, m)
    log_s = _log1p(excess)
    mean_d = t / (1.0 + excess)
    d_y = (zy - m) / temperature
    tl.store(logprobs + rows, tl.where(used, d_y.to(tl.float64) - log_s, 0.0).to(tl.float32), mask=inside)
    if ENTROPY:
        tl.store(entropy + rows, tl.where(used, log_s - mean_d, 0.0).to(tl.float32), mask=inside)
    kept += rows.to(tl.int64) * 4
    tl.store(kept, tl.where(used, m, 0.0), mask=inside)
    tl.store(kept + 1, tl.where(used, excess, 0.0).to(tl.float32), mask=inside)
    tl.store(kept + 2, tl.where(used, mean_d, 0.0).to(tl.float32), mask=inside)
    tl.store(kept + 3, tl.where(used, d_y, 0.0), mask=inside)


@partial(jit, unaligned=True)
def _stats_kernel(
    logits, targets, temperature, stats, logprobs, entropy, kept,
    num_rows: tl.int32, inner: tl.int32, outer_stride: tl.int64, inner_stride: tl.int64,
    targets_stride: tl.int64, temperature_stride: tl.int64,
    scalar_temperature: tl.float32, softcap: tl.float32, ignore_index: tl.int64, start: tl.int64,
    used: tl.int32, parts: tl.int32, span: tl.int32,
    CAP: tl.constexpr, ENTROPY: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Program: `span` groups of a row. Writes stats [P, N, 4], or where there is no such tensor the outputs of a whole
    row."""
    dtype: tl.constexpr = logits.dtype.element_ty
    VEC: tl.constexpr = 128 // dtype.primitive_bitwidth
    tl.static_assert(GROUPS >= 2 * VEC)
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    target = tl.load(targets + row * targets_stride)
    row_temperature = scalar_temperature
    if temperature is not None:
        row_temperature = tl.load(temperature + row * temperature_stride).to(tl.float32)
    to_log2 = LOG2_E / row_temperature
    floor = FLOOR * row_temperature
    columns = tl.where(target == ignore_index, 0, used)  # an ignored row has none

    base = _row(logits, row, inner, outer_stride, inner_stride)
    lead = _lead(base, columns, VEC)
    groups = (columns - lead) // VEC
    body = tl.multiple_of(base + lead, 16)
    first = part * span
    last = tl.minimum(first + span, groups)
    ahead = _load(body, first, last, dtype, GROUPS, VEC)
    y = target - start
    here = (y >= 0) & (y < columns) & (part == 0)
    zy = tl.load(base + tl.where(here, y, 0), mask=here, other=0.0).to(tl.float32)

    m = tl.full([], -INF, tl.float32)
    at_m = tl.zeros([GROUPS], tl.float32)
    others = tl.zeros([GROUPS], tl.float32)
    others_error = tl.zeros([GROUPS], tl.float32)
    shifted = tl.zeros([GROUPS], tl.float32)
    shifted_error = tl.zeros([GROUPS], tl.float32)
    edges = columns - groups * VEC
    if (part == 0) & (edges > 0):
        index = tl.arange(0, GROUPS)[:, None]
        x = tl.load(base + _edge_columns(index, lead, lead + groups * VEC), mask=index < edges, other=-INF)
        x = x.to(tl.float32)
        if CAP:
            x = _softcapped(x, softcap)
        m, at_m, others, others_error, shifted, shifted_error = _add_tile(
            x, m, at_m, others, others_error, shifted, shifted_error, to_log2, floor, ENTROPY
        )
    while first < last:
        x = _unpacked(ahead, dtype, GROUPS, VEC)
        first += GROUPS
        ahead = _load(body, first, last, dtype, GROUPS, VEC)
        if CAP:
            x = _softcapped(x, softcap)
        m, at_m, others, others_error, shifted, shifted_error = _add_tile(
            x, m, at_m, others, others_error, shifted, shifted_error, to_log2, floor, ENTROPY
        )

    excess = (tl.sum(at_m, 0) - 1.0) + tl.sum(others + others_error, 0)
    t = tl.sum(shifted + shifted_error, 0) / row_temperature
    if CAP:
        zy = _softcapped(zy, softcap)
    if stats is not None:
        stats += (part.to(tl.int64) * num_rows + row) * 4
        tl.store(stats, m)
        tl.store(stats + 1, excess)
        tl.store(stats + 2, t)
        tl.store(stats + 3, tl.where(here, zy, NOT_HERE))
    else:
        _finish(
            m, excess.to(tl.float64), t.to(tl.float64), tl.where(here, zy, float("nan")), row_temperature,
            target != ignore_index, row, True, logprobs, entropy, kept, ENTROPY,
        )  # fmt: skip


@partial(jit, unaligned=True)
def _combine_kernel(
    gathered, targets, temperature, stats, logprobs, entropy, kept,
    num_rows: tl.int32, num_parts: tl.int32, part_stride: tl.int64,
    targets_stride: tl.int64, temperature_stride: tl.int64,
    scalar_temperature: tl.float32, ignore_index: tl.int64,
    ENTROPY: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows. Statistics of parts or ranks, [P, N, 4], PARTS at a time -> those of all their columns, or
    where there is no such tensor the outputs. In float64, and in an order that is everywhere the same."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    used = tl.load(targets + rows * targets_stride, mask=inside, other=0) != ignore_index
    row_temperature = tl.full([ROWS], 1.0, tl.float32) * scalar_temperature
    if temperature is not None:
        row_temperature = tl.load(temperature + rows * temperature_stride, mask=inside, other=1.0).to(tl.float32)
    part = tl.arange(0, PARTS)[None, :]
    own = gathered + rows.to(tl.int64)[:, None] * 4 + part * part_stride
    m = tl.full([ROWS], -INF, tl.float32)
    first = 0
    while first < num_parts:
        there = inside[:, None] & (first + part < num_parts)
        m = tl.maximum(m, tl.max(tl.load(own + first * part_stride, mask=there, other=-INF), 1))
        first += PARTS
    reference = tl.where(m == -INF, 0.0, m).to(tl.float64)
    s = tl.zeros([ROWS], tl.float64)
    t = tl.zeros([ROWS], tl.float64)
    zy = tl.zeros([ROWS], tl.float32)
    holders = tl.zeros([ROWS], tl.int32)
    first = 0
    while first < num_parts:
        there = inside[:, None] & (first + part < num_parts)
        at = own + first * part_stride
        m_part = tl.load(at, mask=there, other=-INF).to(tl.float64)
        s_part = 1.0 + tl.load(at + 1, mask=there, other=-1.0).to(tl.float64)
        t_part = tl.load(at + 2, mask=there, other=0.0).to(tl.float64)
        zy_part = tl.load(at + 3, mask=there, other=NOT_HERE)
        d = (m_part - reference[:, None]) / row_temperature[:, None]
        d = tl.where(d < FLOOR, FLOOR, d)
        scale = tl.exp(d)
        s += tl.sum(scale * s_part, 1)
        t += tl.sum(scale * (t_part + d * s_part), 1)
        zy += tl.sum(tl.where(zy_part == NOT_HERE, 0.0, zy_part), 1)  # one of them at most is not 0
        holders += tl.sum((zy_part != NOT_HERE).to(tl.int32), 1)
        first += PARTS
    zy = tl.where(holders > 0, zy, NOT_HERE)
    if stats is not None:
        stats += rows.to(tl.int64) * 4
        tl.store(stats, m, mask=inside)
        tl.store(stats + 1, (s - 1.0).to(tl.float32), mask=inside)
        tl.store(stats + 2, t.to(tl.float32), mask=inside)
        tl.store(stats + 3, zy, mask=inside)
    else:
        _finish(
            m, s - 1.0, t, tl.where(zy == NOT_HERE, float("nan"), zy), row_temperature,
            used, rows, inside, logprobs, entropy, kept, ENTROPY,
        )  # fmt: skip


@triton.jit
def _gradient(x, column, y, at_y, m, a, b, to_log2, floor, softcap, CAP: tl.constexpr, ENTROPY: tl.constexpr):
    if CAP:
        x = _softcapped(x, softcap)
    d = x - m
    e = tl.exp2(d * to_log2)
    gradient = e * (tl.maximum(d, floor) * b + a) if ENTROPY else e * a
    gradient = tl.where(column == y, at_y, gradient)
    if CAP:
        tanh = x / softcap
        gradient = tl.where(x == -INF, gradient, gradient * (1.0 - tanh * tanh))  # -inf stays: no cap, a slope of 1
    return gradient


@partial(jit, unaligned=True)
def _dlogits_kernel(
    logits, dlogits, targets, temperature, kept, grad_logprobs, grad_entropy, source,
    inner: tl.int32, outer_stride: tl.int64, inner_stride: tl.int64,
    out_outer_stride: tl.int64, out_inner_stride: tl.int64,
    targets_stride: tl.int64, temperature_stride: tl.int64, logprobs_stride: tl.int64, entropy_stride: tl.int64,
    scalar_temperature: tl.float32, softcap: tl.float32, ignore_index: tl.int64, start: tl.int64,
    used: tl.int32, width: tl.int32, parts: tl.int32,
    CAP: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Program: TILES tiles of a row of the gradient; the first program, of the last rows, as the last logits that
    forward read may still be in the cache. ALIGNED: logits and gradient lie alike within 16 bytes."""
    dtype: tl.constexpr = dlogits.dtype.element_ty
    VEC: tl.constexpr = 128 // dtype.primitive_bitwidth
    SPAN: tl.constexpr = TILES * TILE // VEC
    ENTROPY: tl.constexpr = grad_entropy is not None
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = program // parts
    part = program % parts
    target = tl.load(targets + row * targets_stride)
    g_lp = 0.0
    if grad_logprobs is not None:
        g_lp = tl.load(grad_logprobs + row * logprobs_stride).to(tl.float32)
    g_h = 0.0
    if ENTROPY:
        g_h = tl.load(grad_entropy + row * entropy_stride).to(tl.float32)

    from_row = row
    if source is not None:
        from_row = tl.load(source + row).to(tl.int32)
    base = _row(logits, from_row, inner, outer_stride, inner_stride)
    out = _row(dlogits, row, inner, out_outer_stride, out_inner_stride)
    lead = _lead(out, used, VEC)
    groups = (used - lead) // VEC
    after = lead + groups * VEC
    first = lead + part * (SPAN * VEC)
    count = tl.minimum(groups - part * SPAN, SPAN)  # groups of this program; not positive where there are none
    read = base + first
    if ALIGNED:
        read = tl.multiple_of(read, 16)
    write = tl.multiple_of(out + first, 16)
    lane = tl.arange(0, TILE)
    edge = tl.arange(0, 2 * VEC)
    edges = tl.where(part == 0, used - groups * VEC, 0)
    edge_columns = _edge_columns(edge, lead, after)

    if part == parts - 1:
        padding = used
        while padding < width:
            tl.store(out + padding + lane, tl.zeros([TILE], dtype), mask=padding + lane < width)
            padding += TILE
    if (target == ignore_index) | ((g_lp == 0.0) & (g_h == 0.0)):
        for tile in range(TILES):
            wanted = tile * (TILE // VEC) + lane // VEC < count
            tl.store(write + tile * TILE + lane, tl.zeros([TILE], dtype), mask=wanted, cache_modifier=".cs")
        tl.store(out + edge_columns, tl.zeros([2 * VEC], dtype), mask=edge < edges)
    else:
        row_temperature = scalar_temperature
        if temperature is not None:
            row_temperature = tl.load(temperature + row * temperature_stride).to(tl.float32)
        kept += row.to(tl.int64) * 4
        m = tl.load(kept)
        excess = tl.load(kept + 1).to(tl.float64)
        mean_d = tl.load(kept + 2)
        d_y = tl.load(kept + 3)
        scale = 1.0 / ((1.0 + excess) * row_temperature)
        # A target that no rank holds leaves its whole row NaN.
        a = tl.where(d_y == d_y, (g_h * mean_d.to(tl.float64) - g_lp) * scale, float("nan")).to(tl.float32)
        b = (-g_h * scale / row_temperature).to(tl.float32)
        to_log2 = LOG2_E / row_temperature
        floor = FLOOR * row_temperature
        y = target - start
        y = tl.where((y >= 0) & (y < used), y, -1).to(tl.int32)
        at_y = 0.0
        if ((y >= first) & (y < first + count * VEC)) | ((edges > 0) & (y >= 0) & ((y < lead) | (y >= after))):
            # Computed apart and rounded once; a - p would cancel where p is near 1.
            value = g_lp * -_expm1(d_y.to(tl.float64) - _log1p(excess))
            if ENTROPY:
                d = tl.where(d_y < FLOOR, FLOOR, d_y).to(tl.float64)
                value -= g_h * tl.exp(d) / (1.0 + excess) * (d - mean_d)
            at_y = (value / row_temperature).to(tl.float32)
        for tile in tl.range(TILES, num_stages=STAGES):
            wanted = tile * (TILE // VEC) + lane // VEC < count
            x = tl.load(read + tile * TILE + lane, mask=wanted, other=0.0).to(tl.float32)
            column = first + tile * TILE + lane
            gradient = _gradient(x, column, y, at_y, m, a, b, to_log2, floor, softcap, CAP, ENTROPY)
            tl.store(write + tile * TILE + lane, gradient.to(dtype), mask=wanted, cache_modifier=".cs")
        if edges > 0:
            x = tl.load(base + edge_columns, mask=edge < edges, other=0.0).to(tl.float32)
            gradient = _gradient(x, edge_columns, y, at_y, m, a, b, to_log2, floor, softcap, CAP, ENTROPY)
            tl.store(out + edge_columns, gradient.to(dtype), mask=edge < edges)


_STATS = Launcher(_stats_kernel, unaligned=True, maxnreg=tiles.LOGPROB.registers)
_COMBINE = Launcher(_combine_kernel, unaligned=True)
_DLOGITS = Launcher(_dlogits_kernel, unaligned=True)


def stats(logits: Tensor, targets: Tensor, temperature: Tensor | None, opt: "RowOptions") -> Tensor:
    """[N, 4] float32, (m, s - 1, t, zy) of these columns. An ignored row holds (-inf, -1, 0, NOT_HERE) or anything."""
    out = torch.empty((targets.shape[0], 4), dtype=torch.float32, device=logits.device)

    def call(block: Tensor, first: int, count: int) -> None:
        per_row = _rows(targets, first, count), _rows(temperature, first, count)
        _reduce(block, *per_row, opt, Outputs(stats=_rows(out, first, count)))

    for_blocks(call, unit_columns(logits))
    return out


def forward(
    logits: Tensor, targets: Tensor, temperature: Tensor | None, opt: "RowOptions"
) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs [N], entropy [N] or empty, kept [N, 4] = (m, s - 1, t/s, d_y): of rows whose columns are all here."""
    result = _empty_results(targets.shape[0], opt.with_entropy, logits.device)

    def call(block: Tensor, first: int, count: int) -> None:
        per_row = _rows(targets, first, count), _rows(temperature, first, count)
        _reduce(block, *per_row, opt, Outputs(None, *(_rows(x, first, count) for x in result)))

    for_blocks(call, unit_columns(logits))
    return result


def combine(
    gathered: Tensor, targets: Tensor, temperature: Tensor | None, opt: "RowOptions"
) -> tuple[Tensor, Tensor, Tensor]:
    """The same from the statistics of all ranks, [R, N, 4]."""
    logprobs, entropy, kept = result = _empty_results(targets.shape[0], opt.with_entropy, gathered.device)
    _combine(gathered.contiguous(), targets, temperature, opt, Outputs(logprobs=logprobs, entropy=entropy, kept=kept))
    return result


def write_dlogits(
    out: Tensor,
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    kept: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    opt: "RowOptions",
    source: Tensor | None = None,
) -> None:
    """out, which may be the logits, becomes their gradient. The upstream gradients are [N], of any floating dtype. Both
    are matrices where `source` says from which row of the logits each row of out comes."""
    kept = kept.contiguous()
    if source is not None:
        if source.numel():
            _write_block(out, logits, targets, temperature, kept, grad_logprobs, grad_entropy, opt, source.contiguous())
        return

    def call(out: Tensor, logits: Tensor, first: int, count: int) -> None:
        per_row = _rows(targets, first, count), _rows(temperature, first, count), _rows(kept, first, count)
        upstream = _rows(grad_logprobs, first, count), _rows(grad_entropy, first, count)
        _write_block(out, logits, *per_row, *upstream, opt)

    for_blocks(call, out, logits)


class Outputs(NamedTuple):
    """Of n rows: their statistics, or what forward gives and backward needs. Only one of both is there."""

    stats: Tensor | None = None
    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    kept: Tensor | None = None


def _reduce(block: Tensor, targets: Tensor, temperature: Tensor | None, opt: "RowOptions", out: Outputs) -> None:
    """A block of rows: whole where their programs fill the device evenly, and otherwise in parts, combined afterwards.
    A lone program takes long over a long row: the last rows must not be alone on the device."""
    count, config = targets.shape[0], tiles.LOGPROB
    tile = config.groups
    groups = -(-opt.used * block.element_size() // 16)
    room = config.programs * _multiprocessors(block.device)
    uneven = 0 < count % room < 0.75 * room
    wanted = max(room // count, groups // config.part_groups if uneven else 1, 1)
    span = max(-(-groups // wanted), config.least_groups)
    span = -(-span // tile) * tile
    parts = max(1, -(-groups // span))
    direct = out
    if parts > 1:
        direct = Outputs(stats=torch.empty((parts, count, 4), dtype=torch.float32, device=block.device))
    capped = opt.softcap is not None
    _STATS(
        count * parts,
        (block, targets, temperature, *direct),
        (
            count, *rows_of(block), targets.stride(0), _stride(temperature),
            opt.temperature, opt.softcap or 0.0, opt.ignore_index, opt.start, opt.used, parts, span,
        ),
        (capped, opt.with_entropy, tile),
        config.warps,
    )  # fmt: skip
    if direct.stats is not None and parts > 1:
        _combine(direct.stats, targets, temperature, opt, out)


def _combine(gathered: Tensor, targets: Tensor, temperature: Tensor | None, opt: "RowOptions", out: Outputs) -> None:
    parts, count, _ = gathered.shape
    if count == 0:
        return
    at_once = 8 if parts <= 8 else 64
    rows = max(1, tiles.LOGPROB.combined // at_once)
    _COMBINE(
        -(-count // rows),
        (gathered, targets, temperature, *out),
        (
            count, parts, gathered.stride(0), targets.stride(0), _stride(temperature),
            opt.temperature, opt.ignore_index,
        ),
        (opt.with_entropy, rows, at_once),
        max(1, tiles.LOGPROB.combined // 128),
    )  # fmt: skip


def _write_block(
    out: Tensor,
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    kept: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    opt: "RowOptions",
    source: Tensor | None = None,
) -> None:
    width, size, config = logits.shape[-1], logits.element_size(), tiles.LOGPROB
    if width == 0:
        return
    tile = config.gradient_bytes // size
    parts = max(1, -(-opt.used // (tile * config.gradient_tiles)))
    read, written = rows_of(logits), rows_of(out)
    apart = (logits.data_ptr() - out.data_ptr()) | ((read[1] - written[1]) | (read[2] - written[2])) * size
    if source is not None:
        apart |= read[2] * size  # any row of the one for any of the other
    _DLOGITS(
        targets.shape[0] * parts,
        (logits, out, targets, temperature, kept, grad_logprobs, grad_entropy, source),
        (
            *read, *written[1:], targets.stride(0), _stride(temperature), _stride(grad_logprobs), _stride(grad_entropy),
            opt.temperature, opt.softcap or 0.0, opt.ignore_index, opt.start, opt.used, width, parts,
        ),
        (opt.softcap is not None, tile, config.gradient_tiles, config.gradient_stages, apart % 16 == 0),
        config.gradient_warps,
    )  # fmt: skip


def _empty_results(count: int, with_entropy: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((count,), (count if with_entropy else 0,), (count, 4))
    logprobs, entropy, kept = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
    return logprobs, entropy, kept


def _rows(x: Any, first: int, count: int) -> Any:
    """Rows of [N, ...]; a slice costs the host a microsecond, and nearly always they are all."""
    return x if x is None or x.shape[0] == count else x[first : first + count]


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


@cache
def _multiprocessors(device: torch.device) -> int:
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
