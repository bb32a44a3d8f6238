"""Where a reward is paid, what it is made of, and which rewards are refused."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests import tiny
from trainers.advantages import estimate_advantages
from trainers.config_algorithm import LossConfig, PPOConfig
from trainers.engines import Completion
from trainers.environments import Prompt, Sample
from trainers.rewards import RewardError, Rewards, score
from trainers.rollout import pack


def batch():
    """Prompt 2 + response 3 (stopped), prompt 1 + response 2 (cut)."""
    made = pack(
        [[5, 6], [7]], [Completion([8, 9, 1], [-1.0] * 3, "stop", 0), Completion([8, 8], [-1.0] * 2, "length", 0)]
    )
    made.samples = [
        Sample(Prompt("a"), (5, 6), (8, 9, 1), "x y", "stop"),
        Sample(Prompt("b"), (7,), (8, 8), "x x", "length"),
    ]
    return made


class Answers:
    def __init__(self, answers):
        self.answers = answers

    def score(self, samples):
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers


def test_the_score_sits_on_the_last_response_token():
    """TRL #3750: the stop token, not the padding after it."""
    scored = score(Answers([0.5, -2]), batch())
    assert scored.token_scores.tolist() == [0, 0, 0, 0, 0.5, 0, 0, -2]
    assert scored.raw_reward.tolist() == [0.5, -2]


@pytest.mark.parametrize(
    "answers",
    [
        torch.tensor([0.5, -2]),
        np.array([0.5, -2]),
        [torch.tensor(0.5), np.float32(-2)],
        (Fraction(1, 2), -2),
        [0.5, -2],
    ],
    ids=["tensor", "array", "scalars", "numbers", "list"],
)
def test_every_usual_form_of_a_list_of_numbers_is_taken(answers):
    assert score(Answers(answers), batch()).raw_reward.tolist() == [0.5, -2]


@pytest.mark.parametrize("form", [list, tuple, torch.tensor, np.array])
def test_scores_per_token_sit_on_their_tokens_and_sum_to_the_raw_reward(form):
    scored = score(Answers([form([1.0, 2.0, 3.0]), form([0.25, 0.5])]), batch())
    assert scored.token_scores.tolist() == [0, 0, 1, 2, 3, 0, 0.25, 0.5]
    assert scored.raw_reward.tolist() == [6.0, 0.75]


def charged(scored, ppo, loss_fn):
    return Rewards(ppo, loss_fn)(scored, loss_fn.reference_policy_kl_penalty)


def test_kl_is_charged_per_token_on_the_response_only():
    scored = score(Answers([1.0, 1.0]), batch())
    nan = math.nan
    scored.update(
        old_logprobs=torch.tensor([nan, nan, -1, -1, -1, nan, -2, -2.0]),
        ref_logprobs=torch.tensor([nan, nan, -1.5, -1, -0.5, nan, -4, -2.0]),
    )
    cfg = tiny.config(loss_fn__reference_policy_kl_penalty=0.1).loss_fn
    # k1 = old - ref: 0.5, 0, -0.5 and 2, 0
    expected = torch.tensor([0, 0, -0.05, 0, 1.05, 0, -0.2, 1.0])
    assert torch.allclose(charged(scored, PPOConfig(), cfg).rewards, expected)
    in_loss = tiny.config(loss_fn__use_kl_in_reward=False, loss_fn__reference_policy_kl_penalty=0.1).loss_fn
    assert charged(scored, PPOConfig(), in_loss).rewards.tolist() == [0, 0, 0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([1.0], "must give 2 values, one per response, got 1"),
        (3.0, "must be a list of 2 values, got float"),
        (None, "must be a list of 2 values, got NoneType"),
        ([1.0, math.nan], "must be finite, got nan for 'x x'"),
        ([1e39, 1.0], "must be finite, got 1e.39 for 'x y'"),
        ([math.inf, 1.0], "must be finite, got inf for 'x y'"),
        ([1.0, None], "must be a number, got None for 'x x'"),
        ([1.0, "good"], "must be a number, got 'good' for 'x x'"),
        ([[1.0, None, 2.0], 1.0], r"must be a number, got \[1.0, None, 2.0\] for 'x y'"),
        ([[0.0, math.inf, 0.0], 1.0], "must be finite, got .*inf.* for 'x y'"),
        ({"a": 1.0, "b": 2.0}, "must be a number, got 'a' for 'x y'"),
        ([[1.0, 2.0], [1.0, 2.0]], "must have 3 values, one per response token, got 2 for 'x y'"),
        (KeyError("label"), "the reward failed: KeyError: 'label'"),
    ],
)
def test_rewards_that_cannot_be_trained_on_are_refused_with_the_sample(answers, message):
    with pytest.raises(RewardError, match=message):
        score(Answers(answers), batch())


