"""What the linear ops share: their head arguments, the product with the output head, and its gradients, by row chunks.

Legend: N rows (tokens), n rows of a chunk, D hidden size, V columns of this rank, of which `Head.used` are real ids.

On a CPU the products of logits and dhidden cost the same per row from 256 rows on (docs/kernels/linear_logprob.md), so
a chunk is about that many rows, or as many as 2^23 logits make where the vocabulary is small.

On a GPU log-probs come in chunks of columns, of all rows or many: dweight of a chunk is final then, and only dhidden,
which is smaller, is summed over chunks.
"""

import math
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fastppo.backends import NAMES, resolve
from fastppo.checks import (
    INTEGERS,
    check_choice,
    check_device,
    check_like,
    check_tensor,
)
from fastppo.ops._logprob_ops import ROW_SCHEMA, RowOptions, check_rows
from fastppo.ops._tracing import traced
from fastppo.vocab import (
    NOT_HERE,
    VocabShard,
    gather_rows,
    gather_stats,
    merge_stats,
    sum_and_scatter_rows,
    sum_over_ranks,
    waited,
)

CHUNK_ROWS = 256
CHUNK_LOGITS_CPU = 1 << 23
CHUNK_LOGITS_ACCELERATOR = 1 << 29
# Of log-probs on a GPU: rows of a chunk at most, and its logits, about.
CHUNK_ROWS_GPU = 1 << 14
CHUNK_LOGITS_GPU = 1 << 27
# A tile of cuBLAS' products there.
TILE_ROWS, TILE_COLUMNS = 128, 256
REDUCTIONS = ("all_reduce", "reduce_scatter", "none")


class Head(NamedTuple):
    """What a head's arguments come down to, in the order in which the registered ops take them."""

    temperature: float  # 1 where there is one per row
    softcap: float | None
    ignore_index: int
    with_entropy: bool
    start: int  # id of this rank's first column
    used: int  # this rank's columns that are real ids
    backend: str  # of the products, and of the row kernels where it is not "cuda"
    product: torch.dtype  # of the operands of every product
    logits: torch.dtype

    @property
    def sums(self) -> torch.dtype:
        return torch.float64 if self.product == torch.float64 else torch.float32


HEAD_SCHEMA = f"{ROW_SCHEMA}, ScalarType product, ScalarType logits_dtype"


def row_options(head: Head) -> RowOptions:
    """Of the row kernels, for what is not done together with the products: that backend "cuda" is of those."""
    options = RowOptions(*head[:7])
    return options._replace(backend="auto") if head.backend == "cuda" else options


def row_stats(logits: Tensor, targets: Tensor, temperature: Tensor | None, head: Head) -> Tensor:
    """[n, 4] statistics of this rank's columns; the one place here that calls the row kernel's forward."""
    stats: Tensor = torch.ops.fastppo.logprob_stats(logits, targets, temperature, *row_options(head))
    return stats


def write_dlogits(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    kept: Tensor,
    upstream: Tensor,
    head: Head,
    source: Tensor | None = None,
) -> Tensor:
    """The logits become their gradient, of the `compacted` rows in `source` alone if that is given; the one place here
    that calls the row kernel's backward."""
    grad_logprobs, grad_entropy = upstream.unbind(1)
    torch.ops.fastppo.logprob_dlogits_(
        logits,
        targets,
        temperature,
        kept,
        grad_logprobs,
        grad_entropy if head.with_entropy else None,
        *row_options(head),
        source,
    )
    return logits if source is None else logits[: source.numel()]


def whole_stats(
    local: Tensor, targets: Tensor, temperature: Tensor | None, head: Head, vocab: VocabShard | None
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's statistics, [n, 4] or of chunks of its columns [C, n, 4] -> logprobs, entropy (empty without
    with_entropy) and what the backward needs."""
    if local.dim() == 3 and is_sharded(vocab):
        local = merge_stats(local, head.temperature if temperature is None else temperature)
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.fastppo.logprob_combine(
        local if local.dim() == 3 else gather_stats(local, vocab),
        targets,
        temperature,
        head.temperature,
        head.ignore_index,
        head.with_entropy,
        row_options(head).backend,
    )
    return result


def no_stats(targets: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, 4] of rows that are not read, and of a rank without columns."""
    stats = torch.zeros(targets.numel(), 4, dtype=dtype, device=targets.device)
    stats[:, 0] = -torch.inf
    stats[:, 1] = -1
    stats[:, 3] = NOT_HERE
    return stats


