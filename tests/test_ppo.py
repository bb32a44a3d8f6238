"""The PPO trainer as a whole: it learns, it resumes bit for bit, it stops as it should."""

import contextlib
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny
from trainers import train
from trainers.launch import launch
from trainers.logger import METRICS
from trainers.ppo import PPOTrainer
from trainers.rewards import RewardError
from trainers.run import Run, TrainingError

LOCAL = {"value__train_global_batch_size": 8, "value__train_micro_batch_size": 8}
TIMES = ("time", "timing_s/", "perf/throughput", "perf/time_per_step", "perf/max_memory")


def lines(run_dir: Path) -> list[dict]:
    """metrics.jsonl without what a clock or the operating system decides."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def small(run_dir: Path, **overrides: object):
    """A few quick steps: 4 prompts x 4 samples, 2 optimizer steps each."""
    options = {
        "logger__run_dir": run_dir,
        "ppo__num_prompts_per_step": 4,
        "ppo__num_generations_per_prompt": 4,
        "policy__train_global_batch_size": 8,
        "policy__train_micro_batch_size": 8,
        "checkpointing__enabled": True,
        "checkpointing__save_period": 2,
        "ppo__max_num_steps": 4,
        "env__size": 10,  # 2 batches of 4 an epoch: steps 2, 4, 6 end at an epoch boundary
    }
    return tiny.config(**options | overrides)


@pytest.mark.parametrize("seed", [0, 1])
def test_ppo_learns_to_copy(tmp_path, seed):
    trainer = PPOTrainer(tiny.config(logger__run_dir=tmp_path, ppo__seed=seed, ppo__max_num_steps=150))
    trainer.fit()
    rewards = [row["critic/score/mean"] for row in lines(tmp_path)]
    assert rewards[0] < 0.2
    assert max(sum(rewards[i : i + 3]) / 3 for i in range(len(rewards) - 2)) > 0.9
    assert sum(rewards[-10:]) / 10 > 0.85


def test_the_critic_warms_up_alone(tmp_path):
    """In steps 1 and 2 of 3: the policy's weights, moments and schedule stay as they are."""
    trainer = PPOTrainer(small(tmp_path, value__mode="local", ppo__policy_training_start_step=3, ppo__max_num_steps=2,
                               **LOCAL))  # fmt: skip
    before = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    critic = [p.detach().clone() for p in trainer.value.model.parameters()]
    trainer.fit()
    assert all(torch.equal(p, before[name]) for name, p in trainer.policy.model.named_parameters())
    assert not all(torch.equal(p, q) for p, q in zip(trainer.value.model.parameters(), critic, strict=True))
    resumed = PPOTrainer(small(tmp_path, value__mode="local", ppo__policy_training_start_step=3, ppo__max_num_steps=3,
                               **LOCAL))  # fmt: skip
    assert [group["lr"] for group in resumed.policy.optimizers["actor"].adamw.param_groups] == [
        group["lr"] for group in trainer.policy.optimizers["actor"].adamw.param_groups
    ]
    resumed.fit()
    rows = lines(tmp_path)
    assert [row.get("actor/optimizer_steps", 0) for row in rows] == [0, 0, 2]
    assert [row["critic/optimizer_steps"] for row in rows] == [2, 2, 2]
    assert not all(torch.equal(p, before[name]) for name, p in resumed.policy.model.named_parameters())


def test_the_policy_stops_where_it_has_moved_too_far_and_the_critic_goes_on(tmp_path):
    """Before the first update of a rollout k3 is 0, so a second one is always made; both critics' epochs go on."""
    PPOTrainer(small(tmp_path, value__mode="local", ppo__target_kl=1e-9, ppo__ppo_epochs=2, **LOCAL)).fit()
    for row in lines(tmp_path):
        assert (row["actor/optimizer_steps"], row["critic/optimizer_steps"]) == (2, 4)


