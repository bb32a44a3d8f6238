"""The settings of both trainers: one dataclass tree, and the arithmetic that every run must satisfy.

A key is documented where it is defined; `--help`, `--print-config` and docs/config.md are made from these fields.
Block and key names are NeMo-RL's. Loading (YAML, overrides, nearest-match errors) is in `trainers/cli.py`.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

from trainers.config_algorithm import (
    AlgorithmConfig,
    LossConfig,
    PPOConfig,
    ReinforceConfig,
    ValueLossConfig,
)
from trainers.config_cluster import ClusterConfig
from trainers.config_env import EnvConfig
from trainers.config_generation import GenerationConfig
from trainers.config_megatron import MegatronConfig
from trainers.config_remote import RemoteConfig
from trainers.config_types import block, opt


@dataclass
class OptimizerConfig:
    """AdamW (torch.optim), float32 moments and weights: masters, where parameters are stored in bfloat16."""

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
class PeftConfig:
    """LoRA: low-rank updates of the decoder's linear layers, W + scale * B @ A, by the peft library."""

    enabled: bool = opt(
        False,
        "train adapters alone; the reference is the model with them switched off. num_layers_unfrozen=N: adapters in "
        "the top N layers",
    )
    dim: int = opt(16, "rank of the update")
    alpha: int = opt(32, "the update's scale is alpha / dim")
    use_rslora: bool = opt(False, "the update's scale is alpha / sqrt(dim)")
    target_modules: list[str] = opt(
        ["all-linear"], "names of the linear layers to adapt, such as [q_proj, v_proj]; [all-linear]: every one"
    )
    export: str = opt(
        "merged",
        "policy/ in a checkpoint: an HF folder of the merged model, or the adapters as peft saves them",
        choices=("merged", "adapter"),
        free=True,
    )


@dataclass
class PolicyConfig:
    model_name: str = opt("auto", "HF folder or hub id; auto: the environment's own model")
    backend: str = opt(
        "hf",
        "what computes and trains the model; hf: transformers, any architecture; megatron: megatron-core, which "
        "divides layers over ranks (Llama, Qwen2, Qwen3, Qwen3-MoE)",
        choices=("hf", "megatron"),
    )
    megatron: MegatronConfig = block(MegatronConfig)
    dtype: str = opt(
        "auto",
        "compute dtype; auto: bfloat16 where this device multiplies it faster",
        choices=("auto", "float32", "bfloat16"),
    )
    param_dtype: str = opt(
        "auto",
        "how trained parameters are stored: float32, under autocast; or in the compute dtype, shared with the embedded "
        "engine, beside float32 masters for the optimizer; auto: the compute dtype on a GPU, float32 on a CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    num_layers_unfrozen: int = opt(
        8,
        "train the top N decoder layers over a frozen trunk that runs once per rollout; -1 or N >= layers: everything",
    )
    max_total_sequence_length: int | None = opt(
        None,
        "with ppo.max_rollout_turns > 1: longest row in tokens, of prompt, turns and observations; an observation "
        "that does not fit is cut",
    )
    train_global_batch_size: int = opt(8, "sequences per optimizer step of the policy, over all ranks")
    train_micro_batch_size: int = opt(
        8, "sequences per forward and backward pass; never changes the numbers", free=True
    )
    logprob_batch_size: int = opt(8, "sequences per scoring pass (log-probs, reference, values)", free=True)
    fused_layers: bool = opt(
        True,
        "on a GPU: RMSNorm, rotary embedding and gated MLP in one Triton kernel each, where these agree with the "
        "model's own code",
    )
    fully_shard: bool = opt(
        False,
        "cut parameters, gradients and AdamW's moments over the ranks that torchrun started, a layer being whole only "
        "while it computes (torch's fully_shard): docs/fully_shard.md",
    )
    gradient_checkpointing: bool = opt(
        False, "compute decoder layers again in backward instead of keeping their activations; same numbers", free=True
    )
    reference: str = opt(
        "auto",
        "where the reference's weights are; auto: beside the trained ones; cpu_offload: in the CPU's memory, written "
        "over the trained ones for the length of a scoring pass; same numbers",
        choices=("auto", "cpu_offload"),
        free=True,
    )
    offload_optimizer: bool = opt(
        False,
        "AdamW's moments, and float32 masters, wait in the CPU's memory while responses are generated; same numbers",
        free=True,
    )
    peft: PeftConfig = block(PeftConfig)
    max_tokens_per_micro_batch: int | None = opt(
        None,
        "in place of those two: as many sequences of like length as fit into this many tokens, padding counted; "
        "default: off",
        free=True,
    )
    packing: bool = opt(
        False,
        "lay the sequences of a pass back to back in one row, without padding; attention stays within each",
        free=True,
    )
    optimizer: OptimizerConfig = block(OptimizerConfig)
    scheduler: SchedulerConfig = block(SchedulerConfig)
    generation: GenerationConfig = block(GenerationConfig)


