"""The served reward: the environment of `env.name`, as a trainer would build it, asked about samples that were sent."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from trainers import dist
from trainers.config import EnvConfig
from trainers.environments import Environment, Prompt, RewardError, Sample
from trainers.environments.asking import LateRewardError, ask
from trainers.environments.reward_model import RewardModelEnvironment
from trainers.environments.weighted import WeightedEnvironment
from trainers.reward_model_rules import is_used
from trainers.service.messages import RewardQuery
from trainers.service.wire import Refused


class Scorer:
    """Args: tokenizer: of the reward model, which reads OpenRLHF's texts; None: no model, functions read texts."""

    def __init__(self, environment: Environment, env: EnvConfig, tokenizer: Any):
        self.environment, self.env, self.tokenizer = environment, env, tokenizer
        self.model = environment.model if isinstance(environment, RewardModelEnvironment) else None
        self.names = tuple(env.rewards) or (env.name,)
        self.reads_ids = is_used(env)  # so the policy must have its vocabulary
        # Others may compare the responses of one call, or count what they were asked.
        self.mergeable = isinstance(environment, RewardModelEnvironment) and dist.size() == 1

    def score(self, requests: Sequence[Sequence[Sample]]) -> list[tuple[list[list[float]], dict[str, float]]]:
        """To each request: for each sample one value for its last response token or one for each, and the
        environment's own metrics. Several requests only if `mergeable`.

        Raises:
            Refused (422): a reward that failed or is not finite; (504): one that was late.
        """
        samples = [sample for request in requests for sample in request]
        try:
            parts = dist.together(lambda: self._ask(mine(samples)))
            each = {name: [values for part in parts for values in part.get(name, [])] for name in self.names}
            weighted = isinstance(self.environment, WeightedEnvironment)
            found = self.environment.combine(samples, each) if weighted else each[self.env.name]
        except LateRewardError as error:
            raise Refused(str(error), 504) from error
        except RewardError as error:
            raise Refused(str(error), 422) from error
        answers, start = [], 0
        for request in requests:
            rows = slice(start, start + len(request))
            sums = [[math.fsum(values) for values in part[rows]] for part in each.values()]
            answers.append((found[rows], self._metrics(request, sums, start)))
            start += len(request)
        return answers

    def _ask(self, samples: Sequence[Sample]) -> dict[str, list[list[float]]]:
        """What each reward says of each of the samples; nothing of none."""
        if not samples:
            return {}
        name, timeout_s = self.env.name, self.env.timeout_s
        if isinstance(self.environment, WeightedEnvironment):
            return self.environment.score_each(samples, timeout_s)
        return {name: ask(self.environment, samples, name=name, timeout_s=timeout_s)}

    def _metrics(self, samples: Sequence[Sample], sums: list[list[float]], start: int) -> dict[str, float]:
        """`sums`: of each reward, of each sample; `start`: of these samples among those that were scored together."""
        if not samples or not hasattr(self.environment, "metrics") or dist.size() > 1:
            return {}
        if isinstance(self.environment, RewardModelEnvironment):
            found = self.environment.metrics(samples, sums[0], start)
        elif isinstance(self.environment, WeightedEnvironment):
            found = self.environment.metrics(samples, list(zip(*sums, strict=True)))
        else:
            found = self.environment.metrics(samples, sums[0])
        numbers = {name: float(value) for name, value in found.items()}
        return {name: value for name, value in numbers.items() if math.isfinite(value)}  # JSON has no other

    def samples_of(self, query: RewardQuery) -> list[Sample]:
        """OpenRLHF's texts as samples: `query`, prompt and response as one text, else `prompts` as whole texts.

        Raises:
            Refused (422): neither of them; lists of several lengths; a text of no token, for a reward model.
        """
        texts = query.query if query.query is not None else query.prompts
        if texts is None:
            raise Refused("expected query or prompts, a list of texts", 422)
        count = len(texts)
        prompts = query.prompts if query.query is not None and query.prompts is not None else [""] * count
        labels = query.labels if query.labels is not None else [None] * count
        for name, each in (("prompts", prompts), ("labels", labels)):
            if len(each) != count:
                raise Refused(f"{name}: expected {count} entries, one for each text, got {len(each)}", 422)
        return [self._sample(*row) for row in zip(texts, prompts, labels, strict=True)]

    def _sample(self, text: str, prompt: str, label: Any) -> Sample:
        prompt = prompt if text.startswith(prompt) else ""
        ids = [0] if self.tokenizer is None else self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise Refused(f"a text of no token cannot be scored: {text!r}", 422)
        # A text has no tokens of the policy's: a model reads it at its last one, a function reads the text.
        metadata = {} if label is None else {"answer": label, "label": label}
        return Sample(Prompt(prompt, metadata), tuple(ids[:-1]), (ids[-1],), text[len(prompt) :], "stop")


def mine(samples: Sequence[Sample]) -> list[Sample]:
    """This rank's. The responses to one prompt, which a reward may compare, stay together."""
    prompts = [list(group) for _, group in groupby(samples, key=lambda sample: (sample.prompt, sample.prompt_ids))]
    return [sample for group in dist.part(prompts) for sample in group]
