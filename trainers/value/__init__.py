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

    def settle(self) -> dict[str, float]:
        """Wait until every train_step() has been made and its metrics are there; what else is to be logged of them."""

    def offload(self) -> None:
        """Make room for generation: leave the device until the next infer() or train_step()."""

    def save(self, folder: Path) -> None:
        """Write the critic's weights, the main rank alone; called on all ranks, as load() is."""

    def load(self, folder: Path) -> None: ...

    def save_shards(self, folder: Path) -> None:
        """Write what of the state lies on several ranks, each rank its part; nothing of a whole model."""

    def load_shards(self, folder: Path) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def release(self) -> None:
        """The run is over, as far as one can tell: what it held elsewhere is free."""

    def close(self) -> None: ...


class BaseValue:
    """What a critic does that computes at once and keeps nothing of its own; each kind says what is otherwise."""

    wants: set[str] = set()

    def minibatches(self, batch: RolloutBatch, *, seed: int, step: int, epoch: int) -> Iterator[RolloutBatch]:
        return iter(())

    def settle(self) -> dict[str, float]:
        return {}

    def offload(self) -> None: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def save_shards(self, folder: Path) -> None: ...

    def load_shards(self, folder: Path) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


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


class NoValue(BaseValue):
    """For advantages that need no critic: nothing is inferred, trained or saved."""

    def infer(self, batch: RolloutBatch) -> "NoValue":
        return self

    def result(self) -> tuple[None, None]:
        return None, None

    def train_step(self, minibatch: RolloutBatch, loss: ValueLoss) -> StepMetrics:
        raise RuntimeError("there is no critic to train")
