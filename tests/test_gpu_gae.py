"""gae on a CUDA device, CUDA and Triton: every path of the kernels, no synchronisation, graphs, streams, determinism.

test_gae.py has its meaning, option by option, on shapes of a few tiles; here are the shapes that take other paths.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import fastppo
from fastppo.ops.gae import gae
from fastppo.packing import cu_seqlens_from_lengths
from fastppo.testing import assert_bitwise_equal, assert_no_worse

pytestmark = pytest.mark.gpu

BACKENDS = ["cuda", "triton"]

# [B, T]. CUDA: a block has 2048 positions of one row or several shorter rows; it looks back at 31 chunks and beyond.
# Triton: tiles of 1024, walked by 256 programs or more, else scanned in three launches.
SHAPES = {
    "short-rows": (70, 20),
    "a-warp-a-row": (9, 256),
    "a-block-a-row": (5, 2048),
    "unaligned-rows": (7, 1021),
    "chunks": (3, 6000),
    "unaligned-chunks": (3, 4099),
    "walked-tiles": (300, 1500),
    "chunks-beyond-the-window": (2, 70_001),
}
# [T, B]. CUDA: a block has 32 rows and 128 positions of each, and looks back at 15 such chunks and beyond.
TIME_MAJOR = {"a-part": (60, 9), "chunks": (700, 40), "chunks-beyond-the-window": (3000, 33)}
LENGTHS = {
    "few-long": [0, 5000, 0, 1, 2047, 2049, 0],
    "many-short": [1] * 2500 + [0] * 40 + [3] * 700,
    "beyond-the-window": [70_000, 2, 70_000],
}
OPTIONS: dict[str, set[str]] = {
    "mask": {"mask"},
    "everything": {"mask", "terminated", "truncated", "bootstrap", "lam", "lam_returns"},
    "a-row": {"mask", "bootstrap_row", "lam"},
}


def inputs(
    shape: tuple[int, ...], num_seqs: int, options: set[str], dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def floats(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).cuda()

    def flags(p: float) -> Tensor:
        return (torch.rand(shape, generator=generator) < p).cuda()

    arguments: dict[str, Any] = {"rewards": floats(*shape), "values": 3 * floats(*shape), "gamma": 0.99, "lam": 0.95}
    if "mask" in options:
        arguments["mask"] = flags(0.8)
    if "terminated" in options:
        arguments |= {"terminated": flags(0.002), "truncated": flags(0.002), "bootstrap_values": floats(*shape)}
    if "bootstrap_row" in options:
        arguments["bootstrap_values"] = floats(num_seqs)
    if "lam" in options:
        arguments["lam"] = torch.rand(num_seqs, generator=generator).cuda()
    if "lam_returns" in options:
        arguments["lam_returns"] = 1.0
    return arguments


def float64(arguments: dict[str, Any]) -> list[Tensor]:
    """The definition position by position, which takes a tenth of torch's time for it."""
    cu_seqlens, rewards = arguments.get("cu_seqlens"), arguments["rewards"]
    dim = 1 if arguments.get("time_dim") == 0 else 0  # of sequences

    def sequences(name: str) -> list[list[float]] | None:
        x = arguments.get(name)
        if x is None or x.shape != rewards.shape:
            return None
        rows = x.double().cpu()
        return [row.tolist() for row in (rows.split(cu_seqlens.diff().tolist()) if x.dim() == 1 else rows.unbind(dim))]

    rows = {name: sequences(name) for name in ("rewards", "values", "mask", "terminated", "truncated")}
    bootstrap, finals = sequences("bootstrap_values"), None
    if bootstrap is None and arguments.get("bootstrap_values") is not None:
        finals = arguments["bootstrap_values"].tolist()
    lams = [arguments["lam"], arguments.get("lam_returns", arguments["lam"])]
    out: list[list[Tensor]] = [[], []]
    for i, r in enumerate(rows["rewards"]):
        v = rows["values"][i]
        selected, over, cut_off = (None if rows[name] is None else rows[name][i] for name in list(rows)[2:])
        decays = [arguments["gamma"] * float(lam[i] if isinstance(lam, Tensor) else lam) for lam in lams]
        answers = [[0.0] * len(r), [0.0] * len(r)]
        acc, following = [0.0, 0.0], 0.0 if finals is None else finals[i]
        for t in range(len(r) - 1, -1, -1):
            if selected is not None and not selected[t]:
                continue
            if over is not None and over[t]:
                acc, following = [0.0, 0.0], 0.0
            elif cut_off is not None and cut_off[t]:
                acc, following = [0.0, 0.0], bootstrap[i][t]
            acc = [r[t] + arguments["gamma"] * following - v[t] + decays[n] * acc[n] for n in range(2)]
            following = v[t]
            answers[0][t], answers[1][t] = acc[0], acc[1] + v[t]
        for n in range(2):
            out[n].append(torch.tensor(answers[n], dtype=torch.float64))
    return [torch.cat(x) if cu_seqlens is not None else torch.stack(x, dim) for x in out]


