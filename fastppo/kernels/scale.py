"""out = x * upstream, the factor read on the device; in place nothing is read or written where it is 1.

A gradient that is formed in forward is multiplied in backward by a factor that is nearly always 1, which the host
cannot know without waiting. Bits are torch's: the product is formed in float32 and rounded once.

Legend: N elements.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton.language as tl
from torch import Tensor

from fastppo.kernels import tiles
from fastppo.kernels.launch import Launcher, jit


@jit
def _kernel(x, upstream, out, n: tl.int64, INPLACE: tl.constexpr, EXACT: tl.constexpr, TILE: tl.constexpr):
    if EXACT:
        n = n // 16 * 16  # so the compiler knows it is, and reads 16 bytes at once
    factor = tl.load(upstream).to(tl.float32)
    if INPLACE:
        n = tl.where(factor == 1.0, 0, n)
    start = tl.program_id(0).to(tl.int64) * TILE
    at = tl.arange(0, TILE)
    while start < n:
        here = at < n - start
        value = tl.load(x + start + at, mask=here, other=0.0).to(tl.float32) * factor
        tl.store(out + start + at, value.to(out.dtype.element_ty), mask=here)
        start += tl.num_programs(0).to(tl.int64) * TILE


_launch = Launcher(_kernel)


def scale(x: Tensor, upstream: Tensor, out: Tensor) -> None:
    """Contiguous tensors of one shape; `out` may be x itself. upstream: 0-dim."""
    n = x.numel()
    if n:
        _launch(
            min(-(-n // tiles.SCALE_ELEMENTS), tiles.SCALE_PROGRAMS),
            (x, upstream, out),
            (n,),
            (out.data_ptr() == x.data_ptr(), n % 16 == 0, tiles.SCALE_ELEMENTS),
            tiles.SCALE_WARPS,
        )
