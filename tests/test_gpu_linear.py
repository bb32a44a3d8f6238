"""The linear ops on a CUDA device: every gradient by the three-way rule, chunks of rows and of columns, a realistic
vocabulary, what is left out, and backward's factor."""

import pytest
import torch

from fastppo import linear_logprob, linear_loss, linear_ppo_loss, logprob, ppo_loss
from fastppo.ops import _linear
from fastppo.reference.linear_logprob import linear_logprob as definition
from fastppo.testing import assert_bitwise_equal, assert_no_worse

pytestmark = pytest.mark.gpu

NAMES = ("logprobs", "entropy", "dhidden", "dweight", "dbias")
PLANS = {"whole": None, "columns": (96, 100), "rows-and-columns": (40, 256)}


def head(rows, vocab, dim, dtype, *, ignored=0.0, seed=0):
    torch.manual_seed(seed)
    hidden, weight, bias = torch.randn(rows, dim), torch.randn(vocab, dim) / dim**0.5, torch.randn(vocab) / 4
    targets = torch.randint(vocab, (rows,))
    targets[torch.rand(rows) < ignored] = -100
    return [x.to(dtype).cuda() for x in (hidden, weight, bias)], targets.cuda()


def plan(monkeypatch, name):
    if PLANS[name] is not None:
        monkeypatch.setattr("fastppo.ops._linear_logprob_ops.plan_of", lambda *_: _linear.Plan(*PLANS[name]))


def run(op, leaves, targets, upstream, **options):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = op(leaves[0], leaves[1], targets, bias=leaves[2], **options)
    grads = torch.autograd.grad(tuple(out), leaves, [u.to(x.dtype) for u, x in zip(upstream, out, strict=True)])
    return *(x.detach() for x in out), *grads


def compare(leaves, targets, **options):
    upstream = torch.randn(2, *targets.shape, device="cuda")
    plain = {k: v for k, v in options.items() if k not in ("memory", "backend")}
    exact = {k: v for k, v in plain.items() if k != "logits_dtype"}
    got = run(linear_logprob, leaves, targets, upstream, **options)
    baseline = run(definition, leaves, targets, upstream, **plain)
    truth = run(definition, [x.double() for x in leaves], targets, upstream, **exact)
    for name, *values in zip(NAMES, got, baseline, truth, strict=True):
        assert_no_worse(name, *values)
    return got


