"""fastppo's side of bench_ppo_step.py: the public trainers, with settings that `python -m trainers.ppo` would take."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from models import prompt_ids, text_of
from step import KL_COEF, LEARNING_RATE, SEED, Clock, Work, clear, dtypes, even_words

from trainers.config import CONFIGS, TrainerConfig
from trainers.environments import Prompt, Sample
from trainers.ppo import PPOTrainer
from trainers.reinforce import ReinforceTrainer
from trainers.settings import load_config


def text_reward(samples: list[str], prompts: list[str], outputs: list[str]) -> list[float]:
    return even_words(outputs)


class RewardModel:
    """An environment whose score is that of a sequence classifier on the device, as in TRL's PPO: the fourth role."""

    default_model = "tiny-llama"  # never used: policy.model_name is given

    def __init__(self, model: str, device: str, rows: int):
        from transformers import AutoModelForSequenceClassification

        loaded = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype="auto")
        self.model, self.rows = loaded.to(device).eval(), rows

    def prompts(self) -> list[Prompt]:
        return []

    @torch.inference_mode()
    def score(self, samples: Sequence[Sample]) -> list[float]:
        scores = []
        for start in range(0, len(samples), self.rows):
            ids = [(*sample.prompt_ids, *sample.response_ids) for sample in samples[start : start + self.rows]]
            batch = torch.tensor(ids, device=self.model.device)  # all of one length here
            # Said outright, since a sampled token may look like padding.
            output = self.model(input_ids=batch, attention_mask=torch.ones_like(batch), use_cache=False)
            scores.append(output.logits[:, 0].float().cpu())
        return torch.cat(scores).tolist()


def settings(work: Work, model: Path, folder: Path, cuda: bool) -> list[str]:
    """The overrides of a run; its prompts are written below `folder`."""
    prompts, samples = work.groups
    lines = [{"prompt": text_of(ids)} for ids in prompt_ids(work.shape, prompts * work.steps, work.prompt_tokens)]
    source = folder / f"prompts-{work.shape}-{len(lines)}x{work.prompt_tokens}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    name = "ppo" if work.algorithm == "ppo" else "reinforce"
    keys: dict[str, Any] = {
        "policy.model_name": model,
        "policy.dtype": "bfloat16" if cuda else "float32",
        "policy.num_layers_unfrozen": -1,
        "policy.packing": True,
        "policy.max_tokens_per_micro_batch": work.micro_tokens,
        "policy.gradient_checkpointing": work.gradient_checkpointing,
        "policy.train_global_batch_size": work.sequences,
        "policy.optimizer.lr": LEARNING_RATE,
        "policy.scheduler.warmup_steps": 0,
        "policy.generation.max_new_tokens": work.response_tokens,
        "policy.generation.ignore_eos": True,
        "policy.generation.max_batch_size": work.sequences,
        "policy.generation.release_memory": cuda,  # TRL's generate() has no cache of its own either while it trains
        "loss_fn.reference_policy_kl_penalty": KL_COEF,
        "data.prompts": source,
        "data.max_prompt_length": work.prompt_tokens,
        f"{name}.num_prompts_per_step": prompts,
        f"{name}.num_generations_per_prompt": samples,
        f"{name}.max_num_steps": work.steps,
        f"{name}.seed": SEED,
        "cluster.device": "cuda" if cuda else "cpu",
        "logger.run_dir": clear(folder / f"fastppo-{work.algorithm}-{work.shape}"),
        "logger.tensorboard": False,
        "logger.report": False,
        "logger.num_samples_to_print": 0,
        "logger.num_inspected_samples": 0,
        "checkpointing.enabled": False,
    }
    if work.algorithm == "ppo":
        device = "cuda" if cuda else "cpu"
        keys |= {
            "value.mode": "local",
            "value.packing": True,
            "value.max_tokens_per_micro_batch": work.micro_tokens,
            "value.gradient_checkpointing": work.gradient_checkpointing,
            "value.train_global_batch_size": work.sequences,
            "value.optimizer.lr": LEARNING_RATE,
            "env.name": f"python:{__name__}.RewardModel",
            "env.params": f"{{model: '{model}', device: {device}, rows: {work.micro_rows}}}",
        }
    else:
        keys["env.name"] = f"python:{__name__}.text_reward"
    if work.algorithm == "grpo":  # as TRL's: k3 in the loss
        keys |= {
            "reinforce.adv_estimator.name": "grpo",
            "loss_fn.use_kl_in_reward": False,
            "loss_fn.reference_policy_kl_type": "k3",
        }
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]


def trainer_of(config: TrainerConfig, clock: Clock) -> Any:
    base: Any = PPOTrainer if config.name == "ppo" else ReinforceTrainer

    class Timed(base):
        def goes_on(self) -> bool:
            time_left = clock.tick()
            return super().goes_on() and time_left

    return Timed(config)


def run(work: Work, model: Path, folder: Path, *, cuda: bool, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Trains `work.steps` steps. What was measured, as a row's part."""
    clock, name = Clock(work, cuda), "ppo" if work.algorithm == "ppo" else "reinforce"
    config = load_config(None, [*settings(work, model, folder, cuda), *overrides], CONFIGS[name])
    trainer = trainer_of(config, clock)
    trainer.fit()
    lines = [json.loads(line) for line in (trainer.run.dir / "metrics.jsonl").read_text().splitlines()]
    lengths = {"prompt_length/min": work.prompt_tokens, "response_length/min": work.response_tokens}
    assert all(line[name] == length for line in lines for name, length in lengths.items()), lines[0]
    stages = [
        {key.removeprefix("timing_s/"): value for key, value in line.items() if key.startswith("timing_s/")}
        for line in lines
    ]
    for stage in stages:
        del stage["step"]  # the clock's, which waits for the device, is the one that is shown
    trained = [parameter for parameter in trainer.policy.model.parameters() if parameter.requires_grad]
    return clock.row(stages) | {
        "refit_bytes": lines[-1]["perf/refit_bytes"],
        "trained_dtype": " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trained})),
        "optimizer_state": dtypes(trainer.policy.optimizers["actor"].state_dict()),
    }
