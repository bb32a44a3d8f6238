"""linear_ppo_loss against the same made of F.linear, logprob and ppo_loss on whole logits, in bfloat16: what not having
the logits costs or saves, in time and memory.

Legend: N tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable

import pytest
import torch
from heads import head
from shapes import LINEAR, LINEAR_HEAD
from torch import Tensor
from torch.nn import functional as F

import fastppo


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
