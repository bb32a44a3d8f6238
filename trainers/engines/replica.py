"""The ranks whose GPUs one engine spans, and how each hands its requests over and gets its own answers back."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as torch_dist

from trainers import dist
from trainers.engines import Completion, Sampling
from trainers.engines.guarded import GuardedEngine

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


class ReplicaEngine(GuardedEngine):
    """Collective over the ranks of `replica`, all of which make the same calls in the same order. generate() takes
    each rank's own prompts and gives each rank its own completions."""

    replica: Replica

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        if self.replica.size == 1:
            return super().generate(prompts, sampling, seeds)

        def request() -> tuple[list[list[int]], Sampling, list[int]]:
            self._check_request(prompts, sampling, seeds)
            return prompts, sampling, list(seeds)

        # A rank without prompts takes part: others of the replica may have some.
        requests = self.replica.together(request)
        rows = [(row, s, seed) for part, s, theirs in requests for row, seed in zip(part, theirs, strict=True)]
        if len({s for _, s, _ in rows}) > 1:
            raise ValueError("the ranks of a replica must sample in one way")
        if not rows:
            return []
        completions = self._generate_together([p for p, _, _ in rows], rows[0][1], [seed for _, _, seed in rows])
        first = sum(len(part) for part, _, _ in requests[: self.replica.index])
        return completions[first : first + len(prompts)]

    def _generate_together(
        self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """The requests of all ranks, answered on all ranks."""
        return self._generate(prompts, sampling, seeds)
