"""When a run must have saved: `checkpointing.checkpoint_must_save_by`, counted from the start of the process.

A cluster ends a job by its wall clock without asking. The run therefore stops itself at the end of a step, once what is
left may not suffice for another step, the checkpoint after it and a validation: 1.2 times the longest of each so far.
A save that has not been timed yet is taken to be as long as a step.
"""

import re
import time

FORM = re.compile(r"(?:(\d+):)?(\d{1,2}):([0-5]?\d):([0-5]?\d)")
MARGIN = 1.2
AFTER_THE_STEP = ("save_checkpoint", "testing")


def seconds_of(text: str) -> int:
    """ "01:02:00:00" (a day and two hours) -> 93600; "00:30:00" -> 1800. ValueError for any other form."""
    match = FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"expected DD:HH:MM:SS or HH:MM:SS, got {text!r}")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def process_seconds() -> float:
    """Seconds since this process started, imports and the loading of models included."""
    import psutil

    return time.time() - psutil.Process().create_time()


class Deadline:
    """`limit` seconds after the process's start; None: never."""

    def __init__(self, limit: float | None):
        now = time.monotonic()
        self.end = None if limit is None else now - process_seconds() + limit
        self.longest: dict[str, float] = {}
        self.passed = False

    def timed(self, stage: str, seconds: float) -> None:
        self.longest[stage] = max(self.longest.get(stage, 0.0), seconds)

    def step(self, seconds: float, stages: dict[str, float]) -> None:
        """A step of `seconds`, of which `stages` may say how long a checkpoint and a validation within it took."""
        self.timed("step", seconds - sum(stages.get(stage, 0.0) for stage in AFTER_THE_STEP))

    def needed(self) -> float:
        """Seconds that one more step, its checkpoint and a validation may take."""
        step = self.longest.get("step", 0.0)
        return MARGIN * (step + self.longest.get("save_checkpoint", step) + self.longest.get("testing", 0.0))

    def leaves_no_step(self) -> bool:
        """Whether it is too late for another step. Once it was, it stays so."""
        if self.end is not None and not self.passed:
            left = self.end - time.monotonic()
            if left <= self.needed():
                self.passed = True
                print(
                    f"checkpointing.checkpoint_must_save_by: {max(left, 0):.0f} s are left, another step and its "
                    f"checkpoint may take {self.needed():.0f} s: saving and ending here",
                    flush=True,
                )
        return self.passed
