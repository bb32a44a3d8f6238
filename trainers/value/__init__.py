"""The critic behind one protocol, wherever it lives: a head on the policy's trunk, or a model of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainers.losses import ValueLoss
from trainers.optim import StepMetrics
from trainers.rollout import RolloutBatch


class Pending(Protocol):
    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """values [T] (V of the state before each selected token, else 0) and next_values [B] (V after the last)."""


class Value(Protocol):
    wants: set[str]  # what the policy's scoring pass should compute for this critic

    def infer(self, batch: RolloutBatch) -> Pending:
        """Ask for values; the answer may come later, while the policy scores log-probs."""

    def minibatches(self, batch: RolloutBatch, *, seed: int, step: int, epoch: int) -> Iterator[RolloutBatch]:
        """The critic's own optimizer steps of one epoch; none where it is stepped together with the policy."""

    def train_step(self, minibatch: RolloutBatch, loss: ValueLoss) -> StepMetrics: ...

    def offload(self) -> None:
        """Make room for generation: leave the device until the next infer() or train_step()."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ScalarHead(nn.Module):
    """[..., D] -> [...], float32 whatever comes in; zero at the start, so that the first values are 0."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return self.linear(hidden.float()).squeeze(-1)


class NoValue:
    """For advantages that need no critic: nothing is inferred, trained or saved."""

    wants: set[str] = set()

    def infer(self, batch: RolloutBatch) -> "NoValue":
        return self

    def result(self) -> tuple[None, None]:
        return None, None

    def minibatches(self, batch: RolloutBatch, *, seed: int, step: int, epoch: int) -> Iterator[RolloutBatch]:
        return iter(())

    def train_step(self, minibatch: RolloutBatch, loss: ValueLoss) -> StepMetrics:
        raise RuntimeError("there is no critic to train")

    def offload(self) -> None:
        """Nothing to move."""

    def save(self, folder: Path) -> None:
        """Nothing to write."""

    def load(self, folder: Path) -> None:
        """Nothing to read."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See save()."""
