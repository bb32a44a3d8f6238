"""A transformers model cut in two: a frozen trunk that runs once per rollout, and the part above it that trains.

Frozen parameters are stored in the compute dtype (trunk, embedded engine and export share them). So are trained ones
with param_dtype=bfloat16, beside float32 masters (masters.py); no autocast is needed then, for norms, rotary tables and
value heads compute in float32 by themselves. Otherwise trained parameters are float32 under autocast.

Rows are right-padded inside this file only: under a causal mask a real token never sees what follows it, so padding
needs no mask and changes no number. With packing nothing is padded: the sequences lie back to back in one row, and an
attention of our own keeps them apart.

Legend: B sequences, S padded length, T packed tokens, D hidden size.
"""

import copy
import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from trainers.masters import Masters
from trainers.packed_attention import Sequences, use_packed_attention
from trainers.rollout import RolloutBatch

T = TypeVar("T")


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, which in a log are noise."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_model(path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal language model in the CPU's memory, or a ValueError that says what `path` was."""
    try:
        with quiet():
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    except OSError as error:
        raise ValueError(f"no causal language model could be loaded from {str(path)!r}: {error}") from error


def decoder_of(model: PreTrainedModel) -> nn.Module:
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


def is_cut(model: PreTrainedModel, num_layers_unfrozen: int) -> bool:
    """Whether training the top `num_layers_unfrozen` decoder layers leaves a frozen trunk below them."""
    return 0 <= num_layers_unfrozen < model.config.num_hidden_layers


class SplitTransformer(nn.Module):
    """Decoder of `model`, its top `num_layers_unfrozen` layers trained; everything if that is -1 or covers all layers.

    With a trunk, the embeddings, the final norm and the output head are frozen as well: a tied head would otherwise
    move the trunk under the reference's feet. What the caller has frozen before (all but LoRA's adapters) stays so.
    With `packing` the model takes `Packed` rows, else `Padded` ones.

    Args:
        model: float32, as loaded.
        dtype: products are computed in it, and frozen parameters stored.
        param_dtype: trained parameters are stored in it: `dtype`, with float32 masters, or float32.
        device: where the model goes, one parameter after the other in the dtype that it is stored in; None: stays.
        fused: on a GPU, layers in fewer kernels (fused_layers.py).
        output_used: whether passes use the output head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_layers_unfrozen: int,
        dtype: torch.dtype,
        *,
        packing: bool = False,
        param_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        fused: bool = True,
        output_used: bool = True,
    ):
        super().__init__()
        self.model, self.dtype, self.packing = model, dtype, packing
        decoder, num_layers = decoder_of(model), model.config.num_hidden_layers
        if packing:
            use_packed_attention(model, decoder)
        self.trunk, self.top, candidates = None, decoder, model
        if is_cut(model, num_layers_unfrozen):
            cut = num_layers - num_layers_unfrozen
            self.trunk, self.top = _part(decoder, 0, cut), _part(decoder, cut, num_layers)
            self.trunk.norm = nn.Identity()
            self._check_split(decoder)
            candidates = self.top.layers
        trained = {id(p) for p in candidates.parameters() if p.requires_grad}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        self.masters = Masters()
        self.root: nn.Module | None = None  # of a model that is cut over the ranks (sharding.py)
        self.output_used = output_used
        self._store(param_dtype, device or model.device)
        if fused and model.device.type == "cuda":
            from trainers.fused_layers import fuse_layers  # triton comes with torch for GPUs alone

            fuse_layers(model)

    def _store(self, param_dtype: torch.dtype, device: torch.device) -> None:
        for parameter in self.model.parameters():
            stored = param_dtype if parameter.requires_grad else self.dtype
            if parameter.requires_grad and stored != torch.float32:
                self.masters.store(parameter, device, stored)
            else:
                parameter.data = parameter.data.to(device, stored)
        self.model.to(device)  # buffers
        self.mixed = any(parameter.dtype != self.dtype for parameter in self.model.parameters())

    def run(self, compute: Callable[[], T]) -> T:
        """`compute()`, which is one pass, or what of it reads parameters."""
        return compute() if self.root is None else self.root(compute)

    @property
    def lockstep(self) -> bool:
        """Whether passes are collective: every rank must make as many."""
        return self.root is not None

    def view(self, batch: RolloutBatch, device: torch.device) -> "View":
        """The batch as this model takes it."""
        return (Packed if self.packing else Padded)(batch, device)

    def trunk_hidden(self, ids: Tensor, **where: Any) -> Tensor:
        """[B, S] ids -> [B, S, D]: the frozen trunk's output, no gradient. `where`: the view's, see there."""
        assert self.trunk is not None
        with torch.no_grad():
            return self.trunk(input_ids=ids, use_cache=False, **where).last_hidden_state

    def hidden(self, ids: Tensor, trunk_hidden: Tensor | None, top: nn.Module | None = None, **where: Any) -> Tensor:
        """[B, S, D] final hidden states of the trained part (or of `top`, a copy of it)."""
        top = top or self.top
        given = {"input_ids": ids} if self.trunk is None else {"inputs_embeds": trunk_hidden}
        with self.autocast():
            return top(**given, use_cache=False, **where).last_hidden_state

    def autocast(self) -> torch.autocast:
        """Products in the compute dtype; nothing to do where everything is stored in it."""
        return autocast(self.dtype if self.mixed else torch.float32, self.model.device)

    def output_layer(self) -> nn.Module:
        head = self.model.get_output_embeddings()
        return head if head is not None else nn.Identity()

    @torch.no_grad()
    def _check_split(self, decoder: nn.Module) -> None:
        """Architectures differ in what they do outside their layers: a probe tells whether the cut is clean."""
        ids = torch.arange(8).remainder(self.model.config.vocab_size)[None].to(self.model.device)
        whole = decoder(input_ids=ids, use_cache=False).last_hidden_state
        cut = self.top(inputs_embeds=self.trunk_hidden(ids), use_cache=False).last_hidden_state
        if not torch.allclose(whole, cut, rtol=1e-4, atol=1e-4):
            raise ValueError(
                f"num_layers_unfrozen: {type(self.model).__name__} cannot be cut into trunk and top "
                f"(outputs differ by {(whole - cut).abs().max():.2g}); use -1 to train the whole model"
            )


def _part(decoder: nn.Module, start: int, stop: int) -> nn.Module:
    """The decoder with layers [start, stop) only; modules are shared, so names and storage stay the model's."""
    if not hasattr(decoder, "layers"):
        raise ValueError(
            f"num_layers_unfrozen: {type(decoder).__name__} has no `layers` to cut; use -1 to train the whole model"
        )
    part = copy.copy(decoder)
    part._modules = dict(decoder._modules)
    part.layers = nn.ModuleList(list(decoder.layers)[start:stop])
    part.config = copy.deepcopy(decoder.config)
    part.config.num_hidden_layers = stop - start
    if getattr(part.config, "layer_types", None):
        part.config.layer_types = decoder.config.layer_types[start:stop]
    return part