@dataclass
class ValueConfig:
    mode: str = opt(
        "shared",
        "where the critic lives: a head on the policy's trunk, a model of its own, or one on a server "
        "(python -m trainers.serve_critic)",
        choices=("shared", "local", "remote"),
    )
    backend: str = opt(
        "hf",
        "local, and on a server: as policy.backend, which a local critic's must equal",
        choices=("hf", "megatron"),
    )
    megatron: MegatronConfig = block(MegatronConfig)
    url: str | None = opt(None, "remote: the server, such as http://127.0.0.1:8900", free=True)
    remote: RemoteConfig = block(RemoteConfig)
    model_name: str | None = opt(
        None,
        "HF folder or hub id of a local critic's backbone; of a reward model with one head, the critic's head starts "
        "as that head; default: the policy's model",
    )
    detach_trunk: bool = opt(True, "shared: train the head alone; false: the value loss reaches the trunk too")
    loss_coef: float = opt(1.0, "weight of the value loss in the joint step of a shared critic")
    param_dtype: str = opt("auto", "local: policy.param_dtype for the critic", choices=("auto", "float32", "bfloat16"))
    num_layers_unfrozen: int = opt(
        -1, "local: train the top N decoder layers of the critic over a frozen trunk; -1: everything"
    )
    train_global_batch_size: int = opt(8, "local, remote: sequences per optimizer step of the critic")
    train_micro_batch_size: int = opt(8, "local: sequences per forward and backward pass of the critic", free=True)
    fused_layers: bool = opt(True, "local: as policy.fused_layers")
    fully_shard: bool = opt(False, "local: as policy.fully_shard")
    gradient_checkpointing: bool = opt(False, "local: as policy.gradient_checkpointing", free=True)
    offload: bool = opt(
        False,
        "local: the critic and its optimizer's state wait in the CPU's memory during generation; same numbers",
        free=True,
    )
    max_tokens_per_micro_batch: int | None = opt(
        None, "local: policy.max_tokens_per_micro_batch for the critic's passes; default: off", free=True
    )
    packing: bool = opt(False, "local: policy.packing for the critic's passes", free=True)
    optimizer: OptimizerConfig = block(lambda: OptimizerConfig(lr=1e-3))
    scheduler: SchedulerConfig = block(lambda: SchedulerConfig(warmup_steps=0))


@dataclass
class DataConfig:
    prompts: str | None = opt(
        None,
        "JSONL file of prompts (one object a line), Parquet file, folder of datasets.save_to_disk, or "
        "hf:<name>[:split] (hf:<name>:<config>:<split>); default: the environment's own prompts",
    )
    val_prompts: str | None = opt(
        None, "prompts of the validation, in one of the same forms; default: the training prompts", free=True
    )
    prompt_key: str = opt(
        "prompt", "key (column) of the prompt, a text or chat messages; the others reach the reward as metadata"
    )
    chat_template: bool = opt(
        False, "wrap each text as a user turn of the tokenizer's chat template; prompts that are chats need it"
    )
    system_prompt: str | None = opt(None, "system turn in front of each prompt; needs chat_template")
    max_prompt_length: int = opt(256, "longest prompt in tokens")
    overlong_prompts: str = opt(
        "drop", "what happens to longer prompts; counted and logged", choices=("error", "drop", "truncate")
    )
    shuffle: bool = opt(True, "new order of the prompts in every epoch")


@dataclass
class WandbConfig:
    """Weights & Biases; a resumed run goes on in the same W&B run."""

    enabled: bool = opt(False, "send every metric to Weights & Biases; needs the extra wandb", free=True)
    project: str = opt("fastppo", "project", free=True)
    entity: str | None = opt(None, "user or team; default: the account's own", free=True)
    name: str | None = opt(None, "name of the run; default: that of the run folder", free=True)
    mode: str = opt(
        "online", "offline: kept in the run folder until `wandb sync`", choices=("online", "offline"), free=True
    )


