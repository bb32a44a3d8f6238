"""Whether an op goes through torch's dispatcher."""

import torch
from torch import Tensor


def traced(*tensors: Tensor | None) -> bool:
    """Whether somebody may want to see registered ops: a compiler, a dispatch mode, torch.func, a subclass of Tensor;
    or the dispatcher must first make memory hold what a tensor says (a negated view).

    Nobody else needs the dispatcher, and its way to an op of sixteen arguments and back is long.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    ):
        return True
    for x in tensors:
        if x is not None and ((type(x) is not Tensor and type(x) is not torch.nn.Parameter) or x.is_neg()):
            return True
    return False
