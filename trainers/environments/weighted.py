"""Several rewards at once, `env.rewards={sentiment: 1.0, "python:my_module.brevity": 0.2}`: their weighted sum.

The prompts are those of `env.name`, or of `data.prompts`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainers.environments import Environment, Prompt, Sample
from trainers.environments.asking import ask, values_of

Answers = list[list[float]]  # for each sample one value for its last response token, or one for each


class WeightedEnvironment:
    def __init__(self, tasks: Environment, rewards: Mapping[str, tuple[Environment, float]]) -> None:
        """`tasks` gives the prompts; `rewards` are environments with their weights, by name."""
        self._tasks, self.rewards = tasks, dict(rewards)
        self.default_model = tasks.default_model
        if hasattr(tasks, "step"):  # dialogues are answered by where the prompts come from
            self.step = tasks.step
        if any(hasattr(each, "bind") for each in self._each()):
            self.bind = self._bind
        self.own_prompts_only = getattr(tasks, "own_prompts_only", False)

    def prompts(self) -> list[Prompt]:
        return self._tasks.prompts()

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        for environment, _ in self.rewards.values():
            if hasattr(environment, "check_prompts"):
                environment.check_prompts(prompts)

    def _each(self) -> list[Environment]:
        """Each of the environments once, for the prompts' may be one of the rewards'."""
        rewards = [environment for environment, _ in self.rewards.values()]
        return rewards if self._tasks in rewards else [self._tasks, *rewards]

    def _bind(self, tokenizer: Any, **policy: Any) -> None:
        """See Environment. Only where one of them has it: a server that serves none needs no tokenizer."""
        for environment in self._each():
            if hasattr(environment, "bind"):
                environment.bind(tokenizer, **policy)

    def score(self, samples: Sequence[Sample]) -> Answers:
        return self.combine(samples, self.score_each(samples))

    def score_each(self, samples: Sequence[Sample], timeout_s: float | None = None) -> dict[str, Answers]:
        """What each reward answers, unweighted. RewardError names the one that fails; each has `timeout_s` seconds."""
        return {
            name: ask(environment, samples, name=name, timeout_s=timeout_s)
            for name, (environment, _) in self.rewards.items()
        }

    def combine(self, samples: Sequence[Sample], answers: Mapping[str, Answers]) -> Answers:
        """The weighted sums, per token where any reward is; one value a response is paid on its last token."""
        weights = [weight for _, weight in self.rewards.values()]
        sums = []
        for sample, *parts in zip(samples, *answers.values(), strict=True):
            total = [0.0] * max(map(len, parts))
            for weight, values in zip(weights, parts, strict=True):
                for i, value in enumerate(reversed(values), start=1):
                    total[-i] += weight * value
            answer = total if len(total) > 1 else total[0]
            sums.append(values_of(answer, sample, "the sum of env.rewards"))
        return sums

    def metrics(self, samples: Sequence[Sample], scores: Sequence[Sequence[float]]) -> dict[str, float]:
        """The rewards' own metrics, as env/<reward>/...; `scores` has each sample's of every reward, unweighted."""
        found = {}
        for i, (name, (environment, _)) in enumerate(self.rewards.items()):
            if hasattr(environment, "metrics"):
                metrics = environment.metrics(samples, [row[i] for row in scores])
                found |= {f"env/{name}/{key.removeprefix('env/')}": value for key, value in metrics.items()}
        return found
