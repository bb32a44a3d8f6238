"""The dtypes that kernels take, and the one that sums are formed in."""

import torch
from torch import Tensor

# The order of csrc/common/dtype.h.
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def accumulator(*tensors: Tensor | None) -> torch.dtype:
    """float64 where an input is, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
