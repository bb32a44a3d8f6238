"""The thread pool behind the CPU kernels: results do not depend on it, and it survives a fork."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from fastppo.ops.gae import GAEOutput, gae


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# Large enough that the work is cut into blocks; 16 lanes a group with few threads and 4 with many; and packed.
SHAPES = {"wide": (48, 3000), "narrow": (7, 20000)}


def compute(shape: tuple[int, int], packed: bool) -> GAEOutput:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(shape, generator=generator) for _ in range(2))
    mask = torch.rand(shape, generator=generator) < 0.8
    if not packed:
        return gae(rewards, values, gamma=0.99, lam=0.95, lam_returns=1.0, mask=mask, backend="cpu")
    flat = rewards.numel()
    cuts = torch.randint(flat, (shape[0] - 1,), generator=generator)
    cu_seqlens = torch.cat((torch.tensor([0, flat]), cuts)).sort().values
    return gae(
        rewards.flatten(),
        values.flatten(),
        gamma=0.99,
        lam=0.95,
        mask=mask.flatten(),
        cu_seqlens=cu_seqlens,
        backend="cpu",
    )


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_results_do_not_depend_on_the_thread_count(shape: tuple[int, int], packed: bool, threads: None) -> None:
    torch.set_num_threads(1)
    expected = compute(shape, packed)
    for count in (2, 5):
        torch.set_num_threads(count)
        for _ in range(5):
            got = compute(shape, packed)
            assert torch.equal(got.advantages, expected.advantages)
            assert torch.equal(got.returns, expected.returns)


def test_concurrent_callers_each_get_their_own_answer(threads: None) -> None:
    torch.set_num_threads(3)
    expected = {name: compute(shape, False) for name, shape in SHAPES.items()}
    wrong: list[str] = []

    def call(name: str) -> None:
        for _ in range(10):
            if not torch.equal(compute(SHAPES[name], False).advantages, expected[name].advantages):
                wrong.append(name)

    callers = [threading.Thread(target=call, args=(name,)) for name in (*SHAPES, *SHAPES)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []


# The kernel is called without torch ops on the way, whose own pool may hang in a child by itself.
FORK = """
import os, sys, threading, torch
from fastppo import _C

def call():
    n, rows = 60000, 8
    x = torch.ones(rows, n)
    a, r = torch.empty(rows, n), torch.empty(rows, n)
    s = lambda t: (t.data_ptr(), n, 1, 0)
    _C.gae(s(x), s(x), None, None, None, None, None, 0, 0, 0, False, a.data_ptr(), r.data_ptr(), n, 1, rows, n,
           1.0, 1.0, 1.0, False, 0, 0, 4, -1, 0)
    assert r[rows - 1, 0] == n, r[rows - 1, 0]

call()
stop = threading.Event()
def keep_busy():
    while not stop.is_set(): call()
other = threading.Thread(target=keep_busy)
if sys.argv[1] == "busy": other.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        call(); call()
        os._exit(0 if len(os.listdir("/proc/self/task")) > 1 else 1)  # the child has workers of its own
    assert os.waitpid(child, 0)[1] == 0
    call()
stop.set()
if sys.argv[1] == "busy": other.join()
print("done")
"""


@pytest.mark.parametrize("parent", ["idle", "busy"])
def test_a_forked_child_can_use_the_pool(parent: str) -> None:
    """Also where another thread of the parent is inside a call when it forks, and so holds the pool's locks."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORK, parent],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"a forked child hung for {time.monotonic() - started:.0f} s")
    assert out == "done\n", err


def test_the_gil_is_released() -> None:
    """Another Python thread goes on while a kernel runs."""
    x = torch.zeros(1, 8_000_000)
    gae(x, x, gamma=1.0, lam=1.0, backend="cpu")
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    started = time.perf_counter()
    gae(x, x, gamma=1.0, lam=1.0, backend="cpu")
    ended = time.perf_counter()
    stop.set()
    ticker.join()
    inside = [t for t in ticks if started + 0.2 * (ended - started) < t < started + 0.8 * (ended - started)]
    assert inside, f"no tick in a call of {ended - started:.3f} s"
