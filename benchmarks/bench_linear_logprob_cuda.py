"""linear_logprob with entropy on a GPU, in bfloat16: against the bare products (cuBLAS through torch.mm) that each mode
has to make, against whole logits compiled, and against the kernels of others beside the same products.

Legend: N tokens, D hidden, V vocabulary. A ratio of 0.95 to the products is 1.05 times their time.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device import backend
from heads import Batch
from peers import LinearLogprob, liger_linear_logprob, trl_linear_logprob, verl_linear_logprob
from shapes import LINEAR_CUDA
from torch import Tensor

import fastppo
from fastppo.reference.linear_logprob import linear_logprob as definition

pytestmark = pytest.mark.usefixtures("no_cached_memory")

# Times the products of the same process that ours may take, and how many products they are.
PRODUCTS = {"fwd": 1, "save": 3, "recompute": 4}
TARGETS = {"fwd": 1.05, "save": 1.05, "recompute": 1.06}

# With entropy, and none keeps the logits for backward: they make four products.
PEERS: dict[str, Callable[[], LinearLogprob]] = {
    "Liger": liger_linear_logprob,
    "TRL": trl_linear_logprob,
    "verl": verl_linear_logprob,
}
# Ours must be ahead of it in the same process.
AHEAD_OF = {("Liger", "recompute"): 1.0}
TRUTH_ROWS = 1024


def ours(memory: Any = "auto") -> LinearLogprob:
    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = fastppo.linear_logprob(hidden, weight, targets, memory=memory)
        assert entropy is not None
        return logprobs, entropy

    return call


def in_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logps = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return logps.gather(-1, targets[:, None])[:, 0], -(logps.exp() * logps).sum(-1)


class Rows(Batch):
    """What one call of an op gives: log-probs and entropy, or the gradients of both, weighed."""

    def call(self, op: LinearLogprob, mode: str) -> Callable[[], tuple[Tensor, ...]]:
        leaves = self.hidden, self.weight

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return op(*leaves, self.targets)

        def both() -> tuple[Tensor, ...]:
            logprobs, entropy = op(*leaves, self.targets)
            return torch.autograd.grad((self.advantages * logprobs + 0.01 * entropy).sum(), leaves)

        return forward if mode == "fwd" else both

    def ours(self, mode: str) -> Callable[[], tuple[Tensor, ...]]:
        return self.call(ours("auto" if mode == "fwd" else mode), mode)

    def truth(self, mode: str) -> tuple[Tensor, ...]:
        """By the definition, with products in float32, some rows at a time; gradients rounded at the end."""
        weight = self.weight.detach().float().requires_grad_(mode != "fwd")
        parts, dweight = [], torch.zeros_like(weight) if mode != "fwd" else None
        for rows in torch.arange(self.targets.numel(), device="cuda").split(TRUTH_ROWS):
            hidden = self.hidden.detach()[rows].float().requires_grad_(mode != "fwd")
            logprobs, entropy = definition(hidden, weight, self.targets[rows])
            assert entropy is not None
            if dweight is None:
                parts.append((logprobs, entropy))
                continue
            loss = (self.advantages[rows] * logprobs + 0.01 * entropy).sum()
            dhidden, part = torch.autograd.grad(loss, (hidden, weight))
            dweight += part
            parts.append((dhidden,))
        results = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        return results if dweight is None else (results[0].bfloat16(), dweight.bfloat16())


@pytest.mark.parametrize("mode", PRODUCTS)
@pytest.mark.parametrize("shape", LINEAR_CUDA)
def test_against_the_products(shape: str, mode: str, compare: Callable[..., None]) -> None:
    batch = Rows(shape)
    compare(
        batch.ours(mode), batch.products(PRODUCTS[mode]), expected=batch.ours(mode), peer_expected=lambda: (),
        op="linear_logprob", direction=mode, shape=shape, dtype="bfloat16", peer_name=f"products: {PRODUCTS[mode]}",
        target=1 / TARGETS[mode], clock="events", is_bound=True, backend=backend("linear_logprob"),
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["fwd", "recompute"])
@pytest.mark.parametrize("shape", LINEAR_CUDA)
def test_against_chunks_of_logits(shape: str, mode: str, compare: Callable[..., None]) -> None:
    """The kernel that writes no logits against chunks of them by cuBLAS and Triton: worth its code from 3 % on."""
    if backend("linear_logprob") != "cuda":
        pytest.skip("needs a card of compute capability 9.0 and a module compiled for it")
    batch = Rows(shape)

    def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = fastppo.linear_logprob(hidden, weight, targets, memory="recompute", backend="triton")
        assert entropy is not None
        return logprobs, entropy

    compare(
        batch.ours(mode), batch.call(chunked, mode), op="linear_logprob", direction=mode, shape=shape, dtype="bfloat16",
        peer_name="chunks of logits", target=1.03, clock="events", rtol=2**-7, atol=2e-3, kinks=0.01,
        backend=backend("linear_logprob"),
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["fwd", "save"])
def test_against_whole_logits_compiled(mode: str, compare: Callable[..., None]) -> None:
    shape = next(iter(LINEAR_CUDA))
    batch = Rows(shape)
    compare(
        batch.ours(mode), batch.call(torch.compile(in_torch, dynamic=False), mode), op="linear_logprob", direction=mode,
        shape=shape, dtype="bfloat16", peer_name="torch.compile", clock="events", rtol=0.05, atol=0.05, kinks=0.01,
        backend=backend("linear_logprob"),
    )  # fmt: skip


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("mode", ["fwd", "recompute"])
@pytest.mark.parametrize("shape", LINEAR_CUDA)
def test_against_others(shape: str, mode: str, peer: str, compare: Callable[..., None]) -> None:
    theirs = PEERS[peer]()
    batch = Rows(shape)
    # Logits up to 8 in bfloat16 are off by half of 2^-5; one in a hundred of the weight's gradients is a sum in which
    # nearly all cancels.
    tolerance = {"rtol": 2**-8, "atol": 0.02} if mode == "fwd" else {"rtol": 0.05, "atol": 1e-3, "kinks": 0.01}
    compare(
        batch.ours(mode), batch.call(theirs, mode), expected=lambda: batch.truth(mode), op="linear_logprob",
        direction=mode, shape=shape, dtype="bfloat16", peer_name=peer, target=AHEAD_OF.get((peer, mode)),
        clock="events", floor=batch.products(PRODUCTS[mode]), floor_name=f"products: {PRODUCTS[mode]}",
        backend=backend("linear_logprob"), **tolerance,
    )  # fmt: skip
