"""One optimizer step: clip, check, step, schedule. AdamW over float32 parameters, or the float32 masters of others."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainers import dist, offload
from trainers.config import OptimizerConfig, SchedulerConfig
from trainers.masters import Masters


@dataclass
class StepMetrics:
    """What one optimizer step leaves behind: metric vectors over its micro-batches, and numbers per optimizer."""

    sums: dict[str, Tensor]
    optimizers: dict[str, dict[str, float]]


class Optimizer:
    """AdamW with its learning-rate schedule and its own gradient clipping.

    Args:
        parameters: float32, or with a master among `masters`, which is then what is clipped and stepped.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: OptimizerConfig,
        scheduler: SchedulerConfig,
        masters: Masters | None = None,
    ):
        self.masters = masters or Masters()
        self.parameters = [self.masters.of(parameter) for parameter in parameters]
        assert all(parameter.dtype == torch.float32 for parameter in self.parameters)
        self.max_grad_norm = optimizer.max_grad_norm
        self.adamw = torch.optim.AdamW(
            self.parameters,
            lr=optimizer.lr,
            betas=(optimizer.betas[0], optimizer.betas[1]),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adamw, lambda step: lr_factor(step, scheduler))
        self.offloaded = False

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)
        self.masters.zero_grad()

    def clip(self) -> float:
        """Clip the gradients; their norm before."""
        limit = self.max_grad_norm if self.max_grad_norm > 0 else math.inf
        return self.masters.clip(self.parameters, limit)

    def offload(self) -> None:
        """AdamW's state to the CPU's memory, until the next step(); the masters until Masters.bring_back() or that."""
        self.masters.offload()
        if not self.offloaded:
            self._move_state(lambda tensor, _: offload.to_host(tensor))
            self.offloaded = True

    def _move_state(self, move: Callable[[Tensor, torch.device], Tensor]) -> None:
        for parameter, state in self.adamw.state.items():
            state.update({name: move(value, parameter.device) for name, value in state.items()})

    def step(self) -> None:
        self.masters.bring_back()
        if self.offloaded:
            self._move_state(offload.to_device)
            self.offloaded = False
        self.adamw.step()
        self.masters.write_back()
        self.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        adamw = self.masters.alike(self.adamw.state_dict(), self.parameters)
        return {"adamw": adamw, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.masters.bring_back()
        self.adamw.load_state_dict(state["adamw"])  # to the parameters' device
        self.offloaded = False
        self.schedule.load_state_dict(state["schedule"])


def step_all(optimizers: dict[str, Optimizer]) -> dict[str, dict[str, float]]:
    """One optimizer step of parts that belong together: all of them, or none if any gradient is not finite.

    A step that is left out is left out whole (no momentum, decay or schedule) and counted.
    """
    dist.sum_gradients(p for each in optimizers.values() for p in each.masters.to_be_summed(each.parameters))
    norms = {name: optimizer.clip() for name, optimizer in optimizers.items()}
    finite = all(map(math.isfinite, norms.values()))
    report = {}
    for name, optimizer in optimizers.items():
        lr = optimizer.schedule.get_last_lr()[0]
        if finite:
            optimizer.step()
        optimizer.zero_grad()
        report[name] = {"grad_norm": norms[name], "lr": lr, "skipped": 0.0 if finite else 1.0}
    return report


def lr_factor(step: int, scheduler: SchedulerConfig) -> float:
    """Learning rate at optimizer step `step` (from 0), as a share of the peak."""
    if step < scheduler.warmup_steps:
        return (step + 1) / scheduler.warmup_steps
    if scheduler.name == "constant":
        return 1.0
    progress = min((step - scheduler.warmup_steps) / scheduler.decay_steps, 1.0)
    left = 1 - progress if scheduler.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return scheduler.min_lr_ratio + (1 - scheduler.min_lr_ratio) * left


def add_metrics(total: dict[str, Tensor], part: dict[str, Tensor]) -> None:
    """Combine micro-batches' metric vectors in place, on the device: sums; maxima where the name ends in _max."""
    for name, value in part.items():
        combine = torch.maximum if name.endswith("_max") else torch.add
        total[name] = combine(total[name], value) if name in total else value
