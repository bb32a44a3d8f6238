import torch, triton, triton.language as tl

@triton.jit
def _exp_parts(x):
    shifted = x * 1.44269504 + 12582912.0
    n = shifted - 12582912.0
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    scale = ((shifted.to(tl.int32, bitcast=True) + 127) << 23).to(tl.float32, bitcast=True)
    q = r * 0.000198578156 + 0.00139336428
    q = q * r + 0.00833336078
    q = q * r + 0.0416664667
    q = q * r + 0.166666672
    return scale, r, q * r + 0.5

@triton.jit
def _exp(x):
    scale, r, q = _exp_parts(x)
    return ((q * r + 1.0) * r + 1.0) * scale

@triton.jit
def _expm1_minus_x(x):
    scale, r, q = _exp_parts(x)
    curved = q * r * r
    return tl.where(scale == 1.0, curved, (curved + r) * scale + (scale - 1.0 - x))

@triton.jit
def _clamp(x, low, high):
    raised = tl.where(x < low, low, x)
    return tl.where(raised > high, high, raised)

@triton.jit
def _add(acc, x, F64: tl.constexpr):
    if F64:
        return acc + tl.sum(x.to(tl.float64), axis=1)
    else:
        return acc + tl.sum(x, axis=1).to(tl.float64)

@triton.jit
def tokens_kernel(logp_p, old_p, adv_p, mask_p, ref_p, ent_p, grad_p, ent_grad_p, part_p,
                  groups: tl.int64, low: tl.float32, high: tl.float32, kl_coef: tl.float32, ent_coef: tl.float32,
                  REST: tl.constexpr, R: tl.constexpr, V: tl.constexpr, F64: tl.constexpr, LOOPED: tl.constexpr, STAGES: tl.constexpr, PATHWISE: tl.constexpr):
    n = groups * 16 + REST
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    BLOCK: tl.constexpr = R * V
    local = tl.arange(0, R)[:, None] * V + tl.arange(0, V)[None, :]
    s_pg = tl.zeros([R], tl.float64)
    s_kl = tl.zeros([R], tl.float64)
    s_pkl = tl.zeros([R], tl.float64)
    s_ent = tl.zeros([R], tl.float64)
    s_ratio = tl.zeros([R], tl.float64)
    s_rsq = tl.zeros([R], tl.float64)
    c_tok = tl.zeros([R], tl.int32)
    c_high = tl.zeros([R], tl.int32)
    c_low = tl.zeros([R], tl.int32)
    c_cl = tl.zeros([R], tl.int32)
    tiles = tl.cdiv(n, BLOCK).to(tl.int32)
    for tile in tl.range(pid, tiles, programs, num_stages=STAGES):
        start = tile.to(tl.int64) * BLOCK
        here = local < (n - start)
        sel = here
        if mask_p is not None:
            sel = sel & (tl.load(mask_p + start + local, mask=here, other=0) != 0)
        logp = tl.load(logp_p + start + local, mask=here, other=0).to(tl.float32)
        old = tl.load(old_p + start + local, mask=here, other=0).to(tl.float32)
        adv = tl.load(adv_p + start + local, mask=here, other=0).to(tl.float32)
        if ref_p is not None:
            ref = tl.load(ref_p + start + local, mask=here, other=0).to(tl.float32)
        if ent_p is not None:
            ent = tl.load(ent_p + start + local, mask=here, other=0).to(tl.float32)
        logp = tl.where(sel, logp, 0.0)
        lr = tl.where(sel, logp - old, 0.0)
        adv = tl.where(sel, adv, 0.0)
        moves = (lr < -20.0) | (lr > 20.0)
        ratio = _exp(_clamp(lr, -20.0, 20.0))
        unc = -adv * ratio
        clipped = -adv * _clamp(ratio, low, high)
        clips = clipped > unc
        pg = tl.where(clips, clipped, unc)
        slope = tl.where(clips | moves, 0.0, unc)
        s_pg = _add(s_pg, pg, F64)
        s_pkl = _add(s_pkl, -_clamp(lr, -20.0, 20.0), F64)
        rz = tl.where(sel, ratio, 0.0)
        s_ratio = _add(s_ratio, rz, F64)
        s_rsq = _add(s_rsq, rz * rz, F64)
        c_tok += tl.sum(sel.to(tl.int32), axis=1)
        c_high += tl.sum((sel & clips & (ratio > 1.0)).to(tl.int32), axis=1)
        c_low += tl.sum((sel & clips & (ratio <= 1.0)).to(tl.int32), axis=1)
        c_cl += tl.sum((sel & moves).to(tl.int32), axis=1)
        if ref_p is not None:
            d = tl.where(sel, ref - logp, 0.0)
            x = _clamp(d, -20.0, 20.0)
            kl = _expm1_minus_x(x)
            s_kl = _add(s_kl, kl, F64)
            st = x
            if PATHWISE:
                st = kl + x
            slope += tl.where((d < -20.0) | (d > 20.0), 0.0, -kl_coef * st)
        tl.store(grad_p + start + local, tl.where(sel, slope, 0.0), mask=here)
        if ent_p is not None:
            s_ent = _add(s_ent, tl.where(sel, ent, 0.0), F64)
            if ent_grad_p is not None:
                tl.store(ent_grad_p + start + local, tl.where(sel, -ent_coef, 0.0), mask=here)
    k = tl.arange(0, 16)
    row = tl.where(k == 0, tl.sum(c_tok).to(tl.float64), 0.0)
    row = tl.where(k == 2, tl.sum(s_pg), row)
    if ref_p is not None:
        row = tl.where(k == 3, tl.sum(s_kl), row)
    row = tl.where(k == 4, tl.sum(s_pkl), row)
    if ent_p is not None:
        row = tl.where(k == 5, tl.sum(s_ent), row)
    row = tl.where(k == 6, tl.sum(c_high).to(tl.float64), row)
    row = tl.where(k == 7, tl.sum(c_low).to(tl.float64), row)
    row = tl.where(k == 9, tl.sum(c_cl).to(tl.float64), row)
    row = tl.where(k == 10, tl.sum(s_ratio), row)
    row = tl.where(k == 11, tl.sum(s_rsq), row)
    tl.store(part_p + pid * 16 + k, row)

