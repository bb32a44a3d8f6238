"""fastppo.logprob over a vocabulary on two GPUs, NCCL between them, equals the unsharded op.

The cases are those of `test_vocab_parallel.py`: uneven, empty, padded and -inf shards, special values, each dtype.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fastppo import linear_logprob
from fastppo.testing import assert_bitwise_equal
from fastppo.vocab import VocabShard
from tests.collectives import Collectives
from tests.test_vocab_parallel import CASES, COMPILED, compiled_gradient, evaluate, problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs two CUDA devices, and torch sees {torch.cuda.device_count()}"
    ),
]

RANKS = 2


def to(device: str, x: Any) -> Any:
    if isinstance(x, dict):
        return {name: to(device, value) for name, value in x.items()}
    return x.to(device) if isinstance(x, torch.Tensor) else x


# (rows, vocabulary, hidden size, dtype) and the ranks' first columns and ends; the second has none in "one_rank".
LINEAR = {
    "float32": ((33, 50, 16, torch.float32), (0, 20, 50)),
    "bfloat16": ((300, 1000, 64, torch.bfloat16), (0, 400, 1000)),
    "one_rank": ((300, 1000, 64, torch.bfloat16), (0, 1000, 1000)),
}


def linear_problem(name: str) -> dict[str, torch.Tensor]:
    (rows, vocab, dim, dtype), _ = LINEAR[name]
    generator = torch.Generator().manual_seed(7)
    shapes = {"hidden": (rows, dim), "weight": (vocab, dim)}
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    made["upstream"] = torch.randn(2, rows, generator=generator)
    return made | {"targets": torch.randint(vocab, (rows,), generator=generator)}


def linear(case: dict[str, torch.Tensor], vocab: VocabShard | None, memory: Any = "auto") -> list[torch.Tensor]:
    """logprobs, entropy, dhidden and this rank's dweight."""
    weight = case["weight"] if vocab is None else case["weight"][vocab.start : vocab.end]
    leaves = [case["hidden"].clone().requires_grad_(), weight.clone().requires_grad_()]
    out = linear_logprob(*leaves, case["targets"], vocab=vocab, temperature=0.7, memory=memory)
    grads = torch.autograd.grad((out.logprobs, out.entropy), leaves, list(case["upstream"]))
    return [out.logprobs.detach(), out.entropy.detach(), *grads]


def worker(rank: int, folder: str) -> None:
    device = f"cuda:{rank}"
    torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    results: dict[str, Any] = {}
    for name, (vocab_size, _, columns, _) in CASES.items():
        start = sum(columns[RANKS][:rank])
        vocab = VocabShard(start, start + columns[RANKS][rank], group, vocab_size)
        case = to(device, problem(name))
        local = case["logits"][:, vocab.start : vocab.end]
        with Collectives() as collectives:
            results[name] = evaluate(local, case, vocab)
        results[name]["collectives"] = collectives.names
        if name in COMPILED:
            results[name]["compiled_grad"] = compiled_gradient(local, case, vocab)
    results = to("cpu", results)
    for name, (_, columns) in LINEAR.items():
        vocab = VocabShard(columns[rank], columns[rank + 1], group, columns[-1])
        for memory in ("save", "recompute"):
            results[name, memory] = [x.cpu() for x in linear(to(device, linear_problem(name)), vocab, memory)]
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("ranks"))
    context = mp.spawn(worker, args=(folder,), nprocs=RANKS, join=False)
    for _ in range(RANKS):
        if context.join(timeout=90):
            break
    else:
        for process in context.processes:
            process.kill()
        pytest.fail("the ranks did not finish")
    return [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_unsharded(ranks, name):
    case = to("cuda", problem(name))
    vocab_size = case["vocab_size"]
    whole = to("cpu", evaluate(case["logits"][:, :vocab_size], case, None))
    shards = [results[name] for results in ranks]
    tolerance = 1e-12 if name == "float64" else 1e-6

    def close(got, expected, scale=1.0):
        torch.testing.assert_close(got, expected, rtol=tolerance * scale, atol=tolerance * scale, equal_nan=True)

    for output in ("logprobs", "entropy"):
        if whole[output] is None:
            assert all(shard[output] is None for shard in shards)
            continue
        close(shards[0][output], whole[output])
        assert_bitwise_equal(f"{output} of the other rank", shards[1][output], shards[0][output])
    grad = torch.cat([shard["grad"] for shard in shards], -1)
    close(grad[:, :vocab_size], whole["grad"], 2**14 if name == "bfloat16" else 1.0)
    assert bool((grad[:, vocab_size:] == 0).all()), "padding has gradient 0"


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole_equals_eager(ranks, name):
    for results in ranks:
        torch.testing.assert_close(results[name]["compiled_grad"], results[name]["grad"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_exactly_one_collective_forward_and_none_backward(ranks, name):
    for results in ranks:
        assert results[name]["collectives"] == ([] if name == "no_rows" else ["all_gather_into_tensor"])


@pytest.mark.parametrize("memory", ["save", "recompute"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_logprob_over_two_ranks(ranks, name, memory):
    whole = [x.cpu() for x in linear(to("cuda", linear_problem(name)), None, memory)]
    first, second = (results[name, memory] for results in ranks)
    exact = {"rtol": 2e-6, "atol": 2e-6}
    products = exact if name == "float32" else {"rtol": 2**-7, "atol": 2e-3}
    for i, output in enumerate(("logprobs", "entropy", "dhidden")):
        torch.testing.assert_close(first[i], whole[i], **(products if output == "dhidden" else exact))
        assert_bitwise_equal(f"{output} of the other rank", second[i], first[i])
    torch.testing.assert_close(torch.cat((first[3], second[3])), whole[3], **products)
