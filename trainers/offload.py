"""What waits in the CPU's memory while the GPU does something else, and the check that there is a GPU to relieve."""

import torch
from torch import Tensor

from trainers.arithmetic import ConfigError
from trainers.config import TrainerConfig
from trainers.extras import require_installed
from trainers.megatron_rules import check_device as check_megatron


def to_host(tensor: Tensor) -> Tensor:
    """A copy in the CPU's memory, pinned if the tensor is on a GPU, so that it travels at the bus's full speed."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Back from the CPU's memory. Work that is put on the device afterwards finds it there."""
    return tensor.to(device, non_blocking=True)


def check_device(config: TrainerConfig, device: torch.device) -> None:
    """Raises ConfigError, by key, where something is to be moved off a device that is the CPU, or needs a GPU.
    ImportError where the engine's library is missing."""
    check_megatron(config, device.type)
    backend = config.policy.generation.backend
    if device.type != "cpu":
        if backend == "trtllm":
            require_installed("tensorrt_llm", extra="trtllm")
        return
    if backend != "native":
        raise ConfigError(f"policy.generation.backend={backend} needs a GPU, and torch sees none")
    options = {
        "policy.reference=cpu_offload": config.policy.reference == "cpu_offload",
        "policy.offload_optimizer=true": config.policy.offload_optimizer,
        "policy.generation.release_memory=true": config.policy.generation.release_memory,
        "value.offload=true": config.critic is not None and config.critic.offload,
    }
    if wanted := [option for option, on in options.items() if on]:
        raise ConfigError("\n".join(f"{option} has no effect on a CPU: it frees a GPU's memory" for option in wanted))
