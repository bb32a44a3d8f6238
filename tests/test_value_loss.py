"""fastppo.value_loss against the formula in numpy float64, hand-computed numbers and finite differences."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastppo.backends import KERNELS
from fastppo.metrics import VALUE_METRICS, summarize
from fastppo.ops.value_loss import value_loss
from fastppo.testing import assert_bitwise_equal, make_loss_inputs

INF, NAN = math.inf, math.nan
LENGTHS = [7, 1, 12, 4]
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"]
both_backends = pytest.mark.parametrize("backend", ["auto", "torch"])


@pytest.fixture(scope="module", params=["cpu", "torch"], autouse=True)
def kernel(request):
    """What "auto" takes: the kernel, or, as on a device without one, the formula whose gradients are kept."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setitem(KERNELS, "value_loss", {})
        yield request.param


def oracle(values, old, returns, clip_eps=None) -> np.ndarray:
    values, old, returns = (x.double().numpy() for x in (values, old, returns))
    loss = (values - returns) ** 2
    if clip_eps is not None:
        moved = np.minimum(np.maximum(values, old - clip_eps), old + clip_eps)
        loss = np.maximum(loss, (moved - returns) ** 2)
    return loss / 2


def aggregated(per_token: np.ndarray, batch, how: str, norm=None) -> float:
    ends, mask = batch.cu_seqlens.tolist(), batch.mask.numpy()
    sequences = [per_token[a:b][mask[a:b]] for a, b in zip(ends[:-1], ends[1:], strict=True) if mask[a:b].any()]
    if how == "token_mean":
        return float(per_token[mask].mean())
    if how == "seq_mean_token_mean":
        return float(np.mean([s.mean() for s in sequences]))
    return float(np.mean([s.sum() for s in sequences])) / (norm if how == "token_sum_norm" else 1)


def call(batch, **options: Any):
    leaf = batch.values.clone().requires_grad_()
    options = {"mask": batch.mask, "cu_seqlens": batch.cu_seqlens if leaf.dim() == 1 else None} | options
    out = value_loss(leaf, batch.old_values, batch.returns, **options)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return out.loss.detach(), out.metrics, grad


@both_backends
@pytest.mark.parametrize("clip_eps", [None, 0.2])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_gradient_equal_the_formula(backend, aggregation, clip_eps):
    batch = make_loss_inputs(LENGTHS, dtype=torch.float64)
    norm = 40.0 if aggregation == "token_sum_norm" else None

    def right(values) -> float:
        return aggregated(oracle(values, batch.old_values, batch.returns, clip_eps), batch, aggregation, norm)

    loss, _, grad = call(batch, aggregation=aggregation, norm=norm, clip_eps=clip_eps, backend=backend)
    assert float(loss) == pytest.approx(right(batch.values), rel=1e-12)
    for t in range(len(batch.mask)):
        step = torch.zeros_like(batch.values)
        step[t] = 1e-6
        difference = (right(batch.values + step) - right(batch.values - step)) / 2e-6
        assert float(grad[t]) == pytest.approx(difference, abs=1e-8)
    single = call(
        type(batch)(*(x.float() if x.is_floating_point() else x for x in batch)),
        aggregation=aggregation,
        norm=norm,
        clip_eps=clip_eps,
    )
    assert float(single[0]) == pytest.approx(float(loss), rel=1e-6)
    torch.testing.assert_close(single[2].double(), grad, rtol=1e-5, atol=1e-7)


# value, old value, return, clip_eps -> loss, gradient
BY_HAND = {
    "unclipped": (1.0, 0.0, 3.0, None, 2.0, -2.0),
    "inside": (1.0, 0.9, 3.0, 0.2, 2.0, -2.0),
    "moved_towards_the_return_and_too_far": (1.0, 0.0, 3.0, 0.2, 0.5 * 2.8**2, 0.0),
    "moved_away_from_the_return": (1.0, 0.0, -1.0, 0.2, 2.0, 2.0),
    "at_the_bound_is_a_tie": (0.25, 0.0, 3.0, 0.25, 0.5 * 2.75**2, -2.75),
    "equally_far_on_both_sides_is_a_tie": (2.0, 0.0, 1.125, 0.25, 0.5 * 0.875**2, 0.875),
    "exact": (3.0, 3.0, 3.0, 0.2, 0.0, 0.0),
}


