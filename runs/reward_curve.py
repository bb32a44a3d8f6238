"""Mean reward over seconds of training, of one or several runs, as a picture.

python runs/reward_curve.py docs/images/first_run.png "one H200=results/h200" "two CPU cores=results/cpu"
"""

import argparse
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from trainers.logger import read_metrics

COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed")
INK = "#7f8694"  # to be read on white and on black


def curve(folder: Path) -> tuple[list[float], list[float], list[float]]:
    """Seconds since the first step began, the step's mean reward, and the mean of the last three steps."""
    steps = [step for step in read_metrics(folder / "metrics.jsonl") if "critic/score/mean" in step]
    rewards = [step["critic/score/mean"] for step in steps]
    last_three = [sum(part) / len(part) for i in range(len(rewards)) if (part := rewards[max(0, i - 2) : i + 1])]
    return list(accumulate(step["timing_s/step"] for step in steps)), rewards, last_three


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER")
    arguments = parser.parse_args()
    figure, axes = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    for colour, run in zip(COLOURS, arguments.runs, strict=False):
        label, _, folder = run.partition("=")
        seconds, rewards, smooth = curve(Path(folder))
        axes.plot(seconds, rewards, ".", color=colour, alpha=0.35)
        axes.plot(seconds, smooth, color=colour, label=label)
    axes.axhline(0.6, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds of training", color=INK)
    axes.set_ylabel("mean reward", color=INK)
    axes.tick_params(colors=INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, labelcolor=INK, loc="lower right")
    figure.savefig(arguments.out, dpi=150, transparent=True)


if __name__ == "__main__":
    main()
