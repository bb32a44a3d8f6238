"""verl with fastppo: a registered policy loss, and the fused head's log-probs and entropies.

    examples=/path/to/fastppo/examples
    export VERL_USE_EXTERNAL_MODULES=verl_fastppo PYTHONPATH=$examples
    python -m verl.trainer.main_ppo \\
        +ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=verl_fastppo \\
        +ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH=$examples \\
        actor_rollout_ref.actor.policy_loss.loss_mode=fastppo \\
        actor_rollout_ref.model.use_fused_kernels=true \\
        actor_rollout_ref.model.fused_kernel_options.impl_backend=torch ...

Each process that imports verl imports the modules of that variable. Workers of a Ray that this command starts inherit
it; those of a cluster that runs already have it from `ray_kwargs` alone, and need fastppo and the folder on every node.
Written for verl 0.9.1.
"""

import torch
import verl.utils.experimental.torch_functional as fused
from verl.trainer.ppo.core_algos import register_policy_loss

import fastppo

AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-sum-norm": "token_sum_norm",
}


@register_policy_loss("fastppo")
def policy_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    """As verl's "vanilla": PPO with dual clip. The batch's counts are verl's; what the mask leaves out is not read."""
    batch = dict(config.global_batch_info)
    low, high = config.clip_ratio_low, config.clip_ratio_high
    aggregation = AGGREGATIONS[loss_agg_mode]
    horizon = batch.get("loss_scale_factor") or response_mask.shape[-1]
    # A correction weight is not negative, so it may multiply the advantage in the place of the loss.
    out = fastppo.ppo_loss(
        log_prob,
        old_log_prob,
        advantages if rollout_is_weights is None else advantages * rollout_is_weights,
        mask=response_mask,
        clip_eps=config.clip_ratio if low is None else low,
        clip_eps_high=config.clip_ratio if high is None else high,
        dual_clip=config.get("clip_ratio_c", 3.0),
        aggregation=aggregation,
        norm=horizon if aggregation == "token_sum_norm" else None,
        num_tokens=batch.get("batch_num_tokens"),
        num_seqs=batch.get("global_batch_size"),
    )
    sums = dict(zip(fastppo.PPO_METRICS, out.metrics.tolist(), strict=True))
    tokens = max(sums["tokens"], 1)
    metrics = {
        "actor/pg_clipfrac": (sums["clip_high"] + sums["clip_low"]) / tokens,
        "actor/ppo_kl": sums["ppo_kl"] / tokens,
        "actor/pg_clipfrac_lower": sums["dual_clip"] / tokens,
    }
    return out.loss * batch.get("dp_size", 1), metrics  # verl averages over ranks what is divided by global counts


def fused_head(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
    return fastppo.linear_logprob(hidden_states, vocab_weights, input_ids.to(torch.int64), temperature=temperature)


fused.FusedLinearForPPO.forward = fused_head
