"""A transformers configuration as a megatron-core GPTModel: Llama, Qwen2, Qwen3 and Qwen3-MoE.

The layers are megatron-core's own, which need neither Transformer Engine nor Apex, or Transformer Engine's. Weights are
left unset: trainers/megatron_weights.py loads them, under Hugging Face names. Hidden states are [S, B, D] in
megatron-core, S divided by the tensor-parallel size between layers under sequence parallelism; positions count from 0
in each row.
"""

import copy
import functools
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trainers.extras import require

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")  # PreTrainedConfig.model_type
ROPE_TYPES = ("default", "linear", "llama3")  # those that are one table of frequencies, and scale nothing else
VOCAB_ROWS = 64  # a rank's rows of the vocabulary are a multiple of it, for the GEMM of the output layer


class RMSNorm(nn.RMSNorm):
    """megatron-core's norm for its local layers refuses sequence parallelism. All it takes is to mark the weight: each
    rank sees a part of the tokens, so megatron-core must sum its gradient over the tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def build_model(
    hf: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    output: str = "logits",
    transformer_engine: bool = False,
    **options: Any,
) -> list[nn.Module]:
    """This rank's part of the model, after `parallel_state.initialize_model_parallel`: one GPTModel for each virtual
    pipeline stage, hence one unless `virtual_pipeline_model_parallel_size` is given. Parameters are not initialised.
    Collective over the first and the last stage where embeddings are tied.

    Args:
        output: what the last stage returns: "logits"; "hidden", the final hidden states; "no_head", these of a model
            without output layer.
        transformer_engine: its layers in place of megatron-core's own.
        options: of megatron-core's TransformerConfig: tensor_model_parallel_size, pipeline_model_parallel_size,
            sequence_parallel, recompute_granularity, ...

    Raises:
        ValueError: a model, or a setting of it, that megatron-core's layers would not compute as transformers does.
        ImportError: megatron-core is not installed.
    """
    check(hf)
    tied = hf.tie_word_embeddings
    if output == "no_head":  # then there is no output layer of its own to load or export
        hf, tied = copy.deepcopy(hf), False
        hf.tie_word_embeddings = True
    if options.get("pipeline_model_parallel_layout") is not None:
        raise ValueError("pipeline_model_parallel_layout is not supported: use num_layers_in_first_pipeline_stage")
    import_megatron()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    config = transformer_config(hf, dtype=dtype, device=device, **options)
    stages: Sequence[int | None] = [None]
    if config.virtual_pipeline_model_parallel_size is not None:
        stages = range(config.virtual_pipeline_model_parallel_size)
    chunks = []
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    for stage in stages:
        model = GPTModel(
            config,
            layer_specs(config, stage, transformer_engine=transformer_engine),
            vocab_size=padded_vocab(hf.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=first and stage == stages[0],
            post_process=last and stage == stages[-1],
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            vp_stage=stage,
        )
        model.rotary_pos_emb.inv_freq = rope_frequencies(hf).to(device)
        model.hf_config = hf
        if output != "logits":
            model._postprocess = _hidden_states
        if output == "no_head" and model.post_process:
            model.output_layer = None
        if model.pre_process and hf.pad_token_id is not None:
            model.embedding.register_forward_hook(functools.partial(_leave_out_padding, hf), with_kwargs=True)
        mark_sharded(model)
        chunks.append(model.to(device))  # megatron-core makes norms and routers on the CPU
    return chunks


def _leave_out_padding(hf: Any, module: nn.Module, _: Any, given: dict[str, Tensor], out: Tensor) -> Tensor:
    """A forward hook of the embedding. transformers never trains the padding token's, wherever the token stands; a
    response may have it, and where it ends sequences too, most have."""
    ids = given["input_ids"].t().contiguous()  # [S, B]
    if len(out) < len(ids):  # sequence parallelism
        ids = ids.chunk(len(ids) // len(out))[module.tp_group.rank()]
    padding = ids == hf.pad_token_id % hf.vocab_size  # a negative one counts from the end
    return torch.where(padding.unsqueeze(-1), out.detach(), out)


def _hidden_states(hidden_states: Tensor, **_: Any) -> Tensor:
    """In place of a GPTModel's step from hidden states to logits."""
    return hidden_states


def head_weight(model: nn.Module) -> Tensor:
    """Of a last stage: [V / tensor-parallel size, D], this rank's rows of the output layer, padding included."""
    tied = model.share_embeddings_and_output_weights
    weight: Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return weight


