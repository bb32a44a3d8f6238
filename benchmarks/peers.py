"""What the suites compare with that is not in one suite alone: gae in torch, and the kernels of other packages, each a
callable, or the row is skipped with the reason."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from shapes import GAMMA, LAM
from torch import Tensor
from torch.nn import functional as F

Logprob = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
# hidden [N, D], weight [V, D], targets [N] -> logprobs, entropy [N], float32
LinearLogprob = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # CuTe's refuses a driver by the last of them
        pytest.skip(f'needs {name.partition(".")[0]}, of pip install "fastppo[bench-gpu]": {error}')


def alone(name: str) -> ModuleType:
    """A module without what the packages above it import, which is all that trainers need: those that are not imported
    yet are given their folder and are not run."""
    package, *below = name.split(".")[:-1]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f'needs {package}, of pip install "fastppo[bench-gpu]"')
    folders = list(spec.submodule_search_locations)
    while True:
        if package not in sys.modules:
            spec = ModuleSpec(package, None, is_package=True)
            spec.submodule_search_locations = folders
            sys.modules[package] = importlib.util.module_from_spec(spec)
        if not below:
            return imported(name)
        part = below.pop(0)
        package, folders = f"{package}.{part}", [str(Path(folder, part)) for folder in folders]


def trl_logprob() -> Logprob:
    return alone("trl.kernels.logprob_entropy").selective_log_softmax_and_entropy


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


def liger_linear_logprob() -> LinearLogprob:
    """On Hopper alone, in CuTe, without logits in memory. Its entropy is rounded to bfloat16."""
    module = imported("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a card of compute capability 9.0")
    temperature, ignore_index, m_tiles, return_entropy = 1.0, -100, 1, True

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        nll, entropy = module.LigerFusedScaledCrossEntropySM90Function.apply(
            hidden, weight, targets, temperature, ignore_index, m_tiles, return_entropy
        )
        return -nll, entropy.float()

    return call


def trl_linear_logprob() -> LinearLogprob:
    """By cuBLAS and Triton, in tiles of 4096 tokens and as many columns as its trainers take."""
    function = alone("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    # Its backward asks there for a context that gathers a head which DeepSpeed has sharded; ours is whole.
    utils = ModuleType("trl.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()
    sys.modules.setdefault(utils.__name__, utils)
    bias, temperature, columns, softcap, logit_scale = None, 1.0, 32768, None, 1.0

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy, *_ = function.apply(
            hidden, weight, bias, targets, temperature, columns, softcap, logit_scale, ("entropy",)
        )
        return logprobs, entropy

    return call


def verl_linear_logprob() -> LinearLogprob:
    """In Triton, without logits in memory; backward by cuBLAS too, from the gradients of 9504 columns at a time."""
    function = alone("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, targets: function(hidden, weight, targets, 1.0, "none")


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
