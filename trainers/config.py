"""The settings of both trainers: one dataclass tree, and the arithmetic that every run must satisfy.

A key is documented where it is defined; `--help`, `--print-config` and docs/config.md are made from these fields.
Block and key names are NeMo-RL's. Loading (YAML, overrides, nearest-match errors) is in `trainers/cli.py`.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any


def opt(default: Any, help: str, *, choices: tuple[str, ...] | None = None, free: bool = False) -> Any:
    """A setting: its default, its meaning, its allowed words, and whether a resumed run may change it (`free`)."""
    metadata = {"help": help, "choices": choices, "free": free}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def block(cls: type) -> Any:
    return field(default_factory=cls)


@dataclass
class OptimizerConfig:
    """AdamW (torch.optim), float32 master weights and moments."""

    lr: float = opt(2e-4, "peak learning rate")
    betas: list[float] = opt([0.9, 0.95], "Adam's decay rates of the first and second moment")
    eps: float = opt(1e-8, "Adam's denominator constant")
    weight_decay: float = opt(0.0, "decoupled weight decay")
    max_grad_norm: float = opt(1.0, "gradients are clipped to this global L2 norm; 0 turns clipping off")


@dataclass
class SchedulerConfig:
    """Learning rate over optimizer steps: linear warm-up, then constant, linear or cosine decay to `min_lr_ratio`."""

    name: str = opt("constant", "shape after the warm-up", choices=("constant", "linear", "cosine"))
    warmup_steps: int = opt(8, "optimizer steps of linear warm-up from lr / warmup_steps to lr; 0: none")
    decay_steps: int | None = opt(
        None, "optimizer steps from the end of the warm-up to the floor; linear and cosine need it"
    )
    min_lr_ratio: float = opt(0.1, "floor of the decay, as a share of lr")


@dataclass
class GenerationConfig:
    """How the policy is sampled. Every option here is scored by the trainer (log-probs are of this distribution)."""

    max_new_tokens: int = opt(16, "longest response in tokens, the stop token included")
    temperature: float = opt(1.0, "sampling temperature; the trainer divides the logits by it too")
    ignore_eos: bool = opt(
        False, "sample past the end-of-sequence token (fixed-length responses); stop_token_ids still stop"
    )
    stop_token_ids: list[int] = opt([], "token ids that end a response, beside the tokenizer's end-of-sequence token")
    stop_strings: list[str] = opt([], "texts that end a response; the tokens that spell one are kept and trained")
    max_batch_size: int = opt(64, "sequences decoded together by the embedded engine", free=True)
    dtype: str = opt(
        "auto",
        "weights of the embedded engine; auto: the policy's compute dtype",
        choices=("auto", "float32", "bfloat16"),
    )


@dataclass
class PolicyConfig:
    model_name: str = opt("auto", "HF folder or hub id; auto: the environment's own model")
    dtype: str = opt(
        "auto",
        "compute dtype (autocast); auto: bfloat16 where this device multiplies it faster",
        choices=("auto", "float32", "bfloat16"),
    )
    num_layers_unfrozen: int = opt(
        8,
        "train the top N decoder layers over a frozen trunk that runs once per rollout; -1 or N >= layers: everything",
    )
    train_global_batch_size: int = opt(8, "sequences per optimizer step of the policy, over all ranks")
    train_micro_batch_size: int = opt(
        8, "sequences per forward and backward pass; never changes the numbers", free=True
    )
    logprob_batch_size: int = opt(8, "sequences per scoring pass (log-probs, reference, values)", free=True)
    optimizer: OptimizerConfig = block(OptimizerConfig)
    scheduler: SchedulerConfig = block(SchedulerConfig)
    generation: GenerationConfig = block(GenerationConfig)


@dataclass
class ValueConfig:
    mode: str = opt(
        "shared",
        "where the critic lives: a head on the policy's trunk, or a model of its own",
        choices=("shared", "local"),
    )
    model_name: str | None = opt(None, "HF folder or hub id of a local critic's backbone; default: the policy's model")
    detach_trunk: bool = opt(True, "shared: train the head alone; false: the value loss reaches the trunk too")
    loss_coef: float = opt(1.0, "weight of the value loss in the joint step of a shared critic")
    num_layers_unfrozen: int = opt(
        -1, "local: train the top N decoder layers of the critic over a frozen trunk; -1: everything"
    )
    train_global_batch_size: int = opt(8, "local: sequences per optimizer step of the critic")
    train_micro_batch_size: int = opt(8, "local: sequences per forward and backward pass of the critic", free=True)
    optimizer: OptimizerConfig = block(lambda: OptimizerConfig(lr=1e-3))
    scheduler: SchedulerConfig = block(lambda: SchedulerConfig(warmup_steps=0))


@dataclass
class LossConfig:
    """The policy's loss; see `fastppo.ppo_loss` for the formulae."""

    type: str = opt("ppo", "policy-gradient loss", choices=("ppo", "reinforce", "cispo", "gspo", "gmpo", "sapo"))
    ratio_clip_min: float = opt(0.2, "ratios are clipped below at 1 - this")
    ratio_clip_max: float | None = opt(None, "ratios are clipped above at 1 + this; default: ratio_clip_min")
    ratio_clip_c: float | None = opt(None, "dual clip: bound of the loss at negative advantages, > 1; default: off")
    entropy_bonus: float = opt(0.0, "weight of the exact entropy, in nats a token")
    aggregation: str = opt(
        "token_mean",
        "how token losses are averaged",
        choices=("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"),
    )
    norm_length: float | None = opt(None, "token_sum_norm: divisor of each sequence's sum; default: max_new_tokens")
    use_kl_in_reward: bool = opt(True, "charge the KL to the reference per token in the reward; false: in the loss")
    reference_policy_kl_penalty: float = opt(0.05, "KL coefficient; 0: the reference is only measured")
    reference_policy_kl_type: str = opt("k1", "estimator of the KL", choices=("k1", "abs", "k2", "k3"))
    reference_policy_kl_gradient: str = opt("reverse", "gradient of a KL in the loss", choices=("reverse", "pathwise"))


