"""What TensorRT-LLM's versions have in common, and where they differ: imports, arguments, handles of tensors.

Names were read in the sources of 1.2 and of 1.3.0rc13 and later; `tests/trtllm_signatures.json` has them with their
origin. Nothing here was run on a real installation, see docs/engines_trtllm.md.
"""

import base64
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from trainers.config_generation import TRTLLMConfig
from trainers.engines import Sampling
from trainers.extras import missing

OLDEST = Version("1.2.0rc6")  # AsyncLLM, update_weights and its closing call
PENALTIES = Version("1.3.0rc24")  # the first whose documentation lists penalties among what TorchSampler does
KV_CACHE = "kv_cache"
# Launchers leave these behind. Ray's workers form a group of their own, and MPI must not find the trainer's.
LAUNCHERS = ("PMI_", "PMIX_", "MPI_", "OMPI_", "SLURM_", "TORCHELASTIC_")
RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Api:
    """The parts of an installed tensorrt_llm that the engine uses."""

    version: str
    AsyncLLM: Any
    SamplingParams: Any
    KvCacheConfig: Any
    CudaGraphConfig: Any
    SleepConfig: Any  # None before 1.3: enable_sleep=True in its place
    memory_tags: tuple[str, ...]  # that may be released, kv_cache among them
    get_device_uuid: Any  # (device index) -> str
    processed: Any  # the value of SamplingParams.logprobs_mode for the sampled distribution; None: raw log-probs only
    penalties: bool  # the sampler applies repetition_penalty
    can_abort: bool  # workers have abort_update_weights, which must follow an update that failed on any of them


def load_api() -> Api:
    """The installed tensorrt_llm.

    Raises:
        ImportError: it is missing, too old, or cannot be imported; names the extra `trtllm`.
    """
    try:
        package = import_module("tensorrt_llm")
        if (version := Version(package.__version__)) >= OLDEST:
            return _parts(package, version)
    except ModuleNotFoundError as error:
        if error.name == "tensorrt_llm":
            raise missing("tensorrt_llm", "trtllm") from error
        raise _broken(error) from error
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        # Without a GPU, or beside a CUDA that does not fit, the import itself raises a RuntimeError.
        raise _broken(error) from error
    raise ImportError(
        f'tensorrt_llm must be {OLDEST} or later, got {version}: pip install "fastppo[trtllm]"', name="tensorrt_llm"
    )


def _parts(package: Any, version: Version) -> Api:
    llm_args, sampling = (import_module(f"tensorrt_llm.{name}") for name in ("llmapi.llm_args", "sampling_params"))
    # Until 1.3 the tags were elsewhere.
    has_tags = hasattr(llm_args, "ExecutorMemoryType")
    tags = (llm_args if has_tags else import_module("tensorrt_llm._torch.virtual_memory")).ExecutorMemoryType
    has_mode = "logprobs_mode" in {field.name for field in fields(sampling.SamplingParams)}
    return Api(
        version=str(version),
        AsyncLLM=package.AsyncLLM,
        SamplingParams=sampling.SamplingParams,
        KvCacheConfig=llm_args.KvCacheConfig,
        CudaGraphConfig=llm_args.CudaGraphConfig,
        SleepConfig=getattr(llm_args, "SleepConfig", None),
        memory_tags=tuple(tag.value for tag in tags if not tag.value.startswith("_")),
        get_device_uuid=import_module("tensorrt_llm._torch.utils").get_device_uuid,
        processed=sampling.LogprobMode.PROCESSED if has_mode else None,
        penalties=version >= PENALTIES,
        can_abort=hasattr(import_module("tensorrt_llm.llmapi.rlhf_utils").WorkerExtension, "abort_update_weights"),
    )


def _broken(error: Exception) -> ImportError:
    return ImportError(
        f"tensorrt_llm is installed but cannot be used ({type(error).__name__}: {error}); it needs a GPU and a CUDA "
        f'that fits it: pip install "fastppo[trtllm]"',
        name="tensorrt_llm",
    )


