"""The served value model. It is trained by numbered requests, each of them applied exactly once, and it is saved when
its client says so.

A critic belongs to one training run at a time. Of that run it has applied the train requests 1 to `step`; it applies
request step + 1 next and nothing else. A request that it has applied already is answered as it was the first time. A
client keeps what it has sent since the last checkpoint, so a server that starts again from there is brought up to date.

    <run_dir>/current.json                    the run, and the step to start from again
    <run_dir>/<run>/step_<N>/                 critic.safetensors, state.pt, training.json
"""

import gc
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainers import checkpoint, dist
from trainers.batching import count, part_of
from trainers.config import CheckpointingConfig, ValueLossConfig
from trainers.config_types import shown
from trainers.files import replace_text
from trainers.losses import ValueLoss
from trainers.rollout import RolloutBatch
from trainers.service.messages import LoadRequest, SaveRequest, TrainHeader
from trainers.service.wire import Refused
from trainers.value.build import OwnValue

KEPT_ANSWERS = 4096
NOTHING = {"grad_norm": 0.0, "skipped": 0.0}


@dataclass(frozen=True)
class Answer:
    """What a train request left behind: the sums of its metrics, float64 vectors, and the optimizer's own numbers."""

    digest: str  # of the request
    sums: dict[str, Tensor]
    optimizer: dict[str, float]


