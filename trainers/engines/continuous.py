"""Continuous batching on a GPU: a paged KV cache, decoding steps as CUDA graphs, waiting requests in freed places.

A prompt is computed once, however many samples are asked of it; they share its full pages. All that a decoding step
reads and writes lies on the device at fixed addresses, one row per place (steps.py), so a step is one graph launch and
the host looks at the result only every few steps: a response that has ended goes on for some steps, and what it then
samples is not read.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainers.engines import Sampling, sample
from trainers.engines.guarded import Deadline
from trainers.engines.paged_attention import Decode, Prefill, use_paged_attention
from trainers.engines.pages import PAGE, Pages, pages_for
from trainers.engines.steps import Graphs, State
from trainers.packed_attention import Sequences

STEPS_BETWEEN_LOOKS = 8
PREFILL_TOKENS = 16384  # prompts computed together; bounds the activations
MEMORY_SHARE = 0.8  # of the memory that is free when the cache is made

Answer = tuple[list[int], list[float], str]  # tokens, log-probs, finish


@dataclass
class Group:
    """A prompt, the requests for it that wait, and what they will share."""

    prompt: tuple[int, ...]
    waiting: deque[int]
    pages: list[int] = field(default_factory=list)
    logits: Tensor | None = None  # [V], of the first response token


@dataclass
class Place:
    """A request in the running batch."""

    request: int
    pages: list[int]
    checked: int = 0  # tokens of it that were searched for stop strings
    generated: int = 0  # at the last look


class ContinuousBatching:
    """Args: model: a causal LM of this engine alone; places: sequences decoded together at most; kv_cache_gb: size of
    the cache, None: what the requests need, within the memory that is free.

    Raises:
        ValueError: an architecture that does not give the same logits over pages as without.
    """

    def __init__(self, model: PreTrainedModel, *, places: int, kv_cache_gb: float | None = None):
        self.model, self.places, self.kv_cache_gb = model, places, kv_cache_gb
        config = model.config.get_text_config()
        self.device, self.dtype = model.device, model.dtype
        self.vocab = model.get_input_embeddings().num_embeddings
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.layout = {"layers": config.num_hidden_layers, "heads": heads, "head_dim": head_dim}
        self.pages: Pages | None = None
        self.state: State | None = None
        self.graphs = Graphs(places, self.device)
        self.stops_of: dict[tuple[int, ...], Tensor] = {}  # graphs read the ids where they lie
        if self.device.type == "cuda":
            from trainers.fused_layers import fuse_layers  # triton comes with torch for GPUs alone

            fuse_layers(model)
        self._check_model()

    @torch.inference_mode()
    def _check_model(self) -> None:
        """Architectures differ in what they do beside attention: two prompts, alone and over pages, tell."""
        lengths, pages = (PAGE // 8, PAGE + PAGE // 8), (1, 2)
        ids = [torch.arange(n + 1, device=self.device).remainder(self.vocab) for n in lengths]
        before = self.model.config._attn_implementation
        alone = [self.model(input_ids=x[None], use_cache=False).logits[0, -2:] for x in ids]
        use_paged_attention(self.model)
        try:
            self.pages = Pages(sum(pages), **self.layout, dtype=self.dtype, device=self.device)
            groups = [
                Group(tuple(x[:-1].tolist()), deque(), self.pages.take(n)) for x, n in zip(ids, pages, strict=True)
            ]
            self._prefill(groups)
            table = torch.tensor([[group.pages[0], group.pages[-1]] for group in groups], device=self.device).int()
            positions = torch.tensor(lengths, device=self.device)
            last = torch.stack([x[-1] for x in ids])
            after = self._logits(last[:, None], positions[:, None], Decode(self.pages, table, positions))[:, -1]
            for group, plain, decoded in zip(groups, alone, after, strict=True):
                error = (torch.stack([group.logits, decoded]) - plain).abs().max()
                if not error <= (1e-3 if self.dtype == torch.float32 else 0.1) * plain.abs().max():
                    name = type(self.model).__name__
                    raise ValueError(f"{name} gives other logits over a paged cache (they differ by {error:.2g})")
        except Exception:
            self.model.set_attn_implementation(before)
            raise
        finally:
            self.release()

    def release(self) -> None:
        """Give the memory back; the next generate() takes it again."""
        self.pages = self.state = None
        self.graphs.clear()

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        stops: Sequence[int],
        spells_stop: Callable[[list[int]], bool],
        deadline: Deadline,
    ) -> list[Answer]:
        """One answer a prompt, in order. stops: ids that end a response; spells_stop: whether the text of a response so
        far holds a stop string (asked only if the sampling has any)."""
        groups: dict[tuple[int, ...], Group] = {}
        for request, prompt in enumerate(prompts):
            groups.setdefault(tuple(prompt), Group(tuple(prompt), deque())).waiting.append(request)
        self._reserve(prompts, sampling)
        self.sampling, self.spells_stop = sampling, spells_stop
        self.stop_ids = tuple(stops)
        if self.stop_ids not in self.stops_of:
            self.stops_of[self.stop_ids] = torch.tensor(stops, dtype=torch.int64, device=self.device)
        self.stops = self.stops_of[self.stop_ids]
        self.running: dict[int, Place] = {}
        self.answers: dict[int, Answer] = {}
        waiting = deque(groups.values())
        try:
            while waiting or self.running:
                deadline.check()
                free = self.places - len(self.running)
                # A prefill costs as much as several steps: it is worth its while for some places together.
                worthwhile = not self.running or free >= max(self.places // 8, 1)
                if waiting and worthwhile and self._admit(waiting, seeds):
                    self._look()
                if self.running:
                    self._decode()
                    self._look()
        finally:
            for place in self.running.values():
                self.pages.drop(place.pages)
            for group in groups.values():
                self.pages.drop(group.pages)
                group.pages = []
        return [self.answers[request] for request in range(len(prompts))]

    def _reserve(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Cache and state large enough for these requests. What is there stays if it is, or nearly, and with it the
        graphs; what grows, grows by a quarter at least, so that this is seldom."""
        longest, seen = sampling.max_new_tokens, sampling.repetition_penalty != 1
        width = pages_for(max(map(len, prompts)) + longest)
        own = [pages_for(len(prompt) + longest) - len(prompt) // PAGE for prompt in prompts]
        shared = sorted((pages_for(len(prompt)) for prompt in set(map(tuple, prompts))), reverse=True)
        # Beside the prompts of the running batch there may be one whose other samples wait.
        wanted = sum(sorted(own, reverse=True)[: self.places]) + sum(shared[: self.places + 1])
        least = max(pages + pages_for(len(prompt)) for pages, prompt in zip(own, prompts, strict=True))
        self._reserve_pages(wanted, least)
        state = self.state
        if state is None or not state.holds(longest, width, seen):
            if state is not None:  # calls of two kinds that take turns find a state that serves both
                grown = state.width + state.width // 4 if width > state.width else state.width
                longest, width = max(longest, state.longest), max(width, grown)
                seen = seen or state.seen is not None
            self.graphs.clear()
            self.state = State(self.places, longest, width, self.vocab, seen=seen, device=self.device)
        self.state.limit.fill_(sampling.max_new_tokens)
        self.state.diverged.zero_()

    def _reserve_pages(self, wanted: int, least: int) -> None:
        have = 0 if self.pages is None else self.pages.count
        if have >= wanted:
            return
        bytes_a_page = 2 * PAGE * self.dtype.itemsize
        for size in self.layout.values():
            bytes_a_page *= size
        room = self._free_bytes() * MEMORY_SHARE if self.kv_cache_gb is None else self.kv_cache_gb * 2**30
        count = min(max(wanted, have + have // 4), int(room) // bytes_a_page)
        if max(count, have) < least:
            raise MemoryError(
                f"the KV cache has room for {max(count, have) * PAGE} tokens, and a response with its prompt may need "
                f"{least * PAGE}: raise policy.generation.kv_cache_gb or lower policy.generation.max_new_tokens"
            )
        if have < least or count > have + have // 8:
            self.graphs.clear()
            self.pages = None  # before the new ones are made
            self.pages = Pages(count, **self.layout, dtype=self.dtype, device=self.device)

    def _free_bytes(self) -> int:
        if self.device.type != "cuda":
            return 2**40
        held = self.pages.kv.numel() * self.pages.kv.element_size() if self.pages is not None else 0
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        # Parts of larger blocks in use: torch has them, but cannot make one large tensor of them.
        kept -= torch.cuda.memory_stats(self.device).get("inactive_split_bytes.all.current", 0)
        return torch.cuda.mem_get_info(self.device)[0] + kept + held

    def _admit(self, waiting: deque[Group], seeds: Sequence[int]) -> bool:
        """As many waiting requests as there are places and pages, siblings together; then their first token. Whether
        there was any."""
        pages = self.pages
        places = [place for place in range(self.places) if place not in self.running]
        fresh: list[Group] = []
        started: list[tuple[int, Group]] = []
        sources, targets, computed = [], [], 0
        while waiting and places:
            group = waiting[0]
            shared, length = len(group.prompt) // PAGE, len(group.prompt)
            own = pages_for(length + self.sampling.max_new_tokens) - shared
            prefill = 0 if group.pages else pages_for(length)
            if len(pages.free) < own + prefill or (prefill and computed and computed + length > PREFILL_TOKENS):
                break
            if prefill:
                group.pages, computed = pages.take(prefill), computed + length
                fresh.append(group)
            request, place = group.waiting.popleft(), places.pop(0)
            mine = group.pages[:shared]
            pages.hold(mine)
            mine = mine + pages.take(own)
            if length % PAGE:  # its last, half-filled page is written on by each sample
                sources.append(group.pages[shared])
                targets.append(mine[shared])
            self.running[place] = Place(request, mine)
            started.append((place, group))
            if not group.waiting:
                waiting.popleft()
        if not started:
            return False
        if fresh:
            self._prefill(fresh)
        if sources:
            pages.copy(sources, targets)
        self._start(started, seeds)
        for _, group in started:
            if not group.waiting and group.pages:
                pages.drop(group.pages)
                group.pages, group.logits = [], None
        return True

    def _prefill(self, groups: list[Group]) -> None:
        lengths = torch.tensor([len(group.prompt) for group in groups])
        ids = torch.tensor([i for group in groups for i in group.prompt], device=self.device)
        positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
        page = torch.tensor([group.pages[i // PAGE] for group in groups for i in range(len(group.prompt))])
        paged = Prefill(
            self.pages, Sequences.of(lengths, self.device), page.to(self.device), (positions % PAGE).to(self.device)
        )
        last = (lengths.cumsum(0) - 1).to(self.device)
        logits = self._logits(ids[None], positions[None].to(self.device), paged, logits_to_keep=last)[0]
        for group, row in zip(groups, logits, strict=True):
            group.logits = row

    def _start(self, started: list[tuple[int, Group]], seeds: Sequence[int]) -> None:
        """Fill the places' rows and sample the first token of each."""
        state, device = self.state, self.device
        places = torch.tensor([place for place, _ in started], device=device)
        table = torch.zeros(len(started), state.width, dtype=torch.int32)
        for row, (place, _) in enumerate(started):
            mine = self.running[place].pages
            table[row, : len(mine)] = torch.tensor(mine)
        state.table[places] = table.to(device)
        state.position[places] = torch.tensor([len(group.prompt) - 1 for _, group in started], device=device)
        state.generated[places] = 0
        state.active[places] = True
        drawn = sample.uniforms([seeds[self.running[p].request] for p, _ in started], self.sampling.max_new_tokens)
        state.uniforms[places, : self.sampling.max_new_tokens] = drawn.to(device)
        if self.sampling.repetition_penalty != 1:
            seen = torch.zeros(len(started), self.vocab, dtype=torch.bool)
            for row, (_, group) in enumerate(started):
                seen[row, list(group.prompt)] = True
            state.seen[places] = seen.to(device)
        self._choose(torch.stack([group.logits for _, group in started]), places, self.sampling)

    def _decode(self) -> None:
        """Some steps of the running batch, and none after the last of them has ended."""
        left = self.sampling.max_new_tokens - min(place.generated for place in self.running.values())
        steps = min(left, STEPS_BETWEEN_LOOKS)
        self.graphs.run(self._step, list(self.running), self.sampling, self.stop_ids, steps)

    def _step(self, lanes: Tensor, sampling: Sampling) -> None:
        """The next token of the places `lanes` [N]."""
        state = self.state
        positions = state.position[lanes]
        paged = Decode(self.pages, state.table[lanes], positions)
        logits = self._logits(state.token[lanes][:, None], positions[:, None], paged)[:, -1]
        self._choose(logits, lanes, sampling)

    def _choose(self, logits: Tensor, places: Tensor, sampling: Sampling) -> None:
        """Sample the next token of `places` [N] from [N, V] logits; note it, and who has ended by it."""
        state = self.state
        generated, live = state.generated[places], state.active[places]
        seen = state.seen[places] if sampling.repetition_penalty != 1 else None
        early = generated < sampling.min_new_tokens if sampling.min_new_tokens else None
        uniform = state.uniforms[places, generated]
        chosen, logprobs, finite = sample.choose(logits, uniform, sampling, seen=seen, stops=self.stops, early=early)
        state.tokens[places, generated] = chosen
        state.logprobs[places, generated] = logprobs
        state.token[places] = chosen
        state.position[places] += live
        generated = generated + live
        state.generated[places] = generated
        stopped = (chosen[:, None] == self.stops).any(1)
        state.active[places] = live & ~stopped & (generated < state.limit)
        state.diverged |= ~(finite | ~live).all()
        if seen is not None:
            state.seen[places, chosen] = torch.ones_like(live)

    def _look(self) -> None:
        """Take the responses that have ended out of the batch."""
        state = self.state
        said = torch.stack([state.active.long(), state.generated, state.diverged.long().expand_as(state.generated)])
        active, generated, diverged = said.tolist()
        sample.check_finite(not diverged[0])
        for place, running in self.running.items():
            running.generated = generated[place]
        ends = {
            place: (generated[place], "length" if generated[place] == self.sampling.max_new_tokens else "stop")
            for place in self.running
            if not active[place]
        }
        if self.sampling.stop_strings:
            ends |= self._search({place: generated[place] for place in self.running})
        if not ends:
            return
        rows = torch.tensor(list(ends), device=self.device)
        tokens, logprobs = state.tokens[rows].tolist(), state.logprobs[rows].tolist()
        for (place, (count, finish)), ids, values in zip(ends.items(), tokens, logprobs, strict=True):
            done = self.running.pop(place)
            self.pages.drop(done.pages)
            if ids[count - 1] in self.stop_ids:
                finish = "stop"
            self.answers[done.request] = (ids[:count], values[:count], finish)

    def _search(self, generated: dict[int, int]) -> dict[int, tuple[int, str]]:
        """Where in the responses a stop string is complete for the first time."""
        rows = torch.tensor(list(generated), device=self.device)
        ends = {}
        for (place, count), ids in zip(generated.items(), self.state.tokens[rows].tolist(), strict=True):
            running = self.running[place]
            for end in range(max(running.checked + 1, self.sampling.min_new_tokens), count + 1):
                if self.spells_stop(ids[:end]):
                    ends[place] = (end, "stop")
                    break
            running.checked = count
        return ends

    def _logits(self, ids: Tensor, positions: Tensor, paged: Prefill | Decode, **options: Tensor) -> Tensor:
        return self.model(input_ids=ids, position_ids=positions, use_cache=False, paged=paged, **options).logits
