"""Policy-gradient losses of PPO and its relatives, with KL, entropy and NLL terms, from per-token log-probabilities.

With r = exp(clamp(logp - old, +-20)), A the advantages, c(r) = clamp(r, 1 - clip_eps, 1 + clip_eps_high), per token:

    ppo        max(-A r, -A c(r)); where A < 0 no more than -A dual_clip
    reinforce  -A logp
    cispo      -A sg(c(r)) logp
    gspo       ppo with s = exp(mean(logp - old)) in the place of every token's r
    gmpo       -A exp(mean(l)); l = min(logp - old, clip_eps_high) where A >= 0, max(logp - old, -clip_eps) where A < 0:
               the bounds are on the log ratio (the paper's is 0.4)
    sapo       -A f(r); f(r) = 4/tau sigmoid(tau (r - 1)), tau = sapo_tau[0] where A > 0, else sapo_tau[1]

sg stops the gradient; means run over the selected tokens of a sequence. With seq_mean_token_mean and one advantage
per sequence gspo and gmpo are their papers' objectives; where advantages differ within a sequence the gradient is
still exact.

Kept for backward: d(sum)/d logprobs and d(sum)/d entropy, formed in forward without the normaliser; backward is one
multiplication by upstream * normaliser, so a token's gradient does not depend on which micro-batch it came in.

Sources: ppo Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip Ye et al. 2020, arXiv:1912.09729; reinforce
Williams 1992; cispo MiniMax 2025, arXiv:2506.13585; gspo Zheng et al. 2025, arXiv:2507.18071; gmpo Zhao et al. 2025,
arXiv:2507.20673, and github.com/callsys/GMPO for A = 0; sapo Gao et al. 2025, arXiv:2511.20347.
"""

from __future__ import annotations  # with evaluated ones torch 2.8 compiles no inner function

import contextlib
import math
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from fastppo import _build
from fastppo.backends import resolve
from fastppo.checks import (
    check_choice,
    check_floats_like,
    check_like,
    check_number,
    check_pair,
    check_tensor,
    contents_checked,
)
from fastppo.dtypes import accumulator, byte_flags
from fastppo.metrics import PPO_METRICS
from fastppo.ops._loss import (
    AGGREGATIONS,
    Kept,
    LossOutput,
    check_count,
    check_layout,
    concrete,
    empty_outputs,
    loss_of_kept,
    loss_of_sums,
    offsets,
    read_count,
    row_shape,
    split_count,
    strided,
    wants_grad,
)
from fastppo.ops._tracing import traced
from fastppo.packing import check_cu_seqlens_contents
from fastppo.reference import ppo_loss as definition
from fastppo.reference.aggregation import Sums
from fastppo.reference.ppo_loss import DEFAULT_IS_BOUNDS

LOSS_TYPES = ("ppo", "reinforce", "cispo", "gspo", "gmpo", "sapo")
KL_TYPES = ("k1", "abs", "k2", "k3")
CORRECTIONS = (None, "tis", "icepop", "seq_mask_tis")


