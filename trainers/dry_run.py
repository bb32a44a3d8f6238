"""What a run would do, without weights: `dry_run(config)` checks everything that needs no model, prints the plan of the
batches, and, if the model's folder is on this machine, its shape and the memory that training it takes. Nothing is
downloaded.
"""

import copy
import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainers.arithmetic import ConfigError, check, trained_parts
from trainers.backbone import decoder_of, is_cut, name_of, pick_device, pick_dtype, pick_param_dtype
from trainers.batch_plan import BatchPlan, counted, launched_ranks
from trainers.classifiers import is_classifier
from trainers.cluster_words import cluster_lines, not_planned
from trainers.config import PolicyConfig, TrainerConfig, ValueConfig
from trainers.config_env import RewardModelConfig
from trainers.environments import Environment, check_turns, make_environment
from trainers.extras import require
from trainers.memory_plan import (
    Trained,
    available_bytes,
    gathered_bytes,
    held_bytes,
    memory,
    plan_lines,
    reference_bytes,
    size,
)
from trainers.model_shapes import is_shape, named_config
from trainers.models import SMOLLM2, TINY_LLAMA, default_cache, is_complete, resolve_model
from trainers.offload import check_device
from trainers.policy.lora import Adapters
from trainers.prompts import load_prompts, load_val_prompts, too_few
from trainers.reward_model_rules import is_used
from trainers.sharding import layers_of

POLICY = "policy.model_name"


def dry_run(config: TrainerConfig) -> str:
    """The plan in words.

    Raises:
        ConfigError: settings that cannot be used, those of the environment, its prompts and the device included.
    """
    plan = check(config)
    try:
        environment = make_environment(config.env)
        check_turns(environment, config)
        remote = any((source or "").startswith("hf:") for source in (config.data.prompts, config.data.val_prompts))
        prompts = None if remote else load_prompts(config.data, environment)
        if not remote:
            load_val_prompts(config.data, environment)
        if config.cluster.gpus is not None:
            return "\n".join([plan.describe(), *on_a_cluster(config, plan, environment)])
        device = pick_device(config.cluster.device)
        check_device(config, device)
        dtype = pick_dtype(config.policy.dtype, device)
        parts = trained_parts(config)
        stored = {
            key: torch.float32 if part.fully_shard else pick_param_dtype(part.param_dtype, dtype, device, key)
            for key, part in parts
        }
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(str(error)) from error
    if prompts is not None and len(prompts) < plan.prompts:
        raise ConfigError(too_few(f"{config.name}.num_prompts_per_step", plan.prompts, len(prompts)))
    wanted = config.policy.generation.dtype
    engine_dtype = dtype if wanted == "auto" else getattr(torch, wanted)
    lines = [
        plan.describe(),
        f"prompts   {config.data.prompts}, which only a run reads"
        if prompts is None
        else f"prompts   {len(prompts):,}, so an epoch is {counted(len(prompts) // plan.prompts, 'step')}",
        f"compute   {device.type}, {name_of(dtype)}; sampling in {name_of(engine_dtype)}",
    ]
    if any(part.backend == "megatron" for _, part in parts):
        return "\n".join([*lines, *as_launched(config, plan, environment, device)])
    policy_name = environment.default_model if config.policy.model_name == "auto" else config.policy.model_name
    described = [
        describe_policy(policy_name, config, environment, dtype, stored["policy"], engine_dtype, plan.longest_sequence)
    ]
    critic = config.critic
    if critic is not None and critic.mode == "local":
        described.append(describe_critic(critic.model_name or policy_name, critic, dtype, stored["value"]))
    models = [model for _, model in described if model is not None]
    if is_used(config.env):
        text, count = describe_reward_model(config.env.reward_model, dtype)
        described[-1][0].extend(text)
        for model in models[:1]:  # it stays on the device, whatever runs there
            model.held["reward model"] = count
    lines += [line for text, _ in described for line in text]
    if len(models) == len(described):
        try:
            lines += plan_lines(models, config, dtype, engine_dtype, device)
        except Exception as error:  # the hub has models that do not run on tensors without storage
            lines.append(f"memory    not known for this model: {type(error).__name__}: {error}")
    return "\n".join(lines)


