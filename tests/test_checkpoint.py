"""Which checkpoints stay, what a kill leaves, and a run that goes on from the best one."""

import json
import math
import random
from pathlib import Path

import pytest

from tests import tiny
from tests.test_arithmetic import accepted, refused
from tests.test_ppo import lines, small
from trainers import checkpoint
from trainers.config import CheckpointingConfig
from trainers.ppo import PPOTrainer


def writer(metrics: dict, **progress):
    def write(folder: Path) -> None:
        (folder / "training.json").write_text(json.dumps({"progress": {"step_metrics": metrics, **progress}}))

    return write


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in checkpoint.listed(folder)]


def stays(i: int, values: list, cfg: CheckpointingConfig) -> bool:
    """The rule once more, for one checkpoint: it is among the last, or fewer than keep_top_k others beat it."""

    def beats(a: int, b: int) -> bool:
        has_a, has_b = (values[j] is not None and math.isfinite(values[j]) for j in (a, b))
        if has_a != has_b:
            return has_a
        if has_a and values[a] != values[b]:
            return (values[a] > values[b]) == cfg.higher_is_better
        return a > b

    newer = len(values) - 1 - i
    better = sum(beats(j, i) for j in range(len(values)) if j != i)
    return cfg.keep_last_k == 0 or newer == 0 or newer < cfg.keep_last_k or better < (cfg.keep_top_k or 0)


def test_the_rule_on_random_sequences():
    draw = random.Random(0)
    seen = set()
    for _ in range(3000):
        values = [draw.choice([None, math.nan, math.inf, -math.inf, *range(4)]) for _ in range(draw.randint(0, 9))]
        cfg = CheckpointingConfig(
            keep_last_k=draw.choice([0, 1, 1, 2, 3]),
            keep_top_k=draw.choice([None, 0, 1, 2, 3, 20]),
            higher_is_better=draw.random() < 0.5,
        )
        expected = {i for i in range(len(values)) if stays(i, values, cfg)}
        assert checkpoint.kept(values, cfg) == expected, (values, cfg)
        seen.add(len(expected))
    assert seen == set(range(10))


def test_the_rule_by_hand():
    values = [0.5, 0.9, 0.9, None, 0.1]
    keep = lambda **cfg: sorted(checkpoint.kept(values, CheckpointingConfig(**cfg)))  # noqa: E731
    assert keep(keep_last_k=1, keep_top_k=1) == [2, 4]  # of equals the newer; the newest
    assert keep(keep_last_k=2, keep_top_k=2) == [1, 2, 3, 4]
    assert keep(keep_last_k=1, keep_top_k=2, higher_is_better=False) == [0, 4]
    assert keep(keep_last_k=1, keep_top_k=5) == keep(keep_last_k=0) == [0, 1, 2, 3, 4]


def test_a_metric_that_comes_after_the_save_counts(tmp_path):
    """Every step is saved first and validated then, as the loop does it; the best two and the newest stay."""
    cfg = CheckpointingConfig(keep_last_k=1, keep_top_k=2, metric_name="val/score/mean")
    for step, value in enumerate([0.3, 0.9, 0.1, 0.8, 0.2], start=1):
        checkpoint.save(tmp_path, step, writer({}), cfg)
        checkpoint.rank(tmp_path, step, {"progress": {"step_metrics": {"val/score/mean": value}}}, cfg)
    assert steps(tmp_path) == [2, 4, 5]
    assert checkpoint.metric_of(tmp_path / "step_4", "val/score/mean") == 0.8
    assert checkpoint.metric_of(tmp_path / "step_4", "val/score/max") is None
    checkpoint.rank(tmp_path, 7, {"progress": {}}, cfg)  # saved in another run's folder: nothing to do
    assert steps(tmp_path) == [2, 4, 5] and not (tmp_path / "step_7").exists()
    (tmp_path / "step_2" / "training.json").write_text("{")  # damaged: it ranks last
    checkpoint.save(tmp_path, 6, writer({"val/score/mean": 0.0}), cfg)
    assert steps(tmp_path) == [4, 5, 6]


@pytest.mark.parametrize("killed_at", range(4))
def test_a_kill_while_pruning_leaves_whole_checkpoints_and_the_next_save_tidies(tmp_path, monkeypatch, killed_at):
    """Two checkpoints are to go, each by a rename and a removal: the kill comes before each of the four calls."""
    keep_all = CheckpointingConfig(keep_last_k=0)
    for step, value in enumerate([0.1, 0.2, 0.9], start=1):
        checkpoint.save(tmp_path, step, writer({"m": value}), keep_all)
    cfg = CheckpointingConfig(keep_last_k=1, keep_top_k=1, metric_name="m")
    calls = []

    class Killed(BaseException):
        pass

    def dying(real):
        def call(*arguments, **keywords):
            if str(arguments[0]).endswith("tmp_step_4"):  # the new checkpoint's own rename
                return real(*arguments, **keywords)
            calls.append(1)
            if len(calls) == killed_at + 1:
                raise Killed
            return real(*arguments, **keywords)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying(Path.rename))
        patch.setattr(checkpoint.shutil, "rmtree", dying(checkpoint.shutil.rmtree))
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, 4, writer({"m": 0.5}), cfg)
    left = steps(tmp_path)
    assert {3, 4} <= set(left) and left == sorted(left)
    assert len(left) == {0: 4, 1: 3, 2: 3, 3: 2}[killed_at]
    assert all((tmp_path / f"step_{step}" / "training.json").is_file() for step in left)
    assert checkpoint.find("auto", tmp_path.parent) is None
    checkpoint.save(tmp_path, 5, writer({"m": 0.4}), cfg)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", "step_5"]


