"""What a run writes down: metrics.jsonl, samples.jsonl, validation/, TensorBoard events, trackers and the console.

metrics.jsonl has one line a call, `{"step": 3, "time": <unix seconds>, "critic/score/mean": 0.21, ...}`. Several lines
may share a step (training, validation); `read_metrics` merges them. JSON has no NaN: a number that is not finite is
null, and a "nonfinite" entry of the same object keeps what it was, as "nan", "inf" or "-inf". samples.jsonl too.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainers.config import LoggerConfig
from trainers.extras import require
from trainers.trackers import Trackers

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from torch.utils.tensorboard import SummaryWriter


def _stats(prefix: str, unit: str, names: str = "mean max min") -> dict[str, str]:
    return {f"{prefix}/{name}": unit for name in names.split()}


STAGES = (
    *("gen", "reward", "old_log_prob", "values", "adv", "update_critic", "update_actor", "update_weights"),
    *("save_checkpoint", "testing"),
)

# Every metric's name and unit ("" for a pure number); docs/metrics.md defines them. Environments add their own under
# env/, a caller's `metric_fn` under val/metrics/.
METRICS: dict[str, str] = {
    **_stats("critic/score", "score"),
    **_stats("critic/rewards", "score"),
    **_stats("critic/kl", "nats/sequence", "mean max"),
    **_stats("critic/advantages", ""),
    **_stats("critic/returns", "score"),
    **_stats("critic/values", "score"),
    **{"critic/vpred_mean": "score", "critic/vf_loss": "score²", "critic/vf_clipfrac": "share"},
    **{"critic/vf_explained_var": "", "critic/grad_norm": "", "critic/lr": ""},
    **_stats("critic", "updates", "optimizer_steps skipped_steps"),
    "actor/pg_loss": "",
    **_stats("actor", "nats/token", "ppo_kl kl_loss entropy"),
    **_stats("actor", "share", "pg_clipfrac pg_clipfrac_high pg_clipfrac_low pg_clipfrac_dual"),
    **_stats("actor", "", "ratio_mean ratio_std"),
    **{"actor/ratio_clamped_frac": "share", "actor/is_weight_mean": "", "actor/is_missing_frac": "share"},
    **_stats("actor", "", "first_ratio_err_mean first_ratio_err_max grad_norm lr kl_coef"),
    **_stats("actor", "updates", "optimizer_steps skipped_steps"),
    **_stats("response_length", "tokens"),
    "response_length/clip_ratio": "share",
    **_stats("prompt_length", "tokens"),
    **{"rollout/turns_mean": "turns", "rollout/turns_max": "turns", "rollout/observation_tokens_mean": "tokens"},
    **_stats("rollout", "share", "natural_termination_rate truncation_rate"),
    **{"training/global_step": "steps", "training/epoch": "epochs", "training/consumed_prompts": "prompts"},
    **{"training/consumed_samples": "sequences", "training/total_valid_tokens": "tokens"},
    **_stats("training", "probability", "rollout_probs_diff_mean rollout_probs_diff_max"),
    "training/probe_logprob_error": "nats/token",
    **{"training/rollout_kl": "nats/token", **_stats("training", "", "seq_logprob_error_mean seq_logprob_error_max")},
    **_stats("training", "sequences", "trained_samples overlong_filtered mismatch_filtered"),
    **{"training/empty_minibatches": "minibatches", "perf/rank_imbalance": ""},
    "dynamic_sampling/gen_batches": "draws",
    **_stats("dynamic_sampling", "prompts", "drawn_prompts equal_prompts surplus_prompts carried_prompts"),
    "dynamic_sampling/score_mean": "score",
    **{"perf/throughput": "tokens/s", "perf/total_num_tokens": "tokens", "perf/time_per_step": "s"},
    **{"perf/critic_infer_time": "s", "perf/critic_train_time": "s"},
    **{"perf/refit_bytes": "bytes", "perf/max_memory_rss_gb": "GB", "perf/max_memory_allocated_gb": "GB"},
    **{f"timing_s/{stage}": "s" for stage in (*STAGES, "step")},
    **_stats("val/score", "score"),
    **_stats("val/response_length", "tokens"),
    "val/response_length/clip_ratio": "share",
}


class Logger:
    """One run's log. `start_step` is the number of finished steps: what the files hold beyond it is cut, so that a
    resumed run ends with the lines of an unbroken one; 0 starts the files anew. As a context manager it always closes.
    """

    def __init__(
        self, run_dir: Path, cfg: LoggerConfig, *, max_steps: int, start_step: int = 0, console: "Console | None" = None
    ) -> None:
        self.run_dir, self.cfg, self.max_steps, self.start_step = Path(run_dir), cfg, max_steps, start_step
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.writer = _tensorboard(self.run_dir / "tensorboard", start_step) if cfg.tensorboard else None
        self.metrics_file = _open_log(self.run_dir / "metrics.jsonl", start_step)
        self.samples_file = _open_log(self.run_dir / "samples.jsonl", start_step)
        _drop_validations(self.run_dir / "validation", start_step)
        self.console = console or require("rich.console").Console(highlight=False)
        terminal = self.console.is_terminal and not self.console.is_dumb_terminal and not os.environ.get("CI")
        if not terminal and console is None and "COLUMNS" not in os.environ:
            self.console.width = 120
        self.trackers = Trackers(self.run_dir, cfg, resumed=start_step > 0, say=self._print)
        self.progress = _progress(self.console, max_steps, start_step) if terminal else None
        self.started = self.last = time.monotonic()
        self.closed = False

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of one finished training step."""
        metrics = self._write_metrics(step, metrics)
        now = time.monotonic()
        seconds = metrics.get("timing_s/step", now - self.last)
        eta = (now - self.started) / max(step - self.start_step, 1) * (self.max_steps - step)
        self.last = now
        self._print(console_line(step, self.max_steps, metrics, seconds=seconds, eta=eta))
        if self.progress:
            self.progress.update(self.progress.task_ids[0], completed=step)
        if self.cfg.report and self.cfg.report_period and step % self.cfg.report_period == 0 and step < self.max_steps:
            self._write_report()

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """The inspected sequences of a step, in the form of docs/metrics.md; a few of them also go to the console."""
        for row in rows:
            _append(self.samples_file, {"step": step, **row})
        shown, period = rows[: self.cfg.num_samples_to_print], self.cfg.samples_period
        if not shown or not period or not (step % period == 0 or step in (1, self.max_steps)):
            return
        self.console.print(self._sample_table(f"samples of step {step}", ("score", "kl"), shown))

    def validation(self, step: int, metrics: dict[str, float], rows: Sequence[dict[str, Any]] = ()) -> None:
        """A validation after `step` training steps: val/* and timing_s/testing, and its samples in the form of
        docs/metrics.md, which go to validation/step_<N>.jsonl; a few of them also go to the console."""
        for name in metrics:
            if not name.startswith("val/") and name != "timing_s/testing":
                raise ValueError(f"validation metrics must be named val/* or timing_s/testing, got {name!r}")
        metrics = self._write_metrics(step, metrics)
        shown = {name.removeprefix("val/"): value for name, value in metrics.items() if name.startswith("val/")}
        self._print(
            "  ".join([f"validation at step {step}", *(f"{name} {value:.4g}" for name, value in shown.items())])
        )
        if rows and self.cfg.val_samples:
            _write_samples(self.run_dir / "validation" / f"step_{step}.jsonl", step, rows)
        if printed := rows[: self.cfg.num_val_samples_to_print]:
            self.console.print(self._sample_table(f"validation samples of step {step}", ("score", "length"), printed))

    def close(self, *, failed: bool = False) -> None:
        """Flush and close the files, write the report, print where the time went and where everything is."""
        if self.closed:
            return
        self.closed = True
        if self.progress:
            self.progress.stop()
        self.metrics_file.close()
        self.samples_file.close()
        if self.writer:
            self.writer.close()
        self.trackers.close(failed)
        stages = stage_shares(read_metrics(self.run_dir / "metrics.jsonl"))
        if stages:
            table = _table("where a step's time goes", "stage", "s/step>", "share>")
            for name, seconds, share in stages:
                table.add_row(name, f"{seconds:.3f}", f"{share:.1%}")
            table.add_row("step", f"{sum(seconds for _, seconds, _ in stages):.3f}", "100.0%")
            self.console.print(table)
        self._print(f"run folder: {self.run_dir}")
        if self.cfg.report and self._write_report():
            self._print(f"report: {self.run_dir / 'report.html'}")

    def _write_metrics(self, step: int, metrics: dict[str, Any]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, value in metrics.items():
            try:
                values[name] = float(value)
            except (TypeError, ValueError) as error:
                raise TypeError(f"metric {name!r} must be a number, got {value!r}") from error
        _append(self.metrics_file, {"step": step, "time": round(time.time(), 3), **values})
        if self.writer:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()
        self.trackers.log(step, values)
        return values

    def _write_report(self) -> bool:
        from trainers.report import write_report

        try:
            write_report(self.run_dir)
        except Exception as error:  # a picture that fails must not end a training run
            self._print(f"no report was written: {type(error).__name__}: {error}")
            return False
        return True

    def _sample_table(self, title: str, numbers: Sequence[str], rows: Sequence[dict[str, Any]]) -> "Table":
        table = _table(title, "id", *(f"{name}>" for name in numbers), "finish", "prompt", "response")
        for row in rows:
            prompt, response = str(row.get("prompt", "")), str(row.get("response", ""))
            prompt = prompt if len(prompt) <= 160 else "..." + prompt[-157:]
            response = response if len(response) <= 320 else response[:317] + "..."
            shown = [_fixed(row.get(name), 0 if name == "length" else 2) for name in numbers]
            cells = [str(row.get("sample_id", "")), *shown, str(row.get("finish", "")), prompt, response]
            table.add_row(*(self._text(cell) for cell in cells))
        return table

    def _print(self, line: str) -> None:
        self.console.print(self._text(line), soft_wrap=True)

    def _text(self, text: str) -> Any:
        """Model output may hold control codes, and characters that the console's encoding lacks: both are escaped."""
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        text = text.encode(self.console.encoding, "backslashreplace").decode(self.console.encoding)
        return require("rich.text").Text(text)


class SilentLogger:
    """What the ranks beside the main one have in a Logger's place."""

    def __init__(self, run_dir: Path, cfg: LoggerConfig, **_: Any) -> None:
        """Takes what a Logger takes, and writes nothing."""

    def __enter__(self) -> "SilentLogger":
        return self

    def __exit__(self, *_: object) -> None:
        """See Logger."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """See Logger."""

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """See Logger."""

    def validation(self, step: int, metrics: dict[str, float], rows: Sequence[dict[str, Any]] = ()) -> None:
        """See Logger."""


def console_line(step: int, max_steps: int, metrics: dict[str, float], *, seconds: float, eta: float) -> str:
    """The line of one step; a metric that the step does not have is left out."""
    parts = [f"step {step:>{len(str(max_steps))}}/{max_steps}"]
    for name, label, form, unit in (
        ("critic/score/mean", "reward ", "6.3f", ""),
        ("critic/kl/mean", "kl ", "6.2f", ""),
        ("actor/entropy", "entropy ", "5.3f", ""),
        ("actor/pg_clipfrac", "clip ", "5.3f", ""),
        ("response_length/mean", "len ", "6.1f", ""),
        ("perf/throughput", "", "6.0f", " tok/s"),
    ):
        if name in metrics:
            parts.append(f"{label}{metrics[name]:{form}}{unit}")
    return "  ".join([*parts, f"{seconds:.2f} s", f"eta {duration(eta)}"])


def duration(seconds: float) -> str:
    """75.2 -> "1m15s"; 3720 -> "1h02m"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """metrics.jsonl as one dict a step, in order of steps; numbers that were not finite are NaN or infinite again."""
    steps: dict[int, dict[str, Any]] = {}
    for _, record in _records(path):
        record.update({name: float(word) for name, word in record.pop("nonfinite", {}).items()})
        steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def stage_shares(steps: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(stage, mean seconds a step, share of the step) over all training steps; "other" is what no stage claims."""
    numbers, stack = stage_stack(steps)
    sums = {stage: sum(times) for stage, times in stack.items()}
    total = sum(sums.values())
    return [(stage, seconds / len(numbers), seconds / total) for stage, seconds in sums.items()]


def stage_stack(steps: list[dict[str, Any]]) -> tuple[list[int], dict[str, list[float]]]:
    """The steps that have a time, and the seconds of every stage in each; "other" completes them to the whole step."""

    def seconds(step: dict[str, Any], stage: str) -> float:
        value = step.get(f"timing_s/{stage}", 0.0)
        return value if math.isfinite(value) else 0.0

    timed = [step for step in steps if seconds(step, "step") > 0]
    stack = {stage: [seconds(step, stage) for step in timed] for stage in STAGES}
    claimed = [sum(column) for column in zip(*stack.values(), strict=True)]
    # A stage outside the step's clock, such as a validation after the step's line, makes the step that much longer.
    stack["other"] = [max(step["timing_s/step"] - taken, 0.0) for step, taken in zip(timed, claimed, strict=True)]
    return [step["step"] for step in timed], {stage: times for stage, times in stack.items() if any(times)}


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line of metrics.jsonl or samples.jsonl; None if it is not whole, as a kill may leave the last."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if whole else None


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if (record := parse_line(line)) is not None:
                    yield line, record


def _open_log(path: Path, start_step: int) -> TextIO:
    """Open for appending what a run that goes on after `start_step` keeps; a run from the start keeps nothing."""
    if path.exists():
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as file:
            file.writelines(line for line, record in _records(path) if start_step and record["step"] <= start_step)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    # In JSON a backslash escape is the right spelling of a lone surrogate, which UTF-8 cannot hold.
    return path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")


def _append(file: TextIO, record: dict[str, Any]) -> None:
    file.write(json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n")
    file.flush()


def _write_samples(path: Path, step: int, rows: Sequence[dict[str, Any]]) -> None:
    """The file appears when it is whole."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        for row in rows:
            _append(file, {"step": step, **row})
    temporary.replace(path)


def _drop_validations(folder: Path, start_step: int) -> None:
    """As `_open_log`: what a run that goes on after `start_step` keeps; a run from the start keeps nothing."""
    for path in folder.glob("step_*.jsonl"):
        step = path.stem.removeprefix("step_")
        if step.isdecimal() and (not start_step or int(step) > start_step):
            path.unlink()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if not isinstance(value, dict):
        return value
    bad = {key: str(item) for key, item in value.items() if isinstance(item, float) and not math.isfinite(item)}
    record = {key: None if key in bad else _finite(item) for key, item in value.items()}
    return {**record, "nonfinite": bad} if bad else record


def _fixed(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else ""


def _table(title: str, *columns: str) -> "Table":
    """A table for the console; columns whose name ends in ">" are right-aligned."""
    table = require("rich.table").Table(title=title, title_justify="left", box=require("rich.box").SIMPLE_HEAD)
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left")
    return table


def _progress(console: "Console", max_steps: int, start_step: int) -> "Progress":
    bars = require("rich.progress")
    columns = (bars.TextColumn("training"), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn())
    progress = bars.Progress(*columns, bars.TimeRemainingColumn(), console=console)
    progress.add_task("training", total=max_steps, completed=start_step)
    progress.start()
    return progress


def _tensorboard(folder: Path, start_step: int) -> "SummaryWriter":
    require("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    # Events of later steps, left by the run that is taken up again, are hidden by TensorBoard.
    return SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else 0)
