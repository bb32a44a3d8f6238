"""How much memory came on top of what was there: for the examples that measure."""

import re
from pathlib import Path

import torch


class Peak:
    """MiB since it was made: what tensors held on a GPU, or what the process had resident on a CPU (Linux)."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated() / 2**20
        else:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
            self.base = self._resident("VmRSS")

    def read(self) -> float:
        """The most above the start. Waits for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() / 2**20 - self.base
        return self._resident("VmHWM") - self.base

    @staticmethod
    def _resident(line: str) -> float:
        return int(re.search(rf"{line}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
