"""Several ranks under torchrun: every rank runs the same trainer, and these functions are where they meet.

    torchrun --nproc-per-node 2 -m trainers.ppo ...

A rollout is cut into parts: each rank samples, rewards and scores its own, and all ranks then hold the whole of it, so
that advantages, minibatches and filters are computed everywhere alike. Of a minibatch each rank trains a part; losses
arrive divided by the whole minibatch's counts, so gradients and metrics are summed. Without torchrun there is one rank,
and everything here returns what it was given.

Where a model is spread over several ranks (tensor, pipeline, context parallel), those compute the same sequences: they
are one data-parallel rank, `replica()` of `replicas()`, and what is summed is summed over `data_group()`. Sampling and
rewards are still cut over all ranks.
"""

import os
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from trainers.batch_plan import launched_ranks
from trainers.config import ClusterConfig

T = TypeVar("T")
ROLL_CALL_S = 3.0  # how long the others wait to learn which of them is gone
_data_group: Any = None  # None: every rank has a whole model, and all are data parallel


class RankLost(RuntimeError):
    """Another rank has ended, or did not answer in time."""


def start(cluster: ClusterConfig) -> None:
    """Join the other ranks, if torchrun started this process; before the first call of any other function here."""
    if launched_ranks() == 1 or torch_dist.is_initialized():
        return
    if cluster.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    timeout, attempt = timedelta(seconds=cluster.rank_timeout_s), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        torch_dist.init_process_group(backend, timeout=timeout)
        return
    # torchrun keeps its store over restarts, in which a rank would find the addresses of those that have died.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and os.environ["RANK"] == "0"
    store = torch_dist.TCPStore(address, port, launched_ranks(), hosts, timeout)
    torch_dist.init_process_group(
        backend,
        store=torch_dist.PrefixStore(f"attempt_{attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=launched_ranks(),
        timeout=timeout,
    )


def stop() -> None:
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def rank() -> int:
    return torch_dist.get_rank() if torch_dist.is_initialized() else 0


def size() -> int:
    return torch_dist.get_world_size() if torch_dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this rank writes files and speaks."""
    return rank() == 0


def spread_model(data_group: Any) -> None:
    """From now on a model lies on several ranks, and `data_group` is the process group of this rank's likes in all
    copies of it; None: every rank has a whole model again."""
    global _data_group
    _data_group = data_group


def data_group() -> Any:
    """The process group over which gradients and metrics are summed; None: that of all ranks."""
    return _data_group


def replica() -> int:
    """The data-parallel rank: which copy of the model this rank has a part of."""
    return torch_dist.get_rank(_data_group) if torch_dist.is_initialized() else 0


def replicas() -> int:
    """The data-parallel size: how many copies of the model there are."""
    return torch_dist.get_world_size(_data_group) if torch_dist.is_initialized() else 1


def part(items: Sequence[T]) -> Sequence[T]:
    """This rank's run of `items`; the runs of all ranks in order are the whole."""
    ranks = size()
    return items[rank() * len(items) // ranks : (rank() + 1) * len(items) // ranks]


def balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `weights` in `parts` lists of nearly equal total weight: heaviest first, each to the lightest list."""
    lists: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        lightest = min(range(parts), key=lambda i: (totals[i], len(lists[i]), i))
        lists[lightest].append(index)
        totals[lightest] += weights[index]
    return [sorted(indices) for indices in lists]


def rows(weights: Tensor) -> list[int]:
    """The rows of a batch that are this rank's to compute, by their weights [B], such as numbers of tokens."""
    return balanced(weights.tolist(), replicas())[replica()]


def imbalance(weights: Tensor) -> float:
    """The heaviest rank's total over the mean, 1 if all are equal."""
    values = weights.tolist()
    totals = [sum(values[i] for i in indices) for indices in balanced(values, replicas())]
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0


def gather(mine: T, group: Any = None) -> list[T]:
    """Every rank's object, on every rank, in the order of ranks; of a process group's ranks alone if one is given."""
    if size() == 1:
        return [mine]
    everyone: list[Any] = [None] * torch_dist.get_world_size(group)
    try:
        torch_dist.all_gather_object(everyone, mine, group=group)
    except RuntimeError as error:  # a closed connection or a timeout, in each backend's own words
        if lost := _roll_call():
            ranks = f"rank {lost[0]} has" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} have"
            raise RankLost(
                f"{ranks} ended, or did not come to a meeting of all ranks within cluster.rank_timeout_s"
            ) from error
        raise
    return everyone


def _roll_call() -> list[int]:
    """The ranks that do not report, by the store through which all of them once found each other, soon after this one
    has found that something is wrong. None if the store is gone too."""
    key = "fastppo/waiting/{}".format
    try:
        store = torch_dist.distributed_c10d._get_default_store()
        store.set(key(rank()), b"1")
        until = time.monotonic() + ROLL_CALL_S
        while missing := [other for other in range(size()) if not store.check([key(other)])]:
            if time.monotonic() > until:
                return missing
            time.sleep(0.05)
    except RuntimeError:
        pass
    return []


def together(compute: Callable[[], T], group: Any = None) -> list[T]:
    """Every rank's result. If `compute` raises on any rank, such an error is raised on all, so that none waits."""
    if size() == 1:
        return [compute()]
    result: Any = None
    error: Exception | None = None
    try:
        result = compute()
    except Exception as raised:
        error = raised
    try:
        everyone = [pickle.loads(sent) for sent in gather(_pickled(result, error), group)]
    except Exception as parted:
        if error is not None:  # why this rank left a meeting in which the others may still be
            raise error from parted
        raise
    if error is not None:
        raise error
    for other, (_, theirs) in enumerate(everyone):
        if theirs is not None:
            if hasattr(theirs, "add_note"):  # Python 3.11
                theirs.add_note(f"on rank {other}")
            raise theirs
    return [value for value, _ in everyone]


def _pickled(result: Any, error: Exception | None) -> bytes:
    """What cannot travel to the other ranks becomes an error that can: none of them may be left waiting."""
    try:
        return pickle.dumps((result, error))
    except Exception as problem:
        what = f"{type(error).__name__}: {error}" if error is not None else f"its result cannot be sent: {problem}"
        return pickle.dumps((None, RuntimeError(f"rank {rank()}: {what}")))


def main_does(compute: Callable[[], T]) -> T:
    """The result of the main rank, which alone computes it; an error of its is raised on all ranks."""
    return together(lambda: compute() if is_main() else None)[0]  # type: ignore[return-value]


def agree(*flags: bool) -> tuple[bool, ...]:
    """Each flag as any rank has it."""
    return tuple(map(any, zip(*gather(flags), strict=True)))


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add the gradients of the copies of the model, in place. A rank without a gradient (none of its rows was trained)
    has zeros."""
    if replicas() == 1:
        return
    if not (trained := list(parameters)):
        return
    has = torch.tensor([p.grad is not None for p in trained], dtype=torch.int64, device=trained[0].device)
    torch_dist.all_reduce(has, op=torch_dist.ReduceOp.MAX, group=_data_group)
    used = [p for p, any_rank in zip(trained, has.tolist(), strict=True) if any_rank]
    for bucket in buckets(used, 64 * 2**20):
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
        torch_dist.all_reduce(flat, group=_data_group)
        for parameter, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = total.view_as(parameter).clone()


def buckets(parameters: Sequence[nn.Parameter], size_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters in order, those of one dtype together until `size_bytes` are full."""
    lists: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        bytes_ = parameter.numel() * parameter.element_size()
        if not lists or lists[-1][-1].dtype != parameter.dtype or filled + bytes_ > size_bytes:
            lists.append([])
            filled = 0
        lists[-1].append(parameter)
        filled += bytes_
    return lists


def sum_metrics(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Metric vectors of an optimizer step, of all ranks: sums; maxima where the name ends in _max. A rank may have had
    none."""
    if replicas() == 1:
        return sums
    total: dict[str, Tensor] = {}
    for theirs in gather({name: value.cpu() for name, value in sums.items()}, _data_group):
        for name, value in theirs.items():
            combine = torch.maximum if name.endswith("_max") else torch.add
            total[name] = combine(total[name], value) if name in total else value
    return total
