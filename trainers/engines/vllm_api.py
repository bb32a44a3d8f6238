"""What the engine needs of an installed vllm: imports, arguments, the environment it starts in.

Read in the source of 0.25.1; `tests/vllm_signatures.json` has the signatures with their files.
"""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.version import Version

from trainers.config_generation import VLLMConfig
from trainers.engines import Sampling
from trainers.extras import missing

OLDEST = Version("0.25.1")  # layerwise reload and the sleep tags as they are used here
TEMPERATURES = (0.01, 2.0)  # what vLLM takes: a lower one would be raised silently, a higher one is refused late
SEEDS = 2**63 - 1  # it keeps them as signed 64-bit integers, and takes -1 for none


@dataclass(frozen=True)
class Api:
    """The parts of an installed vllm that the engine uses."""

    version: str
    LLM: Any
    SamplingParams: Any


def load_api() -> Api:
    """The installed vllm.

    Raises:
        ImportError: it is missing, too old, or cannot be imported; names the extra `vllm`.
    """
    try:
        package = import_module("vllm")
        version = Version(package.__version__)
        if version >= OLDEST:
            return Api(str(version), package.LLM, package.SamplingParams)
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise missing("vllm", "vllm") from error
        raise _broken(error) from error
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        raise _broken(error) from error
    raise ImportError(f'vllm must be {OLDEST} or later, got {version}: pip install "fastppo[vllm]"', name="vllm")


def _broken(error: Exception) -> ImportError:
    return ImportError(
        f"vllm is installed but cannot be used ({type(error).__name__}: {error}); it needs the torch and the CUDA it "
        f'was built for: pip install "fastppo[vllm]"',
        name="vllm",
    )


def constructor_arguments(
    model: str, cfg: VLLMConfig, *, max_model_len: int, max_batch_size: int, dtype: torch.dtype, ranks: int
) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM for weights that are pushed before the first use.

    Args:
        ranks: of the whole run; several mean that torchrun started the workers.

    Raises:
        ValueError: policy.generation.vllm_cfg.vllm_kwargs sets what the engine itself sets.
    """
    own = dict(cfg.vllm_kwargs)
    arguments: dict[str, Any] = {
        "model": model,
        "load_format": "dummy",
        # Prompts and responses are token ids. A tokenizer or the model's generation_config.json (read under "vllm" too)
        # would bring stop tokens of its own, which min_tokens masks even where they are to be ignored.
        "skip_tokenizer_init": True,
        "generation_config": str(Path(__file__).parent / "no_defaults"),
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": cfg.tensor_parallel_size,
        "gpu_memory_utilization": cfg.gpu_memory_utilization,
        "max_model_len": max_model_len,
        "max_num_seqs": max_batch_size,
        "enforce_eager": cfg.enforce_eager,
        "enable_prefix_caching": cfg.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "trainers.engines.vllm_worker.Worker",
    }
    if ranks > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
    reserved = {*arguments, "tokenizer", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend"}
    if taken := sorted(reserved & own.keys()):
        raise ValueError(
            f"policy.generation.vllm_cfg.vllm_kwargs: {taken[0]} is set by the engine or has a key of its own"
        )
    return {**arguments, "enable_sleep_mode": True, **own}


def check_sampling(sampling: Sampling) -> None:
    """Raises ValueError where vLLM would sample something else, or give log-probs of something else."""
    low, high = TEMPERATURES
    if sampling.greedy:
        if sampling.temperature != 1 or sampling.top_p != 1 or sampling.top_k is not None:
            raise ValueError(
                "policy.generation.backend=vllm: greedy responses have log-probs at temperature 1, of all tokens; got "
                f"temperature={sampling.temperature} top_p={sampling.top_p} top_k={sampling.top_k}"
            )
    elif not low <= sampling.temperature <= high:
        raise ValueError(
            f"policy.generation.backend=vllm: temperature must be {low} to {high}, got {sampling.temperature}"
        )


def sampling_arguments(sampling: Sampling, seed: int, stops: Sequence[int]) -> dict[str, Any]:
    """Keyword arguments of vllm.SamplingParams."""
    return {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,  # 0: all
        "repetition_penalty": sampling.repetition_penalty,
        "seed": seed & SEEDS,
        # All end tokens are among these, so vLLM need not know which of them are "the" end of sequence.
        "stop_token_ids": list(stops),
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,  # stop strings are looked for in the trainer's own text of a response
    }


@contextmanager
def starting(in_process: bool) -> Iterator[None]:
    """What must hold while vllm.LLM is made: its environment, and that in this process it leaves the trainer's random
    numbers, default dtype and matmul precision as they were."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    # With log-probs of the sampled distribution FlashInfer's sampler is never used, but would be imported.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()), enabled=in_process):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_float32_matmul_precision(precision)
            torch.set_default_dtype(dtype)
