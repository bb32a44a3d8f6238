"""How megatron-core spreads a model over ranks: the blocks `policy.megatron` and `value.megatron`."""

from dataclasses import dataclass

from trainers.config_types import opt


@dataclass
class MegatronConfig:
    """Ranks = data-parallel copies x tensor x pipeline; a checkpoint of any layout can be gone on from in any other."""

    tensor_model_parallel_size: int = opt(1, "ranks that divide each layer, hence ranks of one machine", free=True)
    pipeline_model_parallel_size: int = opt(1, "ranks that divide the layers among them", free=True)
    virtual_pipeline_model_parallel_size: int | None = opt(
        None,
        "runs of layers that each pipeline rank has, in turns, so that it waits less; default: one",
        free=True,
    )
    context_parallel_size: int = opt(
        1, "ranks that divide each sequence: not supported yet, only 1 is accepted", free=True
    )
    expert_model_parallel_size: int = opt(
        1, "ranks among which the experts of a layer are divided: they are data-parallel for all else", free=True
    )
    expert_tensor_parallel_size: int | None = opt(
        None, "ranks that divide each expert; default: as tensor_model_parallel_size", free=True
    )
    sequence_parallel: bool = opt(
        False,
        "between the divided layers each tensor-parallel rank has a part of the tokens: less memory, same numbers; "
        "experts with tensor_model_parallel_size > 1 need it",
        free=True,
    )
    recompute: str = opt(
        "none",
        "what backward computes again in place of keeping it; selective: the attention scores; full: every layer; same "
        "numbers",
        choices=("none", "selective", "full"),
        free=True,
    )
    transformer_engine: bool | None = opt(
        None,
        "Transformer Engine's layers in place of megatron-core's own, whose attention keeps its scores, tokens x "
        "tokens; default: where it is installed and there is a GPU",
    )
    distributed_optimizer: bool | None = opt(
        None,
        "data-parallel ranks divide AdamW's moments and the float32 masters among them; default: on a GPU; it does not "
        "run on a CPU",
        free=True,
    )
    overlap_grad_reduce: bool = opt(
        False, "gradients travel between data-parallel ranks while backward goes on; same numbers", free=True
    )
    overlap_param_gather: bool = opt(
        False,
        "with the distributed optimizer: new parameters travel while the next forward pass goes on; needs "
        "overlap_grad_reduce",
        free=True,
    )