def check(arguments: dict[str, Any], backend: str) -> None:
    """No worse than the serial walk in float32 of the CPU kernel, whose arithmetic is the definition's."""
    baseline = gae(**{name: x.cpu() if isinstance(x, Tensor) else x for name, x in arguments.items()}, backend="cpu")
    got = gae(**arguments, backend=backend)
    for name, *three in zip(("advantages", "returns"), got, baseline, float64(arguments), strict=True):
        assert_no_worse(name, *three)


def cases(names: dict[str, Any], *for_triton: tuple[str, str]) -> list[tuple[str, str, str]]:
    """(backend, name, options): all of them for CUDA. Triton compiles a kernel, in seconds, for each set of options."""
    all_of_cuda = [("cuda", name, options) for name in names for options in OPTIONS]
    return all_of_cuda + [("triton", *case) for case in for_triton]


@pytest.mark.parametrize(
    ("backend", "shape", "options"),
    cases(
        SHAPES, ("short-rows", "mask"), ("unaligned-chunks", "mask"), ("chunks", "everything"), ("walked-tiles", "mask")
    ),
)
def test_padded(backend, shape, options):
    check(inputs(SHAPES[shape], SHAPES[shape][0], OPTIONS[options]), backend)


@pytest.mark.parametrize(("backend", "shape", "options"), cases(TIME_MAJOR, ("chunks", "mask")))
def test_time_major(backend, shape, options):
    check(inputs(TIME_MAJOR[shape], TIME_MAJOR[shape][1], OPTIONS[options]) | {"time_dim": 0}, backend)


