"""Any loss of log-probabilities and entropies, from hidden states and the output head, with three products in all.

Per chunk of rows: logits, their statistics, loss_fn on the chunk's vectors, its gradient there (the coefficients of
every row), dlogits over the logits, and the chunk's part of dhidden and dweight. Backward has no product left to make:
it multiplies both once by upstream * normaliser. Kept for it: dhidden, dweight, dbias.

Rows that do not count (`mask`, `ignore_index`) are left out of every product, rows whose coefficients are exactly 0
out of those of backward.

A loss of whole sequences (`cu_seqlens`) gets them whole: chunks end where sequences end. Where one is longer than a
chunk, all statistics are taken first, then the loss of all rows, then the chunks are multiplied again (four products).

Over a sharded vocabulary each chunk has the one all-gather of `vocab.py`, and backward sums dhidden over ranks once.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastppo.checks import (
    INTEGERS,
    check_choice,
    check_device,
    check_like,
    check_tensor,
    contents_checked,
)
from fastppo.ops._autograd import forward_of_all_arguments, refuse_double_backward
from fastppo.ops._linear import (
    Gradients,
    Head,
    Inputs,
    Product,
    Reduction,
    check_head,
    chunk_rows,
    chunks,
    columns_of_a_rank,
    compacted,
    count_of,
    gather_hidden,
    gathers_hidden,
    is_sharded,
    narrow,
    plain_operands,
    row_options,
    row_stats,
    scaled,
    take,
    take_optional,
    usual_rows,
    where_any,
    whole_stats,
    write_dlogits,
)
from fastppo.ops.linear_logprob import linear_logprob
from fastppo.packing import check_cu_seqlens
from fastppo.reference.linear_loss import linear_loss as definition
from fastppo.vocab import VocabShard

LossFn = Callable[[Tensor, "Tensor | None", dict[str, Tensor]], tuple[Tensor, Tensor]]
RESERVED = ("mask", "cu_seqlens")


class LinearLossOutput(NamedTuple):
    loss: Tensor
    metrics: Tensor
    logprobs: Tensor
    entropy: Tensor | None


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_fn: LossFn,
    *,
    rows: Mapping[str, Tensor] | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    with_entropy: bool = True,
    vocab: VocabShard | None = None,
    reduce_dhidden: Literal["all_reduce", "reduce_scatter", "none"] = "all_reduce",
    logits_dtype: torch.dtype | None = None,
    weight_grad_into: Tensor | None = None,
    chunk_tokens: int | None = None,
    compact: Literal["auto", "off"] = "auto",
    num_rows: int | None = None,
    backend: Literal["auto", "cuda", "triton", "cpu", "torch"] = "auto",
) -> LinearLossOutput:
    """loss_fn of the log-probs and entropies that `linear_logprob` would give, and its gradients, in one pass.

    loss_fn(logprobs [n], entropy [n], rows) -> (loss, metrics) is called once per chunk and its results are added: it
    must be a sum over its tokens (or sequences), divided by counts that were fixed beforehand, not a mean over what
    it is given. It may be any differentiable function; its gradient with respect to logprobs and entropy is taken
    inside, and it may depend on nothing else that requires grad. What it reads of `rows` comes cut to the same n
    tokens.

    Args:
        hidden, weight, targets, bias, temperature, softcap, ignore_index, with_entropy, vocab, reduce_dhidden,
            logits_dtype, weight_grad_into: as in `fastppo.linear_logprob`; without with_entropy loss_fn gets None.
        loss_fn: see above. Also gets rows["mask"] ([n] bool: the tokens that count; all of them unless
            compact="off") and, where cu_seqlens is given, rows["cu_seqlens"] of its n tokens.
        rows: name -> [..., any] per-token tensors, of targets' shape and maybe more dimensions. None may require
            grad.
        mask: of targets' shape, any dtype, read as != 0: the tokens that count. A target of ignore_index does not
            count either. What other positions hold reaches nothing. None: all.
        cu_seqlens: [B + 1], int32 or int64, of the flattened tokens: loss_fn needs whole sequences and gets them.
        chunk_tokens: tokens whose logits exist at once; None: measured, by the size of the vocabulary. A sequence
            longer than that takes a fourth product, and says so once.
        compact: "auto" leaves tokens that do not count, and those with coefficients of exactly 0, out of the
            products; on an accelerator it reads their number. "off" reads nothing and multiplies them too.
        num_rows: how many tokens count, where the host knows it: spares an accelerator the first reading.
        backend: as in `fastppo.linear_logprob`.

    Returns:
        LinearLossOutput(loss, metrics, logprobs, entropy): the sums of loss_fn's results; logprobs and entropy of
        targets' shape, float32, 0 where not selected. Only `loss` is differentiable, in hidden, weight and bias, and
        once: a second backward raises. Under no_grad the gradients' products are not made. Under torch.compile it is
        `linear_logprob` followed by loss_fn, with compact="off".

    Raises:
        ValueError, TypeError, IndexError: as `fastppo.linear_logprob`; rows, mask or cu_seqlens of another shape or
            device, a row tensor or another that loss_fn uses that requires grad, chunk_tokens < 1, num_rows other than
            the number of rows.
        RuntimeError: a second backward, a second derivative on another backend than "torch".
    """
    if rows is not None and not isinstance(rows, Mapping):
        raise TypeError(f"rows must be a mapping of names to tensors, got {type(rows).__name__}")
    check_tensor("targets", targets, INTEGERS)
    targets = targets.long()
    if mask is not None:  # first: what an unselected position holds is not looked at
        check_tensor("mask", mask, dtypes=None)
        check_like("mask", mask, "targets", targets)
        targets = torch.where(mask != 0, targets, ignore_index)
    inputs = check_head(
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
    if chunk_tokens is not None and (isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int)):
        raise TypeError(f"chunk_tokens must be an int or None, got {type(chunk_tokens).__name__}")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be >= 1, got {chunk_tokens}")
    check_choice("compact", compact, ("auto", "off"))
    for name, value in (rows or {}).items():
        _check_row(name, value, targets)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, targets.numel(), like=targets)
    if (backend == "torch" or inputs.head.product == torch.float64) and vocab is None and weight_grad_into is None:
        plain_hidden, plain_weight, plain_bias = plain_operands(hidden, weight, bias, inputs.head)
        with torch.autocast(hidden.device.type, enabled=False):
            return LinearLossOutput(
                *definition(
                    plain_hidden,
                    plain_weight,
                    targets,
                    loss_fn,
                    rows=dict(rows or {}),
                    mask=mask,
                    cu_seqlens=cu_seqlens,
                    bias=plain_bias,
                    temperature=temperature,
                    softcap=softcap,
                    ignore_index=ignore_index,
                    with_entropy=with_entropy,
                    logits_dtype=logits_dtype,
                )
            )
    selected = inputs.targets != ignore_index
    flat = {name: x.detach().reshape(-1, *x.shape[targets.dim() :]) for name, x in (rows or {}).items()}
    if torch.compiler.is_compiling():
        logprobs, entropy = linear_logprob(
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
        given = flat | {"mask": selected} | ({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens.long()})
        loss, metrics = loss_fn(logprobs.reshape(-1), None if entropy is None else entropy.reshape(-1), given)
        return LinearLossOutput(loss, metrics, logprobs.detach(), None if entropy is None else entropy.detach())
    capturing = targets.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    chosen: slice | Tensor = slice(0, selected.numel())
    if compact == "auto" and not capturing:
        chosen = _chosen(selected, num_rows)
    if cu_seqlens is not None:
        counted = selected if isinstance(chosen, Tensor) else torch.ones_like(selected)
        cu_seqlens = F.pad(counted.cumsum(0), (1, 0))[cu_seqlens.long()]
    wanted = torch.is_grad_enabled()
    if chunk_tokens is None:
        chunk_tokens = default_chunk(
            count_of(chosen),
            columns_of_a_rank(inputs.head, vocab),
            hidden.shape[-1] if wanted and weight.requires_grad else 0,
            targets.device,
            even=cu_seqlens is None,
        )
    work = _Work(
        inputs=inputs,
        vocab=vocab,
        reduce_dhidden=reduce_dhidden,
        weight_grad_into=weight_grad_into,
        loss_fn=loss_fn,
        rows=flat | {"mask": selected},
        chosen=chosen,
        compact=compact == "auto" and not capturing,
        cu_seqlens=cu_seqlens,
        size=chunk_tokens,
        needs=tuple(wanted and x is not None and x.requires_grad for x in (hidden, weight, bias)),
    )
    loss, metrics, logprobs, entropy, *_ = _LinearLoss.apply(hidden, weight, bias, work)  # type: ignore[no-untyped-call]
    return LinearLossOutput(
        loss, metrics, logprobs.view(targets.shape), entropy.view(targets.shape) if with_entropy else None
    )


@dataclass
class _Work:
    """What one call does, behind its door."""

    inputs: Inputs  # a target that does not count is ignore_index
    vocab: VocabShard | None
    reduce_dhidden: str
    weight_grad_into: Tensor | None
    loss_fn: LossFn
    rows: dict[str, Tensor]  # [N, ...]
    chosen: slice | Tensor  # the rows that are multiplied
    compact: bool
    cu_seqlens: Tensor | None  # of the chosen rows
    size: int  # rows of a chunk
    needs: tuple[bool, ...]  # of hidden, weight, bias
    losses: list[Tensor] = field(default_factory=list)
    metrics: list[Tensor] = field(default_factory=list)


class _LinearLoss(torch.autograd.Function):
    @forward_of_all_arguments
    def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work) -> tuple[Tensor | None, ...]:
        head, hidden = work.inputs.head, hidden.reshape(-1, hidden.shape[-1])
        if gathers_hidden(work.vocab, work.reduce_dhidden):
            assert work.vocab is not None
            hidden = gather_hidden(hidden, work.vocab)
        logprobs = torch.zeros(work.inputs.targets.numel(), dtype=head.sums, device=hidden.device)
        entropy = torch.zeros_like(logprobs)

        def per_row(index: slice | Tensor) -> tuple[Tensor, Tensor | None]:
            return take(work.inputs.targets, index), take_optional(work.inputs.temperature, index)

        def keep(index: slice | Tensor, local: Tensor) -> Tensor:
            """This rank's statistics of these rows -> their results, and what backward needs."""
            logprobs[index], of_rows, kept = whole_stats(local, *per_row(index), head, work.vocab)
            if head.with_entropy:
                entropy[index] = of_rows
            return kept

        def coefficients(index: slice | Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, bool]:
            return _coefficients(
                work, take(logprobs, index), take(entropy, index) if head.with_entropy else None, index, cu_seqlens
            )

        parts, spans = _parts(work, count_of(work.chosen))
        gradients: Gradients | None = None
        if any(work.needs):
            gradients = _walk(work, hidden, weight, bias, parts, spans, per_row, keep, coefficients)
        else:  # of the logits nothing is wanted but statistics
            for i, part in enumerate(parts):
                index = narrow(work.chosen, part)
                of_rows = take(hidden, index), weight, bias, *per_row(index)
                keep(index, torch.ops.fastppo.linear_logprob_stats(*of_rows, False, *head)[0])
                if spans is not None:
                    coefficients(index, spans[i])
            if spans is None:
                coefficients(work.chosen, work.cu_seqlens)
        loss = torch.stack([x.double() for x in work.losses]).sum().to(work.losses[0].dtype)
        return (
            loss,
            torch.stack(work.metrics).sum(0),
            logprobs,
            entropy if head.with_entropy else entropy.new_empty(0),
            *((None, None, None) if gradients is None else gradients.results()),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        hidden, weight, bias, work = inputs
        ctx.mark_non_differentiable(*(x for x in output[1:] if x is not None))
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dtypes = hidden.shape, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.vocab, ctx.reduce_dhidden, ctx.into = work.vocab, work.reduce_dhidden, work.weight_grad_into
        ctx.backend = row_options(work.inputs.head).backend
        ctx.save_for_backward(*output[4:])
        ctx.spent = False

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        refuse_double_backward("linear_loss")
        if ctx.spent:
            raise RuntimeError(
                "linear_loss (linear_ppo_loss) has no second backward: its gradients were scaled in place and handed "
                "out; add the losses before one backward"
            )
        upstream = grads[0]
        if upstream is None:
            return None, None, None, None
        ctx.spent = True
        dhidden, dweight, dbias = ctx.saved_tensors
        if dhidden is not None:
            dhidden = scaled(dhidden, upstream, dhidden.dtype, ctx.backend)
            dhidden = Reduction(ctx.vocab, ctx.reduce_dhidden).result(dhidden).to(ctx.dtypes[0]).view(ctx.shape)
        if dweight is not None and ctx.into is not None:
            ctx.into.addcmul_(dweight, upstream)  # no [V, D] temporary on a GPU, whatever dweight's dtype
            dweight = None
        elif dweight is not None:
            dweight = scaled(dweight, upstream, ctx.dtypes[1], ctx.backend)
        if dbias is not None:
            dbias = scaled(dbias, upstream, ctx.dtypes[2], ctx.backend)
        return dhidden, dweight, dbias, None


def _walk(
    work: _Work,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parts: list[slice],
    spans: list[Tensor | None] | None,
    per_row: Callable[[slice | Tensor], tuple[Tensor, Tensor | None]],
    keep: Callable[[slice | Tensor, Tensor], Tensor],
    coefficients: Callable[[slice | Tensor, Tensor | None], tuple[Tensor, bool]],
) -> Gradients:
    """The chunks of rows, one after the other: logits, their statistics, the loss, its gradients."""
    head, product = work.inputs.head, Product(weight, bias, work.inputs.head)
    gradients = Gradients(
        product,
        hidden,
        len(parts),
        dhidden=_dhidden_dtype(hidden, head, work.vocab) if work.needs[0] else None,
        weight=work.needs[1],
        bias=work.needs[2],
    )
    buffer = hidden.new_empty(max(p.stop - p.start for p in parts), head.used, dtype=head.logits)

    def logits_of(index: slice | Tensor) -> Tensor:
        block = buffer[: count_of(index)]
        product.logits(take(hidden, index), block)
        return block

    def statistics(index: slice | Tensor, block: Tensor) -> Tensor:
        return keep(index, row_stats(block, *per_row(index), head))

    indices = [narrow(work.chosen, part) for part in parts]
    if spans is None:  # a sequence longer than a chunk
        stats = torch.cat([statistics(index, logits_of(index)) for index in indices])
        upstream, of_entropy = coefficients(work.chosen, work.cu_seqlens)
        for part, index in zip(parts, indices, strict=True):
            _add_gradients(work, gradients, hidden, index, logits_of(index), stats[part], upstream[part], of_entropy)
    else:
        for index, cu_seqlens in zip(indices, spans, strict=True):
            block = logits_of(index)
            kept = statistics(index, block)
            _add_gradients(work, gradients, hidden, index, block, kept, *coefficients(index, cu_seqlens))
    return gradients


def _coefficients(
    work: _Work, logprobs: Tensor, entropy: Tensor | None, index: slice | Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, bool]:
    """[n, 2], d loss / d logprobs and / d entropy of these rows, and whether the latter is any; keeps the results."""
    wanted = any(work.needs)
    given = {name: take(x, index) for name, x in work.rows.items()}
    if cu_seqlens is not None:
        given["cu_seqlens"] = cu_seqlens
    leaves = [x.detach().clone().requires_grad_(wanted) for x in (logprobs, entropy) if x is not None]
    with torch.set_grad_enabled(wanted):
        result = work.loss_fn(leaves[0], leaves[1] if len(leaves) == 2 else None, given)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"loss_fn must return a pair (loss, metrics), got {type(result).__name__}")
    loss, metrics = result
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return (loss, metrics) with a 0-dim loss, got {got}")
    if not isinstance(metrics, Tensor):
        raise TypeError(
            f"loss_fn must return (loss, metrics) with metrics a torch.Tensor, got {type(metrics).__name__}"
        )
    if work.metrics and metrics.shape != work.metrics[0].shape:
        raise ValueError(
            f"loss_fn must return metrics of one shape for every chunk, {list(work.metrics[0].shape)}, "
            f"got {list(metrics.shape)}"
        )
    if wanted and not work.losses:
        _check_captured(loss, leaves)
    work.losses.append(loss.detach())
    work.metrics.append(metrics.detach())
    upstream, of_entropy = logprobs.new_zeros(logprobs.shape[0], 2), False
    if wanted and loss.requires_grad:
        for column, grad in enumerate(torch.autograd.grad(loss, leaves, allow_unused=True)):
            if grad is not None:
                upstream[:, column] = grad
                of_entropy = column == 1
    return upstream, of_entropy


