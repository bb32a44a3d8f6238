"""metrics.jsonl, samples.jsonl, TensorBoard and the console: values, resume, broken files, pipes and terminals."""

import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fastppo
from trainers.config import LoggerConfig
from trainers.logger import METRICS, STAGES, Logger, duration, read_metrics, stage_shares


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


class Pipe(io.StringIO):
    """A file that is no terminal and remembers what had arrived at the last flush."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def make(
    folder: Path, *, start_step: int = 0, max_steps: int = 10, file: io.StringIO | None = None, **settings
) -> Logger:
    cfg = LoggerConfig(**{"tensorboard": False, "report": False, **settings})
    console = Console(file=file or Pipe(), width=120, highlight=False)
    return Logger(folder, cfg, max_steps=max_steps, start_step=start_step, console=console)


def lines(path: Path) -> list[dict]:
    """The file's objects without their times, read as strict JSON."""
    found = [json.loads(line, parse_constant=pytest.fail) for line in path.read_bytes().splitlines()]
    return [{key: value for key, value in record.items() if key != "time"} for record in found]


def sample(number: int, **more) -> dict:
    return {
        "sample_id": number,
        "prompt": "Once",
        "response": f" upon {number}",
        "finish": "stop",
        "score": 0.5,
        **more,
    }


def test_one_json_line_a_call(tmp_path: Path) -> None:
    with make(tmp_path) as logger:
        logger.validation(0, {"val/score/mean": 0.25})
        logger.log(1, {"critic/score/mean": 0.5, "actor/lr": torch.tensor(2.0)})
        logger.samples(1, [sample(7, tokens=[{"text": " é", "mask": True, "ratio": 1.5}])])
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "val/score/mean": 0.25},
        {"step": 1, "critic/score/mean": 0.5, "actor/lr": 2.0},
    ]
    (row,) = lines(tmp_path / "samples.jsonl")
    assert row["step"] == 1 and row["sample_id"] == 7 and row["tokens"] == [{"text": " é", "mask": True, "ratio": 1.5}]
    assert (tmp_path / "samples.jsonl").read_bytes().startswith(b'{"step": 1, ')
    assert all(record["time"] > 1.6e9 for record in read_metrics(tmp_path / "metrics.jsonl"))


def test_lines_are_on_disk_before_close(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.log(1, {"critic/score/mean": 0.5})
    logger.samples(1, [sample(0)])
    assert len(lines(tmp_path / "metrics.jsonl")) == len(lines(tmp_path / "samples.jsonl")) == 1
    logger.close()


def test_numbers_that_are_not_finite_stay_valid_json_and_come_back(tmp_path: Path) -> None:
    with make(tmp_path) as logger:
        logger.log(1, {"actor/grad_norm": math.nan, "actor/pg_loss": -math.inf, "actor/lr": 1.0})
        logger.samples(1, [sample(0, kl=math.inf, tokens=[{"ratio": math.nan, "old": -1.0}])])
    (row,) = lines(tmp_path / "metrics.jsonl")
    assert row["actor/grad_norm"] is None and row["actor/pg_loss"] is None and row["actor/lr"] == 1.0
    assert row["nonfinite"] == {"actor/grad_norm": "nan", "actor/pg_loss": "-inf"}
    (step,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(step["actor/grad_norm"]) and step["actor/pg_loss"] == -math.inf
    (row,) = lines(tmp_path / "samples.jsonl")
    assert row["kl"] is None and row["nonfinite"] == {"kl": "inf"}
    assert row["tokens"] == [{"ratio": None, "old": -1.0, "nonfinite": {"ratio": "nan"}}]


def test_any_text_makes_a_readable_line(tmp_path: Path) -> None:
    text = 'line\nbreak \u2028 "quote" \ud83d \x00 \x1b[31m'
    with make(tmp_path) as logger:
        logger.samples(1, [sample(0, prompt=text)])
    (row,) = lines(tmp_path / "samples.jsonl")
    assert row["prompt"] == text


def test_metrics_must_be_numbers(tmp_path: Path) -> None:
    with make(tmp_path) as logger, pytest.raises(TypeError, match=r"'critic/score/mean' must be a number, got 'high'"):
        logger.log(1, {"critic/score/mean": "high"})


def steps(logger: Logger, first: int, last: int, offset: float = 0.0) -> None:
    for step in range(first, last + 1):
        logger.log(step, {"critic/score/mean": step + offset})
        logger.samples(step, [sample(step), sample(step + 1)])
        if step % 2 == 0:
            logger.validation(step, {"val/score/mean": -step + offset})


def test_a_resumed_run_ends_with_the_lines_of_an_unbroken_one(tmp_path: Path) -> None:
    with make(tmp_path / "whole") as logger:
        steps(logger, 1, 6)
    with make(tmp_path / "resumed") as logger:
        steps(logger, 1, 2)
        steps(logger, 3, 5, offset=100.0)  # lost work: the last checkpoint is that of step 2
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / "resumed" / name).open("ab") as file:
            file.write(b'{"step": 1, "critic/sc')  # the write that the kill cut
    with make(tmp_path / "resumed", start_step=2) as logger:
        steps(logger, 3, 6)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert lines(tmp_path / "resumed" / name) == lines(tmp_path / "whole" / name)
    assert [row["step"] for row in lines(tmp_path / "whole" / "metrics.jsonl")] == [1, 2, 2, 3, 4, 4, 5, 6, 6]


def test_a_line_without_its_end_is_cut_even_if_it_parses(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "actor/lr": 1.0}\n{"step": 1, "actor/lr": 2.0}')
    assert [step["actor/lr"] for step in read_metrics(tmp_path / "metrics.jsonl")] == [1.0]
    with make(tmp_path, start_step=1) as logger:
        logger.log(2, {"actor/lr": 3.0})
    assert [row["actor/lr"] for row in lines(tmp_path / "metrics.jsonl")] == [1.0, 3.0]


def test_a_run_from_the_start_keeps_nothing(tmp_path: Path) -> None:
    with make(tmp_path) as logger:
        logger.validation(0, {"val/score/mean": 1.0})
        steps(logger, 1, 3)
    with make(tmp_path) as logger:
        logger.validation(0, {"val/score/mean": 2.0})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "val/score/mean": 2.0}]
    assert lines(tmp_path / "samples.jsonl") == []


