"""The benchmark suite: `pytest benchmarks`. Each row times fastppo against a peer in the same process, in turns, on the
same inputs, after asserting that both give the same answer.

pytest-benchmark stores and compares, for each row, the **ratio** ours / peer of each round (its "seconds" are "times
the peer"; the fixture's timer is measure.RatioClock). So this is the regression suite, on this machine or another:

    pytest benchmarks --benchmark-compare=benchmarks/baselines/<machine>.json --benchmark-compare-fail=median:5%

`python benchmarks/machine.py` prints <machine>; `--benchmark-json=` with that file writes a baseline. The instruction
set is read once per process: `python benchmarks/run_isas.py` runs the suite once for each that the machine has.
`--quick` runs the rows marked `quick`, about two minutes, and fails only where a ratio is far from its target.

Seconds of both sides, bandwidth, peak memory, machine, threads and versions go to each row's `extra_info`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import machine
import pytest
import torch
from measure import Pair, RatioClock, keep_freed_memory, peak_mib

BUDGET_S = {False: 3.0, True: 1.0}  # seconds of measuring a row; True: with --quick
# Of the target, what a row must reach with --quick. Where others use the same cores, one row's ratio to a threaded peer
# was seen between 0.7 and 2.1: this finds faults of several times only, and the comparison with a baseline the rest.
QUICK_SHARE = 1 / 3

CLOCK = RatioClock()
ROWS = pytest.StashKey[list[dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastppo benchmarks")
    group.addoption("--quick", action="store_true", help="only rows marked quick; fail where far from the target")
    group.addoption("--threads", type=int, default=None, help="threads of both sides [all cores of this process]")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: in the two-minute subset of the benchmarks")
    # Its table would call ratios seconds; ours below replaces it.
    config.option.benchmark_quiet = True
    config.stash[ROWS] = []
    keep_freed_memory()


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


@pytest.fixture
def compare(benchmark: Any, pytestconfig: pytest.Config, threads: int) -> Iterator[Callable[..., None]]:
    quick = bool(pytestconfig.getoption("quick"))

    def run(
        ours: Callable[[], Any],
        peer: Callable[[], Any],
        *,
        op: str,
        direction: str,
        shape: str,
        dtype: str,
        peer_name: str,
        bytes_moved: int | None = None,
        target: float | None = None,
        backend: str = "cpu",
        rtol: float = 1e-4,
        atol: float = 1e-4,
    ) -> None:
        """Times `ours` against `peer`. Both take nothing and return the tensors or arrays that must agree.

        Args:
            direction: "fwd", "fwd+bwd", or with " host" appended where the input is tiny and the host is measured.
            bytes_moved: what our side must read and write, counted by hand; None where that is not what bounds it.
            target: how many times faster than the peer ours must be.
            rtol, atol: how far the answers may be apart.
        """
        assert_agree(ours(), peer(), rtol, atol)
        pair = Pair(ours, peer)
        benchmark.group = f"{op} {direction} {shape} {dtype}"
        row: dict[str, Any] = benchmark.extra_info
        row.update(op=op, direction=direction, shape=shape, dtype=dtype, backend=backend, peer=peer_name, target=target)
        row.update(machine=machine.machine_name(), isa=machine.isa(), threads=threads, versions=machine.versions())
        row["unit"] = "seconds of ours / seconds of the peer"
        if benchmark.disabled:
            return benchmark.pedantic(lambda: None)
        benchmark.pedantic(lambda: CLOCK.advance(pair.measure()), rounds=pair.rounds(BUDGET_S[quick]))
        row.update(ours_us=pair.ours.median_s * 1e6, peer_us=pair.peer.median_s * 1e6)
        row["times_faster"] = 1 / benchmark.stats.stats.median
        row["gbps"] = None if bytes_moved is None else bytes_moved / pair.ours.median_s / 1e9
        if not quick:
            row.update(ours_peak_mib=peak_mib(ours), peer_peak_mib=peak_mib(peer))
        pytestconfig.stash[ROWS].append(row)
        if quick and target is not None:
            least = QUICK_SHARE * target
            assert row["times_faster"] >= least, (
                f"{op} {direction} {shape} {dtype} is {row['times_faster']:.2f} times as fast as {peer_name}, "
                f"far from its target of {target:g}"
            )

    yield run


def assert_agree(ours: Any, peer: Any, rtol: float, atol: float) -> None:
    ours, peer = (x if isinstance(x, (tuple, list)) else (x,) for x in (ours, peer))
    assert len(ours) == len(peer), f"ours gives {len(ours)} results, the peer {len(peer)}"
    for x, y in zip(ours, peer, strict=True):
        torch.testing.assert_close(
            torch.as_tensor(x), torch.as_tensor(y), rtol=rtol, atol=atol, equal_nan=True, check_dtype=False
        )


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """A baseline names the kind of machine, not the one machine."""
    machine_info.clear()
    machine_info.update(name=machine.machine_name(), cpu=machine.cpu_model())


def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    for key in set(commit_info) - {"id", "time", "dirty"}:
        del commit_info[key]


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """The rounds themselves are left out: a baseline stays small enough to be read in a diff."""
    for row in output_json["benchmarks"]:
        row["stats"].pop("data", None)


COLUMNS = ("op", "direction", "shape", "dtype", "ours", "peer", "", "faster", "target", "GB/s", "MiB", "")


@pytest.hookimpl(tryfirst=True)  # pytest-benchmark's raises where something regressed
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    lines = [COLUMNS, *map(cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    head = f"{rows[0]['machine']}, {rows[0]['threads']} threads, torch {rows[0]['versions']['torch']}"
    terminalreporter.section(f"fastppo against its peers: {head}")
    for line in lines:
        terminalreporter.write_line("  ".join(map(str.ljust, line, widths)).rstrip())


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    target, gbps, mib = row["target"], row["gbps"], row.get("ours_peak_mib")
    verdict = "" if target is None else "reached" if row["times_faster"] >= target else "missed"
    return (
        *(str(row[name]) for name in ("op", "direction", "shape", "dtype")),
        duration(row["ours_us"]),
        duration(row["peer_us"]),
        row["peer"],
        f"{row['times_faster']:.2f} x",
        "" if target is None else f"{target:g} x",
        "" if gbps is None else f"{gbps:.1f}",
        "" if mib is None else f"{mib:.0f}",
        verdict,
    )


def duration(us: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} us"
