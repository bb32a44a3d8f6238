"""The benchmarks' own machinery: what is stored is the ratio to the peer, and it is what fails a comparison."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastppo

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import device  # noqa: E402
import machine  # noqa: E402
import measure  # noqa: E402
import peers  # noqa: E402
import run_isas  # noqa: E402
from shapes import GAMMA, LAM  # noqa: E402

# A peer that takes twice as long as ours; SLOWER makes ours as slow as the peer, as a regression would. The clock is
# moved by them alone: that of a machine with other work to do would be off by more than what is looked at.
BENCH = """
from types import SimpleNamespace
import measure
import pytest
import torch

now = 0.0

def sleep(seconds):
    global now
    now += seconds

measure.time = SimpleNamespace(sleep=sleep, perf_counter=lambda: now)
SLOWER = {slower}

def sleeps(seconds, value):
    def call():
        sleep(seconds)
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
    copy_machinery(folder)
    (folder / "bench_sleep.py").write_text(BENCH.format(slower=slower, peer=peer, target=target))
    return run_pytest(folder, "--quick", *options)


def copy_machinery(folder: Path) -> None:
    pytest.importorskip("pytest_benchmark", reason="needs the bench extra")
    for path in (ROOT / "benchmarks").glob("*.py"):
        if not path.name.startswith("bench_"):
            (folder / path.name).write_text(path.read_text())
    (folder / "pytest.ini").write_text("[pytest]\npython_files = bench_*.py\n")


def run_pytest(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", *options]
    env = os.environ | variables
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, env=env)


def test_the_ratio_is_stored_compared_and_printed(tmp_path: Path) -> None:
    done = suite(tmp_path, "--benchmark-json=base.json")
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("sleep"))
    assert "a longer sleep" in line and "1.5 x" in line and line.endswith("reached")
    stored = json.loads((tmp_path / "base.json").read_text())
    (row,) = stored["benchmarks"]  # the other is not quick
    assert row["stats"]["median"] == pytest.approx(0.5)
    assert row["stats"]["rounds"] >= measure.MIN_ROUNDS
    info = row["extra_info"]
    assert info["ours_us"] == pytest.approx(10_000) and info["peer_us"] == pytest.approx(20_000)
    assert info["times_faster"] == pytest.approx(1 / row["stats"]["median"])
    assert info["gbps"] == pytest.approx(1.0)
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
    pair = measure.Pair(measure.Side(lambda: order.append("a")), measure.Side(lambda: order.append("b")))
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


def test_a_floor_takes_turns_with_both() -> None:
    order: list[str] = []
    pair = measure.Pair(*(measure.Side(lambda name=name: order.append(name)) for name in "abc"))
    starts = []
    for _ in range(2):
        order.clear()
        pair.measure()
        starts.append(list(dict.fromkeys(order)))
    assert starts == [["a", "c", "b"], ["b", "c", "a"]]
    pair.ours.seconds, pair.peer.seconds, pair.floor.seconds = [3.0, 5.0, 9.0], [8.0, 8.0, 8.0], [1.0, 2.0, 4.0]
    assert pair.per_floor(pair.ours) == 2.5 and pair.per_floor(pair.peer) == 4.0


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


