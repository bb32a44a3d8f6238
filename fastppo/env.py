"""`python -m fastppo.env`: versions, devices, the compiled module, and which backend each op takes and why."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import fastppo
from fastppo import _build
from fastppo.backends import KERNELS, resolve

PACKAGES = ("numpy", "triton", "transformers", "accelerate", "safetensors", "omegaconf")
VARIABLES = (
    "FASTPPO_CHECK",
    "FASTPPO_CPU_ISA",
    "FASTPPO_SAVE_LIMIT",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
)


def report() -> str:
    """The whole report, one fact a line."""
    lines = ["Copy-paste the following when reporting an issue:", ""]
    for title, section in facts().items():
        lines.append(f"{title}:")
        lines += [f"  {name}: {value}" for name, value in section.items()]
    return "\n".join(lines)


def facts() -> dict[str, dict[str, str]]:
    """The same by section and name; every training run keeps it as env.json."""
    return {
        "versions": dict(_versions()),
        "devices": dict(_devices()),
        "compiled module": dict(_compiled()),
        "backends (auto)": dict(_backends()),
    }


def _versions() -> Iterator[tuple[str, str]]:
    yield "fastppo", f"{fastppo.__version__} ({Path(fastppo.__file__).parent})"
    yield "python", f"{platform.python_version()} ({sys.implementation.name})"
    yield "platform", platform.platform()
    yield "torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"
    for variable in VARIABLES:
        if variable in os.environ:
            yield variable, os.environ[variable]


def _devices() -> Iterator[tuple[str, str]]:
    yield "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    if not torch.cuda.is_available():
        yield "cuda", "none that torch can use"
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{card.name}, sm_{card.major}{card.minor}, {card.total_memory / 2**30:.1f} GiB"


def _compiled() -> Iterator[tuple[str, str]]:
    module, reason = _build.load()
    tree = _build.csrc_hash()
    if module is None:
        yield "fastppo._C", f"not loaded: {reason}"
        return
    yield "fastppo._C", str(module.__file__)
    stale = "" if tree in (None, module.csrc_hash) else f", STALE: the tree has {tree[:12]}, rebuild it"
    yield "csrc hash", f"{module.csrc_hash[:12]}{stale}"
    yield "CPU kernels", module.cpu_isa()
    yield "CUDA kernels", module.cuda_archs or f"none: {module.cuda_problem(0)}"


def _backends() -> Iterator[tuple[str, str]]:
    devices = [torch.device("cpu")] + [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for op in KERNELS:
        for device in devices:
            backend, why = resolve(op, "auto", device, torch.float32)
            if (op, backend) == ("linear_logprob", "cuda"):
                backend, why = "cuda, else triton", "half precision, no bias or softcap, where logits are not kept"
            yield f"{op} on {device}", f"{backend} ({why})"


if __name__ == "__main__":
    print(report())
