"""linear_logprob over a vocabulary on two or more GPUs of a host, beside what it is made of: a rank's bare products,
the sum of dhidden over ranks alone, and `save` with that sum begun only after the last product (no overlap). Device
time, the slowest rank's, median of 11 calls.

    python benchmarks/run_ranks.py
"""

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fastppo import VocabShard, linear_logprob
from fastppo.ops._linear import Reduction
from fastppo.vocab import waited

N, D, V = 8192, 4096, 151936
CALLS = 11


class AtTheEnd(Reduction):
    """The sum over ranks, begun when it is asked for."""

    def begin(self, dhidden: torch.Tensor) -> None:
        return None

    def result(self, dhidden: torch.Tensor) -> torch.Tensor:
        super().begin(dhidden)
        assert self.begun is not None
        return waited(self.begun)


def milliseconds(call: Callable[[], object]) -> float:
    """A call's time on the slowest rank: they start together."""
    times = []
    for _ in range(CALLS + 2):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        time = torch.tensor(begin.elapsed_time(end), device="cuda")
        dist.all_reduce(time, dist.ReduceOp.MAX)
        times.append(float(time))
    return sorted(times[2:])[CALLS // 2]


def worker(rank: int, ranks: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    width = V // ranks
    vocab = VocabShard(rank * width, (rank + 1) * width, dist.group.WORLD, V)
    hidden = torch.randn(N, D, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(width, D, device="cuda") / D**0.5).bfloat16().requires_grad_()
    targets = torch.randint(V, (N,), device="cuda")
    dist.broadcast(targets, 0)
    dhidden = torch.randn(N, D, device="cuda")

    def both(memory: str) -> Callable[[], object]:
        def call() -> object:
            out = linear_logprob(hidden, weight, targets, vocab=vocab, memory=memory)  # type: ignore[arg-type]
            return torch.autograd.grad(out.logprobs.sum() + 0.01 * out.entropy.sum(), (hidden, weight))

        return call

    def forward() -> object:
        with torch.no_grad():
            return linear_logprob(hidden, weight, targets, vocab=vocab)

    logits = torch.randn(N, width, device="cuda").bfloat16()
    h, w = hidden.detach(), weight.detach()
    products = [lambda: torch.mm(h, w.t()), lambda: torch.mm(logits, w), lambda: torch.mm(logits.t(), h)]
    one, two, three = (milliseconds(product) for product in products)
    rows = {
        "a rank's products: 1, 3, 4": f"{one:.2f}, {one + two + three:.2f}, {2 * one + two + three:.2f}",
        "sum of dhidden over ranks alone": f"{milliseconds(lambda: dist.all_reduce(dhidden)):.2f}",
        "forward": f"{milliseconds(forward):.2f}",
    }
    for memory in ("save", "recompute"):
        rows[f"{memory}, forward and backward"] = f"{milliseconds(both(memory)):.2f}"
    with mock.patch("fastppo.ops.linear_logprob.Reduction", AtTheEnd):
        rows["save, the sum after the last product"] = f"{milliseconds(both('save')):.2f}"
    if rank == 0:
        print(f"{ranks} x {torch.cuda.get_device_name()}, N x D x V = {N} x {D} x {V}, bfloat16, ms")
        for name, value in rows.items():
            print(f"{name:42} {value}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = torch.cuda.device_count()
    if ranks < 2 or V % ranks:
        sys.exit(f"needs two or more GPUs, as many as divide {V} columns; torch sees {ranks}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(ranks, folder), nprocs=ranks)
