"""Generated puzzles with verifiers, from the package reasoning-gym: `env.name=reasoning_gym:<dataset>`.

The reward is the dataset's own verifier applied to the last `<answer>...</answer>` of the response, or to the whole
response where there is none. A verifier may pay a part of 1 for a right answer inside other text, so
`env/exact_match`, the share of samples with the full score, is reported beside the mean reward.

Some verifiers evaluate the response as a Python expression; what a model wrote is kept from that (see guards.py).
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from trainers.environments import Prompt, Sample, nearest
from trainers.environments.guards import TooSlow, guarded_verifier, time_limit
from trainers.extras import require

VERIFIER_SECONDS = 5.0


class ReasoningGymEnvironment:
    default_model = "smollm2-135m"
    own_prompts_only = True  # the verifier needs the whole entry

    def __init__(self, dataset: str, *, size: int, seed: int, params: dict[str, Any]) -> None:
        require("reasoning_gym")
        instance = _create(dataset, {**_checked(dataset, params), "size": size, "seed": seed})
        with _global_random(seed):  # a few generators draw from it beside their own
            self._entries = [instance[i] for i in range(size)]
        self._verify = guarded_verifier(instance.score_answer)
        self._extract_answer = require("reasoning_gym.utils").extract_answer
        self._verifier_errors = 0

    def prompts(self) -> list[Prompt]:
        return [
            Prompt(entry["question"], {"entry": i, "answer": entry["answer"]}) for i, entry in enumerate(self._entries)
        ]

    def score(self, samples: Sequence[Sample]) -> list[float]:
        self._verifier_errors = 0
        return [self._score(sample) for sample in samples]

    def metrics(self, samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, float]:
        n = max(len(samples), 1)
        return {
            "env/exact_match": sum(reward >= 1.0 for reward in rewards) / n,
            "env/answer_tag": sum(self._extract_answer(sample.response) is not None for sample in samples) / n,
            "env/verifier_errors": self._verifier_errors / n,
        }

    def _score(self, sample: Sample) -> float:
        answer = self._extract_answer(sample.response)
        if answer is None:
            answer = sample.response.strip()
        entry = self._entries[sample.prompt.metadata["entry"]]
        try:
            with time_limit(VERIFIER_SECONDS):
                return float(self._verify(answer, entry=entry))
        except (Exception, TooSlow):  # some verifiers raise on text of another form; counted in the metrics
            self._verifier_errors += 1
            return 0.0


@contextmanager
def _global_random(seed: int) -> Iterator[None]:
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def _checked(dataset: str, params: dict[str, Any]) -> dict[str, Any]:
    """`params`, if they are settings of the dataset."""
    datasets = require("reasoning_gym.factory").DATASETS
    if dataset not in datasets:
        raise ValueError(
            f"env.name=reasoning_gym:{dataset}: no such dataset{nearest(dataset, list(datasets))}; "
            f"reasoning_gym.factory.DATASETS lists all {len(datasets)}"
        )
    settings = [f.name for f in fields(datasets[dataset][1])]
    for key in params:
        if key in ("size", "seed"):
            raise ValueError(f"env.params.{key}: set env.{key} instead")
        if key not in settings:
            raise ValueError(
                f"env.params.{key} is not a setting of reasoning_gym:{dataset}{nearest(key, settings)}; "
                f"there are: {', '.join(sorted(set(settings) - {'size', 'seed'}))}"
            )
    return params


def _create(dataset: str, settings: dict[str, Any]) -> Any:
    if settings["size"] < 1:
        raise ValueError(f"env.size must be at least 1, got {settings['size']}")
    try:
        return require("reasoning_gym").create_dataset(dataset, **settings)
    except (AssertionError, TypeError, ValueError) as error:  # datasets check their settings with assert
        raise ValueError(f"env.params of reasoning_gym:{dataset}: {error}") from error