def test_two_runs_of_one_seed_are_equal_and_another_seed_is_not(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        PPOTrainer(small(tmp_path / name, ppo__seed=seed)).fit()
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    assert lines(tmp_path / "a") != lines(tmp_path / "c")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"value__mode": "local", **LOCAL},
        {"policy__num_layers_unfrozen": 1, "policy__dtype": "bfloat16", "ppo__ppo_epochs": 2},
    ],
    ids=["shared", "local", "cut-bf16-2-epochs"],
)
@pytest.mark.parametrize("stop", [3, 4], ids=["inside-an-epoch", "at-an-epoch-boundary"])
def test_resuming_gives_bit_for_bit_what_an_unbroken_run_gives(tmp_path, options, stop):
    """verl #5725, #7401, NeMo-RL #3171."""
    PPOTrainer(small(tmp_path / "whole", ppo__max_num_steps=6, **options)).fit()
    PPOTrainer(small(tmp_path / "broken", ppo__max_num_steps=stop, **options)).fit()
    resumed = PPOTrainer(small(tmp_path / "broken", ppo__max_num_steps=6, **options))
    assert resumed.progress.step == stop
    resumed.fit()
    assert lines(tmp_path / "broken") == lines(tmp_path / "whole")
    for name in ("whole", "broken"):
        assert [p.name for p in sorted((tmp_path / name / "checkpoints").iterdir())] == ["step_4", "step_6"]


def test_metrics_of_a_step(tmp_path):
    trainer = PPOTrainer(small(tmp_path, loss_fn__reference_policy_kl_penalty=0.05))
    trainer.fit()
    rows = lines(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    first = rows[0]
    assert first["critic/kl/mean"] == 0.0  # the reference is the policy that sampled
    assert first["critic/values/mean"] == 0.0  # the value head starts at zero
    assert first["actor/first_ratio_err_max"] < 1e-5
    assert first["training/rollout_probs_diff_max"] < 1e-5
    mismatch = ("rollout_probs_diff_mean", "rollout_probs_diff_max", "rollout_kl", "seq_logprob_error_mean")
    assert all(f"training/{name}" in row for row in rows for name in (*mismatch, "seq_logprob_error_max"))
    assert first["response_length/mean"] == 4 and first["prompt_length/mean"] == 2
    assert first["response_length/clip_ratio"] == 1.0
    assert first["actor/entropy"] == pytest.approx(2.77, abs=0.1)  # log 16, a random model
    assert first["perf/refit_bytes"] == 0.0
    assert first["actor/skipped_steps"] == 0
    assert rows[-1]["critic/kl/mean"] != 0.0
    assert rows[-1]["training/consumed_prompts"] == 16 and rows[-1]["training/consumed_samples"] == 64
    assert rows[-1]["training/total_valid_tokens"] == 256
    assert rows[-1]["training/epoch"] == 2


def test_samples_hold_every_token_with_what_the_update_saw(tmp_path):
    PPOTrainer(small(tmp_path, ppo__max_num_steps=1, loss_fn__reference_policy_kl_penalty=0.05)).fit()
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and rows[0]["step"] == 1
    tokens = rows[0]["tokens"]
    assert [t["mask"] for t in tokens] == [False, False, True, True, True, True]
    assert tokens[0]["logprob"] is None
    copied = sum(t["id"] == tokens[1]["id"] for t in tokens[2:]) / 4
    assert rows[0]["score"] == copied
    assert tokens[-1]["reward"] == pytest.approx(copied)  # the score on the last token; no KL at the first step
    for token in tokens[2:]:
        assert token["return"] == pytest.approx(token["value"] + copied * 0.95 ** (5 - tokens.index(token)), abs=1e-6)
        assert token["ratio"] == pytest.approx(2.718281828 ** (token["logprob"] - token["old"]), rel=1e-4)
        assert token["logprob"] != token["old"]


def test_checkpoint_is_an_hf_folder_with_the_trained_logits(tmp_path):
    trainer = PPOTrainer(small(tmp_path))
    trainer.fit()
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "step_4" / "policy").eval()
    ids = torch.tensor([[0, 5, 5, 6]])
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, trainer.policy.model(ids).logits)


