"""What `ppo_loss` and `value_loss` share: their checks, and gradients that are formed in forward and kept."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo import _build
from fastppo.backends import resolve
from fastppo.checks import check_choice, check_like, check_number, check_tensor
from fastppo.dtypes import CODES
from fastppo.ops._autograd import apply, forward_of_all_arguments, refuse_double_backward
from fastppo.ops._tracing import traced
from fastppo.packing import check_cu_seqlens
from fastppo.reference.aggregation import Sums, normalised

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm")


class LossOutput(NamedTuple):
    loss: Tensor
    metrics: Tensor


def check_layout(
    name: str,
    tokens: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    aggregation: str,
    norm: float | None,
    num_tokens: float | Tensor | None,
    num_seqs: float | Tensor | None,
    sequences_for: str | None = None,
) -> None:
    """Token tensors [T] or [B, T], their mask, sequences and normalisers.

    `sequences_for` names the option, if any, that needs to know the sequences.
    """
    if tokens.dim() not in (1, 2):
        raise ValueError(f"{name} must have shape [T] or [B, T], got {list(tokens.shape)}")
    if mask is not None:
        check_tensor("mask", mask, dtypes=None)
        check_like("mask", mask, name, tokens)
    check_choice("aggregation", aggregation, AGGREGATIONS)
    if (norm is not None) != (aggregation == "token_sum_norm"):
        raise ValueError(
            f"norm goes with aggregation='token_sum_norm' and only there, got norm={norm} with {aggregation!r}"
        )
    if norm is not None:
        check_number("norm", norm, above=0)
    check_count("num_tokens", num_tokens, tokens)
    check_count("num_seqs", num_seqs, tokens)
    if cu_seqlens is not None:
        if tokens.dim() != 1:
            raise ValueError(f"cu_seqlens goes with {name} of shape [T], got {list(tokens.shape)}")
        check_cu_seqlens(cu_seqlens, tokens.numel(), like=tokens)
    elif tokens.dim() == 1:
        if aggregation == "seq_mean_token_mean" or (aggregation != "token_mean" and num_seqs is None):
            sequences_for = f"aggregation={aggregation!r}"
        if sequences_for is not None:
            raise ValueError(
                f"cu_seqlens must be given, or {name} as [B, T], for {sequences_for}, "
                f"got neither: {name} has shape {list(tokens.shape)}"
            )


def check_count(name: str, value: float | Tensor | None, tokens: Tensor) -> None:
    """A global count: None, a number >= 0, or a 0-dim tensor, which is never read on the host."""
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(f"{name} must be a number or a 0-dim tensor, got shape {list(value.shape)}")
        if value.device.type != "cpu" and value.device != tokens.device:
            raise ValueError(f"{name} must be on the CPU or on {tokens.device} as the tokens, got {value.device}")
    elif value is not None:
        check_number(name, value, at_least=0)


class Kept(NamedTuple):
    """What a forward leaves: results, and the gradients of the sums before their normalisers."""

    loss: Tensor  # scalar
    metrics: Tensor
    scales: Tensor  # [1] or [2]: the normalisers of the sum and of the NLL term
    grads: Tensor  # [rows, ...]: d(sum)/d logprobs or values, d(sum)/d entropy, d(NLL sum)/d logprobs; those wanted


def wants_grad(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad and torch.is_grad_enabled()


def loss_of_sums(
    op: str,
    sums: Callable[[Tensor, Tensor | None], Sums],
    x: Tensor,
    entropy: Tensor | None,
    dtype: torch.dtype,
    *,
    plain: bool,
) -> LossOutput:
    """The normalised loss, differentiable in x and entropy: by the formula if `plain`, else by gradients kept."""
    # torch.compile derives and fuses the formula's gradient itself, and cannot look into gradients taken in a
    # forward.
    if plain or not (wants_grad(x) or wants_grad(entropy)) or torch.compiler.is_compiling():
        result = sums(x, entropy)
        return LossOutput(normalised(result).to(dtype), result.metrics)
    wanted = wants_grad(x), wants_grad(entropy)
    return loss_of_kept(op, lambda x, entropy: _kept_by_formula(sums, x, entropy, wanted, dtype), x, entropy, "torch")


def loss_of_kept(
    op: str, forward: Callable[[Tensor, Tensor | None], Kept], x: Tensor, entropy: Tensor | None, backend: str
) -> LossOutput:
    """The loss that `forward` computes together with its gradients, differentiable in x and entropy."""
    if wants_grad(x) or wants_grad(entropy):
        loss, metrics, *_ = apply(_KeptGradients, x, entropy, forward, op, backend)
        return LossOutput(loss, metrics)
    loss, metrics, *_ = forward(x, entropy)  # torch 2.8 does not compile its slice
    return LossOutput(loss, metrics)


def _kept_by_formula(
    sums: Callable[[Tensor, Tensor | None], Sums],
    x: Tensor,
    entropy: Tensor | None,
    wanted: tuple[bool, bool],
    dtype: torch.dtype,
) -> Kept:
    with torch.enable_grad():
        x = x.detach().to(dtype).requires_grad_()
        if entropy is not None:
            entropy = entropy.detach().to(dtype).requires_grad_()
        result = sums(x, entropy)
        inputs = [t for t, want in zip((x, entropy), wanted, strict=True) if want and t is not None]
        nll_too = result.nll_total is not None
        grads = list(torch.autograd.grad(result.total, inputs, retain_graph=nll_too, allow_unused=True))
        if result.nll_total is not None and wanted[0]:
            grads += torch.autograd.grad(result.nll_total, [x])
    scales = [result.scale] if result.nll_scale is None else [result.scale, result.nll_scale]
    return Kept(
        normalised(result).detach().to(dtype),
        result.metrics,
        torch.stack(scales).to(dtype),
        torch.stack([torch.zeros_like(x) if grad is None else grad for grad in grads]).detach(),
    )


class _KeptGradients(torch.autograd.Function):
    @forward_of_all_arguments
    def forward(
        x: Tensor, entropy: Tensor | None, forward: Callable[[Tensor, Tensor | None], Kept], op: str, backend: str
    ) -> tuple[Tensor, ...]:
        return tuple(forward(x, entropy))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, entropy, _, ctx.op, ctx.backend = inputs
        ctx.dtypes = (x.dtype, None if entropy is None else entropy.dtype)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        refuse_double_backward(ctx.op)
        upstream = grads[0]
        if upstream is None:
            return None, None, None, None, None
        scales, kept = ctx.saved_tensors
        dtype, entropy_dtype = ctx.dtypes
        wants = ctx.needs_input_grad
        grads = _scaled(
            kept, scales, upstream, dtype if wants[0] else None, entropy_dtype if wants[1] else None, ctx.backend
        )
        return *grads, None, None, None


# Below this the CPU kernel's call costs more than torch's passes.
_KERNEL_TOKENS = 32768


def _scaled(
    kept: Tensor,
    scales: Tensor,
    upstream: Tensor,
    dtype: torch.dtype | None,
    entropy_dtype: torch.dtype | None,
    backend: str,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of logprobs or values, and of entropy, where they have a dtype: kept * (upstream * scale), with
    that of the NLL term added. The same bits from the kernels and from torch."""
    if backend == "triton" and torch.compiler.is_compiling():
        # The formula, fused, would contract a multiplication and an addition.
        codes = [-1 if x is None else CODES[x] for x in (dtype, entropy_dtype)]
        grads = torch.ops.fastppo.loss_grad(kept, scales, upstream, *codes, backend)
        return None if dtype is None else grads[0], None if entropy_dtype is None else grads[1]
    if (backend == "triton" or (backend == "cpu" and kept[0].numel() >= _KERNEL_TOKENS)) and not traced(kept, upstream):
        x_grad, entropy_grad = (
            None if x is None else torch.empty(kept.shape[1:], dtype=x, device=kept.device)
            for x in (dtype, entropy_dtype)
        )
        _fill_grads(kept, scales, upstream, x_grad, entropy_grad, backend)
        return x_grad, entropy_grad
    factor = upstream * scales[0]
    x_grad = entropy_grad = None
    if dtype is not None:
        x_grad = kept[0] * factor
        if kept.shape[0] > 1 + (entropy_dtype is not None):
            x_grad = x_grad + kept[-1] * (upstream * scales[1])
        x_grad = x_grad.to(dtype)
    if entropy_dtype is not None:
        entropy_grad = (kept[int(dtype is not None)] * factor).to(entropy_dtype)
    return x_grad, entropy_grad


