"""Environments: where prompts come from, how a response is rewarded, and in dialogues what is answered to it.

`make_environment(cfg.env)` picks one by its name. docs/environments.md says how to write one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trainers.config import EnvConfig, TrainerConfig


@dataclass(frozen=True)
class Prompt:
    """One task: its text (or its ids, for environments that have no text) and what the reward needs to know."""

    text: str
    metadata: dict[str, Any] = field(default_factory=dict)
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Message:
    """What one side wrote in one turn; the ids are those of the sequence, never tokenised again."""

    author: str  # "policy" or "environment"
    ids: tuple[int, ...]
    text: str  # decoded without special tokens; of an observation given as text, that text


@dataclass(frozen=True)
class Sample:
    """One response, or all that was written in a dialogue: so far in `step`, in full in `score`."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]  # exactly the sampled tokens, of all turns, the stop tokens included
    response: str  # their text, without special tokens
    finish: str  # how the last turn ended: "stop" or "length"
    messages: tuple[Message, ...] = ()  # policy and environment by turns, as they stand in the sequence
    metadata: Mapping[str, Any] = field(default_factory=dict)  # of the last Turn that had some
    reward: float = 0.0  # sum of the turns' rewards

    @property
    def text(self) -> str:
        """Prompt and everything after it."""
        return self.prompt.text + ("".join(message.text for message in self.messages) or self.response)


@dataclass(frozen=True)
class Turn:
    """An environment's answer to the policy's last message. At most one of the two observations is given."""

    observation_ids: Sequence[int] = ()  # appended to the sequence as they are, and not trained
    observation: str = ""  # the same as a text: tokenised once, without special tokens and without a chat template
    reward: float = 0.0  # the turns' rewards are summed, and paid on the last response token of all
    done: bool = False  # the dialogue ends here: the observation is not appended, for nothing would follow it
    metadata: Mapping[str, Any] | None = None  # the dialogue's state, given back as Sample.metadata; None: as it was
    stop_strings: Sequence[str] = ()  # of the policy's next turn, beside policy.generation.stop_strings


class RewardError(ValueError):
    """A reward or a turn that cannot be trained on; `sample` is the response it was asked for, if it is known, and
    `samples` are all of the rollout."""

    def __init__(self, message: str, sample: Sample | None = None, samples: Sequence[Sample] = ()):
        super().__init__(message)
        self.sample, self.samples = sample, samples


class Environment(Protocol):
    """What a trainer asks of a task. An environment may also have three things that most do not need:

    `step(samples) -> list[Turn]`, an answer to each dialogue that goes on, in order. It is called after each turn of
    the policy, `ppo.max_rollout_turns` times at most. What it pays is added to `score`, which it may then leave out;
    `metrics(samples, rewards) -> dict[str, float]`, means over the samples of one `score` call, named `env/...`;
    `own_prompts_only = True`, where the reward needs more than a prompt's text, so that `data.prompts` is refused.
    """

    default_model: str  # what `policy.model_name: auto` stands for; see trainers/models.py

    def prompts(self) -> list[Prompt]:
        """Every prompt of the task, always in the same order."""

    def score(self, samples: Sequence[Sample]) -> Sequence[float] | Sequence[Sequence[float]]:
        """One float a sample (paid on its last response token), or one list a sample (a float per response token)."""


# Names that `env.name` may have, as errors list them.
NAMES = ("sentiment", "copy", "lookup", "reasoning_gym:<dataset>", "python:<module>.<function or class>")


def make_environment(env: EnvConfig) -> Environment:
    """The environment that `env.name` names.

    Raises:
        ValueError: an unknown name (the nearest one is suggested) or settings that the environment does not have.
        ImportError: a package of the `trainer` extra, or a module of the user's, cannot be imported.
    """
    name, _, argument = env.name.partition(":")
    if name == "sentiment" and not argument:
        from trainers.environments.sentiment import SentimentEnvironment

        _no_params(env)
        return SentimentEnvironment()
    if name == "copy" and not argument:
        from trainers.environments.copy import CopyEnvironment

        _no_params(env)
        return CopyEnvironment(size=env.size, seed=env.seed)
    if name == "lookup" and not argument:
        from trainers.environments.lookup import LookupEnvironment

        _no_params(env)
        return LookupEnvironment(size=env.size, seed=env.seed)
    if name == "reasoning_gym" and argument:
        from trainers.environments.reasoning_gym import ReasoningGymEnvironment

        return ReasoningGymEnvironment(argument, size=env.size, seed=env.seed, params=dict(env.params))
    if name == "python" and argument:
        from trainers.environments.function import from_python

        return from_python(argument, dict(env.params))
    raise ValueError(
        f"env.name={env.name!r} is not an environment{nearest(name, NAMES)}; there are: {', '.join(NAMES)}"
    )


def check_turns(environment: Environment, config: TrainerConfig) -> None:
    """ValueError if dialogues are asked of an environment that answers nothing."""
    turns = config.algorithm.max_rollout_turns
    if turns > 1 and not hasattr(environment, "step"):
        raise ValueError(
            f"{config.name}.max_rollout_turns={turns} needs an environment that answers the policy's turns (one with a "
            f"step method), which env.name={config.env.name} is not: leave it at 1"
        )


def nearest(word: str, known: Sequence[str]) -> str:
    """The phrase that suggests the known name most like `word`; empty if none is."""
    heads = {name.partition(":")[0]: name for name in known}
    found = get_close_matches(word, list(heads), n=1, cutoff=0.6)
    return f"; did you mean {heads[found[0]]}?" if found else ""


def _no_params(env: EnvConfig) -> None:
    if env.params:
        raise ValueError(f"env.params: {env.name} has no settings, got {sorted(env.params)}")
