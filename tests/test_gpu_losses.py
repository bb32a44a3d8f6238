"""The losses' Triton kernels on a CUDA device: every option by the three-way rule, layouts, micro-batches, special
values, streams, graphs, torch.compile."""

import math

import pytest
import torch
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

import fastppo
from fastppo.kernels import tiles
from fastppo.ops.ppo_loss import KL_TYPES, LOSS_TYPES, ppo_loss
from fastppo.ops.value_loss import value_loss
from fastppo.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu

# Tails of tiles; no token, one, parts of a chunk, and a sequence of five chunks.
LENGTHS = [7, 1, 12, 0, 236, 1, 300, 16200, 5]
ON = {"device": "cuda", "lengths": LENGTHS}
EVERYTHING = CASES["gspo-nll-everything"]
# One of every way through the kernels; the interpreter has the whole grid.
OPTIONS = (
    *LOSS_TYPES, *(f"ppo-{how}" for how in list(AGGREGATIONS)[1:]), "gspo-seq_mean_token_mean",
    "gmpo-seq_mean_token_mean", *(f"kl-{kl}" for kl in KL_TYPES), "kl-k3-pathwise", "kl-measured", "entropy", "tis-ppo",
    "icepop-ppo", "seq_mask_tis-ppo", "seq_mask_tis-gspo", "dual_clip", "nll-counts", "gspo-nll-everything",
    "first_update",
)  # fmt: skip
TOKENS_ALONE = {**EVERYTHING, "loss_type": "ppo", "aggregation": "token_mean", "num_seqs": None}


def equal(got, expected):
    for name, a, b in zip(NAMES, got, expected, strict=False):
        assert_bitwise_equal(name, a.reshape(b.shape), b)


@pytest.mark.parametrize("options", [CASES[name] for name in OPTIONS], ids=OPTIONS)
def test_ppo_loss_is_no_worse_than_torch(options):
    assert_ppo_no_worse(inputs(**ON), "triton", **options)


@pytest.mark.parametrize("clip_eps", [None, 0.2])
@pytest.mark.parametrize("how", AGGREGATIONS)
def test_value_loss_is_no_worse_than_torch(how, clip_eps):
    assert_value_no_worse(inputs(**ON), "triton", aggregation=how, clip_eps=clip_eps, **AGGREGATIONS[how])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_inputs(dtype):
    batch = inputs(dtype, **ON)
    for options in (CASES["kl-k3"], EVERYTHING):
        assert_ppo_no_worse(batch, "triton", **options)
    assert_value_no_worse(batch, "triton", clip_eps=0.2)


@pytest.mark.sanitize
@pytest.mark.parametrize("options", [CASES["ppo"], TOKENS_ALONE, EVERYTHING, CASES["seq_mask_tis-ppo"]])
def test_a_small_shape_of_every_kernel(options):
    batch = inputs(lengths=[5, 0, 40, tiles.LOSS_CHUNK + 3], device="cuda")
    assert_ppo_no_worse(batch, "triton", **options)
    assert_value_no_worse(batch, "triton", clip_eps=0.2, aggregation="seq_mean_token_mean")


@pytest.mark.parametrize("tokens", [1, 15, 16, 1023, 4096, 600_000, 600_016])
def test_flat_lengths(tokens):
    """Below a vector, a tile's tail, whole tiles, more tiles than programs; with and without a length of 16."""
    batch = inputs(lengths=[tokens], device="cuda")
    options = {k: v for k, v in TOKENS_ALONE.items() if k != "num_seqs"}
    got, expected = (ppo(batch, packed=False, backend=backend, **options) for backend in ("triton", "torch"))
    for name, a, b in zip(NAMES, got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6 * float(b.abs().max()), msg=lambda m, name=name: name + m)


def test_no_tokens_at_all():
    for shape in ((0,), (0, 5), (3, 0)):
        x = torch.zeros(shape, device="cuda", requires_grad=True)
        out = ppo_loss(x, x.detach(), x.detach(), loss_type="ppo")
        out.loss.backward()
        assert float(out.loss) == 0 and not out.metrics.any() and x.grad.shape == shape
        assert float(value_loss(x, None, x.detach()).loss) == 0


