"""linear_logprob where a Hopper GPU never writes the logits: shapes and options against float64, rows and columns that
are left out, what it is not for, and that forward and backward see the same logits."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastppo import VocabShard, linear_logprob, linear_ppo_loss
from fastppo.backends import resolve
from fastppo.ops import _linear, _linear_sm90
from fastppo.reference.linear_logprob import linear_logprob as definition
from fastppo.testing import assert_bitwise_equal, assert_no_worse

pytestmark = pytest.mark.gpu

NAMES = ("logprobs", "entropy", "dhidden", "dweight")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """Counts the kernels' launches."""
    why = resolve("linear_logprob", "auto", torch.device("cuda", 0), BF16)
    if why[0] != "cuda":
        pytest.skip(f"needs the kernel of compute capability 9.0: {why}")
    counts = {"stats": 0, "dlogits": 0}
    module = _linear_sm90._build.module()

    class Counting:
        def __getattr__(self, name):
            if name in ("head_stats", "head_dlogits"):
                counts[name.removeprefix("head_")] += 1
            return getattr(module, name)

    monkeypatch.setattr(_linear_sm90._build, "module", Counting)
    return counts


def head(rows, vocab, dim, dtype=BF16, *, ignored=0.0, scale=3.0, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(rows, dim, device="cuda").to(dtype)
    weight = (scale * torch.randn(vocab, dim, device="cuda") / dim**0.5).to(dtype)
    targets = torch.randint(vocab, (rows,), device="cuda")
    targets[torch.rand(rows, device="cuda") < ignored] = -100
    return hidden, weight, targets


def run(op, hidden, weight, targets, upstream, **options):
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    out = op(*leaves, targets, **options)
    grads = torch.autograd.grad(tuple(out), leaves, [u.to(x.dtype) for u, x in zip(upstream, out, strict=True)])
    return *(x.detach() for x in out), *grads


def compare(hidden, weight, targets, **options):
    upstream = torch.randn(2, *targets.shape, device="cuda")
    exact = {k: v for k, v in options.items() if k != "logits_dtype"}
    got = run(linear_logprob, hidden, weight, targets, upstream, memory="recompute", **options)
    baseline = run(definition, hidden, weight, targets, upstream, **{**options, "logits_dtype": None})
    truth = run(definition, hidden.double(), weight.double(), targets, upstream, **exact)
    for name, *values in zip(NAMES, got, baseline, truth, strict=True):
        assert_no_worse(name, *values)
    return got, truth


@pytest.mark.parametrize("logits_dtype", [None, F32], ids=["rounded", "f32"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 8), (1, 256, 64), (2, 257, 72), (127, 515, 64), (128, 1000, 128), (129, 1003, 136), (300, 50257, 264),
     (1000, 4099, 1024)],
    ids=str,
)  # fmt: skip
def test_no_worse_than_pytorch(shape, dtype, logits_dtype, fused):
    compare(*head(*shape, dtype, ignored=0.1 if shape[0] > 2 else 0.0), logits_dtype=logits_dtype)
    assert fused["stats"] == 1 and fused["dlogits"] >= 1


@pytest.mark.sanitize
@pytest.mark.parametrize("per_row", [False, True], ids=["scalar", "per-row"])
@pytest.mark.parametrize("logits_dtype", [None, F32], ids=["rounded", "f32"])
def test_temperature(logits_dtype, per_row):
    temperature = torch.rand(300, device="cuda") * 2 + 0.2 if per_row else 0.7
    compare(*head(300, 1003, 128), temperature=temperature, logits_dtype=logits_dtype)


def test_a_whole_vocabulary_in_many_chunks(fused):
    compare(*head(1500, 151936, 128, ignored=0.1))
    assert fused["stats"] == 1 and fused["dlogits"] > 1


