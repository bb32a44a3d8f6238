"""A model sharded over two GPUs, with NCCL, trains as one whole model on one GPU, and holds half of its state."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist
import torch.multiprocessing as mp
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests import tiny
from tests.test_loss_invariance import LENGTHS, Setting, loss_of, random_head
from trainers import dist, sharding
from trainers.batching import count, part_of
from trainers.engines import Sampling
from trainers.engines.native import NativeEngine
from trainers.optim import Optimizer
from trainers.policy.hf import HFPolicy
from trainers.refit import refit
from trainers.value import ScalarHead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs two CUDA devices, and torch sees {torch.cuda.device_count()}"
    ),
]

RANKS = 2
DTYPES = (torch.float32, torch.bfloat16)


def policy(folder: Path, dtype: torch.dtype, sharded: bool) -> HFPolicy:
    cfg = replace(tiny.config().policy, num_layers_unfrozen=-1, fully_shard=sharded, train_micro_batch_size=1)
    made = HFPolicy(folder, cfg, device=torch.device("cuda"), dtype=dtype)
    head = random_head(ScalarHead(512)).to("cuda")
    made.add_head("critic", head, Optimizer(head.parameters(), cfg.optimizer, cfg.scheduler))
    return made


def allocated() -> int:
    """Bytes of tensors on the device, without cuBLAS' workspace, which the first product makes and keeps."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def run(folder: Path, dtype: torch.dtype, sharded: bool) -> dict:
    """Gradients, scores and steps of a policy, and the memory that its parts hold when nothing runs."""
    before = allocated()
    made = policy(folder, dtype, sharded)
    held = allocated() - before
    batch = tiny.rollout(LENGTHS)
    scored = made.score(batch, {"old_logprobs", "ref_logprobs"})
    batch.update(**scored)
    loss, whole = loss_of(Setting(), made), count(batch)
    mine = part_of(whole, torch.tensor(dist.rows(whole.lengths)))
    made.gradients(mine, loss)
    summed = {name: p if sharded else made.masters.of(p) for name, p in made.model.named_parameters()}
    gradients = {name: sharding.whole(p.grad).cpu() for name, p in summed.items()}
    for optimizer in made.optimizers.values():
        optimizer.zero_grad()
    for parameter in summed.values():
        parameter.grad = None
    norms = [made.train_step(mine, loss).optimizers["actor"]["grad_norm"] for _ in range(3)]
    engine = NativeEngine(made.engine_model(dtype), made.tokenizer)
    moved = refit(made, engine, 1)
    tokens = engine.generate([[4, 5, 6]], Sampling(8), [3])[0].tokens
    total = sum(p.numel() for p in made.model.parameters())
    return {
        "scored": {name: scored[name] for name in ("old_logprobs", "ref_logprobs")}, "gradients": gradients,
        "norms": norms, "held": held, "parameters": total, "moved": moved, "tokens": tokens,
    }  # fmt: skip


def worker(rank: int, name: str) -> None:
    folder = Path(name)
    torch.cuda.set_device(rank)
    torch_dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    right = torch.load(folder / "right.pt", weights_only=False)
    for dtype in DTYPES:
        got, expected, exact = run(folder, dtype, True), right[dtype], dtype == torch.float32
        tolerance = 1e-4 if exact else 0.03
        for key, gradient in expected["gradients"].items():
            scale = gradient.abs().max().item()
            torch.testing.assert_close(
                got["gradients"][key], gradient, rtol=tolerance, atol=tolerance * scale, msg=f"{dtype} {key}: ".__add__
            )
        for key, value in expected["scored"].items():
            torch.testing.assert_close(
                got["scored"][key], value, rtol=tolerance, atol=tolerance, msg=f"{key}: ".__add__
            )
        assert got["norms"] == pytest.approx(expected["norms"], rel=10 * tolerance if exact else 0.05)
        # Float32 shards and the reference's in the compute dtype.
        share = (4 + dtype.itemsize) * got["parameters"] / RANKS
        assert got["held"] < share + 8 * 2**20, f"{dtype}: {got['held'] / 2**20:.1f} MiB, of {share / 2**20:.1f}"
        assert got["moved"] == dtype.itemsize * got["parameters"]
        if exact:
            assert got["tokens"] == expected["tokens"]
    dist.stop()


def test_two_gpus_train_a_sharded_model_as_one_trains_the_whole(tmp_path):
    torch.manual_seed(0)
    cfg = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8,
    )  # fmt: skip
    LlamaForCausalLM(cfg).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(tmp_path)
    torch.save({dtype: run(tmp_path, dtype, False) for dtype in DTYPES}, tmp_path / "right.pt")
    mp.start_processes(worker, args=(str(tmp_path),), nprocs=RANKS, start_method="spawn")
