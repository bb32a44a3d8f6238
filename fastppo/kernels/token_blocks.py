"""What the kernels of the losses over tokens share: tiles of any layout, sequences, sums in float64 whose order depends
on the shapes alone, and the division by counts that stay on the device.

A sequence's own sums are formed in chunks counted from its start (`sequence_chunk`), one program each, and added in the
chunks' order: a sequence of 131072 tokens is no walk of one program, and what surrounds a sequence does not matter.
Chunk j of sequence b has slot b + start(b) // CHUNK + j, which no other chunk has, so a grid of B + N // CHUNK programs
holds all of them without anybody counting chunks.

Legend: N tokens, numbered row by row; B sequences; G groups of V tokens, a tile; S sequences of a tile.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo.kernels import tiles
from fastppo.kernels.launch import Launcher, jit

# Rows of `sequence_tables`, float32 [5, B].
WEIGHT = tl.constexpr(0)  # 1 / selected tokens
SELECTED = tl.constexpr(1)  # 1 where the sequence has a selected token
LOG_RATIO = tl.constexpr(2)  # mean over the selected tokens
KEPT = tl.constexpr(3)  # 1 or 0: seq_mask_tis
SLOPE = tl.constexpr(4)  # mean of d(sum)/d log ratio over the selected tokens
TABLE_ROWS = 5
# Columns of a chunk's sums, float64 [slots, 4].
CHUNK_COLUMNS = 4


# --- Tiles of tokens --------------------------------------------------------------------------------------------------


@triton.jit
def row_and_column(start, local, cols):
    """Of the tokens start + local. A row is shorter than 2^31, so that all but one division are of 32 bits."""
    row = start // cols
    col = (start - row * cols + local).to(tl.int32)
    length = cols.to(tl.int32)
    return row + col // length, col % length


@triton.jit
def place(start, local, cols, row_stride, STRIDED: tl.constexpr):
    """Element offsets of the tokens start + local in a tensor whose rows lie `row_stride` apart."""
    if STRIDED:
        row, col = row_and_column(start, local, cols)
        return row * row_stride + col
    else:
        return start + local


@triton.jit
def read_floats(x, offsets, here):
    return tl.load(x + offsets, mask=here, other=0.0).to(tl.float32)


@triton.jit
def read_flags(x, offsets, here):
    """Of any dtype, true where not 0."""
    return tl.load(x + offsets, mask=here, other=0) != 0


@triton.jit
def add(sums, x):
    """sums [G] float64 + x [G, V]."""
    return sums + tl.sum(x.to(tl.float64), axis=1)


@triton.jit
def count(counts, x):
    """counts [G] int32 + flags [G, V]."""
    return counts + tl.sum(x.to(tl.int32), axis=1)


@triton.jit
def columns8(a, b, c, d, e, f, g, h):
    """[G, 8], in the order of the arguments [G]."""
    evens = tl.join(tl.join(a, e), tl.join(c, g))  # the last dimension joined counts fastest
    odds = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(evens, odds), [a.shape[0], 8])


@triton.jit
def columns16(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15):
    """[16]: the sums of the arguments [G], by one reduction for all."""
    evens, odds = columns8(a0, a2, a4, a6, a8, a10, a12, a14), columns8(a1, a3, a5, a7, a9, a11, a13, a15)
    return tl.sum(tl.reshape(tl.join(evens, odds), [a0.shape[0], 16]), axis=0)


@triton.jit
def tiles_of(n, program, programs, TILE: tl.constexpr, TOLD: tl.constexpr):
    """How many tiles a program walks over: program, program + programs, ..."""
    if TOLD:
        return TOLD
    else:
        return tl.cdiv(tl.cdiv(n, TILE) - program, programs).to(tl.int32)


# --- Sequences --------------------------------------------------------------------------------------------------------


@triton.jit
def start_of(cu_seqlens, b, cols):
    """First token of sequence b: of cu_seqlens, or of rows."""
    if cu_seqlens is None:
        return b.to(tl.int64) * cols
    else:
        return tl.load(cu_seqlens + b).to(tl.int64)


@triton.jit
def holder(cu_seqlens, start, local, here, cols, number, TILE: tl.constexpr):
    """The sequence that holds each token start + local of a tile, int64; `here` are those below N."""
    if cu_seqlens is None:
        row, col = row_and_column(start, tl.where(here, local, 0), cols)
        return row
    else:
        # The sequences of the tile's first token and of its last: few lie between, whatever their number.
        first, first_end = start * 0, start * 0 + number
        last, last_end = first, first_end
        span = number
        while span > 0:
            middle, other = (first + first_end) // 2, (last + last_end) // 2
            if tl.load(cu_seqlens + middle).to(tl.int64) <= start:
                first = middle
            else:
                first_end = middle
            if tl.load(cu_seqlens + other).to(tl.int64) < start + TILE:
                last = other
            else:
                last_end = other
            span = span // 2
        low = first + tl.zeros(local.shape, tl.int64)
        high = last + 1 + tl.zeros(local.shape, tl.int64)
        span = last - first
        while span > 0:
            middle = (low + high) // 2
            left = tl.load(cu_seqlens + middle).to(tl.int64) - start <= local
            low = tl.where(left, middle, low)
            high = tl.where(left, high, middle)
            span = span // 2
        return low


@triton.jit
def sequence_chunk(cu_seqlens, slot, cols, number, CHUNK: tl.constexpr):
    """Sequence, its first token, its end, and this slot's chunk [begin, end) of it; empty where the slot has none."""
    low = slot * 0
    high = low + number
    while high - low > 1:
        middle = (low + high) // 2
        if middle + start_of(cu_seqlens, middle, cols) // CHUNK <= slot:
            low = middle
        else:
            high = middle
    start = start_of(cu_seqlens, low, cols)
    end = start_of(cu_seqlens, low + 1, cols)
    begin = start + (slot - low - start // CHUNK) * CHUNK
    return low, start, begin, tl.minimum(begin + CHUNK, end)


@triton.jit
def add_chunks(sums, cu_seqlens, b, there, cols, column: tl.constexpr, CHUNK: tl.constexpr, SLOTS: tl.constexpr):
    """[S] float64: the chunks of each sequence b, in their order."""
    COLUMNS: tl.constexpr = 4
    start = tl.where(there, start_of(cu_seqlens, tl.where(there, b, 0), cols), 0)
    end = tl.where(there, start_of(cu_seqlens, tl.where(there, b + 1, 0), cols), 0)
    chunks = (end - start + CHUNK - 1) // CHUNK
    first = b + start // CHUNK
    total = tl.zeros(b.shape, tl.float64)
    j = tl.arange(0, SLOTS)
    most = tl.max(chunks)
    while most > 0:
        mask = j[None, :] < chunks[:, None]
        slots = first[:, None] + j[None, :]
        total += tl.sum(tl.load(sums + slots * COLUMNS + column, mask=mask, other=0.0), axis=1)
        j += SLOTS
        most -= SLOTS
    return total


@jit
def _count_kernel(
    mask, cu_seqlens, sums, cols: tl.int64, number: tl.int64, mask_stride: tl.int64,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    b, start, begin, end = sequence_chunk(cu_seqlens, slot, cols, number, CHUNK)
    base = begin
    if cu_seqlens is None:
        base = b * mask_stride + (begin - start)
    local = tl.arange(0, TILE)
    selected = tl.zeros([TILE], tl.int32)
    while begin < end:
        selected += read_flags(mask, base + local, local < end - begin).to(tl.int32)
        begin += TILE
        base += TILE
    tl.store(sums + slot * 4, tl.sum(selected).to(tl.float64))


@jit
def _table_kernel(
    sums, cu_seqlens, tables, number: tl.int64, cols: tl.int64, low: tl.float32, high: tl.float32,
    MASKED: tl.constexpr, RATIO: tl.constexpr, KEEP: tl.constexpr, CHUNK: tl.constexpr, S: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64) * S + tl.arange(0, S)
    there = b < number
    if MASKED:
        selected = add_chunks(sums, cu_seqlens, b, there, cols, 0, CHUNK, SLOTS)
    else:
        end = start_of(cu_seqlens, tl.where(there, b + 1, 0), cols)
        selected = tl.where(there, end - start_of(cu_seqlens, tl.where(there, b, 0), cols), 0).to(tl.float64)
    count_of = tl.where(selected > 1.0, selected, 1.0)
    tl.store(tables + WEIGHT * number + b, (1.0 / count_of).to(tl.float32), mask=there)
    tl.store(tables + SELECTED * number + b, (selected > 0).to(tl.float32), mask=there)
    if RATIO:
        mean = add_chunks(sums, cu_seqlens, b, there, cols, 1, CHUNK, SLOTS) / count_of
        tl.store(tables + LOG_RATIO * number + b, mean.to(tl.float32), mask=there)
    if KEEP:
        known = add_chunks(sums, cu_seqlens, b, there, cols, 2, CHUNK, SLOTS)
        weights = add_chunks(sums, cu_seqlens, b, there, cols, 3, CHUNK, SLOTS)
        mean = (weights / tl.where(known > 1.0, known, 1.0)).to(tl.float32)
        geometric = tl.exp(mean.to(tl.float64)).to(tl.float32)
        tl.store(tables + KEPT * number + b, (~((geometric < low) | (geometric > high))).to(tl.float32), mask=there)


# --- The end ----------------------------------------------------------------------------------------------------------


@triton.jit
def add_rows(partials, programs, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """[COLUMNS] float64: the programs' partial sums."""
    column = tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float64)
    p = tl.arange(0, ROWS)
    left = programs
    while left > 0:
        at = p[:, None] * COLUMNS + column[None, :]
        sums += tl.load(partials + at, mask=(p < programs)[:, None], other=0.0)
        p += ROWS
        left -= ROWS
    return tl.sum(sums, axis=0)


@triton.jit
def pick(row, columns, column):
    return tl.sum(tl.where(columns == column, row, 0.0))


@triton.jit
def count_sequences(tables, number, TILE: tl.constexpr):
    """Sequences with at least one selected token."""
    counts = tl.zeros([TILE], tl.float64)
    if tables is not None:
        b = tl.arange(0, TILE)
        left = number
        while left > 0:
            counts += tl.load(tables + SELECTED * number + b, mask=b < number, other=0.0).to(tl.float64)
            b += TILE
            left -= TILE
    return tl.sum(counts)


@triton.jit
def reciprocal(counted, given, tensor):
    """1 / count, 0 for none: the tensor's, else the given number's unless it is below 0, else the counted."""
    number = tl.where(given < 0, counted, given)
    if tensor is not None:
        number = tl.load(tensor).to(tl.float64)
    return tl.where(number > 0, 1.0 / tl.where(number > 0, number, 1.0), 0.0)


@triton.jit
def scale_of(tokens, seqs, num_tokens, num_seqs, norm, tokens_tensor, seqs_tensor, AGGREGATION: tl.constexpr):
    """The normaliser, float64; AGGREGATION counts as fastppo/ops/_loss.py's."""
    if AGGREGATION == 0:
        return reciprocal(tokens, num_tokens, tokens_tensor)
    elif AGGREGATION == 3:
        return reciprocal(seqs, num_seqs, seqs_tensor) / norm
    else:
        return reciprocal(seqs, num_seqs, seqs_tensor)


# --- What launchers share ---------------------------------------------------------------------------------------------

_count = Launcher(_count_kernel)
_tables = Launcher(_table_kernel)


class Layout(NamedTuple):
    """How per-token tensors are read, in the place of each."""

    tensors: list[Tensor | None]
    row_strides: list[int]
    strided: bool  # whether any has rows apart from each other
    exact: bool  # whether N is a whole number of groups
    grouped: bool  # whether a group is read by one load, though its end may lie beyond N


def layout_of(given: tuple[Tensor | None, ...], n: int, cols: int) -> Layout:
    """Rows of unit stride are read where they lie, whatever is between them; other strides are copied.

    A group's end beyond N is in the same 16 bytes as the tensor's last token where the tensor starts at a multiple of
    16: in its allocation, and what is read there reaches nothing.
    """
    tensors, vector = list(given), tiles.LOSS_TOKENS.vector
    exact, narrow, strided = n % vector == 0, True, False
    for i, x in enumerate(given):
        if x is not None:
            narrow = narrow and x.element_size() * vector <= 16
            if not x.is_contiguous():
                if x.dim() == 2 and x.stride(1) == 1:
                    strided = True
                else:
                    tensors[i] = x.contiguous()
    rows = [cols] * len(given)
    if strided:
        rows = [cols if x is None or x.dim() == 1 else x.stride(0) for x in tensors]
    aligned = exact or not any([x is not None and x.data_ptr() % 16 for x in tensors])
    return Layout(tensors, rows, strided, exact and not strided, aligned and narrow and not strided)


def walk_of(n: int, device: torch.device) -> tuple[int, int]:
    """Programs that walk over the tiles of n tokens, and how many each, if the kernel must be told (else 0).

    Triton's interpreter takes no number of the device's as the end of a loop; a GPU's kernel is not told, because each
    number would be another kernel.
    """
    tile = tiles.LOSS_TOKENS
    programs = min(-(-n // tile.tokens), tile.programs)
    told = device.type == "cpu" and programs > 0
    return programs, -(-n // (tile.tokens * programs)) if told else 0


def count_of(number: float, tensor: Tensor | None, device: torch.device) -> tuple[float, Tensor | None]:
    """A count as the kernels take it: one on the CPU is read here, one on the device there."""
    if tensor is None or tensor.device == device:
        return number, tensor
    return max(float(tensor), 0.0), None


class Sequences:
    """The sequences of a call, and their tables on the device."""

    def __init__(self, shape: torch.Size, cu_seqlens: Tensor | None) -> None:
        self.cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        rows, self.cols = (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
        self.tokens = rows * self.cols
        self.number = rows if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.slots = self.number + self.tokens // tiles.LOSS_CHUNK

    def new_sums(self, device: torch.device) -> Tensor:
        return torch.empty(self.slots, CHUNK_COLUMNS, dtype=torch.float64, device=device)

    def count(self, mask: Tensor | None, sums: Tensor | None, mask_stride: int) -> None:
        """Fills the first column of `sums`."""
        if mask is None or self.slots == 0:
            return
        _count(
            self.slots,
            (mask, self.cu_seqlens, sums),
            (self.cols, self.number, mask_stride),
            (tiles.LOSS_CHUNK, tiles.LOSS_CHUNK_TILE),
            tiles.LOSS_CHUNK_WARPS,
        )

    def tables(
        self, sums: Tensor | None, like: Tensor, *, masked: bool, ratio: bool = False,
        bounds: tuple[float, float] | None = None,
    ) -> Tensor:  # fmt: skip
        tables = torch.empty(TABLE_ROWS, self.number, dtype=torch.float32, device=like.device)
        if self.number:
            _tables(
                -(-self.number // tiles.LOSS_SEQUENCES),
                (tables if sums is None else sums, self.cu_seqlens, tables),
                (self.number, self.cols, *(bounds or (0.0, 0.0))),
                (masked, ratio, bounds is not None, tiles.LOSS_CHUNK, tiles.LOSS_SEQUENCES, tiles.LOSS_SLOTS),
                1,
            )
        return tables
