"""Environments: where prompts come from, how a response is rewarded, and in dialogues what is answered to it.

`make_environment(cfg.env)` picks one by its name. docs/environments.md says how to write one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Protocol

from trainers.extras import require

if TYPE_CHECKING:
    from trainers.config import EnvConfig, TrainerConfig


@dataclass(frozen=True)
class Prompt:
    """One task: its text (or its ids, for environments that have no text) and what the reward needs to know."""

    text: str
    metadata: dict[str, Any] = field(default_factory=dict)
    ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None  # a chat, for the tokenizer's template; `text` tells it in words


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
    """What a trainer asks of a task. An environment may also have five things that most do not need:

    `step(samples) -> list[Turn]`, an answer to each dialogue that goes on, in order. It is called after each turn of
    the policy, `ppo.max_rollout_turns` times at most. What it pays is added to `score`, which it may then leave out;
    `metrics(samples, rewards) -> dict[str, float]`, means over the samples of one `score` call, named `env/...`;
    `own_prompts_only = True`, where the reward needs more than a prompt's text, so that `data.prompts` is refused;
    `check_prompts(prompts)`, which raises a ValueError if they lack what the reward needs;
    `bind(tokenizer, device=, dtype=)`, called once with what the policy has, before anything is sampled.
    """

    default_model: str  # what `policy.model_name: auto` stands for; see trainers/models.py

    def prompts(self) -> list[Prompt]:
        """Every prompt of the task, always in the same order."""

    def score(self, samples: Sequence[Sample]) -> Sequence[float] | Sequence[Sequence[float]]:
        """One float a sample (paid on its last response token), or one list a sample (a float per response token)."""


# Names that `env.name` may have, as errors list them.
NAMES = (
    "sentiment",
    "copy",
    "lookup",
    "math",
    "reward_model",
    "remote",
    "reasoning_gym:<dataset>",
    "python:<module>.<function or class>",
)


def make_environment(env: EnvConfig) -> Environment:
    """The environment that `env.name` names; with `env.rewards` the weighted sum of those, on the prompts of env.name.

    Raises:
        ValueError: an unknown name (the nearest one is suggested), settings that the environment does not have, or a
            reward that can score only prompts of its own.
        ImportError: a package of the `trainer` extra, or a module of the user's, cannot be imported.
    """
    tasks = _make(env, "env.name=")
    if env.params and not any(map(has_settings, (env.name, *env.rewards))):
        raise ValueError(
            f"env.params: {' and '.join((env.name, *env.rewards))} has no settings, got {sorted(env.params)}"
        )
    if not env.rewards:
        return tasks
    from trainers.environments.weighted import WeightedEnvironment

    params = {} if has_settings(env.name) else env.params
    rewards = {}
    for name, weight in env.rewards.items():
        reward = tasks if name == env.name else _make(replace(env, name=name, params=params), "env.rewards: ")
        if reward is not tasks and getattr(reward, "own_prompts_only", False):
            raise ValueError(
                f"env.rewards: {name} can only score prompts of its own, which needs env.name={name}, got "
                f"env.name={env.name}"
            )
        rewards[name] = (reward, weight)
    if env.name not in env.rewards and not tasks.prompts():
        raise ValueError(
            f"env.name={env.name} has no prompts and is not among env.rewards: it would do nothing, leave it out"
        )
    return WeightedEnvironment(tasks, rewards)


def has_settings(name: str) -> bool:
    """Whether `env.params` means something to the environment."""
    return name == "math" or name.startswith(("reasoning_gym:", "python:"))


def _make(env: EnvConfig, key: str) -> Environment:
    """`key` is what the name stands behind, for messages."""
    name, _, argument = env.name.partition(":")
    if name == "sentiment" and not argument:
        from trainers.environments.sentiment import SentimentEnvironment

        return SentimentEnvironment()
    if name == "copy" and not argument:
        from trainers.environments.copy import CopyEnvironment

        return CopyEnvironment(size=env.size, seed=env.seed)
    if name == "lookup" and not argument:
        from trainers.environments.lookup import LookupEnvironment

        return LookupEnvironment(size=env.size, seed=env.seed)
    if name == "math" and not argument:
        from trainers.environments.math import MathEnvironment

        return MathEnvironment(**_checked_params(env.params, "math", ("answer_key",)))
    if name == "reward_model" and not argument:
        from trainers.environments.reward_model import RewardModelEnvironment

        return RewardModelEnvironment(env.reward_model)
    if name == "remote" and not argument:
        for module in ("httpx", "pydantic"):
            require(module, extra="server")
        from trainers.environments.remote import RemoteEnvironment

        return RemoteEnvironment(env)
    if name == "reasoning_gym" and argument:
        from trainers.environments.reasoning_gym import ReasoningGymEnvironment

        return ReasoningGymEnvironment(argument, size=env.size, seed=env.seed, params=dict(env.params))
    if name == "python" and argument:
        from trainers.environments.function import from_python

        return from_python(argument, dict(env.params), f"{key}python:{argument}")
    shown = f"{key}{env.name!r}" if key.endswith("=") else f"{key}{env.name}"
    raise ValueError(f"{shown} is not an environment{nearest(name, NAMES)}; there are: {', '.join(NAMES)}")


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


def _checked_params(params: Mapping[str, Any], name: str, known: Sequence[str]) -> dict[str, Any]:
    for key in params:
        if key not in known:
            raise ValueError(
                f"env.params.{key} is not a setting of {name}{nearest(key, known)}; there are: {', '.join(known)}"
            )
    return dict(params)
