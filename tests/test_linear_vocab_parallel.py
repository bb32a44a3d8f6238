"""The linear ops over a sharded vocabulary equal the unsharded ones: gloo, groups of 1, 2 and 4 ranks in one spawn.

The ranks run every case and save what they got; the tests below read it. A rank's shard is its rows of one weight that
every process derives from the same seed.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fastppo import VocabShard, linear_logprob, linear_loss, linear_ppo_loss
from fastppo.ops import _linear
from fastppo.ops import _linear_logprob_ops as linear_logprob_ops
from fastppo.testing import assert_bitwise_equal, make_loss_inputs
from tests.collectives import Collectives
from tests.linear import HeadInputs, make_head

SIZES = (1, 2, 4)
WORLD = 4
LENGTHS = [5, 1, 6]
T = sum(LENGTHS)

# name -> (vocab_size, rows of weight held, rows per rank by group size). Rows beyond vocab_size are padding.
SHARDS: dict[str, tuple[int, int, dict[int, list[int]]]] = {
    "even": (32, 32, {1: [32], 2: [16, 16], 4: [8, 8, 8, 8]}),
    "uneven": (37, 37, {1: [37], 2: [30, 7], 4: [1, 20, 3, 13]}),
    "empty_shard": (37, 37, {1: [37], 2: [37, 0], 4: [0, 20, 0, 17]}),
    "padded": (37, 44, {1: [44], 2: [22, 22], 4: [11, 11, 11, 11]}),
    "padding_only_shard": (30, 48, {1: [48], 2: [32, 16], 4: [12, 12, 12, 12]}),
}
PER_TOKEN = torch.linspace(0.5, 2.0, T)
# op, options -> on every kind of shard
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "save": ("logprob", {"memory": "save"}),
    "recompute": ("logprob", {"memory": "recompute", "softcap": 5.0, "temperature": PER_TOKEN}),
    "columns": ("logprob", {"memory": "recompute", "softcap": 5.0, "temperature": PER_TOKEN}),
    "columns_reduce_scatter": ("logprob", {"memory": "recompute", "reduce_dhidden": "reduce_scatter"}),
    "without_entropy": ("logprob", {"with_entropy": False}),
    "none": ("logprob", {"reduce_dhidden": "none"}),
    "reduce_scatter": ("logprob", {"reduce_dhidden": "reduce_scatter"}),
    "bfloat16": ("logprob", {}),
    "float64": ("logprob", {}),
    "into": ("logprob", {"weight_grad_into": True}),
    "frozen_hidden": ("logprob", {}),
    "no_rows": ("logprob", {}),
    "loss": ("loss", {"chunk_tokens": 5}),
    "ppo": ("ppo", {"ent_coef": 0.1}),
    "ppo_chunks": ("ppo", {"chunk_tokens": 4, "temperature": 0.7}),
    "ppo_default_chunks": ("ppo", {}),
    "ppo_off": ("ppo", {"compact": "off", "ent_coef": 0.1}),
    "ppo_sequences": ("ppo", {"loss_type": "gspo", "chunk_tokens": 4}),
    "ppo_reduce_scatter": ("ppo", {"reduce_dhidden": "reduce_scatter", "chunk_tokens": 5}),
    "ppo_into": ("ppo", {"weight_grad_into": True}),
}
NAMES = ("logprobs", "entropy", "loss", "metrics", "dhidden", "dweight", "dbias")


def problem(shards: str, case: str) -> tuple[HeadInputs, torch.Tensor]:
    """The whole head and the upstream gradients; padding rows of weight and bias hold garbage."""
    vocab_size, rows, _ = SHARDS[shards]
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(case, torch.float32)
    head = make_head(0 if case == "no_rows" else T, rows, dtype=dtype, seed=rows)
    head.targets.remainder_(vocab_size)
    head.weight[vocab_size:] = 1e4
    head.bias[vocab_size:] = float("nan")
    if len(head.targets):
        head.targets[3] = -100
    return head, torch.randn(2, len(head.targets), generator=torch.Generator().manual_seed(5))


def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, rows: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    return (rows["a"] * logprobs.square() - 0.2 * entropy).sum() / 7, torch.stack([logprobs.sum(), entropy.sum()])


def evaluate(
    shards: str, case: str, vocab: VocabShard | None, rank: int = 0, size: int = 1, record: Any = ()
) -> dict[str, Any]:
    head, upstream = problem(shards, case)
    op, options = CASES[case][0], dict(CASES[case][1])
    start, end = (0, SHARDS[shards][0]) if vocab is None else (vocab.start, vocab.end)
    hidden, weight, bias = head.hidden, head.weight[start:end], head.bias[start:end]
    if vocab is None:
        options.pop("reduce_dhidden", None)
    elif options.get("reduce_dhidden") == "reduce_scatter":
        hidden = hidden.chunk(size)[rank]
    hidden, weight, bias = (x.clone().requires_grad_() for x in (hidden, weight, bias))
    if case == "frozen_hidden":
        hidden.requires_grad_(False)
    into = torch.zeros(weight.shape) if options.pop("weight_grad_into", False) else None
    options |= {"vocab": vocab, "bias": bias, "weight_grad_into": into}
    x = make_loss_inputs(LENGTHS)
    result: dict[str, Any] = {}
    if op == "logprob":
        out = linear_logprob(hidden, weight, head.targets, **options)
        result["forward"] = len(record)
        outputs = [o for o in out if o is not None]
        torch.autograd.backward(outputs, [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=False)])
    else:
        if op == "loss":
            out = linear_loss(hidden, weight, head.targets, loss_fn, rows={"a": x.values}, mask=x.mask, **options)
        else:
            out = linear_ppo_loss(
                hidden,
                weight,
                head.targets,
                x.old_logprobs,
                x.advantages,
                mask=x.mask,
                cu_seqlens=x.cu_seqlens,
                **options,
            )
        result["forward"] = len(record)
        (out.loss * 1.5).backward()
        result |= {"loss": out.loss.detach(), "metrics": out.metrics}
    return result | {
        "logprobs": out.logprobs.detach(),
        "entropy": None if out.entropy is None else out.entropy.detach(),
        "dhidden": hidden.grad,
        "dweight": weight.grad if into is None else into,
        "weight.grad": weight.grad,
        "dbias": bias.grad,
        "collectives": list(record),
    }


def errors(rank: int, size: int, group: Any) -> dict[str, str]:
    """What a rank's mistakes raise; none may reach a collective, or the other ranks would hang."""
    vocab = VocabShard(8 // size * rank, 8 // size * (rank + 1), group, 7)
    head = make_head(4, 8 // size)
    head.targets.remainder_(7)
    wrong: dict[str, Any] = {
        "full_width": lambda: linear_logprob(head.hidden, torch.zeros(8, 8), head.targets, vocab=vocab),
        "padding_target": lambda: linear_logprob(*head[:2], torch.full((4,), 7), vocab=vocab),
        "share": lambda: linear_logprob(*head[:2], head.targets, vocab=vocab, reduce_dhidden="reduce_scatter"),
    }
    caught = {}
    for name, call in wrong.items():
        try:
            call()
        except (ValueError, IndexError) as error:
            caught[name] = f"{type(error).__name__}: {error}"
    return caught


def compiled(vocab: VocabShard) -> dict[str, tuple[torch.Tensor, ...]]:
    """Gradients of hidden and weight, eager and by torch.compile(fullgraph=True)."""
    head, _ = problem("even", "save")

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = linear_logprob(hidden, weight, head.targets, vocab=vocab, softcap=5.0)
        return out.logprobs.sum() + out.entropy.square().sum()

    calls = {"eager": loss, "compiled": torch.compile(loss, fullgraph=True, backend="aot_eager")}
    results = {}
    for name, call in calls.items():
        leaves = [x.clone().requires_grad_() for x in (head.hidden, head.weight[vocab.start : vocab.end])]
        results[name] = torch.autograd.grad(call(*leaves), leaves)
    return results


def columns_of_three(*_: Any) -> _linear.Plan:
    return _linear.Plan(rows=5, columns=3)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30))
    results: dict[Any, Any] = {}
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=30))
    if rank < 2:
        results["compile"] = compiled(VocabShard(16 * rank, 16 * (rank + 1), pair, 32))
    usual = _linear.CHUNK_ROWS, _linear.CHUNK_LOGITS_CPU
    for size in SIZES:
        group = dist.new_group(list(range(size)), timeout=timedelta(seconds=30))
        if rank >= size:
            continue
        uncut = linear_logprob_ops.plan_of
        for shards, (vocab_size, _, rows) in SHARDS.items():
            start = sum(rows[size][:rank])
            vocab = VocabShard(start, start + rows[size][rank], group, vocab_size)
            for case in CASES:
                # Default chunks of a few rows, by the size of the vocabulary: ranks with uneven shards must agree.
                small = case == "ppo_default_chunks"
                _linear.CHUNK_ROWS, _linear.CHUNK_LOGITS_CPU = (1, 16) if small else usual
                # Chunks of columns, as on a GPU: a rank has one, several, or none.
                linear_logprob_ops.plan_of = columns_of_three if case.startswith("columns") else uncut
                with Collectives() as collectives:
                    results[size, shards, case] = evaluate(shards, case, vocab, rank, size, collectives.names)
                # Where no mode watches, dhidden's sum begins before the last product.
                results[size, shards, case]["unwatched"] = evaluate(shards, case, vocab, rank, size)["dhidden"]
        if size > 1:
            results[size, "errors"] = errors(rank, size, group)
    torch.save(results, os.path.join(folder, f"rank{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = str(tmp_path_factory.mktemp("ranks"))
    context = mp.start_processes(worker, args=(folder,), nprocs=WORLD, join=False, start_method="forkserver")
    for _ in range(WORLD):
        if context.join(timeout=90):
            break
    else:
        for process in context.processes:
            process.kill()
        pytest.fail("the ranks did not finish")
    return [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.mark.filterwarnings("ignore:a sequence is longer")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shards", SHARDS)
def test_sharded_equals_unsharded(ranks, shards, case, size):
    vocab_size = SHARDS[shards][0]
    whole = evaluate(shards, case, None)
    parts = [ranks[rank][size, shards, case] for rank in range(size)]
    # float32 rounding of sums of products of size 10; bfloat16 is rounded once a rank, and its logits once.
    tolerance = {"float64": 1e-12, "bfloat16": 2**-6}.get(case, 1e-5)

    def close(name, got, expected):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")

    for name in ("logprobs", "entropy", "loss", "metrics"):
        if whole.get(name) is None:
            assert all(part.get(name) is None for part in parts)
            continue
        close(name, parts[0][name], whole[name])
        for part in parts[1:]:
            assert_bitwise_equal(f"{name} of another rank", part[name], parts[0][name])

    if case == "frozen_hidden":
        assert all(part["dhidden"] is None for part in parts)
    elif "reduce_scatter" in case:
        close("dhidden", torch.cat([part["dhidden"] for part in parts]), whole["dhidden"])
    elif case == "none":
        close("dhidden", sum(part["dhidden"] for part in parts), whole["dhidden"])
    else:
        for part in parts:
            close("dhidden", part["dhidden"], whole["dhidden"])
            assert_bitwise_equal("dhidden of another rank", part["dhidden"], parts[0]["dhidden"])
    for name in ("dweight", "dbias"):
        got = torch.cat([part[name] for part in parts])
        close(name, got[:vocab_size], whole[name])
        assert bool((got[vocab_size:] == 0).all()), f"padding has {name} 0"
    if "into" in case:
        assert all(part["weight.grad"] is None for part in parts)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shards", SHARDS)
def test_the_overlapped_sum_is_the_same(ranks, shards, case, size):
    for rank in range(size):
        got = ranks[rank][size, shards, case]
        if got["dhidden"] is None:
            assert got["unwatched"] is None
        else:
            assert_bitwise_equal("dhidden", got["unwatched"], got["dhidden"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_collectives(ranks, case, size):
    """Forward: one all-gather of the statistics (one a chunk of linear_loss). Backward: one reduction of dhidden."""
    x, (head, _) = make_loss_inputs(LENGTHS), problem("even", case)
    chunks = 1
    if CASES[case][0] != "logprob":
        counted = int((x.mask & (head.targets != -100)).sum())
        chunks = -(-counted // CASES[case][1].get("chunk_tokens", T))
    forward, backward = ["all_gather_into_tensor"] * chunks, ["all_reduce"]
    if "reduce_scatter" in case:
        forward, backward = ["all_gather_into_tensor", *forward], ["reduce_scatter_tensor"]
    if case in ("none", "frozen_hidden"):
        backward = []
    if size == 1 or case == "no_rows":
        forward = backward = []
    for shards in SHARDS:
        for rank in range(size):
            got = ranks[rank][size, shards, case]
            if case == "ppo_default_chunks" and size > 1:
                forward = ["all_gather_into_tensor"] * ranks[0][size, shards, case]["forward"]
                assert len(forward) > 1
            assert got["collectives"][: got["forward"]] == forward
            assert got["collectives"][got["forward"] :] == backward


@pytest.mark.parametrize("size", [2, 4])
def test_errors_before_the_collective(ranks, size):
    for rank in range(size):
        caught = ranks[rank][size, "errors"]
        assert caught["full_width"].startswith(f"ValueError: weight must have the {8 // size} rows of vocab")
        assert caught["padding_target"].startswith("IndexError: targets must be in [0, 7)")
        assert caught["share"].startswith("ValueError: targets must have the shape of all ranks' hidden")
        assert caught["share"].endswith(f"[{4 * size}], got [4]")


def test_compiled_whole_equals_eager(ranks):
    for rank in (0, 1):
        for name, got, expected in zip(("dhidden", "dweight"), *ranks[rank]["compile"].values(), strict=True):
            assert_bitwise_equal(name, got, expected)
            assert bool((expected != 0).any())


def test_one_process_without_a_group():
    """The padding of a head that no rank shares."""
    head = make_head(5, 12)
    head.targets.remainder_(10)
    padded = linear_logprob(*head[:2], head.targets, bias=head.bias, vocab=VocabShard(0, 12, None, 10))
    plain = linear_logprob(head.hidden, head.weight[:10], head.targets, bias=head.bias[:10])
    assert_bitwise_equal("logprobs", padded.logprobs, plain.logprobs)
    assert_bitwise_equal("entropy", padded.entropy, plain.entropy)
