"""Advantages and returns of a scored rollout: `estimate_advantages` fills `advantages` and, with a critic, `returns`.

GAE walks each sequence's tokens. The other estimators compare whole responses: R is the sum of a response's token
rewards (what the KL charged included), and its advantage is spread over its tokens. Responses left out of the training
(`RolloutBatch.valid`) take part in no mean, and their advantages are 0.
"""

import torch
from torch import Tensor

import fastppo
from trainers.config_algorithm import AdvEstimatorConfig, AlgorithmConfig
from trainers.rollout import FINISH, RolloutBatch


def estimate_advantages(batch: RolloutBatch, cfg: AlgorithmConfig) -> RolloutBatch:
    """Fill `advantages` [T], over the trained tokens of the whole rollout normalised where that is asked for."""
    name = cfg.adv_estimator.name
    if name == "gae":
        return generalized(batch, cfg)
    if name == "reinforce_plus_plus":  # the discounted rest of the rewards: GAE of a critic that knows nothing
        walked = batch.update(values=torch.zeros_like(batch.rewards))
        advantages = generalized(walked, cfg, lam=1.0).advantages
        return batch.update(advantages=advantages, values=None, returns=None)
    per_response = compared(batch, cfg.adv_estimator)
    advantages = torch.where(batch.trained, per_response[batch.sequence_ids], 0.0)
    return batch.update(
        advantages=fastppo.whiten(advantages, batch.trained) if cfg.normalize_advantages else advantages
    )


def needs_greedy(cfg: AlgorithmConfig) -> bool:
    """Whether the estimator compares with the greedy response to each prompt, which then is sampled too."""
    return cfg.adv_estimator.name == "remax"


def generalized(batch: RolloutBatch, cfg: AlgorithmConfig, *, lam: float | None = None) -> RolloutBatch:
    """GAE per sequence (Schulman et al. 2016, arXiv:1506.02438).

    A response that stopped by itself ends in value 0. One cut at max_new_tokens does too, unless bootstrap_truncated:
    then it ends in the critic's value of the state after its last token.
    """
    terminated = bootstrap = None
    if cfg.bootstrap_truncated:
        stopped = batch.finish == FINISH.index("stop")
        terminated = torch.zeros_like(batch.mask)
        terminated[batch.last_selected()[stopped]] = True
        bootstrap = batch.next_values
    policy, returns = lambdas(batch, cfg.adv_estimator) if lam is None else (lam, None)
    estimate = fastppo.gae(
        batch.rewards,
        batch.values,
        gamma=cfg.adv_estimator.gae_gamma,
        lam=policy,
        lam_returns=returns,
        mask=batch.trained,
        terminated=terminated,
        bootstrap_values=bootstrap,
        cu_seqlens=batch.cu_seqlens,
        whiten=cfg.normalize_advantages,
    )
    return batch.update(advantages=estimate.advantages, returns=estimate.returns)


def lambdas(batch: RolloutBatch, cfg: AdvEstimatorConfig) -> tuple[float | Tensor, float | None]:
    """GAE's lambda of the advantages, one number or [B], and that of the returns where it is another."""
    policy: float | Tensor = cfg.gae_lambda if cfg.gae_lambda_policy is None else cfg.gae_lambda_policy
    returns = cfg.gae_lambda if cfg.gae_lambda_value is None else cfg.gae_lambda_value
    if cfg.length_adaptive_alpha is not None:  # VAPO (arXiv:2504.05118)
        policy = 1 - 1 / (cfg.length_adaptive_alpha * batch.response_lengths).clamp(min=1)
    same = not isinstance(policy, Tensor) and policy == returns
    return policy, None if same else returns


def compared(batch: RolloutBatch, cfg: AdvEstimatorConfig) -> Tensor:
    """[B] float32: the advantage of each response as a whole."""
    reward, siblings = batch.per_sequence(batch.rewards), {"group_ids": batch.group, "valid": batch.valid}
    match cfg.name:
        case "raw_reward":
            return reward
        case "rloo":
            return fastppo.rloo(reward, **siblings)
        case "opo":
            return fastppo.group_advantages(reward, kind="opo", lengths=batch.response_lengths, **siblings)
        case "grpo":
            return fastppo.group_advantages(reward, kind="grpo", **siblings)
        case "dr_grpo" | "reinforce_plus_plus_baseline":
            return fastppo.group_advantages(reward, kind="dr_grpo", **siblings)
        case "remax":  # arXiv:2310.10505: less what the greedy response to the same prompt earns
            return reward - batch.baseline
    raise ValueError(f"adv_estimator.name: {cfg.name!r} is not an estimator")