@pytest.mark.parametrize("loss_type", ["ppo", "gmpo"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_and_packing_change_no_bit(layout, loss_type):
    batch = inputs(lengths=[301] * 5, device="cuda")
    options = {k: v for k, v in EVERYTHING.items() if k not in ("num_seqs", "loss_type", "dual_clip")}
    packed = ppo(batch, backend="triton", loss_type=loss_type, **options)
    shaped = {k: layout(v.view(5, 301)) if k != "cu_seqlens" else v for k, v in batch.items()}
    equal(ppo(shaped, packed=False, backend="triton", loss_type=loss_type, **options), packed)


def test_unaligned_inputs_change_no_bit():
    batch = inputs(lengths=[4096], device="cuda")
    shifted = {k: torch.cat((v[:1], v))[1:] for k, v in batch.items() if k != "cu_seqlens"}
    options = {k: v for k, v in TOKENS_ALONE.items() if k != "num_seqs"}
    equal(
        ppo(shifted, packed=False, backend="triton", **options), ppo(batch, packed=False, backend="triton", **options)
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_masks_of_any_dtype(dtype):
    batch = inputs(**ON)
    expected = ppo(batch, backend="triton", nll_mask="nll_mask", nll_coef=0.1)
    other = batch | {k: batch[k].to(dtype) * 2 for k in ("mask", "nll_mask")}
    equal(ppo(other, backend="triton", nll_mask="nll_mask", nll_coef=0.1), expected)


@pytest.mark.parametrize(
    ("loss_type", "how"),
    [("ppo", "token_mean"), ("gspo", "token_mean"), ("gmpo", "seq_mean_token_mean"), ("sapo", "token_sum_norm")],
)
def test_micro_batches_are_the_whole(how, loss_type):
    lengths = [40, 3, 0, tiles.LOSS_CHUNK + 5, 200]
    batch = inputs(lengths=lengths, device="cuda")
    counts = {"num_tokens": max(int(batch["mask"].sum()), 1), "num_seqs": torch.tensor(len(lengths), device="cuda")}
    options = dict(
        backend="triton", loss_type=loss_type, aggregation=how, ref_logprobs="ref_logprobs", kl_coef=0.1,
        **AGGREGATIONS[how], **counts,
    )  # fmt: skip
    whole = ppo(batch, **options)
    ends = batch["cu_seqlens"].tolist()
    parts = []
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        part = {k: v[start:end] for k, v in batch.items() if k != "cu_seqlens"}
        parts.append(ppo(part | {"cu_seqlens": torch.tensor([0, end - start], device="cuda")}, **options))
    losses = torch.stack([p[0] for p in parts]).double()
    assert float(losses.sum()) == pytest.approx(float(whole[0]), rel=1e-6, abs=1e-7 * float(losses.abs().sum()))
    torch.testing.assert_close(sum(p[1] for p in parts), whole[1], rtol=1e-9, atol=1e-9)
    assert_bitwise_equal("dlogprobs", torch.cat([p[2] for p in parts]), whole[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("tokens", [1, 15, 16384 + 16])
def test_backwards_kernel_gives_torchs_bits(tokens, dtype):
    kept = torch.randn(3, tokens, device="cuda") * 10 ** torch.linspace(-9, 6, tokens, device="cuda")
    scales, upstream = torch.tensor([0.37, -1.7e-3], device="cuda"), torch.tensor(1.9, device="cuda")
    factor, nll_factor = upstream * scales
    code = [torch.float32, torch.float16, torch.bfloat16].index(dtype)
    with_nll, entropy = torch.ops.fastppo.loss_grad(kept, scales, upstream, code, 0, "triton")
    assert_bitwise_equal("with nll", with_nll, (kept[0] * factor + kept[2] * nll_factor).to(dtype))
    assert_bitwise_equal("entropy", entropy, kept[1] * factor)
    nothing, got = torch.ops.fastppo.loss_grad(kept[:1], scales[:1], upstream, -1, code, "triton")
    assert_bitwise_equal("entropy alone", got, (kept[0] * factor).to(dtype))
    assert nothing.numel() == 0


# -- special values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [EVERYTHING, TOKENS_ALONE, CASES["seq_mask_tis-gspo"], CASES["gmpo"]])
def test_garbage_where_nothing_is_selected_reaches_nothing(options):
    batch = inputs(**ON)
    garbage = torch.tensor([math.nan, math.inf, -math.inf], device="cuda").repeat(len(batch["mask"]))
    dirty = {k: torch.where(batch["mask"], v, garbage[: len(v)]) if k in PPO_FIELDS else v for k, v in batch.items()}
    equal(ppo(dirty, backend="triton", **options), ppo(batch, backend="triton", **options))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "advantages", "ref_logprobs"])
def test_nan_of_a_selected_token_is_nan_in_loss_and_gradient(field, loss_type):
    if (field, loss_type) == ("old_logprobs", "reinforce"):
        pytest.skip("reinforce does not read old_logprobs")
    batch = inputs(lengths=[4, 3], device="cuda")
    batch["mask"][:] = True
    batch[field][1] = math.nan
    loss, _, grad = ppo(batch, backend="triton", loss_type=loss_type, ref_logprobs="ref_logprobs", kl_coef=0.1)
    assert bool(loss.isnan())
    assert bool(grad[:4].isnan().any()) and bool(grad[4:].isfinite().all())


@pytest.mark.parametrize("correction", ["tis", "icepop", "seq_mask_tis"])
def test_an_old_log_prob_of_nan_is_not_dropped_by_the_correction(correction):
    batch = inputs(lengths=[4, 3], device="cuda")
    batch["mask"][:] = True
    batch["old_logprobs"][1] = math.nan
    options = dict(is_correction=correction, rollout_logprobs="rollout_logprobs")
    loss, _, grad = ppo(batch, backend="triton", **options)
    assert bool(loss.isnan()) and bool(grad[1].isnan())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_log_ratio_of_100(loss_type, sign):
    logprobs = torch.full((2, 3), -50.0 + 50 * sign, device="cuda", requires_grad=True)
    old = torch.full((2, 3), -50.0 - 50 * sign, device="cuda")
    got, expected = (
        ppo_loss(logprobs, old, torch.ones_like(old), loss_type=loss_type, backend=backend)
        for backend in ("triton", "torch")
    )
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.metrics, expected.metrics, rtol=1e-6, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(x.loss, logprobs)[0] for x in (got, expected)), rtol=1e-6, atol=0)


def test_sums_are_not_of_float32():
    """2^24 + 1 is no float32: a running sum of ones there would stand still."""
    tokens = 2**24 + 64
    ones = torch.ones(tokens, device="cuda")
    out = ppo_loss(-ones, -ones, -ones, num_tokens=1)
    assert float(out.metrics[fastppo.PPO_METRICS.index("pg_loss")]) == tokens
    assert float(value_loss(ones * 3, None, ones, num_tokens=1).metrics[1]) == 2 * tokens


# -- device, streams, graphs, compiler --------------------------------------------------------------------------------


def calls():
    batch = inputs(lengths=[37, 1, 200, 64], device="cuda")
    counts = {"num_tokens": torch.tensor(300, device="cuda"), "num_seqs": torch.tensor(4.0)}
    return {
        "ppo": lambda: ppo(batch, backend="auto"),
        "everything": lambda: ppo(batch, backend="auto", **EVERYTHING),
        "seq_mask": lambda: ppo(batch, backend="auto", **CASES["seq_mask_tis-gspo"]),
        "counts": lambda: ppo(batch, backend="auto", aggregation="seq_mean_token_sum", **counts),
        "value": lambda: value(batch, backend="auto", clip_eps=0.2, aggregation="seq_mean_token_mean"),
    }


CALLS = ("ppo", "everything", "seq_mask", "counts", "value")


@pytest.mark.parametrize("name", CALLS)
def test_no_synchronisation_and_the_same_bits_twice(name):
    call = calls()[name]
    first = call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    equal(second, first)


@pytest.mark.parametrize("name", CALLS)
def test_captures_into_a_graph(name):
    call = calls()[name]
    expected = call()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for _ in range(2):
        for x in got:
            x.zero_()
        graph.replay()
        equal(got, expected)


def test_the_current_stream_is_taken():
    batch = inputs(lengths=[50000], device="cuda")
    expected = ppo(batch, packed=False, backend="triton")
    late = {k: torch.zeros_like(v) for k, v in batch.items()}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for k, v in batch.items():
            late[k].copy_(v)
        got = ppo(late, packed=False, backend="triton")
    stream.synchronize()
    equal(got, expected)


@pytest.mark.parametrize("options", [TOKENS_ALONE, EVERYTHING], ids=["tokens", "everything"])
def test_compiles_whole(options):
    batch = inputs(lengths=[5, 3, 40], device="cuda")

    def call(logprobs, entropy):
        given = {k: batch[v] if isinstance(v, str) and v in batch else v for k, v in options.items()}
        given |= {"entropy": entropy, "ent_coef": 0.1, "backend": "triton", "cu_seqlens": batch["cu_seqlens"]}
        return ppo_loss(logprobs, batch["old_logprobs"], batch["advantages"], mask=batch["mask"], **given)

    results = []
    for function in (call, torch.compile(call, fullgraph=True)):
        leaves = [batch[k].clone().requires_grad_() for k in ("logprobs", "entropy")]
        loss, metrics = function(*leaves)
        results.append((loss.detach(), metrics, *torch.autograd.grad(loss, leaves)))
    equal(results[1], results[0])


@pytest.mark.parametrize("grads", [(True, True), (False, False)], ids=str)
def test_registered_ops_pass_opcheck(grads):
    b = inputs(lengths=[5, 3], device="cuda")
    numbers = [0.2, 0.2, 0.0, 1.0, 1.05, 0.1, 0.1, 0.0, 2.0, 0.1, 1.0, -1.0, -1.0, -1.0]
    torch.library.opcheck(
        torch.ops.fastppo.ppo_loss,
        (b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"], b["entropy"], b["ref_logprobs"],
         b["rollout_logprobs"], b["nll_mask"], b["cu_seqlens"], torch.tensor(4), None, None, [0, 3, 0, 1, 1], numbers,
         *grads, "triton"),
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.fastppo.value_loss,
        (b["values"], b["old_values"], b["returns"], b["mask"], b["cu_seqlens"], None, torch.tensor(2.0), 1,
         [0.2, 1.0, -1.0, -1.0], grads[0], "triton"),
    )  # fmt: skip
    scales, upstream = torch.tensor([2.0, 3.0], device="cuda"), torch.tensor(0.5, device="cuda")
    for rows, codes in ((3, (2, 0)), (1, (-1, 1)), (2, (0, -1))):
        kept = torch.randn(rows, 5, device="cuda")
        torch.library.opcheck(torch.ops.fastppo.loss_grad, (kept, scales, upstream, *codes, "triton"))


@pytest.mark.timeout(300)
def test_more_than_2_to_the_31_tokens():
    """bfloat16, 2^31 + 20 tokens: addresses and counts do not fit 32 bits."""
    tokens = 2**31 + 20
    x = torch.full((tokens,), -1.0, dtype=torch.bfloat16, device="cuda")
    x[-1] = -2.0
    leaf = x.requires_grad_()
    out = value_loss(leaf, None, x.detach()[:1].expand(tokens).contiguous())
    (grad,) = torch.autograd.grad(out.loss * tokens, leaf)
    assert float(out.metrics[0]) == tokens and float(out.metrics[1]) == 0.5
    assert float(grad[-1]) == -1.0 and float(grad[:-1].abs().max()) == 0.0
