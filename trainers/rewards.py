"""From scores to per-token rewards: who pays what, and where it is paid.

The task's score sits on the last response token (the stop token included), of all turns, and so does what the turns of
a dialogue have paid; scores per token sit on their own. What
scaling, shaping, normalisation and clipping make of a response's score is paid, as the difference, on its last token.
The KL to the reference, if it is charged in the reward, is per token and detached.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import is_dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastppo
from trainers.config import AlgorithmConfig, LossConfig
from trainers.environments import Environment, RewardError, Sample
from trainers.rollout import FINISH, RolloutBatch

FLOAT32_MAX = torch.finfo(torch.float32).max


def score(environment: Environment, batch: RolloutBatch) -> RolloutBatch:
    """Ask the environment; fill `raw_reward` [B] and `token_scores` [T]. RewardErrors carry the batch's samples."""
    try:
        return _scored(environment, batch)
    except RewardError as error:
        error.samples = batch.samples
        raise


def _scored(environment: Environment, batch: RolloutBatch) -> RolloutBatch:
    samples = batch.samples
    token_scores = torch.zeros(batch.tokens.numel())
    raw = []
    responses = batch.mask.nonzero().squeeze(1).split(batch.response_lengths.tolist())
    for answer, sample, tokens in zip(answers(environment, samples), samples, responses, strict=True):
        values = _values(answer, sample)  # one for the last response token, or one for each
        token_scores[tokens[-len(values) :]] = torch.tensor(values)
        token_scores[tokens[-1]] += sample.reward
        raw.append(math.fsum([*values, sample.reward]))
    return batch.update(raw_reward=torch.tensor(raw, dtype=torch.float32), token_scores=token_scores)


def answers(environment: Environment, samples: Sequence[Sample]) -> Sequence[Any]:
    """What the environment's `score` says of each sample; 0 where its turns are all that pays.

    Raises:
        RewardError: it raised, or its answer has not one entry a sample.
    """
    if not hasattr(environment, "score"):
        return [0.0] * len(samples)
    try:
        scores = environment.score(samples)
    except Exception as error:
        raise RewardError(f"the reward failed: {type(error).__name__}: {error}") from error
    try:
        count = len(scores)
    except TypeError:
        raise RewardError(f"the reward must be a list of {len(samples)} values, got {type(scores).__name__}") from None
    if count != len(samples):
        raise RewardError(f"the reward must give {len(samples)} values, one per response, got {count}")
    return scores


def dump(samples: Sequence[Sample], path: Path) -> None:
    """Every response of a rollout that could not be rewarded, for the author of the reward."""
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:  # metadata are the environment's own, and may hold anything
            file.write(json.dumps(vars(sample), default=lambda x: vars(x) if is_dataclass(x) else str(x)) + "\n")


