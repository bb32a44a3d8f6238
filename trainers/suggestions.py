"""Which setting was meant: the nearest keys of the tree for a name that is not one of them."""

from collections.abc import Iterable
from difflib import SequenceMatcher

MAX_SUGGESTIONS = 3

# What other trainers call the same thing, by the last part of its name, or the last two where one says too little.
ELSEWHERE = {
    "learning_rate": "policy.optimizer.lr",
    "clip_eps": "loss_fn.ratio_clip_min",
    "clip_ratio": "loss_fn.ratio_clip_min",
    "clip_ratio_high": "loss_fn.ratio_clip_max",
    "clip_ratio_c": "loss_fn.ratio_clip_c",
    "cliprange_value": "value_loss_fn.cliprange",
    "entropy_coeff": "loss_fn.entropy_bonus",
    "ent_coef": "loss_fn.entropy_bonus",
    "kl_coef": "loss_fn.reference_policy_kl_penalty",
    "vf_coef": "value.loss_coef",
    "adv_estimator": "ppo.adv_estimator.name",
    "gamma": "ppo.adv_estimator.gae_gamma",
    "lam": "ppo.adv_estimator.gae_lambda",
    "n": "ppo.num_generations_per_prompt",
    "num_generations": "ppo.num_generations_per_prompt",
    "train_batch_size": "ppo.num_prompts_per_step",
    "ppo_mini_batch_size": "policy.train_global_batch_size",
    "ppo_micro_batch_size_per_gpu": "policy.train_micro_batch_size",
    "ppo_max_token_len_per_gpu": "policy.max_tokens_per_micro_batch",
    "sequence_packing": "policy.packing",
    "free_cache_engine": "policy.generation.release_memory",
    "use_remove_padding": "policy.packing",
    "max_response_length": "policy.generation.max_new_tokens",
    "max_completion_length": "policy.generation.max_new_tokens",
    "total_training_steps": "ppo.max_num_steps",
    "max_steps": "ppo.max_num_steps",
    "total_epochs": "ppo.max_num_epochs",
    "save_freq": "checkpointing.save_period",
    "save_steps": "checkpointing.save_period",
    "test_freq": "ppo.val_period",
    "output_dir": "logger.run_dir",
    "resume_mode": "checkpointing.resume",
    "train_files": "data.prompts",
    "val_files": "data.val_prompts",
    "loss_agg_mode": "loss_fn.aggregation",
    "use_kl_loss": "loss_fn.use_kl_in_reward",
    "kl_loss_coef": "loss_fn.reference_policy_kl_penalty",
    "kl_loss_type": "loss_fn.reference_policy_kl_type",
    "grad_clip": "policy.optimizer.max_grad_norm",
    "lora_rank": "policy.peft.dim",
    # TRL
    "per_device_train_batch_size": "policy.train_micro_batch_size",
    "num_ppo_epochs": "ppo.ppo_epochs",
    "num_iterations": "ppo.ppo_epochs",
    "num_train_epochs": "ppo.max_num_epochs",
    "epsilon": "loss_fn.ratio_clip_min",
    "epsilon_high": "loss_fn.ratio_clip_max",
    "cliprange": "loss_fn.ratio_clip_min",
    "beta": "loss_fn.reference_policy_kl_penalty",
    "rloo_k": "ppo.num_generations_per_prompt",
    "whiten_rewards": "ppo.reward_normalization",
    "response_length": "policy.generation.max_new_tokens",
    "max_prompt_length": "data.max_prompt_length",
    "model_name_or_path": "policy.model_name",
    "bf16": "policy.dtype",
    "use_peft": "policy.peft.enabled",
    "lora_r": "policy.peft.dim",
    "lora_alpha": "policy.peft.alpha",
    "lora_target_modules": "policy.peft.target_modules",
    "report_to": "logger.tensorboard",
    "use_vllm": "policy.generation.backend",
    "vllm_gpu_memory_utilization": "policy.generation.vllm_cfg.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "policy.generation.vllm_cfg.tensor_parallel_size",
    "vllm_max_model_length": "policy.generation.vllm_cfg.max_model_len",
    "vllm_enable_sleep_mode": "policy.generation.release_memory",
    # NeMo-Aligner
    "discount_factor": "ppo.adv_estimator.gae_gamma",
    "initial_policy_kl_penalty": "loss_fn.reference_policy_kl_penalty",
    "use_absolute_kl": "loss_fn.reference_policy_kl_type",
    "ratio_eps": "loss_fn.ratio_clip_min",
    "loss_clip_val": "value_loss_fn.cliprange",
    "critic_warmup_steps": "ppo.policy_training_start_step",
    "num_rollout_samples": "ppo.num_prompts_per_step",
    "num_rollouts_per_prompt": "ppo.num_generations_per_prompt",
    "rollout_micro_batch_size": "policy.generation.max_batch_size",
    "forward_micro_batch_size": "policy.logprob_batch_size",
    "global_batch_size": "policy.train_global_batch_size",
    "micro_batch_size": "policy.train_micro_batch_size",
    "max_length": "policy.generation.max_new_tokens",
    "end_strings": "policy.generation.stop_strings",
    "gradient_clip_val": "policy.optimizer.max_grad_norm",
    "min_lr": "policy.scheduler.min_lr_ratio",
    "precision": "policy.dtype",
    "accelerator": "cluster.device",
    "restore_from_path": "policy.model_name",
    "data_prefix": "data.prompts",
    "val_check_interval": "ppo.val_period",
    "val_rollout_micro_batch_size": "ppo.val_batch_size",
    "use_greedy": "policy.generation.val.greedy",
    "min_length": "policy.generation.min_new_tokens",
    "num_val_samples": "ppo.max_val_samples",
    "save_interval": "checkpointing.save_period",
    "resume_from_checkpoint": "checkpointing.resume",
    "explicit_log_dir": "logger.run_dir",
    "create_wandb_logger": "logger.wandb.enabled",
    "monitor": "checkpointing.metric_name",
    "save_top_k": "checkpointing.keep_top_k",
    "max_time_per_run": "checkpointing.checkpoint_must_save_by",
    "offload_adam_states": "policy.offload_optimizer",
    "peft_scheme": "policy.peft.enabled",
    "adapter_dim": "policy.peft.dim",
    "megatron_amp_O2": "policy.param_dtype",
    "trt_llm.enable": "policy.generation.backend",
    "max_input_len": "policy.generation.trtllm_cfg.max_seq_len",
    "unload_engine_train": "policy.generation.release_memory",
    "activations_checkpoint_granularity": "policy.gradient_checkpointing",
    # trlX
    "num_rollouts": "ppo.num_prompts_per_step",
    "num_return_sequences": "ppo.num_generations_per_prompt",
    "chunk_size": "policy.generation.max_batch_size",
    "init_kl_coef": "loss_fn.reference_policy_kl_penalty",
    "batch_size": "policy.train_global_batch_size",
    "minibatch_size": "policy.train_micro_batch_size",
    "num_value_layers_unfrozen": "value.num_layers_unfrozen",
    "model_path": "policy.model_name",
    "T_max": "policy.scheduler.decay_steps",
    "eta_min": "policy.scheduler.min_lr_ratio",
    "epochs": "ppo.max_num_epochs",
    "total_steps": "ppo.max_num_steps",
    "eval_interval": "ppo.val_period",
    "checkpoint_interval": "checkpointing.save_period",
    "logging_dir": "logger.run_dir",
    "scale_reward": "ppo.reward_normalization",
    "ref_mean": "ppo.reward_reference_mean",
    "ref_std": "ppo.reward_reference_std",
    "peft_config": "policy.peft.enabled",
    "save_best": "checkpointing.keep_top_k",
    # NeMo-RL, where its name is not kept
    "disable_ppo_ratio": "loss_fn.type",
    "sequence_level_importance_ratios": "loss_fn.type",
    "use_cispo": "loss_fn.type",
    "token_level_loss": "loss_fn.aggregation",
    "use_importance_sampling_correction": "loss_fn.importance_sampling.type",
    "truncated_importance_sampling_type": "loss_fn.importance_sampling.type",
    "truncated_importance_sampling_ratio": "loss_fn.importance_sampling.max",
    "truncated_importance_sampling_ratio_min": "loss_fn.importance_sampling.min",
    "activation_checkpointing": "policy.gradient_checkpointing",
    "use_liger": "policy.fused_layers",
    "use_liger_kernel": "policy.fused_layers",
    "offload_optimizer_for_logprob": "policy.offload_optimizer",
    "sequence_packing.enabled": "policy.packing",
    "train_mb_tokens": "policy.max_tokens_per_micro_batch",
    "logprob_mb_tokens": "policy.max_tokens_per_micro_batch",
    "dynamic_batching.enabled": "policy.max_tokens_per_micro_batch",
    "lora_cfg.enabled": "policy.peft.enabled",
    "vllm_cfg.precision": "policy.generation.dtype",
    "kv_cache_dtype": "policy.generation.vllm_cfg.vllm_kwargs",
    "trtllm_cfg.precision": "policy.generation.dtype",
    "trtllm_cfg.gpu_memory_utilization": "policy.generation.trtllm_cfg.free_gpu_memory_fraction",
    "trtllm_cfg.max_model_len": "policy.generation.trtllm_cfg.max_seq_len",
    "trtllm_kwargs": "policy.generation.trtllm_cfg.kwargs",
    "colocated.enabled": "policy.generation.release_memory",
    "refit_buffer_size_gb": "policy.generation.refit_bucket_mb",
    "generation_batch_size": "policy.generation.max_batch_size",
    "max_input_seq_length": "data.max_prompt_length",
    "dataset_name": "data.prompts",
    "system_prompt_file": "data.system_prompt",
    "env_name": "env.name",
    "checkpoint_dir": "logger.run_dir",
    "log_dir": "logger.run_dir",
    "tensorboard_enabled": "logger.tensorboard",
    "val_temperature": "policy.generation.val.temperature",
    "val_top_p": "policy.generation.val.top_p",
    "val_top_k": "policy.generation.val.top_k",
    "wandb_enabled": "logger.wandb.enabled",
    "mlflow_enabled": "logger.mlflow.enabled",
    "ft_save_period": "checkpointing.save_period",
    "ft_keep_latest_k": "checkpointing.keep_last_k",
}


