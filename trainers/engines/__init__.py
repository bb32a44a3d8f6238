"""Generation engines behind one protocol: token ids in, token ids and their log-probs out, weights pushed in between.

An engine never decides what is trained: it returns every sampled token, the stop token included, with the log-prob
under the distribution that sampled it and the version of the weights that did.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainers.config import GenerationConfig


@dataclass(frozen=True)
class Sampling:
    """The sampling distribution softmax(logits / temperature), and what ends a response."""

    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, generation: GenerationConfig, *, greedy: bool = False) -> "Sampling":
        return cls(
            max_new_tokens=generation.max_new_tokens,
            temperature=generation.temperature,
            greedy=greedy,
            ignore_eos=generation.ignore_eos,
            stop_token_ids=tuple(generation.stop_token_ids),
            stop_strings=tuple(generation.stop_strings),
        )


@dataclass(frozen=True)
class Completion:
    tokens: list[int]  # at least one; ends with the stop token if finish is "stop"
    logprobs: list[float]  # of the sampling distribution, one per token
    finish: str  # "stop" or "length"
    weight_version: int


@dataclass(frozen=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype


Manifest = Mapping[str, TensorSpec]


class Engine(Protocol):
    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """One completion a prompt, in order. Row i depends on its prompt, the weights and seeds[i] alone."""

    def begin_update(self, version: int, manifest: Manifest) -> None:
        """Announce new weights. Names and shapes are checked here, before anything moves."""

    def put(self, bucket: Iterable[tuple[str, Tensor]]) -> int:
        """Take some of the announced tensors. Returns the bytes copied: 0 where storage is shared."""

    def end_update(self) -> None:
        """All tensors have arrived; completions carry the new version from here on."""

    def abort_update(self) -> None:
        """A half-made update: generate() refuses until a full one has been made."""

    def close(self) -> None: ...
