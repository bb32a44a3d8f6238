"""gae on a GPU against the loop over T that trainers write and against torch's associative scan, compiled.

Every peer has the op's semantics of a mask. Legend: B sequences, T positions.
"""

from collections.abc import Callable

import pytest
import torch
from device import backend
from peers import gae_by_scans, gae_loop
from shapes import GAE_CUDA, GAMMA, LAM, TINY
from torch import Tensor

import fastppo

# Microseconds on the card in conftest.TARGET_CARD: what ours must reach, and the peers as measured there; the ratio
# counts on another card.
TARGET_US = {"512x2048": 12, "32x32768": 14, "8192x1024": 58, "1x131072": 10}
PEER_US = {
    ("512x2048", "torch loop"): 208_000,
    ("512x2048", "associative_scan"): 44, ("32x32768", "associative_scan"): 242,
    ("8192x1024", "associative_scan"): 473, ("1x131072", "associative_scan"): 563,
}  # fmt: skip

# Per position: rewards and values of 4 bytes and a byte of mask read, two outputs of 4 bytes written.
BYTES_PER_POSITION = 17

# The loop takes 0.2 s over 2048 positions, whatever the rows.
ROWS = [("512x2048", "torch loop"), *((shape, "associative_scan") for shape in GAE_CUDA)]


def batch(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """rewards, values, and the mask of dialogues: spans of 200 positions, every fifth of them a tool's output."""
    rewards, values = torch.randn(2, *shape, device="cuda")
    mask = (torch.arange(shape[-1], device="cuda") // 200 % 5 != 3).expand(shape).contiguous()
    return rewards, values, mask


def call(op: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: op(*inputs)


def ours(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return fastppo.gae(rewards, values, gamma=GAMMA, lam=LAM, mask=mask)


def on_the_cpu(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.cuda() for x in ours(*(x.cpu() for x in inputs)))


@pytest.mark.parametrize(("shape", "peer"), ROWS)
def test_gae(shape: str, peer: str, compare: Callable[..., None], num_sets: Callable[[int], int]) -> None:
    size = BYTES_PER_POSITION * torch.Size(GAE_CUDA[shape]).numel()
    batches = [batch(*GAE_CUDA[shape]) for _ in range(num_sets(size))]
    theirs = gae_loop if peer == "torch loop" else torch.compile(gae_by_scans, dynamic=False)
    compare(
        [call(ours, *x) for x in batches],
        # A graph of the loop's 20,000 launches would time what nobody runs.
        [call(theirs, *x) for x in (batches[:1] if peer == "torch loop" else batches)],
        op="gae", direction="fwd", shape=shape, dtype="float32", peer_name=peer, bytes_moved=size,
        target=PEER_US[shape, peer] / TARGET_US[shape], target_us=TARGET_US[shape],
        expected=lambda: on_the_cpu(*batches[0]), peer_clock="events" if peer == "torch loop" else None,
        backend=backend("gae"),
    )  # fmt: skip


def test_gae_host(compare: Callable[..., None]) -> None:
    """What a call costs the host: the same loop of torch calls over 8 positions."""
    inputs = batch(*TINY)
    compare(
        call(ours, *inputs), call(gae_loop, *inputs), op="gae", direction="fwd host", shape="2x8", dtype="float32",
        peer_name="torch loop", clock="wall", backend=backend("gae"),
    )  # fmt: skip
