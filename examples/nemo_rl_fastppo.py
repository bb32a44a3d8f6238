"""NeMo-RL with fastppo: a LossFunction in the place of ClippedPGLossFn, before `nemo_rl.algorithms.grpo.setup`:

    import nemo_rl.algorithms.grpo, nemo_rl_fastppo
    nemo_rl.algorithms.grpo.ClippedPGLossFn = nemo_rl_fastppo.FastPPOLossFn

It reads the same `loss_fn` settings. Written for NeMo-RL at 7ea279a (0.6.0 and later).
"""

import torch
from nemo_rl.algorithms.loss.interfaces import LossFunction, LossInputType, LossType, MetricNormalizer

import fastppo

CORRECTIONS = {None: None, "tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask_tis"}


class FastPPOLossFn(LossFunction):
    """PPO, REINFORCE, CISPO or GSPO with dual clip, the KL to the reference and truncated importance sampling.

    Differs in two places: a k3 estimate above `kl_output_clamp_value` is not cut, and a log-ratio beyond 20 is.
    """

    input_type = LossInputType.LOGPROB

    def __init__(self, cfg, use_fused_linear_logprobs: bool = False):
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.cfg = cfg
        for refused in ("use_on_policy_kl_approximation", "positive_example_nll_weight"):
            if getattr(cfg, refused):
                raise ValueError(f"loss_fn.{refused} is not in FastPPOLossFn")
        self.kl_coef = 0.0 if cfg.use_kl_in_reward else cfg.reference_policy_kl_penalty
        if self.kl_coef and cfg.reference_policy_kl_type != "k3":
            raise ValueError(f"loss_fn.reference_policy_kl_type must be k3, got {cfg.reference_policy_kl_type}")
        self.correction = CORRECTIONS[cfg.truncated_importance_sampling_type]
        if cfg.use_importance_sampling_correction and self.correction is None:
            raise ValueError(
                "loss_fn.use_importance_sampling_correction needs loss_fn.truncated_importance_sampling_type"
            )
        kinds = {
            "reinforce": cfg.disable_ppo_ratio,
            "cispo": cfg.use_cispo,
            "gspo": cfg.sequence_level_importance_ratios,
        }
        self.kind = next((kind for kind, chosen in kinds.items() if chosen), "ppo")
        self.loss_type = LossType.TOKEN_LEVEL if cfg.token_level_loss else LossType.SEQUENCE_LEVEL
        grad = MetricNormalizer.TOKENS if cfg.token_level_loss else MetricNormalizer.SEQUENCES
        self.metric_normalizations = {
            "loss": grad,
            "kl_penalty": MetricNormalizer.TOKENS,
            "probs_ratio": MetricNormalizer.TOKENS,
            "token_mult_prob_error": MetricNormalizer.TOKENS,
            "num_valid_samples": MetricNormalizer.NONE,
        }

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        cfg, logprobs = self.cfg, next_token_logprobs
        shifted = {key: data[key][:, 1:] for key in ("token_mask", "advantages", "generation_logprobs")}
        old = logprobs.detach() if cfg.force_on_policy_ratio else data["prev_logprobs"][:, 1:]
        mask = (shifted["token_mask"] * data["sample_mask"].unsqueeze(-1)).bool()
        low = cfg.truncated_importance_sampling_ratio_min or 0.0
        out = fastppo.ppo_loss(
            logprobs,
            old,
            shifted["advantages"],
            mask=mask,
            loss_type=self.kind,
            clip_eps=cfg.ratio_clip_min,
            clip_eps_high=cfg.ratio_clip_max,
            dual_clip=cfg.ratio_clip_c,
            ref_logprobs=data["reference_policy_logprobs"][:, 1:] if self.kl_coef else None,
            kl_coef=self.kl_coef,
            rollout_logprobs=shifted["generation_logprobs"] if self.correction else None,
            is_correction=self.correction,
            is_bounds=(low, cfg.truncated_importance_sampling_ratio) if self.correction else None,
            aggregation="token_mean" if cfg.token_level_loss else "seq_mean_token_mean",
            num_tokens=global_valid_toks,
            num_seqs=global_valid_seqs,
        )
        sums = dict(zip(fastppo.PPO_METRICS, out.metrics.tolist(), strict=True))
        tokens = float(global_valid_toks)
        error = (shifted["generation_logprobs"] - old).abs()
        return out.loss, {
            "loss": out.loss.item(),
            "kl_penalty": sums["kl"] / tokens,
            "probs_ratio": sums["ratio"] / tokens,
            "token_mult_prob_error": torch.where(mask, error, 0.0).exp().masked_fill(~mask, 0.0).sum().item() / tokens,
            "num_valid_samples": data["sample_mask"].sum().item(),
        }
