"""fastppo.linear_logprob against its definition in float64: values, every gradient, memory, and what is left out."""

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastppo
from fastppo import linear_logprob
from fastppo.ops import _linear
from fastppo.ops import linear_logprob as linear_logprob_module
from fastppo.reference.linear_logprob import linear_logprob as definition
from fastppo.testing import assert_bitwise_equal, assert_no_worse
from fastppo.vocab import combine_stats, merge_stats
from tests.linear import make_head, memory_of, small_chunks, small_columns

NAN = math.nan
MEMORY = ["save", "recompute"]
both_modes = pytest.mark.parametrize("memory", MEMORY)
NAMES = ("logprobs", "entropy", "dhidden", "dweight", "dbias")


def run(op, head, *, upstream=None, with_bias=True, **options):
    """logprobs, entropy, and the gradients of hidden, weight and bias."""
    leaves = [x.detach().clone().requires_grad_() for x in head[:3]]
    out = op(leaves[0], leaves[1], head.targets, bias=leaves[2] if with_bias else None, **options)
    if upstream is None:
        upstream = torch.randn(2, *head.targets.shape, generator=torch.Generator().manual_seed(1))
    outputs = [x for x in out if x is not None]
    wanted = leaves[: 3 if with_bias else 2]
    grads = torch.autograd.grad(outputs, wanted, [u.to(x.dtype) for u, x in zip(upstream, outputs, strict=False)])
    return [None if x is None else x.detach() for x in out] + list(grads)


def wide(head):
    return type(head)(*(x.double() for x in head[:3]), head.targets)


def check(*heads, sum_atol=None, **options):
    """The three-way rule for outputs and every gradient, over all the heads; `sum_atol` for sums over rows."""
    plain = {k: v for k, v in options.items() if k != "memory"}
    exact = {k: v for k, v in plain.items() if k != "logits_dtype"}
    got = [run(linear_logprob, head, **options) for head in heads]
    baseline = [run(definition, head, **plain) for head in heads]
    truth = [run(definition, wide(head), **exact) for head in heads]
    for i, name in enumerate(NAMES[: len(got[0])]):
        three = (torch.stack([result[i] for result in results]) for results in (got, baseline, truth))
        assert_no_worse(name, *three, atol=sum_atol if name in NAMES[3:] else None)


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 3.0},
    "both": {"softcap": 5.0, "temperature": 0.7},
    "per_token": {"temperature": torch.linspace(0.5, 2.0, 23)},
}


