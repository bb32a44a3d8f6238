"""Rollout -> minibatches of one optimizer step each -> micro-batches of one forward and backward pass each.

A minibatch carries the counts its losses are divided by (selected tokens, sequences with at least one), taken before
it is cut further: however it is cut, the same numbers come out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from trainers.config import TrainerConfig
from trainers.optim import StepMetrics
from trainers.rollout import RolloutBatch, hash64


def minibatches(batch: RolloutBatch, size: int, *, seed: int, step: int, epoch: int) -> Iterator[RolloutBatch]:
    """Every sequence once, in an order that depends on (seed, step, epoch) alone. Those without a trained token are
    left out afterwards, and so are minibatches of them alone: an optimizer step on nothing would still move weights."""
    generator = torch.Generator().manual_seed(hash64(seed, step, epoch))
    trained = batch.trained_lengths > 0
    for rows in torch.randperm(len(batch), generator=generator).split(size):
        if len(rows := rows[trained[rows]]):
            yield count(batch.select(rows))
        else:
            batch.empty_minibatches += 1


def policy_minibatches(
    batch: RolloutBatch, config: TrainerConfig, done: Sequence[StepMetrics], *, step: int, epoch: int
) -> Iterator[RolloutBatch]:
    """Those that the policy is trained on: none before its first step, no more of a rollout once it has moved too far.
    `done` are the rollout's optimizer steps so far, as they come."""
    cfg, size = config.algorithm, config.policy.train_global_batch_size
    if step < cfg.policy_training_start_step:
        return
    for minibatch in minibatches(batch, size, seed=cfg.seed, step=step, epoch=epoch):
        if done and cfg.target_kl is not None:
            total, count = done[-1].sums["k3"].tolist()
            if total > cfg.target_kl * count:
                return
        yield minibatch


def micro_batches(minibatch: RolloutBatch, size: int) -> Iterator[RolloutBatch]:
    for rows in torch.arange(len(minibatch)).split(size):
        counts = {name: getattr(minibatch, name) for name in ("num_tokens", "num_seqs", "num_nll_tokens")}
        yield replace(minibatch.select(rows), **counts)


def count(batch: RolloutBatch) -> RolloutBatch:
    """The batch with the counts of one optimizer step over exactly these sequences."""
    lengths = batch.trained_lengths
    positive = lengths.new_zeros(()) if batch.raw_reward is None else lengths[batch.raw_reward > 0].sum()
    return replace(
        batch, num_tokens=int(lengths.sum()), num_seqs=int((lengths > 0).sum()), num_nll_tokens=int(positive)
    )
