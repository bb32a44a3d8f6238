"""The GPU rows' clock and memory: device time by CUDA events, inputs that have left the L2 cache, peak allocations."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from measure import Side

from fastppo.backends import resolve

WARM_UP = 3  # calls before a capture, which may neither compile a kernel nor set up a library
COPY_BYTES = 1 << 30


def backend(op: str) -> str:
    return resolve(op, "auto", torch.device("cuda", torch.cuda.current_device()), torch.float32)[0]


def input_sets(set_bytes: int, l2_bytes: int) -> int:
    """How many sets of inputs and results take turns, so that the cache has none left of a set when its turn comes
    again: three times the cache in all. One set that alone fills it eight times over needs no other."""
    return 1 if set_bytes >= 8 * l2_bytes else max(2, math.ceil(3 * l2_bytes / set_bytes))


class DeviceSide(Side):
    """A side by the device's clock. Its `call` makes the calls of all sets of inputs in turn, and is a CUDA graph's
    replay, without the host, unless what is timed cannot be captured."""

    burst_s: ClassVar[float] = 5e-3
    settle_s: ClassVar[float] = 0.0  # the host's threads are not what is timed, and an idle GPU lowers its clocks
    warm_s: ClassVar[float] = 0.0

    def _burst(self, loops: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.call()  # untimed: it warms, and the device is busy with it while the host launches the next
        begin.record()
        for _ in range(loops):
            self.call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / loops


def device_side(calls: Sequence[Callable[[], Any]], captured: bool) -> DeviceSide:
    """`calls`: the same call for each set of inputs. Not `captured` are those that wait for the device: their time is
    that between two events around them, the host's share included."""
    if captured:
        return DeviceSide(Graph(calls), sets=len(calls))

    def in_turn() -> None:
        for call in calls:
            call()

    return DeviceSide(in_turn, sets=len(calls))


class Graph:
    """The calls, captured. Their results stay alive, so that each writes memory of its own, as it reads its own."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.results = [call() for call in calls]

    def __call__(self) -> None:
        self.graph.replay()


def copy_gbps() -> float:
    """What the memory gives a large copy within the device, bytes read plus bytes written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    side = DeviceSide(lambda: target.copy_(source))
    side.calibrate()
    return 2 * COPY_BYTES / statistics.median(side.measure() for _ in range(21)) / 1e9


def peak_mib(call: Callable[[], Any]) -> float:
    """The most that a call has allocated at once, its results included, beyond what there was before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 2**20
