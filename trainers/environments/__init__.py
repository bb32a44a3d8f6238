"""Environments: where prompts come from and how a response is rewarded.

`make_environment(cfg.env)` picks one by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trainers.config import EnvConfig


@dataclass(frozen=True)
class Prompt:
    """One task: its text (or its ids, for environments that have no text) and what the reward needs to know."""

    text: str
    metadata: dict[str, Any] = field(default_factory=dict)
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Sample:
    """One finished response. `response_ids` are exactly the sampled tokens, the stop token included."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response: str  # decoded without special tokens
    finish: str  # "stop" or "length"


class Environment(Protocol):
    """What a trainer asks of a task. An environment may also have two things that most do not need:

    `metrics(samples, rewards) -> dict[str, float]`, means over the samples of one `score` call, named `env/...`;
    `own_prompts_only = True`, where the reward needs more than a prompt's text, so that `data.prompts` is refused.
    """

    default_model: str  # what `policy.model_name: auto` stands for; see trainers/models.py

    def prompts(self) -> list[Prompt]:
        """Every prompt of the task, always in the same order."""

    def score(self, samples: Sequence[Sample]) -> Sequence[float] | Sequence[Sequence[float]]:
        """One float a sample (paid on its last response token), or one list a sample (a float per response token)."""


def make_environment(env: EnvConfig) -> Environment:
    """The environment that `env.name` names.

    Raises:
        ValueError: an unknown name (the nearest one is suggested) or settings that the environment does not have.
        ImportError: a package of the `trainer` extra, or the module of a reward function, cannot be imported.
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
    if name == "reasoning_gym" and argument:
        from trainers.environments.reasoning_gym import ReasoningGymEnvironment

        return ReasoningGymEnvironment(argument, size=env.size, seed=env.seed, params=dict(env.params))
    if name == "python" and argument:
        from trainers.environments.function import FunctionEnvironment, load_function

        _no_params(env)
        return FunctionEnvironment(load_function(argument))
    known = ("sentiment", "copy", "reasoning_gym:<dataset>", "python:<module>.<function>")
    raise ValueError(
        f"env.name={env.name!r} is not an environment{nearest(name, known)}; there are: {', '.join(known)}"
    )


def nearest(word: str, known: Sequence[str]) -> str:
    """The phrase that suggests the known name most like `word`; empty if none is."""
    heads = {name.partition(":")[0]: name for name in known}
    found = get_close_matches(word, list(heads), n=1, cutoff=0.6)
    return f"; did you mean {heads[found[0]]}?" if found else ""


def _no_params(env: EnvConfig) -> None:
    if env.params:
        raise ValueError(f"env.params: {env.name} has no settings, got {sorted(env.params)}")
