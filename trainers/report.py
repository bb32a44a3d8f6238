"""report.html and curves.png of a run, from the files of its folder alone.

    python -m trainers.report RUN_DIR                    # RUN_DIR/report.html, RUN_DIR/curves.png
    python -m trainers.report RUN_DIR RUN_DIR --out DIR  # DIR/comparison.html, DIR/comparison.png: curves overlaid

The page is one file that loads nothing. Prompts and responses are untrusted text: the template engine escapes all of
them, and the page's content policy lets no script run but the one that the report brings. Missing files and torn lines
are passed over, so that the report of a run that was killed, or that still runs, is the report of what it wrote.
"""

import argparse
import base64
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trainers.charts import charts_of, curves_png, line_chart, stage_chart
from trainers.config import CONFIGS
from trainers.extras import require
from trainers.logger import duration, parse_line, read_metrics, stage_shares

TEMPLATES = Path(__file__).parent / "templates"
MAX_BYTES = 8 << 20  # of samples.jsonl that a page holds; a longer run shows evenly spaced steps of itself
STEP = re.compile(rb'\{"step": (\d+)')  # how the logger begins a line
MAX_SAMPLE_TOKENS = 4_096  # of one sample
TOKEN_NUMBERS = ("logprob", "old", "rollout", "ref", "kl", "value", "reward", "advantage", "return", "ratio")


@dataclass(frozen=True)
class Run:
    name: str
    folder: Path
    steps: list[dict[str, Any]]
    config_text: str
    config: dict[str, str]  # dotted key -> value
    env: dict[str, str]
    samples: list[dict[str, Any]]
    sample_steps: tuple[int, int]  # shown here, in the file


def write_report(run_dir: Path, *more: Path, out: Path | None = None) -> Path:
    """Write the report of one run, or the comparison of several, and return the page's path.

    Args:
        run_dir, more: run folders. A folder without any log is a page that says so.
        out: folder of the result; default: `run_dir`.

    Raises:
        FileNotFoundError: a run folder does not exist.
    """
    folders = [Path(run_dir), *map(Path, more)]
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"run_dir must be the folder of a run, got {folder}")
    names = Counter(folder.resolve().name for folder in folders)
    runs = [
        load_run(folder, folder.resolve().name if names[folder.resolve().name] == 1 else str(folder))
        for folder in folders
    ]
    out = Path(out or run_dir)
    out.mkdir(parents=True, exist_ok=True)
    page, picture = ("report.html", "curves.png") if len(runs) == 1 else ("comparison.html", "comparison.png")
    _write(out / picture, curves_png({run.name: run.steps for run in runs}))
    _write(out / page, render(runs).encode("utf-8", "replace"))
    return out / page


def load_run(folder: Path, name: str) -> Run:
    config = _read(folder / "config.yaml")
    try:
        env = json.loads(_read(folder / "env.json"))
    except ValueError:
        env = {}
    samples, sample_steps = load_samples(folder / "samples.jsonl")
    return Run(
        name=name,
        folder=folder,
        steps=read_metrics(folder / "metrics.jsonl"),
        config_text=config,
        config=_config(config),
        env=_flat(env),
        samples=samples,
        sample_steps=sample_steps,
    )


