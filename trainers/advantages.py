"""Advantages and returns of a scored rollout."""

import torch

import fastppo
from trainers.config import PPOConfig
from trainers.rollout import FINISH, RolloutBatch


def estimate_advantages(batch: RolloutBatch, ppo: PPOConfig) -> RolloutBatch:
    """Fill `advantages` and `returns` [T]: GAE per sequence, then normalised over the whole rollout.

    A response that stopped by itself ends in value 0. One cut at max_new_tokens does too, unless
    ppo.bootstrap_truncated: then it ends in the critic's value of the state after its last token.
    """
    terminated = bootstrap = None
    if ppo.bootstrap_truncated:
        stopped = batch.finish == FINISH.index("stop")
        terminated = torch.zeros_like(batch.mask)
        terminated[batch.last_selected()[stopped]] = True
        bootstrap = batch.next_values
    estimator = ppo.adv_estimator
    lam = estimator.gae_lambda if estimator.gae_lambda_policy is None else estimator.gae_lambda_policy
    lam_returns = estimator.gae_lambda if estimator.gae_lambda_value is None else estimator.gae_lambda_value
    if estimator.length_adaptive_alpha is not None:  # VAPO (arXiv:2504.05118)
        lam = 1 - 1 / (estimator.length_adaptive_alpha * batch.response_lengths).clamp(min=1)
    estimate = fastppo.gae(
        batch.rewards,
        batch.values,
        gamma=estimator.gae_gamma,
        lam=lam,
        lam_returns=None if lam is lam_returns else lam_returns,
        mask=batch.mask,
        terminated=terminated,
        bootstrap_values=bootstrap,
        cu_seqlens=batch.cu_seqlens,
        whiten=ppo.normalize_advantages,
    )
    return batch.update(advantages=estimate.advantages, returns=estimate.returns)
