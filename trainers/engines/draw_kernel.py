"""Triton kernels of `sample.draw`: the logits are read once, and then once more one block of each row.

A row's cumulative distribution is inverted in two steps: which block of the vocabulary the uniform number falls into,
by the blocks' sums, then which token of it.

Legend: B rows, V vocabulary, C blocks of BLOCK tokens.
"""

# What a kernel's parameters are depends on the call.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _sums(logits, tops, sums, places, scale, row_stride, V, C, BLOCK: tl.constexpr):
    """Of each block: the largest score, where it is, and the sum of exp(score - largest)."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = c * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * row_stride + v, mask=v < V, other=float("-inf")).to(tl.float32) * scale
    top = tl.max(z, 0)
    total = tl.sum(tl.where(z == float("-inf"), 0.0, tl.exp(z - top)), 0)
    # A maximum does not see a NaN; the sum of one that a difference to it makes does.
    broken = tl.sum(tl.where((z != z) | (z == float("inf")), 1, 0), 0) > 0
    tl.store(tops + row * C + c, top)
    tl.store(sums + row * C + c, tl.where(broken, float("nan"), total))
    tl.store(places + row * C + c, c * BLOCK + tl.argmax(z, 0))


@triton.jit
def _pick(
    logits, tops, sums, places, uniform, chosen, logprobs, finite, uniform_stride, scale, row_stride, V, C,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCKS)
    top = tl.load(tops + row * C + c, mask=c < C, other=float("-inf"))
    part = tl.load(sums + row * C + c, mask=c < C, other=0.0).to(tl.float64)
    highest = tl.max(top, 0)
    weight = tl.where(top == float("-inf"), part, part * tl.exp(top - highest).to(tl.float64))
    reached = tl.cumsum(weight, 0)
    total = tl.sum(weight, 0)
    if GREEDY:
        first = tl.min(tl.where(top == highest, c, BLOCKS - 1), 0)
        token = tl.load(places + row * C + first)
    else:
        target = tl.load(uniform + row * uniform_stride).to(tl.float64) * total
        last_block = tl.max(tl.where(weight > 0, c, 0), 0)
        block = tl.minimum(tl.sum((reached <= target).to(tl.int32), 0), last_block)
        before = tl.sum(tl.where(c < block, weight, 0.0), 0)
        i = tl.arange(0, BLOCK)
        v = block * BLOCK + i
        z = tl.load(logits + row * row_stride + v, mask=v < V, other=float("-inf")).to(tl.float32) * scale
        p = tl.where(z == float("-inf"), 0.0, tl.exp(z - highest)).to(tl.float64)
        inside = tl.sum((before + tl.cumsum(p, 0) <= target).to(tl.int32), 0)
        # Sums are rounded otherwise here than above: never past the last token that has a probability.
        token = block * BLOCK + tl.minimum(inside, tl.max(tl.where(p > 0, i, 0), 0))
    z = tl.load(logits + row * row_stride + token).to(tl.float32) * scale
    tl.store(chosen + row, token.to(tl.int64))
    tl.store(logprobs + row, ((z - highest).to(tl.float64) - tl.log(total)).to(tl.float32))
    tl.store(finite + row, (total > 0) & (total < float("inf")))


def draw(
    logits: Tensor, uniform: Tensor, *, temperature: float = 1.0, greedy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, V] logits of any float dtype and [B] float64 uniform numbers -> as `sample.draw` of logits / temperature."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (rows, vocab), device = logits.shape, logits.device
    blocks = triton.cdiv(vocab, BLOCK)
    tops, sums = torch.empty(2, rows, blocks, dtype=torch.float32, device=device)
    places = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    chosen = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    where = (1 / temperature, logits.stride(0), vocab, blocks)
    _sums[(rows, blocks)](logits, tops, sums, places, *where, BLOCK=BLOCK, num_warps=8)
    _pick[(rows,)](
        logits, tops, sums, places, uniform, chosen, logprobs, finite, uniform.stride(0), *where,
        BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(blocks), GREEDY=greedy, num_warps=8,
    )  # fmt: skip
    return chosen, logprobs, finite
