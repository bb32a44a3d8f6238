"""A model cut over the data-parallel ranks by torch's `fully_shard` (FSDP2): parameters, gradients, AdamW's moments.

Each decoder layer is a unit: gathered for its own forward and again for its backward, and let go after each. What is
left (embeddings, final norm, output head) is the unit of `Root`, whose forward is a whole pass of ours, the loss and so
the output head's fused operation included: these read the head's weight, not its module's result, and inside the pass
it is a plain tensor, under both names where it is tied to the embeddings. Backward sums its gradient over the ranks
like any other. No parameter is whole outside a pass.

Shards are stored in float32, frozen ones in the compute dtype, and gathered in the compute dtype: a shard is its own
float32 master. Gradients are summed over the ranks in float32, never averaged, after each micro-batch.

A pass is collective: every rank must make as many, see `micro_batches(..., lockstep=True)`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from trainers import dist
from trainers.masters import Masters

if TYPE_CHECKING:
    from trainers.backbone import SplitTransformer
    from trainers.optim import Optimizer

T = TypeVar("T")
Named = Sequence[tuple[str, nn.Parameter]]


class Root(nn.Module):
    """`root(compute)` is `compute()`, during which the parameters of `model` outside its layers are whole. Tensors with
    a gradient must be found in the result: alone, or in tuples, lists and dicts."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


def shard(backbone: "SplitTransformer", device: torch.device, *, fused: bool, key: str) -> None:
    """Cut the model of `backbone`, which is whole and in the CPU's memory, unit by unit on its way to `device`; its
    passes and masters are then of the kind for it.

    Args:
        fused: as of SplitTransformer.
        key: the setting that asks for it.

    Raises:
        ValueError: an architecture without layers to cut.
    """
    model = backbone.model
    if not (layers := layers_of(model)):
        raise ValueError(f"{key}: {type(model).__name__} has no layers that transformers marks as such, hence no units")
    if fused and device.type == "cuda":
        from trainers.fused_layers import fuse_layers  # triton comes with torch for GPUs alone

        fuse_layers(model, device, backbone.dtype)
    mesh, root = _mesh(device), Root(model)
    # Reshard after forward always, the root as well: a pass without backward would leave it whole, and then stale.
    how = {
        "mesh": mesh,
        "reshard_after_forward": True,
        "mp_policy": MixedPrecisionPolicy(backbone.dtype, torch.float32, cast_forward_inputs=False),
    }
    for module in (*layers, *_apart(model, backbone.output_used), root):
        fully_shard(module, **how)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if hasattr(root, "set_reduce_scatter_unused_params"):  # experts that only some of the ranks had tokens for
        root.set_reduce_scatter_unused_params(True)
    with torch.no_grad():
        root(lambda: None)  # torch settles at the first pass which tensors hold the shards
    backbone.root, backbone.masters, backbone.mixed = root, Shards(model), False


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that transformers treats as one layer."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_layer = isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in names
        if is_layer and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return list(found.values())


def _apart(model: Any, output_used: bool) -> list[nn.Module]:
    """Of untied weights: the embeddings, needed at the start of a pass alone; an output head that no pass uses."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if outputs is not None and outputs.weight is inputs.weight:
        return []
    return [inputs] + ([outputs] if outputs is not None and not output_used else [])


def _mesh(device: torch.device) -> DeviceMesh:
    """All ranks; a process that torchrun did not start is a group of one."""
    if not torch_dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        torch_dist.init_process_group(backend, store=torch_dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.size(),))


def local(parameter: Tensor) -> Tensor:
    """What of a parameter lies on this rank: rows of it, maybe none. The tensor itself, detached."""
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def whole(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """All of a parameter in `dtype`, on every rank; collective."""
    with torch.no_grad():
        mine = parameter.detach() if dtype is None else parameter.detach().to(dtype)
        return mine.full_tensor() if isinstance(mine, DTensor) else mine


def whole_on_main(named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """All of each tensor in the CPU's memory of the main rank, one after the other; elsewhere {}. Collective."""
    gathered: dict[str, Tensor] = {}
    for name, tensor in named:
        value = whole(tensor)
        if dist.is_main():
            gathered[name] = value.cpu().contiguous()
    return gathered


