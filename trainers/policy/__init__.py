"""The policy behind one protocol: scores a rollout, makes an optimizer step, hands out its weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from trainers.engines import Manifest
from trainers.losses import JointLoss, PolicyLoss
from trainers.optim import StepMetrics
from trainers.rollout import RolloutBatch


class Policy(Protocol):
    tokenizer: Any
    stop_ids: tuple[int, ...]  # the tokens that end a response; those before `min_new_tokens` are scored without them

    def score(self, batch: RolloutBatch, want: set[str]) -> dict[str, Tensor]:
        """Fields of the batch, no gradient. want: of "old_logprobs" (with "entropy"), "ref_logprobs", "values"."""

    def train_step(self, minibatch: RolloutBatch, loss: PolicyLoss | JointLoss) -> StepMetrics:
        """Exactly one optimizer step; micro-batches, clipping and the finite check are inside."""

    def manifest(self) -> Manifest:
        """Name, shape and dtype of every tensor that weights() will yield. Moves nothing."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its Hugging Face name; tied ones once."""

    def offload(self) -> None:
        """Make room for generation: what is not needed for it leaves the device until it is. Never the parameters,
        which an engine may share."""

    def save(self, folder: Path) -> None:
        """Write the model as users load it; what a resume needs is in state_dict()."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
