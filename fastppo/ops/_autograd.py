"""What the ops' autograd functions share."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

_ANY = inspect.Signature([inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)])


def forward_of_all_arguments(function: Callable[..., Any]) -> Any:
    """A Function's static `forward` that is always called with every argument, by position.

    Where `setup_context` is a method of its own, apply() inspects forward's signature on each call, to fill in
    defaults: 30 us for six annotated arguments, 5 us for this one.
    """
    function.__signature__ = _ANY  # type: ignore[attr-defined]
    return staticmethod(function)


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """function.apply(*arguments), without what that does on each call for torch.func and for arguments left out.

    Even with one argument in its signature that is a tenth of what a loss takes on the host.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def refuse_double_backward(op: str) -> None:
    """Called first in a backward: autograd records there only when a second derivative is wanted."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f'{op} has no second derivative on this backend (create_graph=True, torch.func): use backend="torch", '
            "without a vocab and without what backward writes into (inplace_backward, weight_grad_into)"
        )
