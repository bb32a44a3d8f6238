"""The plan of a cluster against what ranks really hold: megatron-core's parameters in many layouts, and what its layers
and transformers' keep for backward. On a CPU. What a rank of fully_shard holds: test_fully_shard.py."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as torch_dist
import transformers

from tests import megatron_cpu
from trainers.cluster_layout import Layout
from trainers.cluster_memory import Part, layer_bytes_kept, local_parameters
from trainers.memory_plan import Activations
from trainers.model_shapes import shape_of

SIZES = {
    "vocab_size": 250, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48
    ),
}
LAYOUTS = [{"tp": 2}, {"tp": 8, "pp": 2}]
EXPERTS = [{"tp": 2, "ep": 4, "etp": 1}, {"tp": 2, "ep": 2, "pp": 2}]
WORLD, ROWS, LENGTH = 16, 2, 32


def test_what_a_layer_of_transformers_keeps():
    """The formula counts two bytes where norms keep float32 copies, unless they are fused, and no rotary tables."""
    for name in ("llama", "qwen2"):
        shape = shape_of(MODELS[name], name)
        counted = Activations.count(
            MODELS[name], layers=4, whole=True, length=256, dtype=torch.bfloat16, stored=torch.bfloat16,
            device=torch.device("cpu"),
        )  # fmt: skip
        planned = 256 * 4 * layer_bytes_kept(shape, Layout(), 256)
        norms = 256 * 4 * 2 * 4 * shape.hidden
        assert planned < counted.row < planned + 1.5 * norms


def measure() -> None:
    """In a process of its own: ranks of megatron-core one by one, in a world of processes that are not there."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    megatron_cpu.apply()
    for name, config in MODELS.items():
        for sizes in LAYOUTS + (EXPERTS if config.model_type == "qwen3_moe" else []):
            for critic in (False, True) if sizes.get("pp") else (False,):
                compare_parameters(name, sizes, critic=critic)
        compare_kept(name)


def compare_parameters(name: str, sizes: dict[str, int], *, critic: bool) -> None:
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    layout = Layout("megatron", WORLD // (tp * pp), **{"etp": tp} | sizes, sequence_parallel=tp > 1)
    part = Part(shape_of(MODELS[name], name), layout, WORLD, 1, critic=critic)
    for stage in {0, pp - 1}:
        with rank_of(MODELS[name], layout, stage * WORLD // pp, "no_head" if critic else "hidden") as model:
            pass
        apart = {getattr(p, "allreduce", True) for p in model.parameters()} == {True, False}
        experts = sum(p.numel() for p in model.parameters() if not getattr(p, "allreduce", True))
        head = 65 if critic and stage == pp - 1 else 0  # its own, put on the model later
        dense, expert = local_parameters(part, stage)
        assert sum(p.numel() for p in model.parameters()) == dense + expert - head, (name, sizes, stage, critic)
        assert apart == (layout.ep > 1) and (not apart or experts == expert)


def compare_kept(name: str) -> None:
    """Of a layer, what four keep and two do not: all but norms', which are float32 on a CPU, and tables and routes."""
    kept = {}
    for layers in (2, 4):
        config = type(MODELS[name]).from_dict(
            MODELS[name].to_dict() | {"num_hidden_layers": layers, "layer_types": None}
        )
        shape, layout = shape_of(config, name), Layout("megatron", WORLD, flash=False)
        with rank_of(config, layout, 0) as model:
            kept[layers] = saved(model)
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 4 * h + (2 * (q + kv) if shape.qk_norm else 0)
    planned = ROWS * LENGTH * (layer_bytes_kept(shape, layout, LENGTH) - norms)
    assert planned == pytest.approx((kept[4] - kept[2]) / 2, rel=0.01), name


@contextmanager
def rank_of(
    config: transformers.PreTrainedConfig, layout: Layout, rank: int, output: str = "hidden"
) -> Iterator[torch.nn.Module]:
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from trainers.policy.megatron_model import build_model

    torch_dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    sizes = layout.sizes | {"expert_tensor_parallel_size": layout.etp}
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    (model,) = build_model(
        config, dtype=torch.bfloat16, device=torch.device("cpu"), output=output,
        sequence_parallel=layout.sequence_parallel, moe_token_dispatcher_type="alltoall", **sizes,
    )  # fmt: skip
    yield model
    parallel_state.destroy_model_parallel()
    torch_dist.destroy_process_group()


def saved(model: torch.nn.Module) -> int:
    """Bytes that autograd keeps of a forward pass, of bfloat16 activations and the softmax."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        softmax = tensor.shape[-2:] == (LENGTH, LENGTH) and tensor.dtype == torch.float32
        if tensor.dtype == torch.bfloat16 or softmax:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model(torch.zeros(ROWS, LENGTH, dtype=torch.int64), position_ids=None, attention_mask=None)
    assert hidden.requires_grad
    tables = LENGTH * 16 * 2  # rotary, of the largest head
    return sum(s.nbytes() for address, s in found.items() if address not in weights and s.nbytes() > tables)


def worker(_: int) -> None:
    measure()


@pytest.mark.skipif(find_spec("megatron") is None, reason='needs megatron-core: pip install "fastppo[megatron]"')
def test_megatron_cores_ranks_hold_what_the_plan_says():
    megatron_cpu.spawn(worker, (), 1)
