"""The benchmark suite: `pytest benchmarks`. Each row times fastppo against a peer in the same process, in turns, on the
same inputs, after asserting that both give the same answer.

pytest-benchmark stores and compares, for each row, the **ratio** ours / peer of each round (its "seconds" are "times
the peer"; the fixture's timer is measure.RatioClock). So this is the regression suite, on this machine or another:

    pytest benchmarks --benchmark-compare=benchmarks/baselines/<machine>.json --benchmark-compare-fail=median:5%

`python benchmarks/machine.py` prints <machine>; `--benchmark-json=` with that file writes a baseline. The instruction
set is read once per process: `python benchmarks/run_isas.py` runs the suite once for each that the machine has.
`--quick` runs the rows marked `quick`, about two minutes, and fails only where a ratio is far from its target.

`--device cuda` runs the rows of bench_*_cuda.py instead, by the device's clock (device.py), on a machine whose name is
its card's: `python benchmarks/machine.py cuda`.

Seconds of both sides, bandwidth, peak memory, machine, threads and versions go to each row's `extra_info`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import device as gpu
import machine
import pytest
import torch
from measure import Pair, RatioClock, Side, keep_freed_memory, peak_mib

BUDGET_S = {False: 3.0, True: 1.0}  # seconds of measuring a row; True: with --quick
GPU_BUDGET_S = 0.5
# Of the target, what a row must reach with --quick. Where others use the same cores, one row's ratio to a threaded peer
# was seen between 0.7 and 2.1: this finds faults of several times only, and the comparison with a baseline the rest.
QUICK_SHARE = 1 / 3
# Targets in microseconds are of this card; on any other a row's target is how many times faster it is.
TARGET_CARD = "NVIDIA H100 80GB HBM3"

CLOCK = RatioClock()
ROWS = pytest.StashKey[list[dict[str, Any]]]()

Call = Callable[[], Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastppo benchmarks")
    group.addoption("--quick", action="store_true", help="only rows marked quick; fail where far from the target")
    group.addoption("--threads", type=int, default=None, help="threads of both sides [all cores of this process]")
    group.addoption("--device", choices=("cpu", "cuda", "auto"), default="cpu", help="whose rows; auto: cuda if any")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: in the two-minute subset of the benchmarks")
    # Its table would call ratios seconds; ours below replaces it.
    config.option.benchmark_quiet = True
    config.stash[ROWS] = []
    if config.option.device == "auto":
        config.option.device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.option.device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device")
    keep_freed_memory()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    name = collection_path.name
    return name.endswith("_cuda.py") != (config.option.device == "cuda") if name.startswith("bench_") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=CLOCK))
    if config.getoption("quick"):
        left_out = [item for item in items if item.get_closest_marker("quick") is None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("quick") is not None]


@pytest.fixture(scope="session")
def threads(pytestconfig: pytest.Config) -> int:
    return pytestconfig.getoption("threads") or machine.cores()


@pytest.fixture(autouse=True)
def _same_start(threads: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def num_sets() -> Callable[[int], int]:
    """How many sets of inputs a GPU row needs, by the bytes that one call touches."""
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    return lambda set_bytes: gpu.input_sets(set_bytes, l2_bytes)


@pytest.fixture
def no_cached_memory() -> Iterator[None]:
    """For rows that need most of a card: no memory is held for the row before, nor for the next."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def compare(benchmark: Any, pytestconfig: pytest.Config, threads: int) -> Iterator[Callable[..., None]]:
    quick = bool(pytestconfig.getoption("quick"))
    on_gpu = pytestconfig.getoption("device") == "cuda"

    def run(
        ours: Call | Sequence[Call],
        peer: Call | Sequence[Call],
        *,
        op: str,
        direction: str,
        shape: str,
        dtype: str,
        peer_name: str,
        bytes_moved: int | None = None,
        target: float | None = None,
        target_us: float | None = None,
        expected: Call | None = None,
        peer_expected: Call | None = None,
        clock: str = "graph" if on_gpu else "wall",
        peer_clock: str | None = None,
        is_bound: bool = False,
        floor: Call | None = None,
        floor_name: str | None = None,
        backend: str = "cpu",
        rtol: float = 1e-4,
        atol: float = 1e-4,
        kinks: float = 0.0,
    ) -> None:
        """Times `ours` against `peer`. Both take nothing and return the tensors or arrays that must agree.

        Args:
            ours, peer: on a GPU one for each set of inputs, which take turns.
            direction: "fwd", "fwd+bwd", or with " host" appended where the input is tiny and the host is measured.
            bytes_moved: what our side must read and write, counted by hand; None where that is not what bounds it.
            target: how many times faster than the peer ours must be.
            target_us: the time that ours must reach on TARGET_CARD, where it counts instead of `target`.
            expected, peer_expected: who is right; ours must agree, a peer that does not is timed and named. None: the
                peer is right, and for the peer the same as for ours.
            clock: of ours, "wall", "graph" (a CUDA graph's replay by the device's clock) or "events" (around the call,
                where it cannot be captured); `peer_clock` where the peer's is another.
            is_bound: the peer does less than ours, so that it need not be slower.
            floor, floor_name: what both have to do at least, by the clock of ours; it takes turns with them.
            kinks: the share of elements that may disagree, where a gradient jumps and rounding picks the side.
        """
        all_ours, all_peers = ([x] if callable(x) else list(x) for x in (ours, peer))
        difference = None
        if expected is None:
            assert_agree(all_ours[0](), all_peers[0](), rtol, atol, kinks)
        else:
            right = expected()
            assert_agree(all_ours[0](), right, rtol, atol, kinks)
            right = right if peer_expected is None else peer_expected()
            difference = disagreement(all_peers[0](), right, rtol, atol, kinks)
            del right
        pair = Pair(
            side(all_ours, clock, on_gpu),
            side(all_peers, peer_clock or clock, on_gpu),
            None if floor is None else side([floor], clock, on_gpu),
        )
        benchmark.group = f"{op} {direction} {shape} {dtype}"
        row: dict[str, Any] = benchmark.extra_info
        row.update(op=op, direction=direction, shape=shape, dtype=dtype, backend=backend, peer=peer_name, target=target)
        row.update(versions=machine.versions(), threads=threads)
        row.update(about_the_card() if on_gpu else {"machine": machine.machine_name(), "isa": machine.isa()})
        row["unit"] = "seconds of ours / seconds of the peer"
        if on_gpu:
            row.update(clock=clock, peer_clock=peer_clock or clock, target_us=target_us, is_bound=is_bound)
            row.update(peer_differs=difference, input_sets=len(all_ours))
        if benchmark.disabled:
            return benchmark.pedantic(lambda: None)
        budget_s = GPU_BUDGET_S if on_gpu else BUDGET_S[quick]
        benchmark.pedantic(lambda: CLOCK.advance(pair.measure()), rounds=pair.rounds(budget_s))
        row.update(ours_us=pair.ours.median_s * 1e6, peer_us=pair.peer.median_s * 1e6)
        row["times_faster"] = 1 / benchmark.stats.stats.median
        if pair.floor is not None:
            row.update(floor=floor_name, floor_us=pair.floor.median_s * 1e6)
            row.update(ours_per_floor=pair.per_floor(pair.ours), peer_per_floor=pair.per_floor(pair.peer))
        row["gbps"] = None if bytes_moved is None else bytes_moved / pair.ours.median_s / 1e9
        if on_gpu:
            row["copy_share"] = None if row["gbps"] is None else row["gbps"] / row["copy_gbps"]
        if not quick:
            peak = gpu.peak_mib if on_gpu else peak_mib
            row.update(ours_peak_mib=peak(all_ours[0]), peer_peak_mib=peak(all_peers[0]))
        pytestconfig.stash[ROWS].append(row)
        if quick and target is not None:
            least = QUICK_SHARE * target
            assert row["times_faster"] >= least, (
                f"{op} {direction} {shape} {dtype} is {row['times_faster']:.2f} times as fast as {peer_name}, "
                f"far from its target of {target:g}"
            )

    yield run
    if on_gpu:
        torch.cuda.empty_cache()  # a graph's memory serves no other row