def on_a_cluster(config: TrainerConfig, plan: BatchPlan, environment: Environment) -> list[str]:
    """The plan of cluster.gpus GPUs, from the models' configs alone."""
    policy, value = config.policy.model_name, config.critic
    names = {POLICY: environment.default_model if policy == "auto" else policy}
    if value is not None and value.mode == "local":
        names["value.model_name"] = value.model_name or names[POLICY]
    models = {key: (name, config_of(name, key)) for key, name in names.items()}
    for key, (name, model) in models.items():
        if model is None:
            return [absent("policy" if key == POLICY else "critic", name)]
    reward = describe_reward_model(config.env.reward_model, torch.bfloat16)[1] if is_used(config.env) else 0
    return cluster_lines(config, plan, models[POLICY], models.get("value.model_name"), reward)


def as_launched(config: TrainerConfig, plan: BatchPlan, environment: Environment, device: torch.device) -> list[str]:
    """The same for the ranks that torchrun started, on devices like this one."""
    if problems := [*not_planned(config)]:  # a run does it all the same
        return [f"memory    not known: {problem}" for problem in problems]
    memory_gb, ranks = config.cluster.device_memory_gb, launched_ranks()
    if memory_gb is None and device.type == "cuda":
        memory_gb = round(available_bytes(device, None)[1] / 1e9, 1)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", config.cluster.gpus_per_node))
    planned = copy.copy(config)
    planned.cluster = replace(config.cluster, gpus=ranks, gpus_per_node=per_node, device_memory_gb=memory_gb)
    try:
        return on_a_cluster(planned, plan, environment)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def describe_policy(
    name: str,
    config: TrainerConfig,
    environment: Environment,
    dtype: torch.dtype,
    stored: torch.dtype,
    engine_dtype: torch.dtype,
    longest: int,
) -> tuple[list[str], Trained | None]:
    model = on_meta(name)
    if model is None:
        return [absent("policy", name)], None
    policy = config.policy
    adapters = adapters_in(model, policy) if policy.peft.enabled else None
    stored = stored if adapters is None else torch.float32
    trained = trained_parameters(model, policy.num_layers_unfrozen)
    total, count = size(model.parameters()), size(trained)
    frozen = total - count
    copied = 0 if engine_dtype == dtype else frozen
    if policy.fully_shard:
        copied = total
    elif adapters is not None:
        copied = copied or size(layer.get_base_layer().weight for layer in adapters.adapted.values())
    elif engine_dtype != stored:
        copied += count
    skipped = config.algorithm.skip_reference_policy_logprobs_calculation
    copied_reference = adapters is None and policy.reference == "auto" and not skipped
    head = model.config.hidden_size + 1 if config.critic is not None and config.critic.mode == "shared" else 0
    ranks = launched_ranks() if policy.fully_shard else 1
    held = held_bytes(count, frozen, dtype, stored, head=head, ranks=ranks)
    if policy.fully_shard:
        reference = dtype.itemsize * -(-count // ranks)
    else:
        reference = reference_bytes(model, trained, dtype, stored)
    held["reference"] = reference if copied_reference else 0
    if policy.generation.backend == "native":  # other engines' weights are in the plan of their memory
        held["sampling"] = engine_dtype.itemsize * copied
    lines = [
        f"model     {name}: {type(model).__name__}, {total:,} parameters, {count:,} trained"
        + (f", and {head:,} of the critic's head" if head else ""),
        memory(held) + cut_over(ranks),
    ]
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        lines.append(f"          its context is {positions:,} tokens: sequences of up to {longest:,} would not fit")
    swapped = 4 * -(-count // ranks) if policy.fully_shard and copied_reference else 0  # trained shards meanwhile
    return lines, planned("policy", model, policy, held, stored, frozen if adapters else total, dtype, swapped)


def describe_critic(
    name: str, critic: ValueConfig, dtype: torch.dtype, stored: torch.dtype
) -> tuple[list[str], Trained | None]:
    model = on_meta(name, "value.model_name")
    if model is None:
        return [absent("critic", name)], None
    head = model.get_output_embeddings()
    tied = head is None or head.weight is model.get_input_embeddings().weight
    unused = [] if tied else list(head.parameters())  # the language-model head is kept but not trained
    trained = trained_parameters(model, critic.num_layers_unfrozen)
    whole = len(trained) == len(list(model.parameters()))
    count, scalar = size(trained) - (size(unused) if whole else 0), model.config.hidden_size + 1
    frozen = size(model.parameters()) - count
    ranks = launched_ranks() if critic.fully_shard else 1
    held = held_bytes(count, frozen, dtype, stored, head=scalar, ranks=ranks)
    lines = [
        f"critic    {name}: {type(model).__name__}, {count + scalar + frozen:,} parameters, {count + scalar:,} trained",
        memory(held) + cut_over(ranks),
    ]
    return lines, planned("value", model, critic, held, stored, count + frozen, dtype)


def cut_over(ranks: int) -> str:
    return f", cut over {ranks} ranks" if ranks > 1 else ""


def describe_reward_model(cfg: RewardModelConfig, dtype: torch.dtype) -> tuple[list[str], int]:
    """In words, and its bytes."""
    name = cfg.model_name or ""
    model = on_meta(name, "env.reward_model.model_name")
    if model is None:
        return [absent("reward", name)], 0
    total = size(model.parameters())
    held = total * (dtype if cfg.dtype == "auto" else getattr(torch, cfg.dtype)).itemsize
    return [f"reward    {name}: {type(model).__name__}, {total:,} parameters", memory({"weights": held})], held


def planned(
    key: str,
    model: Any,
    cfg: PolicyConfig | ValueConfig,
    held: dict[str, int],
    stored: torch.dtype,
    parameters: int,
    dtype: torch.dtype,
    swapped: int = 0,
) -> Trained:
    """`swapped`: bytes that come while a sharded reference scores."""
    layers = cfg.num_layers_unfrozen if is_cut(model, cfg.num_layers_unfrozen) else model.config.num_hidden_layers
    if not cfg.fully_shard:
        return Trained(key, model.config, layers, held, cfg, stored, parameters)
    embedding, head = model.get_input_embeddings().weight, getattr(model.get_output_embeddings(), "weight", None)
    tied = head is None or head is embedding
    gathered = functools.partial(
        gathered_bytes,
        max(size(layer.parameters()) for layer in layers_of(model)),
        0 if tied else embedding.numel(),
        embedding.numel() if tied else 0 if key == "value" or head is None else head.numel(),
        dtype.itemsize,
    )
    # Parameters are gathered in the compute dtype, so that passes are those of a model that is stored in it.
    passes = gathered(backward=False) + swapped, gathered(backward=True)
    return Trained(key, model.config, layers, held, cfg, dtype, parameters, *passes)


def on_meta(name: str, key: str = POLICY) -> Any | None:
    """The model of the setting `key` without storage: a language model, or a classifier's backbone where it is not the
    policy's. None if its config is not on this machine."""
    transformers = require("transformers")
    config, source = config_of(name, key), source_of(name, key)
    if config is None:
        return None
    with torch.device("meta"):
        if key != POLICY and source is not None and is_classifier(source):
            return decoder_of(transformers.AutoModelForSequenceClassification.from_config(config))
        return transformers.AutoModelForCausalLM.from_config(config)


def config_of(name: str, key: str = POLICY) -> Any | None:
    """The transformers config of the model of the setting `key`, or of a shape; None if it is not on this machine."""
    if is_shape(name):
        return named_config(name, key)
    source = source_of(name, key)
    if source is None:
        return None
    try:
        return require("transformers").AutoConfig.from_pretrained(source, local_files_only=True)
    except OSError:
        return None
    except ValueError as error:
        raise ConfigError(str(error)) from error


def source_of(name: str, key: str) -> Path | str | None:
    """What `from_pretrained` reads; None for a shape, and for a built-in model that was not fetched yet."""
    if is_shape(name):
        return None
    if name in (SMOLLM2, TINY_LLAMA):
        folders = [folder for folder in default_cache().glob(f"{name}-*") if is_complete(folder)]
        return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)
    try:
        return resolve_model(name, key=key)  # fetches nothing for a folder or a hub id
    except OSError:
        return None
    except ValueError as error:
        raise ConfigError(str(error)) from error


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
