"""Decoder layers in fewer kernels, for generation: a decoding step is bound by launches of kernels on little data.

RMSNorm, rotary embedding and gated MLP activation, each one Triton kernel where transformers needs three to ten. What a
model does is not guessed from names: each replacement is compared with the module's own result on random input and used
only where it agrees. No gradient: these are for an engine's copy of the model.
"""

# What a kernel's parameters are depends on the call.
# mypy: allow-untyped-defs, allow-incomplete-defs

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from transformers import PreTrainedModel


@triton.jit
def _rms_norm(x, weight, out, eps, x_row, D: tl.constexpr, WIDTH: tl.constexpr, ONE_PLUS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    value = tl.load(x + row * x_row + d, mask=d < D, other=0.0)
    v = value.to(tl.float32)
    v = v * (1 / tl.sqrt(tl.sum(v * v, 0) / D + eps))
    w = tl.load(weight + d, mask=d < D, other=0.0)
    # Gemma multiplies by 1 + weight before it rounds, the others round first.
    v = v * (1 + w.to(tl.float32)) if ONE_PLUS else v.to(value.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(out + row * D + d, v, mask=d < D)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False) -> Tensor:
    """[..., D] -> [..., D] in x's dtype: x / rms(x), in float32, times weight [D] (or 1 + weight)."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    width = triton.next_power_of_2(size)
    if len(rows):
        _rms_norm[(len(rows),)](
            rows, weight, out, eps, rows.stride(0), D=size, WIDTH=width, ONE_PLUS=one_plus,
            num_warps=min(max(width // 512, 1), 8),
        )  # fmt: skip
    return out.view(x.shape)


@triton.jit
def _rotate(
    query, key, cos, sin, out_q, out_k, H, K, q_b, q_h, q_s, k_b, k_h, k_s, cos_b, cos_s,
    S, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, s = row // S, row % S
    d = tl.arange(0, WIDTH)
    inside = d < HALF
    at = b * cos_b + s * cos_s + d
    cos_low = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + at + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < H:
        source, target = query + b * q_b + head * q_h + s * q_s, out_q + ((b * H + head) * S + s) * 2 * HALF
    else:
        head -= H
        source, target = key + b * k_b + head * k_h + s * k_s, out_k + ((b * K + head) * S + s) * 2 * HALF
    low = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + d, low * cos_low - high * sin_low, mask=inside)
    tl.store(target + HALF + d, high * cos_high + low * sin_high, mask=inside)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query [B, H, S, D], key [B, K, S, D], cos and sin [B or 1, S, D] -> both rotated, in their dtypes, contiguous.

    Dimension i of the lower half turns with dimension i of the upper half (Su et al. 2021, arXiv:2104.09864).
    """
    (b, h, s, d), k = query.shape, key.shape[1]
    out_q, out_k = query.new_empty(b, h, s, d), key.new_empty(b, k, s, d)
    _rotate[(b * s, h + k)](
        query, key, cos, sin, out_q, out_k, h, k, *query.stride()[:3], *key.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), s, HALF=d // 2, WIDTH=triton.next_power_of_2(d // 2),
        num_warps=1,
    )  # fmt: skip
    return out_q, out_k


@triton.jit
def _silu_mul(gate, up, out, total, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + i, mask=i < total, other=0.0)
    x = g.to(tl.float32)
    x = (x / (1 + tl.exp(-x))).to(g.dtype).to(tl.float32)
    tl.store(out + i, x * tl.load(up + i, mask=i < total, other=0.0).to(tl.float32), mask=i < total)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both contiguous and of one shape."""
    out = torch.empty_like(gate)
    _silu_mul[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), BLOCK=1024)
    return out


def fuse_layers(model: PreTrainedModel) -> None:
    """Let `model`'s norms and gated MLPs use the kernels above, where they do the same."""
    checked: dict[Any, bool] = {}
    for module in model.modules():
        replacement = _norm(module) or _mlp(module)
        if replacement is None:
            continue
        kind = (type(module), *(tuple(p.shape) for p in module.parameters()))
        if kind not in checked:  # all layers alike
            checked[kind] = _same(module, module.forward, replacement)
        if checked[kind]:
            module.forward = replacement


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    one_plus = "Gemma" in type(module).__name__  # and then compared
    return functools.partial(rms_norm, weight=weight, eps=eps, one_plus=one_plus)


def _mlp(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if len(list(module.children())) != 4 or not all(type(part) is nn.Linear for part in parts):
        return None
    return functools.partial(_gated, *parts)


def _gated(gate: nn.Module, up: nn.Module, down: nn.Module, x: Tensor) -> Tensor:
    return down(silu_mul(gate(x), up(x)))


@torch.no_grad()
def _same(module: nn.Module, own: Callable[[Tensor], Tensor], ours: Callable[[Tensor], Tensor]) -> bool:
    weight = next(module.parameters())
    x = torch.randn(5, 3, weight.shape[-1], device=weight.device, generator=_generator(weight.device)).to(weight.dtype)
    return _close(own(x), ours(x))


def _close(own: Tensor, ours: Tensor) -> bool:
    """Up to some roundings in their dtype."""
    error, scale = (own.float() - ours.float()).abs().max(), own.float().abs().max()
    return own.dtype == ours.dtype and bool(error <= 8 * torch.finfo(own.dtype).eps * scale)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


class FusedRotary:
    """`with fused:` the model's attention layers rotate by the kernel above. transformers calls a function of the
    model's own file, so for as long as the block lasts that name is another function's."""

    def __init__(self, model: PreTrainedModel):
        files = {type(module).__module__ for module in model.modules() if hasattr(module, "layer_idx")}
        modules = [sys.modules[name] for name in files]
        self.replaced: list[tuple[ModuleType, Any, Any]] = []
        for module in modules:
            own = getattr(module, "apply_rotary_pos_emb", None)
            if own is not None and _rotates_alike(own, model.dtype, model.device):
                self.replaced.append((module, own, functools.partial(_rotate_or, own)))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        try:
            for module, _, ours in self.replaced:
                module.apply_rotary_pos_emb = ours
            yield
        finally:
            for module, own, _ in self.replaced:
                module.apply_rotary_pos_emb = own


def _rotates_alike(own: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> bool:
    draw = _generator(device)
    q, k, angle = (
        torch.randn(shape, device=device, generator=draw) for shape in ((2, 4, 3, 16), (2, 2, 3, 16), (2, 3, 8))
    )
    angle = torch.cat([angle, angle], -1)
    arguments = [x.to(dtype) for x in (q, k, angle.cos(), angle.sin())]
    try:
        theirs = own(*arguments)
    except TypeError:
        return False
    return all(_close(a, b) for a, b in zip(theirs, rotate(*arguments), strict=True))


def _rotate_or(
    own: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any
) -> Any:
    plain = not more and not options and q.shape[-1] == k.shape[-1] == cos.shape[-1] and cos.dim() == 3
    contiguous = all(x.stride(-1) == 1 for x in (q, k, cos, sin)) and cos.stride() == sin.stride()
    return rotate(q, k, cos, sin) if plain and contiguous else own(q, k, cos, sin, *more, **options)
