"""fastppo.logprob over the grid of shapes, layouts and dtypes by the three-way rule, and on every instruction set.

What is too large for every run is marked slow.
"""

import pytest
import torch
from torch import Tensor

from fastppo.ops.logprob import logprob
from fastppo.testing import assert_bitwise_equal, assert_no_worse, make_logits, make_targets

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# One column; two; fewer than a vector; around the unrolled step of 64; the vocabularies of Llama 2, GPT-2 (odd), Qwen.
VOCABULARIES = [1, 2, 7, 255, 256, 257, 32000, 50257, 151936]
# Nothing; one row, which threads cannot share; a few; more than a block of rows, an odd number.
ROWS = [0, 1, 3, 131]

# Above this many logits a case takes seconds, most of them for the truth in float64.
MANY = 3 * 160_000


def shapes() -> list:
    cases = []
    for vocabulary in VOCABULARIES:
        for rows in ROWS:
            marks = [pytest.mark.slow, pytest.mark.timeout(600)] if rows * vocabulary > MANY else []
            cases.append(pytest.param(rows, vocabulary, marks=marks, id=f"{rows}x{vocabulary}"))
    return cases


def truth_of(logits: Tensor, targets: Tensor, upstream: Tensor, *, dtype: torch.dtype, **options) -> tuple[Tensor, ...]:
    """logprobs, entropy and the gradient in plain torch: softmax in `dtype`, as trainers write it."""
    leaf = logits.detach().clone().requires_grad_()
    z = leaf.to(dtype)
    if options.get("softcap") is not None:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    temperature = options.get("temperature", 1.0)
    z = z / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
    log_p = torch.log_softmax(z, -1)
    logprobs = log_p.gather(-1, targets[..., None])[..., 0]
    p = log_p.exp()
    entropy = -(p * torch.where(p > 0, log_p, 0.0)).sum(-1)
    (grad,) = torch.autograd.grad((logprobs, entropy), leaf, list(upstream.to(dtype)))
    return logprobs.detach(), entropy.detach(), grad


def ours(logits: Tensor, targets: Tensor, upstream: Tensor, **options) -> tuple[Tensor, ...]:
    leaf = logits.detach().requires_grad_()
    out = logprob(leaf, targets, **options)
    (grad,) = torch.autograd.grad((out.logprobs, out.entropy), leaf, list(upstream))
    return out.logprobs.detach(), out.entropy.detach(), grad


NAMES = ("logprobs", "entropy", "dlogits")


def three(logits: Tensor, targets: Tensor, **options) -> tuple[tuple[Tensor, ...], ...]:
    """NAMES by the kernel, by torch in float32, and in float64."""
    upstream = torch.randn(2, *targets.shape)
    return (
        ours(logits, targets, upstream, backend="cpu", **options),
        truth_of(logits, targets, upstream, dtype=torch.float32, **options),
        truth_of(logits.double(), targets, upstream, dtype=torch.float64, **options),
    )


