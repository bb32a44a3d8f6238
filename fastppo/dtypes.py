"""The dtypes that kernels take, and the one that sums are formed in."""

import torch
from torch import Tensor

# The order of csrc/common/dtype.h.
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# A byte of these is 0 exactly where the element is, so a kernel reads them as they are.
BYTE_FLAGS = (torch.bool, torch.uint8, torch.int8)


def byte_flags(x: Tensor | None) -> Tensor | None:
    """The same flags, one byte each, 0 where false. Keep a name for it until a kernel has read it."""
    return x if x is None or x.dtype in BYTE_FLAGS else x != 0


def accumulator(*tensors: Tensor | None) -> torch.dtype:
    """float64 where an input is, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
