"""RolloutBatch, what travels through a trainer, and the step that fills it: prompts -> engine -> packed sequences.

Legend: T tokens of all sequences back to back, B sequences, D hidden size. Every [T] tensor is about its own token:
`logprobs[t]` scores `tokens[t]`, `values[t]` is V of the state before it, `rewards[t]` is paid for it. A sequence's
first token has mask 0, since nothing predicts it.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from trainers import dist
from trainers.config import GenerationConfig
from trainers.dialogues import ENDINGS, Dialogue, Row, read_turns, write_turn
from trainers.engines import Completion, Engine, Sampling
from trainers.environments import Environment, RewardError, Sample
from trainers.prompts import TokenizedPrompt

FINISH = ("stop", "length")  # codes of RolloutBatch.finish


def token_field() -> Any:
    return field(default=None, metadata={"per": "token"})


def sequence_field() -> Any:
    return field(default=None, metadata={"per": "sequence"})


@dataclass
class RolloutBatch:
    """Packed sequences. The first block is set by generation, the rest by the trainer as it goes."""

    cu_seqlens: Tensor  # [B + 1] int64
    tokens: Tensor = token_field()  # [T] int64
    mask: Tensor = token_field()  # [T] bool: sampled by the policy, hence trained
    rollout_logprobs: Tensor = token_field()  # [T] float32, the engine's own; 0 where mask is 0
    group: Tensor = sequence_field()  # [B] int64, index of the prompt within the step
    sample_id: Tensor = sequence_field()  # [B] int64, row within the step
    finish: Tensor = sequence_field()  # [B] int64, index into FINISH
    weight_version: Tensor = sequence_field()  # [B] int64, step of the weights that sampled it
    turns: Tensor | None = sequence_field()  # [B] int64, turns of the policy, where there may be several
    ended: Tensor | None = sequence_field()  # [B] int64, index into dialogues.ENDINGS, likewise

    valid: Tensor | None = sequence_field()  # [B] bool: trained on; None: all of them are
    raw_reward: Tensor | None = sequence_field()  # [B] float32, the task's score
    reward_parts: Tensor | None = sequence_field()  # [B, R] float32, with several rewards each one's own score
    baseline: Tensor | None = sequence_field()  # [B] float32, what the greedy response to the same prompt earned
    token_scores: Tensor | None = token_field()  # [T] float32, where the score is paid
    old_logprobs: Tensor | None = token_field()
    ref_logprobs: Tensor | None = token_field()
    entropy: Tensor | None = token_field()
    values: Tensor | None = token_field()
    next_values: Tensor | None = sequence_field()  # [B] float32, V after the last token
    rewards: Tensor | None = token_field()  # [T] float32, after KL
    advantages: Tensor | None = token_field()
    returns: Tensor | None = token_field()
    trunk_hidden: Tensor | None = token_field()  # [T, D], output of the policy's frozen trunk

    reward_names: tuple[str, ...] = ()  # of the R columns of reward_parts
    num_tokens: int | None = None  # trained tokens of the optimizer step, set by batching
    num_seqs: int | None = None  # sequences of the optimizer step with at least one trained token
    num_nll_tokens: int | None = None  # of the trained tokens those of responses with a positive raw reward
    rank_imbalance: list[float] = field(default_factory=list)  # of each minibatch so far, see dist.imbalance()
    empty_minibatches: int = 0  # minibatches of this rollout so far without a trained token, counted by batching
    greedy: "RolloutBatch | None" = None  # [B'] one greedy response to each prompt; not carried by select()
    metrics: dict[str, float] = field(default_factory=dict)  # of how it came about; not carried by select()
    samples: list[Sample] = field(default_factory=list)  # decoded, for rewards and tables; not carried by select()

    def __len__(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> Tensor:  # [B]
        return self.cu_seqlens.diff()

    @property
    def sequence_ids(self) -> Tensor:
        """[T] int64: which sequence each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    @property
    def positions(self) -> Tensor:
        """[T] int64: place of each token in its own sequence."""
        return torch.arange(self.tokens.numel()) - self.cu_seqlens[:-1][self.sequence_ids]

    @property
    def prompt_lengths(self) -> Tensor:
        """[B] int64: tokens before the first response token. What stands between turns is not the prompt."""
        index = torch.where(self.mask, self.positions, self.tokens.numel())
        return torch.full((len(self),), self.tokens.numel()).scatter_reduce(0, self.sequence_ids, index, "amin")

    @property
    def response_lengths(self) -> Tensor:
        """[B] int64: tokens that the policy sampled, of all turns."""
        return torch.zeros(len(self), dtype=torch.int64).index_add(0, self.sequence_ids, self.mask.long())

    @property
    def trained(self) -> Tensor:
        """[T] bool: what losses and advantages are about: sampled by the policy, in a sequence that is not left out."""
        return self.mask if self.valid is None else self.mask & self.valid[self.sequence_ids]

    @property
    def trained_lengths(self) -> Tensor:
        """[B] int64"""
        return torch.zeros(len(self), dtype=torch.int64).index_add(0, self.sequence_ids, self.trained.long())

    def per_sequence(self, per_token: Tensor) -> Tensor:
        """[B] float32: the sum of a [T] tensor over each sequence's sampled tokens."""
        return torch.zeros(len(self)).index_add(0, self.sequence_ids, torch.where(self.mask, per_token, 0.0))

    @property
    def turn_positions(self) -> Tensor:
        """[T] int64: place of each sampled token in its own turn, a run of sampled tokens; 0 elsewhere."""
        index = torch.arange(self.tokens.numel())
        starts = torch.where(self.mask, 0, index + 1).cummax(0).values  # the place after the last unsampled token
        return torch.where(self.mask, index - starts, 0)

    def last_selected(self) -> Tensor:
        """[B] int64: packed index of each sequence's last response token. Every sequence has one."""
        index = torch.where(self.mask, torch.arange(self.tokens.numel()), -1)
        return torch.full((len(self),), -1).scatter_reduce(0, self.sequence_ids, index, "amax")

    def tokens_of(self, rows: Tensor) -> Tensor:
        """[T'] int64: packed index of every token of the sequences `rows`, in that order."""
        lengths = self.lengths[rows]
        ends = lengths.cumsum(0)
        return torch.arange(int(lengths.sum())) + torch.repeat_interleave(self.cu_seqlens[1:][rows] - ends, lengths)

    def select(self, rows: Tensor | Sequence[int]) -> "RolloutBatch":
        """The sequences `rows`, in that order, with everything known of them."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        cu_seqlens = torch.nn.functional.pad(self.lengths[rows].cumsum(0), (1, 0))
        at = {"token": self.tokens_of(rows), "sequence": rows}
        chosen = {
            f.name: value[at[f.metadata["per"]]]
            for f in fields(self)
            if "per" in f.metadata and (value := getattr(self, f.name)) is not None
        }
        own = {"samples": [], "greedy": None, "metrics": {}, "rank_imbalance": [], "empty_minibatches": 0}
        return replace(self, cu_seqlens=cu_seqlens, **own, **chosen)

    @classmethod
    def concat(cls, batches: Sequence["RolloutBatch"]) -> "RolloutBatch":
        """All sequences of the batches, in order, with the fields that every one of them has."""
        first = batches[0]
        per = [f.name for f in fields(cls) if "per" in f.metadata]
        known = [name for name in per if all(getattr(batch, name) is not None for batch in batches)]
        lengths = torch.cat([batch.lengths for batch in batches])
        return replace(
            first,
            cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            samples=[sample for batch in batches for sample in batch.samples],
            greedy=None,
            metrics={},
            rank_imbalance=[],
            empty_minibatches=0,
            **{name: torch.cat([getattr(batch, name) for batch in batches]) if name in known else None for name in per},
        )

    def update(self, **tensors: Tensor | None) -> "RolloutBatch":
        for name, tensor in tensors.items():
            assert hasattr(self, name), name
            setattr(self, name, tensor)
        return self


def hash64(*parts: int) -> int:
    """A seed from integers: equal for any rank layout and batch order, and without state to save."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch.Generator takes a signed 64-bit seed


