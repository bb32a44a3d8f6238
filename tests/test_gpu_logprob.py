"""logprob's Triton kernels on the card: values, layouts, special values, and what torch's machinery asks of an op."""

import math

import pytest
import torch

from fastppo import linear_logprob, logprob
from fastppo.backends import resolve
from fastppo.kernels import tiles
from fastppo.testing import LOGITS, assert_bitwise_equal, assert_no_worse, make_logits, make_targets
from tests.test_logprob_grid import LAYOUTS, NAMES, truth_of

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = math.inf, math.nan


def ours(logits, targets, upstream, inplace=False, **options):
    """NAMES; the gradient as the op hands it over."""
    leaf = logits.detach().requires_grad_()
    seen = []
    work = leaf * 1 if inplace else leaf
    if inplace:
        work.register_hook(seen.append)
    out = logprob(work, targets, inplace_backward=inplace, **options)
    outputs = [x for x in out if x is not None]
    torch.autograd.backward(outputs, [u.to(x.dtype) for u, x in zip(upstream, outputs, strict=False)])
    return *(x.detach() for x in outputs), seen[0] if inplace else leaf.grad


def three(logits, targets, **options):
    upstream = torch.randn(2, *targets.shape, device="cuda")
    return (
        ours(logits, targets, upstream, backend="triton", **options),
        truth_of(logits, targets, upstream, dtype=torch.float32, **options),
        truth_of(logits.double(), targets, upstream, dtype=torch.float64, **options),
    )


def assert_three_way(logits, targets, **options):
    for name, *values in zip(NAMES, *three(logits, targets, **options), strict=True):
        assert_no_worse(name, *values)


def test_auto_takes_it():
    for dtype in DTYPES:
        assert resolve("logprob", "auto", torch.device("cuda", 0), dtype)[0] == "triton"
    assert resolve("logprob", "auto", torch.device("cuda", 0), torch.float64)[0] == "torch"


