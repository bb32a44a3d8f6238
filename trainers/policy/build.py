"""The policy that a configuration asks for."""

from pathlib import Path

import torch

from trainers.backbone import name_of
from trainers.config import PolicyConfig, TrainerConfig, ValueConfig
from trainers.policy import Policy
from trainers.policy.hf import HFPolicy


def make_policy(
    path: Path | str,
    config: TrainerConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    param_dtype: torch.dtype,
    reference: bool,
) -> Policy:
    """`dtype`: of computation; `param_dtype`: of stored trained parameters; `reference`: whether it has one."""
    if config.policy.backend == "megatron":
        from trainers.policy.megatron import MegatronPolicy  # needs the extra megatron

        return MegatronPolicy(path, config.policy, config.cluster, device=device, dtype=dtype, reference=reference)
    return HFPolicy(path, config.policy, device=device, dtype=dtype, param_dtype=param_dtype, reference=reference)


def stored_dtype(cfg: PolicyConfig | ValueConfig, dtype: torch.dtype) -> str:
    """What `cfg.param_dtype` comes to where the backend leaves no choice."""
    if cfg.backend == "megatron":
        return name_of(dtype)
    return "float32" if cfg.fully_shard else cfg.param_dtype
