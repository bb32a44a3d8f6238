"""Which settings of `checkpointing` go together: rules of trainers/arithmetic.py."""

from collections.abc import Iterator

from trainers.config import TrainerConfig
from trainers.config_types import shown
from trainers.deadline import seconds_of
from trainers.environments import nearest
from trainers.logger import METRICS


def malformed(config: TrainerConfig) -> Iterator[str]:
    if (limit := config.checkpointing.checkpoint_must_save_by) is not None:
        try:
            seconds_of(limit)
        except ValueError as error:
            yield f"checkpointing.checkpoint_must_save_by={limit}: {error}"
    if (name := config.checkpointing.metric_name) is not None and not is_metric(name):
        yield (
            f"checkpointing.metric_name={name}: expected a name of metrics.jsonl (docs/metrics.md), such as "
            f"val/score/mean or critic/score/mean{nearest(name, sorted(METRICS))}"
        )


def needed(config: TrainerConfig) -> Iterator[str]:
    saving = config.checkpointing
    if bool(saving.keep_top_k) != (saving.metric_name is not None):
        option, other = "keep_top_k", "metric_name"
        if saving.metric_name is not None:
            option, other = other, option
        yield f"checkpointing.{option}={shown(getattr(saving, option))} needs checkpointing.{other}"
    elif saving.metric_name is not None and saving.metric_name.startswith("val/"):
        period = config.algorithm.val_period
        if not period or saving.save_period % period:
            yield (
                f"checkpointing.metric_name={saving.metric_name} needs a validation of every checkpoint: "
                f"{config.name}.val_period={period} must divide checkpointing.save_period={saving.save_period}"
            )


def is_metric(name: str) -> bool:
    """Whether a run may log it; those under env/ and val/metrics/ are the environment's and the caller's own."""
    return name in METRICS or name.startswith(("env/", "val/metrics/"))