def test_a_kill_while_the_files_are_cut_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path) as logger:
        steps(logger, 1, 4)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, start_step=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_lines_of_one_step_are_merged(tmp_path: Path) -> None:
    with make(tmp_path) as logger:
        logger.log(2, {"critic/score/mean": 0.5})
        logger.validation(2, {"val/score/mean": 0.75})
        logger.log(1, {"critic/score/mean": 0.25})
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["step"], first["critic/score/mean"]) == (1, 0.25)
    assert (second["step"], second["critic/score/mean"], second["val/score/mean"]) == (2, 0.5, 0.75)


def test_tensorboard_shows_every_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    with make(tmp_path, tensorboard=True) as logger:
        steps(logger, 1, 4, offset=100.0)
    with make(tmp_path, tensorboard=True, start_step=2) as logger:
        steps(logger, 3, 4)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("critic/score/mean")] == [
        (1, 101.0),
        (2, 102.0),
        (3, 3.0),
        (4, 4.0),
    ]


def test_missing_tensorboard_names_the_extra_and_touches_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "actor/lr": 1.0}\n')
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"tensorboard.*fastppo\[trainer\]"):
        make(tmp_path, tensorboard=True)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 5, "actor/lr": 1.0}]


STEP = {
    "critic/score/mean": 0.2144,
    "critic/kl/mean": 6.4,
    "actor/entropy": 3.14159,
    "actor/pg_clipfrac": 0.0125,
    "response_length/mean": 15.75,
    "perf/throughput": 210.4,
    "timing_s/step": 3.346,
}


def test_plain_lines_in_a_pipe(tmp_path: Path) -> None:
    pipe = Pipe()
    logger = make(tmp_path, file=pipe, max_steps=60)
    logger.log(2, STEP)
    assert re.fullmatch(
        r"step  2/60  reward  0\.214  kl   6\.40  entropy 3\.142  clip 0\.013  len   15\.8     210 tok/s  3\.35 s  "
        r"eta \d+s\n",
        pipe.flushed,
    )
    logger.close()
    assert "\x1b" not in pipe.getvalue() and "\r" not in pipe.getvalue()


