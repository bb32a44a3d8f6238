"""What can be refused before a model loads: batch arithmetic, ranges, and options that another option leaves unused.

`check(config)` returns the plan of the run, or raises one `ConfigError` that lists every problem by key. Nothing is
adjusted in place: a batch size that does not fit is an error, never rounded. Imports neither torch nor transformers.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainers import checkpointing_rules, megatron_rules, reward_model_rules, service_rules
from trainers.algorithm_rules import needed_rules, unused_rules
from trainers.batch_plan import BatchPlan, counted, launched_ranks, ranks_of
from trainers.config import TrainerConfig
from trainers.config_checks import (
    ConfigError,
    Rule,
    constant_schedule,
    missing_decay,
    out_of_range,
    sharding_needs,
    without_effect,
    wrong_betas,
    wrong_choices,
    wrong_types,
)
from trainers.config_types import one_of, shown
from trainers.environments import NAMES, has_settings, nearest
from trainers.prompt_rows import missing
from trainers.sampling import of_validation, sampling_problems


def check(config: TrainerConfig) -> BatchPlan:
    """The plan of a run with these settings.

    Raises:
        ConfigError: any problem that the settings alone show; all of them, one a line.
    """
    # In this order: each group computes with values that those before it have let through.
    groups = (
        (wrong_types,),
        (wrong_choices, out_of_range, malformed),
        (uneven_batches, sampling_problems, unused, needed),
    )
    for group in groups:
        if problems := [problem for rule in group for problem in rule(config)]:
            raise ConfigError("\n".join(problems))
    cfg, critic = config.algorithm, config.critic
    local = critic if critic is not None and critic.mode == "local" else None
    remote = critic if critic is not None and critic.mode == "remote" else None
    own = local or remote
    return BatchPlan(
        prompts=cfg.num_prompts_per_step,
        responses_per_prompt=cfg.num_generations_per_prompt,
        epochs=cfg.ppo_epochs,
        max_prompt_length=config.data.max_prompt_length,
        max_new_tokens=config.policy.generation.max_new_tokens,
        max_turns=cfg.max_rollout_turns,
        max_length=config.policy.max_total_sequence_length,
        max_steps=cfg.max_num_steps,
        policy_batch=config.policy.train_global_batch_size,
        policy_micro_batch=config.policy.train_micro_batch_size,
        critic=critic.mode if critic else None,
        value_batch=own.train_global_batch_size if own else None,
        value_micro_batch=local.train_micro_batch_size if local else None,
        policy_micro_tokens=config.policy.max_tokens_per_micro_batch,
        value_micro_tokens=local.max_tokens_per_micro_batch if local else None,
        value_url=remote.url if remote else None,
    )


def check_launched(config: TrainerConfig) -> None:
    """Before a run: cluster.gpus is what a plan was made for, and is what torchrun has started.

    Raises:
        ConfigError: it is another number.
    """
    gpus, ranks = config.cluster.gpus, launched_ranks()
    if gpus not in (None, ranks):
        raise ConfigError(
            f"cluster.gpus={gpus}, but {ranks} {'rank was' if ranks == 1 else 'ranks were'} started: torchrun with "
            f"--nnodes and --nproc-per-node starts {gpus}; --dry-run plans for them from one process"
        )


def check_model(config: Any, model: Any, longest_prompt: int, longest_val_prompt: int) -> None:
    """What only the loaded model's config shows: ids outside its vocabulary, sequences beyond its positions.

    Raises:
        ConfigError: the key, and what the model has.
    """
    for token in config.policy.generation.stop_token_ids:
        if not 0 <= token < model.vocab_size:
            raise ConfigError(
                f"policy.generation.stop_token_ids: {token} is outside the model's vocabulary of {model.vocab_size}"
            )
    positions = getattr(model, "max_position_embeddings", None)
    limit, generation = config.policy.max_total_sequence_length, config.policy.generation
    block = "" if generation.val.max_new_tokens is None else "val."
    for prompt, key, new in (
        (longest_prompt, "policy.generation.max_new_tokens", generation.max_new_tokens),
        (longest_val_prompt, f"policy.generation.{block}max_new_tokens", of_validation(generation).max_new_tokens),
    ):
        if limit is not None and prompt >= limit:
            raise ConfigError(
                f"policy.max_total_sequence_length={limit} leaves no room for a response to a prompt of {prompt} tokens"
            )
        if positions is not None and (limit or prompt + new) > positions:
            what = f"a prompt of {prompt} tokens + {key}={new} = {prompt + new}"
            what = what if limit is None else f"policy.max_total_sequence_length={limit}"
            raise ConfigError(f"{what}, but the model has {positions} positions")


def malformed(config: TrainerConfig) -> Iterator[str]:
    """Texts and lists with a form of their own."""
    for key, part in trained_parts(config):
        yield from wrong_betas(key, part)
    generation = config.policy.generation
    if any(token < 0 for token in generation.stop_token_ids):
        yield f"policy.generation.stop_token_ids={generation.stop_token_ids}: expected token ids >= 0"
    if "" in generation.stop_strings:
        yield f"policy.generation.stop_strings={generation.stop_strings}: an empty text would end every response"
    targets = config.policy.peft.target_modules
    if not targets or (len(targets) > 1 and "all-linear" in targets):
        yield f"policy.peft.target_modules={shown(targets)}: expected [all-linear], or names such as [q_proj, v_proj]"
    if config.loss_fn.ratio_clip_min > 1 and config.loss_fn.type != "gmpo":  # gmpo bounds the log ratio
        yield f"loss_fn.ratio_clip_min={config.loss_fn.ratio_clip_min}: expected at most 1, ratios are never below 0"
    if not config.policy.model_name:
        yield "policy.model_name is empty: expected auto, a folder or a hub id"
    if not config.logger.run_dir:
        yield "logger.run_dir is empty: expected auto or a folder"
    for key, name in [("env.name=", config.env.name), *(("env.rewards: ", name) for name in config.env.rewards)]:
        if not re.fullmatch(
            r"sentiment|copy|lookup|math|reward_model|remote|reasoning_gym:\w+|python:[\w<>]+(\.[\w<>]+)+", name
        ):
            yield f"{key}{name}: expected {one_of(NAMES)}{nearest(name.partition(':')[0], NAMES)}"
    for name, weight in config.env.rewards.items():
        if not math.isfinite(weight):
            yield f"env.rewards: the weight of {name} is {weight}, expected a number that is finite"
    for key, source in (("prompts", config.data.prompts), ("val_prompts", config.data.val_prompts)):
        if source is not None and (problem := missing(source)):
            yield f"data.{key}={source}: {problem}"
    yield from reward_model_rules.malformed(config)
    yield from service_rules.malformed(config)
    yield from checkpointing_rules.malformed(config)
    resume = config.checkpointing.resume
    if resume not in ("auto", "never") and not Path(resume).expanduser().is_dir():
        yield f"checkpointing.resume={resume}: expected auto, never or a checkpoint's folder; there is no such folder"


def uneven_batches(config: TrainerConfig) -> Iterator[str]:
    cfg, name = config.algorithm, config.name
    longest, why = longest_sequence(config)
    sequences = cfg.num_prompts_per_step * cfg.num_generations_per_prompt
    for key, part in trained_parts(config):
        if key == "value" and part.mode == "shared":
            continue
        if sequences % part.train_global_batch_size:
            yield (
                f"{name}.num_prompts_per_step={cfg.num_prompts_per_step} x {name}.num_generations_per_prompt="
                f"{cfg.num_generations_per_prompt} = {sequences} sequences a step, which "
                f"{key}.train_global_batch_size={part.train_global_batch_size} does not divide"
            )
        if key == "value" and part.mode == "remote":  # how it is cut is the server's
            continue
        budget = part.max_tokens_per_micro_batch
        if budget is not None and budget < longest:
            yield f"{key}.max_tokens_per_micro_batch={budget} is less than the longest sequence: {why} tokens"
        if (copies := megatron_rules.replicas(config)) > part.train_global_batch_size:
            ranks = f"{ranks_of(config)} ranks that torchrun started"
            if copies < ranks_of(config):
                ranks = f"{counted(copies, 'copy', 'copies')} of the model on the {ranks}"
            yield (
                f"{key}.train_global_batch_size={part.train_global_batch_size} sequences an optimizer step are fewer "
                f"than the {ranks}: each needs at least one"
            )
        if budget is None and part.train_micro_batch_size > part.train_global_batch_size:
            yield (
                f"{key}.train_micro_batch_size={part.train_micro_batch_size} is larger than "
                f"{key}.train_global_batch_size={part.train_global_batch_size}: a micro-batch is a part of the batch "
                "of one optimizer step"
            )
    budget = config.env.reward_model.max_tokens_per_micro_batch
    if budget is not None and budget < longest:
        yield f"env.reward_model.max_tokens_per_micro_batch={budget} is less than the longest sequence: {why} tokens"
    if generated_tasks(config) and config.env.size < cfg.num_prompts_per_step:
        yield (
            f"env.size={config.env.size} tasks, of which {name}.num_prompts_per_step={cfg.num_prompts_per_step} "
            "different ones cannot be drawn"
        )


def unused(config: TrainerConfig) -> Iterator[str]:
    """Options that were changed from their default and that another option leaves without effect.

    Details of something that is switched off as a whole (reports, checkpoints, validation) are let through, so that one
    switch on the command line suffices against a recipe.
    """
    env, critic = config.env.name, config.critic
    own_model = "num_layers_unfrozen train_global_batch_size train_micro_batch_size model_name "
    own_model += "param_dtype fused_layers fully_shard gradient_checkpointing offload "
    own_model += "max_tokens_per_micro_batch packing"
    peft = config.policy.peft
    shared, local = (critic is not None and critic.mode == mode for mode in ("shared", "local"))
    by_tokens = config.policy.max_tokens_per_micro_batch is not None
    critic_by_tokens = local and critic.max_tokens_per_micro_batch is not None
    backend = config.policy.generation.backend
    rules: list[Rule] = [
        *unused_rules(config),
        *service_rules.unused_rules(config),
        *megatron_rules.unused_rules(config),
        (backend != "trtllm", "policy.generation.trtllm_cfg: *", f"policy.generation.backend={backend}"),
        (backend != "vllm", "policy.generation.vllm_cfg: *", f"policy.generation.backend={backend}"),
        (backend != "native", "policy.generation: kv_cache_gb", f"policy.generation.backend={backend}"),
        (shared, f"value: {own_model}", "value.mode=shared, a head without model and batch of its own"),
        (by_tokens, "policy: train_micro_batch_size", "policy.max_tokens_per_micro_batch"),
        # A local critic without a budget of its own is scored by policy.logprob_batch_size.
        (by_tokens and not local, "policy: logprob_batch_size", "policy.max_tokens_per_micro_batch"),
        (
            by_tokens and critic_by_tokens,
            "policy: logprob_batch_size",
            "policy.max_tokens_per_micro_batch and value.max_tokens_per_micro_batch",
        ),
        (critic_by_tokens, "value: train_micro_batch_size", "value.max_tokens_per_micro_batch"),
        (
            local and critic.num_layers_unfrozen == 0,
            "value: param_dtype",
            "value.num_layers_unfrozen=0, which trains the float32 head alone",
        ),
        (local, "value: detach_trunk loss_coef", "value.mode=local, which shares no trunk and no step"),
        (
            config.policy.generation.backend == "native"
            and config.policy.backend == "hf"
            and not (peft.enabled or config.policy.fully_shard),
            "policy.generation: refit_bucket_mb",
            "policy.generation.backend=native, which takes the policy's own tensors",
        ),
        (
            not peft.enabled,
            "policy.peft: dim alpha use_rslora target_modules export",
            "policy.peft.enabled=false",
        ),
        (peft.enabled, "policy: reference", "policy.peft.enabled=true: the reference is the adapters off"),
        (peft.enabled, "policy: param_dtype", "policy.peft.enabled=true: adapters are float32"),
        (
            config.algorithm.skip_reference_policy_logprobs_calculation,
            "policy: reference",
            f"{config.name}.skip_reference_policy_logprobs_calculation=true",
        ),
        (
            config.data.prompts is None and config.data.val_prompts is None,
            "data: prompt_key",
            "data.prompts=null and data.val_prompts=null",
        ),
        (not config.data.chat_template, "data: system_prompt", "data.chat_template=false"),
        (not generated_tasks(config), "env: seed size", f"env.name={env}, which generates no tasks"),
        (
            not any(map(has_settings, (env, *config.env.rewards))),
            "env: params",
            f"{' and '.join([f'env.name={env}', *config.env.rewards])}, which has no settings",
        ),
        (
            not reward_model_rules.is_used(config.env),
            "env.reward_model: *",
            f"env.name={env}" + (" and env.rewards without reward_model" if config.env.rewards else ""),
        ),
        (
            config.env.reward_model.max_tokens_per_micro_batch is not None,
            "env.reward_model: batch_size",
            "env.reward_model.max_tokens_per_micro_batch",
        ),
        (generated_tasks(config), "data: prompts val_prompts", f"env.name={env}, which scores only its own tasks"),
        (env in ("copy", "lookup"), "data: chat_template", f"env.name={env}, whose prompts are token ids"),
        (config.cluster.gpus is None, "cluster: gpus_per_node", "cluster.gpus=null"),
        (config.cluster.gpus is None, "cluster.plan: *", "cluster.gpus=null"),
        (not config.checkpointing.keep_top_k, "checkpointing: higher_is_better", "checkpointing.keep_top_k off"),
        (
            not config.checkpointing.keep_last_k,
            "checkpointing: keep_top_k",
            "checkpointing.keep_last_k=0, which keeps all",
        ),
        *(constant_schedule(key, part) for key, part in trained_parts(config)),
    ]
    yield from without_effect(config, rules)


def needed(config: TrainerConfig) -> Iterator[str]:
    """Options that need another one."""
    logger = config.logger
    yield from needed_rules(config)
    yield from engine_needs(config)
    if config.env.name == "math" and config.data.prompts is None:
        yield "env.name=math needs data.prompts: tasks whose answers stand under env.params.answer_key [answer]"
    if logger.num_samples_to_print > logger.num_inspected_samples:
        yield (
            f"logger.num_samples_to_print={logger.num_samples_to_print} needs as many logger.num_inspected_samples, "
            f"got {logger.num_inspected_samples}"
        )
    if config.data.chat_template and config.data.overlong_prompts == "truncate":
        yield "data.overlong_prompts=truncate would cut the tokens of data.chat_template=true: use drop or error"
    yield from reward_model_rules.needed(config)
    yield from service_rules.needed(config)
    yield from checkpointing_rules.needed(config)
    yield from megatron_rules.needed(config)
    for key, part in trained_parts(config):
        if part.param_dtype == "bfloat16" and config.policy.dtype == "float32":
            yield f"{key}.param_dtype=bfloat16 needs policy.dtype=bfloat16: parameters are multiplied as stored"
        yield from missing_decay(key, part)
        yield from sharding_needs(key, part)
    if config.policy.fully_shard and config.policy.peft.enabled:
        yield "policy.fully_shard=true does not go with policy.peft.enabled=true: adapters merge with whole matrices"


def engine_needs(config: TrainerConfig) -> Iterator[str]:
    """What an engine beside the trainer needs of the run."""
    generation = config.policy.generation
    if config.cluster.gpus is not None and config.cluster.device == "cpu":
        yield f"cluster.gpus={config.cluster.gpus} are GPUs, got cluster.device=cpu"
    if generation.backend == "native":
        return
    key, ranks = f"policy.generation.{generation.backend}", ranks_of(config)
    if config.cluster.device == "cpu":
        yield f"policy.generation.backend={generation.backend} needs a GPU, got cluster.device=cpu"
    trtllm, vllm = generation.trtllm_cfg, generation.vllm_cfg
    span = (trtllm if generation.backend == "trtllm" else vllm).tensor_parallel_size
    if ranks % span:
        yield (
            f"{key}_cfg.tensor_parallel_size={span} needs a multiple of {span} ranks, one a GPU, started by torchrun; "
            f"here are {ranks}"
        )
    if span > 1 and config.algorithm.max_rollout_turns > 1:
        yield (
            f"{key}_cfg.tensor_parallel_size={span}: ranks of one engine generate together, but dialogues of "
            f"{config.name}.max_rollout_turns={config.algorithm.max_rollout_turns} end at different turns: set it to 1"
        )
    limits = {"trtllm": ("max_seq_len", trtllm.max_seq_len), "vllm": ("max_model_len", vllm.max_model_len)}
    (name, limit), longest = limits[generation.backend], longest_request(config)
    if limit is not None and limit < longest:
        yield f"{key}_cfg.{name}={limit} is less than the longest request of this run, {longest} tokens"
    if generation.backend == "vllm":
        if not vllm.in_process and ranks > 1:
            yield f"{key}_cfg.in_process=false needs one rank, here are {ranks}"
        validation = of_validation(generation)
        if validation.greedy and (validation.temperature, validation.top_p, validation.top_k) != (1, 1, None):
            yield (
                "policy.generation.backend=vllm gives greedy responses log-probs at temperature 1, of all tokens: set "
                "policy.generation.val.temperature=1, policy.generation.val.top_p=1 and no top_k beside greedy"
            )


def longest_sequence(config: TrainerConfig) -> tuple[int, str]:
    """In tokens, and the settings that it follows from."""
    if (limit := config.policy.max_total_sequence_length) is not None:
        return limit, f"policy.max_total_sequence_length={limit}"
    prompt, new = config.data.max_prompt_length, config.policy.generation.max_new_tokens
    return prompt + new, f"data.max_prompt_length={prompt} + policy.generation.max_new_tokens={new} = {prompt + new}"


def longest_request(config: TrainerConfig) -> int:
    """Tokens of prompt and response together that an engine is asked for, in training or validation."""
    validation = config.data.max_prompt_length + of_validation(config.policy.generation).max_new_tokens
    return max(longest_sequence(config)[0], validation)


def trained_parts(config: TrainerConfig) -> list[tuple[str, Any]]:
    """(block, settings) of what has an optimizer."""
    return [("policy", config.policy)] + ([("value", config.critic)] if config.critic is not None else [])


def generated_tasks(config: TrainerConfig) -> bool:
    """Whether the environment makes its own tasks from `env.seed`, `env.size` of them."""
    return config.env.name.partition(":")[0] in ("copy", "lookup", "reasoning_gym")