@pytest.mark.parametrize(
    ("options", "kl"),
    [
        ({}, [10.0, 2.0, -10.0]),  # log ratios old - ref of 30, 2 and -12
        ({"kl_output_clamp_value": 15.0}, [15.0, 2.0, -12.0]),
        ({"kl_output_clamp_value": 100.0}, [20.0, 2.0, -12.0]),
        ({"kl_input_clamp_value": 1.0}, [1.0, 1.0, -1.0]),
        ({"kl_input_clamp_value": 4.0, "reference_policy_kl_type": "k2"}, [8.0, 2.0, 8.0]),
    ],
)
def test_the_charged_kl_is_bounded(options, kl):
    scored = score(Answers([0.0, 0.0]), batch())
    old = torch.tensor([0, 0, -1.0, -2, -13, 0, 0, 0])
    scored.update(old_logprobs=old, ref_logprobs=old - torch.tensor([9, 9, 30.0, 2, -12, 9, 0, 0]))
    cfg = LossConfig(reference_policy_kl_penalty=0.5, **options)
    assert charged(scored, PPOConfig(), cfg).rewards[2:5].tolist() == [-0.5 * x for x in kl]


def ppo_settings(**options):
    return tiny.config(**{f"ppo__{key}": value for key, value in options.items()}).ppo


def shaped_scores(scores, **options):
    """After scaling, shaping, normalisation and clipping: what the whole response is paid."""
    scored = charged(score(Answers(scores), batch()), ppo_settings(**options), LossConfig(use_kl_in_reward=False))
    return scored.per_sequence(scored.rewards).tolist()


@pytest.mark.parametrize(
    ("scores", "expected"), [([0.5, 1.0], [0.5, 1.0]), ([2.0, 0.0], [1.0, 0.0]), ([-3.0, 0.25], [0.0, 0.25])]
)
def test_reward_scaling_clamps_and_maps(scores, expected):
    assert shaped_scores(scores) == scores
    assert shaped_scores(scores, reward_scaling__enabled=True) == expected
    centred = {"target_min": -1.0, "target_max": 1.0}
    options = {f"reward_scaling__{key}": value for key, value in ({"enabled": True} | centred).items()}
    assert shaped_scores(scores, **options) == [2 * x - 1 for x in expected]


def test_the_overlong_penalty_grows_over_the_buffer_and_no_further():
    """Responses of 3 and 2 tokens: of a buffer of 2 before 4 tokens the first fills half, the second none."""
    options = {"reward_shaping__enabled": True, "reward_shaping__overlong_buffer_penalty": 0.5}
    for (limit, buffer), expected in {(4, 2): [0.75, -2.0], (3, 2): [0.5, -2.25], (2, 1): [0.5, -2.5]}.items():
        lengths = {"reward_shaping__max_response_length": limit, "reward_shaping__overlong_buffer_length": buffer}
        assert shaped_scores([1.0, -2.0], **options, **lengths) == expected


@pytest.mark.parametrize(("scores", "expected"), [([2.0, 2.0], [2.0, 0.5]), ([-1.0, -1.0], [-1.0, -1.0])])
def test_a_cut_response_gets_a_part_of_its_reward_and_no_bonus_for_a_negative_one(scores, expected):
    options = {"reward_shaping__enabled": True, "reward_shaping__stop_properly_penalty_coef": 0.25}
    assert shaped_scores(scores, **options) == expected


