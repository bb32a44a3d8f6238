"""The CPU kernels of ppo_loss and value_loss over every option by the three-way rule, and over layouts, dtypes, lengths
and threads bit for bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import (
    AGGREGATIONS,
    CASES,
    LAYOUTS,
    NAMES,
    PPO_FIELDS,
    assert_ppo_no_worse,
    assert_value_no_worse,
    inputs,
    ppo,
    value,
)
from torch import Tensor

from fastppo.metrics import PPO_METRICS
from fastppo.ops.ppo_loss import LOSS_TYPES, ppo_loss
from fastppo.ops.value_loss import value_loss
from fastppo.reference.ppo_loss import ppo_loss as ppo_reference
from fastppo.testing import assert_bitwise_equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_ppo_loss_is_no_worse_than_torch(options, dtype):
    assert_ppo_no_worse(inputs(dtype), "cpu", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("clip_eps", [None, 0.2])
@pytest.mark.parametrize("how", AGGREGATIONS)
def test_value_loss_is_no_worse_than_torch(how, clip_eps, dtype):
    assert_value_no_worse(inputs(dtype), "cpu", aggregation=how, clip_eps=clip_eps, **AGGREGATIONS[how])


# -- layouts, lengths, threads ----------------------------------------------------------------------------------------


def padded_batch(rows=5, columns=301):
    return inputs(lengths=[columns] * rows)


@pytest.mark.parametrize("loss_type", ["ppo", "gspo"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_and_packing_change_no_bit(layout, loss_type):
    batch = padded_batch()
    options = dict(
        loss_type=loss_type, ref_logprobs="ref_logprobs", kl_coef=0.1, entropy="entropy", ent_coef=0.1,
        rollout_logprobs="rollout_logprobs", is_correction="tis", aggregation="seq_mean_token_mean",
        nll_mask="nll_mask", nll_coef=0.1,
    )  # fmt: skip
    packed = ppo(batch, **options)
    shaped = {k: layout(v.view(5, 301)) if k != "cu_seqlens" else v for k, v in batch.items()}
    for name, a, b in zip(NAMES, ppo(shaped, packed=False, **options), packed, strict=True):
        assert_bitwise_equal(name, a.reshape(b.shape), b)


def test_expanded_inputs():
    batch = padded_batch()
    row = {k: v.view(5, 301)[:1].expand(5, 301) for k, v in batch.items() if k != "cu_seqlens"}
    plain = {k: v.contiguous() for k, v in row.items()}
    for name, a, b in zip(NAMES, ppo(row, packed=False), ppo(plain, packed=False), strict=False):
        assert_bitwise_equal(name, a, b)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16], ids=str)
def test_masks_of_any_dtype(dtype):
    batch = inputs()
    expected = ppo(batch, nll_mask="nll_mask", nll_coef=0.1)
    got = ppo(batch | {k: batch[k].to(dtype) * 2 for k in ("mask", "nll_mask")}, nll_mask="nll_mask", nll_coef=0.1)
    for name, a, b in zip(NAMES, got, expected, strict=False):
        assert_bitwise_equal(name, a, b)


@pytest.mark.parametrize("options", [CASES["gspo-nll-everything"], CASES["kl-k3"], CASES["seq_mask_tis-ppo"]])
def test_threads_change_no_bit(options):
    batch = inputs(lengths=[3000] * 25)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((*ppo(batch, **options), *value(batch, clip_eps=0.2)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert_bitwise_equal("threads", a, b)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.sampled_from(LOSS_TYPES),
    st.sampled_from(list(AGGREGATIONS)),
    st.integers(0, 2**31 - 1),
)
def test_micro_batches_are_the_whole(lengths, loss_type, how, seed):
    """Sequences apart, with the whole's counts: losses add up, and gradients are the same bit for bit."""
    batch = inputs(lengths=lengths, seed=seed)
    counts = {"num_tokens": max(int(batch["mask"].sum()), 1), "num_seqs": len(lengths)}
    options = dict(
        loss_type=loss_type, aggregation=how, ref_logprobs="ref_logprobs", kl_coef=0.1, **AGGREGATIONS[how], **counts
    )
    whole = ppo(batch, **options)
    ends = batch["cu_seqlens"].tolist()
    parts = []
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        part = {k: v[start:end] for k, v in batch.items() if k != "cu_seqlens"}
        parts.append(ppo(part | {"cu_seqlens": torch.tensor([0, end - start])}, **options))
    losses = torch.stack([p[0] for p in parts]).double()  # of either sign, and each rounded to float32
    assert float(losses.sum()) == pytest.approx(float(whole[0]), rel=1e-6, abs=1e-7 * float(losses.abs().sum()))
    torch.testing.assert_close(sum(p[1] for p in parts), whole[1], rtol=1e-9, atol=1e-9)
    assert_bitwise_equal("dlogprobs", torch.cat([p[2] for p in parts]), whole[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("tokens", [1, 15, 16384 + 3])
def test_backwards_kernel_gives_torchs_bits(tokens, dtype):
    """Large gradients are scaled by the kernel, small ones by torch: a token's must be the same in either."""
    kept = torch.randn(3, tokens) * 10 ** torch.linspace(-9, 6, tokens)
    scales, upstream = torch.tensor([0.37, -1.7e-3]), torch.tensor(1.9)
    factor, nll_factor = upstream * scales
    code = [torch.float32, torch.float16, torch.bfloat16].index(dtype)
    with_nll, entropy = torch.ops.fastppo.loss_grad(kept, scales, upstream, code, 0, "cpu")
    assert_bitwise_equal("with nll", with_nll, (kept[0] * factor + kept[2] * nll_factor).to(dtype))
    assert_bitwise_equal("entropy", entropy, kept[1] * factor)
    got, nothing = torch.ops.fastppo.loss_grad(kept[:1], scales[:1], upstream, code, -1, "cpu")
    assert_bitwise_equal("without", got, (kept[0] * factor).to(dtype))
    nothing, got = torch.ops.fastppo.loss_grad(kept[:1], scales[:1], upstream, -1, code, "cpu")
    assert_bitwise_equal("entropy alone", got, (kept[0] * factor).to(dtype))
    assert nothing.numel() == 0


def test_large_batches_are_their_parts():
    """70000 tokens, whose backward is the kernel's, against parts of 7000, whose backward is torch's."""
    batch = inputs(lengths=[7000] * 10)
    options = dict(entropy="entropy", ent_coef=0.1, nll_mask="nll_mask", nll_coef=0.2)
    counts = dict(num_tokens=50000, num_nll_tokens=17000)
    whole = ppo(batch, **options, **counts)
    parts = [
        ppo({k: v[s : s + 7000] for k, v in batch.items()}, packed=False, **options, **counts)
        for s in range(0, 70000, 7000)
    ]
    assert_bitwise_equal("dlogprobs", torch.cat([p[2] for p in parts]), whole[2])
    assert_bitwise_equal("dentropy", torch.cat([p[3] for p in parts]), whole[3])


# -- special values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["gspo", "gmpo"])
def test_a_sequences_ratio_is_clamped_too(loss_type):
    """gmpo's own bounds are on the token: only with bounds beyond 20 does its mean reach the clamp."""
    options = {"clip_eps": 30.0, "clip_eps_high": 30.0} if loss_type == "gmpo" else {}
    logprobs = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-26.0, -26.0], [-1.0, -1.0]])
    out = ppo_loss(logprobs, old, -torch.ones(2, 2), loss_type=loss_type, **options)
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    assert out.metrics[PPO_METRICS.index("clamped")] == 2
    assert bool((grad[0] == 0).all()) and bool((grad[1] != 0).all())
    assert float(out.loss) == pytest.approx((math.exp(20) + 1) / 2, rel=1e-6)


