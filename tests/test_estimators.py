"""Estimators without a critic, reward normalisation and the KL controller, with numbers worked out by hand."""

import math

import pytest
import torch

import fastppo
from trainers.advantages import estimate_advantages
from trainers.config_algorithm import (
    IS_BOUNDS,
    AdvEstimatorConfig,
    KLControllerConfig,
    LossConfig,
    PPOConfig,
    ReinforceConfig,
)
from trainers.engines import Completion
from trainers.rewards import KLController, Rewards
from trainers.rollout import pack


def rollout(rewards, lengths=None, groups=None):
    """One prompt token and `lengths` response tokens each; the reward on the last one."""
    lengths = lengths or [2] * len(rewards)
    batch = pack([[5]] * len(rewards), [Completion([8] * n, [-1.0] * n, "stop", 0) for n in lengths])
    raw = torch.tensor(rewards, dtype=torch.float32)
    scores = torch.zeros(batch.tokens.numel())
    scores[batch.last_selected()] = raw
    batch.update(raw_reward=raw, token_scores=scores, rewards=scores.clone())
    batch.update(old_logprobs=torch.zeros_like(scores), ref_logprobs=torch.zeros_like(scores))
    return batch.update(group=torch.tensor(groups if groups else [0] * len(rewards)))


def per_response(batch, name, **options):
    cfg = ReinforceConfig(adv_estimator=AdvEstimatorConfig(name=name), **options)
    estimated = estimate_advantages(batch, cfg)
    last = estimated.advantages[estimated.last_selected()]
    # one number a response, on every trained token and nowhere else
    assert torch.equal(estimated.advantages, torch.where(batch.trained, last[batch.sequence_ids], 0.0))
    assert estimated.values is None and estimated.returns is None
    return last.tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("raw_reward", [1.0, 0.0, 5.0, 3.0, 3.0]),
        ("rloo", [1.0 - 2.5, 0.0 - 3.0, 5.0 - 0.5, 0.0, 0.0]),
        ("dr_grpo", [-1.0, -2.0, 3.0, 0.0, 0.0]),
        ("reinforce_plus_plus_baseline", [-1.0, -2.0, 3.0, 0.0, 0.0]),
        # std with n - 1: sqrt((1 + 4 + 9) / 2)
        ("grpo", [-1 / (math.sqrt(7) + 1e-6), -2 / (math.sqrt(7) + 1e-6), 3 / (math.sqrt(7) + 1e-6), 0.0, 0.0]),
        # lengths 1, 2, 3: (1 + 0 + 15) / 6
        ("opo", [1 - 16 / 6, -16 / 6, 5 - 16 / 6, 0.0, 0.0]),
    ],
)
def test_estimators_by_hand(name, expected):
    batch = rollout([1.0, 0.0, 5.0, 3.0, 3.0], lengths=[1, 2, 3, 2, 1], groups=[0, 0, 0, 1, 1])
    assert per_response(batch, name) == pytest.approx(expected, abs=1e-6)


def test_left_out_responses_are_no_siblings_and_get_nothing():
    batch = rollout([1.0, 0.0, 5.0, 3.0, 2.0], groups=[0, 0, 0, 1, 1])
    batch.update(valid=torch.tensor([True, False, True, True, False]))
    assert per_response(batch, "rloo") == [1.0 - 5.0, 0.0, 5.0 - 1.0, 0.0, 0.0]
    assert per_response(batch, "raw_reward") == [1.0, 0.0, 5.0, 3.0, 0.0]


def test_remax_takes_off_what_the_greedy_response_earns():
    batch = rollout([1.0, 0.0, 5.0, 3.0], groups=[0, 0, 1, 1])
    batch.greedy = rollout([2.0, 4.0], groups=[0, 1])
    scaled = ReinforceConfig(adv_estimator=AdvEstimatorConfig(name="remax"), cliprange_reward=3.5)
    batch = Rewards(scaled, LossConfig())(batch, 0.0)
    assert batch.baseline.tolist() == [2.0, 2.0, 3.5, 3.5]
    assert per_response(batch, "remax") == [-1.0, -2.0, 0.0, -0.5]


