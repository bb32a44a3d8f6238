"""The policy's weights on their way to an engine: full tensors under Hugging Face names, bucket by bucket.

An engine in this process (transport "inproc") is given the tensors themselves, so that what it shares with the policy
need not move. To one in another process ("cuda_ipc") they travel in two flat buffers on the policy's device, filled in
turns: the device fills one while the engine reads the other. Which tensor lies where is planned once, from the
policy's manifest, and holds for every refit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from trainers.engines import Manifest, TensorSpec
from trainers.policy import Policy

ALIGNMENT = 512  # bytes: what CUDA aligns an allocation to, so a view is as good to any kernel as a tensor of its own


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in its bucket."""

    name: str
    spec: TensorSpec
    offset: int  # bytes

    @property
    def size(self) -> int:  # bytes
        return self.spec.dtype.itemsize * torch.Size(self.spec.shape).numel()

    def view(self, flat: Tensor) -> Tensor:
        """The tensor inside a uint8 buffer that holds its bucket."""
        return flat[self.offset : self.offset + self.size].view(self.spec.dtype).view(self.spec.shape)


class Plan:
    """The tensors of a manifest, in its order, in buckets of at most `bucket_bytes`; a larger tensor has its own."""

    def __init__(self, manifest: Manifest, bucket_bytes: int):
        self.manifest = dict(manifest)
        self.buckets: list[list[Place]] = []
        self.sizes: list[int] = []  # bytes of each bucket
        for name, spec in manifest.items():
            start = -(-self.sizes[-1] // ALIGNMENT) * ALIGNMENT if self.sizes else 0
            place = Place(name, spec, start)
            if not self.buckets or start + place.size > bucket_bytes:
                place = Place(name, spec, 0)
                self.buckets.append([])
                self.sizes.append(0)
            self.buckets[-1].append(place)
            self.sizes[-1] = place.offset + place.size

    def check(self, manifest: Manifest) -> None:
        """Raises ValueError, by name, unless `manifest` is still the one that was planned for."""
        if manifest == self.manifest:
            return
        for name in (*self.manifest, *manifest):
            before, now = self.manifest.get(name), manifest.get(name)
            if before != now:
                raise ValueError(f"the policy's manifest changed between two refits: {name} was {before}, is {now} now")


class WeightStream:
    """`policy`'s weights in buckets for an engine of this transport, as often as wanted."""

    def __init__(self, policy: Policy, transport: str, bucket_bytes: int):
        self.policy, self.flat, self.bucket_bytes = policy, transport != "inproc", bucket_bytes
        self.plan: Plan | None = None
        self.buffers: list[Tensor | None] = [None, None]

    def manifest(self) -> Manifest:
        """What is to be announced; the plan is made from the first, and the same is expected ever after."""
        manifest = self.policy.manifest()
        if self.plan is None:
            self.plan = Plan(manifest, self.bucket_bytes)
        self.plan.check(manifest)
        return manifest

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        """After manifest(). A bucket holds until the next one is asked for.

        Raises:
            ValueError: the policy's weights are not those of its manifest, in that order.
        """
        weights = self._weights()
        if not self.flat:
            for bucket in self.plan.buckets:
                yield [next(weights) for _ in bucket]
            next(weights, None)  # there must be none
            return
        filled = self._filled(weights)
        bucket = next(filled)
        while bucket is not None:
            following = next(filled, None)  # its copies go on while the engine reads this one
            tensors, copied = bucket
            if copied is not None:
                copied.synchronize()  # the engine's reads are on no stream of this process
            yield tensors
            bucket = following

    def free(self) -> None:
        """Give the buffers back until the next refit."""
        self.buffers = [None, None]

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        planned = (place for bucket in self.plan.buckets for place in bucket)
        for place, weight in zip_longest(planned, self.policy.weights()):
            expected = None if place is None else (place.name, place.spec)
            got = None if weight is None else (weight[0], TensorSpec(tuple(weight[1].shape), weight[1].dtype))
            if got != expected:
                raise ValueError(f"the policy's weights() must be what its manifest says: {expected}, got {got}")
            yield weight

    @torch.no_grad()
    def _filled(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[list[tuple[str, Tensor]], Any]]:
        """(views into a buffer, the event after their copies or None) of one bucket after the other."""
        for turn, bucket in enumerate(self.plan.buckets):
            views: list[tuple[str, Tensor]] = []
            for place in bucket:
                name, tensor = next(weights)
                flat = self._buffer(turn % 2, tensor.device)
                views.append((name, place.view(flat).copy_(tensor)))
            copied = torch.cuda.Event() if flat.is_cuda else None
            if copied is not None:
                copied.record()
            yield views, copied
        next(weights, None)  # there must be none

    def _buffer(self, which: int, device: torch.device) -> Tensor:
        if self.buffers[which] is None:
            size = max(self.plan.sizes[which::2])
            self.buffers[which] = torch.empty(size, dtype=torch.uint8, device=device)
        return self.buffers[which]