def test_advantages_are_estimated_once_per_rollout(tmp_path, monkeypatch):
    """trlX #202."""
    import trainers.ppo
    import trainers.trainer

    calls = []
    original = trainers.ppo.estimate_advantages
    monkeypatch.setattr(trainers.ppo, "estimate_advantages", lambda *a: calls.append(1) or original(*a))
    PPOTrainer(small(tmp_path, ppo__ppo_epochs=3, ppo__max_num_steps=2)).fit()
    assert len(calls) == 2


def test_several_epochs_use_the_first_epochs_old_logprobs(tmp_path):
    PPOTrainer(small(tmp_path, ppo__ppo_epochs=4, ppo__max_num_steps=2)).fit()
    row = lines(tmp_path)[-1]
    assert row["actor/ratio_std"] > 0.01 and row["actor/first_ratio_err_max"] < 1e-5


@pytest.mark.parametrize("detach", [True, False])
def test_value_loss_reaches_the_trunk_only_if_asked(tmp_path, detach):
    trainer = PPOTrainer(small(tmp_path, value__detach_trunk=detach, value__optimizer__lr=0.0))
    batch = trainer.generate_ppo_data(trainer.generate_rollouts(1))
    batch.update(advantages=torch.zeros_like(batch.advantages))
    with torch.no_grad():
        trainer.value.head.linear.weight.fill_(0.1)
    before = [p.clone() for p in trainer.policy.model.parameters()]
    for minibatch in trainer.policy_minibatches(batch, [], step=1, epoch=0):
        trainer.policy.train_step(minibatch, trainer.policy_loss)
    moved = any(not torch.equal(a, b) for a, b in zip(before, trainer.policy.model.parameters(), strict=True))
    assert moved is not detach


def test_the_critic_learns_the_return(tmp_path):
    """A reward that is always 1 and lambda 1: every return is 1, and the zero-initialised head must find it."""
    for mode in ("shared", "local"):
        trainer = train(
            tiny.tiny_model(),
            reward_fn=lambda outputs, **_: [1.0] * len(outputs),
            prompts=["w3 w4", "w5"] * 5,
            config=small(
                tmp_path / mode, env__name="sentiment", env__size=512, value__mode=mode, ppo__max_num_steps=40,
                checkpointing__enabled=False, ppo__adv_estimator__gae_lambda=1.0, value__optimizer__lr=0.003,
                **(LOCAL if mode == "local" else {}),
            ),
        )  # fmt: skip
        values = [row["critic/values/mean"] for row in lines(trainer.run.dir)]
        assert values[0] == 0.0
        assert values[-1] == pytest.approx(1.0, abs=0.15), mode


def test_resume_refuses_a_changed_setting_by_name(tmp_path):
    PPOTrainer(small(tmp_path, ppo__max_num_steps=2)).fit()
    with pytest.raises(TrainingError, match="cannot resume .*step_2.*policy.optimizer.lr"):
        PPOTrainer(small(tmp_path, policy__optimizer__lr=1e-5))
    with pytest.raises(TrainingError, match="policy.model_name"):
        PPOTrainer(small(tmp_path, policy__model_name=tiny.tiny_model()))


def test_resume_from_a_path_starts_a_new_run_folder(tmp_path):
    PPOTrainer(small(tmp_path / "a", ppo__max_num_steps=2)).fit()
    PPOTrainer(small(tmp_path / "a", ppo__max_num_steps=4)).fit()
    with pytest.raises(ValueError, match="goes on to step_4; name another logger.run_dir"):
        PPOTrainer(small(tmp_path / "a", checkpointing__resume=tmp_path / "a" / "checkpoints" / "step_2"))
    for source in (tmp_path / "a" / "checkpoints" / "step_2",):
        trainer = PPOTrainer(small(tmp_path / f"b-{source.name}", checkpointing__resume=source))
        assert trainer.progress.step == 2
    with pytest.raises(ValueError, match="checkpointing.resume=.*nowhere: expected auto, never"):
        PPOTrainer(small(tmp_path / "c", checkpointing__resume=tmp_path / "nowhere"))


