"""fastppo.ppo_loss and kl_divergence against formulas in numpy float64, numbers by hand and finite differences."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastppo.backends import KERNELS
from fastppo.metrics import PPO_METRICS, summarize
from fastppo.ops.logprob import logprob
from fastppo.ops.ppo_loss import KL_TYPES, LOSS_TYPES, kl_divergence, ppo_loss
from fastppo.testing import assert_bitwise_equal, make_logits, make_loss_inputs

INF, NAN = math.inf, math.nan
LENGTHS = [7, 1, 12, 4]
both_backends = pytest.mark.parametrize("backend", ["auto", "torch"])


@pytest.fixture(scope="module", params=["cpu", "torch"], autouse=True)
def kernel(request):
    """What "auto" takes: the kernel, or, as on a device without one, the formula whose gradients are kept."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setitem(KERNELS, "ppo_loss", {})
        yield request.param


def sequences_of(batch) -> list[np.ndarray]:
    """Indices of each sequence's selected tokens."""
    ends = batch.cu_seqlens.tolist()
    mask = batch.mask.numpy()
    return [np.arange(a, b)[mask[a:b]] for a, b in zip(ends[:-1], ends[1:], strict=True)]


def oracle(batch, loss_type="ppo", lo=0.2, hi=0.2, dual=None, tau=(1.0, 1.05), weight=None) -> np.ndarray:
    """w * pg per token, one token after another, from the papers' formulas; 0 where unselected."""
    logp, old, adv = (getattr(batch, k).double().numpy() for k in ("logprobs", "old_logprobs", "advantages"))
    weight = np.ones_like(logp) if weight is None else weight
    pg = np.zeros_like(logp)
    for tokens in sequences_of(batch):
        lr = logp[tokens] - old[tokens]
        if loss_type == "gmpo":
            lr = np.array([min(x, hi) if a >= 0 else max(x, -lo) for x, a in zip(lr, adv[tokens], strict=True)])
        if loss_type in ("gspo", "gmpo") and len(tokens):
            lr = np.full_like(lr, lr.mean())
        for t, x in zip(tokens, lr, strict=True):
            r, a = math.exp(min(max(x, -20.0), 20.0)), adv[t]
            clipped = min(max(r, 1 - lo), 1 + hi)
            if loss_type in ("ppo", "gspo"):
                pg[t] = -min(r * a, clipped * a)
                if dual is not None and a < 0:
                    pg[t] = min(pg[t], -a * dual)
            elif loss_type == "reinforce":
                pg[t] = -a * logp[t]
            elif loss_type == "cispo":
                pg[t] = -a * clipped * logp[t]
            elif loss_type == "gmpo":
                pg[t] = -a * r
            else:
                k = tau[0] if a > 0 else tau[1]
                pg[t] = -a * (4 / k) / (1 + math.exp(-k * (r - 1)))
            pg[t] *= weight[t]
    return pg


def aggregated(per_token: np.ndarray, batch, how: str, norm=None) -> float:
    sequences = [s for s in sequences_of(batch) if len(s)]
    if how == "token_mean":
        return per_token[batch.mask.numpy()].mean()
    if how == "seq_mean_token_mean":
        return float(np.mean([per_token[s].mean() for s in sequences]))
    total = float(np.sum([per_token[s].sum() for s in sequences]))
    return total / len(sequences) / (norm if how == "token_sum_norm" else 1)


def call(batch, **options: Any):
    """Loss, metrics and gradient of the log-probs."""
    leaf = batch.logprobs.clone().requires_grad_()
    out = ppo_loss(leaf, batch.old_logprobs, batch.advantages, mask=batch.mask, cu_seqlens=batch.cu_seqlens, **options)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return out.loss.detach(), out.metrics, grad


def one(logp, old, adv, **options: Any) -> tuple[float, float]:
    """Loss and gradient of a single token."""
    leaf = torch.tensor([float(logp)], requires_grad=True)
    out = ppo_loss(leaf, None if old is None else torch.tensor([float(old)]), torch.tensor([float(adv)]), **options)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return float(out.loss.detach()), float(grad)


# -- policy-gradient terms --------------------------------------------------------------------------------------------


@both_backends
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_equals_the_formula(backend, loss_type, aggregation):
    batch = make_loss_inputs(LENGTHS)
    norm = 50.0 if aggregation == "token_sum_norm" else None
    loss, metrics, _ = call(
        batch,
        loss_type=loss_type,
        clip_eps=0.1,
        clip_eps_high=0.25,
        aggregation=aggregation,
        norm=norm,
        backend=backend,
    )
    expected = oracle(batch, loss_type, 0.1, 0.25)
    assert float(loss) == pytest.approx(aggregated(expected, batch, aggregation, norm), rel=2e-6, abs=1e-7)
    sums = dict(zip(PPO_METRICS, metrics.tolist(), strict=True))
    assert sums["pg_loss"] == pytest.approx(expected.sum(), rel=2e-6, abs=1e-6)
    assert sums["tokens"] == batch.mask.sum() and sums["seqs"] == sum(len(s) > 0 for s in sequences_of(batch))


@both_backends
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"])
@pytest.mark.parametrize("loss_type", [t for t in LOSS_TYPES if t != "cispo"])
def test_gradient_equals_finite_differences_of_the_formula(backend, loss_type, aggregation):
    """Central differences of the numpy formula; cispo's coefficient is a stopped gradient and has its own test."""
    batch = make_loss_inputs(LENGTHS, dtype=torch.float64, seed=2)
    norm = 50.0 if aggregation == "token_sum_norm" else None
    _, _, grad = call(batch, loss_type=loss_type, aggregation=aggregation, norm=norm, backend=backend)
    step = 1e-6
    for t in range(len(batch.mask)):
        values = []
        for sign in (1, -1):
            moved = batch.logprobs.clone()
            moved[t] += sign * step
            values.append(aggregated(oracle(batch._replace(logprobs=moved), loss_type), batch, aggregation, norm))
        assert float(grad[t]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-8)