def assert_three_way(logits: Tensor, targets: Tensor, **options) -> None:
    for name, *values in zip(NAMES, *three(logits, targets, **options), strict=True):
        assert_no_worse(name, *values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocabulary"), shapes())
def test_shapes(rows, vocabulary, dtype):
    """Small shapes are drawn again and again: of two elements the baseline may hit one by chance."""
    results = []
    for seed in range(max(1, 128 // max(1, rows * vocabulary))):
        logits = make_logits(rows, vocabulary, dtype=dtype, seed=seed) * 3
        targets = make_targets(logits, seed=seed) if rows else torch.zeros(0, dtype=torch.int64)
        results.append(three(logits, targets))
    for i, name in enumerate(NAMES):
        assert_no_worse(name, *(torch.stack([result[k][i] for result in results]) for k in range(3)))


OPTIONS = {
    "temperature": {"temperature": 0.7},
    "per_token": {"temperature": torch.linspace(0.3, 3.0, 9)},
    "softcap": {"softcap": 5.0},
    "softcap_per_token": {"softcap": 30.0, "temperature": torch.linspace(0.3, 3.0, 9)},
}


@pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "large"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(dtype, options, kind):
    """4099 columns: more than a chunk of the kernel, and an odd number."""
    logits = make_logits(9, 4099, kind, dtype=dtype) * (1 if kind == "large" else 2)
    assert_three_way(logits, make_targets(logits), **options)


def rising(logits: Tensor) -> Tensor:
    """Each chunk's largest logit above all before it: the kernel sums every chunk twice."""
    return logits.float().sort(-1).values.to(logits.dtype)


def falling(logits: Tensor) -> Tensor:
    return rising(logits).flip(-1)


def far_apart(logits: Tensor) -> Tensor:
    """The first chunk so far below the second that nothing of it is left."""
    logits = logits.clone()
    logits[:, :2048] -= 300
    return logits


@pytest.mark.parametrize("order", [rising, falling, far_apart])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_in_any_order_of_size(dtype, order):
    logits = order(make_logits(3, 9001, dtype=dtype) * 4)
    assert_three_way(logits, make_targets(logits))


# Of logits [2, 3, 301], 16 bytes aligned at the start: what the kernel is given in place of neighbouring rows.
LAYOUTS = {
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "row_padded": lambda x: torch.nn.functional.pad(x, (0, 11))[..., :301],
    "odd_offset": lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:302],
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch_last": lambda x: x.permute(1, 0, 2).contiguous().permute(1, 0, 2),
    "column_stride": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "column_stride_0": lambda x: x[..., :1].expand(2, 3, 301),
    "expanded_rows": lambda x: x[:, :1].expand(2, 3, 301),
    "expanded_batch": lambda x: x[:1].expand(2, 3, 301),
    "one_row_skipped": lambda x: torch.cat((x, x), 1)[:, 1:4],
    "four_dimensions": lambda x: x.reshape(2, 3, 7, 43).permute(1, 2, 0, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_change_no_bit(layout, dtype):
    view = layout(make_logits(6, 301, dtype=dtype).view(2, 3, 301))
    plain = view.clone(memory_format=torch.contiguous_format)
    targets = make_targets(plain, ignored=0.2)
    upstream = torch.randn(2, *targets.shape)
    expected = ours(plain, targets, upstream)
    for name, got, want in zip(
        ("logprobs", "entropy", "dlogits"), ours(view, targets, upstream), expected, strict=True
    ):
        assert_bitwise_equal(name, got, want)
    strided = layout(make_logits(6, 301, dtype=dtype).view(2, 3, 301).requires_grad_() * 1)
    if 0 not in strided.stride():
        seen = []
        strided.register_hook(seen.append)
        out = logprob(strided, targets, inplace_backward=True)
        torch.autograd.backward((out.logprobs, out.entropy), list(upstream))
        assert_bitwise_equal("dlogits in place", strided.detach().contiguous(), expected[2])
        assert_bitwise_equal("gradient", seen[0].contiguous(), expected[2])


@pytest.mark.parametrize("strided", ["targets", "temperature", "upstream"])
def test_strides_of_the_small_inputs(strided):
    logits, upstream, temperature = make_logits(4, 33), torch.randn(2, 4), torch.linspace(0.5, 2, 4)
    targets = make_targets(logits)
    expected = ours(logits, targets, upstream, temperature=temperature)
    apart = {"targets": targets, "temperature": temperature, "upstream": upstream}
    apart[strided] = apart[strided].repeat_interleave(3, -1)[..., ::3]
    got = ours(logits, apart["targets"], apart["upstream"], temperature=apart["temperature"])
    for name, one, want in zip(NAMES, got, expected, strict=True):
        assert_bitwise_equal(name, one, want)


def test_upstream_gradients_of_any_dtype_and_expanded():
    """sum().backward() hands over one number for all rows; a half-precision consumer hands over its dtype."""
    logits = make_logits(4, 33)
    targets = make_targets(logits)
    leaf = logits.clone().requires_grad_()
    logprob(leaf, targets).logprobs.sum().backward()
    expected = ours(logits, targets, torch.stack((torch.ones(4), torch.zeros(4))))[2]
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-6, atol=1e-8)
    half = logits.clone().requires_grad_()
    (logprob(half, targets).logprobs.to(torch.bfloat16) * 1.0).sum().backward()
    torch.testing.assert_close(half.grad, expected, rtol=1e-6, atol=1e-8)


def test_a_second_backward_gives_the_same_gradient():
    logits = make_logits(4, 33).requires_grad_()
    out = logprob(logits, make_targets(logits.detach()))
    total = (out.logprobs - 0.3 * out.entropy).sum()
    (first,) = torch.autograd.grad(total, logits, retain_graph=True)
    (second,) = torch.autograd.grad(total, logits)
    assert_bitwise_equal("second backward", second, first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, logits)


def test_what_is_kept_for_backward():
    """The caller's own logits and four floats a row, no copy."""
    kept = []
    logits = make_logits(8, 500).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        logprob(logits, make_targets(logits.detach()))
    large = [x for x in kept if x.numel() > 8 * 4]
    assert [x.data_ptr() for x in large] == [logits.data_ptr()]
    assert sum(x.numel() for x in kept if x.is_floating_point()) == 8 * 500 + 8 * 4


def test_autocast_leaves_the_logits_as_they_are():
    logits = make_logits(4, 33)
    targets = make_targets(logits)
    expected = logprob(logits, targets)
    with torch.autocast("cpu", torch.bfloat16):
        got = logprob(logits, targets)
    assert_bitwise_equal("logprobs", got.logprobs, expected.logprobs)
    assert got.entropy is not None and got.entropy.dtype == torch.float32


@pytest.mark.parametrize("inplace", [False, True])
def test_large_gradients_are_written_past_the_cache(inplace):
    """Over 8 MiB and rows that are not aligned to a vector; the last rows, and nothing beyond them."""
    logits = make_logits(43, 50257)
    targets = make_targets(logits, ignored=0.1)
    upstream = torch.randn(2, 43)
    work = logits.clone().requires_grad_() * 1
    seen = []
    work.register_hook(seen.append)
    out = logprob(work, targets, inplace_backward=inplace)
    torch.autograd.backward((out.logprobs, out.entropy), list(upstream))
    for rows in (slice(0, 1), slice(21, 23), slice(42, 43)):
        few = ours(logits[rows], targets[rows], upstream[:, rows])
        assert_bitwise_equal("dlogits", seen[0][rows], few[2])
