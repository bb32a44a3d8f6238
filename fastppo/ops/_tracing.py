"""Whether an op goes through torch's dispatcher."""

import torch
from torch import Tensor


def traced(x: Tensor) -> bool:
    """Whether somebody may want to see registered ops: a compiler, a dispatch mode, torch.func, a subclass of
    Tensor.

    Nobody else needs the dispatcher, and its way to an op of sixteen arguments and back is long.
    """
    return (
        torch.compiler.is_compiling()
        or (type(x) is not Tensor and type(x) is not torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )
