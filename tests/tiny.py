"""Small parts for the trainer tests: a two-layer random Llama, a copy-task configuration, a hand-made rollout."""

import functools
from dataclasses import replace
from pathlib import Path

import torch

from trainers.config import CONFIGS, TrainerConfig
from trainers.engines import Completion
from trainers.models import resolve_model
from trainers.policy.hf import HFPolicy
from trainers.rollout import RolloutBatch, pack
from trainers.settings import load_config


@functools.cache
def tiny_model() -> Path:
    return Path(resolve_model("tiny-llama"))


def config(algorithm: str = "ppo", **overrides: object) -> TrainerConfig:
    """The copy recipe, quiet and small, with dotted overrides (`__` for the dot)."""
    quiet = {
        "logger.tensorboard": False,
        "logger.report": False,
        "cluster.num_threads": 1,
        "checkpointing.enabled": False,
    }
    settings = quiet | {key.replace("__", "."): value for key, value in overrides.items()}
    texts = [f"{key}={_written(value)}" for key, value in settings.items()]
    return load_config(f"{algorithm}_copy", texts, CONFIGS[algorithm])


def _written(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def policy(num_layers_unfrozen: int = -1, dtype: torch.dtype = torch.float32, **overrides: object) -> HFPolicy:
    cfg = replace(config().policy, num_layers_unfrozen=num_layers_unfrozen, **overrides)
    return HFPolicy(tiny_model(), cfg, device=torch.device("cpu"), dtype=dtype)


def rollout(lengths: tuple[tuple[int, int], ...] = ((2, 4), (3, 1), (1, 5), (2, 3)), seed: int = 0) -> RolloutBatch:
    """Random (prompt, response) lengths over ids 2..15, with plausible fields of a scored rollout."""
    draw = torch.Generator().manual_seed(seed)
    ids = lambda n: torch.randint(2, 16, (n,), generator=draw).tolist()  # noqa: E731
    batch = pack([ids(p) for p, _ in lengths], [Completion(ids(r), [-1.0] * r, "length", 0) for _, r in lengths])
    total = batch.tokens.numel()
    noise = lambda: torch.where(batch.mask, torch.randn(total, generator=draw), 0.0)  # noqa: E731
    return batch.update(
        advantages=noise(), returns=noise(), values=noise(), ref_logprobs=noise() - 2, raw_reward=torch.ones(len(batch))
    )
