"""A critic on megatron-core on a GPU: that on transformers, within rounding; with the distributed optimizer too, which
runs nowhere else, and its memory free while it waits. On two GPUs: tensor and data parallel, over NCCL."""

import gc
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests import tiny
from tests.test_loss_invariance import random_head
from tests.test_megatron_training import rollout
from trainers import dist
from trainers.batching import count, part_of
from trainers.config import ClusterConfig, ValueConfig, ValueLossConfig
from trainers.config_megatron import MegatronConfig
from trainers.losses import ValueLoss
from trainers.value import ScalarHead
from trainers.value.hf import LocalValue

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("megatron") is None, reason='needs megatron-core: pip install "fastppo[megatron]"'),
]
GPU, VOCAB, MIB = torch.device("cuda"), 500, 2**20
DTYPES = (torch.float32, torch.bfloat16)
# By ranks: name -> layout.
LAYOUTS = {
    1: {"plain": MegatronConfig(distributed_optimizer=False), "distributed": MegatronConfig()},
    2: {
        "tp2": MegatronConfig(2, sequence_parallel=True),
        "dp2": MegatronConfig(overlap_grad_reduce=True, overlap_param_gather=True),
        "pp2": MegatronConfig(1, 2),
    },
}


def settings(**changes: Any) -> ValueConfig:
    cfg = tiny.config().value
    optimizer = replace(cfg.optimizer, lr=1e-4, weight_decay=0.1, max_grad_norm=0.5)
    # One sequence a pass: else both sum bfloat16 gradients of the embeddings in another order.
    return replace(cfg, mode="local", offload=True, train_micro_batch_size=1, optimizer=optimizer, **changes)


def draw(head: ScalarHead) -> None:
    """In place: an optimizer may have its own view of it."""
    with torch.no_grad():
        head.linear.weight.copy_(random_head(ScalarHead(512)).linear.weight)


def values(critic: Any) -> Tensor:
    """[T + B]"""
    return torch.cat(critic.infer(rollout(VOCAB)).result())


def course(critic: Any) -> dict[str, Any]:
    """Values, the norms of three steps, and values again; before the last step and before those the critic waits."""
    found, batch, norms = {"first": values(critic)}, rollout(VOCAB), []
    whole = count(batch)
    mine = part_of(whole, torch.tensor(dist.rows(whole.lengths)))
    for i in range(3):
        if i == 2:
            waits(critic)
        norms.append(critic.train_step(mine, ValueLoss(ValueLossConfig())).optimizers["critic"]["grad_norm"])
    waits(critic)
    return found | {"last": values(critic), "norms": norms}


def waits(critic: Any) -> None:
    """Nothing of it but small things is on the device."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    critic.offload()
    freed = before - torch.cuda.memory_allocated()
    if not isinstance(critic, LocalValue):
        own = sum(p.numel() for chunk in critic.model.chunks for p in chunk.parameters())
        # Weights and float32 gradients at the least.
        assert freed > own * (critic.dtype.itemsize + 4) - MIB, f"{freed / MIB:.1f} MiB of {own} parameters"


def on_megatron(folder: Path, ranks: int) -> dict[Any, Any]:
    from trainers import megatron_groups
    from trainers.value.megatron import MegatronValue

    results = {}
    for name, layout in LAYOUTS[ranks].items():
        for dtype in DTYPES:
            cfg = settings(backend="megatron", megatron=replace(layout, transformer_engine=False))
            make = lambda cfg=cfg, dtype=dtype: MegatronValue(  # noqa: E731
                folder, cfg, ClusterConfig(), device=GPU, dtype=dtype, score_batch=3
            )
            critic = make()
            if critic.model.last is not None:
                draw(critic.model.last.value_head)
            critic.save(start := folder / f"start_{name}_{dtype}")
            dist.gather(None)
            critic.load(start)
            found = course(critic)
            critic.save_shards(shards := folder / f"shards_{name}_{dtype}")
            dist.gather(None)
            again = make()
            again.load_state_dict(critic.state_dict())
            again.load_shards(shards)
            found["again"] = values(again)
            results[name, dtype] = found
        megatron_groups.stop()
    return results


def worker(rank: int, name: str, ranks: int) -> None:
    folder = Path(name)
    torch.cuda.set_device(rank)
    store = torch_dist.FileStore(str(folder / f"store{ranks}"), ranks)
    torch_dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    torch.save(on_megatron(folder, ranks), folder / f"found{ranks}_{rank}.pt")
    dist.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and in right.pt what a critic on transformers does with it."""
    folder = tmp_path_factory.mktemp("megatron_value")
    torch.manual_seed(0)
    cfg = LlamaConfig(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64,
    )  # fmt: skip
    LlamaForCausalLM(cfg).save_pretrained(folder)
    right = {}
    for dtype in DTYPES:
        critic = LocalValue(folder, settings(), device=GPU, dtype=dtype, score_batch=3)
        draw(critic.head)
        right[dtype] = course(critic)
    torch.save(right, folder / "right.pt")
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_a_critic_on_gpus_is_the_critic_on_transformers(folder, ranks):
    if (there := torch.cuda.device_count()) < ranks:
        pytest.skip(f"needs {ranks} CUDA devices, and torch sees {there}")
    right = torch.load(folder / "right.pt", weights_only=False)
    exact = right[torch.float32]
    mp.start_processes(worker, args=(str(folder), ranks), nprocs=ranks, start_method="spawn")
    for rank in range(ranks):
        found = torch.load(folder / f"found{ranks}_{rank}.pt", weights_only=False)
        assert found.keys() == {(name, dtype) for name in LAYOUTS[ranks] for dtype in DTYPES}
        for (name, dtype), got in found.items():
            scale = float(exact["first"].abs().max())
            for what in ("first", "norms", "last"):
                mine, theirs, truth = (torch.as_tensor(x[what]) for x in (got, right[dtype], exact))
                # float32: rounding. bfloat16, which three steps of AdamW amplify: no worse than on transformers.
                near = 1e-3 * (truth.abs() if what == "norms" else scale)
                noise = 2 * float((theirs - truth).abs().max())
                assert bool(((mine - truth).abs() <= near + noise).all()), (name, dtype, what, mine, theirs, truth)
            assert float((got["again"] - got["last"]).abs().max()) < 1e-5 * scale, (name, dtype)
