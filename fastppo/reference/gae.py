"""The definition of `fastppo.gae`: a loop over time in plain PyTorch, float64 if any input is, else float32.

Legend: B sequences, T positions; a packed input is one row of T in which several sequences end.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fastppo.packing import segment_ids
from fastppo.reference.advantages import whiten as whiten_advantages


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    lam_returns: float | Tensor | None = None,
    mask: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    time_dim: int = -1,
    whiten: bool = False,
    group: "dist.ProcessGroup | None" = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns); see `fastppo.gae`."""
    floats = [x for x in (rewards, values, bootstrap_values) if x is not None]
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in floats) else torch.float32

    def rows(x: Tensor) -> Tensor:  # -> [B, T], time last
        return x.unsqueeze(0) if x.dim() == 1 else x.movedim(time_dim, -1)

    def flags(x: Tensor | None, default: bool) -> Tensor:
        return torch.full_like(r, default, dtype=torch.bool) if x is None else rows(x) != 0

    r, v = rows(rewards).to(dtype), rows(values).to(dtype)
    steps = r.shape[1]
    selected, terminal, cut_off = flags(mask, True), flags(terminated, False), flags(truncated, False)

    # Each position's sequence, and whether it is the last one of that sequence.
    if cu_seqlens is None:
        num_seqs = r.shape[0]
        sequence = torch.arange(num_seqs, device=r.device).unsqueeze(1).expand_as(r)
    else:
        num_seqs = cu_seqlens.numel() - 1
        sequence = segment_ids(cu_seqlens, steps).unsqueeze(0)
    last = torch.ones_like(selected)
    last[:, :-1] = sequence[:, 1:] != sequence[:, :-1]

    def per_sequence(x: float | Tensor) -> Tensor:  # [B] -> [B, T]
        return x.to(dtype)[sequence] if isinstance(x, Tensor) else torch.full_like(r, x)

    decay = gamma * per_sequence(lam)
    decay_returns = gamma * per_sequence(lam if lam_returns is None else lam_returns)
    bootstrap, beyond = torch.zeros_like(r), torch.zeros_like(r)
    if bootstrap_values is not None and truncated is None and bootstrap_values.shape == (num_seqs,):
        # Nothing is carried yet at a sequence's last selected position: the value found there is the bootstrap value.
        beyond = per_sequence(bootstrap_values)
    elif bootstrap_values is not None and truncated is not None:
        whole = bootstrap_values.shape == values.shape
        bootstrap = rows(bootstrap_values).to(dtype) if whole else per_sequence(bootstrap_values)

    advantages, returns = torch.zeros_like(r), torch.zeros_like(r)
    acc = acc_returns = next_value = r.new_zeros(r.shape[0])
    for t in reversed(range(steps)):
        acc = torch.where(last[:, t], 0.0, acc)
        acc_returns = torch.where(last[:, t], 0.0, acc_returns)
        next_value = torch.where(last[:, t], beyond[:, t], next_value)

        ends = terminal[:, t] | cut_off[:, t]
        following = torch.where(cut_off[:, t], bootstrap[:, t], next_value)
        following = torch.where(terminal[:, t], 0.0, following)
        delta = r[:, t] + gamma * following - v[:, t]
        advantage = delta + decay[:, t] * torch.where(ends, 0.0, acc)
        return_advantage = delta + decay_returns[:, t] * torch.where(ends, 0.0, acc_returns)

        advantages[:, t] = torch.where(selected[:, t], advantage, 0.0)
        returns[:, t] = torch.where(selected[:, t], return_advantage + v[:, t], 0.0)
        acc = torch.where(selected[:, t], advantage, acc)
        acc_returns = torch.where(selected[:, t], return_advantage, acc_returns)
        next_value = torch.where(selected[:, t], v[:, t], next_value)

    def like_input(x: Tensor) -> Tensor:
        return x.squeeze(0) if rewards.dim() == 1 else x.movedim(-1, time_dim).contiguous()

    advantages, returns = like_input(advantages), like_input(returns)
    return whiten_advantages(advantages, mask, group=group) if whiten else advantages, returns