@pytest.mark.parametrize("cut", PLANS)
@pytest.mark.parametrize("memory", ["save", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_no_worse_than_pytorch(monkeypatch, dtype, memory, cut):
    plan(monkeypatch, cut)
    compare(*head(96, 1003, 64, dtype, ignored=0.2), memory=memory, softcap=20.0, temperature=0.8)


@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_a_whole_vocabulary(memory):
    """151936 columns, cut as they are by default."""
    rows = 1500
    cut = _linear.plan_of(rows, 151936, torch.device("cuda", 0))
    assert cut.columns < 151936
    compare(*head(rows, 151936, 128, torch.bfloat16, ignored=0.1), memory=memory)


def test_columns_of_a_plan_fill_whole_waves():
    device = torch.device("cuda", 0)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    for rows in (8192, 16384):
        cut = _linear.plan_of(rows, 151936, device)
        assert (cut.rows // 128) * (cut.columns // 256) % processors == 0
        assert cut.rows * cut.columns * 2 <= 2**29
    assert _linear.plan_of(100000, 151936, device).rows <= _linear.CHUNK_ROWS_GPU
    assert _linear.plan_of(8, 151936, device) == (8, 151936)


@pytest.mark.parametrize("cut", PLANS)
def test_left_out_rows_reach_nothing(monkeypatch, cut):
    plan(monkeypatch, cut)
    leaves, targets = head(96, 1003, 64, torch.bfloat16, ignored=0.3)
    upstream = torch.randn(2, 96, device="cuda")
    upstream[:, ::4] = 0
    clean = run(linear_logprob, leaves, targets, upstream, memory="recompute")
    dirty = leaves[0].masked_fill((targets == -100)[:, None], torch.nan)
    dirty[::4] = torch.nan
    live = torch.arange(96, device="cuda") % 4 != 0
    for name, a, b in zip(NAMES, run(linear_logprob, [dirty, *leaves[1:]], targets, upstream, memory="recompute"),
                          clean, strict=True):  # fmt: skip
        assert_bitwise_equal(name, *((a[live], b[live]) if name in NAMES[:2] else (a, b)))


@pytest.mark.parametrize("cut", PLANS)
def test_master_weights_under_autocast_and_gradients_added_elsewhere(monkeypatch, cut):
    """float32 weights multiplied in bfloat16: their gradient, and what is added to weight_grad_into, is not rounded to
    bfloat16 where columns are cut."""
    plan(monkeypatch, cut)
    leaves, targets = head(96, 1003, 64, torch.float32)
    upstream = torch.randn(2, 96, device="cuda")
    rounded = [x.bfloat16().float() for x in leaves]
    truth = run(definition, [x.double() for x in rounded], targets, upstream)
    with torch.autocast("cuda", torch.bfloat16):
        got = run(linear_logprob, leaves, targets, upstream, memory="recompute")
        baseline = run(lambda h, w, t, bias: logprob(torch.nn.functional.linear(h, w, bias), t), leaves, targets,
                       upstream)  # fmt: skip
        into = torch.full((1003, 64), 2.0, device="cuda")
        hidden, weight = (x.clone().requires_grad_() for x in leaves[:2])
        out = linear_logprob(hidden, weight, targets, bias=leaves[2], memory="recompute", weight_grad_into=into)
    ((out.logprobs * upstream[0]).sum() + (out.entropy * upstream[1]).sum()).backward()
    for name, *values in zip(NAMES, got, baseline, truth, strict=True):
        assert_no_worse(name, *values)
    assert weight.grad is None
    torch.testing.assert_close(into - 2, got[3], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("chunk", [None, 50])
@pytest.mark.parametrize("loss_type", ["ppo", "cispo", "gspo"])
def test_linear_ppo_loss_is_the_composition(loss_type, chunk):
    (hidden, weight, bias), targets = head(96, 1003, 64, torch.float32, ignored=0.2)
    cu = torch.tensor([0, 40, 41, 96], device="cuda", dtype=torch.int32)
    sequences = {"cu_seqlens": cu} if loss_type == "gspo" else {}
    advantages, mask = torch.randn(96, device="cuda"), torch.rand(96, device="cuda") < 0.7
    advantages[::3] = 0
    with torch.no_grad():
        old = linear_logprob(hidden, weight, targets, bias=bias).logprobs + 0.1 * torch.randn(96, device="cuda")
    results = []
    for fused in (True, False):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        options = {"loss_type": loss_type, "mask": mask, **sequences}
        if fused:
            loss = linear_ppo_loss(*leaves[:2], targets, old, advantages, bias=leaves[2], ent_coef=0.01,
                                   chunk_tokens=chunk, **options).loss  # fmt: skip
        else:
            options["mask"] = mask & (targets != -100)
            lp, entropy = linear_logprob(*leaves[:2], targets, bias=leaves[2])
            loss = ppo_loss(lp, old, advantages, entropy=entropy, ent_coef=0.01, **options).loss
        results.append((loss.detach(), *torch.autograd.grad(3.0 * loss, leaves)))
    for name, a, b in zip(("loss", "dhidden", "dweight", "dbias"), *results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("chunk", [96, 50], ids=["one-chunk", "two-chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_loss_of_ones_own_and_backwards_factor(dtype, chunk):
    """Factors 1, for which nothing is multiplied, and 0.375."""
    (hidden, weight, _), targets = head(96, 1003, 64, dtype)

    def loss_fn(logprobs, entropy, rows):
        return (logprobs * rows["weight"] + 0.1 * entropy).sum(), logprobs.new_zeros(1)

    rows = {"weight": torch.randn(96, device="cuda")}
    grads = {}
    for factor in (1.0, 0.375):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss = linear_loss(*leaves, targets, loss_fn, rows=rows, chunk_tokens=chunk).loss
        grads[factor] = torch.autograd.grad(loss, leaves, torch.tensor(factor, device="cuda"))
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    truth = definition(*leaves, targets)
    exact = torch.autograd.grad((truth[0] * rows["weight"].double() + 0.1 * truth[1]).sum(), leaves)
    for i in range(2):
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        scale = float(exact[i].abs().max())
        torch.testing.assert_close(grads[1.0][i].double(), exact[i], rtol=0, atol=tolerance * scale)
        torch.testing.assert_close(grads[0.375][i].double(), 0.375 * grads[1.0][i].double(), rtol=2**-7, atol=1e-12)


@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_the_same_bits_twice(memory):
    leaves, targets = head(1500, 151936, 64, torch.bfloat16)
    upstream = torch.randn(2, 1500, device="cuda")
    first, second = (run(linear_logprob, leaves, targets, upstream, memory=memory) for _ in range(2))
    for name, a, b in zip(NAMES, first, second, strict=True):
        assert_bitwise_equal(name, a, b)
