"""What `ppo_loss` and `value_loss` share: their checks, and gradients that are formed in forward and kept."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo import _build
from fastppo.checks import check_choice, check_like, check_number, check_tensor
from fastppo.dtypes import CODES
from fastppo.ops._autograd import forward_of_all_arguments, refuse_double_backward
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
    scale: Tensor  # scalar: the normaliser of the sum
    nll_scale: Tensor | None  # scalar: that of the NLL term
    grad: Tensor | None  # d(sum)/d logprobs or values
    entropy_grad: Tensor | None
    nll_grad: Tensor | None


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
    return loss_of_kept(op, lambda x, entropy: _kept_by_formula(sums, x, entropy, dtype), x, entropy)


def loss_of_kept(
    op: str, forward: Callable[[Tensor, Tensor | None], Kept], x: Tensor, entropy: Tensor | None = None
) -> LossOutput:
    """The loss that `forward` computes together with its gradients, differentiable in x and entropy."""
    if wants_grad(x) or wants_grad(entropy):
        loss, metrics, *_ = _KeptGradients.apply(x, entropy, forward, op)
        return LossOutput(loss, metrics)
    loss, metrics, *_ = forward(x, entropy)  # torch 2.8 does not compile its slice
    return LossOutput(loss, metrics)


def _kept_by_formula(
    sums: Callable[[Tensor, Tensor | None], Sums], x: Tensor, entropy: Tensor | None, dtype: torch.dtype
) -> Kept:
    with torch.enable_grad():
        x = x.detach().to(dtype).requires_grad_()
        inputs = [x]
        if entropy is not None:
            entropy = entropy.detach().to(dtype).requires_grad_()
            inputs.append(entropy)
        result = sums(x, entropy)
        grads = torch.autograd.grad(result.total, inputs, retain_graph=result.nll_total is not None, allow_unused=True)
        nll_grad = None
        if result.nll_total is not None:
            (nll_grad,) = torch.autograd.grad(result.nll_total, [x])
    return Kept(
        normalised(result).detach().to(dtype),
        result.metrics,
        result.scale.to(dtype),
        None if result.nll_scale is None else result.nll_scale.to(dtype),
        grads[0],
        grads[1] if entropy is not None else None,
        nll_grad,
    )


class _KeptGradients(torch.autograd.Function):
    @forward_of_all_arguments
    def forward(
        x: Tensor, entropy: Tensor | None, forward: Callable[[Tensor, Tensor | None], Kept], op: str
    ) -> tuple[Tensor | None, ...]:
        return tuple(forward(x, entropy))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        x, entropy, _, ctx.op = inputs
        ctx.dtypes = (x.dtype, None if entropy is None else entropy.dtype)
        ctx.mark_non_differentiable(*(t for t in output[1:] if t is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        refuse_double_backward(ctx.op)
        upstream = grads[0]
        if upstream is None:
            return None, None, None, None
        scale, nll_scale, kept, entropy_kept, nll_kept = ctx.saved_tensors
        factor = upstream * scale
        nll_factor = None if nll_kept is None else upstream * nll_scale
        return (
            _scaled(kept, factor, nll_kept, nll_factor, ctx.dtypes[0]),
            _scaled(entropy_kept, factor, None, None, ctx.dtypes[1]),
            None,
            None,
        )


# Below this the kernel's call costs more than torch's passes.
_KERNEL_TOKENS = 32768


def _scaled(
    kept: Tensor | None,
    factor: Tensor,
    nll_kept: Tensor | None,
    nll_factor: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """kept * factor + nll_kept * nll_factor in `dtype`; the same bits from the kernel and from torch."""
    if kept is None:
        return None if nll_kept is None or nll_factor is None else (nll_kept * nll_factor).to(dtype)
    if (
        kept.device.type == "cpu"
        and kept.dtype == torch.float32
        and dtype in CODES
        and not torch.compiler.is_compiling()
        and kept.numel() >= _KERNEL_TOKENS
        and _build.load()[0] is not None
    ):
        scaled: Tensor = torch.ops.fastppo.loss_grad(kept, factor, nll_kept, nll_factor, CODES[dtype])
        return scaled
    grad = kept * factor
    if nll_kept is not None and nll_factor is not None:
        grad = grad + nll_kept * nll_factor
    return grad.to(dtype)


def _loss_grad_cpu(
    kept: Tensor, factor: Tensor, nll_kept: Tensor | None, nll_factor: Tensor | None, dtype: int
) -> Tensor:
    """csrc/loss_grad/loss_grad.h."""
    kept, factor = kept.contiguous(), factor.contiguous()
    if nll_kept is not None:
        nll_kept = nll_kept.contiguous()
    grad = torch.empty(kept.shape, dtype=list(CODES)[dtype])
    _build.module().loss_grad(
        kept.data_ptr(),
        0 if nll_kept is None else nll_kept.data_ptr(),
        factor.data_ptr(),
        0 if nll_factor is None else nll_factor.data_ptr(),
        grad.data_ptr(),
        dtype,
        kept.numel(),
        torch.get_num_threads(),
    )
    return grad


_LIBRARY = torch.library.Library("fastppo", "FRAGMENT")
_LIBRARY.define("loss_grad(Tensor kept, Tensor factor, Tensor? nll_kept, Tensor? nll_factor, int dtype) -> Tensor")
_LIBRARY.impl("loss_grad", _loss_grad_cpu, "CPU")
# It is a backward, and has none.
_LIBRARY.impl("loss_grad", torch.library.fallthrough_kernel, "Autograd")


@torch.library.register_fake("fastppo::loss_grad", lib=_LIBRARY)
def _(kept: Tensor, factor: Tensor, nll_kept: Tensor | None, nll_factor: Tensor | None, dtype: int) -> Tensor:
    return torch.empty(kept.shape, dtype=list(CODES)[dtype], device=kept.device)


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


def kept_like(x: Tensor, wanted: bool) -> Tensor:
    """Room for gradients of x: float32, contiguous; empty where not wanted."""
    return torch.empty(x.shape if wanted else (0,), dtype=torch.float32, device=x.device)
