"""logprob's Triton kernels: a small shape for each code path, by the three-way rule, and the special values.

Tiles are small, so that a row of 301 columns has edges on both sides of its groups of 16 bytes, full tiles and a last
one that is not full, in each dtype.
"""

import pytest
import torch

from fastppo import VocabShard, logprob
from fastppo.kernels import logprob as kernels
from fastppo.kernels import tiles
from fastppo.testing import assert_bitwise_equal, assert_no_worse, make_logits, make_targets
from fastppo.vocab import combine_stats
from tests.test_logprob import (  # noqa: F401
    test_a_target_at_minus_infinity_has_the_same_gradient_under_a_softcap,
    test_all_ignored,
    test_all_logits_minus_200,
    test_another_ignore_index_and_dtypes_of_targets,
    test_columns_at_minus_infinity_are_as_if_deleted,
    test_entropy_with_minus_infinity,
    test_ignored_rows_are_not_read,
    test_rows_that_are_no_distribution_are_nan_and_alone_so,
    test_shapes,
    test_target_at_minus_infinity,
)
from tests.test_logprob_grid import LAYOUTS, NAMES, truth_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = tiles.LOGPROB._replace(groups=16, part_groups=1000, least_groups=1, programs=1, combined=16, gradient_bytes=64)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "LOGPROB", SMALL)


def in_parts(monkeypatch, rows: int, parts: int) -> None:
    """Rows are cut as if the device had room for `parts` times as many."""
    monkeypatch.setattr(tiles, "LOGPROB", SMALL._replace(programs=rows * parts))


def ours(logits, targets, upstream, inplace=False, **options):
    """NAMES; the gradient as the op hands it over."""
    leaf = logits.detach().requires_grad_()
    seen = []
    work = leaf * 1 if inplace else leaf
    if inplace:
        work.register_hook(seen.append)
    out = logprob(work, targets, inplace_backward=inplace, backend="triton", **options)
    outputs = [x for x in out if x is not None]
    torch.autograd.backward(outputs, list(upstream[: len(outputs)]))
    return *(x.detach() for x in outputs), seen[0] if inplace else leaf.grad


def assert_three_way(logits, targets, **options):
    upstream = torch.randn(2, *targets.shape)
    got = ours(logits, targets, upstream, **options)
    baseline = truth_of(logits, targets, upstream, dtype=torch.float32, **options)
    truth = truth_of(logits.double(), targets, upstream, dtype=torch.float64, **options)
    for name, *values in zip(NAMES, got, baseline, truth, strict=True):
        assert_no_worse(name, *values)
    return got


# One column; edges without a group; full tiles alone, in either size of element; all paths.
@pytest.mark.parametrize("vocabulary", [1, 5, 128, 301])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns(dtype, vocabulary):
    logits = make_logits(3, vocabulary, dtype=dtype) * 3
    assert_three_way(logits, make_targets(logits))


