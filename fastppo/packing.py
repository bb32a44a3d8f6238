"""Packed sequences: B sequences of any lengths one after another in T tokens, with cu_seqlens [B + 1] saying where.

Sequence b is tokens cu_seqlens[b] to cu_seqlens[b + 1]; cu_seqlens is int32 or int64, starts with 0, ends with T and
never decreases. Equal neighbours are an empty sequence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastppo.checks import check_tensor, contents_checked


def cu_seqlens_from_lengths(
    lengths: Tensor | Sequence[int], *, dtype: torch.dtype = torch.int32, device: torch.device | str | None = None
) -> Tensor:
    """lengths [B] -> cu_seqlens [B + 1]; a tensor stays on its device unless `device` says otherwise."""
    lengths = torch.as_tensor(lengths, dtype=torch.int64, device=device)
    if lengths.dim() != 1:
        raise ValueError(f"lengths must have shape [B], got {list(lengths.shape)}")
    if contents_checked(lengths) and bool((lengths < 0).any()):
        raise ValueError(f"lengths must be >= 0, got {int(lengths.min())}")
    cu_seqlens = torch.zeros(lengths.numel() + 1, dtype=dtype, device=lengths.device)
    cu_seqlens[1:] = lengths.cumsum(0)
    return cu_seqlens


def sequence_lengths(cu_seqlens: Tensor) -> Tensor:
    """cu_seqlens [B + 1] -> lengths [B] int64."""
    return cu_seqlens.long().diff()


def segment_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """cu_seqlens [B + 1] -> the sequence of each token, [T] int64. Does not synchronise."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].long().contiguous(), tokens, right=True)


def check_cu_seqlens(
    cu_seqlens: Tensor, num_tokens: int, *, name: str = "cu_seqlens", like: Tensor | None = None
) -> None:
    """Everything about cu_seqlens: what needs no value always, the contents on CPU or under FASTPPO_CHECK=1.

    Raises:
        TypeError: not a tensor of int32 or int64.
        ValueError: not [B + 1], not on the device of `like`, or contents that are not offsets of `num_tokens` tokens.
    """
    check_cu_seqlens_form(cu_seqlens, name=name, like=like)
    if contents_checked(cu_seqlens):
        check_cu_seqlens_contents(cu_seqlens, num_tokens, name=name)


def check_cu_seqlens_form(cu_seqlens: Tensor, *, name: str = "cu_seqlens", like: Tensor | None = None) -> None:
    """The part of `check_cu_seqlens` that reads no value."""
    check_tensor(name, cu_seqlens, (torch.int32, torch.int64))
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"{name} must have shape [B + 1], got {list(cu_seqlens.shape)}")
    if like is not None and cu_seqlens.device != like.device:
        raise ValueError(f"{name} must be on the tokens' device {like.device}, got {cu_seqlens.device}")


def check_cu_seqlens_contents(cu_seqlens: Tensor, num_tokens: int, *, name: str = "cu_seqlens") -> None:
    """The part of `check_cu_seqlens` that reads the values (on a GPU, a synchronisation)."""
    offsets = cu_seqlens.cpu().numpy()  # whose functions take a tenth of the time of torch's at this size
    if offsets[0] != 0:
        raise ValueError(f"{name} must start with 0, got {offsets[0]}")
    if offsets[-1] != num_tokens:
        raise ValueError(f"{name} must end at T={num_tokens}, got {offsets[-1]}")
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        at = int(falls.argmax())
        raise ValueError(f"{name} must not decrease, got {offsets[at]} then {offsets[at + 1]} at index {at + 1}")
