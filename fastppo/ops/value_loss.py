"""Squared error of a value head, clipped around the rollout's values as in PPO.

    0.5 (v - R)^2,   with clip_eps   0.5 max((v - R)^2, (old + clamp(v - old, +-clip_eps) - R)^2)

Kept for backward: d(sum)/d values, formed in forward without the normaliser; see `ops/_loss.py`.
"""

from typing import Literal

from torch import Tensor

from fastppo.backends import resolve
from fastppo.checks import check_like, check_number, check_tensor
from fastppo.ops._loss import LossOutput, check_layout, loss_of_sums
from fastppo.reference import value_loss as definition
from fastppo.reference.aggregation import Sums, accumulator


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    *,
    mask: Tensor | None = None,
    clip_eps: float | None = None,
    cu_seqlens: Tensor | None = None,
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"] = "token_mean",
    norm: float | None = None,
    num_tokens: float | Tensor | None = None,
    num_seqs: float | Tensor | None = None,
    backend: Literal["auto", "cuda", "triton", "cpu", "torch"] = "auto",
) -> LossOutput:
    """Value loss 0.5 (v - R)^2, clipped if clip_eps is given, aggregated once. A tie takes the unclipped gradient.

    Args:
        values: [T] or [B, T], float16, bfloat16, float32 or float64. Gradients flow to it alone.
        old_values: values of the rollout; may be None without clip_eps.
        returns: targets, as `gae` gives them.
        mask: any dtype, read as != 0: the tokens that count. What other positions hold reaches nothing. None: all.
        clip_eps: > 0, how far values may move from old_values; None: no clipping.
        cu_seqlens, aggregation, norm, num_tokens, num_seqs, backend: as in `ppo_loss`.

    Returns:
        LossOutput(loss, metrics): loss scalar, float32 (float64 if an input is); metrics [len(VALUE_METRICS)]
        float64, sums over this call's selected tokens for `summarize`; err is returns - values.

    Raises:
        ValueError: shapes or devices disagree, an unknown choice, a number out of range, an option without what it
            needs.
        TypeError: an integer or unsupported dtype, a DTensor.
        RuntimeError: a backend that cannot run here, a second derivative on another backend than "torch".

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 9; the clipped form is that of openai/baselines ppo2.
    """
    check_tensor("values", values)
    check_tensor("returns", returns)
    check_like("returns", returns, "values", values)
    if old_values is not None:
        check_tensor("old_values", old_values)
        check_like("old_values", old_values, "values", values)
    if clip_eps is not None:
        check_number("clip_eps", clip_eps, above=0)
        if old_values is None:
            raise ValueError(f"old_values must be given with clip_eps={clip_eps}, got None")
    check_layout("values", values, mask, cu_seqlens, aggregation, norm, num_tokens, num_seqs)
    resolve("value_loss", backend, values.device, values.dtype)

    def sums(values: Tensor, _: Tensor | None) -> Sums:
        return definition.value_sums(
            values,
            old_values,
            returns,
            mask=mask,
            clip_eps=clip_eps,
            cu_seqlens=cu_seqlens,
            aggregation=aggregation,
            norm=norm,
            num_tokens=num_tokens,
            num_seqs=num_seqs,
        )

    return loss_of_sums(
        "value_loss", sums, values, None, accumulator(values, old_values, returns), plain=backend == "torch"
    )