@both_backends
def test_cispo_gradient_is_the_detached_clipped_ratio(backend):
    batch = make_loss_inputs(LENGTHS, dtype=torch.float64)
    _, _, grad = call(batch, loss_type="cispo", backend=backend)
    ratio = (batch.logprobs - batch.old_logprobs).exp().clamp(0.8, 1.2)
    expected = torch.where(batch.mask, -batch.advantages * ratio, 0.0) / batch.mask.sum()
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


@both_backends
def test_gspo_gradient_with_unequal_advantages(backend):
    """Two tokens of one sequence, s = 1, A = [1, -3], token sum: each token's gradient is (1/2)(-1 + 3) = 1."""
    leaf = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -2.0]])
    out = ppo_loss(
        leaf, old, torch.tensor([[1.0, -3.0]]), loss_type="gspo", aggregation="seq_mean_token_sum", backend=backend
    )
    out.loss.backward()
    assert leaf.grad.tolist() == [[1.0, 1.0]]


@both_backends
def test_gmpo_by_hand(backend):
    """A = 1, log ratios [0.5, -0.1], bound 0.4: exp((0.4 - 0.1)/2); the bounded token has no gradient."""
    leaf = torch.tensor([[-0.5, -1.1]], requires_grad=True)
    out = ppo_loss(
        leaf, torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2), loss_type="gmpo", clip_eps=0.4, backend=backend
    )
    assert float(out.loss.detach()) == pytest.approx(-math.exp(0.15), rel=1e-6)
    out.loss.backward()
    assert leaf.grad[0].tolist() == pytest.approx([0.0, -math.exp(0.15) / 2], rel=1e-6)


@both_backends
def test_gmpo_bounds_a_zero_advantage_as_a_positive_one(backend):
    """A = [0, 1], log ratios [0.5, 0], bound 0.4: exp(0.4/2) on the second token."""
    leaf = torch.tensor([[-0.5, -1.0]], requires_grad=True)
    old, adv = torch.tensor([[-1.0, -1.0]]), torch.tensor([[0.0, 1.0]])
    out = ppo_loss(leaf, old, adv, loss_type="gmpo", clip_eps=0.4, aggregation="seq_mean_token_sum", backend=backend)
    assert out.loss.item() == pytest.approx(-math.exp(0.2), rel=1e-6)
    assert dict(zip(PPO_METRICS, out.metrics.tolist(), strict=True))["clip_high"] == 1
    out.loss.backward()
    assert leaf.grad[0].tolist() == pytest.approx([0.0, -math.exp(0.2) / 2], rel=1e-6)


@both_backends
def test_sapo_by_hand(backend):
    """At ratio 1 the gate is 2/tau with the policy gradient's slope -A; far away the slope vanishes."""
    assert one(-1, -1, 2, loss_type="sapo", backend=backend) == pytest.approx((-4.0, -2.0))
    assert one(-1, -1, -2, loss_type="sapo", backend=backend) == pytest.approx((4 / 1.05, 2.0))
    loss, grad = one(0, -5, 1, loss_type="sapo", backend=backend)
    assert loss == pytest.approx(-4.0) and abs(grad) < 1e-6


# Each row: logp - old, advantage, options, loss, gradient. Ratios are exact powers of e or of the clip bound.
CLIPS = {
    "ratio_1_is_a_tie": (0.0, 1.0, {}, -1.0, -1.0),
    "ratio_1_negative": (0.0, -2.0, {}, 2.0, 2.0),
    "clipped_high": (0.5, 1.0, {}, -1.2, 0.0),
    "not_clipped_low_at_positive": (-0.5, 1.0, {}, -math.exp(-0.5), -math.exp(-0.5)),
    "clipped_low": (-0.5, -1.0, {}, 0.8, 0.0),
    "not_clipped_high_at_negative": (0.5, -1.0, {}, math.exp(0.5), math.exp(0.5)),
    "asymmetric_high": (0.5, 1.0, {"clip_eps_high": 0.28}, -1.28, 0.0),
    "asymmetric_low": (-0.5, -1.0, {"clip_eps": 0.1, "clip_eps_high": 0.5}, 0.9, 0.0),
    "dual_clip": (math.log(10), -1.0, {"dual_clip": 3.0}, 3.0, 0.0),
    "dual_clip_not_reached": (math.log(2), -1.0, {"dual_clip": 3.0}, 2.0, 2.0),
    "dual_clip_leaves_positive_alone": (-3.0, 1.0, {"dual_clip": 3.0}, -math.exp(-3), -math.exp(-3)),
    "zero_advantage": (0.5, 0.0, {}, 0.0, 0.0),
}


@both_backends
@pytest.mark.parametrize("row", CLIPS.values(), ids=CLIPS)
def test_clipping_by_hand(backend, row):
    log_ratio, adv, options, loss, grad = row
    assert one(-1 + log_ratio, -1, adv, backend=backend, **options) == pytest.approx((loss, grad), rel=1e-6, abs=1e-12)


@both_backends
@pytest.mark.parametrize("adv", [1.0, -1.0])
def test_a_tie_at_the_clip_bound_takes_the_unclipped_gradient(backend, adv):
    """The ratio is made exactly 1 + eps (1 - eps): eps is read off the float32 ratio itself."""
    for log_ratio in (0.25, -0.25):
        ratio = torch.tensor(-1.0 + log_ratio).sub(-1.0).exp()
        eps = float(ratio.double() - 1)
        if (eps > 0) != (adv > 0):
            continue
        loss, grad = one(-1 + log_ratio, -1, adv, clip_eps=abs(eps), backend=backend)
        assert loss == grad == -adv * float(ratio)


