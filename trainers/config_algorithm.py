"""The settings of the algorithm: losses, rewards, advantages, epochs, sampling of prompts. See trainers/config.py."""

from dataclasses import dataclass

from trainers.config_types import block, opt

IS_BOUNDS = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq_mask_tis": (0.999, 1.002)}  # those of fastppo.ppo_loss


@dataclass
class ImportanceSamplingConfig:
    """Weights exp(old - rollout), detached, for an engine whose log-probs differ from the trainer's."""

    type: str = opt(
        "none",
        "tis: clamped to the bounds; icepop: 0 outside them; seq_mask_tis: 0 for sequences whose geometric mean is "
        "outside them",
        choices=("none", "tis", "icepop", "seq_mask_tis"),
    )
    min: float | None = opt(None, "lower bound; default: tis 0, icepop 0.5, seq_mask_tis 0.999")
    max: float | None = opt(None, "upper bound; default: tis 2, icepop 5, seq_mask_tis 1.002")


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
    kl_input_clamp_value: float = opt(
        20.0, "KL in the reward: log ratios count as at most this, either way; the loss's own bound is 20"
    )
    kl_output_clamp_value: float = opt(10.0, "KL in the reward: what a token is charged is at most this, either way")
    reference_policy_kl_gradient: str = opt("reverse", "gradient of a KL in the loss", choices=("reverse", "pathwise"))
    force_on_policy_ratio: bool = opt(
        False,
        "the ratio is 1 by construction, whatever the scorer said; needs one optimizer step a rollout",
    )
    positive_example_nll_weight: float = opt(
        0.0, "weight of the negative log-likelihood of responses whose raw reward is above 0 (VAPO: 0.1), a token mean"
    )
    importance_sampling: ImportanceSamplingConfig = block(ImportanceSamplingConfig)


@dataclass
class ValueLossConfig:
    scale: float = opt(1.0, "factor of the value loss 0.5 * (V - R)^2")
    cliprange: float | None = opt(None, "clip the new value to the old one +- this; default: off")


