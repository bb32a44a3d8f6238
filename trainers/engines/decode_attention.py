"""Triton kernel of one decoding step's attention: one new token per sequence against its paged KV cache.

A program takes one sequence, one key-value head with all query heads that share it, and a share of the pages (online
softmax, float32; what several programs have of one sequence is put together by a second kernel). The new token's key
and value are read from the projection's output and written to the cache on the way, by the one program that reads
their page: no launch of their own. Bytes: the cache once.

Legend: N sequences, H query heads, K key-value heads, D head size, P pages of PAGE tokens, S shares of a sequence.
"""

# What a kernel's parameters are depends on the call.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _attend(
    query, key, value, k_pages, v_pages, table, positions, out, part_max, part_sum, part_out,
    scale, softcap, window, table_stride, query_n, query_h, key_n, key_h, value_n, value_h,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, SHARES: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    n, head, share = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + n).to(tl.int32)
    last = position // PAGE
    first = tl.maximum(position - window + 1, 0) // PAGE if WINDOW else 0
    each = tl.cdiv(last - first + 1, SHARES)
    begin = first + share * each
    end = tl.minimum(begin + each, last + 1)

    d, g, t = tl.arange(0, WIDTH), tl.arange(0, GROUP), tl.arange(0, PAGE)
    inside, queries = d < D, g < G
    heads = head * G + g
    both = queries[:, None] & inside[None]
    dtype = k_pages.dtype.element_ty
    q = tl.load(query + n * query_n + heads[:, None] * query_h + d[None], mask=both, other=0.0).to(dtype)
    new_k = tl.load(key + n * key_n + head * key_h + d, mask=inside, other=0.0).to(dtype)
    new_v = tl.load(value + n * value_n + head * value_h + d, mask=inside, other=0.0).to(dtype)
    if (begin <= last) & (end == last + 1):
        page = tl.load(table + n * table_stride + last).to(tl.int64)
        at = ((page * K + head) * PAGE + position % PAGE) * D + d
        tl.store(k_pages + at, new_k, mask=inside)
        tl.store(v_pages + at, new_v, mask=inside)

    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, WIDTH], tl.float32)
    for i in range(begin, end):
        page = tl.load(table + n * table_stride + i).to(tl.int64)
        at = (page * K + head) * PAGE * D + t[:, None] * D + d[None]
        token = i * PAGE + t
        cached = (token < position)[:, None] & inside[None]
        is_new = (token == position)[:, None]
        k = tl.where(is_new, new_k[None], tl.load(k_pages + at, mask=cached, other=0.0))
        v = tl.where(is_new, new_v[None], tl.load(v_pages + at, mask=cached, other=0.0))
        s = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale
        if SOFTCAP:
            s = softcap * (1 - 2 / (tl.exp(2 * s / softcap) + 1))
        seen = token <= position
        if WINDOW:
            seen = seen & (token > position - window)
        s = tl.where(seen[None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        # A page that lies before the window altogether does not exist, so `higher` is finite.
        p = tl.exp(s - higher[:, None])
        kept = tl.exp(top - higher)
        total = total * kept + tl.sum(p, 1)
        acc = acc * kept[:, None] + tl.dot(p.to(v.dtype), v, input_precision=EXACT)
        top = higher

    row = n * K * G + heads
    if SHARES == 1:
        tl.store(out + row[:, None] * D + d[None], acc / total[:, None], mask=both)
    else:
        row = row * SHARES + share
        tl.store(part_max + row, top, mask=queries)
        tl.store(part_sum + row, total, mask=queries)
        tl.store(part_out + row[:, None] * D + d[None], acc, mask=both)


@triton.jit
def _combine(part_max, part_sum, part_out, out, D: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SHARES), tl.arange(0, WIDTH)
    top = tl.load(part_max + row * SHARES + s)  # -inf where a share had no page
    factor = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(part_sum + row * SHARES + s) * factor, 0)
    at = (row * SHARES + s[:, None]) * D + d[None]
    parts = tl.load(part_out + at, mask=(d < D)[None], other=0.0)
    tl.store(out + row * D + d, tl.sum(parts * factor[:, None], 0) / total, mask=d < D)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    shares: int | None = None,
) -> Tensor:
    """Writes each sequence's new key and value into the cache, and attends over what it then holds.

    Args:
        query: [N, H, D]; key, value: [N, K, D], of the token at `positions`; last dim contiguous.
        k_pages, v_pages: [P, K, PAGE, D] contiguous, PAGE a power of two from 16.
        table: [N, M] int32, the pages of each sequence in order; positions: [N] int64, where the new token stands.
        window: a token sees itself and the window - 1 before it; None: all before it.
        softcap: scores become softcap * tanh(score / softcap).
        shares: programs a sequence and key-value head, a power of two; None: as many as fill the card.

    Returns:
        [N, H, D] in the query's dtype.
    """
    (n, h, d), (_, k, page, _) = query.shape, k_pages.shape
    if shares is None:
        shares = 1
        while n * k * shares < 2 * _processors(query.device) and shares < min(table.shape[1], 32):
            shares *= 2
    out = query.new_empty(n, h, d)
    parts = [out, out, out]
    if shares > 1:
        rows = (n, h, shares)
        parts = [torch.empty(shape, dtype=torch.float32, device=query.device) for shape in (rows, rows, (*rows, d))]
    width, group = max(triton.next_power_of_2(d), 16), max(triton.next_power_of_2(h // k), 16)
    _attend[(n, k, shares)](
        query, key, value, k_pages, v_pages, table, positions, out, *parts,
        scale, 0.0 if softcap is None else softcap, 0 if window is None else window, table.stride(0),
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        K=k, G=h // k, GROUP=group, D=d, WIDTH=width, PAGE=page, SHARES=shares,
        SOFTCAP=softcap is not None, WINDOW=window is not None,
        EXACT="ieee" if query.dtype == torch.float32 else "tf32", num_warps=4,
        num_stages=2 if width * k_pages.element_size() <= 512 else 1,  # what fits into an SM's shared memory
    )  # fmt: skip
    if shares > 1:
        _combine[(n * h,)](*parts, out, D=d, WIDTH=width, SHARES=shares, num_warps=4)
    return out


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
