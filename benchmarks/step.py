"""What the trainers of bench_ppo_step.py have in common: the work of a step, the clock, the memory."""

import resource
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import product_parameters

SEED, LEARNING_RATE, KL_COEF = 0, 1e-6, 0.05

# TFLOP/s of dense bfloat16 products, from the makers' data sheets, by the name that torch gives a card.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "A100": 312}


@dataclass(frozen=True)
class Work:
    """One step: prompts x samples responses of one length, one optimizer step, a KL to a reference model."""

    shape: str
    algorithm: str  # rloo, grpo or ppo
    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    micro_tokens: int
    gradient_checkpointing: bool
    steps: int
    warmup: int
    seconds: float

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def micro_rows(self) -> int:
        """Sequences of a micro-batch: all have one length, so that both trainers form the same ones."""
        return self.micro_tokens // self.length

    @property
    def groups(self) -> tuple[int, int]:
        """Prompts and responses to each. PPO has no use for groups, and TRL's takes one response a prompt."""
        return (self.sequences, 1) if self.algorithm == "ppo" else (self.prompts, self.samples)

    @property
    def flops(self) -> float:
        """Of the matrix products that the algorithm asks for, the same for both trainers: 2 a parameter and token of a
        pass forward, 4 more of one backward. Attention, and what checkpointing computes again, is not counted."""
        layers, head = product_parameters(self.shape)
        generated, old, reference, trained = 2, 2, 2, 6
        policy = (generated + old + reference + trained) * (layers + head)
        values, scores, critic = (2, 2, 6) if self.algorithm == "ppo" else (0, 0, 0)
        return (policy + (values + scores + critic) * layers) * self.tokens


class OutOfTime(Exception):
    """No further step is to be begun; trainers that cannot be asked to stop are stopped by it."""


@dataclass
class Clock:
    """Seconds of the steps: `tick()` when training begins and after each step, with the device idle."""

    work: Work
    cuda: bool
    ticks: list[float] = field(default_factory=list)
    generation: list[float] = field(default_factory=list)  # of each step, where the trainer has no clock of its own
    other_bytes: int = 0  # on the device beside PyTorch's allocator: the context, libraries

    def tick(self) -> bool:
        """Whether another step may be begun."""
        self.wait()
        if self.cuda:
            if not self.ticks:
                torch.cuda.reset_peak_memory_stats()
            free, total = torch.cuda.mem_get_info()
            self.other_bytes = max(self.other_bytes, total - free - torch.cuda.memory_reserved())
        self.ticks.append(time.perf_counter())
        self.generation.append(0.0)
        return self.ticks[-1] - self.ticks[0] < self.work.seconds or len(self.ticks) < self.work.warmup + 2

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def time_generation(self, model: Any) -> None:
        """Count the seconds of the model's generate(), and see that its responses have the length they should."""
        plain = model.generate

        def generate(*args: Any, **options: Any) -> Any:
            self.wait()
            begin = time.perf_counter()
            answer = plain(*args, **options)
            self.wait()
            self.generation[-1] += time.perf_counter() - begin
            length = getattr(answer, "sequences", answer).shape[1]
            assert length == self.work.length, f"sequences of {length} tokens, not of {self.work.length}"
            return answer

        model.generate = generate

    @property
    def steps(self) -> list[float]:
        return [after - before for before, after in zip(self.ticks, self.ticks[1:], strict=False)]

    def row(self, stages: Sequence[dict[str, float]] = ()) -> dict[str, Any]:
        """What was measured after the warm-up. `stages`: seconds by name, of each step."""
        work, measured = self.work, self.steps[self.work.warmup :]
        median = statistics.median(measured)
        stages = list(stages) or [{"gen": seconds} for seconds in self.generation]
        stages = stages[work.warmup : work.warmup + len(measured)]
        row: dict[str, Any] = {
            "step_s": median,
            "steps_s": measured,
            "stages_s": {name: statistics.median(stage.get(name, 0.0) for stage in stages) for name in stages[-1]},
            "tokens_per_s": work.tokens / median,
            "tflop": work.flops / 1e12,
            "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,  # Linux counts KiB
        }
        if self.cuda:
            peak = peak_tflops(torch.cuda.get_device_name())
            row |= {
                "peak_tflops": peak,
                "mfu": peak and work.flops / 1e12 / median / peak,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                "device_gib": (torch.cuda.max_memory_reserved() + self.other_bytes) / 2**30,
            }
        return row


def peak_tflops(card: str) -> int | None:
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in card), None)


def dtypes(state: Any) -> str:
    """Names and dtypes of the tensors in an optimizer's state, scalars aside."""
    found: dict[str, set[str]] = {}

    def walk(name: str, part: Any) -> None:
        if isinstance(part, torch.Tensor) and part.numel() > 1:
            found.setdefault(name, set()).add(str(part.dtype).removeprefix("torch."))
        elif isinstance(part, dict):
            for key, value in part.items():
                walk(key if isinstance(key, str) else name, value)
        elif isinstance(part, (list, tuple)):
            for value in part:
                walk(name, value)

    walk("state", state)
    return ", ".join(f"{name} {' and '.join(sorted(kinds))}" for name, kinds in sorted(found.items()))


def even_words(texts: Sequence[str]) -> list[float]:
    """A reward that costs next to nothing: the share of words that end in an even digit."""
    return [sum(word[-1] in "02468" for word in text.split()) / max(len(text.split()), 1) for text in texts]


def clear(folder: Path) -> Path:
    """A run's folder, without what an earlier run left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder
