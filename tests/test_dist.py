"""Several ranks train as one: gloo on a CPU. The ranks of 4, then of 2, are processes of one spawn."""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist
import torch.multiprocessing as mp

from tests import tiny
from tests.test_loss_invariance import LONGER, PLAIN, Cut, Outcome, Setting, assert_same, outcome
from trainers import dist
from trainers.arithmetic import ConfigError, check
from trainers.config import GenerationConfig
from trainers.engines import Sampling
from trainers.engines.native import NativeEngine
from trainers.probe import Probe
from trainers.refit import Refit
from trainers.run import TrainingError

WORLDS = (4, 2)
SETTINGS = [
    Setting(), Setting("gspo", "seq_mean_token_mean"), Setting("reinforce", "seq_mean_token_sum"), Setting(layers=1),
    Setting(critic="local"),
]  # fmt: skip
CUTS = [PLAIN, Cut(1, order=LONGER), Cut(max_tokens=30, packing=True)]
HALF = Setting(param_dtype="bfloat16")  # one sequence a pass: else gradients are rounded otherwise before the sum


@pytest.mark.parametrize(
    ("weights", "parts", "expected"),
    [
        ([5, 1, 4, 2], 2, [[0, 1], [2, 3]]),  # 5 + 1 and 4 + 2
        ([3, 3, 3], 2, [[0, 2], [1]]),
        ([7], 3, [[0], [], []]),
        ([0, 0], 2, [[0], [1]]),
        ([], 2, [[], []]),
    ],
)
def test_balanced_parts(weights, parts, expected):
    assert dist.balanced(weights, parts) == expected


