"""ppo_loss and value_loss against what trainers write in torch: eager, and the same compiled.

Legend: T tokens, flat.
"""

from collections.abc import Callable

import pytest
import torch
from shapes import LOSSES, TINY
from torch import Tensor

import fastppo

# Target of the CPU table: times faster than the peer.
TARGETS = {"torch eager": 5.0, "torch.compile": None}

CLIP, KL_COEF, ENT_COEF = 0.2, 0.1, 0.01


def ppo_in_torch(
    logprobs: Tensor, entropy: Tensor | None, old: Tensor, ref: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """Clipped loss, k3 with its own gradient, entropy bonus, token mean; and the metrics that trainers log."""
    log_ratio = torch.clamp(logprobs - old, -20, 20)
    ratio = torch.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
    x = torch.clamp(ref - logprobs, -20, 20)
    per_token = torch.maximum(unclipped, clipped) + KL_COEF * (torch.exp(x) - x - 1)
    if entropy is not None:
        per_token = per_token - ENT_COEF * entropy
    weight = mask.to(per_token.dtype)
    total = weight.sum()
    with torch.no_grad():
        clip_fraction = ((clipped > unclipped) * weight).sum() / total
        approx_kl = (-log_ratio * weight).sum() / total
        ratio_mean = (ratio * weight).sum() / total
        entropy_mean = 0.0 if entropy is None else (entropy * weight).sum() / total
    loss = (per_token * weight).sum() / total
    return loss + 0 * (clip_fraction + approx_kl + ratio_mean + entropy_mean)


def ppo_ours(
    logprobs: Tensor, entropy: Tensor | None, old: Tensor, ref: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    return fastppo.ppo_loss(
        logprobs, old, advantages, mask=mask, clip_eps=CLIP, entropy=entropy,
        ent_coef=0.0 if entropy is None else ENT_COEF, ref_logprobs=ref, kl_coef=KL_COEF, kl_grad="pathwise",
    ).loss  # fmt: skip


def value_in_torch(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    bounded = old + torch.clamp(values - old, -CLIP, CLIP)
    per_token = 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)
    weight = mask.to(per_token.dtype)
    total = weight.sum()
    with torch.no_grad():
        error = (((returns - values) ** 2) * weight).sum() / total
    return (per_token * weight).sum() / total + 0 * error


def value_ours(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    return fastppo.value_loss(values, old, returns, mask=mask, clip_eps=CLIP).loss


Loss = Callable[..., Tensor]
PPO: dict[str, Loss] = {"torch eager": ppo_in_torch, "torch.compile": torch.compile(ppo_in_torch)}
VALUE: dict[str, Loss] = {"torch eager": value_in_torch, "torch.compile": torch.compile(value_in_torch)}


def ppo_inputs(tokens: int, device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
    """What has a gradient, and what has not."""
    with torch.device(device):
        old = -3 * torch.rand(tokens)
        logprobs = (old + 0.2 * torch.randn(tokens)).clamp_max(0)
        ref = (old + 0.2 * torch.randn(tokens)).clamp_max(0)
        leaves = [logprobs.requires_grad_(), (2 * torch.rand(tokens)).requires_grad_()]
        return leaves, [old, ref, torch.randn(tokens), torch.rand(tokens) < 0.75]


def value_inputs(tokens: int, device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
    with torch.device(device):
        old = torch.randn(tokens)
        values = old + 0.3 * torch.randn(tokens)
        return [values.requires_grad_()], [old, old + torch.randn(tokens), torch.rand(tokens) < 0.75]


def forward_and_backward(loss: Loss, leaves: list[Tensor], rest: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    def call() -> tuple[Tensor, ...]:
        value = loss(*leaves, *rest)
        return value.detach(), *torch.autograd.grad(value, leaves)

    return call


@pytest.mark.parametrize("peer", TARGETS)
@pytest.mark.parametrize("shape", [pytest.param(name, marks=pytest.mark.quick) for name in LOSSES])
def test_ppo_loss(shape: str, peer: str, compare: Callable[..., None]) -> None:
    leaves, rest = ppo_inputs(LOSSES[shape])
    compare(
        *(forward_and_backward(loss, leaves, rest) for loss in (ppo_ours, PPO[peer])), op="ppo_loss",
        direction="fwd+bwd", shape=shape, dtype="float32", peer_name=peer, target=TARGETS[peer],
        # Five inputs of 4 bytes and a mask read, two gradients written; backward reads and writes these.
        bytes_moved=(5 * 4 + 1 + 2 * 4 + 2 * 8) * LOSSES[shape], atol=1e-7,
    )  # fmt: skip


@pytest.mark.parametrize("peer", TARGETS)
@pytest.mark.parametrize("shape", LOSSES)
def test_value_loss(shape: str, peer: str, compare: Callable[..., None]) -> None:
    leaves, rest = value_inputs(LOSSES[shape])
    compare(
        *(forward_and_backward(loss, leaves, rest) for loss in (value_ours, VALUE[peer])), op="value_loss",
        direction="fwd+bwd", shape=shape, dtype="float32", peer_name=peer, target=TARGETS[peer],
        # Three inputs and a mask read, a gradient written; backward reads and writes that.
        bytes_moved=(3 * 4 + 1 + 4 + 8) * LOSSES[shape], atol=1e-7,
    )  # fmt: skip


@pytest.mark.quick
def test_ppo_loss_host(compare: Callable[..., None]) -> None:
    """What a call costs before any work: checks, dispatch, autograd."""
    leaves, rest = ppo_inputs(TINY[0] * TINY[1])
    compare(
        *(forward_and_backward(loss, leaves, rest) for loss in (ppo_ours, ppo_in_torch)), op="ppo_loss",
        direction="fwd+bwd host", shape=str(TINY[0] * TINY[1]), dtype="float32", peer_name="torch eager",
    )  # fmt: skip
