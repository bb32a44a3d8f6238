"""Log-probabilities of given tokens and entropies from hidden states and the output head, without the whole logits.

    logits = hidden @ weight.T + bias,   then per row as `ops/logprob.py`,
    dhidden = dlogits @ weight,   dweight = dlogits.T @ hidden,   dbias = sum over rows of dlogits.

The logits are made in chunks, of rows on a CPU, of columns on a GPU; on a Hopper GPU half precision without bias and
softcap takes their statistics without them. The walks over chunks are in `_linear_logprob_ops.py`.

memory="recompute" keeps four numbers per row and multiplies again in backward: the same products, so the same rounding,
and every row of dlogits sums to 0. memory="save" keeps the logits, and backward writes dlogits over them. Rows that are
ignored are left out of every product, rows whose upstream gradients are exactly 0 out of the products of backward (on a
CPU; elsewhere knowing them would synchronise).

Over a sharded vocabulary forward has the one all-gather of `vocab.py`, and backward sums dhidden over ranks once.
"""

import logging
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from fastppo.checks import check_choice
from fastppo.ops._autograd import forward_of_all_arguments, refuse_double_backward
from fastppo.ops._linear import (
    Head,
    Reduction,
    check_head,
    gather_hidden,
    gathers_hidden,
    is_sharded,
    plain_operands,
    save_limit,
    whole_stats,
)
from fastppo.ops._linear_logprob_ops import backward as gradients_of
from fastppo.ops._tracing import traced
from fastppo.ops.logprob import LogprobOutput
from fastppo.reference.linear_logprob import linear_logprob as definition
from fastppo.vocab import VocabShard


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    with_entropy: bool = True,
    vocab: VocabShard | None = None,
    reduce_dhidden: Literal["all_reduce", "reduce_scatter", "none"] = "all_reduce",
    memory: Literal["auto", "save", "recompute"] = "auto",
    logits_dtype: torch.dtype | None = None,
    weight_grad_into: Tensor | None = None,
    backend: Literal["auto", "cuda", "triton", "cpu", "torch"] = "auto",
) -> LogprobOutput:
    """log p(target) and entropy, in nats, of softmax(softcap(hidden @ weight.T + bias) / temperature).

    Args:
        hidden: [..., D], float16, bfloat16, float32 or float64. Under autocast hidden, weight and bias are read in
            autocast's dtype; gradients come in their own.
        weight: [V, D], the output head; V is this rank's rows when `vocab` is given. No product is made for the
            gradient of a frozen weight.
        targets: [...], integer, ids of the whole vocabulary. A row whose target is `ignore_index` is not read: 0,
            0, gradient 0.
        bias: [V].
        temperature, softcap, ignore_index, with_entropy: as in `fastppo.logprob`.
        vocab: the rows of the weight of this rank where the vocabulary is sharded; one all-gather of four numbers per
            token. Every rank has all hidden states and targets, and the same upstream gradients.
        reduce_dhidden: what backward does with dhidden, of which each rank has the part of its columns: "all_reduce"
            sums it, "none" leaves it partial, "reduce_scatter" gives each rank its share; hidden is then this rank's
            [N / ranks, ..., D] on dim 0, gathered inside.
        memory: "save" keeps the logits once and turns them into their gradient: three products, and a second
            backward raises. "recompute" keeps nothing of their size: four products. "auto" saves where they take no
            more than FASTPPO_SAVE_LIMIT bytes (default 4 GiB), by shape alone, and says which once at level INFO of
            the logger "fastppo". Without gradients nothing is kept.
        logits_dtype: of the logits, from which statistics and gradients come; None: of the product, hidden's and
            weight's wider one or autocast's.
        weight_grad_into: [V, D] float32, contiguous or not. Backward adds the weight's gradient to it and the weight
            gets no .grad. Nothing is added for a frozen weight.
        backend: "auto"; "cuda" (where logits are not kept, products on a Hopper GPU that never write them; not with a
            bias or a softcap); "triton", "cpu" (PyTorch's products and these row kernels); or "torch" (the reference,
            for higher derivatives: all logits at once).

    Returns:
        LogprobOutput(logprobs, entropy): [...], float32 (float64 for float64 hidden or weight).

    Raises:
        ValueError: shapes or devices disagree, a weight of another height than the shard's, temperature or softcap not
            positive, an unknown choice.
        TypeError: a dtype not named above, a DTensor.
        IndexError: a target outside the vocabulary (on a CPU, and under FASTPPO_CHECK=1; elsewhere that row is
            NaN).
        RuntimeError: a backend that cannot run here, a second backward of saved logits, a second derivative on
            another backend than "torch".
    """
    check_choice("memory", memory, ("auto", "save", "recompute"))
    rows, per_row, head = check_head(
        hidden,
        weight,
        targets,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        ignore_index=ignore_index,
        with_entropy=with_entropy,
        vocab=vocab,
        reduce_dhidden=reduce_dhidden,
        logits_dtype=logits_dtype,
        weight_grad_into=weight_grad_into,
        backend=backend,
    )
    if (backend == "torch" or head.product == torch.float64) and vocab is None and weight_grad_into is None:
        plain_hidden, plain_weight, plain_bias = plain_operands(hidden, weight, bias, head)
        with torch.autocast(hidden.device.type, enabled=False):
            return LogprobOutput(
                *definition(
                    plain_hidden,
                    plain_weight,
                    targets.long(),
                    bias=plain_bias,
                    temperature=temperature,
                    softcap=softcap,
                    ignore_index=ignore_index,
                    with_entropy=with_entropy,
                    logits_dtype=logits_dtype,
                )
            )
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    fits = rows.numel() * head.used * head.logits.itemsize <= save_limit()
    save = wanted and (memory == "save" or memory == "auto" and fits)
    if wanted and memory == "auto" and not torch.compiler.is_compiling():
        _say_choice(save)
    logprobs, entropy, *_ = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, rows, per_row, weight_grad_into, head, vocab, reduce_dhidden, save
    )
    return LogprobOutput(logprobs.view(targets.shape), entropy.view(targets.shape) if with_entropy else None)


