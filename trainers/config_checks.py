"""What can be wrong with any tree of settings: types, words, ranges, and options that another one leaves unused."""

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from trainers.config import walk
from trainers.config_types import expected, fits, named, one_of, shown
from trainers.ranges import RANGES

# Where the condition holds, the keys ("block: name name", "block: *") have no effect, for the reason.
Rule = tuple[bool, str, str]


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the key, what was expected and what came."""


def wrong_types(config: Any) -> Iterator[str]:
    for key, field, value in walk(config):
        if not fits(value, field):
            yield f"{key}: expected {expected(field)}, got {named(value)}"


def wrong_choices(config: Any) -> Iterator[str]:
    for key, field, value in walk(config):
        choices = field.metadata["choices"]
        if choices and value not in choices:
            near = difflib.get_close_matches(str(value), choices, 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{key}={shown(value)}: expected {one_of(choices)}{hint}"


def out_of_range(config: Any) -> Iterator[str]:
    for key, _, value in walk(config):
        rule = RANGES.get(re.sub("^reinforce[.]", "ppo.", key))
        if rule is not None and value is not None:
            words, holds = rule
            if not math.isfinite(value) or not holds(value):
                yield f"{key}={value}: expected a number {words}"


def without_effect(config: Any, rules: Iterable[Rule]) -> Iterator[str]:
    """Options that were changed from their default and that another option leaves without effect."""
    default = {key: value for key, _, value in walk(type(config)())}
    now = {key: value for key, _, value in walk(config)}
    for condition, keys, reason in rules:
        block, names = keys.split(": ")
        every = [key for key in now if key.startswith(f"{block}.")]
        for key in every if names == "*" else (f"{block}.{name}" for name in names.split()):
            if condition and key in now and now[key] != default[key]:
                yield f"{key}={shown(now[key])} has no effect with {reason}: set it to {shown(default[key])}"


def wrong_betas(key: str, part: Any) -> Iterator[str]:
    """`part`, the block `key`, has an optimizer."""
    betas = part.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"{key}.optimizer.betas={betas}: expected two numbers, each >= 0 and < 1"


def missing_decay(key: str, part: Any) -> Iterator[str]:
    scheduler = part.scheduler
    if scheduler.name != "constant" and scheduler.decay_steps is None:
        yield (
            f"{key}.scheduler.name={scheduler.name} needs {key}.scheduler.decay_steps, the optimizer steps from the "
            "end of the warm-up to the floor"
        )


def sharding_needs(key: str, part: Any) -> Iterator[str]:
    if not part.fully_shard:
        return
    if part.param_dtype == "bfloat16":
        yield (
            f"{key}.param_dtype=bfloat16 does not go with {key}.fully_shard=true: shards are float32, the masters of "
            "the parameters that are gathered in the compute dtype"
        )
    if getattr(part, "offload", False):
        yield f"{key}.offload=true does not go with {key}.fully_shard=true: shards stay on their devices"


def constant_schedule(key: str, part: Any) -> Rule:
    name = f"{key}.scheduler.name=constant"
    return (part.scheduler.name == "constant", f"{key}.scheduler: decay_steps min_lr_ratio", name)
