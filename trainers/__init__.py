"""Thin PPO and REINFORCE trainers on fastppo's ops. `train()` is one call, `python -m trainers.ppo` the command."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.config import TrainerConfig
    from trainers.trainer import Trainer

__all__ = ["train"]


def train(
    model: str | Path = "auto",
    reward_fn: Callable[..., Sequence[float] | Sequence[Sequence[float]]] | None = None,
    prompts: Sequence[str | Mapping[str, Any]] | None = None,
    config: "TrainerConfig | Mapping[str, Any] | str | Path | None" = None,
    *,
    algorithm: str = "ppo",
    eval_prompts: Sequence[str | Mapping[str, Any]] | None = None,
    metric_fn: Callable[..., Mapping[str, Sequence[float]]] | None = None,
    stop_sequences: Sequence[str] = (),
) -> "Trainer":
    """Train a language model by PPO or REINFORCE against a Python reward, and return the trainer.

    Args:
        model: HF folder or hub id; "auto": SmolLM2-135M.
        reward_fn: `reward_fn(samples, prompts, outputs, **metadata)`, all lists with one entry a response: whole texts,
            prompt texts, response texts, and each key of the prompts' metadata. Returns one float a response, or one
            list a response with a float per response token. Default: the environment that `config` names.
        prompts: texts, or mappings with a "prompt" text whose other keys are metadata. Goes with `reward_fn`.
        algorithm: "ppo" or "reinforce"; a config tree says itself which it is of.
        config: a config tree, a mapping of (nested) settings, or a YAML file; default: the defaults.
        eval_prompts: prompts of `validate()`; default: those of `data.val_prompts`, else the training prompts.
        metric_fn: called as `reward_fn` with samples, prompts and outputs; its per-sample lists are averaged and
            logged as val/metrics/<name>.
        stop_sequences: texts that end a response; added to policy.generation.stop_strings.

    Raises:
        ValueError: prompts without a reward, or the reverse; settings that cannot be.
    """
    from dataclasses import replace

    from trainers.cli import load_config
    from trainers.config import CONFIGS, EnvConfig, TrainerConfig
    from trainers.environments.function import FunctionEnvironment, as_prompt

    if (reward_fn is None) != (prompts is None):
        given, missing = ("prompts", "reward_fn") if reward_fn is None else ("reward_fn", "prompts")
        raise ValueError(f"{given} was given without {missing}: a reward function scores prompts of its own")

    if algorithm not in CONFIGS:
        raise ValueError(f"algorithm must be ppo or reinforce, got {algorithm!r}")
    settings = config if isinstance(config, TrainerConfig) else load_config(config, config_class=CONFIGS[algorithm])
    if settings.name == "ppo":
        from trainers.ppo import PPOTrainer as TrainerClass
    else:
        from trainers.reinforce import ReinforceTrainer as TrainerClass
    if eval_prompts is not None and settings.data.val_prompts is not None:
        raise ValueError(
            f"eval_prompts was given, and so was data.val_prompts={settings.data.val_prompts!r}: leave one out"
        )
    generation = replace(
        settings.policy.generation, stop_strings=[*settings.policy.generation.stop_strings, *stop_sequences]
    )
    policy = replace(settings.policy, generation=generation)
    if str(model) != "auto":
        policy = replace(policy, model_name=str(model))
    environment = None
    if reward_fn is not None and prompts is not None:
        if settings.data.prompts is not None:
            raise ValueError(f"prompts was given, and so was data.prompts={settings.data.prompts!r}: leave one out")
        if settings.env.rewards:
            raise ValueError("reward_fn was given, and so was env.rewards: leave one out")
        environment = FunctionEnvironment(reward_fn, prompts)
        # The record says whose reward it was; a resume with another one is refused.
        name = getattr(reward_fn, "__qualname__", type(reward_fn).__qualname__)
        own = EnvConfig(name=f"python:{reward_fn.__module__}.{name}")
        own.timeout_s, own.constant_reward_steps = settings.env.timeout_s, settings.env.constant_reward_steps
        settings = replace(settings, env=own)
    trainer = TrainerClass(
        replace(settings, policy=policy),
        environment=environment,
        eval_prompts=[as_prompt(prompt, i) for i, prompt in enumerate(eval_prompts or [])],
        metric_fn=metric_fn,
    )
    trainer.fit()
    trainer.release()
    return trainer
