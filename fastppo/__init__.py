"""Fused ops for PPO-style training of language models: fast, exact about masks, usable from any trainer."""

from fastppo import _build
from fastppo.metrics import PPO_METRICS, VALUE_METRICS, summarize
from fastppo.ops._loss import LossOutput
from fastppo.ops.advantages import group_advantages, rloo, whiten
from fastppo.ops.gae import GAEOutput, gae
from fastppo.ops.linear_logprob import linear_logprob
from fastppo.ops.linear_loss import LinearLossOutput, linear_loss
from fastppo.ops.linear_ppo_loss import linear_ppo_loss
from fastppo.ops.logprob import LogprobOutput, logprob
from fastppo.ops.ppo_loss import kl_divergence, ppo_loss
from fastppo.ops.value_loss import value_loss
from fastppo.vocab import VocabShard

__version__ = "0.1.0"

__all__ = [
    "PPO_METRICS",
    "VALUE_METRICS",
    "GAEOutput",
    "LinearLossOutput",
    "LogprobOutput",
    "LossOutput",
    "VocabShard",
    "__version__",
    "gae",
    "group_advantages",
    "kl_divergence",
    "linear_logprob",
    "linear_loss",
    "linear_ppo_loss",
    "logprob",
    "ppo_loss",
    "rloo",
    "summarize",
    "value_loss",
    "whiten",
]

_build.warn_if_missing()