def suggest(key: str, known: Iterable[str]) -> list[str]:
    """The keys that were probably meant, best first; none if nothing is near.

    What other trainers call so comes first, then the same last part in another block (a moved or forgotten block);
    where there is neither, spelling: of the whole key, or (which says less) of its last part.
    """
    known = list(known)
    for mine, other in (("ppo", "reinforce"), ("reinforce", "ppo")):  # a command line or a recipe of the other trainer
        if key.partition(".")[0] == mine and (there := other + key[len(mine) :]) in known:
            return [there]
    last = last_part(key)
    there = ELSEWHERE.get(last_part(key, 2)) or ELSEWHERE.get(last, "")
    meant = [there, there.replace("ppo.", "reinforce.")]
    if key.startswith("value."):
        meant.insert(0, there.replace("policy.", "value."))
    elsewhere = [name for name in meant if name in known][:1]
    same = [(similarity(key, name), name) for name in known if last_part(name) == last]
    if elsewhere or same:
        return [*elsewhere, *best(same)][:MAX_SUGGESTIONS]
    scored = [(max(similarity(key, name), 0.9 * similarity(last, last_part(name))), name) for name in known]
    return best([(score, name) for score, name in scored if score >= 0.7])


def best(scored: list[tuple[float, str]]) -> list[str]:
    """Names within 0.1 of the best score, the best first, equal ones (to 0.05) in the order of the tree."""
    limit = max((score for score, _ in scored), default=0.0) - 0.1
    near = sorted((pair for pair in scored if pair[0] >= limit), key=lambda pair: -round(pair[0] * 20))
    return [name for _, name in near[:MAX_SUGGESTIONS]]


def similarity(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower(), b.lower()).ratio()


def last_part(key: str, parts: int = 1) -> str:
    return ".".join(key.split(".")[-parts:])
