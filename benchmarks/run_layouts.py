"""Whole training steps of one model by how it is spread over processes, beside one process: fastppo's trainers alone.

    python benchmarks/run_layouts.py --shape llama-1b --ranks 2
    python benchmarks/run_layouts.py --shape tiny --ranks 2 --dtype float32 --layouts one fully_shard tensor_parallel

The work of a step is that of bench_ppo_step.py, with gradients checkpointed. Each layout is a run of the public command
(`python -m`, `torchrun -m`) and one JSON line of --out. Times are the trainer's own `timing_s/step`, its median after
the warm-up; memory is the first rank's. The last column is the largest relative difference from the first layout in any
step, of score, reward after KL, entropy and gradient norm. In float32 all layouts sample the same tokens, and it is
rounding; in bfloat16 they soon sample others, and it says that nothing is far off.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SAME = ("critic/score/mean", "critic/rewards/mean", "actor/entropy", "actor/grad_norm")
ON_MEGATRON = {
    "policy.backend": "megatron",
    "policy.packing": "false",
    "policy.gradient_checkpointing": "false",
    "policy.megatron.recompute": "full",
}
# What a layout has beside the settings of one process; `N` is the number of ranks.
LAYOUTS: dict[str, dict[str, str]] = {
    "one": {},
    "data_parallel": {},
    "fully_shard": {"policy.fully_shard": "true"},
    "megatron": ON_MEGATRON,
    "tensor_parallel": ON_MEGATRON | {"policy.megatron.tensor_model_parallel_size": "N"},
    "sequence_parallel": ON_MEGATRON
    | {"policy.megatron.tensor_model_parallel_size": "N", "policy.megatron.sequence_parallel": "true"},
    "pipeline_parallel": ON_MEGATRON | {"policy.megatron.pipeline_model_parallel_size": "N"},
}


def main(argv: list[str]) -> int:
    described = parser()
    args = described.parse_args(argv)
    if not 0 <= args.warmup < args.steps:
        described.error(f"--warmup={args.warmup} must be at least 0 and less than --steps={args.steps}")
    if args.ranks < 2 and args.layouts != ["one"]:
        described.error(f"--ranks must be at least 2, got {args.ranks}")
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: everything is in a folder
    import torch
    from models import model_folder

    cuda = torch.cuda.is_available() if args.device is None else args.device == "cuda"
    dtype = args.dtype or ("bfloat16" if cuda else "float32")
    model = model_folder(args.shape, getattr(torch, dtype), args.folder)
    rows: list[dict[str, Any]] = []
    for layout in args.layouts:
        row = {"layout": layout, "shape": args.shape, "dtype": dtype, "ranks": 1 if layout == "one" else args.ranks}
        row["warmup"] = args.warmup
        rows.append(row | measured(args, layout, model, cuda=cuda, dtype=dtype))
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    return int(any("error" in row for row in rows))


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = described.add_argument
    add("--shape", default="llama-1b")
    add("--ranks", type=int, default=2)
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    add("--prompts", type=int, default=16)
    add("--samples", type=int, default=4, help="responses to each prompt")
    add("--prompt-tokens", type=int, default=128)
    add("--response-tokens", type=int, default=256)
    add("--micro-tokens", type=int, default=12288)
    add("--steps", type=int, default=6, help="those of the warm-up included")
    add("--warmup", type=int, default=2, help="steps that are not counted")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees one")
    add("--seconds", type=float, default=300, help="that one layout may take")
    add("--folder", type=Path, default=Path("results/layouts"), help="for models, prompts and runs")
    add("--out", type=Path, default=Path("results/layouts.jsonl"), help="a line is added for each layout")
    return described


def measured(args: argparse.Namespace, layout: str, model: Path, *, cuda: bool, dtype: str) -> dict[str, Any]:
    """A run of the public command in processes of its own."""
    import step_fastppo
    from step import Work

    numbers = ("shape", "prompts", "samples", "prompt_tokens", "response_tokens", "micro_tokens", "steps", "warmup")
    work = Work(
        algorithm="rloo", gradient_checkpointing=True, seconds=args.seconds, **{n: getattr(args, n) for n in numbers}
    )
    folder = args.folder.absolute() / layout
    ranks = 1 if layout == "one" else args.ranks
    own = {key: value.replace("N", str(args.ranks)) for key, value in LAYOUTS[layout].items()} | {"policy.dtype": dtype}
    settings = dict(pair.split("=", 1) for pair in step_fastppo.settings(work, model.absolute(), folder, cuda)) | own
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command += ["trainers.reinforce", *(f"{key}={value}" for key, value in settings.items())]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    log, environment = folder / "log.txt", os.environ | {"PYTHONPATH": path}
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=args.seconds
            ).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {args.seconds:g} s"}
    if code:
        print(log.read_text()[-3000:], file=sys.stderr)
        return {"error": f"exit code {code}"}
    lines = [json.loads(line) for line in (Path(settings["logger.run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["timing_s/step"] for line in lines]
    return {
        "step_s": statistics.median(seconds[args.warmup :]),
        "steps_s": seconds,
        "gen_s": statistics.median([line["timing_s/gen"] for line in lines][args.warmup :]),
        "peak_gib": lines[-1].get("perf/max_memory_allocated_gb"),
        "metrics": {name: [line[name] for line in lines] for name in SAME},
        "settings": own,
        "command": shlex.join(command),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| layout | ranks | step s (fastest to slowest) | generation s | peak GiB of a rank | largest difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["layout"], str(row["ranks"])]
        if "error" in row:
            cells += [row["error"], "", "", ""]
        else:
            counted = row["steps_s"][row["warmup"] :]
            peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
            cells += [f"{row['step_s']:.3g} ({min(counted):.3g} to {max(counted):.3g})", f"{row['gen_s']:.3g}", peak]
            cells += [f"{difference(row, rows[0]):.1e}" if "metrics" in rows[0] else "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def difference(row: dict[str, Any], first: dict[str, Any]) -> float:
    """Over steps and metrics, relative to the metric's largest value."""
    found = []
    for name, right in first["metrics"].items():
        scale = max(map(abs, right)) or 1.0
        found += [abs(a - b) / scale for a, b in zip(row["metrics"][name], right, strict=True)]
    return max(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
