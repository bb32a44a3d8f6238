"""linear_logprob without gradients against F.linear and logprob on whole logits, in bfloat16: what not having the
logits costs or saves, in time and memory.

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