def test_tables_in_a_pipe_are_wide(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with Logger(tmp_path, LoggerConfig(tensorboard=False, report=False), max_steps=1) as logger:
        logger.samples(1, [sample(0, response=70 * "x")])
    assert 70 * "x" in capsys.readouterr().out


def test_a_long_line_is_not_wrapped_in_a_pipe(tmp_path: Path) -> None:
    pipe = Pipe()
    logger = make(tmp_path, file=pipe)
    logger.validation(1, {f"val/metrics/a_rather_long_name_{i}": 0.5 for i in range(12)})
    assert pipe.getvalue().count("\n") == 1 and pipe.getvalue().count("0.5") == 12
    logger.close()


def test_missing_metrics_are_left_out_of_the_line(tmp_path: Path) -> None:
    pipe = Pipe()
    logger = make(tmp_path, file=pipe)
    logger.log(1, {})
    logger.log(2, {"critic/score/mean": math.nan})
    first, second = pipe.getvalue().splitlines()
    assert re.fullmatch(r"step  1/10  \d+\.\d\d s  eta \d+s", first)
    assert re.fullmatch(r"step  2/10  reward    nan  \d+\.\d\d s  eta \d+s", second)
    logger.close()


class Terminal(Pipe):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_its_cursor_back_after_an_error(tmp_path: Path) -> None:
    terminal = Terminal()
    with pytest.raises(ZeroDivisionError), make(tmp_path, file=terminal) as logger:
        logger.log(4, STEP)
        raise ZeroDivisionError
    text = terminal.getvalue()
    assert "training" in text and "4/10" in text and "reward  0.214" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # hidden, shown again
    assert text.index("\x1b[?25l") < text.index("\x1b[?25h")


def test_no_bar_under_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    terminal = Terminal()
    with make(tmp_path, file=terminal) as logger:
        logger.log(4, STEP)
    assert "training" not in terminal.getvalue() and "\x1b[?25l" not in terminal.getvalue()


def test_sample_tables_come_at_their_steps_with_their_number_of_rows(tmp_path: Path) -> None:
    pipe = Pipe()
    logger = make(tmp_path, file=pipe, max_steps=9, samples_period=4, num_samples_to_print=2)
    for step in range(1, 10):
        logger.samples(step, [sample(30), sample(31), sample(32)])
    text = pipe.getvalue()
    assert re.findall(r"samples of step (\d+)", text) == ["1", "4", "8", "9"]
    assert text.count("upon 30") == text.count("upon 31") == 4 and "upon 32" not in text
    assert len(lines(tmp_path / "samples.jsonl")) == 27
    logger.close()


@pytest.mark.parametrize("settings", [{"samples_period": 0}, {"num_samples_to_print": 0}], ids=str)
def test_no_sample_table_where_none_is_wanted(tmp_path: Path, settings: dict[str, int]) -> None:
    pipe = Pipe()
    with make(tmp_path, file=pipe, **settings) as logger:
        logger.samples(1, [sample(30)])
    assert "samples of step" not in pipe.getvalue()


def test_model_output_cannot_drive_the_terminal(tmp_path: Path) -> None:
    pipe = Pipe()
    logger = make(tmp_path, file=pipe)
    logger.samples(1, [sample(0, response="a\x1b[2J\x07b\rc[bold]d[/bold]\n")])
    assert r"a\x1b[2J\x07b\rc[bold]d[/bold]\n" in pipe.getvalue()
    logger.close()


def test_a_console_without_unicode_gets_escapes(tmp_path: Path) -> None:
    raw = io.BytesIO()
    logger = make(tmp_path, file=io.TextIOWrapper(raw, encoding="ascii"))  # type: ignore[arg-type]
    logger.samples(1, [sample(0, response="snow \u2603")])
    logger.close()
    assert rb"snow \u2603" in raw.getvalue()


def test_validation_takes_its_own_names_only(tmp_path: Path) -> None:
    pipe = Pipe()
    with make(tmp_path, file=pipe) as logger:
        logger.validation(3, {"val/score/mean": 0.61234, "timing_s/testing": 4.0})
        with pytest.raises(ValueError, match=r"val/\*.*got 'critic/score/mean'"):
            logger.validation(3, {"critic/score/mean": 0.5})
    assert pipe.getvalue().startswith("validation at step 3  score/mean 0.6123\n")
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 3, "val/score/mean": 0.61234, "timing_s/testing": 4.0}]


@pytest.mark.parametrize("shown", [0, 1, 2, 5])
def test_validation_samples_are_written_and_some_are_shown(tmp_path: Path, shown: int) -> None:
    pipe = Pipe()
    rows = [sample(i, response=f"answer {i}", length=i + 2, score=math.nan if i else 0.25) for i in range(3)]
    with make(tmp_path, file=pipe, num_val_samples_to_print=shown) as logger:
        logger.validation(4, {"val/score/mean": 0.5}, rows)
        printed = pipe.getvalue()
    assert ("validation samples of step 4" in printed) == (shown > 0)
    assert [f"answer {i}" in printed for i in range(3)] == [i < shown for i in range(3)]
    if shown:
        assert re.search(r"0 +0\.25 +2 +stop +Once +answer 0", printed)
    written = lines(tmp_path / "validation" / "step_4.jsonl")
    assert written[0] == {"step": 4, **rows[0]}
    assert written[1] == {"step": 4, **rows[1], "score": None, "nonfinite": {"score": "nan"}}
    assert len(written) == 3 and [p.name for p in (tmp_path / "validation").iterdir()] == ["step_4.jsonl"]