def _loss_grad(
    kept: Tensor, scales: Tensor, upstream: Tensor, code: int, entropy_code: int, backend: str
) -> tuple[Tensor, Tensor]:
    """The registered op: gradients of logprobs or values and of entropy; empty for those whose dtype code is -1."""
    grads = _empty_grads(kept, code, entropy_code)
    wanted = [None if c < 0 else grad for c, grad in zip((code, entropy_code), grads, strict=True)]
    _fill_grads(kept, scales, upstream, wanted[0], wanted[1], concrete("ppo_loss", backend, kept))
    return grads


def _fill_grads(
    kept: Tensor, scales: Tensor, upstream: Tensor, grad: Tensor | None, entropy_grad: Tensor | None, backend: str
) -> None:
    nll = grad is not None and kept.shape[0] > 1 + (entropy_grad is not None)
    if backend == "triton":
        from fastppo.kernels.loss_grad import loss_grad

        loss_grad(kept, scales, upstream, grad, entropy_grad, nll)
    else:
        _loss_grad_cpu(kept, scales, upstream, grad, entropy_grad, nll)


def _loss_grad_cpu(
    kept: Tensor,
    scales: Tensor,
    upstream: Tensor,
    grad: Tensor | None,
    entropy_grad: Tensor | None,
    nll: bool,
) -> None:
    """csrc/loss_grad/loss_grad.h."""
    tokens = kept[0].numel()
    rows = [kept.data_ptr() + 4 * tokens * row for row in range(kept.shape[0])]
    # Named until the kernel has read them.
    factors = upstream * scales
    row = 0
    for x, nll_here in ((grad, nll), (entropy_grad, False)):
        if x is not None:
            _build.module().loss_grad(
                rows[row],
                rows[-1] if nll_here else 0,
                factors.data_ptr(),
                factors.data_ptr() + 4 if nll_here else 0,
                x.data_ptr(),
                CODES[x.dtype],
                tokens,
                torch.get_num_threads(),
            )
            row += 1


