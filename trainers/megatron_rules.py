"""Which settings go with policy.backend=megatron and value.backend=megatron: rules of trainers/arithmetic.py and of the
critic's server, and what the device and the model's config.json have to do with them. Imports neither torch nor
megatron-core."""

from collections.abc import Iterator
from typing import Any

from trainers.batch_plan import ranks_of
from trainers.config import PolicyConfig, TrainerConfig, ValueConfig
from trainers.config_checks import ConfigError, Rule
from trainers.config_megatron import MegatronConfig
from trainers.config_types import shown
from trainers.extras import require_installed

DEVICES = ["cuda"]  # where megatron-core runs; the tests patch it for a CPU
SIZES = (  # of process groups, of which a process has one set
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
)


def ranks_of_a_copy(cfg: MegatronConfig) -> int:
    """Ranks that hold one copy of the model together."""
    return cfg.tensor_model_parallel_size * cfg.pipeline_model_parallel_size * cfg.context_parallel_size


def replicas(config: TrainerConfig) -> int:
    """The data-parallel ranks among those that torchrun started, or cluster.gpus plans for."""
    spread = config.policy.backend == "megatron"
    return ranks_of(config) // ranks_of_a_copy(config.policy.megatron) if spread else ranks_of(config)


def unused_rules(config: TrainerConfig) -> list[Rule]:
    critic = config.critic
    rules = [
        (critic is not None and critic.mode == "shared", "value: backend", "value.mode=shared, a head on the policy"),
        *unused_of("policy", config.policy),
    ]
    if critic is not None and critic.mode == "remote":  # the server's, which has its own rules
        rules.append((critic.backend == "hf", "value.megatron: *", "value.backend=hf"))
    elif critic is not None:
        rules += unused_of("value", critic)
    return rules


def unused_of(key: str, part: PolicyConfig | ValueConfig) -> list[Rule]:
    """Of a block that is trained here: policy, value."""
    spread, cfg, block, backend = part.backend == "megatron", part.megatron, f"{key}.megatron", f"{key}.backend"
    return [
        (not spread, f"{block}: *", f"{backend}=hf"),
        (spread, f"{key}: param_dtype", f"{backend}=megatron, which stores the compute dtype, beside float32 masters"),
        (spread, f"{key}: fused_layers", f"{backend}=megatron, whose layers are megatron-core's own"),
        (
            spread and cfg.tensor_model_parallel_size == 1,
            f"{block}: sequence_parallel",
            f"{block}.tensor_model_parallel_size=1",
        ),
        (
            spread and cfg.pipeline_model_parallel_size == 1,
            f"{block}: virtual_pipeline_model_parallel_size",
            f"{block}.pipeline_model_parallel_size=1",
        ),
    ]


def needed(config: TrainerConfig) -> Iterator[str]:
    policy, critic = config.policy, config.critic
    if critic is not None and critic.mode == "local" and critic.backend != policy.backend:
        yield (
            f"value.backend={critic.backend} does not go with policy.backend={policy.backend}: a local critic lies on "
            f"the ranks as the policy does; set value.backend={policy.backend}, or value.mode=remote"
        )
    if policy.backend == "megatron":
        yield from needs_of("policy", policy, ranks_of(config))
    if critic is None:
        return
    if policy.backend == "megatron" and critic.mode == "shared":
        yield (
            "value.mode=shared is not supported with policy.backend=megatron: set value.mode=local or remote, or an "
            f"{config.name}.adv_estimator.name without a critic"
        )
    if critic.mode == "local" and policy.backend == critic.backend == "megatron":
        yield from needs_of("value", critic, ranks_of(config))
        for name in SIZES:
            mine, theirs = getattr(critic.megatron, name), getattr(policy.megatron, name)
            if mine != theirs:
                yield (
                    f"value.megatron.{name}={shown(mine)} must equal policy.megatron.{name}={shown(theirs)}: "
                    "megatron-core's process groups are one set for policy and local critic; value.mode=remote has its "
                    "own"
                )


def needs_of(key: str, part: PolicyConfig | ValueConfig, ranks: int) -> Iterator[str]:
    """Of a block that is trained on megatron-core here: policy, value."""
    for on, name, instead in (
        (key == "policy" and part.peft.enabled, "peft.enabled", f"set it to false, or {key}.backend=hf"),
        (part.fully_shard, "fully_shard", f"set it to false; {key}.megatron divides the model"),
        (part.packing, "packing", "its passes have one sequence a row, sorted by length: set it to false"),
        (part.gradient_checkpointing, "gradient_checkpointing", f"set {key}.megatron.recompute=full instead"),
    ):
        if on:
            yield f"{key}.{name}=true is not supported with {key}.backend=megatron: {instead}"
    if part.num_layers_unfrozen != -1:
        yield (
            f"{key}.num_layers_unfrozen={part.num_layers_unfrozen} is not supported with {key}.backend=megatron, which "
            "trains every layer: set it to -1"
        )
    yield from layout_needs(f"{key}.megatron", part.megatron, ranks)


