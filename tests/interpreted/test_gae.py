"""The Triton kernel of gae: tiles of few positions, so that every path of the launcher takes several of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fastppo.kernels.gae as kernels
from fastppo.kernels.tiles import GAE
from fastppo.ops.gae import gae
from fastppo.packing import cu_seqlens_from_lengths
from fastppo.testing import assert_bitwise_equal, assert_no_worse

# Options, as the names of what is given.
OPTIONS: dict[str, set[str]] = {
    "plain": set(),
    "mask": {"mask"},
    "cuts": {"mask", "terminated", "truncated", "bootstrap_full"},
    "cuts-a-row": {"terminated", "truncated", "bootstrap_row", "lam_returns"},
    "end": {"mask", "terminated", "bootstrap_row"},
    "everything": {"mask", "terminated", "truncated", "bootstrap_full", "lam_row", "lam_returns_row"},
}
# Where a row is longer than a tile of 8, it is walked, or cut up where there are fewer programs than asked for.
SHAPES = {"part-of-a-tile": (3, 5), "several-rows-a-tile": (5, 3), "whole-tiles": (2, 16), "tiles-and-a-part": (2, 21)}
LENGTHS = [0, 5, 0, 0, 1, 9, 8, 3, 0]


def tiles(monkeypatch: pytest.MonkeyPatch, *, split: bool) -> None:
    small = GAE._replace(steps=8, rows_side_by_side=4, steps_of_those=4, programs=1000 if split else 0, window=2)
    monkeypatch.setattr(kernels, "GAE", small)


def inputs(shape: tuple[int, ...], num_seqs: int, options: set[str], seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def floats(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    def flags(p: float) -> Tensor:
        return torch.rand(shape, generator=generator) < p

    arguments: dict[str, Any] = {"rewards": floats(*shape), "values": floats(*shape), "gamma": 0.98, "lam": 0.9}
    for name, p in (("mask", 0.7), ("terminated", 0.15), ("truncated", 0.15)):
        if name in options:
            arguments[name] = flags(p)
    if "bootstrap_full" in options:
        arguments["bootstrap_values"] = floats(*shape)
    if "bootstrap_row" in options:
        arguments["bootstrap_values"] = floats(num_seqs)
    if "lam_row" in options:
        arguments["lam"] = torch.rand(num_seqs, generator=generator)
    if "lam_returns" in options:
        arguments["lam_returns"] = 1.0
    if "lam_returns_row" in options:
        arguments["lam_returns"] = torch.rand(num_seqs, generator=generator)
    return arguments


def check(arguments: dict[str, Any]) -> None:
    wide = arguments | {"rewards": arguments["rewards"].double(), "values": arguments["values"].double()}
    got, baseline, truth = (
        gae(**x, backend=b) for x, b in ((arguments, "triton"), (arguments, "torch"), (wide, "torch"))
    )
    for name, *three in zip(("advantages", "returns"), got, baseline, truth, strict=True):
        assert three[0].dtype == torch.float32
        assert_no_worse(name, *three)


@pytest.mark.parametrize("split", [False, True], ids=["walked", "cut-up"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_padded(monkeypatch, shape, options, split):
    tiles(monkeypatch, split=split)
    check(inputs(shape, shape[0], options))


@pytest.mark.parametrize("split", [False, True], ids=["walked", "cut-up"])
@pytest.mark.parametrize("options", ["mask", "everything"])
def test_time_major(monkeypatch, options, split):
    """More rows than a tile's four."""
    tiles(monkeypatch, split=split)
    arguments = inputs((9, 6), 6, OPTIONS[options])
    check(arguments | {"time_dim": 0})
    for name in ("rewards", "values", "mask"):
        arguments[name] = arguments[name].t().contiguous().t()
    check(arguments | {"time_dim": 0})


@pytest.mark.parametrize(("split", "index"), [(False, torch.int32), (True, torch.int64)], ids=["walked", "cut-up"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed(monkeypatch, options, split, index):
    tiles(monkeypatch, split=split)
    arguments = inputs((sum(LENGTHS),), len(LENGTHS), options)
    check(arguments | {"cu_seqlens": cu_seqlens_from_lengths(LENGTHS, dtype=index)})


@pytest.mark.parametrize(
    ("rewards", "values"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
def test_dtypes_and_strides(monkeypatch, rewards, values):
    tiles(monkeypatch, split=True)
    arguments = inputs((3, 20), 3, OPTIONS["everything"])
    arguments["rewards"] = arguments["rewards"][:, :1].expand(3, 20).to(rewards)
    arguments["values"] = torch.stack((arguments["values"],) * 2, -1)[..., 0].to(values)
    arguments["mask"] = arguments["mask"].to(torch.int64) * 256  # a flag of another dtype, whose first byte is 0
    arguments["terminated"] = arguments["terminated"].to(torch.int8) * 2
    check(arguments)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["walked", "cut-up"])
def test_unselected_positions_reach_nothing(monkeypatch, split, garbage):
    tiles(monkeypatch, split=split)
    arguments = inputs((2, 20), 2, OPTIONS["cuts"])
    clean = gae(**arguments, backend="triton")
    for name in ("rewards", "values", "bootstrap_values"):
        arguments[name] = torch.where(arguments["mask"], arguments[name], garbage)
    for got, expected in zip(gae(**arguments, backend="triton"), clean, strict=True):
        assert_bitwise_equal("output", got, expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["walked", "cut-up"])
def test_what_is_not_finite_reaches_earlier_positions_up_to_a_cut(monkeypatch, split, poison):
    """A row each: cut in front of the poison, cut at it, and not at all; half of lambda's powers underflow."""
    tiles(monkeypatch, split=split)
    rewards, values, terminated = torch.ones(3, 40), torch.full((3, 40), 0.5), torch.zeros(3, 40, dtype=torch.bool)
    rewards[:, 30] = poison
    terminated[0, 20] = terminated[1, 30] = True
    check({"rewards": rewards, "values": values, "terminated": terminated, "gamma": 1.0, "lam": 1e-4})
    check({"rewards": rewards, "values": values, "terminated": terminated, "gamma": 1.0, "lam": 0.0})


def test_whiten(monkeypatch):
    tiles(monkeypatch, split=False)
    arguments = inputs((2, 20), 2, OPTIONS["mask"])
    got, expected = (gae(**arguments, whiten=True, backend=backend) for backend in ("triton", "torch"))
    torch.testing.assert_close(got.advantages, expected.advantages, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_empty(shape):
    empty = torch.zeros(shape)
    assert gae(empty, empty, gamma=0.9, lam=0.9, backend="triton").advantages.shape == shape
