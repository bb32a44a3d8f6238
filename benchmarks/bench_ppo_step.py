"""Whole training steps on one device: fastppo's trainers beside TRL's, on random weights of a known shape.

    python benchmarks/bench_ppo_step.py --shape qwen3-0.6b --algorithm rloo --trainer fastppo
    python benchmarks/bench_ppo_step.py --shape qwen3-0.6b --all --liger --peers SITE --ppo-peers SITE112
    python benchmarks/bench_ppo_step.py --table results/ppo_step.jsonl

The same for both trainers: model, random prompts, responses of one length (nothing stops them), compute dtype, one
optimizer step over the whole rollout, micro-batches, a KL to a reference model, whether gradients are checkpointed,
and the reward: a cheap function of the text for RLOO and GRPO, a sequence classifier of the policy's shape on the
device for PPO, which has a critic of its own too. What differs by design is in the row: dtypes of parameters and of
AdamW's state.

A step's time is that from the end of one to the end of the next, with the device idle at both; the median of those
after the warm-up is shown. `--all` runs every trainer and algorithm, each in a process of its own, so that memory and
allocator of one do not touch the next. A run is one JSON line of --out. docs/performance.md says what the columns are.

TRL is taken from --peers (RLOO, GRPO: trl 1.16.0) and --ppo-peers (PPO: trl 1.12.0), folders made by
`pip install --no-deps --target`, or where it is installed.
"""

import argparse
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TRAINERS, ALGORITHMS = ("fastppo", "trl"), ("rloo", "grpo", "ppo")
SHAPES = ("tiny", "qwen3-0.6b", "llama-1b")
PACKAGES = ("accelerate", "datasets", "liger-kernel", "transformers", "trl")
SAME = ("shape", "algorithm", "prompts", "samples", "prompt_tokens", "response_tokens", "gradient_checkpointing")


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = described.add_argument
    add("--all", action="store_true", help="every pair of trainer and algorithm, or of those given")
    add("--trainer", choices=TRAINERS, nargs="+")
    add("--algorithm", choices=ALGORITHMS, nargs="+")
    add("--shape", choices=SHAPES, default="qwen3-0.6b")
    add("--prompts", type=int, default=16, help="prompts a step; PPO takes prompts x samples different ones")
    add("--samples", type=int, default=4, help="responses to each prompt")
    add("--prompt-tokens", type=int, default=128)
    add("--response-tokens", type=int, default=256)
    add("--micro-tokens", type=int, help="tokens of a micro-batch; default: a quarter of the rollout")
    add("--gradient-checkpointing", action="store_true")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees one")
    add("--steps", type=int, default=7, help="those of the warm-up included")
    add("--warmup", type=int, default=2, help="steps that are not counted")
    add("--seconds", type=float, default=1e9, help="of training, after which no further step is begun")
    add("--liger", action="store_true", help="TRL's GRPO with Liger's kernels")
    add("--fastppo", metavar="KEY=VALUE", action="append", default=[], help="a setting of fastppo; may be repeated")
    add("--trl", metavar="KEY=VALUE", action="append", default=[], help="a field of TRL's configuration; likewise")
    add("--peers", type=Path, help="folder put first on sys.path for TRL")
    add("--ppo-peers", type=Path, help="folder put before --peers for TRL's PPO")
    add("--folder", type=Path, default=Path("results/bench-step"), help="for models, prompts and runs")
    add("--out", type=Path, default=Path("results/ppo_step.jsonl"), help="a line is added for each run")
    add("--table", type=Path, metavar="JSONL", help="print the table of earlier runs, and run nothing")
    return described


