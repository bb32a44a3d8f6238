"""linear_ppo_loss on a GPU, in bfloat16, against the three bare products (cuBLAS through torch.mm) that a loss with
gradients has to make, and against itself where half of the rows have no gradient.

Legend: N tokens, D hidden, V vocabulary. A ratio of 0.95 to the products is 1.05 times their time.
"""

from collections.abc import Callable

import pytest
import torch
from device import backend
from heads import Batch
from shapes import LINEAR_CUDA
from torch import Tensor

import fastppo

pytestmark = pytest.mark.usefixtures("no_cached_memory")

# Times the products of the same process that ours may take, with the tokens in so many chunks.
TARGETS = {"loss, one chunk": 1.06, "loss, two chunks": 1.12}
CHUNKS = {"loss, one chunk": 1, "loss, two chunks": 2}
HALF_ROWS = 0.70  # of its own time with all rows


class Loss(Batch):
    """What an optimizer step would differentiate."""

    def __init__(self, shape: str) -> None:
        super().__init__(shape)
        with torch.no_grad():
            self.old = fastppo.linear_logprob(self.hidden, self.weight, self.targets).logprobs

    def gradients(self, chunks: int, advantages: Tensor) -> tuple[Tensor, ...]:
        loss = fastppo.linear_ppo_loss(
            self.hidden, self.weight, self.targets, self.old, advantages,
            chunk_tokens=self.targets.numel() // chunks, num_rows=self.targets.numel(),  # as a trainer knows it
        ).loss  # fmt: skip
        return torch.autograd.grad(loss, (self.hidden, self.weight))


@pytest.mark.parametrize("mode", TARGETS)
@pytest.mark.parametrize("shape", LINEAR_CUDA)
def test_against_the_products(shape: str, mode: str, compare: Callable[..., None]) -> None:
    batch = Loss(shape)

    def ours() -> tuple[Tensor, ...]:
        return batch.gradients(CHUNKS[mode], batch.advantages)

    compare(
        ours, batch.products(3), expected=ours, peer_expected=lambda: (), op="linear_ppo_loss", direction=mode,
        shape=shape, dtype="bfloat16", peer_name="products: 3", target=1 / TARGETS[mode], clock="events", is_bound=True,
        backend=backend("logprob"),
    )  # fmt: skip


@pytest.mark.parametrize("shape", LINEAR_CUDA)
def test_half_of_the_rows_without_a_gradient(shape: str, compare: Callable[..., None]) -> None:
    batch = Loss(shape)
    half = torch.where(torch.rand_like(batch.advantages) < 0.5, 0.0, batch.advantages)
    compare(
        lambda: batch.gradients(1, half), lambda: batch.gradients(1, batch.advantages),
        expected=lambda: batch.gradients(1, half), peer_expected=lambda: batch.gradients(1, batch.advantages),
        op="linear_ppo_loss", direction="loss, half of the rows", shape=shape, dtype="bfloat16",
        peer_name="with all rows", target=1 / HALF_ROWS, clock="events", backend=backend("logprob"),
    )  # fmt: skip