def test_a_run_folder_is_not_overwritten(tmp_path):
    PPOTrainer(small(tmp_path, ppo__max_num_steps=1)).fit()
    with pytest.raises(ValueError, match="holds a run already, and checkpointing.resume=never"):
        PPOTrainer(small(tmp_path, checkpointing__resume="never"))
    unsaved = small(tmp_path / "unsaved", checkpointing__enabled=False, ppo__max_num_steps=1)
    PPOTrainer(unsaved).fit()  # without checkpoints there is nothing to go on from
    with pytest.raises(ValueError, match="holds a run already"):
        PPOTrainer(unsaved)


def test_a_failing_reward_saves_the_last_step_and_names_the_sample(tmp_path):
    calls = []

    def reward(outputs, **_):
        calls.append(outputs)
        return [float("nan") if len(calls) == 4 and i == 2 else 0.5 for i in range(len(outputs))]

    prompts = ["w3 w4", "w5", "w6", "w7"]
    cfg = small(tmp_path, env__name="sentiment", env__size=512)
    with pytest.raises(RewardError, match="finite"):
        train(tiny.tiny_model(), reward, prompts, cfg)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_2", "step_3"]
    failed = [json.loads(line) for line in (tmp_path / "failed_rollout.jsonl").read_text().splitlines()]
    assert [row["response"] for row in failed] == calls[3]
    train(tiny.tiny_model(), reward, prompts, cfg)  # it fails once only
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3, 4]
    with pytest.raises(TrainingError, match="env.name"):
        train(tiny.tiny_model(), lambda outputs, **_: [0.5] * len(outputs), prompts, cfg)


def test_a_disk_that_fills_up_costs_one_checkpoint_and_the_second_time_the_run(tmp_path, capsys):
    trainer = PPOTrainer(small(tmp_path, ppo__max_num_steps=8))
    save = trainer.policy.save
    full = {4}

    def filling(folder):
        save(folder)
        if trainer.progress.step in full:
            raise OSError(28, "No space left on device")

    trainer.policy.save = filling
    trainer.fit()
    assert "step 4 was not saved, training goes on" in capsys.readouterr().out
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step_6", "step_8"]
    trainer = PPOTrainer(small(tmp_path, ppo__max_num_steps=12))
    trainer.policy.save, full = filling, {10, 12}
    save = type(trainer.policy).save.__get__(trainer.policy)
    with pytest.raises(TrainingError, match="in a row could not be written: .*No space left"):
        trainer.fit()
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step_6", "step_8"]


def test_a_last_checkpoint_that_cannot_be_written_is_no_success(tmp_path):
    trainer = PPOTrainer(small(tmp_path, checkpointing__save_period=100))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer.policy.save = lambda folder: (
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
        or type(trainer.policy).save(trainer.policy, folder)
    )
    handler = signal.signal(
        signal.SIGXFSZ, signal.SIG_IGN
    )  # a file beyond the limit is then an error, as a full disk is
    try:
        with pytest.raises(TrainingError, match="the last checkpoint could not be written"):
            trainer.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_nothing_is_inspected_if_nothing_is_to_be(tmp_path):
    PPOTrainer(small(tmp_path, logger__num_inspected_samples=0, logger__num_samples_to_print=0)).fit()
    assert (tmp_path / "samples.jsonl").read_text() == "" and len(lines(tmp_path)) == 4


