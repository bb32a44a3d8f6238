"""fastppo.logprob over a sharded vocabulary equals the unsharded op: gloo, groups of 1, 2 and 4 ranks in one spawn.

The ranks run every case and save what they got; the tests below read it. A case's shards are this rank's columns of one
matrix of logits that every process derives from the same seed.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from fastppo.ops.advantages import whiten
from fastppo.ops.logprob import logprob
from fastppo.testing import assert_bitwise_equal, make_logits, make_targets
from fastppo.vocab import VocabShard, combine_stats
from tests.collectives import Collectives

SIZES = (1, 2, 4)
WORLD = 4
INF, NAN = float("inf"), float("nan")

# name -> (vocab_size, width held, columns per rank by group size, options). Columns beyond vocab_size are padding.
CASES: dict[str, tuple[int, int, dict[int, list[int]], dict[str, Any]]] = {
    "even": (32, 32, {1: [32], 2: [16, 16], 4: [8, 8, 8, 8]}, {}),
    "uneven": (37, 37, {1: [37], 2: [30, 7], 4: [1, 20, 3, 13]}, {"softcap": 5.0, "temperature": 0.7}),
    "empty_shard": (37, 37, {1: [37], 2: [37, 0], 4: [0, 20, 0, 17]}, {}),
    "padded": (37, 44, {1: [44], 2: [22, 22], 4: [11, 11, 11, 11]}, {}),
    "padding_only_shard": (30, 48, {1: [48], 2: [32, 16], 4: [12, 12, 12, 12]}, {"temperature": "per_token"}),
    "minus_infinity_shard": (40, 40, {1: [40], 2: [20, 20], 4: [10, 10, 10, 10]}, {}),
    "without_entropy": (32, 32, {1: [32], 2: [16, 16], 4: [8, 8, 8, 8]}, {"with_entropy": False}),
    "bfloat16": (64, 64, {1: [64], 2: [32, 32], 4: [16, 16, 16, 16]}, {}),
    "float64": (32, 32, {1: [32], 2: [16, 16], 4: [8, 8, 8, 8]}, {}),
    "inplace": (32, 32, {1: [32], 2: [20, 12], 4: [8, 8, 8, 8]}, {"inplace_backward": True}),
    "no_rows": (32, 32, {1: [32], 2: [16, 16], 4: [8, 8, 8, 8]}, {}),
    "special": (16, 16, {1: [16], 2: [8, 8], 4: [4, 4, 4, 4]}, {}),
}
ROWS = 9
COMPILED = ("uneven", "padding_only_shard")


def problem(name: str) -> dict[str, Any]:
    """Logits over the whole held width, targets, upstream gradients and options of a case."""
    vocab_size, width, _, options = CASES[name]
    rows = 0 if name == "no_rows" else ROWS
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(name, torch.float32)
    logits = make_logits(rows, width, dtype=dtype, seed=len(name))
    if name == "minus_infinity_shard":
        logits[:, 20:] = -INF
        logits[0, :10] = -INF
    targets = make_targets(logits[:, :vocab_size], ignored=0.2) if rows else torch.zeros(0, dtype=torch.int64)
    if name == "special":
        logits[0, 3] = NAN
        logits[1, 9] = INF
        logits[2] = -INF
        logits[3, 5] = -INF
        logits[4] = NAN
        targets = torch.tensor([12, 2, 0, 5, -100, 9, 1, 15, 4])
        logits[1, 2] = 0.5
    logits[:, vocab_size:] = torch.tensor([1e4, NAN, -3.0, INF]).repeat(width)[: width - vocab_size].to(dtype)
    options = dict(options)
    if options.get("temperature") == "per_token":
        options["temperature"] = torch.linspace(0.5, 2.0, rows)
    generator = torch.Generator().manual_seed(5)
    upstream = torch.randn(2, rows, generator=generator)
    return {"logits": logits, "targets": targets, "upstream": upstream, "options": options, "vocab_size": vocab_size}


def evaluate(logits: torch.Tensor, case: dict[str, Any], vocab: VocabShard | None) -> dict[str, Any]:
    leaf = logits.clone().requires_grad_()
    options = dict(case["options"])
    if vocab is None:
        options.pop("inplace_backward", None)
    out = logprob(leaf * 1, case["targets"], vocab=vocab, **options)
    outputs = [x for x in out if x is not None]
    torch.autograd.backward(outputs, [u.to(x.dtype) for u, x in zip(case["upstream"], outputs, strict=False)])
    return {
        "logprobs": out.logprobs.detach(),
        "entropy": out.entropy if out.entropy is None else out.entropy.detach(),
        "grad": leaf.grad,
    }


def compiled_gradient(logits: torch.Tensor, case: dict[str, Any], vocab: VocabShard) -> torch.Tensor:
    """As `evaluate`, in one graph."""
    leaf = logits.clone().requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        out = logprob(x * 1, case["targets"], vocab=vocab, **case["options"])
        return (out.logprobs * case["upstream"][0] + out.entropy * case["upstream"][1]).sum()

    torch.compile(loss, fullgraph=True, backend="aot_eager")(leaf).backward()
    return leaf.grad


def errors(group: Any, start: int, end: int) -> dict[str, str]:
    """What a rank's mistakes raise; none may reach the collective, or the other ranks would hang."""
    caught = {}
    wrong = {
        "full_width": (torch.zeros(2, 8), torch.tensor([0, 1]), VocabShard(start, end, group, 8)),
        "padding_target": (torch.zeros(2, end - start), torch.tensor([0, 7]), VocabShard(start, end, group, 7)),
    }
    for name, (logits, targets, vocab) in wrong.items():
        try:
            logprob(logits, targets, vocab=vocab)
        except (ValueError, IndexError) as error:
            caught[name] = f"{type(error).__name__}: {error}"
    return caught


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30))
    results: dict[Any, Any] = {}
    for size in SIZES:
        group = dist.new_group(list(range(size)), timeout=timedelta(seconds=30))
        if rank >= size:
            continue
        for name, (vocab_size, _, columns, _) in CASES.items():
            start = sum(columns[size][:rank])
            vocab = VocabShard(start, start + columns[size][rank], group, vocab_size)
            case = problem(name)
            local = case["logits"][:, vocab.start : vocab.end]
            with Collectives() as collectives:
                results[size, name] = evaluate(local, case, vocab)
            results[size, name]["collectives"] = collectives.names
            if name in COMPILED:
                results[size, name]["compiled_grad"] = compiled_gradient(local, case, vocab)
        if size > 1:
            results[size, "errors"] = errors(group, 8 // size * rank, 8 // size * (rank + 1))
        x, mask = whiten_input()
        with Collectives() as collectives:
            results[size, "whiten"] = whiten(x.chunk(size)[rank], mask.chunk(size)[rank], group=group)
        results[size, "whiten_collectives"] = collectives.names
        results[size, "whiten_shifted"] = whiten(
            x.chunk(size)[rank], mask.chunk(size)[rank], group=group, shift_mean=False
        )
    results["whiten_default"] = whiten(x.chunk(WORLD)[rank], mask.chunk(WORLD)[rank])
    torch.save(results, os.path.join(folder, f"rank{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def whiten_input() -> tuple[torch.Tensor, torch.Tensor]:
    """The second quarter, hence one rank of four, has nothing selected; unselected elements are garbage."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, generator=generator) * 3 + 100
    mask = torch.rand(32, generator=generator) < 0.7
    mask[8:16] = False
    return torch.where(mask, x, NAN), mask


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = str(tmp_path_factory.mktemp("ranks"))
    context = mp.start_processes(worker, args=(folder,), nprocs=WORLD, join=False, start_method="forkserver")
    for _ in range(WORLD):
        if context.join(timeout=60):
            break
    else:
        for process in context.processes:
            process.kill()
        pytest.fail("the ranks did not finish")
    return [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_unsharded(ranks, size, name):
    case = problem(name)
    vocab_size = case["vocab_size"]
    whole = evaluate(case["logits"][:, :vocab_size], case, None)
    shards = [ranks[rank][size, name] for rank in range(size)]
    tolerance = {"float64": 1e-12}.get(name, 1e-6)

    def close(got, expected, scale=1.0):
        torch.testing.assert_close(got, expected, rtol=tolerance * scale, atol=tolerance * scale, equal_nan=True)

    for output in ("logprobs", "entropy"):
        if whole[output] is None:
            assert all(shard[output] is None for shard in shards)
            continue
        close(shards[0][output], whole[output])
        for shard in shards[1:]:
            assert_bitwise_equal(f"{output} of another rank", shard[output], shards[0][output])
    grad = torch.cat([shard["grad"] for shard in shards], -1)
    close(grad[:, :vocab_size], whole["grad"], 2**14 if name == "bfloat16" else 1.0)
    assert bool((grad[:, vocab_size:] == 0).all()), "padding has gradient 0"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole_equals_eager(ranks, size, name):
    for rank in range(size):
        result = ranks[rank][size, name]
        torch.testing.assert_close(result["compiled_grad"], result["grad"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_exactly_one_collective_forward_and_none_backward(ranks, size, name):
    expected = ["all_gather_into_tensor"] if size > 1 and name != "no_rows" else []
    for rank in range(size):
        assert ranks[rank][size, name]["collectives"] == expected


@pytest.mark.parametrize("size", [2, 4])
def test_errors_before_the_collective(ranks, size):
    for rank in range(size):
        caught = ranks[rank][size, "errors"]
        assert caught["full_width"].startswith(f"ValueError: logits must have the {8 // size} columns of vocab")
        assert caught["full_width"].endswith("got 8")
        assert caught["padding_target"].startswith("IndexError: targets must be in [0, 7)")


@pytest.mark.parametrize("size", SIZES)
def test_whiten_over_ranks(ranks, size):
    x, mask = whiten_input()
    kept = x[mask].double()
    for key, mean in (("whiten", 0.0), ("whiten_shifted", kept.mean())):
        expected = torch.zeros(32, dtype=torch.float64)
        expected[mask] = (kept - kept.mean()) / (kept.var(correction=0) + 1e-8).sqrt() + mean
        got = torch.cat([ranks[rank][size, key] for rank in range(size)])
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
    assert ranks[0][size, "whiten_collectives"] == ["allreduce_"] * 2
    if size == WORLD:
        assert_bitwise_equal(
            "default group", torch.cat([r["whiten_default"] for r in ranks]), torch.cat([r[4, "whiten"] for r in ranks])
        )


def test_a_target_that_no_rank_holds_is_nan():
    """What an accelerator gives, where targets are not looked at; and one rank's -inf target is no other's business."""
    logits, targets = torch.randn(2, 6), torch.tensor([9, 4])
    logits[1, 4] = -INF
    options = (None, 1.0, None, -100, True)
    shards = [torch.ops.fastppo.logprob_stats(logits[:, a : a + 3], targets, *options, a, 3, "auto") for a in (0, 3)]
    target_logits = combine_stats(torch.stack(shards), 1.0)[:, 3].tolist()
    assert target_logits[0] != target_logits[0] and target_logits[1] == -INF


def test_one_process_without_a_group():
    logits = torch.randn(5, 12)
    targets = make_targets(logits[:, :10])
    padded = logprob(logits, targets, vocab=VocabShard(0, 12, None, 10))
    plain = logprob(logits[:, :10], targets)
    assert_bitwise_equal("logprobs", padded.logprobs, plain.logprobs)
    assert_bitwise_equal("entropy", padded.entropy, plain.entropy)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(0, 12), min_size=1, max_size=5),
    st.sampled_from(["normal", "holes", "large"]),
)
def test_combination_of_any_cut_is_the_whole(seed, widths, kind):
    """The algebra without processes: local statistics of any cut, combined, equal those of whole rows."""
    vocab = sum(widths)
    if vocab == 0:
        return
    logits = make_logits(3, vocab, kind, seed=seed)
    targets = make_targets(logits, seed=seed)

    def stats(start: int, end: int) -> torch.Tensor:
        return torch.ops.fastppo.logprob_stats(
            logits[:, start:end], targets, None, 1.0, None, -100, True, start, end - start, "auto"
        )

    ends = torch.tensor(widths).cumsum(0).tolist()
    gathered = torch.stack([stats(end - width, end) for end, width in zip(ends, widths, strict=True)])
    torch.testing.assert_close(
        combine_stats(gathered, 1.0), combine_stats(stats(0, vocab)[None], 1.0), rtol=2e-6, atol=2e-6
    )