@both_modes
@pytest.mark.parametrize("rows_per_chunk", [5, 256], ids=["chunks", "one_chunk"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_no_worse_than_pytorch(monkeypatch, dtype, options, rows_per_chunk, memory):
    small_chunks(monkeypatch, rows_per_chunk)
    check(make_head(23, 61, dtype=dtype, ignored=0.2), memory=memory, **options)


# Rows: none, one (a chunk's smallest), a part of a chunk, several chunks. Columns: one, two, odd, and 257 = 256 + 1.
@both_modes
@pytest.mark.parametrize("vocab", [1, 2, 7, 257, 1000])
@pytest.mark.parametrize("rows", [0, 1, 3, 131])
def test_shapes(monkeypatch, rows, vocab, memory):
    small_chunks(monkeypatch, 32)
    # Small shapes are drawn again and again: of two elements the baseline may hit one by chance.
    heads = [make_head(rows, vocab, ignored=0.1, seed=seed) for seed in range(max(1, 128 // max(1, rows * vocab)))]
    # With few columns a weight's gradient is a sum of many terms near 1 that cancel: one rounding of each of them.
    sum_atol = torch.finfo(torch.float32).eps * max(rows, 1) ** 0.5
    check(*heads, memory=memory, sum_atol=sum_atol)
    check(*heads, memory=memory, sum_atol=sum_atol, with_bias=False)


@both_modes
def test_leading_dimensions_and_strides(memory):
    head = make_head(24, 13)
    shaped = type(head)(head.hidden.view(2, 3, 4, 8), *head[1:3], head.targets.view(2, 3, 4))
    upstream = torch.randn(2, 24)
    got = run(linear_logprob, shaped, upstream=upstream.view(2, 2, 3, 4), memory=memory)
    expected = run(linear_logprob, head, upstream=upstream, memory=memory)
    for name, a, b in zip(NAMES, got, expected, strict=True):
        assert_bitwise_equal(name, a.reshape(b.shape), b)
    assert got[0].shape == (2, 3, 4) and got[2].shape == (2, 3, 4, 8)
    strided = type(head)(head.hidden.t().contiguous().t(), head.weight.repeat(1, 2)[:, ::2], *head[2:])
    strided.weight.copy_(head.weight)
    for name, a, b in zip(NAMES, run(linear_logprob, strided, upstream=upstream, memory=memory), expected, strict=True):
        torch.testing.assert_close(a, b, msg=name)


@both_modes
def test_without_entropy_and_each_output_alone(memory):
    head = make_head(9, 31)
    full = run(linear_logprob, head, upstream=torch.tensor([[1.0], [0.0]]).expand(2, 9), memory=memory)
    none = run(linear_logprob, head, upstream=torch.ones(1, 9), memory=memory, with_entropy=False)
    assert none[1] is None
    for name, a, b in zip(NAMES, none, full, strict=True):
        if b is not None and a is not None:
            torch.testing.assert_close(a, b, msg=name)
    leaves = [x.clone().requires_grad_() for x in head[:2]]
    out = linear_logprob(*leaves, head.targets, memory=memory)
    (got,) = torch.autograd.grad(out.entropy.sum(), leaves[0])
    wide_hidden = head.hidden.double().requires_grad_()
    truth = definition(wide_hidden, head.weight.double(), head.targets)[1].sum()
    torch.testing.assert_close(got.double(), torch.autograd.grad(truth, wide_hidden)[0], rtol=1e-5, atol=1e-6)


def test_values_by_hand():
    """Two columns: logprob -log(1 + e^(z0 - z1)), and the gradient (1 - p) (w1 - w0) / T of the hidden state."""
    hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.0], [0.25, 0.5]])
    hidden.requires_grad_()
    out = linear_logprob(hidden, weight, torch.tensor([1]), bias=torch.tensor([0.0, 0.25]), temperature=0.5)
    z = (1.5 - 0.5) / 0.5
    p = 1 / (1 + math.exp(-z))
    assert out.logprobs.item() == pytest.approx(math.log(p), rel=1e-6)
    assert out.entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), rel=1e-6)
    (grad,) = torch.autograd.grad(out.logprobs.sum(), hidden)
    assert grad[0].tolist() == pytest.approx([(1 - p) * -0.25 / 0.5, (1 - p) * 0.5 / 0.5], rel=1e-5)


def test_softcap_before_temperature():
    out = linear_logprob(torch.tensor([[40.0]]), torch.tensor([[1.0], [0.0]]), torch.tensor([1]), softcap=30.0,
                         temperature=0.5)  # fmt: skip
    assert out.logprobs.item() == pytest.approx(-30 * math.tanh(40 / 30) / 0.5, rel=1e-6)  # -52.20


# -- rows that are left out -------------------------------------------------------------------------------------------


@both_modes
def test_ignored_rows_reach_nothing(memory):
    head = make_head(11, 19, ignored=0.4)
    ignored = head.targets == -100
    assert 0 < int(ignored.sum()) < 11
    clean = run(linear_logprob, head, memory=memory)
    dirty = type(head)(head.hidden.masked_fill(ignored[:, None], NAN), *head[1:])
    for name, a, b in zip(NAMES, run(linear_logprob, dirty, memory=memory), clean, strict=True):
        assert_bitwise_equal(name, a, b)
    assert bool((clean[0][ignored] == 0).all() and (clean[1][ignored] == 0).all() and (clean[2][ignored] == 0).all())
    kept = type(head)(head.hidden[~ignored], *head[1:3], head.targets[~ignored])
    upstream = torch.randn(2, 11, generator=torch.Generator().manual_seed(1))[:, ~ignored]
    for name, a, b in zip(NAMES, run(linear_logprob, kept, upstream=upstream, memory=memory), clean, strict=True):
        assert_bitwise_equal(name, a, b[~ignored] if name in NAMES[:3] else b)


