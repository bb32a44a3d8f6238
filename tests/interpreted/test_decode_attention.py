"""One decoding step's attention: the Triton kernel beside the plain definition."""

import pytest
import torch

from trainers.engines.decode_attention import decode_attention
from trainers.engines.paged_attention import decode_reference

PAGE = 16


def case(heads: int, kv_heads: int, head_dim: int, positions: list[int], *, strided: bool = False):
    draw = torch.Generator().manual_seed(0)
    n, width = len(positions), max(positions) // PAGE + 2
    table = torch.randperm(n * width, generator=draw).view(n, width).int() + 1
    cache = torch.full((2, n * width + 1, kv_heads, PAGE, head_dim), torch.nan)  # what no token has written is garbage
    for row, position in enumerate(positions):
        for i in range(position):
            cache[:, table[row, i // PAGE], :, i % PAGE] = torch.randn(2, kv_heads, head_dim, generator=draw)
    wide = torch.randn(n, heads + 2 * kv_heads, head_dim, generator=draw)  # as one projection gives all three
    query, key, value = wide.split([heads, kv_heads, kv_heads], 1)
    return query, key, value, cache, table, torch.tensor(positions)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "shares", "options"),
    [
        (4, 2, 16, 1, {}),
        (3, 1, 24, 4, {}),
        (2, 2, 16, 2, {"window": 20}),
        (2, 1, 16, 1, {"window": 1}),
        (2, 2, 16, 2, {"softcap": 2.0}),
    ],
)
def test_kernel_and_definition_agree(heads, kv_heads, head_dim, shares, options):
    query, key, value, cache, table, positions = case(heads, kv_heads, head_dim, [0, 15, 16, 40])
    mine, theirs = cache.clone(), cache.clone()
    out = decode_attention(query, key, value, *mine, table, positions, scale=0.3, shares=shares, **options)
    expected = decode_reference(query, key, value, *theirs, table, positions, scale=0.3, **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)  # the new token, and nothing else
