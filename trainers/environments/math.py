"""Maths answers against a reference: `env.name=math`, on `data.prompts` whose rows have the answer beside the prompt.

The reward is 1 if the response's final answer equals the reference, else 0. The final answer is what stands in the last
\\boxed{...}, else after the last "####", else in the last <answer>...</answer>, else the last number. A reference may
be a number, an answer as a text, or a solution that marks its answer in one of the first three ways.

Two answers are equal if they are the same number (integers, decimals, fractions, mixed numbers; thousands separators,
currency signs and units of two letters or more are left out, 50% is 50 and 1/2), or the same text after LaTeX's spacing
and font commands are taken away, or if sympy finds the difference of the two expressions to be 0. Nothing is rounded:
0.33 is not 1/3. No text is ever evaluated: expressions are short, are parsed by Python's `ast`, and only numbers,
one-letter variables, + - * / ** and a few functions become sympy's; where its time cannot be limited (outside the main
thread) there is no symbolic comparison.
"""

from collections.abc import Sequence
from typing import Any

from trainers.environments import Prompt, Sample
from trainers.environments.answers import equal, marked, written


class MathEnvironment:
    default_model = "smollm2-135m"

    def __init__(self, answer_key: str = "answer") -> None:
        if not isinstance(answer_key, str):
            raise ValueError(f"env.params.answer_key: expected a text, got {answer_key!r}")
        self._key = answer_key

    def prompts(self) -> list[Prompt]:
        return []

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        for i, prompt in enumerate(prompts):
            self._reference(prompt, f"prompt {i}")

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [float(equal(written(s.response), self._reference(s.prompt, repr(s.prompt.text)))) for s in samples]

    def metrics(self, samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, float]:
        return {"env/answer_marked": sum(marked(s.response) is not None for s in samples) / max(len(samples), 1)}

    def _reference(self, prompt: Prompt, who: str) -> str:
        answer: Any = prompt.metadata.get(self._key)
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            found = f"got {answer!r}" if self._key in prompt.metadata else f"its keys are {sorted(prompt.metadata)}"
            raise ValueError(
                f"{who}: the math reward needs an answer, a number or a text, under {self._key!r} "
                f"(env.params.answer_key); {found}"
            )
        text = str(answer)
        inner = marked(text)
        return text if inner is None else inner