def test_rewards_are_scaled_then_shaped_then_clipped():
    options = {"reward_scaling__enabled": True, "reward_scaling__target_max": 8.0, "cliprange_reward": 1.5,
               "reward_shaping__enabled": True, "reward_shaping__stop_properly_penalty_coef": 0.25}  # fmt: skip
    assert shaped_scores([0.5, 0.5], **options) == [1.5, 1.0]  # 4 and 4, 4 and 1, 1.5 and 1
    assert shaped_scores([-9.0, 0.0], cliprange_reward=1.5) == [-1.5, 0.0]


def test_what_shaping_changes_is_paid_on_the_last_token_and_the_raw_reward_stays():
    scored = score(Answers([[0.25, 0.5, 0.25], 2.0]), batch())
    paid = charged(scored, ppo_settings(cliprange_reward=0.75), tiny.config(
        loss_fn__reference_policy_kl_penalty=0.0).loss_fn)  # fmt: skip
    assert paid.rewards.tolist() == [0, 0, 0.25, 0.5, 0.0, 0, 0, 0.75]
    assert paid.raw_reward.tolist() == [1.0, 2.0]


def advantages(**overrides):
    prepared = batch().update(
        rewards=torch.tensor([9, 9, 0, 0, 1.0, 9, 0, 1.0]),
        values=torch.tensor([9, 9, 0.1, 0.2, 0.3, 9, 0.4, 0.5]),
        next_values=torch.tensor([0.7, 0.6]),
    )
    options = {"normalize_advantages": False, "adv_estimator.gae_lambda": 1.0} | overrides
    return estimate_advantages(
        prepared, tiny.config(**{f"ppo__{k.replace('.', '__')}": v for k, v in options.items()}).ppo
    )


def test_advantages_are_return_minus_value_when_lambda_is_one():
    estimate = advantages()
    assert torch.allclose(estimate.advantages, torch.tensor([0, 0, 0.9, 0.8, 0.7, 0, 0.6, 0.5]))
    assert torch.allclose(estimate.returns, torch.tensor([0, 0, 1.0, 1, 1, 0, 1, 1]))


def test_a_truncated_response_ends_in_the_critics_value_if_asked():
    estimate = advantages(bootstrap_truncated=True)
    assert torch.allclose(estimate.returns, torch.tensor([0, 0, 1.0, 1, 1, 0, 1.6, 1.6]))


def test_normalised_advantages_have_mean_zero_and_variance_one_over_the_response_tokens():
    estimate = advantages(normalize_advantages=True)
    mask = batch().mask
    assert estimate.advantages[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert estimate.advantages[mask].var(unbiased=False).item() == pytest.approx(1, abs=1e-4)
    assert not estimate.advantages[~mask].any()
    assert torch.allclose(estimate.returns, advantages().returns)


def test_decoupled_lambdas():
    """Advantages with lambda 0 are r + V' - V; returns with lambda 1 are the rewards to come."""
    estimate = advantages(**{"adv_estimator.gae_lambda_policy": 0.0, "adv_estimator.gae_lambda_value": 1.0,
                             "adv_estimator.gae_lambda": 0.95})  # fmt: skip
    assert torch.allclose(estimate.advantages, torch.tensor([0, 0, 0.1, 0.1, 0.7, 0, 0.1, 0.5]))
    assert torch.allclose(estimate.returns, torch.tensor([0, 0, 1.0, 1, 1, 0, 1, 1]))
    only_value = advantages(**{"adv_estimator.gae_lambda": 0.0, "adv_estimator.gae_lambda_value": 1.0})
    assert torch.equal(only_value.advantages, estimate.advantages)
    assert torch.equal(only_value.returns, estimate.returns)


def test_length_adaptive_lambda():
    """alpha 0.5: 1 - 1 / 1.5 = 1/3 for 3 tokens, and 1 - 1 / max(1, 1) = 0 for 2."""
    estimate = advantages(**{"adv_estimator.length_adaptive_alpha": 0.5})
    last, middle = 0.7, 0.1 + 0.7 / 3
    assert torch.allclose(estimate.advantages, torch.tensor([0, 0, 0.1 + middle / 3, middle, last, 0, 0.1, 0.5]))
    assert torch.allclose(estimate.returns, torch.tensor([0, 0, 1.0, 1, 1, 0, 1, 1]))
