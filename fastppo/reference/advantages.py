"""The definitions of `fastppo.whiten`, `fastppo.rloo` and `fastppo.group_advantages`. They compute in float64."""

import torch
import torch.distributed as dist
from torch import Tensor

WHITEN_EPS = 1e-8


def whiten(
    x: Tensor, mask: Tensor | None = None, *, group: "dist.ProcessGroup | None" = None, shift_mean: bool = True
) -> Tensor:
    shared = dist.is_available() and dist.is_initialized()
    selected = torch.ones_like(x, dtype=torch.bool) if mask is None else mask != 0
    wide = torch.where(selected, x.detach().double(), 0.0)
    total = torch.stack((wide.sum(), selected.sum(dtype=torch.float64)))
    if shared:
        dist.all_reduce(total, group=group)
    count = total[1].clamp_min(1)
    mean = total[0] / count
    centred = torch.where(selected, wide - mean, 0.0)
    variance = centred.square().sum()
    if shared:
        dist.all_reduce(variance, group=group)
    y = centred * torch.rsqrt(variance / count + WHITEN_EPS)
    if not shift_mean:
        y = torch.where(selected, y + mean, 0.0)
    return y.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def rloo(rewards: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
    groups = Groups(rewards, ids, valid)
    # r - (sum of the others)/(n - 1) = n/(n - 1) * (r - mean), which is exactly 0 where all are equal.
    return groups.result(groups.centred * groups.count / (groups.count - 1).clamp_min(1))


def group_advantages(
    rewards: Tensor, ids: Tensor, valid: Tensor, *, kind: str = "grpo", lengths: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    groups = Groups(rewards, ids, valid)
    if kind == "dr_grpo":
        return groups.result(groups.centred)
    if kind == "opo":
        assert lengths is not None
        weight = torch.where(valid, lengths.double(), 0.0)
        whole = groups.spread(weight)
        baseline = groups.spread(weight * groups.centred) / torch.where(whole > 0, whole, 1.0)
        return groups.result(groups.centred - baseline)
    std = (groups.spread(groups.centred.square()) / (groups.count - 1).clamp_min(1)).sqrt()
    return groups.result(groups.centred / (std + eps))


class Groups:
    """Rewards by group, as offsets from the group's largest: equal rewards are exactly 0, whatever their size."""

    def __init__(self, rewards: Tensor, ids: Tensor, valid: Tensor) -> None:
        self.ids, self.valid, self.dtype = ids, valid, rewards.dtype
        wide = torch.where(valid, rewards.detach().double(), -torch.inf)
        top = torch.full_like(wide, -torch.inf).scatter_reduce(0, ids, wide, "amax")
        self.offset = torch.where(valid, wide - top[ids], 0.0)
        self.count = self.spread(valid.double())  # [N], valid samples in each sample's group
        self.centred = torch.where(valid, self.offset - self.spread(self.offset) / self.count.clamp_min(1), 0.0)

    def spread(self, x: Tensor) -> Tensor:
        """[N]: the sum of x over each sample's group."""
        return torch.zeros_like(x).index_add(0, self.ids, x)[self.ids]

    def result(self, advantages: Tensor) -> Tensor:
        return torch.where(self.valid, advantages, 0.0).to(
            torch.float64 if self.dtype == torch.float64 else torch.float32
        )
