"""What the suites compare with that is not in one suite alone: gae in torch, and the kernels of other packages, each a
callable, or the row is skipped with the reason."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from shapes import GAMMA, LAM
from torch import Tensor
from torch.nn import functional as F

Logprob = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f'needs {name.partition(".")[0]}, of pip install "fastppo[bench-gpu]": {error}')


def trl_logprob() -> Logprob:
    """By the file's path: `import trl` asks for all that its trainers need."""
    package = importlib.util.find_spec("trl")
    if package is None or not package.submodule_search_locations:
        pytest.skip('needs trl, of pip install "fastppo[bench-gpu]"')
    path = Path(package.submodule_search_locations[0], "kernels", "logprob_entropy.py")
    spec = importlib.util.spec_from_file_location("trl_logprob_entropy", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.selective_log_softmax_and_entropy


def liger_logprob() -> Logprob:
    """Without entropy. Waits for the device in both directions, and writes the gradient over the logits."""
    function = imported("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction
    return lambda logits, targets: (-function.apply(logits, targets, None, -100, 0.0, 0.0, "none")[0],)


def quack_logprob() -> Logprob:
    """Without entropy."""
    cross_entropy = imported("quack.cross_entropy").cross_entropy
    return lambda logits, targets: (-cross_entropy(logits, targets, reduction="none"),)


def flash_attn_logprob() -> Logprob:
    """Without entropy."""
    cross_entropy = imported("flash_attn.ops.triton.cross_entropy").cross_entropy_loss
    return lambda logits, targets: (-cross_entropy(logits, targets)[0],)


def gae_loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """As trainers write it: a step of Python for each position, vectorised over the rows."""
    acc = next_value = rewards.new_zeros(rewards.shape[0])
    advantages = torch.zeros_like(rewards)
    for t in range(rewards.shape[1] - 1, -1, -1):
        selected = mask[:, t]
        advantage = rewards[:, t] + GAMMA * next_value - values[:, t] + GAMMA * LAM * acc
        acc = torch.where(selected, advantage, acc)
        next_value = torch.where(selected, values[:, t], next_value)
        advantages[:, t] = torch.where(selected, advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def gae_by_scans(
    rewards: Tensor, values: Tensor, mask: Tensor, combine_mode: str = "pointwise"
) -> tuple[Tensor, Tensor]:
    """Two of torch's scans from the end: the value of the next selected position, then A = delta + gamma * lam * A."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def later(after: tuple[Tensor, Tensor], here: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.maximum(after[0], here[0]), torch.where(here[0] > 0, here[1], after[1])

    def affine(after: tuple[Tensor, Tensor], here: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return after[0] * here[0], here[1] + here[0] * after[1]

    options = {"dim": -1, "reverse": True, "combine_mode": combine_mode}
    selected = mask.to(rewards.dtype)
    _, latest = associative_scan(later, (selected, torch.where(mask, values, 0.0)), **options)
    next_value = F.pad(latest[:, 1:], (0, 1))
    delta = torch.where(mask, rewards + GAMMA * next_value - values, 0.0)
    decay = torch.where(mask, GAMMA * LAM, torch.ones_like(rewards))
    _, scanned = associative_scan(affine, (decay, delta), **options)
    return torch.where(mask, scanned, 0.0), torch.where(mask, scanned + values, 0.0)
