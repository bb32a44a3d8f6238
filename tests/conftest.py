"""What every test shares: one thread a process, fixed seeds, no network, and the reason why a gpu test is skipped."""

import multiprocessing
import os
import random

# Before any import reads these: no test depends on the network, and no library starts a thread pool of its own.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

torch.set_num_threads(1)

# A pytest that a test starts is neither a worker of this one nor has its options.
for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
    os.environ.pop(name, None)


# Ranks of a test are forks of one process that has imported what takes seconds, and has no threads.
multiprocessing.set_forkserver_preload(["torch._dynamo", "fastppo", "hypothesis", "pytest"])


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    # All that torch.manual_seed does without a GPU, except that it notes a traceback for the day when there is one.
    torch.manual_seed(0) if torch.cuda.is_available() else torch.default_generator.manual_seed(0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")


@pytest.fixture
def other_sign(monkeypatch):
    """A device beside the CPU, for tests: `to_host` and `to_device` change the sign. Returns the sizes moved out."""
    from trainers import offload

    moved = []
    monkeypatch.setattr(offload, "to_host", lambda tensor: moved.append(tensor.numel()) or -tensor)
    monkeypatch.setattr(offload, "to_device", lambda tensor, device: -tensor)
    return moved