def side(calls: list[Call], clock: str, on_gpu: bool) -> Side:
    if clock == "wall":
        return Side(calls[0], finish=torch.cuda.synchronize if on_gpu else None)
    return gpu.device_side(calls, captured=clock == "graph")


@cache
def about_the_card() -> dict[str, Any]:
    return {"machine": machine.card(), "copy_gbps": gpu.copy_gbps(), "card_state": machine.card_state()}


def assert_agree(ours: Any, peer: Any, rtol: float, atol: float, kinks: float = 0.0) -> None:
    ours, peer = (x if isinstance(x, (tuple, list)) else (x,) for x in (ours, peer))
    assert len(ours) == len(peer), f"ours gives {len(ours)} results, the peer {len(peer)}"
    for x, y in zip(ours, peer, strict=True):
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        if kinks and x.shape == y.shape:
            apart = ~torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
            if apart.sum() <= kinks * x.numel():
                x = torch.where(apart, y, x)
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol, equal_nan=True, check_dtype=False)


def disagreement(peer: Any, expected: Any, rtol: float, atol: float, kinks: float) -> str | None:
    """How the peer's answer differs from what is right; None where it does not."""
    try:
        assert_agree(peer, expected, rtol, atol, kinks)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """A baseline names the kind of machine, not the one machine."""
    machine_info.clear()
    if config.option.device == "cuda":
        machine_info.update(name=machine.slug(machine.card()), cpu=machine.cpu_model())
    else:
        machine_info.update(name=machine.machine_name(), cpu=machine.cpu_model())


