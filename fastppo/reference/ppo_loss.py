"""The definition of `fastppo.ppo_loss` and `fastppo.kl_divergence` in plain PyTorch: any derivative, float64 too.

`ppo_sums` is the formula: sums over this call's tokens, before the division by global counts. `ppo_loss` divides
them. Unselected inputs are replaced by zeros before anything is computed, so what they hold reaches nothing.

Sums over a sequence run in float64 in the order of its tokens, so they do not depend on what else is in the batch,
nor on padding against packing.
"""

import torch
from torch import Tensor

from fastppo.dtypes import accumulator
from fastppo.metrics import PPO_METRICS
from fastppo.reference.aggregation import Sequences, Sums, aggregate, normalised, reciprocal

# exp(20) = 4.9e8 is far beyond any ratio that training survives and far below overflow.
LOG_RATIO_BOUND = 20.0

DEFAULT_IS_BOUNDS = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq_mask_tis": (0.999, 1.002)}


def ppo_loss(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, **options: object
) -> tuple[Tensor, Tensor]:
    """(loss, metrics) with the arguments of `fastppo.ppo_loss`."""
    sums = ppo_sums(logprobs, old_logprobs, advantages, **options)  # type: ignore[arg-type]
    others = (options.get(name) for name in ("entropy", "ref_logprobs", "rollout_logprobs"))
    dtype = accumulator(logprobs, old_logprobs, advantages, *others)  # type: ignore[arg-type]
    return normalised(sums).to(dtype), sums.metrics


def ppo_sums(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    loss_type: str = "ppo",
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
    sapo_tau: tuple[float, float] = (1.0, 1.05),
    entropy: Tensor | None = None,
    ent_coef: float = 0.0,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "k3",
    kl_grad: str = "reverse",
    rollout_logprobs: Tensor | None = None,
    is_correction: str | None = None,
    is_bounds: tuple[float, float] | None = None,
    nll_coef: float = 0.0,
    nll_mask: Tensor | None = None,
    num_nll_tokens: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    aggregation: str = "token_mean",
    norm: float | None = None,
    num_tokens: float | Tensor | None = None,
    num_seqs: float | Tensor | None = None,
) -> Sums:
    dtype = accumulator(logprobs, old_logprobs, advantages, entropy, ref_logprobs, rollout_logprobs)
    selected = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask != 0
    sequences = Sequences.of(selected, cu_seqlens)

    def read(x: Tensor) -> Tensor:
        return torch.where(selected, x.to(dtype), 0.0)

    logp = read(logprobs)
    old = logp.detach() if old_logprobs is None else read(old_logprobs).detach()
    adv = read(advantages).detach()
    high = clip_eps if clip_eps_high is None else clip_eps_high
    none = torch.zeros_like(selected)

    token_log_ratio = logp - old
    log_ratio, clip_high, clip_low, dual_clipped = token_log_ratio, none, none, none
    if loss_type == "gmpo":
        clip_high = (adv >= 0) & (log_ratio > high)
        clip_low = (adv < 0) & (log_ratio < -clip_eps)
        log_ratio = torch.where(adv >= 0, log_ratio.clamp_max(high), log_ratio.clamp_min(-clip_eps))
    if loss_type in ("gspo", "gmpo"):
        log_ratio = sequences.mean(log_ratio)
    clamped = log_ratio.detach().abs() > LOG_RATIO_BOUND
    ratio = bounded(log_ratio).exp()

    if loss_type in ("ppo", "gspo"):
        unclipped = -adv * ratio
        clipped = -adv * ratio.clamp(1 - clip_eps, 1 + high)
        clip_high = (clipped > unclipped) & (ratio > 1)
        clip_low = (clipped > unclipped) & (ratio <= 1)
        pg = torch.where(clipped > unclipped, clipped, unclipped)  # a tie, and NaN, take the unclipped gradient
        if dual_clip is not None:
            bound = -adv * dual_clip
            dual_clipped = (adv < 0) & (bound < pg)
            pg = torch.where(dual_clipped, bound, pg)
    elif loss_type == "reinforce":
        pg = -adv * logp
    elif loss_type == "cispo":
        clip_high, clip_low = ratio > 1 + high, ratio < 1 - clip_eps
        pg = -adv * ratio.detach().clamp(1 - clip_eps, 1 + high) * logp
    elif loss_type == "gmpo":
        pg = -adv * ratio
    else:  # sapo
        tau = torch.full_like(adv, sapo_tau[1]).masked_fill(adv > 0, sapo_tau[0])
        # 4 sigmoid(2x) = 2 (1 + tanh(x)). torch.sigmoid's last bit depends on an element's place in the tensor.
        pg = -adv * (1 + torch.tanh(tau * (ratio - 1) / 2)) * (2 / tau)

    weight, missing = torch.ones_like(adv), none
    if is_correction is not None:
        assert rollout_logprobs is not None
        bounds = DEFAULT_IS_BOUNDS[is_correction] if is_bounds is None else is_bounds
        missing = selected & ~rollout_logprobs.isfinite()
        weight = rollout_weight(old, rollout_logprobs.detach().to(dtype), missing, sequences, is_correction, bounds)
        pg = torch.where(weight == 0, 0.0, weight * pg)

    loss = pg
    kl = torch.zeros_like(adv)
    if ref_logprobs is not None:
        x = bounded(read(ref_logprobs).detach() - logp)
        kl = kl_estimate(x, kl_type)
        if kl_grad == "reverse":
            # x^2/2 has the derivative -x, the score-function gradient of the reverse KL, whatever estimator is
            # shown.
            surrogate = 0.5 * x * x
            kl = kl.detach() + (surrogate - surrogate.detach())
        if kl_coef:
            loss = loss + kl_coef * kl
    ent = torch.zeros_like(adv)
    if entropy is not None:
        ent = read(entropy)
        if ent_coef:
            loss = loss - ent_coef * ent

    counts = {
        "tokens": selected,
        "pg_loss": pg,
        "kl": kl,
        "ppo_kl": -token_log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND),
        "entropy": ent,
        "clip_high": clip_high,
        "clip_low": clip_low,
        "dual_clip": dual_clipped,
        "clamped": clamped,
        "ratio": ratio,
        "ratio_sq": ratio.detach().double().square(),
        "is_weight": weight,
        "is_missing": missing,
    }
    values = {k: torch.where(selected, v.detach(), 0).sum(dtype=torch.float64) for k, v in counts.items()}
    values["seqs"] = sequences.count()
    metrics = torch.stack([values[name] for name in PPO_METRICS])
    total, scale = aggregate(loss, selected, sequences, aggregation, norm, num_tokens, num_seqs)
    if not nll_coef:
        return Sums(total, scale, metrics)
    assert nll_mask is not None
    positive = selected & (nll_mask != 0)
    nll_total = torch.where(positive, -logp, 0.0).sum(dtype=torch.float64)
    nll_scale = nll_coef * reciprocal(positive.sum() if num_nll_tokens is None else num_nll_tokens, loss)
    return Sums(total, scale, metrics, nll_total, nll_scale)


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, kl_type: str = "k3") -> Tensor:
    dtype = accumulator(logprobs, ref_logprobs)
    x = ref_logprobs.detach().to(dtype) - logprobs.to(dtype)
    return kl_estimate(bounded(x), kl_type)


