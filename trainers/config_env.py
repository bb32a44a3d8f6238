"""Settings of environments that have more than a few: the block `env.reward_model`."""

from dataclasses import dataclass

from trainers.config_types import opt


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
