"""Settings of the environment: the block `env`, and those of the environments that have more than a few."""

from dataclasses import dataclass
from typing import Any

from trainers.config_remote import RemoteRewardConfig
from trainers.config_types import block, opt


@dataclass
class RewardModelConfig:
    """A model that scores whole responses, for `reward_model` in env.name or env.rewards: a decoder under a linear
    `score` head (AutoModelForSequenceClassification) with the policy's vocabulary, read at the last response token."""

    model_name: str | None = opt(None, "HF folder or hub id of the reward model, with its tokenizer")
    dtype: str = opt(
        "auto", "its weights and products; auto: the policy's compute dtype", choices=("auto", "float32", "bfloat16")
    )
    batch_size: int = opt(8, "sequences per pass; never changes the numbers", free=True)
    max_tokens_per_micro_batch: int | None = opt(
        None,
        "in place of it: as many sequences of like length as fit into this many tokens, padding counted; default: off",
        free=True,
    )
    mean: list[float] = opt([], "subtracted from the output of each head, one number a head; default: 0")
    std: list[float] = opt([], "what that leaves is divided by it, one number > 0 a head; default: 1")
    weights: list[float] = opt(
        [], "of the standardised heads, whose weighted sum is the reward; a model of several heads needs them"
    )


@dataclass
class EnvConfig:
    name: str = opt(
        "sentiment",
        "sentiment, copy, lookup, math, reward_model, remote, reasoning_gym:<dataset> or "
        "python:<module>.<function or class>",
    )
    rewards: dict[str, float] = opt(
        {},
        "several rewards, named as in env.name, with their weights; the score is their weighted sum, the prompts stay "
        "those of env.name; default: env.name alone",
    )
    seed: int = opt(0, "seed of generated tasks (copy, lookup, reasoning_gym)")
    size: int = opt(512, "number of generated tasks (copy, lookup, reasoning_gym)")
    params: dict[str, Any] = opt(
        {},
        "arguments of the environment: a reasoning_gym dataset's own settings, a Python class's; math: answer_key",
    )
    timeout_s: float | None = opt(
        600.0, "seconds in which a reward must have scored a rollout, else the run saves and stops; null: no limit",
        free=True,
    )  # fmt: skip
    constant_reward_steps: int = opt(
        10, "warn of a reward that was the same for every response of so many rollouts in a row; 0: never", free=True
    )
    reward_model: RewardModelConfig = block(RewardModelConfig)
    url: str | None = opt(
        None, "env.name=remote: the server, such as http://127.0.0.1:8900; for openrlhf with its path", free=True
    )
    remote: RemoteRewardConfig = block(RemoteRewardConfig)
