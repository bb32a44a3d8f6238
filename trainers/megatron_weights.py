"""Weights between Hugging Face's names and a megatron-core model's shards, one parameter at a time.

Loading copies to each shard the rows that lie in it. The export joins a parameter's shards and picks the rows of each
tensor. Both read one table (megatron_layout.py), so they hold for any layout; with fewer key-value heads than
tensor-parallel ranks, too, where a shard may begin inside a head.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.engines import Manifest
from trainers.megatron_layout import Entry, Rows, Sizes, layout

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
VALUE_HEAD = "value_head."  # a critic's, which no model of Hugging Face's has
Chunks = Sequence[nn.Module]  # a rank's part of a model as build_model returns it, each wrapped by megatron-core or not


def manifest(chunks: Chunks) -> Manifest:
    """Name, shape and dtype of what `hf_tensors` yields, in its order. From the configuration alone: moves nothing."""
    table = Table(chunks)
    return {rows.name: entry.spec(rows, table.dtype) for entry, _, rows in table.tensors()}


@torch.no_grad()
def load_hf(
    chunks: Chunks,
    state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    into: Callable[[nn.Parameter], Tensor] = lambda parameter: parameter.data,
) -> None:
    """Fill this rank's shards from full tensors under Hugging Face's names. No rank waits for another.

    Args:
        state: (name, tensor) in any order, in any dtype, on any device. Of a mapping, which may read a file as it is
            asked, only what this rank has a part of is read. The padding of the vocabulary becomes 0.
        into: what to fill of each parameter, of its shape: itself, its master.

    Raises:
        ValueError: a tensor is missing, given twice, of another shape (only where it is read), or none of this model's.
    """
    table = Table(chunks)
    expected = {rows.name: entry.spec(rows, table.dtype).shape for entry, _, rows in table.tensors()}
    here = {rows.name: (entry, rows) for entry, member, rows in table.tensors() if table.has(entry, member)}
    for entry in table.entries:
        if entry.padded:
            for parameter in table.holders(entry):
                into(parameter).zero_()
    missing = dict.fromkeys(expected)
    for name, read in _readers(state):
        if not table.knows(name, expected):
            continue
        if name not in missing:
            raise ValueError(f"{name} was given twice")
        del missing[name]
        if name in here or not isinstance(state, Mapping):
            tensor = read()
            if tuple(tensor.shape) != expected[name]:
                raise ValueError(f"{name} must be {expected[name]}, got {tuple(tensor.shape)}")
            if name in here:
                table.place(*here[name], tensor, into)
    if missing:
        some = ", ".join([*missing][:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(f"{len(missing)} of the model's {len(expected)} tensors are missing: {some}")


def _readers(state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    if isinstance(state, Mapping):
        yield from ((name, lambda name=name: state[name]) for name in state)
    else:
        yield from ((name, lambda tensor=tensor: tensor) for name, tensor in state)


@torch.no_grad()
def hf_tensors(
    chunks: Chunks, of: Callable[[nn.Parameter], Tensor] = lambda parameter: parameter.detach()
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of the whole model, in the manifest's order, on every rank.

    Collective over the ranks that share a copy of the model (tensor, pipeline and expert parallel): all must iterate to
    the end. One parameter is whole at a time, of experts one a rank. A tensor may be a view of the parameter.

    Args:
        of: what to export of each parameter, of its shape, all of one dtype: itself, its gradient, its master.
    """
    table = Table(chunks)
    sample = of(next(iter(table.parameters.values())))
    for entry in table.entries:
        own = table.holders(entry, copies=False)
        wholes = table.gather(entry, of(own[0]).detach() if own else None, sample)
        for member, whole in zip(entry.tensors, wholes, strict=True):
            for rows in member:
                yield rows.name, rows.of(whole)


