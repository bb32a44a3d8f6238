"""A run's clock and its memory: it saves before its deadline, and says what to lower where memory does not suffice."""

import time
from types import SimpleNamespace

import pytest
import torch

from tests import tiny
from tests.test_arithmetic import accepted, refused
from tests.test_ppo import LOCAL, command, lines, small
from trainers import deadline, run
from trainers.checkpoint import listed
from trainers.deadline import Deadline, process_seconds, seconds_of
from trainers.launch import launch
from trainers.out_of_memory import is_out_of_memory
from trainers.ppo import PPOTrainer
from trainers.run import TrainingError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:00:30:00", 1800), ("01:02:03:04", 93784), ("00:30:00", 1800), ("48:00:00", 172800), ("10:00:00:00", 864000)],
)
def test_the_forms_of_a_deadline(text, seconds):
    assert seconds_of(text) == seconds
    accepted(f"checkpointing.checkpoint_must_save_by={text}")


@pytest.mark.parametrize("text", ["30:00", "1800", "00:60:00", "1:00:00:00:00", "-1:00:00", "1:00:00 h"])
def test_what_is_no_deadline(text):
    message = refused(f"checkpointing.checkpoint_must_save_by={text}")
    assert message == (f"checkpointing.checkpoint_must_save_by={text}: expected DD:HH:MM:SS or HH:MM:SS, got {text!r}")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves; the process began 100 s before it says 0."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now.seconds)
    monkeypatch.setattr(deadline, "process_seconds", lambda: 100.0 + now.seconds)
    return now


def test_when_there_is_no_time_for_another_step(clock, capsys):
    limit = Deadline(400.0)  # at 300 of the clock
    clock.seconds = 299.0
    assert not limit.leaves_no_step()  # nothing was measured yet
    limit.step(50.0, {"save_checkpoint": 6.0, "testing": 4.0, "gen": 20.0})  # 40 without what the last step left
    assert limit.needed() == pytest.approx(1.2 * (40 + 40))  # a save that was not timed is as long as a step
    limit.timed("save_checkpoint", 5.0)
    limit.timed("testing", 15.0)
    limit.timed("testing", 10.0)
    limit.step(30.0, {})
    assert limit.needed() == pytest.approx(1.2 * (40 + 5 + 15))  # the longest of each
    clock.seconds = 300 - 72.1
    assert not limit.leaves_no_step()
    clock.seconds = 300 - 71.9
    assert limit.leaves_no_step()
    said = "72 s are left, another step and its checkpoint may take 72 s: saving and ending here"
    assert said in capsys.readouterr().out
    clock.seconds = 0.0
    assert limit.leaves_no_step() and capsys.readouterr().out == ""  # it stays so, and is said once
    never = Deadline(None)
    never.step(1e9, {})
    assert not never.leaves_no_step()


def test_the_process_began_before_this_test():
    before = process_seconds()
    time.sleep(0.05)
    assert before > 0 and 0.04 < process_seconds() - before < 5


def test_the_last_checkpoint_is_there_before_the_deadline(tmp_path, clock, monkeypatch):
    """Steps of 10 s, saves of 3 s and validations of 2 s against a limit at 62: after step 4, at 40 and not later."""
    trainer = PPOTrainer(small(tmp_path, checkpointing__save_period=100, ppo__max_num_steps=100, ppo__val_at_end=True,
                               checkpointing__checkpoint_must_save_by="00:02:42"))  # fmt: skip
    monkeypatch.setattr(run.time, "perf_counter", lambda: clock.seconds)
    generated, written, sampled = trainer.generate_rollouts, trainer._write, trainer.validate

    def slow(call, seconds):
        def slowed(*arguments, **keywords):
            clock.seconds += seconds
            return call(*arguments, **keywords)

        return slowed

    trainer.generate_rollouts, trainer._write = slow(generated, 10), slow(written, 3)
    trainer.validate = lambda when="now": slow(sampled, 2)(when) if when == "end" else sampled(when)
    trainer.fit()
    assert trainer.progress.step == 4  # then 22 s are left, and 1.2 x (10 + 10) are needed
    assert [path.name for path in listed(tmp_path / "checkpoints")] == ["step_4"]
    rows = lines(tmp_path)
    assert rows[-1]["step"] == 4 and "val/score/mean" in rows[-1]
    assert clock.seconds == 45 <= 62