class Rewards:
    """`rewards(batch, kl_coef)` fills `rewards` [T]: scores, shaped, less the KL where it is charged in the reward.

    The state is what `reward_normalization` has measured so far.
    """

    def __init__(self, cfg: AlgorithmConfig, loss_fn: LossConfig):
        self.cfg, self.loss_fn = cfg, loss_fn
        self.count, self.mean, self.squares = 0, 0.0, 0.0  # of all rewards so far (Welford), under running
        self.reference: tuple[float, float] | None = None  # mean and standard deviation, under ref
        if cfg.reward_reference_mean is not None and cfg.reward_reference_std is not None:
            self.reference = (cfg.reward_reference_mean, cfg.reward_reference_std)

    def __call__(self, batch: RolloutBatch, kl_coef: float) -> RolloutBatch:
        shaped = shape(batch.raw_reward, batch.finish, batch.response_lengths, self.cfg)
        shift, scale = self.moments(shaped if batch.valid is None else shaped[batch.valid])
        final = self.clipped((shaped - shift) / scale)
        rewards = batch.token_scores.clone()
        rewards[batch.last_selected()] += (final - batch.raw_reward.double()).float()
        if self.loss_fn.use_kl_in_reward and kl_coef:
            kl = fastppo.kl_divergence(batch.old_logprobs, batch.ref_logprobs, self.loss_fn.reference_policy_kl_type)
            if self.cfg.kl_reduction == "mean":
                kl = kl / batch.response_lengths[batch.sequence_ids]
            rewards -= kl_coef * torch.where(batch.mask, kl, 0.0)
        batch.update(rewards=rewards)
        if batch.greedy is not None:
            greedy = batch.greedy
            other = shape(greedy.raw_reward, greedy.finish, greedy.response_lengths, self.cfg)
            batch.update(baseline=self.clipped((other - shift) / scale).float()[batch.group])
        return batch

    def moments(self, reward: Tensor) -> tuple[float, float]:
        """What is subtracted from this rollout's rewards, and what they are then divided by."""
        kind, mean, deviation = self.cfg.reward_normalization, 0.0, 1.0
        if kind == "running":
            self._measure(reward.tolist())
            return 0.0, math.sqrt(self.squares / (self.count - 1)) or 1.0 if self.count > 1 else 1.0
        if kind == "whiten" and len(reward):
            mean, deviation = float(reward.mean()), float(reward.std(correction=0)) + 1e-8
        if kind == "ref" and len(reward):
            mean, deviation = self.reference or (float(reward.mean()), float(reward.std(correction=0)))
            if deviation > 0:
                self.reference = (mean, deviation)
            else:  # nothing to measure yet
                deviation = 1.0
        return (mean if self.cfg.reward_normalization_shift else 0.0), deviation

    def _measure(self, rewards: list[float]) -> None:
        for reward in rewards:
            self.count += 1
            moved = reward - self.mean
            self.mean += moved / self.count
            self.squares += moved * (reward - self.mean)

    def clipped(self, reward: Tensor) -> Tensor:
        limit = self.cfg.cliprange_reward
        return reward if limit is None else reward.clamp(-limit, limit)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares, "reference": self.reference}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]
        self.reference = None if state["reference"] is None else tuple(state["reference"])


def shape(raw: Tensor, finish: Tensor, lengths: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """[B] float64: scores after reward_scaling and reward_shaping, each response by itself."""
    reward, scaling, shaping = raw.double(), cfg.reward_scaling, cfg.reward_shaping
    if scaling.enabled:
        share = (reward.clamp(scaling.source_min, scaling.source_max) - scaling.source_min) / (
            scaling.source_max - scaling.source_min
        )
        reward = scaling.target_min + share * (scaling.target_max - scaling.target_min)
    if shaping.enabled and shaping.stop_properly_penalty_coef is not None:
        # Positive rewards alone: a factor below 1 would raise a negative one.
        cut = (finish == FINISH.index("length")) & (reward > 0)
        reward = torch.where(cut, shaping.stop_properly_penalty_coef * reward, reward)
    elif shaping.enabled:
        # The soft overlong punishment of DAPO (arXiv:2503.14476).
        free = shaping.max_response_length - shaping.overlong_buffer_length
        share = (lengths - free) / shaping.overlong_buffer_length
        reward = reward - shaping.overlong_buffer_penalty * share.clamp(0, 1)
    return reward


class KLController:
    """The coefficient of the KL to the reference, `coef`: constant, or led towards a target (arXiv:1909.08593, 2.2)."""

    def __init__(self, cfg: AlgorithmConfig, loss_fn: LossConfig):
        self.cfg, self.coef = cfg.kl_controller, loss_fn.reference_policy_kl_penalty

    def update(self, batch: RolloutBatch) -> None:
        """Once a step, after its updates. The KL is the mean over the trained responses of sum_t(old - ref), nats."""
        if self.cfg.name == "fixed":
            return
        trained = batch.response_lengths > 0 if batch.valid is None else batch.valid
        if not bool(trained.any()):
            return
        kl = float(batch.per_sequence(batch.old_logprobs - batch.ref_logprobs)[trained].double().mean())
        error = min(max(kl / self.cfg.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * int(trained.sum()) / self.cfg.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = state["coef"]


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
