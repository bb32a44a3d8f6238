"""A reward in one Python function: `env.name=python:<module>.<function>`, or `trainers.train(reward_fn=...)`.

It is called once per rollout with keyword arguments, each a list with one item a sample:

    reward_fn(samples=prompt + output texts, prompts=prompt texts, outputs=response texts, **metadata)

`metadata` are the other keys of the prompts' JSONL lines (None for a prompt without the key). It returns one number a
sample, or for each sample a list with one number per response token.

`env.name=python:<module>.<class>` names a whole environment instead, which may answer the policy in turns.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainers.environments import Environment, Prompt, Sample, nearest

ARGUMENTS = ("samples", "prompts", "outputs")


class FunctionEnvironment:
    default_model = "smollm2-135m"

    def __init__(self, reward_fn: Callable[..., Any], prompts: Sequence[Prompt | str | Mapping[str, Any]] = ()) -> None:
        """`prompts` are texts, or mappings with the text under "prompt" and metadata under the other keys."""
        if not callable(reward_fn):
            raise TypeError(f"reward_fn must be callable, got {type(reward_fn).__name__}")
        self._reward_fn = reward_fn
        self._prompts = [as_prompt(prompt, i) for i, prompt in enumerate(prompts)]

    def prompts(self) -> list[Prompt]:
        return list(self._prompts)

    def score(self, samples: Sequence[Sample]) -> Any:
        """Whatever the function returns: `trainers.rewards` checks it, as it does every environment's answer."""
        keys = dict.fromkeys(key for sample in samples for key in sample.prompt.metadata)  # ordered, each once
        taken = [key for key in keys if key in ARGUMENTS]
        if taken:
            raise ValueError(
                f"prompt metadata may not be called {', '.join(taken)}: the reward function has it already"
            )
        return self._reward_fn(
            samples=[sample.text for sample in samples],
            prompts=[sample.prompt.text for sample in samples],
            outputs=[sample.response for sample in samples],
            **{key: [sample.prompt.metadata.get(key) for sample in samples] for key in keys},
        )


def from_python(path: str, params: dict[str, Any], key: str | None = None) -> Environment:
    """The environment at `<module>.<name>`: a class, made with `params`; an instance; or a reward function, around
    which one is made. An instance is known by its `score` or `step`. `key` is what errors call it; default:
    env.name=python:<path>.

    Raises:
        ValueError: no such name, or `params` that it does not take.
        TypeError: something else, or an environment that lacks a part.
    """
    key = key or f"env.name=python:{path}"
    named = load(path, key)
    if isinstance(named, type):
        try:
            inspect.signature(named).bind(**params)
        except TypeError as error:
            raise ValueError(f"env.params of python:{path}: {error}") from error
    elif params:
        raise ValueError(f"env.params: python:{path} has no settings, got {sorted(params)}")
    elif not any(hasattr(named, method) for method in ("score", "step")):
        if not callable(named):
            raise TypeError(f"{key} must be a reward function or an environment, got {type(named).__name__}")
        return FunctionEnvironment(named)
    parts = [name for name in ("default_model", "prompts") if not hasattr(named, name)]
    if not any(hasattr(named, method) for method in ("score", "step")):
        parts.append("score or step")
    if parts:
        raise TypeError(f"{key} is not an environment: it has no {', no '.join(parts)}")
    return named(**params) if isinstance(named, type) else named


def load(path: str, key: str) -> Any:
    """What `<module>.<name>` is; the module is imported as Python would from the working directory."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{key}: expected python:<module>.<function or class>")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ImportError(
            f"{key}: cannot import {module_name} ({error}); "
            "run from the folder that holds it, or put that folder on PYTHONPATH"
        ) from error
    if not hasattr(module, name):
        names = [other for other, value in vars(module).items() if callable(value)]
        raise ValueError(f"{key}: {module_name} has no {name}{nearest(name, names)}")
    return getattr(module, name)


def as_prompt(prompt: Any, position: int) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(prompt)
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
        return Prompt(prompt["prompt"], {key: value for key, value in prompt.items() if key != "prompt"})
    raise TypeError(f"prompts[{position}] must be a text or a mapping with a text under 'prompt', got {prompt!r}")
