"""The products of linear_logprob that never write logits: csrc/linear_logprob takes their statistics, or turns them
into their gradient, while they are in the registers of a Hopper GPU.
"""

import torch
from torch import Tensor

from fastppo import _build
from fastppo.backends import resolve
from fastppo.dtypes import CODES
from fastppo.ops._linear import Head

# Columns whose statistics are taken together, before they are merged.
COLUMNS = 256
# Operands are fetched 16 bytes at a time.
ALIGNMENT = 16
HALVES = (torch.float16, torch.bfloat16)


def problem(head: Head, width: int, bias: bool) -> str:
    """Why such a head (D = `width`) is not for these kernels; empty where it is. By arguments alone: backward must
    find what forward found."""
    if head.product not in HALVES:
        return f"it multiplies float16 and bfloat16, not {head.product}"
    if head.logits not in (head.product, torch.float32):
        return f"logits_dtype must be {head.product} or torch.float32, got {head.logits}"
    if head.softcap is not None:
        return "it takes no softcap"
    if bias:
        return "it takes no bias"
    if width % (ALIGNMENT // head.product.itemsize):
        return f"D must be a multiple of {ALIGNMENT // head.product.itemsize}, got {width}"
    return ""


def fuses(head: Head, device: torch.device, width: int, bias: bool) -> bool:
    """Whether these kernels make the products whose logits are not kept."""
    if device.type != "cuda" or head.backend not in ("auto", "cuda") or problem(head, width, bias):
        return False
    return resolve("linear_logprob", head.backend, device, head.product)[0] == "cuda"


def stats(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None, head: Head) -> Tensor:
    """[N, 4] statistics of this rank's columns, of hidden [N, D] and weight [used, D] in the product's dtype."""
    count, used = targets.numel(), weight.shape[0]
    hidden, weight = fetchable(hidden), fetchable(weight)
    result = torch.empty(count, 4, dtype=torch.float32, device=hidden.device)
    scratch = torch.empty(-(-used // COLUMNS), count, 4, dtype=torch.float32, device=hidden.device)
    targets, temperature = targets.contiguous(), per_row(temperature)
    _build.module().head_stats(
        *_product(hidden, weight, head),
        targets.data_ptr(),
        0 if temperature is None else temperature.data_ptr(),
        head.temperature,
        head.start,
        result.data_ptr(),
        scratch.data_ptr(),
        head.with_entropy,
        *_stream(hidden),
    )
    return result


class Dlogits:
    """The gradient of the logits of some rows, a chunk of columns at a time."""

    def __init__(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        kept: Tensor,
        upstream: Tensor,
        head: Head,
    ):
        self.hidden, self.head = fetchable(hidden), head
        self.coefficients = torch.empty(targets.numel(), 8, dtype=torch.float32, device=hidden.device)
        targets, temperature = targets.contiguous(), per_row(temperature)
        kept, upstream = kept.contiguous(), upstream.to(torch.float32).contiguous()
        _build.module().head_gradient(
            targets.data_ptr(),
            0 if temperature is None else temperature.data_ptr(),
            head.temperature,
            kept.data_ptr(),
            upstream.data_ptr(),
            head.ignore_index,
            head.start,
            head.used,
            targets.numel(),
            self.coefficients.data_ptr(),
            *_stream(hidden),
        )

    def write(self, out: Tensor, weight: Tensor, first_column: int) -> None:
        """out [n, columns], of the weight's rows from `first_column` on."""
        weight = fetchable(weight)
        _build.module().head_dlogits(
            *_product(self.hidden, weight, self.head),
            first_column,
            self.coefficients.data_ptr(),
            (out.data_ptr(), out.stride(0)),
            *_stream(out),
        )


def per_row(temperature: Tensor | None) -> Tensor | None:
    return None if temperature is None else temperature.float().contiguous()


def fetchable(x: Tensor) -> Tensor:
    """x [rows, D], or a copy where its rows are not as TMA needs them."""
    rows_apart = x.stride(0) if x.shape[0] > 1 else x.shape[1]
    fits = x.stride(1) == 1 and rows_apart >= x.shape[1] and rows_apart * x.element_size() % ALIGNMENT == 0
    return x if fits and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def _product(hidden: Tensor, weight: Tensor, head: Head) -> tuple[object, ...]:
    rows, columns, width = hidden.shape[0], weight.shape[0], hidden.shape[1]
    return (
        (hidden.data_ptr(), hidden.stride(0) if rows > 1 else width),
        (weight.data_ptr(), weight.stride(0) if columns > 1 else width),
        rows,
        columns,
        width,
        CODES[head.product],
        head.logits == head.product,
    )


def _stream(x: Tensor) -> tuple[int, int]:
    index = x.device.index
    return index, torch.cuda.current_stream(x.device).cuda_stream
