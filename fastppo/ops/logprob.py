"""Log-probabilities of given tokens and the entropy of their distributions, from logits.

Per row, with x = softcap(logits), m = max x, d = (x - m) / temperature, e = exp(d), s = sum e, t = sum e*d:

    logprob = d_y - log s,   entropy = log s - t/s,
    dd_j = e_j/s * (-g_lp - g_H * (d_j - t/s)),  at j = y plus g_lp, formed as g_lp * -expm1(logprob).

Everything is a difference to the maximum: a shift of the logits changes nothing, and logprob <= 0 and entropy >= 0
hold exactly; s - 1 is what is kept of s, so that a peaked row keeps its digits. Kept for backward: the caller's logits
and four numbers per row (m, s - 1, t/s, d_y); e is recomputed.

One read of the logits in forward, one read and one write in backward, no copy. `backend="torch"` and float64 take the
plain formula of `reference/logprob.py` instead: higher derivatives, no such economy.

Over a sharded vocabulary the four numbers are of this rank's columns, gathered and combined in `vocab.py`; backward is
local.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fastppo.backends import NAMES, resolve
from fastppo.checks import INTEGERS, check_choice, check_device, check_tensor
from fastppo.ops._autograd import apply, forward_of_all_arguments, refuse_double_backward
from fastppo.ops._logprob_ops import RowOptions, check_rows
from fastppo.reference.logprob import logprob as definition
from fastppo.vocab import VocabShard, gather_stats


class LogprobOutput(NamedTuple):
    logprobs: Tensor
    entropy: Tensor | None


def logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    with_entropy: bool = True,
    vocab: VocabShard | None = None,
    inplace_backward: bool = False,
    backend: Literal["auto", "cuda", "triton", "cpu", "torch"] = "auto",
) -> LogprobOutput:
    """log p(target) and entropy, in nats, of softmax(softcap(logits) / temperature).

    softcap(z) = softcap * tanh(z / softcap) is the model's and comes first, the temperature is the sampler's. -inf
    stays -inf through both, as if that column were deleted; +inf, NaN or a row of -inf give NaN.

    Args:
        logits: [..., V], float16, bfloat16, float32 or float64; V is this rank's columns when `vocab` is given. Any
            strides.
        targets: [...], integer, ids of the whole vocabulary. A row whose target is `ignore_index` is not read: 0,
            0, gradient 0.
        temperature: > 0, a number or a tensor of targets' shape. No gradient flows to it.
        softcap: > 0, or None for none.
        with_entropy: False spares the entropy, which is then None.
        vocab: the columns of this rank where the vocabulary is sharded; one all-gather of four numbers per row.
        inplace_backward: backward writes the logits' gradient into the logits' storage. They must be nobody's but
            ours: not a leaf, not expanded. A second backward raises.
        backend: "auto", "cuda", "triton", "cpu", or "torch" (the reference, for higher derivatives).

    Returns:
        LogprobOutput(logprobs, entropy): [...], float32 (float64 for float64 logits). logprobs <= 0; 0 <= entropy.

    Raises:
        ValueError: shapes or devices disagree, a width other than the shard's, temperature or softcap not positive,
            logits that inplace_backward cannot use, an unknown backend.
        TypeError: a dtype not named above, a DTensor.
        IndexError: a target outside the vocabulary (on a CPU, and under FASTPPO_CHECK=1; elsewhere that row is
            NaN).
        RuntimeError: a backend that cannot run here, a second derivative on another backend than "torch".
    """
    check_tensor("targets", targets, INTEGERS)
    targets = targets.long()  # an unsigned dtype has no -100 to compare with
    _check(logits, targets, temperature, softcap, ignore_index, vocab, inplace_backward)
    check_choice("backend", backend, NAMES)
    if vocab is None and not inplace_backward and (backend == "torch" or logits.dtype == torch.float64):
        resolve("logprob", backend, logits.device, logits.dtype)
        return LogprobOutput(
            *definition(
                logits,
                targets,
                temperature=temperature,
                softcap=softcap,
                ignore_index=ignore_index,
                with_entropy=with_entropy,
            )
        )
    per_row = _flat(temperature.detach()) if isinstance(temperature, Tensor) else None
    options = RowOptions(
        1.0 if isinstance(temperature, Tensor) else float(temperature),
        None if softcap is None else float(softcap),
        ignore_index,
        with_entropy,
        0 if vocab is None else vocab.start,
        logits.shape[-1] if vocab is None else vocab.used,
        backend,
    )
    arguments = (logits, _flat(targets), per_row, options, vocab, inplace_backward)
    if torch.is_grad_enabled() and logits.requires_grad:
        logprobs, entropy, _ = apply(_Logprob, *arguments)
    else:
        logprobs, entropy, _ = _Logprob.forward(*arguments)
    return LogprobOutput(logprobs, entropy if with_entropy else None)


class _Logprob(torch.autograd.Function):
    @forward_of_all_arguments
    def forward(
        logits: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        options: RowOptions,
        vocab: VocabShard | None,
        inplace: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if vocab is None or vocab.ranks == 1:
            logprobs, entropy, kept = torch.ops.fastppo.logprob_forward.default(logits, targets, temperature, *options)
        else:
            local = torch.ops.fastppo.logprob_stats.default(logits, targets, temperature, *options)
            logprobs, entropy, kept = torch.ops.fastppo.logprob_combine.default(
                gather_stats(local, vocab),
                targets,
                temperature,
                options.temperature,
                options.ignore_index,
                options.with_entropy,
                options.backend,
            )
        if logits.dim() == 2:
            return logprobs, entropy, kept
        shape = logits.shape[:-1]
        return logprobs.view(shape), entropy.view(shape) if options.with_entropy else entropy, kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, targets, temperature, ctx.options, _, ctx.inplace = inputs
        kept = output[2]
        ctx.mark_non_differentiable(*(output[2:] if ctx.options.with_entropy else output[1:]))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, temperature, kept)
        ctx.spent = False

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None, None]:
        refuse_double_backward("logprob")
        if ctx.spent:
            raise RuntimeError(
                "logprob with inplace_backward=True has no second backward: the logits hold their gradient"
            )
        logits, *rows = ctx.saved_tensors
        upstream = [None if grad is None else _flat(grad) for grad in grads[:2]]
        if all(grad is None for grad in upstream):
            return (None,) * 6
        if ctx.inplace:
            ctx.spent = True
            torch.ops.fastppo.logprob_dlogits_.default(logits, *rows, *upstream, *ctx.options)
            return logits.detach(), None, None, None, None, None
        dlogits = torch.ops.fastppo.logprob_dlogits.default(logits, *rows, *upstream, *ctx.options)
        return dlogits, None, None, None, None, None


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.reshape(-1)


def _check(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int,
    vocab: VocabShard | None,
    inplace_backward: bool,
) -> None:
    check_tensor("logits", logits)
    if logits.dim() < 1 or targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets must have logits' shape without the last dimension, {list(logits.shape[:-1])}, "
            f"got {list(targets.shape)}"
        )
    check_device("targets", targets, "logits", logits)
    if vocab is not None:
        if logits.shape[-1] != vocab.width:
            raise ValueError(
                f"logits must have the {vocab.width} columns of vocab [{vocab.start}, {vocab.end}), "
                f"got {logits.shape[-1]}"
            )
    elif logits.shape[-1] == 0:
        raise ValueError(f"logits must have at least one column, got shape {list(logits.shape)}")
    check_rows(targets, temperature, softcap, ignore_index, logits.shape[-1] if vocab is None else vocab.vocab_size)
    if inplace_backward and logits.requires_grad and torch.is_grad_enabled():
        if logits.is_leaf or (logits._base is not None and logits._base.is_leaf):
            kind = "a leaf" if logits.is_leaf else "a view of one"
            raise ValueError(
                "logits must not be a leaf, nor a view of one, with inplace_backward=True, "
                f"got {kind} that requires grad"
            )
        if _overlaps(logits):
            raise ValueError(
                "logits must not be expanded or overlap themselves with inplace_backward=True, "
                f"got shape {list(logits.shape)} with strides {list(logits.stride())}"
            )


def _overlaps(x: Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