@both_backends
@pytest.mark.parametrize("row", BY_HAND.values(), ids=BY_HAND)
def test_by_hand(backend, row):
    value, old, ret, clip_eps, loss, grad = row
    leaf = torch.tensor([value], requires_grad=True)
    out = value_loss(leaf, torch.tensor([old]), torch.tensor([ret]), clip_eps=clip_eps, backend=backend)
    out.loss.backward()
    assert (float(out.loss.detach()), float(leaf.grad)) == pytest.approx((loss, grad), rel=1e-6)


@both_backends
def test_old_values_may_be_none_and_are_not_read_without_clipping(backend):
    batch = make_loss_inputs(LENGTHS)
    without = call(batch._replace(old_values=None), backend=backend)
    poisoned = call(batch._replace(old_values=torch.full_like(batch.values, NAN)), backend=backend)
    for got, expected in zip(without, poisoned, strict=True):
        assert_bitwise_equal("old_values", got, expected)


@both_backends
@pytest.mark.parametrize("garbage", [NAN, INF, 1e30])
def test_masked_garbage_reaches_nothing(backend, garbage):
    batch = make_loss_inputs(LENGTHS)
    poison = {f: torch.where(batch.mask, getattr(batch, f), garbage) for f in ("values", "old_values", "returns")}
    options = {"clip_eps": 0.2, "aggregation": "seq_mean_token_mean", "backend": backend}
    for got, expected in zip(call(batch._replace(**poison), **options), call(batch, **options), strict=True):
        assert_bitwise_equal("poisoned", got, expected)
    assert bool((call(batch, **options)[2][~batch.mask] == 0).all())