def transformer_config(hf: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device, **options: Any) -> Any:
    """megatron-core's TransformerConfig of a model that `check` accepts."""
    from megatron.core.transformer import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim(hf),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "qk_layernorm": hf.model_type in ("qwen3", "qwen3_moe"),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type == "qwen2",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,
    }
    if hf.model_type == "qwen3_moe":
        settings |= {
            "num_moe_experts": hf.num_experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_pre_softmax": not hf.norm_topk_prob,  # the probabilities of those chosen sum to 1, or do not
            "moe_router_load_balancing_type": "none",
            "moe_layer_freq": [int(is_moe_layer(hf, i)) for i in range(hf.num_hidden_layers)],
        }
    return TransformerConfig(**settings | options)


def layer_specs(config: Any, vp_stage: int | None, *, transformer_engine: bool = False) -> Any:
    """The layers of this stage: Transformer Engine's, or megatron-core's own with the norm above."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if transformer_engine:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        if config.qk_layernorm:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block


def mark_sharded(model: nn.Module) -> None:
    """Tell the weights along which dimension they are sharded. megatron-core does so only where it initialises them
    too; a weight that does not say so counts as a copy, and all ranks but the first leave it out of the gradient norm.
    """
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        set_tensor_model_parallel_attributes,
    )

    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        if type(module) in dims and module.weight is not None and not hasattr(module.weight, "partition_dim"):
            set_tensor_model_parallel_attributes(module.weight, True, dims[type(module)], 1)


def check(hf: PreTrainedConfig, key: str = "policy") -> None:
    """Raises ValueError, naming the setting of config.json, for a model that is not computed here as it should be;
    `key`: the block whose model it is."""
    if hf.model_type not in FAMILIES:
        raise ValueError(
            f"{key}.backend=megatron takes models of type {', '.join(FAMILIES)}, got {hf.model_type}: use "
            f"{key}.backend=hf"
        )
    rope = hf.rope_parameters
    kinds = getattr(hf, "layer_types", None) or ()
    for name, got, expected in (
        ("hidden_act", hf.hidden_act, ("silu",)),
        ("attention_bias", getattr(hf, "attention_bias", False), (False,)),  # it has one on the output projection too
        ("mlp_bias", getattr(hf, "mlp_bias", False), (False,)),
        ("use_sliding_window", "sliding_attention" in kinds, (False,)),
        ("rope_parameters.rope_type", rope["rope_type"], ROPE_TYPES),
        ("rope_parameters.partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,)),
    ):
        if got not in expected:
            raise ValueError(
                f"{key}.backend=megatron: the model's {name} must be {' or '.join(map(str, expected))}, got {got}"
            )


def rope_frequencies(hf: PreTrainedConfig) -> Tensor:
    """[head_dim / 2] float32. transformers' own: megatron-core knows Llama 3's scaling by one set of numbers only."""
    kind = hf.rope_parameters["rope_type"]
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))[0]
    dim = head_dim(hf)
    return 1.0 / (hf.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def head_dim(hf: PreTrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def is_moe_layer(hf: PreTrainedConfig, layer: int) -> bool:
    return (
        hf.model_type == "qwen3_moe"
        and layer not in hf.mlp_only_layers
        and hf.num_experts > 0
        and (layer + 1) % hf.decoder_sparse_step == 0
    )


def padded_vocab(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows of the embeddings and the output layer, all ranks together."""
    multiple = VOCAB_ROWS * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def takes_transformer_engine(wanted: bool | None, device: torch.device, key: str = "policy") -> bool:
    """The setting megatron.transformer_engine of the block `key`; None: where it is installed and there is a GPU.

    Raises:
        ValueError: wanted, and missing.
    """
    there = find_spec("transformer_engine") is not None and device.type == "cuda"
    if wanted and not there:
        raise ValueError(
            f"{key}.megatron.transformer_engine=true needs a GPU and the package transformer_engine: install it, or "
            "set it to false"
        )
    return there if wanted is None else wanted


def import_megatron() -> None:
    """Import megatron-core without its six warnings that Transformer Engine and Apex are missing.

    Raises:
        ImportError: not installed; names the extra `megatron`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        require("megatron.core", extra="megatron")
        require("megatron.core.models.gpt", extra="megatron")
        router = require("megatron.core.transformer.moe.moe_utils", extra="megatron")
    if not hasattr(router, "te_general_gemm"):  # 0.16 asks whether it is None, but imports it with Transformer Engine
        router.te_general_gemm = None
