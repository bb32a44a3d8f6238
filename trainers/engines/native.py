"""The embedded engine: batched sampling with a KV cache through transformers, in the trainer's own process.

Parameters whose dtype equals the policy's stored one are the policy's own tensors (a frozen trunk, or everything in
float32), so a refit moves only the trained layers' half-precision copies, or nothing. Prompts are left-padded within a
batch; sampling draws one uniform number per (request, position) from the request's own seed and inverts the cumulative
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

from trainers.engines import Capabilities, Completion, Manifest, Sampling, stop_ids
from trainers.engines.guarded import Deadline, GuardedEngine, check_manifest
from trainers.packed_attention import own_attention

Model = TypeVar("Model", bound=nn.Module)


class NativeEngine(GuardedEngine):
    """Args: model: a causal LM, used as it is (see `share_parameters`); tokenizer: its end token and stop strings."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, *, max_batch_size: int = 64, timeout_s: float | None = None
    ):
        super().__init__(timeout_s=timeout_s)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.max_batch_size = max_batch_size
        self.parameters = dict(model.named_parameters())
        # transformers renamed the argument; both names are in use among the supported versions.
        arguments = inspect.signature(type(model.base_model).forward).parameters
        self.cache_argument = "cache" if "cache" in arguments else "past_key_values"

    def capabilities(self) -> Capabilities:
        return Capabilities("native", transformers.__version__, transport="inproc", can_sleep=False)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        if any(getattr(parameter, "holds_reference", False) for parameter in self.parameters.values()):
            raise RuntimeError("generate() inside a reference pass: the weights it shares are the reference's now")
        # Rows of like length share a batch, so that little is spent on padding.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        self.deadline = Deadline(self.timeout_s)
        completions: dict[int, Completion] = {}
        for start in range(0, len(order), self.max_batch_size):
            rows = order[start : start + self.max_batch_size]
            batch = self._decode([prompts[i] for i in rows], sampling, [seeds[i] for i in rows])
            completions.update(zip(rows, batch, strict=True))
        return [completions[i] for i in range(len(prompts))]

    def _decode(self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        device = self.model.device
        stops = stop_ids(sampling, self.model, self.tokenizer)
        uniforms = torch.stack(
            [torch.rand(sampling.max_new_tokens, dtype=torch.float64, generator=_generator(seed)) for seed in seeds]
        ).to(device)
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
            early = i < sampling.min_new_tokens
            removed = stops if early else ()
            chosen, logprob = _sample(output.logits[:, -1], sampling, uniforms[:, i], seen=seen, removed=removed)
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
        check_manifest(manifest, {name: tuple(parameter.shape) for name, parameter in self.parameters.items()})

    def _put(self, bucket: list[tuple[str, Tensor]]) -> int:
        moved = 0
        for name, tensor in bucket:
            mine = self.parameters[name]
            if mine.data_ptr() != tensor.data_ptr():
                mine.copy_(tensor)
                moved += mine.numel() * mine.element_size()
        return moved

    def _close(self) -> None:
        self.parameters = {}

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


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _sample(
    logits: Tensor,
    sampling: Sampling,
    uniform: Tensor,
    *,
    seen: Tensor | None = None,
    removed: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """[B, V] logits, [B] uniform numbers -> token ids [B] and their log-probs [B] (float64 sums: V may be 250,000)."""
    scores = _scores(logits, sampling, seen, removed)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    if not bool(torch.isfinite(total).all()):
        raise FloatingPointError("the policy's logits are not finite while sampling: the weights have diverged")
    if sampling.greedy:
        chosen = weights.argmax(-1)
    else:
        # right=True never picks a token of probability zero.
        chosen = torch.searchsorted(cumulative, (uniform * total)[:, None], right=True).squeeze(-1)
        chosen = chosen.clamp(max=logits.shape[-1] - 1)
    picked = weights.gather(-1, chosen[:, None]).squeeze(-1)
    return chosen, (picked.double().log() - total.log()).float()


def _scores(logits: Tensor, sampling: Sampling, seen: Tensor | None, removed: Sequence[int]) -> Tensor:
    """[B, V] float32 whose softmax is the sampling distribution; -inf where a token cannot be sampled.

    seen: [B, V] bool, the tokens that the repetition penalty is for; removed: ids that are left out of every row.
    """
    scores = logits.float()
    if seen is not None:
        penalty = sampling.repetition_penalty
        scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if removed:
        scores = scores.index_fill(-1, torch.tensor(removed, device=scores.device), -torch.inf)
    scores = scores / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)  # what ties with the last one stays
    if sampling.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        probs = ordered.double().softmax(-1)
        enough = probs.cumsum(-1) - probs >= sampling.top_p  # what is more likely suffices; never so for the first
        scores = scores.scatter(-1, order, ordered.masked_fill(enough, -torch.inf))
    return scores
