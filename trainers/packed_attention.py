"""Attention over sequences that lie back to back in one row: no token sees another sequence, and no mask is made.

transformers looks a model's attention up by the name in its config and hands it what the forward pass was called with,
in gradient checkpointing's second pass too, so the lengths reach it there as `sequences`. Under a name without a mask
function of its own no mask is built. On a GPU in half precision this is torch's variable-length flash attention, else
one causal attention per sequence. What it does not have (windows, caps, sinks, caches) is refused by name.

Legend: H query heads, K key and value heads, T tokens of all sequences, D size of a head.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

NAME = "fastppo_packed"
REFUSED = ("sliding_window", "softcap", "s_aux", "sinks", "position_bias")  # as transformers calls them


@dataclass(frozen=True)
class Sequences:
    """Where the sequences of a packed row lie."""

    lengths: list[int]
    cu_seqlens: Tensor  # [B + 1] int32, on the row's device

    @classmethod
    def of(cls, lengths: Tensor, device: torch.device) -> "Sequences":
        return cls(lengths.tolist(), F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sequences: Sequences | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D], causal within each of `sequences`.

    Without `sequences` every row is one sequence, as in a pass over right-padded rows.
    """
    asked = {name: options[name] for name in REFUSED if options.get(name) is not None}
    asked |= {"dropout": dropout} if dropout else {}
    who = f"packing: {type(module).__name__} asks for"
    for name, wanted in asked.items():
        shown = f"={wanted}" if isinstance(wanted, int | float) else ""
        raise ValueError(f"{who} {name}{shown}, which packed attention does not have")
    if attention_mask is not None or query.shape[2] != key.shape[2] or not getattr(module, "is_causal", True):
        raise ValueError(f"{who} something other than causal attention over whole sequences without a mask")
    if sequences is not None and (flash := packed_varlen(query, value)) is not None:
        return flash(query, key, value, sequences, scaling), None
    lengths = [query.shape[2]] if sequences is None else sequences.lengths
    # Key and value heads are repeated here: given fewer of them, torch's kernels for float32 fall back to whole scores.
    groups = query.shape[1] // key.shape[1]
    parts = [x.split(lengths, 2) for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))]
    out = [F.scaled_dot_product_attention(*qkv, is_causal=True, scale=scaling) for qkv in zip(*parts, strict=True)]
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


def packed_varlen(query: Tensor, value: Tensor) -> Any:
    """`varlen_flash` for the torch at hand where its kernel takes such heads, else None."""
    head = query.shape[-1]
    if not query.is_cuda or head != value.shape[-1] or head % 8 or head > 256:
        return None
    dtype = _compute_dtype(value)
    supported = dtype in (torch.float16, torch.bfloat16) and torch.cuda.get_device_capability(query.device) >= (8, 0)
    return functools.partial(varlen_flash, torch_varlen()) if supported and torch_varlen() is not None else None


@functools.cache
def torch_varlen() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    return varlen_attn


def varlen_flash(
    attend: Any, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scaling: float | None
) -> Tensor:
    """[1, H, T, D] -> [1, T, H, D] by `attend`, torch's `varlen_attn` in any of its signatures so far."""
    # An op of torch's own that autocast does not know: rotary embeddings leave query and key in float32.
    q, k, v = (x[0].transpose(0, 1).to(_compute_dtype(value)) for x in (query, key, value))
    known, groups = inspect.signature(attend).parameters, q.shape[1] // k.shape[1]
    how: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "scale" in known:
        how["scale"] = scaling
    elif scaling is not None:
        q = q * (scaling * q.shape[-1] ** 0.5)
    if "enable_gqa" in known:
        how["enable_gqa"] = groups > 1
    else:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    longest, bounds = max(sequences.lengths), sequences.cu_seqlens
    return attend(q, k, v, bounds, bounds, longest, longest, **how)[None]


def _compute_dtype(like: Tensor) -> torch.dtype:
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype


def use_packed_attention(model: PreTrainedModel, decoder: nn.Module) -> None:
    """From now on `decoder` of `model` takes `sequences`.

    Raises:
        ValueError: a model whose layers do something else between tokens than causal attention over all before them.
    """
    name = type(model).__name__
    others = sorted(set(getattr(decoder.config, "layer_types", None) or ()) - {"full_attention"})
    if others:
        raise ValueError(f"packing: {name} has layers of type {others[0]}; only full_attention can be packed")
    AttentionInterface.register(NAME, packed_attention)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
    if (found := decoder.config._attn_implementation) != NAME:
        raise ValueError(f"packing: {name} keeps to an attention of its own ({found})")
    _check_packed(name, decoder, next(decoder.parameters()).device)


def own_attention(model: PreTrainedModel) -> None:
    """Undo `use_packed_attention` on a copy of the model."""
    if model.config._attn_implementation == NAME:
        model.set_attn_implementation("sdpa")


@torch.no_grad()
def _check_packed(name: str, decoder: nn.Module, device: torch.device) -> None:
    """Architectures differ in what else they do over a row: two sequences, alone and packed, tell."""
    lengths = torch.tensor([5, 7])
    ids = torch.arange(12, device=device).remainder(decoder.config.vocab_size)
    alone = [decoder(input_ids=part[None], use_cache=False).last_hidden_state for part in ids.split(lengths.tolist())]
    positions = torch.cat([torch.arange(n, device=device) for n in lengths.tolist()])
    where = {"position_ids": positions[None], "sequences": Sequences.of(lengths, device)}
    try:
        packed = decoder(input_ids=ids[None], use_cache=False, **where).last_hidden_state
    except TypeError as error:  # a forward pass without **kwargs
        raise ValueError(f"packing: {name} does not hand the sequences' lengths to its attention: {error}") from error
    error = (packed - torch.cat(alone, 1)).abs().max()
    if not error <= 1e-4:
        raise ValueError(f"packing: {name} gives other outputs when sequences are packed (they differ by {error:.2g})")
