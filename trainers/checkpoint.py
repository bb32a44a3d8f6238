"""Checkpoints: `checkpoints/step_N/`, complete or not there at all.

A checkpoint is written under a temporary name, flushed to disk and renamed. It holds what a resumed run needs to give
bit for bit what an unbroken one gives on a CPU: `policy/` (an HF folder, loads with AutoModelForCausalLM; with
policy.peft.export=adapter the adapters in peft's format), `critic/` if the critic has a model of its own, `state.pt`
(optimizers, schedules, heads), `shards/` (of a model that lies on several ranks, weights and optimizer, each rank its
own part, to be read by any number of ranks), `training.json` (step, prompts drawn, counters, last metrics) and
`config.yaml`.

Which ones stay is a union: the newest, the last `keep_last_k`, and the best `keep_top_k` by a metric of the step at
which they were written. A checkpoint that lacks the metric, or has it as NaN or infinite, ranks below all that have it;
among equals the newer one ranks higher.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from trainers import dist
from trainers.config import CheckpointingConfig
from trainers.files import fsync, replace_text
from trainers.out_of_memory import is_out_of_memory

STEP = re.compile(r"step_(\d+)")
TEMPORARY = "tmp_step_"


def save(folder: Path, step: int, write: Callable[[Path], None], cfg: CheckpointingConfig) -> Path:
    """`write(path)` fills the checkpoint of `step`; those that `cfg` does not keep go afterwards.

    Every rank calls it, over one file system, and so is `write` called: on each rank at once, for its own files.
    """
    final, temporary = folder / f"step_{step}", folder / f"{TEMPORARY}{step}"
    dist.main_does(lambda: _begin(folder, temporary))
    try:
        dist.together(lambda: _write(write, temporary))
        dist.main_does(lambda: _finish(temporary, final))
    except BaseException:
        if dist.is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    dist.main_does(lambda: prune(folder, cfg))
    return final


def _begin(folder: Path, temporary: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover)
    temporary.mkdir()


def _finish(temporary: Path, final: Path) -> None:
    for path in (*temporary.rglob("*"), temporary):
        fsync(path)
    if final.exists():
        _remove(final)
    temporary.rename(final)
    fsync(final.parent)


def prune(folder: Path, cfg: CheckpointingConfig) -> None:
    """Remove what is not kept. A kill in between leaves checkpoints too many, never one too few."""
    complete = listed(folder)
    values = [metric_of(path, cfg.metric_name) if cfg.metric_name else None for path in complete]
    keep = kept(values, cfg)
    for i, path in enumerate(complete):
        if i not in keep:
            _remove(path)


def keep_only(folder: Path, steps: Collection[int]) -> None:
    """Remove the checkpoints of all other steps."""
    for path in listed(folder):
        if int(path.name.removeprefix("step_")) not in steps:
            _remove(path)


def kept(values: Sequence[float | None], cfg: CheckpointingConfig) -> set[int]:
    """Indices of the checkpoints to keep, given their metrics, oldest first; None where there is none."""
    count = len(values)
    if not cfg.keep_last_k:
        return set(range(count))
    sign = 1 if cfg.higher_is_better else -1

    def rank(i: int) -> tuple[float, int]:
        value = values[i]
        return (-math.inf if value is None or not math.isfinite(value) else sign * value, i)

    best = sorted(range(count), key=rank, reverse=True)[: cfg.keep_top_k or 0]
    return {*range(count - min(cfg.keep_last_k, count), count), *best}


def metric_of(folder: Path, name: str) -> float | None:
    """The metric that was logged at the checkpoint's own step; None if it was not."""
    try:
        value = json.loads((folder / "training.json").read_text())["progress"]["step_metrics"][name]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, int | float) else None


def rank(folder: Path, step: int, record: dict[str, Any], cfg: CheckpointingConfig) -> None:
    """Put `record`, a later one of the same step, into the checkpoint's training.json at once, and remove what is then
    not kept. Nothing happens if the checkpoint of `step` lies in another run's folder.
    """
    path = folder / f"step_{step}" / "training.json"
    if not path.is_file():
        return
    replace_text(path, _json(json.loads(path.read_text()) | record))
    prune(folder, cfg)


def _write(write: Callable[[Path], None], folder: Path) -> None:
    """A full disk is an OSError whichever library meets it: safetensors and torch raise errors of their own."""
    from safetensors import SafetensorError

    try:
        write(folder)
    except (SafetensorError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
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
    """What every rank has alike, written by the main one."""
    import torch

    if not dist.is_main():
        return
    (folder / "training.json").write_text(_json(training))
    torch.save(state, folder / "state.pt")


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    training = json.loads((folder / "training.json").read_text())
    return training, torch.load(folder / "state.pt", weights_only=True, map_location="cpu")


def compute_dtype(folder: Path) -> str:
    """The dtype that the run computes in, whatever "auto" would measure today."""
    return str(json.loads((folder / "training.json").read_text())["compute_dtype"])


def param_dtype(folder: Path, part: str) -> str:
    """How the trained parameters of `part`, policy or value, are stored, whatever "auto" would mean here."""
    known = json.loads((folder / "training.json").read_text()).get("param_dtypes", {})
    return str(known.get(part, "float32"))  # before there was a choice


def check_origin(state: dict[str, Any], key: str, *, backend: str, dtype: torch.dtype | None = None) -> None:
    """Whether the state of the policy or of the critic, `key`: "policy" or "value", is one of this backend and of this
    compute dtype, if that is given.

    Raises:
        ValueError: it is not; names the setting.
    """
    if (theirs := state.get("backend", "hf")) != backend:
        folder = {"policy": "policy", "value": "critic"}[key]
        raise ValueError(
            f"the checkpoint was trained with {key}.backend={theirs}: set that, or start from its {folder}/"
        )
    if dtype is not None and state["dtype"] != str(dtype):
        name = state["dtype"].removeprefix("torch.")
        raise ValueError(f"the checkpoint was trained in {name}, this run computes in {dtype}: set policy.dtype={name}")
