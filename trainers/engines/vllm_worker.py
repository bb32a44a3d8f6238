"""What vLLM's workers are given beside their own methods (`worker_extension_cls`): how weights are taken.

vLLM's layerwise reload does the work, so that fused, quantised and rearranged layers come out right and captured CUDA
graphs still read the same memory. It keeps what it is given until the rest of the layer has come, hence the copies.
Imported in vLLM's own process too, where there is no trainer.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes: what CUDA aligns an allocation to


def packed(bucket: Sequence[tuple[str, Tensor]]) -> tuple[Tensor, list[tuple[str, torch.dtype, tuple[int, ...], int]]]:
    """One uint8 buffer that holds the bucket, and (name, dtype, shape, offset in bytes) of each tensor. A bucket that
    lies in one storage is taken as it is, another one is copied."""
    storages = {tensor.untyped_storage().data_ptr() for _, tensor in bucket}
    if len(storages) == 1 and all(tensor.is_contiguous() for _, tensor in bucket):
        whole = bucket[0][1]
        flat = torch.empty(0, dtype=torch.uint8, device=whole.device).set_(whole.untyped_storage())
        offsets = [tensor.storage_offset() * tensor.element_size() for _, tensor in bucket]
        return flat, [(n, t.dtype, tuple(t.shape), start) for (n, t), start in zip(bucket, offsets, strict=True)]
    offsets, end = [], 0
    for _, tensor in bucket:
        offsets.append(end)
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    flat = torch.empty(end, dtype=torch.uint8, device=bucket[0][1].device)
    layout = [(n, t.dtype, tuple(t.shape), start) for (n, t), start in zip(bucket, offsets, strict=True)]
    for (_, tensor), (_, view) in zip(bucket, unpacked(flat, layout), strict=True):
        view.copy_(tensor)
    return flat, layout


def unpacked(flat: Tensor, layout: Sequence[tuple[str, torch.dtype, tuple[int, ...], int]]) -> list[tuple[str, Tensor]]:
    """Views into a buffer of `packed`."""
    return [
        (name, flat[start : start + dtype.itemsize * torch.Size(shape).numel()].view(dtype).view(shape))
        for name, dtype, shape, start in layout
    ]


class Worker:
    """Mixed into vLLM's worker: `model_runner` and `vllm_config` are that one's. Names must not meet its own."""

    # Not assigned here: vLLM refuses an extension with an attribute of a name that its worker has.
    model_runner: Any
    vllm_config: Any
    device: torch.device

    def fastppo_begin_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model_runner.model)

    def fastppo_put(self, bucket: Any) -> None:
        """Full tensors under Hugging Face names: (name, tensor) pairs in one process, bytes of `handle` from another
        one. On return the engine has its own copy."""
        if isinstance(bucket, bytes):
            bucket = _opened(bucket)
        self.model_runner.model.load_weights([(name, tensor.to(self.device, copy=True)) for name, tensor in bucket])
        _synchronize()

    def fastppo_end_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model_runner.model, self.vllm_config.model_config)
        _synchronize()


def handle(flat: Tensor, layout: Sequence[tuple[str, torch.dtype, tuple[int, ...], int]]) -> bytes:
    """What another process on this GPU reads a bucket with, without a copy (CUDA IPC). `flat` must outlive its use."""
    from torch.multiprocessing.reductions import reduce_tensor

    return pickle.dumps((reduce_tensor(flat), list(layout)))


def _opened(data: bytes) -> list[tuple[str, Tensor]]:
    (rebuild, arguments), layout = pickle.loads(data)
    own = list(arguments)
    if len(own) > 6:  # of a tensor on a GPU: the seventh is the device, as its sender counts them
        own[6] = torch.cuda.current_device()
    return unpacked(rebuild(*own), layout)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
