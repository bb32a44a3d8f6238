"""What a decoding step reads and writes on the device, and steps as CUDA graphs.

A graph reads and writes where it did when it was made, so nothing here moves while graphs exist; which places a batch
serves is data. Graphs exist for batches of a few sizes and for each way of sampling.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from trainers.engines import Sampling

Step = Callable[[Tensor, Sampling], None]  # of places [N]


class State:
    """Row i is place i; the last row belongs to nobody and fills up batches."""

    def __init__(self, places: int, longest: int, width: int, vocab: int, *, seen: bool, device: torch.device):
        rows = places + 1
        self.longest, self.width = longest, width
        new = lambda *shape, dtype: torch.zeros(*shape, dtype=dtype, device=device)  # noqa: E731
        self.table = new(rows, width, dtype=torch.int32)
        self.token = new(rows, dtype=torch.int64)
        self.position = new(rows, dtype=torch.int64)  # where `token` stands
        self.generated = new(rows, dtype=torch.int64)
        self.active = new(rows, dtype=torch.bool)
        self.uniforms = new(rows, longest + 1, dtype=torch.float64)
        self.tokens = new(rows, longest + 1, dtype=torch.int64)  # a row that has ended goes on writing past its end
        self.logprobs = new(rows, longest + 1, dtype=torch.float32)
        self.seen = new(rows, vocab, dtype=torch.bool) if seen else None
        self.limit = new((), dtype=torch.int64)  # tokens of a response
        self.diverged = new((), dtype=torch.bool)

    def holds(self, longest: int, width: int, seen: bool) -> bool:
        return self.longest >= longest and self.width >= width and (self.seen is not None or not seen)


class Graphs:
    """Steps of batches of any size up to `places`; place number `places` is nobody's, and a step of it changes nothing
    that counts. On a CPU, and for models that cannot be captured (experts that the host picks tokens for), a step is
    called as it is."""

    def __init__(self, places: int, device: torch.device):
        self.nobody, self.sizes = places, batch_sizes(places)
        self.lanes = torch.full((places,), places, dtype=torch.int64, device=device)
        self.capture = device.type == "cuda"
        self.made: dict[tuple[int, tuple[int, ...], Sampling], Callable[[], None]] = {}

    def clear(self) -> None:
        self.made.clear()

    def run(self, step: Step, places: Sequence[int], sampling: Sampling, stops: tuple[int, ...], times: int) -> None:
        """`step` of `places`, `times` times. stops: the ids that end a response, which `step` finds on the device."""
        size = next(size for size in self.sizes if size >= len(places))
        once = self._step(step, size, sampling, stops)
        served = torch.tensor([*places] + [self.nobody] * (size - len(places)))
        served = served.pin_memory() if self.lanes.is_cuda else served
        self.lanes[:size].copy_(served, non_blocking=True)
        for _ in range(times):
            once()

    def _step(self, step: Step, size: int, sampling: Sampling, stops: tuple[int, ...]) -> Callable[[], None]:
        # What only bounds the length, is looked at by the host or is in `stops` is not in a graph.
        sampling = dataclasses.replace(sampling, max_new_tokens=0, stop_strings=(), stop_token_ids=(), ignore_eos=False)
        lanes, key = self.lanes[:size], (size, stops, sampling)
        once = lambda: step(lanes, sampling)  # noqa: E731
        if self.capture and key not in self.made:
            lanes.fill_(self.nobody)
            try:
                self.made[key] = self._captured(once)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as reason:
                self.capture = False  # nor ever again: torch does not tidy up after a capture that failed
                torch.cuda.synchronize()
                _free_generator(lanes.device)
                print(f"generation: without CUDA graphs: {str(reason).partition(chr(10))[0]}", flush=True)
        return self.made.get(key, once)

    def _captured(self, once: Callable[[], None]) -> Callable[[], None]:
        if not self.made:
            self.pool = torch.cuda.graph_pool_handle()  # the graphs share what they need for a while
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            once()  # kernels are compiled
            with _no_waiting():
                once()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # If the capture fails, torch.cuda.graph leaves its own stream behind as the current one.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
        ):
            once()
        return graph.replay


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """Where the host waits for the device is a RuntimeError, as in a capture, but one that leaves nothing behind."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not see every wait; the capture sees the others
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _free_generator(device: torch.device) -> None:
    """After a capture that failed, torch takes the device's random generator to be in it still, and whoever draws next
    gets an error: its numbers go on in a state that was in none."""
    default = torch.cuda.default_generators[device.index or 0]
    fresh = torch.Generator(device)
    fresh.set_state(default.get_state())
    default.graphsafe_set_state(fresh.graphsafe_get_state())


def batch_sizes(places: int) -> list[int]:
    """For which a graph is made: powers of two, and all places."""
    sizes = [1]
    while sizes[-1] * 2 < places:
        sizes.append(sizes[-1] * 2)
    return [*sizes, places] if places > 1 else sizes
