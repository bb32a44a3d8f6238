"""Which backend an op takes: the one place where backend="auto" decides, by op, device and dtype, never by values."""

import importlib.util
import os
from functools import cache

import torch

from fastppo import _build

NAMES = ("auto", "cuda", "triton", "cpu", "torch")

# op -> device type -> its kernels there, best first. "torch" runs everywhere and is what is left.
KERNELS: dict[str, dict[str, tuple[str, ...]]] = {
    "logprob": {"cpu": ("cpu", "triton"), "cuda": ("triton",)},
    # Of the products; what is not fused with them is done by the kernels of logprob.
    "linear_logprob": {"cpu": ("cpu", "triton"), "cuda": ("cuda", "triton")},
    "gae": {"cpu": ("cpu", "triton"), "cuda": ("cuda", "triton")},
    "ppo_loss": {"cpu": ("cpu", "triton"), "cuda": ("triton",)},
    "value_loss": {"cpu": ("cpu", "triton"), "cuda": ("triton",)},
}


def resolve(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The backend that `op` takes for tensors on `device` computed in `dtype`, and why.

    Raises:
        ValueError: `op` or `backend` is no known name.
        RuntimeError: `backend` is forced and cannot run here; the message names what can.
    """
    if op not in KERNELS:
        raise ValueError(f"op must be one of {', '.join(KERNELS)}, got {op!r}")
    if backend not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(map(repr, NAMES))}, got {backend!r}")
    if backend == "torch":
        return "torch", "asked for"
    if dtype == torch.float64:
        return "torch", "float64 is computed by the reference"

    problems: dict[str, str] = {}
    before = ""  # why those do not run that come first
    for kernel in KERNELS[op].get(device.type, ()):
        problem = _problem(op, kernel, device.type, device.index)
        if not problem and backend in ("auto", kernel):
            if backend == kernel:
                return kernel, "asked for"
            return kernel, f"the first of its kernels on {device.type} that runs{before}"
        problems[kernel] = problem
        before += f"; {kernel}: {problem}"

    if backend == "auto":
        return "torch", before.removeprefix("; ") or f"{op} has no kernel for {device.type}"
    there = [repr(kernel) for kernel, problem in problems.items() if not problem] + ["'torch'"]
    why = problems.get(backend) or f"{op} has no such kernel for {device.type} tensors"
    raise RuntimeError(f"backend={backend!r} cannot run {op} on {device}: {why}; available: {', '.join(there)}")


def _problem(op: str, kernel: str, device_type: str, index: int | None) -> str:
    """Why an op's kernel cannot run on a device; empty where it can."""
    return _cached_problem(op, kernel, device_type, index)


# What torch.compiler.assume_constant_result sets; that would import all of the compiler together with fastppo.
_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _cached_problem(op: str, kernel: str, device_type: str, index: int | None) -> str:
    if kernel == "triton":
        return _triton_problem(device_type, index)
    module, reason = _build.load()
    if module is None:
        return f"the compiled module fastppo._C does not load ({reason})"
    if kernel == "cuda":
        problem = module.head_problem if op == "linear_logprob" else module.cuda_problem
        return str(problem(index or 0))
    return ""


def _triton_problem(device_type: str, index: int | None) -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device_type == "cpu":
        # Triton itself reads the variable once, when it defines a kernel.
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return "" if interpreted else "Triton takes CPU tensors only under TRITON_INTERPRET=1"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(index)
    return (
        "" if capability >= (8, 0) else f"Triton's kernels need sm_80 or newer, not sm_{''.join(map(str, capability))}"
    )