def layout_needs(key: str, cfg: MegatronConfig, ranks: int) -> Iterator[str]:
    """What a block of megatron-core's settings, `key`, needs of itself and of the ranks that torchrun started."""
    tensor, pipeline, expert = (
        cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size, cfg.expert_model_parallel_size
    )  # fmt: skip
    if cfg.context_parallel_size > 1:
        yield f"{key}.context_parallel_size={cfg.context_parallel_size} is not supported yet: set it to 1"
    if ranks % ranks_of_a_copy(cfg):
        yield (
            f"{key}.tensor_model_parallel_size={tensor} x {key}.pipeline_model_parallel_size={pipeline} = "
            f"{tensor * pipeline} ranks hold a model together: torchrun must start a multiple of that, here are {ranks}"
        )
    per_expert = cfg.expert_tensor_parallel_size or tensor
    if (expert > 1 or per_expert != tensor) and ranks % (expert * per_expert * pipeline):
        yield (
            f"{key}.expert_model_parallel_size={expert} x {key}.expert_tensor_parallel_size={per_expert} x "
            f"{key}.pipeline_model_parallel_size={pipeline} = {expert * per_expert * pipeline} ranks hold all experts "
            f"together: torchrun must start a multiple of that, here are {ranks}"
        )
    if cfg.overlap_param_gather and not cfg.overlap_grad_reduce:
        yield f"{key}.overlap_param_gather=true needs {key}.overlap_grad_reduce=true"
    if cfg.overlap_param_gather and cfg.distributed_optimizer is False:
        yield f"{key}.overlap_param_gather=true needs {key}.distributed_optimizer=true, which divides the parameters"


def check_device(config: TrainerConfig, device: str) -> None:
    """Before a model is fetched; `device`: its type. See check_device_of()."""
    check_device_of("policy", config.policy, device)
    if config.critic is not None and config.critic.mode == "local":
        check_device_of("value", config.critic, device)


def check_device_of(key: str, part: PolicyConfig | ValueConfig, device: str) -> None:
    """Of a block that is trained here: policy, value.

    Raises:
        ConfigError: megatron-core does not run there, or not so.
        ImportError: it is not installed.
    """
    if part.backend != "megatron":
        return
    require_installed("megatron.core", extra="megatron")
    if device not in DEVICES:
        raise ConfigError(
            f"{key}.backend=megatron needs GPUs, and this run is on {device}: use {key}.backend=hf, or "
            "cluster.device=cuda where torch sees one"
        )
    if device == "cpu" and part.megatron.distributed_optimizer:
        raise ConfigError(f"{key}.megatron.distributed_optimizer=true needs GPUs: megatron-core checks their types")


def check_layout(hf: Any, cfg: MegatronConfig, key: str) -> None:
    """Whether the ranks can divide a model of this Hugging Face configuration evenly. Its vocabulary always: it is
    padded. `key`: the block that `cfg` is.

    Raises:
        ConfigError: every setting with which they cannot.
    """
    tensor, groups = cfg.tensor_model_parallel_size, hf.num_key_value_heads
    pieces = cfg.pipeline_model_parallel_size * (cfg.virtual_pipeline_model_parallel_size or 1)
    by_stage = f"{key}.pipeline_model_parallel_size"
    if cfg.virtual_pipeline_model_parallel_size:
        by_stage += f" x {key}.virtual_pipeline_model_parallel_size"
    divided = [
        (f"{key}.tensor_model_parallel_size", tensor, "num_attention_heads", hf.num_attention_heads),
        (f"{key}.tensor_model_parallel_size", tensor, "intermediate_size", hf.intermediate_size),
        (by_stage, pieces, "num_hidden_layers", hf.num_hidden_layers),
    ]
    experts = getattr(hf, "num_experts", 0) if hf.model_type == "qwen3_moe" else 0
    per_expert = cfg.expert_tensor_parallel_size
    if experts:
        size = hf.moe_intermediate_size
        divided += [
            (f"{key}.expert_model_parallel_size", cfg.expert_model_parallel_size, "num_experts", experts),
            (f"{key}.expert_tensor_parallel_size", per_expert or tensor, "moe_intermediate_size", size),
        ]
    problems = [
        f"{setting}={ranks} does not divide the model's {name}={count}"
        for setting, ranks, name, count in divided
        if count % ranks
    ]
    if groups % tensor and tensor % groups:
        problems.append(
            f"{key}.tensor_model_parallel_size={tensor} neither divides the model's num_key_value_heads={groups} nor "
            "is a multiple of it"
        )
    if experts and tensor > 1 and not cfg.sequence_parallel:
        problems.append(
            f"{key}.tensor_model_parallel_size={tensor} of a model with experts needs {key}.sequence_parallel=true"
        )
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if not experts and (value := getattr(cfg, name)) not in (None, 1):
            problems.append(f"{key}.{name}={value} has no effect: the model, a {hf.model_type}, has no experts")
    if problems:
        raise ConfigError("\n".join(problems))
