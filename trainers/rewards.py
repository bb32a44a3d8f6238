"""From scores to per-token rewards: who pays what, and where it is paid.

The task's score sits on the last response token (the stop token included), of all turns, and so does what the turns of
a dialogue have paid; scores per token sit on their own. What
scaling, shaping, normalisation and clipping make of a response's score is paid, as the difference, on its last token.
The KL to the reference, if it is charged in the reward, is per token and detached.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastppo
from trainers import dist
from trainers.config import AlgorithmConfig, EnvConfig, LossConfig
from trainers.environments import Environment, RewardError, Sample
from trainers.environments.asking import LateRewardError, ask
from trainers.environments.weighted import WeightedEnvironment
from trainers.rollout import FINISH, RolloutBatch

__all__ = ["ConstantRewards", "KLController", "LateRewardError", "RewardError", "Rewards", "dump", "score", "shape"]

logger = logging.getLogger(__name__)


class ConstantRewards:
    """Warns, once for each reward, when every response of `limit` scoring calls in a row got the same; 0: never."""

    def __init__(self, limit: int):
        self.limit = limit
        self._seen: dict[str, tuple[float, int]] = {}  # the value and in how many calls it was the only one
        self._warned: set[str] = set()

    def see(self, name: str, scores: Sequence[float]) -> None:
        value = scores[0]
        before, calls = self._seen.get(name, (value, 0))
        calls = calls + 1 if before == value else 1
        calls = calls if all(score == value for score in scores) else 0
        self._seen[name] = (value, calls)
        if self.limit and calls >= self.limit and name not in self._warned and dist.is_main():
            self._warned.add(name)
            logger.warning(
                "env.constant_reward_steps=%d: the reward %s gave %g to every response so many times in a row: there "
                "is nothing to learn from it",
                self.limit, name, value,
            )  # fmt: skip


def score(
    environment: Environment,
    batch: RolloutBatch,
    env: EnvConfig | None = None,
    constant: ConstantRewards | None = None,
) -> RolloutBatch:
    """Ask the environment; fill `raw_reward` [B], `token_scores` [T] and, with several rewards, `reward_parts` [B, R].

    Each rank asks about its part of the responses. What the environment itself counts goes to `batch.metrics`.

    Args:
        env: the name of the reward, for errors, and its time limit; default: no name, no limit.
        constant: is shown each reward's scores.

    Raises:
        RewardError: a reward that failed, was late or cannot be trained on, on any rank; with the batch's samples.
    """
    # Cut at prompts: a reward may compare the responses to one.
    mine = dist.part(batch.group.unique_consecutive().tolist())
    samples = [sample for sample, group in zip(batch.samples, batch.group.tolist(), strict=True) if group in mine]
    try:
        found = dist.together(lambda: _asked(environment, samples, env))
    except RewardError as error:
        error.samples = batch.samples
        raise
    names = next(iter(each for each, _ in found if each))
    parts = {name: [answer for each, _ in found for answer in each.get(name, [])] for name in names}
    weighted = isinstance(environment, WeightedEnvironment)
    answers = environment.combine(batch.samples, parts) if weighted else next(iter(parts.values()))
    token_scores, raw = torch.zeros(batch.tokens.numel()), []
    responses = batch.mask.nonzero().squeeze(1).split(batch.response_lengths.tolist())
    for values, sample, tokens in zip(answers, batch.samples, responses, strict=True):
        token_scores[tokens[-len(values) :]] = torch.tensor(values)  # one for the last response token, or one for each
        token_scores[tokens[-1]] += sample.reward
        raw.append(math.fsum([*values, sample.reward]))
    sums = {name: [math.fsum(values) for values in part] for name, part in parts.items()}
    for name, scores in sums.items() if constant else ():
        constant.see(name, scores if weighted else raw)
    if weighted:
        batch.reward_names = tuple(sums)
        batch.update(reward_parts=torch.tensor(list(sums.values())).T)
    counted = [set(metrics) for each, metrics in found if each]
    for name in sorted(set.intersection(*counted)):  # a server may tell one rank what it does not tell another
        sizes = [len(next(iter(each.values()))) if each else 0 for each, _ in found]
        total = sum(metrics[name] * size for (_, metrics), size in zip(found, sizes, strict=True) if size)
        batch.metrics[name] = total / sum(sizes)
    return batch.update(raw_reward=torch.tensor(raw, dtype=torch.float32), token_scores=token_scores)


def _asked(
    environment: Environment, samples: Sequence[Sample], env: EnvConfig | None
) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """What each reward says of each of the samples, and the environment's own metrics of them; nothing of none."""
    if not samples:
        return {}, {}
    name, timeout_s = (env.name, env.timeout_s) if env else ("", None)
    if isinstance(environment, WeightedEnvironment):
        parts = environment.score_each(samples, timeout_s)
    else:
        parts = {name: ask(environment, samples, name=name, timeout_s=timeout_s)}
    if not hasattr(environment, "metrics"):
        return parts, {}
    sums = [[math.fsum(values) for values in part] for part in parts.values()]
    if isinstance(environment, WeightedEnvironment):
        return parts, environment.metrics(samples, list(zip(*sums, strict=True)))
    return parts, environment.metrics(samples, [total + s.reward for total, s in zip(sums[0], samples, strict=True)])


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
        normalize = self.moments(shaped if batch.valid is None else shaped[batch.valid])
        final = self.clipped(normalize(shaped))
        rewards = batch.token_scores.clone()
        rewards[batch.last_selected()] += (final - batch.raw_reward.double()).float()
        if self.loss_fn.use_kl_in_reward and kl_coef:
            kl = self.token_kl(batch)
            if self.cfg.kl_reduction == "mean":
                kl = kl / batch.response_lengths[batch.sequence_ids]
            rewards -= kl_coef * torch.where(batch.mask, kl, 0.0)
        batch.update(rewards=rewards)
        if batch.greedy is not None:
            greedy = batch.greedy
            other = shape(greedy.raw_reward, greedy.finish, greedy.response_lengths, self.cfg)
            batch.update(baseline=self.clipped(normalize(other)).float()[batch.group])
        return batch

    def token_kl(self, batch: RolloutBatch) -> Tensor:
        """[T]: the estimate of each token's KL to the reference, its log ratio and itself bounded."""
        cfg, logprobs = self.loss_fn, batch.old_logprobs
        ratio = (batch.ref_logprobs - logprobs).clamp(-cfg.kl_input_clamp_value, cfg.kl_input_clamp_value)
        kl = fastppo.kl_divergence(torch.zeros_like(ratio), ratio, cfg.reference_policy_kl_type)
        return kl.clamp(-cfg.kl_output_clamp_value, cfg.kl_output_clamp_value)

    def moments(self, reward: Tensor) -> Callable[[Tensor], Tensor]:
        """How this rollout's rewards are normalised, from those of its responses that are trained on, [B'] float64."""
        kind, shifted = self.cfg.reward_normalization, self.cfg.reward_normalization_shift
        if kind == "running":
            self._measure(reward.tolist())
            deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 1.0
            return lambda r: r / (deviation or 1.0)
        if kind == "none" or not len(reward):
            return lambda r: r
        mean, deviation = float(reward.mean()), float(reward.std(correction=0))
        if kind == "whiten":
            kept = 0.0 if shifted else mean  # without the shift the mean comes back, as in fastppo.whiten
            return lambda r: (r - mean) / (deviation + 1e-8) + kept
        if self.reference is None and deviation > 0:
            self.reference = (mean, deviation)
        mean, deviation = self.reference or (mean, 1.0)  # equal rewards are nothing to measure a deviation by
        return lambda r: (r - mean if shifted else r) / deviation

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
        self.coef *= 1 + error * len(batch) / self.cfg.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = state["coef"]
