"""Handles of tensors across processes, in the form that TensorRT-LLM's workers read. The library is not needed."""

import base64
import pickle

import pytest
import torch
import torch.multiprocessing as mp

from trainers.engines import trtllm_api

pytestmark = pytest.mark.gpu


def read(blob: str, queue) -> None:
    """As WorkerExtension.update_weights: the seventh argument becomes the reader's own device."""
    found = {}
    for name, (rebuild, args) in pickle.loads(base64.b64decode(blob)):
        own = list(args)
        own[6] = torch.cuda.current_device()
        found[name] = rebuild(*own).float().cpu().tolist()
    queue.put(found)


def test_a_bucket_of_handles_is_read_in_another_process():
    whole = torch.arange(12, device="cuda", dtype=torch.float32)
    bucket = [("a", whole), ("b", whole[4:].view(2, 4)), ("c", torch.full((3,), 0.5, device="cuda").bfloat16())]
    torch.cuda.synchronize()
    context = mp.get_context("spawn")
    queue = context.Queue()
    reader = context.Process(target=read, args=(trtllm_api.packed_handles(bucket), queue))
    reader.start()
    assert queue.get(timeout=60) == {name: tensor.float().cpu().tolist() for name, tensor in bucket}
    reader.join(60)
    assert reader.exitcode == 0


def test_the_current_gpu_is_named_as_the_environment_does(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert trtllm_api.physical_gpu() == str(torch.cuda.current_device())