class Table:
    """The entries of a model beside this rank's parameters and groups."""

    def __init__(self, chunks: Chunks):
        from megatron.core import parallel_state as ranks

        models = [unwrap(chunk) for chunk in chunks]
        named = (pair for model in models for pair in named_parameters(model))
        self.parameters = {name: p for name, p in named if not name.startswith(VALUE_HEAD)}
        self.tp, self.etp = ranks.get_tensor_model_parallel_group(), ranks.get_expert_tensor_parallel_group()
        self.pp, self.ep = ranks.get_pipeline_model_parallel_group(), ranks.get_expert_model_parallel_group()
        self.hf, config = models[0].hf_config, models[0].config
        self.dtype = config.params_dtype
        sizes = Sizes(self.tp.size(), self.etp.size(), self.ep.size(), models[0].vocab_size)
        device = next(iter(self.parameters.values())).device
        self.entries = list(layout(self.hf, config, sizes, device))
        known = {name for entry in self.entries for name in (*entry.names, *entry.copies)}
        for name in self.parameters:
            if name not in known:
                raise ValueError(f"{name}: no tensor of a {self.hf.model_type} model is known for this parameter")

    def tensors(self) -> Iterator[tuple[Entry, int, Rows]]:
        """(entry, its expert-parallel rank or 0, tensor)."""
        for entry in self.entries:
            for member, tensors in enumerate(entry.tensors):
                for rows in tensors:
                    yield entry, member, rows

    def holders(self, entry: Entry, *, copies: bool = True) -> list[nn.Parameter]:
        """This rank's parameters that have a part of it."""
        names = (*entry.names, *entry.copies) if copies else entry.names
        return [self.parameters[name] for name in names if name in self.parameters]

    def has(self, entry: Entry, member: int) -> bool:
        return bool(self.holders(entry)) and (not entry.expert or member == self.ep.rank())

    def knows(self, name: str, expected: Mapping[str, Any]) -> bool:
        """False for what transformers passes over too. ValueError for any other name that is none of the model's."""
        if name in expected:
            return True
        if name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and self.hf.tie_word_embeddings):
            return False
        near = difflib.get_close_matches(name, expected, 1)
        hint = f"; near it: {near[0]}" if near else ""
        raise ValueError(f"{name} is no tensor of this {self.hf.model_type} model{hint}")

    def place(self, entry: Entry, rows: Rows, tensor: Tensor, into: Callable[[nn.Parameter], Tensor]) -> None:
        """Copy this rank's part of a full tensor to where it belongs."""
        rank = (self.etp if entry.expert else self.tp).rank()
        for parameter in self.holders(entry):
            data = into(parameter)
            if entry.dim == 1:
                data.copy_(tensor.narrow(1, rank * data.shape[1], data.shape[1]))
            else:
                start = rank * data.shape[0] if entry.dim == 0 else 0
                source, target = rows.within(start, start + data.shape[0])
                data[target] = tensor[source].to(data.device, data.dtype)

    def gather(self, entry: Entry, shard: Tensor | None, sample: Tensor) -> list[Tensor]:
        """The whole, on every rank; of an expert, those of all expert-parallel ranks.

        Shards cross the pipeline first, which spans nodes, and are joined over the ranks within one after that.
        """
        group = self.etp if entry.expert else self.tp
        shape = list(entry.shape)
        if entry.dim is not None:
            shape[entry.dim] //= group.size()
        if shard is None:
            shard = sample.new_empty(shape)
        elif list(shard.shape) != shape:
            raise ValueError(f"{entry.names[0]} must be {shape} on this rank, got {list(shard.shape)}")
        if self.pp.size() > 1:
            shard = shard.contiguous()
            dist.broadcast(shard, group=self.pp, group_src=entry.stage)
        whole = shard if entry.dim is None else joined(shard, entry.dim, group)
        return list(joined(whole[None], 0, self.ep)) if entry.expert else [whole]


def joined(shard: Tensor, dim: int, group: Any) -> Tensor:
    """The group's shards, of one shape, along `dim` in rank order, on every rank."""
    if group.size() == 1:
        return shard
    first = shard.movedim(dim, 0).contiguous()
    whole = first.new_empty(group.size() * first.shape[0], *first.shape[1:])
    all_gather(whole, first, group=group)
    return whole.movedim(0, dim)


def unwrap(model: nn.Module) -> nn.Module:
    """Without what megatron-core puts around one: DistributedDataParallel, Float16Module."""
    while not hasattr(model, "hf_config") and hasattr(model, "module"):
        model = model.module
    return model


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """With a layer's number in the whole model; in a module list they begin at 0 on every stage."""
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):
            number, rest = name.removeprefix("decoder.layers.").split(".", 1)
            name = f"decoder.layers.{model.decoder.layers[int(number)].layer_number - 1}.{rest}"
        yield name, parameter
