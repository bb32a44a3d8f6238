"""Which tensor of Hugging Face's lies where in megatron-core's parameters, computed from the configuration alone.

Every parameter of megatron-core is a whole, divided evenly along one dimension over the tensor-parallel ranks (an
expert's over the expert-tensor-parallel ranks). Each tensor of Hugging Face's is a set of rows of one whole, ascending:

    whole                           rows of                              in this order
    linear_qkv [(H + 2 G) d, D]     q_proj, k_proj, v_proj               each group's H / G queries, its key, its value
    linear_fc1 [2 F, D]             gate_proj, up_proj                   each rank's gates, then its ups
    word_embeddings, output_layer   embed_tokens, lm_head                the first V; the rest pads the ranks' shares
    any other                       one tensor                           as it is

H query heads, G groups (key-value heads), d head size, D hidden size, F feed-forward size, V vocabulary size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from trainers.engines import TensorSpec
from trainers.policy.megatron_model import is_moe_layer


@dataclass(frozen=True)
class Rows:
    """A tensor of Hugging Face's within a whole."""

    name: str
    count: int
    index: Tensor | None = None  # [count] ascending, along dimension 0 of the whole; None: the first ones

    def of(self, whole: Tensor) -> Tensor:
        return whole[: self.count] if self.index is None else whole[self.index]

    def within(self, start: int, stop: int) -> tuple[slice, slice | Tensor]:
        """What lies in rows [start, stop) of the whole: these rows of the tensor, and where they are from `start`."""
        if self.index is None:
            stop = max(start, min(stop, self.count))
            return slice(start, stop), slice(0, stop - start)
        bounds = torch.tensor([start, stop], device=self.index.device)
        first, last = torch.searchsorted(self.index, bounds).tolist()
        return slice(first, last), self.index[first:last] - start


@dataclass(frozen=True)
class Entry:
    """A parameter of megatron-core. Of an expert: the parameter of this name on every expert-parallel rank."""

    names: tuple[str, ...]  # it has one of them; a layer's number is that in the whole model
    shape: tuple[int, ...]  # of the whole
    dim: int | None  # along which shards divide it; None: every rank has all of it
    stage: int  # the pipeline stage that exports it
    tensors: tuple[tuple[Rows, ...], ...]  # of each expert-parallel rank; of what is no expert, one
    expert: bool = False
    copies: tuple[str, ...] = ()  # parameters that hold the same, on other stages

    def spec(self, rows: Rows, dtype: torch.dtype) -> TensorSpec:
        return TensorSpec((rows.count, *self.shape[1:]), dtype)

    @property
    def padded(self) -> bool:
        return sum(rows.count for rows in self.tensors[0]) < self.shape[0]


@dataclass(frozen=True)
class Sizes:
    """Of the groups that share a model, and of the padded vocabulary."""

    tensor: int
    expert_tensor: int
    expert: int
    vocab: int


