"""The KV cache in pages: memory that sequences of any length share, and a prompt's pages that its samples share.

Legend: L layers, P pages of PAGE tokens, K key-value heads, D head size. Page 0 belongs to nobody: rows of a batch that
serve no sequence write there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 64


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


class Pages:
    """Args: count: pages beside page 0."""

    def __init__(self, count: int, *, layers: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.kv = torch.empty(layers, 2, count + 1, heads, PAGE, head_dim, dtype=dtype, device=device)
        self.count = count
        self.free = list(range(count, 0, -1))
        self.owners = [0] * (count + 1)  # sequences, or prompts that still have samples to come, that hold each page

    def take(self, number: int) -> list[int]:
        taken = [self.free.pop() for _ in range(number)]
        self.hold(taken)
        return taken

    def hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.owners[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.owners[page] -= 1
            if not self.owners[page]:
                self.free.append(page)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Page by page, in all layers."""
        source, target = torch.tensor([sources, targets], device=self.kv.device)
        for layer in self.kv:  # one at a time: what is read waits in memory until it is written
            layer[:, target] = layer[:, source]

    def write(self, layer: int, key: Tensor, value: Tensor, page: Tensor, place: Tensor) -> None:
        """key, value [T, K, D] of tokens that go to `place` [T] of `page` [T]."""
        self.kv[layer, 0][page, :, place] = key
        self.kv[layer, 1][page, :, place] = value
