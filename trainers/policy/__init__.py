"""The policy behind one protocol: scores a rollout, makes an optimizer step, hands out its weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainers.engines import Manifest
from trainers.losses import JointLoss, PolicyLoss
from trainers.optim import StepMetrics
from trainers.rollout import RolloutBatch


class Policy(Protocol):
    """Every method is called on all ranks, and every rank of those that a model lies on returns the same."""

    path: Path | str  # where it was loaded from
    hf_config: Any  # the model's, of transformers
    vocab_size: int  # rows of the embeddings: a prompt has no other ids
    softcap: float | None  # of the logits
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

    def trained(self) -> dict[str, Tensor]:
        """The float32 values that the optimizer steps; of a model on several ranks those of this one."""

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, as passes read it, of this rank; what several ranks have alike under one name."""

    def offload(self) -> None:
        """Make room for generation: what is not needed for it leaves the device until it is. Never the parameters,
        which an engine may share."""

    def engine_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model for the embedded engine of this rank, in `dtype`; the next refit brings the weights that it does
        not share."""

    def facts(self) -> dict[str, object]:
        """For env.json: model, architecture, parameters, trained_parameters."""

    def save(self, folder: Path) -> None:
        """Write the model as users load it, the main rank alone; what a resume needs is in state_dict()."""

    def save_shards(self, folder: Path) -> None:
        """Write what of the state lies on several ranks, each rank its part; nothing of a whole model."""

    def load_shards(self, folder: Path) -> None:
        """After load_state_dict(): what save_shards() wrote, by however many ranks."""

    def state_dict(self) -> dict[str, Any]:
        """What every rank has alike."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
