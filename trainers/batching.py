"""Rollout -> minibatches of one optimizer step each, this rank's part of them -> micro-batches of one pass each.

A minibatch carries the counts its losses are divided by (selected tokens, sequences with at least one), taken before
it is cut further: however it is cut, the same numbers come out.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from trainers import dist
from trainers.config import TrainerConfig
from trainers.optim import StepMetrics
from trainers.rollout import RolloutBatch, hash64


def minibatches(
    batch: RolloutBatch, size: int, *, seed: int, step: int, epoch: int, whole: bool = False
) -> Iterator[RolloutBatch]:
    """This rank's part of each, or with `whole` all of it.

    Every sequence once, in an order that depends on (seed, step, epoch) alone. Those without a trained token are left
    out afterwards, and so are minibatches of them alone: an optimizer step on nothing would still move weights.
    """
    generator = torch.Generator().manual_seed(hash64(seed, step, epoch))
    trained = batch.trained_lengths > 0
    for rows in torch.randperm(len(batch), generator=generator).split(size):
        if len(rows := rows[trained[rows]]):
            minibatch = count(batch.select(rows))
            if dist.replicas() > 1 and not whole:
                batch.rank_imbalance.append(dist.imbalance(minibatch.lengths))
                minibatch = part_of(minibatch, torch.tensor(dist.rows(minibatch.lengths), dtype=torch.int64))
            yield minibatch
        else:
            batch.empty_minibatches += 1


def part_of(minibatch: RolloutBatch, rows: Tensor) -> RolloutBatch:
    """Some sequences of an optimizer step, with the counts of the whole."""
    counts = {name: getattr(minibatch, name) for name in ("num_tokens", "num_seqs", "num_nll_tokens")}
    return replace(minibatch.select(rows), **counts)


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


def split(
    batch: RolloutBatch, rows: int, max_tokens: int | None = None, packing: bool = False, *, by_length: bool = False
) -> list[Tensor]:
    """The sequences of each micro-batch: `rows` of them, in order or the longest first, or as many as fit into
    `max_tokens`.

    Those are taken from the longest to the shortest, so that little is padded, and what counts is what the model sees:
    with `packing` the tokens, else sequences x the longest one.

    Raises:
        ValueError: a sequence of more than `max_tokens`.
    """
    if not len(batch):  # a rank without a sequence of this minibatch
        return []
    if max_tokens is None:
        order = torch.argsort(batch.lengths, descending=True, stable=True) if by_length else torch.arange(len(batch))
        return list(order.split(rows))
    lengths = batch.lengths.tolist()
    order = sorted(range(len(batch)), key=lambda row: -lengths[row])
    if lengths and lengths[order[0]] > max_tokens:
        raise ValueError(f"max_tokens_per_micro_batch={max_tokens}: a sequence has {lengths[order[0]]} tokens")
    parts: list[list[int]] = []
    filled = max_tokens
    for row in order:
        cost = lengths[row] if packing or not parts else lengths[parts[-1][0]]
        if filled + cost > max_tokens:
            parts.append([])
            filled, cost = 0, lengths[row]
        parts[-1].append(row)
        filled += cost
    return [torch.tensor(part) for part in parts]


def micro_batches(
    minibatch: RolloutBatch,
    rows: int,
    max_tokens: int | None = None,
    packing: bool = False,
    *,
    lockstep: bool = False,
    by_length: bool = False,
) -> Iterator[RolloutBatch]:
    """The parts of one optimizer step, each with the counts of the whole; see split().

    lockstep: as many on every rank, for a model whose passes are collective; a rank with fewer goes on with `idle()`.
    """
    parts = split(minibatch, rows, max_tokens, packing, by_length=by_length)
    idles = missing(len(parts)) if lockstep else 0  # asked before the first pass, which is a meeting of its own
    for part in parts:
        yield part_of(minibatch, part)
    for _ in range(idles):
        yield idle(minibatch)


def missing(passes: int) -> int:
    """By how many passes another rank has more than this one."""
    return max(dist.gather(passes)) - passes


def idle(minibatch: RolloutBatch) -> RolloutBatch:
    """One sequence of two tokens, neither of them trained, with the counts of `minibatch`: its loss and its gradients
    are 0, but the pass is made."""
    size = {"token": 2, "sequence": 1}
    empty = {
        field.name: value.new_zeros(size[field.metadata["per"]], *value.shape[1:])
        for field in fields(RolloutBatch)
        if "per" in field.metadata and (value := getattr(minibatch, field.name)) is not None
    }
    cu_seqlens = torch.tensor([0, 2])
    return replace(minibatch, cu_seqlens=cu_seqlens, samples=[], greedy=None, metrics={}, rank_imbalance=[], **empty)


def score_parts(
    batch: RolloutBatch,
    parts: Sequence[Tensor],
    score: Callable[[RolloutBatch], dict[str, Tensor]],
    *,
    lockstep: bool = False,
) -> dict[str, Tensor]:
    """What `score` finds for each part, [T, ...] or [B, ...] as the fields of a batch are, in the batch's own order.

    The parts are spread over the data-parallel ranks by their tokens, and every rank gets the whole. Only the trunk's
    output, which is as large as all else together, does not travel: with several ranks training computes it again.
    lockstep: see micro_batches().
    """
    return score_together(batch, parts, lambda mine: [score(part) for part in mine], lockstep=lockstep)


def score_together(
    batch: RolloutBatch,
    parts: Sequence[Tensor],
    score: Callable[[Iterable[RolloutBatch]], list[dict[str, Tensor]]],
    *,
    lockstep: bool = False,
) -> dict[str, Tensor]:
    """score_parts() where `score` takes all the parts of a rank at once, as a pipeline does."""
    mine = dist.rows(torch.tensor([int(batch.lengths[rows].sum()) for rows in parts], dtype=torch.int64))
    idles = missing(len(mine)) if lockstep else 0  # asked before the first pass, which may be a meeting of its own
    passes = itertools.chain((batch.select(parts[i]) for i in mine), itertools.repeat(idle(batch), idles))
    found = list(zip(mine, score(passes), strict=False))
    if dist.replicas() > 1:
        found = [(i, {name: x for name, x in each.items() if name != "trunk_hidden"}) for i, each in found]
    per = {field.name: field.metadata.get("per") for field in fields(RolloutBatch)}
    size = {"token": batch.tokens.numel(), "sequence": len(batch)}
    out: dict[str, Tensor] = {}
    for i, each in (pair for pairs in dist.gather(found, dist.data_group()) for pair in pairs):
        place = {"token": batch.tokens_of(parts[i]), "sequence": parts[i]}
        for name, value in each.items():
            if name not in out:
                out[name] = value.new_empty(size[per[name]], *value.shape[1:])
            out[name][place[per[name]]] = value
    return out


def count(batch: RolloutBatch) -> RolloutBatch:
    """The batch with the counts of one optimizer step over exactly these sequences."""
    lengths = batch.trained_lengths
    positive = lengths.new_zeros(()) if batch.raw_reward is None else lengths[batch.raw_reward > 0].sum()
    return replace(
        batch, num_tokens=int(lengths.sum()), num_seqs=int((lengths > 0).sum()), num_nll_tokens=int(positive)
    )