def bounded(x: Tensor) -> Tensor:
    """Clamped to +-20. Not by clamp, whose gradient is 0 at NaN: a finite check of gradients would see nothing."""
    return torch.where(x > LOG_RATIO_BOUND, LOG_RATIO_BOUND, torch.where(x < -LOG_RATIO_BOUND, -LOG_RATIO_BOUND, x))


def kl_estimate(x: Tensor, kl_type: str) -> Tensor:
    """Estimator of KL(policy || reference) at x = ref - logp."""
    if kl_type == "k1":
        return -x
    if kl_type == "abs":
        return x.abs()
    if kl_type == "k2":
        return 0.5 * x * x
    # expm1(x) - x loses half its digits to cancellation near 0; five terms of its series do not.
    near = x.abs() < (1e-3 if x.dtype == torch.float64 else 0.03)
    series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x / 720))))
    return torch.where(near, series, torch.expm1(x) - x)


def rollout_weight(
    old: Tensor, rollout: Tensor, missing: Tensor, sequences: Sequences, kind: str, bounds: tuple[float, float]
) -> Tensor:
    """Detached weight of pi_old / pi_rollout per token; 1 where the rollout's log-prob is missing."""
    usable = sequences.selected & ~missing
    log_weight = torch.where(usable, old - rollout, 0.0)
    weight = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    low, high = bounds
    if kind == "tis":
        return torch.where(missing, 1.0, weight.clamp(low, high))
    if kind == "icepop":
        return torch.where(~missing & ((weight < low) | (weight > high)), 0.0, weight)  # NaN is not dropped in silence
    geometric_mean = sequences.mean(log_weight, usable).exp()
    return torch.where((geometric_mean < low) | (geometric_mean > high), 0.0, weight)
