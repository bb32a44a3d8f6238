"""Learning curves of fastppo's PPO and RLOO beside TRL's RLOOTrainer on two tasks; see docs/learning_quality.md.

    python runs/learning_quality.py --trainer trl-rloo --task sentiment --seed 0 --samples 640 --out results.jsonl
    python runs/learning_quality.py --draw results.jsonl --picture curves.png      # a table and a picture

Model, trained layers, dtype, prompts, reward function, samples a rollout, optimizer steps a rollout, AdamW, learning
rate with its warm-up, KL coefficient, temperature and length limit are the same for all. A run is one JSON line; its
curve has a point for each rollout, noted when the rollout is rewarded.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

TRAINERS = ("fastppo-ppo", "fastppo-rloo", "trl-rloo")

# What both trainers of fastppo read; TRL's arguments are made from it. `ppo` stands for the block of the algorithm.
COMMON = {
    "policy.dtype": "float32",
    "policy.generation.temperature": 1.0,
    "data.max_prompt_length": 32,
    "checkpointing.enabled": False,
    "logger.tensorboard": False,
    "logger.report": False,
    "logger.num_samples_to_print": 0,
}
TASKS: dict[str, dict[str, Any]] = {
    "copy": COMMON
    | {
        "env.name": "copy",
        "env.size": 64,
        "policy.num_layers_unfrozen": -1,
        "policy.train_global_batch_size": 64,
        "policy.train_micro_batch_size": 64,
        "policy.logprob_batch_size": 128,
        "policy.optimizer.lr": 3e-3,
        "policy.scheduler.warmup_steps": 4,
        "policy.generation.max_new_tokens": 4,
        "policy.generation.max_batch_size": 128,
        "loss_fn.reference_policy_kl_penalty": 0.03,
        "ppo.num_prompts_per_step": 16,
        "ppo.num_generations_per_prompt": 8,
    },
    "sentiment": COMMON
    | {
        "env.name": "sentiment",
        "policy.num_layers_unfrozen": 8,
        "policy.train_global_batch_size": 8,
        "policy.train_micro_batch_size": 8,
        "policy.logprob_batch_size": 8,
        "policy.optimizer.lr": 2e-4,
        "policy.scheduler.warmup_steps": 8,
        "policy.generation.max_new_tokens": 16,
        "policy.generation.max_batch_size": 64,
        "loss_fn.reference_policy_kl_penalty": 0.05,
        "ppo.num_prompts_per_step": 8,
        "ppo.num_generations_per_prompt": 4,
    },
}
VALUE = {"copy": {"value.optimizer.lr": 3e-3}, "sentiment": {}}
# As TRL: a clipped ratio, the sum over a response's tokens, the mean over responses.
RLOO = {"loss_fn.type": "ppo", "loss_fn.aggregation": "seq_mean_token_sum"}


class Recorder:
    """The task's environment; it notes samples so far, seconds so far and mean reward of each rollout."""

    def __init__(self, environment: Any, title: str, limit: float):
        self.environment, self.title, self.limit = environment, title, limit
        self.default_model = environment.default_model
        self.curve: list[dict[str, float]] = []
        self.start = time.perf_counter()

    def prompts(self) -> list[Any]:
        return self.environment.prompts()

    def score(self, samples: Any) -> list[float]:
        rewards = self.environment.score(samples)
        seen = len(samples) + (self.curve[-1]["samples"] if self.curve else 0)
        self.curve.append({"samples": seen, "seconds": round(self.seconds(), 2), "reward": mean(rewards)})
        if len(self.curve) % 10 == 1:
            print(f"{self.title}: {seen} samples, {self.seconds():.0f} s, reward {mean(rewards):.3f}", flush=True)
            print(f"    {samples[0].prompt.text!r} -> {samples[0].response!r} ({rewards[0]:.2f})", flush=True)
        return rewards

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def over(self) -> bool:
        return self.seconds() > self.limit


