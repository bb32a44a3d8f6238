"""A reward model of transformers: `env.name=reward_model` or `env.rewards={reward_model: 1.0, ...}`.

It reads the very ids that were sampled, so it must have the policy's vocabulary, and is read at the last token that the
policy wrote. The reward is sum_h weights[h] * (head_h - mean[h]) / std[h].
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from trainers.backbone import Padded, decoder_of
from trainers.batching import split
from trainers.classifiers import load_classifier, scores_at
from trainers.config_env import RewardModelConfig
from trainers.config_types import shown
from trainers.engines import Completion
from trainers.environments import Prompt, Sample
from trainers.models import resolve_model
from trainers.rollout import pack

KEY = "env.reward_model"


class RewardModelEnvironment:
    default_model = "smollm2-135m"  # beside other rewards; env.name=reward_model needs policy.model_name

    def __init__(self, cfg: RewardModelConfig) -> None:
        self.cfg = cfg
        self._heads: Tensor | None = None  # [samples, heads] of the last score()

    def prompts(self) -> list[Prompt]:
        return []

    def bind(self, tokenizer: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        """Load the model; `tokenizer` and `dtype`, of computation, are the policy's.

        Raises:
            ValueError: not a reward model, another vocabulary, or not as many numbers as the model has heads.
        """
        if self.cfg.model_name is None:
            raise ValueError(f"{KEY}.model_name is not set: expected a Hugging Face folder or a hub id")
        path = resolve_model(self.cfg.model_name, key=f"{KEY}.model_name")
        check_vocabulary(path, tokenizer)
        model = load_classifier(path, f"{KEY}.model_name")
        dtype = dtype if self.cfg.dtype == "auto" else getattr(torch, self.cfg.dtype)
        for parameter in decoder_of(model).parameters():  # alone: the head and buffers (rotary tables) stay float32
            parameter.data = parameter.data.to(device, dtype)
        self.model, self.device = model.requires_grad_(False).to(device), device
        heads = model.score.out_features
        self._mean, self._std = (of_heads(getattr(self.cfg, key), heads, key) for key in ("mean", "std"))
        if heads > 1 and not self.cfg.weights:
            raise ValueError(f"{KEY}.weights: the model has {heads} heads, expected a weight for each, got none")
        self._weights = of_heads(self.cfg.weights, heads, "weights")

    def score(self, samples: Sequence[Sample]) -> list[float]:
        if not samples:
            return []
        self._heads = self._raw([sequence_of(sample) for sample in samples])
        return ((self._heads.double() - self._mean) / self._std @ self._weights).tolist()

    def metrics(self, samples: Sequence[Sample], rewards: Sequence[float], start: int = 0) -> dict[str, float]:
        """Means of the heads as the model gives them, before mean and std; `samples` are those of the last score()
        from `start` on."""
        if self._heads is None:
            return {}
        mean = self._heads[start : start + len(samples)].double().mean(0)
        return {f"env/head_{i}": float(x) for i, x in enumerate(mean)}

    @torch.no_grad()
    def _raw(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """[sequences, heads] float32: the heads at each one's last token."""
        self._check_ids(sequences)
        batch = pack([ids[:-1] for ids in sequences], [Completion([ids[-1]], [0.0], "stop", 0) for ids in sequences])
        out = torch.empty(len(sequences), self.model.score.out_features)
        for rows in split(batch, self.cfg.batch_size, self.cfg.max_tokens_per_micro_batch):
            view = Padded(batch.select(rows), self.device)
            out[rows] = scores_at(self.model, view.ids, view.last).cpu()
        return out

    def _check_ids(self, sequences: Sequence[Sequence[int]]) -> None:
        rows = self.model.get_input_embeddings().num_embeddings
        if (largest := max(map(max, sequences))) >= rows:
            raise ValueError(f"{KEY}.model_name={self.cfg.model_name}: token {largest} is beyond its {rows} embeddings")
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if positions is not None and (longest := max(map(len, sequences))) > positions:
            raise ValueError(
                f"{KEY}.model_name={self.cfg.model_name} has {positions} positions, a sequence {longest} tokens"
            )


def sequence_of(sample: Sample) -> tuple[int, ...]:
    """The ids of prompt and response, observations included, up to the last one that the policy wrote."""
    messages = list(sample.messages)
    if messages and messages[-1].author == "environment":  # cut off by policy.max_total_sequence_length
        messages.pop()
    written = [i for message in messages for i in message.ids] or list(sample.response_ids)
    return (*sample.prompt_ids, *written)


def of_heads(numbers: list[float], heads: int, key: str) -> Tensor:
    """[heads] float64; without numbers what changes nothing."""
    if numbers and len(numbers) != heads:
        raise ValueError(
            f"{KEY}.{key}={shown(numbers)}: expected a number for each head of the model, which has {heads}"
        )
    return torch.tensor(numbers or [0.0 if key == "mean" else 1.0] * heads, dtype=torch.float64)


def check_vocabulary(path: Path | str, tokenizer: Any) -> None:
    """Every token of the policy must be the same id to the reward model, which may have more."""
    name = f"{KEY}.model_name={str(path)!r}"
    try:
        own = AutoTokenizer.from_pretrained(path).get_vocab()
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} has no tokenizer to compare with the policy's: {error}") from error
    for token, i in tokenizer.get_vocab().items():
        if own.get(token) != i:
            raise ValueError(
                f"{name} has another vocabulary than the policy: {token!r} is id {i} to the policy and "
                f"{own.get(token, 'no token')} to the reward model. Sampled ids are scored as they are, so the two "
                "need one tokenizer"
            )
