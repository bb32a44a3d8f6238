"""Weights & Biases and MLflow, by stand-ins with the calls of wandb 0.31.0 and mlflow 3.18.0."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import tiny
from tests.test_logger import make
from trainers import extras
from trainers.cli import save_config
from trainers.config import LoggerConfig, MLflowConfig, WandbConfig
from trainers.ppo import PPOTrainer
from trainers.run import Run


class FakeWandb:
    """`runs`: id -> its rows; `calls` of init; `broken`: what Run.log raises."""

    def __init__(self) -> None:
        self.runs: dict[str, list[dict]] = {}
        self.calls: list[dict] = []
        self.axes: list[tuple] = []
        self.exit_codes: list[int] = []
        self.broken: Exception | None = None

    def Settings(self, *, console: str) -> dict:
        return {"console": console}

    def init(self, *, project, entity, name, mode, dir, id, resume, config, settings):
        self.calls.append(
            {"project": project, "entity": entity, "name": name, "mode": mode, "id": id, "config": config}
        )
        assert resume == "allow" and settings == {"console": "off"}
        rows = self.runs.setdefault(id or f"run{len(self.runs)}", [])

        def log(data):
            if self.broken:
                raise self.broken
            rows.append(data)

        return SimpleNamespace(
            id=next(key for key, value in self.runs.items() if value is rows),
            log=log,
            define_metric=lambda name, step_metric=None: self.axes.append((name, step_metric)),
            finish=lambda exit_code: self.exit_codes.append(exit_code),
        )


class FakeMLflow:
    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, SimpleNamespace] = {}
        self.entities = SimpleNamespace(
            Metric=lambda key, value, timestamp, step: (key, value, step), Param=lambda key, value: (key, value)
        )

    def MlflowClient(self, tracking_uri):
        self.tracking_uri = tracking_uri
        return self

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name):
        assert name not in self.experiments
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def create_run(self, experiment_id, *, run_name):
        run = SimpleNamespace(info=SimpleNamespace(run_id=f"m{len(self.runs)}"), name=run_name, status="RUNNING")
        run.experiment, run.metrics, run.params = experiment_id, [], {}
        return self.runs.setdefault(run.info.run_id, run)

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(params) <= 100 and not {key for key, _ in params} & set(self.runs[run_id].params)
        self.runs[run_id].metrics += metrics
        self.runs[run_id].params |= dict(params)

    def update_run(self, run_id, status):
        self.runs[run_id].status = status

    set_terminated = update_run


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def mlflow(monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


BOTH = {"wandb": WandbConfig(enabled=True, project="p", mode="offline"), "mlflow": MLflowConfig(enabled=True)}


def test_every_line_reaches_both_and_a_resumed_run_goes_on_in_the_same(tmp_path: Path, wandb, mlflow) -> None:
    run_dir = tmp_path / "nice-run"
    run_dir.mkdir()
    save_config(tiny.config(ppo__seed=7), run_dir / "config.yaml")
    with make(run_dir, **BOTH) as logger:
        logger.log(1, {"critic/score/mean": 0.5})
        logger.validation(1, {"val/score/mean": 0.25})
        logger.log(2, {"critic/score/mean": 9.0})  # lost: the last checkpoint is that of step 1
    assert mlflow.runs["m0"].status == "FINISHED"
    with make(run_dir, start_step=1, **BOTH) as logger:
        assert mlflow.runs["m0"].status == "RUNNING"
        logger.log(2, {"critic/score/mean": 0.75})
    assert wandb.runs == {
        "run0": [
            {"critic/score/mean": 0.5, "training/global_step": 1},
            {"val/score/mean": 0.25, "training/global_step": 1},
            {"critic/score/mean": 9.0, "training/global_step": 2},
            {"critic/score/mean": 0.75, "training/global_step": 2},
        ]
    }
    assert wandb.axes[:2] == [("training/global_step", None), ("*", "training/global_step")]
    assert [call["id"] for call in wandb.calls] == [None, "run0"] and wandb.exit_codes == [0, 0]
    assert {key: wandb.calls[0][key] for key in ("project", "entity", "name", "mode")} == {
        "project": "p", "entity": None, "name": "nice-run", "mode": "offline",
    }  # fmt: skip
    (run,) = mlflow.runs.values()
    assert run.metrics == [
        ("critic/score/mean", 0.5, 1), ("val/score/mean", 0.25, 1),
        ("critic/score/mean", 9.0, 2), ("critic/score/mean", 0.75, 2),
    ]  # fmt: skip
    assert mlflow.experiments == {"fastppo": run.experiment} and run.name == "nice-run"
    assert run.params["ppo.seed"] == "7" and wandb.calls[0]["config"]["ppo.seed"] == 7
    assert json.loads((run_dir / "trackers.json").read_text()) == {"wandb": "run0", "mlflow": "m0"}


def test_a_run_from_the_start_is_a_new_one(tmp_path: Path, wandb, mlflow) -> None:
    for _ in range(2):
        with make(tmp_path, **BOTH) as logger:
            logger.log(1, {"critic/score/mean": 0.5})
    assert len(wandb.runs) == len(mlflow.runs) == 2 and len(mlflow.experiments) == 1


def test_a_run_that_dies_is_marked_as_failed(tmp_path: Path, wandb, mlflow) -> None:
    with pytest.raises(ZeroDivisionError), make(tmp_path, **BOTH):
        _ = 1 / 0
    assert wandb.exit_codes == [1] and mlflow.runs["m0"].status == "FAILED"


def test_a_tracker_that_fails_is_said_once_and_given_up_after_three_in_a_row(tmp_path: Path, wandb, mlflow) -> None:
    with make(tmp_path, **BOTH) as logger:
        for step in range(1, 9):
            wandb.broken = ConnectionError("no route") if step in (2, 4, 5, 6) else None
            logger.log(step, {"critic/score/mean": float(step)})
        said = logger.console.file.getvalue()
    assert [row["training/global_step"] for row in wandb.runs["run0"]] == [1, 3]
    assert said.count("warning") == 3  # steps 2 and 4, and the end
    assert "warning: logger.wandb did not take step 2, training goes on: ConnectionError: no route" in said
    assert "warning: logger.wandb failed 3 times in a row: no more is sent to it" in said
    assert [step for _, _, step in mlflow.runs["m0"].metrics] == list(range(1, 9))


def test_a_tracker_that_does_not_start_is_left_out(tmp_path: Path, wandb, mlflow) -> None:
    wandb.init = lambda **_: (_ for _ in ()).throw(ValueError("not logged in"))
    with make(tmp_path, **BOTH) as logger:
        logger.log(1, {"critic/score/mean": 0.5})
        said = logger.console.file.getvalue()
    assert "warning: logger.wandb could not be started, training goes on without: ValueError: not logged in" in said
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"mlflow": "m0"} and len(mlflow.runs["m0"].metrics)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_before_a_model_loads(tmp_path: Path, monkeypatch, name) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    with pytest.raises(ImportError, match=rf'{name} is not installed: pip install "fastppo\[{name}\]"'):
        Run(tiny.config(**{f"logger__{name}__enabled": True, "logger__run_dir": tmp_path}))
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"fastppo\[{name}\]"):
        make(tmp_path, **{name: BOTH[name]})


def test_nothing_is_written_if_none_is_enabled(tmp_path: Path) -> None:
    make(tmp_path).close()
    assert LoggerConfig().wandb.enabled is LoggerConfig().mlflow.enabled is False
    assert not (tmp_path / "trackers.json").exists()


def test_a_training_run_is_tracked(tmp_path: Path, wandb, monkeypatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: object())
    PPOTrainer(tiny.config(logger__run_dir=tmp_path, logger__wandb__enabled=True, ppo__max_num_steps=2)).fit()
    assert [row["training/global_step"] for row in wandb.runs["run0"]] == [1, 2]
    assert wandb.calls[0]["config"]["env.name"] == "copy" and "critic/score/mean" in wandb.runs["run0"][0]
