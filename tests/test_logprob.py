"""fastppo.logprob against float64 numpy, its special values, its gradients, its promises about memory and order."""

import math
import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fastppo.ops import _logprob_rows
from fastppo.ops.logprob import logprob
from fastppo.reference.logprob import logprob as reference
from fastppo.testing import LOGITS, assert_bitwise_equal, assert_no_worse, make_logits, make_targets
from fastppo.vocab import VocabShard

# "torch_rows" is what a device without a kernel takes: torch ops on chunks of rows. tests/interpreted takes tests from
# here for Triton's kernels.
BACKENDS = ["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["cpu", "torch_rows", "torch"]
INF, NAN = math.inf, math.nan
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def oracle(logits, targets, temperature=1.0, softcap=None):
    """Row by row in float64, with the columns at -inf deleted."""
    x = np.asarray(logits, dtype=np.float64).reshape(-1, np.shape(logits)[-1])
    targets = np.asarray(targets).reshape(-1)
    temperature = np.broadcast_to(np.asarray(temperature, dtype=np.float64).reshape(-1), targets.shape)
    logprobs, entropies = np.zeros(len(x)), np.zeros(len(x))
    for i, (row, y) in enumerate(zip(x, targets, strict=True)):
        if y == -100:
            continue
        kept = np.isfinite(row)
        z = row if softcap is None else softcap * np.tanh(row / softcap)
        z = z / temperature[i]
        p = np.exp(z[kept] - z[kept].max())
        log_s = np.log(p.sum())
        p /= p.sum()
        logprobs[i] = z[y] - z[kept].max() - log_s if kept[y] else -INF
        entropies[i] = -(p * np.log(np.where(p > 0, p, 1.0))).sum()
    return logprobs, entropies


def oracle_gradient(logits, targets, up_lp, up_h, temperature=1.0, softcap=None):
    """d(up_lp * logprob + up_h * entropy)/d logits in float64: dlogp_j = [j=y] - p_j, dH_j = -p_j (log p_j + H)."""
    x = np.asarray(logits, dtype=np.float64)
    z = x if softcap is None else softcap * np.tanh(x / softcap)
    z = z / np.asarray(temperature, dtype=np.float64).reshape(-1, 1)
    log_p = z - z.max(-1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(-1, keepdims=True))
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(-1, keepdims=True)
    onehot = np.zeros_like(p)
    used = np.asarray(targets) != -100
    onehot[used, np.asarray(targets)[used]] = 1
    g = np.asarray(up_lp)[:, None] * (onehot - p) - np.asarray(up_h)[:, None] * p * (log_p + entropy)
    slope = 1.0 if softcap is None else 1 - np.tanh(x / softcap) ** 2
    return np.where(used[:, None], g * slope / np.asarray(temperature, dtype=np.float64).reshape(-1, 1), 0.0)


def on(backend, logits):
    """Options that take a backend of BACKENDS: the reference has no vocab, so torch with one goes by rows."""
    width = logits.shape[-1]
    return (
        {"backend": "torch", "vocab": VocabShard(0, width, None, width)}
        if backend == "torch_rows"
        else {"backend": backend}
    )


def run(logits, targets, up_lp=1.0, up_h=0.0, **options):
    """logprobs, entropy and the logits' gradient of up_lp * logprobs + up_h * entropy."""
    options |= on(options.get("backend", "auto"), logits)
    leaf = torch.as_tensor(logits).clone().requires_grad_()
    out = logprob(leaf, torch.as_tensor(targets), **options)
    upstream = [torch.as_tensor(u, dtype=out.logprobs.dtype).expand_as(out.logprobs) for u in (up_lp, up_h)]
    outputs = [out.logprobs] if out.entropy is None else [out.logprobs, out.entropy]
    (grad,) = torch.autograd.grad(outputs, leaf, upstream[: len(outputs)])
    return out.logprobs.detach(), None if out.entropy is None else out.entropy.detach(), grad


def close(got: Tensor, expected, tolerance=1e-6) -> None:
    np.testing.assert_allclose(got.detach().double().numpy(), expected, rtol=tolerance, atol=tolerance)


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 3.0},
    "both": {"softcap": 5.0, "temperature": 0.7},
    "per_token": {"temperature": torch.linspace(0.5, 2.0, 12)},
}


