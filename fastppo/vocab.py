"""Vocabulary sharded over ranks (tensor parallel): which columns a rank holds, and the one collective the ops need.

Each rank reduces its own columns to four numbers per token, (m, s - 1, t, zy):

    m = max_j x_j,  d_j = (x_j - m) / temperature,  s = sum_j exp(d_j),  t = sum_j exp(d_j) d_j,
    zy = x_y where this rank holds y, of x = softcap(logits).

One all-gather of these [N, 4] and a combination in rank order give every rank bitwise the same statistics of the
whole row. It is s - 1, because the largest column's e is exactly 1, beside which a float32 would lose the other columns
of a trained policy. A sum over ranks would not do for zy: a NaN in a rank that does not hold the target would leak into
it.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

# Marks "this rank does not hold the target". A target logit of +inf reads as held by none, and is NaN either way.
NOT_HERE = float("inf")
# exp(FLOOR) is exactly 0 in float32 and float64, and FLOOR * 0 is 0 where -inf * 0 would be NaN.
FLOOR = -1000.0


@dataclass(frozen=True)
class VocabShard:
    """This rank's half-open range of vocabulary columns.

    Args:
        start, end: logits have exactly end - start columns on this rank, the weight as many rows. Ranks may hold
            uneven or empty ranges; together, in any order, they cover [0, vocab_size) once.
        group: torch.distributed process group over which the vocabulary is sharded; None where this rank holds all
            of it.
        vocab_size: number of real ids. Columns with id >= vocab_size are padding: read as -inf, gradient 0, never a
            target.

    Raises:
        ValueError: a range that is no range, or group=None with a part of the vocabulary.
    """

    start: int
    end: int
    group: "dist.ProcessGroup | None"
    vocab_size: int
    # Of the group: what the ops call it by. Plain values, because torch.compile does not tell one group from another.
    ranks: int = field(init=False, repr=False)
    group_name: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"VocabShard needs 0 <= start <= end, got start={self.start}, end={self.end}")
        if self.vocab_size < 1:
            raise ValueError(f"VocabShard vocab_size must be >= 1, got {self.vocab_size}")
        if self.group is None and (self.start > 0 or self.end < self.vocab_size):
            raise ValueError(
                f"VocabShard group must be a process group where a rank holds a part of the vocabulary: "
                f"got group=None, columns [{self.start}, {self.end}) of {self.vocab_size}"
            )
        object.__setattr__(self, "ranks", 1 if self.group is None else dist.get_world_size(self.group))
        object.__setattr__(self, "group_name", "" if self.group is None else self.group.group_name)

    @property
    def width(self) -> int:
        """Columns on this rank, padding included."""
        return self.end - self.start

    @property
    def used(self) -> int:
        """Columns on this rank that are real ids; they come first."""
        return min(max(self.vocab_size - self.start, 0), self.width)


def gather_stats(stats: Tensor, vocab: VocabShard | None) -> Tensor:
    """[N, 4] of this rank -> [R, N, 4] of all ranks, in rank order. The only collective of a vocab-parallel forward."""
    if vocab is None or vocab.ranks == 1 or stats.shape[0] == 0:
        return stats.unsqueeze(0)
    return gather_rows(stats, vocab).view(vocab.ranks, stats.shape[0], 4)


# Functional collectives, which torch.compile can keep in its graph. A sum is begun, and `waited` for before it is read.


def gather_rows(x: Tensor, vocab: VocabShard) -> Tensor:
    """[n, ...] of each rank -> [R * n, ...], in rank order."""
    ops = torch.ops._c10d_functional
    return waited(ops.all_gather_into_tensor(x.contiguous(), vocab.ranks, vocab.group_name))


def sum_over_ranks(x: Tensor, vocab: VocabShard) -> Tensor:
    result: Tensor = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", vocab.group_name)
    return result


def sum_and_scatter_rows(x: Tensor, vocab: VocabShard) -> Tensor:
    """[R * n, ...] of each rank -> this rank's [n, ...] of their sum."""
    ops = torch.ops._c10d_functional
    result: Tensor = ops.reduce_scatter_tensor(x.contiguous(), "sum", vocab.ranks, vocab.group_name)
    return result


def waited(x: Tensor) -> Tensor:
    result: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return result


def merge_stats(parts: Tensor, temperature: float | Tensor) -> Tensor:
    """[C, N, 4] of chunks of a rank's columns -> [N, 4] of the rank."""
    merged = combine_stats(parts, temperature)
    merged[:, 0] = parts[..., 0].amax(0)
    merged[:, 3] = torch.where((parts[..., 3] == NOT_HERE).all(0), NOT_HERE, merged[:, 3])
    return merged.to(parts.dtype)


def combine_stats(gathered: Tensor, temperature: float | Tensor) -> Tensor:
    """[R, N, 4] -> [N, 4] float64, the statistics of whole rows; zy is NaN where no rank holds the target.

    A row of -inf gets m = 0, s = 0.
    """
    gathered = gathered.double()
    m = gathered[..., 0].amax(0)
    shift = torch.where(m == -torch.inf, 0.0, m)
    s = torch.zeros_like(m)
    t = torch.zeros_like(m)
    zy = torch.full_like(m, torch.nan)
    for m_r, excess_r, t_r, zy_r in (stats.unbind(-1) for stats in gathered.unbind(0)):
        s_r = 1 + excess_r
        d = ((m_r - shift) / temperature).clamp_min(FLOOR)
        scale = d.exp()
        s = s + scale * s_r
        t = t + scale * (t_r + d * s_r)
        zy = torch.where(zy_r == NOT_HERE, zy, zy_r)
    return torch.stack((shift, s - 1, t, zy), -1)