@both_modes
def test_rows_without_upstream_reach_nothing(monkeypatch, memory):
    """Exactly zero upstream, NaN hidden states, and a chunk that has nothing else."""
    small_chunks(monkeypatch, 3)
    head = make_head(11, 19)
    upstream = torch.randn(2, 11)
    upstream[:, [0, 3, 4, 5, 10]] = 0
    used = (upstream != 0).any(0)
    dirty = type(head)(head.hidden.masked_fill(~used[:, None], NAN), *head[1:])
    got = run(linear_logprob, dirty, upstream=upstream, memory=memory)
    expected = run(linear_logprob, head, upstream=upstream, memory=memory)
    for name, a, b in zip(NAMES[2:], got[2:], expected[2:], strict=True):
        assert_bitwise_equal(name, a, b)
    assert bool((got[2][~used] == 0).all())
    truth = run(definition, wide(head), upstream=upstream)
    for name, a, b in zip(NAMES[2:], expected[2:], truth[2:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5, msg=name)


@both_modes
def test_left_out_rows_are_not_multiplied(monkeypatch, memory):
    seen = []
    add = _linear.Gradients.add
    monkeypatch.setattr(
        _linear.Gradients, "add", lambda self, z, *a, **k: (seen.append(z.shape[0]), add(self, z, *a, **k))
    )
    head = make_head(20, 7)
    head.targets[:8] = -100
    upstream = torch.ones(2, 20)
    upstream[:, 15:] = 0
    run(linear_logprob, head, upstream=upstream, memory=memory)
    assert seen == [7]


@both_modes
def test_everything_ignored(memory):
    head = make_head(4, 5)
    head.targets.fill_(-100)
    for name, x in zip(NAMES, run(linear_logprob, head, memory=memory), strict=True):
        assert bool((x == 0).all()), name


def test_frozen_parts_get_no_product_and_no_gradient(monkeypatch):
    head = make_head(9, 13)
    made = []
    original = _linear.Gradients._add_weight
    monkeypatch.setattr(_linear.Gradients, "_add_weight", lambda self, *a: (made.append(1), original(self, *a)))
    for memory in MEMORY:
        hidden = head.hidden.clone().requires_grad_()
        linear_logprob(hidden, head.weight, head.targets, bias=head.bias, memory=memory).logprobs.sum().backward()
        assert hidden.grad is not None and head.weight.grad is None and not made
        weight = head.weight.clone().requires_grad_()
        linear_logprob(head.hidden, weight, head.targets, memory=memory).logprobs.sum().backward()
        assert weight.grad is not None and len(made) == 1
        made.clear()


# -- chunks of columns ------------------------------------------------------------------------------------------------

cuts = pytest.mark.parametrize("rows, columns", [(5, 7), (23, 20), (8, 61), (4, 60)])


@cuts
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_columns_are_no_worse_than_pytorch(monkeypatch, options, rows, columns):
    small_columns(monkeypatch, rows, columns)
    check(make_head(23, 61, ignored=0.2), memory="recompute", **options)
    check(make_head(23, 61), memory="recompute", with_bias=False, **options)


@cuts
def test_columns_leave_out_what_rows_leave_out(monkeypatch, rows, columns):
    """Ignored rows, and rows without a gradient, that hold NaN; weight_grad_into; frozen parts."""
    head = make_head(23, 61, ignored=0.3)
    upstream = torch.randn(2, 23)
    upstream[:, ::4] = 0
    expected = run(linear_logprob, head, upstream=upstream, memory="recompute")
    small_columns(monkeypatch, rows, columns)
    dirty = head.hidden.masked_fill((head.targets == -100)[:, None], NAN)
    dirty[::4] = NAN
    got = run(linear_logprob, type(head)(dirty, *head[1:]), upstream=upstream, memory="recompute")
    live = torch.ones(23, dtype=torch.bool)
    live[::4] = False
    for name, a, b in zip(NAMES, got, expected, strict=True):
        if name in NAMES[:2]:
            a, b = a[live], b[live]
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, msg=name)

    def of(*needs, **options):
        leaves = [x.clone().requires_grad_(need) for x, need in zip(head[:3], needs, strict=True)]
        out = linear_logprob(*leaves[:2], head.targets, bias=leaves[2], memory="recompute", **options)
        ((out.logprobs * upstream[0]).sum() + (out.entropy * upstream[1]).sum()).backward()
        return [x.grad for x in leaves]

    assert torch.equal(of(True, False, False)[0], of(True, True, True)[0])
    into = torch.full((61, 8), 2.0)
    assert of(True, True, False, weight_grad_into=into)[1] is None
    torch.testing.assert_close(into - 2, expected[3], rtol=2e-5, atol=2e-5)