@every_backend
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", [k for k in LOGITS if k != "holes"])
def test_values_and_gradients_equal_the_formula(backend, options, kind):
    logits = make_logits(12, 37, kind)
    targets = make_targets(logits, ignored=0.2)
    up_lp, up_h = torch.randn(12), torch.randn(12)
    logprobs, entropy, grad = run(logits, targets, up_lp, up_h, backend=backend, **options)
    expected = oracle(logits, targets, **options)
    close(logprobs, expected[0], 2e-6)
    close(entropy, expected[1], 2e-6)
    close(grad, oracle_gradient(logits, targets, up_lp, up_h, **options), 3e-6)


# Shapes: one token, no leading dimension, none at all, one column, odd width, three leading dimensions.
@pytest.mark.parametrize("shape", [(1, 5), (7,), (0, 5), (4, 1), (3, 129), (2, 3, 2, 11)], ids=str)
@every_backend
def test_shapes(backend, shape):
    logits = torch.randn(shape)
    targets = make_targets(logits) if logits.numel() else torch.zeros(shape[:-1], dtype=torch.int64)
    logprobs, entropy, grad = run(logits, targets, backend=backend)
    expected = oracle(logits, targets)
    assert logprobs.shape == entropy.shape == shape[:-1] and grad.shape == shape
    close(logprobs.flatten(), expected[0])
    close(entropy.flatten(), expected[1])


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("chunk", [1, 40, 1 << 20], ids=["one_row", "few_rows", "one_chunk"])
def test_chunks_change_nothing(monkeypatch, chunk, with_entropy):
    logits = make_logits(11, 19)
    targets = make_targets(logits, ignored=0.3)
    options = {"with_entropy": with_entropy, "softcap": 4.0, "backend": "torch_rows"}
    whole = run(logits, targets, 1.0, 0.5, **options)
    monkeypatch.setattr(_logprob_rows, "_CHUNK_CPU", chunk)
    for name, got, expected in zip("lhg", run(logits, targets, 1.0, 0.5, **options), whole, strict=True):
        if expected is not None:
            assert_bitwise_equal(name, got, expected)


@every_backend
def test_without_entropy(backend):
    logits = make_logits(6, 31)
    targets = make_targets(logits)
    logprobs, entropy, grad = run(logits, targets, with_entropy=False, backend=backend)
    full, _, full_grad = run(logits, targets, backend=backend)
    assert entropy is None
    assert_bitwise_equal("logprobs", logprobs, full)
    close(grad, full_grad)


# -- special values ---------------------------------------------------------------------------------------------------


@every_backend
def test_columns_at_minus_infinity_are_as_if_deleted(backend):
    logits = make_logits(8, 33, "holes")
    targets = make_targets(logits)
    logprobs, entropy, grad = run(logits, targets, 0.7, -0.4, backend=backend, softcap=6.0, temperature=1.3)
    expected = oracle(logits, targets, 1.3, 6.0)
    close(logprobs, expected[0])
    close(entropy, expected[1])
    assert bool((grad[logits == -INF] == 0).all())
    for i in range(8):
        kept = logits[i] != -INF
        y = int(kept[: int(targets[i])].sum())
        short = run(logits[i, kept][None], [y], 0.7, -0.4, backend=backend, softcap=6.0, temperature=1.3)
        close(grad[i, kept], short[2][0])