def test_the_validation_that_fails_leaves_the_last_step_saved_and_is_made_once(tmp_path):
    PPOTrainer(small(tmp_path / "a", ppo__val_period=2, ppo__val_at_end=True)).fit()
    assert [row["step"] for row in lines(tmp_path / "a") if "val/score/mean" in row] == [2, 4]

    def metric_fn(**_):
        raise KeyError("broken")

    with pytest.raises(KeyError):
        train(
            tiny.tiny_model(), lambda outputs, **_: [0.5] * len(outputs), ["w3", "w4", "w5", "w6"],
            small(tmp_path / "b", env__name="sentiment", env__size=512, ppo__val_at_end=True), metric_fn=metric_fn,
        )  # fmt: skip
    assert (tmp_path / "b" / "checkpoints" / "step_4").is_dir()


def test_sequences_beyond_the_models_positions_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"2 tokens \+ .*max_new_tokens=5000 = 5002, but the model has"):
        PPOTrainer(small(tmp_path, policy__generation__max_new_tokens=5000))


def test_train_refuses_two_sources_of_prompts(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "w3"}\n' * 4)
    with pytest.raises(ValueError, match="prompts was given, and so was data.prompts"):
        train(tiny.tiny_model(), lambda **_: [], ["w3"], {"data.prompts": str(tmp_path / "p.jsonl")})


def test_a_trainer_that_disagrees_with_its_own_scores_is_stopped(tmp_path):
    trainer = PPOTrainer(small(tmp_path, policy__generation__probe_period=0))  # which would see it first
    scored = trainer.policy.score
    trainer.policy.score = lambda batch, want: {
        name: value + 0.1 * batch.mask if name == "old_logprobs" else value
        for name, value in scored(batch, want).items()
    }
    with pytest.raises(TrainingError, match="above ppo.max_first_ratio_error=0.02"):
        trainer.fit()


def test_a_run_whose_gradients_are_never_finite_gives_up(tmp_path):
    trainer = PPOTrainer(small(tmp_path, ppo__max_num_steps=10))
    prepared = trainer.generate_ppo_data
    trainer.generate_ppo_data = lambda batch: prepared(batch).update(
        advantages=torch.full_like(batch.advantages, torch.nan)
    )
    with pytest.raises(TrainingError, match="no gradient was finite in 3 rollouts"):
        trainer.fit()
    assert trainer.progress.step == 3


def test_validation_is_deterministic_and_logged(tmp_path):
    trainer = train(
        tiny.tiny_model(),
        reward_fn=lambda outputs, **_: [float(len(o)) for o in outputs],
        prompts=["w3 w4", "w5", "w6", "w7"],
        config=small(
            tmp_path, env__name="sentiment", env__size=512, ppo__val_period=2, ppo__val_at_start=True,
            policy__optimizer__lr=0.0, value__optimizer__lr=0.0,
        ),
        eval_prompts=[{"prompt": "w8"}, {"prompt": "w9 w2"}, {"prompt": "w3"}],
        metric_fn=lambda outputs, **_: {"words": [len(o.split()) for o in outputs]},
    )  # fmt: skip
    rows = [row for row in lines(tmp_path) if "val/score/mean" in row]
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert len({row["val/score/mean"] for row in rows}) == 1
    assert rows[0]["val/metrics/words"] <= 4
    assert trainer.validate()["val/score/mean"] == rows[0]["val/score/mean"]


def test_stop_sequences_end_responses(tmp_path):
    seen = []
    train(
        tiny.tiny_model(),
        reward_fn=lambda outputs, **_: seen.extend(outputs) or [1.0] * len(outputs),
        prompts=["w3 w4", "w5", "w6", "w7"],
        config=small(
            tmp_path, env__name="sentiment", env__size=512, ppo__max_num_steps=1, policy__generation__max_new_tokens=200
        ),
        stop_sequences=["w9"],
    )
    assert len(seen) == 16 and all(output.endswith("w9") and output.count("w9") == 1 for output in seen)


def test_a_run_ends_after_its_epochs(tmp_path):
    PPOTrainer(small(tmp_path, ppo__max_num_steps=100, ppo__max_num_epochs=2)).fit()
    assert [row["training/epoch"] for row in lines(tmp_path)] == [0, 1, 1, 2]  # 10 prompts, 4 a step


