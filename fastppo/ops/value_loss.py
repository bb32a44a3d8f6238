"""Squared error of a value head, clipped around the rollout's values as in PPO.

    0.5 (v - R)^2,   with clip_eps   0.5 max((v - R)^2, (old + clamp(v - old, +-clip_eps) - R)^2)

Kept for backward: d(sum)/d values, formed in forward without the normaliser; see `ops/_loss.py`.
"""

from __future__ import annotations  # with evaluated ones torch 2.8 compiles no inner function

from typing import Any, Literal

import torch
from torch import Tensor

from fastppo import _build
from fastppo.backends import resolve
from fastppo.checks import check_floats_like, check_number, check_tensor, contents_checked
from fastppo.dtypes import accumulator, byte_flags
from fastppo.metrics import VALUE_METRICS
from fastppo.ops._loss import (
    AGGREGATIONS,
    Kept,
    LossOutput,
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
from fastppo.reference import value_loss as definition
from fastppo.reference.aggregation import Sums


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
    check_floats_like("returns", returns, "values", values)
    if old_values is not None:
        check_floats_like("old_values", old_values, "values", values)
    if clip_eps is not None:
        check_number("clip_eps", clip_eps, above=0)
        if old_values is None:
            raise ValueError(f"old_values must be given with clip_eps={clip_eps}, got None")
    check_layout("values", values, mask, cu_seqlens, aggregation, norm, num_tokens, num_seqs)
    dtype = accumulator(values, old_values, returns)
    chosen, _ = resolve("value_loss", backend, values.device, dtype)
    if chosen != "torch":
        tokens, tokens_tensor = split_count(num_tokens)
        seqs, seqs_tensor = split_count(num_seqs)
        numbers = (clip_eps or 0.0, 1.0 if norm is None else norm, tokens, seqs)
        grad = wants_grad(values)
        clipped_from = None if clip_eps is None else old_values

        others = (old_values, returns, mask, cu_seqlens, tokens_tensor, seqs_tensor)
        op = torch.ops.fastppo.value_loss if traced(values, *others) else _value_loss

        def forward(values: Tensor, _: Tensor | None) -> Kept:
            return Kept(
                *op(
                    values, clipped_from, returns, mask, cu_seqlens, tokens_tensor, seqs_tensor,
                    AGGREGATIONS.index(aggregation), list(map(float, numbers)), grad, chosen,
                )
            )  # fmt: skip

        return loss_of_kept("value_loss", forward, values, None, chosen)

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

    return loss_of_sums("value_loss", sums, values, None, dtype, plain=backend == "torch")


def _value_loss(
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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The registered op: fills a `Kept`; csrc/value_loss/value_loss.h, fastppo/kernels/value_loss.py."""
    outputs = empty_outputs(values, len(VALUE_METRICS), 1, int(wants_grad))
    if cu_seqlens is not None and contents_checked(cu_seqlens):
        # Under torch.compile nobody has looked at it yet, and the kernel goes where it says.
        check_cu_seqlens_contents(cu_seqlens, values.numel())
    if concrete("value_loss", backend, values) == "triton":
        from fastppo.kernels.value_loss import value_loss as triton_value_loss

        triton_value_loss(
            values,
            old_values,
            returns,
            mask,
            cu_seqlens,
            num_tokens,
            num_seqs,
            aggregation,
            numbers,
            wants_grad,
            outputs,
        )
        return outputs
    loss, metrics, scale, grad = (x.data_ptr() for x in outputs)
    # Converted tensors keep a name until the kernel has read them.
    mask = byte_flags(mask)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.contiguous()
    clip_eps, norm, tokens, seqs = numbers
    _build.module().value_loss(
        *row_shape(values),
        strided(values),
        strided(old_values),
        strided(returns),
        strided(mask),
        offsets(cu_seqlens),
        values.dim() == 2,
        aggregation,
        clip_eps,
        norm,
        read_count(tokens, num_tokens),
        read_count(seqs, num_seqs),
        grad if wants_grad else 0,
        loss,
        scale,
        metrics,
        torch.get_num_threads(),
    )
    return outputs


_LIBRARY = torch.library.Library("fastppo", "FRAGMENT")
_LIBRARY.define(
    "value_loss(Tensor values, Tensor? old_values, Tensor returns, Tensor? mask, Tensor? cu_seqlens, "
    "Tensor? num_tokens, Tensor? num_seqs, int aggregation, float[] numbers, bool wants_grad, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("value_loss", _value_loss, "CompositeExplicitAutograd")
# The gradient is `_KeptGradients`', around this op.
_LIBRARY.impl("value_loss", torch.library.fallthrough_kernel, "Autograd")


@torch.library.register_fake("fastppo::value_loss", lib=_LIBRARY)
def _(values: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return empty_outputs(values, len(VALUE_METRICS), 1, int(options[-2]))
