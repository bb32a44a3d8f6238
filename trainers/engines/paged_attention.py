"""Attention over a paged KV cache, as transformers calls a model's attention: prompts packed in one row, then one token
per sequence. A model that asks for what it does not have (sinks, biases, other masks) is refused by name.

Legend: H query heads, K key-value heads, D head size, T tokens of all prompts, N sequences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from trainers.engines.pages import Pages
from trainers.packed_attention import Sequences, packed_varlen

NAME = "fastppo_paged"
REFUSED = ("s_aux", "sinks", "position_bias")
REFUSED_ROPE = ("dynamic", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Prefill:
    """Whole prompts, back to back in one row, into fresh pages."""

    pages: Pages
    sequences: Sequences
    page: Tensor  # [T] int64
    place: Tensor  # [T] int64, within the page


@dataclass(frozen=True)
class Decode:
    """One new token per sequence, each in a row of its own."""

    pages: Pages
    table: Tensor  # [N, M] int32
    positions: Tensor  # [N] int64


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    paged: Prefill | Decode | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, K, T, D] (Prefill), or [N, H or K, 1, D] (Decode) -> [., ., H, D]."""
    for name in REFUSED:
        if options.get(name) is not None:
            raise ValueError(f"{type(module).__name__} asks for {name}, which paged attention does not have")
    if attention_mask is not None or paged is None or not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} asks for something other than causal attention over pages")
    if sliding_window is None and _slides(module):
        raise ValueError(
            f"{type(module).__name__} has a sliding window in its mask alone, and over pages there is none"
        )
    layer, scale = int(module.layer_idx), query.shape[-1] ** -0.5 if scaling is None else scaling
    kv = paged.pages.kv[layer]
    heads, head_dim = kv.shape[2], kv.shape[4]
    found = (key.shape[1], query.shape[-1], key.shape[-1], value.shape[-1])
    if found != (heads, head_dim, head_dim, head_dim):
        mine = f"{type(module).__name__} has {found[0]} heads of sizes {found[1:]} in layer {layer}"
        raise ValueError(f"{mine}, and the cache {heads} of {head_dim}")
    if isinstance(paged, Decode):
        attend = _decode_triton if query.is_cuda else decode_reference
        step = [x[:, :, 0] for x in (query, key, value)]
        how = {"scale": scale, "window": sliding_window, "softcap": softcap}
        out = attend(*step, kv[0], kv[1], paged.table, paged.positions, **how)
        return out[:, None], None
    paged.pages.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), paged.page, paged.place)
    flash = packed_varlen(query, value) if sliding_window is None and softcap is None else None
    if flash is not None:
        return flash(query, key, value, paged.sequences, scale), None
    groups = query.shape[1] // key.shape[1]
    heads = (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
    parts = [x.split(paged.sequences.lengths, 2) for x in heads]
    out = [_causal(*qkv, scale, sliding_window, softcap) for qkv in zip(*parts, strict=True)]
    return torch.cat(out, 2).transpose(1, 2), None


def _slides(module: nn.Module) -> bool:
    """Whether the model makes this layer's mask with a window, as transformers decides it."""
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    if types is not None:
        return bool(types[module.layer_idx] == "sliding_attention")
    return bool(getattr(config, "sliding_window", None))


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """[1, H, S, D] each -> [1, H, S, D]: one sequence."""
    if window is None and softcap is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    place = torch.arange(q.shape[2], device=q.device)
    seen = place[:, None] >= place
    if window is not None:
        seen = seen & (place > place[:, None] - window)
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    scores = softcap * torch.tanh((q @ k.transpose(-1, -2)).float() * scale / softcap)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype) @ v


def _decode_triton(*tensors: Tensor, **options: Any) -> Tensor:
    from trainers.engines.decode_attention import decode_attention  # triton comes with torch for GPUs alone

    return decode_attention(*tensors, **options)


def decode_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What `decode_attention` computes, sequence by sequence in plain PyTorch; same arguments."""
    outs, size = [], k_pages.shape[2]
    for n, position in enumerate(positions.tolist()):
        pages = table[n, : position // size + 1].long()
        k_pages[pages[-1], :, position % size], v_pages[pages[-1], :, position % size] = key[n], value[n]
        k, v = (x[pages].transpose(0, 1).flatten(1, 2)[:, : position + 1] for x in (k_pages, v_pages))
        q = query[n].unflatten(0, (k.shape[0], -1))  # [K, H / K, D]
        scores = (q @ k.transpose(-1, -2)).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is not None:
            scores[..., : max(position - window + 1, 0)] = -torch.inf
        outs.append((scores.softmax(-1).to(v.dtype) @ v).flatten(0, 1))
    return torch.stack(outs)


def use_paged_attention(model: PreTrainedModel) -> None:
    """From now on `model` takes `paged`.

    Raises:
        ValueError: an architecture whose attention transformers does not look up by name, or that does something else
            over long sequences.
    """
    name = type(model).__name__
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in REFUSED_ROPE:  # then a token's keys depend on how long other sequences are
                raise ValueError(f"{name} has rotary embeddings of type {kind}, whose frequencies depend on the batch")
    config = model.config.get_text_config()
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES)):
        raise ValueError(f"{name} has layers of type {others[0]}, which paged attention does not have")
    AttentionInterface.register(NAME, paged_attention)
    model.set_attn_implementation(NAME)
    if (found := model.config._attn_implementation) != NAME:
        raise ValueError(f"{name} keeps to an attention of its own ({found})")