@pytest.mark.parametrize(
    ("backend", "lengths", "options"), cases(LENGTHS, ("few-long", "everything"), ("many-short", "mask"))
)
def test_packed(backend, lengths, options):
    cu_seqlens = cu_seqlens_from_lengths(LENGTHS[lengths], device="cuda")
    arguments = inputs((sum(LENGTHS[lengths]),), len(LENGTHS[lengths]), OPTIONS[options])
    check(arguments | {"cu_seqlens": cu_seqlens}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rewards", "values"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("shape", [(3, 4096), (2, 4097)], ids=["aligned", "unaligned"])
def test_dtypes(shape, rewards, values, backend):
    arguments = inputs(shape, shape[0], OPTIONS["everything" if backend == "cuda" else "mask"])
    for name, dtype in (("rewards", rewards), ("values", values), ("bootstrap_values", values)):
        if name in arguments:
            arguments[name] = arguments[name].to(dtype)
    check(arguments, backend)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_bases_that_are_not_aligned(first):
    """Rows that begin at any element: 4096 positions of 4100, and a mask that begins elsewhere."""
    arguments = inputs((3, 4100), 3, OPTIONS["mask"])
    check({name: x[:, first : first + 4096] if isinstance(x, Tensor) else x for name, x in arguments.items()}, "cuda")
    arguments["rewards"] = arguments["rewards"][:, :4096]
    arguments["values"] = arguments["values"][:, :4096]
    arguments["mask"] = arguments["mask"][:, first : first + 4096]
    check(arguments, "cuda")


@pytest.mark.parametrize(
    ("backend", "packed"),
    [("cuda", False), ("cuda", True), ("triton", False)],
    ids=["cuda-padded", "cuda-packed", "triton-padded"],
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_reaches_all_before_it_up_to_a_cut(packed, poison, backend):
    """Through several chunks, and where lambda's powers underflow; a lambda of 0 makes a NaN of inf, as 0 * inf is one.

    Three sequences: cut in front of the poison, cut at it, and not cut.
    """
    steps = 9000
    rewards = torch.ones(3, steps, device="cuda")
    rewards[:, 8000] = poison
    terminated = torch.zeros_like(rewards, dtype=torch.bool)
    terminated[0, 2500] = terminated[1, 8000] = True
    arguments = {"rewards": rewards, "values": rewards * 0 + 0.5, "terminated": terminated, "gamma": 0.9}
    arguments["values"][:, 8000] = 0.5
    if packed:
        arguments = {name: x.flatten() if isinstance(x, Tensor) else x for name, x in arguments.items()}
        arguments["cu_seqlens"] = torch.arange(4, device="cuda") * steps
    for lam in (0.5, 0.0):
        check(arguments | {"lam": lam}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_offsets_stay_within_the_tensors(backend):
    """Contents of cu_seqlens are not looked at on a GPU: numbers may be wrong, accesses not."""
    arguments = inputs((5000,), 3, OPTIONS["everything"])
    for offsets in ([7, 9000, -5, 40], [0, 0, 0, 0], [5000, 5000, 5000, 5000], [2**40, -(2**40), 3, 2**40]):
        gae(**arguments, cu_seqlens=torch.tensor(offsets, device="cuda"), backend=backend)
    torch.cuda.synchronize()


CALLS: dict[str, dict[str, Any]] = {
    "rows": {"shape": (64, 1000)},
    "chunks": {"shape": (3, 9000)},
    "time-major": {"shape": (700, 40), "time_dim": 0},
    "packed": {"shape": (9000,)},
    "whitened": {"shape": (3, 9000), "whiten": True},
}


def call_arguments(name: str, backend: str) -> dict[str, Any]:
    call = dict(CALLS[name])
    shape = call.pop("shape")
    num_seqs = 3 if len(shape) == 1 else shape[1] if "time_dim" in call else shape[0]
    options = OPTIONS["everything" if backend == "cuda" else "mask"]
    arguments = inputs(shape, num_seqs, options) | call | {"backend": backend}
    if len(shape) == 1:
        arguments["cu_seqlens"] = torch.tensor([0, 100, 7000, 9000], device="cuda")
    return arguments


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_no_synchronisation_and_the_same_bits_twice(name, backend):
    arguments = call_arguments(name, backend)
    first = gae(**arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [gae(**arguments) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for outputs in again:
        for got, expected in zip(outputs, first, strict=True):
            assert_bitwise_equal(name, got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_captures_into_a_graph_whose_replays_agree(name, backend):
    """Scratch memory holds what the last replay left."""
    arguments = call_arguments(name, backend)
    gae(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gae(**arguments)
    for _ in range(3):
        arguments["rewards"].normal_()
        for output in got:
            output.fill_(torch.nan)
        graph.replay()
        for x, expected in zip(got, gae(**arguments), strict=True):
            assert_bitwise_equal(name, x, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_streams_run_beside_each_other(name, backend):
    arguments = call_arguments(name, backend)
    expected = gae(**arguments)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(gae(**arguments))
    torch.cuda.synchronize()
    for outputs in results:
        for got, want in zip(outputs, expected, strict=True):
            assert_bitwise_equal(name, got, want)


@pytest.mark.parametrize(("name", "backend"), [("chunks", "cuda"), ("chunks", "triton"), ("whitened", "cuda")])
def test_compiles_without_a_graph_break(name, backend):
    arguments = call_arguments(name, backend)
    compiled = torch.compile(gae, fullgraph=True)
    for got, expected in zip(compiled(**arguments), gae(**arguments), strict=True):
        assert_bitwise_equal(name, got, expected)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("name", ["rows", "chunks", "time-major", "packed"])
def test_whitening_is_the_definition(name, mask):
    arguments = call_arguments(name, "cuda") | {"whiten": True}
    if not mask:
        del arguments["mask"]
    arguments["rewards"] = arguments["rewards"] + 1000.0  # the mean is far from 0
    got, plain = gae(**arguments), gae(**arguments | {"whiten": False})
    expected = fastppo.whiten(plain.advantages, arguments.get("mask"))
    torch.testing.assert_close(got.advantages, expected, rtol=1e-6, atol=1e-6)
    assert_bitwise_equal("returns", got.returns, plain.returns)


def test_whitening_nothing_one_and_equal_advantages_gives_zero():
    rewards = torch.full((2, 5000), 3.0, device="cuda")
    mask = torch.zeros_like(rewards, dtype=torch.bool)
    for chosen in (0, 1):
        mask[1, 2047 : 2047 + chosen] = True
        output = gae(rewards, rewards, gamma=0.9, lam=0.9, mask=mask, whiten=True, backend="cuda")
        assert torch.equal(output.advantages, torch.zeros_like(rewards))
    equal = gae(rewards, rewards * 0, gamma=0.0, lam=0.0, whiten=True, backend="cuda")
    assert torch.equal(equal.advantages, torch.zeros_like(rewards))


@pytest.mark.timeout(300)
def test_more_than_2_to_the_31_positions():
    """One row, its inputs a single element: the last outputs' addresses do not fit 32 bits."""
    steps = 2**31 + 4096
    one = torch.ones(1, device="cuda")
    output = gae(one.expand(steps), one.expand(steps) * 0.0, gamma=0.5, lam=1.0, backend="cuda").advantages
    assert output[-3:].tolist() == [1.75, 1.5, 1.0]
    assert output[: steps - 64].eq(2.0).all()


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("backend", "name"), [*(("cuda", name) for name in CALLS), ("triton", "chunks"), ("triton", "packed")]
)
def test_sanitize(backend, name):
    """A small shape for each path: several chunks of each, where there are chunks."""
    small = {"rows": (5, 130), "chunks": (2, 2100), "time-major": (130, 9), "packed": (2100,), "whitened": (2, 2100)}
    call = dict(CALLS[name]) | {"shape": small[name]}
    shape = call.pop("shape")
    num_seqs = 3 if len(shape) == 1 else shape[1] if "time_dim" in call else shape[0]
    arguments = inputs(shape, num_seqs, OPTIONS["everything" if backend == "cuda" else "mask"]) | call
    if len(shape) == 1:
        arguments["cu_seqlens"] = torch.tensor([0, 100, 100, 2100], device="cuda")
    if name == "whitened":
        on_cpu = {key: x.cpu() if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}
        expected = gae(**on_cpu, backend="torch").advantages  # on the GPU a launch for each of many positions
        got = gae(**arguments, backend=backend).advantages.cpu()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    else:
        check(arguments, backend)
