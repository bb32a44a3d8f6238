"""Which settings of the algorithm go together: rules of trainers/arithmetic.py about trainers/config_algorithm.py."""

from collections.abc import Iterator

from trainers.config import TrainerConfig
from trainers.config_algorithm import IS_BOUNDS
from trainers.config_checks import Rule

GROUPED = ("rloo", "grpo", "dr_grpo", "opo", "reinforce_plus_plus_baseline")  # compare a response with its siblings


def unused_rules(config: TrainerConfig) -> list[Rule]:
    cfg, loss, name = config.algorithm, config.loss_fn, config.name
    estimator, shaping, correction = cfg.adv_estimator, cfg.reward_shaping, loss.importance_sampling
    own = f"{name}.adv_estimator"
    no_critic = f"{own}.name={estimator.name}, which has no critic"
    per_token = estimator.name in ("gae", "reinforce_plus_plus")
    return [
        (config.critic is None, "value: *", no_critic),
        (config.critic is None, "value_loss_fn: *", no_critic),
        (config.critic is None, f"{name}: bootstrap_truncated policy_training_start_step", no_critic),
        (
            config.critic is None,
            f"{own}: gae_lambda gae_lambda_policy gae_lambda_value length_adaptive_alpha",
            no_critic,
        ),
        (not per_token, f"{own}: gae_gamma", f"{own}.name={estimator.name}, which does not discount"),
        (
            estimator.length_adaptive_alpha is not None,
            f"{own}: gae_lambda_policy",
            f"{own}.length_adaptive_alpha",
        ),
        (
            estimator.gae_lambda_value is not None
            and (estimator.gae_lambda_policy is not None or estimator.length_adaptive_alpha is not None),
            f"{own}: gae_lambda",
            f"{own}.gae_lambda_value and a lambda of the policy's own",
        ),
        (loss.type in ("reinforce", "sapo"), "loss_fn: ratio_clip_min ratio_clip_max", f"loss_fn.type={loss.type}"),
        (loss.type == "reinforce", "loss_fn: force_on_policy_ratio", "loss_fn.type=reinforce, which has no ratio"),
        (loss.type not in ("ppo", "gspo"), "loss_fn: ratio_clip_c", f"loss_fn.type={loss.type}"),
        (
            loss.force_on_policy_ratio,
            "loss_fn: ratio_clip_min ratio_clip_max ratio_clip_c",
            "loss_fn.force_on_policy_ratio=true: a ratio of 1 is never clipped",
        ),
        (
            loss.force_on_policy_ratio,
            f"{name}: target_kl",
            "loss_fn.force_on_policy_ratio=true: a rollout is one optimizer step",
        ),
        (correction.type == "none", "loss_fn.importance_sampling: min max", "loss_fn.importance_sampling.type=none"),
        (loss.aggregation != "token_sum_norm", "loss_fn: norm_length", f"loss_fn.aggregation={loss.aggregation}"),
        (loss.use_kl_in_reward, "loss_fn: reference_policy_kl_gradient", "loss_fn.use_kl_in_reward=true"),
        (
            not loss.use_kl_in_reward,
            "loss_fn: kl_input_clamp_value kl_output_clamp_value",
            "loss_fn.use_kl_in_reward=false, where log ratios are bounded by 20",
        ),
        (
            per_token or not loss.use_kl_in_reward,
            f"{name}: kl_reduction",
            f"{own}.name={estimator.name}, which takes the KL per token"
            if per_token
            else "loss_fn.use_kl_in_reward=false",
        ),
        (
            cfg.reward_normalization not in ("whiten", "ref"),
            f"{name}: reward_normalization_shift",
            f"{name}.reward_normalization={cfg.reward_normalization}",
        ),
        (
            cfg.reward_normalization != "ref",
            f"{name}: reward_reference_mean reward_reference_std",
            f"{name}.reward_normalization={cfg.reward_normalization}",
        ),
        (
            cfg.kl_controller.name == "fixed",
            f"{name}.kl_controller: target horizon",
            f"{name}.kl_controller.name=fixed",
        ),
        (cfg.max_rollout_turns == 1, "policy: max_total_sequence_length", f"{name}.max_rollout_turns=1"),
        (
            not cfg.use_dynamic_sampling,
            f"{name}: batch_multiplier dynamic_sampling_max_gen_batches dynamic_sampling_on_exhausted "
            "dynamic_sampling_carry",
            f"{name}.use_dynamic_sampling=false",
        ),
        (
            shaping.enabled and shaping.stop_properly_penalty_coef is not None,
            f"{name}.reward_shaping: max_response_length overlong_buffer_length overlong_buffer_penalty",
            f"{name}.reward_shaping.stop_properly_penalty_coef",
        ),
    ]


