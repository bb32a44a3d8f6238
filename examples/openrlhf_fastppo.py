"""OpenRLHF with fastppo: the forward of its PolicyLoss replaced. Run this file where you would run its trainer:

    python examples/openrlhf_fastppo.py --actor.policy_loss_type ppo ...      # arguments of openrlhf.cli.train_ppo_ray

The loss is made in Ray's workers, so this file starts Ray, or joins the cluster of RAY_ADDRESS, with a hook that has
each worker call `install` from here. On a cluster fastppo must be installed, and this file lie, on every node as on
this one. Each process that has the loss prints `PolicyLoss is fastppo's`; without that line it is OpenRLHF's own.
Written for OpenRLHF 0.11.2.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path

import fastppo

LOSSES = "openrlhf.models.loss"
# As openrlhf.cli.train_ppo_ray starts Ray with, where nobody has before.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}


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
    """PPO and GSPO, with dual clip, per token or per sequence. Corrections of the sampler stay OpenRLHF's own."""
    if self.is_correction_level != "off":
        return self.openrlhf_forward(
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


def replace(losses) -> None:
    losses.PolicyLoss.openrlhf_forward = losses.PolicyLoss.forward
    losses.PolicyLoss.forward = forward
    print(f"PolicyLoss is fastppo's in process {os.getpid()}", flush=True)


class Replacing(importlib.abc.MetaPathFinder):
    """Finds OpenRLHF's losses as Python does, and replaces the forward once their file has run."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != LOSSES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), replace(module))
        return spec


def install() -> None:
    """For this process, once it imports the losses. Not at once: Ray's hook runs before the worker is given its GPU,
    and with the losses comes DeepSpeed, which asks CUDA for the devices and would see all of them."""
    if LOSSES in sys.modules:
        replace(sys.modules[LOSSES])
    else:
        sys.meta_path.insert(0, Replacing())


def start_ray() -> None:
    import ray

    here = str(Path(__file__).resolve().parent)
    variables = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    ray.init(runtime_env={"worker_process_setup_hook": "openrlhf_fastppo.install", "env_vars": variables})


if __name__ == "__main__":
    import runpy

    start_ray()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