def test_training_keeps_the_best_by_validation_and_goes_on_from_it_elsewhere(tmp_path):
    options = {
        "ppo__val_period": 1, "checkpointing__save_period": 1, "checkpointing__keep_last_k": 1,
        "checkpointing__keep_top_k": 2, "checkpointing__metric_name": "val/score/mean",
    }  # fmt: skip
    PPOTrainer(small(tmp_path / "a", ppo__max_num_steps=6, **options)).fit()
    scores = {row["step"]: row["val/score/mean"] for row in lines(tmp_path / "a") if "val/score/mean" in row}
    best = sorted(scores, key=lambda step: (scores[step], step))[-2:]
    assert steps(tmp_path / "a" / "checkpoints") == sorted({*best, 6})
    first = min(best)
    assert first < 6, "a seed whose best step is not the last, else the resume below proves little"
    folder = tmp_path / "a" / "checkpoints" / f"step_{first}"
    progress = json.loads((folder / "training.json").read_text())["progress"]
    assert progress["step"] == first and progress["consumed_samples"] == 16 * first
    assert progress["last_validation"]["step"] == first
    assert progress["last_validation"]["val/score/mean"] == progress["step_metrics"]["val/score/mean"] == scores[first]
    assert progress["step_metrics"]["critic/score/mean"] == next(
        row["critic/score/mean"] for row in lines(tmp_path / "a") if row["step"] == first
    )
    resumed = PPOTrainer(small(tmp_path / "b", ppo__max_num_steps=6, checkpointing__resume=folder, **options))
    assert resumed.progress.step == first
    resumed.fit()
    assert lines(tmp_path / "b") == [row for row in lines(tmp_path / "a") if row["step"] > first]


def test_a_checkpoint_without_a_validation_of_its_own_keeps_the_last_one(tmp_path):
    PPOTrainer(small(tmp_path, ppo__max_num_steps=4, ppo__val_period=3)).fit()
    progress = json.loads((tmp_path / "checkpoints" / "step_4" / "training.json").read_text())["progress"]
    assert progress["last_validation"]["step"] == 3 and "val/score/mean" in progress["last_validation"]
    assert "val/score/mean" not in progress["step_metrics"]


def test_what_is_refused():
    ranked = ("checkpointing.keep_top_k=2", "checkpointing.metric_name=critic/score/mean")
    accepted(*ranked)
    accepted(*ranked, "checkpointing.higher_is_better=false")
    assert refused("checkpointing.keep_top_k=2") == "checkpointing.keep_top_k=2 needs checkpointing.metric_name"
    assert refused("checkpointing.metric_name=critic/score/mean") == (
        "checkpointing.metric_name=critic/score/mean needs checkpointing.keep_top_k"
    )
    message = refused(ranked[0], "checkpointing.metric_name=val:score/mean")
    assert message.startswith(
        "checkpointing.metric_name=val:score/mean: expected a name of metrics.jsonl (docs/metrics.md), such as "
        "val/score/mean or critic/score/mean"
    )
    message = refused(ranked[0], "checkpointing.metric_name=critic/scores/mean")
    assert message.endswith("did you mean critic/score/mean?")
    validated = ("checkpointing.keep_top_k=2", "checkpointing.metric_name=val/score/mean")
    assert refused(*validated) == (
        "checkpointing.metric_name=val/score/mean needs a validation of every checkpoint: ppo.val_period=0 must divide "
        "checkpointing.save_period=20"
    )
    assert "ppo.val_period=15 must divide" in refused(*validated, "ppo.val_period=15")
    accepted(*validated, "ppo.val_period=10")
    accepted("checkpointing.keep_top_k=1", "checkpointing.metric_name=val/metrics/exact", "ppo.val_period=20")
    accepted("checkpointing.keep_top_k=1", "checkpointing.metric_name=env/exact_match")
    assert "has no effect" in refused("checkpointing.higher_is_better=false")
    assert "has no effect" in refused(*ranked, "checkpointing.keep_last_k=0")
    assert tiny.config(checkpointing__keep_top_k=0).checkpointing.keep_top_k == 0