class Shards(Masters):
    """Trained parameters of a sharded model, each with the tensor that holds this rank's part of it. The optimizer
    steps these: AdamW and clipping see ordinary tensors."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.pairs = {p: local(p) for p in model.parameters() if p.requires_grad}

    def grad(self, parameter: nn.Parameter) -> Tensor | None:
        return None  # summed over the ranks before it is added up

    def write_back(self) -> None: ...

    @torch.no_grad()
    def load(self, parameter: nn.Parameter, value: Tensor) -> None:
        """This rank's part takes its rows of `value`, which is whole."""
        mine = self.of(parameter)
        if parameter in self.pairs:
            rows = -(-len(value) // dist.size())  # as torch.chunk cuts
            start = min(rows * dist.rank(), len(value))
            value = value[start : start + len(mine)]
        mine.copy_(value)

    def offload(self) -> None: ...  # the parameters themselves

    def to_be_summed(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        shards = {id(tensor) for tensor in self.pairs.values()}
        return [tensor for tensor in parameters if id(tensor) not in shards]

    @torch.no_grad()
    def clip(self, parameters: Sequence[Tensor], limit: float) -> float:
        for parameter, mine in self.pairs.items():
            mine.grad = None if parameter.grad is None else local(parameter.grad)
        alike = self.to_be_summed(parameters)
        mine = {id(tensor) for tensor in parameters} - {id(tensor) for tensor in alike}
        shards = [tensor.grad for tensor in parameters if id(tensor) in mine and tensor.grad is not None]
        others = [tensor.grad for tensor in alike if tensor.grad is not None]
        square = _square(shards, parameters[0].device)
        torch_dist.all_reduce(square)
        norm = (square + _square(others, square.device)).sqrt()
        if math.isfinite(limit):
            torch._foreach_mul_(shards + others, (limit / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)

    def zero_grad(self) -> None:
        for parameter in self.pairs:
            parameter.grad = None

    def alike(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
        others = {id(tensor) for tensor in self.to_be_summed(parameters)}
        moments = state["state"]
        for i, tensor in enumerate(parameters):
            if i in moments and id(tensor) not in others:
                moments[i] = {"step": moments[i]["step"]}
        return state


def _square(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squared norm of all of them; 0 of none."""
    if not gradients:
        return torch.zeros((), device=device)
    return nn.utils.get_total_norm(gradients).square()


def save_shards(folder: Path, named: Named, optimizer: "Optimizer") -> None:
    """Trained parameters and AdamW's moments, every rank its part, to be read by any number of ranks."""
    dcp.save(_state(named, optimizer), checkpoint_id=folder)


def load_shards(folder: Path, named: Named, optimizer: "Optimizer") -> None:
    """After the optimizer's load_state_dict(), by which it is known whether there are moments.

    Raises:
        ValueError: the checkpoint lacks some of them, or has them in another shape.
    """
    state = _state(named, optimizer)
    there = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name in sorted(set(state) ^ set(there)):
        raise ValueError(f"{folder} is not a checkpoint of this model: they differ in {name!r}")
    for name, tensor in state.items():
        if there[name].size != tensor.shape:
            raise ValueError(f"{folder}: {name} must be {tuple(tensor.shape)}, got {tuple(there[name].size)}")
    dcp.load(state, checkpoint_id=folder)


@torch.no_grad()
def _state(named: Named, optimizer: "Optimizer") -> dict[str, Tensor]:
    """Tensors as they are cut, over the storage that they have."""
    state: dict[str, Tensor] = {}
    for name, parameter in named:
        if not isinstance(parameter, DTensor):
            continue
        mine = optimizer.masters.of(parameter)
        state[f"weight.{name}"] = parameter.detach()
        moments = optimizer.adamw.state.get(mine, {})
        for kind in ("exp_avg", "exp_avg_sq") if moments else ():
            part = moments.setdefault(kind, torch.zeros_like(mine))
            state[f"{kind}.{name}"] = DTensor.from_local(
                part, parameter.device_mesh, parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
    return state