@cache
def _say_choice(save: bool) -> None:
    """Once for each of the two."""
    what = "are kept, three products: they fit in" if save else "are not kept, four products: they exceed"
    logger = logging.getLogger("fastppo")
    logger.info("linear_logprob, memory='auto': logits %s FASTPPO_SAVE_LIMIT, %d bytes", what, save_limit())


class _LinearLogprob(torch.autograd.Function):
    @forward_of_all_arguments
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        weight_grad_into: Tensor | None,
        head: Head,
        vocab: VocabShard | None,
        reduce_dhidden: str,
        save: bool,
    ) -> tuple[Tensor, ...]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        gathered = flat.new_empty(0)
        if gathers_hidden(vocab, reduce_dhidden):
            assert vocab is not None
            flat = gathered = gather_hidden(flat, vocab)
        local, logits = torch.ops.fastppo.linear_logprob_stats(flat, weight, bias, targets, temperature, save, *head)
        logprobs, entropy, stats = whole_stats(local, targets, temperature, head, vocab)
        return logprobs, entropy, stats, logits, gathered

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, weight, bias, targets, temperature, ctx.into, ctx.head, ctx.vocab, ctx.reduce_dhidden, ctx.save = inputs
        _, _, stats, logits, gathered = output
        ctx.mark_non_differentiable(*(output[2:] if ctx.head.with_entropy else output[1:]))
        ctx.set_materialize_grads(False)
        # What is gathered takes hidden's place; only one of the two is kept.
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        kept = gathered if gathers_hidden(ctx.vocab, ctx.reduce_dhidden) else hidden
        ctx.save_for_backward(kept, weight, bias, targets, temperature, stats, logits if ctx.save else None)
        ctx.spent = False

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_logprob")
        if ctx.spent:
            raise RuntimeError(
                "linear_logprob with memory='save' has no second backward: the logits hold their gradient; "
                "use memory='recompute'"
            )
        grad_logprobs, grad_entropy = grads[:2]
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 10
        hidden, weight, bias, targets, temperature, stats, logits = ctx.saved_tensors
        upstream = stats.new_zeros(stats.shape[0], 2)
        if grad_logprobs is not None:
            upstream[:, 0] = grad_logprobs
        if grad_entropy is not None:
            upstream[:, 1] = grad_entropy
        ctx.spent = ctx.save
        sharded = is_sharded(ctx.vocab)
        # The compiler of torch 2.8 knows neither _replace nor slices of a NamedTuple.
        *head, _with_entropy, start, used, backend, product, logits_dtype = ctx.head
        # Where nobody watches, the sum over ranks begins as soon as dhidden is there, under the weight's product.
        reduction = Reduction(ctx.vocab, ctx.reduce_dhidden)
        backward: Any = torch.ops.fastppo.linear_logprob_backward
        if reduction.needed and not traced(hidden, weight, stats, upstream):
            backward = partial(gradients_of, on_dhidden=reduction.begin)
        dhidden, dweight, dbias = backward(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            bias,
            targets,
            temperature,
            logits,
            stats,
            upstream,
            ctx.into,
            ctx.needs_input_grad[:3],
            sharded,
            *head,
            grad_entropy is not None,
            start,
            used,
            backend,
            product,
            logits_dtype,
        )
        if ctx.needs_input_grad[0]:
            dhidden = reduction.result(dhidden).to(ctx.dtype).view(ctx.shape)
        return (
            dhidden if ctx.needs_input_grad[0] else None,
            dweight if ctx.needs_input_grad[1] and ctx.into is None else None,
            dbias if ctx.needs_input_grad[2] else None,
            *(None,) * 7,
        )
