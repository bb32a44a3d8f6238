"""A reward in one Python function: `env.name=python:<module>.<function>`, or `trainers.train(reward_fn=...)`.

It is called once per rollout with keyword arguments, each a list with one item a sample:

    reward_fn(samples=prompt + output texts, prompts=prompt texts, outputs=response texts, **metadata)

`metadata` are the other keys of the prompts' JSONL lines (None for a prompt without the key). It returns one number a
sample, or for each sample a list with one number per response token.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainers.environments import Prompt, Sample, nearest

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
            samples=[sample.prompt.text + sample.response for sample in samples],
            prompts=[sample.prompt.text for sample in samples],
            outputs=[sample.response for sample in samples],
            **{key: [sample.prompt.metadata.get(key) for sample in samples] for key in keys},
        )


def load_function(path: str, name: str | None = None) -> Callable[..., Any]:
    """The function at `<module>.<function>`; the module is imported as Python would from the working directory.

    `name` is what errors call it; default: env.name=python:<path>.
    """
    name = name or f"env.name=python:{path}"
    module_name, _, function_name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{name}: expected python:<module>.<function>")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ImportError(
            f"{name}: cannot import {module_name} ({error}); "
            "run from the folder that holds it, or put that folder on PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        names = [known for known, value in vars(module).items() if callable(value)]
        raise ValueError(f"{name}: {module_name} has no {function_name}{nearest(function_name, names)}")
    if not callable(function):
        raise TypeError(f"{name} must be a function, got {type(function).__name__}")
    return function


def as_prompt(prompt: Any, position: int) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(prompt)
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
        return Prompt(prompt["prompt"], {key: value for key, value in prompt.items() if key != "prompt"})
    raise TypeError(f"prompts[{position}] must be a text or a mapping with a text under 'prompt', got {prompt!r}")
