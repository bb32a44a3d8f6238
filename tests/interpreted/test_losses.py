"""The losses' Triton kernels under the interpreter: every option by the three-way rule, sequences across
chunks, layouts, micro-batches, special values."""

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
)

from fastppo.kernels import tiles
from fastppo.kernels.scale import scale
from fastppo.ops.ppo_loss import LOSS_TYPES
from fastppo.testing import assert_bitwise_equal

# With the tiles below: programs of two turns and a tail; sequences of no token, one, part of a chunk, four chunks.
LENGTHS = [7, 1, 12, 0, 44, 37, 101]
EVERYTHING = CASES["gspo-nll-everything"]
# gmpo takes gspo's way through the kernels, and ppo those of the rest.
LEFT_OUT = ("reinforce", "gmpo-", "ppo-token_mean", "gspo-token_mean", "no_clip", "k2-pathwise")
OPTIONS = {name: options for name, options in CASES.items() if not any(word in name for word in LEFT_OUT)}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Loops of more than one turn on few tokens: interpreting is slow."""
    monkeypatch.setattr(tiles, "LOSS_TOKENS", tiles.TokenTiles(groups=8, vector=4, warps=4, programs=3, stages=2))
    for name, size in {"CHUNK": 32, "CHUNK_TILE": 16, "SEQUENCES": 4, "SLOTS": 2, "FINISH_ROWS": 2}.items():
        monkeypatch.setattr(tiles, f"LOSS_{name}", size)


def equal(got, expected):
    for name, a, b in zip(NAMES, got, expected, strict=False):
        assert_bitwise_equal(name, a.reshape(b.shape), b)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_ppo_loss_is_no_worse_than_torch(options):
    assert_ppo_no_worse(inputs(lengths=LENGTHS), "triton", **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_inputs(dtype):
    batch = inputs(dtype, lengths=LENGTHS)
    assert_ppo_no_worse(batch, "triton", **EVERYTHING)
    assert_value_no_worse(batch, "triton", clip_eps=0.2)


@pytest.mark.parametrize("clip_eps", [None, 0.2])
@pytest.mark.parametrize("how", AGGREGATIONS)
def test_value_loss_is_no_worse_than_torch(how, clip_eps):
    options = {"aggregation": how, "clip_eps": clip_eps, **AGGREGATIONS[how]}
    assert_value_no_worse(inputs(lengths=LENGTHS), "triton", **options)


def test_no_tokens_at_all():
    batch = {k: v[:0] for k, v in inputs(lengths=[3]).items()} | {"cu_seqlens": torch.tensor([0, 0])}
    loss, metrics, grad, _ = ppo(batch, backend="triton", **EVERYTHING)
    assert float(loss) == 0 and not metrics.any() and grad.shape == (0,)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_and_packing_change_no_bit(layout):
    batch = inputs(lengths=[37] * 3)
    options = {k: v for k, v in EVERYTHING.items() if k != "num_seqs"}
    packed = ppo(batch, backend="triton", **options)
    shaped = {k: layout(v.view(3, 37)) if k != "cu_seqlens" else v for k, v in batch.items()}
    equal(ppo(shaped, packed=False, backend="triton", **options), packed)


@pytest.mark.parametrize("loss_type", ["ppo", "gspo", "gmpo"])
def test_micro_batches_are_the_whole(loss_type):
    lengths = [5, 70, 0, 33]
    batch = inputs(lengths=lengths)
    counts = {"num_tokens": max(int(batch["mask"].sum()), 1), "num_seqs": torch.tensor(len(lengths))}
    options = dict(
        backend="triton", loss_type=loss_type, aggregation="seq_mean_token_mean", ref_logprobs="ref_logprobs",
        kl_coef=0.1, **counts,
    )  # fmt: skip
    whole = ppo(batch, **options)
    ends = batch["cu_seqlens"].tolist()
    parts = []
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        part = {k: v[start:end] for k, v in batch.items() if k != "cu_seqlens"}
        parts.append(ppo(part | {"cu_seqlens": torch.tensor([0, end - start])}, **options))
    assert float(sum(p[0] for p in parts)) == pytest.approx(float(whole[0]), rel=1e-6, abs=1e-7)
    torch.testing.assert_close(sum(p[1] for p in parts), whole[1], rtol=1e-9, atol=1e-9)
    assert_bitwise_equal("dlogprobs", torch.cat([p[2] for p in parts]), whole[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
def test_backwards_kernel_gives_torchs_bits(dtype):
    kept = torch.randn(3, 37) * 10 ** torch.linspace(-9, 6, 37)
    scales, upstream = torch.tensor([0.37, -1.7e-3]), torch.tensor(1.9)
    factor, nll_factor = upstream * scales
    code = [torch.float32, torch.float16, torch.bfloat16].index(dtype)
    with_nll, entropy = torch.ops.fastppo.loss_grad(kept, scales, upstream, code, 0, "triton")
    assert_bitwise_equal("with nll", with_nll, (kept[0] * factor + kept[2] * nll_factor).to(dtype))
    assert_bitwise_equal("entropy", entropy, kept[1] * factor)
    nothing, got = torch.ops.fastppo.loss_grad(kept[:1], scales[:1], upstream, -1, code, "triton")
    assert_bitwise_equal("entropy alone", got, (kept[0] * factor).to(dtype))
    assert nothing.numel() == 0


@pytest.mark.parametrize("options", [EVERYTHING, CASES["seq_mask_tis-gspo"], CASES["gmpo"]])
def test_garbage_where_nothing_is_selected_reaches_nothing(options):
    batch = inputs(lengths=LENGTHS)
    garbage = torch.tensor([math.nan, math.inf, -math.inf]).repeat(len(batch["mask"]))
    dirty = {k: torch.where(batch["mask"], v, garbage[: len(v)]) if k in PPO_FIELDS else v for k, v in batch.items()}
    equal(ppo(dirty, backend="triton", **options), ppo(batch, backend="triton", **options))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("field", ["logprobs", "advantages"])
def test_nan_of_a_selected_token_is_nan_in_loss_and_gradient(field, loss_type):
    batch = inputs(lengths=[4, 3])
    batch["mask"][:] = True
    batch[field][1] = math.nan
    loss, _, grad = ppo(batch, backend="triton", loss_type=loss_type, ref_logprobs="ref_logprobs", kl_coef=0.1)
    assert bool(loss.isnan())
    assert bool(grad[:4].isnan().any()) and bool(grad[4:].isfinite().all())


@pytest.mark.parametrize("correction", ["tis", "icepop", "seq_mask_tis"])
def test_an_old_log_prob_of_nan_is_not_dropped_by_the_correction(correction):
    batch = inputs(lengths=[4, 3])
    batch["mask"][:] = True
    batch["old_logprobs"][1] = math.nan
    options = dict(is_correction=correction, rollout_logprobs="rollout_logprobs")
    loss, _, grad = ppo(batch, backend="triton", **options)
    assert bool(loss.isnan()) and bool(grad[1].isnan())


@pytest.mark.parametrize("tokens", [1, 16, 12304])
def test_scale(tokens):
    """Out of place and in place, where a factor of 1 leaves everything as it is."""
    x = torch.randn(tokens)
    for factor in (torch.tensor(0.37), torch.tensor(1.0)):
        for dtype in (torch.float32, torch.float16):
            out = torch.empty(tokens, dtype=dtype)
            scale(x, factor, out)
            assert_bitwise_equal("out", out, (x * factor).to(dtype))
        inplace = x.clone()
        scale(inplace, factor, inplace)
        assert_bitwise_equal("in place", inplace, x * factor)