ESTIMATORS = (
    *("gae", "raw_reward", "rloo", "grpo", "dr_grpo", "opo"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"),
)


@dataclass
class AdvEstimatorConfig:
    """Advantages of each response's tokens. Only gae has a critic; the others spread one number over a response."""

    name: str = opt(
        "gae",
        "gae; raw_reward: the reward; rloo: less the mean of the other responses to the prompt; grpo: less their mean, "
        "over their deviation; dr_grpo: less their mean; opo: less their length-weighted mean; reinforce_plus_plus: "
        "the discounted rest of the token rewards; reinforce_plus_plus_baseline: as dr_grpo, meant to be normalised; "
        "remax: less the reward of the greedy response",
        choices=ESTIMATORS,
    )
    gae_lambda: float = opt(0.95, "GAE lambda, 0 to 1, of advantages and of the critic's targets")
    gae_lambda_policy: float | None = opt(None, "lambda of the advantages alone (VAPO); default: gae_lambda")
    gae_lambda_value: float | None = opt(None, "lambda of the critic's targets alone (VAPO: 1.0); default: gae_lambda")
    length_adaptive_alpha: float | None = opt(
        None,
        "lambda of a response's advantages is 1 - 1 / (this x its tokens), 0 where that is below (VAPO: 0.05); "
        "default: off",
    )
    gae_gamma: float = opt(1.0, "discount, 0 to 1, of gae and reinforce_plus_plus")


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
class KLControllerConfig:
    """How the coefficient goes on from loss_fn.reference_policy_kl_penalty (Ziegler et al. 2019, arXiv:1909.08593)."""

    name: str = opt(
        "fixed",
        "fixed, or adaptive: once a step times 1 + clip(KL / target - 1, -0.2, 0.2) * responses / horizon",
        choices=("fixed", "adaptive"),
    )
    target: float = opt(6.0, "adaptive: wanted KL to the reference, in nats a response")
    horizon: int = opt(10000, "adaptive: responses over which the coefficient follows")


@dataclass
class AlgorithmConfig:
    """The algorithm: rollouts, rewards, advantages and epochs. Both trainers have all of it."""

    num_prompts_per_step: int = opt(8, "prompts per step")
    num_generations_per_prompt: int = opt(4, "responses per prompt; batch = prompts x responses")
    max_rollout_turns: int = opt(
        1, "turns of the policy in one dialogue; more than 1 needs an environment that answers (docs/environments.md)"
    )
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
    reward_normalization: str = opt(
        "none",
        "after the shaping; whiten: (r - mean) / (std + 1e-8) of the rollout; ref: the same with a mean and std that "
        "are given or measured once; running: r / std of all rewards so far",
        choices=("none", "whiten", "ref", "running"),
    )
    reward_normalization_shift: bool = opt(True, "false: whiten adds the mean back, ref does not subtract it")
    reward_reference_mean: float | None = opt(
        None, "ref: the mean; default: measured on the first rollout whose rewards differ, and kept"
    )
    reward_reference_std: float | None = opt(None, "ref: the standard deviation; given together with the mean")
    cliprange_reward: float | None = opt(None, "rewards are clipped to +- this before the KL is charged; default: off")
    kl_controller: KLControllerConfig = block(KLControllerConfig)
    kl_reduction: str = opt(
        "sum", "KL charged to a response in estimators without a critic: of its tokens", choices=("sum", "mean")
    )
    skip_reference_policy_logprobs_calculation: bool = opt(
        False, "keep no reference and score none; needs loss_fn.reference_policy_kl_penalty=0"
    )
    normalize_advantages: bool = opt(
        True, "advantages to mean 0, variance 1 over the selected tokens of the whole rollout"
    )
    bootstrap_truncated: bool = opt(False, "a response cut at max_new_tokens ends in the critic's value instead of 0")
    overlong_filtering: bool = opt(False, "responses cut at max_new_tokens leave every sum and count of the training")
    seq_logprob_error_threshold: float | None = opt(
        None,
        "responses whose mean exp|rollout - old| of log-probs exceeds this leave every sum and count; default: off",
    )
    use_dynamic_sampling: bool = opt(
        False, "prompts whose responses all have the same raw reward are replaced by further prompts (DAPO)"
    )
    batch_multiplier: float = opt(
        1.0, "dynamic sampling: prompts drawn at a time, as a multiple of num_prompts_per_step"
    )
    dynamic_sampling_max_gen_batches: int = opt(10, "dynamic sampling: draws of prompts in one step at most")
    dynamic_sampling_on_exhausted: str = opt(
        "error", "dynamic sampling: when the draws did not suffice", choices=("error", "train_partial")
    )
    dynamic_sampling_carry: bool = opt(
        False,
        "dynamic sampling: surplus prompts serve the next step, with the log-probs of the weights that sampled them; "
        "needs loss_fn.importance_sampling",
    )
    max_first_ratio_error: float = opt(
        0.02, "stop when the first minibatch's mean |ratio - 1| exceeds this: trainer and scorer disagree", free=True
    )
    val_period: int = opt(0, "validate every N steps; 0: never", free=True)
    val_at_start: bool = opt(False, "validate before the first step", free=True)
    val_at_end: bool = opt(False, "validate after the last step", free=True)
    max_val_samples: int = opt(64, "prompts per validation, the first ones", free=True)
    val_batch_size: int | None = opt(
        None, "validation prompts sampled and scored together; never changes the numbers; default: all", free=True
    )
    seed: int = opt(0, "seed of everything random")


@dataclass
class PPOConfig(AlgorithmConfig):
    """PPO (arXiv:1707.06347): rollouts, rewards, advantages and epochs."""


@dataclass
class ReinforceConfig(AlgorithmConfig):
    """REINFORCE with the leave-one-out baseline (RLOO, arXiv:2402.14740), or another estimator without a critic."""

    adv_estimator: AdvEstimatorConfig = block(lambda: AdvEstimatorConfig(name="rloo"))
    normalize_advantages: bool = opt(
        False, "advantages to mean 0, variance 1 over the selected tokens of the whole rollout"
    )
