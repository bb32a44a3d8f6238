"""How responses are sampled, and the engines that do it: the block `policy.generation`."""

from dataclasses import dataclass
from typing import Any

from trainers.config_types import block, opt


@dataclass
class ValSamplingConfig:
    """How validation is sampled; what is null is as in training. Nothing here touches what is trained."""

    max_new_tokens: int | None = opt(None, "longest response in tokens, the stop token included", free=True)
    min_new_tokens: int | None = opt(None, "tokens that a response has before it may stop", free=True)
    temperature: float | None = opt(None, "sampling temperature", free=True)
    top_p: float | None = opt(
        None, "sample among the fewest tokens, most likely first, that have this probability together", free=True
    )
    top_k: int | None = opt(None, "sample among this many most likely tokens, before top_p", free=True)
    greedy: bool | None = opt(None, "take the most likely token", free=True)
    repetition_penalty: float | None = opt(
        None,
        "positive logits of the tokens already in prompt or response are divided by this, negative ones multiplied",
        free=True,
    )


@dataclass
class TRTLLMConfig:
    """backend=trtllm: TensorRT-LLM's PyTorch backend on the trainer's GPUs, in a Ray cluster of its own."""

    tensor_parallel_size: int = opt(1, "GPUs, hence neighbouring ranks of torchrun, that one engine spans", free=True)
    max_seq_len: int | None = opt(
        None, "tokens of prompt and response together; default: the longest that this run asks for", free=True
    )
    max_num_tokens: int | None = opt(
        None, "tokens of one forward pass; longer prompts are taken in chunks; default: the library's own", free=True
    )
    free_gpu_memory_fraction: float = opt(
        0.4, "share of the memory that is free beside the weights, for the KV cache", free=True
    )
    enable_block_reuse: bool = opt(True, "share the KV cache of equal beginnings of prompts", free=True)
    kwargs: dict[str, Any] = opt(
        {},
        "further arguments of tensorrt_llm.AsyncLLM, by its names; kv_cache_config and cuda_graph_config as mappings",
        free=True,
    )


@dataclass
class VLLMConfig:
    """backend=vllm: vLLM on the trainer's GPUs."""

    tensor_parallel_size: int = opt(1, "GPUs, hence neighbouring ranks of torchrun, that one engine spans", free=True)
    gpu_memory_utilization: float = opt(
        0.4, "share of the GPU's memory for weights, activations and KV cache of the engine", free=True
    )
    max_model_len: int | None = opt(
        None, "tokens of prompt and response together; default: the longest that this run asks for", free=True
    )
    enforce_eager: bool = opt(False, "no torch.compile and no CUDA graphs: a quicker start, slower decoding", free=True)
    enable_prefix_caching: bool = opt(True, "share the KV cache of equal beginnings of prompts", free=True)
    in_process: bool = opt(
        True, "run in the trainer's process, so that weights need no handles; false: in one of its own (one rank)",
        free=True,
    )  # fmt: skip
    vllm_kwargs: dict[str, Any] = opt({}, "further arguments of vllm.LLM, by its names", free=True)


@dataclass
class GenerationConfig:
    """How the policy is sampled. The trainer's log-probs are of this distribution; what it cannot score is refused."""

    max_new_tokens: int = opt(16, "longest response in tokens, the stop token included; in a dialogue, of each turn")
    min_new_tokens: int = opt(
        0,
        "tokens that a response, in a dialogue each turn, has before it may stop; scored: their log-probs are of the "
        "distribution without stop tokens",
    )
    temperature: float = opt(1.0, "sampling temperature; the trainer divides the logits by it too")
    top_p: float = opt(1.0, "the trainer does not score it: 1 in training, see policy.generation.val")
    top_k: int | None = opt(None, "the trainer does not score it: null in training, see policy.generation.val")
    greedy: bool = opt(False, "the trainer does not score it: false in training, see policy.generation.val")
    repetition_penalty: float = opt(1.0, "the trainer does not score it: 1 in training, see policy.generation.val")
    ignore_eos: bool = opt(
        False, "sample past the end-of-sequence token (fixed-length responses); stop_token_ids still stop"
    )
    stop_token_ids: list[int] = opt([], "token ids that end a response, beside the tokenizer's end-of-sequence token")
    stop_strings: list[str] = opt([], "texts that end a response; the tokens that spell one are kept and trained")
    backend: str = opt(
        "native",
        "what generates; native: the embedded engine; trtllm: TensorRT-LLM, vllm: vLLM, on the trainer's GPUs",
        choices=("native", "trtllm", "vllm"),
    )
    timeout_s: float | None = opt(
        1800.0, "seconds in which the engine must have answered a batch of prompts, else the run stops; null: no limit",
        free=True,
    )  # fmt: skip
    max_batch_size: int = opt(64, "sequences decoded together", free=True)
    kv_cache_gb: float | None = opt(
        None,
        "embedded engine on a GPU: size of its KV cache in GiB; default: what max_batch_size of a step's longest "
        "responses need, at most 0.8 of the memory that is free then",
        free=True,
    )
    refit_bucket_mb: int = opt(
        512,
        "new weights reach the engine in buckets of this many MB (2**20 bytes): memory on the policy's device, two "
        "buckets for an engine in another process, one for the merged matrices of policy.peft; a larger tensor has a "
        "bucket of its own",
        free=True,
    )
    release_memory: bool = opt(
        False,
        "while the policy trains, the engine gives back its KV cache, and its weights where they are not the policy's",
        free=True,
    )
    probe_period: int = opt(
        10,
        "after the refit of every such step the engine answers a fixed prompt, and the run stops if the answer's "
        "log-probs are not those of the policy's new weights; 0: never",
        free=True,
    )
    dtype: str = opt(
        "auto",
        "weights of the engine; auto: the policy's compute dtype",
        choices=("auto", "float32", "bfloat16"),
    )
    trtllm_cfg: TRTLLMConfig = block(TRTLLMConfig)
    vllm_cfg: VLLMConfig = block(VLLMConfig)
    val: ValSamplingConfig = block(ValSamplingConfig)
