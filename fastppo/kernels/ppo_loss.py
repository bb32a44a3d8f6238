"""ppo_loss on a GPU: what csrc/ppo_loss/ppo_loss_cpu.cpp computes, by the same formulae.

    _token_kernel   a program walks over tiles of tokens: reads each input once, writes d(sum)/d logprobs and d entropy
                    without the normaliser, and leaves one row of partial sums (float64)
    _finish_kernel  one program adds the rows in their order: loss, normalisers, metrics

Per token, float32 with mask, KL and entropy: 21 bytes read, 8 written. Where sequences are known their selected
tokens are counted before (1 byte a token); means over a sequence (gspo, gmpo, seq_mask_tis) read log-probs once more
in that pass, and the gradient of a sequence's ratio advantages in another (`token_blocks.py`).

Options are constants of the kernels, numbers are not: a new clip_eps or count compiles nothing. A token's gradient
depends on that token and its sequence alone: not on its place in a tile or the batch.

Legend: N tokens, numbered row by row; a tile is [G, V] of them.
"""
# Triton has no `in`.
# ruff: noqa: SIM109
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo.kernels import tiles
from fastppo.kernels.elementary import clamp, exp, expm1, expm1_minus_x, tanh
from fastppo.kernels.launch import Launcher, jit, let_next_begin, wait_for_previous
from fastppo.kernels.token_blocks import (
    KEPT,
    LOG_RATIO,
    SLOPE,
    WEIGHT,
    Sequences,
    add,
    add_chunks,
    add_rows,
    columns16,
    count,
    count_of,
    count_sequences,
    holder,
    layout_of,
    pick,
    place,
    read_flags,
    read_floats,
    reciprocal,
    scale_of,
    sequence_chunk,
    tiles_of,
    walk_of,
)

# Loss types and corrections count as LOSS_TYPES and CORRECTIONS of fastppo/ops/ppo_loss.py.
PPO, REINFORCE, CISPO, GSPO, GMPO = (tl.constexpr(i) for i in range(5))
TIS, ICEPOP, SEQ_MASK_TIS = (tl.constexpr(i) for i in range(1, 4))
BOUND = tl.constexpr(20.0)  # of log ratios


@triton.jit
def policy(
    logp, old, adv, seq_log_ratio, ratio_low, ratio_high, log_ratio_low, log_ratio_high, dual_clip, tau_positive,
    tau_other, LOSS: tl.constexpr, DUAL: tl.constexpr,
):  # fmt: skip
    """pg; d pg/d logp, or for a sequence's ratio d pg/d log ratio; ratio; and flags of each token.

    The flags: clipped high, clipped low, by the dual clip, ratio clamped, own log ratio reaches the sequence's mean.
    """
    never = logp != logp
    never = never & ~never
    log_ratio = logp - old
    clip_high, clip_low, dual, passes = never, never, never, ~never
    if LOSS == GMPO:
        clip_high = (adv >= 0.0) & (log_ratio > log_ratio_high)
        clip_low = (adv < 0.0) & (log_ratio < log_ratio_low)
        passes = ~(clip_high | clip_low) & (log_ratio == log_ratio)
    if LOSS == GSPO or LOSS == GMPO:
        log_ratio = seq_log_ratio
    clamped = (log_ratio > BOUND) | (log_ratio < -BOUND)  # NaN is not: what it multiplies becomes NaN
    ratio = exp(clamp(log_ratio, -BOUND, BOUND))
    if LOSS == PPO or LOSS == GSPO:
        unclipped = -adv * ratio
        clipped = -adv * clamp(ratio, ratio_low, ratio_high)
        clips = clipped > unclipped  # a tie is not, and neither is NaN: its gradient must not look like 0
        clip_high = clips & (ratio > 1.0)
        clip_low = clips & (ratio <= 1.0)
        pg = tl.where(clips, clipped, unclipped)
        if DUAL:
            limit = -adv * dual_clip
            dual = (adv < 0.0) & (limit < pg)
            pg = tl.where(dual, limit, pg)
        slope = tl.where(clips | dual | clamped, 0.0, unclipped)
    elif LOSS == REINFORCE:
        slope = -adv
        pg = slope * logp
    elif LOSS == CISPO:
        clip_high = ratio > ratio_high
        clip_low = ratio < ratio_low
        slope = -adv * clamp(ratio, ratio_low, ratio_high)
        pg = slope * logp
    elif LOSS == GMPO:
        pg = -adv * ratio
        slope = tl.where(clamped, 0.0, pg)
    else:  # sapo
        tau = tl.where(adv > 0.0, tau_positive, tau_other)
        gate = tanh(tau * (ratio - 1.0) * 0.5)
        pg = -adv * (1.0 + gate) * (2.0 / tau)
        slope = tl.where(clamped, 0.0, -adv * (1.0 - gate * gate) * ratio)
    return pg, slope, ratio, clip_high, clip_low, dual, clamped, passes