def test_a_run_over_its_deadline_exits_0_and_goes_on_later(tmp_path, capsys):
    limit = "checkpointing.checkpoint_must_save_by=00:00:01"  # over before the models are there
    assert launch("ppo", "PPOTrainer", "", [*command(tmp_path)[3:], limit]) == 0
    assert "0 s are left" in capsys.readouterr().out
    assert [path.name for path in listed(tmp_path / "checkpoints")] == ["step_0"]
    trainer = PPOTrainer(small(tmp_path, policy__model_name=tiny.tiny_model(), env__size=64, ppo__max_num_steps=2))
    trainer.fit()
    assert [row["step"] for row in lines(tmp_path)] == [1, 2]


def cuda():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")


def cpu():
    return RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: ...")


def failing(error):
    def call(*_, **__):
        raise error

    return call


@pytest.mark.parametrize(
    ("part", "method", "stage", "advice"),
    [
        ("engine", "generate", "generation", "lower policy.generation.max_batch_size, now 128"),
        ("policy", "score", "scoring", "lower policy.logprob_batch_size, now 128"),
        ("policy", "train_step", "the policy's update", "lower policy.train_micro_batch_size, now 8"),
        ("value", "train_step", "the critic's update", "lower value.train_micro_batch_size, now 8"),
        ("policy", "save", "saving a checkpoint", "no setting bounds this stage alone"),
    ],
)
@pytest.mark.parametrize("kind", [cuda, cpu, MemoryError])
def test_out_of_memory_names_the_stage_and_the_setting(tmp_path, part, method, stage, advice, kind):
    error = kind()
    trainer = PPOTrainer(small(tmp_path, value__mode="local", checkpointing__save_period=1, **LOCAL))
    setattr(getattr(trainer, part), method, failing(error))
    with pytest.raises(TrainingError) as caught:
        trainer.fit()
    message = str(caught.value)
    assert message.startswith(f"out of memory in {stage}: {advice}") and "\n" not in message
    assert (str(error).splitlines() or ["MemoryError"])[0] in message and caught.value.__cause__ is error


def test_a_token_budget_is_what_to_lower_where_one_is_set(tmp_path):
    trainer = PPOTrainer(small(tmp_path, policy__max_tokens_per_micro_batch=48, policy__logprob_batch_size=8))
    trainer.policy.train_step = failing(cuda())
    with pytest.raises(TrainingError, match="update: lower policy.max_tokens_per_micro_batch, now 48"):
        trainer.fit()


def test_a_micro_batch_of_one_cannot_be_lowered(tmp_path):
    trainer = PPOTrainer(small(tmp_path, policy__train_micro_batch_size=1))
    trainer.policy.train_step = failing(cuda())
    with pytest.raises(TrainingError, match="policy.train_micro_batch_size is 1 already: data.max_prompt_length"):
        trainer.fit()


def test_other_errors_pass_as_they_are(tmp_path):
    for error in (RuntimeError("shape mismatch"), TrainingError("out of memory in scoring: can't allocate memory")):
        assert not is_out_of_memory(error)
        trainer = PPOTrainer(small(tmp_path))
        trainer.policy.train_step = failing(error)
        with pytest.raises(RuntimeError) as caught:
            trainer.fit()
        assert caught.value is error


def test_a_model_that_does_not_fit_is_exit_2(tmp_path, monkeypatch, capsys):
    import trainers.policy.build

    monkeypatch.setattr(trainers.policy.build, "HFPolicy", failing(cpu()))
    arguments = command(tmp_path)[3:]
    assert launch("ppo", "PPOTrainer", "", arguments) == 2
    error = capsys.readouterr().err
    assert "error: out of memory in loading the models: no setting bounds this stage alone" in error