def checkpoint_layers(model: PreTrainedModel, key: str) -> None:
    """Keep each decoder layer's input alone for backward, which computes the layer again. Same gradients, bit for bit.

    transformers' own switch works in train mode only, which would turn dropout on; hence not through it. Raises
    ValueError, naming the setting `key`, for an architecture whose layers transformers cannot checkpoint either.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{key}: {type(model).__name__} has no layers that can be computed again in backward")
    for layer in layers:
        # A bound method in a partial, not a closure: a deep copy of the model then calls its own layers.
        layer.forward = functools.partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(hidden, *args, **kwargs)
    # A layer whose input needs no gradient, over a frozen part, has parameters that do.
    anchor = torch.empty(0, requires_grad=True)
    return _Checkpoint.apply(anchor, hidden, functools.partial(_on, forward, args, kwargs))


def _on(forward: Callable[..., Any], args: Any, kwargs: Any, hidden: Tensor) -> Any:
    return forward(hidden, *args, **kwargs)


class _Checkpoint(torch.autograd.Function):
    """torch's own, `use_reentrant=False`, hooks every tensor that a layer saves: of a small layer on a GPU that takes
    the host longer than the layer takes the device. Nothing here needs what it can do: only the hidden states have a
    history, no layer draws random numbers in eval mode, and each backward is made once."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, run: Callable[[Tensor], Any]) -> Any:
        ctx.run, ctx.device = run, hidden.device.type
        ctx.autocast = torch.is_autocast_enabled(ctx.device), torch.get_autocast_dtype(ctx.device)
        ctx.save_for_backward(hidden)
        return run(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[1])
        enabled, dtype = ctx.autocast
        with torch.enable_grad(), torch.autocast(ctx.device, dtype=dtype, enabled=enabled, cache_enabled=False):
            out = ctx.run(hidden)
        torch.autograd.backward(out, *grads)
        return None, hidden.grad, None


def autocast(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    # Each matrix is used once per context: a cache of its half-precision copy would only hold memory.
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False)


