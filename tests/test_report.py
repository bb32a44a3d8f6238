"""The report of a run folder: what it shows, what it must never let through, and folders that are not whole."""

import base64
import hashlib
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trainers import charts, report
from trainers.config import LoggerConfig
from trainers.logger import METRICS, Logger
from trainers.report import write_report

EVIL = '</script><script>alert(1)</script><img src="https://evil.example/x" onerror=alert(2)><!-- {{ 7 * 7 }} \' &amp;'


class Page(HTMLParser):
    """A page as a browser reads it: its tags with attributes, and the text of its scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.inside = ""
        self.source = path.read_text("utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

        self.text += " "

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""
        self.text += " "

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def figure(self, title: str) -> ElementTree.Element:
        start = self.source.index(f"<figure><figcaption><b>{title}</b>")
        return ElementTree.fromstring(self.source[start : self.source.index("</figure>", start) + len("</figure>")])

    def samples(self) -> list[dict]:
        return json.loads(self.scripts[0])


def token(text: str, advantage: float | None, **more) -> dict:
    names = ("logprob", "old", "rollout", "ref", "kl", "value", "reward", "return", "ratio")
    numbers = dict.fromkeys(names, None if advantage is None else -1.25)
    return (
        {"text": text, "id": 5, "mask": advantage is not None, "clipped": False, "advantage": advantage}
        | numbers
        | more
    )


def sample(number: int, **more) -> dict:
    tokens = [token("Once", None), token(" upon", 0.5), token(" a", -1.0, clipped=True)]
    base = {"sample_id": number, "prompt": "Once", "response": " upon a", "finish": "stop", "score": 0.5, "kl": 2.0}
    return {**base, "tokens": tokens, **more}


def make_run(
    folder: Path, scores: list[float], *, config: str = "", env: str = "", samples: bool = True, **metrics
) -> Path:
    cfg = LoggerConfig(tensorboard=False, report=False, num_samples_to_print=0)
    with Logger(folder, cfg, max_steps=len(scores)) as logger:
        for step, score in enumerate(scores, 1):
            logger.log(step, {"critic/score/mean": score, "timing_s/step": 2.0, "timing_s/gen": 1.5, **metrics})
            if samples:
                logger.samples(step, [sample(10 * step), sample(10 * step + 1)])
    if config:
        (folder / "config.yaml").write_text(config)
    if env:
        (folder / "env.json").write_text(env)
    return folder


@pytest.mark.parametrize(("algorithm", "estimator"), [("ppo", "gae"), ("reinforce", "rloo")])
def test_the_page_has_the_run_s_key_facts(tmp_path: Path, algorithm: str, estimator: str) -> None:
    config = f"policy: {{model_name: auto}}\nenv: {{name: copy}}\n{algorithm}: {{max_num_steps: 9, seed: 3, "
    config += f"num_prompts_per_step: 8, num_generations_per_prompt: 4, adv_estimator: {{name: {estimator}}}}}\n"
    env = {"model": "/models/SmolLM2-135M", "torch": "2.13.0", "ops": {"gae": "cpu"}}
    scores = [0.1, 0.2, 0.3, 0.6, 0.7, 0.83]
    run = make_run(tmp_path / "run", scores, config=config, env=json.dumps(env), **{"critic/kl/mean": 6.5})
    page = Page(write_report(run))
    text = " ".join(page.text.split())
    for fact in (
        "Reward 0.710 mean of the last 3 steps; first 3: 0.200",
        "KL 6.50 nats per sequence, last 3 steps; max 6.50",
        "Time 12s 6 steps of 2.00 s",
        "model SmolLM2-135M",
        "task copy",
        f"algorithm {algorithm.upper()}, {estimator}",
        "batch 8 prompts × 4 responses a step",
        "steps 6 of 9",
        "seed 3",
        "torch 2.13.0",
        "ops.gae cpu",
        "model_name: auto",
    ):
        assert fact in text
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert sorted(path.name for path in run.iterdir()) == sorted(
        ["config.yaml", "curves.png", "env.json", "metrics.jsonl", "report.html", "samples.jsonl"]
    )


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = Page(write_report(make_run(tmp_path / "run", [0.1, 0.2], **dict.fromkeys(METRICS, 0.5))))
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page.source)
    assert {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "embed", "base", "form", "use"} == set()
    for _, attributes in page.tags:
        assert not {"src", "href", "srcset", "action", "xlink:href", "data"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv")]
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_untrusted_text_stays_text(tmp_path: Path) -> None:
    run = tmp_path / "a<b>&'c"
    evil = sample(1, sample_id=EVIL, prompt=EVIL, response=EVIL, finish=EVIL, tokens=[token(EVIL, 0.5)])
    make_run(run, [0.5], config=f"note: {json.dumps(EVIL)}\n", env=json.dumps({EVIL: EVIL}), **{f"env/{EVIL}": 1.0})
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, **evil}) + "\n")
    page = Page(write_report(run))
    assert page.count("script") == 2 and page.count("img") == 0
    assert all(EVIL not in source for source in (page.source, page.scripts[1]))
    shown = page.samples()[0]["samples"][-1]
    assert shown["prompt"] == shown["response"] == shown["tokens"]["text"][0] == EVIL
    # As text: id, finish, prompt and response of the table, key and value of the environment, and the chart's title.
    assert page.text.count(EVIL) >= 7
    assert run.name in page.text
    assert page.figure(str(charts.escape(f"env/{EVIL}"))).find("figcaption/b").text == f"env/{EVIL}"


def test_the_inspector_s_data(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Logger(run, LoggerConfig(tensorboard=False, report=False), max_steps=1) as logger:
        odd = token(" a", -1.0, clipped=True, ratio=math.inf, old=math.nan, logprob=-1.23456789)
        logger.samples(1, [sample(4, tokens=[token("Once", None), odd]), sample(5, score=math.nan, tokens=None)])
    ((first, second),) = [one["samples"] for one in Page(write_report(run)).samples()]
    assert (first["step"], first["sample_id"], first["score"], first["num_tokens"]) == (1, "4", 0.5, 2)
    columns = first["tokens"]
    assert columns["text"] == ["Once", " a"] and columns["mask"] == [0, 1] and columns["clipped"] == [0, 1]
    assert columns["advantage"] == [None, -1.0] and columns["logprob"] == [None, -1.2346]
    assert columns["ratio"] == [None, "inf"] and columns["old"] == [None, "nan"]
    assert second["score"] == "nan" and second["tokens"]["text"] == []
    assert re.search(r"1 4 0\.500 2\.000 stop .*1 5 nan 2\.000 stop", " ".join(Page(run / "report.html").text.split()))


def test_a_page_too_large_shows_evenly_spaced_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", [0.5] * 9)
    a_step = (run / "samples.jsonl").stat().st_size // 9
    monkeypatch.setattr(report, "MAX_BYTES", int(3.5 * a_step))
    page = Page(write_report(run))
    assert [one["step"] for one in page.samples()[0]["samples"]] == [1, 1, 5, 5, 9, 9]
    assert "3 of 9 steps, evenly spaced" in page.text
    monkeypatch.setattr(report, "MAX_BYTES", 1)
    assert {one["step"] for one in Page(write_report(run)).samples()[0]["samples"]} == {1, 9}


def test_a_very_long_sample_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_SAMPLE_TOKENS", 2)
    (one,) = Page(write_report(make_run(tmp_path / "run", [0.5]))).samples()
    assert one["samples"][0]["tokens"]["text"] == ["Once", " upon"] and one["samples"][0]["num_tokens"] == 3


def test_torn_lines_are_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.25, 0.75])
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run / name).open("a") as file:
            file.write('not json\n[1]\n{"step": "x"}\n{"step": 3, "critic/score/mean": 9')
    (run / "config.yaml").write_text("policy: {model_na")
    (run / "env.json").write_text('{"torch": ')
    page = Page(write_report(run))
    assert "steps 2" in " ".join(page.text.split()) and "policy: {model_na" in page.text
    assert [one["step"] for one in page.samples()[0]["samples"]] == [1, 1, 2, 2]


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path))
    assert "No step has been logged yet." in page.text
    assert page.count("svg") == page.count("script") == 0
    assert (tmp_path / "curves.png").exists()


def test_a_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run_dir must be the folder of a run, got .*nowhere"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name", ["critic/score/mean", "critic/kl/max", "val/score/mean", "timing_s/gen", "timing_s/step"]
)
@pytest.mark.parametrize("value", [0.5, 0.0, math.nan, math.inf], ids=str)
def test_any_metric_may_be_the_only_one(
    tmp_path: Path, name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "curves_png", lambda runs: b"")
    with Logger(tmp_path, LoggerConfig(tensorboard=False, report=False), max_steps=1) as logger:
        logger.log(1, {name: value})
    page = Page(write_report(tmp_path))
    assert page.count("svg") == int(not name.startswith("timing_s") or name == "timing_s/step" and value == 0.5)


def test_pictures_of_few_numbers(tmp_path: Path) -> None:
    for values in ([], [{"step": 1, "critic/score/mean": math.nan, "timing_s/step": 1.0}]):
        assert charts.curves_png({"run": values}).startswith(b"\x89PNG")


def test_the_reward_curve_is_a_mean_of_three_steps(tmp_path: Path) -> None:
    steps = [{"step": step, "critic/score/mean": score} for step, score in ((2, 0.3), (4, 0.6), (6, 0.9), (8, 0.0))]
    reward = next(chart for chart in charts.CHARTS if chart.title == "Reward")
    smooth, raw = charts.series(reward, {"run": steps})
    assert smooth.points == [(2, 0.3), (4, pytest.approx(0.45)), (6, pytest.approx(0.6)), (8, pytest.approx(0.5))]
    assert raw.points == [(2, 0.3), (4, 0.6), (6, 0.9), (8, 0.0)]
    assert (smooth.label, raw.label) == ("3-step mean", "each step")


def test_a_chart_s_lines_and_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.0, 0.5, 1.0], **{"actor/entropy": 3.0})
    figure = Page(write_report(run)).figure("Reward")
    smooth = next(line for line in figure.iter("polyline") if line.get("class") == "main c0")
    xs, ys = zip(*((float(x), float(y)) for x, y in (p.split(",") for p in smooth.get("points").split())), strict=True)
    assert xs == (48.0, 215.0, 382.0)
    # 0, 0.25, 0.5 of an axis that ends at 1.05: from the bottom 176 up to the top 10.
    assert ys == pytest.approx([176, 176 - 166 * 0.25 / 1.05, 176 - 166 * 0.5 / 1.05], abs=0.06)
    titles = [title.text for title in figure.iter("title")]
    assert titles == [
        "step 1\n3-step mean: 0\neach step: 0",
        "step 2\n3-step mean: 0.2500\neach step: 0.5000",
        "step 3\n3-step mean: 0.5000\neach step: 1.000",
    ]


def test_a_number_that_is_not_finite_breaks_its_line_and_is_marked() -> None:
    steps = [{"step": i, "actor/entropy": math.inf if i == 3 else float(i)} for i in range(1, 7)]
    chart = next(chart for chart in charts.CHARTS if chart.title == "Entropy")
    figure = ElementTree.fromstring(str(charts.line_chart(chart, {"run": steps})))
    assert [len(line.get("points").split()) for line in figure.iter("polyline")] == [2, 3]
    assert [text.text for text in figure.iter("text") if text.get("class") == "bad"] == ["×"]


def test_a_long_run_is_thinned_without_losing_a_spike() -> None:
    steps = [{"step": i, "actor/entropy": 100.0 if i == 7777 else 1.0 + i % 3} for i in range(1, 20_001)]
    chart = next(chart for chart in charts.CHARTS if chart.title == "Entropy")
    figure = ElementTree.fromstring(str(charts.line_chart(chart, {"run": steps})))
    (line,) = figure.iter("polyline")
    heights = [float(point.split(",")[1]) for point in line.get("points").split()]
    assert len(heights) <= charts.MAX_POINTS
    # The axis ends 5% above the spike; everything else is at most 3.
    assert min(heights) == pytest.approx(176 - 166 / 1.05, abs=0.06) and sorted(heights)[1] > 165
    assert len(list(figure.iter("rect"))) <= charts.MAX_POINTERS


def test_stage_times_add_up_to_the_step(tmp_path: Path) -> None:
    metrics = {"timing_s/gen": 1.5, "timing_s/update_actor": 0.25, "timing_s/step": 2.0}
    page = Page(write_report(make_run(tmp_path / "run", [0.5, 0.5], **metrics)))
    figure = page.figure("Stage times")
    areas = [area.get("points").split() for area in figure.iter("polygon")]
    assert [area.get("class") for area in figure.iter("polygon")] == ["area s0", "area s6", "area s10"]
    heights = [float(area[-1].split(",")[1]) - float(area[0].split(",")[1]) for area in areas]
    assert heights == pytest.approx([166 / 1.05 * share for share in (0.75, 0.125, 0.125)], abs=0.11)
    assert areas[1][-1] == areas[0][0] and areas[2][-1] == areas[1][0]  # each stands on the one before
    text = " ".join(page.text.split())
    assert "gen 1.500 75.0 % update_actor 0.250 12.5 % other 0.250 12.5 % step 2.000 100.0 %" in text


def test_several_runs_are_overlaid(tmp_path: Path) -> None:
    first = make_run(tmp_path / "x" / "seed0", [0.1, 0.2], config="ppo: {seed: 0}\nenv: {name: copy}\n")
    second = make_run(tmp_path / "x" / "seed1", [0.3, 0.4, 0.5], config="ppo: {seed: 1}\nenv: {name: copy}\n")
    path = write_report(first, second, out=tmp_path / "out")
    assert path == tmp_path / "out" / "comparison.html" and (tmp_path / "out" / "comparison.png").exists()
    assert not (first / "report.html").exists()
    page = Page(path)
    reward = page.figure("Reward")
    assert [(line.get("class"), len(line.get("points").split())) for line in reward.iter("polyline")] == [
        ("main c0", 2),
        ("main c1", 3),
    ]
    assert "step 2\nseed0: 0.1500\nseed1: 0.3500" in [title.text for title in reward.iter("title")]
    text = " ".join(page.text.split())
    assert "Settings that differ key seed0 seed1 ppo.seed 0 1 Curves" in text
    assert [one["run"] for one in page.samples()] == ["seed0", "seed1"]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name / "run", [0.5], samples=False) for name in "ab"]
    page = Page(write_report(*folders, out=tmp_path))
    assert all(str(folder) in page.text for folder in folders)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    run = make_run(tmp_path / "run", [0.5])
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["report", str(run)])
    report.main()
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="2"):
        report.main()
    assert "nowhere" in capsys.readouterr().err


def test_a_kill_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", [0.5])
    before = write_report(run).read_bytes()

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_report(run)
    assert (run / "report.html").read_bytes() == before


@pytest.mark.parametrize(
    "value, text",
    [
        (0.123456, "0.1235"),
        (-12.3456, "-12.35"),
        (0.0001234, "0.0001234"),
        (0.00001234, "1.234e-05"),
        (123456.0, "123456"),
        (1234567.0, "1.235e+06"),
        (0.0, "0"),
        (math.inf, "inf"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert charts.number(value) == text


@pytest.mark.parametrize(
    "low, high, texts",
    [
        (0.0, 0.84, ["0.0", "0.2", "0.4", "0.6", "0.8"]),
        (2.77, 3.45, ["2.8", "3.0", "3.2", "3.4"]),
        (-4.2, 4.2, ["-4", "-2", "0", "2", "4"]),
        (0.0, 2.1e-4, ["0", "0.5e-4", "1e-4", "1.5e-4", "2e-4"]),
        (0.0, 1.05e6, ["0", "0.2e6", "0.4e6", "0.6e6", "0.8e6", "1e6"]),
    ],
)
def test_ticks_are_round(low: float, high: float, texts: list[str]) -> None:
    assert [text for _, text in charts._ticks(low, high, 4)] == texts


def test_every_chart_uses_documented_metrics() -> None:
    assert {line.metric for chart in charts.CHARTS for line in chart.lines} <= set(METRICS)
