"""fastppo.testing: the three-way rule and the input factories do what other tests trust them to do."""

import math

import pytest
import torch

from fastppo.testing import LOGITS, assert_bitwise_equal, assert_no_worse, make_logits, make_loss_inputs, make_targets

TRUTH = torch.tensor([[1.0, -2.0], [math.inf, math.nan]], dtype=torch.float64)


def test_no_worse_passes_up_to_the_bound_and_not_beyond():
    baseline = TRUTH + 1e-3
    assert_no_worse("x", TRUTH + 1.9e-3, baseline, TRUTH, factor=2.0, atol=0.0)
    with pytest.raises(AssertionError, match=r"dx: error 2.1.*e-03 > 2.0 \* 1.0.*e-03 \(baseline\).*worst at \[0, 1\]"):
        got = TRUTH.clone()
        got[0, 1] += 2.1e-3
        assert_no_worse("dx", got, baseline, TRUTH, factor=2.0, atol=0.0)


def test_an_exact_baseline_allows_one_rounding_of_what_is_tested():
    truth = torch.tensor([1.0 / 3, 8.0], dtype=torch.float64)
    assert_no_worse("x", truth.bfloat16(), truth, truth)
    with pytest.raises(AssertionError, match="1 of 2 elements"):
        assert_no_worse("x", truth.float() + torch.tensor([3e-6, 0.0]), truth, truth)


@pytest.mark.parametrize("wrong", [0.0, -math.inf, math.nan])
def test_inf_and_nan_must_sit_in_the_same_places(wrong):
    got = TRUTH.clone()
    got[1, 0] = wrong
    with pytest.raises(AssertionError, match=r"other places than in truth: worst at \[1, 0\]"):
        assert_no_worse("x", got, TRUTH, TRUTH)
    got = TRUTH.clone()
    got[0, 0] = math.nan
    with pytest.raises(AssertionError, match=r"other places than in truth: worst at \[0, 0\]"):
        assert_no_worse("x", got, TRUTH, TRUTH)


def test_shapes_and_nothing():
    assert_no_worse("x", torch.zeros(0), torch.zeros(0), torch.zeros(0))
    with pytest.raises(AssertionError, match="x: shapes differ"):
        assert_no_worse("x", torch.zeros(2), torch.zeros(2), torch.zeros(3))


def test_bitwise():
    assert_bitwise_equal("x", TRUTH, TRUTH.clone())
    for got, expected in (
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
        (torch.tensor([math.nan]), torch.tensor([0.0])),
        (torch.tensor([1]), torch.tensor([2])),
    ):
        with pytest.raises(AssertionError, match=r"x: not bitwise equal: worst at \[0\].*1 of 1 elements"):
            assert_bitwise_equal("x", got, expected)
    with pytest.raises(AssertionError, match="got .* expected"):
        assert_bitwise_equal("x", torch.zeros(1), torch.zeros(1).double())


@pytest.mark.parametrize("kind", LOGITS)
def test_targets_are_never_a_hole(kind):
    logits = make_logits(50, 7, kind)
    targets = make_targets(logits, ignored=0.5)
    used = targets != -100
    assert 0 < int(used.sum()) < 50
    assert bool((logits[used].gather(1, targets[used][:, None]) > -math.inf).all())
    assert_bitwise_equal("same seed", make_logits(50, 7, kind), logits)


def test_unknown_kind():
    with pytest.raises(ValueError, match="kind must be one of 'normal'.*got 'odd'"):
        make_logits(1, 2, "odd")


def test_loss_inputs():
    batch = make_loss_inputs([3, 0, 5], dtype=torch.bfloat16)
    assert batch.cu_seqlens.tolist() == [0, 3, 3, 8] and batch.cu_seqlens.dtype == torch.int32
    assert all(x.shape == (8,) and x.dtype == torch.bfloat16 for x in batch[:9]) and batch.mask.dtype == torch.bool
    assert bool((batch.logprobs <= 0).all()) and bool((batch.entropy >= 0).all())