@both_backends
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("loss_type", [t for t in LOSS_TYPES if t != "reinforce"])
def test_log_ratio_of_100_on_a_used_and_on_a_masked_token(backend, loss_type, sign):
    """TRL #3015: finite everywhere, gradient 0 at both, the third token as if it were alone."""
    leaf = torch.tensor([[-101.0], [-101.0], [-1.0]], requires_grad=True)
    old = leaf.detach() + torch.tensor([[-sign * 100.0], [-sign * 100.0], [0.0]])
    mask = torch.tensor([[1], [0], [1]])
    out = ppo_loss(leaf, old, -sign * torch.ones(3, 1), mask=mask, loss_type=loss_type, clip_eps=0.9, backend=backend)
    out.loss.backward()
    assert bool(out.loss.isfinite()) and bool(out.metrics.isfinite().all())
    assert leaf.grad[1] == 0
    if loss_type != "cispo":  # its gradient flows through logp, with the detached ratio clipped
        assert leaf.grad[0] == 0
    assert dict(zip(PPO_METRICS, out.metrics.tolist(), strict=True))["clamped"] == 1
    assert abs(float(leaf.grad[2])) == pytest.approx(0.5, rel=1e-6)


@both_backends
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_without_old_logprobs_the_ratio_is_one(backend, loss_type):
    batch = make_loss_inputs(LENGTHS)
    loss, metrics, grad = call(batch._replace(old_logprobs=None), loss_type=loss_type, backend=backend)
    same = call(batch._replace(old_logprobs=batch.logprobs), loss_type=loss_type, backend=backend)
    for name, got, expected in zip(("loss", "metrics", "grad"), (loss, metrics, grad), same, strict=True):
        assert_bitwise_equal(name, got, expected)
    sums = dict(zip(PPO_METRICS, metrics.tolist(), strict=True))
    assert sums["ratio"] == sums["ratio_sq"] == sums["tokens"]
    assert sums["clip_high"] == sums["clip_low"] == sums["ppo_kl"] == sums["clamped"] == 0
    if loss_type in ("ppo", "reinforce", "cispo", "sapo"):
        expected = torch.where(batch.mask, -batch.advantages, 0.0) / batch.mask.sum()
        torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-8)


# -- KL ---------------------------------------------------------------------------------------------------------------


@both_backends
@pytest.mark.parametrize(
    ("kl_type", "kl_grad", "value", "gradient"),
    [
        ("k1", "reverse", 0.5, 0.5),
        ("abs", "reverse", 0.5, 0.5),
        ("k2", "reverse", 0.125, 0.5),
        ("k3", "reverse", 0.10653066, 0.5),
        ("k2", "pathwise", 0.125, 0.5),
        ("k3", "pathwise", 0.10653066, 0.39346934),
    ],
)
def test_kl_in_the_loss_by_hand(backend, kl_type, kl_grad, value, gradient):
    """logp -1, ref -1.5."""
    got = one(
        -1, -1, 0, ref_logprobs=torch.tensor([-1.5]), kl_coef=2.0, kl_type=kl_type, kl_grad=kl_grad, backend=backend
    )
    assert got == pytest.approx((2 * value, 2 * gradient), rel=1e-6)


