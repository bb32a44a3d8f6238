"""float32 masters of parameters that are stored in bfloat16: what the optimizer steps, and where gradients are summed.

bfloat16 has 8 significant bits: adding less than 1/512 of a number leaves it as it was, and most of AdamW's steps are
smaller. So a step is made on the float32 master, and the parameter becomes the master rounded, in the storage that it
has: an engine that shares this storage generates with the new weights at once. The master starts as the value that was
loaded, not as the rounded one.

Gradients of micro-batches are summed in the master's `grad`, in float32. A hook moves a parameter's own gradient there
as soon as backward has made it, so that bfloat16 gradients exist one parameter at a time.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainers import offload


class Masters:
    """Pairs of a parameter and its float32 master; a parameter without one is its own."""

    def __init__(self) -> None:
        self.pairs: dict[nn.Parameter, Tensor] = {}
        self.offloaded = False

    def store(self, parameter: nn.Parameter, device: torch.device, dtype: torch.dtype) -> None:
        """Move a float32 parameter to `device` in `dtype`; the values that it had become its master there."""
        master = parameter.data.to(device, torch.float32)
        parameter.data = master.to(dtype)
        self.pairs[parameter] = master
        # Of the two only the master: a hook that held its parameter would keep both alive for ever.
        parameter.register_post_accumulate_grad_hook(functools.partial(_accumulate, master))

    def of(self, parameter: nn.Parameter) -> Tensor:
        """What the optimizer steps."""
        return self.pairs.get(parameter, parameter)

    def grad(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum of this optimizer step's gradients, to be added to; None without a master."""
        if (master := self.pairs.get(parameter)) is None:
            return None
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    @torch.no_grad()
    def write_back(self) -> None:
        """Every parameter takes its master's values, rounded, in place."""
        if self.pairs:
            torch._foreach_copy_(list(self.pairs), list(self.pairs.values()))

    @torch.no_grad()
    def load(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Parameter and master take `value`, in place."""
        self.of(parameter).copy_(value)
        if parameter in self.pairs:
            parameter.copy_(self.pairs[parameter])

    def to_be_summed(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Those of what the optimizer steps whose gradients are still this rank's own."""
        return list(parameters)

    def clip(self, parameters: Sequence[Tensor], limit: float) -> float:
        """Clip the gradients of what the optimizer steps to the norm `limit`, inf: not; their norm before."""
        return float(nn.utils.clip_grad_norm_(parameters, limit))

    def zero_grad(self) -> None:
        """Let go of what the optimizer itself does not know of."""

    def alike(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
        """What of AdamW's state over `parameters` every rank has alike."""
        return state

    def offload(self) -> None:
        """To the CPU's memory, until bring_back()."""
        if not self.offloaded:
            for master in self.pairs.values():
                master.data = offload.to_host(master)
            self.offloaded = True

    def bring_back(self) -> None:
        """To their parameters' device, where gradients and steps need them."""
        if self.offloaded:
            for parameter, master in self.pairs.items():
                master.data = offload.to_device(master, parameter.device)
            self.offloaded = False


def _accumulate(master: Tensor, parameter: Tensor) -> None:
    if parameter.grad is None:  # its gradient went where grad() is
        return
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None
