"""megatron-core 0.16 on a CPU with gloo: replaces, in this process only, what it takes for granted of CUDA.

    torchrun --nproc-per-node 2 tests/megatron_cpu.py trainers.ppo key=value ...

applies the patches, then runs the module. Tests call `apply()` in the ranks that they start. Dropout must be 0: ranks
draw the same numbers here.
"""

import contextlib
import functools
import multiprocessing
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
import torch.utils._device as torch_device

FACTORIES = ("ones", "tensor", "zeros")
IMPORTS = (
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.pipeline_parallel",
    "trainers.policy.megatron",
    "trainers.ppo",
    "trainers.reinforce",
    "transformers.models.llama.modeling_llama",
    *(f"transformers.models.{name}.configuration_{name}" for name in ("llama", "qwen2", "qwen3", "qwen3_moe")),
)


def apply() -> None:
    """May be called again. Not to be undone: for processes that end after it."""
    if getattr(apply, "done", False):
        return
    apply.done = True
    cpu = torch.device("cpu")
    # Where layers, rotary tables, buffers, gathered activations and what a pipeline stage receives are allocated.
    torch.cuda.current_device = lambda: cpu
    # After a pipeline stage's batched sends, for a race that only NCCL has.
    torch.cuda.synchronize = lambda device=None: None
    # The last stage's copy of tied embeddings is moved to the GPU before it is filled.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    # megatron-core's distributed optimizer tells float32 parameters from others by the names of their CUDA types.
    torch.Tensor.type = functools.partialmethod(_type_on_a_gpu, torch.Tensor.type)
    # `with torch.device(...)`, in which transformers builds models, knows these functions as they are at its first use.
    torch_device._device_constructors()
    # The default causal mask, the pipeline schedules' token count and the optimizer's flags name "cuda" themselves.
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # six say that Transformer Engine and Apex are missing
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import token_dispatcher

        from trainers import megatron_rules

    megatron_rules.DEVICES.append("cpu")
    # Attention forks the GPU's random state around dropout, at probability 0 too.
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    # Recomputed layers save and restore the GPU's random state.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # Tokens go to their experts by sizes that a stream of its own brings to the host.
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"
    token_dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _sizes_on_the_host


def _type_on_a_gpu(
    tensor: torch.Tensor, plain: Callable[..., Any], dtype: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if dtype is None:
        return plain(tensor).replace("torch.", "torch.cuda.")
    return plain(tensor, dtype, *args, **kwargs)


def _sizes_on_the_host(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if torch.is_tensor(sizes := getattr(self, name, None)):
                setattr(self, name, sizes.numpy())
    return tokens_per_expert


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return on_cpu


def spawn(worker: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """torch.multiprocessing.spawn, but ranks are forked from one process that has imported what takes them seconds."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*IMPORTS, worker.__module__])
    torch.multiprocessing.start_processes(worker, args, nprocs, start_method="forkserver")


def main() -> dict[str, Any]:
    """The globals of the module that was run."""
    if len(sys.argv) < 2:
        sys.exit("usage: torchrun --nproc-per-node N tests/megatron_cpu.py MODULE [ARGUMENT ...]")
    module = sys.argv[1]
    del sys.argv[1]
    sys.path[0] = str(Path(__file__).parents[1])  # as `python -m` from the root has it, not this file's folder
    apply()
    return runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