def test_merged_statistics_are_those_of_all_columns():
    """Chunks of a rank, one that holds no target, rows of -inf in one chunk or all."""
    logits = torch.randn(6, 40)
    logits[1, 10:20] = -torch.inf
    logits[2] = -torch.inf
    targets = torch.tensor([0, 12, 3, 39, 25, 10])
    parts = torch.stack([
        torch.ops.fastppo.logprob_stats(logits[:, c : c + 10].contiguous(), targets, None, 0.7, None, -100, True, c, 10,
                                        "torch") for c in range(0, 40, 10)
    ])  # fmt: skip
    halves = torch.stack([merge_stats(parts[:2], 0.7), merge_stats(parts[2:], 0.7)])
    assert halves.dtype == parts.dtype and bool((halves[:, 2, 0] == -torch.inf).all())
    torch.testing.assert_close(combine_stats(halves, 0.7), combine_stats(parts, 0.7), rtol=1e-6, atol=1e-6,
                               equal_nan=True)  # fmt: skip


# -- memory, modes, dtypes --------------------------------------------------------------------------------------------


def test_auto_says_once_what_it_chose(monkeypatch, caplog):
    linear_logprob_module._say_choice.cache_clear()
    caplog.set_level("INFO", logger="fastppo")
    head = make_head(8, 300)
    for limit in ("100", "100", "100000", "100000"):
        monkeypatch.setenv("FASTPPO_SAVE_LIMIT", limit)
        run(linear_logprob, head)
        run(linear_logprob, head, memory="save")
    assert [record.getMessage() for record in caplog.records] == [
        f"linear_logprob, memory='auto': logits {what} FASTPPO_SAVE_LIMIT, {limit} bytes"
        for what, limit in (("are not kept, four products: they exceed", 100),
                            ("are kept, three products: they fit in", 100000))
    ]  # fmt: skip


@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_no_rows_give_gradients_of_zero(monkeypatch, cut):
    if cut == "columns":
        small_columns(monkeypatch, 7, 100)
    head = make_head(0, 300)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        grads = run(linear_logprob, head, upstream=torch.zeros(2, 0), memory="recompute")[2:]
    finally:
        torch.use_deterministic_algorithms(before)
    assert grads[0].shape == head.hidden.shape and all(bool((x == 0).all()) for x in grads[1:])