@dataclass
class ValueLossConfig:
    scale: float = opt(1.0, "factor of the value loss 0.5 * (V - R)^2")
    cliprange: float | None = opt(None, "clip the new value to the old one +- this; default: off")


@dataclass
class EnvConfig:
    name: str = opt("sentiment", "sentiment, copy, reasoning_gym:<dataset> or python:<module>.<function>")
    seed: int = opt(0, "seed of generated tasks (copy, reasoning_gym)")
    size: int = opt(512, "number of generated tasks (copy, reasoning_gym)")
    params: dict[str, Any] = opt(
        {}, "further arguments of the environment, such as a reasoning_gym dataset's own settings"
    )


@dataclass
class DataConfig:
    prompts: str | None = opt(None, "JSONL file of prompts (one object a line); default: the environment's own prompts")
    prompt_key: str = opt("prompt", "JSONL key of the prompt text; the other keys reach the reward as metadata")
    chat_template: bool = opt(False, "wrap each prompt as a user turn of the tokenizer's chat template")
    system_prompt: str | None = opt(None, "system turn in front of each prompt; needs chat_template")
    max_prompt_length: int = opt(256, "longest prompt in tokens")
    overlong_prompts: str = opt(
        "drop", "what happens to longer prompts; counted and logged", choices=("error", "drop", "truncate")
    )
    shuffle: bool = opt(True, "new order of the prompts in every epoch")


@dataclass
class AdvEstimatorConfig:
    name: str = opt("gae", "advantage estimator", choices=("gae",))
    gae_lambda: float = opt(0.95, "GAE lambda, 0 to 1, of advantages and of the critic's targets")
    gae_lambda_policy: float | None = opt(None, "lambda of the advantages alone (VAPO); default: gae_lambda")
    gae_lambda_value: float | None = opt(None, "lambda of the critic's targets alone (VAPO: 1.0); default: gae_lambda")
    length_adaptive_alpha: float | None = opt(
        None,
        "lambda of a response's advantages is 1 - 1 / (this x its tokens), 0 where that is below (VAPO: 0.05); "
        "default: off",
    )
    gae_gamma: float = opt(1.0, "discount, 0 to 1")


@dataclass
class RewardScalingConfig:
    """A linear map of the task's rewards, clamped to the source range first."""

    enabled: bool = opt(False, "map the rewards")
    source_min: float = opt(0.0, "rewards below count as this, which becomes target_min")
    source_max: float = opt(1.0, "rewards above count as this, which becomes target_max")
    target_min: float = opt(0.0, "what source_min becomes")
    target_max: float = opt(1.0, "what source_max becomes")


@dataclass
class RewardShapingConfig:
    """A penalty on long or cut responses, after the scaling: DAPO's soft overlong penalty, or a factor."""

    enabled: bool = opt(False, "shape the rewards")
    max_response_length: int | None = opt(None, "tokens from which the whole overlong penalty is taken")
    overlong_buffer_length: int | None = opt(None, "tokens before max_response_length over which the penalty grows")
    overlong_buffer_penalty: float | None = opt(None, "penalty of a response of max_response_length tokens or more")
    stop_properly_penalty_coef: float | None = opt(
        None, "in place of the three: factor, 0 to 1, of the positive reward of a response cut at max_new_tokens"
    )


