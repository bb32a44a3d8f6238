"""OpenRLHF with fastppo: its PolicyLoss replaced. Run this file where you would run its trainer:

    python examples/openrlhf_fastppo.py --actor.policy_loss_type ppo ...      # arguments of openrlhf.cli.train_ppo_ray

Ray's workers import the actor's module themselves; `install` must run in them, so keep this file on their PYTHONPATH
and name it in Ray's `runtime_env`: {"worker_process_setup_hook": "openrlhf_fastppo.install"}. Written for 0.11.2.
"""

from openrlhf.models.loss import PolicyLoss as Theirs

import fastppo


class PolicyLoss(Theirs):
    """PPO and GSPO, with dual clip, per token or per sequence. Corrections of the sampler stay OpenRLHF's own."""

    def forward(
        self,
        log_probs,
        old_log_probs,
        advantages,
        action_mask=None,
        rollout_log_probs=None,
        dp_size=1,
        batch_num_tokens=None,
        global_batch_size=None,
    ):
        if self.is_correction_level != "off":
            return super().forward(
                log_probs,
                old_log_probs,
                advantages,
                action_mask,
                rollout_log_probs,
                dp_size,
                batch_num_tokens,
                global_batch_size,
            )
        out = fastppo.ppo_loss(
            log_probs,
            old_log_probs,
            advantages,
            mask=action_mask,
            loss_type=self.policy_loss_type,
            clip_eps=self.clip_eps_low,
            clip_eps_high=self.clip_eps_high,
            dual_clip=self.dual_clip,
            aggregation="token_mean" if self.token_level_loss else "seq_mean_token_mean",
            num_tokens=batch_num_tokens,
            num_seqs=global_batch_size,
        )
        sums = dict(zip(fastppo.PPO_METRICS, out.metrics, strict=True))
        tokens = sums["tokens"].clamp(min=1)
        clip_ratio = (sums["clip_high"] + sums["clip_low"]) / tokens
        return out.loss * dp_size, clip_ratio, sums["ppo_kl"] / tokens, None, None


def install() -> None:
    import openrlhf.trainer.ray.ppo_actor as actor

    actor.PolicyLoss = PolicyLoss


if __name__ == "__main__":
    import runpy

    install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