class Critic:
    """Args: build: makes the model as it is before training; it is called again when another run begins.
    facts: what the course of training depends on, by name; a checkpoint made with others is refused.
    """

    def __init__(self, build: Callable[[], OwnValue], folder: Path, facts: dict[str, Any]):
        self.build, self.folder, self.facts = build, folder, facts
        self.run: str | None = None
        self._fresh()
        if (current := dist.main_does(lambda: read_current(folder))) is not None:
            self.run = current["run"]
            if current["step"]:
                self._restore(current["run"], current["step"])

    def _fresh(self) -> None:
        self.value: Any = None  # the one before goes first: two may not fit
        gc.collect()  # megatron-core's parameters and their hooks hold each other
        self.value = self.build()
        self.step = 0
        self.saved = {0}  # steps whose checkpoints are of this very course of training; step 0 needs none
        self.answers: OrderedDict[int, Answer] = OrderedDict()

    def infer(self, batch: RolloutBatch, max_tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """values [T] and next_values [B], float32, in passes of `max_tokens`, or of one longer sequence."""
        if not len(batch):
            return torch.zeros(0), torch.zeros(0)
        budget = None if max_tokens is None else max(max_tokens, int(batch.lengths.max()))
        values, next_values = self.value.infer(batch, budget).result()
        return values.float(), next_values.float()

    def check_at(self, run: str | None, step: int | None) -> None:
        """Refused (409) unless this is the critic of `run` after `step` train requests; None: whatever it is."""
        if run is not None and run != self.run:
            raise self._of_another(run)
        if step is not None and step != self.step:
            raise Refused(f"the critic is at step {self.step}, not at {step}", 409, run=self.run, step=self.step)

    def _of_another(self, run: str) -> Refused:
        whose = f"run {self.run}" if self.run else "no run"
        return Refused(f"the critic belongs to {whose}, not to {run}", 409, run=self.run, step=self.step)

    def train(self, header: TrainHeader, digest: str, batch: RolloutBatch) -> Answer:
        """One optimizer step on all of `batch`, or the answer to the same request as it was given before.

        A batch without a sampled token moves nothing, not even by the optimizer's momentum, and counts as a step.

        Raises:
            Refused (409): not the next request of the critic's run; (410): applied too long ago to be remembered.
        """
        self.check_at(header.run, None)
        if header.id <= self.step:
            return self._again(header.id, digest)
        self.check_at(None, header.id - 1)
        sums: dict[str, Tensor] = {}
        optimizer = NOTHING | {"lr": self.value.lr}
        if bool(batch.mask.any()):
            sums, optimizer = self._step(count(batch), ValueLossConfig(scale=header.scale, cliprange=header.cliprange))
        answer = Answer(digest, {name: vector.cpu().double() for name, vector in sums.items()}, optimizer)
        self.step = header.id
        self.answers[header.id] = answer
        if len(self.answers) > KEPT_ANSWERS:
            self.answers.popitem(last=False)
        return answer

    def _step(self, batch: RolloutBatch, loss: ValueLossConfig) -> tuple[dict[str, Tensor], dict[str, float]]:
        # What no pass would see: as in trainers.batching.minibatches, whose requests have no such sequence.
        batch = part_of(batch, (batch.trained_lengths > 0).nonzero().squeeze(1))
        if dist.replicas() > 1:
            batch = part_of(batch, torch.tensor(dist.rows(batch.lengths), dtype=torch.int64))
        try:
            metrics = self.value.train_step(batch, ValueLoss(loss))
        except BaseException:  # such as out of memory: no weight has moved yet, but gradients may be half summed
            self.value.zero_grad()
            raise
        return metrics.sums, metrics.optimizers["critic"]

    def _again(self, number: int, digest: str) -> Answer:
        if number not in self.answers:
            raise Refused(f"train request {number} was applied long ago: its answer is forgotten", 410, step=self.step)
        if self.answers[number].digest != digest:
            raise Refused(
                f"train request {number} was applied with another content; nothing is applied twice", 409,
                run=self.run, step=self.step,
            )  # fmt: skip
        return self.answers[number]

    def save(self, request: SaveRequest) -> None:
        """Write the checkpoint of this very step, whole or not at all, then let go of those that are not wanted.

        Raises:
            Refused (507): it cannot be written.
        """
        self.check_at(request.run, request.step)
        try:
            self._save(set(request.keep))
        except OSError as error:
            raise Refused(f"the checkpoint of step {request.step} was not written: {error}", 507) from error

    def _save(self, keep: set[int]) -> None:
        assert self.run is not None
        folder = self.folder / self.run
        if self.step not in self.saved:
            checkpoint.save(folder, self.step, self._write, CheckpointingConfig(keep_last_k=0))
        self.saved.add(self.step)
        self._remember(self.step)
        dist.main_does(lambda: checkpoint.keep_only(folder, keep | {self.step}))

    def _write(self, folder: Path) -> None:
        """What fails on one rank fails on all before the next part, in which others would wait for it."""
        dist.together(lambda: self.value.save(folder / "critic"))
        answers = {
            str(n): {"digest": a.digest, "sums": a.sums, "optimizer": a.optimizer} for n, a in self.answers.items()
        }
        record = {"step": self.step, "run": self.run, "time": time.time(), "facts": self.facts}
        state = {"value": self.value.state_dict(), "answers": answers}
        dist.main_does(lambda: checkpoint.write_state(folder, record, state))
        self.value.save_shards(folder / "shards")

    def load(self, request: LoadRequest) -> None:
        """Become the critic of a run at a step: as it was before any training, or as a checkpoint has it.

        Raises:
            Refused (409): another run has the critic and has not released it; there is no such checkpoint.
        """
        if self.run is not None and self.run != request.run:
            raise Refused(
                f"the critic is run {self.run}'s, trained to step {self.step}: end that run first, which releases the "
                f'critic; if it is gone for good, POST {{"run": "{self.run}"}} to /release, or start the server with '
                "another run_dir", 409, run=self.run, step=self.step,
            )  # fmt: skip
        source = request.source or request.run
        if (self.run, self.step) != (source, request.step):
            if request.step:
                self._restore(source, request.step)
            elif self.step:
                self._fresh()
        if source != request.run:
            self.saved = {0}
        self.run = request.run
        # A run that goes on from another's checkpoint has one of its own, from which the server can start again.
        if source != request.run:
            self._save(set())
        else:
            self._remember(self.step)

    def _restore(self, run: str, step: int) -> None:
        folder = self.folder / run / f"step_{step}"
        dist.together(lambda: self._check(run, step, folder))  # of several ranks each reads it
        _, state = checkpoint.read_state(folder)
        self.value.load(folder / "critic")
        self.value.load_state_dict(state["value"])
        self.value.load_shards(folder / "shards")
        self.answers = OrderedDict((int(n), Answer(**a)) for n, a in state["answers"].items())
        self.step, self.saved = step, {step}

    def _check(self, run: str, step: int, folder: Path) -> None:
        """Refused (409) unless the checkpoint is there, and of a critic with these facts."""
        where = {"run": self.run, "step": self.step}
        if not folder.is_dir():
            there = [int(path.name.removeprefix("step_")) for path in checkpoint.listed(folder.parent)]
            raise Refused(
                f"there is no checkpoint of run {run} at step {step} in the server's run_dir; there are: {there}", 409,
                **where, checkpoints=there,
            )  # fmt: skip
        record = json.loads((folder / "training.json").read_text())
        other = [
            f"{key}={shown(then)}, here it is {shown(self.facts.get(key))}"
            for key, then in record["facts"].items()
            if self.facts.get(key) != then
        ]
        if other:
            raise Refused(f"{folder} was made with {'; '.join(other)}", 409, **where)

    def release(self, run: str) -> None:
        """Another run may have the critic now. What was not saved is lost once one takes it."""
        self.check_at(run, None)
        self.run = None
        dist.main_does(lambda: (self.folder / "current.json").unlink(missing_ok=True))

    def _remember(self, step: int) -> None:
        dist.main_does(lambda: write_current(self.folder, {"run": self.run, "step": step}))


def write_current(folder: Path, current: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "current.json", json.dumps(current) + "\n")


def read_current(folder: Path) -> dict[str, Any] | None:
    """The run and the step to start from again, and the facts of its checkpoint if there is one; None: afresh."""
    path = folder / "current.json"
    try:
        current = json.loads(path.read_text())
        record = folder / current["run"] / f"step_{current['step']}" / "training.json"
        return current | {"facts": json.loads(record.read_text())["facts"] if record.is_file() else {}}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} or the checkpoint that it names is damaged: {error!r}") from error
