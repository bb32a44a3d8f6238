"""The reference policy: the model as it was before training, over the same frozen trunk. Three ways to have it.

Each gives, for the length of one scoring pass, the part above the trunk and the output head to run.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import nn

from trainers.backbone import SplitTransformer
from trainers.offload import to_host
from trainers.policy.lora import Adapters
from trainers.sharding import local

Part = tuple[nn.Module, nn.Module]


class Reference(Protocol):
    def active(self) -> AbstractContextManager[Part]:
        """(part above the trunk, output head), to be used inside the context only."""


def make_reference(kind: str, backbone: SplitTransformer, adapters: Adapters | None) -> Reference:
    if adapters is not None:
        return AdaptersOff(backbone, adapters)
    if kind == "cpu_offload":
        return SwappedIn(backbone)
    # A sharded model cannot be copied, but its shards can.
    return SwappedIn(backbone, on_device=True) if backbone.lockstep else FrozenCopy(backbone)


class FrozenCopy:
    """The trained part as it is now: frozen parameters shared, trained ones copied, matrices in the compute dtype.

    Under autocast a matrix product reads its weight in the compute dtype anyway, so the copy gives the same numbers.
    """

    def __init__(self, backbone: SplitTransformer):
        memo = {id(p): p for p in backbone.model.parameters() if not p.requires_grad}
        holder = copy.deepcopy(nn.ModuleList([backbone.top, backbone.output_layer()]), memo)
        for module in holder.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    parameter.requires_grad_(False)
                    if isinstance(module, nn.Linear):
                        parameter.data = parameter.data.to(backbone.dtype)
        self.top, self.head = holder.eval()

    @contextmanager
    def active(self) -> Iterator[Part]:
        yield self.top, self.head


class AdaptersOff:
    """The base model under the adapters: no weight of its own."""

    def __init__(self, backbone: SplitTransformer, adapters: Adapters):
        self.backbone, self.adapters = backbone, adapters

    @contextmanager
    def active(self) -> Iterator[Part]:
        with self.adapters.off():
            yield self.backbone.top, self.backbone.output_layer()


class SwappedIn:
    """A copy in the CPU's memory, written over the trained parameters for the pass: the device holds one model.

    Of a sharded model it is this rank's part. With `on_device` the copy is there, in the compute dtype, which is what
    passes read, and so are the trained values for the length of a pass; else they wait in the CPU's memory. They come
    back bit for bit, also from a pass that raises. Meanwhile each parameter says so in `holds_reference`, which an
    engine that samples from the same storage refuses.
    """

    def __init__(self, backbone: SplitTransformer, *, on_device: bool = False):
        self.backbone, self.on_device = backbone, on_device
        self.trained = [local(p) if backbone.lockstep else p for p in backbone.model.parameters() if p.requires_grad]
        if on_device:
            self.initial = [p.to(backbone.dtype, copy=True) for p in self.trained]
        else:
            self.initial = [to_host(p.detach()) for p in self.trained]
            self.waiting = [torch.empty_like(p, pin_memory=p.is_pinned()) for p in self.initial]

    @contextmanager
    def active(self) -> Iterator[Part]:
        swapped, places = 0, [torch.empty_like(p) for p in self.trained] if self.on_device else self.waiting
        try:
            with torch.no_grad():
                for parameter, initial, waiting in zip(self.trained, self.initial, places, strict=True):
                    # One stream: each copy begins when those before it have ended, so none needs to be waited for.
                    waiting.copy_(parameter, non_blocking=True)
                    swapped += 1
                    parameter.holds_reference = True
                    parameter.copy_(initial, non_blocking=True)
            yield self.backbone.top, self.backbone.output_layer()
        finally:
            with torch.no_grad():
                for parameter, waiting in zip(self.trained[:swapped], places, strict=False):
                    parameter.copy_(waiting, non_blocking=True)
                    parameter.holds_reference = False