def main(argv: list[str]) -> int:
    described = parser()
    args = described.parse_args(argv)
    if args.table:
        print(table(read(args.table)))
        return 0
    for key, value in {"prompts": 1, "samples": 1, "prompt_tokens": 1, "response_tokens": 1, "warmup": 0}.items():
        if getattr(args, key) < value:
            described.error(f"--{key.replace('_', '-')} must be at least {value}, got {getattr(args, key)}")
    if args.steps <= args.warmup:
        described.error(f"--steps={args.steps} leaves nothing after --warmup={args.warmup}")
    sequences, length = args.prompts * args.samples, args.prompt_tokens + args.response_tokens
    if args.micro_tokens is None:
        args.micro_tokens = length * max(sequences // 4, 1)
    if args.micro_tokens < length or sequences % (args.micro_tokens // length):
        described.error(
            f"--micro-tokens={args.micro_tokens} holds {args.micro_tokens // length} sequences of {length} tokens, "
            f"which must divide the {sequences} of a step"
        )
    pairs = [(t, a) for a in args.algorithm or ALGORITHMS for t in args.trainer or TRAINERS]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.all:
        return run_all(args, pairs)
    if len(pairs) > 1:
        described.error("one --trainer and one --algorithm, or --all")
    row = measured(args, *pairs[0], command=shlex.join(["python", "benchmarks/bench_ppo_step.py", *argv]))
    write(args.out, row)
    print(table([row]))
    return 0


def measured(args: argparse.Namespace, trainer: str, algorithm: str, command: str) -> dict[str, Any]:
    """One run in this process, as a row."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: everything is in a folder
    if trainer == "trl":
        folders = [args.ppo_peers, args.peers] if algorithm == "ppo" else [args.peers]
        sys.path[:0] = [str(folder.absolute()) for folder in folders if folder]
    import machine
    import torch
    from models import model_folder
    from step import Work

    numbers = ("shape", "prompts", "samples", "prompt_tokens", "response_tokens", "micro_tokens")
    work = {key: getattr(args, key) for key in (*numbers, "gradient_checkpointing", "steps", "warmup", "seconds")}
    cuda = torch.cuda.is_available() if args.device is None else args.device == "cuda"
    model = model_folder(args.shape, torch.bfloat16 if cuda else torch.float32, args.folder)
    overrides = args.fastppo if trainer == "fastppo" else args.trl
    if trainer == "fastppo":
        import step_fastppo

        found = step_fastppo.run(Work(algorithm=algorithm, **work), model, args.folder, cuda=cuda, overrides=overrides)
        variant = list(overrides)
    else:
        import step_trl

        liger = args.liger and algorithm == "grpo"
        found = step_trl.run(
            Work(algorithm=algorithm, **work), model, args.folder, cuda=cuda, liger=liger, overrides=overrides
        )
        variant = ["Liger"] * liger + list(overrides)
    return {
        "trainer": trainer,
        "algorithm": algorithm,
        "variant": " ".join(variant),
        **work,
        **found,
        "machine": machine.card() if cuda else machine.cpu_model(),
        "driver_and_clocks": machine.card_state() if cuda else {},
        "versions": machine.versions() | versions(),
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
    }


def run_all(args: argparse.Namespace, pairs: list[tuple[str, str]]) -> int:
    """Each pair in a fresh process; then the table. A run that fails is a row that says so, and exit code 1."""
    before = len(read(args.out))
    for trainer, algorithm in pairs:
        print(f"--- {trainer} {algorithm}", flush=True)
        done = len(read(args.out))
        command = [sys.executable, __file__, *child_arguments(args, trainer, algorithm)]
        code = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}).returncode
        if len(read(args.out)) == done:
            keys = {key: getattr(args, key) for key in SAME if key != "algorithm"}
            error = f"exit code {code}"
            write(args.out, {"trainer": trainer, "algorithm": algorithm, "variant": "", **keys, "error": error})
    rows = read(args.out)[before:]
    print(table(rows))
    return int(any("error" in row for row in rows))


def child_arguments(args: argparse.Namespace, trainer: str, algorithm: str) -> list[str]:
    words = ["--trainer", trainer, "--algorithm", algorithm]
    for name in ("shape", "prompts", "samples", "prompt-tokens", "response-tokens", "micro-tokens", "steps", "warmup"):
        words += [f"--{name}", str(getattr(args, name.replace("-", "_")))]
    for name in ("device", "seconds", "peers", "ppo-peers", "folder", "out"):
        value = getattr(args, name.replace("-", "_"))
        words += [f"--{name}", str(value)] if value is not None else []
    words += [f"--{name}" for name in ("gradient-checkpointing", "liger") if getattr(args, name.replace("-", "_"))]
    own = args.fastppo if trainer == "fastppo" else args.trl
    return words + [word for text in own for word in (f"--{trainer}", text)]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; of runs of one kind the last. The ratios are to fastppo's run of the same work."""
    header = ("shape, algorithm", "trainer", "step s (min to max)", "generation s", "rest s", "tokens/s", "MFU")
    header += ("peak GiB", "device GiB", "refit bytes", "step / fastppo's", "peak / fastppo's")
    kept = {(*work_of(row), row["trainer"], row["variant"]): row for row in rows}
    ours = {work_of(row): row for row in reversed(kept.values()) if row["trainer"] == "fastppo" and "error" not in row}
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in kept.values():
        versions = row.get("versions", {})
        name = " ".join(filter(None, (row["trainer"], versions.get(row["trainer"]), row["variant"])))
        checkpointed = ", gradients checkpointed" if row["gradient_checkpointing"] else ""
        cells = [f"{row['shape']}, {row['algorithm']}{checkpointed}", name]
        if "error" in row:
            cells += [row["error"], *[""] * (len(header) - 3)]
        else:
            generation = row["stages_s"].get("gen", 0.0)
            own = ours.get(work_of(row), {})
            cells += [
                f"{row['step_s']:.3g} ({min(row['steps_s']):.3g} to {max(row['steps_s']):.3g})",
                f"{generation:.3g}",
                f"{row['step_s'] - generation:.3g}",
                f"{row['tokens_per_s']:,.0f}",
                shown(row.get("mfu"), ".1%"),
                shown(row.get("peak_gib"), ".1f"),
                shown(row.get("device_gib"), ".1f"),
                shown(row["refit_bytes"], ",.0f"),
                ratio(row["step_s"], own.get("step_s")),
                ratio(row.get("peak_gib"), own.get("peak_gib")),
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def work_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in SAME)


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def ratio(value: float | None, own: float | None) -> str:
    return "-" if not value or not own else f"{value / own:.2f}"


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