def constructor_arguments(
    api: Api, model: str, cfg: TRTLLMConfig, *, max_seq_len: int, max_batch_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Keyword arguments of AsyncLLM for weights that are pushed before the first use.

    Raises:
        ValueError: policy.generation.trtllm_cfg.kwargs sets what the engine itself sets.
    """
    own = dict(cfg.kwargs)
    cache = {
        "enable_block_reuse": cfg.enable_block_reuse,
        "free_gpu_memory_fraction": cfg.free_gpu_memory_fraction,
        **_mapping(own, "kv_cache_config"),
    }
    graphs = {"enable_padding": True, "max_batch_size": max_batch_size, **_mapping(own, "cuda_graph_config")}
    arguments: dict[str, Any] = {
        "model": model,  # by keyword: the first three positions are placement arguments
        "backend": "pytorch",
        "ray_worker_extension_cls": "trainers.engines.trtllm_worker.Worker",
        "load_format": "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": cfg.tensor_parallel_size,
        "max_seq_len": max_seq_len,
        "max_input_len": max_seq_len,  # its default of 1024 would reject longer prompts
        "max_batch_size": max_batch_size,
        "enable_chunked_prefill": True,  # else a prompt longer than max_num_tokens is an error
        "sampler_type": "TorchSampler",  # the other one is gone since 1.3.0rc26
        "allreduce_strategy": "NCCL",  # its own all-reduce made several replicas diverge
        "kv_cache_config": api.KvCacheConfig(**cache),
        "cuda_graph_config": api.CudaGraphConfig(**graphs),
        # One worker a GPU: with less, Ray may put two ranks of one engine on the same GPU. The cluster is the engine's
        # own (see ray_environment), so the trainer's share is not Ray's business.
        "per_worker_gpu_share": 1.0,
    }
    if cfg.max_num_tokens is not None:
        arguments["max_num_tokens"] = cfg.max_num_tokens
    if api.SleepConfig is None:
        arguments["enable_sleep"] = True
    else:
        # Neither is worth a copy in the CPU's memory: weights that were given up are sent again, the cache is filled.
        modes = {tag: "NONE" for tag in (KV_CACHE, "model_weights") if tag in api.memory_tags}
        arguments["sleep_config"] = api.SleepConfig(restore_modes=modes)
    reserved = {*arguments, "orchestrator_type", "ray_placement_config", "max_num_tokens"}
    reserved |= {"enable_sleep", "sleep_config", "placement_groups", "placement_bundle_indices"}
    reserved |= {"pipeline_parallel_size", "skip_tokenizer_init"}
    if taken := sorted(reserved & own.keys()):
        raise ValueError(
            f"policy.generation.trtllm_cfg.kwargs: {taken[0]} is set by the engine or has a key of its own"
        )
    return arguments | own


def _mapping(own: dict[str, Any], name: str) -> dict[str, Any]:
    """A nested configuration from kwargs, taken out of them."""
    value = own.pop(name, {})
    if not hasattr(value, "keys"):
        raise ValueError(f"policy.generation.trtllm_cfg.kwargs.{name}: expected a mapping, got {value!r}")
    return dict(value)


def sampling_arguments(
    api: Api, sampling: Sampling, seed: int, stops: Sequence[int], pad_id: int | None
) -> dict[str, Any]:
    """Keyword arguments of SamplingParams, all that matter given: left out, several of them together mean greedy.

    Raises:
        ValueError: a sampling whose log-probs this version cannot give, or that its sampler does not do.
    """
    plain = sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k is None
    plain = plain and sampling.repetition_penalty == 1 and sampling.min_new_tokens == 0
    what = f"policy.generation.backend=trtllm with TensorRT-LLM {api.version}"
    if sampling.repetition_penalty != 1 and not api.penalties:
        raise ValueError(
            f"{what} does not apply repetition_penalty={sampling.repetition_penalty}: it needs {PENALTIES} or later"
        )
    if sampling.min_new_tokens and len(stops) != 1:
        raise ValueError(
            f"{what}: min_new_tokens={sampling.min_new_tokens} needs exactly one token that ends a response, since "
            f"the sampler holds back only one; here are {list(stops)}"
        )
    if not plain and (api.processed is None or sampling.greedy):
        changed = f"temperature={sampling.temperature} top_p={sampling.top_p} top_k={sampling.top_k} "
        changed += f"repetition_penalty={sampling.repetition_penalty} min_new_tokens={sampling.min_new_tokens}"
        why = "greedy responses have log-probs" if sampling.greedy else "there are log-probs"
        raise ValueError(
            f"{what}: {why} of the model's own distribution only (temperature 1, top_p 1, no top_k, no penalty, "
            f"min_new_tokens 0), got {changed}"
        )
    arguments: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 1 if sampling.greedy else sampling.top_k or 0,  # 0: all
        "seed": seed,  # 64 bits, as ours
        "stop_token_ids": list(stops) or None,
        "include_stop_str_in_output": True,  # of stop_token_ids too
        # Not None, or the tokenizer's own end token would be taken even where it is to be ignored. -1: no such token;
        # the stop tokens end a response as stop_token_ids. What min_tokens holds back is the end token.
        "end_id": stops[0] if sampling.min_new_tokens else -1,
        "pad_id": pad_id if pad_id is not None else 0,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }
    # Stop strings stay here: the engine would match a text's own tokens only, and where end_id is given some versions
    # do not prepare them.
    if sampling.min_new_tokens:
        arguments["min_tokens"] = sampling.min_new_tokens
    if sampling.repetition_penalty != 1:
        arguments["repetition_penalty"] = sampling.repetition_penalty
    if not plain:
        arguments["logprobs_mode"] = api.processed
    return arguments


def current_gpu() -> int:
    return torch.cuda.current_device()


def physical_gpu() -> str:
    """The current GPU as CUDA_VISIBLE_DEVICES names it: by number, which is all that the engine's workers read."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[current_gpu()].strip() if visible else str(current_gpu())
    if not name.isdigit():
        raise ValueError(f"CUDA_VISIBLE_DEVICES={visible}: policy.generation.backend=trtllm needs numbers of GPUs")
    return name


def to_handle(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """What another process on this GPU rebuilds the tensor from, without a copy (CUDA IPC): a function of torch and
    its arguments, of which the engine replaces the seventh by its own device."""
    return reduce_tensor(tensor)


def packed_handles(bucket: Sequence[tuple[str, Tensor]]) -> str:
    """A bucket as `update_weights` takes it: a list, pickled, in base64. The tensors must outlive its answer."""
    return base64.b64encode(pickle.dumps([(name, to_handle(tensor)) for name, tensor in bucket])).decode()


@contextmanager
def ray_environment(gpus: Sequence[str]) -> Iterator[None]:
    """The environment in which the engine's workers start: a Ray cluster of their own on these GPUs and no others."""
    added = {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",
        "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",  # copies stay on the caller's stream, and memory is lower
    }
    removed = {name for name in os.environ if name.startswith(LAUNCHERS) or name in RENDEZVOUS}
    kept = {name: os.environ.pop(name, None) for name in removed | added.keys()}
    os.environ |= added
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
