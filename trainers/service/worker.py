"""Where requests are computed: one after the other, in the main thread, on every rank at once under torchrun.

Requests that only ask (infer) and that wait side by side are computed together; one that changes something (train,
save, load) is never overtaken. A request is answered or refused by itself, whatever it was computed beside.

The main thread, because rewards may limit their own time by signals, which reach no other.
"""

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainers import dist
from trainers.config_service import LimitsConfig
from trainers.environments import Sample
from trainers.rollout import RolloutBatch
from trainers.service.critic import Critic
from trainers.service.scorer import Scorer
from trainers.service.wire import Refused

MERGED_PASSES = 8  # of requests that are computed together, so that none waits for all
CHANGES = ("train", "save", "load", "release")


@dataclass
class Inference:
    """An infer request: what is asked, about what."""

    want: Sequence[str]
    batch: RolloutBatch
    samples: list[Sample]
    run: str | None = None
    step: int | None = None


@dataclass
class Inferred:
    step: int
    run: str | None
    seconds: float = 0.0
    values: Tensor | None = None  # [T]
    next_values: Tensor | None = None  # [B]
    rewards: list[list[float]] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Job:
    name: str  # "infer" or one of CHANGES, a method of Critic
    arguments: tuple[Any, ...]
    future: Future = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)


