"""A critic on a server (`python -m trainers.serve_critic`), which computes while the policy does.

Requests leave in order through one thread. `infer` and `train_step` return at once; what was asked for is awaited in
`Pending.result()` and in `settle()`, where every failure appears.

Train requests are numbered, 1, 2, ... of this run. Each is kept in <run_dir>/critic_requests/ until a save that covers
it is acknowledged: a server that comes back at an earlier step gets the requests in between once more. A checkpoint of
the run holds the number of the last request that it contains, and the server a checkpoint of the critic by that number.
"""

import atexit
import itertools
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainers import dist
from trainers.batching import minibatches
from trainers.config import ValueConfig
from trainers.losses import ValueLoss
from trainers.optim import StepMetrics
from trainers.rollout import RolloutBatch
from trainers.run import TrainingError
from trainers.service.client import Client, ServerError
from trainers.service.messages import packed
from trainers.service.served import vocab_digest
from trainers.service.wire import encode
from trainers.service_rules import otherwise_served
from trainers.value import BaseValue

T = TypeVar("T")
VALUES = ("values", "next_values")
HEADER_ROOM = 65536  # bytes of a request beside its tensors
MOST_RESTARTS = 100  # of a server during one request


class Journal:
    """Train requests as they were sent, by their numbers."""

    def __init__(self, folder: Path):
        self.folder = folder

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, number: int, body: bytes) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self._path(number).with_suffix(".partial")
            partial.write_bytes(body)
            os.replace(partial, self._path(number))
        except OSError as error:
            raise TrainingError(f"a train request cannot be kept in {self.folder}: {error}") from error

    def read(self, number: int) -> bytes:
        return self._path(number).read_bytes()

    def drop_through(self, number: int) -> None:
        for path in self.folder.glob("*.safetensors"):
            if int(path.stem) <= number:
                path.unlink()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.safetensors"


