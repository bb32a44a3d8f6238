"""gae against a float64 oracle that cuts unselected positions out, for every backend, option and layout.

Legend: B sequences, T positions.
"""

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastppo.ops._whiten import whiten as whiten_on_cpu
from fastppo.ops.gae import GAEOutput, gae
from fastppo.packing import cu_seqlens_from_lengths
from fastppo.reference.advantages import whiten as whiten_definition
from fastppo.reference.gae import gae as definition

BACKENDS = ["cpu", "torch", pytest.param("cuda", marks=pytest.mark.gpu)]
# What takes few kernels: Triton compiles one for each set of options. interpreted/test_gae.py has the others.
ALL_BACKENDS = [*BACKENDS, pytest.param("triton", marks=pytest.mark.gpu)]

# CPU: vectors of 16 positions, tiles of 128, 4 or 8 sequences side by side; 16 in lanes where time-major. CUDA: quads
# of positions, segments of 128; test_gpu_gae.py has longer rows.
SHAPES = {
    "one": (1, 1),
    "part-of-a-group": (3, 5),
    "a-group-and-a-tile": (4, 64),
    "a-group-and-a-lane-past-a-tile": (5, 65),
    "wide-groups-and-a-lane": (33, 7),
    "three-tiles": (17, 131),
    "four-tiles-and-a-vector": (3, 400),
    "warp-tile": (2, 32),
    "past-a-warp-tile": (2, 33),
}

FULL = ("mask", "terminated", "truncated")
OPTIONS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "mask": ("mask",),
    "terminated": ("terminated",),
    "truncated": ("truncated", "bootstrap_full"),
    "truncated-one-bootstrap-a-row": ("truncated", "bootstrap_row"),
    "bootstrap-at-the-end": ("mask", "bootstrap_row"),
    "bootstrap-unless-terminated": ("mask", "terminated", "bootstrap_row"),
    "lam-a-row": ("mask", "lam_row"),
    "decoupled": ("mask", "terminated", "lam_returns"),
    "decoupled-a-row": ("mask", "lam_returns_row"),
    "everything": (*FULL, "bootstrap_full", "lam_row", "lam_returns_row"),
    "everything-a-row": (*FULL, "bootstrap_row", "lam_returns"),
}