# One column; edges without a group; a group and edges; around a tile of 512; the vocabularies of Llama 2, GPT-2 (odd),
# Qwen. Few rows are cut into parts; 5000 are not.
SHAPES = [(1, 1), (3, 2), (3, 7), (131, 255), (131, 512), (2, 513), (1, 32000), (7, 50257), (3, 151936), (5000, 1031)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype):
    """Small shapes are drawn again and again: of two elements the baseline may hit one by chance."""
    results = []
    for seed in range(max(1, 128 // (shape[0] * shape[1]))):
        logits = make_logits(*shape, dtype=dtype, device="cuda", seed=seed) * 3
        results.append(three(logits, make_targets(logits, seed=seed)))
    for i, name in enumerate(NAMES):
        assert_no_worse(name, *(torch.stack([result[k][i] for result in results]) for k in range(3)))


OPTIONS = {
    "temperature": {"temperature": 0.7},
    "softcap_per_token": {"softcap": 30.0, "temperature": torch.linspace(0.3, 3.0, 9)},
}


@pytest.mark.parametrize("kind", [kind for kind in LOGITS if kind != "holes"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(dtype, options, kind):
    logits = make_logits(9, 4099, kind, dtype=dtype, device="cuda") * (1 if kind == "large" else 2)
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    assert_three_way(logits, make_targets(logits), **options)


@pytest.mark.parametrize("rows", [9, 4500], ids=["in_parts", "whole"])
@pytest.mark.parametrize("order", ["rising", "falling", "far_apart"])
def test_tiles_in_any_order_of_size(order, rows):
    """Each tile's largest logit above all before it, below, or so far above that nothing of the first ones is left."""
    logits = make_logits(rows, 3001, dtype=torch.bfloat16, device="cuda") * 4
    if order == "far_apart":
        logits[:, :1024] -= 300
    else:
        logits = logits.sort(-1, descending=order == "falling").values
    assert_three_way(logits, make_targets(logits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout, dtype):
    """To rounding: the order of a row's sums depends on how it lies within 16 bytes."""
    view = layout(make_logits(6, 301, dtype=dtype, device="cuda").view(2, 3, 301))
    plain = view.clone(memory_format=torch.contiguous_format)
    targets = make_targets(plain, ignored=0.2)
    upstream = torch.randn(2, *targets.shape, device="cuda")
    expected = ours(plain, targets, upstream)
    rounding = torch.finfo(dtype).eps
    for name, got, want in zip(NAMES, ours(view, targets, upstream), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=rounding if name == "dlogits" else 1e-6, atol=1e-6)
    if 0 not in view.stride():
        work = layout(make_logits(6, 301, dtype=dtype, device="cuda").view(2, 3, 301).requires_grad_() * 1)
        out = logprob(work, targets, inplace_backward=True)
        torch.autograd.backward((out.logprobs, out.entropy), list(upstream))
        torch.testing.assert_close(work.detach(), expected[2], rtol=rounding, atol=1e-6)


def test_small_inputs_of_other_dtypes_and_strides():
    logits = make_logits(40, 333, device="cuda")
    targets, temperature = make_targets(logits), torch.linspace(0.5, 2, 40, device="cuda").bfloat16()
    upstream = torch.randn(2, 40, device="cuda")
    expected = ours(logits, targets, upstream, temperature=temperature.float())
    strided = [x.repeat_interleave(3, -1)[..., ::3] for x in (targets, upstream, temperature)]
    for name, a, b in zip(NAMES, ours(logits, *strided[:2], temperature=strided[2]), expected, strict=True):
        assert_bitwise_equal(name, a, b)
    leaf = logits.clone().requires_grad_()
    (logprob(leaf, targets.int()).logprobs.to(torch.bfloat16) * 1.0).sum().backward()
    ones = ours(logits, targets, torch.tensor([[1.0], [0.0]], device="cuda").expand(2, 40))
    assert_bitwise_equal("expanded bfloat16 upstream", leaf.grad, ones[2])


# -- special values ---------------------------------------------------------------------------------------------------

# Rows of 700 columns, more than a tile: how it differs from random, and its target.
SPECIAL = {
    "some columns at -inf": ([(0, 600, -INF)], 650),
    "one finite logit": ([(0, 689, -INF), (690, 700, -INF)], 689),
    "target at -inf": ([(5, 9, -INF)], 6),
    "all at -inf": ([(0, 700, -INF)], 3),
    "a NaN": ([(333, 334, NAN)], 3),
    "all NaN": ([(0, 700, NAN)], 3),
    "a +inf": ([(698, 699, INF)], 3),
    "the target at +inf": ([(3, 4, INF)], 3),
    "ignored NaN": ([(0, 700, NAN)], -100),
    "ignored -inf": ([(0, 700, -INF)], -100),
    "target beyond the vocabulary": ([], 700),
    "negative target": ([], -1),
    "unremarkable": ([], 0),
}


@pytest.mark.parametrize("rows", [1, 500], ids=["in_parts", "whole"])
@pytest.mark.parametrize("options", [{}, {"softcap": 20.0, "temperature": 0.7}], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_special_rows(dtype, options, rows):
    """Against the rows in torch, in float64 on the CPU, whose tests have the table of these; and rows alone so."""
    logits = make_logits(len(SPECIAL), 700, dtype=dtype)
    targets = torch.tensor([target for _, target in SPECIAL.values()])
    for row, (changes, _) in zip(logits, SPECIAL.values(), strict=True):
        for first, last, value in changes:
            row[first:last] = value
    upstream = torch.randn(2, len(SPECIAL))
    flags = (options.get("temperature", 1.0), options.get("softcap"), -100, True)

    def rows_in_torch(logits, wide):
        results = torch.ops.fastppo.logprob_combine(
            torch.ops.fastppo.logprob_stats(logits, targets, None, *flags, 0, 700, "torch")[None],
            targets, None, flags[0], -100, True, "torch",
        )  # fmt: skip
        grad = torch.ops.fastppo.logprob_dlogits(
            logits, targets, None, results[2], *upstream.to(wide), *flags, 0, 700, "torch"
        )
        return results[0], results[1], grad

    baseline, truth = rows_in_torch(logits, torch.float32), rows_in_torch(logits.double(), torch.float64)
    got = ours(logits.cuda().repeat(rows, 1), targets.cuda().repeat(rows), upstream.cuda().repeat(1, rows), **options)
    for name, *values in zip(NAMES, got, baseline, truth, strict=True):
        values[0] = values[0].cpu().unflatten(0, (rows, len(SPECIAL)))[-1]
        for i, what in enumerate(SPECIAL):
            assert_no_worse(f"{name}, {what}", *(x[i] for x in values))


@pytest.mark.parametrize("inplace", [False, True])
def test_zero_upstream_gradients_leak_nothing(inplace):
    logits = make_logits(4, 700, device="cuda")
    logits[1, 3], logits[2], logits[3, 699] = NAN, -INF, INF
    upstream = torch.tensor([[1.0, 0, 0, 0], [0.5, 0, 0, 0]], device="cuda")
    grad = ours(logits, torch.tensor([0, 1, 0, 1], device="cuda"), upstream, inplace=inplace)[2]
    assert_bitwise_equal("unused rows", grad[1:], torch.zeros(3, 700))
    assert bool((grad[0] != 0).all())


def test_one_finite_logit_far_from_the_start_gives_positive_zeros():
    logits = torch.full((1, 100000), -INF, device="cuda")
    logits[0, 50000] = 0.0
    one = torch.ones(2, 1, device="cuda")
    logprobs, entropy, grad = ours(logits, torch.tensor([50000], device="cuda"), one)
    assert_bitwise_equal("logprob", logprobs, torch.zeros(1))
    assert_bitwise_equal("entropy", entropy, torch.zeros(1))
    assert bool((grad == 0).all())


def test_contents_are_checked_on_request(monkeypatch):
    logits, targets = make_logits(2, 9, device="cuda"), torch.tensor([3, 9], device="cuda")
    monkeypatch.setenv("FASTPPO_CHECK", "1")
    with pytest.raises(IndexError, match="targets must be in"):
        logprob(logits, targets)


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5000], ids=["in_parts", "whole"])
@pytest.mark.parametrize("gap", [12.0, 16.0, 24.0])
def test_a_peaked_row_keeps_its_digits(gap, rows):
    """A trained policy's log-prob of -1e-7 has seven digits too; 1 + 1e-7 in float32 has none of them. What is allowed
    is the card's 2^x, 2^-22, the rounding of x = gap * log2(e) to float32, and the sums' 2^-22."""
    logits = torch.full((rows, 40001), -gap, device="cuda")
    logits[:, 7000] = 0.0
    upstream = torch.tensor([[1.0], [0.0]], device="cuda").expand(2, rows)
    logprobs, entropy, grad = ours(logits, torch.full((rows,), 7000, device="cuda"), upstream)
    rest = 40000 * math.exp(-gap)
    p = 1 / (1 + rest)
    allowed = 2 * 2**-22 + 2.0 ** (math.floor(math.log2(gap * math.log2(math.e))) - 24) * math.log(2)
    for row in (0, rows - 1):
        assert float(logprobs[row]) == pytest.approx(-math.log1p(rest), rel=allowed)
        assert float(entropy[row]) == pytest.approx(math.log1p(rest) + p * rest * gap, rel=allowed)
        assert float(grad[row, 7000]) == pytest.approx(p * rest, rel=allowed)


@pytest.mark.parametrize("offset", [1e4, 1e6, -1e6])
def test_a_shift_of_the_logits_changes_nothing(offset):
    logits = (torch.randn(4, 999, device="cuda") * 48).round() / 16
    targets = torch.tensor([0, 5, 500, 998], device="cuda")
    upstream = torch.randn(2, 4, device="cuda")
    plain, shifted = ours(logits, targets, upstream), ours(logits + offset, targets, upstream)
    for a, b in zip(plain, shifted, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("p", [0.99, 0.999, 0.9999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_targets_gradient_is_one_rounding_from_expm1(p, dtype):
    logits = torch.zeros(1, 1024, dtype=dtype, device="cuda")
    logits[0, 3] = math.log(p / (1 - p) * 1023)
    logprobs, _, grad = ours(logits, torch.tensor([3], device="cuda"), torch.tensor([[1.0], [0.0]], device="cuda"))
    right = -math.expm1(float(logprobs))
    assert abs(float(grad[0, 3]) - right) <= torch.finfo(dtype).eps / 2 * right * (1 + 1e-6)


# -- torch's machinery ------------------------------------------------------------------------------------------------


def calls():
    """What takes each kernel: whole rows, rows in parts, in place, a rank's statistics, the linear op."""
    many, few = make_logits(5000, 600, device="cuda"), make_logits(2, 50257, dtype=torch.bfloat16, device="cuda")
    hidden, weight = torch.randn(300, 64, device="cuda"), torch.randn(1000, 64, device="cuda")
    of_many, of_few, of_hidden = make_targets(many, ignored=0.1), make_targets(few), torch.arange(300, device="cuda")
    upstream = torch.randn(2, 5000, device="cuda")
    options = (1.0, None, -100, True)

    def linear():
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        out = linear_logprob(*leaves, of_hidden)
        return *(x.detach() for x in out), *torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), leaves)

    def ranks():
        stats = [
            torch.ops.fastppo.logprob_stats(many[:, a:b], of_many, None, *options, a, b - a, "auto")
            for a, b in ((0, 350), (350, 600))
        ]
        return torch.ops.fastppo.logprob_combine(torch.stack(stats), of_many, None, 1.0, -100, True, "auto")

    return {
        "whole": lambda: ours(many, of_many, upstream),
        "in_parts": lambda: ours(few, of_few, upstream[:, :2]),
        "in_place": lambda: ours(many, of_many, upstream, inplace=True),
        "ranks": ranks,
        "linear": linear,
    }


CALLS = ("whole", "in_parts", "in_place", "ranks", "linear")


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
    for a, b in zip(first, second, strict=True):
        assert_bitwise_equal(name, b, a)


@pytest.mark.parametrize("name", CALLS)
def test_captures_into_a_graph_and_runs_on_a_side_stream(name):
    call = calls()[name]
    expected = call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for x in got:
        x.fill_(NAN)
    graph.replay()
    for a, b, c in zip(got, aside, expected, strict=True):
        assert_bitwise_equal("replayed", a, c)
        assert_bitwise_equal("aside", b, c)


def test_on_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, and torch sees one")
    logits = make_logits(20, 700, device="cuda:1")
    upstream = torch.randn(2, 20, device="cuda:1")
    targets = make_targets(logits)
    got = ours(logits, targets, upstream)
    for name, a, b in zip(
        NAMES, got, ours(logits.to("cuda:0"), targets.to("cuda:0"), upstream.to("cuda:0")), strict=True
    ):
        assert a.device.index == 1
        assert_bitwise_equal(name, a, b)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_in_one_graph(inplace):
    logits = make_logits(40, 700, dtype=torch.bfloat16, device="cuda")
    targets = make_targets(logits, ignored=0.2)

    def loss(x):
        out = logprob(x * 1, targets, temperature=0.7, inplace_backward=inplace)
        return (out.logprobs - 0.1 * out.entropy).sum()

    grads = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        leaf = logits.clone().requires_grad_()
        function(leaf).backward()
        grads.append(leaf.grad)
    assert_bitwise_equal("gradient", grads[1], grads[0])


def test_shapes_and_alignments_need_no_compilation():
    from fastppo.kernels import logprob as kernels

    def binaries():
        return [
            len(kernel.device_caches[torch.cuda.current_device()][0])
            for kernel in (kernels._stats_kernel, kernels._combine_kernel, kernels._dlogits_kernel)
        ]

    storage = torch.randn(3 << 20, device="cuda").bfloat16()

    def call(rows, columns, first):
        logits = storage[first : first + rows * columns].view(rows, columns)
        ours(logits, torch.zeros(rows, dtype=torch.int64, device="cuda"), torch.randn(2, rows, device="cuda"))

    def every_kernel():
        call(5000, 64, 0)  # whole rows
        call(2, 8192, 0)  # parts

    every_kernel()
    call(2, 8191, 1)  # logits and gradient lie differently within 16 bytes
    before = binaries()
    for rows, columns, first in ((1, 1, 0), (1, 16, 3), (4999, 65, 0), (5001, 128, 8), (17, 50257, 5), (16, 65536, 1)):
        call(rows, columns, first)
    assert binaries() == before


@pytest.mark.timeout(300)
def test_more_than_2_to_the_31_logits():
    """16384 x 151936: the last rows' addresses do not fit 32 bits, of the logits nor of a gradient of its own."""
    if torch.cuda.get_device_properties(0).total_memory < 20 << 30:
        pytest.skip("needs 20 GiB")
    logits = torch.zeros(16384, 151936, dtype=torch.bfloat16, device="cuda")
    logits[-2:] = make_logits(2, 151936, dtype=torch.bfloat16, device="cuda")
    targets = torch.zeros(16384, dtype=torch.int64, device="cuda")
    targets[-2:] = make_targets(logits[-2:])
    upstream = torch.ones(2, 16384, device="cuda")
    got = ours(logits, targets, upstream)
    expected = truth_of(logits[-2:].double(), targets[-2:], upstream[:, -2:], dtype=torch.float64)
    torch.testing.assert_close(got[0][-2:].double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1][-2:].double(), expected[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[2][-2:].double(), expected[2], rtol=2**-8, atol=1e-9)


# -- the linear ops ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_linear_logprob_takes_these_rows(memory):
    torch.manual_seed(1)
    hidden, weight = torch.randn(70, 64, device="cuda"), torch.randn(1003, 64, device="cuda") / 4
    targets = torch.randint(1003, (70,), device="cuda")
    targets[::7] = -100
    upstream = torch.randn(2, 70, device="cuda")

    def results(dtype, **options):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        out = linear_logprob(*leaves, targets, softcap=20.0, temperature=0.8, **options)
        grads = torch.autograd.grad((out.logprobs, out.entropy), leaves, list(upstream.to(out.logprobs.dtype)))
        return out.logprobs.detach(), out.entropy.detach(), *grads

    got = results(torch.float32, memory=memory, backend="triton")
    baseline, truth = results(torch.float32, backend="torch"), results(torch.float64, backend="torch")
    for name, *values in zip(("logprobs", "entropy", "dhidden", "dweight"), got, baseline, truth, strict=True):
        assert_no_worse(name, *values)


# -- under compute-sanitizer ------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 40], ids=["in_parts", "whole"])
@pytest.mark.parametrize("inplace", [False, True])
def test_every_kernel_within_its_tensors(monkeypatch, inplace, rows, dtype):
    """Rows that start anywhere; the last one ends where its memory does."""
    monkeypatch.setattr(tiles, "LOGPROB", tiles.LOGPROB._replace(programs=1 if rows > 1 else 8))
    logits = torch.randn(rows * 1337 + 1, device="cuda").to(dtype)[1:].view(rows, 1337)
    targets = torch.full((rows,), 1336, device="cuda")
    upstream = torch.ones(2, rows, device="cuda")
    got = ours(logits, targets, upstream, inplace=inplace)
    assert all(bool(x.isfinite().all()) for x in got)
