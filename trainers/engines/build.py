"""The engine that a configuration asks for."""

import torch

from trainers.arithmetic import longest_request
from trainers.config import TrainerConfig
from trainers.engines import Engine
from trainers.engines.native import NativeEngine
from trainers.policy import Policy


def make_engine(policy: Policy, config: TrainerConfig, compute_dtype: torch.dtype) -> Engine:
    """One engine for this rank, with the policy's tokenizer; the first refit brings its weights."""
    cfg = config.policy.generation
    dtype = compute_dtype if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
    if cfg.backend == "trtllm":
        from trainers.engines.trtllm import TRTLLMEngine

        return TRTLLMEngine(
            policy.path,
            policy.tokenizer,
            cfg.trtllm_cfg,
            max_seq_len=longest_request(config),
            max_batch_size=cfg.max_batch_size,
            dtype=dtype,
            timeout_s=cfg.timeout_s,
        )
    if cfg.backend == "vllm":
        from trainers.engines.vllm import VLLMEngine

        return VLLMEngine(
            policy.path,
            policy.tokenizer,
            cfg.vllm_cfg,
            max_model_len=longest_request(config),
            max_batch_size=cfg.max_batch_size,
            dtype=dtype,
            timeout_s=cfg.timeout_s,
        )
    return NativeEngine(
        policy.engine_model(dtype),
        policy.tokenizer,
        max_batch_size=cfg.max_batch_size,
        kv_cache_gb=cfg.kv_cache_gb,
        timeout_s=cfg.timeout_s,
        own_weights=config.policy.backend == "megatron" or config.policy.fully_shard,
    )