@every_backend
@pytest.mark.parametrize(
    ("row", "target", "logprob_", "entropy_"),
    [
        ([0.0, -INF], 0, 0.0, 0.0),
        ([0.0, 0.0, -INF], 1, -0.6931471805599453, 0.6931471805599453),
        ([-INF, 3.0, -INF, -INF], 1, 0.0, 0.0),
    ],
    ids=["one_of_two", "two_of_three", "one_of_four"],
)
def test_entropy_with_minus_infinity(backend, row, target, logprob_, entropy_):
    logprobs, entropy, grad = run(torch.tensor([row]), [target], 1.0, 1.0, backend=backend)
    close(logprobs, [logprob_], 1e-7)
    close(entropy, [entropy_], 1e-7)
    p = np.exp(np.array(row))
    p /= p.sum()
    close(grad[0], np.eye(len(row))[target] - p, 1e-7)
    assert bool((grad[0][torch.tensor(row) == -INF] == 0).all())


def test_one_finite_logit_far_from_the_start_gives_positive_zeros():
    logits = torch.full((1, 100000), -INF)
    logits[0, 50000] = 0.0
    logprobs, entropy, grad = run(logits, [50000], 1.0, 1.0)
    assert_bitwise_equal("logprob", logprobs, torch.zeros(1))
    assert_bitwise_equal("entropy", entropy, torch.zeros(1))
    assert bool((grad == 0).all())


@every_backend
def test_a_target_at_minus_infinity_has_the_same_gradient_under_a_softcap(backend):
    """There the cap is no function: -inf stays -inf, with slope 1."""
    logits = torch.tensor([[1.0, -INF, 2.0]])
    grad = run(logits, [1], 1.0, 0.5, softcap=1e6, backend=backend)[2]
    close(grad, run(logits, [1], 1.0, 0.5, backend=backend)[2], 1e-6)
    assert float(grad[0, 1]) == 1.0


@every_backend
def test_target_at_minus_infinity(backend):
    logits = torch.tensor([[0.0, 1.0, -INF]])
    logprobs, entropy, grad = run(logits, [2], 1.0, 0.5, backend=backend)
    assert logprobs.tolist() == [-INF]
    p = np.exp([0.0, 1.0]) / np.exp([0.0, 1.0]).sum()
    h = -(p * np.log(p)).sum()
    close(entropy, [h])
    close(grad[0, :2], -p - 0.5 * p * (np.log(p) + h))
    assert bool(grad.isfinite().all())


@pytest.mark.parametrize("bad", [[-INF, -INF, -INF], [0.0, NAN, 1.0], [0.0, INF, 1.0], [INF, INF, 0.0]], ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("target", [0, 1])
@every_backend
def test_rows_that_are_no_distribution_are_nan_and_alone_so(backend, bad, softcap, target):
    good = [0.5, 1.0, -0.25]
    logprobs, entropy, grad = run(
        torch.tensor([good, bad, good]), [0, target, 2], 1.0, 1.0, softcap=softcap, backend=backend
    )
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]
    assert bool(grad[1].isnan().all()) and bool(grad[[0, 2]].isfinite().all())


@every_backend
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_ignored_rows_are_not_read(backend, garbage):
    logits = torch.tensor([[0.0, 1.0], [garbage, garbage], [2.0, 0.0]])
    temperature = torch.tensor([1.0, NAN, 2.0])
    logprobs, entropy, grad = run(logits, [0, -100, 1], 1.0, 1.0, temperature=temperature, backend=backend)
    assert logprobs[1] == entropy[1] == 0 and bool((grad[1] == 0).all())
    expected = oracle(logits[[0, 2]], [0, 1], [1.0, 2.0])
    close(logprobs[[0, 2]], expected[0])
    close(entropy[[0, 2]], expected[1])


@every_backend
def test_all_ignored(backend):
    logprobs, entropy, grad = run(torch.full((3, 4), NAN), [-100] * 3, 1.0, 1.0, backend=backend)
    for x in (logprobs, entropy, grad):
        assert_bitwise_equal("zeros", x, torch.zeros_like(x))


