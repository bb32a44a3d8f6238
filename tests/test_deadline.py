"""A reward that is late: wherever it spends its time it is stopped, and one in time notices nothing."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import tiny
from trainers import train
from trainers.environments.asking import LateRewardError, ask
from trainers.environments.deadline import TooLate, call_within
from trainers.environments.guards import time_limit
from trainers.rewards import RewardError

LIMIT = 0.2
RELEASE = threading.Event()  # ends what a test has left behind


@pytest.fixture(autouse=True)
def _release():
    RELEASE.clear()
    yield
    RELEASE.set()


def forever():
    while True:
        pass


def read_from_nobody():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def except_exception():
    while True:
        with contextlib.suppress(Exception):
            time.sleep(30)


def bare_except():
    for _ in range(100):
        try:
            time.sleep(30)
        except:  # noqa: E722
            time.sleep(30)


def waits_for_its_threads():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(RELEASE.wait, 60).result()


def regular_expression():
    re.fullmatch("(a+)+b", "a" * 40)  # holds the interpreter's lock for hours


def large_power():
    9**9**9


def with_an_alarm_of_its_own():
    for _ in range(1000):
        with time_limit(5):
            time.sleep(0.05)


SLOW = [
    forever, lambda: time.sleep(30), read_from_nobody, lambda: subprocess.run(["sleep", "30"]), except_exception,
    bare_except, waits_for_its_threads, with_an_alarm_of_its_own,
]  # fmt: skip


@pytest.mark.parametrize("slow", [*SLOW, regular_expression, large_power])
def test_a_late_call_is_stopped_in_the_main_thread(slow):
    start = time.monotonic()
    with pytest.raises(TooLate):
        call_within(LIMIT, slow)
    assert LIMIT <= time.monotonic() - start < 15
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)
    time.sleep(2 * LIMIT)  # nothing comes after it


def spin():
    while not RELEASE.is_set():
        pass


@pytest.mark.parametrize("slow", [spin, lambda: RELEASE.wait(60), bare_except])
def test_a_late_call_is_left_behind_in_any_other_thread(slow):
    with ThreadPoolExecutor(1) as pool:
        start = time.monotonic()
        with pytest.raises(TooLate):
            pool.submit(call_within, LIMIT, slow).result()
        assert LIMIT <= time.monotonic() - start < 15


def test_answers_and_errors_pass_through():
    def fails():
        raise TimeoutError("its own")

    def everywhere(limit):
        assert call_within(limit, lambda a, b: (a, b), 1, 2) == (1, 2)
        with pytest.raises(TimeoutError, match="its own"):
            call_within(limit, fails)

    for limit in (None, 30.0):
        everywhere(limit)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(everywhere, limit).result()


def test_in_the_main_thread_it_runs_where_it_was_called():
    """Thread-local state, event loops and alarms of a reward work as without a limit; other threads only without."""
    here = threading.current_thread()
    assert call_within(30, threading.current_thread) is here
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.current_thread).result()
        assert pool.submit(call_within, None, threading.current_thread).result() is thread
        assert pool.submit(call_within, 30, threading.current_thread).result() is not thread


def test_a_call_in_time_leaves_no_thread_and_no_signal():
    limit = 0.5  # a busy machine may wake a sleeper tens of milliseconds late
    for _ in range(20):
        call_within(limit, time.sleep, 0.01)
    time.sleep(limit + 0.1)
    assert "reward-watchdog" not in [thread.name for thread in threading.enumerate()]


def test_the_error_names_the_reward_the_limit_and_the_key():
    class Slow:
        def score(self, samples):
            time.sleep(30)

    with pytest.raises(
        LateRewardError, match=r"^the reward slow did not answer within env.timeout_s=0.2 seconds$"
    ) as e:
        ask(Slow(), [], name="slow", timeout_s=LIMIT)
    assert "time.sleep(30)" in str(e.traceback[-1].frame.code.source()) or e.value.__cause__ is not None


MODULE = """
import threading, time
def reward(outputs, **_):
    reward.calls = getattr(reward, "calls", 0) + 1
    if reward.calls > 1:
        threading.Thread(target=time.sleep, args=(1000,)).start()  # not a daemon: Python would wait for it at the end
        while True: pass
    return [float(len(set(o.split()))) for o in outputs]
"""


def test_a_late_reward_saves_the_run_which_exits_with_1(tmp_path):
    (tmp_path / "late_reward.py").write_text(MODULE)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w3"}\n' * 4)
    settings = [
        f"logger.run_dir={tmp_path / 'run'}", "env.name=python:late_reward.reward", "env.size=512", "env.timeout_s=1",
        f"data.prompts={tmp_path / 'prompts.jsonl'}", "ppo.num_prompts_per_step=4", "ppo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=8", "policy.train_micro_batch_size=8", "logger.tensorboard=false",
        "logger.report=false", "cluster.num_threads=1", f"policy.model_name={tiny.tiny_model()}",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "trainers.ppo", "config=ppo_copy", *settings],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "error: the reward python:late_reward.reward did not answer within env.timeout_s=1 seconds" in done.stderr
    assert 'late_reward.py", line 7, in reward' in done.stderr  # where it was
    assert f"logger.run_dir={tmp_path / 'run'} goes on after step 1." in done.stderr
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_1"]
    assert len((tmp_path / "run" / "failed_rollout.jsonl").read_text().splitlines()) == 16


def test_train_in_another_thread(tmp_path):
    cfg = tiny.config(
        logger__run_dir=str(tmp_path), env__name="sentiment", env__size=512, env__timeout_s=LIMIT,
        ppo__num_prompts_per_step=2, ppo__num_generations_per_prompt=4, policy__train_global_batch_size=8,
        policy__train_micro_batch_size=8,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(train, tiny.tiny_model(), lambda **_: RELEASE.wait(60), ["w3", "w4"], cfg)
        with pytest.raises(RewardError, match="lambda> did not answer within env.timeout_s=0.2 seconds"):
            run.result()
    assert (tmp_path / "failed_rollout.jsonl").exists()
