"""Validation: every prompt once whatever the batches, its own sampling and prompts, what is written and shown."""

import json
from pathlib import Path

import pytest
import torch

from tests import tiny
from trainers import train
from trainers.arithmetic import ConfigError
from trainers.dry_run import dry_run
from trainers.engines import Completion
from trainers.environments import Prompt, Sample
from trainers.ppo import PPOTrainer
from trainers.prompts import TokenizedPrompt
from trainers.rollout import pack
from trainers.validation import validation_metrics, validation_rows

WORDS = ["w3 w4", "w5", "w6", "w7 w2", "w9"]


def prompts(n: int) -> list[TokenizedPrompt]:
    return [TokenizedPrompt(i, Prompt(f"w{i}"), (i,)) for i in range(n)]


def rollout_of(scores: list[float], calls: list[tuple[int, int]]):
    """Responses of 1, 2, 3, ... tokens; every other one is cut."""

    def rollout(part, first):
        calls.append((first, len(part)))
        places = range(first, first + len(part))
        finish = ["length" if place % 2 else "stop" for place in places]
        completions = [Completion([5] * (p + 1), [-1.0] * (p + 1), f, 0) for p, f in zip(places, finish, strict=True)]
        batch = pack([prompt.ids for prompt in part], completions)
        batch.samples = [
            Sample(prompt.prompt, prompt.ids, tuple(c.tokens), f"r{p}", c.finish)
            for prompt, c, p in zip(part, completions, places, strict=True)
        ]
        return batch.update(raw_reward=torch.tensor([scores[place] for place in places]))

    return rollout


@pytest.mark.parametrize(
    ("batch_size", "parts"),
    [(2, [(0, 2), (2, 2), (4, 1)]), (5, [(0, 5)]), (64, [(0, 5)]), (None, [(0, 5)]), (1, [(i, 1) for i in range(5)])],
)
def test_metrics_are_means_over_samples_and_the_last_partial_batch_counts(batch_size, parts):
    calls: list[tuple[int, int]] = []
    rows = validation_rows(prompts(5), rollout_of([1.0, 2.0, 3.0, 4.0, 10.0], calls), batch_size=batch_size)
    assert calls == parts
    assert rows[4] == {
        "sample_id": 4, "prompt": "w4", "response": "r4", "score": 10.0, "finish": "stop", "length": 5
    }  # fmt: skip
    seen = []
    metrics = validation_metrics(rows, lambda **texts: seen.append(texts) or {"m": [0, 0, 0, 0, 1]})
    assert metrics == {
        "val/metrics/m": 0.2,
        "val/score/mean": 4.0,  # the mean of the batches' means would be 5
        "val/score/max": 10.0,
        "val/score/min": 1.0,
        "val/response_length/mean": 3.0,
        "val/response_length/max": 5.0,
        "val/response_length/min": 1.0,
        "val/response_length/clip_ratio": 0.4,
    }
    assert [(texts["samples"][3], texts["prompts"][3], texts["outputs"][3]) for texts in seen] == [("w3r3", "w3", "r3")]


def trained(folder: Path, eval_prompts=WORDS, **overrides):
    """A run of two steps that learns nothing, validated at its start."""
    settings = {
        "env__name": "sentiment", "env__size": 512, "logger__run_dir": folder, "ppo__num_prompts_per_step": 4,
        "ppo__num_generations_per_prompt": 4, "policy__train_global_batch_size": 8, "policy__train_micro_batch_size": 8,
        "ppo__max_num_steps": 1, "ppo__val_at_start": True, "policy__optimizer__lr": 0.0,
    }  # fmt: skip
    return train(
        tiny.tiny_model(), lambda outputs, **_: [float(len(o)) for o in outputs], ["w3 w4", "w5", "w6", "w7"],
        tiny.config(**settings | overrides), eval_prompts=eval_prompts,
    )  # fmt: skip


def written(folder: Path, step: int = 0) -> list[dict]:
    return [json.loads(line) for line in (folder / "validation" / f"step_{step}.jsonl").read_text().splitlines()]


def test_a_batch_size_changes_no_sample_and_every_sample_is_written(tmp_path):
    runs = {size: trained(tmp_path / str(size), ppo__val_batch_size=size) for size in (None, 2)}
    rows = written(tmp_path / "None")
    assert rows == written(tmp_path / "2")
    assert [row["prompt"] for row in rows] == WORDS and [row["sample_id"] for row in rows] == [0, 1, 2, 3, 4]
    assert len({row["response"] for row in rows}) > 1
    for row in rows:
        assert row["step"] == 0 and row["score"] == len(row["response"]) and row["length"] == 4
    for trainer in runs.values():
        assert trainer.validate()["val/score/mean"] == pytest.approx(sum(row["score"] for row in rows) / 5)


def test_equal_prompts_of_different_batches_are_sampled_with_different_seeds(tmp_path):
    trained(tmp_path, eval_prompts=["w3"] * 4, ppo__val_batch_size=1, policy__generation__max_new_tokens=8)
    assert len({row["response"] for row in written(tmp_path)}) == 4


def test_validation_has_its_own_sampling(tmp_path):
    val = {"policy__generation__val__greedy": True, "policy__generation__val__max_new_tokens": 3}
    trainer = trained(tmp_path, eval_prompts=["w3"] * 4, **val)
    rows = written(tmp_path)
    assert len({row["response"] for row in rows}) == 1 and {row["length"] for row in rows} == {3}
    assert trainer.config.policy.generation.max_new_tokens == 4  # training's own, as the copy recipe has it
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["response_length/mean"] for row in metrics if "critic/score/mean" in row] == [4.0]


def test_validation_prompts_from_a_file_and_no_more_than_asked_for(tmp_path):
    path = tmp_path / "val.jsonl"
    path.write_text("".join(json.dumps({"q": word}) + "\n" for word in WORDS))
    settings = {"data__val_prompts": path, "data__prompt_key": "q", "ppo__max_val_samples": 3, "ppo__val_batch_size": 2}
    trained(tmp_path / "run", eval_prompts=None, **settings)
    assert [row["prompt"] for row in written(tmp_path / "run")] == WORDS[:3]
    with pytest.raises(ValueError, match="eval_prompts was given, and so was data.val_prompts"):
        trained(tmp_path / "run", **settings)


def test_a_validation_file_that_cannot_be_read_is_found_by_the_dry_run(tmp_path):
    path = tmp_path / "val.jsonl"
    path.write_text('{"prompt": "w3"}\n{"text": "w4"}\n')
    config = tiny.config(env__name="sentiment", env__size=512, data__val_prompts=path)
    with pytest.raises(ConfigError, match=r"val.jsonl:2: no key 'prompt' \(data.prompt_key\)"):
        dry_run(config)
    with pytest.raises(ConfigError, match="data.val_prompts=.* has no effect with env.name=copy"):
        dry_run(tiny.config(data__val_prompts=path))


def test_validation_beyond_the_models_positions_is_refused(tmp_path):
    config = tiny.config(logger__run_dir=tmp_path, policy__generation__val__max_new_tokens=5000)
    with pytest.raises(ValueError, match=r"2 tokens \+ policy.generation.val.max_new_tokens=5000 = 5002, but"):
        PPOTrainer(config)


def test_no_file_where_none_is_wanted(tmp_path):
    trained(tmp_path, logger__val_samples=False)
    assert not (tmp_path / "validation").exists()
