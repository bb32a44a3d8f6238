"""Turn by turn: the policy writes, the environment answers, until it is done, the turns are used up or the row is full.

Each id is known with who wrote it, and stays as it was sampled or tokenised the first time. A row that the policy
wrote in one go is a dialogue of one turn without an answer.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from numbers import Integral, Real
from typing import Any

from trainers.engines import Completion, Engine, Sampling
from trainers.environments import Environment, Message, RewardError, Sample, Turn
from trainers.environments.asking import LateRewardError
from trainers.environments.deadline import TooLate, call_within
from trainers.prompts import TokenizedPrompt

ENDINGS = ("done", "turns", "length")  # codes of RolloutBatch.ended: by the environment, turns used up, row full


@dataclass
class Row:
    """One sequence while it grows; the three lists have one entry a token."""

    ids: list[int]
    sampled: list[bool]  # by the policy, in this rollout
    logprobs: list[float]  # the engine's; 0 where not sampled
    finish: str = "stop"  # how the row ended: "length" where it was cut
    weight_version: int | None = None  # the oldest of its turns

    @classmethod
    def of(cls, ids: Sequence[int]) -> "Row":
        row = cls([], [], [])
        row.read(ids)
        return row

    def read(self, ids: Sequence[int]) -> None:
        """What someone else wrote."""
        self.ids += ids
        self.sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def write(self, completion: Completion) -> "Row":
        """What the policy sampled."""
        self.ids += completion.tokens
        self.sampled += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.finish = completion.finish
        versions = (completion.weight_version, self.weight_version)
        self.weight_version = min(version for version in versions if version is not None)
        return self


@dataclass
class Dialogue:
    prompt: TokenizedPrompt
    row: Row
    messages: list[Message] = field(default_factory=list)
    turns: int = 0  # of the policy
    reward: float = 0.0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    stop_strings: tuple[str, ...] = ()  # of the next turn, beside the configuration's
    ended: str | None = None  # one of ENDINGS

    @classmethod
    def of(cls, prompt: TokenizedPrompt) -> "Dialogue":
        return cls(prompt, Row.of(prompt.ids))

    def sample(self, tokenizer: Any) -> Sample:
        ids = tuple(i for i, sampled in zip(self.row.ids, self.row.sampled, strict=True) if sampled)
        return Sample(
            prompt=self.prompt.prompt,
            prompt_ids=tuple(self.prompt.ids),
            response_ids=ids,
            response=tokenizer.decode(ids, skip_special_tokens=True),
            finish=self.row.finish,
            messages=tuple(self.messages),
            metadata=self.metadata,
            reward=self.reward,
        )


def write_turn(
    engine: Engine,
    dialogues: Sequence[Dialogue],
    sampling: Sampling,
    seeds: Sequence[int],
    tokenizer: Any,
    max_length: int | None,
) -> None:
    """One turn of the policy in each dialogue, within `max_length` tokens a row.

    An engine samples all its prompts in one way, so rows with stop strings or little room of their own go separately.
    """
    groups: defaultdict[Sampling, list[int]] = defaultdict(list)
    for i, dialogue in enumerate(dialogues):
        own = sampling
        if dialogue.row.sampled[-1]:
            # Without an observation between them two turns are one, whose first min_new_tokens are written.
            own = replace(own, min_new_tokens=0)
        if dialogue.stop_strings:
            own = replace(own, stop_strings=(*own.stop_strings, *dialogue.stop_strings))
        if max_length is not None and (room := max_length - len(dialogue.row.ids)) < own.max_new_tokens:
            own = replace(own, max_new_tokens=room)
        groups[own].append(i)
    for own, rows in groups.items():
        completions = engine.generate([list(dialogues[i].row.ids) for i in rows], own, [seeds[i] for i in rows])
        for i, completion in zip(rows, completions, strict=True):
            dialogue = dialogues[i]
            dialogue.row.write(completion)
            text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
            dialogue.messages.append(Message("policy", tuple(completion.tokens), text))
            dialogue.turns += 1


def read_turns(
    environment: Environment,
    dialogues: Sequence[Dialogue],
    tokenizer: Any,
    *,
    last: bool,
    max_length: int | None,
    timeout_s: float | None = None,
) -> None:
    """The environment's answer to each dialogue; those that it or the limits end have `ended` set.

    Args:
        last: no turn of the policy follows.
        timeout_s: seconds that `step` may take; None: no limit.
        max_length: tokens of a row. An observation that leaves no room for another token is cut there.

    Raises:
        RewardError: `step` raised, or its answer is not one that can be trained on.
    """
    samples = [dialogue.sample(tokenizer) for dialogue in dialogues]
    for dialogue, turn, sample in zip(dialogues, ask(environment, samples, timeout_s), samples, strict=True):
        ids, reward = checked(turn, tokenizer, sample)
        dialogue.reward += reward
        dialogue.metadata = dialogue.metadata if turn.metadata is None else turn.metadata
        dialogue.stop_strings = tuple(turn.stop_strings)
        room = len(ids) + 1 if max_length is None else max_length - len(dialogue.row.ids)
        if turn.done:
            dialogue.ended, dialogue.row.finish = "done", "stop"  # however long the last turn was
        elif last:
            dialogue.ended = "turns" if room or dialogue.row.finish == "stop" else "length"
        else:
            kept = ids[:room]
            if len(ids) >= room:
                dialogue.ended = dialogue.row.finish = "length"
            if kept:
                dialogue.row.read(kept)
                whole = turn.observation if kept == ids else ""
                text = whole or tokenizer.decode(kept, skip_special_tokens=True)
                dialogue.messages.append(Message("environment", tuple(kept), text))


def ask(environment: Environment, samples: Sequence[Sample], timeout_s: float | None = None) -> list[Turn]:
    try:
        turns = list(call_within(timeout_s, environment.step, samples))
    except TooLate as error:
        late = f"the environment's step did not answer within env.timeout_s={timeout_s:g} seconds"
        raise LateRewardError(late) from error
    except Exception as error:
        raise RewardError(f"the environment's step failed: {type(error).__name__}: {error}") from error
    if len(turns) != len(samples):
        raise RewardError(f"the environment's step must give {len(samples)} turns, one per dialogue, got {len(turns)}")
    return turns


def checked(turn: Any, tokenizer: Any, sample: Sample) -> tuple[list[int], float]:
    """A turn's observation in ids, and its reward.

    Raises:
        RewardError: not a Turn, a reward that is no finite number, an empty stop string, two observations, or ids
            outside the vocabulary.
    """

    def wrong(expected: str, got: Any) -> RewardError:
        return RewardError(f"{expected}, got {got!r} in answer to {sample.response!r}", sample)

    if not isinstance(turn, Turn):
        raise wrong("the environment's step must give Turns", turn)
    reward, given = (x.tolist() if hasattr(x, "tolist") else x for x in (turn.reward, turn.observation_ids))
    if not isinstance(reward, Real) or not isfinite(reward):
        raise wrong("a turn's reward must be a finite number", turn.reward)
    if isinstance(turn.stop_strings, str) or not all(isinstance(s, str) and s for s in turn.stop_strings):
        raise wrong("a turn's stop_strings must be a list of texts that are not empty", turn.stop_strings)
    ids = list(given)
    if turn.observation:
        if ids:
            raise wrong("a turn has observation_ids or an observation, not both", (ids, turn.observation))
        ids = tokenizer(turn.observation, add_special_tokens=False)["input_ids"]
    for i in ids:
        if not isinstance(i, Integral) or not 0 <= i < len(tokenizer):
            raise wrong(f"a turn's observation_ids must be ids of the vocabulary of {len(tokenizer)}", i)
    return [int(i) for i in ids], float(reward)
