"""linear_ppo_loss and linear_logprob against the same made of F.linear and our ops on whole logits, in bfloat16: what
not having the logits costs or saves, in time and memory.

Legend: T tokens, V vocabulary, D hidden.
"""

from collections.abc import Callable

import pytest
import torch
from shapes import LINEAR, LINEAR_HEAD
from torch import Tensor
from torch.nn import functional as F

import fastppo


def head(tokens: int, trained: bool) -> tuple[Tensor, Tensor, Tensor]:
    vocabulary, dim = LINEAR_HEAD
    hidden = torch.randn(tokens, dim).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, dim) / dim**0.5).bfloat16().requires_grad_(trained)
    return hidden, weight, torch.randint(vocabulary, (tokens,))


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("shape", LINEAR)
def test_linear_ppo_loss(shape: str, trained: bool, compare: Callable[..., None]) -> None:
    hidden, weight, targets = head(LINEAR[shape], trained)
    leaves = [x for x in (hidden, weight) if x.requires_grad]
    advantages = torch.randn(LINEAR[shape])
    with torch.no_grad():
        old = fastppo.linear_logprob(hidden, weight, targets).logprobs

    def ours() -> tuple[Tensor, ...]:
        loss = fastppo.linear_ppo_loss(hidden, weight, targets, old, advantages, ent_coef=0.01).loss
        return torch.autograd.grad(loss, leaves)

    def peer() -> tuple[Tensor, ...]:
        logprobs, entropy = fastppo.logprob(F.linear(hidden, weight), targets, inplace_backward=True)
        return torch.autograd.grad(
            fastppo.ppo_loss(logprobs, old, advantages, entropy=entropy, ent_coef=0.01).loss, leaves
        )

    compare(
        ours, peer, op=f"linear_ppo_loss, {'trained' if trained else 'frozen'} head", direction="fwd+bwd",
        shape=f"{shape} x {LINEAR_HEAD[1]} x {LINEAR_HEAD[0]}", dtype="bfloat16", peer_name="F.linear + our ops",
        rtol=0.05, atol=1e-4,
    )  # fmt: skip


@pytest.mark.parametrize("shape", LINEAR)
def test_linear_logprob_without_gradients(shape: str, compare: Callable[..., None]) -> None:
    hidden, weight, targets = head(LINEAR[shape], False)

    @torch.no_grad()
    def ours() -> tuple[Tensor, ...]:
        logprobs, entropy = fastppo.linear_logprob(hidden, weight, targets)
        return logprobs, entropy

    @torch.no_grad()
    def peer() -> tuple[Tensor, ...]:
        logprobs, entropy = fastppo.logprob(F.linear(hidden, weight), targets)
        return logprobs, entropy

    compare(
        ours, peer, op="linear_logprob", direction="fwd", shape=f"{shape} x {LINEAR_HEAD[1]} x {LINEAR_HEAD[0]}",
        dtype="bfloat16", peer_name="F.linear + our ops", rtol=0.02, atol=0.02,
    )  # fmt: skip
