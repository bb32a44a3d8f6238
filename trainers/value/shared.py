"""A critic that is a head on the policy's final hidden states, trained in the policy's own optimizer step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from trainers.config import ValueConfig
from trainers.losses import ValueLoss
from trainers.optim import Optimizer, StepMetrics
from trainers.policy.hf import HFPolicy
from trainers.rollout import RolloutBatch
from trainers.value import ScalarHead


class SharedValue:
    wants = {"values"}

    def __init__(self, policy: HFPolicy, cfg: ValueConfig):
        self.head = ScalarHead(policy.model.config.hidden_size).to(policy.device)
        policy.add_head("critic", self.head, Optimizer(self.head.parameters(), cfg.optimizer, cfg.scheduler))

    def infer(self, batch: RolloutBatch) -> "FromScoring":
        return FromScoring(batch)

    def minibatches(self, batch: RolloutBatch, *, seed: int, step: int, epoch: int) -> Iterator[RolloutBatch]:
        return iter(())

    def train_step(self, minibatch: RolloutBatch, loss: ValueLoss) -> StepMetrics:
        raise RuntimeError("a shared critic is trained by the policy's train_step")

    def offload(self) -> None:
        """The head's optimizer is one of the policy's, which offloads them all."""

    def save(self, folder: Path) -> None:
        """Nothing of its own: the head and its optimizer are part of the policy's state."""

    def load(self, folder: Path) -> None:
        """See save()."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See save()."""


class FromScoring:
    """Values that the policy's scoring pass has left in the batch."""

    def __init__(self, batch: RolloutBatch):
        self.batch = batch

    def result(self) -> tuple[Tensor, Tensor]:
        assert self.batch.values is not None and self.batch.next_values is not None
        return self.batch.values, self.batch.next_values
