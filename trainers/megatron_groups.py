"""megatron-core's process groups, which are one set per process: the policy and a local critic share them."""

import warnings
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from trainers import dist
from trainers.config import ClusterConfig
from trainers.config_megatron import MegatronConfig
from trainers.megatron_rules import SIZES
from trainers.policy.megatron_model import import_megatron, takes_transformer_engine


def start(cfg: MegatronConfig, cluster: ClusterConfig) -> None:
    """Make the groups, after dist.start(); from then on the trainer's data-parallel ranks are megatron-core's.

    Raises:
        ImportError: megatron-core is not installed.
        RuntimeError: this process has groups of another layout.
    """
    import_megatron()
    from megatron.core import parallel_state

    if not torch_dist.is_initialized():  # a single process, without torchrun
        backend = "cpu:gloo,cuda:nccl" if cluster.device != "cpu" and torch.cuda.is_available() else "gloo"
        torch_dist.init_process_group(backend, store=torch_dist.HashStore(), rank=0, world_size=1)
    wanted = {name: getattr(cfg, name) for name in SIZES}
    if parallel_state.model_parallel_is_initialized():
        if start.sizes != wanted:
            raise RuntimeError(f"a process has one layout of megatron-core: {start.sizes}, got {wanted}")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(
            **wanted,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=cluster.rank_timeout_s / 60,  # it becomes a timedelta
        )
    start.sizes = wanted
    dist.spread_model(parallel_state.get_data_parallel_group())
    if torch.cuda.is_available() and cluster.device != "cpu":
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1)  # attention asks for its random state, though nothing is dropped out


start.sizes = None


def stop() -> None:
    """Undo start(), for another layout in the same process."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.spread_model(None)
    start.sizes = None


def model_options(cfg: MegatronConfig, device: torch.device) -> dict[str, Any]:
    """Arguments of build_model() that follow from the settings."""
    options: dict[str, Any] = {name: getattr(cfg, name) for name in SIZES}
    if options["expert_tensor_parallel_size"] is None:
        del options["expert_tensor_parallel_size"]  # megatron-core's own default is the same
    options |= {
        "sequence_parallel": cfg.sequence_parallel,
        "transformer_engine": takes_transformer_engine(cfg.transformer_engine, device),
        # Losses come divided by the counts of the whole step: gradients are summed, and divided by nothing.
        "calculate_per_token_loss": True,
        # A pass is as long as its longest sequence, so stages tell each other the shape of what they send. With a
        # virtual pipeline they would wait for each other (megatron-core 0.16): there all passes are made equal.
        "variable_seq_lengths": cfg.pipeline_model_parallel_size > 1
        and cfg.virtual_pipeline_model_parallel_size is None,
        "moe_token_dispatcher_type": "alltoall",  # the only one for passes of unequal lengths
    }
    if cfg.recompute == "full":
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif cfg.recompute == "selective":
        options["recompute_granularity"] = "selective"
    return options


def free_buffers() -> None:
    """megatron-core keeps what held attention's scores and gathered sequences, as large as the largest were."""
    from megatron.core import parallel_state

    parallel_state.get_global_memory_buffer().buffer.clear()


def of_last_stage(found: Any) -> Any:
    """What the last pipeline stage has, on all of them. Tensors must be on the CPU."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return found
    box = [found]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    torch_dist.broadcast_object_list(box, src=last, group=group)
    return box[0]


def whole_sequence(hidden: Tensor, *, partial_gradient: bool) -> Tensor:
    """[S / tensor-parallel size, B, D] of each rank -> [S, B, D]. partial_gradient: each rank has a part of its
    gradient, to be summed; otherwise all have the same one."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    whole: Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=partial_gradient)
    return whole