def test_one_rank_is_everybody():
    assert dist.part(range(5)) == range(5)
    assert dist.rows(torch.tensor([1, 9, 3])) == [0, 1, 2]
    assert dist.gather("x") == ["x"] and dist.together(lambda: 3) == [3] and dist.agree(True, False) == (True, False)
    with pytest.raises(ZeroDivisionError):
        dist.together(lambda: 1 // 0)
    assert dist.imbalance(torch.tensor([4, 4])) == 1.0


def test_why_a_rank_left_is_told_when_the_others_are_gone(monkeypatch):
    def gone(*_):
        raise ConnectionError("timed out")

    monkeypatch.setattr(dist, "size", lambda: 2)
    monkeypatch.setattr(dist, "gather", gone)
    with pytest.raises(ZeroDivisionError) as caught:
        dist.together(lambda: 1 // 0)
    assert isinstance(caught.value.__cause__, ConnectionError)
    with pytest.raises(ConnectionError, match="timed out"):
        dist.together(lambda: 1)


def fails_on(rank: int) -> int:
    if dist.rank() == rank:
        raise ValueError(f"rank {rank} cannot")
    return dist.rank()


def refits_its_own_engine(rank: int) -> None:
    """Every rank has an engine; a failure of one, and one that is stale, are told to all."""
    policy, cfg = tiny.policy(), GenerationConfig(max_new_tokens=8, probe_period=1)
    engine = NativeEngine(copy.deepcopy(policy.model), policy.tokenizer)
    update, probe = Refit(policy, engine, cfg), Probe(policy, engine, cfg, [0, 4], dtype="float32")
    for version in (1, 2):
        with torch.no_grad():
            policy.head.weight += 0.01 * torch.randn(
                policy.head.weight.shape, generator=torch.Generator().manual_seed(7)
            )
        assert update(version) > 0
        probe(version)
        probe.check()
    answers = dist.gather(engine.generate([[4]], Sampling(6), [3])[0])
    assert all(answer == answers[0] and answer.weight_version == 2 for answer in answers)
    if rank == 1:
        engine._put = lambda bucket: 0
    with torch.no_grad():
        policy.head.weight[3] += 0.1
    update(3)
    probe(3)
    with pytest.raises(TrainingError, match="stale"):
        probe.check()
    if rank == 1:
        engine._end_update = lambda: fails_on(1)
    with pytest.raises(ValueError, match="rank 1 cannot"):
        update(4)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    right: dict[str, Outcome] = torch.load(f"{folder}/right.pt", weights_only=False)
    for world in WORLDS:
        if rank >= world:
            continue
        torch_dist.init_process_group("gloo", init_method=f"file://{folder}/meet{world}", rank=rank, world_size=world)
        assert [i for part in dist.gather(list(dist.part(range(7)))) for i in part] == list(range(7))
        assert dist.agree(rank == 1, False) == (True, False)
        assert dist.main_does(lambda: "main") == "main"
        with pytest.raises(ValueError, match="rank 1 cannot"):
            dist.together(lambda: fails_on(1))
        with pytest.raises(RuntimeError, match="rank 1: its result cannot be sent"):
            dist.together(lambda: (lambda: 1) if rank == 1 else 1)
        for setting in SETTINGS:
            for cut in CUTS:
                assert_same(outcome(setting, cut), right[str(setting)], f"{world} ranks, {setting}, {cut}")
        assert_same(outcome(HALF, Cut(1, order=LONGER)), right[str(HALF)], f"{world} ranks, {HALF}")
        batch = tiny.rollout()
        scored = tiny.policy(1).score(batch, {"old_logprobs", "ref_logprobs"})
        for name, value in scored.items():  # the same parts, so bit for bit
            assert torch.equal(value, right["scored"][name]), name
        assert "trunk_hidden" not in scored
        refits_its_own_engine(rank)
        dist.stop()


@pytest.mark.timeout(300)
def test_the_step_is_the_same_on_2_and_4_ranks(tmp_path):
    right = {str(setting): outcome(setting, PLAIN) for setting in SETTINGS} | {str(HALF): outcome(HALF, Cut(1))}
    right["scored"] = tiny.policy(1).score(tiny.rollout(), {"old_logprobs", "ref_logprobs"})
    torch.save(right, tmp_path / "right.pt")
    mp.start_processes(worker, args=(str(tmp_path),), nprocs=max(WORLDS), start_method="forkserver")


def torchrun(run_dir: Path, *overrides: str, algorithm: str = "reinforce", ranks: int = 2) -> list[str]:
    settings = {
        "policy.model_name": tiny.tiny_model(),
        "logger.run_dir": run_dir,
        "logger.tensorboard": "false",
        "logger.report": "false",
        "cluster.num_threads": "1",
        "cluster.rank_timeout_s": "60",
        "checkpointing.save_period": "2",
        f"{algorithm}.num_prompts_per_step": "4",
        f"{algorithm}.num_generations_per_prompt": "3",
        "policy.train_global_batch_size": "6",
        "policy.train_micro_batch_size": "2",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    written = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, *launcher, "-m", f"trainers.{algorithm}", f"config={algorithm}_copy", *written, *overrides]


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


PATHS = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATHS)}


@pytest.mark.timeout(300)
def test_two_ranks_train_like_one(tmp_path):
    """Three steps, then a resume on two ranks of what one rank has begun."""
    for ranks, name in ((1, "one"), (2, "two")):
        command = torchrun(tmp_path / name, "reinforce.max_num_steps=3", ranks=ranks)
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("step 3/3") == 1  # one rank speaks
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        compared = [name for name in one if not name.startswith(("tim", "perf/"))]
        for name in compared:
            assert two[name] == pytest.approx(one[name], rel=2e-3, abs=2e-4), name
        assert two["perf/rank_imbalance"] == 1.0  # every row has as many tokens
    more = subprocess.run(
        torchrun(tmp_path / "one", "reinforce.max_num_steps=4"), capture_output=True, text=True, env=ENVIRONMENT
    )
    assert more.returncode == 0 and "resumed after step 3" in more.stdout, more.stderr
    assert [row["step"] for row in metrics(tmp_path / "one")] == [1, 2, 3, 4]


