"""logprob with entropy against what trainers write in torch, eager and compiled, in float32 as they do.

Legend: N tokens, V vocabulary.
"""

from collections.abc import Callable

import pytest
import torch
from shapes import LOGPROB, TINY
from torch import Tensor

import fastppo

# Targets of the CPU table: times faster than each peer.
TARGETS = {"torch eager": 4.0, "torch.compile": 1.5}

Op = Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # log-probs, entropy; some peers have log-probs only


def in_torch(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def ours(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs, entropy = fastppo.logprob(logits, targets)
    assert entropy is not None
    return logprobs, entropy


PEERS: dict[str, Op] = {"torch eager": in_torch, "torch.compile": torch.compile(in_torch)}


def forward(op: Op, logits: Tensor, targets: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return op(logits, targets)

    return call


def both(op: Op, logits: Tensor, targets: Tensor, upstream: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward from a gradient per token, as a policy loss gives it."""
    leaf = logits.detach().requires_grad_()
    gradients = upstream.unbind()

    def call() -> tuple[Tensor, ...]:
        outputs = op(leaf, targets)
        return torch.autograd.grad(outputs, leaf, gradients[: len(outputs)])

    return call


@pytest.mark.parametrize("peer", TARGETS)
@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [pytest.param(name, marks=pytest.mark.quick) for name in LOGPROB])
def test_logprob(shape: str, dtype: torch.dtype, direction: str, peer: str, compare: Callable[..., None]) -> None:
    tokens, vocabulary = LOGPROB[shape]
    logits = torch.randn(tokens, vocabulary).to(dtype)
    targets = torch.randint(vocabulary, (tokens,))
    upstream = torch.randn(2, tokens)
    if direction == "fwd":
        calls = [forward(op, logits, targets) for op in (ours, PEERS[peer])]
    else:
        calls = [both(op, logits, targets, upstream) for op in (ours, PEERS[peer])]
    # Forward reads the logits once; backward reads them once and writes as much.
    passes = 1 if direction == "fwd" else 3
    compare(
        *calls, op="logprob + entropy", direction=direction, shape=shape, dtype=str(dtype).removeprefix("torch."),
        peer_name=peer, bytes_moved=passes * logits.numel() * logits.element_size(), target=TARGETS[peer],
        # A gradient's rounding in bfloat16: half a unit of its 8 bits.
        rtol=1e-4 if dtype == torch.float32 or direction == "fwd" else 2**-7,
    )  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
def test_logprob_host(direction: str, compare: Callable[..., None]) -> None:
    """What a call costs before any work: checks, dispatch, autograd."""
    logits, targets = torch.randn(TINY), torch.zeros(TINY[0], dtype=torch.int64)
    upstream = torch.randn(2, TINY[0])
    if direction == "fwd":
        calls = [forward(op, logits, targets) for op in (ours, in_torch)]
    else:
        calls = [both(op, logits, targets, upstream) for op in (ours, in_torch)]
    compare(
        *calls, op="logprob + entropy", direction=f"{direction} host", shape="x".join(map(str, TINY)),
        dtype="float32", peer_name="torch eager",
    )  # fmt: skip
