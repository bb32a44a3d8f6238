"""A critic that is a head on the policy's final hidden states, trained in the policy's own optimizer step.

The head and its optimizer are part of the policy: its offloading, its checkpoints.
"""

from torch import Tensor

from trainers.config import ValueConfig
from trainers.losses import ValueLoss
from trainers.optim import Optimizer, StepMetrics
from trainers.policy.hf import HFPolicy
from trainers.rollout import RolloutBatch
from trainers.value import BaseValue, ScalarHead


class SharedValue(BaseValue):
    wants = {"values"}

    def __init__(self, policy: HFPolicy, cfg: ValueConfig):
        self.head = ScalarHead(policy.model.config.hidden_size).to(policy.device)
        policy.add_head("critic", self.head, Optimizer(self.head.parameters(), cfg.optimizer, cfg.scheduler))

    def infer(self, batch: RolloutBatch) -> "FromScoring":
        return FromScoring(batch)

    def train_step(self, minibatch: RolloutBatch, loss: ValueLoss) -> StepMetrics:
        raise RuntimeError("a shared critic is trained by the policy's train_step")


class FromScoring:
    """Values that the policy's scoring pass has left in the batch."""

    def __init__(self, batch: RolloutBatch):
        self.batch = batch

    def result(self) -> tuple[Tensor, Tensor]:
        assert self.batch.values is not None and self.batch.next_values is not None
        return self.batch.values, self.batch.next_values