@dataclass
class MLflowConfig:
    """MLflow tracking; a resumed run goes on in the same MLflow run."""

    enabled: bool = opt(False, "send every metric to MLflow; needs the extra mlflow", free=True)
    experiment_name: str = opt("fastppo", "experiment", free=True)
    run_name: str | None = opt(None, "name of the run; default: that of the run folder", free=True)
    tracking_uri: str | None = opt(None, "server, database or folder; default: MLflow's own choice", free=True)


@dataclass
class LoggerConfig:
    run_dir: str = opt("auto", "folder of the run; auto: results/<algorithm>-<environment>-<time>", free=True)
    tensorboard: bool = opt(True, "write TensorBoard events to the run folder", free=True)
    wandb: WandbConfig = block(WandbConfig)
    mlflow: MLflowConfig = block(MLflowConfig)
    report: bool = opt(True, "write report.html and curves.png at the end and every report_period steps", free=True)
    report_period: int = opt(20, "steps between reports", free=True)
    num_samples_to_print: int = opt(2, "responses shown on the console every samples_period steps", free=True)
    samples_period: int = opt(10, "steps between samples, on the console and in samples.jsonl", free=True)
    num_val_samples_to_print: int = opt(2, "responses shown on the console at every validation", free=True)
    val_samples: bool = opt(True, "write every response of a validation to validation/step_<N>.jsonl", free=True)
    num_inspected_samples: int = opt(
        4, "responses kept token by token in samples.jsonl every samples_period steps, for the report", free=True
    )


@dataclass
class CheckpointingConfig:
    enabled: bool = opt(True, "save checkpoints", free=True)
    save_period: int = opt(20, "steps between checkpoints; one more is saved at the end", free=True)
    keep_last_k: int = opt(2, "newest checkpoints kept, at least one; 0: all", free=True)
    keep_top_k: int | None = opt(
        None, "checkpoints kept beside those: the best by metric_name; null or 0: none", free=True
    )
    metric_name: str | None = opt(
        None, "metric that keep_top_k ranks by, as named in metrics.jsonl: val/score/mean, critic/score/mean", free=True
    )
    higher_is_better: bool = opt(True, "whether keep_top_k keeps the largest values or the smallest", free=True)
    checkpoint_must_save_by: str | None = opt(
        None,
        "time since the process started, DD:HH:MM:SS or HH:MM:SS, by which the run has saved its last checkpoint and "
        "ends; default: no limit",
        free=True,
    )
    resume: str = opt(
        "auto",
        "auto: go on from the newest checkpoint of run_dir if there is one; never; or the path of a checkpoint",
        free=True,
    )


class TrainerConfig:
    """What the two trees have in common, for code that serves both trainers."""

    name: ClassVar[str]  # of the algorithm, and of its block
    policy: "PolicyConfig"
    loss_fn: LossConfig
    env: "EnvConfig"
    data: "DataConfig"
    logger: "LoggerConfig"
    cluster: "ClusterConfig"
    checkpointing: "CheckpointingConfig"

    @property
    def algorithm(self) -> AlgorithmConfig:
        return getattr(self, self.name)

    @property
    def critic(self) -> ValueConfig | None:
        """The critic's settings, if the advantages need one."""
        return getattr(self, "value", None) if self.algorithm.adv_estimator.name == "gae" else None


@dataclass
class PPOTrainerConfig(TrainerConfig):
    """Everything `python -m trainers.ppo` reads."""

    name: ClassVar[str] = "ppo"
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


@dataclass
class ReinforceTrainerConfig(TrainerConfig):
    """Everything `python -m trainers.reinforce` reads."""

    name: ClassVar[str] = "reinforce"
    policy: PolicyConfig = block(PolicyConfig)
    loss_fn: LossConfig = block(LossConfig)
    env: EnvConfig = block(EnvConfig)
    data: DataConfig = block(DataConfig)
    reinforce: ReinforceConfig = block(ReinforceConfig)
    logger: LoggerConfig = block(LoggerConfig)
    cluster: ClusterConfig = block(ClusterConfig)
    checkpointing: CheckpointingConfig = block(CheckpointingConfig)


CONFIGS: dict[str, type] = {cls.name: cls for cls in (PPOTrainerConfig, ReinforceTrainerConfig)}


def walk(config: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Every leaf of the tree as (dotted key, dataclass field, value), in the order of definition."""
    rows: list[tuple[str, Any, Any]] = []
    for f in fields(config):
        value, key = getattr(config, f.name), f"{prefix}{f.name}"
        rows += walk(value, key + ".") if is_dataclass(value) else [(key, f, value)]
    return rows