@triton.jit
def finish_kernel(part_p, small_p, metrics_p, programs, tokens: tl.float64, kl_coef: tl.float64, ent_coef: tl.float64, PB: tl.constexpr):
    k = tl.arange(0, 16)
    acc = tl.zeros([PB, 16], tl.float64)
    for first in range(0, programs, PB):
        p = first + tl.arange(0, PB)
        acc += tl.load(part_p + p[:, None] * 16 + k[None, :], mask=(p < programs)[:, None], other=0.0)
    v = tl.sum(acc, axis=0)
    tl.store(metrics_p + k, v, mask=k < 14)
    count = tl.sum(tl.where(k == 0, v, 0.0))
    count = tl.where(tokens < 0, count, tokens)
    scale = tl.where(count > 0, 1.0 / count, 0.0)
    w = tl.where(k == 2, 1.0, tl.where(k == 3, kl_coef, tl.where(k == 5, -ent_coef, 0.0)))
    total = tl.sum(tl.where(w != 0, w * v, 0.0))
    tl.store(small_p, (total * scale).to(tl.float32))
    tl.store(small_p + 1, scale.to(tl.float32))

@triton.jit
def grad_kernel(kept_p, ent_p, up_p, scale_p, out_p, ent_out_p, groups: tl.int64, REST: tl.constexpr, BLOCK: tl.constexpr):
    n = groups * 16 + REST
    start = tl.program_id(0).to(tl.int64) * BLOCK
    local = tl.arange(0, BLOCK)
    here = local < (n - start)
    factor = tl.load(up_p) * tl.load(scale_p)
    x = tl.load(kept_p + start + local, mask=here, other=0.0)
    if ent_p is not None:
        e = tl.load(ent_p + start + local, mask=here, other=0.0)
    tl.store(out_p + start + local, x * factor, mask=here)
    if ent_p is not None:
        tl.store(ent_out_p + start + local, e * factor, mask=here)
