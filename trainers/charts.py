"""The curves of a run: which metrics share a chart, and charts as inline SVG (no script) and as one PNG.

Colours, lines and dark mode come from the style sheet of templates/report.html through class names. Pointing at a step
shows its numbers (SVG's own `<title>`). A value that is not finite breaks its line and leaves a red cross at the top.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from markupsafe import Markup, escape

from trainers.extras import require
from trainers.logger import METRICS, STAGES, stage_stack


@dataclass(frozen=True)
class Line:
    metric: str
    label: str
    window: int = 1  # mean of this many steps, ending at each
    style: str = "main"  # "main", "faint" or "dots"


@dataclass(frozen=True)
class Chart:
    """The first line is the one that a comparison of several runs draws."""

    title: str
    lines: tuple[Line, ...]


def _spread(prefix: str) -> tuple[Line, ...]:
    return (
        Line(f"{prefix}/mean", "mean"),
        Line(f"{prefix}/max", "max", style="faint"),
        Line(f"{prefix}/min", "min", style="faint"),
    )


def _pair(first: str, first_label: str, second: str, second_label: str) -> tuple[Line, ...]:
    return Line(first, first_label), Line(second, second_label)


SCORE = "critic/score/mean"
CHARTS = (
    Chart(
        "Reward",
        (
            Line(SCORE, "3-step mean", window=3),
            Line(SCORE, "each step", style="faint"),
            Line("val/score/mean", "validation", style="dots"),
        ),
    ),
    Chart("KL to the reference", (Line("critic/kl/mean", "mean"), Line("critic/kl/max", "max", style="faint"))),
    Chart("Entropy", (Line("actor/entropy", "policy"),)),
    Chart(
        "Clip fraction",
        (
            Line("actor/pg_clipfrac", "clipped"),
            Line("actor/pg_clipfrac_high", "above"),
            Line("actor/pg_clipfrac_low", "below"),
        ),
    ),
    Chart("KL of the update, old to new policy", (Line("actor/ppo_kl", "policy"),)),
    Chart("Policy loss", (Line("actor/pg_loss", "policy"),)),
    Chart("Response length", _spread("response_length")),
    Chart("Responses cut at the limit", (Line("response_length/clip_ratio", "cut"),)),
    Chart("Turns of a dialogue", (Line("rollout/turns_mean", "mean"), Line("rollout/turns_max", "max", style="faint"))),
    Chart(
        "How dialogues end",
        _pair("rollout/natural_termination_rate", "environment", "rollout/truncation_rate", "length limit"),
    ),
    Chart("Reward after KL", _spread("critic/rewards")),
    Chart("Value loss", (Line("critic/vf_loss", "critic"),)),
    Chart("Explained variance of the returns", (Line("critic/vf_explained_var", "critic"),)),
    Chart("Values and returns", _pair("critic/values/mean", "values", "critic/returns/mean", "returns")),
    Chart("Advantages", _spread("critic/advantages")),
    Chart("Gradient norm", _pair("actor/grad_norm", "policy", "critic/grad_norm", "critic")),
    Chart("Learning rate", _pair("actor/lr", "policy", "critic/lr", "critic")),
    Chart("Throughput", (Line("perf/throughput", "all tokens"),)),
    Chart(
        "Sampler against trainer, |p − p′|",
        (
            Line("training/rollout_probs_diff_mean", "mean"),
            Line("training/rollout_probs_diff_max", "max", style="faint"),
        ),
    ),
    Chart(
        "First minibatch, |ratio − 1|",
        (Line("actor/first_ratio_err_mean", "mean"), Line("actor/first_ratio_err_max", "max", style="faint")),
    ),
)

Steps = list[dict[str, Any]]
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Series:
    """One drawn line: its legend, its CSS classes, its points."""

    label: str
    style: str
    points: Points


def series(chart: Chart, runs: dict[str, Steps]) -> list[Series]:
    """What there is to draw: every line of a single run, or the first line of each of several runs. Empty ones are left
    out."""
    if len(runs) == 1:
        (steps,) = runs.values()
        colors = {line: i for i, line in enumerate(line for line in chart.lines if line.style != "faint")}
        drawn = [
            Series(line.label, f"{line.style} c{colors.get(line, 0)}", points(steps, line)) for line in chart.lines
        ]
    else:
        line = chart.lines[0]
        drawn = [Series(name, f"main c{i % 8}", points(steps, line)) for i, (name, steps) in enumerate(runs.items())]
    return [one for one in drawn if one.points]


def points(steps: Steps, line: Line) -> Points:
    """(step, value) where the metric exists; with a window, the mean of its last `window` values."""
    found = [(step["step"], float(step[line.metric])) for step in steps if step.get(line.metric) is not None]
    values = [value for _, value in found]
    means = [
        sum(part) / len(part) for part in (values[max(0, i + 1 - line.window) : i + 1] for i in range(len(values)))
    ]
    return [(step, mean) for (step, _), mean in zip(found, means, strict=True)]


# Geometry of an SVG chart, in its own units (about one CSS pixel each).
LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 48, 18, 10, 34, 210
MAX_POINTS = 500  # more are thinned to the extremes of each bucket, so that no spike is lost
MAX_POINTERS = 250  # columns that answer to the mouse


def line_chart(chart: Chart, runs: dict[str, Steps], *, width: int = 400) -> Markup | None:
    """A `<figure>` of one chart, or None where no run has its metrics."""
    drawn = series(chart, runs)
    values = [value for one in drawn for _, value in one.points if math.isfinite(value)]
    if not drawn:
        return None
    frame = Frame.around([step for one in drawn for step, _ in one.points], values, width)
    body = [frame.axes()]
    for one in sorted(drawn, key=lambda one: "main" in one.style):
        shown = _thin(one.points)
        for part in _finite_parts(shown):
            if "dots" in one.style or len(part) == 1:
                body += [
                    f'<circle class="{one.style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in map(frame.at, part)
                ]
            if "dots" not in one.style and len(part) > 1:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(frame.at, part))
                body.append(f'<polyline class="{one.style}" points="{path}"/>')
        body += [
            f'<text class="bad" x="{frame.x(step):.1f}" y="{TOP + 9}">×</text>'
            for step, value in shown
            if not math.isfinite(value)
        ]
    lookup = [(one.label, dict(one.points)) for one in drawn]
    body.append(frame.pointers(lambda step: [f"{label}: {number(at[step])}" for label, at in lookup if step in at]))
    legend = [(one.label, one.style) for one in drawn] if len(runs) == 1 and len(drawn) > 1 else []
    which = chart.lines[0].label if len(runs) > 1 and len(chart.lines) > 1 else ""
    note = ", ".join(filter(None, (unit(chart), which)))
    return _figure(chart.title, note, legend, width, body)


def stage_chart(steps: Steps, *, title: str = "Stage times", width: int = 820) -> Markup | None:
    """Seconds of every stage, stacked: the top edge is the whole step."""
    xs, stack = stage_stack(steps)
    if not xs:
        return None
    stage_names = (*STAGES, "other")
    totals = [sum(column) for column in zip(*stack.values(), strict=True)]
    # Long runs are drawn as means of neighbouring steps, which keeps the sums.
    size = math.ceil(len(xs) / MAX_POINTS)
    groups = [range(i, min(i + size, len(xs))) for i in range(0, len(xs), size)]
    edges = [*(xs[group[0]] - 0.5 for group in groups), xs[-1] + 0.5]
    base = [0.0] * len(groups)
    frame = Frame.around(edges, [0.0, *(sum(totals[i] for i in group) / len(group) for group in groups)], width)
    body = [frame.axes()]
    for stage, times in stack.items():
        top = [low + sum(times[i] for i in group) / len(group) for low, group in zip(base, groups, strict=True)]
        outline = [corner for i, y in enumerate(top) for corner in ((edges[i], y), (edges[i + 1], y))]
        floor = [corner for i, y in enumerate(base) for corner in ((edges[i], y), (edges[i + 1], y))][::-1]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(frame.at, outline + floor))
        body.append(f'<polygon class="area s{stage_names.index(stage)}" points="{path}"/>')
        base = top
    index = {step: i for i, step in enumerate(xs)}

    def texts(step: int) -> list[str]:
        at = index[step]
        return [
            f"whole step: {totals[at]:.2f} s",
            *(f"{stage}: {times[at]:.2f} s" for stage, times in stack.items() if times[at]),
        ]

    body.append(frame.pointers(texts, xs))
    legend = [(stage, f"area s{stage_names.index(stage)}") for stage in stack]
    return _figure(title, "s", legend, width, body)


@dataclass(frozen=True)
class Frame:
    """The plot area: its data ranges and the way from data to coordinates."""

    steps: list[int]
    x0: float
    x1: float
    y0: float
    y1: float
    width: int

    @classmethod
    def around(cls, xs: Iterable[float], values: Iterable[float], width: int) -> "Frame":
        xs, values = sorted(set(xs)), list(values) or [0.0, 1.0]
        low, high = min(values), max(values)
        if 0 < low < 0.6 * high or low == 0 <= high:
            low, high = 0.0, high * 1.05 or 1.0
        elif low == high:
            pad = abs(low) * 0.1
            low, high = low - pad, high + pad
        else:
            low, high = low - 0.06 * (high - low), high + 0.06 * (high - low)
        x0, x1 = (xs[0], xs[-1]) if len(xs) > 1 else (xs[0] - 1, xs[0] + 1)
        return cls([int(x) for x in xs], x0, x1, low, high, width)

    def x(self, step: float) -> float:
        return LEFT + (step - self.x0) / (self.x1 - self.x0) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (self.y1 - value) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def at(self, point: tuple[float, float]) -> tuple[float, float]:
        return self.x(point[0]), self.y(point[1])

    def axes(self) -> str:
        parts = []
        for tick, text in _ticks(self.y0, self.y1, 4):
            y, kind = self.y(tick), "zero" if tick == 0 else "grid"
            parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 4:.1f}">{text}</text>')
        for tick, text in _ticks(self.x0, self.x1, self.width // 80, whole=True):
            parts.append(f'<text class="tick mid" x="{self.x(tick):.1f}" y="{HEIGHT - BOTTOM + 15}">{text}</text>')
        middle = (LEFT + self.width - RIGHT) / 2
        return "".join([*parts, f'<text class="tick mid" x="{middle:.1f}" y="{HEIGHT - 4}">step</text>'])

    def pointers(self, texts: Callable[[int], list[str]], steps: list[int] | None = None) -> str:
        """Invisible columns, one a step (or one for several neighbours), whose `<title>` has the numbers."""
        steps = steps or self.steps
        steps = steps[:: math.ceil(len(steps) / MAX_POINTERS)]
        middles = [(self.x(a) + self.x(b)) / 2 for a, b in zip(steps, steps[1:], strict=False)]
        edges = [LEFT, *middles, self.width - RIGHT]
        parts = []
        for i, step in enumerate(steps):
            text = escape("\n".join([f"step {step}", *texts(step)]))
            box = f'x="{edges[i]:.1f}" y="{TOP}" width="{edges[i + 1] - edges[i]:.1f}" height="{HEIGHT - TOP - BOTTOM}"'
            parts.append(f'<rect class="point" {box}><title>{text}</title></rect>')
        return "".join(parts)


def curves_png(runs: dict[str, Steps]) -> bytes:
    """The main charts as one picture, for a README or a chat."""
    require("matplotlib")
    from matplotlib.figure import Figure

    titles = ("Reward", "KL to the reference", "Entropy", "Clip fraction", "Response length")
    more = ("Explained variance of the returns", "Value loss", "Throughput")
    chosen = [(chart, series(chart, runs)) for chart in CHARTS if chart.title in (*titles, *more)]
    chosen = [(chart, drawn) for chart, drawn in chosen if drawn]
    stacks = [stage_stack(steps) for steps in runs.values()]
    with_stages = len(runs) == 1 and bool(stacks[0][0])
    count = len(chosen) + with_stages
    rows = max(1, math.ceil(count / 3))
    figure = Figure(figsize=(12, 3 * rows), layout="constrained", dpi=110)
    axes = list(figure.subplots(rows, 3, squeeze=False).flat)
    for ax, (chart, drawn) in zip(axes, chosen, strict=False):
        ax.set_title(chart.title + (f" ({unit(chart)})" if unit(chart) else ""), fontsize=10)
        for one in drawn:
            color = f"C{int(one.style.rpartition('c')[2])}"
            xs, ys = zip(*one.points, strict=True)
            marker = "o" if "dots" in one.style or len(xs) == 1 else ""
            alpha, line_style = (0.35 if "faint" in one.style else 1.0), ("" if "dots" in one.style else "-")
            ax.plot(
                xs, ys, color=color, alpha=alpha, marker=marker, markersize=4, linestyle=line_style, label=one.label
            )
        if len(drawn) > 1:
            ax.legend(fontsize=8, frameon=False)
    if with_stages:
        numbers, stack = stacks[0]
        ax = axes[len(chosen)]
        ax.set_title("Stage times (s)", fontsize=10)
        edges, bottom = [*(x - 0.5 for x in numbers), numbers[-1] + 0.5], [0.0] * len(numbers)
        for i, (stage, times) in enumerate(stack.items()):
            top = [low + time for low, time in zip(bottom, times, strict=True)]
            color = "0.75" if stage == "other" else f"C{i}"
            ax.stairs(top, edges, baseline=bottom, fill=True, color=color, label=stage)
            bottom = top
        ax.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=4)
    for ax in axes[:count]:
        ax.set_xlabel("step", fontsize=9)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.25)
    for ax in axes[count:]:
        ax.set_axis_off()
    if not count:
        axes[1].text(0.5, 0.5, "No step has been logged yet.", ha="center")
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def charts_of(runs: dict[str, Steps]) -> list[Chart]:
    """The fixed charts, then one for each metric of the environment's, its rewards' or the caller's own."""
    names = dict.fromkeys(name for steps in runs.values() for step in steps for name in step)
    own = [
        name
        for name in names
        if name.startswith(("env/", "val/metrics/")) or re.fullmatch(r"(critic|val)/score/.+/mean", name)
    ]
    return [
        *CHARTS,
        *(Chart(name, (Line(name, "mean", style="dots" if name.startswith("val/") else "main"),)) for name in own),
    ]