@pytest.mark.parametrize("inplace", [False, True])
def test_zero_upstream_gradients_leak_nothing(inplace):
    logits = torch.tensor([[0.0, 1.0], [NAN, 0.0], [-INF, -INF], [INF, 0.0]])
    leaf = logits.clone().requires_grad_()
    out = logprob(leaf * 1, torch.tensor([0, 1, 0, 1]), inplace_backward=inplace)
    (torch.where(torch.tensor([True, False, False, False]), out.logprobs, 0.0).sum()).backward()
    assert_bitwise_equal("unused rows", leaf.grad[1:], torch.zeros(3, 2))
    assert bool((leaf.grad[0] != 0).all())


@every_backend
def test_another_ignore_index_and_dtypes_of_targets(backend):
    logits = make_logits(4, 300)
    expected = oracle(logits, [156, 0, 200, 255])[0]
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        targets = torch.tensor([156, 0, 200, 255], dtype=dtype)
        close(run(logits, targets, backend=backend)[0], expected)
    logprobs, entropy, _ = run(logits, [156, 0, 200, 255], ignore_index=0, backend=backend)
    assert logprobs[1] == entropy[1] == 0
    close(logprobs[[0, 2, 3]], expected[[0, 2, 3]])


# -- precision --------------------------------------------------------------------------------------------------------


@every_backend
def test_all_logits_minus_200(backend):
    logprobs, entropy, _ = run(torch.full((1, 256), -200.0), [17], backend=backend)
    close(logprobs, [-5.545177444479562])
    close(entropy, [5.545177444479562])


@every_backend
@pytest.mark.parametrize("offset", [1e4, 1e6, -1e6])
def test_a_shift_of_the_logits_changes_nothing(backend, offset):
    logits = (torch.randn(4, 999) * 48).round() / 16
    targets = torch.tensor([0, 5, 500, 998])
    plain, shifted = run(logits, targets, backend=backend), run(logits + offset, targets, backend=backend)
    for a, b in zip(plain, shifted, strict=True):
        close(b, a.numpy(), 1e-6)


@every_backend
@pytest.mark.parametrize(
    ("z", "options", "right"),
    [
        (2.0, {"softcap": 30.0}, 1.997042),
        (45.0, {"softcap": 30.0}, 27.1544476),
        (40.0, {"softcap": 30.0, "temperature": 0.5}, 52.2036997),
    ],
    ids=["below_cap", "above_cap", "cap_then_temperature"],
)
def test_softcap_comes_before_temperature(backend, z, options, right):
    """Against a second logit of 0, logit(p) of the first is its capped and scaled value."""
    logprobs, _, _ = run(torch.tensor([[z, 0.0]] * 2, dtype=torch.float64), [0, 1], backend=backend, **options)
    assert float(logprobs[0] - logprobs[1]) == pytest.approx(right, abs=2e-6)


