"""Does the engine generate with the weights it was last given? After a refit it answers a fixed prompt, and is judged.

By two rules, of which each sees what the other cannot. Its log-probs of the answer are compared with the trainer's: an
engine with other weights, a part of them or a prefix cached under older ones is as far off as these move the policy.
That is seen once it is more than rounding, which in bfloat16 takes many small steps. Hence the second: an engine that
missed a refit gives its last answer again, with the same log-probs, though the trainer's moved. One that was refitted
cannot: what moves the trainer's log-probs changes the engine's at least in their last bits.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainers import dist
from trainers.config import GenerationConfig
from trainers.engines import Engine, Sampling
from trainers.policy import Policy
from trainers.rollout import pack
from trainers.run import TrainingError

TOKENS = 8  # of the answer
PROMPT_TOKENS = 64
# Of log-probs, the mean |trainer - engine| beyond which the two are different models: what rounding may do, with room.
DISAGREEMENT = {"float32": 1e-3, "bfloat16": 0.15}
# By the dtypes of trainer and engine, the mean |change| of the trainer's log-probs that no engine of the new weights
# leaves without a trace. A float32 engine does not see what the rounding of a bfloat16 trainer does to a change.
MOVED = {
    ("float32", "float32"): 1e-5,
    ("float32", "bfloat16"): 1e-3,
    ("bfloat16", "bfloat16"): 1e-3,
    ("bfloat16", "float32"): 0.05,
}
STOOD_STILL = 0.1  # the engine's mean |change|, over the mean |change| that it lacks
ENOUGH = 4  # tokens: of fewer, rounding might undo the change by chance


def engine_dtype(trainer: str, cfg: GenerationConfig) -> str:
    return trainer if cfg.dtype == "auto" else cfg.dtype


def disagreement(trainer: str, cfg: GenerationConfig) -> float:
    """The limit that holds for the coarser of the trainer's and the engine's dtype."""
    return max(DISAGREEMENT[trainer], DISAGREEMENT[engine_dtype(trainer, cfg)])


@dataclass(frozen=True)
class Answer:
    """To the fixed prompt, by the weights of `version`; log-probs [n]."""

    version: int
    tokens: list[int]
    engine: Tensor
    trainer: Tensor

    @property
    def apart(self) -> float:
        """Mean |trainer - engine|."""
        return float((self.engine - self.trainer).abs().mean())


def moves(now: Answer, then: Answer) -> tuple[float, float, float] | None:
    """From one answer to a later one, of log-probs: the trainer's mean |change|, the engine's, and that of their
    difference. None if they are of other tokens, or too few."""
    if now.tokens != then.tokens or len(now.tokens) < ENOUGH:
        return None
    trainer, engine = now.trainer - then.trainer, now.engine - then.engine
    return tuple(float(change.abs().mean()) for change in (trainer, engine, engine - trainer))


class Probe:
    """Called after a refit. `check()` before anything is sampled: it raises once the engine has been found wrong.

    Args:
        prompt: ids; its last 64 are used.
        max_length: tokens of prompt and answer together; None: no limit.
        timer: of a run: the time counts to its stages "gen" and "old_log_prob".
        dtype: "float32" or "bfloat16", what the trainer computes in.
    """

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        cfg: GenerationConfig,
        prompt: Sequence[int],
        *,
        dtype: str,
        max_length: int | None = None,
        timer: Callable[[str], AbstractContextManager] = nullcontext,
    ):
        self.policy, self.engine, self.period, self.timer = policy, engine, cfg.probe_period, timer
        self.prompt = list(prompt[-PROMPT_TOKENS:])
        room = TOKENS if max_length is None else max_length - len(self.prompt)
        # By one seed throughout where seeds decide: likelier tokens move less. Greedy where they do not, if its
        # log-probs are to be had: engines know those of the model's own distribution alone.
        plain = cfg.temperature == 1 and not cfg.min_new_tokens
        greedy = plain and not engine.capabilities().row_seeds
        self.sampling = replace(
            Sampling.from_config(cfg, greedy=greedy), max_new_tokens=min(TOKENS, cfg.max_new_tokens, room)
        )
        if not cfg.min_new_tokens:  # else what ends a response has a part in its log-probs
            self.sampling = replace(self.sampling, ignore_eos=True, stop_token_ids=(), stop_strings=())
        self.limit, self.moved = disagreement(dtype, cfg), MOVED[dtype, engine_dtype(dtype, cfg)]
        self.before: list[Answer] | None = None  # each rank's engine's, the last that were seen to follow
        self.metrics: dict[str, float] = {}  # of the last refit
        self.problem: str | None = None

    def __call__(self, version: int) -> None:
        self.metrics = {}
        if not self.period or (self.before is not None and version % self.period):
            return
        try:
            answers = self.ask()
        except FloatingPointError:  # diverged weights, as the rollout that follows will say
            return
        self.metrics["training/probe_logprob_error"] = max(answer.apart for answer in answers)
        pairs = list(zip(answers, self.before or answers, strict=True))
        for now, then in pairs:
            self.problem = self.problem or self.judge(version, now, then)
        # Until the trainer has moved the older answers stay, so that small steps add up.
        self.before = [then if (by := moves(now, then)) and by[0] <= self.moved else now for now, then in pairs]

    def check(self) -> None:
        """Raises TrainingError if the engine was found to generate with other weights than the policy's."""
        if self.problem:
            raise TrainingError(self.problem)

    def ask(self) -> list[Answer]:
        """The answer of every rank's engine. The trainer scores them together, so that all ranks judge alike."""
        with self.timer("gen"):
            completions = dist.together(lambda: self.engine.generate([self.prompt], self.sampling, [0])[0])
        batch = pack([self.prompt] * len(completions), completions)
        with self.timer("old_log_prob"):
            scored = self.policy.score(batch, {"old_logprobs"})["old_logprobs"][batch.mask]
        parts = scored.split([len(completion.tokens) for completion in completions])
        return [
            Answer(completion.weight_version, completion.tokens, torch.tensor(completion.logprobs), part)
            for completion, part in zip(completions, parts, strict=True)
        ]

    def judge(self, version: int, now: Answer, then: Answer) -> str | None:
        """What is wrong with the engine after the refit to `version`, in words."""
        if now.version != version:
            return (
                f"the generation engine is stale: it answered a fixed prompt with the weights of step {now.version}, "
                f"after a refit to those of step {version}"
            )
        if not now.apart <= self.limit:
            return (
                "the generation engine is stale or holds other weights: after the refit to those of step "
                f"{version} its log-probs of an answer to a fixed prompt differ from the trainer's by {now.apart:.2g} "
                f"in the mean; rounding explains {self.limit:g}"
            )
        trainer, engine, difference = moves(now, then) or (0.0, 0.0, 0.0)
        if trainer > self.moved and engine <= STOOD_STILL * difference:
            return (
                f"the generation engine is stale: since step {then.version} the trainer's log-probs of its answer to "
                f"a fixed prompt moved by {trainer:.2g} in the mean, its own by {engine:.2g}; its weights are still "
                f"those of step {then.version}, not those of step {version}"
            )
        return None