@both_backends
@pytest.mark.parametrize("kl_grad", ["reverse", "pathwise"])
@pytest.mark.parametrize("ref", [-51.0, 49.0])
def test_a_far_reference_is_clamped_without_gradient(backend, kl_grad, ref):
    for kl_type in ("k2", "k3"):
        options = {"ref_logprobs": torch.tensor([ref]), "kl_coef": 1.0, "kl_type": kl_type, "kl_grad": kl_grad}
        loss, grad = one(-1, -1, 0, backend=backend, **options)
        x = 20.0 if ref > 0 else -20.0
        assert loss == pytest.approx(x * x / 2 if kl_type == "k2" else math.expm1(x) - x, rel=1e-6)
        assert grad == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_has_no_cancellation(dtype):
    exponents = torch.linspace(-9, 1.2, 300, dtype=torch.float64)
    x = torch.cat((10**exponents, -(10**exponents))).to(dtype)
    got = kl_divergence(torch.zeros_like(x), x, "k3").double().numpy()
    wide = x.double().numpy()
    series = sum(np.clip(wide, -1, 1) ** n / math.factorial(n) for n in range(2, 25))
    exact = np.where(np.abs(wide) < 1, series, np.expm1(wide) - wide)
    assert float(np.abs(got / exact - 1).max()) < (5e-6 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("kl_type", KL_TYPES)
def test_kl_divergence(kl_type):
    logp = torch.tensor([-1.0, -2.0, -0.5, -60.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, -0.5, -1.0], requires_grad=True)
    kl = kl_divergence(logp, ref, kl_type)
    x = np.array([-0.5, 1.0, 0.0, 20.0])
    value = {"k1": -x, "abs": np.abs(x), "k2": x**2 / 2, "k3": np.expm1(x) - x}[kl_type]
    slope = {"k1": np.ones(4), "abs": -np.sign(x), "k2": -x, "k3": -np.expm1(x)}[kl_type]
    slope[3] = 0
    np.testing.assert_allclose(kl.detach().numpy(), value, rtol=1e-6)
    kl.sum().backward()
    np.testing.assert_allclose(logp.grad.numpy(), slope, rtol=1e-6)
    assert ref.grad is None
    assert kl_divergence(logp.double(), ref, kl_type).dtype == torch.float64
    assert kl_divergence(logp.bfloat16(), ref.half(), kl_type).dtype == torch.float32


# -- entropy, NLL, rollout correction ---------------------------------------------------------------------------------


@both_backends
def test_entropy_bonus_with_zero_advantages(backend):
    """TRL #6625: the entropy's gradient does not depend on the advantages."""
    entropy = torch.tensor([[0.5, 2.0, NAN]], requires_grad=True)
    logp = torch.full((1, 3), -1.0, requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    out = ppo_loss(logp, None, torch.zeros(1, 3), mask=mask, entropy=entropy, ent_coef=0.1, backend=backend)
    assert out.loss.item() == pytest.approx(-0.125)
    out.loss.backward()
    assert entropy.grad.tolist() == [[pytest.approx(-0.05), pytest.approx(-0.05), 0.0]]
    assert logp.grad.tolist() == [[0.0, 0.0, 0.0]]


@both_backends
def test_measured_only(backend):
    """With coefficient 0 a reference or entropy is in the metrics and changes neither loss nor gradient, NaN or not."""
    batch = make_loss_inputs(LENGTHS)
    plain = call(batch, backend=backend)
    measured = call(batch, entropy=batch.entropy, ref_logprobs=batch.ref_logprobs, backend=backend)
    assert_bitwise_equal("loss", measured[0], plain[0])
    assert_bitwise_equal("grad", measured[2], plain[2])
    sums = dict(zip(PPO_METRICS, measured[1].tolist(), strict=True))
    assert sums["entropy"] == pytest.approx(float(batch.entropy[batch.mask].sum()), rel=1e-6)
    x = (batch.ref_logprobs - batch.logprobs)[batch.mask].double()
    assert sums["kl"] == pytest.approx(float((torch.expm1(x) - x).sum()), rel=1e-5)
    poisoned = call(batch, ref_logprobs=torch.full_like(batch.logprobs, NAN), backend=backend)
    assert_bitwise_equal("grad", poisoned[2], plain[2])


@both_backends
def test_nll_is_a_token_mean_of_its_own(backend):
    logp = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, NAN, -16.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    nll_mask = torch.tensor([[1, 0, 1], [0, 1, 0]])
    common = {
        "mask": mask,
        "nll_coef": 0.5,
        "nll_mask": nll_mask,
        "aggregation": "seq_mean_token_sum",
        "backend": backend,
    }
    out = ppo_loss(logp, None, torch.zeros(2, 3), **common)
    assert out.loss.item() == pytest.approx(0.5 * (1 + 4) / 2)
    out.loss.backward()
    assert logp.grad.tolist() == [[-0.25, 0.0, -0.25], [0.0, 0.0, 0.0]]
    logp.grad = None
    out = ppo_loss(logp, None, torch.zeros(2, 3), num_nll_tokens=torch.tensor(10), **common)
    assert out.loss.item() == pytest.approx(0.25)
    out.loss.backward()
    assert logp.grad[0].tolist() == pytest.approx([-0.05, 0.0, -0.05])
    assert ppo_loss(logp, None, torch.zeros(2, 3), **{**common, "nll_mask": torch.zeros(2, 3)}).loss.item() == 0


def weights_by_hand(kind, bounds, log_weight, missing, tokens):
    w = np.exp(log_weight)
    if kind == "tis":
        return np.where(missing, 1.0, np.clip(w, *bounds))
    if kind == "icepop":
        return np.where(missing | ((w >= bounds[0]) & (w <= bounds[1])), np.where(missing, 1.0, w), 0.0)
    result = np.zeros_like(w)
    for s in tokens:
        known = s[~missing[s]]
        mean = math.exp(log_weight[known].mean()) if len(known) else 1.0
        result[s] = np.where(missing[s], 1.0, w[s]) if bounds[0] <= mean <= bounds[1] else 0.0
    return result


@both_backends
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        ("tis", None),
        ("tis", (0.9, 1.1)),
        ("icepop", None),
        ("icepop", (0.95, 1.05)),
        ("tis", (1.5, 3.0)),
        ("icepop", (1.5, 3.0)),
        ("seq_mask_tis", None),
        ("seq_mask_tis", (0.5, 2.0)),
    ],
)
def test_rollout_correction(backend, kind, bounds, loss_type):
    batch = make_loss_inputs(LENGTHS, dtype=torch.float64, spread=0.8)
    rollout = batch.rollout_logprobs.clone()
    rollout[0], rollout[9], rollout[10] = -INF, NAN, INF
    mask = batch.mask.clone()
    mask[0] = mask[9] = mask[10] = True
    mask[3] = False
    rollout[3] = NAN
    batch = batch._replace(mask=mask, rollout_logprobs=rollout)
    missing = (mask & ~rollout.isfinite()).numpy()
    log_weight = np.where(missing | ~mask.numpy(), 0.0, np.nan_to_num((batch.old_logprobs - rollout).numpy()))
    used = bounds or {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq_mask_tis": (0.999, 1.002)}[kind]
    weight = weights_by_hand(kind, used, log_weight, missing, sequences_of(batch))
    loss, metrics, grad = call(
        batch, loss_type=loss_type, rollout_logprobs=rollout, is_correction=kind, is_bounds=bounds, backend=backend
    )
    pg = oracle(batch, loss_type, weight=weight)
    assert float(loss) == pytest.approx(aggregated(pg, batch, "token_mean"), rel=1e-9)
    sums = dict(zip(PPO_METRICS, metrics.tolist(), strict=True))
    assert sums["is_missing"] == 3
    assert sums["is_weight"] == pytest.approx(weight[mask.numpy()].sum())
    if loss_type in ("ppo", "reinforce", "cispo", "sapo"):
        plain = call(batch, loss_type=loss_type, backend=backend)[2]
        torch.testing.assert_close(grad, plain * torch.from_numpy(weight), rtol=1e-9, atol=1e-15)


@both_backends
def test_missing_tokens_do_not_dilute_the_geometric_mean(backend):
    """Log weights [0.5, missing]: the mean is 0.5, not 0.25, so the first sequence is dropped and the second kept."""
    old = torch.full((2, 2), -1.0)
    rollout = torch.tensor([[-1.5, -INF], [-1.25, -1.25]])
    options = {"rollout_logprobs": rollout, "is_correction": "seq_mask_tis", "is_bounds": (0.7, 1.4)}
    out = ppo_loss(old, old, torch.ones(2, 2), aggregation="seq_mean_token_sum", backend=backend, **options)
    assert out.loss.item() == pytest.approx(-(0 + 0 + 2 * math.exp(0.25)) / 2)


@both_backends
def test_rollout_logprobs_are_read_only_for_a_correction(backend):
    batch = make_loss_inputs(LENGTHS)
    for got, expected in zip(
        call(batch, rollout_logprobs=torch.full_like(batch.logprobs, NAN), backend=backend),
        call(batch, backend=backend),
        strict=True,
    ):
        assert_bitwise_equal("with and without", got, expected)


# -- masks, counts, micro-batches -------------------------------------------------------------------------------------

EVERYTHING = {
    "entropy": "entropy",
    "ent_coef": 0.01,
    "ref_logprobs": "ref_logprobs",
    "kl_coef": 0.1,
    "rollout_logprobs": "rollout_logprobs",
    "is_correction": "tis",
    "nll_coef": 0.3,
}
FIELDS = ("logprobs", "old_logprobs", "advantages", "entropy", "ref_logprobs", "rollout_logprobs")


def everything(batch, **options: Any):
    """All terms at once; loss, metrics, gradients of log-probs and entropy."""
    leaf, entropy = batch.logprobs.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    arguments = {k: getattr(batch, v) if isinstance(v, str) and hasattr(batch, v) else v for k, v in EVERYTHING.items()}
    arguments |= {"entropy": entropy, "nll_mask": batch.advantages > 0.5, "mask": batch.mask} | options
    if leaf.dim() == 1:
        arguments["cu_seqlens"] = batch.cu_seqlens
    out = ppo_loss(leaf, batch.old_logprobs, batch.advantages, **arguments)
    grads = torch.autograd.grad(out.loss, (leaf, entropy))
    return out.loss.detach(), out.metrics, *grads


@both_backends
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_garbage_reaches_nothing(backend, loss_type, aggregation, garbage):
    batch = make_loss_inputs(LENGTHS)
    poison = {f: torch.where(batch.mask, getattr(batch, f), garbage) for f in FIELDS}
    options = {"loss_type": loss_type, "aggregation": aggregation, "backend": backend, "num_nll_tokens": 5}
    clean, dirty = everything(batch, **options), everything(batch._replace(**poison), **options)
    for name, got, expected in zip(("loss", "metrics", "logprobs", "entropy"), dirty, clean, strict=True):
        assert_bitwise_equal(name, got, expected)
    assert bool((dirty[2][~batch.mask] == 0).all()) and bool((dirty[3][~batch.mask] == 0).all())


@both_backends
def test_a_mask_selects_whatever_its_dtype(backend):
    batch = make_loss_inputs(LENGTHS)
    expected = call(batch, backend=backend)
    for mask in (batch.mask.long() * 3, batch.mask.float() * -0.25, batch.mask.to(torch.uint8), batch.mask.half()):
        for got, want in zip(call(batch._replace(mask=mask), backend=backend), expected, strict=True):
            assert_bitwise_equal(str(mask.dtype), got, want)


@both_backends
@pytest.mark.parametrize(
    "counts", [{}, {"num_tokens": 0, "num_seqs": 0}, {"num_tokens": torch.tensor(0.0), "num_seqs": torch.tensor(0)}]
)
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"])
def test_zero_valid_tokens(backend, aggregation, counts):
    batch = make_loss_inputs(LENGTHS)
    batch = batch._replace(mask=torch.zeros_like(batch.mask), logprobs=torch.full_like(batch.logprobs, NAN))
    norm = 8.0 if aggregation == "token_sum_norm" else None
    for loss_type in LOSS_TYPES:
        loss, metrics, *grads = everything(
            batch, loss_type=loss_type, aggregation=aggregation, norm=norm, backend=backend, **counts
        )
        assert float(loss) == 0 and bool((metrics == 0).all())
        assert all(bool((g == 0).all()) for g in grads)


@both_backends
def test_no_tokens_at_all(backend):
    empty = torch.zeros(0, requires_grad=True)
    out = ppo_loss(
        empty,
        torch.zeros(0),
        torch.zeros(0),
        cu_seqlens=torch.tensor([0]),
        aggregation="seq_mean_token_mean",
        backend=backend,
    )
    out.loss.backward()
    assert out.loss.item() == 0 and empty.grad.shape == (0,) and bool((out.metrics == 0).all())


@both_backends
def test_every_target_ignored(backend):
    """unsloth #7677, through logprob: loss 0, gradients 0."""
    logits = torch.randn(4, 9, requires_grad=True)
    targets = torch.full((4,), -100)
    out = logprob(logits, targets)
    loss = ppo_loss(
        out.logprobs, None, torch.ones(4), mask=targets != -100, entropy=out.entropy, ent_coef=0.1, backend=backend
    ).loss
    loss.backward()
    assert loss.item() == 0 and bool((logits.grad == 0).all())


@both_backends
def test_two_of_four_rows_ignored_divides_by_two(backend):
    """TE #2476."""
    logits = make_logits(4, 9)
    targets = torch.tensor([3, -100, 5, -100])
    logprobs = logprob(logits, targets).logprobs
    loss = ppo_loss(logprobs, None, torch.ones(4), mask=targets != -100, loss_type="reinforce", backend=backend).loss
    expected = torch.nn.functional.cross_entropy(logits.double(), targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize(
    "parts", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3], [0, 2], [1], [4]]], ids=["1", "2", "4_one_fully_masked"]
)
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches(loss_type, aggregation, parts, kind):
    """Loss to 1e-6, d loss/d logprobs bit for bit, however sequences are dealt out, packed or padded."""
    lengths = [*LENGTHS, 5]
    batch = make_loss_inputs(lengths)
    batch.mask[sum(LENGTHS) :] = False
    spans = list(zip(batch.cu_seqlens.tolist()[:-1], batch.cu_seqlens.tolist()[1:], strict=True))
    counts: dict[str, Any] = {
        "num_tokens": int(batch.mask.sum()),
        "num_seqs": len(LENGTHS),
        "num_nll_tokens": int((batch.mask & (batch.advantages > 0.5)).sum()),
    }
    if kind == "tensor":
        counts = {k: torch.tensor(v, dtype=torch.float64) for k, v in counts.items()}
    norm = 32.0 if aggregation == "token_sum_norm" else None
    options = {"loss_type": loss_type, "aggregation": aggregation, "norm": norm} | counts
    loss, metrics, grad, grad_entropy = everything(batch, **options)

    total, sums = 0.0, torch.zeros_like(metrics)
    for part in parts:
        tokens = torch.cat([torch.arange(*spans[i]) for i in part])
        piece = type(batch)(*(x[tokens] for x in batch[:-1]), torch.tensor([0, *(lengths[i] for i in part)]).cumsum(0))
        part_loss, part_metrics, part_grad, part_grad_entropy = everything(piece, **options)
        total += float(part_loss)
        sums += part_metrics
        assert_bitwise_equal("d loss/d logprobs", part_grad, grad[tokens])
        assert_bitwise_equal("d loss/d entropy", part_grad_entropy, grad_entropy[tokens])
    assert total == pytest.approx(float(loss), rel=1e-6, abs=1e-9)
    torch.testing.assert_close(sums, metrics, rtol=1e-12, atol=1e-9)

    width = max(lengths) + 3
    padded = {}
    for name, x in zip(batch._fields[:-1], batch[:-1], strict=True):
        padded[name] = torch.full((len(lengths), width), NAN if x.is_floating_point() else 0, dtype=x.dtype)
        for i, (a, b) in enumerate(spans):
            padded[name][i, : b - a] = x[a:b]
    padded_loss, padded_metrics, padded_grad, _ = everything(batch._replace(**padded), **options)
    assert float(padded_loss) == pytest.approx(float(loss), rel=1e-6, abs=1e-9)
    torch.testing.assert_close(padded_metrics, metrics, rtol=1e-12, atol=1e-9)
    assert_bitwise_equal(
        "padded d loss/d logprobs", torch.cat([padded_grad[i, : b - a] for i, (a, b) in enumerate(spans)]), grad
    )


