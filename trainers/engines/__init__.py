"""Generation engines behind one protocol: token ids in, token ids and their log-probs out, weights pushed in between.

An engine never decides what is trained: it returns every sampled token, the stop token included, with the log-prob
under the distribution that sampled it and the version of the weights that did.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trainers.config import GenerationConfig


@dataclass(frozen=True)
class Sampling:
    """The sampling distribution, and what ends a response.

    Logits pass through these in order, each as transformers and vLLM define it: repetition penalty over the tokens of
    prompt and response, removal of the stop ids while the response is shorter than `min_new_tokens`, temperature, then
    the `top_k` most likely tokens (None: all), then of those the fewest, most likely first, that reach `top_p`
    together. `greedy` takes the most likely token that is left; its log-prob is of the distribution all the same.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    greedy: bool = False
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, generation: GenerationConfig, *, greedy: bool = False) -> "Sampling":
        return cls(
            max_new_tokens=generation.max_new_tokens,
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            greedy=greedy or generation.greedy,
            min_new_tokens=generation.min_new_tokens,
            repetition_penalty=generation.repetition_penalty,
            ignore_eos=generation.ignore_eos,
            stop_token_ids=tuple(generation.stop_token_ids),
            stop_strings=tuple(generation.stop_strings),
        )


def stop_ids(sampling: Sampling | GenerationConfig, model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens of a Hugging Face model's vocabulary that end a response, ascending."""
    ids = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        known = model.generation_config.eos_token_id if model.generation_config is not None else None
        ids |= {*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id} - {None}
    return tuple(sorted(i for i in ids if i < model.get_input_embeddings().num_embeddings))


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