def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    for key in set(commit_info) - {"id", "time", "dirty"}:
        del commit_info[key]


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """The rounds themselves are left out: a baseline stays small enough to be read in a diff."""
    for row in output_json["benchmarks"]:
        row["stats"].pop("data", None)


COLUMNS = (
    "op", "direction", "shape", "dtype", "ours", "peer", "", "faster", "target", "ours and peer per floor", "GB/s",
    "of copy", "MiB", "peer's MiB", "",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # pytest-benchmark's raises where something regressed
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    table = list(zip(*map(cells, rows), strict=True))
    columns = [(name, *column) for name, column in zip(COLUMNS, table, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in columns]
    head = f"{rows[0]['machine']}, {rows[0]['threads']} threads, torch {rows[0]['versions']['torch']}"
    if "copy_gbps" in rows[0]:
        head += f", copy {rows[0]['copy_gbps']:.0f} GB/s, driver {rows[0]['card_state'].get('driver_version')}"
    terminalreporter.section(f"fastppo against its peers: {head}")
    for line in zip(*columns, strict=True):
        terminalreporter.write_line("  ".join(map(str.ljust, line, widths)).rstrip())
    for row in rows:
        if row.get("peer_differs"):
            where = " ".join(row[name] for name in ("op", "direction", "shape", "peer"))
            terminalreporter.write_line(f"the peer's answer differs, {where}: {row['peer_differs']}")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    gbps, share, mib, peer_mib = (row.get(x) for x in ("gbps", "copy_share", "ours_peak_mib", "peer_peak_mib"))
    goal, verdict = judge(row)
    return (
        *(str(row[name]) for name in ("op", "direction", "shape", "dtype")),
        duration(row["ours_us"]) + how(row.get("clock")),
        duration(row["peer_us"]) + how(row.get("peer_clock")),
        row["peer"] + (" (does less)" if row.get("is_bound") else ""),
        f"{row['times_faster']:.2f} x",
        goal,
        f"{row['ours_per_floor']:.3f}, {row['peer_per_floor']:.3f} {row['floor']}" if "floor" in row else "",
        "" if gbps is None else f"{gbps:.1f}",
        "" if share is None else f"{share:.0%}",
        "" if mib is None else f"{mib:.0f}",
        "" if peer_mib is None else f"{peer_mib:.0f}",
        verdict,
    )


def judge(row: dict[str, Any]) -> tuple[str, str]:
    """The row's target in words, and whether it is reached: on the targets' own card a time, and ahead of the peer."""
    if row.get("target_us") is not None and row["machine"] == TARGET_CARD:
        goal = duration(row["target_us"])
        reached = row["ours_us"] <= row["target_us"] and (row["is_bound"] or row["times_faster"] >= 1)
    elif row["target"] is not None:
        goal = f"{row['target']:.3g} x"
        reached = row["times_faster"] >= row["target"]
    else:
        return "", ""
    return goal, "reached" if reached else "missed"


def how(clock: str | None) -> str:
    """Of a GPU row's times those are marked that are not a graph's replay."""
    return "" if clock in (None, "graph") else f" {clock}"


def duration(us: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} us"
