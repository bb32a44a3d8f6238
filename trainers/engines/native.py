"""The embedded engine: sampling with a KV cache through transformers, in the trainer's own process.

On a GPU sequences come and go in a running batch (continuous.py). On a CPU, and for architectures that cannot do that,
a batch is decoded to its end: prompts are left-padded, rows that have ended leave it.

Parameters whose dtype equals the policy's stored one are the policy's own tensors (a frozen trunk, or everything in
float32, or with bfloat16 parameters), so a refit moves only the trained layers' half-precision copies, or nothing.
Sampling draws one uniform number per (request, position) from the request's own seed and inverts the cumulative
distribution, so a row's randomness does not depend on its neighbours.
"""

import copy
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from trainers.engines import Capabilities, Completion, Manifest, Sampling, sample, stop_ids
from trainers.engines.continuous import ContinuousBatching
from trainers.engines.guarded import Deadline, GuardedEngine, check_manifest
from trainers.packed_attention import own_attention

Model = TypeVar("Model", bound=nn.Module)


class NativeEngine(GuardedEngine):
    """Args:
    model: a causal LM, used as it is (see `share_parameters`).
    tokenizer: its end token and stop strings.
    own_weights: the model shares no storage with the policy, and gives its own up in sleep().
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        max_batch_size: int = 64,
        kv_cache_gb: float | None = None,
        continuous: bool | None = None,
        timeout_s: float | None = None,
        own_weights: bool = False,
    ):
        super().__init__(timeout_s=timeout_s)
        self.model = model.eval()
        self.tokenizer, self.own_weights = tokenizer, own_weights
        self.max_batch_size = max_batch_size
        self.parameters = dict(model.named_parameters())
        self.places: dict[str, Tensor] = {}  # the same, under the names of the update's manifest
        self.sizes: dict[str, int] = {}  # bytes of those that were given up
        # transformers renamed the argument; both names are in use among the supported versions.
        arguments = inspect.signature(type(model.base_model).forward).parameters
        self.cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self.continuous: ContinuousBatching | None = None
        if model.device.type == "cuda" if continuous is None else continuous:
            try:
                self.continuous = ContinuousBatching(model, places=max_batch_size, kv_cache_gb=kv_cache_gb)
            except torch.OutOfMemoryError:
                raise
            except Exception as reason:  # each architecture has reasons of its own, and batches serve them all
                print(f"generation: batch by batch, without CUDA graphs: {reason}", flush=True)

    def capabilities(self) -> Capabilities:
        can_sleep = self.own_weights or self.continuous is not None
        return Capabilities("native", transformers.__version__, transport="inproc", can_sleep=can_sleep)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        if any(getattr(parameter, "holds_reference", False) for parameter in self.parameters.values()):
            raise RuntimeError("generate() inside a reference pass: the weights it shares are the reference's now")
        self.deadline = Deadline(self.timeout_s)
        if self.continuous is not None:
            answers = self.continuous.generate(
                prompts,
                sampling,
                seeds,
                stops=stop_ids(sampling, self.model, self.tokenizer),
                spells_stop=lambda tokens: self._spells_stop(tokens, sampling.stop_strings),
                deadline=self.deadline,
            )
            return [Completion(*answer, self.version) for answer in answers]
        # Rows of like length share a batch, so that little is spent on padding.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        completions: dict[int, Completion] = {}
        for start in range(0, len(order), self.max_batch_size):
            rows = order[start : start + self.max_batch_size]
            batch = self._decode([prompts[i] for i in rows], sampling, [seeds[i] for i in rows])
            completions.update(zip(rows, batch, strict=True))
        return [completions[i] for i in range(len(prompts))]

    def _decode(self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        device = self.model.device
        ids_of_stops = stop_ids(sampling, self.model, self.tokenizer)
        stops, stop_tensor = set(ids_of_stops), torch.tensor(ids_of_stops, dtype=torch.int64, device=device)
        uniforms = sample.uniforms(list(seeds), sampling.max_new_tokens).to(device)
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        attention = torch.zeros(len(prompts), width + sampling.max_new_tokens, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention[row, width - len(prompt) :] = 1
        ids, attention = ids.to(device), attention.to(device)
        positions = (attention[:, :width].cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        # As an index, not as the number 1: a slice is not contiguous, and then the head's weight is copied per row.
        last = torch.tensor([-1], device=device)
        seen = self._seen(prompts) if sampling.repetition_penalty != 1 else None

        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        finish = ["length"] * len(prompts)
        active = list(range(len(prompts)))  # which request each row of the running batch serves
        for i in range(sampling.max_new_tokens):
            self.deadline.check()
            output = self.model(
                input_ids=ids,
                attention_mask=attention[:, : width + i],
                position_ids=positions,
                use_cache=True,
                logits_to_keep=last,
                **{self.cache_argument: cache},
            )
            early = torch.full((len(active),), True, device=device) if i < sampling.min_new_tokens else None
            logits = output.logits[:, -1]
            chosen, logprob, finite = sample.choose(
                logits, uniforms[:, i], sampling, seen=seen, stops=stop_tensor, early=early
            )
            sample.check_finite(bool(finite.all()))
            checked = sampling.stop_strings if i + 1 >= sampling.min_new_tokens else ()
            keep = []
            for row, (token, lp) in enumerate(zip(chosen.tolist(), logprob.tolist(), strict=True)):
                request = active[row]
                tokens[request].append(token)
                logprobs[request].append(lp)
                if token in stops or self._spells_stop(tokens[request], checked):
                    finish[request] = "stop"
                else:
                    keep.append(row)
            if not keep or i + 1 == sampling.max_new_tokens:
                break
            if seen is not None:
                seen.scatter_(1, chosen[:, None], True)
            if len(keep) < len(active):
                index = torch.tensor(keep, device=device)
                cache.reorder_cache(index)
                chosen, attention, positions, uniforms = (x[index] for x in (chosen, attention, positions, uniforms))
                seen = None if seen is None else seen[index]
                active = [active[row] for row in keep]
            ids, positions = chosen[:, None], positions[:, -1:] + 1
        return [Completion(t, lp, f, self.version) for t, lp, f in zip(tokens, logprobs, finish, strict=True)]

    def _begin_update(self, manifest: Manifest) -> None:
        self.places = check_manifest(manifest, self.parameters)

    def _put(self, bucket: list[tuple[str, Tensor]]) -> int:
        moved = 0
        for name, tensor in bucket:
            mine = self.places[name]
            if mine.data_ptr() != tensor.data_ptr():
                mine.copy_(tensor)
                moved += mine.numel() * mine.element_size()
        return moved

    def _sleep(self, parts: set[str], *, keep_weights: bool) -> bool:
        """The cache; weights only where all are this engine's: others are the policy's, or few."""
        if self.continuous is not None:
            self.continuous.release()
        if not self.own_weights or keep_weights or "weights" not in parts:
            return False
        self.sizes = {name: parameter.untyped_storage().nbytes() for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.untyped_storage().resize_(0)
        return True

    def _wake(self, part: str) -> None:
        if part == "weights":
            for name, size in self.sizes.items():
                self.parameters[name].untyped_storage().resize_(size)
            self.sizes = {}

    def _close(self) -> None:
        self._sleep(set(), keep_weights=True)
        self.parameters, self.places = {}, {}

    def _seen(self, prompts: list[list[int]]) -> Tensor:
        """[B, V] bool: the tokens of each prompt, padding not among them."""
        seen = torch.zeros(len(prompts), self.model.get_input_embeddings().num_embeddings, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            seen[row, prompt] = True
        return seen.to(self.model.device)

    def _spells_stop(self, tokens: list[int], stop_strings: tuple[str, ...]) -> bool:
        if not stop_strings:
            return False
        text = self.tokenizer.decode(tokens)
        return any(stop in text for stop in stop_strings)


def own_copy(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """`model`, which nobody else uses, as an engine wants it. Its buffers keep their dtype, as in transformers: rotary
    frequencies are float32."""
    for parameter in model.requires_grad_(False).parameters():
        parameter.data = parameter.data.to(device, dtype, copy=True)  # a file's storage cannot be given up
    return model.to(device)


def share_parameters(model: Model, dtype: torch.dtype, copied: Iterable[Tensor] = ()) -> Model:
    """A model of the same structure in `dtype`: parameters stored in that dtype are shared, unless they are among
    `copied`; the others are copied."""
    never = {id(p) for p in copied}
    memo: dict[int, Any] = {id(p): p for p in model.parameters() if p.dtype == dtype and id(p) not in never}
    shared = copy.deepcopy(model, memo)
    own_attention(shared)  # a cache and left padding are beyond the attention of packed training
    for parameter in shared.parameters():
        if id(parameter) not in memo:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
    return shared