@pytest.mark.parametrize("kind", ["large", "peaked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softcap_and_a_temperature_per_token(dtype, kind):
    logits = make_logits(3, 301, kind, dtype=dtype)
    assert_three_way(logits, make_targets(logits), softcap=30.0, temperature=torch.tensor([0.3, 1.0, 3.0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_in_parts(monkeypatch, dtype):
    """The first row's largest columns come last, the second has a part of -inf."""
    logits = make_logits(2, 301, dtype=dtype) * 3
    logits[0] = logits[0].float().sort().values.to(dtype)
    logits[1, 100:240] = -torch.inf
    targets = torch.tensor([300, 7])
    in_parts(monkeypatch, 2, 3)
    assert_three_way(logits, targets)


def test_rows_of_an_uneven_last_turn_are_cut(monkeypatch):
    """Of room for four programs five rows would leave three idle at the end, four none."""
    combined = []
    combine = kernels._COMBINE
    monkeypatch.setattr(kernels, "_COMBINE", lambda *arguments: combined.append(1) or combine(*arguments))
    monkeypatch.setattr(tiles, "LOGPROB", SMALL._replace(programs=4, part_groups=20))
    logits = make_logits(5, 301) * 3
    whole = logprob(logits[:4], make_targets(logits[:4]), backend="triton")
    assert not combined
    cut = logprob(logits, make_targets(logits), backend="triton")
    assert combined
    for got, expected in zip(cut, whole, strict=True):
        torch.testing.assert_close(got[:4], expected, rtol=1e-6, atol=1e-6)


def test_parts_keep_the_digits_of_a_peaked_row(monkeypatch):
    logits = torch.full((1, 400), -20.0)
    logits[0, 250] = 0.0
    in_parts(monkeypatch, 1, 3)
    for backend in ("triton", "torch"):
        stats = torch.ops.fastppo.logprob_stats(
            logits, torch.tensor([250]), None, 1.0, None, -100, True, 0, 400, backend
        )
        assert float(stats[0, 1]) == pytest.approx(399 * 2.061153622438558e-09, rel=5e-7)


def test_without_entropy(monkeypatch):
    logits = make_logits(2, 301) * 3
    targets, upstream = make_targets(logits), torch.randn(2, 2)
    whole = ours(logits, targets, upstream * torch.tensor([[1.0], [0.0]]))
    logprobs, grad = ours(logits, targets, upstream, with_entropy=False)
    assert_bitwise_equal("logprobs", logprobs, whole[0])
    torch.testing.assert_close(grad, whole[2], rtol=1e-6, atol=1e-8)
    in_parts(monkeypatch, 2, 3)
    torch.testing.assert_close(ours(logits, targets, upstream, with_entropy=False)[0], logprobs, rtol=1e-6, atol=1e-6)


# name -> this rank's (first column, columns, of which real)
SHARDS = {"first": (0, 150, 150), "last": (150, 160, 151), "empty": (301, 0, 0), "padding": (301, 20, 0)}


@pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS)
def test_statistics_and_gradient_of_a_shard(shard):
    """A target of each shard, an ignored one, and one that no rank holds, which leaves its row NaN."""
    start, width, used = shard
    logits = make_logits(4, 400) * 3
    local = logits[:, start : start + width]
    arguments = (torch.tensor([3, 299, -100, 301]), torch.tensor([0.5, 1.0, torch.nan, 2.0]))
    options = (1.0, 20.0, -100, True, start, used)
    got, expected = (
        torch.ops.fastppo.logprob_stats(local, *arguments, *options, backend) for backend in ("triton", "torch")
    )
    torch.testing.assert_close(got[[0, 1, 3]], expected[[0, 1, 3]], rtol=1e-6, atol=1e-6)
    kept = torch.tensor([[9.0, 30.0, -3.0, -2.0]] * 3 + [[9.0, 30.0, -3.0, torch.nan]])
    upstream = (torch.randn(4), torch.randn(4))
    got, expected = (
        torch.ops.fastppo.logprob_dlogits(local, *arguments, kept, *upstream, *options, backend)
        for backend in ("triton", "torch")
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert bool((got[:, used:] == 0).all()) and bool(got[3, :used].isnan().all())


@pytest.mark.parametrize("width", [304, 301], ids=["aligned", "odd"])
def test_gradient_of_compacted_rows(width):
    """Rows that moved to the first places, over logits that nobody needs any more."""
    logits = make_logits(6, width, dtype=torch.bfloat16)
    source, targets = torch.tensor([5, 1, 4]), torch.tensor([3, 299, 0])
    kept = torch.tensor([[9.0, 30.0, -3.0, -2.0]] * 3)
    options, upstream = (1.0, None, -100, True, 0, width, "triton"), torch.randn(2, 3)
    expected = torch.ops.fastppo.logprob_dlogits(logits[source], targets, None, kept, *upstream, *options)
    written = logits.clone()
    torch.ops.fastppo.logprob_dlogits_(written, targets, None, kept, *upstream, *options, source)
    assert_bitwise_equal("dlogits", written[:3], expected)
    assert_bitwise_equal("rest", written[3:], logits[3:])


def test_combination_of_ranks():
    """Five rows, more than a program's four, of three ranks: the second has no column, the last's m is the largest."""
    torch.manual_seed(3)
    stats = torch.stack((torch.randn(3, 5), torch.rand(3, 5), -torch.rand(3, 5), torch.full((3, 5), torch.inf)), -1)
    stats[1] = torch.tensor([-torch.inf, -1.0, 0.0, torch.inf])
    stats[2, :, 0] += 5
    stats[0, :3, 3] = -1.5
    stats[2, 3, 3] = 0.5
    targets, temperature = torch.tensor([0, 1, -100, 3, 4]), torch.linspace(0.5, 2.0, 5)
    got, expected = (
        torch.ops.fastppo.logprob_combine(stats, targets, temperature, 1.0, -100, True, backend)
        for backend in ("triton", "torch")
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
    m, excess, mean_d, _ = got[2].unbind(1)
    whole = combine_stats(stats, temperature.double())
    torch.testing.assert_close(excess[:2], whole[:2, 1].float(), rtol=1e-6, atol=1e-6)
    assert bool(got[0][4].isnan()), "no rank holds the target"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout):
    """To rounding: the order of a row's sums depends on how it lies within 16 bytes."""
    view = layout(make_logits(6, 301, dtype=torch.bfloat16).view(2, 3, 301))[:, :2]
    plain = view.clone(memory_format=torch.contiguous_format)
    targets = make_targets(plain)
    targets[1, 0] = -100
    upstream = torch.randn(2, *targets.shape)
    expected = ours(plain, targets, upstream)
    for name, got, want in zip(NAMES, ours(view, targets, upstream), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7 if name == "dlogits" else 1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["row_padded", "transposed"])
def test_in_place(layout):
    logits = make_logits(6, 301).view(2, 3, 301).requires_grad_()
    strided = LAYOUTS[layout](logits * 1)
    plain = strided.detach().clone(memory_format=torch.contiguous_format)
    targets = make_targets(plain)
    upstream = torch.randn(2, *targets.shape)
    seen = []
    strided.register_hook(seen.append)
    out = logprob(strided, targets, inplace_backward=True, backend="triton")
    torch.autograd.backward((out.logprobs, out.entropy), list(upstream))
    torch.testing.assert_close(strided.detach(), ours(plain, targets, upstream)[2], rtol=1e-5, atol=1e-7)
    assert_bitwise_equal("gradient", seen[0].contiguous(), strided.detach().contiguous())


@pytest.mark.parametrize("inplace", [False, True])
def test_zero_upstream_gradients_leak_nothing(inplace):
    logits = make_logits(4, 37)
    logits[1, 3], logits[2], logits[3, 36] = torch.nan, -torch.inf, torch.inf
    grad = ours(logits, torch.tensor([0, 1, 0, 1]), torch.tensor([[1.0, 0, 0, 0], [0.5, 0, 0, 0]]), inplace=inplace)[2]
    assert_bitwise_equal("unused rows", grad[1:], torch.zeros(3, 37))
    assert bool((grad[0] != 0).all())


def test_small_inputs_of_other_dtypes_and_strides():
    logits = make_logits(4, 33)
    targets, temperature = make_targets(logits), torch.linspace(0.5, 2, 4).bfloat16()
    upstream = torch.randn(2, 4)
    expected = ours(logits, targets, upstream, temperature=temperature.float())
    strided = [x.repeat_interleave(3, -1)[..., ::3] for x in (targets, upstream, temperature)]
    for name, a, b in zip(NAMES, ours(logits, *strided[:2], temperature=strided[2]), expected, strict=True):
        assert_bitwise_equal(name, a, b)
    leaf = logits.clone().requires_grad_()
    (
        logprob(leaf, targets, temperature=temperature, backend="triton").logprobs.to(torch.bfloat16) * 1.0
    ).sum().backward()
    ones = ours(logits, targets, torch.tensor([[1.0] * 4, [0.0] * 4]), temperature=temperature)
    torch.testing.assert_close(leaf.grad, ones[2], rtol=1e-6, atol=1e-8)


def test_no_rows_and_a_vocabulary_with_padding():
    out = logprob(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), backend="triton")
    assert out.logprobs.shape == out.entropy.shape == (0,)
    logits = make_logits(2, 24)
    targets = make_targets(logits[:, :17])
    padded = ours(logits, targets, torch.ones(2, 2), vocab=VocabShard(0, 24, None, 17))
    plain = ours(logits[:, :17], targets, torch.ones(2, 2))
    for a, b in zip(padded[:2], plain[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(padded[2], torch.nn.functional.pad(plain[2], (0, 7)), rtol=1e-5, atol=1e-7)