@both_backends
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)])
def test_zero_valid_tokens(backend, aggregation, count):
    batch = make_loss_inputs(LENGTHS)
    batch = batch._replace(mask=torch.zeros_like(batch.mask), values=torch.full_like(batch.values, NAN))
    norm = 40.0 if aggregation == "token_sum_norm" else None
    loss, metrics, grad = call(
        batch, clip_eps=0.2, aggregation=aggregation, norm=norm, num_tokens=count, num_seqs=count, backend=backend
    )
    assert float(loss) == 0 and bool((metrics == 0).all()) and bool((grad == 0).all())


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3]], [[3], [0, 2], [1], [4]]], ids=["2", "4_one_fully_masked"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches(aggregation, parts):
    lengths = [*LENGTHS, 5]
    batch = make_loss_inputs(lengths)
    batch.mask[sum(LENGTHS) :] = False
    ends = batch.cu_seqlens.tolist()
    options = {
        "clip_eps": 0.2,
        "aggregation": aggregation,
        "norm": 40.0 if aggregation == "token_sum_norm" else None,
        "num_tokens": int(batch.mask.sum()),
        "num_seqs": torch.tensor(len(LENGTHS)),
    }
    loss, metrics, grad = call(batch, **options)
    total, sums = 0.0, torch.zeros_like(metrics)
    for part in parts:
        tokens = torch.cat([torch.arange(ends[i], ends[i + 1]) for i in part])
        offsets = torch.tensor([0, *(lengths[i] for i in part)]).cumsum(0)
        part_loss, part_metrics, part_grad = call(type(batch)(*(x[tokens] for x in batch[:-1]), offsets), **options)
        total += float(part_loss)
        sums += part_metrics
        assert_bitwise_equal("d loss/d values", part_grad, grad[tokens])
    assert total == pytest.approx(float(loss), rel=1e-6)
    torch.testing.assert_close(sums, metrics, rtol=1e-12, atol=1e-9)


def test_rows_are_sequences():
    values, returns = torch.tensor([[1.0, 2.0], [4.0, 0.0]]), torch.zeros(2, 2)
    mask = torch.tensor([[True, True], [True, False]])
    out = value_loss(values, None, returns, mask=mask, aggregation="seq_mean_token_mean")
    assert out.loss.item() == pytest.approx((0.5 * (1 + 4) / 2 + 8) / 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype):
    batch = make_loss_inputs(LENGTHS)
    mixed = batch._replace(
        values=batch.values.to(dtype), returns=batch.returns.bfloat16(), old_values=batch.old_values.half()
    )
    loss, metrics, grad = call(mixed, clip_eps=0.2)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert metrics.dtype == torch.float64 and grad.dtype == dtype
    right = aggregated(oracle(mixed.values, mixed.old_values, mixed.returns, 0.2), batch, "token_mean")
    assert float(loss) == pytest.approx(right, rel=1e-6)


@both_backends
def test_gradcheck(backend):
    batch = make_loss_inputs([3, 2], dtype=torch.float64)

    def f(values):
        return value_loss(values, batch.old_values, batch.returns, mask=batch.mask, clip_eps=0.1, backend=backend).loss

    assert torch.autograd.gradcheck(f, batch.values.requires_grad_())
    if backend == "torch":
        assert torch.autograd.gradgradcheck(f, batch.values)
    else:
        with pytest.raises(RuntimeError, match='value_loss .*backend="torch"'):
            torch.autograd.grad(f(batch.values), batch.values, create_graph=True)


def test_no_gradient_to_old_values_and_returns():
    values, old, returns = (torch.randn(4, requires_grad=True) for _ in range(3))
    for backend in ("auto", "torch"):
        value_loss(values, old, returns, clip_eps=0.2, backend=backend).loss.backward()
    assert values.grad is not None and old.grad is None and returns.grad is None


def test_metrics_by_hand_and_their_summary():
    values, old = torch.tensor([1.0, 2.0, 5.0, NAN]), torch.tensor([1.0, 2.0, 1.0, 0.0])
    returns = torch.tensor([2.0, 2.0, 8.0, 7.0])
    out = value_loss(values, old, returns, mask=torch.tensor([1, 1, 1, 0]), clip_eps=0.5)
    expected = {
        "tokens": 3,
        "vf_loss": 0.5 + 0 + 0.5 * 6.5**2,
        "vf_clipped": 1,
        "err": 4,
        "err_sq": 10,
        "ret": 12,
        "ret_sq": 72,
    }
    assert dict(zip(VALUE_METRICS, out.metrics.tolist(), strict=True)) == pytest.approx(expected)
    assert summarize(out.metrics) == pytest.approx(
        {
            "critic/vf_loss": expected["vf_loss"] / 3,
            "critic/vf_clipfrac": 1 / 3,
            "critic/vf_explained_var": 1 - np.var([1, 0, 3]) / np.var([2, 2, 8]),
            "critic/vpred_mean": 8 / 3,
        }
    )


def test_explained_variance_of_constant_returns_is_undefined():
    out = value_loss(torch.tensor([0.1, 0.2]), None, torch.tensor([0.3, 0.3]))
    assert math.isnan(summarize(out.metrics)["critic/vf_explained_var"])
    assert all(math.isnan(v) for v in summarize(torch.zeros(len(VALUE_METRICS))).values())


floats = st.floats(-1e3, 1e3, width=32)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(floats, floats, floats), min_size=1, max_size=8), st.sampled_from([None, 0.125, 4.0]))
def test_any_batch_equals_the_formula(rows, clip_eps):
    values, old, returns = (torch.tensor(x) for x in zip(*rows, strict=True))
    leaf = values.clone().requires_grad_()
    out = value_loss(leaf, old, returns, clip_eps=clip_eps)
    right = oracle(values, old, returns, clip_eps)
    assert float(out.loss.detach()) == pytest.approx(right.mean(), rel=1e-5, abs=1e-6 * (1 + np.abs(right).max()))
    out.loss.backward()
    bound = (values - returns).abs() / len(rows)
    tiny = torch.finfo(torch.float32).tiny  # below it digits are lost
    assert bool(((leaf.grad == 0) | ((leaf.grad.abs() - bound).abs() <= 1e-6 * bound + tiny)).all())


def test_nothing_clips_inside_the_range_however_it_is_rounded():
    values, old, returns = (torch.randn(10_000) for _ in range(3))
    values.requires_grad_()
    clipped = value_loss(values, old, returns, clip_eps=1e3)
    (gradient,) = torch.autograd.grad(clipped.loss, values)
    (unclipped,) = torch.autograd.grad(value_loss(values, None, returns).loss, values)
    assert summarize(clipped.metrics)["critic/vf_clipfrac"] == 0.0
    assert torch.equal(gradient, unclipped)