@pytest.mark.parametrize("p", [0.99, 0.999, 0.9999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_targets_gradient_is_one_rounding_from_expm1(p, dtype):
    logits = torch.full((1, 1024), 0.0, dtype=dtype)
    logits[0, 3] = math.log(p / (1 - p) * 1023)
    logprobs, _, grad = run(logits, [3])
    right = -math.expm1(float(logprobs))
    assert abs(float(grad[0, 3]) - right) <= torch.finfo(dtype).eps / 2 * right * (1 + 1e-6)
    if dtype == torch.bfloat16:
        truth = -math.expm1(float(oracle(logits.double(), [3])[0][0]))
        assert abs(float(grad[0, 3]) - truth) <= torch.finfo(dtype).eps * truth


@pytest.mark.parametrize("backend", ["cpu", "torch_rows"])
@pytest.mark.parametrize("gap", [12.0, 16.0, 24.0])
def test_a_peaked_row_keeps_its_digits(backend, gap):
    """A trained policy's log-prob of -1e-7 has seven digits too; 1 + 1e-7 in float32 has none of them."""
    logits = torch.full((1, 40001), -gap)
    logits[0, 7000] = 0.0
    logprobs, entropy, grad = run(logits, [7000], backend=backend)
    rest = 40000 * math.exp(-gap)
    p = 1 / (1 + rest)
    assert float(logprobs) == pytest.approx(-math.log1p(rest), rel=5e-7)
    assert float(entropy) == pytest.approx(math.log1p(rest) + p * rest * gap, rel=5e-7)
    assert float(grad[0, 7000]) == pytest.approx(p * rest, rel=5e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", LOGITS)
def test_no_worse_than_torch(dtype, kind):
    logits = make_logits(16, 2048, kind, dtype=dtype)
    targets = make_targets(logits)
    up = torch.randn(16)
    got = run(logits, targets, up)
    leaf = logits.clone().requires_grad_()
    baseline = torch.log_softmax(leaf.float(), -1).gather(-1, targets[:, None])[:, 0]
    (baseline_grad,) = torch.autograd.grad(baseline, leaf, up)
    wide = logits.double().requires_grad_()
    truth = torch.log_softmax(wide, -1).gather(-1, targets[:, None])[:, 0]
    (truth_grad,) = torch.autograd.grad(truth, wide, up.double())
    assert_no_worse("logprobs", got[0], baseline, truth)
    assert_no_worse("dlogits", got[2], baseline_grad, truth_grad)
    close(got[1], oracle(logits.double(), targets)[1], 2e-6)


def test_gradient_rows_of_large_bf16_logits_sum_to_zero():
    logits = (torch.randn(8, 512) * 40 + 3000).bfloat16()
    _, _, grad = run(logits, make_targets(logits), torch.randn(8), torch.randn(8))
    total = grad.double().sum(-1).abs()
    assert bool((total <= torch.finfo(torch.bfloat16).eps * grad.double().abs().sum(-1)).all())
    _, _, grad = run(logits.float(), make_targets(logits), torch.randn(8), torch.randn(8))
    assert float(grad.double().sum(-1).abs().max()) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@every_backend
def test_dtypes(backend, dtype):
    logits = make_logits(4, 50, dtype=dtype)
    logprobs, entropy, grad = run(logits, make_targets(logits), backend=backend)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert logprobs.dtype == entropy.dtype == wide and grad.dtype == dtype
    close(logprobs, oracle(logits.double(), make_targets(logits))[0], 1e-12 if dtype == torch.float64 else 1e-6)


# -- derivatives ------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0, "temperature": torch.linspace(0.5, 2, 6).double().view(2, 3)}]
)
def test_gradcheck(backend, options, with_entropy):
    logits = torch.randn(2, 3, 7, dtype=torch.float64)
    logits[0, 0, 1] = -INF
    logits[1, 1] = 0.0
    targets = torch.tensor([[0, 6, 2], [-100, 3, 4]])
    keep = logits != -INF
    finite = torch.where(keep, logits, 0.0).requires_grad_()

    def op(x: Tensor):
        out = logprob(torch.where(keep, x, -INF), targets, with_entropy=with_entropy, **on(backend, x), **options)
        return out.logprobs if out.entropy is None else tuple(out)

    assert torch.autograd.gradcheck(op, finite)


def test_higher_derivatives_need_the_reference():
    logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([1, 3])
    assert torch.autograd.gradgradcheck(lambda x: tuple(logprob(x, targets, backend="torch")), logits)
    hessian = torch.func.hessian(lambda x: logprob(x, targets, backend="torch").logprobs.sum())(logits.detach())
    p = torch.softmax(logits.detach(), -1)
    close(hessian[0, :, 0], -(torch.diag(p[0]) - torch.outer(p[0], p[0])), 1e-12)

    assert torch.autograd.gradgradcheck(lambda x: tuple(logprob(x, targets)), logits), "float64 is the reference's"
    narrow = logits.detach().float().requires_grad_()
    out = logprob(narrow, targets)
    with pytest.raises(RuntimeError, match='backend="torch"'):
        torch.autograd.grad(out.logprobs.sum(), narrow, create_graph=True)
    with pytest.raises(RuntimeError, match='backend="torch"'):
        torch.func.grad(lambda x: logprob(x, targets).logprobs.sum())(narrow.detach())


def test_either_output_alone_has_its_gradient():
    logits = make_logits(5, 23)
    targets = make_targets(logits)
    leaf = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(logprob(leaf, targets).entropy.sum(), leaf)
    close(grad, oracle_gradient(logits, targets, np.zeros(5), np.ones(5)))
    (grad,) = torch.autograd.grad(logprob(leaf, targets).logprobs.sum(), leaf)
    close(grad, oracle_gradient(logits, targets, np.ones(5), np.zeros(5)))


def test_no_gradient_to_the_temperature():
    temperature = torch.ones(2, requires_grad=True)
    for backend in BACKENDS:
        logits = torch.randn(2, 4, requires_grad=True)
        out = logprob(logits, torch.tensor([0, 1]), temperature=temperature, **on(backend, logits))
        assert torch.autograd.grad(out.logprobs.sum(), temperature, allow_unused=True) == (None,)


# -- memory, strides, order, threads ----------------------------------------------------------------------------------


def test_inputs_are_not_modified_and_may_be_used_elsewhere():
    """The logits feed two ops in either order and a third reader; every result is as if it were alone."""
    logits = make_logits(6, 41, dtype=torch.float32)
    targets = make_targets(logits, ignored=0.2)
    leaf = logits.clone().requires_grad_()
    scaled = leaf * 1.5
    before = scaled.detach().clone()
    first = logprob(scaled, targets)
    other = torch.logsumexp(scaled, -1)
    second = logprob(scaled, targets, with_entropy=False)
    (first.logprobs + first.entropy + second.logprobs + other).sum().backward()
    assert_bitwise_equal("logits", scaled.detach(), before)
    p = torch.softmax(before.double(), -1)
    used = (targets != -100).double()
    expected = oracle_gradient(before, targets, 2 * used, used) + p.numpy()
    close(leaf.grad, 1.5 * expected, 3e-6)


def test_logits_modified_after_forward_are_an_error():
    leaf = torch.randn(2, 4, requires_grad=True)
    logits = leaf * 1
    out = logprob(logits, torch.tensor([0, 1]))
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.logprobs.sum().backward()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, :-1],
        lambda x: x[:, ::2, 1:],
        lambda x: x.transpose(1, 2)[..., :5],
    ],
    ids=["rows_swapped", "last_row_cut", "every_other_row_odd_offset", "column_stride"],
)
def test_strides(view, inplace):
    leaf = torch.randn(3, 6, 8, requires_grad=True)
    logits = view(leaf * 1)
    targets = make_targets(logits.detach(), ignored=0.2)
    up = torch.randn(2, *targets.shape)
    plain = logits.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    out = logprob(logits, targets, inplace_backward=inplace)
    (grad,) = torch.autograd.grad([out.logprobs, out.entropy], leaf, list(up))
    out2 = logprob(plain, targets)
    (grad2,) = torch.autograd.grad([out2.logprobs, out2.entropy], plain, list(up))
    expected = torch.autograd.grad(view(leaf * 1), leaf, grad2)[0]
    assert_bitwise_equal("logprobs", out.logprobs, out2.logprobs)
    assert_bitwise_equal("gradient", grad + 0.0, expected + 0.0)