class Worker:
    """`run()` computes until `stop()`; `submit()` may be called from any thread of the first rank.

    Args:
        limits: how many jobs may wait, and how many tokens of merged ones are in one pass.
        idle_s: seconds after which the other ranks hear from the first even if nothing is asked, so that none gives up.
    """

    def __init__(self, critic: Critic | None, scorer: Scorer | None, limits: LimitsConfig, *, idle_s: float):
        self.critic, self.scorer, self.idle_s = critic, scorer, idle_s
        self.max_waiting, self.merged_tokens = limits.max_waiting, limits.merged_tokens
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.next: Job | None = None  # taken from the queue, but not part of what is merged
        self.stopping = threading.Event()
        self.ended, self.ending = False, threading.Lock()  # from then on nobody would take a job

    @property
    def waiting(self) -> int:
        return self.jobs.qsize()

    def submit(self, name: str, *arguments: Any) -> Future:
        """Raises: Refused (429): too many wait already; (503): the worker has ended."""
        if self.waiting >= self.max_waiting:
            raise Refused(f"{self.waiting} requests wait already, limits.max_waiting={self.max_waiting}", 429)
        job = Job(name, arguments)
        with self.ending:
            if self.ended:
                raise Refused("the server is ending", 503)
            self.jobs.put(job)
        return job.future

    def stop(self) -> None:
        self.stopping.set()
        self.jobs.put(None)

    def run(self) -> None:
        """Raises whatever leaves the model in doubt: then only a new process, from the last checkpoint, is sure."""
        if not dist.is_main():
            return self._follow()
        try:
            while not self.stopping.is_set():
                self._compute(self._take())
            self._everywhere("stop")
        finally:
            self._leave()

    def _follow(self) -> None:
        """What every rank but the first does: the same calls, in the same order."""
        while True:
            name, *arguments = dist.main_does(lambda: None)
            if name == "stop":
                return
            with suppress(Refused):
                getattr(self, f"_{name}")(*arguments)

    def _everywhere(self, name: str, *arguments: Any) -> None:
        """Tell the other ranks what is about to be called."""
        dist.main_does(lambda: (name, *arguments))

    def _take(self) -> list[Job]:
        """Jobs to be computed together; none when nothing has come for a while."""
        first, self.next = self.next, None
        if first is None:
            try:
                first = self.jobs.get(timeout=self.idle_s)
            except queue.Empty:
                return []
        if first is None:  # stop()
            return []
        taken, tokens = [first], self._tokens(first)
        while self._mergeable(first) and tokens < MERGED_PASSES * self.merged_tokens:
            try:
                following = self.jobs.get_nowait()
            except queue.Empty:
                break
            if following is None:
                self.stopping.set()
                break
            if not self._mergeable(following):
                self.next = following
                break
            taken.append(following)
            tokens += self._tokens(following)
        return taken

    def _mergeable(self, job: Job) -> bool:
        """A run's own requests are computed alone, and so to the same bits each time; it has one under way anyway."""
        if job.name != "infer" or job.arguments[0].run is not None:
            return False
        return "rewards" not in job.arguments[0].want or (self.scorer is not None and self.scorer.mergeable)

    def _tokens(self, job: Job) -> int:
        return job.arguments[0].batch.tokens.numel() if job.name == "infer" else 0

    def _compute(self, jobs: list[Job]) -> None:
        jobs = [job for job in jobs if job.future.set_running_or_notify_cancel()]
        if not jobs:
            self._everywhere("nothing")
        elif jobs[0].name == "infer":
            self._inferences(jobs)
        else:
            self._change(jobs[0])

    def _nothing(self) -> None:
        """See idle_s."""

    def _change(self, job: Job) -> None:
        assert self.critic is not None
        try:
            self._everywhere("call", job.name, *job.arguments)
            result = self._call(job.name, *job.arguments)
        except Refused as refused:
            job.future.set_exception(refused)
        except BaseException as error:
            # A train request that failed has moved no weight; a half-made load or save is another matter.
            if job.name != "train" or leaves_doubt(error):
                job.future.set_exception(ending(error))
                raise
            job.future.set_exception(error)
        else:
            job.future.set_result(result)

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(self.critic, name)(*arguments)

    def _inferences(self, jobs: list[Job]) -> None:
        """All of them together; if that fails each alone, so that only what is wrong with one is said to it."""
        asked = [job.arguments[0] for job in jobs]
        try:
            self._everywhere("infer", asked)
            answers = self._infer(asked)
        except BaseException as error:
            if leaves_doubt(error):
                for job in jobs:
                    job.future.set_exception(ending(error))
                raise
            if len(jobs) == 1:
                jobs[0].future.set_exception(error)
                return
        else:
            for job, answer in zip(jobs, answers, strict=True):
                job.future.set_result(answer)
            return
        for job in jobs:  # not inside `except`, where the error would keep the failed pass's memory
            self._inferences([job])

    def _infer(self, asked: Sequence[Inference]) -> list[Inferred]:
        start = time.monotonic()
        answers = [Inferred(*self._state()) for _ in asked]
        values = [(each, answer) for each, answer in zip(asked, answers, strict=True) if "values" in each.want]
        if values:
            self._values(values)
        scored = [(each, answer) for each, answer in zip(asked, answers, strict=True) if "rewards" in each.want]
        if scored:
            assert self.scorer is not None
            found = self.scorer.score([each.samples for each, _ in scored])
            for (_, answer), (rewards, metrics) in zip(scored, found, strict=True):
                answer.rewards, answer.metrics = rewards, metrics
        for answer in answers:
            answer.seconds = time.monotonic() - start
        return answers

    def _state(self) -> tuple[int, str | None]:
        return (self.critic.step, self.critic.run) if self.critic else (0, None)

    def _values(self, asked: Sequence[tuple[Inference, Inferred]]) -> None:
        assert self.critic is not None
        for each, _ in asked:
            self.critic.check_at(each.run, each.step)
        budget = self.merged_tokens if len(asked) > 1 else None
        values, next_values = self.critic.infer(RolloutBatch.concat([each.batch for each, _ in asked]), budget)
        tokens = values.split([each.batch.tokens.numel() for each, _ in asked])
        rows = next_values.split([len(each.batch) for each, _ in asked])
        for (_, answer), of_tokens, of_rows in zip(asked, tokens, rows, strict=True):
            answer.values, answer.next_values = of_tokens, of_rows

    def _leave(self) -> None:
        """Those that still wait are told to ask again: the server may come back."""
        with self.ending:
            self.ended = True
        waiting = [self.next] if self.next else []
        while not self.jobs.empty():
            waiting.append(self.jobs.get_nowait())
        for job in waiting:
            if job is not None and job.future.set_running_or_notify_cancel():
                job.future.set_exception(Refused("the server is ending", 503))


def leaves_doubt(error: BaseException) -> bool:
    """Whether nothing can be computed any more in this process: ranks have parted, or the device is broken."""
    if isinstance(error, Refused):
        return False
    parted, broken = dist.size() > 1, isinstance(error, RuntimeError) and "CUDA error" in str(error)
    return parted or broken or not isinstance(error, Exception)


def ending(error: BaseException) -> Refused:
    """The answer to a request over which the server ends: to be sent again once it is back."""
    return Refused(f"the server ends: {type(error).__name__}: {error}", 503)
