"""What waits in the CPU's memory while the GPU does something else, and the check that there is a GPU to relieve."""

from collections.abc import Iterable

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


class Emptied:
    """Tensors whose memory is free until restore(), while they stay what they are to whoever holds them.

    A parameter that is given data of another device gets a new gradient accumulator (torch's Variable::set_data), and
    the hooks on the old one are gone: those by which megatron-core's DistributedDataParallel collects gradients.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self.waiting: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():  # of two that share one, the first has emptied it
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                self.waiting.append((memory, to_host(memory)))
                storage.resize_(0)

    def restore(self) -> None:
        """Work that is put on the device afterwards finds the values."""
        for memory, host in self.waiting:
            memory.untyped_storage().resize_(len(host))
            memory.copy_(host, non_blocking=True)
        self.waiting.clear()


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