def test_expanded_logits():
    leaf = torch.randn(1, 9, requires_grad=True)
    targets = torch.tensor([0, 4, 8])
    out = logprob(leaf.expand(3, 9), targets)
    out.logprobs.sum().backward()
    close(leaf.grad[0], oracle_gradient(leaf.detach().expand(3, 9), targets, np.ones(3), np.zeros(3)).sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inplace_backward(dtype):
    logits = make_logits(7, 29, dtype=dtype)
    targets = make_targets(logits, ignored=0.3)
    up = torch.randn(2, 7)
    expected = run(logits, targets, up[0], up[1])
    leaf = logits.clone().requires_grad_()
    work = leaf * 1
    seen = []
    work.register_hook(lambda g: seen.append(g.data_ptr()))
    out = logprob(work, targets, inplace_backward=True)
    torch.autograd.backward([out.logprobs, out.entropy], list(up), retain_graph=True)
    assert seen == [work.data_ptr()], "dlogits are in the logits' storage"
    assert_bitwise_equal("dlogits in the logits", work.detach(), expected[2])
    assert_bitwise_equal("gradient", leaf.grad, expected[2])
    with pytest.raises(RuntimeError, match="inplace_backward=True has no second backward"):
        torch.autograd.backward([out.logprobs, out.entropy], list(up))


def test_inplace_backward_does_not_corrupt_another_reader():
    """A reader that saved the logits gets autograd's error, not the gradient of something else."""
    work = torch.randn(3, 5, requires_grad=True) * 1
    out = logprob(work, torch.tensor([0, 1, 2]), inplace_backward=True)
    other = work.square().sum()
    out.logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(threads):
    logits = make_logits(7, 40001)
    targets = make_targets(logits)
    whole = run(logits, targets, 0.3, 0.1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (slice(0, 1), slice(3, 4), slice(2, 7), slice(0, 7)):
            part = run(logits[rows], targets[rows], 0.3, 0.1)
            for name, got, expected in zip(("logprobs", "entropy", "dlogits"), part, whole, strict=True):
                assert_bitwise_equal(name, got, expected[rows])
        masked = torch.where(torch.arange(7) % 2 == 0, targets, -100)
        part = run(logits, masked, 0.3, 0.1)
        for name, got, expected in zip(("logprobs", "entropy", "dlogits"), part, whole, strict=True):
            assert_bitwise_equal(name, got[::2], expected[::2])
    finally:
        torch.set_num_threads(before)


def test_backward_in_another_thread():
    leaf = torch.randn(3, 5, requires_grad=True)
    out = logprob(leaf, torch.tensor([0, 1, 2]))
    thread = threading.Thread(target=lambda: out.logprobs.sum().backward())
    thread.start()
    thread.join(30)
    close(leaf.grad, oracle_gradient(leaf.detach(), [0, 1, 2], np.ones(3), np.zeros(3)))


def test_70000_tokens():
    logits = torch.randn(70000, 3)
    targets = make_targets(logits)
    logprobs, entropy, _ = run(logits, targets)
    expected = oracle(logits, targets)
    close(logprobs, expected[0])
    close(entropy, expected[1])


@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_whole_and_equals_eager_with_ignored_rows(inplace):
    logits = make_logits(6, 33)
    targets = make_targets(logits, ignored=0.4)
    assert bool((targets == -100).any())

    def loss(x: Tensor) -> Tensor:
        out = logprob(x * 1, targets, softcap=5.0, temperature=0.8, inplace_backward=inplace)
        return out.logprobs.sum() + out.entropy.square().sum()

    eager, compiled = (logits.clone().requires_grad_() for _ in range(2))
    loss(eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(compiled).backward()
    assert_bitwise_equal("gradient", compiled.grad, eager.grad)


def test_shapes_without_values():
    """Under FakeTensorMode, which tools that plan memory use, nothing is looked at and nothing computed."""
    with FakeTensorMode():
        logits = torch.empty(3, 4, 1000, dtype=torch.bfloat16, requires_grad=True)
        out = logprob(logits, torch.empty(3, 4, dtype=torch.int64))
        assert out.logprobs.shape == out.entropy.shape == (3, 4) and out.logprobs.dtype == torch.float32
        (grad,) = torch.autograd.grad(out.logprobs.sum(), logits)
        assert grad.shape == logits.shape and grad.dtype == torch.bfloat16


def test_registered_ops_pass_opcheck():
    logits, targets = make_logits(4, 9), torch.tensor([0, -100, 3, 8])
    for backend in ("cpu", "torch"):
        options = (1.0, 5.0, -100, True, 0, 9, backend)
        ops = torch.ops.fastppo
        torch.library.opcheck(ops.logprob_stats, (logits, targets, None, *options))
        combine = (ops.logprob_stats(logits, targets, None, *options)[None], targets, None, 1.0, -100, True, backend)
        torch.library.opcheck(ops.logprob_combine, combine)
        kept = ops.logprob_combine(*combine)[2]
        for grads in ((torch.ones(4), torch.ones(4)), (torch.ones(4), None), (None, torch.ones(4))):
            backward = (logits, targets, None, kept, *grads, *options)
            torch.library.opcheck(ops.logprob_dlogits, backward)
            torch.library.opcheck(ops.logprob_dlogits_, (logits.clone(), *backward[1:]))


def test_unknown_target_without_checks_is_nan(monkeypatch):
    """What an accelerator does, where contents are not looked at."""
    monkeypatch.setattr("fastppo.ops._logprob_ops.contents_checked", lambda _: False)
    for backend in BACKENDS:
        logprobs, entropy, grad = run(torch.randn(3, 4), [1, 4, 2], 1.0, 1.0, backend=backend)
        assert logprobs.isnan().tolist() == [False, True, False]
        assert bool(entropy.isfinite().all())
        assert bool(grad[1].isnan().all()) and bool(grad[[0, 2]].isfinite().all())


# -- properties -------------------------------------------------------------------------------------------------------

rows = st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=5, max_size=5), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(rows, st.integers(0, 4), st.floats(0.05, 20), st.sampled_from([None, 0.5, 30.0]))
@example([[0.0, -14.5, -14.5, -14.5, -14.5]], 0, 1.0, None)
def test_properties(x, target, temperature, softcap):
    logits = torch.tensor(x)
    targets = torch.full((len(x),), target)
    logprobs, entropy, grad = run(logits, targets, 1.0, 1.0, temperature=temperature, softcap=softcap)
    assert bool((logprobs <= 0).all())
    assert bool((entropy >= 0).all()) and bool((entropy <= math.log(5) * (1 + 1e-6)).all())
    if softcap is None:
        # Absolute: log s is rounded to float32, so where s is nearly 1 a row's tiny gradients share an error of 6e-8.
        bound = 3e-6 / temperature * (1 + grad.double().abs().sum(-1))
        assert bool((grad.double().sum(-1).abs() <= bound).all())
    expected = oracle(logits, targets, temperature, softcap)
    scale = 1 + np.abs(logits.numpy()).max() / temperature
    close(logprobs, expected[0], 1e-6 * scale)
    if softcap is None:
        exact = (logits * 16).round() / 16
        for a, b in zip(run(exact, targets), run(exact + 4096, targets), strict=True):
            assert_bitwise_equal("shifted", b, a)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 3000), st.sampled_from(["normal", "flat", "peaked"]))
