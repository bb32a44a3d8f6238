"""Runs inside TensorRT-LLM's workers, one a GPU, mixed into them by `ray_worker_extension_cls`."""

import torch
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension


class Worker(WorkerExtension):
    def fastppo_synchronize(self) -> None:
        """Returns once the copies of earlier `update_weights` are done: their answers come when they are queued."""
        torch.cuda.synchronize()
