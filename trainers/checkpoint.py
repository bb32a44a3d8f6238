"""Checkpoints: `checkpoints/step_N/`, complete or not there at all.

A checkpoint is written under a temporary name, flushed to disk and renamed. It holds what a resumed run needs to give
bit for bit what an unbroken one gives on a CPU: `policy/` (an HF folder, loads with AutoModelForCausalLM; with
policy.peft.export=adapter the adapters in peft's format), `critic/` if the critic has a model of its own, `state.pt`
(optimizers, schedules, heads), `training.json` (step, prompts drawn, counters) and `config.yaml`.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.files import fsync

STEP = re.compile(r"step_(\d+)")
TEMPORARY = "tmp_step_"


def save(folder: Path, step: int, write: Callable[[Path], None], *, keep_last_k: int) -> Path:
    """`write(path)` fills the checkpoint of `step`; all but the last `keep_last_k` go afterwards (0 keeps all)."""
    final, temporary = folder / f"step_{step}", folder / f"{TEMPORARY}{step}"
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover)
    temporary.mkdir()
    try:
        _write(write, temporary)
        for path in (*temporary.rglob("*"), temporary):
            fsync(path)
        if final.exists():
            _remove(final)
        temporary.rename(final)
        fsync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if keep_last_k > 0:
        for old in listed(folder)[:-keep_last_k]:
            _remove(old)
    return final


def _write(write: Callable[[Path], None], folder: Path) -> None:
    """A full disk is an OSError whichever library meets it: safetensors and torch raise errors of their own."""
    from safetensors import SafetensorError

    try:
        write(folder)
    except (SafetensorError, RuntimeError) as error:
        raise OSError(f"cannot write {folder}: {error}") from error


def _remove(folder: Path) -> None:
    """Under a temporary name first: a half-removed step_N would look like a checkpoint."""
    shutil.rmtree(folder.rename(folder.with_name(f"{TEMPORARY}removed_{folder.name}")))


def listed(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [(int(m[1]), path) for path in folder.glob("step_*") if (m := STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def find(resume: str, run_dir: Path) -> Path | None:
    """The checkpoint that `checkpointing.resume` means: None to start afresh."""
    if resume == "never":
        return None
    if resume == "auto":
        complete = listed(run_dir / "checkpoints")
        return complete[-1] if complete else None
    path = Path(resume).expanduser()
    if (path / "checkpoints").is_dir() and (complete := listed(path / "checkpoints")):
        return complete[-1]
    if (path / "training.json").is_file():
        newer = [other for other in listed(run_dir / "checkpoints") if other.parent.samefile(path.parent)]
        if newer and newer[-1].name != path.name:
            raise ValueError(
                f"checkpointing.resume={resume!r}: {run_dir} goes on to {newer[-1].name}; name another logger.run_dir "
                "for a run that branches off before that"
            )
        return path
    raise ValueError(f"checkpointing.resume={resume!r} must be auto, never, a run folder or a checkpoint (step_N)")


def write_state(folder: Path, training: dict[str, Any], state: dict[str, Any]) -> None:
    import torch

    (folder / "training.json").write_text(json.dumps(training, indent=2) + "\n")
    torch.save(state, folder / "state.pt")


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    training = json.loads((folder / "training.json").read_text())
    return training, torch.load(folder / "state.pt", weights_only=True, map_location="cpu")


def compute_dtype(folder: Path) -> str:
    """The dtype that the run computes in, whatever "auto" would measure today."""
    return str(json.loads((folder / "training.json").read_text())["compute_dtype"])