def test_logprob_is_never_positive(seed, vocab, kind):
    logits = make_logits(3, vocab, kind, seed=seed, dtype=torch.bfloat16) * 3
    logprobs, entropy, _ = run(logits, logits.float().argmax(-1))
    assert bool((logprobs <= 0).all()) and bool((entropy >= 0).all())
    close(reference(logits.double(), logits.float().argmax(-1))[0], logprobs.numpy(), 2e-6)


@pytest.mark.parametrize("view", [lambda x: x.view(6, 5), lambda x: x[0], lambda x: x[..., :-1]])
def test_in_place_backward_never_writes_into_a_leaf(view):
    leaf = torch.randn(2, 3, 5, requires_grad=True)
    logits = view(leaf)
    with pytest.raises(ValueError, match="logits must not be a leaf, nor a view of one"):
        logprob(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64), inplace_backward=True)


@pytest.mark.parametrize("rows", [1, 2, 5, 36])
def test_a_row_over_strided_columns_does_not_depend_on_its_neighbours(rows):
    logits = torch.randn(40, 3001).t().contiguous().t()
    targets = torch.arange(40)
    whole, part = (logprob(logits[:n], targets[:n]) for n in (40, rows))
    for a, b in zip(whole, part, strict=True):
        assert torch.equal(a[:rows], b)
