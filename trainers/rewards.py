"""From scores to per-token rewards: who pays what, and where it is paid.

The task's score sits on the last response token (the stop token included); scores per token sit on their own. What
scaling, shaping and clipping make of a response's score is paid, as the difference, on its last token. The KL to the
reference, if it is charged in the reward, is per token and detached.
"""

import json
import math
from dataclasses import asdict
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastppo
from trainers.config import LossConfig, PPOConfig
from trainers.environments import Environment, Sample
from trainers.rollout import FINISH, RolloutBatch

FLOAT32_MAX = torch.finfo(torch.float32).max


class RewardError(ValueError):
    """A reward that cannot be trained on; `sample` is the response it was asked for, if it is known."""

    def __init__(self, message: str, sample: Sample | None = None):
        super().__init__(message)
        self.sample = sample


def score(environment: Environment, batch: RolloutBatch) -> RolloutBatch:
    """Ask the environment; fill `raw_reward` [B] and `token_scores` [T]."""
    samples = batch.samples
    try:
        answers = environment.score(samples)
    except Exception as error:
        raise RewardError(f"the reward failed: {type(error).__name__}: {error}") from error
    try:
        count = len(answers)
    except TypeError:
        raise RewardError(f"the reward must be a list of {len(samples)} values, got {type(answers).__name__}") from None
    if count != len(samples):
        raise RewardError(f"the reward must give {len(samples)} values, one per response, got {count}")
    token_scores = torch.zeros(batch.tokens.numel())
    raw = []
    for answer, sample, last in zip(answers, samples, batch.last_selected().tolist(), strict=True):
        values = _values(answer, sample)  # one for the last response token, or one for each
        token_scores[last + 1 - len(values) : last + 1] = torch.tensor(values)
        raw.append(math.fsum(values))
    return batch.update(raw_reward=torch.tensor(raw, dtype=torch.float32), token_scores=token_scores)


def dump(batch: RolloutBatch, path: Path) -> None:
    """Every response of a rollout that could not be rewarded, for the author of the reward."""
    with path.open("w", encoding="utf-8") as file:
        for sample in batch.samples:
            file.write(json.dumps(asdict(sample)) + "\n")


def shaped(batch: RolloutBatch, ppo: PPOConfig) -> Tensor:
    """[B] float64: the task's scores after reward_scaling, reward_shaping and cliprange_reward, in this order."""
    reward, scaling, shaping = batch.raw_reward.double(), ppo.reward_scaling, ppo.reward_shaping
    if scaling.enabled:
        share = (reward.clamp(scaling.source_min, scaling.source_max) - scaling.source_min) / (
            scaling.source_max - scaling.source_min
        )
        reward = scaling.target_min + share * (scaling.target_max - scaling.target_min)
    if shaping.enabled and shaping.stop_properly_penalty_coef is not None:
        # Positive rewards alone: a factor below 1 would raise a negative one.
        cut = (batch.finish == FINISH.index("length")) & (reward > 0)
        reward = torch.where(cut, shaping.stop_properly_penalty_coef * reward, reward)
    elif shaping.enabled:
        # The soft overlong punishment of DAPO (arXiv:2503.14476).
        free = shaping.max_response_length - shaping.overlong_buffer_length
        share = (batch.response_lengths - free) / shaping.overlong_buffer_length
        reward = reward - shaping.overlong_buffer_penalty * share.clamp(0, 1)
    limit = ppo.cliprange_reward
    return reward if limit is None else reward.clamp(-limit, limit)


def token_rewards(batch: RolloutBatch, ppo: PPOConfig, loss_fn: LossConfig) -> RolloutBatch:
    """Fill `rewards` [T]: scores, shaped, less the KL where it is charged in the reward."""
    rewards = batch.token_scores.clone()
    rewards[batch.last_selected()] += (shaped(batch, ppo) - batch.raw_reward.double()).float()
    if loss_fn.use_kl_in_reward and loss_fn.reference_policy_kl_penalty:
        kl = fastppo.kl_divergence(batch.old_logprobs, batch.ref_logprobs, loss_fn.reference_policy_kl_type)
        rewards -= loss_fn.reference_policy_kl_penalty * torch.where(batch.mask, kl, 0.0)
    return batch.update(rewards=rewards)


def _values(answer: Any, sample: Sample) -> list[float]:
    plain = answer.tolist() if hasattr(answer, "tolist") else answer  # tensors, arrays and their scalars
    per_token = isinstance(plain, list | tuple)
    values = list(plain) if per_token else [plain]
    if not all(isinstance(value, Real) for value in values):
        raise RewardError(f"the reward must be a number, got {answer!r} for {sample.response!r}", sample)
    if not all(abs(value) <= FLOAT32_MAX for value in values):  # NaN is not either
        raise RewardError(f"the reward must be finite, got {answer!r} for {sample.response!r}", sample)
    if per_token and len(values) != len(sample.response_ids):
        raise RewardError(
            f"a per-token reward must have {len(sample.response_ids)} values, one per response token, got "
            f"{len(values)} for {sample.response!r}",
            sample,
        )
    return [float(value) for value in values]
