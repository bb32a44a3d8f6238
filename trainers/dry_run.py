"""What a run would do, without weights: `dry_run(config)` checks everything that needs no model, prints the plan of the
batches, and builds the model's shape on torch's meta device if its folder is on this machine. Nothing is downloaded.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainers.arithmetic import ConfigError, check, counted
from trainers.backbone import is_cut, pick_device, pick_dtype
from trainers.config import PolicyConfig, TrainerConfig, ValueConfig
from trainers.environments import Environment, check_turns, make_environment
from trainers.extras import require
from trainers.models import SMOLLM2, TINY_LLAMA, default_cache, is_complete, resolve_model
from trainers.offload import check_device
from trainers.policy.lora import Adapters
from trainers.prompts import load_prompts, load_val_prompts


def dry_run(config: TrainerConfig) -> str:
    """The plan in words.

    Raises:
        ConfigError: settings that cannot be used, those of the environment, its prompts and the device included.
    """
    plan = check(config)
    try:
        environment = make_environment(config.env)
        check_turns(environment, config)
        prompts = load_prompts(config.data, environment)
        load_val_prompts(config.data, environment)
        device = pick_device(config.cluster.device)
        check_device(config, device)
        dtype = pick_dtype(config.policy.dtype, device)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(str(error)) from error
    if len(prompts) < plan.prompts:
        raise ConfigError(
            f"{config.name}.num_prompts_per_step={plan.prompts}, but there are only {counted(len(prompts), 'prompt')}: "
            f"set it to {len(prompts)} or less"
        )
    wanted = config.policy.generation.dtype
    engine_dtype = dtype if wanted == "auto" else getattr(torch, wanted)
    lines = [
        plan.describe(),
        f"prompts   {len(prompts):,}, so an epoch is {counted(len(prompts) // plan.prompts, 'step')}",
        f"compute   {device.type}, {name_of(dtype)}; sampling in {name_of(engine_dtype)}",
    ]
    policy_name = environment.default_model if config.policy.model_name == "auto" else config.policy.model_name
    lines += policy_lines(policy_name, config, environment, dtype, engine_dtype, plan.longest_sequence)
    critic = config.critic
    if critic is not None and critic.mode == "local":
        lines += critic_lines(critic.model_name or policy_name, critic, dtype)
    return "\n".join(lines)


def policy_lines(
    name: str,
    config: TrainerConfig,
    environment: Environment,
    dtype: torch.dtype,
    engine_dtype: torch.dtype,
    longest: int,
) -> list[str]:
    model = on_meta(name)
    if model is None:
        return [absent("policy", name)]
    policy = config.policy
    adapters = adapters_in(model, policy) if policy.peft.enabled else None
    trained = trained_parameters(model, policy.num_layers_unfrozen)
    total, count = size(model.parameters()), size(trained)
    frozen = total - count
    copied = 0 if engine_dtype == dtype else frozen
    if adapters is not None:
        copied = copied or size(layer.get_base_layer().weight for layer in adapters.adapted.values())
    elif engine_dtype != torch.float32:
        copied += count
    skipped = config.algorithm.skip_reference_policy_logprobs_calculation
    copied_reference = adapters is None and policy.reference == "auto" and not skipped
    head = model.config.hidden_size + 1 if config.critic is not None and config.critic.mode == "shared" else 0
    lines = [
        f"model     {name}: {type(model).__name__}, {total:,} parameters, {count:,} trained"
        + (f", and {head:,} of the critic's head" if head else ""),
        memory(
            {
                "weights": 4 * (count + head) + dtype.itemsize * frozen,
                "gradients": 4 * (count + head),
                "Adam": 8 * (count + head),
                "reference": dtype.itemsize * count if copied_reference else 0,
                "sampling": engine_dtype.itemsize * copied,
            }
        ),
    ]
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        lines.append(f"          its context is {positions:,} tokens: sequences of up to {longest:,} would not fit")
    return lines


def critic_lines(name: str, critic: ValueConfig, dtype: torch.dtype) -> list[str]:
    model = on_meta(name)
    if model is None:
        return [absent("critic", name)]
    head = model.get_output_embeddings()
    tied = head is None or head.weight is model.get_input_embeddings().weight
    unused = [] if tied else list(head.parameters())  # the language-model head is kept but not trained
    trained = trained_parameters(model, critic.num_layers_unfrozen)
    whole = len(trained) == len(list(model.parameters()))
    count = size(trained) - (size(unused) if whole else 0) + model.config.hidden_size + 1
    frozen = size(model.parameters()) + model.config.hidden_size + 1 - count
    return [
        f"critic    {name}: {type(model).__name__}, {count + frozen:,} parameters, {count:,} trained",
        memory(
            {
                "weights": 4 * count + dtype.itemsize * frozen,
                "gradients": 4 * count,
                "Adam": 8 * count,
            }
        ),
    ]


def on_meta(name: str) -> Any | None:
    """The model without storage; None if its config is not on this machine."""
    transformers = require("transformers")
    if name in (SMOLLM2, TINY_LLAMA):
        folders = [folder for folder in default_cache().glob(f"{name}-*") if is_complete(folder)]
        if not folders:
            return None
        source: Path | str = max(folders, key=lambda folder: folder.stat().st_mtime)
    try:
        if name not in (SMOLLM2, TINY_LLAMA):
            source = resolve_model(name)  # fetches nothing for a folder or a hub id
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
    except OSError:
        return None
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def trained_parameters(model: Any, num_layers_unfrozen: int) -> list[nn.Parameter]:
    """As `trainers.backbone.SplitTransformer` has it: the top layers alone over a frozen trunk, else everything; of
    either what LoRA has not frozen."""
    part = model
    if is_cut(model, num_layers_unfrozen):
        layers = list(model.get_decoder().layers)
        part = nn.ModuleList(layers[len(layers) - num_layers_unfrozen :])
    return [parameter for parameter in part.parameters() if parameter.requires_grad]


def adapters_in(model: Any, policy: PolicyConfig) -> Adapters:
    try:
        return Adapters(model, policy.peft, policy.num_layers_unfrozen)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def absent(part: str, name: str) -> str:
    return f"{part:<10}{name} is not on this machine yet: its size is known after the first run has fetched it"


def memory(parts: dict[str, int]) -> str:
    listed = ", ".join(f"{name} {gigabytes(count)}" for name, count in parts.items())
    return f"          {listed}: {gigabytes(sum(parts.values()))}, activations not counted"


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def size(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
