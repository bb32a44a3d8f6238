"""Bodies of requests to a critic server, good and bad. The tiny model reads ids 0 to 15 and 256 tokens at most."""

import json
import struct
from typing import Any

import torch
from torch import Tensor

from trainers.service.wire import HEADER, decode, encode

Row = tuple[list[int], list[int]]  # ids, mask
ROWS: list[Row] = [([0, 3, 4, 5], [0, 0, 1, 1]), ([0, 6, 7], [0, 1, 1]), ([0, 9], [0, 1])]


def tensors(rows: list[Row] = ROWS) -> dict[str, Tensor]:
    return {
        "tokens": torch.tensor([i for ids, _ in rows for i in ids], dtype=torch.int64),
        "lengths": torch.tensor([len(ids) for ids, _ in rows], dtype=torch.int64),
        "mask": torch.tensor([m for _, mask in rows for m in mask], dtype=torch.bool),
    }


def random_rows(count: int, longest: int = 40, seed: int = 0) -> list[Row]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=draw).tolist()
    return [(torch.randint(0, 16, (n,), generator=draw).tolist(), [0] + [1] * (n - 1)) for n in lengths]


def infer(rows: list[Row] = ROWS, header: dict[str, Any] | None = None, **changed: Tensor | None) -> bytes:
    """`changed`: tensors in place of those of `rows`; None leaves one out."""
    return encode(header or {}, _chosen(tensors(rows), changed))


def train(
    run: str, number: int, rows: list[Row] = ROWS, header: dict[str, Any] | None = None, **changed: Tensor | None
) -> bytes:
    known = tensors(rows)
    noise = torch.randn(known["tokens"].numel(), generator=torch.Generator().manual_seed(number))
    known |= {"values": 0.1 * noise, "returns": noise}
    return encode({"run": run, "id": number} | (header or {}), _chosen(known, changed))


def _chosen(known: dict[str, Tensor], changed: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in (known | changed).items() if tensor is not None}


def file_of(described: dict[str, Any] | str, data: bytes = b"") -> bytes:
    """A safetensors file as it is written down, whatever it says."""
    text = described.encode() if isinstance(described, str) else json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text + data


def with_header(text: str, body: bytes | None = None) -> bytes:
    """`body` with this text where its JSON header stood."""
    body = infer() if body is None else body
    size = struct.unpack("<Q", body[:8])[0]
    described = json.loads(body[8 : 8 + size])
    described["__metadata__"][HEADER] = text
    return file_of(described, body[8 + size :])


def answered(body: bytes) -> dict[str, bytes]:
    """The tensors of an answer, byte for byte. Its header also tells the time, which differs."""
    return {name: tensor.numpy().tobytes() for name, tensor in decode(body)[1].items()}
