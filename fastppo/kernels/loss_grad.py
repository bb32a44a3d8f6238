"""The losses' backward on a GPU: kept gradients times upstream * normaliser, both read on the device, in one launch.

    grad         = kept[0] * (upstream * scales[0]) + kept[-1] * (upstream * scales[1])     the second with an NLL term
    entropy_grad = kept[1] * (upstream * scales[0])

Per token and gradient in float32: 4 bytes read, 4 written. The bits are torch's: no multiplication is fused with the
addition.

Legend: N tokens.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton.language as tl
from torch import Tensor

from fastppo.kernels import tiles
from fastppo.kernels.launch import Launcher, jit, let_next_begin, wait_for_previous


@jit
def _kernel(
    kept, scales, upstream, grad, entropy_grad, n: tl.int64, HAS_GRAD: tl.constexpr, NLL: tl.constexpr,
    EXACT: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    if tl.num_programs(0) <= 128:  # more would share the multiprocessors with programs that wait
        let_next_begin(OVERLAP)
    if EXACT:
        n = n // 4 * 4  # so the compiler knows it is, and reads four tokens at once
    start = tl.program_id(0).to(tl.int64) * TILE
    at = start + tl.arange(0, TILE)
    here = tl.arange(0, TILE) < n - start
    up = tl.load(upstream)
    factor = up * tl.load(scales)
    if HAS_GRAD:
        x = tl.load(kept + at, mask=here, other=0.0) * factor
        if NLL:
            row: tl.constexpr = 1 if entropy_grad is None else 2
            x += tl.load(kept + row * n + at, mask=here, other=0.0) * (up * tl.load(scales + 1))
        tl.store(grad + at, x.to(grad.dtype.element_ty), mask=here)
    if entropy_grad is not None:
        x = tl.load(kept + HAS_GRAD * n + at, mask=here, other=0.0) * factor
        tl.store(entropy_grad + at, x.to(entropy_grad.dtype.element_ty), mask=here)


_launch = Launcher(_kernel, overlaps=True, early=True, enable_fp_fusion=False)


def loss_grad(
    kept: Tensor, scales: Tensor, upstream: Tensor, grad: Tensor | None, entropy_grad: Tensor | None, nll: bool
) -> None:
    """Fills grad and entropy_grad, contiguous, each if given, in their dtypes."""
    like = entropy_grad if grad is None else grad
    assert like is not None
    n = like.numel()
    if n:
        _launch(
            -(-n // tiles.LOSS_GRAD_TOKENS),
            (kept, scales, upstream, grad, entropy_grad),
            (n,),
            (int(grad is not None), nll, n % 4 == 0, tiles.LOSS_GRAD_TOKENS),
            tiles.LOSS_GRAD_WARPS,
        )