def test_float32_logits_are_exact():
    """As exact as products accumulated in float32 are, at a hidden size of models."""
    hidden, weight, targets = head(256, 32000, 4096)
    with torch.no_grad():
        got = linear_logprob(hidden, weight, targets, logits_dtype=F32)
        rounded = linear_logprob(hidden, weight, targets)
        truth = definition(hidden.double(), weight.double(), targets)
    error, rounded_error = ((x.logprobs - truth[0]).abs().max() for x in (got, rounded))
    assert error < 1e-4 < 1e-2 < rounded_error
    torch.testing.assert_close(got.entropy.double(), truth[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("logits_dtype", [None, F32], ids=["rounded", "f32"])
def test_peaked_rows_keep_their_digits(logits_dtype):
    """log p of -1e-9, beside which a sum of 1 would lose all others, wherever in a tile the target stands."""
    rows, vocab = 512, 1000
    hidden = torch.zeros(rows, 64, dtype=BF16, device="cuda")
    hidden[:, 0] = torch.linspace(4, 28, rows, device="cuda").to(BF16)
    weight = torch.zeros(vocab, 64, dtype=BF16, device="cuda")
    targets = torch.randint(vocab, (rows,), device="cuda")
    for row in range(8):  # one at a time: the weight's row of the target is the only one that is not 0
        target = targets[row * 64]
        only = weight.clone()
        only[target, 0] = 1
        got = linear_logprob(hidden, only, target.expand(rows), logits_dtype=logits_dtype)
        truth = definition(hidden.double(), only.double(), target.expand(rows))
        peaked = truth[0] > -0.03  # where a float32 that holds the 1 too would show
        for x, true in zip(got, truth, strict=True):
            torch.testing.assert_close(x[peaked].double(), true[peaked], rtol=3e-6, atol=0)
            torch.testing.assert_close(x.double(), true, rtol=1e-5, atol=0)


def test_ties():
    hidden, weight, targets = head(200, 1003, 64)
    got = linear_logprob(hidden, torch.zeros_like(weight), targets)
    torch.testing.assert_close(got.logprobs, torch.full_like(got.logprobs, -math.log(1003)))
    torch.testing.assert_close(got.entropy, torch.full_like(got.entropy, math.log(1003)))


def test_forward_and_backward_see_the_same_logits():
    """Then a row of dlogits sums to 0, but for what rounding each to bfloat16 takes. The hidden states' last number
    is 0 and the weight's is 1: the gradient there is that sum."""
    hidden, weight, targets = head(512, 4099, 512, scale=8.0)
    hidden[:, -1], weight[:, -1] = 0, 1
    dhidden = run(linear_logprob, hidden, weight, targets, torch.ones(2, 512, device="cuda"), memory="recompute")[2]
    p = definition(hidden.float(), weight.float(), targets)[0].exp()
    assert (dhidden[:, -1].abs() <= 2**-8 * (1 + p) + 1e-3).all()
    assert dhidden[:, -1].float().mean().abs() < 2e-4


def test_what_is_left_out_reaches_nothing():
    hidden, weight, targets = head(300, 1003, 64, ignored=0.3)
    upstream = torch.randn(2, 300, device="cuda")
    upstream[:, ::4] = 0
    clean = run(linear_logprob, hidden, weight, targets, upstream, memory="recompute")
    dirty = hidden.masked_fill((targets == -100)[:, None], torch.nan)
    dirty[::4] = torch.inf
    got = run(linear_logprob, dirty, weight, targets, upstream, memory="recompute")
    live = torch.arange(300, device="cuda") % 4 != 0
    for name, a, b in zip(NAMES, got, clean, strict=True):
        assert_bitwise_equal(name, *((a[live], b[live]) if name in NAMES[:2] else (a, b)))
    assert (got[0][targets == -100] == 0).all() and (got[2][targets == -100] == 0).all()


def test_rows_that_are_not_finite_keep_it_to_themselves():
    hidden, weight, targets = head(300, 1003, 64)
    dirty = hidden.clone()
    dirty[7], dirty[130] = torch.nan, torch.inf
    got, clean = (linear_logprob(x, weight, targets) for x in (dirty, hidden))
    bad = torch.zeros(300, dtype=torch.bool, device="cuda")
    bad[[7, 130]] = True
    for a, b in zip(got, clean, strict=True):
        assert a[bad].isnan().all()
        assert_bitwise_equal("others", a[~bad], b[~bad])


def test_logits_of_minus_infinity():
    """float16 has no -1e5: such a token has probability 0, and takes no gradient."""
    hidden, weight, targets = head(64, 300, 64, F16)
    hidden[:, 0], weight[:, 0] = 300, 0
    weight[::5, 0] = -300
    targets = (targets // 5 * 5 + 1).clamp(max=296)
    upstream = torch.randn(2, 64, device="cuda")
    got = run(linear_logprob, hidden, weight, targets, upstream, memory="recompute")
    kept = torch.arange(300, device="cuda") % 5 != 0
    where = torch.cumsum(kept, 0) - 1
    expected = run(linear_logprob, hidden, weight[kept], where[targets], upstream, memory="recompute")
    for name, a, b in zip(NAMES, got, expected, strict=True):
        assert a.isfinite().all(), name
        torch.testing.assert_close(a[kept] if name == "dweight" else a, b, rtol=2e-3, atol=2e-3)
    assert (got[3][~kept] == 0).all()


def test_targets_elsewhere_and_padding_columns():
    hidden, weight, targets = head(200, 1008, 64)
    targets = targets.clamp(max=1002)
    vocab = VocabShard(0, 1008, None, 1003)
    upstream = torch.randn(2, 200, device="cuda")
    got = run(linear_logprob, hidden, weight, targets, upstream, vocab=vocab, memory="recompute")
    expected = run(linear_logprob, hidden, weight[:1003], targets, upstream, memory="recompute")
    for name, a, b in zip(NAMES, got, expected, strict=True):
        assert_bitwise_equal(name, a[:1003] if name == "dweight" else a, b)
    assert (got[3][1003:] == 0).all()
    targets[5] = 1005
    logprobs = run(linear_logprob, hidden, weight, targets, upstream, vocab=vocab, memory="recompute")[0]
    assert logprobs[5].isnan() and logprobs.isnan().sum() == 1


@pytest.mark.parametrize("plan", [(64, 256), (128, 512), (300, 1003), (100, 264)], ids=str)
def test_the_same_bits_however_it_is_cut(monkeypatch, plan, fused):
    """Forward's for any cut; dweight's too where rows are not."""
    hidden, weight, targets = head(300, 1003, 136)
    upstream = torch.randn(2, 300, device="cuda")
    whole = run(linear_logprob, hidden, weight, targets, upstream, memory="recompute")
    monkeypatch.setattr("fastppo.ops._linear_logprob_ops.plan_of", lambda *_: _linear.Plan(*plan))
    cut = run(linear_logprob, hidden, weight, targets, upstream, memory="recompute")
    for a, b in zip(cut[:2], whole[:2], strict=True):
        assert_bitwise_equal("forward", a, b)
    for name, a, b in zip(NAMES[2:], cut[2:], whole[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}")
    again = run(linear_logprob, hidden, weight, targets, upstream, memory="recompute")
    for name, a, b in zip(NAMES, again, cut, strict=True):
        assert_bitwise_equal(name, a, b)


@pytest.mark.sanitize
def test_memory_layouts():
    hidden, weight, targets = head(200, 1003, 64)
    upstream = torch.randn(2, 200, device="cuda")
    expected = run(linear_logprob, hidden, weight, targets, upstream, memory="recompute")
    wide = torch.zeros(1003, 80, dtype=BF16, device="cuda")
    wide[:, 8:72] = weight
    offset = torch.zeros(200 * 64 + 1, dtype=BF16, device="cuda")
    offset[1:] = hidden.flatten()
    layouts = {
        "rows apart": (hidden, wide[:, 8:72]),
        "not at 16 bytes": (offset[1:].view(200, 64), weight),
        "columns apart": (hidden.t().contiguous().t(), weight.t().contiguous().t()),
    }
    for name, (h, w) in layouts.items():
        out = linear_logprob(h, w, targets)
        assert_bitwise_equal(name, out.logprobs, expected[0])
        leaves = [x.detach().requires_grad_() for x in (h, w)]
        grads = torch.autograd.grad(
            tuple(linear_logprob(*leaves, targets, memory="recompute")), leaves, tuple(upstream)
        )
        for a, b in zip(grads, expected[2:], strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}")
    batched = linear_logprob(hidden.view(4, 50, 64), weight, targets.view(4, 50))
    assert_bitwise_equal("batched", batched.logprobs.flatten(), expected[0])
    for empty in (hidden[:0], hidden.view(4, 50, 64)[:, :0]):
        assert linear_logprob(empty, weight, targets[:0].view(empty.shape[:-1])).logprobs.shape == empty.shape[:-1]


def test_master_weights_under_autocast_and_frozen_operands(fused):
    hidden, weight, targets = (x.float() if x.is_floating_point() else x for x in head(200, 1003, 64))
    upstream = torch.randn(2, 200, device="cuda")
    expected = run(linear_logprob, hidden.bfloat16(), weight.bfloat16(), targets, upstream, memory="recompute")
    before = dict(fused)
    with torch.autocast("cuda", BF16):
        got = run(linear_logprob, hidden, weight, targets, upstream, memory="recompute")
        into = torch.full((1003, 64), 2.0, device="cuda")
        frozen = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = linear_logprob(*frozen, targets, memory="recompute", weight_grad_into=into)
        torch.autograd.backward(tuple(out), tuple(upstream))
        only = linear_logprob(hidden, frozen[1].detach().requires_grad_(), targets, memory="recompute")
        only_hidden = linear_logprob(frozen[0].detach().requires_grad_(), weight, targets, memory="recompute")
    assert fused["stats"] - before["stats"] == 4
    assert got[2].dtype == got[3].dtype == F32
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=2**-7, atol=2e-3)
    assert frozen[1].grad is None
    torch.testing.assert_close(into - 2, got[3], rtol=1e-3, atol=1e-4)
    for out in (only, only_hidden):
        torch.autograd.backward(tuple(out), tuple(upstream))


def test_without_entropy():
    hidden, weight, targets = head(200, 1003, 64)
    with_it = linear_logprob(hidden, weight, targets)
    without = linear_logprob(hidden, weight, targets, with_entropy=False)
    assert without.entropy is None
    assert_bitwise_equal("logprobs", without.logprobs, with_it.logprobs)


def test_the_loss_without_gradients_writes_no_logits(fused):
    hidden, weight, targets = head(2000, 4099, 64, ignored=0.2)
    advantages = torch.randn(2000, device="cuda")
    with torch.no_grad():
        old = linear_logprob(hidden, weight, targets).logprobs
        before = fused["stats"]
        out = linear_ppo_loss(hidden, weight, targets, old, advantages)
    assert fused["stats"] == before + 1
    live = targets != -100
    torch.testing.assert_close(out.loss, -(advantages * live).sum() / live.sum())
    torch.testing.assert_close(out.logprobs, old)


def test_compiled_and_captured():
    hidden, weight, targets = head(200, 1003, 64)
    upstream = torch.randn(2, 200, device="cuda")
    expected = run(linear_logprob, hidden, weight, targets, upstream, memory="recompute")
    compiled = torch.compile(linear_logprob, fullgraph=True)
    for name, a, b in zip(
        NAMES, run(compiled, hidden, weight, targets, upstream, memory="recompute"), expected, strict=True
    ):
        assert_bitwise_equal(name, a, b)
    wide = [run(op, hidden, weight, targets, upstream, memory="recompute", logits_dtype=F32)
            for op in (compiled, linear_logprob)]  # fmt: skip
    for name, a, b in zip(NAMES, *wide, strict=True):
        assert_bitwise_equal(name, a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = linear_logprob(hidden, weight, targets)
    out.logprobs.zero_()
    graph.replay()
    assert_bitwise_equal("captured", out.logprobs, expected[0])


def test_who_is_refused(fused):
    hidden, weight, targets = head(16, 300, 64)
    bias = torch.zeros(300, dtype=BF16, device="cuda")
    refused = {
        "takes no bias": {"bias": bias},
        "takes no softcap": {"softcap": 30.0},
        "logits_dtype must be torch.bfloat16 or torch.float32": {"logits_dtype": F16},
    }
    for message, options in refused.items():
        with pytest.raises(RuntimeError, match=message):
            linear_logprob(hidden, weight, targets, backend="cuda", **options)
        linear_logprob(hidden, weight, targets, **options)
    with pytest.raises(RuntimeError, match="D must be a multiple of 8, got 60"):
        linear_logprob(hidden[:, :60], weight[:, :60], targets, backend="cuda")
    with pytest.raises(RuntimeError, match="float16 and bfloat16, not torch.float32"):
        linear_logprob(hidden.float(), weight.float(), targets, backend="cuda")
    with pytest.raises(RuntimeError, match="linear_logprob has no such kernel for cpu"):
        linear_logprob(hidden.cpu(), weight.cpu(), targets.cpu(), backend="cuda")
    assert fused == {"stats": 0, "dlogits": 0}
    chunked = linear_logprob(hidden, weight, targets, backend="triton")
    assert fused == {"stats": 0, "dlogits": 0}
    torch.testing.assert_close(linear_logprob(hidden, weight, targets, backend="cuda"), chunked, rtol=0, atol=0.02)


def test_many_calls_end():
    """Blocks wait for each other: one that missed a phase would hang."""
    shapes = itertools.product((1, 100, 129, 700), (8, 64, 200, 704), (255, 3000, 40000))
    for rows, dim, vocab in shapes:
        hidden, weight, targets = head(rows, vocab, dim)
        first = linear_logprob(hidden, weight, targets).logprobs
        for _ in range(20):
            again = linear_logprob(hidden, weight, targets).logprobs
        assert_bitwise_equal(f"{rows} {dim} {vocab}", first, again)


def test_no_rows_give_gradients_of_zero():
    hidden, weight, targets = head(200, 1003, 64)
    got = run(linear_logprob, hidden[:0], weight, targets[:0], torch.ones(2, 0, device="cuda"), memory="recompute")
    assert got[2].shape == (0, 64) and (got[3] == 0).all()


@pytest.mark.parametrize("vocab", [300, 512])
@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan], ids=str)
def test_rows_of_infinite_logits(vocab, value):
    """Whether or not columns are missing in the last tile."""
    hidden, weight, targets = head(64, vocab, 64)
    hidden[7] = value
    got = run(linear_logprob, hidden, weight.abs(), targets, torch.ones(2, 64, device="cuda"), memory="recompute")
    assert got[0][7].isnan() and got[1][7].isnan() and got[2][7].isnan().all()
    for x in got[:3]:
        assert x.isnan().flatten(1).any(1).sum() == 1 if x.dim() > 1 else x.isnan().sum() == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e30])