def test_reinforce_plus_plus_discounts_token_rewards_to_come():
    batch = rollout([1.0, 4.0], lengths=[3, 2])
    batch.rewards[1] = 2.0  # the first response token
    name = AdvEstimatorConfig(name="reinforce_plus_plus", gae_gamma=0.5)
    plain = estimate_advantages(batch, ReinforceConfig(adv_estimator=name))
    assert plain.advantages[batch.mask].tolist() == [2.25, 0.5, 1.0, 2.0, 4.0]
    white = estimate_advantages(batch, ReinforceConfig(adv_estimator=name, normalize_advantages=True))
    assert white.advantages[batch.mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert white.advantages[batch.mask].std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_whole_response_advantages_can_be_normalised_over_tokens():
    batch = rollout([1.0, 0.0], lengths=[3, 1])
    chosen = per_response(batch, "raw_reward", normalize_advantages=True)
    assert chosen == pytest.approx([0.25 / math.sqrt(3 / 16), -0.75 / math.sqrt(3 / 16)], abs=1e-5)


@pytest.mark.parametrize(("reduction", "charge"), [("sum", 0.6), ("mean", 0.3)])
def test_a_response_is_charged_the_sum_or_the_mean_of_its_kl(reduction, charge):
    batch = rollout([1.0, 1.0], lengths=[2, 2])
    batch.old_logprobs[1:3] = torch.tensor([4.0, 2.0])  # k1 of the first response: 4 and 2
    cfg = ReinforceConfig(kl_reduction=reduction)
    charged = Rewards(cfg, LossConfig())(batch, 0.1)
    assert charged.per_sequence(charged.rewards).tolist() == pytest.approx([1 - charge, 1.0])
    assert charged.raw_reward.tolist() == [1.0, 1.0]


def paid(rewards, batch_rewards, valid=None):
    batch = rollout(batch_rewards)
    batch.update(valid=None if valid is None else torch.tensor(valid))
    charged = rewards(batch, 0.0)
    return charged.per_sequence(charged.rewards).tolist()


def test_whitened_rewards():
    cfg = PPOConfig(reward_normalization="whiten")
    assert paid(Rewards(cfg, LossConfig()), [1.0, 3.0, 100.0], [True, True, False])[:2] == pytest.approx([-1, 1])
    unshifted = PPOConfig(reward_normalization="whiten", reward_normalization_shift=False, cliprange_reward=2.5)
    # (r - 2) / 2 + 2: the spread is 1, the mean stays
    assert paid(Rewards(unshifted, LossConfig()), [0.0, 4.0]) == pytest.approx([1.0, 2.5])  # 3, clipped
    assert paid(Rewards(unshifted, LossConfig()), [1.0, 1.0]) == [1.0, 1.0]


def test_reference_moments_are_given_or_measured_once():
    given = PPOConfig(reward_normalization="ref", reward_reference_mean=1.0, reward_reference_std=2.0)
    assert paid(Rewards(given, LossConfig()), [1.0, 5.0]) == [0.0, 2.0]
    rewards = Rewards(PPOConfig(reward_normalization="ref"), LossConfig())
    assert paid(rewards, [7.0, 7.0]) == [0.0, 0.0]  # nothing to measure yet
    assert paid(rewards, [0.0, 4.0]) == [-1.0, 1.0]
    assert paid(rewards, [6.0, 6.0]) == [2.0, 2.0]
    unshifted = PPOConfig(reward_normalization="ref", reward_normalization_shift=False)
    assert paid(Rewards(unshifted, LossConfig()), [0.0, 4.0]) == [0.0, 2.0]
    again = Rewards(PPOConfig(reward_normalization="ref"), LossConfig())
    again.load_state_dict(rewards.state_dict())
    assert paid(again, [6.0, 0.0]) == [2.0, -1.0]


def test_running_deviation_includes_the_batch_and_survives_a_resume():
    cfg = PPOConfig(reward_normalization="running")
    rewards = Rewards(cfg, LossConfig())
    assert paid(rewards, [3.0]) == [3.0]  # one sample: divided by 1
    second = torch.tensor([3.0, 1.0, 5.0]).std().item()
    assert paid(rewards, [1.0, 5.0]) == pytest.approx([1 / second, 5 / second])
    again = Rewards(cfg, LossConfig())
    again.load_state_dict(rewards.state_dict())
    third = torch.tensor([3.0, 1.0, 5.0, 9.0]).std().item()
    assert paid(again, [9.0]) == paid(rewards, [9.0]) == pytest.approx([9 / third])
    assert paid(Rewards(cfg, LossConfig()), [2.0, 2.0]) == [2.0, 2.0]  # no deviation: divided by 1


def test_adaptive_kl_coefficient():
    """KL 12 and 0 over two trained responses is 6 a response; target 4: the error 0.5 is clipped to 0.2; of 3 / 100."""
    cfg = PPOConfig(kl_controller=KLControllerConfig(name="adaptive", target=4.0, horizon=100))
    batch = rollout([0.0, 0.0, 0.0])
    batch.old_logprobs[1:3] = torch.tensor([7.0, 5.0])
    batch.old_logprobs[-1] = 1e6
    batch.update(valid=torch.tensor([True, True, False]))
    kl = KLController(cfg, LossConfig(reference_policy_kl_penalty=0.5))
    kl.update(batch)
    assert kl.coef == pytest.approx(0.5 * (1 + 0.2 * 3 / 100))
    batch.old_logprobs[1:3] = torch.tensor([7.0, 0.2])  # 3.6 a response: 3.6 / 4 - 1 = -0.1
    kl.update(batch)
    assert kl.coef == pytest.approx(0.5 * 1.006 * (1 - 0.1 * 3 / 100))
    again = KLController(cfg, LossConfig())
    again.load_state_dict(kl.state_dict())
    assert again.coef == kl.coef
    batch.update(valid=torch.zeros(3, dtype=torch.bool))
    kl.update(batch)
    assert kl.coef == again.coef
    fixed = KLController(PPOConfig(), LossConfig(reference_policy_kl_penalty=0.5))
    fixed.update(batch)
    assert fixed.coef == 0.5


def test_the_bounds_in_the_settings_are_the_ops_own():
    logprobs, rollout_logprobs = torch.zeros(1, 3), torch.tensor([[2.0, -0.001, -2.0]])
    for kind, bounds in IS_BOUNDS.items():
        mine, default = (
            fastppo.ppo_loss(
                logprobs, logprobs, torch.ones(1, 3), is_correction=kind, rollout_logprobs=rollout_logprobs, **given
            )
            for given in ({"is_bounds": bounds}, {})
        )
        assert torch.equal(mine.loss, default.loss)
