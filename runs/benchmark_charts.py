"""Pictures of benchmarks: for each op and machine the bars of fastppo, its peers, and the floor, which is what any
implementation has to do at least: the matrix products by cuBLAS, or a copy of as many bytes.

    python runs/benchmark_charts.py --out docs/images benchmarks/baselines/nvidia-h200.json results/ppo_step.jsonl

FILES are those of runs/benchmarks.sh (.json), of bench_ppo_step.py and of bench_generate.py (.jsonl). Of an op's shapes
and dtypes one is drawn, which the panel names: that with the most peers, then the largest, then that of the longest
rows. Calls that measure the host are left out. The time of fastppo and of the floor is that beside the first peer; "x"
is the peer's time over fastppo's in the same rounds, so that it need not be the quotient of two bars. A clock is named
where a peer's is not that of fastppo.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from benchmarks_table import Row, duration, kinds, peer_name, read, where
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from bench_ppo_step import work_of
from machine import slug

MAX_BARS = 12  # of a picture; further panels go into the next
LOG_FROM = 30.0  # longest bar / shortest, from which on the scale is logarithmic
INK, OURS, PEER = "#757c8a", "#3b82f6", "#8b93a3"  # to be read on white and on black
ROW, HEAD, FOOT = 0.26, 0.34, 0.15  # inches: of a bar, of a panel's title and gap, of the picture's title and margins
LEFT = 0.01  # where titles begin, of the picture's width
PRODUCTS = "products: "
DIRECTIONS = {
    "fwd": "forward",
    "fwd+bwd": "forward and backward",
    "save": 'forward and backward, memory="save"',
    "recompute": 'forward and backward, memory="recompute"',
}


@dataclass(frozen=True)
class Bar:
    name: str
    us: float
    text: str
    color: str  # OURS, PEER, or INK: the floor


@dataclass(frozen=True)
class Panel:
    title: str
    bars: list[Bar]


def rows_of(file: Path) -> list[Row]:
    """The rows of a file of either kind, all in the form of benchmarks/conftest.py: ours beside one peer.

    Raises:
        ValueError: not a file of benchmarks, none with a time in it, or of several machines.
    """
    if file.suffix != ".jsonl":
        rows = read(file)
    else:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [generation(line) for line in lines if "case" in line] + steps([x for x in lines if "trainer" in x])
    if not rows:
        raise ValueError(f"{file} has no row in which fastppo was measured beside a peer")
    if len(machines := sorted({row["machine"] for row in rows})) > 1:
        raise ValueError(f"{file} must have the rows of one machine, got {', '.join(machines)}")
    return rows


def steps(lines: list[Row]) -> list[Row]:
    """TRL's whole steps, each beside fastppo's first run of the same work."""
    measured = [line for line in lines if "error" not in line]
    ours = {work_of(line): line for line in reversed(measured) if line["trainer"] == "fastppo"}
    rows = []
    for line in measured:
        own = ours.get(work_of(line))
        if line["trainer"] == "fastppo" or own is None:
            continue
        count, lengths = line["prompts"] * line["samples"], (line["prompt_tokens"], line["response_tokens"])
        rows.append(
            {
                "op": f"training step, {line['algorithm'].upper()}",
                "direction": f"{count} x ({lengths[0]} + {lengths[1]}) tokens",
                "shape": line["shape"],
                "dtype": line["trained_dtype"],
                "peer": " ".join(filter(None, ("TRL", line["versions"].get("trl"), line["variant"]))),
                "ours_us": own["step_s"] * 1e6,
                "peer_us": line["step_s"] * 1e6,
                "times_faster": line["step_s"] / own["step_s"],
                **{name: line[name] for name in ("machine", "versions")},
            }
        )
    return rows


def generation(line: Row) -> Row:
    """The embedded engine beside generate(); "x" is of tokens per second, since lengths differ where a token stops."""
    ours, peer = (statistics.median(line[name]["seconds"]) * 1e6 for name in ("fastppo", "transformers"))
    return {
        "op": f"generation, {line['case']}",
        "direction": f"{line['requests']} x ({line['prompt_tokens']} + {line['response_tokens']}) tokens",
        "peer": f"transformers {line['versions']['transformers']}",
        "ours_us": ours,
        "peer_us": peer,
        "times_faster": line["ratio"],
        **{name: line[name] for name in ("shape", "dtype", "machine", "versions")},
    }


def pictures(rows: list[Row]) -> dict[str, list[Panel]]:
    """Name of each picture -> its panels, of the rows of one machine."""
    timed = [row for row in rows if not row["direction"].endswith("host") and row.get("clock") != "wall"]
    sizes: dict[str, Counter[tuple[str, str]]] = {}
    for row in timed:
        sizes.setdefault(row["op"], Counter())[row["shape"], row["dtype"]] += 1
    drawn = {op: max(count, key=lambda kind: (count[kind], size_of(kind[0]))) for op, count in sizes.items()}
    shown = [same for same in kinds(timed) if (same[0]["shape"], same[0]["dtype"]) == drawn[same[0]["op"]]]
    order = list(dict.fromkeys((row["op"], row["direction"]) for row in timed))
    named: dict[str, list[list[Panel]]] = {}
    for same in sorted(shown, key=lambda same: order.index((same[0]["op"], same[0]["direction"]))):
        op, machine = re.split(r" [+] |, ", same[0]["op"])[0], same[0]["machine"]
        name, one = f"bench_{slug(op).replace('-', '_')}_{slug(machine)}", panel(same)
        parts = named.setdefault(name, [[]])
        if parts[-1] and sum(len(other.bars) for other in parts[-1]) + len(one.bars) > MAX_BARS:
            parts.append([])
        parts[-1].append(one)
    return {name + f"_{i}" * (i > 1): part for name, parts in named.items() for i, part in enumerate(parts, start=1)}


def size_of(shape: str) -> tuple[int, int]:
    """Numbers in all, and in a row."""
    sizes = [int(number) for number in re.findall(r"\d+", shape)]
    return math.prod(sizes), sizes[-1] if sizes else 0


def panel(same: list[Row]) -> Panel:
    """The floor, fastppo, then the peers from the fastest to the slowest."""
    first = same[0]
    bars = [bar(row) for row in same]
    bars = sorted(bars, key=lambda one: (one.color != INK, one.us))
    if first.get("copy_share"):
        copy = first["ours_us"] * first["copy_share"]
        bars.insert(0, Bar("a copy of as many bytes", copy, duration(copy), INK))
    ours = Bar("fastppo", first["ours_us"], duration(first["ours_us"]), OURS)
    bars.insert(sum(one.color == INK for one in bars), ours)
    direction = DIRECTIONS.get(first["direction"], first["direction"])
    return Panel(f"{first['op']}, {direction}, {first['shape']} {first['dtype']}", bars)


def bar(row: Row) -> Bar:
    name, us, times = row["peer"], row["peer_us"], row["times_faster"]
    clock = row["peer_clock"] if row.get("peer_clock") != row.get("clock") else "graph"
    if row.get("is_bound") and name.startswith(PRODUCTS):
        count = name.removeprefix(PRODUCTS)
        return Bar(f"{count} product{'s' * (count != '1')} by cuBLAS", us, duration(us), INK)
    factor = f"{times:.3g}" if times < 1000 else f"{float(f'{times:.3g}'):,.0f}"
    return Bar(peer_name(row), us, f"{duration(us, clock)}, {factor} x", PEER)


def is_log(panel: Panel) -> bool:
    times = [one.us for one in panel.bars]
    return max(times) > LOG_FROM * min(times)


def draw(title: str, panels: list[Panel], out: Path) -> None:
    counts = [len(one.bars) for one in panels]
    size = 6.4, ROW * sum(counts) + HEAD * len(panels) + FOOT
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=counts)
    figure.suptitle(title, x=LEFT, ha="left", color=INK, fontsize=10, fontweight="bold")
    for ax, one in zip(axes.flat, panels, strict=True):
        draw_panel(ax, one)
    buffer = BytesIO()
    figure.savefig(buffer, dpi=150, transparent=True)
    Image.open(buffer).quantize(64).save(out, optimize=True)


def draw_panel(ax: Axes, one: Panel) -> None:
    times, places = [x.us for x in one.bars], range(len(one.bars))
    if is_log(one):
        ax.set_xscale("log")
        begin = min(times) / 3
        ax.set_xlim(begin, begin * (max(times) / begin) ** 1.6)
    else:
        ax.set_xlim(0, max(times) * 1.5)
    for place, x in zip(places, one.bars, strict=True):
        look = {"fill": False, "hatch": "////", "edgecolor": INK} if x.color == INK else {"color": x.color}
        ax.barh(place, x.us, height=0.72, linewidth=0.8, **look)
        kind = {"color": OURS, "fontweight": "bold"} if x.color == OURS else {"color": INK}
        ax.annotate(x.text, (x.us, place), (4, 0), textcoords="offset points", va="center", fontsize=9, **kind)
    ax.set_ylim(len(one.bars) - 0.5, -0.5)
    ax.set_yticks(places, [x.name for x in one.bars], fontsize=9, color=INK)
    ax.set_xticks([])
    ax.minorticks_off()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    text = one.title + (" (logarithmic scale)" if is_log(one) else "")
    ax.set_title(" ", fontsize=9)  # makes room for the text, which begins further left than the bars
    sides = "figure fraction", "axes fraction"
    ax.annotate(text, (LEFT, 1), (0, 5), sides, "offset points", fontsize=9, color=INK).set_in_layout(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/charts"), help="folder of the pictures")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILES")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for file in arguments.files:
        try:
            rows = rows_of(file)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        for name, panels in pictures(rows).items():
            draw(where(rows[0]), panels, arguments.out / f"{name}.png")
            print(arguments.out / f"{name}.png")
            for one in panels:
                print(f"  {one.title}: {'; '.join(f'{x.name} {x.text}' for x in one.bars)}")


if __name__ == "__main__":
    main()
