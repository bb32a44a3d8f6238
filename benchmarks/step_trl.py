"""TRL's side of bench_ppo_step.py: RLOO and GRPO of trl 1.16, PPO of trl 1.12, the last release that has it.

They generate with transformers' generate(). Models are loaded in the compute dtype, so that AdamW's state is in it too.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from models import prompt_ids, text_of
from step import KL_COEF, LEARNING_RATE, SEED, Clock, OutOfTime, Work, clear, dtypes, even_words
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
)


class Ticks(TrainerCallback):
    def __init__(self, clock: Clock):
        self.clock = clock

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock.tick()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if not self.clock.tick():
            raise OutOfTime


def text_reward(completions: list[str], **_: Any) -> list[float]:
    return even_words(completions)


def arguments(work: Work, folder: Path, cuda: bool) -> dict[str, Any]:
    """What the configurations of all three have in common."""
    return {
        "output_dir": str(clear(folder / f"trl-{work.algorithm}-{work.shape}")),
        "per_device_train_batch_size": work.micro_rows,
        "gradient_accumulation_steps": work.sequences // work.micro_rows,
        "gradient_checkpointing": work.gradient_checkpointing,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "temperature": 1.0,
        "bf16": cuda,
        "use_cpu": not cuda,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": SEED,
    }


def grouped(work: Work, model: Path, folder: Path, cuda: bool, liger: bool, options: dict[str, Any]) -> Any:
    """The trainer of RLOO or GRPO."""
    import trl

    Config, Trainer = {"rloo": (trl.RLOOConfig, trl.RLOOTrainer), "grpo": (trl.GRPOConfig, trl.GRPOTrainer)}[
        work.algorithm
    ]
    settings = arguments(work, folder, cuda) | {
        "num_generations": work.samples,
        "max_completion_length": work.response_tokens,
        "generation_kwargs": {"min_new_tokens": work.response_tokens},
        "top_k": 0,
        "beta": KL_COEF,
        "max_steps": work.steps,
        "model_init_kwargs": {"dtype": "bfloat16" if cuda else "float32"},
    }
    if work.algorithm == "grpo":
        settings |= {"loss_type": "grpo", "use_liger_kernel": liger}
    prompts = prompt_ids(work.shape, work.prompts * work.steps, work.prompt_tokens)
    return Trainer(
        model=str(model),  # a model object would be looked up under its name again, for the reference
        reward_funcs=text_reward,
        args=Config(**settings | options),
        train_dataset=Dataset.from_dict({"prompt": [text_of(ids) for ids in prompts]}),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
    )


def ppo(work: Work, model: Path, folder: Path, cuda: bool, options: dict[str, Any]) -> Any:
    """The trainer of PPO, with policy, reference, reward and value models."""
    try:
        from trl.experimental.ppo import PPOConfig, PPOTrainer
    except ImportError as error:
        raise SystemExit(f"TRL's PPO needs trl 1.12.0 or earlier, by --ppo-peers: {error}") from error
    dtype = torch.bfloat16 if cuda else torch.float32
    policy, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=dtype) for _ in range(2))
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=dtype) for _ in range(2)
    )
    if work.gradient_checkpointing:  # this trainer's own loop does not look at the argument
        policy.gradient_checkpointing_enable()
        value.gradient_checkpointing_enable()
    settings = arguments(work, folder, cuda) | {
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "response_length": work.response_tokens,
        "total_episodes": work.steps * work.sequences,
        "kl_coef": KL_COEF,
        "num_sample_generations": 0,
        "stop_token_id": None,
        # Responses are generated in batches of this size too: a micro-batch would leave the device idle there.
        "local_rollout_forward_batch_size": work.sequences,
    }
    prompts = Dataset.from_dict({"input_ids": prompt_ids(work.shape, work.sequences * work.steps, work.prompt_tokens)})
    return PPOTrainer(
        args=PPOConfig(**settings | options),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=prompts,
        eval_dataset=prompts.select(range(work.sequences)),
    )


def run(
    work: Work, model: Path, folder: Path, *, cuda: bool, liger: bool = False, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Trains `work.steps` steps. What was measured, as a row's part."""
    clock = Clock(work, cuda)
    options = {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in overrides)}
    if work.algorithm == "ppo":
        trainer = ppo(work, model, folder, cuda, options)
        policy = trainer.policy_model
    else:
        trainer = grouped(work, model, folder, cuda, liger, options)
        policy = trainer.model
    clock.time_generation(policy)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Ticks(clock))
    with contextlib.suppress(OutOfTime):
        trainer.train()
    return clock.row() | {
        "refit_bytes": None,  # it generates with the trained model itself
        "trained_dtype": " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in policy.parameters()})),
        "optimizer_state": dtypes(trainer.optimizer.state_dict()),
    }