def test_counts_default_to_this_call():
    batch = make_loss_inputs(LENGTHS)
    present = sum(len(s) > 0 for s in sequences_of(batch))
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum"):
        own = call(batch, aggregation=aggregation)
        given_ = call(batch, aggregation=aggregation, num_tokens=int(batch.mask.sum()), num_seqs=present)
        twice = call(batch, aggregation=aggregation, num_tokens=2 * int(batch.mask.sum()), num_seqs=2 * present)
        assert_bitwise_equal("loss", own[0], given_[0])
        assert_bitwise_equal("grad", own[2], given_[2])
        torch.testing.assert_close(twice[2] * 2, own[2])


def test_one_sequence_of_70000_tokens():
    """Liger #1294; gspo so that the sequence itself is summed."""
    batch = make_loss_inputs([70000], dtype=torch.float64)
    loss, _, _ = call(batch, loss_type="gspo")
    assert float(loss) == pytest.approx(aggregated(oracle(batch, "gspo"), batch, "token_mean"), rel=1e-9)


# -- autograd, dtypes, metrics ----------------------------------------------------------------------------------------


@both_backends
@pytest.mark.parametrize("loss_type", [t for t in LOSS_TYPES if t != "cispo"])
def test_gradcheck(backend, loss_type):
    """With pathwise KL and no correction every term is the derivative of what is returned."""
    batch = make_loss_inputs([3, 2], dtype=torch.float64, seed=4)

    def f(logp: Tensor, entropy: Tensor) -> Tensor:
        return ppo_loss(
            logp, batch.old_logprobs, batch.advantages, mask=batch.mask, loss_type=loss_type,
            entropy=entropy, ent_coef=0.1, ref_logprobs=batch.ref_logprobs, kl_coef=0.2, kl_grad="pathwise",
            nll_coef=0.5, nll_mask=batch.advantages > 0,
            cu_seqlens=batch.cu_seqlens, aggregation="seq_mean_token_mean", backend=backend,
        ).loss  # fmt: skip

    inputs = (batch.logprobs.requires_grad_(), batch.entropy.requires_grad_())
    assert torch.autograd.gradcheck(f, inputs)
    if backend == "torch":
        assert torch.autograd.gradgradcheck(f, inputs)


