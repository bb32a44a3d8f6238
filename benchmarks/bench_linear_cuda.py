"""The LM head fused with log-probs and with the loss on a GPU, in bfloat16, against the bare products (cuBLAS through
torch.mm) that each mode has to make, and against whole logits compiled.

Legend: N tokens, D hidden, V vocabulary. A ratio of 0.95 to the products is 1.05 times their time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from device import backend
from shapes import LINEAR_CUDA
from torch import Tensor

import fastppo

# Times the products of the same process that ours may take, and how many products they are.
PRODUCTS = {"fwd": 1, "save": 3, "recompute": 4, "loss, one chunk": 3, "loss, two chunks": 3}
TARGETS = {"fwd": 1.05, "save": 1.05, "recompute": 1.06, "loss, one chunk": 1.06, "loss, two chunks": 1.12}
HALF_ROWS = 0.70  # of its own time with all rows


@pytest.fixture(autouse=True)
def _memory_of_the_row_before() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


class Batch:
    """A head, a batch and what an optimizer step would differentiate."""

    def __init__(self, shape: str) -> None:
        tokens, dim, vocabulary = LINEAR_CUDA[shape]
        self.hidden = torch.randn(tokens, dim, device="cuda").bfloat16().requires_grad_()
        self.weight = (torch.randn(vocabulary, dim, device="cuda") / dim**0.5).bfloat16().requires_grad_()
        self.targets = torch.randint(vocabulary, (tokens,), device="cuda")
        self.advantages = torch.randn(tokens, device="cuda")
        with torch.no_grad():
            self.old = fastppo.linear_logprob(self.hidden, self.weight, self.targets).logprobs

    def no_grad(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            logprobs, entropy = fastppo.linear_logprob(self.hidden, self.weight, self.targets)
        assert entropy is not None
        return logprobs, entropy

    def logprob(self, memory: Any) -> tuple[Tensor, ...]:
        logprobs, entropy = fastppo.linear_logprob(self.hidden, self.weight, self.targets, memory=memory)
        assert entropy is not None
        return torch.autograd.grad((self.advantages * logprobs + 0.01 * entropy).sum(), (self.hidden, self.weight))

    def loss(self, chunks: int, advantages: Tensor) -> tuple[Tensor, ...]:
        loss = fastppo.linear_ppo_loss(
            self.hidden, self.weight, self.targets, self.old, advantages,
            chunk_tokens=self.targets.numel() // chunks,
        ).loss  # fmt: skip
        return torch.autograd.grad(loss, (self.hidden, self.weight))

    def call(self, mode: str) -> Callable[[], tuple[Tensor, ...]]:
        if mode == "fwd":
            return self.no_grad
        if mode.startswith("loss"):
            chunks = 1 if "one" in mode else 2
            return lambda: self.loss(chunks, self.advantages)
        return lambda: self.logprob(mode)

    def products(self, number: int) -> Callable[[], tuple[Tensor, ...]]:
        """logits; with three dhidden and dweight too; with four logits once more."""
        hidden, weight = self.hidden.detach(), self.weight.detach()
        # Of the logits' size: products of zeros take less power and run faster.
        logits = torch.randn(hidden.shape[0], weight.shape[0], device="cuda", dtype=torch.bfloat16)

        def call() -> tuple[Tensor, ...]:
            for _ in range(2 if number == 4 else 1):
                torch.mm(hidden, weight.t(), out=logits)
            if number > 1:
                torch.mm(logits, weight)
                torch.mm(logits.t(), hidden)
            return ()

        return call

    def compiled(self, mode: str) -> Callable[[], tuple[Tensor, ...]]:
        def outputs(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            logps = torch.log_softmax((hidden @ weight.t()).float(), -1)
            return logps.gather(-1, self.targets[:, None])[:, 0], -(logps.exp() * logps).sum(-1)

        def loss(hidden: Tensor, weight: Tensor) -> Tensor:
            logprobs, entropy = outputs(hidden, weight)
            return (self.advantages * logprobs + 0.01 * entropy).sum()

        if mode == "fwd":
            forward = torch.compile(outputs, dynamic=False)
            return torch.no_grad()(lambda: forward(self.hidden, self.weight))
        compiled = torch.compile(loss, dynamic=False)
        leaves = (self.hidden, self.weight)
        return lambda: torch.autograd.grad(compiled(*leaves), leaves)


@pytest.mark.parametrize("mode", PRODUCTS)
@pytest.mark.parametrize("shape", LINEAR_CUDA)
def test_against_the_products(shape: str, mode: str, compare: Callable[..., None]) -> None:
    batch = Batch(shape)
    compare(
        batch.call(mode), batch.products(PRODUCTS[mode]), expected=batch.call(mode), peer_expected=lambda: (),
        op="linear_ppo_loss" if "loss" in mode else "linear_logprob", direction=mode, shape=shape, dtype="bfloat16",
        peer_name=f"products: {PRODUCTS[mode]}", target=1 / TARGETS[mode], clock="events", is_bound=True,
        backend=backend("logprob"),
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["fwd", "save"])
def test_against_whole_logits_compiled(mode: str, compare: Callable[..., None]) -> None:
    shape = next(iter(LINEAR_CUDA))
    batch = Batch(shape)
    compare(
        batch.call(mode), batch.compiled(mode), op="linear_logprob", direction=mode, shape=shape, dtype="bfloat16",
        peer_name="torch.compile", clock="events", rtol=0.05, atol=0.05, kinks=0.01, backend=backend("logprob"),
    )  # fmt: skip


@pytest.mark.parametrize("shape", LINEAR_CUDA)
def test_half_of_the_rows_without_a_gradient(shape: str, compare: Callable[..., None]) -> None:
    batch = Batch(shape)
    half = torch.where(torch.rand_like(batch.advantages) < 0.5, 0.0, batch.advantages)
    compare(
        lambda: batch.loss(1, half), lambda: batch.loss(1, batch.advantages), expected=lambda: batch.loss(1, half),
        peer_expected=lambda: batch.loss(1, batch.advantages), op="linear_ppo_loss", direction="loss, half of the rows",
        shape=shape, dtype="bfloat16", peer_name="with all rows", target=1 / HALF_ROWS, clock="events",
        backend=backend("logprob"),
    )  # fmt: skip
