"""The body of a request or an answer: a safetensors file whose metadata holds one JSON header. Nothing is pickled."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save
from torch import Tensor

MEDIA_TYPE = "application/vnd.safetensors"
HEADER = "fastppo"  # key of the header in the file's metadata
MOST_TENSORS = 256  # in a file; a body could name a million empty ones
LONGEST_REASON = 1000  # characters of a refusal, which may quote what was sent
DTYPES = {"I64": torch.int64, "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool}


class Refused(Exception):
    """A request that changes nothing; `status` is HTTP's, `facts` join the answer."""

    def __init__(self, message: str, status: int = 400, **facts: Any):
        super().__init__(message[:LONGEST_REASON])
        self.status, self.facts = status, facts


def encode(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """`tensors`: on the CPU, of one of DTYPES."""
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, {HEADER: dumps(header)})


def decode(body: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors, each with memory of its own.

    Raises:
        Refused: no such file, a name that is given twice, a dtype that is not among DTYPES, more than one dimension, or
            a header that is no JSON object.
    """
    size = int.from_bytes(body[:8], "little")
    try:
        described = json.loads(body[8 : 8 + size], object_pairs_hook=_Limited(MOST_TENSORS + 2))
        parts = deserialize(body)  # which keeps the last of two tensors of one name
    except (SafetensorError, ValueError, RecursionError) as error:
        raise Refused(f"the body is not a safetensors file: {error}") from None
    metadata = described.get("__metadata__") or {}
    if HEADER not in metadata:
        raise Refused(f"the safetensors metadata must have the key {HEADER!r}, a JSON object; got {sorted(metadata)}")
    return loads(metadata[HEADER]), {name: _tensor(name, **part) for name, part in parts}


def _tensor(name: str, dtype: str, shape: list[int], data: bytearray) -> Tensor:
    if dtype not in DTYPES:
        raise Refused(f"tensor {name!r}: expected dtype {', '.join(DTYPES)}, got {dtype}")
    if len(shape) > 1:
        raise Refused(f"tensor {name!r}: expected one dimension, got {len(shape)}")
    if not data:
        return torch.empty(shape, dtype=DTYPES[dtype])
    if dtype == "BOOL":  # a byte that is neither 0 nor 1 would be a bool without a defined value
        raw = torch.frombuffer(data, dtype=torch.uint8)
        if int(raw.max()) > 1:
            raise Refused(f"tensor {name!r}: a bool must be stored as 0 or 1, got {int(raw.max())}")
        return raw.bool().view(shape)
    return torch.frombuffer(data, dtype=DTYPES[dtype]).view(shape)


def dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def loads(text: str | bytes) -> dict[str, Any]:
    """A JSON object; NaN and Infinity, which JSON does not have, and a key that is given twice are refused.

    Raises:
        Refused: it is none.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of open brackets
        raise Refused(f"not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise Refused(f"expected a JSON object, got {type(value).__name__}")
    return value


class _Limited:
    """Ends the reading of a JSON text at its `most`-th object, before it fills the memory."""

    def __init__(self, most: int):
        self.left = most

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"it has more than {MOST_TENSORS} tensors")
        return _unique(pairs)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {max(counts, key=counts.__getitem__)!r} is given twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