_PER_TOKEN = ("old_logprobs", "advantages", "entropy", "ref_logprobs", "rollout_logprobs")


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    loss_type: Literal["ppo", "reinforce", "cispo", "gspo", "gmpo", "sapo"] = "ppo",
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
    sapo_tau: tuple[float, float] = (1.0, 1.05),
    entropy: Tensor | None = None,
    ent_coef: float = 0.0,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_type: Literal["k1", "abs", "k2", "k3"] = "k3",
    kl_grad: Literal["reverse", "pathwise"] = "reverse",
    rollout_logprobs: Tensor | None = None,
    is_correction: Literal["tis", "icepop", "seq_mask_tis"] | None = None,
    is_bounds: tuple[float, float] | None = None,
    nll_coef: float = 0.0,
    nll_mask: Tensor | None = None,
    num_nll_tokens: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"] = "token_mean",
    norm: float | None = None,
    num_tokens: float | Tensor | None = None,
    num_seqs: float | Tensor | None = None,
    backend: Literal["auto", "cuda", "triton", "cpu", "torch"] = "auto",
) -> LossOutput:
    """Policy loss: per token w * pg + kl_coef * KL - ent_coef * H, aggregated once, plus the NLL term.

    pg by loss_type: help("fastppo.ops.ppo_loss") has the formulae and their sources.

    Args:
        logprobs: [T] or [B, T], float16, bfloat16, float32 or float64, nats. Gradients flow to it and to `entropy`
            alone.
        old_logprobs: of the policy that the update started from; None: logprobs themselves, detached (ratio 1).
        advantages: one per token.
        mask: any dtype, read as != 0: the tokens that count. What other positions hold reaches nothing. None: all.
        loss_type: "ppo", "reinforce", "cispo", "gspo", "gmpo" or "sapo".
        clip_eps, clip_eps_high: ratio bounds 1 - clip_eps and 1 + clip_eps_high (None: clip_eps). At a tie the
            unclipped branch's gradient is taken. |logp - old| beyond 20 is clamped, with gradient 0.
        dual_clip: > 1, for ppo and gspo; None: off.
        sapo_tau: > 0, temperatures for positive and other advantages.
        entropy, ent_coef: the bonus. Given with coefficient 0 it is only measured.
        ref_logprobs, kl_coef: KL(policy || reference) by kl_type, of x = clamp(ref - logp, +-20): "k1" -x, "abs"
            |x|, "k2" x^2/2, "k3" e^x - 1 - x. Given with coefficient 0 it is only measured.
        kl_grad: "reverse" takes d KL/d logp = -x for every type, the gradient of the reverse KL; "pathwise" takes
            the estimator's own (k2, k3 only). Zero where clamped.
        rollout_logprobs: of the sampler. Read only with is_correction.
        is_correction: weight w = exp(old - rollout), detached, on pg: "tis" clamps it to is_bounds (default 0, 2),
            "icepop" zeroes it outside (0.5, 5), "seq_mask_tis" zeroes a sequence whose geometric mean of w is
            outside (0.999, 1.002). A non-finite rollout log-prob of a selected token gives weight 1 and is counted.
        nll_coef, nll_mask, num_nll_tokens: adds nll_coef * sum(-logp where nll_mask) / num_nll_tokens, whatever the
            aggregation; the tokens must be selected by `mask` too.
        cu_seqlens: [B + 1], int32 or int64: sequences of a flat [T] batch. Otherwise sequences are the rows of [B,
            T].
        aggregation: "token_mean" = sum / num_tokens; "seq_mean_token_mean", "seq_mean_token_sum" = sum over
            sequences of the mean or sum over their selected tokens, / num_seqs; "token_sum_norm" = sum / (num_seqs
            * norm).
        num_tokens, num_seqs, num_nll_tokens: counts of the whole optimizer step, all ranks and micro-batches; a
            number or a 0-dim tensor, never read on the host. None: this call's selected tokens, sequences with at
            least one, NLL tokens. A count of 0 gives loss 0.
        backend: "auto", "cuda", "triton", "cpu", or "torch" (the reference, for higher derivatives).

    Returns:
        LossOutput(loss, metrics): loss scalar, float32 (float64 if an input is); metrics [len(PPO_METRICS)]
        float64, sums over this call's selected tokens to be added over micro-batches and ranks; `summarize` makes
        means of them. pg_loss includes w. kl, entropy are 0 where not given, seqs where sequences are unknown.

    Raises:
        ValueError: shapes or devices disagree, an unknown choice, a number out of range, an option without what it
            needs.
        TypeError: an integer or unsupported dtype, a DTensor.
        RuntimeError: a backend that cannot run here, a second derivative on another backend than "torch".
    """
    check_tensor("logprobs", logprobs)
    check_tensor("advantages", advantages)
    per_token = (old_logprobs, advantages, entropy, ref_logprobs, rollout_logprobs)
    for name, value in zip(_PER_TOKEN, per_token, strict=True):
        if value is not None:
            check_floats_like(name, value, "logprobs", logprobs)
    choices, options = _checked_options(
        loss_type, clip_eps, clip_eps_high, dual_clip, sapo_tau, ent_coef, kl_coef, kl_type, kl_grad, is_correction,
        is_bounds, nll_coef,
    )  # fmt: skip
    for name, coef, needs, given in (
        ("ent_coef", ent_coef, "entropy", entropy),
        ("kl_coef", kl_coef, "ref_logprobs", ref_logprobs),
        ("nll_coef", nll_coef, "nll_mask", nll_mask),
    ):
        if coef and given is None:
            raise ValueError(f"{needs} must be given with {name}={coef}, got None")
    if is_correction is not None and rollout_logprobs is None:
        raise ValueError(f"rollout_logprobs must be given with is_correction={is_correction!r}, got None")
    if nll_mask is not None:
        check_tensor("nll_mask", nll_mask, dtypes=None)
        check_like("nll_mask", nll_mask, "logprobs", logprobs)
    check_count("num_nll_tokens", num_nll_tokens, logprobs)
    needs_sequences = f"loss_type={loss_type!r}" if loss_type in ("gspo", "gmpo") else None
    if is_correction == "seq_mask_tis":
        needs_sequences = "is_correction='seq_mask_tis'"
    check_layout("logprobs", logprobs, mask, cu_seqlens, aggregation, norm, num_tokens, num_seqs, needs_sequences)
    dtype = accumulator(logprobs, *per_token)
    chosen, _ = resolve("ppo_loss", backend, logprobs.device, dtype)
    if chosen != "torch":
        tokens, tokens_tensor = split_count(num_tokens)
        seqs, seqs_tensor = split_count(num_seqs)
        nll_tokens, nll_tokens_tensor = split_count(num_nll_tokens)
        numbers = [*options, 1.0 if norm is None else float(norm), tokens, seqs, nll_tokens]
        grad, entropy_grad = wants_grad(logprobs), wants_grad(entropy)
        # What is not read is not handed over.
        rollout = None if is_correction is None else rollout_logprobs
        positive = nll_mask if nll_coef else None

        others = (mask, nll_mask, cu_seqlens, tokens_tensor, seqs_tensor, nll_tokens_tensor)
        op = torch.ops.fastppo.ppo_loss if traced(logprobs, *per_token, *others) else _ppo_loss

        def forward(logprobs: Tensor, entropy: Tensor | None) -> Kept:
            return Kept(
                *op(
                    logprobs, old_logprobs, advantages, mask, entropy, ref_logprobs, rollout, positive, cu_seqlens,
                    tokens_tensor, seqs_tensor, nll_tokens_tensor, [*choices, AGGREGATIONS.index(aggregation)], numbers,
                    grad, entropy_grad, chosen,
                )
            )  # fmt: skip

        return loss_of_kept("ppo_loss", forward, logprobs, entropy, chosen)

    def sums(logprobs: Tensor, entropy: Tensor | None) -> Sums:
        return definition.ppo_sums(
            logprobs,
            old_logprobs,
            advantages,
            mask=mask,
            loss_type=loss_type,
            clip_eps=clip_eps,
            clip_eps_high=clip_eps_high,
            dual_clip=dual_clip,
            sapo_tau=sapo_tau,
            entropy=entropy,
            ent_coef=ent_coef,
            ref_logprobs=ref_logprobs,
            kl_coef=kl_coef,
            kl_type=kl_type,
            kl_grad=kl_grad,
            rollout_logprobs=rollout_logprobs,
            is_correction=is_correction,
            is_bounds=is_bounds,
            nll_coef=nll_coef,
            nll_mask=nll_mask,
            num_nll_tokens=num_nll_tokens,
            cu_seqlens=cu_seqlens,
            aggregation=aggregation,
            norm=norm,
            num_tokens=num_tokens,
            num_seqs=num_seqs,
        )

    return loss_of_sums("ppo_loss", sums, logprobs, entropy, dtype, plain=backend == "torch")