def test_validation_samples_beyond_the_step_of_a_resume_are_dropped(tmp_path: Path) -> None:
    with make(tmp_path) as logger:
        for step in (0, 2, 4, 10):
            logger.validation(step, {"val/score/mean": 0.5}, [sample(0)])
    (tmp_path / "validation" / "notes.txt").write_text("mine")
    names = lambda: sorted(path.name for path in (tmp_path / "validation").iterdir())  # noqa: E731
    make(tmp_path, start_step=4).close()
    assert names() == ["notes.txt", "step_0.jsonl", "step_2.jsonl", "step_4.jsonl"]
    make(tmp_path).close()
    assert names() == ["notes.txt"]


def test_close_shows_where_the_time_went_once(tmp_path: Path) -> None:
    pipe = Pipe()
    logger = make(tmp_path, file=pipe)
    logger.log(1, {"timing_s/gen": 1.0, "timing_s/update_actor": 2.0, "timing_s/step": 4.0})
    logger.log(2, {"timing_s/gen": 3.0, "timing_s/update_actor": 2.0, "timing_s/step": 6.0})
    logger.close()
    logger.close()
    rows = [line.split() for line in pipe.getvalue().splitlines()]
    for row in (["gen", "2.000", "40.0%"], ["update_actor", "2.000", "40.0%"], ["other", "1.000", "20.0%"]):
        assert rows.count(row) == 1
    assert rows.count(["step", "5.000", "100.0%"]) == 1
    assert pipe.getvalue().count(f"run folder: {tmp_path}") == 1
    assert "report" not in pipe.getvalue()


def test_closing_a_run_without_steps(tmp_path: Path) -> None:
    pipe = Pipe()
    make(tmp_path, file=pipe).close()
    assert pipe.getvalue() == f"run folder: {tmp_path}\n"


def test_the_report_comes_with_its_period_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr("trainers.report.write_report", lambda folder: written.append(len(read_metrics(folder / NAME))))
    pipe = Pipe()
    with make(tmp_path, file=pipe, report=True, report_period=3, max_steps=6) as logger:
        steps(logger, 1, 6)
    assert written == [3, 6]
    assert pipe.getvalue().endswith(f"report: {tmp_path / 'report.html'}\n")


NAME = "metrics.jsonl"


def test_a_report_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr("trainers.report.write_report", broken)
    pipe = Pipe()
    with make(tmp_path, file=pipe, report=True, report_period=1) as logger:
        logger.log(1, {})
        logger.log(2, {})
    assert len(lines(tmp_path / NAME)) == 2
    assert pipe.getvalue().count("no report was written: RuntimeError: no font") == 3
    assert "report.html" not in pipe.getvalue()


def test_stage_shares() -> None:
    steps = [
        {"step": 0, "val/score/mean": 1.0},
        {"step": 1, "timing_s/gen": 1.0, "timing_s/step": 2.0},
        {"step": 2, "timing_s/gen": 1.0, "timing_s/testing": 5.0, "timing_s/step": 2.0},  # tested beside its clock
        {"step": 3, "timing_s/step": math.nan},
    ]
    assert stage_shares(steps) == [("gen", 1.0, 0.25), ("testing", 2.5, 0.625), ("other", 0.5, 0.125)]
    assert stage_shares([]) == stage_shares([{"step": 1}]) == []


@pytest.mark.parametrize(
    "seconds, text",
    [(0.2, "0s"), (59.6, "1m00s"), (75.2, "1m15s"), (3599.7, "1h00m"), (3720, "1h02m"), (90000, "25h00m")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_docs_define_every_metric_with_its_unit() -> None:
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text("utf-8")
    documented: dict[str, str] = {}
    for row in text.partition("## Names of others")[0].splitlines():
        if not row.startswith("| `"):
            continue
        _, cell, unit, meaning, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", row))
        names = re.findall(r"`([^`]+)`", cell)
        assert meaning, f"{names[0]} has no meaning"
        stem = re.match(r".*[/_]", names[0])[0]
        for name in [names[0], *(stem + short for short in names[1:])]:
            assert name not in documented, f"{name} is documented twice"
            documented[name] = unit
    assert documented == METRICS


def test_summaries_of_the_losses_use_documented_names() -> None:
    for names in (fastppo.PPO_METRICS, fastppo.VALUE_METRICS):
        assert set(fastppo.summarize(torch.ones(len(names), dtype=torch.float64))) <= set(METRICS)


def test_every_stage_has_its_metric() -> None:
    assert [name for name in METRICS if name.startswith("timing_s/")] == [f"timing_s/{s}" for s in (*STAGES, "step")]