def unit(chart: Chart) -> str:
    return METRICS.get(chart.lines[0].metric, "")


def number(value: float) -> str:
    """Four significant digits, without exponents where they can be avoided."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if 1e-4 <= abs(value) < 1e6:
        return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"
    return f"{value:.3e}"


def _figure(title: str, note: str, legend: list[tuple[str, str]], width: int, body: list[str]) -> Markup:
    keys = "".join(f'<span class="key"><i class="{style}"></i>{escape(label)}</span>' for label, style in legend)
    caption = f"<b>{escape(title)}</b> <small>{escape(note)}</small>"
    svg = f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    return Markup(f'<figure><figcaption>{caption}<span class="legend">{keys}</span></figcaption>{svg}</figure>')


def _thin(line: Points) -> Points:
    if len(line) <= MAX_POINTS:
        return line
    size = math.ceil(len(line) / MAX_POINTS) * 2
    groups = [line[i : i + size] for i in range(0, len(line), size)]
    kept = [{*_extremes(group), *(p for p in group if not math.isfinite(p[1]))} for group in groups]
    return sorted(set().union(*kept))


def _extremes(group: Points) -> Points:
    finite = [point for point in group if math.isfinite(point[1])]
    return [min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])] if finite else []


def _finite_parts(line: Points) -> list[Points]:
    parts: list[Points] = [[]]
    for point in line:
        if math.isfinite(point[1]):
            parts[-1].append(point)
        else:
            parts.append([])
    return [part for part in parts if part]


def _ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[tuple[float, str]]:
    """Round values inside [low, high] at equal distances of 1, 2 or 5 times a power of ten, with their texts."""
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    steps = [factor * power for factor in (0.5, 1, 2, 5, 10)]
    step = min(steps, key=lambda step: abs((high - low) / step - count))
    step = max(step, 1.0) if whole else step
    values = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    largest = max((abs(value) for value in values), default=0.0)
    if largest and not 1e-3 <= largest < 1e5:
        exponent = math.floor(math.log10(largest) + 1e-9)
        return [(value, f"{value / 10.0**exponent:.3g}e{exponent}" if value else "0") for value in values]
    return [(value, f"{value:.{digits}f}") for value in values]
