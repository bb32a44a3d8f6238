"""A run's frame: its folder, its clock, its progress, and when it ends."""

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from trainers import dist
from trainers.arithmetic import ConfigError
from trainers.checkpoint import find
from trainers.config import TrainerConfig
from trainers.deadline import Deadline, seconds_of
from trainers.out_of_memory import advice, is_out_of_memory
from trainers.trackers import check_installed

MAX_SKIPPED_STEPS = 3  # rollouts in a row without a single finite gradient before a run gives up


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to do."""


@dataclass
class Progress:
    """Counters that a checkpoint carries."""

    step: int = 0
    consumed_prompts: int = 0
    consumed_samples: int = 0
    total_valid_tokens: int = 0
    skipped_in_a_row: int = 0
    empty_in_a_row: int = 0
    step_metrics: dict[str, float | None] = field(default_factory=dict)  # what was logged at `step`
    last_validation: dict[str, float | None] = field(default_factory=dict)  # its metrics, and its step

    def metrics(self, epoch: int) -> dict[str, float]:
        names = ("consumed_prompts", "consumed_samples", "total_valid_tokens")
        counters = {f"training/{name}": float(getattr(self, name)) for name in names}
        return {"training/global_step": float(self.step), "training/epoch": float(epoch), **counters}

    def logged(self, metrics: dict[str, float]) -> None:
        """The metrics of training step `step`: a checkpoint is ranked by them."""
        self.step_metrics = finite(metrics)

    def validated(self, metrics: dict[str, float]) -> None:
        self.step_metrics = self.step_metrics | finite(metrics)
        self.last_validation = {"step": self.step, **finite(metrics)}


class Run:
    """The folder and life of one training run.

    As a context manager it listens to SIGINT and SIGTERM: the first finishes the step and saves, the second ends the
    process at once.
    """

    def __init__(self, config: TrainerConfig):
        self.config = config
        check_installed(config.logger)
        self.dir = dist.main_does(lambda: check_writable(run_folder(config)))
        limit = config.checkpointing.checkpoint_must_save_by
        self.deadline = Deadline(None if limit is None else seconds_of(limit))
        self.signalled = False
        self.failed_saves = 0
        self.stages: dict[str, float] = {}
        self.lap_start = time.perf_counter()
        self.handlers: dict[int, Any] = {}

    def open(self, model: dict[str, Any]) -> None:
        """Write config.yaml and env.json: what is trained, with what."""
        dist.main_does(lambda: self._open(model))

    def _open(self, model: dict[str, Any]) -> None:
        from fastppo.env import facts
        from trainers.cli import save_config

        self.dir.mkdir(parents=True, exist_ok=True)
        save_config(self.config, self.dir / "config.yaml")
        trained, total = model["trained_parameters"] / 1e6, model["parameters"] / 1e6
        print(f"model     {model['model']}: {trained:.1f} of {total:.1f} M parameters train, {model['compute_dtype']}")
        print(f"run       {self.dir}", flush=True)
        (self.dir / "env.json").write_text(json.dumps({**model, **facts()}, indent=2) + "\n")

    @property
    def stopping(self) -> bool:
        """Whether the step that was just finished is the last: if any rank was signalled, or sees no time for more."""
        return any(dist.agree(self.signalled, self.deadline.leaves_no_step()))

    @property
    def interrupted(self) -> bool:
        """Whether a signal has come, to any rank."""
        return dist.agree(self.signalled)[0]

    @contextmanager
    def timer(self, stage: str) -> Iterator[None]:
        """Counts the stage's seconds. Out of memory within it becomes a TrainingError that says what to lower."""
        start = time.perf_counter()
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(advice(stage, error, self.config)) from error
        finally:
            seconds = time.perf_counter() - start
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds
            self.deadline.timed(stage, seconds)

    @contextmanager
    def saving(self, step: int, *, last: bool) -> Iterator[None]:
        """A full disk costs one checkpoint, not the run; a second failure in a row ends it. The last good one stays."""
        try:
            yield
        except OSError as error:
            self.failed_saves += 1
            if last or self.failed_saves > 1:
                which = "the last checkpoint" if last else "two checkpoints in a row"
                raise TrainingError(f"{which} could not be written: {error}") from error
            if dist.is_main():
                print(f"warning: step {step} was not saved, training goes on: {error}", flush=True)
        else:
            self.failed_saves = 0

    def lap(self, tokens: float) -> dict[str, float]:
        """Stage times since the last lap, and its length: a checkpoint or validation counts to the step it delays."""
        now = time.perf_counter()
        seconds, self.lap_start = now - self.lap_start, now
        metrics = {f"timing_s/{stage}": value for stage, value in self.stages.items()}
        self.deadline.step(seconds, self.stages)
        self.stages = {}
        return {
            **metrics,
            "timing_s/step": seconds,
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds,
        }

    def check(self, metrics: dict[str, float], progress: Progress) -> None:
        """Stop a run whose numbers cannot be right."""
        error, limit = metrics.get("actor/first_ratio_err_mean", 0.0), self.config.algorithm.max_first_ratio_error
        if not error <= limit:
            raise TrainingError(
                f"the first minibatch's mean |ratio - 1| is {error:.3g}, above "
                f"{self.config.name}.max_first_ratio_error={limit}: the "
                "log-probs that the trainer computes are not those it scored the rollout with"
            )
        empty = metrics["training/trained_samples"] == 0
        progress.empty_in_a_row = progress.empty_in_a_row + 1 if empty else 0
        if progress.empty_in_a_row >= MAX_SKIPPED_STEPS:
            why = {name: value for name, value in metrics.items() if name.endswith("_filtered") or "dynamic_sa" in name}
            raise TrainingError(
                f"nothing was left to train on in {MAX_SKIPPED_STEPS} rollouts in a row: the last one had "
                + ", ".join(f"{name} {value:.4g}" for name, value in why.items())
            )
        skipped = any(
            0 < metrics.get(f"{part}/optimizer_steps", 0.0) <= metrics[f"{part}/skipped_steps"]
            for part in ("actor", "critic")
        )
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if skipped else 0
        if progress.skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise TrainingError(
                f"no gradient was finite in {MAX_SKIPPED_STEPS} rollouts in a row: try a new run with a lower "
                "policy.optimizer.lr or value.optimizer.lr"
            )

    def __enter__(self) -> "Run":
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self._on_signal)
        except ValueError:  # only the main thread may listen; elsewhere the caller's own handling stays
            pass
        self.lap_start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signalled:
            raise SystemExit(128 + number)
        self.signalled = True
        # Not by print: the signal may have come in the middle of one, and a buffer cannot be entered twice.
        name = signal.Signals(number).name
        with suppress(OSError):
            os.write(2, f"\n{name}: finishing this step, then saving; once more to leave at once\n".encode())


