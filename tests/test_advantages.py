"""fastppo.whiten, rloo and group_advantages against numpy float64 and by hand; ranks: test_vocab_parallel.py."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastppo.ops.advantages import group_advantages, rloo, whiten
from fastppo.testing import assert_bitwise_equal

INF, NAN = math.inf, math.nan


# -- whiten -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_whiten_equals_numpy(dtype, shift_mean):
    x = (torch.randn(5, 9) * 3 + 2).to(dtype)
    mask = torch.rand(5, 9) < 0.6
    kept = x[mask].double().numpy()
    right = np.zeros((5, 9))
    right[mask.numpy()] = (kept - kept.mean()) / np.sqrt(kept.var() + 1e-8) + (0 if shift_mean else kept.mean())
    got = whiten(torch.where(mask, x, NAN), mask, shift_mean=shift_mean)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    np.testing.assert_allclose(got.double().numpy(), right, rtol=1e-6, atol=1e-6)
    assert bool((got[~mask] == 0).all())


def test_whiten_by_hand_with_biased_variance():
    assert whiten(torch.tensor([1.0, 3.0])).tolist() == pytest.approx([-1.0, 1.0], rel=1e-6)
    assert whiten(torch.tensor([1.0, 3.0]), shift_mean=False).tolist() == pytest.approx([1.0, 3.0], rel=1e-6)
    assert whiten(torch.tensor([1.0, 3.0, NAN]), torch.tensor([0.5, 2.0, 0.0])).tolist() == pytest.approx(
        [-1, 1, 0], rel=1e-6
    )


def test_whiten_of_one_none_and_equal_elements():
    assert whiten(torch.tensor([7.0])).tolist() == [0.0]
    assert whiten(torch.tensor([NAN, 7.0, INF]), torch.tensor([0, 1, 0])).tolist() == [0.0, 0.0, 0.0]
    assert whiten(torch.full((3,), NAN), torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert whiten(torch.zeros(0)).shape == (0,)
    assert whiten(torch.full((64,), 0.1)).abs().max() < 1e-6


def test_whiten_has_no_cancellation():
    """Two passes: an offset of 1e6 on values a unit apart leaves a float32 result exact to float32."""
    small = torch.randint(0, 9, (1000,)).float()
    torch.testing.assert_close(whiten(small + 1e6), whiten(small), rtol=1e-6, atol=1e-7)


def test_no_gradient_flows():
    x = torch.randn(6, requires_grad=True)
    for y in (whiten(x), rloo(x, 3), group_advantages(x, 3)):
        assert not y.requires_grad


# -- rloo and group advantages ----------------------------------------------------------------------------------------


def by_hand(rewards, ids, valid, kind="rloo", lengths=None, eps=1e-6) -> np.ndarray:
    """One sample after another, each with the list of its valid siblings."""
    rewards = np.asarray(rewards, dtype=np.float64)
    result = np.zeros(len(rewards))
    for i in range(len(rewards)):
        group = [j for j in range(len(rewards)) if ids[j] == ids[i] and valid[j]]
        if not valid[i] or len(group) < 2:
            continue
        r = rewards[group]
        if kind == "rloo":
            result[i] = rewards[i] - np.mean([rewards[j] for j in group if j != i])
        elif kind == "dr_grpo":
            result[i] = rewards[i] - r.mean()
        elif kind == "grpo":
            result[i] = (rewards[i] - r.mean()) / (r.std(ddof=1) + eps)
        else:
            weight = np.asarray(lengths, dtype=np.float64)[group]
            result[i] = rewards[i] - (weight * r).sum() / weight.sum()
    return result


def call(rewards, kind="rloo", lengths=None, **options: Any):
    if kind == "rloo":
        return rloo(rewards, **options)
    return group_advantages(rewards, kind=kind, lengths=lengths if kind == "opo" else None, **options)


KINDS = ["rloo", "grpo", "dr_grpo", "opo"]


def test_hand_computed():
    rewards = torch.tensor([1.0, 2.0, 6.0])
    assert rloo(rewards, 3).tolist() == pytest.approx([-3.0, -1.5, 4.5])
    assert group_advantages(rewards, 3, kind="dr_grpo").tolist() == pytest.approx([-2.0, -1.0, 3.0])
    assert group_advantages(rewards, 3).tolist() == pytest.approx([x / math.sqrt(7) for x in (-2, -1, 3)], rel=1e-5)
    opo = group_advantages(rewards, 3, kind="opo", lengths=torch.tensor([1, 1, 2]))
    assert opo.tolist() == pytest.approx([1 - 3.75, 2 - 3.75, 6 - 3.75])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_equals_the_definition(kind, dtype):
    rewards = torch.randn(24).to(dtype)
    lengths = torch.randint(1, 100, (24,))
    valid = torch.rand(24) < 0.7
    valid[:4] = torch.tensor([False, True, False, False])
    garbage = torch.where(valid, rewards, NAN)
    adjacent = np.arange(24) // 4
    got = call(garbage, kind, lengths, group_size=4, valid=valid)
    np.testing.assert_allclose(
        got.double().numpy(), by_hand(rewards.double(), adjacent, valid, kind, lengths), rtol=2e-6, atol=1e-6
    )
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert got[:4].tolist() == [0.0] * 4, "fewer than two valid"
    order = torch.randperm(24)
    ids = torch.tensor([17, 0, 23, 5, 9, 2])[torch.from_numpy(adjacent)][order]
    shuffled = call(garbage[order], kind, lengths[order], group_ids=ids, valid=valid[order].float())
    torch.testing.assert_close(shuffled, got[order], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [1.0, 0.1, -3e4 / 7, 1e-20])
def test_equal_rewards_give_exactly_zero(kind, reward, dtype, group_size):
    """NeMo-RL #1518, [1, 1, 1, 1] with std normalisation: no rounding error is divided by a std of zero."""
    got = call(torch.full((84,), reward, dtype=dtype), kind, torch.arange(1, 85), group_size=group_size)
    assert_bitwise_equal("advantages", got.abs(), torch.zeros(84, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_small_differences_on_a_large_offset(kind):
    small = torch.tensor([0.0, 1.0, 2.0, 5.0])
    lengths = torch.tensor([3, 1, 4, 1])
    torch.testing.assert_close(
        call(small + 2**23, kind, lengths, group_size=4), call(small, kind, lengths, group_size=4)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_samples_and_groups_of_one(kind):
    assert call(torch.zeros(0), kind, torch.zeros(0), group_size=4).shape == (0,)
    assert call(torch.tensor([1.0, 2.0]), kind, torch.ones(2), group_size=1).tolist() == [0.0, 0.0]
    assert call(torch.tensor([1.0, 2.0]), kind, torch.ones(2), group_ids=torch.tensor([1, 0])).tolist() == [0.0, 0.0]


def test_opo_without_any_length_takes_the_plain_mean():
    got = group_advantages(torch.tensor([1.0, 2.0]), 2, kind="opo", lengths=torch.zeros(2))
    assert got.tolist() == [-0.5, 0.5]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-100, 100, width=32), st.integers(0, 5), st.booleans(), st.integers(1, 50)),
        min_size=6,
        max_size=20,
    ),
    st.sampled_from(KINDS),
)
def test_any_grouping(samples, kind):
    rewards, ids, valid, lengths = zip(*samples, strict=True)
    got = call(
        torch.tensor(rewards), kind, torch.tensor(lengths), group_ids=torch.tensor(ids), valid=torch.tensor(valid)
    )
    np.testing.assert_allclose(got.double().numpy(), by_hand(rewards, ids, valid, kind, lengths), rtol=1e-5, atol=1e-4)
    if kind != "opo":
        for group in set(ids):
            total = sum(float(a) for a, g in zip(got, ids, strict=True) if g == group)
            assert abs(total) < 1e-3


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_narrow_group_ids_work_for_any_number_of_samples(dtype):
    rewards = torch.arange(300.0)
    ids = torch.arange(300) % 100
    assert torch.equal(rloo(rewards, group_ids=ids.to(dtype)), rloo(rewards, group_ids=ids))


def test_whitening_adds_1e_8_to_the_variance():
    x = torch.tensor([1e-4, -1e-4], dtype=torch.float64)
    assert whiten(x).tolist() == pytest.approx([1e-4 / (2e-8) ** 0.5, -1e-4 / (2e-8) ** 0.5], rel=1e-9)


def test_grpos_eps_is_added_to_the_standard_deviation():
    """Rewards 0 and 2: mean 1, deviation sqrt(2) over n - 1."""
    advantages = group_advantages(torch.tensor([0.0, 2.0]), 2, eps=0.5)
    assert advantages.tolist() == pytest.approx([-1 / (2**0.5 + 0.5), 1 / (2**0.5 + 0.5)], rel=1e-6)
