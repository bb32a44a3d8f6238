"""NeMo-RL with fastppo: its ClippedPGLossFn with another __call__, put in place before `nemo_rl.algorithms.grpo.setup`:

    import nemo_rl.algorithms.grpo, nemo_rl_fastppo
    nemo_rl.algorithms.grpo.ClippedPGLossFn = nemo_rl_fastppo.FastPPOLossFn

It reads the same `loss_fn` settings. NeMo-RL's policy workers unpickle it in Python environments of their own: fastppo
must be installed in those, and this file's folder be on PYTHONPATH, which NeMo-RL hands on to them. Written for
NeMo-RL at 7ea279a.
"""

from nemo_rl.algorithms.loss.interfaces import LossType
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn

import fastppo

CORRECTIONS = {None: None, "tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask_tis"}


class FastPPOLossFn(ClippedPGLossFn):
    """PPO, REINFORCE, CISPO or GSPO with dual clip, the KL to the reference and truncated importance sampling.

    Differs in four places: `kl_output_clamp_value` is not read, a k3 estimate above it is not cut; a log-ratio beyond
    20 is; a sampler's log-prob that is not finite weighs 1, not 0; REINFORCE's `probs_ratio` is the ratio, not the
    mean log-prob.
    """

    def __init__(self, cfg, use_fused_linear_logprobs: bool = False):
        try:
            super().__init__(cfg, use_fused_linear_logprobs)
        except AssertionError as refusal:  # what NeMo-RL itself refuses
            raise ValueError(f"loss_fn: {refusal}") from refusal
        self.token_level = self.loss_type == LossType.TOKEN_LEVEL
        self.correction = CORRECTIONS[cfg.truncated_importance_sampling_type]
        self.low = cfg.truncated_importance_sampling_ratio_min or 0.0
        corrected, kl = cfg.use_importance_sampling_correction, self.reference_policy_kl_penalty != 0
        for refused, name, why in (
            (cfg.use_on_policy_kl_approximation, "use_on_policy_kl_approximation", "is not in FastPPOLossFn"),
            (cfg.positive_example_nll_weight, "positive_example_nll_weight", "is not in FastPPOLossFn"),
            (kl and cfg.reference_policy_kl_type != "k3", "reference_policy_kl_type", "must be k3"),
            (kl and cfg.kl_input_clamp_value != 20, "kl_input_clamp_value", "must be 20"),
            (
                (corrected or cfg.truncated_importance_sampling_ratio is not None) and self.correction is None,
                "truncated_importance_sampling_type",
                "must be given with use_importance_sampling_correction or truncated_importance_sampling_ratio",
            ),
            (  # the weight there is one of the whole sequence
                corrected and cfg.sequence_level_importance_ratios,
                "sequence_level_importance_ratios",
                "is not served with use_importance_sampling_correction",
            ),
        ):
            if refused:
                raise ValueError(f"loss_fn.{name} {why}, got {getattr(cfg, name)}")
        # In this order, as there: on policy nothing is clipped and every token has its own ratio, 1.
        kinds = {
            "ppo": cfg.force_on_policy_ratio,
            "reinforce": cfg.disable_ppo_ratio,
            "cispo": cfg.use_cispo,
            "gspo": cfg.sequence_level_importance_ratios,
        }
        self.kind = next((kind for kind, chosen in kinds.items() if chosen), "ppo")

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        if "curr_logprobs_unfiltered" in data:
            raise ValueError(
                "curr_logprobs_unfiltered: top-k or top-p of the sampler with loss_fn.reference_policy_kl_penalty "
                "is not served, for the KL is then of other log-probs than the loss"
            )
        logprobs, kl_coef = next_token_logprobs, self.reference_policy_kl_penalty
        token_mask, advantages, rollout = (data[x][:, 1:] for x in ("token_mask", "advantages", "generation_logprobs"))
        old = logprobs.detach() if self.force_on_policy_ratio else data["prev_logprobs"][:, 1:]
        ref = data["reference_policy_logprobs"][:, 1:] if kl_coef else None
        mask = (token_mask * data["sample_mask"].unsqueeze(-1)).bool()
        out = fastppo.ppo_loss(
            logprobs,
            old,
            advantages,
            mask=mask,
            loss_type=self.kind,
            clip_eps=self.ratio_clip_min,
            clip_eps_high=self.ratio_clip_max,
            dual_clip=None if self.kind == "reinforce" else self.ratio_clip_c,  # a log-prob is below every bound
            ref_logprobs=ref,
            kl_coef=kl_coef,
            rollout_logprobs=rollout if self.correction else None,
            is_correction=self.correction,
            is_bounds=(self.low, self.truncated_importance_sampling_ratio) if self.correction else None,
            aggregation="token_mean" if self.token_level else "seq_mean_token_mean",
            num_tokens=global_valid_toks,
            num_seqs=global_valid_seqs,
        )
        sums = dict(zip(fastppo.PPO_METRICS, out.metrics.tolist(), strict=True))
        tokens = max(float(global_valid_toks), 1.0)
        kl = sums["kl"] / tokens
        if kl_coef and not self.token_level:
            per_token = fastppo.kl_divergence(logprobs.detach(), ref).masked_fill(~mask, 0.0)
            means = per_token.sum(-1) / mask.sum(-1).clamp(min=1)
            kl = means.sum().item() / max(float(global_valid_seqs), 1.0)
        error = (rollout - old).abs().masked_fill(~mask, 0.0)
        return out.loss, {
            "loss": out.loss.item(),
            "kl_penalty": kl,
            "probs_ratio": sums["ratio"] / tokens,
            "token_mult_prob_error": error.exp().masked_fill(~mask, 0.0).sum().item() / tokens,
            "num_valid_samples": data["sample_mask"].sum().item(),
        }