def layout(hf: PreTrainedConfig, config: Any, sizes: Sizes, device: torch.device) -> Iterator[Entry]:
    """All entries in Hugging Face's order. `config`: megatron-core's, `device`: where rows are to be indexed."""
    stages, hidden, last = stages_of_layers(config), config.hidden_size, config.pipeline_model_parallel_size - 1
    vocab, head = (sizes.vocab, hidden), "output_layer.weight"
    embeddings = Rows("model.embed_tokens.weight", hf.vocab_size)
    copies = (head,) if hf.tie_word_embeddings else ()
    yield Entry(("embedding.word_embeddings.weight",), vocab, 0, 0, ((embeddings,),), copies=copies)

    groups, d = config.num_query_groups, config.kv_channels
    qkv = qkv_rows(groups, config.num_attention_heads // groups, d, device)
    width = sum(len(index) for index in qkv.values())
    gate_up = gate_up_rows(config.ffn_hidden_size, sizes.tensor, device)
    for i in range(config.num_layers):
        to, of = f"decoder.layers.{i}.", f"model.layers.{i}."
        norm = (f"{to}input_layernorm.weight", f"{to}self_attention.linear_qkv.layer_norm_weight")
        yield _one(norm, f"{of}input_layernorm.weight", (hidden,), stages[i])
        to_attention, of_attention = f"{to}self_attention.", f"{of}self_attn."
        yield _joint(f"{to_attention}linear_qkv.weight", of_attention, "weight", qkv, (width, hidden), stages[i])
        if config.add_qkv_bias:
            yield _joint(f"{to_attention}linear_qkv.bias", of_attention, "bias", qkv, (width,), stages[i])
        if config.qk_layernorm:
            for which in "qk":
                name = f"{to_attention}{which}_layernorm.weight"
                yield _one((name,), f"{of_attention}{which}_norm.weight", (d,), stages[i])
        out = (hidden, config.num_attention_heads * d)
        yield _one((f"{to_attention}linear_proj.weight",), f"{of_attention}o_proj.weight", out, stages[i], dim=1)
        norm = (f"{to}pre_mlp_layernorm.weight", f"{to}mlp.linear_fc1.layer_norm_weight")
        yield _one(norm, f"{of}post_attention_layernorm.weight", (hidden,), stages[i])
        to, of = f"{to}mlp.", f"{of}mlp."
        if is_moe_layer(hf, i):
            yield _one((f"{to}router.weight",), f"{of}gate.weight", (config.num_moe_experts, hidden), stages[i])
            yield from _experts(config, sizes, f"{to}experts.", f"{of}experts.", stages[i], device)
        else:
            wide, narrow = (2 * config.ffn_hidden_size, hidden), (hidden, config.ffn_hidden_size)
            yield _joint(f"{to}linear_fc1.weight", of, "weight", gate_up, wide, stages[i])
            yield _one((f"{to}linear_fc2.weight",), f"{of}down_proj.weight", narrow, stages[i], dim=1)

    yield _one(("decoder.final_layernorm.weight",), "model.norm.weight", (hidden,), last)
    if not hf.tie_word_embeddings:
        yield Entry((head,), vocab, 0, last, ((Rows("lm_head.weight", hf.vocab_size),),))


def _one(names: tuple[str, ...], hf: str, shape: tuple[int, ...], stage: int, *, dim: int | None = None) -> Entry:
    """A parameter that is one tensor. Two names: megatron-core's own layers, and Transformer Engine's fused ones."""
    return Entry(names, shape, dim, stage, ((Rows(hf, shape[0]),),))


def _joint(name: str, hf: str, suffix: str, parts: Mapping[str, Tensor], shape: tuple[int, ...], stage: int) -> Entry:
    """A parameter of several tensors, divided by rows."""
    return Entry((name,), shape, 0, stage, (_parts(hf, suffix, parts),))


def _parts(hf: str, suffix: str, parts: Mapping[str, Tensor]) -> tuple[Rows, ...]:
    return tuple(Rows(f"{hf}{part}.{suffix}", len(index), index) for part, index in parts.items())


def _experts(config: Any, sizes: Sizes, to: str, of: str, stage: int, device: torch.device) -> Iterator[Entry]:
    """Each expert-parallel rank has as many, in order. A sequence of experts, or Transformer Engine's grouped GEMM."""
    hidden, ffn, local = config.hidden_size, config.moe_ffn_hidden_size, config.num_moe_experts // sizes.expert
    gate_up = gate_up_rows(ffn, sizes.expert_tensor, device)
    for e in range(local):
        prefixes = [f"{of}{rank * local + e}." for rank in range(sizes.expert)]
        names = [(f"{to}local_experts.{e}.linear_{fc}.weight", f"{to}linear_{fc}.weight{e}") for fc in ("fc1", "fc2")]
        wide = tuple(_parts(prefix, "weight", gate_up) for prefix in prefixes)
        yield Entry(names[0], (2 * ffn, hidden), 0, stage, wide, expert=True)
        narrow = tuple((Rows(f"{prefix}down_proj.weight", hidden),) for prefix in prefixes)
        yield Entry(names[1], (hidden, ffn), 1, stage, narrow, expert=True)


def qkv_rows(groups: int, queries: int, head_dim: int, device: torch.device) -> dict[str, Tensor]:
    """`queries`: heads a group."""
    rows = torch.arange(groups * (queries + 2) * head_dim, device=device).view(groups, queries + 2, head_dim)
    return {
        "q_proj": rows[:, :queries].flatten(),
        "k_proj": rows[:, queries].flatten(),
        "v_proj": rows[:, queries + 1].flatten(),
    }


def gate_up_rows(ffn: int, ranks: int, device: torch.device) -> dict[str, Tensor]:
    rows = torch.arange(2 * ffn, device=device).view(ranks, 2, ffn // ranks)
    return {"gate_proj": rows[:, 0].flatten(), "up_proj": rows[:, 1].flatten()}


def stages_of_layers(config: Any) -> list[int]:
    """The pipeline stage of each layer."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    stages = [-1] * config.num_layers
    virtual = config.virtual_pipeline_model_parallel_size
    for rank in range(config.pipeline_model_parallel_size):
        for chunk in [None] if virtual is None else range(virtual):
            start = get_transformer_layer_offset(config, chunk, rank)
            count = get_num_layers_to_build(config, chunk, rank)
            stages[start : start + count] = [rank] * count
    return stages
