"""What the tests of the linear ops share: heads, and how much memory a call takes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fastppo.ops import _linear


class HeadInputs(NamedTuple):
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor  # [V]
    targets: Tensor  # [N]


def make_head(
    rows: int, vocab: int, dim: int = 8, *, dtype: torch.dtype = torch.float32, ignored: float = 0.0, seed: int = 0
) -> HeadInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = -100
    return HeadInputs(normal(rows, dim), normal(vocab, dim), normal(vocab), targets)


def small_chunks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Chunks of `rows` rows whatever the vocabulary."""
    monkeypatch.setattr(_linear, "CHUNK_ROWS", rows)
    monkeypatch.setattr(_linear, "CHUNK_LOGITS_CPU", 1)


def small_columns(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    """Log-probs in chunks of rows and columns, as on a GPU where the vocabulary is large."""
    monkeypatch.setattr("fastppo.ops._linear_logprob_ops.plan_of", lambda *_: _linear.Plan(rows, columns))


class Memory(NamedTuple):
    largest: int  # bytes of the largest allocation
    peak: int  # bytes beyond what was there before


def memory_of(call: Callable[[], Any]) -> Memory:
    """Of every allocation that torch makes in the call, inside registered ops too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    found: list[tuple[int, int]] = []

    def walk(events: list[Any]) -> None:
        for event in events:
            if event.tag.name == "Allocation":
                found.append((event.start_time_ns, event.extra_fields.alloc_size))
            walk(event.children)

    walk(profiler.profiler.kineto_results.experimental_event_tree())
    live = peak = 0
    for _, size in sorted(found, key=lambda x: x[0]):
        live += size
        peak = max(peak, live)
    return Memory(max(size for _, size in found), peak)