@pytest.mark.parametrize("wanted", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_compacted_rows_stay_or_come_from_the_end(wanted):
    torch.manual_seed(int(10 * wanted))
    for rows in (1, 2, 7, 300):
        live = torch.rand(rows) < wanted
        order, count = _linear.compacted(live)
        assert order.shape == live.shape and int(count) == int(live.sum())
        kept = order[:count]
        assert kept.sort().values.tolist() == live.nonzero()[:, 0].tolist()
        stays = kept == torch.arange(count)
        assert (kept[~stays] >= count).all() and (stays == live[:count]).all()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_dlogits_of_compacted_rows(backend):
    """Those of the rows alone, bit for bit, written over the first; the rest is left as it was."""
    torch.manual_seed(0)
    logits, live = torch.randn(9, 300), torch.tensor([0, 1, 0, 0, 1, 1, 0, 1, 1], dtype=torch.bool)
    targets = torch.randint(300, (9,))
    kept, upstream = torch.rand(9, 4) * torch.tensor([1.0, 30.0, -3.0, -2.0]), torch.randn(9, 2)
    order, count = _linear.compacted(live)
    source = order[:count]
    assert source.tolist() == [8, 1, 7, 5, 4]
    options = (1.0, None, -100, True, 0, 300, backend)
    per_row = targets[source], None, kept[source], *upstream[source].unbind(1)
    expected = torch.ops.fastppo.logprob_dlogits(logits[source], *per_row, *options)
    written = logits.clone()
    torch.ops.fastppo.logprob_dlogits_(written, *per_row, *options, source)
    assert_bitwise_equal("dlogits", written[:5], expected)
    assert_bitwise_equal("rest", written[5:], logits[5:])


def test_recompute_rounds_as_forward_did(monkeypatch):
    """Large bfloat16 logits: were they rounded otherwise in backward, rows of dlogits would not sum to 0."""
    small_chunks(monkeypatch, 7)
    head = make_head(40, 300, dtype=torch.bfloat16)
    head = type(head)(head.hidden * 8, *head[1:])
    upstream = torch.stack((torch.ones(40), torch.zeros(40)))
    upstream[0, ::3] = 0  # left-out rows must not shift what the others are multiplied with
    seen = []
    original = _linear.write_dlogits

    def record(block, *rest):
        dlogits = original(block, *rest)
        seen.append(dlogits.clone())
        return dlogits

    monkeypatch.setattr("fastppo.ops._linear_logprob_ops.write_dlogits", record)
    results = {}
    for memory in MEMORY:
        seen.clear()
        run(linear_logprob, head, upstream=upstream, memory=memory)
        results[memory] = torch.cat(seen)
    for memory, dlogits in results.items():
        total = dlogits.double().sum(-1).abs()
        assert bool((total <= torch.finfo(torch.bfloat16).eps * dlogits.double().abs().sum(-1)).all()), memory
    # The same rows, in an order that depends on the chunks.
    weights = torch.rand(300, dtype=torch.float64)
    ordered = {memory: x[(x.double() @ weights).argsort()] for memory, x in results.items()}
    assert_bitwise_equal("dlogits", ordered["recompute"], ordered["save"])


def test_auto_saves_below_the_limit(monkeypatch):
    head = make_head(16, 32)
    leaf = head.hidden.clone().requires_grad_()

    def second_backward_raises() -> bool:
        loss = linear_logprob(leaf, head.weight, head.targets).logprobs.sum()
        loss.backward(retain_graph=True)
        try:
            loss.backward()
        except RuntimeError as error:
            assert "memory='save' has no second backward" in str(error)
            return True
        return False

    assert second_backward_raises()
    monkeypatch.setenv("FASTPPO_SAVE_LIMIT", str(16 * 32 * 4))
    assert second_backward_raises()
    monkeypatch.setenv("FASTPPO_SAVE_LIMIT", str(16 * 32 * 4 - 1))
    assert not second_backward_raises()


def test_recompute_has_a_second_backward():
    head = make_head(6, 11)
    leaf = head.hidden.clone().requires_grad_()
    loss = linear_logprob(leaf, head.weight, head.targets, memory="recompute").logprobs.sum()
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert_bitwise_equal("second", second, first)


def test_memory_held():
    """recompute and no_grad never hold the logits; save holds them once, its gradient in their place."""
    head = make_head(3000, 5000)
    logits = 3000 * 5000 * 4
    hidden, weight = (x.clone().requires_grad_() for x in head[:2])

    def step(**options):
        def call():
            out = linear_logprob(hidden, weight, head.targets, **options)
            if out.logprobs.requires_grad:
                (out.logprobs.sum() + out.entropy.sum()).backward()

        return memory_of(call)

    saved, recomputed = step(memory="save"), step(memory="recompute")
    with torch.no_grad():
        scored = step()
    assert saved.largest == logits and saved.peak < 1.4 * logits
    assert recomputed.largest < 0.6 * logits and recomputed.peak < 0.9 * logits
    assert scored.largest < 0.6 * logits and scored.peak < 0.9 * logits
    plain = memory_of(lambda: definition(hidden, weight, head.targets)[0].sum().backward())
    assert plain.largest >= logits and plain.peak > 2 * logits


@both_modes
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_dtype(monkeypatch, dtype, logits_dtype, memory):
    small_chunks(monkeypatch, 7)
    head = make_head(20, 61, dtype=dtype)
    check(head, memory=memory, logits_dtype=logits_dtype)
    got = run(linear_logprob, head, memory=memory, logits_dtype=logits_dtype)
    assert [x.dtype for x in got] == [torch.float32] * 2 + [dtype] * 3


def test_float32_logits_of_half_inputs_are_exact_logits():
    head = make_head(20, 61, dtype=torch.bfloat16)
    exact = definition(*wide(head)[:2], head.targets)[0]
    error = {
        d: float((linear_logprob(*head[:2], head.targets, logits_dtype=d).logprobs - exact).abs().max())
        for d in (None, torch.float32)
    }
    assert error[torch.float32] < 2e-6 < 1e-3 < error[None]


def test_mixed_dtypes():
    head = make_head(12, 17)
    mixed = type(head)(head.hidden.bfloat16(), head.weight, head.bias.half(), head.targets)
    got, truth = run(linear_logprob, mixed), run(definition, wide(mixed))
    assert [x.dtype for x in got[2:]] == [torch.bfloat16, torch.float32, torch.float16]
    for name, a, b in zip(NAMES, got, truth, strict=True):
        eps = torch.finfo(a.dtype).eps
        torch.testing.assert_close(a.double(), b, rtol=4 * max(eps, 1e-6), atol=8 * eps, msg=name)


@both_modes
def test_autocast_reads_in_its_dtype_and_gradients_keep_their_own(memory):
    head = make_head(12, 17)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(linear_logprob, head, memory=memory)
    rounded = type(head)(*(x.bfloat16() for x in head[:3]), head.targets)
    expected = run(linear_logprob, rounded, memory=memory)
    assert [x.dtype for x in got] == [torch.float32] * 5
    for name, a, b in zip(NAMES, got, expected, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=2**-8, atol=2**-8, msg=name)
    assert_bitwise_equal("logprobs", got[0], expected[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = run(linear_logprob, head, backend="torch")
    assert_no_worse("logprobs", got[0], plain[0], run(definition, wide(head))[0])


@both_modes
def test_weight_grad_into_is_added_to(monkeypatch, memory):
    small_chunks(monkeypatch, 4)
    for dtype in (torch.float32, torch.bfloat16):
        head = make_head(14, 9, dtype=dtype)
        expected = run(linear_logprob, head, upstream=torch.ones(2, 14), memory=memory, with_bias=False)[3]
        hidden, weight = (x.clone().requires_grad_() for x in head[:2])
        into = torch.full((9, 8), 2.0)
        out = linear_logprob(hidden, weight, head.targets, memory=memory, weight_grad_into=into)
        (out.logprobs.sum() + out.entropy.sum()).backward()
        assert weight.grad is None and hidden.grad is not None
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(into - 2, expected.float(), rtol=tolerance, atol=tolerance)
        linear_logprob(hidden, head.weight, head.targets, weight_grad_into=into.fill_(0)).logprobs.sum().backward()
        assert bool((into == 0).all()), "nothing is added for a frozen weight"


@both_modes
def test_micro_batches_add_up_to_the_whole(memory):
    head = make_head(30, 41)
    upstream = torch.randn(2, 30)
    whole = run(linear_logprob, head, upstream=upstream, memory=memory)
    parts = [
        run(
            linear_logprob,
            type(head)(head.hidden[p], *head[1:3], head.targets[p]),
            upstream=upstream[:, p],
            memory=memory,
        )
        for p in (slice(0, 1), slice(1, 18), slice(18, 30))
    ]
    for i, name in enumerate(NAMES):
        got = torch.cat([p[i] for p in parts]) if i < 3 else sum(p[i] for p in parts)
        torch.testing.assert_close(got, whole[i], rtol=2e-5, atol=2e-5, msg=name)


# -- autograd ---------------------------------------------------------------------------------------------------------


def test_float64_is_the_reference():
    head = wide(make_head(5, 7))
    inputs = [x.clone().requires_grad_() for x in head[:3]]

    def f(hidden, weight, bias):
        out = linear_logprob(hidden, weight, head.targets, bias=bias, softcap=2.0, temperature=0.7)
        return out.logprobs, out.entropy

    assert f(*inputs)[0].dtype == torch.float64
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


@both_modes
def test_second_derivatives_are_refused(memory):
    head = make_head(3, 5)
    hidden = head.hidden.clone().requires_grad_()
    out = linear_logprob(hidden, head.weight, head.targets, memory=memory)
    with pytest.raises(RuntimeError, match='linear_logprob has no second derivative.*backend="torch"'):
        torch.autograd.grad(out.logprobs.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match='backend="torch"'):
        torch.func.grad(lambda x: linear_logprob(x, head.weight, head.targets, memory=memory).logprobs.sum())(
            head.hidden
        )
    out = linear_logprob(hidden, head.weight, head.targets, backend="torch")
    (first,) = torch.autograd.grad(out.logprobs.sum(), hidden, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), hidden)[0].abs().max() > 0


def test_backward_in_another_thread():
    head = make_head(5, 7)
    expected = run(linear_logprob, head, upstream=torch.ones(2, 5))
    hidden = head.hidden.clone().requires_grad_()
    out = linear_logprob(hidden, head.weight, head.targets, bias=head.bias)
    thread = threading.Thread(target=lambda: (out.logprobs.sum() + out.entropy.sum()).backward())
    thread.start()
    thread.join(30)
    assert_bitwise_equal("dhidden", hidden.grad, expected[2])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_do_not_depend_on_threads(threads):
    head = make_head(300, 700, 16, ignored=0.2)
    expected = run(linear_logprob, head)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = run(linear_logprob, head)
    finally:
        torch.set_num_threads(before)
    for name, a, b in zip(NAMES, got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=name)  # the products are torch's own


@both_modes
def test_compiles_whole_and_equals_eager_with_ignored_rows(memory):
    head = make_head(9, 33, ignored=0.4)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = linear_logprob(hidden, weight, head.targets, bias=bias, softcap=5.0, temperature=0.8, memory=memory)
        return out.logprobs.sum() + out.entropy.square().sum()

    eager, compiled = ([x.clone().requires_grad_() for x in head[:3]] for _ in range(2))
    loss(*eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*compiled).backward()
    for name, a, b in zip(NAMES[2:], compiled, eager, strict=True):
        assert_bitwise_equal(name, a.grad, b.grad)


@both_modes
def test_compiles_under_autocast_with_auto_memory(memory):
    head = make_head(9, 33)

    def score(hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear_logprob(hidden, head.weight, head.targets).logprobs

    leaf = head.hidden.clone().requires_grad_()
    assert_bitwise_equal("logprobs", torch.compile(score, fullgraph=True, backend="aot_eager")(leaf), score(leaf))


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("per_row", [True, False])
def test_registered_ops_pass_opcheck(save, per_row):
    head = make_head(5, 9)
    temperature = torch.linspace(0.5, 1, 5) if per_row else None
    options = (1.0, 5.0, -100, True, 0, 9, "auto", torch.float32, torch.float32)
    inputs = (*head[:3], head.targets, temperature)
    stats, logits = torch.ops.fastppo.linear_logprob_stats(*inputs, save, *options)
    torch.library.opcheck(torch.ops.fastppo.linear_logprob_stats, (*inputs, save, *options))
    tail = (stats, torch.ones(5, 2))
    for into, needs in ((None, [True, True, True]), (torch.zeros(9, 8), [False, True, False])):
        arguments = (*inputs, logits if save else None, *tail, into, needs, False, *options)
        torch.library.opcheck(torch.ops.fastppo.linear_logprob_backward, arguments)


# -- errors -----------------------------------------------------------------------------------------------------------

HEAD = make_head(6, 5)
ERRORS = {
    "hidden_list": ({"hidden": [1.0]}, TypeError, "hidden must be a torch.Tensor, got list"),
    "hidden_dim": ({"hidden": torch.zeros(6, 7)}, ValueError, "hidden must have weight's D=8 as last dimension.*6, 7"),
    "transposed": ({"weight": torch.zeros(8, 5)}, ValueError, r"weight must be \[V, D\], not its transpose.*8, 5"),
    "no_numbers": ({"weight": torch.zeros(5, 0)}, ValueError, r"weight must have D of at least 1.*5, 0"),
    "cuda_on_a_cpu": ({"backend": "cuda"}, RuntimeError, "linear_logprob has no such kernel for cpu"),
    "weight_dim": ({"weight": torch.zeros(8)}, ValueError, r"weight must have shape \[V, D\], got \[8\]"),
    "weight_empty": ({"weight": torch.zeros(0, 8)}, ValueError, "weight must have at least one row"),
    "weight_integer": ({"weight": torch.zeros(5, 8).long()}, TypeError, "weight must be one of float16.*got int64"),
    "weight_device": ({"weight": torch.zeros(5, 8, device="meta")}, ValueError, "weight must be on hidden's device"),
    "targets_shape": ({"targets": torch.zeros(5).long()}, ValueError, r"targets must have.*\[6\].*\[5\]"),
    "targets_float": ({"targets": torch.zeros(6)}, TypeError, "targets must be one of uint8.*got float32"),
    "targets_above": ({"targets": torch.full((6,), 5)}, IndexError, r"targets must be in \[0, 5\).*got 5"),
    "bias_shape": ({"bias": torch.zeros(4)}, ValueError, r"bias must have shape \[5\].*got \[4\]"),
    "temperature": ({"temperature": 0.0}, ValueError, "temperature must be.*> 0, got 0.0"),
    "temperature_shape": ({"temperature": torch.ones(5)}, ValueError, r"temperature must have targets's shape \[6\]"),
    "temperature_zero": ({"temperature": torch.zeros(6)}, ValueError, "temperature must be > 0, got 0.0"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap must be.*> 0, got -1.0"),
    "memory": ({"memory": "keep"}, ValueError, "memory must be one of 'auto', 'save', 'recompute', got 'keep'"),
    "reduce_dhidden": ({"reduce_dhidden": "sum"}, ValueError, "reduce_dhidden must be one of 'all_reduce'.*got 'sum'"),
    "logits_dtype": ({"logits_dtype": torch.int8}, ValueError, "logits_dtype must be one of.*got torch.int8"),
    "into_dtype": (
        {"weight_grad_into": torch.zeros(5, 8).half()}, TypeError, "weight_grad_into must be.*float32, got float16"
    ),
    "into_shape": (
        {"weight_grad_into": torch.zeros(5, 7)}, ValueError, r"weight_grad_into must have weight's shape \[5, 8\].*5, 7"
    ),
    "vocab_width": (
        {"vocab": fastppo.VocabShard(0, 6, None, 6)}, ValueError, r"weight must have the 6 rows.*\[0, 6\), got 5"
    ),
    "backend": ({"backend": "gpu"}, ValueError, "backend must be one of.*got 'gpu'"),
}  # fmt: skip


@pytest.mark.parametrize("change, error, message", ERRORS.values(), ids=ERRORS)
def test_errors(change, error, message):
    arguments = {"hidden": HEAD.hidden, "weight": HEAD.weight, "targets": HEAD.targets} | change
    with pytest.raises(error, match=message):
        linear_logprob(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("targets"), **arguments)


def test_dtensor_is_refused_by_name():
    class DTensor(Tensor):
        pass

    weight = torch.zeros(5, 8).as_subclass(DTensor)
    with pytest.raises(TypeError, match=r"weight must be a plain torch.Tensor.*DTensor.*to_local\(\).*VocabShard"):
        linear_logprob(HEAD.hidden, weight, HEAD.targets)


# -- properties -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 20), st.integers(1, 40), st.sampled_from(MEMORY), st.floats(0.2, 5))
def test_properties(seed, rows, vocab, memory, temperature):
    head = make_head(rows, vocab, seed=seed, ignored=0.2)
    logprobs, entropy, *grads = run(linear_logprob, head, memory=memory, temperature=temperature)
    assert bool((logprobs <= 0).all())
    assert bool((entropy >= 0).all()) and bool((entropy <= math.log(vocab) * (1 + 1e-6) + 1e-6).all())
    assert abs(float(grads[2].double().sum())) <= 1e-5 * (1 + float(grads[2].abs().sum())), "rows of dlogits sum to 0"
    logits = torch.nn.functional.linear(*head[:3])
    expected = fastppo.logprob(logits, head.targets, temperature=temperature)
    torch.testing.assert_close(logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected.entropy, rtol=1e-5, atol=1e-5)