def _check_captured(loss: Tensor, leaves: list[Tensor]) -> None:
    """Whether the loss depends on something else that requires grad, whose gradient nobody would take."""
    seen: set[Any] = set()
    pending: list[Any] = [loss.grad_fn]
    found = loss if loss.grad_fn is None and loss.requires_grad else None
    while pending and found is None:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and all(variable is not leaf for leaf in leaves):
            found = variable
        pending += [following for following, _ in node.next_functions]
    if found is not None:
        raise ValueError(
            "loss_fn must be differentiable in logprobs and entropy alone, got a loss that depends on another tensor "
            f"that requires grad, of shape {list(found.shape)}: detach it, or add its part outside"
        )


def _add_gradients(
    work: _Work,
    gradients: Gradients,
    hidden: Tensor,
    index: slice | Tensor,
    block: Tensor,
    stats: Tensor,
    upstream: Tensor,
    of_entropy: bool,
) -> None:
    """The chunk's logits become dlogits and give their part of the gradients."""
    rows = upstream.shape[0]
    if rows == 0:
        return
    head, live = work.inputs.head._replace(with_entropy=of_entropy), (upstream != 0).any(1)
    chosen, source = index, None
    order, count = compacted(live) if work.compact else (None, rows)
    if order is not None:
        chosen, stats, upstream = narrow(index, order), stats[order], upstream[order]
    factor = None
    if torch.float16 in (head.logits, head.product):
        # A loss divided by many tokens has coefficients below float16's range; a power of two brings them back.
        largest = upstream.abs().amax()
        exponent = torch.where(largest.isfinite(), torch.frexp(largest)[1], 0)
        upstream, factor = torch.ldexp(upstream, -exponent), torch.ldexp(torch.ones_like(largest), exponent)
    targets, temperature = take(work.inputs.targets, chosen), take_optional(work.inputs.temperature, chosen)
    if order is not None:
        rows = int(count)  # waits for the device, which has been given before what could be: it is idle from here on
        if rows == 0:
            return
        if rows < live.numel():
            index, source = narrow(chosen, slice(0, rows)), order[:rows]
            targets, stats, upstream = targets[:rows], stats[:rows], upstream[:rows]
            temperature = None if temperature is None else temperature[:rows]
    block = write_dlogits(block, targets, temperature, stats, upstream, head, source)
    live_rows = None if work.compact else live & (targets != head.ignore_index)
    gradients.add(block, take(hidden, index), index, live=live_rows, factor=factor)