@pytest.mark.timeout(300)
def test_a_signal_to_one_rank_ends_the_run_on_all(tmp_path):
    process = subprocess.Popen(
        torchrun(tmp_path, "reinforce.max_num_steps=100000"),
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log = tmp_path / "metrics.jsonl"
    while not log.exists() or not log.read_text().count("\n"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    last = metrics(tmp_path)[-1]["step"]
    assert (tmp_path / "checkpoints" / f"step_{last}").is_dir()


REWARD = """
import os
def reward(outputs, **_):
    if os.environ["RANK"] == "1":
        raise KeyError("no label")
    return [0.5] * len(outputs)
"""


@pytest.mark.timeout(300)
def test_a_reward_that_fails_on_one_rank_ends_all_with_its_reason(tmp_path):
    (tmp_path / "failing.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w2"}\n{"prompt": "w3"}\n{"prompt": "w4"}\n{"prompt": "w5"}\n')
    command = torchrun(
        tmp_path / "run", "env.name=python:failing.reward", "env.size=512", "data.max_prompt_length=4",
        f"data.prompts={tmp_path / 'prompts.jsonl'}",
    )  # fmt: skip
    path = {"PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(tmp_path)])}
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | path)
    assert done.returncode != 0
    assert "the reward python:failing.reward failed: KeyError: 'no label'" in done.stderr
    rows = (tmp_path / "run" / "failed_rollout.jsonl").read_text().splitlines()
    assert len(rows) == 12  # those of both ranks


DEADLY = """
import os, signal
from pathlib import Path
calls = 0
def reward(outputs, **_):
    global calls
    calls += 1
    mark = Path(__file__).with_name("killed")
    if os.environ["RANK"] == "1" and calls == 4 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(set(text))) for text in outputs]
"""


@pytest.mark.timeout(300)
def test_a_killed_rank_is_named_and_max_restarts_goes_on_from_the_last_checkpoint(tmp_path):
    (tmp_path / "deadly.py").write_text(DEADLY)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w2"}\n{"prompt": "w3"}\n{"prompt": "w4"}\n{"prompt": "w5"}\n')

    def run(name: str, restarts: int) -> tuple[float, subprocess.CompletedProcess]:
        command = torchrun(
            tmp_path / name, "env.name=python:deadly.reward", "env.size=512", "data.max_prompt_length=4",
            f"data.prompts={tmp_path / 'prompts.jsonl'}", "reinforce.max_num_steps=5",
        )  # fmt: skip
        if restarts:
            command[command.index("--standalone") : command.index("--standalone")] = ["--max-restarts", str(restarts)]
        path = {"PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(tmp_path)])}
        began = time.monotonic()
        return time.monotonic() - began, subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | path)

    _, done = run("dies", 0)
    assert done.returncode != 0 and (tmp_path / "killed").exists()
    assert "rank 0: error: rank 1 has ended" in done.stderr or "SIGKILL" in done.stderr
    assert "exitcode  : -9" in done.stderr and "rank      : 1" in done.stderr
    (tmp_path / "killed").unlink()
    _, done = run("restarted", 1)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists() and "resumed after step 2" in done.stdout
    _, done = run("unbroken", 0)
    assert done.returncode == 0, done.stderr
    runs = [metrics(tmp_path / name) for name in ("restarted", "unbroken")]
    clocks = ("time", "timing", "perf")
    timeless = [[{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows] for rows in runs]
    assert timeless[0] == timeless[1] and len(timeless[0]) == 5


def test_more_ranks_than_sequences_are_refused_before_any_model_loads(monkeypatch):
    """verl #1043."""
    monkeypatch.setenv("WORLD_SIZE", "65")
    with pytest.raises(ConfigError, match="train_global_batch_size=64 sequences .* fewer than the 65 ranks"):
        check(tiny.config())
