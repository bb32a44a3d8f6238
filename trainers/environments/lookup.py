"""Look a word up, then say it: a task of two turns that a random two-layer model learns in seconds.

The prompt is `<s> k`, a key. Only the environment knows the value of this task's k, which it drew for this task alone:
no policy can know it without asking. A message that begins with CALL is a question, about the word that follows; the
answer is `FOUND v` if that word is the key, else `UNKNOWN`. Any other message is the policy's own answer, and ends the
dialogue.

A quarter of the reward is for the first question, a quarter for asking about the key, and half for the answer: the
share of its words that equal v. Without the observation in its context a policy stays near 0.5, and so does one
whose observation is trained, moved by one, or scored as its own.
"""

import random
from collections.abc import Sequence

from trainers.environments import Prompt, Sample, Turn
from trainers.models import TINY_LLAMA_WORDS

BOS = TINY_LLAMA_WORDS.index("<s>")
CALL, FOUND, UNKNOWN = 2, 3, 4  # ids of w2, w3 and w4
WORDS = range(5, 11)  # keys and values: six, so that a first question is right often enough to learn from


class LookupEnvironment:
    default_model = "tiny-llama"
    own_prompts_only = True  # the value is in the metadata

    def __init__(self, *, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError(f"env.size must be at least 1, got {size}")
        draw = random.Random(seed)
        self._tasks = [(draw.choice(WORDS), draw.choice(WORDS)) for _ in range(size)]

    def prompts(self) -> list[Prompt]:
        return [
            Prompt(f"<s> {TINY_LLAMA_WORDS[key]}", {"key": key, "value": value}, (BOS, key))
            for key, value in self._tasks
        ]

    def step(self, samples: Sequence[Sample]) -> list[Turn]:
        return [self._answer(sample) for sample in samples]

    def _answer(self, sample: Sample) -> Turn:
        task, message = sample.prompt.metadata, sample.messages[-1].ids
        if message[0] != CALL:
            return Turn(reward=0.5 * message.count(task["value"]) / len(message), done=True)
        found = message[1:2] == (task["key"],)
        paid = sample.metadata.get("paid", 0.0)  # each part once, however often the policy asks
        earned = max(paid, 0.5 if found else 0.25)
        answer = (FOUND, task["value"]) if found else (UNKNOWN,)
        return Turn(observation_ids=answer, reward=earned - paid, metadata={"paid": earned})
