"""Prints the tables of docs/ppo_sentiment.md from the run folders given as arguments."""

import sys
from pathlib import Path

from trainers.logger import read_metrics

STAGES = ("gen", "old_log_prob", "update_actor", "update_weights", "step")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def trained(folder: Path) -> list[dict[str, float]]:
    return [step for step in read_metrics(folder / "metrics.jsonl") if "critic/score/mean" in step]


def rewards(steps: list[dict[str, float]]) -> list[float]:
    return [step["critic/score/mean"] for step in steps]


def row(folder: Path) -> list[str]:
    steps = trained(folder)
    reward = rewards(steps)
    seconds = [sum(step["timing_s/step"] for step in steps[: i + 1]) for i in range(len(steps))]
    smooth = [mean(reward[i - 2 : i + 1]) for i in range(2, len(reward))]  # smooth[i] ends with step i + 3
    passed = next(i for i, value in enumerate(smooth) if value > 0.6)
    after = [value for value, end in zip(smooth, seconds[2:], strict=True) if end >= 120]
    kl = [step["critic/kl/mean"] for step in steps]
    return [
        folder.name,
        f"{smooth[0]:.3f}",
        f"step {passed + 3}, {seconds[passed + 2]:.0f} s",
        f"{min(after):.3f}",
        f"{smooth[-1]:.3f}",
        f"{mean(kl[-3:]):.1f} ({max(kl):.1f})",
        f"{steps[0]['actor/entropy']:.2f} -> {steps[-1]['actor/entropy']:.2f}",
        f"{seconds[-1]:.0f} s",
        *(f"{mean([step[f'timing_s/{stage}'] for step in steps[1:]]):.2f}" for stage in STAGES),
    ]


def main() -> None:
    header = ["run", "first 3 steps", "3-step mean > 0.6 at", "lowest 3-step mean after 120 s", "last 3 steps"]
    header += ["KL a sequence, last 3 (highest step)", "entropy", "time", *(f"{stage} s" for stage in STAGES)]
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for folder in sys.argv[1:]:
        print("| " + " | ".join(row(Path(folder))) + " |")
    for folder in sys.argv[1:]:
        reward = rewards(trained(Path(folder)))
        blocks = [mean(reward[i : i + 5]) for i in range(0, len(reward), 5)]
        print(f"- {Path(folder).name}: " + " ".join(f"{block:.2f}" for block in blocks))


if __name__ == "__main__":
    main()