@triton.jit
def correct(pg, slope, old, rollout, selected, seq_kept, is_low, is_high, CORRECTION: tl.constexpr):
    """pg and slope times the rollout's weight, that weight, and whether the rollout's log-prob is finite."""
    known = (rollout - rollout) == 0.0
    log_weight = tl.where(selected & known, old - rollout, 0.0)
    weight = exp(clamp(log_weight, -BOUND, BOUND))
    if CORRECTION == TIS:
        weight = tl.where(known, clamp(weight, is_low, is_high), 1.0)
    elif CORRECTION == ICEPOP:
        # NaN is not dropped in silence.
        weight = tl.where(known & ((weight < is_low) | (weight > is_high)), 0.0, weight)
    else:
        weight = tl.where(seq_kept != 0.0, weight, 0.0)
    dropped = weight == 0.0
    return tl.where(dropped, 0.0, weight * pg), tl.where(dropped, 0.0, weight * slope), weight, known


@jit
def _token_kernel(
    logprobs, old_logprobs, advantages, mask, entropy, ref_logprobs, rollout_logprobs, nll_mask, cu_seqlens, tables,
    kept, partials,
    n: tl.int64, cols: tl.int64, number: tl.int64,
    logprobs_row: tl.int64, old_row: tl.int64, advantages_row: tl.int64, mask_row: tl.int64, entropy_row: tl.int64,
    ref_row: tl.int64, rollout_row: tl.int64, nll_row: tl.int64,
    ratio_low: tl.float32, ratio_high: tl.float32, log_ratio_low: tl.float32, log_ratio_high: tl.float32,
    dual_clip: tl.float32, tau_positive: tl.float32, tau_other: tl.float32, ent_coef: tl.float32,
    kl_coef: tl.float32, is_low: tl.float32, is_high: tl.float32,
    LOSS: tl.constexpr, KL: tl.constexpr, PATHWISE: tl.constexpr, CORRECTION: tl.constexpr, WEIGHTED: tl.constexpr,
    DUAL: tl.constexpr, GRAD: tl.constexpr, ENTROPY_GRAD: tl.constexpr, STRIDED: tl.constexpr, EXACT: tl.constexpr,
    GROUPED: tl.constexpr,
    G: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr, TOLD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    let_next_begin(OVERLAP)
    PER_SEQUENCE: tl.constexpr = LOSS == GSPO or LOSS == GMPO
    if EXACT:
        n = n // V * V  # so the compiler knows it is
    program, programs = tl.program_id(0), tl.num_programs(0)
    group = tl.arange(0, G)[:, None] * V
    local = group + tl.arange(0, V)[None, :]  # [G, V]
    doubles, ints = tl.zeros([G], tl.float64), tl.zeros([G], tl.int32)
    pg_sum, kl_sum, ppo_kl_sum, entropy_sum, ratio_sum, square_sum = (
        doubles,
        doubles,
        doubles,
        doubles,
        doubles,
        doubles,
    )
    is_sum, weighted_sum, nll_sum = doubles, doubles, doubles
    tokens, nll_tokens, highs, lows, duals, clamps, missing = ints, ints, ints, ints, ints, ints, ints

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
        logp = read_floats(logprobs, place(start, local, cols, logprobs_row, STRIDED), near)
        logp = tl.where(selected, logp, 0.0)
        old = logp
        if old_logprobs is not None:
            old = read_floats(old_logprobs, place(start, local, cols, old_row, STRIDED), near)
            old = tl.where(selected, old, 0.0)
        adv = read_floats(advantages, place(start, local, cols, advantages_row, STRIDED), near)
        adv = tl.where(selected, adv, 0.0)
        weight, seq_log_ratio, seq_kept = 1.0, logp, logp
        if WEIGHTED or PER_SEQUENCE or CORRECTION == SEQ_MASK_TIS:
            b = holder(cu_seqlens, start, local, here, cols, number, G * V)
            if WEIGHTED:
                weight = tl.load(tables + WEIGHT * number + b)
            if PER_SEQUENCE:
                seq_log_ratio = tl.where(selected, tl.load(tables + LOG_RATIO * number + b), 0.0)
            if CORRECTION == SEQ_MASK_TIS:
                seq_kept = tl.load(tables + KEPT * number + b)

        pg, slope, ratio, clip_high, clip_low, dual, clamped, passes = policy(
            logp, old, adv, seq_log_ratio, ratio_low, ratio_high, log_ratio_low, log_ratio_high, dual_clip,
            tau_positive, tau_other, LOSS, DUAL,
        )  # fmt: skip
        if CORRECTION:
            rollout = read_floats(rollout_logprobs, place(start, local, cols, rollout_row, STRIDED), near)
            pg, slope, is_weight, known = correct(
                pg, slope, old, rollout, selected, seq_kept, is_low, is_high, CORRECTION
            )
            is_sum = add(is_sum, tl.where(selected, is_weight, 0.0))
            missing = count(missing, selected & ~known)
        tokens = count(tokens, selected)
        highs, lows = count(highs, selected & clip_high), count(lows, selected & clip_low)
        clamps = count(clamps, selected & clamped)
        if DUAL:
            duals = count(duals, selected & dual)
        pg_sum = add(pg_sum, tl.where(selected, pg, 0.0))
        ppo_kl_sum = add(ppo_kl_sum, -clamp(logp - old, -BOUND, BOUND))
        ratio = tl.where(selected, ratio, 0.0).to(tl.float64)
        ratio_sum, square_sum = add(ratio_sum, ratio), add(square_sum, ratio * ratio)

        loss = pg
        kl_slope = tl.zeros([G, V], tl.float32)
        if ref_logprobs is not None:
            ref = read_floats(ref_logprobs, place(start, local, cols, ref_row, STRIDED), near)
            difference = tl.where(selected, ref - logp, 0.0)
            x = clamp(difference, -BOUND, BOUND)
            if KL == 0:  # k1
                kl = -x
            elif KL == 1:
                kl = tl.abs(x)
            elif KL == 2:
                kl = 0.5 * x * x
            else:
                kl = expm1_minus_x(x)
            kl_sum = add(kl_sum, kl)
            steepness = x
            if PATHWISE and KL == 3:
                steepness = expm1(x)
            flat = (difference > BOUND) | (difference < -BOUND) | (kl_coef == 0.0)
            kl_slope = tl.where(flat, 0.0, -kl_coef * steepness)
            if WEIGHTED:
                loss += tl.where(kl_coef == 0.0, 0.0, kl_coef * kl)
        if entropy is not None:
            h = read_floats(entropy, place(start, local, cols, entropy_row, STRIDED), near)
            h = tl.where(selected, h, 0.0)
            entropy_sum = add(entropy_sum, h)
            if WEIGHTED:
                loss -= tl.where(ent_coef == 0.0, 0.0, ent_coef * h)
        if WEIGHTED:
            weighted_sum = add(weighted_sum, tl.where(selected, loss * weight, 0.0))
            slope *= weight
            kl_slope *= weight

        if PER_SEQUENCE and GRAD:
            mean = tl.load(tables + SLOPE * number + b)
            slope = tl.where(selected & passes, mean, 0.0)
        if GRAD:
            tl.store(kept + start + local, tl.where(selected, slope + kl_slope, 0.0), mask=here)
        if ENTROPY_GRAD:
            grad = tl.where(selected, -ent_coef * weight, 0.0)
            tl.store(kept + GRAD * n + start + local, grad, mask=here)
        if nll_mask is not None:
            positive = selected & read_flags(nll_mask, place(start, local, cols, nll_row, STRIDED), near)
            nll_tokens = count(nll_tokens, positive)
            nll_sum = add(nll_sum, tl.where(positive, -logp, 0.0))
            if GRAD:
                grad = tl.where(positive, -1.0, 0.0)
                tl.store(kept + (GRAD + ENTROPY_GRAD) * n + start + local, grad, mask=here)

    row = columns16(
        tokens.to(tl.float64), nll_tokens.to(tl.float64), pg_sum, kl_sum, ppo_kl_sum, entropy_sum,
        highs.to(tl.float64), lows.to(tl.float64), duals.to(tl.float64), clamps.to(tl.float64), ratio_sum,
        square_sum, is_sum, missing.to(tl.float64), weighted_sum, nll_sum,
    )  # fmt: skip
    tl.store(partials + program * 16 + tl.arange(0, 16), row)


@jit
def _finish_kernel(
    partials, tables, tokens_tensor, seqs_tensor, nll_tokens_tensor, loss, metrics, scales,
    programs: tl.int64, number: tl.int64, num_tokens: tl.float64, num_seqs: tl.float64, num_nll_tokens: tl.float64,
    norm: tl.float64, ent_coef: tl.float64, kl_coef: tl.float64, nll_coef: tl.float64,
    AGGREGATION: tl.constexpr, NLL: tl.constexpr, CORRECTION: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row: the metrics in their order, NLL tokens in the place of seqs; then the weighted loss and the NLL sum."""
    wait_for_previous(OVERLAP)
    let_next_begin(OVERLAP)
    column = tl.arange(0, 16)
    row = add_rows(partials, programs, 16, ROWS)
    tokens = pick(row, column, 0)
    seqs = count_sequences(tables, number, 1024)
    scale = scale_of(tokens, seqs, num_tokens, num_seqs, norm, tokens_tensor, seqs_tensor, AGGREGATION)
    if AGGREGATION == 1:
        total = pick(row, column, 14)
    else:
        factor = tl.where(column == 2, 1.0, 0.0).to(tl.float64)
        factor = tl.where(column == 3, kl_coef, factor)
        factor = tl.where(column == 5, -ent_coef, factor)
        total = tl.sum(tl.where(factor != 0.0, factor * row, 0.0))
    value = total * scale
    tl.store(scales, scale.to(tl.float32))
    if NLL:
        nll_scale = nll_coef * reciprocal(pick(row, column, 1), num_nll_tokens, nll_tokens_tensor)
        value += pick(row, column, 15) * nll_scale
        tl.store(scales + 1, nll_scale.to(tl.float32))
    tl.store(loss, value.to(tl.float32))
    row = tl.where(column == 1, seqs, row)
    if CORRECTION == 0:
        row = tl.where(column == 12, tokens, row)
    tl.store(metrics + column, row, mask=column < 14)


@jit
def _mean_kernel(
    logprobs, old_logprobs, advantages, mask, rollout_logprobs, cu_seqlens, sums, cols: tl.int64, number: tl.int64,
    logprobs_row: tl.int64, old_row: tl.int64, advantages_row: tl.int64, mask_row: tl.int64,
    rollout_row: tl.int64, log_ratio_low: tl.float32, log_ratio_high: tl.float32,
    LOSS: tl.constexpr, CORRECTION: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of a chunk: selected tokens, sum of log ratios, tokens of a known rollout weight, sum of its logarithms."""
    slot = tl.program_id(0).to(tl.int64)
    b, start, begin, end = sequence_chunk(cu_seqlens, slot, cols, number, CHUNK)
    local = tl.arange(0, TILE)
    selected_sum, known_sum = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    ratio_sum, weight_sum = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    while begin < end:
        here = local < end - begin
        col = begin - start + local
        base = start
        selected = here
        if mask is not None:
            if cu_seqlens is None:
                base = b * mask_row
            selected = here & read_flags(mask, base + col, here)
        if cu_seqlens is None:
            base = b * logprobs_row
        logp = read_floats(logprobs, base + col, selected)
        old = logp
        if old_logprobs is not None:
            if cu_seqlens is None:
                base = b * old_row
            old = read_floats(old_logprobs, base + col, selected)
        selected_sum += selected.to(tl.int32)
        if LOSS == GSPO or LOSS == GMPO:
            log_ratio = logp - old
            if LOSS == GMPO:
                if cu_seqlens is None:
                    base = b * advantages_row
                adv = read_floats(advantages, base + col, selected)
                log_ratio = tl.where((adv >= 0.0) & (log_ratio > log_ratio_high), log_ratio_high, log_ratio)
                # An advantage of NaN is bounded below, as clamp_min bounds it.
                log_ratio = tl.where(~(adv >= 0.0) & (log_ratio < log_ratio_low), log_ratio_low, log_ratio)
            ratio_sum += tl.where(selected, log_ratio, 0.0).to(tl.float64)
        if CORRECTION == SEQ_MASK_TIS:
            if cu_seqlens is None:
                base = b * rollout_row
            rollout = read_floats(rollout_logprobs, base + col, selected)
            known = selected & ((rollout - rollout) == 0.0)
            known_sum += known.to(tl.int32)
            weight_sum += tl.where(known, old - rollout, 0.0).to(tl.float64)
        begin += TILE
    tl.store(sums + slot * 4, tl.sum(selected_sum).to(tl.float64))
    tl.store(sums + slot * 4 + 1, tl.sum(ratio_sum))
    tl.store(sums + slot * 4 + 2, tl.sum(known_sum).to(tl.float64))
    tl.store(sums + slot * 4 + 3, tl.sum(weight_sum))


@jit
def _slope_kernel(
    logprobs, old_logprobs, advantages, mask, rollout_logprobs, cu_seqlens, tables, sums, cols: tl.int64,
    number: tl.int64, logprobs_row: tl.int64, old_row: tl.int64, advantages_row: tl.int64,
    mask_row: tl.int64, rollout_row: tl.int64, ratio_low: tl.float32, ratio_high: tl.float32,
    dual_clip: tl.float32, is_low: tl.float32, is_high: tl.float32, LOSS: tl.constexpr, CORRECTION: tl.constexpr,
    WEIGHTED: tl.constexpr, DUAL: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of a chunk: sum of d(sum)/d log ratio of its sequence, through each token, in the second column."""
    slot = tl.program_id(0).to(tl.int64)
    b, start, begin, end = sequence_chunk(cu_seqlens, slot, cols, number, CHUNK)
    local = tl.arange(0, TILE)
    slope_sum = tl.zeros([TILE], tl.float64)
    seq_log_ratio = tl.load(tables + LOG_RATIO * number + b)
    seq_kept = seq_log_ratio
    if CORRECTION == SEQ_MASK_TIS:
        seq_kept = tl.load(tables + KEPT * number + b)
    while begin < end:
        here = local < end - begin
        col = begin - start + local
        base = start
        selected = here
        if mask is not None:
            if cu_seqlens is None:
                base = b * mask_row
            selected = here & read_flags(mask, base + col, here)
        if cu_seqlens is None:
            base = b * advantages_row
        adv = read_floats(advantages, base + col, selected)
        log_ratio = tl.where(selected, seq_log_ratio, 0.0)
        zero = tl.zeros([TILE], tl.float32)
        pg, slope, ratio, clip_high, clip_low, dual, clamped, passes = policy(
            zero, zero, adv, log_ratio, ratio_low, ratio_high, 0.0, 0.0, dual_clip, 1.0, 1.0, LOSS, DUAL
        )
        if CORRECTION:
            if cu_seqlens is None:
                base = b * rollout_row
            rollout = read_floats(rollout_logprobs, base + col, selected)
            if old_logprobs is not None:
                if cu_seqlens is None:
                    base = b * old_row
                old = read_floats(old_logprobs, base + col, selected)
            else:
                if cu_seqlens is None:
                    base = b * logprobs_row
                old = read_floats(logprobs, base + col, selected)
            pg, slope, weight, known = correct(pg, slope, old, rollout, selected, seq_kept, is_low, is_high, CORRECTION)
        if WEIGHTED:
            slope *= tl.load(tables + WEIGHT * number + b)
        slope_sum += tl.where(selected, slope, 0.0).to(tl.float64)
        begin += TILE
    tl.store(sums + slot * 4 + 1, tl.sum(slope_sum))


@jit
def _slope_table_kernel(
    sums, cu_seqlens, tables, number: tl.int64, cols: tl.int64, CHUNK: tl.constexpr, S: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64) * S + tl.arange(0, S)
    there = b < number
    selected = add_chunks(sums, cu_seqlens, b, there, cols, 0, CHUNK, SLOTS)
    slopes = add_chunks(sums, cu_seqlens, b, there, cols, 1, CHUNK, SLOTS)
    mean = slopes / tl.where(selected > 1.0, selected, 1.0)
    tl.store(tables + SLOPE * number + b, mean.to(tl.float32), mask=there)


_tokens = Launcher(_token_kernel, overlaps=True, early=True)
_finish = Launcher(_finish_kernel, overlaps=True, early=True)
_means = Launcher(_mean_kernel)
_slopes = Launcher(_slope_kernel)
_slope_tables = Launcher(_slope_table_kernel)


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None,
    entropy: Tensor | None,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    nll_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    num_tokens: Tensor | None,
    num_seqs: Tensor | None,
    num_nll_tokens: Tensor | None,
    choices: list[int],
    numbers: list[float],
    wants_grad: bool,
    wants_entropy_grad: bool,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fills loss, metrics, scales and the gradients kept, as `fastppo/ops/ppo_loss.py` names them."""
    loss, metrics, scales, kept = outputs
    loss_type, kl_type, pathwise, correction, aggregation = choices
    (
        clip_low, clip_high, dual_clip, tau_positive, tau_other, ent_coef, kl_coef, is_low, is_high, nll_coef, norm,
        given_tokens, given_seqs, given_nll_tokens,
    ) = numbers  # fmt: skip
    device = logprobs.device
    n, cols = logprobs.numel(), logprobs.shape[-1]
    given = (logprobs, old_logprobs, advantages, mask, entropy, ref_logprobs, rollout_logprobs, nll_mask)
    layout = layout_of(given, n, cols)
    per_token, rows = layout.tensors, layout.row_strides
    weighted, dual = aggregation == 1, dual_clip != 0.0

    cu, tables, number = None, None, 0
    if cu_seqlens is not None or logprobs.dim() == 2:
        sequences = Sequences(logprobs.shape, cu_seqlens)
        cu, number = sequences.cu_seqlens, sequences.number
        tables = _sequence_tables(
            sequences, per_token, rows, loss_type, correction, weighted, numbers, grad=wants_grad and n > 0
        )

    tile = tiles.LOSS_TOKENS
    programs, told = walk_of(n, device)
    partials = torch.empty(max(programs, 1), 16, dtype=torch.float64, device=device)
    if programs:
        _tokens(
            programs,
            (*per_token, cu, tables, kept, partials),
            (
                n, cols, number, *rows, 1.0 - clip_low, 1.0 + clip_high, -clip_low, clip_high, dual_clip,
                tau_positive, tau_other, ent_coef, kl_coef, is_low, is_high,
            ),
            (
                loss_type, kl_type, pathwise, correction, weighted, dual, int(wants_grad), int(wants_entropy_grad),
                layout.strided, layout.exact, layout.grouped, tile.groups, tile.vector,
                tile.stages, told,
            ),
            tile.warps,
        )  # fmt: skip
    tokens, tokens_tensor = count_of(given_tokens, num_tokens, device)
    seqs, seqs_tensor = count_of(given_seqs, num_seqs, device)
    nll_tokens, nll_tokens_tensor = count_of(given_nll_tokens, num_nll_tokens, device)
    _finish(
        1,
        (partials, tables, tokens_tensor, seqs_tensor, nll_tokens_tensor, loss, metrics, scales),
        (programs, number, tokens, seqs, nll_tokens, norm, ent_coef, kl_coef, nll_coef),
        (aggregation, nll_mask is not None, correction, tiles.LOSS_FINISH_ROWS),
        tiles.LOSS_FINISH_WARPS,
    )


def _sequence_tables(
    sequences: Sequences,
    per_token: list[Tensor | None],
    rows: list[int],
    loss_type: int,
    correction: int,
    weighted: bool,
    numbers: list[float],
    *,
    grad: bool,
) -> Tensor:
    logprobs, old_logprobs, advantages, mask, _, _, rollout_logprobs, _ = per_token
    logprobs_row, old_row, advantages_row, mask_row, _, _, rollout_row, _ = rows
    assert logprobs is not None
    clip_low, clip_high, dual_clip, _, _, _, _, is_low, is_high, *_ = numbers
    per_sequence, keep = loss_type in (GSPO.value, GMPO.value), correction == SEQ_MASK_TIS.value
    cu, shape = sequences.cu_seqlens, (sequences.cols, sequences.number)
    chunk = (tiles.LOSS_CHUNK, tiles.LOSS_CHUNK_TILE)
    if not per_sequence and not keep:
        sums = None if mask is None else sequences.new_sums(logprobs.device)
        sequences.count(mask, sums, mask_row)
        return sequences.tables(sums, logprobs, masked=mask is not None)

    sums = sequences.new_sums(logprobs.device)
    if sequences.slots:
        _means(
            sequences.slots,
            (logprobs, old_logprobs, advantages, mask, rollout_logprobs, cu, sums),
            (*shape, logprobs_row, old_row, advantages_row, mask_row, rollout_row, -clip_low, clip_high),
            (loss_type, correction, *chunk),
            tiles.LOSS_CHUNK_WARPS,
        )
    bounds = (is_low, is_high) if keep else None
    tables = sequences.tables(sums, logprobs, masked=True, ratio=per_sequence, bounds=bounds)
    if per_sequence and grad:
        _slopes(
            sequences.slots,
            (logprobs, old_logprobs, advantages, mask, rollout_logprobs, cu, tables, sums),
            (
                *shape, logprobs_row, old_row, advantages_row, mask_row, rollout_row, 1.0 - clip_low, 1.0 + clip_high,
                dual_clip, is_low, is_high,
            ),
            (loss_type, correction, weighted, dual_clip != 0.0, *chunk),
            tiles.LOSS_CHUNK_WARPS,
        )  # fmt: skip
        _slope_tables(
            -(-sequences.number // tiles.LOSS_SEQUENCES),
            (sums, cu, tables),
            (sequences.number, sequences.cols),
            (tiles.LOSS_CHUNK, tiles.LOSS_SEQUENCES, tiles.LOSS_SLOTS),
            1,
        )
    return tables
