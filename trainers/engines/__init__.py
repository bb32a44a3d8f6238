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


@dataclass(frozen=True)
class Capabilities:
    """What an engine is and can do."""

    name: str  # as policy.generation.backend calls it
    version: str  # of the library that runs the model
    transport: str  # how weights reach it: "inproc" (copied, or shared, in one process) or "cuda_ipc"
    raw_logprobs_only: bool = (
        False  # it can give log-probs of the model's own distribution only, not of the sampled one
    )
    row_seeds: bool = True  # row i's draws are those of seeds[i], whatever is sampled beside it
    can_sleep: bool = True  # sleep() frees memory
    max_len: int | None = None  # tokens of prompt and response together; None: no limit of its own
    devices: tuple[str, ...] = ()  # UUIDs of its GPUs, in its own spelling; empty: none, or none that matter


class Engine(Protocol):
    """Same calls, same order, for every engine (`trainers.engines.guarded` enforces it, one contract test checks it):

    begin_update, put*, end_update, then generate as often as wanted, then perhaps sleep, wake("weights"), an update,
    wake("kv"). A replica is the set of ranks whose GPUs one engine spans.
    """

    def capabilities(self) -> Capabilities: ...

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """One completion a prompt, in order. Row i depends on its prompt, the weights and seeds[i] alone, unless
        capabilities().row_seeds is False: then its draws are its own, but not to be had again.

        Raises:
            TimeoutError: not done within policy.generation.timeout_s.
            RuntimeError: weights incomplete, asleep or closed.
        """

    def begin_update(self, version: int, manifest: Manifest) -> None:
        """Announce new weights. Names and shapes are checked here, before anything moves."""

    def put(self, bucket: Iterable[tuple[str, Tensor]]) -> int:
        """Take some of the announced tensors, full ones under their Hugging Face names, in any order and split. They
        may be overwritten once put() returns. Returns the bytes copied: 0 where storage is shared."""

    def end_update(self) -> None:
        """All tensors have arrived; completions carry the new version from here on, and no cached prefix is older."""

    def abort_update(self) -> None:
        """A half-made update: generate() refuses until a full one has been made."""

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the KV cache, and the weights unless kept (then they may wait in the CPU's memory). Does nothing if
        asleep. What frees nothing (weights shared with the policy) is left as it is."""

    def wake(self, part: str) -> None:
        """Take the memory of "weights", then of "kv", again. Weights that were not kept must be sent before
        generate(). Does nothing if awake."""

    def reset_prefix_cache(self) -> None:
        """Forget what is cached of earlier prompts."""

    def close(self) -> None:
        """Free everything. May be called again."""