def needed_rules(config: TrainerConfig) -> Iterator[str]:
    cfg, loss, name = config.algorithm, config.loss_fn, config.name
    estimator, penalty, controller = cfg.adv_estimator.name, loss.reference_policy_kl_penalty, cfg.kl_controller
    count, sequences = cfg.num_generations_per_prompt, cfg.num_prompts_per_step * cfg.num_generations_per_prompt
    if name == "reinforce" and estimator == "gae":
        yield "reinforce.adv_estimator.name=gae needs a critic: python -m trainers.ppo has one"
    if estimator in GROUPED and count < 2:
        yield (
            f"{name}.adv_estimator.name={estimator} compares the responses to a prompt: "
            f"{name}.num_generations_per_prompt must be at least 2, got {count}"
        )
    if cfg.max_rollout_turns > 1 and config.policy.max_total_sequence_length is None:
        yield (
            f"{name}.max_rollout_turns={cfg.max_rollout_turns} needs policy.max_total_sequence_length, the longest row "
            "of prompt, turns and observations in tokens"
        )
    if cfg.use_dynamic_sampling and count < 2:
        yield (
            f"{name}.use_dynamic_sampling=true compares the responses to a prompt: {name}.num_generations_per_prompt "
            f"must be at least 2, got {count}"
        )
    if cfg.dynamic_sampling_carry and loss.importance_sampling.type == "none":
        yield (
            f"{name}.dynamic_sampling_carry=true needs loss_fn.importance_sampling.type: what it carries was sampled "
            "by older weights"
        )
    if cfg.use_dynamic_sampling and round(cfg.num_prompts_per_step * cfg.batch_multiplier) < 1:
        yield f"{name}.batch_multiplier={cfg.batch_multiplier} draws less than one prompt at a time"
    if cfg.skip_reference_policy_logprobs_calculation and (penalty or controller.name == "adaptive"):
        which = f"loss_fn.reference_policy_kl_penalty={penalty}" if penalty else f"{name}.kl_controller.name=adaptive"
        yield f"{name}.skip_reference_policy_logprobs_calculation=true leaves no reference for {which}"
    elif controller.name == "adaptive" and not penalty:
        yield f"{name}.kl_controller.name=adaptive needs loss_fn.reference_policy_kl_penalty > 0 to start from"
    if loss.force_on_policy_ratio and (sequences != config.policy.train_global_batch_size or cfg.ppo_epochs != 1):
        yield (
            f"loss_fn.force_on_policy_ratio=true needs one optimizer step a rollout: {name}.ppo_epochs=1, got "
            f"{cfg.ppo_epochs}, and policy.train_global_batch_size={sequences}, all sequences of a step, got "
            f"{config.policy.train_global_batch_size}"
        )
    if (cfg.reward_reference_mean is None) != (cfg.reward_reference_std is None):
        yield f"{name}.reward_reference_mean and {name}.reward_reference_std must be given together"
    if loss.importance_sampling.type != "none":
        correction, (low, high) = loss.importance_sampling, IS_BOUNDS[loss.importance_sampling.type]
        low, high = correction.min if correction.min is not None else low, correction.max or high
        if low > high:
            yield f"loss_fn.importance_sampling.min={low} is above loss_fn.importance_sampling.max={high}"
    if loss.reference_policy_kl_gradient == "pathwise" and not loss.use_kl_in_reward:
        kl_type = loss.reference_policy_kl_type
        if kl_type in ("k1", "abs"):
            yield (
                f"loss_fn.reference_policy_kl_gradient=pathwise needs reference_policy_kl_type=k2 or k3, got "
                f"{kl_type}: the derivative of that estimate does not pull towards the reference"
            )
    critic = config.critic
    if critic is not None and cfg.policy_training_start_step > 1 and critic.mode == "shared":
        yield (
            f"{name}.policy_training_start_step={cfg.policy_training_start_step} needs value.mode=local or remote: a "
            "shared critic is trained in the policy's optimizer steps"
        )
    yield from shaping_rules(config)


def shaping_rules(config: TrainerConfig) -> Iterator[str]:
    name, scaling, shaping = config.name, config.algorithm.reward_scaling, config.algorithm.reward_shaping
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        yield (
            f"{name}.reward_scaling.source_min={scaling.source_min} must be below {name}.reward_scaling.source_max="
            f"{scaling.source_max}"
        )
    if shaping.enabled and shaping.stop_properly_penalty_coef is None:
        names = ("max_response_length", "overlong_buffer_length", "overlong_buffer_penalty")
        if missing := [key for key in names if getattr(shaping, key) is None]:
            yield (
                f"{name}.reward_shaping.enabled=true needs {name}.reward_shaping.{missing[0]}, or "
                "stop_properly_penalty_coef in place of the three that make the overlong penalty"
            )
        elif shaping.overlong_buffer_length > shaping.max_response_length:
            yield (
                f"{name}.reward_shaping.overlong_buffer_length={shaping.overlong_buffer_length} is longer than "
                f"{name}.reward_shaping.max_response_length={shaping.max_response_length}"
            )