# -- rows -------------------------------------------------------------------------------------------------------------


def chunk_rows(count: int, columns: int, device: torch.device) -> int:
    """Rows of a chunk of `count`: even parts, as a small last one would cost more than its share."""
    about = usual_rows(columns, device)
    return max(1, -(-count // max(1, (2 * count + about) // (2 * about))))


def usual_rows(columns: int, device: torch.device) -> int:
    logits = CHUNK_LOGITS_CPU if device.type == "cpu" else CHUNK_LOGITS_ACCELERATOR
    return max(CHUNK_ROWS, logits // max(columns, 1))


class Plan(NamedTuple):
    """How the logits of log-probs are cut where they are not kept; forward and backward cut alike."""

    rows: int
    columns: int


def plan_of(count: int, columns: int, device: torch.device) -> Plan:
    """`count` rows of this rank's columns."""
    columns = max(columns, 1)
    if device.type == "cpu":
        return Plan(chunk_rows(count, columns, device), columns)
    rows = max(1, -(-count // max(1, -(-count // CHUNK_ROWS_GPU))))
    if rows * columns <= CHUNK_LOGITS_GPU:
        return Plan(rows, columns)
    # Whole waves: a product of so many columns has a multiple of as many tiles as there are multiprocessors.
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wave = TILE_COLUMNS * (processors // math.gcd(processors, -(-rows // TILE_ROWS)))
    if wave * rows > 2 * CHUNK_LOGITS_GPU:
        wave = TILE_COLUMNS
    return Plan(rows, min(columns, wave * max(1, round(CHUNK_LOGITS_GPU / rows / wave))))


def chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, max(size, 1)):
        yield slice(start, min(start + size, count))


def take(x: Tensor, rows: slice | Tensor) -> Tensor:
    return x.index_select(0, rows) if isinstance(rows, Tensor) else x[rows]


def take_optional(x: Tensor | None, rows: slice | Tensor) -> Tensor | None:
    return None if x is None else take(x, rows)


def narrow(rows: slice | Tensor, part: slice | Tensor) -> slice | Tensor:
    """Which rows of the whole the `part` of these rows is."""
    if isinstance(rows, Tensor):
        return take(rows, part)
    return part + rows.start if isinstance(part, Tensor) else slice(rows.start + part.start, rows.start + part.stop)


def where_any(wanted: Tensor) -> slice | Tensor:
    """The rows that are wanted: indices, or a slice where that is all of them. Reads the device."""
    indices = wanted.nonzero()[:, 0]
    return indices if indices.numel() < wanted.numel() else slice(0, wanted.numel())


def count_of(rows: slice | Tensor) -> int:
    return rows.numel() if isinstance(rows, Tensor) else rows.stop - rows.start


def compacted(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """An order of rows whose first `count` (0-dim) are the wanted ones, and that count. The i-th of them is i, or where
    that is not wanted one from beyond the count: the others' places are filled from the end, so that no row moves over
    another that is wanted. Reads nothing from the device."""
    rows = wanted.numel()
    here, upto = torch.arange(rows, device=wanted.device), wanted.cumsum(0)
    count = upto[-1] if rows else upto.sum()
    indices = torch.nonzero_static(wanted, size=rows, fill_value=0)[:, 0]
    from_end = (upto - here + (count - 1)).clamp_(0, max(rows - 1, 0))
    return torch.where(wanted | (here >= count), here, indices[from_end]), count


# -- the head ---------------------------------------------------------------------------------------------------------


class Product:
    """The head's weight and bias, ready to be multiplied with. Autocast has no say inside."""

    def __init__(self, weight: Tensor, bias: Tensor | None, head: Head):
        self.head, self.device, self.width = head, weight.device, weight.shape[0]
        self.weight = weight[: head.used].to(head.product)
        # Logits in a wider dtype than the product's need wider operands, of the same values.
        self.wide = torch.promote_types(head.product, head.logits)
        self.bias = None if bias is None else bias[: head.used].to(head.product).to(self.wide)

    @cached_property
    def forward_weight(self) -> Tensor:
        return self.weight.to(self.wide)

    def logits(self, hidden: Tensor, out: Tensor, columns: slice = slice(None)) -> None:
        """out [n, V] = hidden [n, D] @ weight.T + bias, of these columns, rounded to out's dtype."""
        with torch.autocast(self.device.type, enabled=False):
            hidden = hidden.to(self.head.product).to(self.wide)
            same = out if out.dtype == self.wide else None
            weight = self.forward_weight[columns].t()
            if self.bias is None:
                result = torch.mm(hidden, weight, out=same)
            else:
                result = torch.addmm(self.bias[columns], hidden, weight, out=same)
            if same is None:
                out.copy_(result)


def widens(a: Tensor, dtype: torch.dtype) -> bool:
    """Whether a product with `a` can be written in this wider dtype without being rounded to a's before."""
    return a.is_cuda and dtype == torch.float32 and "dtype_out" in torch.ops.aten.addmm.overloads()


def scaled(x: Tensor, upstream: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """x * upstream (0-dim), rounded once to `dtype`; x itself where it has that dtype."""
    wide = torch.promote_types(x.dtype, dtype)
    if not traced(x, upstream) and resolve("logprob", backend, x.device, wide)[0] == "triton":
        from fastppo.kernels.scale import scale

        out = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
        scale(x, upstream, out)
        return out
    if x.device.type == "cpu" and not torch.compiler.is_compiling() and upstream == 1:
        return x.to(dtype)
    # Widened first: a half's product would be rounded a second time.
    return x.to(wide).mul_(upstream).to(dtype)


def mm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif widens(a, out.dtype):
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.mm(a, b))


def mm_onto(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif widens(a, out.dtype):
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.add_(torch.mm(a, b))


class Gradients:
    """dhidden, dweight and dbias of a head, gathered from chunks of dlogits.

    A chunk's dhidden is final. dweight is summed over chunks in float32; a single chunk leaves it in the product's
    dtype, rounded once. `weight_grad_into` is added to where it is.
    """

    def __init__(
        self,
        product: Product,
        hidden: Tensor,
        num_chunks: int,
        *,
        dhidden: torch.dtype | None,
        weight: bool,
        bias: bool,
        weight_grad_into: Tensor | None = None,
    ):
        self.product, self.needs_weight, self.needs_bias = product, weight, bias
        self.dtype = product.head.sums
        self.dhidden = None if dhidden is None else torch.zeros(hidden.shape, dtype=dhidden, device=hidden.device)
        self.dweight: Tensor | None = None
        self.into = weight_grad_into
        self.single, self.shape = num_chunks <= 1, (product.width, hidden.shape[1])
        self.dbias = torch.zeros(product.width, dtype=self.dtype, device=hidden.device) if bias else None

    def add(
        self,
        dlogits: Tensor,
        hidden: Tensor,
        rows: slice | Tensor,
        *,
        live: Tensor | None = None,
        factor: Tensor | None = None,
        then: Callable[[Tensor], None] | None = None,
    ) -> None:
        """dlogits [n, V] and hidden [n, D] of these rows of the whole; `factor` multiplies what they give. `then` is
        called with the whole's dhidden before the weight's product.

        Rows that are not `live` (None: all are) have dlogits of 0, and may hold anything: 0 * NaN must not be formed.
        """
        used, product = self.product.head.used, self.product
        if dlogits.numel() == 0:
            return
        with torch.autocast(product.device.type, enabled=False):
            if self.dbias is not None:
                dbias = dlogits.sum(0, dtype=self.dtype)
                self.dbias[:used] += dbias if factor is None else dbias * factor
            dlogits = dlogits.to(product.head.product)
            if self.dhidden is not None:
                direct = isinstance(rows, slice) and factor is None
                dhidden = self.dhidden[rows] if direct else self.dhidden.new_empty(dlogits.shape[0], hidden.shape[1])
                mm_into(dhidden, dlogits, product.weight)
                if factor is not None:
                    dhidden *= factor
                if isinstance(rows, Tensor):
                    self.dhidden.index_copy_(0, rows, dhidden)
                elif not direct:
                    self.dhidden[rows] = dhidden
                if then is not None:
                    then(self.dhidden)
            if self.needs_weight:
                hidden = hidden if live is None else torch.where(live[:, None], hidden, 0.0)
                self._add_weight(dlogits.t(), hidden.to(product.head.product), factor)

    def _add_weight(self, dlogits: Tensor, hidden: Tensor, factor: Tensor | None) -> None:
        used, device = self.product.head.used, hidden.device
        total = self.into if self.into is not None else self.dweight
        if total is None:  # the first chunk's part is written, not added to zeros
            dtype = hidden.dtype if self.single and factor is None else self.dtype
            total = self.dweight = torch.empty(self.shape, dtype=dtype, device=device)
            total[used:] = 0
            mm_into(total[:used], dlogits, hidden)
            if factor is not None:
                total *= factor
        elif factor is None:
            mm_onto(total[:used], dlogits, hidden)
        else:
            total[:used].add_(torch.mm(dlogits, hidden).to(total.dtype).mul_(factor))

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.dhidden, self.weight_gradient(), self.dbias

    def weight_gradient(self) -> Tensor | None:
        """[V, D]; None where it is not wanted or went into weight_grad_into."""
        if not self.needs_weight or self.into is not None:
            return None
        if self.dweight is None:
            self.dweight = torch.zeros(self.shape, dtype=self.product.head.product, device=self.product.device)
        return self.dweight


# -- ranks ------------------------------------------------------------------------------------------------------------


def is_sharded(vocab: VocabShard | None) -> bool:
    return vocab is not None and vocab.ranks > 1


def columns_of_a_rank(head: Head, vocab: VocabShard | None) -> int:
    """About how many columns each rank has: the same number on all, so that all make the same chunks."""
    if vocab is None or not is_sharded(vocab):
        return head.used
    return -(-vocab.vocab_size // vocab.ranks)


def gathers_hidden(vocab: VocabShard | None, reduce_dhidden: str) -> bool:
    return reduce_dhidden == "reduce_scatter" and is_sharded(vocab)


def gather_hidden(hidden: Tensor, vocab: VocabShard) -> Tensor:
    """[N / ranks, D] of each rank -> [N, D]."""
    return gather_rows(hidden, vocab) if hidden.numel() else hidden


class Reduction:
    """Of dhidden [N, D], this rank's columns' part: the sum over ranks, or this rank's [N / ranks, D] of it. One
    collective, which runs on the collectives' own stream from `begin` to `result`."""

    def __init__(self, vocab: VocabShard | None, reduce_dhidden: str):
        self.vocab, self.how = vocab, reduce_dhidden
        self.begun: Tensor | None = None

    @property
    def needed(self) -> bool:
        return self.how != "none" and is_sharded(self.vocab)

    def begin(self, dhidden: Tensor) -> None:
        if self.begun is None and self.needed and dhidden.numel():
            assert self.vocab is not None
            reduce = sum_over_ranks if self.how == "all_reduce" else sum_and_scatter_rows
            self.begun = reduce(dhidden, self.vocab)

    def result(self, dhidden: Tensor) -> Tensor:
        self.begin(dhidden)
        return dhidden if self.begun is None else waited(self.begun)


# -- the door ---------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    targets: Tensor  # [N] int64
    temperature: Tensor | None  # [N], where there is one per row
    head: Head


def check_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int,
    with_entropy: bool,
    vocab: VocabShard | None,
    reduce_dhidden: str,
    logits_dtype: torch.dtype | None,
    weight_grad_into: Tensor | None,
    backend: str,
) -> Inputs:
    """Every head argument, checked; raises as the public functions say."""
    check_tensor("hidden", hidden)
    check_tensor("weight", weight)
    check_tensor("targets", targets, INTEGERS)
    targets = targets.long()  # an unsigned dtype has no -100 to compare with
    if weight.dim() != 2:
        raise ValueError(f"weight must have shape [V, D], got {list(weight.shape)}")
    if weight.shape[1] == 0:
        raise ValueError(f"weight must have D of at least 1, got shape {list(weight.shape)}")
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        turned = hidden.dim() >= 1 and hidden.shape[-1] == weight.shape[0]
        raise ValueError(
            f"hidden must have weight's D={weight.shape[1]} as last dimension, got {list(hidden.shape)}"
            + (f": weight must be [V, D], not its transpose, got {list(weight.shape)}" if turned else "")
        )
    check_choice("reduce_dhidden", reduce_dhidden, REDUCTIONS)
    expected = list(hidden.shape[:-1])
    shared = gathers_hidden(vocab, reduce_dhidden)
    if shared:
        if not expected:
            raise ValueError("hidden must have shape [N / ranks, ..., D] with reduce_dhidden='reduce_scatter', got [D]")
        assert vocab is not None
        expected[0] *= vocab.ranks
    if list(targets.shape) != expected:
        what = "the shape of all ranks' hidden" if shared else "hidden's shape"
        raise ValueError(f"targets must have {what} without the last dimension, {expected}, got {list(targets.shape)}")
    check_device("weight", weight, "hidden", hidden)
    check_device("targets", targets, "hidden", hidden)
    width = weight.shape[0]
    if vocab is not None:
        if width != vocab.width:
            raise ValueError(
                f"weight must have the {vocab.width} rows of vocab [{vocab.start}, {vocab.end}), got {width}"
            )
    elif width == 0:
        raise ValueError(f"weight must have at least one row, got shape {list(weight.shape)}")
    if bias is not None:
        check_tensor("bias", bias)
        check_device("bias", bias, "hidden", hidden)
        if bias.shape != (width,):
            raise ValueError(f"bias must have shape [{width}], one for each row of weight, got {list(bias.shape)}")
    if weight_grad_into is not None:
        check_tensor("weight_grad_into", weight_grad_into, (torch.float32,))
        check_like("weight_grad_into", weight_grad_into, "weight", weight)
    check_choice("logits_dtype", logits_dtype, (None, torch.float16, torch.bfloat16, torch.float32, torch.float64))
    check_rows(targets, temperature, softcap, ignore_index, width if vocab is None else vocab.vocab_size)
    product = product_dtype(hidden, weight)
    check_choice("backend", backend, NAMES)
    head = Head(
        1.0 if isinstance(temperature, Tensor) else float(temperature),
        None if softcap is None else float(softcap),
        ignore_index,
        with_entropy,
        0 if vocab is None else vocab.start,
        width if vocab is None else vocab.used,
        backend,
        product,
        product if logits_dtype is None else logits_dtype,
    )
    if backend == "cuda":
        from fastppo.ops._linear_sm90 import problem

        resolve("linear_logprob", backend, hidden.device, torch.bfloat16)  # whether it runs on this device
        why = problem(head, hidden.shape[-1], bias is not None)
        if why:
            raise RuntimeError(
                f"backend='cuda' cannot run linear_logprob on {hidden.device}: {why}; use 'auto' or 'triton'"
            )
    per_row = temperature.detach().reshape(-1) if isinstance(temperature, Tensor) else None
    return Inputs(targets.reshape(-1), per_row, head)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The wider of the two, or under autocast its dtype; autocast leaves float64 alone."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    device = hidden.device.type
    if dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return dtype


def save_limit() -> int:
    """Bytes of logits up to which memory="auto" keeps them: FASTPPO_SAVE_LIMIT, 4 GiB by default."""
    return int(os.environ.get("FASTPPO_SAVE_LIMIT", 4 << 30))


def plain_operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head
) -> tuple[Tensor, Tensor, Tensor | None]:
    """hidden, weight and bias as autocast would cast them, differentiably: what the reference is given."""
    if head.product == torch.promote_types(hidden.dtype, weight.dtype):
        return hidden, weight, bias
    return hidden.to(head.product), weight.to(head.product), None if bias is None else bias.to(head.product)