def test_a_model_with_tied_embeddings_trains_and_resumes(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny.tiny_model())
    config = model.config.to_diff_dict() | {"tie_word_embeddings": True}
    tied = type(model)(type(model.config)(**config))
    tied.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(tmp_path / "model")
    options = {"policy__model_name": tmp_path / "model"}
    PPOTrainer(small(tmp_path / "whole", ppo__max_num_steps=4, **options)).fit()
    PPOTrainer(small(tmp_path / "broken", ppo__max_num_steps=2, **options)).fit()
    trainer = PPOTrainer(small(tmp_path / "broken", ppo__max_num_steps=4, **options))
    trainer.fit()
    assert lines(tmp_path / "broken") == lines(tmp_path / "whole")
    assert "lm_head.weight" not in trainer.policy.manifest()
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "broken" / "checkpoints" / "step_4" / "policy")
    assert reloaded.lm_head.weight is reloaded.get_input_embeddings().weight
    assert not torch.equal(reloaded.lm_head.weight, tied.lm_head.weight)


def test_every_metric_of_a_run_is_documented(tmp_path):
    PPOTrainer(small(tmp_path, ppo__val_at_end=True)).fit()
    names = {name for row in lines(tmp_path) for name in row} - {"step"}
    assert names <= set(METRICS) and len(names) > 50


def test_train_says_what_is_missing():
    with pytest.raises(ValueError, match="prompts was given without reward_fn"):
        train(prompts=["a"])
    with pytest.raises(ValueError, match="reward_fn was given without prompts"):
        train(reward_fn=len)
    with pytest.raises(ValueError, match="reward_fn was given, and so was env.rewards: leave one out"):
        train(reward_fn=len, prompts=["a"], config={"env.rewards": {"sentiment": 1.0}})


def command(run_dir: Path, *overrides: str) -> list[str]:
    settings = {
        "policy.model_name": tiny.tiny_model(),
        "logger.run_dir": run_dir,
        "logger.tensorboard": "false",
        "logger.report": "false",
        "cluster.num_threads": "1",
        "checkpointing.save_period": "2",
        "ppo.num_prompts_per_step": "4",
        "ppo.num_generations_per_prompt": "4",
        "policy.train_global_batch_size": "8",
        "policy.train_micro_batch_size": "8",
    }
    written = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "trainers.ppo", "config=ppo_copy", *written, *overrides]


REWARD = '''
import os, signal
def reward(outputs, **_):
    """Scores like any other; in the middle of the fourth step, once, the process is killed."""
    reward.calls = getattr(reward, "calls", 0) + 1
    if reward.calls == 4 and os.environ.get("KILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    return [len(set(o.split())) / 4 for o in outputs]
'''