def _empty_grads(kept: Tensor, *codes: int) -> tuple[Tensor, Tensor]:
    dtypes = list(CODES)
    grad, entropy_grad = (
        torch.empty(kept.shape[1:] if code >= 0 else (0,), dtype=dtypes[max(code, 0)], device=kept.device)
        for code in codes
    )
    return grad, entropy_grad


_LIBRARY = torch.library.Library("fastppo", "FRAGMENT")
_LIBRARY.define(
    "loss_grad(Tensor kept, Tensor scales, Tensor upstream, int dtype, int entropy_dtype, str backend) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.impl("loss_grad", _loss_grad, "CompositeExplicitAutograd")
# It is a backward, and has none.
_LIBRARY.impl("loss_grad", torch.library.fallthrough_kernel, "Autograd")


@torch.library.register_fake("fastppo::loss_grad", lib=_LIBRARY)
def _(
    kept: Tensor, scales: Tensor, upstream: Tensor, dtype: int, entropy_dtype: int, backend: str
) -> tuple[Tensor, Tensor]:
    return _empty_grads(kept, dtype, entropy_dtype)


def concrete(op: str, backend: str, x: Tensor) -> str:
    """The backend of a registered op, which is called with a resolved one by ours, and with any by others."""
    return backend if backend in ("cpu", "triton") else resolve(op, backend, x.device, torch.float32)[0]


# --- What a kernel is handed; csrc/common/token_blocks.h --------------------------------------------------------------

Strided = tuple[int, int, int, int]


def split_count(count: float | Tensor | None) -> tuple[float, Tensor | None]:
    """A count as a registered op takes it: a number (-1: of this call) and a tensor that overrides it."""
    if isinstance(count, Tensor):
        return -1.0, count
    if count is not None and torch.compiler.is_compiling():
        # A number would be a constant of the graph, and the counts of every step another one.
        return -1.0, torch.full((), count, dtype=torch.float64)
    return (-1.0 if count is None else float(count)), None


def read_count(number: float, tensor: Tensor | None) -> float:
    return number if tensor is None else max(float(tensor), 0.0)


def strided(x: Tensor | None) -> Strided | None:
    """Address, row stride, column stride, dtype code."""
    if x is None:
        return None
    strides = x.stride()
    return (x.data_ptr(), 0 if len(strides) == 1 else strides[0], strides[-1], CODES.get(x.dtype, 0))


def offsets(cu_seqlens: Tensor | None) -> tuple[int, bool, int] | None:
    """Address, whether int64, number of sequences."""
    if cu_seqlens is None:
        return None
    return cu_seqlens.data_ptr(), cu_seqlens.dtype == torch.int64, cu_seqlens.shape[0] - 1


def row_shape(x: Tensor) -> tuple[int, int]:
    """[B, T], or one row of T."""
    return (x.shape[0], x.shape[1]) if x.dim() == 2 else (1, x.shape[0])


def empty_outputs(x: Tensor, metrics: int, scales: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for what a `Kept` holds, float32 but for the metrics, contiguous."""
    device = x.device
    return (
        torch.empty((), dtype=torch.float32, device=device),
        torch.empty(metrics, dtype=torch.float64, device=device),
        torch.empty(scales, dtype=torch.float32, device=device),
        torch.empty((rows, *x.shape), dtype=torch.float32, device=device),
    )