def load_samples(path: Path) -> tuple[list[dict[str, Any]], tuple[int, int]]:
    """The samples of evenly spaced steps, first and last included, that fit MAX_BYTES; and (steps kept, steps)."""
    sizes: Counter[int] = Counter()
    for step, line in _lines_of_steps(path):
        sizes[step] += len(line)
    steps = sorted(sizes)
    kept, count = steps, len(steps)
    while count > 2 and (size := sum(sizes[step] for step in kept)) > MAX_BYTES:
        count = max(2, min(count - 1, count * MAX_BYTES // size))
        kept = [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]
    chosen = set(kept)
    records = (parse_line(line) for step, line in _lines_of_steps(path) if step in chosen)
    return [_columns(record) for record in records if record], (len(kept), len(steps))


def render(runs: list[Run]) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["fixed"] = lambda value: f"{value:.3f}" if isinstance(value, float) else value or ""
    script = (TEMPLATES / "inspector.js").read_text("utf-8")
    by_name = {run.name: run.steps for run in runs}
    charts = [figure for chart in charts_of(by_name) if (figure := line_chart(chart, by_name))]
    stages = [
        (stage_chart(run.steps, title="Stage times" if len(runs) == 1 else run.name), stage_shares(run.steps))
        for run in runs
    ]
    return environment.get_template("report.html").render(
        runs=runs,
        title=runs[0].name if len(runs) == 1 else "Comparison: " + ", ".join(run.name for run in runs),
        headline=headline(runs[0]) if len(runs) == 1 else [],
        facts=facts(runs),
        charts=charts,
        stages=[(figure, shares) for figure, shares in stages if figure],
        differences=differences(runs),
        samples=[{"run": run.name, "samples": run.samples} for run in runs if run.samples],
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def headline(run: Run) -> list[tuple[str, str, str]]:
    """(name, figure, explanation) of what one looks for first."""
    score, kl = _series(run, "critic/score/mean"), _series(run, "critic/kl/mean")
    figures = []
    if score:
        before = f"first {len(score[:3])}: {_mean(score[:3]):.3f}"
        figures.append(("Reward", f"{_mean(score[-3:]):.3f}", f"mean of the last {len(score[-3:])} steps; {before}"))
    if kl:
        figures.append(
            ("KL", f"{_mean(kl[-3:]):.2f}", f"nats per sequence, last {len(kl[-3:])} steps; max {max(kl):.2f}")
        )
    if validation := _series(run, "val/score/mean"):
        figures.append(("Validation", f"{validation[-1]:.3f}", f"last score; first {validation[0]:.3f}"))
    if times := _series(run, "timing_s/step"):
        figures.append(("Time", duration(sum(times)), f"{len(times)} steps of {_mean(times):.2f} s"))
    if rate := _series(run, "perf/throughput"):
        figures.append(("Throughput", f"{_mean(rate):.0f}", "tokens per second, prompt and response"))
    return figures


def facts(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Rows of (fact, its value in every run); facts that no run has are left out."""
    rows = []
    for label, fact in (
        ("model", _model),
        ("task", lambda run: run.config.get("env.name", "")),
        ("algorithm", _trained_by),
        ("batch", _batch),
        ("steps", _steps),
        ("training time", lambda run: _seen(run, "timing_s/step", lambda times: duration(sum(times)))),
        ("reward, first 3 steps", lambda run: _seen(run, "critic/score/mean", lambda xs: f"{_mean(xs[:3]):.3f}")),
        ("reward, last 3 steps", lambda run: _seen(run, "critic/score/mean", lambda xs: f"{_mean(xs[-3:]):.3f}")),
        (
            "KL per sequence, last 3 steps",
            lambda run: _seen(run, "critic/kl/mean", lambda xs: f"{_mean(xs[-3:]):.2f} nats"),
        ),
        (
            "entropy, last 3 steps",
            lambda run: _seen(run, "actor/entropy", lambda xs: f"{_mean(xs[-3:]):.2f} nats per token"),
        ),
        ("validation score, last", lambda run: _seen(run, "val/score/mean", lambda xs: f"{xs[-1]:.3f}")),
        ("throughput", lambda run: _seen(run, "perf/throughput", lambda xs: f"{_mean(xs):.0f} tokens/s")),
        ("peak memory", lambda run: _seen(run, "perf/max_memory_rss_gb", lambda xs: f"{max(xs):.2f} GB")),
        ("seed", lambda run: _algorithm(run, "seed")),
    ):
        values = [fact(run) for run in runs]
        if any(values):
            rows.append((label, values))
    return rows


def differences(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """The settings in which several runs differ."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = [(key, [run.config.get(key, "") for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _model(run: Run) -> str:
    """The folder that was loaded, by its last name; before that was known, the setting."""
    return Path(run.env["model"]).name if run.env.get("model") else run.config.get("policy.model_name", "")


def _trained_by(run: Run) -> str:
    name = next((name for name in CONFIGS if f"{name}.seed" in run.config), "")
    return ", ".join(filter(None, [name.upper(), _algorithm(run, "adv_estimator.name")]))


def _batch(run: Run) -> str:
    prompts, responses = (_algorithm(run, key) for key in ("num_prompts_per_step", "num_generations_per_prompt"))
    return f"{prompts} prompts × {responses} responses a step" if prompts and responses else ""


def _algorithm(run: Run, key: str) -> str:
    """A setting of the algorithm's block, whichever it is."""
    return next((run.config[full] for name in CONFIGS if (full := f"{name}.{key}") in run.config), "")


def _steps(run: Run) -> str:
    trained = [step["step"] for step in run.steps if "critic/score/mean" in step]
    planned = _algorithm(run, "max_num_steps")
    return (f"{trained[-1]}" + (f" of {planned}" if planned else "")) if trained else ""


def _series(run: Run, name: str) -> list[float]:
    return [step[name] for step in run.steps if math.isfinite(step.get(name, math.nan))]


def _seen(run: Run, name: str, show: Callable[[list[float]], str]) -> str:
    values = _series(run, name)
    return show(values) if values else ""


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _lines_of_steps(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that may be larger than memory, their step read without parsing them."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if start := STEP.match(line):
                    yield int(start[1]), line


def _columns(record: dict[str, Any]) -> dict[str, Any]:
    """A sample with its tokens as columns of short numbers: a fraction of the page that the rows would take."""
    tokens = [token for token in record.get("tokens") or [] if isinstance(token, dict)]
    columns: dict[str, list[Any]] = {
        "text": [str(token.get("text", "")) for token in tokens[:MAX_SAMPLE_TOKENS]],
        "id": [token.get("id") for token in tokens[:MAX_SAMPLE_TOKENS]],
        "mask": [int(bool(token.get("mask"))) for token in tokens[:MAX_SAMPLE_TOKENS]],
        "clipped": [int(bool(token.get("clipped"))) for token in tokens[:MAX_SAMPLE_TOKENS]],
    }
    for name in TOKEN_NUMBERS:
        columns[name] = [_short(token, name) for token in tokens[:MAX_SAMPLE_TOKENS]]
    return {
        "step": record["step"],
        "sample_id": str(record.get("sample_id", "")),
        **{name: str(record.get(name) or "") for name in ("prompt", "response", "finish")},
        **{name: _short(record, name) for name in ("score", "kl")},
        "num_tokens": len(tokens),
        "tokens": columns,
    }


def _short(record: dict[str, Any], name: str) -> Any:
    value = record.get(name)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(f"{value:.5g}")
    return record.get("nonfinite", {}).get(name)


def _config(text: str) -> dict[str, str]:
    omegaconf = require("omegaconf").OmegaConf
    try:
        return _flat(omegaconf.to_container(omegaconf.create(text))) if text.strip() else {}
    except Exception:  # a torn or foreign file: the page still shows its text
        return {}


def _flat(tree: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(tree, dict) and tree:
        return {key: value for name, branch in tree.items() for key, value in _flat(branch, f"{prefix}.{name}").items()}
    return (
        {prefix.removeprefix("."): tree if isinstance(tree, str) else json.dumps(tree, default=str)} if prefix else {}
    )


def _read(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.exists() else ""


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainers.report", description="Report of a run, or of several.")
    parser.add_argument("run_dir", nargs="+", type=Path, help="folder of a run")
    parser.add_argument("--out", type=Path, help="folder of the result; default: the first run's")
    arguments = parser.parse_args()
    try:
        print(write_report(*arguments.run_dir, out=arguments.out))
    except FileNotFoundError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
