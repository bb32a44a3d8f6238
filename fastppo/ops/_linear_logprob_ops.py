"""The registered ops under `linear_logprob`: statistics of this rank's columns, and the gradients.

    linear_logprob_stats     hidden, weight -> (m, s - 1, t, zy) per row, and the logits where they are to be kept
    linear_logprob_backward  the logits, kept or made again, become dlogits; dhidden, dweight, dbias

One walk over chunks of rows (`backward`: a CPU, and logits that were kept) and one over chunks of columns
(`_backward_by_columns`: a GPU), in which dlogits come from logits or, on a Hopper GPU, at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastppo.ops._linear import (
    HEAD_SCHEMA,
    Gradients,
    Head,
    Plan,
    Product,
    chunk_rows,
    chunks,
    compacted,
    count_of,
    mm_into,
    mm_onto,
    narrow,
    no_stats,
    plan_of,
    row_stats,
    take,
    take_optional,
    where_any,
    write_dlogits,
)
from fastppo.ops._linear_sm90 import Dlogits, fuses
from fastppo.ops._linear_sm90 import stats as fused_stats


def _read_rows(targets: Tensor, ignore_index: int) -> slice | Tensor:
    """The rows that are multiplied: all but the ignored on a CPU, all elsewhere."""
    return where_any(targets != ignore_index) if targets.device.type == "cpu" else slice(0, targets.numel())


def _stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    save: bool,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Local statistics, [N, 4] or of chunks of columns [C, N, 4]; and, if saved, the logits [N, used]: those of the
    rows that are read come first."""
    head = Head(*options)
    if _fuses(hidden, bias, save, head):
        return _fused_stats(hidden, weight, targets, temperature, head), hidden.new_empty(0, dtype=head.logits)
    rows = _read_rows(targets, head.ignore_index)
    count = count_of(rows)
    plan = _plan(count, head, targets.device, save)
    stats = [no_stats(targets, head.sums) for _ in range(_num_column_chunks(plan, head))]
    if save:
        logits = hidden.new_empty(targets.numel(), head.used, dtype=head.logits)
    else:
        logits = _buffer(hidden, min(count, plan.rows), plan.columns, head.logits)
    if count and head.used:
        product = Product(weight, bias, head)
        for part in chunks(count, plan.rows):
            index = narrow(rows, part)
            of_hidden, of_targets = take(hidden, index), take(targets, index)
            of_temperature = take_optional(temperature, index)
            for into, columns in zip(stats, chunks(head.used, plan.columns), strict=True):
                block = logits[part] if save else _block(logits, of_targets.shape[0], columns)
                product.logits(of_hidden, block, columns)
                into[index] = row_stats(block, of_targets, of_temperature, _of_columns(head, columns))
    return stats[0] if len(stats) == 1 else torch.stack(stats), logits if save else logits.new_empty(0)


def _fuses(hidden: Tensor, bias: Tensor | None, save: bool, head: Head) -> bool:
    return not save and fuses(head, hidden.device, hidden.shape[1], bias is not None)