class View:
    """Packed sequences as the model's input, [B, S], and where each selected token's predecessor lies in it."""

    def __init__(self, batch: RolloutBatch, device: torch.device, shape: tuple[int, int], place: Tensor):
        self.shape, self.place, self.device = shape, place, device  # place: [T] flat index into [B * S]
        self.where: dict[str, Any] = {}  # what the model must be told beside the ids
        self.selected = batch.mask.nonzero().squeeze(-1)  # [N] packed index of each trained token
        # The hidden state before a token predicts it. The first token of a sequence is never selected.
        self.before = (place[self.selected] - 1).to(device)  # [N] flat index
        self.last = place[batch.cu_seqlens[1:] - 1].to(device)  # [number of sequences] flat index
        self.ids = self.lay_out(batch.tokens)
        self.packed_trunk_hidden = batch.trunk_hidden

    def lay_out(self, packed: Tensor) -> Tensor:
        """[T, ...] -> [B, S, ...], zeros in the padding."""
        flat = packed.new_zeros(self.shape[0] * self.shape[1], *packed.shape[1:])
        flat[self.place] = packed
        return flat.view(*self.shape, *packed.shape[1:]).to(self.device)

    @property
    def trunk_hidden(self) -> Tensor | None:
        """[B, S, D], what an earlier pass of the policy's trunk left in the batch."""
        return None if self.packed_trunk_hidden is None else self.lay_out(self.packed_trunk_hidden)

    def unpad(self, hidden: Tensor) -> Tensor:
        """[B, S, ...] -> [T, ...] on the CPU."""
        return hidden.flatten(0, 1).cpu()[self.place]

    def scatter(self, values: Tensor) -> Tensor:
        """[N] values of the selected tokens -> [T], 0 elsewhere."""
        packed = torch.zeros(self.place.numel(), dtype=values.dtype)
        packed[self.selected] = values.detach().cpu()
        return packed


class Padded(View):
    """One right-padded row per sequence."""

    def __init__(self, batch: RolloutBatch, device: torch.device):
        shape = (len(batch), int(batch.lengths.max()))
        super().__init__(batch, device, shape, batch.sequence_ids * shape[1] + batch.positions)


class Packed(View):
    """All sequences back to back in one row; the model is told their positions, its attention their bounds."""

    def __init__(self, batch: RolloutBatch, device: torch.device):
        total = batch.tokens.numel()
        super().__init__(batch, device, (1, total), torch.arange(total))
        self.where = {
            "position_ids": batch.positions[None].to(device),
            "sequences": Sequences.of(batch.lengths, device),
        }


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("cluster.device=cuda but torch sees no CUDA device; use cpu or auto")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The compute dtype. On a CPU "auto" times one product in both: only recent CPUs multiply bfloat16 faster."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16
    best = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
    factors = {dtype: (torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)) for dtype in best}
    for _ in range(40):  # taken in turns, the best of many: other programs on the cores must not decide
        for dtype, (a, b) in factors.items():
            start = time.perf_counter()
            a @ b
            best[dtype] = min(best[dtype], time.perf_counter() - start)
    return torch.bfloat16 if best[torch.bfloat16] * 1.3 < best[torch.float32] else torch.float32


def pick_param_dtype(name: str, dtype: torch.dtype, device: torch.device, key: str) -> torch.dtype:
    """How trained parameters are stored, as `name`, the setting `key`.param_dtype, has it; `dtype`: the compute dtype.

    Raises:
        ValueError: neither the compute dtype nor float32.
    """
    if name == "auto":
        return dtype if device.type == "cuda" else torch.float32
    if name not in (name_of(dtype), "float32"):
        raise ValueError(
            f"{key}.param_dtype={name} needs policy.dtype={name}: expected float32 or the compute dtype, which is "
            f"{name_of(dtype)} here"
        )
    return getattr(torch, name)


def name_of(dtype: torch.dtype) -> str:
    """As settings write it: bfloat16."""
    return str(dtype).removeprefix("torch.")


def limits_of(model: PreTrainedModel) -> tuple[int, int | None]:
    """Rows of the embedding, and positions if they are limited."""
    config = model.config.get_text_config()
    return model.get_input_embeddings().num_embeddings, getattr(config, "max_position_embeddings", None)


def model_facts(path: Path | str, model: PreTrainedModel) -> dict[str, object]:
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "model": str(path),
        "architecture": type(model).__name__,
        "parameters": total,
        "trained_parameters": trained,
    }
