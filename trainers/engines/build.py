"""The engine that a configuration asks for."""

import torch

from trainers.config import GenerationConfig
from trainers.engines import Engine
from trainers.engines.native import NativeEngine
from trainers.policy.hf import HFPolicy


def make_engine(policy: HFPolicy, cfg: GenerationConfig, compute_dtype: torch.dtype) -> Engine:
    """One engine for this rank, with the policy's tokenizer; the first refit brings its weights."""
    dtype = compute_dtype if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
    return NativeEngine(
        policy.engine_model(dtype),
        policy.tokenizer,
        max_batch_size=cfg.max_batch_size,
        kv_cache_gb=cfg.kv_cache_gb,
        timeout_s=cfg.timeout_s,
    )
