"""How two callables are timed against each other, and how much memory one needs. What is reported is their ratio:
absolute times differ between machines and drift on one, the ratio of two calls made a moment apart does not."""

import contextlib
import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

# A burst of calls is at least this long: shorter ones measure the timer and the scheduler.
BURST_S = 2e-3
# Before a burst the other side's threads may still spin on a core (OpenMP's do, for about a millisecond).
SETTLE_S = 2e-3
# A side is called, untimed, for at least this long before each burst, so that a burst starts with its own data in the
# caches and its own threads awake: after another's data the first calls take up to three times as long, and a short
# call would be measured cold against a long one that warms up within itself.
WARM_S = 5e-3
# A call of more than this is not repeated for that.
LONG_S = 0.05
MIN_ROUNDS, MAX_ROUNDS = 5, 201


class RatioClock:
    """A clock for pytest-benchmark that stands still except where it is told to go on by the ratio of a round, so that
    the "time" of a round, which pytest-benchmark stores and compares, is ours / peer."""

    __name__ = "ratio_of_paired_times"  # pytest-benchmark writes the timer's name down

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, ratio: float) -> None:
        self.now += ratio


@dataclass
class Side:
    """One of the two callables: how many calls make a burst, and the seconds a call took in each round.

    Its clock is the wall's; device.DeviceSide has that of a GPU. `finish` waits for what calls left running, and `sets`
    is how often `call` makes what is timed.
    """

    call: Callable[[], Any]
    finish: Callable[[], Any] | None = None
    sets: int = 1
    loops: int = 1
    one_s: float = 0.0
    seconds: list[float] = field(default_factory=list)

    burst_s: ClassVar[float] = BURST_S
    settle_s: ClassVar[float] = SETTLE_S
    warm_s: ClassVar[float] = WARM_S

    def calibrate(self) -> None:
        """The call has run before: what is compiled at first use is compiled."""
        self.one_s = self._burst(1)
        while self.one_s * self.loops < self.burst_s / 2 and self.loops < 1_000_000:
            self.loops *= 2
            self.one_s = self._burst(self.loops)
        self.loops = max(1, math.ceil(self.burst_s / self.one_s))

    @property
    def round_s(self) -> float:
        """What a round of this side takes in all."""
        return self.settle_s + self.one_s * (self.warming_loops + self.loops)

    @property
    def warming_loops(self) -> int:
        return 0 if self.one_s > LONG_S else math.ceil(self.warm_s / self.one_s)

    def _burst(self, loops: int) -> float:
        calls = range(loops)
        begin = time.perf_counter()
        for _ in calls:
            self.call()
        if self.finish is not None:
            self.finish()
        return (time.perf_counter() - begin) / loops

    def measure(self) -> float:
        time.sleep(self.settle_s)
        if self.warming_loops:
            self._burst(self.warming_loops)
        self.seconds.append(self._burst(self.loops) / self.sets)
        return self.seconds[-1]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


class Pair:
    """Ours and the peer, measured in turns, in an order that alternates so that a drift of the clocks cancels out.
    Between them, where there is one, what both have to do at least."""

    def __init__(self, ours: Side, peer: Side, floor: Side | None = None) -> None:
        self.ours, self.peer, self.floor = ours, peer, floor
        self.sides = [ours, peer] if floor is None else [ours, floor, peer]
        for side in self.sides:
            side.calibrate()

    def rounds(self, budget_s: float) -> int:
        """As many as the budget holds; an odd number, so that the median is a round that happened."""
        fitting = int(budget_s / sum(side.round_s for side in self.sides))
        return min(max(fitting, MIN_ROUNDS), MAX_ROUNDS) | 1

    def measure(self) -> float:
        """One round: seconds of ours / seconds of the peer."""
        turns = self.sides if len(self.ours.seconds) % 2 == 0 else self.sides[::-1]
        with garbage_kept():
            for side in turns:
                side.measure()
        return self.ours.seconds[-1] / self.peer.seconds[-1]

    def per_floor(self, side: Side) -> float:
        """How many times the floor's time a side takes: the median of the rounds."""
        assert self.floor is not None
        return statistics.median(x / y for x, y in zip(side.seconds, self.floor.seconds, strict=True))


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """No collection inside, as pytest-benchmark and timeit do it; whatever it was before afterwards."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def keep_freed_memory() -> None:
    """glibc hands no freed memory back to the system in this process, so that results of megabytes reuse pages.

    By default it does or does not, depending on what lies beside them on the heap; where it does, a thousand page
    faults per call, of either side, take longer than the kernels that are compared.
    """
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_max, 0)


def peak_mib(call: Callable[[], Any]) -> float | None:
    """By how much this process grows during a call, its results included; None where Linux does not tell.

    Memory that an allocator kept of earlier calls would hide the growth, so it is handed back first.
    """
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:  # 5: the peak becomes what is resident now
            file.write("5")
    except (OSError, AttributeError):
        return None
    before = _status_kib("VmRSS")
    result = call()
    peak = _status_kib("VmHWM")
    del result
    return max(0, peak - before) / 1024


def _status_kib(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name}:"))
