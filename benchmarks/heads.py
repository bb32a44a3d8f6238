"""What the suites of linear_logprob and linear_ppo_loss share: output heads with a batch of hidden states, and the bare
products that a head costs on a GPU.

Legend: N tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable

import torch
from shapes import LINEAR_CUDA, LINEAR_HEAD
from torch import Tensor


def head(tokens: int, trained: bool) -> tuple[Tensor, Tensor, Tensor]:
    """On a CPU: hidden [N, D], weight [V, D], targets [N]."""
    vocabulary, dim = LINEAR_HEAD
    hidden = torch.randn(tokens, dim).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, dim) / dim**0.5).bfloat16().requires_grad_(trained)
    return hidden, weight, torch.randint(vocabulary, (tokens,))


class Batch:
    """On a GPU: a head, a batch and the advantages that weigh its rows."""

    def __init__(self, shape: str) -> None:
        tokens, dim, vocabulary = LINEAR_CUDA[shape]
        self.hidden = torch.randn(tokens, dim, device="cuda").bfloat16().requires_grad_()
        self.weight = (torch.randn(vocabulary, dim, device="cuda") / dim**0.5).bfloat16().requires_grad_()
        self.targets = torch.randint(vocabulary, (tokens,), device="cuda")
        self.advantages = torch.randn(tokens, device="cuda")

    def products(self, number: int) -> Callable[[], tuple[Tensor, ...]]:
        """cuBLAS through torch.mm. One: logits; three: dhidden and dweight too; four: logits once more."""
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