def _checked_options(*options: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """`_check_options`, which is asked once for each set of options: a step's calls all have the same."""
    if torch.compiler.is_compiling():
        return _check_options(*options)
    types = tuple(type(x) for option in options if isinstance(option, tuple) for x in option)
    found = None
    with contextlib.suppress(TypeError):  # a list cannot be remembered; or that is the error, and comes again
        found = _check_options_once(types, *options)
    return _check_options(*options) if found is None else found


def _check_options(
    loss_type: str,
    clip_eps: float,
    clip_eps_high: float | None,
    dual_clip: float | None,
    sapo_tau: tuple[float, float],
    ent_coef: float,
    kl_coef: float,
    kl_type: str,
    kl_grad: str,
    is_correction: str | None,
    is_bounds: tuple[float, float] | None,
    nll_coef: float,
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Checks what is no tensor. Returns choices and numbers as the registered op takes them, up to what goes with the
    aggregation."""
    check_choice("loss_type", loss_type, LOSS_TYPES)
    check_number("clip_eps", clip_eps, at_least=0)
    if clip_eps_high is not None:
        check_number("clip_eps_high", clip_eps_high, at_least=0)
    if dual_clip is not None:
        check_number("dual_clip", dual_clip, above=1)
        if loss_type not in ("ppo", "gspo"):
            raise ValueError(f"dual_clip goes with loss_type 'ppo' or 'gspo', got {loss_type!r}")
    check_pair("sapo_tau", sapo_tau, "(positive, other)")
    for tau in sapo_tau:
        check_number("sapo_tau", tau, above=0)
    for name, coef in (("ent_coef", ent_coef), ("kl_coef", kl_coef), ("nll_coef", nll_coef)):
        check_number(name, coef)
    check_choice("kl_type", kl_type, KL_TYPES)
    check_choice("kl_grad", kl_grad, ("reverse", "pathwise"))
    if kl_grad == "pathwise" and kl_type in ("k1", "abs"):
        raise ValueError(
            f"kl_grad='pathwise' goes with kl_type 'k2' or 'k3', got {kl_type!r}: its own gradient is no KL gradient"
        )
    check_choice("is_correction", is_correction, CORRECTIONS)
    if is_bounds is None:
        is_bounds = DEFAULT_IS_BOUNDS.get(is_correction or "", (0.0, 0.0))
    else:
        if is_correction is None:
            raise ValueError(f"is_bounds goes with is_correction, got is_bounds={is_bounds} without it")
        check_pair("is_bounds", is_bounds, "(low, high)")
        for bound in is_bounds:
            if bound != math.inf:
                check_number("is_bounds", bound)
        if not 0 <= is_bounds[0] <= is_bounds[1]:
            raise ValueError(f"is_bounds must be (low, high) with 0 <= low <= high, got {is_bounds}")
    choices = (
        LOSS_TYPES.index(loss_type),
        KL_TYPES.index(kl_type),
        int(kl_grad == "pathwise"),
        CORRECTIONS.index(is_correction),
    )
    numbers = (
        clip_eps,
        clip_eps if clip_eps_high is None else clip_eps_high,
        0.0 if dual_clip is None else dual_clip,
        *sapo_tau,
        ent_coef,
        kl_coef,
        *is_bounds,
        nll_coef,
    )
    return choices, tuple(map(float, numbers))


@lru_cache(maxsize=128, typed=True)
def _check_options_once(_types: tuple[type, ...], *options: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return _check_options(*options)


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, kl_type: Literal["k1", "abs", "k2", "k3"] = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference) at tokens sampled from the policy, in nats.

    x = clamp(ref - logp, +-20):  k1 = -x,  abs = |x|,  k2 = x^2/2,  k3 = e^x - 1 - x.

    Args:
        logprobs, ref_logprobs: one shape, floating point.
        kl_type: "k1", "abs", "k2" or "k3".

    Returns:
        logprobs' shape, float32 (float64 if an input is). The gradient is the estimator's own, 0 where clamped, and
        flows to logprobs alone. With a mask select afterwards: torch.where(mask, kl, 0).

    Raises:
        ValueError: shapes or devices disagree, an unknown kl_type.
        TypeError: an integer or unsupported dtype, a DTensor.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    check_tensor("logprobs", logprobs)
    check_tensor("ref_logprobs", ref_logprobs)
    check_like("ref_logprobs", ref_logprobs, "logprobs", logprobs)
    check_choice("kl_type", kl_type, KL_TYPES)
    return definition.kl_divergence(logprobs, ref_logprobs, kl_type)


def _ppo_loss(
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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The registered op: fills what `_empty_outputs` gives; csrc/ppo_loss/ppo_loss.h, fastppo/kernels/ppo_loss.py."""
    outputs = _empty_outputs(logprobs, nll_mask is not None, wants_grad, wants_entropy_grad)
    if cu_seqlens is not None and contents_checked(cu_seqlens):
        # Under torch.compile nobody has looked at it yet, and the kernel goes where it says.
        check_cu_seqlens_contents(cu_seqlens, logprobs.numel())
    if concrete("ppo_loss", backend, logprobs) == "triton":
        from fastppo.kernels.ppo_loss import ppo_loss as triton_ppo_loss

        triton_ppo_loss(
            logprobs, old_logprobs, advantages, mask, entropy, ref_logprobs, rollout_logprobs, nll_mask, cu_seqlens,
            num_tokens, num_seqs, num_nll_tokens, choices, numbers, wants_grad, wants_entropy_grad, outputs,
        )  # fmt: skip
        return outputs
    loss, metrics, scales, kept = (x.data_ptr() for x in outputs)
    rows = [kept + 4 * logprobs.numel() * row for row in range(3)]
    # Converted tensors keep a name until the kernel has read them.
    mask, nll_mask = byte_flags(mask), byte_flags(nll_mask)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.contiguous()
    *options, tokens, seqs, nll_tokens = numbers
    _build.module().ppo_loss(
        *row_shape(logprobs),
        strided(logprobs),
        strided(old_logprobs),
        strided(advantages),
        strided(mask),
        strided(entropy),
        strided(ref_logprobs),
        strided(rollout_logprobs),
        strided(nll_mask),
        offsets(cu_seqlens),
        logprobs.dim() == 2,
        *choices,
        *options,
        read_count(tokens, num_tokens),
        read_count(seqs, num_seqs),
        read_count(nll_tokens, num_nll_tokens),
        rows[0] if wants_grad else 0,
        rows[wants_grad] if wants_entropy_grad else 0,
        rows[1 + wants_entropy_grad] if wants_grad and nll_mask is not None else 0,
        loss,
        scales,
        scales + 4 if nll_mask is not None else 0,
        metrics,
        torch.get_num_threads(),
    )
    return outputs


def _empty_outputs(
    logprobs: Tensor, nll: bool, wants_grad: bool, wants_entropy_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Those of `Kept`."""
    rows = wants_grad + wants_entropy_grad + (wants_grad and nll)
    return empty_outputs(logprobs, len(PPO_METRICS), 1 + nll, rows)


_LIBRARY = torch.library.Library("fastppo", "FRAGMENT")
_LIBRARY.define(
    "ppo_loss(Tensor logprobs, Tensor? old_logprobs, Tensor advantages, Tensor? mask, Tensor? entropy, "
    "Tensor? ref_logprobs, Tensor? rollout_logprobs, Tensor? nll_mask, Tensor? cu_seqlens, Tensor? num_tokens, "
    "Tensor? num_seqs, Tensor? num_nll_tokens, int[] choices, float[] numbers, bool wants_grad, "
    "bool wants_entropy_grad, str backend) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("ppo_loss", _ppo_loss, "CompositeExplicitAutograd")
# The gradient is `_KeptGradients`', around this op.
_LIBRARY.impl("ppo_loss", torch.library.fallthrough_kernel, "Autograd")


@torch.library.register_fake("fastppo::ppo_loss", lib=_LIBRARY)
def _(logprobs: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return _empty_outputs(logprobs, options[6] is not None, *options[-3:-1])
