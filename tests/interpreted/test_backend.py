"""What a process that interprets gets: Triton's kernels for CPU tensors, where they are asked for by name."""

import torch

from fastppo.backends import KERNELS, resolve


def test_the_interpreter_is_taken_where_it_is_asked_for():
    for op, kernels in KERNELS.items():
        if "triton" in kernels.get("cpu", ()):
            assert resolve(op, "triton", torch.device("cpu"), torch.float32)[0] == "triton"
            assert resolve(op, "auto", torch.device("cpu"), torch.float32)[0] == "cpu"