def _fused_stats(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None, head: Head) -> Tensor:
    if head.used == 0 or targets.numel() == 0:
        return no_stats(targets, head.sums)
    product = Product(weight, None, head)
    parts = [
        fused_stats(
            hidden[part].to(head.product), product.weight, targets[part], take_optional(temperature, part), head
        )
        for part in chunks(targets.numel(), plan_of(targets.numel(), head.used, targets.device).rows)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _plan(count: int, head: Head, device: torch.device, save: bool) -> Plan:
    if save:  # all columns, as dlogits are an operand whole
        return Plan(chunk_rows(count, head.used, device) if device.type == "cpu" else max(count, 1), max(head.used, 1))
    return plan_of(count, head.used, device)


def _num_column_chunks(plan: Plan, head: Head) -> int:
    return -(-head.used // plan.columns) if head.used > plan.columns else 1


def _of_columns(head: Head, columns: slice) -> Head:
    return head._replace(start=head.start + columns.start, used=columns.stop - columns.start)


def _buffer(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """For blocks of so many rows and columns at most."""
    return like.new_empty(rows * _row_stride(columns), dtype=dtype)


def _block(buffer: Tensor, rows: int, columns: slice) -> Tensor:
    """The buffer's beginning, as [rows, columns]."""
    stride = _row_stride(columns.stop - columns.start)
    return buffer[: rows * stride].view(rows, stride)[:, : columns.stop - columns.start]


def _row_stride(columns: int) -> int:
    """Rows begin at multiples of 16 bytes, which products and TMA are faster with or need."""
    return -(-columns // 8) * 8


def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    logits: Tensor | None,
    stats: Tensor,
    upstream: Tensor,
    weight_grad_into: Tensor | None,
    needs: list[bool],
    is_part: bool,
    *options: Any,
    on_dhidden: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dhidden (in float32 where it is a rank's part of a sum), dweight and dbias; empty where not needed. `on_dhidden`
    is called with dhidden before the last product, which is the weight's, where that is more than a chunk's part."""
    head = Head(*options)
    rows = _read_rows(targets, head.ignore_index)
    count = count_of(rows)
    plan = _plan(count, head, targets.device, logits is not None)
    if count and (_num_column_chunks(plan, head) > 1 or _fuses(hidden, bias, logits is not None, head)):
        return _backward_by_columns(
            plan, rows, hidden, weight, bias, targets, temperature, stats, upstream, weight_grad_into, needs, is_part,
            head,
        )  # fmt: skip
    size = plan.rows
    if logits is not None and head.logits == head.product:
        size = max(count, 1)  # dlogits are operands as they are: one product each
    product = Product(weight, bias, head)
    gradients = Gradients(
        product,
        hidden,
        -(-count // size),
        dhidden=(head.sums if is_part else hidden.dtype) if needs[0] else None,
        weight=needs[1],
        bias=needs[2],
        weight_grad_into=weight_grad_into,
    )
    buffer = hidden.new_empty(0 if logits is not None else min(count, size), head.used, dtype=head.logits)
    for part in chunks(count if head.used else 0, size):
        index = narrow(rows, part)
        kept: slice | Tensor = slice(0, part.stop - part.start)
        if targets.device.type == "cpu":
            order, live_rows = compacted((take(upstream, index) != 0).any(1))
            if live_rows == 0:
                continue
            if live_rows < order.numel():
                kept = order[:live_rows]
        if logits is not None:
            block = logits[part]
        else:
            block = buffer[: part.stop - part.start]
            product.logits(take(hidden, index), block)
        index = narrow(index, kept)
        block = write_dlogits(
            block,
            take(targets, index),
            take_optional(temperature, index),
            take(stats, index),
            take(upstream, index),
            head,
            kept if isinstance(kept, Tensor) else None,
        )
        live = None
        if targets.device.type != "cpu":
            live = (take(targets, index) != head.ignore_index) & (take(upstream, index) != 0).any(1)
        then = on_dhidden if part.stop == count else None
        gradients.add(block, take(hidden, index), index, live=live, then=then)
    dweight = gradients.weight_gradient()
    empty = stats.new_empty(0)
    return (
        empty if gradients.dhidden is None else gradients.dhidden,
        empty.clone() if dweight is None else dweight.to(weight.dtype),
        empty.clone() if gradients.dbias is None or bias is None else gradients.dbias.to(bias.dtype),
    )


def _backward_by_columns(
    plan: Plan,
    rows: slice | Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    stats: Tensor,
    upstream: Tensor,
    weight_grad_into: Tensor | None,
    needs: list[bool],
    is_part: bool,
    head: Head,
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` of logits that are made again in chunks of columns: dweight and dbias of a chunk are final, dhidden
    is summed over chunks in float32."""
    count, product, empty = count_of(rows), Product(weight, bias, head), stats.new_empty(0)
    dhidden = hidden.new_zeros(count, hidden.shape[1], dtype=head.sums) if needs[0] else None
    dweight = None
    if needs[1] and weight_grad_into is None:
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        dweight[head.used :] = 0
    dbias = bias.new_zeros(bias.shape) if needs[2] and bias is not None else None
    # Rows without a gradient have dlogits of 0, and hidden states that may hold anything: 0 * NaN must not be formed.
    live = (targets != head.ignore_index) & (upstream != 0).any(1)
    dtype, hidden = hidden.dtype, hidden.to(head.product)
    operand = torch.where(live[:, None], hidden, 0.0) if needs[1] else None
    fused = _fuses(hidden, bias, False, head)
    buffer = _buffer(hidden, min(count, plan.rows), plan.columns, head.product if fused else head.logits)
    parts = list(chunks(count, plan.rows))
    of_parts = []
    for part in parts:
        index = narrow(rows, part)
        per_row = take(targets, index), take_optional(temperature, index), take(stats, index), take(upstream, index)
        of_parts.append(_gradient(product, take(hidden, index), *per_row, fused=fused))
    for columns in chunks(head.used, plan.columns):
        total = None
        if needs[1]:
            if weight_grad_into is not None:
                total = weight_grad_into[columns]
            elif dweight is not None:
                # Several chunks of rows are added up in float32 and rounded once.
                total = dweight[columns] if len(parts) == 1 else dweight[columns].to(head.sums)
        of_bias = stats.new_zeros(columns.stop - columns.start) if dbias is not None else None
        for part, write in zip(parts, of_parts, strict=True):
            index = narrow(rows, part)
            block = _block(buffer, part.stop - part.start, columns)
            write(block, columns)
            if of_bias is not None:
                of_bias += block.sum(0, dtype=of_bias.dtype)
            with torch.autocast(product.device.type, enabled=False):
                dlogits = block.to(head.product)
                if dhidden is not None:
                    add = mm_into if columns.start == 0 else mm_onto
                    add(dhidden[part], dlogits, product.weight[columns])
                if total is not None and operand is not None:
                    add = mm_into if part.start == 0 and weight_grad_into is None else mm_onto
                    add(total, dlogits.t(), take(operand, index))
        if dweight is not None and total is not None and len(parts) > 1:
            dweight[columns] = total
        if dbias is not None and of_bias is not None:
            dbias[columns] = of_bias.to(dbias.dtype)
    if dhidden is not None and isinstance(rows, Tensor):
        dhidden = dhidden.new_zeros(hidden.shape).index_copy_(0, rows, dhidden)
    return (
        empty if dhidden is None else dhidden if is_part else dhidden.to(dtype),
        empty.clone() if dweight is None else dweight,
        empty.clone() if dbias is None else dbias,
    )


# Of some rows: writes the dlogits [n, columns] of these columns.
Gradient = Callable[[Tensor, slice], None]


def _gradient(
    product: Product,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    stats: Tensor,
    upstream: Tensor,
    *,
    fused: bool,
) -> Gradient:
    """From logits, which are turned into dlogits, or fused: at once."""
    head, per_row = product.head, (targets, temperature, stats, upstream)
    if fused:
        dlogits = Dlogits(hidden, *per_row, head)
        return lambda block, columns: dlogits.write(block, product.weight[columns], columns.start)

    def write(block: Tensor, columns: slice) -> None:
        product.logits(hidden, block, columns)
        write_dlogits(block, *per_row, _of_columns(head, columns))

    return write


_LIBRARY = torch.library.Library("fastppo", "FRAGMENT")
_LIBRARY.define(
    "linear_logprob_stats(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? temperature, bool save, "
    f"{HEAD_SCHEMA}) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "linear_logprob_backward(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? temperature, "
    "Tensor(a!)? logits, Tensor stats, Tensor upstream, Tensor(b!)? weight_grad_into, bool[] needs, bool partial, "
    f"{HEAD_SCHEMA}) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("linear_logprob_stats", _stats, "CompositeExplicitAutograd")
_LIBRARY.impl("linear_logprob_backward", backward, "CompositeExplicitAutograd")


@torch.library.register_fake("fastppo::linear_logprob_stats", lib=_LIBRARY)
def _(hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, temperature: Any, save: bool, *options: Any) -> Any:
    head = Head(*options)
    cut = not save and targets.device.type != "cpu" and not _fuses(hidden, bias, save, head)
    chunks = _num_column_chunks(plan_of(targets.numel(), head.used, targets.device), head) if cut else 1
    return (
        hidden.new_empty(([chunks] if chunks > 1 else []) + [targets.numel(), 4], dtype=head.sums),
        hidden.new_empty((targets.numel(), head.used) if save else (0,), dtype=head.logits),
    )


@torch.library.register_fake("fastppo::linear_logprob_backward", lib=_LIBRARY)
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Any,
    logits: Any,
    stats: Tensor,
    upstream: Tensor,
    into: Tensor | None,
    needs: list[bool],
    partial: bool,
    *options: Any,
) -> Any:
    head = Head(*options)
    dtype = head.sums if partial else hidden.dtype
    return (
        hidden.new_empty(hidden.shape, dtype=dtype) if needs[0] else stats.new_empty(0),
        torch.empty_like(weight, memory_format=torch.contiguous_format)
        if needs[1] and into is None
        else stats.new_empty(0),
        bias.new_empty(bias.shape) if needs[2] and bias is not None else stats.new_empty(0),
    )
