"""Weights through two flat buffers on a GPU, read on another stream, as an engine in another process reads them."""

import pytest
import torch

from tests.test_weights import Named
from trainers.weights import WeightStream

pytestmark = pytest.mark.gpu


def test_a_bucket_is_whole_when_it_is_handed_over_and_stays_while_it_is_read():
    draw = torch.Generator("cuda").manual_seed(0)
    sizes = [(1024, 4096), (3, 5), (7,), (4096, 2048), (2048, 1024), (512, 8192), (9, 1000)]
    tensors = {str(i): torch.randn(size, generator=draw, device="cuda").bfloat16() for i, size in enumerate(sizes)}
    stream = WeightStream(Named(**tensors), "cuda_ipc", 8 * 2**20)
    work, elsewhere = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    for _ in range(3):
        stream.manifest()
        for bucket in stream.buckets():
            with torch.cuda.stream(elsewhere):  # knows nothing of the stream that filled the buffer
                read = [(name, tensor.clone()) for name, tensor in bucket]
            elsewhere.synchronize()  # put() returns when the bytes were read
            for name, tensor in read:
                assert torch.equal(tensor, tensors[name]), name
            work = work @ work / 4096  # so that the next copies wait in a queue
        for tensor in tensors.values():
            tensor += 1
    assert stream.buffers[0].is_cuda and len({buffer.data_ptr() for buffer in stream.buffers}) == 2
