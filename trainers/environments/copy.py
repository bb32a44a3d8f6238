"""Repeat the word of the prompt: a task that a random two-layer model learns in seconds, for tests and first runs.

The prompt is `<s> k`; the reward is the share of the response's tokens that equal k. The target changes with
the prompt, so a policy that ignores the prompt stays at chance, and an off-by-one in masks or log-probs shows.
"""

import random
from collections.abc import Sequence

from trainers.environments import Prompt, Sample
from trainers.models import TINY_LLAMA_WORDS

BOS = TINY_LLAMA_WORDS.index("<s>")
WORDS = range(2, len(TINY_LLAMA_WORDS))  # ids of the ordinary words


class CopyEnvironment:
    default_model = "tiny-llama"
    own_prompts_only = True  # the target is in the metadata

    def __init__(self, *, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError(f"env.size must be at least 1, got {size}")
        draw = random.Random(seed)
        self._targets = [draw.choice(WORDS) for _ in range(size)]

    def prompts(self) -> list[Prompt]:
        return [Prompt(f"<s> {TINY_LLAMA_WORDS[k]}", {"target": k}, (BOS, k)) for k in self._targets]

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [_share(sample.response_ids, sample.prompt.metadata["target"]) for sample in samples]


def _share(ids: Sequence[int], target: int) -> float:
    return sum(token == target for token in ids) / len(ids) if ids else 0.0
