"""Rollout -> minibatches of one optimizer step each -> micro-batches of one forward and backward pass each.

A minibatch carries the counts its losses are divided by (selected tokens, sequences with at least one), taken before
it is cut further: however it is cut, the same numbers come out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from trainers.config import PPOTrainerConfig
from trainers.optim import StepMetrics
from trainers.rollout import RolloutBatch, hash64


def minibatches(batch: RolloutBatch, size: int, *, seed: int, step: int, epoch: int) -> Iterator[RolloutBatch]:
    """Every sequence once, in an order that depends on (seed, step, epoch) alone."""
    generator = torch.Generator().manual_seed(hash64(seed, step, epoch))
    for rows in torch.randperm(len(batch), generator=generator).split(size):
        yield count(batch.select(rows))


def policy_minibatches(
    batch: RolloutBatch, config: PPOTrainerConfig, done: Sequence[StepMetrics], *, step: int, epoch: int
) -> Iterator[RolloutBatch]:
    """Those that the policy is trained on: none before its first step, no more of a rollout once it has moved too far.
    `done` are the rollout's optimizer steps so far, as they come."""
    ppo, size = config.ppo, config.policy.train_global_batch_size
    if step < ppo.policy_training_start_step:
        return
    for minibatch in minibatches(batch, size, seed=ppo.seed, step=step, epoch=epoch):
        if done and ppo.target_kl is not None:
            total, count = done[-1].sums["k3"].tolist()
            if total > ppo.target_kl * count:
                return
        yield minibatch


def micro_batches(minibatch: RolloutBatch, size: int) -> Iterator[RolloutBatch]:
    for rows in torch.arange(len(minibatch)).split(size):
        yield replace(minibatch.select(rows), num_tokens=minibatch.num_tokens, num_seqs=minibatch.num_seqs)


def count(batch: RolloutBatch) -> RolloutBatch:
    """The batch with the counts of one optimizer step over exactly these sequences."""
    per_sequence = torch.zeros(len(batch), dtype=torch.int64).index_add(0, batch.sequence_ids, batch.mask.long())
    return replace(batch, num_tokens=int(per_sequence.sum()), num_seqs=int((per_sequence > 0).sum()))