def test_a_weight_of_0_removes_an_infinite_loss():
    """icepop drops the token whose old log-prob is far from the rollout's, whatever its loss is."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    out = ppo_loss(
        logprobs, torch.tensor([-1.0, -2.0]), torch.tensor([math.inf, 1.0]), loss_type="reinforce",
        rollout_logprobs=torch.tensor([-9.0, -2.0]), is_correction="icepop",
    )  # fmt: skip
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    assert float(out.loss) == 1.0 and grad.tolist() == [0.0, -0.5]


def test_fractional_counts_below_one():
    out = ppo_loss(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.ones(1), num_tokens=0.25)
    assert float(out.loss) == -4.0
    assert float(ppo_loss(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.ones(1), num_tokens=0).loss) == 0.0


def test_sums_are_not_of_float32():
    """2^24 + 1 is no float32: a running sum of ones there would stand still."""
    tokens = 2**24 + 64
    ones = torch.ones(1).expand(tokens)
    out = ppo_loss(-ones, -ones, -ones, num_tokens=1)
    assert float(out.metrics[PPO_METRICS.index("pg_loss")]) == tokens
    assert float(value_loss(ones * 3, None, ones, num_tokens=1).metrics[1]) == 2 * tokens


def test_garbage_where_nothing_is_selected_reaches_nothing():
    batch = inputs()
    clean = ppo(batch, **CASES["gspo-nll-everything"])
    dirty = {
        k: torch.where(batch["mask"], v, torch.tensor([math.nan, math.inf, -math.inf]).repeat(len(v))[: len(v)])
        if k in PPO_FIELDS else v
        for k, v in batch.items()
    }  # fmt: skip
    for name, a, b in zip(NAMES, ppo(dirty, **CASES["gspo-nll-everything"]), clean, strict=True):
        assert_bitwise_equal(name, a, b)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "advantages", "ref_logprobs"])
@pytest.mark.parametrize("function", [ppo_loss, ppo_reference], ids=["cpu", "reference"])
def test_nan_of_a_selected_token_is_nan_in_loss_and_gradient(function, field, loss_type):
    """Never a gradient of 0: a trainer looks for what is not finite there, and would go on with the step."""
    if (field, loss_type) == ("old_logprobs", "reinforce"):
        pytest.skip("reinforce does not read old_logprobs")
    batch = inputs(lengths=[4, 3])
    batch["mask"][:] = True
    batch[field][1] = math.nan
    loss, _, grad = ppo(batch, function, loss_type=loss_type, ref_logprobs="ref_logprobs", kl_coef=0.1)
    assert bool(loss.isnan())
    assert bool(grad[:4].isnan().any()) and bool(grad[4:].isfinite().all())


# -- autograd and registration ----------------------------------------------------------------------------------------


def test_a_second_backward_gives_the_same_gradient_and_changes_no_input():
    batch = inputs()
    leaf = batch["logprobs"].clone().requires_grad_()
    before = {k: v.clone() for k, v in batch.items()}
    loss = ppo_loss(leaf, batch["old_logprobs"], batch["advantages"], mask=batch["mask"]).loss
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf)
    assert_bitwise_equal("second backward", second, first)
    for k, v in before.items():
        assert_bitwise_equal(k, batch[k], v)


def test_what_is_kept_for_backward():
    """One float32 gradient per token and input, and scalars."""
    kept: list[Tensor] = []
    batch = inputs()
    leaf = batch["logprobs"].clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ppo_loss(leaf, batch["old_logprobs"], batch["advantages"], mask=batch["mask"])
    assert sum(x.numel() for x in kept) <= leaf.numel() + 2


def test_autocast_leaves_the_inputs_as_they_are():
    batch = inputs()
    expected = ppo(batch)
    with torch.autocast("cpu", torch.bfloat16):
        got = ppo(batch)
    for name, a, b in zip(NAMES, got, expected, strict=False):
        assert_bitwise_equal(name, a, b)


@pytest.mark.parametrize("grads", [(True, True), (True, False), (False, False)], ids=str)
def test_registered_ops_pass_opcheck(grads):
    b = inputs(lengths=[5, 3])
    numbers = [0.2, 0.2, 0.0, 1.0, 1.05, 0.1, 0.1, 0.0, 2.0, 0.1, 1.0, -1.0, -1.0, -1.0]
    torch.library.opcheck(
        torch.ops.fastppo.ppo_loss,
        (b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"], b["entropy"], b["ref_logprobs"],
         b["rollout_logprobs"], b["nll_mask"], b["cu_seqlens"], torch.tensor(4), None, None, [0, 3, 0, 1, 1], numbers,
         *grads, "auto"),
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.fastppo.value_loss,
        (b["values"], b["old_values"], b["returns"], b["mask"], b["cu_seqlens"], None, torch.tensor(2.0), 1,
         [0.2, 1.0, -1.0, -1.0], grads[0], "auto"),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [int, float])
def test_counts_of_every_step_need_no_graph_of_their_own(kind):
    torch._dynamo.reset()
    b = inputs(lengths=[5, 3])
    graphs = []

    def backend(module, example):
        graphs.append(module)
        return module.forward

    @torch.compile(fullgraph=True, backend=backend)
    def loss(x: Tensor, tokens: float) -> Tensor:
        return ppo_loss(x, b["old_logprobs"], b["advantages"], mask=b["mask"], num_tokens=tokens, backend="cpu").loss

    for i in range(20):
        tokens = kind(100 + 3 * i)
        right = ppo_loss(b["logprobs"], b["old_logprobs"], b["advantages"], mask=b["mask"], num_tokens=tokens)
        torch.testing.assert_close(loss(b["logprobs"], tokens), right.loss)
    assert len(graphs) <= 2


def test_registered_backward_passes_opcheck():
    scales, upstream = torch.tensor([2.0, 3.0]), torch.tensor(0.5)
    for rows, codes in ((3, (2, 0)), (1, (-1, 1)), (2, (0, -1))):
        torch.library.opcheck(torch.ops.fastppo.loss_grad, (torch.randn(rows, 5), scales, upstream, *codes, "auto"))


@pytest.mark.parametrize("op", ["ppo", "value"])
def test_compiles_whole_through_the_kernel(op):
    b = inputs(lengths=[5, 3])

    def loss(x: Tensor) -> Tensor:
        if op == "value":
            return value_loss(x, b["old_values"], b["returns"], mask=b["mask"], clip_eps=0.2, backend="cpu").loss
        return ppo_loss(x, b["old_logprobs"], b["advantages"], mask=b["mask"], backend="cpu").loss

    start = b["values"] if op == "value" else b["logprobs"]
    eager, compiled = (start.clone().requires_grad_() for _ in range(2))
    loss(eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(compiled).backward()
    assert_bitwise_equal("gradient", compiled.grad, eager.grad)
