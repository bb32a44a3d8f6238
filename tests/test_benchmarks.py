"""The benchmarks' own machinery: what is stored is the ratio to the peer, and it is what fails a comparison."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import machine  # noqa: E402
import measure  # noqa: E402
import run_isas  # noqa: E402

# A peer that takes twice as long as ours; SLOWER makes ours as slow as the peer, as a regression would.
BENCH = """
import time
import pytest
import torch

SLOWER = {slower}

def sleeps(seconds, value):
    def call():
        time.sleep(seconds)
        return torch.tensor([value])
    return call

@pytest.mark.quick
def test_sleep(compare):
    compare(
        sleeps(0.02 if SLOWER else 0.01, 1.0), sleeps(0.02, {peer}), op="sleep", direction="fwd", shape="1",
        dtype="float32", peer_name="a longer sleep", bytes_moved=10_000_000, target={target},
    )

def test_not_quick(compare):
    compare(sleeps(0.001, 1.0), sleeps(0.001, 1.0), op="nap", direction="fwd", shape="1", dtype="float32",
            peer_name="a nap")
"""


def suite(
    folder: Path, *options: str, slower: bool = False, peer: float = 1.0, target: float = 1.5
) -> subprocess.CompletedProcess[str]:
    """Runs a suite of two rows on the real conftest, with --quick's second of measuring unless told otherwise."""
    pytest.importorskip("pytest_benchmark", reason="needs the bench extra")
    for path in (ROOT / "benchmarks").glob("*.py"):
        if not path.name.startswith("bench_"):
            (folder / path.name).write_text(path.read_text())
    (folder / "bench_sleep.py").write_text(BENCH.format(slower=slower, peer=peer, target=target))
    (folder / "pytest.ini").write_text("[pytest]\npython_files = bench_*.py\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", "--quick", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


def test_the_ratio_is_stored_compared_and_printed(tmp_path: Path) -> None:
    done = suite(tmp_path, "--benchmark-json=base.json")
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("sleep"))
    assert "a longer sleep" in line and "1.5 x" in line and line.endswith("reached")
    stored = json.loads((tmp_path / "base.json").read_text())
    (row,) = stored["benchmarks"]  # the other is not quick
    assert row["stats"]["median"] == pytest.approx(0.5, rel=0.1)
    assert row["stats"]["rounds"] >= measure.MIN_ROUNDS
    info = row["extra_info"]
    assert info["ours_us"] == pytest.approx(10_000, rel=0.2) and info["peer_us"] == pytest.approx(20_000, rel=0.2)
    assert info["times_faster"] == pytest.approx(1 / row["stats"]["median"])
    assert info["gbps"] == pytest.approx(1.0, rel=0.2)
    assert info["machine"] == machine.machine_name() and info["isa"] == machine.isa() and info["threads"] >= 1
    assert info["versions"]["torch"] and info["peer"] == "a longer sleep" and info["target"] == 1.5
    assert set(stored["machine_info"]) == {"name", "cpu"}
    assert "branch" not in stored["commit_info"] and "data" not in row["stats"]

    against = ("--benchmark-compare=base.json", "--benchmark-compare-fail=median:30%")
    assert suite(tmp_path, *against).returncode == 0
    slower = suite(tmp_path, *against, slower=True)
    assert slower.returncode != 0 and "Performance has regressed" in slower.stdout + slower.stderr


def test_quick_fails_far_from_the_target_only(tmp_path: Path) -> None:
    near = suite(tmp_path, target=4.0)
    assert near.returncode == 0 and "missed" in near.stdout
    far = suite(tmp_path, target=10.0)
    assert far.returncode == 1 and "far from its target of 10" in far.stdout


def test_a_wrong_answer_is_not_timed(tmp_path: Path) -> None:
    done = suite(tmp_path, peer=2.0)
    assert (
        done.returncode == 1 and "Tensor-likes are not close" in done.stdout and "against its peers" not in done.stdout
    )


def test_the_clock_goes_on_by_ratios_alone() -> None:
    clock = measure.RatioClock()
    begin = clock()
    clock.advance(0.25)
    assert clock() - begin == 0.25 == clock() - begin


def test_sides_take_turns_and_short_calls_are_made_many_times() -> None:
    order: list[str] = []
    pair = measure.Pair(lambda: order.append("a"), lambda: order.append("b"))
    assert pair.ours.loops > 100
    starts = []
    for _ in range(4):
        order.clear()
        ratio = pair.measure()
        starts.append(order[0])
        for name, side in (("a", pair.ours), ("b", pair.peer)):
            assert order.count(name) == side.loops + side.warming_loops and side.warming_loops > side.loops
    assert starts == ["a", "b", "a", "b"]
    assert ratio == pair.ours.seconds[-1] / pair.peer.seconds[-1]
    assert pair.rounds(0.0) == measure.MIN_ROUNDS and pair.rounds(1e9) == measure.MAX_ROUNDS


def test_peak_memory_sees_what_is_freed_inside_a_call() -> None:
    def call() -> int:
        return len(bytearray(64 << 20)) and 0

    peak = measure.peak_mib(call)
    if peak is None:
        pytest.skip("this system does not tell a process its peak memory")
    assert 60 < peak < 80


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("model name\t: AMD EPYC 9554 64-Core Processor\ncpu family\t: 25\nmodel\t\t: 17\n", "AMD EPYC 9554"),
        ("model name\t: Intel(R) Xeon(R) Platinum 8480C @ 2.00GHz\n", "Intel Xeon Platinum 8480C"),
        ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nmodel\t: 9\n", "AMD EPYC family25 model17"),
    ],
)
def test_the_machine_has_a_short_name(cpuinfo: str, name: str) -> None:
    assert machine.cpu_model(cpuinfo) == name
    slug = machine.machine_name(name, 2, "avx2")
    assert slug == name.lower().replace(" ", "-") + "-2c-avx2"


def test_each_instruction_set_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[list[str], str]] = []

    def run(command: list[str], *, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        runs.append((command, env["FASTPPO_CPU_ISA"]))
        return subprocess.CompletedProcess(command, 1 if env["FASTPPO_CPU_ISA"] == "baseline" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(machine, "isa", lambda: "avx2")
    assert run_isas.main(["--save", "--quick"]) == 1
    assert [isa for _, isa in runs] == ["avx2", "baseline"]
    for command, isa in runs:
        assert command[-1] == "--quick" and any(x.endswith(f"-{isa}.json") for x in command)
