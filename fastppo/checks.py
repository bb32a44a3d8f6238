"""Checks at the door of the public ops. Every message gives the argument's name, what was expected and what came."""

import os
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INF = float("inf")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def contents_checked(tensor: Tensor) -> bool:
    """Whether its values may be looked at: on the CPU always, on a GPU (a synchronisation) under FASTPPO_CHECK=1."""
    if torch.compiler.is_compiling() or type(tensor).__name__ == "FakeTensor":
        return False
    return tensor.device.type == "cpu" or os.environ.get("FASTPPO_CHECK") == "1"


def check_tensor(name: str, value: object, dtypes: Sequence[torch.dtype] | None = FLOATS) -> None:
    """A plain torch.Tensor of one of `dtypes` (None: any)."""
    if not isinstance(value, Tensor):
        # A Linear's weight, an output's metrics; but not a dict's method `values`.
        hint = f": pass its .{name}" if isinstance(getattr(value, name, None), Tensor) else ""
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}{hint}")
    if type(value).__name__ == "DTensor":
        raise TypeError(
            f"{name} must be a plain torch.Tensor, got a DTensor: pass {name}.to_local(), and for logits or a weight "
            "sharded over the vocabulary also vocab=fastppo.VocabShard(...)"
        )
    if dtypes is not None and value.dtype not in dtypes:
        raise TypeError(f"{name} must be one of {', '.join(map(_short, dtypes))}, got {_short(value.dtype)}")


def check_like(name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    """Same shape and device as another argument."""
    if value.shape != like.shape:
        hint = _shape_hint(name, value, like_name, like)
        raise ValueError(f"{name} must have {like_name}'s shape {list(like.shape)}, got {list(value.shape)}{hint}")
    check_device(name, value, like_name, like)


def _shape_hint(name: str, value: Tensor, like_name: str, like: Tensor) -> str:
    """What other libraries take in this place, where the shape shows it."""
    if name == "advantages" and like.dim() == 2 and value.shape in (like.shape[:1], (len(like), 1)):
        return f": one number a sequence goes to each of its tokens by {name}.view(-1, 1).expand_as({like_name})"
    longer = [a - b for a, b in zip(value.shape, like.shape, strict=False)]
    if name == "values" and value.dim() == like.dim() and sorted(longer) == [0] * (like.dim() - 1) + [1]:
        return ": the value after the last step is bootstrap_values"
    return ""


def check_floats_like(name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    """`check_tensor` and `check_like`, in a quarter of their time where all is well."""
    if (
        type(value) is not Tensor
        or value.dtype not in FLOATS
        or value.shape != like.shape
        or value.device != like.device
    ):
        check_tensor(name, value)
        check_like(name, value, like_name, like)


def check_device(name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    if value.device != like.device:
        raise ValueError(f"{name} must be on {like_name}'s device {like.device}, got {value.device}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_number(
    name: str, value: object, *, above: float | None = None, at_least: float | None = None, below: float | None = None
) -> None:
    """A finite number within the given bounds, Python's or numpy's."""
    if type(value) is float and above is below is None and (0.0 if at_least is None else at_least) <= value < _INF:
        return  # the usual case, in a third of the time
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    value = float(value)
    wanted = [f"> {above}"] * (above is not None) + [f">= {at_least}"] * (at_least is not None)
    wanted += [f"< {below}"] * (below is not None)
    inside = (
        (above is None or value > above)
        and (at_least is None or value >= at_least)
        and (below is None or value < below)
        and value not in (float("inf"), float("-inf"))
        and value == value
    )
    if not inside:
        raise ValueError(f"{name} must be a finite number{' ' if wanted else ''}{' and '.join(wanted)}, got {value}")


def check_pair(name: str, value: object, meaning: str) -> None:
    """A tuple or list of two, whose numbers are checked next."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name} must be {meaning}, got {type(value).__name__}")
    if len(value) != 2:
        raise ValueError(f"{name} must be {meaning}, got {value}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
