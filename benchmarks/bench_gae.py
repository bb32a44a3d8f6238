"""gae against what trainers do: a loop over T in torch and in numpy, and a compiled loop in numba.

Every peer has the op's semantics of a mask and allocates its results, as the op does. Legend: B sequences, T positions.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
import torch
from peers import gae_loop
from shapes import GAE, GAMMA, LAM, TINY
from torch import Tensor

import fastppo
from fastppo.reference.advantages import whiten as whiten_in_torch

# The fastest of its threading layers here: the threads of its OpenMP one spin into the next call, whoever makes it.
numba.config.THREADING_LAYER = "workqueue"

# Targets of the CPU table: times faster than each peer, on both shapes.
TARGETS = {"torch loop": 200.0, "numpy loop": 50.0, "numba": 1.5}


def numpy_loop(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    acc = next_value = np.zeros(rewards.shape[0], np.float32)
    gamma, decay = np.float32(GAMMA), np.float32(GAMMA * LAM)
    advantages = np.zeros(rewards.shape, np.float32)
    for t in range(rewards.shape[1] - 1, -1, -1):
        selected = mask[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + decay * acc
        acc = np.where(selected, advantage, acc)
        next_value = np.where(selected, values[:, t], next_value)
        advantages[:, t] = np.where(selected, advantage, np.float32(0))
    return advantages, np.where(mask, advantages + values, np.float32(0))


@numba.njit(parallel=True)
def numba_loop(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    num_rows, num_steps = rewards.shape
    gamma, decay = np.float32(GAMMA), np.float32(GAMMA * LAM)
    zero = np.float32(0)
    advantages = np.empty((num_rows, num_steps), np.float32)
    returns = np.empty((num_rows, num_steps), np.float32)
    for b in numba.prange(num_rows):
        acc = next_value = zero
        for t in range(num_steps - 1, -1, -1):
            if mask[b, t]:
                value = values[b, t]
                acc = rewards[b, t] + gamma * next_value - value + decay * acc
                next_value = value
                advantages[b, t] = acc
                returns[b, t] = acc + value
            else:
                advantages[b, t] = zero
                returns[b, t] = zero
    return advantages, returns


@numba.njit(parallel=True)
def numba_packed(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, cu_seqlens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    gamma, decay = np.float32(GAMMA), np.float32(GAMMA * LAM)
    zero = np.float32(0)
    advantages = np.empty(rewards.shape, np.float32)
    returns = np.empty(rewards.shape, np.float32)
    for b in numba.prange(cu_seqlens.shape[0] - 1):
        acc = next_value = zero
        for t in range(cu_seqlens[b + 1] - 1, cu_seqlens[b] - 1, -1):
            if mask[t]:
                value = values[t]
                acc = rewards[t] + gamma * next_value - value + decay * acc
                next_value = value
                advantages[t] = acc
                returns[t] = acc + value
            else:
                advantages[t] = zero
                returns[t] = zero
    return advantages, returns


def batch(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """rewards, values, and the mask of dialogues: spans of 200 positions, every fifth of them a tool's output."""
    rewards, values = (torch.randn(shape).to(dtype) for _ in range(2))
    mask = (torch.arange(shape[-1]) // 200 % 5 != 3).expand(shape).contiguous()
    return rewards, values, mask


def arrays(*tensors: Tensor) -> tuple[np.ndarray, ...]:
    return tuple(x.numpy() for x in tensors)


def ours(rewards: Tensor, values: Tensor, mask: Tensor, **options: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: fastppo.gae(rewards, values, gamma=GAMMA, lam=LAM, mask=mask, **options)


@pytest.fixture(autouse=True)
def _numba_threads(threads: int) -> None:
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))


# Per position: rewards and values of 4 bytes and a byte of mask read, two outputs of 4 bytes written.
BYTES_PER_POSITION = 17


@pytest.mark.parametrize("shape", [pytest.param(name, marks=pytest.mark.quick) for name in GAE])
@pytest.mark.parametrize("peer", TARGETS)
def test_gae(peer: str, shape: str, compare: Callable[..., None]) -> None:
    inputs = batch(*GAE[shape])
    numpy_inputs = arrays(*inputs)
    peers: dict[str, Callable[[], Any]] = {
        "torch loop": lambda: gae_loop(*inputs),
        "numpy loop": lambda: numpy_loop(*numpy_inputs),
        "numba": lambda: numba_loop(*numpy_inputs),
    }
    compare(
        ours(*inputs), peers[peer], op="gae", direction="fwd", shape=shape, dtype="float32", peer_name=peer,
        bytes_moved=BYTES_PER_POSITION * inputs[0].numel(), target=TARGETS[peer],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("shape", GAE)
def test_gae_half(shape: str, dtype: torch.dtype, compare: Callable[..., None]) -> None:
    """numba knows neither type: the peer converts with torch and then runs the compiled loop."""
    rewards, values, mask = batch(*GAE[shape], dtype=dtype)
    compare(
        ours(rewards, values, mask),
        lambda: numba_loop(*arrays(rewards.float(), values.float(), mask)),
        op="gae", direction="fwd", shape=shape, dtype=str(dtype).removeprefix("torch."),
        peer_name="torch .float() + numba", bytes_moved=(BYTES_PER_POSITION - 4) * rewards.numel(),
    )  # fmt: skip


@pytest.mark.quick
def test_gae_packed(compare: Callable[..., None]) -> None:
    """Lengths of a rollout: 256 sequences of 1 to 4096 tokens."""
    lengths = torch.randint(1, 4097, (256,))
    inputs = batch(int(lengths.sum()))
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    numpy_inputs = arrays(*inputs, cu_seqlens)
    compare(
        ours(*inputs, cu_seqlens=cu_seqlens), lambda: numba_packed(*numpy_inputs), op="gae", direction="fwd",
        shape="packed 256 x 1..4096", dtype="float32", peer_name="numba",
        bytes_moved=BYTES_PER_POSITION * inputs[0].numel(),
    )  # fmt: skip


@pytest.mark.parametrize("shape", GAE)
def test_gae_whitened(shape: str, compare: Callable[..., None]) -> None:
    """Against the same advantages whitened by the definition, which is a few passes of torch in float64."""
    rewards, values, mask = batch(*GAE[shape])

    def peer() -> tuple[Tensor, Tensor]:
        advantages, returns = fastppo.gae(rewards, values, gamma=GAMMA, lam=LAM, mask=mask)
        return whiten_in_torch(advantages, mask), returns

    compare(
        ours(rewards, values, mask, whiten=True), peer, op="gae + whiten", direction="fwd", shape=shape,
        dtype="float32", peer_name="gae, then torch", bytes_moved=(BYTES_PER_POSITION + 8) * rewards.numel(),
    )  # fmt: skip


@pytest.mark.quick
def test_gae_host(compare: Callable[..., None]) -> None:
    """What a call costs before any work: the same loop of torch calls over 8 positions."""
    inputs = batch(*TINY)
    compare(
        ours(*inputs), lambda: gae_loop(*inputs), op="gae", direction="fwd host", shape="2x8", dtype="float32",
        peer_name="torch loop",
    )  # fmt: skip