def _parts(work: _Work, count: int) -> tuple[list[slice], list[Tensor | None] | None]:
    """Chunks of the chosen rows and each one's cu_seqlens; None for these where a sequence is longer than a chunk."""
    plain = list(chunks(count, work.size)) or [slice(0, 0)]
    if work.cu_seqlens is None:
        return plain, [None] * len(plain)
    offsets = work.cu_seqlens.tolist()
    if any(stop - start > work.size for start, stop in pairwise(offsets)):
        if any(work.needs):
            _say_four_products()
        return plain, None
    cuts = [0]  # indices into the offsets
    for i in range(1, len(offsets)):
        if offsets[i] - offsets[cuts[-1]] > work.size:
            cuts.append(i - 1)
    cuts.append(len(offsets) - 1)
    parts = [slice(offsets[a], offsets[b]) for a, b in pairwise(cuts)]
    return parts, [work.cu_seqlens[a : b + 1] - offsets[a] for a, b in pairwise(cuts)]


def _say_four_products() -> None:
    warnings.warn(
        "a sequence is longer than chunk_tokens and the loss is one of whole sequences: the logits of this loss are "
        "formed twice (four products instead of three); raise chunk_tokens if memory allows",
        stacklevel=2,
    )


def default_chunk(count: int, columns: int, trained: int, device: torch.device, *, even: bool) -> int:
    """Rows of a chunk of `count`; `trained` is D of a head that is trained, else 0.

    On a GPU several chunks need dweight in float32, V x D x 2 bytes more than one chunk: as much as the logits of D
    rows. All at once where that would be all they save.
    """
    usual = usual_rows(columns, device)
    if device.type != "cpu" and count <= usual + trained:
        return max(count, 1)
    # Even parts, but where sequences are to fit, which cut unevenly anyway.
    return chunk_rows(count, columns, device) if even else usual


