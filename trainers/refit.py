"""The policy's weights into the engine: announce, send in buckets, finish; or abort: none serves half of them."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from trainers.engines import Engine
from trainers.policy import Policy

BUCKET_BYTES = 512 * 2**20


def refit(policy: Policy, engine: Engine, version: int) -> int:
    """Make `engine` generate with the policy's present weights. Returns the bytes copied."""
    moved = 0
    engine.begin_update(version, policy.manifest())
    try:
        for bucket in buckets(policy.weights(), BUCKET_BYTES):
            moved += engine.put(bucket)
        engine.end_update()
    except BaseException:
        engine.abort_update()
        raise
    return moved


def buckets(weights: Iterable[tuple[str, Tensor]], size_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in order, in lists of at most `size_bytes` (a larger tensor travels alone)."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if bucket and filled + size > size_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += size
    if bucket:
        yield bucket