def test_both_backends_agree():
    batch = make_loss_inputs(LENGTHS, spread=0.8)
    for loss_type in LOSS_TYPES:
        options = {"loss_type": loss_type, "aggregation": "seq_mean_token_mean"}
        kept, plain = everything(batch, **options), everything(batch, backend="torch", **options)
        torch.testing.assert_close(kept[0], plain[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(kept[1], plain[1], rtol=1e-6, atol=1e-6)
        for name, got, expected in zip(("logprobs", "entropy"), kept[2:], plain[2:], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9, msg=name)


def test_second_derivatives_need_the_reference():
    leaf = torch.tensor([-1.0, -2.0], requires_grad=True)

    def f(x: Tensor, backend: str = "auto") -> Tensor:
        return ppo_loss(x, torch.tensor([-1.1, -2.0]), torch.ones(2), backend=backend).loss

    with pytest.raises(RuntimeError, match='ppo_loss .*backend="torch"'):
        torch.autograd.grad(f(leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match='ppo_loss .*backend="torch"'):
        torch.func.grad(f)(leaf.detach())
    (grad,) = torch.autograd.grad(f(leaf, "torch"), leaf, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), leaf)
    assert second.tolist() == pytest.approx([-math.exp(0.1) / 2, -0.5])


def test_gradients_go_to_logprobs_and_entropy_alone():
    batch = make_loss_inputs(LENGTHS)
    others = {f: getattr(batch, f).clone().requires_grad_() for f in FIELDS[1:] if f != "entropy"}
    for backend in ("auto", "torch"):
        leaf = batch.logprobs.clone().requires_grad_()
        out = ppo_loss(
            leaf, others["old_logprobs"], others["advantages"], ref_logprobs=others["ref_logprobs"], kl_coef=0.1,
            rollout_logprobs=others["rollout_logprobs"], is_correction="tis", backend=backend,
        )  # fmt: skip
        out.loss.backward()
        assert leaf.grad is not None and all(x.grad is None for x in others.values())
        assert not out.metrics.requires_grad


def test_upstream_gradient_and_no_grad():
    batch = make_loss_inputs(LENGTHS)
    leaf = batch.logprobs.clone().requires_grad_()
    loss = ppo_loss(leaf, batch.old_logprobs, batch.advantages).loss
    (plain,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * -4, leaf)
    assert_bitwise_equal("scaled", scaled, plain * -4)
    with torch.no_grad():
        out = ppo_loss(leaf, batch.old_logprobs, batch.advantages)
    assert_bitwise_equal("loss", out.loss, loss.detach())
    assert not out.loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype):
    batch = make_loss_inputs(LENGTHS)
    mixed = batch._replace(
        logprobs=batch.logprobs.to(dtype),
        advantages=batch.advantages.half(),
        old_logprobs=batch.old_logprobs.bfloat16(),
    )
    loss, metrics, grad = call(mixed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert loss.dtype == wide and metrics.dtype == torch.float64 and grad.dtype == dtype
    assert float(loss) == pytest.approx(aggregated(oracle(mixed), mixed, "token_mean"), rel=3e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_compiles_whole(loss_type):
    torch._dynamo.reset()  # one function compiled over and over reaches its limit
    batch = make_loss_inputs(LENGTHS)

    def f(x: Tensor) -> Tensor:
        out = ppo_loss(x, batch.old_logprobs, batch.advantages, mask=batch.mask, loss_type=loss_type,
                       cu_seqlens=batch.cu_seqlens, ref_logprobs=batch.ref_logprobs, kl_coef=0.1)  # fmt: skip
        return out.loss

    eager, compiled = (batch.logprobs.clone().requires_grad_() for _ in range(2))
    f(eager).backward()
    torch.compile(f, fullgraph=True, backend="aot_eager")(compiled).backward()
    torch.testing.assert_close(compiled.grad, eager.grad, rtol=1e-6, atol=1e-9)


def test_metrics_by_hand_and_their_summary():
    """Ratios e^0.5 (clipped, A > 0), 1, e^-0.5 (clipped, A < 0), 10 (dual-clipped); two sequences, a token masked."""
    logp = torch.tensor([[-1.0, -1.0, -2.0], [-1.0, NAN, -1.0]])
    old = torch.tensor([[-1.5, -1.0, -1.5], [-1 - math.log(10), 0.0, -1.0]])
    adv = torch.tensor([[1.0, 1.0, -1.0], [-1.0, 1.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    ref, entropy = logp - 0.5, torch.full((2, 3), 0.25)
    out = ppo_loss(logp, old, adv, mask=mask, dual_clip=3.0, ref_logprobs=ref, entropy=entropy)
    sums = dict(zip(PPO_METRICS, out.metrics.tolist(), strict=True))
    ratios = [math.exp(0.5), 1, math.exp(-0.5), 10, 1]
    assert sums == pytest.approx(
        {
            "tokens": 5, "seqs": 2, "pg_loss": -1.2 - 1 + 0.8 + 3 + 0, "kl": 5 * 0.10653066,
            "ppo_kl": -(0.5 + 0 - 0.5 + math.log(10) + 0), "entropy": 1.25,
            "clip_high": 1, "clip_low": 1, "dual_clip": 1, "clamped": 0, "ratio": sum(ratios),
            "ratio_sq": sum(r * r for r in ratios), "is_weight": 5, "is_missing": 0,
        },
        rel=1e-6,
    )  # fmt: skip
    assert summarize(out.metrics) == pytest.approx(
        {
            "actor/pg_loss": 0.32, "actor/kl_loss": 0.10653066, "actor/ppo_kl": -math.log(10) / 5,
            "actor/entropy": 0.25,
            "actor/pg_clipfrac": 0.4, "actor/pg_clipfrac_high": 0.2, "actor/pg_clipfrac_low": 0.2,
            "actor/pg_clipfrac_dual": 0.2, "actor/ratio_clamped_frac": 0.0, "actor/ratio_mean": float(np.mean(ratios)),
            "actor/ratio_std": float(np.std(ratios)), "actor/is_weight_mean": 1.0, "actor/is_missing_frac": 0.0,
        },
        rel=1e-6,
    )  # fmt: skip
    doubled = summarize(out.metrics + out.metrics)
    assert doubled == pytest.approx(summarize(out.metrics))
    assert all(math.isnan(v) for v in summarize(torch.zeros(len(PPO_METRICS))).values())


floats = st.floats(-30, 30, width=32)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(floats, floats, st.floats(-5, 5, width=32), st.booleans()), min_size=1, max_size=12),
    st.sampled_from(LOSS_TYPES),
)
def test_any_batch_equals_the_formula_and_its_micro_batches(tokens, loss_type):
    logp, old, adv, mask = (torch.tensor(x) for x in zip(*tokens, strict=True))
    batch = make_loss_inputs([1] * len(tokens))._replace(logprobs=logp, old_logprobs=old, advantages=adv, mask=mask)
    loss, metrics, grad = call(batch, loss_type=loss_type, num_tokens=7)
    expected = oracle(batch, loss_type)
    scale = np.abs(expected).sum() / 7
    # exp turns the float32 rounding of a log ratio of up to 20 into a relative error of its size.
    assert float(loss) == pytest.approx(expected.sum() / 7, abs=1e-12 + 5e-6 * scale)
    assert bool(grad.isfinite().all()) and bool((grad[~mask] == 0).all())
    for t in range(len(tokens)):
        single = batch._replace(
            **{f: getattr(batch, f)[t : t + 1] for f in batch._fields[:-1]}, cu_seqlens=torch.tensor([0, 1])
        )
        assert_bitwise_equal("token alone", call(single, loss_type=loss_type, num_tokens=7)[2], grad[t : t + 1])


def test_the_sequence_mask_takes_the_geometric_mean_of_the_weights_themselves():
    """Log weights 25 and -20 have the mean 2.5: the sequence is out, although single weights are bounded by e^20."""
    old, rollout = torch.zeros(2), torch.tensor([-25.0, 20.0])
    out = ppo_loss(
        old, old, torch.ones(2), rollout_logprobs=rollout, is_correction="seq_mask_tis", cu_seqlens=torch.tensor([0, 2])
    )
    assert out.loss.item() == 0.0


@pytest.mark.parametrize("name", ["old_logprobs", "advantages", "entropy", "ref_logprobs", "rollout_logprobs"])
def test_float64_of_any_input_is_kept(name):
    inputs = {key: torch.tensor([-1.0, -2.0]) for key in ("old_logprobs", "advantages")}
    inputs[name] = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    assert ppo_loss(torch.tensor([-1.0, -2.0]), **inputs).loss.dtype == torch.float64


def test_sapos_first_temperature_is_of_positive_advantages():
    """f(r) = 4/tau sigmoid(tau (r - 1)) at r = 2: tau 2 for A = 1, 0.5 for A = -1."""
    old = torch.zeros(2)
    out = ppo_loss(
        old + math.log(2), old, torch.tensor([1.0, -1.0]), loss_type="sapo", sapo_tau=(2.0, 0.5), num_tokens=1
    )
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    assert out.loss.item() == pytest.approx(-4 / 2 * sigmoid(2) + 4 / 0.5 * sigmoid(0.5), rel=1e-6)


@pytest.mark.parametrize("loss_type", ["cispo", "gmpo"])
def test_clip_metrics_of_the_other_losses(loss_type):
    """One ratio above the upper bound, one below the lower: cispo bounds the ratio, gmpo its logarithm."""
    logprobs = torch.tensor([2.0, 1.5, 0.5, 0.9]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    bounds = {"clip_eps": 0.2, "clip_eps_high": 0.9 if loss_type == "cispo" else 0.5}
    cu_seqlens = torch.tensor([0, 4])
    out = ppo_loss(logprobs, torch.zeros(4), advantages, loss_type=loss_type, cu_seqlens=cu_seqlens, **bounds)
    metrics = dict(zip(PPO_METRICS, out.metrics.tolist(), strict=True))
    assert (metrics["clip_high"], metrics["clip_low"]) == (1, 1)


def test_numpys_numbers_are_numbers():
    batch = make_loss_inputs(LENGTHS)
    plain = call(batch, clip_eps=0.25, sapo_tau=(1.0, 2.0), loss_type="sapo", num_tokens=9)
    numpys = call(
        batch,
        clip_eps=np.float32(0.25),
        sapo_tau=(np.float32(1), np.float64(2)),
        loss_type="sapo",
        num_tokens=np.int64(9),
    )
    for name, got, expected in zip(("loss", "metrics", "grad"), numpys, plain, strict=True):
        assert_bitwise_equal(name, got, expected)


@pytest.mark.parametrize("name", ["sapo_tau", "is_bounds"])
def test_a_number_in_the_place_of_a_pair(name):
    x = torch.zeros(3)
    with pytest.raises(TypeError, match=f"{name} must be \\(.*, got float"):
        ppo_loss(x, x, x, rollout_logprobs=x, is_correction="tis", **{name: 2.0})


@both_backends
def test_a_log_prob_of_minus_infinity_with_advantage_0(backend):
    """A clipped ratio times 0 is 0, for loss and gradient; 0 times an infinite log-prob, of reinforce, is NaN."""
    logp, old, adv = torch.tensor([-math.inf, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([0.0, 1.0])
    leaf = logp.requires_grad_()
    out = ppo_loss(leaf, old, adv, backend=backend)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    assert out.loss.item() == -0.5 and grad.tolist() == [0.0, -0.5]
    assert math.isnan(ppo_loss(leaf, old, adv, loss_type="reinforce", backend=backend).loss.item())


@both_backends
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_advantage_of_nan_is_seen_in_the_gradient(backend, loss_type):
    """A step is left out by its gradients: none may be silently 0."""
    leaf = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    out = ppo_loss(leaf, leaf.detach(), torch.tensor([[NAN, 1.0]]), loss_type=loss_type, backend=backend)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    assert math.isnan(out.loss.item()) and math.isnan(grad[0, 0].item())


@both_backends
@pytest.mark.parametrize("correction", ["tis", "icepop", "seq_mask_tis"])
def test_an_old_log_prob_of_nan_is_not_dropped_by_the_correction(backend, correction):
    """No bound tells whether it lies outside: a weight of 0 would hide it."""
    leaf = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[NAN, -2.0]])
    out = ppo_loss(
        leaf, old, torch.ones(1, 2), rollout_logprobs=leaf.detach(), is_correction=correction, backend=backend
    )
    (grad,) = torch.autograd.grad(out.loss, leaf)
    assert math.isnan(out.loss.item()) and math.isnan(grad[0, 0].item())


def test_views_that_are_negated_when_they_are_read():
    x, advantages = -torch.rand(6), torch.randn(6)
    expected = ppo_loss(x, x - 0.1, advantages).loss
    negated = torch.complex(torch.zeros(6), -advantages).conj().imag
    assert negated.is_neg()
    assert_bitwise_equal("loss", ppo_loss(x, x - 0.1, negated).loss, expected)


def test_options_remembered_are_checked_again_where_a_type_differs():
    x = torch.zeros(3)
    for good, bad in (((1.0, 1.05), (True, 1.05)), ([1.0, 1.05], [1.0, 0.0])):
        ppo_loss(x, x, x, loss_type="sapo", sapo_tau=good)
        with pytest.raises((TypeError, ValueError), match="sapo_tau"):
            ppo_loss(x, x, x, loss_type="sapo", sapo_tau=bad)
