"""A critic with a model of its own, on the backend that the settings name."""

from pathlib import Path

import torch

from trainers.config import ClusterConfig, ValueConfig
from trainers.value.hf import LocalValue
from trainers.value.megatron import MegatronValue

OwnValue = LocalValue | MegatronValue


def make_value(
    path: Path | str,
    cfg: ValueConfig,
    cluster: ClusterConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    param_dtype: torch.dtype,
    score_batch: int,
) -> OwnValue:
    """As of `LocalValue`. param_dtype: of backend=hf; megatron-core stores parameters in `dtype`."""
    if cfg.backend == "megatron":
        return MegatronValue(path, cfg, cluster, device=device, dtype=dtype, score_batch=score_batch)
    return LocalValue(path, cfg, device=device, dtype=dtype, param_dtype=param_dtype, score_batch=score_batch)
