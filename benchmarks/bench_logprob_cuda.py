"""logprob with entropy on a GPU against torch, eager and compiled, in float32, and against the kernels of others.

Legend: N tokens, V vocabulary.
"""

from collections.abc import Callable

import pytest
import torch
from bench_logprob import Op, both, forward, in_torch, ours
from device import backend
from peers import flash_attn_logprob, liger_logprob, quack_logprob, trl_logprob
from shapes import LOGPROB_CUDA, TINY
from torch import Tensor

# Microseconds on the card in conftest.TARGET_CARD: what ours must reach, and the peers as measured there; the ratio
# counts on another card.
TARGET_US = {
    ("8192x151936", "fwd"): 860, ("8192x151936", "fwd+bwd"): 2580,
    ("8192x128256", "fwd"): 710, ("8192x128256", "fwd+bwd"): 2190,
    ("8192x32000", "fwd"): 190, ("8192x32000", "fwd+bwd"): 550,
}  # fmt: skip
PEER_US = {
    ("8192x151936", "fwd", "torch eager"): 20200, ("8192x151936", "fwd+bwd", "torch eager"): 53700,
    ("8192x151936", "fwd", "torch.compile"): 2460, ("8192x151936", "fwd+bwd", "torch.compile"): 12200,
    ("8192x151936", "fwd", "TRL"): 1110, ("8192x151936", "fwd+bwd", "TRL"): 2860,
    ("8192x128256", "fwd", "TRL"): 1080, ("8192x128256", "fwd+bwd", "TRL"): 2500,
    ("8192x32000", "fwd", "TRL"): 366, ("8192x32000", "fwd+bwd", "TRL"): 708,
}  # fmt: skip

PEERS: dict[str, Callable[[], Op]] = {
    "torch eager": lambda: in_torch,
    "torch.compile": lambda: torch.compile(in_torch, dynamic=False),
    "TRL": trl_logprob,
    "Liger": liger_logprob,
    "flash-attn": flash_attn_logprob,
    "QuACK": quack_logprob,
}
WITHOUT_ENTROPY = ("Liger", "flash-attn", "QuACK")


def without_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return in_torch(logits, targets)[:1]


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("shape", LOGPROB_CUDA)
def test_logprob(
    shape: str, direction: str, peer: str, compare: Callable[..., None], num_sets: Callable[[int], int]
) -> None:
    tokens, vocabulary = LOGPROB_CUDA[shape]
    theirs = PEERS[peer]()
    is_bound = peer in WITHOUT_ENTROPY
    size = 2 * tokens * vocabulary  # bytes of the logits in bfloat16
    batches = [
        (torch.randn(tokens, vocabulary, device="cuda", dtype=torch.bfloat16), targets)
        for targets in torch.randint(vocabulary, (num_sets(size), tokens), device="cuda")
    ]
    upstream = torch.randn(2, tokens, device="cuda")

    def calls(op: Op, copied: bool = False) -> list[Callable[[], tuple[Tensor, ...]]]:
        inputs = [(logits.clone() if copied else logits, targets) for logits, targets in batches]
        if direction == "fwd":
            return [forward(op, *x) for x in inputs]
        return [both(op, *x, upstream) for x in inputs]

    passes = 1 if direction == "fwd" else 3
    target_us = TARGET_US[shape, direction]
    peer_us = PEER_US.get((shape, direction, peer))
    compare(
        calls(ours), calls(theirs, copied=peer == "Liger"), op="logprob + entropy", direction=direction, shape=shape,
        dtype="bfloat16", peer_name=peer, bytes_moved=passes * size, target=peer_us and peer_us / target_us,
        target_us=target_us, expected=calls(in_torch)[0], peer_expected=calls(without_entropy)[0] if is_bound else None,
        peer_clock="events" if peer == "Liger" else None, is_bound=is_bound,
        backend=backend("logprob"),
        # Half a unit of bfloat16's 8 bits, of the gradient and of Liger's log-probs.
        rtol=2**-7 if direction == "fwd+bwd" or peer == "Liger" else 1e-4, atol=1e-4 if direction == "fwd" else 1e-8,
    )  # fmt: skip


@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
def test_logprob_host(direction: str, compare: Callable[..., None]) -> None:
    """What a call costs the host: checks, dispatch, autograd, launches."""
    logits, targets = torch.randn(TINY, device="cuda"), torch.zeros(TINY[0], dtype=torch.int64, device="cuda")
    upstream = torch.randn(2, TINY[0], device="cuda")
    if direction == "fwd":
        calls = [forward(op, logits, targets) for op in (ours, in_torch)]
    else:
        calls = [both(op, logits, targets, upstream) for op in (ours, in_torch)]
    compare(
        *calls, op="logprob + entropy", direction=f"{direction} host", shape="x".join(map(str, TINY)),
        dtype="float32", peer_name="torch eager", clock="wall",
        backend=backend("logprob"),
    )  # fmt: skip