def _chosen(selected: Tensor, num_rows: int | None) -> slice | Tensor:
    """The rows that count. `num_rows`, where given, is how many: nothing is read from an accelerator."""
    if num_rows is None:
        return where_any(selected)
    if isinstance(num_rows, bool) or not isinstance(num_rows, int) or num_rows < 0:
        raise ValueError(f"num_rows must be an int >= 0, got {num_rows!r}")
    if contents_checked(selected) and int(selected.sum()) != num_rows:
        raise ValueError(f"num_rows must be the {int(selected.sum())} rows that count, got {num_rows}")
    if num_rows == selected.numel():
        return slice(0, num_rows)
    return torch.nonzero_static(selected, size=num_rows)[:, 0]


def _dhidden_dtype(hidden: Tensor, head: Head, vocab: VocabShard | None) -> torch.dtype:
    """float32 where ranks are summed, and where a loss scale may yet lift what float16 would lose."""
    return head.sums if is_sharded(vocab) or torch.float16 in (hidden.dtype, head.product) else hidden.dtype


def _check_row(name: str, value: object, targets: Tensor) -> None:
    label = f"rows[{name!r}]"
    if name in RESERVED:
        raise ValueError(f"rows must not hold {name!r}, which loss_fn is given besides, got {name!r}")
    check_tensor(label, value, dtypes=None)
    assert isinstance(value, Tensor)
    if value.shape[: targets.dim()] != targets.shape:
        raise ValueError(f"{label} must begin with targets' shape {list(targets.shape)}, got {list(value.shape)}")
    check_device(label, value, "targets", targets)
    if value.requires_grad:
        raise ValueError(f"{label} must not require grad: no gradient flows to it, got one that does")
