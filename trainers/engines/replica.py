"""The ranks whose GPUs one engine spans: only their leader talks to the engine, the others hand over and get back."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as torch_dist

from trainers import dist

T = TypeVar("T")


class Replica:
    """`size` neighbouring ranks, the first of them the leader. Made by all ranks of the run at once.

    Args:
        size: GPUs of one engine.
        timeout_s: seconds that a rank waits for the leader's engine; None: torch's default.

    Raises:
        ValueError: the run's ranks cannot be cut into replicas of this size.
    """

    def __init__(self, size: int, *, timeout_s: float | None = None):
        if dist.size() % size:
            raise ValueError(f"an engine over {size} GPUs needs a multiple of {size} ranks, got {dist.size()}")
        self.size, self.index = size, dist.rank() % size
        self.leader = self.index == 0
        self.group: Any = None
        if size > 1:
            # The leader may use all of timeout_s before the others hear of it.
            timeout = None if timeout_s is None else timedelta(seconds=timeout_s + 60)
            for first in range(0, dist.size(), size):
                group = torch_dist.new_group(list(range(first, first + size)), timeout=timeout, backend="gloo")
                if first <= dist.rank() < first + size:
                    self.group = group

    def together(self, compute: Callable[[], T]) -> list[T]:
        """Every member's result, on every member; an error of one is raised on all."""
        return [compute()] if self.size == 1 else dist.together(compute, self.group)

    def leader_does(self, compute: Callable[[], T]) -> T:
        """The result of the leader, which alone computes it; an error of its is raised on all members."""
        return self.together(lambda: compute() if self.leader else None)[0]  # type: ignore[return-value]
