"""Counts collectives, by whatever way they are called."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """`names` of those called inside: of c10d's and of the functional ones, but not their waits."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            self.names.append(func.name().split("::")[1].split(".")[0])
        return func(*args, **(kwargs or {}))
