"""Advantages without a critic, and their whitening: a few operations per sample, computed in float64 by torch."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fastppo.checks import (
    INTEGERS,
    check_choice,
    check_like,
    check_number,
    check_tensor,
    contents_checked,
)
from fastppo.reference import advantages as definition


def whiten(
    x: Tensor, mask: Tensor | None = None, *, group: "dist.ProcessGroup | None" = None, shift_mean: bool = True
) -> Tensor:
    """(x - mean) * rsqrt(var + 1e-8) over the selected elements of all ranks of `group`; biased variance, two passes.

    Args:
        x: any shape, floating point.
        mask: x's shape, any dtype, read as != 0; unselected elements are not read and become 0. None: all.
        group: process group whose ranks' elements share mean and variance: two all-reduces, and every rank must
            call, also one that has nothing selected. None: the default group where one is initialised, else this
            process.
        shift_mean: False adds the mean back.

    Returns:
        x's shape, float32 (float64 for float64). A single selected element gives 0. No gradient flows.

    Raises:
        ValueError: mask of another shape or device.
        TypeError: an integer or unsupported dtype, a DTensor.
    """
    check_tensor("x", x)
    if mask is not None:
        check_tensor("mask", mask, dtypes=None)
        check_like("mask", mask, "x", x)
    return definition.whiten(x, mask, group=group, shift_mean=shift_mean)


def rloo(
    rewards: Tensor,
    group_size: int | None = None,
    *,
    group_ids: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Leave-one-out advantages: each reward minus the mean of the other valid rewards of its group.

    Args:
        rewards: [N], floating point, one per sample.
        group_size: groups are this many adjacent samples; it divides N. Exactly one of group_size and group_ids is
            given.
        group_ids: [N], integer, in [0, N): samples of equal id are a group, in any order.
        valid: [N], any dtype, read as != 0. An invalid sample is no sibling and gets 0. None: all.

    Returns:
        [N], float32 (float64 for float64): 0 where fewer than two of a group are valid. No gradient flows.

    Raises:
        ValueError: shapes or devices disagree; not exactly one grouping; a size that does not divide N.
        IndexError: a group id outside [0, N) (on a CPU, and under FASTPPO_CHECK=1).
        TypeError: an integer or unsupported dtype of rewards, a DTensor.

    Source: Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740.
    """
    ids, chosen = _groups(rewards, group_size, group_ids, valid)
    return definition.rloo(rewards, ids, chosen)


def group_advantages(
    rewards: Tensor,
    group_size: int | None = None,
    *,
    group_ids: Tensor | None = None,
    valid: Tensor | None = None,
    kind: Literal["grpo", "dr_grpo", "opo"] = "grpo",
    lengths: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantages over the valid samples of each group.

    grpo     (r - mean) / (std + eps), std with n - 1     Shao et al. 2024, arXiv:2402.03300
    dr_grpo  r - mean                                     Liu et al. 2025, arXiv:2503.20783
    opo      r - sum(length * r) / sum(length)            Hao et al. 2025, arXiv:2505.23585

    Args:
        rewards, group_size, group_ids, valid: as in `rloo`.
        kind: "grpo", "dr_grpo" or "opo".
        lengths: [N], response tokens, any real dtype; needed by opo and only there.
        eps: > 0, in reward units.

    Returns:
        [N], float32 (float64 for float64): exactly 0 for equal rewards, for an invalid sample and where fewer than
        two of a group are valid. No gradient flows.

    Raises:
        As `rloo`; ValueError also for an unknown kind, and for lengths missing or given in vain.
    """
    ids, chosen = _groups(rewards, group_size, group_ids, valid)
    check_choice("kind", kind, ("grpo", "dr_grpo", "opo"))
    check_number("eps", eps, above=0)
    if (lengths is not None) != (kind == "opo"):
        got = "None" if lengths is None else f"a tensor of shape {list(lengths.shape)}"
        raise ValueError(f"lengths must be given with kind='opo' only, got {got} with {kind!r}")
    if lengths is not None:
        check_tensor("lengths", lengths, dtypes=None)
        check_like("lengths", lengths, "rewards", rewards)
    return definition.group_advantages(rewards, ids, chosen, kind=kind, lengths=lengths, eps=eps)


def _groups(
    rewards: Tensor, group_size: int | None, group_ids: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Checks; then each sample's group in [0, N) and whether it counts."""
    check_tensor("rewards", rewards)
    if rewards.dim() != 1:
        hint = f": rewards.flatten() with group_size={rewards.shape[1]}" if rewards.dim() == 2 else ""
        raise ValueError(f"rewards must have shape [N], got {list(rewards.shape)}{hint}")
    n = rewards.numel()
    if (group_size is None) == (group_ids is None):
        raise ValueError(
            "exactly one of group_size and group_ids must be given, "
            f"got {'neither' if group_size is None else f'both, group_size={group_size}'}"
        )
    if valid is None:
        chosen = torch.ones_like(rewards, dtype=torch.bool)
    else:
        check_tensor("valid", valid, dtypes=None)
        check_like("valid", valid, "rewards", rewards)
        chosen = valid != 0
    if group_ids is not None:
        check_tensor("group_ids", group_ids, INTEGERS)
        check_like("group_ids", group_ids, "rewards", rewards)
        group_ids = group_ids.long()  # a narrow dtype cannot hold N
        if contents_checked(group_ids):
            outside = (group_ids < 0) | (group_ids >= n)
            if bool(outside.any()):
                raise IndexError(f"group_ids must be in [0, N) with N={n}, got {int(group_ids[outside][0])}")
        return group_ids, chosen
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"group_size must be an int, got {type(group_size).__name__}")
    if group_size < 1 or n % group_size:
        raise ValueError(f"group_size must be >= 1 and divide the {n} rewards, got {group_size}")
    return torch.arange(n, device=rewards.device) // group_size, chosen