def test_kill_9_in_the_middle_of_a_step_and_a_resume_give_the_unbroken_runs_metrics(tmp_path):
    (tmp_path / "dying_reward.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w{i}"}) + "\n" for i in range(2, 12)))
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"}
    more = (
        "env.name=python:dying_reward.reward", "env.size=512", "ppo.max_num_steps=6",
        f"data.prompts={tmp_path / 'prompts.jsonl'}",
    )  # fmt: skip

    def run(name: str, **extra: str) -> int:
        return subprocess.run(
            command(tmp_path / name, *more), env=env | extra, timeout=120, capture_output=True
        ).returncode

    assert run("whole") == 0
    assert run("killed", KILL="1") == -signal.SIGKILL
    assert [row["step"] for row in lines(tmp_path / "killed")] == [1, 2, 3]
    assert run("killed") == 0
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_exits_0(tmp_path, number):
    process = subprocess.Popen(
        command(tmp_path / "run", "ppo.max_num_steps=100000", "checkpointing.save_period=100000"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step") and "3/" in line:
            process.send_signal(number)
            break
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, "".join(seen) + rest
    last = lines(tmp_path / "run")[-1]["step"]
    assert 3 <= last < 100
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{last}"]
    assert f"{number.name}: finishing this step" in rest


def test_a_signal_in_the_middle_of_a_print(tmp_path):
    """stdout's buffer is being written when the handler runs: it must not be entered again."""
    run = Run(tiny.config(logger__run_dir=str(tmp_path / "run")))

    class Interrupted(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            signal.raise_signal(signal.SIGTERM)
            return len(data)

    text = io.TextIOWrapper(io.BufferedWriter(Interrupted()), write_through=True)
    with run, contextlib.redirect_stdout(text):
        print("step 1", flush=True)
    assert run.stopping


def test_a_second_signal_leaves_at_once(tmp_path):
    (tmp_path / "slow_reward.py").write_text(
        "import time\ndef reward(**_): print('asked', flush=True); time.sleep(60)\n"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w3"}\n' * 4)
    process = subprocess.Popen(
        command(
            tmp_path / "run", "env.name=python:slow_reward.reward", "env.size=512",
            f"data.prompts={tmp_path / 'prompts.jsonl'}",
        ),
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("asked"):
            break
    process.send_signal(signal.SIGTERM)
    start = time.monotonic()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM and time.monotonic() - start < 15


def run_command(*arguments: object, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=100, **options)


def test_what_cannot_be_run_is_one_line_and_exit_2(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    run = tmp_path / "file" / "run"
    done = run_command(run)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert re.search(f"logger.run_dir={run}: .* is not a folder", done.stderr)
    for override, message in (  # what the command calls, without the seconds that its imports take
        ("policy.model_name=/no/such/folder", "/no/such/folder"),
        ("policy.generation.stop_token_ids=[99]", "stop_token_ids.*99 .*vocabulary of 16"),
    ):
        assert launch("ppo", "PPOTrainer", "", command(tmp_path / "run", override)[3:]) == 2
        errors = capsys.readouterr().err
        assert re.search(message, errors) and len(errors.splitlines()) == 1, errors


def test_a_reward_that_raises_shows_its_own_traceback_and_how_to_go_on(tmp_path):
    (tmp_path / "broken_reward.py").write_text("def reward(outputs, **_):\n    return [1 / 0 for o in outputs]\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w3"}\n' * 4)
    done = run_command(
        tmp_path / "run", "env.name=python:broken_reward.reward", "env.size=512",
        f"data.prompts={tmp_path / 'prompts.jsonl'}",
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"},
    )  # fmt: skip
    assert done.returncode == 1
    assert 'broken_reward.py", line 2, in reward' in done.stderr
    assert "the reward python:broken_reward.reward failed: ZeroDivisionError: division by zero" in done.stderr
    assert f"logger.run_dir={tmp_path / 'run'} goes on after step 0" in done.stderr


def test_auto_dtype_is_measured_once_and_a_resume_keeps_it(tmp_path, monkeypatch):
    import trainers.ppo
    import trainers.trainer

    asked = []
    monkeypatch.setattr(trainers.trainer, "pick_dtype", lambda name, device: asked.append(name) or torch.bfloat16)
    PPOTrainer(small(tmp_path, policy__dtype="auto", policy__num_layers_unfrozen=1, ppo__max_num_steps=2)).fit()
    monkeypatch.setattr(trainers.trainer, "pick_dtype", lambda name, device: asked.append(name) or getattr(torch, name))
    trainer = PPOTrainer(small(tmp_path, policy__dtype="auto", policy__num_layers_unfrozen=1, ppo__max_num_steps=4))
    assert asked == ["auto", "bfloat16"] and trainer.policy.dtype == torch.bfloat16 and trainer.progress.step == 2


def test_bad_arguments_exit_2_before_a_model_loads(tmp_path):
    done = subprocess.run(
        command(tmp_path / "run", "policy.generation.temprature=1"), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "policy.generation.temperature" in done.stderr and not (tmp_path / "run").exists()
    done = subprocess.run(
        command(tmp_path / "run", "policy.train_global_batch_size=12", "policy.train_micro_batch_size=4"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "16" in done.stderr and "12" in done.stderr
