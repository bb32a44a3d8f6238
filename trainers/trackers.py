"""Remote loggers: Weights & Biases (`logger.wandb`) and MLflow (`logger.mlflow`), beside metrics.jsonl.

Both get every line of metrics.jsonl under the same names and the settings of config.yaml. The ids of their runs lie in
the run folder's trackers.json, so that a resumed run goes on in them. A tracker that fails costs its own record only:
it is said once, and after three failures in a row no more is sent.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trainers.config import LoggerConfig, MLflowConfig, WandbConfig
from trainers.extras import require, require_installed
from trainers.files import replace_text

MAX_FAILURES = 3


class Tracker(Protocol):
    id: str  # what the service calls the run

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class Wandb:
    """wandb.init, Run.log, Run.finish."""

    def __init__(self, cfg: WandbConfig, run_dir: Path, settings: dict[str, Any], run_id: str | None):
        wandb = require("wandb", extra="wandb")
        self.run = wandb.init(
            project=cfg.project,
            entity=cfg.entity,
            name=cfg.name or run_dir.name,
            mode=cfg.mode,
            dir=str(run_dir),
            id=run_id,
            resume="allow",
            config=settings,
            settings=wandb.Settings(console="off"),
        )
        self.id = self.run.id
        # W&B's own step only grows, but a run that is taken up again repeats the steps after its last checkpoint.
        self.run.define_metric("training/global_step")
        self.run.define_metric("*", step_metric="training/global_step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log({**metrics, "training/global_step": step})

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class MLflow:
    """Of mlflow's client only what names its run: the module-wide "active run" may be the caller's."""

    def __init__(self, cfg: MLflowConfig, run_dir: Path, settings: dict[str, Any], run_id: str | None):
        mlflow = require("mlflow", extra="mlflow")
        self.metric = mlflow.entities.Metric
        self.client = mlflow.MlflowClient(tracking_uri=cfg.tracking_uri)
        if run_id is not None:
            self.id = run_id
            self.client.update_run(run_id, status="RUNNING")
            return
        known = self.client.get_experiment_by_name(cfg.experiment_name)
        experiment = known.experiment_id if known else self.client.create_experiment(cfg.experiment_name)
        self.id = self.client.create_run(experiment, run_name=cfg.run_name or run_dir.name).info.run_id
        parameters = [mlflow.entities.Param(key, str(value)[:500]) for key, value in settings.items()]
        for start in range(0, len(parameters), 100):  # what a server takes at once
            self.client.log_batch(self.id, params=parameters[start : start + 100])

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(self.id, metrics=[self.metric(name, value, now, step) for name, value in metrics.items()])

    def close(self, failed: bool) -> None:
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


KINDS: dict[str, Callable[[Any, Path, dict[str, Any], str | None], Tracker]] = {"wandb": Wandb, "mlflow": MLflow}


class Trackers:
    """All that are enabled. `resumed`: whether the run goes on, and the trackers' runs with it."""

    def __init__(self, run_dir: Path, cfg: LoggerConfig, *, resumed: bool, say: Callable[[str], None]):
        self.say, self.failures = say, dict.fromkeys(KINDS, 0)
        self.active: dict[str, Tracker] = {}
        enabled = [name for name in KINDS if getattr(cfg, name).enabled]
        if not enabled:
            return
        record = run_dir / "trackers.json"
        ids = json.loads(record.read_text()) if resumed and record.is_file() else {}
        settings = _settings(run_dir / "config.yaml")
        for name in enabled:
            try:
                self.active[name] = KINDS[name](getattr(cfg, name), run_dir, settings, ids.get(name))
            except ImportError:
                raise
            except Exception as error:
                say(f"warning: logger.{name} could not be started, training goes on without: {_words(error)}")
        replace_text(record, json.dumps(ids | {name: tracker.id for name, tracker in self.active.items()}) + "\n")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, tracker in list(self.active.items()):
            try:
                tracker.log(step, metrics)
                self.failures[name] = 0
            except Exception as error:
                self.failures[name] += 1
                if self.failures[name] == 1:
                    self.say(f"warning: logger.{name} did not take step {step}, training goes on: {_words(error)}")
                elif self.failures[name] == MAX_FAILURES:
                    self.say(f"warning: logger.{name} failed {MAX_FAILURES} times in a row: no more is sent to it")
                    del self.active[name]

    def close(self, failed: bool) -> None:
        for name, tracker in self.active.items():
            try:
                tracker.close(failed)
            except Exception as error:
                self.say(f"warning: logger.{name} was not closed: {_words(error)}")
        self.active = {}


def check_installed(cfg: LoggerConfig) -> None:
    """Before a model loads: ImportError for a tracker whose package is not there."""
    for name in KINDS:
        if getattr(cfg, name).enabled:
            require_installed(name, extra=name)


def _settings(path: Path) -> dict[str, Any]:
    """config.yaml as one dotted key a setting; nothing if there is none."""
    if not path.is_file():
        return {}
    omegaconf = require("omegaconf").OmegaConf
    return _flat(omegaconf.to_container(omegaconf.load(path), resolve=False))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
