"""Which values each number of the settings may have."""

from collections.abc import Callable
from typing import Any

Rule = tuple[str, Callable[[Any], bool]]
POSITIVE: Rule = ("> 0", lambda x: x > 0)
NOT_NEGATIVE: Rule = (">= 0", lambda x: x >= 0)
AT_LEAST_1: Rule = (">= 1", lambda x: x >= 1)
SHARE: Rule = ("from 0 to 1", lambda x: 0 <= x <= 1)
FINITE: Rule = ("that is finite", lambda x: True)
SEED: Rule = ("from 0 to 2**63 - 1", lambda x: 0 <= x < 2**63)

OPTIMIZER: dict[str, Rule] = {
    "optimizer.lr": NOT_NEGATIVE,
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.max_grad_norm": NOT_NEGATIVE,
    "scheduler.warmup_steps": NOT_NEGATIVE,
    "scheduler.decay_steps": AT_LEAST_1,
    "scheduler.min_lr_ratio": SHARE,
}

SAMPLING: dict[str, Rule] = {
    "max_new_tokens": AT_LEAST_1,
    "min_new_tokens": NOT_NEGATIVE,
    "temperature": POSITIVE,
    "top_p": ("> 0 and <= 1", lambda x: 0 < x <= 1),
    "top_k": AT_LEAST_1,
    "repetition_penalty": POSITIVE,
}

