"""Fifty times killed at random points, a run ends with the numbers of one that was never interrupted. Slow: minutes."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import tiny
from tests.test_reinforce import STATEFUL, lines

KILLS, STEPS = 50, 80


def command(run_dir: Path) -> list[str]:
    settings = {
        "policy.model_name": tiny.tiny_model(), "logger.run_dir": run_dir, "logger.tensorboard": "false",
        "logger.report": "false", "logger.samples_period": 1000, "cluster.num_threads": 1,
        "checkpointing.save_period": 1, "checkpointing.keep_last_k": 2, "checkpointing.keep_top_k": 1,
        "checkpointing.metric_name": "critic/score/mean", "env.size": 10,
        "policy.train_global_batch_size": 8, "policy.train_micro_batch_size": 4,
        "ppo.num_prompts_per_step": 4, "ppo.num_generations_per_prompt": 4, "ppo.max_num_steps": STEPS,
    }  # fmt: skip
    options = {key.replace("algorithm__", "ppo__").replace("__", "."): value for key, value in STATEFUL.items()}
    written = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()]
    return [
        sys.executable,
        "-m",
        "trainers.ppo",
        "config=ppo_copy",
        *(f"{k}={v}" for k, v in settings.items()),
        *written,
    ]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_fifty_kills_at_random_points(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(tmp_path / "whole"), env=environment, check=True, stdout=subprocess.DEVNULL)
    draw, kills, finished = random.Random(0), 0, False
    while kills < KILLS and not finished:
        process = subprocess.Popen(command(tmp_path / "killed"), env=environment, stdout=subprocess.PIPE, text=True)
        early = draw.random() < 0.1  # while it imports, loads and resumes
        delay = draw.uniform(0, 5 if early else 0.25)
        if not early:  # from its first step on: within sampling, updates, refit, logging or a checkpoint
            for line in process.stdout:
                if line.startswith("step "):
                    break
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        finished = process.wait() == 0
        process.stdout.close()
        kills += 1
    assert kills == KILLS, f"it was through after {kills} kills: give it more steps"
    subprocess.run(command(tmp_path / "killed"), env=environment, check=True, stdout=subprocess.DEVNULL)
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    kept = [sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) for name in ("killed", "whole")]
    assert kept[0] == kept[1]