def settings(args: argparse.Namespace, run_dir: str) -> Any:
    """The config tree of a run; TRL's is that of fastppo's RLOO."""
    from trainers.config import CONFIGS
    from trainers.settings import load_config

    block, own = ("ppo", VALUE[args.task]) if args.trainer == "fastppo-ppo" else ("reinforce", RLOO)
    keys = TASKS[args.task] | own | {"logger.run_dir": run_dir, "ppo.seed": args.seed}
    step = keys["ppo.num_prompts_per_step"] * keys["ppo.num_generations_per_prompt"]
    keys["ppo.max_num_steps"] = -(-args.samples // step)
    renamed = {key.replace("ppo.", f"{block}.") if key.startswith("ppo.") else key: keys[key] for key in keys}
    return load_config(renamed, args.overrides, CONFIGS[block])


def train_fastppo(cfg: Any, recorder: Recorder) -> None:
    from trainers.ppo import PPOTrainer
    from trainers.reinforce import ReinforceTrainer

    base = PPOTrainer if cfg.name == "ppo" else ReinforceTrainer

    class Timed(base):  # type: ignore[valid-type, misc]
        def goes_on(self) -> bool:
            return super().goes_on() and not recorder.over()

    trainer = Timed(cfg, environment=recorder)
    recorder.start = time.perf_counter()
    trainer.fit()


def train_trl(cfg: Any, recorder: Recorder, model_path: str) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import RLOOConfig, RLOOTrainer

    from trainers.environments import Sample
    from trainers.optim import lr_factor

    policy, algorithm = cfg.policy, cfg.algorithm
    rollout = algorithm.num_prompts_per_step * algorithm.num_generations_per_prompt
    steps = rollout // policy.train_global_batch_size  # optimizer steps a rollout
    tasks = recorder.prompts()
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    if policy.num_layers_unfrozen >= 0:
        model.requires_grad_(False)
        model.model.layers[-policy.num_layers_unfrozen :].requires_grad_(True)

    def reward(completions: list[str], completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        responses = zip(index, completion_ids, completions, strict=True)
        return recorder.score([Sample(tasks[i], (), tuple(ids), text, "") for i, ids, text in responses])

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= recorder.over() and state.global_step % steps == 0

    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=policy.optimizer.lr,
        betas=tuple(policy.optimizer.betas),
        eps=policy.optimizer.eps,
        weight_decay=policy.optimizer.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, policy.scheduler))
    args = RLOOConfig(
        output_dir=cfg.logger.run_dir,
        seed=algorithm.seed,
        max_steps=algorithm.max_num_steps * steps,
        per_device_train_batch_size=policy.train_global_batch_size,
        generation_batch_size=rollout,
        num_generations=algorithm.num_generations_per_prompt,
        max_completion_length=policy.generation.max_new_tokens,
        temperature=policy.generation.temperature,
        beta=cfg.loss_fn.reference_policy_kl_penalty,
        max_grad_norm=policy.optimizer.max_grad_norm,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = RLOOTrainer(
        model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": p.text, "index": i} for i, p in enumerate(tasks)]),
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
        callbacks=[Stop()],
    )
    recorder.start = time.perf_counter()
    trainer.train()


def run(args: argparse.Namespace) -> None:
    from trainers.environments import make_environment
    from trainers.models import resolve_model

    with tempfile.TemporaryDirectory() as folder:
        cfg = settings(args, f"{folder}/run")
        environment = make_environment(cfg.env)
        label = " ".join([args.trainer, *args.overrides])
        recorder = Recorder(environment, f"{label} {args.task} seed {args.seed}", args.seconds)
        if args.trainer == "trl-rloo":
            train_trl(cfg, recorder, str(resolve_model(environment.default_model)))
        else:
            train_fastppo(cfg, recorder)
    packages = ("torch", "transformers") + (("trl",) if args.trainer == "trl-rloo" else ("fastppo",))
    row = {
        "trainer": label,
        "task": args.task,
        "seed": args.seed,
        "seconds": round(recorder.seconds(), 1),
        "curve": recorder.curve,
        "versions": {name: version(name) for name in packages},
        "cpu": cpu(),
        "load": round(os.getloadavg()[1], 1),  # what else ran in the last five minutes; 1 to 2 is this run alone
    }
    with args.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    last = mean(point["reward"] for point in recorder.curve[-5:])
    print(f"{recorder.title}: {row['seconds']} s, last five rollouts {last:.3f}; written to {args.out}", flush=True)


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def smooth(values: list[float], window: int) -> list[float]:
    """Mean of the last `window` values, of fewer at the start."""
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def table(rows: list[dict[str, Any]]) -> str:
    """Means over the seeds, with the lowest and highest seed in brackets."""
    header = ("task", "trainer", "seeds", "samples", "first tenth", "all", "last fifth", "seconds per 1000 samples")
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for task in TASKS:
        for trainer in sorted({row["trainer"] for row in rows}):
            runs = [row for row in rows if row["task"] == task and row["trainer"] == trainer]
            if not runs:
                continue
            rewards = [[point["reward"] for point in row["curve"]] for row in runs]
            first = [mean(r[: max(1, len(r) // 10)]) for r in rewards]
            last = [mean(r[-max(1, len(r) // 5) :]) for r in rewards]
            pace = [1000 * row["seconds"] / row["curve"][-1]["samples"] for row in runs]
            samples = "/".join(sorted({f"{row['curve'][-1]['samples']}" for row in runs}))
            cells = [task, trainer, str(len(runs)), samples, spread(first), spread([mean(r) for r in rewards])]
            lines.append("| " + " | ".join([*cells, spread(last), spread(pace, 1)]) + " |")
    return "\n".join(lines)


def spread(values: list[float], digits: int = 3) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), mean(values), max(values)))
    return f"{middle} ({low} to {high})"


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Each seed's moving mean over ten rollouts; on the left against samples, on the right against seconds."""
    from matplotlib.figure import Figure

    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    figure = Figure(figsize=(11, 3.6 * len(tasks)), layout="constrained", dpi=110)
    for line, task in zip(figure.subplots(len(tasks), 2, squeeze=False), tasks, strict=True):
        for ax, axis in zip(line, ("samples", "seconds"), strict=True):
            for i, trainer in enumerate(sorted({row["trainer"] for row in rows})):
                label: str | None = trainer
                for row in rows:
                    if (row["task"], row["trainer"]) == (task, trainer):
                        xs = [point[axis] for point in row["curve"]]
                        ys = smooth([point["reward"] for point in row["curve"]], 10)
                        ax.plot(xs, ys, color=f"C{i}", alpha=0.8, linewidth=1.2, label=label)
                        label = None  # one entry in the legend for all seeds
            ax.set_title(f"{task}: reward, mean of the last 10 rollouts", fontsize=10)
            ax.set_xlabel({"samples": "samples", "seconds": "seconds of training"}[axis], fontsize=9)
            ax.tick_params(labelsize=8)
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(axis="y", alpha=0.25)
            ax.legend(fontsize=8, frameon=False)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value, of fastppo's settings; the curve gets its own name")
    parser.add_argument("--trainer", choices=TRAINERS, default="fastppo-rloo")
    parser.add_argument("--task", choices=sorted(TASKS), default="copy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=960, help="rounded up to whole rollouts")
    parser.add_argument("--seconds", type=float, default=150, help="no further rollout is begun after this time")
    parser.add_argument("--out", type=Path, default=Path("learning_quality.jsonl"), help="a line is added for the run")
    parser.add_argument("--draw", type=Path, help="instead of training: results to put in a table and a picture")
    parser.add_argument("--picture", type=Path, default=Path("learning_quality.png"))
    args = parser.parse_args()
    if args.draw is None:
        return run(args)
    rows = [json.loads(line) for line in args.draw.read_text().splitlines()]
    print(table(rows))
    draw(rows, args.picture)


if __name__ == "__main__":
    main()