def generate(
    engine: Engine,
    prompts: Sequence[TokenizedPrompt],
    generation: GenerationConfig,
    tokenizer: Any,
    *,
    samples_per_prompt: int,
    seed: int,
    step: int,
    first_sample: int = 0,
    greedy: bool = False,
    environment: Environment | None = None,
    max_turns: int = 1,
    max_length: int | None = None,
    timeout_s: float | None = None,
) -> RolloutBatch:
    """`samples_per_prompt` responses to each prompt, siblings adjacent, packed.

    Args:
        first_sample: the first one's sample_id, on which its seeds depend.
        greedy: take the likeliest token throughout.
        environment: answers each turn if it has a `step`; its observations stand in the rows with mask 0.
        max_turns: turns of the policy in one row; more than 1 needs such an environment.
        timeout_s: seconds that the environment may take to answer all dialogues of a turn; None: no limit.
        max_length: tokens of a row, prompt and observations included; None: no limit but max_new_tokens.

    Raises:
        RewardError: an answer of the environment that cannot be used; it carries every sample as it was then.
    """
    sampling = Sampling.from_config(generation, greedy=greedy)
    dialogues = [Dialogue.of(prompt) for prompt in prompts for _ in range(samples_per_prompt)]

    def converse() -> list[Dialogue]:
        """This rank's dialogues, to their end."""
        mine = dist.part(range(len(dialogues)))
        open_ids = list(mine)
        for turn in range(max_turns):
            rows = [dialogues[i] for i in open_ids]
            seeds = [hash64(seed, step, first_sample + i, turn) for i in open_ids]
            if not rows and not turn:
                engine.generate([], sampling, [])  # an engine over several ranks waits for each of them
            write_turn(engine, rows, sampling, seeds, tokenizer, max_length)
            if not hasattr(environment, "step") or not rows:
                break
            try:
                read_turns(
                    environment, rows, tokenizer, last=turn + 1 == max_turns, max_length=max_length, timeout_s=timeout_s
                )
            except RewardError as error:
                error.samples = [dialogue.sample(tokenizer) for dialogue in dialogues]
                raise
            open_ids = [i for i in open_ids if dialogues[i].ended is None]
        return [dialogues[i] for i in mine]

    dialogues = [dialogue for part in dist.together(converse) for dialogue in part]
    batch = pack_rows([dialogue.row for dialogue in dialogues])
    batch.group = torch.arange(len(prompts)).repeat_interleave(samples_per_prompt)
    batch.sample_id = torch.arange(first_sample, first_sample + len(dialogues))
    batch.samples = [dialogue.sample(tokenizer) for dialogue in dialogues]
    if max_turns > 1:
        batch.turns = torch.tensor([dialogue.turns for dialogue in dialogues])
        batch.ended = torch.tensor([ENDINGS.index(dialogue.ended) for dialogue in dialogues])
    return batch


def pack(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> RolloutBatch:
    """One packed batch of rows of one turn: a prompt and what the policy made of it."""
    return pack_rows([Row.of(prompt).write(c) for prompt, c in zip(prompts, completions, strict=True)])


def pack_rows(rows: Sequence[Row]) -> RolloutBatch:
    """The rows back to back; the mask is what the policy sampled, never `ids != pad`."""
    lengths = torch.tensor([len(row.ids) for row in rows], dtype=torch.int64)
    return RolloutBatch(
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        tokens=torch.tensor([i for row in rows for i in row.ids], dtype=torch.int64),
        mask=torch.tensor([m for row in rows for m in row.sampled], dtype=torch.bool),
        rollout_logprobs=torch.tensor([p for row in rows for p in row.logprobs], dtype=torch.float32),
        group=torch.arange(len(rows)),
        sample_id=torch.arange(len(rows)),
        finish=torch.tensor([FINISH.index(row.finish) for row in rows], dtype=torch.int64),
        weight_version=torch.tensor([row.weight_version for row in rows], dtype=torch.int64),
    )