def run_folder(config: TrainerConfig) -> Path:
    if config.logger.run_dir != "auto":
        folder = Path(config.logger.run_dir).expanduser()
        log, resume = folder / "metrics.jsonl", config.checkpointing.resume
        again = (
            int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        )  # before the first checkpoint: from the start
        if log.exists() and log.stat().st_size and find(resume, folder) is None and not again:
            raise ConfigError(
                f"logger.run_dir={config.logger.run_dir} holds a run already, and checkpointing.resume={resume} has no "
                "checkpoint of it to go on from: it would be overwritten. Name another folder"
            )
        return folder
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise ConfigError(
            "logger.run_dir=auto is another folder after each restart of torchrun --max-restarts, which would begin "
            "anew: name a folder"
        )
    environment = config.env.name.replace(":", "-")
    base = Path("results") / f"{config.name}-{environment}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, suffix = base, 1
    while folder.exists():
        suffix += 1
        folder = base.with_name(f"{base.name}-{suffix}")
    return folder


def check_writable(folder: Path) -> Path:
    """Before a model loads: the folder, or the nearest one above it that exists, must take files."""
    parent = folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        kind = "a folder that can be written to" if parent.is_dir() else "a folder"
        raise ConfigError(f"logger.run_dir={folder}: {parent} is not {kind}")
    return folder


def finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """As JSON has them: None for a number that is not finite."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}


def progress_from(training: dict[str, Any]) -> Progress:
    return Progress(**training["progress"])


def training_record(progress: Progress, **more: Any) -> dict[str, Any]:
    return {"progress": asdict(progress), **more}