class RemoteValue(BaseValue):
    """Under torchrun the main rank speaks, and all have its answers.

    Args:
        run_dir: of the training run.
        resumed: the checkpoint that load() will be called with; None: a run from its beginning.
        tokenizer: the policy's; the critic reads the ids that it wrote.

    Raises:
        TrainingError: no such server, one with another vocabulary, or one that belongs to another run.
    """

    def __init__(self, cfg: ValueConfig, *, run_dir: Path, resumed: Path | None, tokenizer: Any):
        assert cfg.url is not None
        self.cfg, self.run_dir = cfg, run_dir
        self.client = Client(cfg.url, cfg.remote, key="value")
        self.sender = ThreadPoolExecutor(1, thread_name_prefix="critic")
        self.journal = Journal(run_dir / "critic_requests")
        self.run = dist.main_does(lambda: uuid.uuid4().hex)
        self.sent = 0  # number of the last train request
        self.saved = 0  # of the last that a checkpoint of the server covers
        self.waiting: list[tuple[Future | None, StepMetrics]] = []
        self.seconds: dict[str, float] = {}
        dist.main_does(lambda: self._begin(tokenizer, resumed))
        atexit.register(self.close)  # a process that ends without a word would keep the critic from others

    def _begin(self, tokenizer: Any, resumed: Path | None) -> None:
        self._check(tokenizer)
        if resumed is None:
            self._claim({"run": self.run, "step": 0})
            self.journal.clear()

    def _check(self, tokenizer: Any) -> None:
        vocab = max(tokenizer.get_vocab().values(), default=-1) + 1
        info = self.info = self.client.get("info", vocab=vocab)
        if "value" not in info.get("serves", {}):
            raise TrainingError(f"{self.client.who} serves no value model: start it with serve=value or serve=both")
        if (size := self.cfg.train_global_batch_size) > (most := info["max_sequences"]):
            raise TrainingError(
                f"value.train_global_batch_size={size}, but {self.client.who} takes limits.max_sequences={most} of them"
            )
        served, rate = info["serves"]["value"], info["value"]["optimizer.lr"]
        print(f"critic    {served} at {self.client.url}, {info['compute_dtype']}, learning rate {rate:g}", flush=True)
        if problems := otherwise_served(self.cfg, info["value"]):
            raise TrainingError(
                f"{self.client.who} serves another critic than the settings say: " + "; ".join(problems)
            )
        mine = vocab_digest(tokenizer, vocab)
        if info.get("vocab_digest", mine) != mine:
            raise TrainingError(
                f"{self.client.who}: its model {info['serves']['value']} has another vocabulary than the policy, whose "
                "ids it would read"
            )

    def infer(self, batch: RolloutBatch) -> "Answer":
        """In one request, or in as many as the server's limits make of it."""
        header = {"run": self.run, "step": self.sent, "want": ["values"]}
        parts = self._within_limits(batch) if dist.is_main() else []
        bodies = [encode(header, packed(batch.select(rows) if len(parts) > 1 else batch)) for rows in parts]
        step = self.sent
        return Answer(self._submit(lambda: self._timed("critic_infer", lambda: self._infer(step, bodies, batch))))

    def _within_limits(self, batch: RolloutBatch) -> list[Tensor]:
        """The rows of each request, in order."""
        most, room = self.info["max_sequences"], self.info["max_body_mb"] * 1e6 - HEADER_ROOM
        parts: list[list[int]] = [[]]
        size = 0
        for row, length in enumerate(batch.lengths.tolist()):
            bytes_ = length * (batch.tokens.itemsize + batch.mask.itemsize) + batch.lengths.itemsize
            if parts[-1] and (len(parts[-1]) == most or size + bytes_ > room):
                parts.append([])
                size = 0
            parts[-1].append(row)
            size += bytes_
        return [torch.tensor(rows) for rows in parts]

    def _submit(self, work: Callable[[], T]) -> Future | None:
        return self.sender.submit(work) if dist.is_main() else None

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return result

    def _infer(self, step: int, bodies: Sequence[bytes], batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        found = [self._at(step, lambda body=body: self.client.exchange("infer", body)[1]) for body in bodies]
        values, next_values = (torch.cat([each.get(name, torch.empty(0)) for each in found]) for name in VALUES)
        if (len(values), len(next_values)) != (batch.tokens.numel(), len(batch)):
            raise TrainingError(
                f"{self.client.who} must answer with values of {batch.tokens.numel()} tokens and {len(batch)} "
                f"sequences, got {len(values)} and {len(next_values)}"
            )
        return values, next_values

    def minibatches(self, batch: RolloutBatch, *, seed: int, step: int, epoch: int) -> Iterator[RolloutBatch]:
        return minibatches(batch, self.cfg.train_global_batch_size, seed=seed, step=step, epoch=epoch, whole=True)

    def train_step(self, minibatch: RolloutBatch, loss: ValueLoss) -> StepMetrics:
        """The metrics are filled in by settle()."""
        self.sent += 1
        number, metrics = self.sent, StepMetrics({}, {})
        header = {"run": self.run, "id": number, "cliprange": loss.cfg.cliprange, "scale": loss.cfg.scale}
        body = encode(header, packed(minibatch, "values", "returns")) if dist.is_main() else b""
        future = self._submit(lambda: self._timed("critic_train", lambda: self._train(number, body)))
        self.waiting.append((future, metrics))
        return metrics

    def _train(self, number: int, body: bytes) -> tuple[dict[str, Tensor], dict[str, float]]:
        self.journal.add(number, body)
        _, tensors = self._at(number - 1, lambda: self.client.exchange("train", body))
        parts: dict[str, dict[str, Tensor]] = {"sums": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            parts[kind][rest] = tensor
        return parts["sums"], {name: float(value) for name, value in parts["optimizer"].items()}

    def _at(self, step: int, ask: Callable[[], T]) -> T:
        """What `ask` gives when the critic is at `step`. One that is behind, since its server has started again from a
        checkpoint, gets what it lacks, from the beginning if that happens once more on the way."""
        behind: ServerError | None = None
        for restarts in itertools.count():
            try:
                if behind is not None:
                    self._bring_to(step, behind)
                return ask()
            except ServerError as error:
                if error.status != 409 or restarts == MOST_RESTARTS:
                    raise
                behind = error
        raise AssertionError

    def _bring_to(self, step: int, error: ServerError) -> None:
        there, run = error.facts.get("step"), error.facts.get("run")
        if run is None:  # the server came back without a checkpoint, or never had one
            self._claim({"run": self.run, "step": self.saved})
            there = self.saved
        elif run != self.run or not isinstance(there, int) or there > step:
            raise TrainingError(str(error)) from error
        if there < self.saved:
            raise TrainingError(
                f"{self.client.who} is back at step {there} of this run, though it has saved step {self.saved}: what "
                "lies between is kept nowhere. Start it with the run_dir that it had"
            ) from error
        print(f"critic    {self.client.who} is back at step {there}: it gets {step - there} requests again", flush=True)
        for number in range(there + 1, step + 1):
            self.client.exchange("train", self.journal.read(number))

    def _claim(self, request: dict[str, Any]) -> None:
        try:
            self.client.post("load", request)
        except ServerError as error:
            raise TrainingError(str(error)) from error

    def settle(self) -> dict[str, float]:
        """Wait for every train_step; the seconds that the server took to infer and to train."""
        waiting, self.waiting = self.waiting, []
        answers = dist.main_does(lambda: [future.result() for future, _ in waiting if future is not None])
        for (_, metrics), (sums, optimizer) in zip(waiting, answers, strict=True):
            metrics.sums.update(sums)
            metrics.optimizers["critic"] = optimizer
        seconds, self.seconds = self.seconds, {}
        return dist.main_does(lambda: {f"perf/{name}_time": value for name, value in seconds.items()})

    def save(self, folder: Path) -> None:
        """Have the server save; `folder` gets the number by which it is found again. Called on the main rank alone.

        Raises:
            OSError: the server could not write its checkpoint, as where its disk is full.
        """
        keep = [known["step"] for known in self._checkpoints() if known["run"] == self.run]
        request = {"run": self.run, "step": self.sent, "keep": keep}
        try:
            self.sender.submit(lambda: self._at(self.sent, lambda: self.client.post("save", request))).result()
        except ServerError as error:
            raise OSError(str(error)) if error.status == 507 else error from error
        self.saved = self.sent
        self.journal.drop_through(self.saved)
        folder.mkdir()
        facts = {"run": self.run, "step": self.sent, "url": self.cfg.url}
        (folder / "remote.json").write_text(json.dumps(facts, indent=2) + "\n")

    def _checkpoints(self) -> list[dict[str, Any]]:
        """What this run's checkpoints say of the critic that belongs to them."""
        return [json.loads(path.read_text()) for path in self.run_dir.glob("checkpoints/step_*/critic/remote.json")]

    def load(self, folder: Path) -> None:
        """The critic that the checkpoint was saved with. A run that branches off another's gets a copy of its own.

        Raises:
            TrainingError: the server has no such checkpoint.
        """
        known = json.loads((folder / "remote.json").read_text())
        if folder.parent.parent.parent.resolve() == self.run_dir.resolve():
            self.run = known["run"]
        self.sent = self.saved = known["step"]
        request = {"run": self.run, "step": self.sent, "source": known["run"]}

        def claim() -> None:
            try:
                self._claim(request)
                self.journal.clear()
            except TrainingError as error:
                raise TrainingError(
                    f"cannot resume {folder.parent}, which belongs to step {self.sent} of the critic of run "
                    f"{known['run']}: {error}"
                ) from error

        dist.main_does(claim)

    def release(self) -> None:
        """Another run may have the critic. A later request of this one takes it back as it was saved, if nobody has."""
        if dist.is_main() and (problem := self.client.last_word("release", {"run": self.run})):
            print(f"warning: {self.client.who} was not told that the run is over: {problem}", flush=True)

    def close(self) -> None:
        """For good; once is enough. What is under way is given up."""
        atexit.unregister(self.close)
        if self.client.closing.is_set():
            return
        self.client.close()
        self.sender.shutdown(wait=True, cancel_futures=True)
        self.release()
        if dist.is_main():
            self.journal.clear()


class Answer:
    """Values on their way."""

    def __init__(self, future: Future | None):
        self.future = future  # None on the other ranks

    def result(self) -> tuple[Tensor, Tensor]:
        return dist.main_does(lambda: self.future.result() if self.future else None)