def test_extreme_temperatures(temperature):
    compare(*head(64, 300, 64), temperature=temperature, logits_dtype=None)


def test_more_rows_than_are_taken_at_once_and_more_logits_than_32_bits_count(fused):
    rows, vocab = 20000, 110000
    hidden, weight, targets = head(rows, vocab, 64)
    upstream = torch.randn(2, rows, device="cuda")
    got = run(linear_logprob, hidden, weight, targets, upstream, memory="recompute", logits_dtype=F32)
    assert rows * vocab > 2**31 and fused["stats"] == 2
    for part in (slice(0, 40), slice(rows // 2, rows // 2 + 40), slice(rows - 40, rows)):
        truth = run(definition, hidden[part].double(), weight.double(), targets[part], upstream[:, part])
        torch.testing.assert_close(got[0][part].double(), truth[0], rtol=0, atol=1e-4)
        torch.testing.assert_close(got[1][part].double(), truth[1], rtol=0, atol=1e-4)
        torch.testing.assert_close(got[2][part].double(), truth[2].double(), rtol=0.05, atol=0.02)


def test_parts_of_a_vocabulary_make_the_whole():
    """What ranks compute, one after the other: columns from `start` on, one of them without any."""
    hidden, weight, targets = head(200, 1003, 64, ignored=0.1)
    parts = []
    for start, stop in ((0, 400), (400, 400), (400, 1003)):
        options = (1.0, None, -100, True, start, stop - start, "auto", BF16, BF16)
        of_rank = torch.ops.fastppo.linear_logprob_stats(
            hidden, weight[start:stop], None, targets, None, False, *options
        )
        parts.append(of_rank[0])
    got = torch.ops.fastppo.logprob_combine(torch.stack(parts), targets, None, 1.0, -100, True, "auto")
    whole = linear_logprob(hidden, weight, targets)
    for a, b in zip(got[:2], whole, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def test_the_losses_take_the_backend_for_their_products(fused):
    hidden, weight, targets = head(200, 1003, 64)
    advantages = torch.randn(200, device="cuda")
    results = []
    for backend in ("cuda", "auto"):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        linear_ppo_loss(*leaves, targets, None, advantages, backend=backend).loss.backward()
        results.append([x.grad for x in leaves])
    for a, b in zip(*results, strict=True):
        assert_bitwise_equal("gradient", a, b)
    with pytest.raises(RuntimeError, match="takes no bias"):
        linear_ppo_loss(hidden, weight, targets, None, advantages, bias=weight[:, 0], backend="cuda")


def test_float32_logits_need_no_copy_of_the_weight():
    hidden, weight, targets = head(256, 64000, 512)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    for wanted in (False, True):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.set_grad_enabled(wanted):
            out = linear_logprob(*leaves, targets, logits_dtype=F32, memory="recompute")
            if wanted:
                torch.autograd.grad(tuple(out), leaves, (torch.ones(256, device="cuda"),) * 2)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak < weight.numel() * (2 * wanted + 1) + 256 * 64000 * 2, peak


def test_streams_threads_and_a_captured_backward():
    inputs = head(500, 4099, 128)
    upstream = torch.randn(2, 500, device="cuda")
    expected = run(linear_logprob, *inputs, upstream, memory="recompute")
    torch.cuda.synchronize()

    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [run(linear_logprob, *inputs, upstream, memory="recompute") for _ in range(10)]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(work, range(2)):
            for result in results:
                for name, a, b in zip(NAMES, result, expected, strict=True):
                    assert_bitwise_equal(name, a, b)
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:2]]

    def step():
        out = linear_logprob(*leaves, inputs[2], memory="recompute")
        return torch.autograd.grad(tuple(out), leaves, tuple(upstream))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    graph.replay()
    for name, a, b in zip(NAMES[2:], grads, expected[2:], strict=True):
        assert_bitwise_equal(name, a, b)