@pytest.mark.parametrize("folder", ["", "kept"])
def test_each_instruction_set_runs_in_a_process_of_its_own(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[list[str], str]] = []

    def run(command: list[str], *, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        runs.append((command, env["FASTPPO_CPU_ISA"]))
        return subprocess.CompletedProcess(command, 1 if env["FASTPPO_CPU_ISA"] == "baseline" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(machine, "isa", lambda: "avx2")
    save = f"--save={tmp_path / folder}" if folder else "--save"
    assert run_isas.main([save, "--quick"]) == 1
    assert [isa for _, isa in runs] == ["avx2", "baseline"]
    for command, isa in runs:
        written = Path(next(x for x in command if x.startswith("--benchmark-json=")).partition("=")[2])
        assert command[-1] == "--quick" and written.name.endswith(f"-{isa}.json")
        assert written.parent == (tmp_path / folder if folder else ROOT / "benchmarks" / "baselines")


# What the GPU rows need of torch.cuda, on a clock that only `sleep` moves: a graph replays by sleeping as long as its
# capture took.
FAKE_CUDA = """
import os
from types import SimpleNamespace
import torch

now = 0.0

def sleep(seconds):
    global now
    now += seconds

class Event:
    def __init__(self, enable_timing): assert enable_timing
    def record(self): self.time = now
    def synchronize(self): pass
    def elapsed_time(self, end): return 1e3 * (end.time - self.time)

class Stream:
    def wait_stream(self, stream): pass
    def __enter__(self): return self
    def __exit__(self, *error): pass

class CUDAGraph:
    def replay(self): sleep(self.seconds)

class graph:
    def __init__(self, graph, stream): self.graph = graph
    def __enter__(self): self.begin = now
    def __exit__(self, *error): self.graph.seconds = now - self.begin

nothing = lambda *_: None
vars(torch.cuda).update(
    Event=Event, Stream=Stream, CUDAGraph=CUDAGraph, graph=graph, stream=lambda x: x, current_stream=Stream,
    is_available=lambda: True, get_device_name=lambda: os.environ["CARD"], synchronize=nothing, empty_cache=nothing,
    get_device_properties=lambda: SimpleNamespace(L2_cache_size=1 << 20), reset_peak_memory_stats=nothing,
    memory_allocated=lambda: 1 << 20, max_memory_allocated=lambda: 3 << 20,
)
import device, measure
device.copy_gbps = lambda: 4.0
measure.time = SimpleNamespace(sleep=sleep, perf_counter=lambda: now)
"""

GPU_BENCH = """
import pytest
import torch
from fake_cuda import sleep

def sleeps(seconds, value, sets):
    def call():
        sleep(seconds)
        return torch.tensor([value])
    return [call] * sets

@pytest.mark.parametrize("peer", ["right", "wrong", "waiting"])
def test_nap(peer, compare, num_sets):
    compare(
        sleeps(0.004, 1.0, num_sets(1 << 20)), sleeps(0.008, 1.0 + (peer == "wrong"), 2), op="nap", direction="fwd",
        shape="1", dtype="float32", peer_name=peer, bytes_moved=10_000_000, target=1.5, target_us=1000,
        expected=lambda: torch.tensor([1.0]), peer_clock="events" if peer == "waiting" else None,
        **({"floor": sleeps(0.002, 1.0, 1)[0], "floor_name": "product"} if peer == "right" else {}),
    )

def test_wall(compare):
    compare(*(sleeps(x, 1.0, 1) for x in (0.004, 0.008)), op="nap", direction="fwd host", shape="1", dtype="float32",
            peer_name="right", clock="wall")
"""


def gpu_suite(folder: Path, card: str) -> tuple[str, list[dict[str, Any]]]:
    """What four rows by a GPU's clock print and store, on a stand-in for the GPU."""
    copy_machinery(folder)
    (folder / "fake_cuda.py").write_text(FAKE_CUDA)
    (folder / "bench_nap_cuda.py").write_text(GPU_BENCH)
    (folder / "bench_nap.py").write_text("raise AssertionError('a CPU suite')")
    done = run_pytest(folder, "-p", "fake_cuda", "--device=auto", "--benchmark-json=rows.json", CARD=card)
    assert done.returncode == 0, done.stdout + done.stderr
    stored = json.loads((folder / "rows.json").read_text())
    assert stored["machine_info"]["name"] == machine.slug(card)
    for row in stored["benchmarks"]:
        assert row["stats"]["median"] == pytest.approx(0.5)
    return done.stdout, [row["extra_info"] for row in stored["benchmarks"]]


def test_a_gpu_row_is_the_devices_time_of_one_call(tmp_path: Path) -> None:
    printed, rows = gpu_suite(tmp_path, "NVIDIA H100 80GB HBM3")
    assert [row["peer"] for row in rows] == ["right", "wrong", "waiting", "right"]
    for row in rows:
        assert row["ours_us"] == pytest.approx(4000) and row["peer_us"] == pytest.approx(8000)
        assert row["machine"] == "NVIDIA H100 80GB HBM3" and row["versions"]["torch"] and row["copy_gbps"] == 4.0
        assert row["ours_peak_mib"] == 2.0
    assert [row["input_sets"] for row in rows] == [3, 3, 3, 1]
    assert [row["clock"] for row in rows] == ["graph"] * 3 + ["wall"]
    assert [row["peer_clock"] for row in rows] == ["graph", "graph", "events", "wall"]
    assert rows[0]["gbps"] == pytest.approx(2.5) and rows[0]["copy_share"] == rows[0]["gbps"] / 4.0
    assert rows[0]["floor_us"] == pytest.approx(2000) and "floor" not in rows[1]
    assert (rows[0]["ours_per_floor"], rows[0]["peer_per_floor"]) == pytest.approx((2, 4))
    lines = [line for line in printed.splitlines() if line.startswith("nap")]
    assert "2.000, 4.000 product" in lines[0]
    assert all("1 ms" in line and line.endswith("missed") for line in lines[:3])  # this card's target is a time
    assert " ms events " in lines[2] and lines[3].count(" ms wall ") == 2
    assert [row["peer_differs"] is None for row in rows] == [True, False, True, True]
    assert "the peer's answer differs, nap fwd 1 wrong: Tensor-likes are not close" in printed


def test_on_another_card_the_ratio_counts(tmp_path: Path) -> None:
    printed, _ = gpu_suite(tmp_path, "NVIDIA H200")
    lines = [line for line in printed.splitlines() if line.startswith("nap")]
    assert all("1.5 x" in line and line.endswith("reached") for line in lines[:3])


def test_gpu_rows_are_refused_without_a_gpu(tmp_path: Path) -> None:
    copy_machinery(tmp_path)
    done = run_pytest(tmp_path, "--device=cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "torch sees no CUDA device" in done.stderr


def test_one_of_many_may_lie_beside_a_kink() -> None:
    spec = importlib.util.spec_from_file_location("benchmarks_conftest", ROOT / "benchmarks" / "conftest.py")
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    x, y = torch.ones(1000), torch.ones(1000)
    y[:2] = 2
    conftest.assert_agree(x, y, 1e-4, 1e-4, kinks=2e-3)
    for kinks in (0.0, 1e-3):
        with pytest.raises(AssertionError, match="Mismatched elements: 2 / 1000"):
            conftest.assert_agree(x, y, 1e-4, 1e-4, kinks)


def test_sets_of_inputs_outgrow_the_cache() -> None:
    cache = 50 << 20
    for size in (1000, 1 << 20, 18 << 20, 100 << 20, 399 << 20):
        sets = device.input_sets(size, cache)
        assert sets >= 2 and sets * size >= 3 * cache > (sets - 1) * size or sets == 2
    assert device.input_sets(8 * cache, cache) == 1


@pytest.mark.parametrize("peer", [peers.gae_loop, lambda *x: peers.gae_by_scans(*x, combine_mode="generic")])
def test_peers_of_gae_have_its_mask(peer: Any) -> None:
    rewards, values = torch.randn(2, 3, 40)
    mask = torch.rand(3, 40) < 0.6
    right = fastppo.gae(rewards, values, gamma=GAMMA, lam=LAM, mask=mask, backend="torch")
    for got, expected in zip(peer(rewards, values, mask), right, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_peer_that_is_not_installed_is_a_skipped_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:  # another test's
        monkeypatch.delitem(sys.modules, name)
    for loader in (
        peers.trl_logprob, peers.liger_logprob, peers.quack_logprob, peers.flash_attn_logprob,
        peers.liger_linear_logprob, peers.trl_linear_logprob, peers.verl_linear_logprob,
    ):  # fmt: skip
        with pytest.raises(pytest.skip.Exception, match="bench-gpu"):
            loader()


def test_a_peers_module_is_imported_without_the_packages_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("heavy_peer", "heavy_peer/kernels"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("import of_a_trainer")
    (tmp_path / "heavy_peer" / "device.py").write_text("NAME = 'a card'")
    (tmp_path / "heavy_peer" / "kernels" / "logprob.py").write_text("from heavy_peer.device import NAME")
    (tmp_path / "heavy_peer" / "kernels" / "loss.py").write_text("from . import logprob")
    monkeypatch.syspath_prepend(tmp_path)
    assert peers.alone("heavy_peer.kernels.logprob").NAME == "a card"
    assert peers.alone("heavy_peer.kernels.loss").logprob.NAME == "a card"
    with pytest.raises(pytest.skip.Exception, match="bench-gpu"):
        peers.alone("heavy_peer.kernels.other")
