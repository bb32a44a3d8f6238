"""`python benchmarks/machine.py [cpu|cuda]` prints the short name of this machine, or of its GPU, which is that of its
file in baselines/."""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def cores() -> int:
    """The cores that this process may use; what the suite runs on unless --threads says otherwise."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def isa() -> str:
    """The instruction set that the compiled kernels take here; FASTPPO_CPU_ISA names a lower one."""
    from fastppo import _C

    return _C.cpu_isa()


def cpu_model(cpuinfo: str | None = None) -> str:
    """As Linux calls it. Family and model stand in where a hypervisor leaves the number out of the name."""
    path = Path("/proc/cpuinfo")
    if cpuinfo is None:
        cpuinfo = path.read_text() if path.exists() else ""
    fields = dict(re.findall(r"^([^\t:\n]+?)\s*:\s*(.*)$", cpuinfo.partition("\n\n")[0], re.MULTILINE))
    name = fields.get("model name") or platform.processor() or platform.machine()
    name = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|\d+-Core|@.*", " ", name)
    if not re.search(r"\d", name) and "cpu family" in fields:
        name += f" family{fields['cpu family']} model{fields['model']}"
    return " ".join(name.split())


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def machine_name(model: str | None = None, num_cores: int | None = None, isa_name: str | None = None) -> str:
    return f"{slug(model or cpu_model())}-{num_cores or cores()}c-{isa_name or isa()}"


def card() -> str:
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device")
    return torch.cuda.get_device_name()


def card_state() -> dict[str, str]:
    """The driver's version and the clocks, as nvidia-smi tells them; empty without it."""
    names = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names, (value.strip() for value in told.splitlines()[0].split(",")), strict=True))


def versions() -> dict[str, str]:
    """Of what the numbers depend on; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in ("fastppo", "torch", "triton", "numpy", "numba", "pytest-benchmark"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.stdout.write((slug(card()) if sys.argv[1:] == ["cuda"] else machine_name()) + "\n")
