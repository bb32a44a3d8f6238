"""Which settings of `env.reward_model` go together: rules of trainers/arithmetic.py."""

import math
from collections.abc import Iterator

from trainers.config import EnvConfig, TrainerConfig
from trainers.config_types import shown

NAME = "reward_model"


def is_used(env: EnvConfig) -> bool:
    return NAME in (env.name, *env.rewards)


def malformed(config: TrainerConfig) -> Iterator[str]:
    block = config.env.reward_model
    for key in ("mean", "std", "weights"):
        value = getattr(block, key)
        positive = key == "std"
        if not all(math.isfinite(x) and (x > 0 or not positive) for x in value):
            yield f"env.reward_model.{key}={shown(value)}: expected numbers that are {'> 0' if positive else 'finite'}"
    if block.model_name == "":
        yield "env.reward_model.model_name is empty: expected a folder or a hub id"


def needed(config: TrainerConfig) -> Iterator[str]:
    env = config.env
    if is_used(env) and env.reward_model.model_name is None:
        yield f"{NAME} in env.name or env.rewards needs env.reward_model.model_name, a Hugging Face folder or a hub id"
    if env.name != NAME:
        return
    if config.data.prompts is None:
        yield f"env.name={NAME} needs data.prompts: it has no prompts of its own"
    if config.policy.model_name == "auto":
        yield (
            f"env.name={NAME} needs policy.model_name: the model to train, of the reward model's vocabulary; a reward "
            "model has no language-model head, so auto could not mean its own folder"
        )