# Every number of the trees; a value of None (an option that is off) passes. ppo.X stands for reinforce.X as well.
RANGES: dict[str, Rule] = {
    **{f"policy.{key}": rule for key, rule in OPTIMIZER.items()},
    **{f"value.{key}": rule for key, rule in OPTIMIZER.items()},
    **{f"policy.generation.{part}{key}": rule for part in ("", "val.") for key, rule in SAMPLING.items()},
    "policy.generation.timeout_s": POSITIVE,
    "policy.generation.refit_bucket_mb": POSITIVE,
    "policy.generation.probe_period": NOT_NEGATIVE,
    "policy.generation.kv_cache_gb": POSITIVE,
    "policy.generation.max_batch_size": AT_LEAST_1,
    "policy.generation.trtllm_cfg.tensor_parallel_size": AT_LEAST_1,
    "policy.generation.trtllm_cfg.max_seq_len": AT_LEAST_1,
    "policy.generation.trtllm_cfg.max_num_tokens": AT_LEAST_1,
    "policy.generation.trtllm_cfg.free_gpu_memory_fraction": ("> 0 and < 1", lambda x: 0 < x < 1),
    "policy.generation.vllm_cfg.tensor_parallel_size": AT_LEAST_1,
    "policy.generation.vllm_cfg.max_model_len": AT_LEAST_1,
    "policy.generation.vllm_cfg.gpu_memory_utilization": ("> 0 and < 1", lambda x: 0 < x < 1),
    "policy.num_layers_unfrozen": ("-1 (everything) or >= 1", lambda x: x == -1 or x >= 1),
    "policy.max_total_sequence_length": AT_LEAST_1,
    "policy.train_global_batch_size": AT_LEAST_1,
    "policy.train_micro_batch_size": AT_LEAST_1,
    "policy.logprob_batch_size": AT_LEAST_1,
    "policy.peft.dim": AT_LEAST_1,
    "policy.peft.alpha": AT_LEAST_1,
    "policy.max_tokens_per_micro_batch": AT_LEAST_1,
    "value.loss_coef": NOT_NEGATIVE,
    "value.num_layers_unfrozen": ("-1 (everything) or >= 0", lambda x: x >= -1),
    "value.train_global_batch_size": AT_LEAST_1,
    "value.train_micro_batch_size": AT_LEAST_1,
    **{
        f"{part}.remote.{key}": POSITIVE
        for part in ("value", "env")
        for key in ("connect_timeout_s", "timeout_s", "retry_s")
    },
    **{
        f"{part}.megatron.{key}_parallel_size": AT_LEAST_1
        for part in ("policy", "value")
        for key in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    },
    **{
        f"{part}.megatron.virtual_pipeline_model_parallel_size": (">= 2", lambda x: x >= 2)
        for part in ("policy", "value")
    },
    "port": ("from 0 to 65535", lambda x: 0 <= x <= 65535),
    "limits.max_body_mb": POSITIVE,
    "limits.max_sequences": AT_LEAST_1,
    "limits.max_waiting": AT_LEAST_1,
    "limits.merged_tokens": AT_LEAST_1,
    "infer_batch_size": AT_LEAST_1,
    "limits.body_timeout_s": POSITIVE,
    "value.max_tokens_per_micro_batch": AT_LEAST_1,
    "loss_fn.ratio_clip_min": POSITIVE,
    "loss_fn.ratio_clip_max": POSITIVE,
    "loss_fn.ratio_clip_c": ("> 1", lambda x: x > 1),
    "loss_fn.entropy_bonus": NOT_NEGATIVE,
    "loss_fn.norm_length": POSITIVE,
    "loss_fn.reference_policy_kl_penalty": NOT_NEGATIVE,
    "loss_fn.kl_input_clamp_value": ("> 0 and <= 20", lambda x: 0 < x <= 20),
    "loss_fn.kl_output_clamp_value": POSITIVE,
    "loss_fn.positive_example_nll_weight": NOT_NEGATIVE,
    "loss_fn.importance_sampling.min": NOT_NEGATIVE,
    "loss_fn.importance_sampling.max": POSITIVE,
    "value_loss_fn.scale": POSITIVE,
    "value_loss_fn.cliprange": POSITIVE,
    "env.seed": SEED,
    "env.size": AT_LEAST_1,
    "env.timeout_s": POSITIVE,
    "env.constant_reward_steps": NOT_NEGATIVE,
    "env.reward_model.batch_size": AT_LEAST_1,
    "env.reward_model.max_tokens_per_micro_batch": AT_LEAST_1,
    "data.max_prompt_length": AT_LEAST_1,
    "ppo.num_prompts_per_step": AT_LEAST_1,
    "ppo.num_generations_per_prompt": AT_LEAST_1,
    "ppo.max_rollout_turns": AT_LEAST_1,
    "ppo.ppo_epochs": AT_LEAST_1,
    "ppo.policy_training_start_step": AT_LEAST_1,
    "ppo.target_kl": POSITIVE,
    "ppo.max_num_steps": NOT_NEGATIVE,
    "ppo.max_num_epochs": AT_LEAST_1,
    "ppo.adv_estimator.gae_lambda": SHARE,
    "ppo.adv_estimator.gae_lambda_policy": SHARE,
    "ppo.adv_estimator.gae_lambda_value": SHARE,
    "ppo.adv_estimator.length_adaptive_alpha": POSITIVE,
    **{f"ppo.reward_scaling.{side}_{end}": FINITE for side in ("source", "target") for end in ("min", "max")},
    "ppo.reward_shaping.max_response_length": AT_LEAST_1,
    "ppo.reward_shaping.overlong_buffer_length": AT_LEAST_1,
    "ppo.reward_shaping.overlong_buffer_penalty": NOT_NEGATIVE,
    "ppo.reward_shaping.stop_properly_penalty_coef": SHARE,
    "ppo.cliprange_reward": POSITIVE,
    "ppo.reward_reference_mean": FINITE,
    "ppo.reward_reference_std": POSITIVE,
    "ppo.kl_controller.target": POSITIVE,
    "ppo.kl_controller.horizon": AT_LEAST_1,
    "ppo.seq_logprob_error_threshold": AT_LEAST_1,
    "ppo.batch_multiplier": POSITIVE,
    "ppo.dynamic_sampling_max_gen_batches": AT_LEAST_1,
    "ppo.adv_estimator.gae_gamma": SHARE,
    "ppo.max_first_ratio_error": POSITIVE,
    "ppo.val_period": NOT_NEGATIVE,
    "ppo.max_val_samples": AT_LEAST_1,
    "ppo.val_batch_size": AT_LEAST_1,
    "ppo.seed": SEED,
    "logger.report_period": NOT_NEGATIVE,
    "logger.num_samples_to_print": NOT_NEGATIVE,
    "logger.num_val_samples_to_print": NOT_NEGATIVE,
    "logger.samples_period": AT_LEAST_1,
    "logger.num_inspected_samples": NOT_NEGATIVE,
    "cluster.num_threads": AT_LEAST_1,
    "cluster.rank_timeout_s": POSITIVE,
    "cluster.device_memory_gb": POSITIVE,
    "cluster.gpus": AT_LEAST_1,
    "cluster.gpus_per_node": AT_LEAST_1,
    **{f"cluster.plan.{key}_gbps": POSITIVE for key in ("gpu_bandwidth", "nvlink", "network")},
    "cluster.plan.gpu_tflops": POSITIVE,
    "cluster.plan.mfu": ("> 0 and <= 1", lambda x: 0 < x <= 1),
    "checkpointing.save_period": AT_LEAST_1,
    "checkpointing.keep_last_k": NOT_NEGATIVE,
    "checkpointing.keep_top_k": NOT_NEGATIVE,
}