def oracle(
    rewards: np.ndarray,
    values: np.ndarray,
    gamma: float,
    lam: float,
    lam_returns: float | None,
    mask: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    bootstrap: np.ndarray | None,
    final: float | None,
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence [T], float64. bootstrap [T] is read where truncated; final is V after the last selected position."""
    advantages, returns = np.zeros(len(rewards)), np.zeros(len(rewards))
    kept = np.flatnonzero(mask)
    r, v = rewards[kept], values[kept]
    following = np.append(v[1:], 0.0 if final is None else final)
    for j, t in enumerate(kept):
        if terminated[t]:
            following[j] = 0.0
        elif truncated[t]:
            following[j] = bootstrap[t]
    delta = r + gamma * following - v
    go_on = ~(terminated[kept] | truncated[kept])
    for j, t in enumerate(kept):  # the sum of eq. 16, forward from each position
        for out, decay in ((advantages, gamma * lam), (returns, gamma * (lam if lam_returns is None else lam_returns))):
            weight, k, total = 1.0, j, delta[j]
            while go_on[k] and k + 1 < len(kept):
                k, weight = k + 1, weight * decay
                total += weight * delta[k]
            out[t] = total
        returns[t] += v[j]
    return advantages, returns


class Case:
    """Inputs [B, T] in float64, rounded to a dtype where asked, and the arguments and answers that follow from them."""

    def __init__(self, shape: tuple[int, int], options: tuple[str, ...], dtype: torch.dtype = torch.float32) -> None:
        b, t = shape
        rng = np.random.default_rng(b * 1000 + t)

        def floats(*size: int) -> Tensor:
            return torch.from_numpy(rng.standard_normal(size)).to(dtype)

        def flags(p: float) -> Tensor:
            return torch.from_numpy(rng.random(shape) < p)

        self.gamma, self.lam = 0.98, 0.9
        self.full: dict[str, Tensor] = {"rewards": floats(b, t), "values": floats(b, t)}
        probability = {"mask": 0.6, "terminated": 0.15, "truncated": 0.15}
        self.full |= {name: flags(probability[name]) for name in FULL if name in options}
        self.row: dict[str, Tensor | float] = {}
        if "bootstrap_full" in options:
            self.full["bootstrap_values"] = floats(b, t)
        if "bootstrap_row" in options:
            self.row["bootstrap_values"] = floats(b)
        self.row["lam"] = torch.from_numpy(rng.random(b)).float() if "lam_row" in options else self.lam
        if "lam_returns" in options:
            self.row["lam_returns"] = 1.0
        if "lam_returns_row" in options:
            self.row["lam_returns"] = torch.from_numpy(rng.random(b)).float()

    def arguments(self, view: Callable[[Tensor], Tensor] = lambda x: x, device: str = "cpu") -> dict[str, Any]:
        moved = {name: view(x.to(device)) for name, x in self.full.items()}
        rows = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.row.items()}
        return moved | rows | {"gamma": self.gamma}

    def expected(self, lengths: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        b, t = self.full["rewards"].shape
        lengths = [t] * b if lengths is None else lengths
        advantages, returns = np.zeros((b, t)), np.zeros((b, t))
        nothing = np.zeros((b, t), dtype=bool)
        full = {name: x.double().numpy() for name, x in self.full.items()}
        row = {
            name: x.double().numpy() if isinstance(x, Tensor) else np.full(b, x, dtype=np.float64)
            for name, x in self.row.items()
        }
        bootstrap, final = full.get("bootstrap_values"), None
        if "bootstrap_values" in row:
            spread = np.repeat(row["bootstrap_values"][:, None], t, axis=1)
            bootstrap, final = (spread, None) if "truncated" in full else (None, row["bootstrap_values"])
        for i, n in enumerate(lengths):
            advantages[i, :n], returns[i, :n] = oracle(
                full["rewards"][i, :n],
                full["values"][i, :n],
                self.gamma,
                row["lam"][i],
                row["lam_returns"][i] if "lam_returns" in row else None,
                full.get("mask", ~nothing)[i, :n] != 0,
                full.get("terminated", nothing)[i, :n] != 0,
                full.get("truncated", nothing)[i, :n] != 0,
                None if bootstrap is None else bootstrap[i, :n],
                None if final is None else final[i],
            )
        return advantages, returns


@functools.cache
def answers(
    shape: tuple[int, int], options: tuple[str, ...], lengths: tuple[int, ...] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What every backend, layout and kind of index is compared with; the oracle takes longer than they do."""
    return Case(shape, options).expected(None if lengths is None else list(lengths))


def device_of(backend: str) -> str:
    return "cuda" if backend in ("cuda", "triton") else "cpu"


def close(output: GAEOutput, expected: tuple[np.ndarray, np.ndarray], dtype: torch.dtype = torch.float32) -> None:
    # A few roundings of the largest term a position depends on.
    eps = 1e-14 if dtype == torch.float64 else 1e-6
    for name, got, want in zip(("advantages", "returns"), output, expected, strict=True):
        assert got.dtype == dtype and not got.requires_grad
        atol = eps * max(1, abs(want).max(initial=0))
        np.testing.assert_allclose(got.cpu().double().numpy(), want, rtol=0, atol=atol, err_msg=name)


def same_bits(a: GAEOutput, b: GAEOutput) -> None:
    for name, x, y in zip(("advantages", "returns"), a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


# --- Against the oracle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_padded(shape: tuple[int, int], options: tuple[str, ...], backend: str) -> None:
    case = Case(shape, options)
    close(gae(**case.arguments(device=device_of(backend)), backend=backend), answers(shape, options))


# Lengths with empty sequences at both ends and inside, one token, exactly a tile, and past one.
LENGTHS = [0, 5, 1, 0, 64, 66, 32, 33, 2, 128, 300, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("copies", [1, 2], ids=["narrow-groups", "wide-groups"])
def test_packed(copies: int, options: tuple[str, ...], index: torch.dtype, backend: str) -> None:
    lengths = LENGTHS * copies
    case = Case((len(lengths), max(lengths)), options)
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    arguments = case.arguments(lambda x: x.cpu()[inside].to(x.device), device_of(backend))
    cu_seqlens = cu_seqlens_from_lengths(lengths, dtype=index, device=device_of(backend))
    advantages, returns = answers((len(lengths), max(lengths)), options, tuple(lengths))
    close(gae(**arguments, cu_seqlens=cu_seqlens, backend=backend), (advantages[inside], returns[inside]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", ["plain", "everything", "everything-a-row", "bootstrap-unless-terminated"])
def test_one_sequence_without_cu_seqlens(options: str, backend: str) -> None:
    case = Case((1, 70), OPTIONS[options])
    advantages, returns = case.expected()
    output = gae(**case.arguments(lambda x: x[0], device_of(backend)), backend=backend)
    close(output, (advantages[0], returns[0]))


def spaced(x: Tensor) -> Tensor:
    """Every other element of both dimensions of something larger."""
    room = torch.full((2 * x.shape[0] + 1, 2 * x.shape[1] + 1), 1, dtype=x.dtype, device=x.device)
    room[1::2, 1::2] = x
    return room[1::2, 1::2]


# How [B, T] is laid out, and the time_dim that says so.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "strided": (spaced, -1),
    "columns-contiguous": (lambda x: x.t().contiguous().t(), 1),
    "time-major": (lambda x: x.t().contiguous(), 0),
    "time-major-view": (lambda x: x.t(), -2),
    "time-major-strided": (lambda x: spaced(x).t(), 0),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("options", ["mask", "everything", "everything-a-row"])
@pytest.mark.parametrize("shape", [(4, 65), (16, 3), (19, 67), (35, 150)], ids=str)
def test_layouts(
    shape: tuple[int, int], options: str, layout: tuple[Callable[[Tensor], Tensor], int], backend: str
) -> None:
    view, time_dim = layout
    case = Case(shape, OPTIONS[options])
    output = gae(**case.arguments(view, device_of(backend)), time_dim=time_dim, backend=backend)
    if time_dim in (0, -2):
        assert output.advantages.shape == (shape[1], shape[0])
        output = GAEOutput(output.advantages.t(), output.returns.t())
    close(output, answers(shape, OPTIONS[options]))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("steps", [9, 48])
@pytest.mark.parametrize("which", ["rewards", "values", "mask", "terminated"])
@pytest.mark.parametrize("dim", [0, 1])
def test_expanded_inputs(dim: int, which: str, steps: int, backend: str) -> None:
    case = Case((6, steps), ("mask", "terminated") if which == "terminated" else ("mask",))
    case.full[which] = case.full[which].narrow(dim, 0, 1)
    wide = case.arguments(lambda x: x.expand(6, steps), device_of(backend))
    assert wide[which].stride(dim) == 0
    case.full = {name: x.expand(6, steps).contiguous() for name, x in case.full.items()}
    close(gae(**wide, backend=backend), case.expected())


FLOATS = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rewards", "values"), list(itertools.product(FLOATS, FLOATS)), ids=str)
def test_dtypes_in_any_mix(rewards: torch.dtype, values: torch.dtype, backend: str) -> None:
    case = Case((17, 70), OPTIONS["everything"])
    case.full["rewards"] = case.full["rewards"].to(rewards)
    case.full["values"] = case.full["values"].to(values)
    case.full["bootstrap_values"] = case.full["bootstrap_values"].to(values)
    close(gae(**case.arguments(device=device_of(backend)), backend=backend), case.expected())


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_every_float16_is_read_exactly(backend: str) -> None:
    """Subnormals, infinities and NaN included: with gamma 0 and value 0 the advantage is the reward."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    rewards = bits.view(torch.float16).to(device_of(backend))
    rewards = rewards[rewards.isfinite()]
    if backend == "torch":  # which walks over the positions of all rows at once
        rewards = rewards.view(-1, 31)
    values = torch.zeros_like(rewards)
    assert torch.equal(gae(rewards, values, gamma=0.0, lam=0.0, backend=backend).advantages, rewards.float())
    for special in (float("inf"), float("-inf"), float("nan")):
        one = torch.tensor([special], dtype=torch.float16, device=rewards.device)
        got = gae(one, torch.zeros_like(one), gamma=0.0, lam=0.0, backend=backend).advantages
        torch.testing.assert_close(got, one.float(), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("wide", ["rewards", "values", "bootstrap_values"])
def test_float64_goes_to_the_reference(wide: str, backend: str) -> None:
    case = Case((3, 40), OPTIONS["everything"])
    case.full[wide] = case.full[wide].double() + 1e-12
    close(gae(**case.arguments(device=device_of(backend)), backend=backend), case.expected(), torch.float64)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float32, torch.bfloat16], ids=str
)
def test_flags_of_any_dtype_are_true_where_not_zero(dtype: torch.dtype, backend: str) -> None:
    case = Case((5, 40), OPTIONS["everything"])
    expected = case.expected()
    for name in FULL:
        case.full[name] = case.full[name].to(dtype) * (1 if dtype == torch.bool else 2)
    if dtype.is_floating_point:
        mask = case.full["mask"]
        case.full["mask"] = torch.where(mask == 0, -0.0, torch.nan).to(dtype)
    close(gae(**case.arguments(device=device_of(backend)), backend=backend), expected)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)], ids=str)
def test_empty(shape: tuple[int, int], backend: str) -> None:
    empty = torch.zeros(shape, device=device_of(backend))
    for output in gae(empty, empty, gamma=0.9, lam=0.9, mask=empty, backend=backend):
        assert output.shape == shape and output.dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offsets", [[0], [0, 0, 0]], ids=str)
def test_empty_packed(offsets: list[int], backend: str) -> None:
    empty = torch.zeros(0, device=device_of(backend))
    cu_seqlens = torch.tensor(offsets, device=device_of(backend))
    assert gae(empty, empty, gamma=0.9, lam=0.9, cu_seqlens=cu_seqlens, backend=backend).advantages.shape == (0,)


# --- Known values and what the mask means -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_value_of_padding_is_not_the_next_value(backend: str) -> None:
    device = device_of(backend)
    rewards, values, mask = (torch.tensor(x, device=device) for x in ([0.0, 1, 0], [0.0, 0, 100], [1, 1, 0]))
    output = gae(rewards, values, gamma=1.0, lam=0.95, mask=mask, backend=backend)
    assert output.advantages.tolist() == [pytest.approx(0.95), 1.0, 0.0]
    assert output.returns.tolist() == [pytest.approx(0.95), 1.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", ["mask", "everything", "everything-a-row", "bootstrap-unless-terminated"])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("shape", [(5, 70), (18, 40)], ids=str)
def test_unselected_positions_reach_nothing(shape: tuple[int, int], garbage: float, options: str, backend: str) -> None:
    case = Case(shape, OPTIONS[options])
    device = device_of(backend)
    clean = gae(**case.arguments(device=device), backend=backend)
    out = ~case.full["mask"]
    for name, x in case.full.items():
        if name != "mask":
            case.full[name] = torch.where(out, True if x.dtype == torch.bool else garbage, x)
    assert case.full["rewards"].isfinite().logical_not().any()
    same_bits(gae(**case.arguments(device=device), backend=backend), clean)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_sequence_without_selected_positions_reads_no_bootstrap_value(backend: str) -> None:
    device = device_of(backend)
    rewards = torch.full((2, 40), torch.nan, device=device)
    rewards[1] = 1.0
    mask = torch.tensor([[False], [True]], device=device).expand(2, 40)
    bootstrap = torch.tensor([torch.nan, 0.0], device=device)
    output = gae(
        rewards, torch.zeros_like(rewards), gamma=1.0, lam=1.0, mask=mask, bootstrap_values=bootstrap, backend=backend
    )
    assert output.advantages[0].tolist() == [0.0] * 40
    assert output.advantages[1].tolist() == list(range(40, 0, -1))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_tool_output_between_two_turns_vanishes(backend: str) -> None:
    device = device_of(backend)
    rewards, values = torch.randn(100, device=device), torch.randn(100, device=device)
    mask = torch.ones(100, dtype=torch.bool, device=device)
    mask[20:75] = False
    options: dict[str, Any] = {"gamma": 0.97, "lam": 0.9, "backend": backend}
    whole = gae(rewards, values, mask=mask, **options)
    cut = gae(rewards[mask], values[mask], **options)
    torch.testing.assert_close(whole.advantages[mask], cut.advantages, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole.returns[mask], cut.returns, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_nothing_crosses_an_episodes_end(poison: float, backend: str) -> None:
    """Two episodes in one row: not even a NaN of the second reaches the first, at every place within a tile."""
    device = device_of(backend)
    steps = 80
    for end in range(steps - 1):
        rewards = torch.ones(2, steps, device=device)
        rewards[:, end + 1 :] = poison
        values = torch.full_like(rewards, 0.5)
        values[:, end + 1 :] = poison
        flag = torch.zeros(2, steps, dtype=torch.bool, device=device)
        flag[:, end] = True
        terminated, truncated = flag.clone(), flag.clone()
        terminated[1] = False
        output = gae(
            rewards, values, gamma=1.0, lam=1.0, terminated=terminated, truncated=truncated,
            bootstrap_values=torch.full_like(rewards, 10.0), backend=backend,
        )  # fmt: skip
        left = torch.arange(end + 1, 0, -1, device=device)
        assert torch.equal(output.returns[0, : end + 1], left.float())
        assert torch.equal(output.returns[1, : end + 1], left + 10.0)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_full_shape_and_per_sequence_bootstrap_of_one_token_sequences_agree(backend: str) -> None:
    """[T] and [B] are the same shape here; both readings must give the same."""
    device = device_of(backend)
    x, bootstrap = torch.zeros(3, device=device), torch.tensor([1.0, 2.0, 3.0], device=device)
    cu_seqlens = torch.arange(4, device=device)
    options: dict[str, Any] = {
        "gamma": 0.5,
        "lam": 1.0,
        "cu_seqlens": cu_seqlens,
        "bootstrap_values": bootstrap,
        "backend": backend,
    }
    truncated = torch.ones(3, dtype=torch.bool, device=device)
    assert gae(x, x, truncated=truncated, **options).advantages.tolist() == [0.5, 1.0, 1.5]
    assert gae(x, x, **options).advantages.tolist() == [0.5, 1.0, 1.5]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_full_shape_bootstrap_without_truncated_is_read_nowhere(backend: str) -> None:
    case = Case((3, 9), ())
    arguments = case.arguments(device=device_of(backend))
    bootstrap = torch.full_like(arguments["values"], torch.nan)
    same_bits(gae(**arguments, bootstrap_values=bootstrap, backend=backend), gae(**arguments, backend=backend))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_whiten(backend: str) -> None:
    case = Case((6, 30), OPTIONS["everything"])
    arguments = case.arguments(device=device_of(backend))
    plain, white = gae(**arguments, backend=backend), gae(**arguments, whiten=True, backend=backend)
    selected = plain.advantages[arguments["mask"]].double()
    expected = (selected - selected.mean()) / (selected.var(correction=0) + 1e-8).sqrt()
    torch.testing.assert_close(white.advantages[arguments["mask"]].double(), expected, rtol=1e-5, atol=1e-6)
    assert white.advantages[~arguments["mask"]].eq(0).all()
    assert torch.equal(white.returns, plain.returns)
    reference = GAEOutput(*definition(**arguments, whiten=True))
    torch.testing.assert_close(white.advantages, reference.advantages, rtol=1e-5, atol=1e-6)


WHITENED_SIZES = {
    "one": (1, 1),
    "part-of-a-vector": (1, 7),
    "a-block": (2, 2048),
    "past-a-block": (1, 4097),
    "tasks": (33, 1021),
}


@pytest.mark.parametrize("mask", [None, "some", "bytes", "floats", "time-major"])
@pytest.mark.parametrize("shape", WHITENED_SIZES.values(), ids=WHITENED_SIZES)
def test_whitening_kernel_is_the_definition(shape: tuple[int, int], mask: str | None) -> None:
    x = torch.randn(shape) * 3 + 100
    selected: Tensor | None = torch.rand(shape) < 0.7
    if mask == "bytes":
        selected = selected.to(torch.int8) * 2
    elif mask == "floats":
        selected = torch.where(selected, torch.nan, -0.0)
    elif mask == "time-major":
        selected = selected.t().contiguous().t()
    elif mask is None:
        selected = None
    if selected is not None:
        x[selected == 0] = torch.nan
    got = whiten_on_cpu(x, selected, group=None)
    torch.testing.assert_close(got, whiten_definition(x, selected), rtol=1e-6, atol=1e-6)
    assert selected is None or torch.equal(got[selected == 0], torch.zeros_like(got[selected == 0]))


def test_moments_hold_for_a_mean_far_from_zero() -> None:
    """Sums of squares would cancel: x^2 is 1e12 times the variance."""
    x = 1e6 + torch.rand(20000)
    count, mean, squares = torch.ops.fastppo.moments(x, None).tolist()
    wide = x.double().numpy()
    assert count == 20000
    assert mean == pytest.approx(wide.mean(), rel=1e-14)
    assert squares == pytest.approx(((wide - wide.mean()) ** 2).sum(), rel=1e-9)


@pytest.mark.parametrize("value", [0.1, -3e7])
def test_whitening_equal_advantages_gives_exactly_zero(value: float) -> None:
    x = torch.full((9001,), value)
    assert torch.equal(whiten_on_cpu(x, None, group=None), torch.zeros(9001))


@pytest.mark.parametrize("selected", [0, 1])
def test_whitening_none_or_one_selected_gives_zero(selected: int) -> None:
    rewards, mask = torch.full((2, 40), 3.0), torch.zeros(2, 40, dtype=torch.bool)
    mask[1, :selected] = True
    output = gae(rewards, torch.zeros_like(rewards), gamma=0.9, lam=0.9, mask=mask, whiten=True, backend="cpu")
    assert torch.equal(output.advantages, torch.zeros(2, 40))


def test_whitening_does_not_depend_on_the_thread_count() -> None:
    x, mask = torch.randn(300_000), torch.rand(300_000) < 0.5
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(whiten_on_cpu(x, mask, group=None))
    torch.set_num_threads(1)
    assert all(torch.equal(x, results[0]) for x in results[1:])


def whiten_on_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(rank * 3000, generator=generator) + rank  # nothing at all on the first rank
    mask = torch.rand(x.shape, generator=generator) < 0.6
    ours, theirs = whiten_on_cpu(x, mask, group=None), whiten_definition(x, mask)
    torch.save((x, mask, ours, theirs), f"{folder}/{rank}.pt")
    dist.barrier()  # torch 2.8 can hang in the next line where another rank has left already
    dist.destroy_process_group()


def test_whitening_over_ranks_is_whitening_of_all(tmp_path: Path) -> None:
    world = 3
    torch.multiprocessing.start_processes(
        whiten_on_rank, args=(world, str(tmp_path)), nprocs=world, start_method="forkserver"
    )
    xs, masks, ours, theirs = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(world)), strict=True)
    torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.cat(ours), whiten_on_cpu(torch.cat(xs), torch.cat(masks), group=None), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("masked", [False, True])
def test_opcheck_of_whitening(masked: bool) -> None:
    x, mask = torch.randn(3, 5), torch.rand(3, 5) < 0.5 if masked else None
    torch.library.opcheck(torch.ops.fastppo.moments.default, (x, mask))
    moments = torch.ops.fastppo.moments(x, mask)
    torch.library.opcheck(torch.ops.fastppo.apply_moments.default, (x, mask, moments))


# --- Properties -------------------------------------------------------------------------------------------------------

lengths_of = st.lists(st.integers(0, 70), min_size=1, max_size=20)
unit = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def random_batch(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """rewards and values [B, T] with garbage in the padding, and which positions are inside."""
    generator = torch.Generator().manual_seed(seed)
    steps = max(lengths)
    inside = torch.arange(steps) < torch.tensor(lengths)[:, None]
    rewards, values = (torch.randn(len(lengths), steps, generator=generator) for _ in range(2))
    return rewards.masked_fill(~inside, torch.nan), values.masked_fill(~inside, torch.inf), inside


@settings(max_examples=40, deadline=None)
@given(lengths_of, unit, unit, st.integers(0, 2**31))
def test_packed_is_bit_for_bit_padded(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    rewards, values, inside = random_batch(lengths, seed)
    for backend in ("cpu", "torch"):
        padded = gae(rewards, values, gamma=gamma, lam=lam, mask=inside, backend=backend)
        packed = gae(
            rewards[inside],
            values[inside],
            gamma=gamma,
            lam=lam,
            cu_seqlens=cu_seqlens_from_lengths(lengths),
            backend=backend,
        )
        same_bits(packed, GAEOutput(padded.advantages[inside], padded.returns[inside]))


@settings(max_examples=40, deadline=None)
@given(lengths_of, unit, st.integers(0, 2**31))
def test_lambda_one_is_discounted_return_minus_value(lengths: list[int], gamma: float, seed: int) -> None:
    rewards, values, inside = random_batch(lengths, seed)
    output = gae(rewards, values, gamma=gamma, lam=1.0, mask=inside, backend="cpu")
    for b, n in enumerate(lengths):
        discounted = 0.0
        for t in reversed(range(n)):
            discounted = rewards[b, t].item() + gamma * discounted
            assert output.returns[b, t].item() == pytest.approx(discounted, abs=3e-5)
            assert output.advantages[b, t].item() == pytest.approx(discounted - values[b, t].item(), abs=3e-5)


@settings(max_examples=40, deadline=None)
@given(lengths_of, unit, unit, st.integers(0, 2**31))
def test_masking_is_cutting_out(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    rewards, values, inside = random_batch(lengths, seed)
    mask = inside & (torch.rand(inside.shape, generator=torch.Generator().manual_seed(seed)) < 0.5)
    masked = gae(rewards, values, gamma=gamma, lam=lam, mask=mask, backend="cpu")
    cut = gae(
        rewards[mask],
        values[mask],
        gamma=gamma,
        lam=lam,
        cu_seqlens=cu_seqlens_from_lengths(mask.sum(1)),
        backend="cpu",
    )
    same_bits(GAEOutput(masked.advantages[mask], masked.returns[mask]), cut)


@pytest.mark.parametrize("shape", [(4, 2_200_000), (4, 2_200_003), (17, 530_000), (17, 530_003)])
def test_outputs_past_the_caches_are_those_of_each_row_alone(shape: tuple[int, int]) -> None:
    """More than 128 MiB in all: where that is past the last cache, outputs are stored another way."""
    case = Case(shape, OPTIONS["mask"])
    whole = gae(**case.arguments(), backend="cpu")
    for b in range(shape[0]):
        row = gae(**case.arguments(lambda x, b=b: x[b : b + 1]), backend="cpu")
        same_bits(GAEOutput(whole.advantages[b : b + 1], whole.returns[b : b + 1]), row)


@pytest.mark.parametrize("options", ["plain", "mask", "bootstrap-at-the-end", "lam-a-row"])
@pytest.mark.parametrize("steps", [1, 3, 15, 16, 17, 47, 64, 131])
@pytest.mark.parametrize("rows", [15, 37])
def test_rows_side_by_side_are_those_of_each_row_alone(rows: int, steps: int, options: str) -> None:
    """Groups of 16, 8 and 4 rows that are walked in squares of positions, and rows that are not. A row of padding at
    the end, one in the middle, and one without a selected position."""
    case = Case((rows, steps), OPTIONS[options])
    if "mask" in case.full:
        case.full["mask"][:, steps // 2 : steps // 2 + 20] = False
        case.full["mask"][3, steps // 3 :] = False
        case.full["mask"][10] = False
        case.full["mask"][11] = True
    whole = gae(**case.arguments(), backend="cpu")
    close(whole, case.expected())
    same_bits(gae(**case.arguments(lambda x: x.repeat_interleave(2, 0)[::2]), backend="cpu"), whole)
    for b in range(rows):
        of_row = {name: x[b : b + 1] if isinstance(x, Tensor) else x for name, x in case.arguments().items()}
        row = gae(**of_row, backend="cpu")
        same_bits(GAEOutput(whole.advantages[b : b + 1], whole.returns[b : b + 1]), row)


class Wrapped(torch.Tensor):
    """A tensor without memory of its own: data_ptr() is nobody's."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapped) else x

        return func(*map(bare, args), **{k: bare(v) for k, v in (kwargs or {}).items()})


@pytest.mark.parametrize("which", ["rewards", "values", "mask", "lam", "bootstrap_values"])
def test_tensors_whose_memory_is_not_theirs(which: str) -> None:
    """A wrapper around another tensor, and a view that is negated when it is read."""
    case = Case((5, 20), OPTIONS["bootstrap-at-the-end"] + ("lam_row",))
    expected = gae(**case.arguments(), backend="cpu")
    arguments = case.arguments()
    same_bits(gae(**arguments | {which: Wrapped(arguments[which])}, backend="cpu"), expected)
    if arguments[which].dtype == torch.float32 and which != "lam":
        negated = torch.complex(torch.zeros_like(arguments[which]), -arguments[which]).conj().imag
        assert negated.is_neg()
        same_bits(gae(**arguments | {which: negated}, backend="cpu"), expected)


# --- As a torch op ----------------------------------------------------------------------------------------------------


def op_arguments(case: Case, **extra: Any) -> tuple[Any, ...]:
    x: dict[str, Any] = case.arguments() | extra
    lam, lam_returns = x["lam"], x.get("lam_returns")
    return (
        x["rewards"],
        x["values"],
        x["gamma"],
        0.0 if isinstance(lam, Tensor) else lam,
        lam if isinstance(lam, Tensor) else None,
        None if isinstance(lam_returns, Tensor) else lam_returns,
        lam_returns if isinstance(lam_returns, Tensor) else None,
        *(x.get(name) for name in FULL),
        x.get("bootstrap_values"),
        x.get("cu_seqlens"),
        x.get("time_dim", -1),
        x.get("backend", "cpu"),
    )


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("options", ["plain", "everything", "everything-a-row"])
def test_opcheck(options: str, backend: str) -> None:
    case = Case((3, 6), OPTIONS[options])
    case.full["rewards"].requires_grad_()
    torch.library.opcheck(torch.ops.fastppo.gae.default, op_arguments(case, backend=backend))


@pytest.mark.parametrize("options", ["plain", "everything", "everything-a-row"])
def test_compiles_without_a_graph_break(options: str) -> None:
    case = Case((4, 9), OPTIONS[options])
    compiled = torch.compile(gae, fullgraph=True, backend="aot_eager")
    same_bits(compiled(**case.arguments()), gae(**case.arguments()))


def test_compiles_packed() -> None:
    x = torch.randn(9)
    cu_seqlens = torch.tensor([0, 4, 9])
    compiled = torch.compile(gae, fullgraph=True, backend="aot_eager")
    same_bits(
        compiled(x, x, gamma=0.9, lam=0.9, cu_seqlens=cu_seqlens), gae(x, x, gamma=0.9, lam=0.9, cu_seqlens=cu_seqlens)
    )


def test_compiles_whitened() -> None:
    arguments = Case((4, 9), OPTIONS["mask"]).arguments() | {"whiten": True}
    same_bits(torch.compile(gae, fullgraph=True, backend="aot_eager")(**arguments), gae(**arguments))


@pytest.mark.parametrize("whiten", [False, True])
def test_autocast_changes_nothing(whiten: bool) -> None:
    arguments = Case((4, 70), OPTIONS["everything"]).arguments() | {"whiten": whiten}
    with torch.autocast("cpu", torch.bfloat16):
        inside = gae(**arguments)
    same_bits(inside, gae(**arguments))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_no_gradient_flows(backend: str) -> None:
    x = torch.randn(3, 4, device=device_of(backend), requires_grad=True)
    for output in gae(x * 2, x, gamma=0.9, lam=0.9, backend=backend):
        assert not output.requires_grad


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_inputs_are_left_as_they_are(backend: str) -> None:
    arguments = Case((5, 40), OPTIONS["everything"]).arguments(device=device_of(backend))
    before = {name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    gae(**arguments, whiten=True, backend=backend)
    for name, x in arguments.items():
        assert torch.equal(x, before[name]) if isinstance(x, Tensor) else x == before[name]


ISA_SCRIPT = """
import sys, torch
from fastppo import _C
from fastppo.ops.gae import gae
assert _C.cpu_isa() == sys.argv[1], _C.cpu_isa()
g = torch.Generator().manual_seed(0)
for shape in ((3, 70), (5, 48), (40, 130)):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        r, v = (torch.randn(shape, generator=g).to(dtype) for _ in range(2))
        m, e = (torch.rand(shape, generator=g) < p for p in (0.8, 0.1))
        for time_dim in (0, 1):
            flags = {"mask": m, "terminated": e, "time_dim": time_dim}
            out = gae(r, v, gamma=0.99, lam=0.95, lam_returns=1.0, **flags, backend="cpu")
            print([x.view(torch.int32).sum(dtype=torch.int64).item() for x in out])
            white = gae(r, v, gamma=0.99, lam=0.95, mask=m, whiten=True, backend="cpu").advantages
            print(white.view(torch.int32).sum(dtype=torch.int64).item())
"""


def isas() -> Iterator[str]:
    import fastppo._C as module

    known = ["baseline", "avx2", "avx512"]
    yield from known[: known.index(module.cpu_isa()) + 1]


def test_every_instruction_set_gives_the_same_bits() -> None:
    printed = {
        isa: subprocess.run(
            [sys.executable, "-c", ISA_SCRIPT, isa],
            env=os.environ | {"FASTPPO_CPU_ISA": isa},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for isa in isas()
    }
    assert printed["baseline"].count("\n") == 36
    assert set(printed.values()) == {printed["baseline"]}


# --- Errors -----------------------------------------------------------------------------------------------------------

X = torch.zeros(2, 3)
T6 = torch.zeros(6)
CU = torch.tensor([0, 6])
ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "integer-rewards": ({"rewards": X.long()}, TypeError, "rewards must be one of .*, got int64"),
    "integer-values": ({"values": X.int()}, TypeError, "values must be one of .*, got int32"),
    "bool-values": ({"values": X.bool()}, TypeError, "values must be one of .*, got bool"),
    "complex": ({"rewards": X.cfloat()}, TypeError, "rewards must be one of .*, got complex64"),
    "integer-bootstrap": (
        {"truncated": X, "bootstrap_values": X.long()},
        TypeError,
        "bootstrap_values must be one of .*, got int64",
    ),
    "list": ({"rewards": [[0.0]]}, TypeError, "rewards must be a torch.Tensor, got list"),
    "list-mask": ({"mask": [True]}, TypeError, "mask must be a torch.Tensor, got list"),
    "0-d": (
        {"rewards": torch.tensor(1.0), "values": torch.tensor(1.0)},
        ValueError,
        r"rewards must have shape .*, got \[\]",
    ),
    "3-d": ({"rewards": X[None], "values": X[None]}, ValueError, r"rewards must have shape .*, got \[1, 2, 3\]"),
    "values-shape": (
        {"values": torch.zeros(2, 4)},
        ValueError,
        r"values must have rewards's shape \[2, 3\], got \[2, 4\]",
    ),
    "mask-shape": ({"mask": torch.zeros(3)}, ValueError, r"mask must have rewards's shape \[2, 3\], got \[3\]"),
    "terminated-shape": ({"terminated": torch.zeros(2)}, ValueError, r"terminated must have .*, got \[2\]"),
    "truncated-shape": (
        {"truncated": torch.zeros(2), "bootstrap_values": X},
        ValueError,
        r"truncated must have .*\[2\]",
    ),
    "device": ({"mask": X.to("meta")}, ValueError, "mask must be on rewards's device cpu, got meta"),
    "bootstrap-device": (
        {"bootstrap_values": X.to("meta")},
        ValueError,
        "bootstrap_values must be on .* cpu, got meta",
    ),
    "bootstrap-shape": (
        {"truncated": X, "bootstrap_values": torch.zeros(3)},
        ValueError,
        r"bootstrap_values must have values' shape \[2, 3\] or \[B\] = \[2\], got \[3\]",
    ),
    "truncated-alone": ({"truncated": X}, ValueError, "bootstrap_values must be given with truncated, got None"),
    "gamma-above": ({"gamma": 1.5}, ValueError, r"gamma must be in \[0, 1\], got 1.5"),
    "gamma-nan": ({"gamma": float("nan")}, ValueError, r"gamma must be in \[0, 1\], got nan"),
    "gamma-tensor": ({"gamma": torch.ones(2)}, TypeError, "gamma must be a number, got Tensor"),
    "lam-below": ({"lam": -0.1}, ValueError, r"lam must be in \[0, 1\], got -0.1"),
    "lam-string": ({"lam": "1"}, TypeError, "lam must be a number, got str"),
    "lam-shape": ({"lam": torch.ones(3)}, ValueError, r"lam must be a number or have shape \[B\] = \[2\], got \[3\]"),
    "lam-integers": ({"lam": torch.ones(2).long()}, TypeError, "lam must be one of .*, got int64"),
    "lam-contents": ({"lam": torch.tensor([0.5, 2.0])}, ValueError, r"lam must be in \[0, 1\], got 2.0"),
    "lam-nan": ({"lam": torch.tensor([0.5, torch.nan])}, ValueError, r"lam must be in \[0, 1\], got nan"),
    "lam_returns-above": ({"lam_returns": 1.01}, ValueError, r"lam_returns must be in \[0, 1\], got 1.01"),
    "lam_returns-contents": (
        {"lam_returns": torch.tensor([-1.0, 1.0])},
        ValueError,
        r"lam_returns must be in \[0, 1\], got -1.0",
    ),
    "time_dim": ({"time_dim": 2}, ValueError, r"time_dim must be in \[-2, 1\], got 2"),
    "cu-time_dim": (
        {"rewards": T6, "values": T6, "cu_seqlens": CU, "time_dim": 0},
        ValueError,
        "time_dim must be -1 with cu_seqlens, got 0",
    ),
    "cu-2-d": ({"cu_seqlens": CU}, ValueError, r"rewards must have shape \[T\] with cu_seqlens, got \[2, 3\]"),
    "cu-contents": (
        {"rewards": T6, "values": T6, "cu_seqlens": torch.tensor([0, 5])},
        ValueError,
        "cu_seqlens must end at T=6, got 5",
    ),
    "cu-dtype": (
        {"rewards": T6, "values": T6, "cu_seqlens": CU.float()},
        TypeError,
        "cu_seqlens must be one of .*float32",
    ),
    "backend-name": ({"backend": "gpu"}, ValueError, "backend must be one of 'auto', .*, got 'gpu'"),
    "backend-cuda": (
        {"backend": "cuda"},
        RuntimeError,
        "backend='cuda' cannot run gae on cpu: .*available: 'cpu', 'torch'",
    ),
    "backend-triton": ({"backend": "triton"}, RuntimeError, "backend='triton' cannot run gae on cpu"),
}


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"rewards": X, "values": X, "gamma": 0.9, "lam": 0.9} | changes
    with pytest.raises(error, match=message):
        gae(**arguments)


# --- On a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_runs_on_the_current_stream_without_synchronising_and_captures_into_a_graph() -> None:
    case = Case((33, 300), OPTIONS["everything"])
    arguments = case.arguments(device="cuda") | {"backend": "cuda"}
    expected = gae(**arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gae(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for output in captured:
        output.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    same_bits(captured, expected)


@pytest.mark.gpu
def test_gpu_gives_the_same_bits_twice() -> None:
    arguments = Case((64, 1000), OPTIONS["everything"]).arguments(device="cuda") | {"backend": "cuda"}
    same_bits(gae(**arguments), gae(**arguments))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_sanitize(packed: bool) -> None:
    case = Case((3, 33), OPTIONS["everything"])
    cu_seqlens = torch.tensor([0, 33, 66, 99], device="cuda") if packed else None
    arguments = case.arguments((lambda x: x.flatten()) if packed else (lambda x: x), "cuda")
    expected = tuple(x.reshape(-1) if packed else x for x in case.expected())
    close(gae(**arguments, cu_seqlens=cu_seqlens, backend="cuda"), (expected[0], expected[1]))