@dataclass
class PPOConfig:
    num_prompts_per_step: int = opt(8, "prompts per step")
    num_generations_per_prompt: int = opt(4, "responses per prompt; batch = prompts x responses")
    ppo_epochs: int = opt(1, "passes over each rollout")
    policy_training_start_step: int = opt(
        1, "first step in which the policy is trained; a local critic is trained from the start"
    )
    target_kl: float | None = opt(
        None,
        "leave out the policy's remaining minibatches of a rollout once the last one's mean k3(old, new), in nats a "
        "token, exceeds this; a local critic goes on; default: off",
    )
    max_num_steps: int = opt(75, "steps (rollouts) to train", free=True)
    max_num_epochs: int | None = opt(
        None, "passes over the prompts after which the run ends; default: no limit", free=True
    )
    adv_estimator: AdvEstimatorConfig = block(AdvEstimatorConfig)
    reward_scaling: RewardScalingConfig = block(RewardScalingConfig)
    reward_shaping: RewardShapingConfig = block(RewardShapingConfig)
    cliprange_reward: float | None = opt(None, "rewards are clipped to +- this before the KL is charged; default: off")
    normalize_advantages: bool = opt(
        True, "advantages to mean 0, variance 1 over the selected tokens of the whole rollout"
    )
    bootstrap_truncated: bool = opt(False, "a response cut at max_new_tokens ends in the critic's value instead of 0")
    max_first_ratio_error: float = opt(
        0.02, "stop when the first minibatch's mean |ratio - 1| exceeds this: trainer and scorer disagree", free=True
    )
    val_period: int = opt(0, "validate every N steps; 0: never", free=True)
    val_at_start: bool = opt(False, "validate before the first step", free=True)
    val_at_end: bool = opt(False, "validate after the last step", free=True)
    max_val_samples: int = opt(64, "prompts per validation", free=True)
    seed: int = opt(0, "seed of everything random")


@dataclass
class LoggerConfig:
    run_dir: str = opt("auto", "folder of the run; auto: results/<algorithm>-<environment>-<time>", free=True)
    tensorboard: bool = opt(True, "write TensorBoard events to the run folder", free=True)
    report: bool = opt(True, "write report.html and curves.png at the end and every report_period steps", free=True)
    report_period: int = opt(20, "steps between reports", free=True)
    num_samples_to_print: int = opt(2, "responses shown on the console every samples_period steps", free=True)
    samples_period: int = opt(10, "steps between samples, on the console and in samples.jsonl", free=True)
    num_inspected_samples: int = opt(
        4, "responses kept token by token in samples.jsonl every samples_period steps, for the report", free=True
    )


@dataclass
class ClusterConfig:
    device: str = opt("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    num_threads: int | None = opt(
        None, "CPU threads of torch and of fastppo's kernels; default: torch's own choice", free=True
    )


@dataclass
class CheckpointingConfig:
    enabled: bool = opt(True, "save checkpoints", free=True)
    save_period: int = opt(20, "steps between checkpoints; one more is saved at the end", free=True)
    keep_last_k: int = opt(2, "checkpoints kept; 0: all", free=True)
    resume: str = opt(
        "auto",
        "auto: go on from the newest checkpoint of run_dir if there is one; never; or the path of a checkpoint",
        free=True,
    )


@dataclass
class PPOTrainerConfig:
    """Everything `python -m trainers.ppo` reads."""

    policy: PolicyConfig = block(PolicyConfig)
    value: ValueConfig = block(ValueConfig)
    loss_fn: LossConfig = block(LossConfig)
    value_loss_fn: ValueLossConfig = block(ValueLossConfig)
    env: EnvConfig = block(EnvConfig)
    data: DataConfig = block(DataConfig)
    ppo: PPOConfig = block(PPOConfig)
    logger: LoggerConfig = block(LoggerConfig)
    cluster: ClusterConfig = block(ClusterConfig)
    checkpointing: CheckpointingConfig = block(CheckpointingConfig)


def walk(config: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Every leaf of the tree as (dotted key, dataclass field, value), in the order of definition."""
    rows: list[tuple[str, Any, Any]] = []
    for f in fields(config):
        value, key = getattr(config, f.name), f"{prefix}{f.name}"
        rows += walk(value, key + ".") if is_dataclass(value) else [(key, f, value)]
    return rows
