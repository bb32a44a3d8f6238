"""What the generation engine holds in the device's memory, for --dry-run.

The embedded engine on a GPU has a KV cache in pages, sized at the first rollout as `ContinuousBatching._reserve` does,
for prompts and responses at their longest; its rows of state; and what its CUDA graphs keep, which is little beside a
batch's logits. An architecture that falls back to generating batch by batch is not known before its weights are there.
On a CPU the cache is that of a batch. vLLM and TensorRT-LLM have weights of their own and take a share of the card.
Not counted: what a library holds while it sleeps, and graphs of its own.
"""

from dataclasses import dataclass
from typing import Any

import torch

from trainers.arithmetic import longest_sequence
from trainers.config import TrainerConfig
from trainers.engines.pages import PAGE, pages_for

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class EngineMemory:
    words: str
    held: int  # bytes from the first rollout on; 0 if given back while the policy trains
    generating: int  # bytes that come while it generates


def engine_memory(
    config: TrainerConfig,
    model: Any,
    parameters: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    free: int,
    total: int,
) -> EngineMemory:
    """Args: model: its transformers config; parameters: their number; dtype: the engine's; free: bytes of the device
    when the first rollout begins; total: of the whole device."""
    generation = config.policy.generation
    if generation.backend == "vllm":
        held, words = vllm_bytes(config, model, parameters * dtype.itemsize, dtype, total)
    elif generation.backend == "trtllm":
        held, words = trtllm_bytes(config, model, parameters * dtype.itemsize, dtype, free)
    elif device.type == "cuda":
        return of_pages(config, model, dtype, free)
    else:
        rows, longest = generation.max_batch_size, longest_sequence(config)[0]
        cache, sampler = kv_cache_bytes(model, rows, longest, dtype), sampler_bytes(model, rows, dtype)
        words = f"the embedded engine, {rows} sequences x {longest:,} tokens: KV cache {gigabytes(cache)}, sampler "
        return EngineMemory(words + gigabytes(sampler), 0, cache + sampler)
    return placed(words, held, 0, released=generation.release_memory)


def of_pages(config: TrainerConfig, model: Any, dtype: torch.dtype, free: int) -> EngineMemory:
    from trainers.engines.continuous import MEMORY_SHARE, PREFILL_TOKENS

    generation, places = config.policy.generation, config.policy.generation.max_batch_size
    algorithm, longest = config.algorithm, longest_sequence(config)[0]
    prompts, prompt = algorithm.num_prompts_per_step, config.data.max_prompt_length
    requests = prompts * algorithm.num_generations_per_prompt
    if config.policy.max_total_sequence_length is not None:  # dialogues: in their last turn no two begin alike
        prompts, prompt = requests, longest - generation.max_new_tokens
    own, shared = pages_for(longest) - prompt // PAGE, pages_for(prompt)
    wanted = min(places, requests) * own + min(prompts, places + 1) * shared
    page = kv_cache_bytes(model, 1, PAGE, dtype)
    room = free * MEMORY_SHARE if generation.kv_cache_gb is None else generation.kv_cache_gb * GIB
    pages = max(min(wanted, int(room) // page), 0)
    cache = (pages + 1) * page
    state = (places + 1) * (4 * pages_for(longest) + 25 + 20 * (generation.max_new_tokens + 1))
    state += places * model.vocab_size * (dtype.itemsize + (3 * 4 if generation.min_new_tokens else 0))
    prefill = layer_bytes(model, max(min(prompts * prompt, PREFILL_TOKENS), prompt), dtype)
    words = f"the embedded engine, KV cache of {pages * PAGE:,} tokens in pages of {PAGE}: {gigabytes(cache)}, "
    if pages < own + shared:
        words += f"too small for a sequence of {longest:,}, "
    elif pages < wanted:
        words += f"where {wanted * PAGE:,} are wanted, "
    words += f"state and logits {gigabytes(state)}, prompts {gigabytes(prefill)}"
    return placed(words, cache + state, prefill, released=generation.release_memory)


def vllm_bytes(config: TrainerConfig, model: Any, weights: int, dtype: torch.dtype, total: int) -> tuple[int, str]:
    """Weights, activations and cache are within the share."""
    cfg = config.policy.generation.vllm_cfg
    weights //= cfg.tensor_parallel_size
    share = int(cfg.gpu_memory_utilization * total)
    tokens = max(share - weights, 0) * cfg.tensor_parallel_size // kv_cache_bytes(model, 1, 1, dtype)
    words = (
        f"vLLM, vllm_cfg.gpu_memory_utilization={cfg.gpu_memory_utilization} of {gigabytes(total)}: "
        f"{gigabytes(share)}, weights {gigabytes(weights)} of it, so a KV cache of less than {tokens:,} tokens"
    )
    return with_buckets(config, share, words, weights, flat=not cfg.in_process)


def trtllm_bytes(config: TrainerConfig, model: Any, weights: int, dtype: torch.dtype, free: int) -> tuple[int, str]:
    """The share is the cache's, of what is free beside the weights."""
    cfg = config.policy.generation.trtllm_cfg
    weights //= cfg.tensor_parallel_size
    cache = int(cfg.free_gpu_memory_fraction * max(free - weights, 0))
    tokens = cache * cfg.tensor_parallel_size // kv_cache_bytes(model, 1, 1, dtype)
    words = (
        f"TensorRT-LLM, weights {gigabytes(weights)}, KV cache of {tokens:,} tokens, "
        f"trtllm_cfg.free_gpu_memory_fraction={cfg.free_gpu_memory_fraction} of what is free: {gigabytes(cache)}"
    )
    return with_buckets(config, weights + cache, words, weights, flat=True)


def with_buckets(config: TrainerConfig, held: int, words: str, weights: int, *, flat: bool) -> tuple[int, str]:
    """`flat`: an engine in another process reads new weights from two buffers on the policy's device."""
    if not flat:
        return held, words
    buckets = 2 * min(config.policy.generation.refit_bucket_mb * MIB, weights)
    return held + buckets, f"{words}, refit buckets {gigabytes(buckets)}"


def placed(words: str, held: int, generating: int, *, released: bool) -> EngineMemory:
    if released:
        return EngineMemory(f"{words}; given back while the policy trains", 0, held + generating)
    return EngineMemory(f"{words}; held from the first rollout on", held, generating)


def kv_cache_bytes(config: Any, rows: int, length: int, dtype: torch.dtype) -> int:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size * dtype.itemsize * rows * length


def sampler_bytes(config: Any, rows: int, dtype: torch.dtype) -> int:
    """On a CPU: the logits, 3 float32 copies, float64 sums."""
    return rows * config.vocab_size * (dtype.itemsize + 3 * 4 + 8)


def layer_bytes(config: Any, tokens: int, dtype: torch.dtype) -> int:
    """Of one layer without gradients: residual stream and its norm in float32, three vectors of the MLP."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return tokens * (8 * config.hidden_size + 3 * inner * dtype.itemsize)


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
