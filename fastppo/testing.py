"""Checks and inputs for testing these ops, and your own integration of them.

    truth = op(inputs in float64),  baseline = plain PyTorch in the inputs' dtype,  got = what is tested
    assert_no_worse("dlogits", got, baseline, truth)

The three-way rule asks no kernel for digits that PyTorch does not have in the same dtype, and forgives none it has.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def assert_no_worse(
    name: str, got: Tensor, baseline: Tensor, truth: Tensor, *, factor: float = 2.0, atol: float | None = None
) -> None:
    """max |got - truth| <= factor * max |baseline - truth| + atol; inf and NaN in the same places as in truth.

    Args:
        name: for the message.
        got, baseline, truth: one shape, any floating dtypes and devices; compared in float64.
        factor: how much worse than the baseline is still no worse.
        atol: None: one rounding of `got`'s dtype at truth's largest finite magnitude, so that an exact baseline
            does not ask for exactness.

    Raises:
        AssertionError: with the name, the worst index, the three values there and the share of elements beyond the
            bound.
    """
    if not got.shape == baseline.shape == truth.shape:
        raise AssertionError(
            f"{name}: shapes differ: got {list(got.shape)}, baseline {list(baseline.shape)}, truth {list(truth.shape)}"
        )
    if got.numel() == 0:
        return
    rounding = torch.finfo(got.dtype).eps
    values = [x.detach().double().cpu().flatten() for x in (got, baseline, truth)]
    finite = values[2].isfinite()
    strange = ~finite & ~_same(values[0], values[2]) | finite & ~values[0].isfinite()
    if bool(strange.any()):
        raise AssertionError(
            f"{name}: inf or NaN in other places than in truth: {_report(strange.double(), strange, got.shape, values)}"
        )
    if not bool(finite.any()):
        return
    if atol is None:
        atol = rounding * float(values[2][finite].abs().max())
    error = torch.where(finite, (values[0] - values[2]).abs(), 0.0)
    allowed = torch.where(finite, (values[1] - values[2]).abs(), 0.0)
    allowed = torch.where(allowed.isfinite(), allowed, 0.0)
    bound = factor * float(allowed.max()) + atol
    if float(error.max()) > bound:
        raise AssertionError(
            f"{name}: error {float(error.max()):.3e} > {factor} * {float(allowed.max()):.3e} (baseline) + {atol:.3e}: "
            + _report(error, error > bound, got.shape, values)
        )


def assert_bitwise_equal(name: str, got: Tensor, expected: Tensor) -> None:
    """Same shape, dtype and bits; any NaN equals any NaN, and 0 is not -0.

    Raises:
        AssertionError: with the name, the worst index, both values there and the share of elements that differ.
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise AssertionError(
            f"{name}: got {list(got.shape)} {got.dtype}, expected {list(expected.shape)} {expected.dtype}"
        )
    values = [x.detach().cpu().flatten() for x in (got, expected)]
    differ = ~_same(*values)
    if got.is_floating_point():
        differ |= (values[0] == 0) & (values[0].signbit() != values[1].signbit())
    if bool(differ.any()):
        wide = [x.double() for x in values]
        gap = torch.where(differ, (wide[0] - wide[1]).abs().nan_to_num(torch.inf), -1.0)
        raise AssertionError(f"{name}: not bitwise equal: {_report(gap, differ, got.shape, wide)}")


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b


def _report(gap: Tensor, bad: Tensor, shape: torch.Size, values: list[Tensor]) -> str:
    worst = int(gap.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), shape)] if shape else []
    labels = ("got", "baseline", "truth") if len(values) == 3 else ("got", "expected")
    shown = ", ".join(f"{label} {float(x[worst]):.9g}" for label, x in zip(labels, values, strict=True))
    return f"worst at {index}: {shown}; {int(bad.sum())} of {bad.numel()} elements ({float(bad.double().mean()):.2%})"


LOGITS = ("normal", "flat", "peaked", "large", "holes")


def make_logits(
    rows: int,
    vocab: int,
    kind: str = "normal",
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Tensor:
    """[rows, vocab] logits of one kind.

    "normal" is an untrained head, "flat" all equal, "peaked" one column far above the rest, as after training,
    "large" an offset of 1e4, "holes" has a third of the columns at -inf.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=generator)
    if kind == "flat":
        x = torch.full_like(x, 0.75)
    elif kind == "peaked":
        top = torch.randint(vocab, (rows, 1), generator=generator)
        x = x.scatter(1, top, 20.0)
    elif kind == "large":
        x = x + 1e4
    elif kind == "holes":
        x = x.masked_fill(torch.rand(rows, vocab, generator=generator) < 1 / 3, -torch.inf)
        x[:, 0] = 0.0
    elif kind != "normal":
        raise ValueError(f"kind must be one of {', '.join(map(repr, LOGITS))}, got {kind!r}")
    return x.to(device=device, dtype=dtype)


def make_targets(logits: Tensor, *, ignored: float = 0.0, ignore_index: int = -100, seed: int = 0) -> Tensor:
    """[...] int64, each a column that is not -inf; a share of `ignored` rows get ignore_index."""
    generator = torch.Generator().manual_seed(seed + 1)
    shape, vocab = logits.shape[:-1], logits.shape[-1]
    score = torch.rand(*shape, vocab, generator=generator).masked_fill(logits.cpu() == -torch.inf, -1.0)
    targets = score.argmax(-1)
    targets[torch.rand(shape, generator=generator) < ignored] = ignore_index
    return targets.to(logits.device)


class LossInputs(NamedTuple):
    """Per-token inputs [T] of the losses, packed."""

    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor
    entropy: Tensor
    advantages: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    mask: Tensor  # bool
    cu_seqlens: Tensor  # [B + 1] int32


def make_loss_inputs(
    lengths: list[int],
    *,
    selected: float = 0.75,
    spread: float = 0.3,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> LossInputs:
    """Random inputs of sequences of these lengths; log ratios have standard deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal() -> Tensor:
        return torch.randn(tokens, generator=generator, dtype=torch.float64)

    old = -torch.rand(tokens, generator=generator, dtype=torch.float64) * 3 - spread
    values = normal()
    floats = (
        (old + spread * normal()).clamp_max(0),
        old,
        (old + spread * normal()).clamp_max(0),
        (old + 0.1 * spread * normal()).clamp_max(0),
        torch.rand(tokens, generator=generator, dtype=torch.float64) * 2,
        normal(),
        values + spread * normal(),
        values,
        values + normal(),
    )
    mask = torch.rand(tokens, generator=generator) < selected
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return LossInputs._make(
        [*(x.to(device=device, dtype=dtype) for x in floats), mask.to(device), cu_seqlens.to(device)]
    )
