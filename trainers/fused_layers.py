"""Decoder layers in fewer kernels: RMSNorm, rotary embedding and gated MLP activation, each one Triton kernel forward
and one backward, where transformers needs three to ten that read and write the same data again.

What a model does is not guessed from names: each replacement is compared with the module's own result and gradient on
random input and used only where they agree. Backward is made once: no second derivatives.
"""

# What a kernel's parameters are depends on the call.
# mypy: allow-untyped-defs, allow-incomplete-defs

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from transformers import PreTrainedModel


@triton.jit
def _norm_forward(
    x, weight, out, eps, x_row, N, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ONE_PLUS: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDTH)[None]
    mask = (n < N) & (d < D)
    value = tl.load(x + n * x_row + d, mask=mask, other=0.0)
    v = value.to(tl.float32)
    v = v * (1 / tl.sqrt(tl.sum(v * v, 1) / D + eps))[:, None]
    w = tl.load(weight + d, mask=d < D, other=0.0)
    # Gemma multiplies by 1 + weight before it rounds, the others round first.
    v = v * (1 + w.to(tl.float32)) if ONE_PLUS else v.to(value.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(out + n * D + d, v, mask=mask)


@triton.jit
def _norm_backward(
    grad, x, weight, grad_x, grad_weight, eps, grad_row, x_row, N,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ONE_PLUS: tl.constexpr,
):  # fmt: skip
    """y = x * r * w with r = 1 / rms(x): dx = r * (g w - x r^2 mean(g w x)), dw = sum over rows of g x r."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    d = tl.arange(0, WIDTH)[None]
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    w = 1 + w if ONE_PLUS else w
    total = tl.zeros([1, WIDTH], tl.float32)
    for tile in range(program, tl.cdiv(N, ROWS), programs):
        n = tile * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (n < N) & (d < D)
        v = tl.load(x + n * x_row + d, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + n * grad_row + d, mask=mask, other=0.0).to(tl.float32)
        r = (1 / tl.sqrt(tl.sum(v * v, 1) / D + eps))[:, None]
        v = v * r
        total += tl.sum(g * v, 0)[None]
        g = g * w
        tl.store(grad_x + n * D + d, r * (g - v * (tl.sum(g * v, 1) / D)[:, None]), mask=mask)
    tl.store(grad_weight + program * D + d, total, mask=d < D)


def _once() -> None:
    if torch.is_grad_enabled():  # torch's once_differentiable lets some wrong second derivatives through
        raise RuntimeError("fused layers have no second derivative (create_graph=True): set policy.fused_layers=false")


def _as_rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _tile(rows: int, size: int) -> dict[str, int]:
    """Of few rows each has a program of its own; of many, some share one, so that it has enough to read."""
    width = triton.next_power_of_2(size)
    together = 1 if rows < 4096 else max(2048 // width, 1)
    return {"D": size, "ROWS": together, "WIDTH": width, "num_warps": min(max(width * together // 512, 1), 8)}


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, one_plus):
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.one_plus = eps, one_plus
        return _rms_norm(x, weight, eps, one_plus)

    @staticmethod
    def backward(ctx, grad):
        _once()
        x, weight = ctx.saved_tensors
        rows, grads, size = _as_rows(x), _as_rows(grad), x.shape[-1]
        tile = _tile(len(rows), size)
        programs = min(triton.cdiv(len(rows), tile["ROWS"]), 512)
        grad_x = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        parts = torch.empty(programs, size, dtype=torch.float32, device=x.device)
        if programs:
            _norm_backward[(programs,)](
                grads, rows, weight, grad_x, parts, ctx.eps, grads.stride(0), rows.stride(0), len(rows), **tile,
                ONE_PLUS=ctx.one_plus,
            )  # fmt: skip
        return grad_x.view(x.shape), parts.sum(0).to(weight.dtype), None, None


def _rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    rows = _as_rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        tile = _tile(*rows.shape)
        _norm_forward[(triton.cdiv(len(rows), tile["ROWS"]),)](
            rows, weight, out, eps, rows.stride(0), len(rows), **tile, ONE_PLUS=one_plus
        )
    return out.view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False) -> Tensor:
    """[..., D] -> [..., D] in x's dtype: x / rms(x), in float32, times weight [D] (or 1 + weight).

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(x, weight, eps, one_plus)
    return _rms_norm(x, weight, eps, one_plus)


@triton.jit
def _rotate_kernel(
    query, key, cos, sin, out_q, out_k, H, K, q_b, q_h, q_s, k_b, k_h, k_s, cos_b, cos_s,
    S, HALF: tl.constexpr, WIDTH: tl.constexpr, BACKWARD: tl.constexpr,
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
    # Written with heads beside each other for every token, as the projections gave them and attention wants them.
    if head < H:
        source, target = query + b * q_b + head * q_h + s * q_s, out_q + (row * H + head) * 2 * HALF
    else:
        head -= H
        source, target = key + b * k_b + head * k_h + s * k_s, out_k + (row * K + head) * 2 * HALF
    low = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + d, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:  # the transposed rotation
        tl.store(target + d, low * cos_low + high * sin_high, mask=inside)
        tl.store(target + HALF + d, high * cos_high - low * sin_low, mask=inside)
    else:
        tl.store(target + d, low * cos_low - high * sin_low, mask=inside)
        tl.store(target + HALF + d, high * cos_high + low * sin_high, mask=inside)


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> tuple[Tensor, Tensor]:
    (b, h, s, d), k = query.shape, key.shape[1]
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    out_q, out_k = query.new_empty(b, s, h, d), key.new_empty(b, s, k, d)
    _rotate_kernel[(b * s, h + k)](
        query, key, cos, sin, out_q, out_k, h, k, *query.stride()[:3], *key.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), s, HALF=d // 2, WIDTH=triton.next_power_of_2(d // 2),
        BACKWARD=backward, num_warps=1,
    )  # fmt: skip
    return out_q.transpose(1, 2), out_k.transpose(1, 2)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(query, key, cos, sin)

    @staticmethod
    def backward(ctx, grad_query, grad_key):
        _once()
        return *_rotate(grad_query, grad_key, *ctx.saved_tensors, backward=True), None, None


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query [B, H, S, D], key [B, K, S, D], cos and sin [B or 1, S, D] -> both rotated, in their dtypes.

    Dimension i of the lower half turns with dimension i of the upper half (Su et al. 2021, arXiv:2104.09864). No
    gradient for cos and sin.
    """
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return _Rotate.apply(query, key, cos, sin)
    return _rotate(query, key, cos, sin)


@triton.jit
def _silu_mul_forward(gate, up, out, total, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + i, mask=i < total, other=0.0)
    x = g.to(tl.float32)
    x = (x / (1 + tl.exp(-x))).to(g.dtype).to(tl.float32)
    tl.store(out + i, x * tl.load(up + i, mask=i < total, other=0.0).to(tl.float32), mask=i < total)


@triton.jit
def _silu_mul_backward(grad, gate, up, grad_gate, grad_up, total, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < total
    g = tl.load(grad + i, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(gate + i, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-x))
    tl.store(grad_gate + i, g * u * sigmoid * (1 + x * (1 - sigmoid)), mask=mask)
    tl.store(grad_up + i, g * x * sigmoid, mask=mask)


BLOCK = 1024


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    if gate.numel():
        _silu_mul_forward[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK=BLOCK)
    return out


class _SiLUMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _silu_mul(gate, up)

    @staticmethod
    def backward(ctx, grad):
        _once()
        gate, up = ctx.saved_tensors
        grads = torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            _silu_mul_backward[(triton.cdiv(gate.numel(), BLOCK),)](
                grad.contiguous(), gate, up, *grads, gate.numel(), BLOCK=BLOCK
            )
        return grads


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of one shape (Shazeer 2020, arXiv:2002.05202)."""
    gate, up = gate.contiguous(), up.contiguous()
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _SiLUMul.apply(gate, up)
    return _silu_mul(gate, up)


def fuse_layers(model: PreTrainedModel, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
    """Let `model`'s norms, gated MLPs and attention layers use the kernels above, where they do the same.

    A replacement is found again by a deep copy of the model, computes with the copy's parameters, and stands in for one
    module alone: other models in the process are left as they are. `device`, `dtype`: where and in which the
    model will be, if not now.
    """
    checked: dict[Any, bool] = {}
    for module in model.modules():
        replacement = _norm(module) or _mlp(module)
        if replacement is not None:
            # All layers alike, of which each may have settings and an activation of its own.
            settings = sorted((name, x) for name, x in vars(module).items() if isinstance(x, int | float | str))
            parts = (*settings, *map(type, module.children()))
            kind = (type(module), *parts, *((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters()))
            if kind not in checked:
                there = (module, replacement)
                if device is not None:
                    there = copy.deepcopy(there)  # the replacement's module is the copy
                    there[0].to(device, dtype)
                checked[kind] = _same(*there)
            if checked[kind]:
                module.forward = replacement
        elif hasattr(module, "layer_idx") and getattr(module.forward, "func", None) is not _rotating:
            own = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
            if own is not None and own not in checked:
                checked[own] = _rotates_alike(own, dtype or model.dtype, device or model.device)
            if own is not None and checked[own]:
                module.forward = functools.partial(_rotating, module.forward)


# What a module raises that wants other arguments, or gives something else than one tensor or two.
UNLIKE = (TypeError, ValueError, AttributeError, IndexError, RuntimeError)


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weighted = isinstance(getattr(module, "weight", None), nn.Parameter)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float) or not weighted:
        return None
    one_plus = "Gemma" in type(module).__name__  # and then compared
    return functools.partial(_normed, module, eps, one_plus)


def _normed(module: nn.Module, eps: float, one_plus: bool, x: Tensor) -> Tensor:
    if x.dtype != module.weight.dtype:  # float32 weights under autocast: the result is in another dtype
        return type(module).forward(module, x)
    return rms_norm(x, module.weight, eps, one_plus=one_plus)


def _mlp(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if len(list(module.children())) != 4 or not all(type(part) is nn.Linear for part in parts):
        return None
    return functools.partial(_gated, module)


def _gated(module: nn.Module, x: Tensor) -> Tensor:
    return module.down_proj(silu_mul(module.gate_proj(x), module.up_proj(x)))


def _rotating(own_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """transformers' attention calls a function of the model's own file: for this call that name is another's."""
    file = sys.modules[type(own_forward.__self__).__module__]  # type: ignore[attr-defined]
    own = file.apply_rotary_pos_emb
    try:
        file.apply_rotary_pos_emb = functools.partial(_rotate_or, own)
        return own_forward(*args, **kwargs)
    finally:
        file.apply_rotary_pos_emb = own


def _rotate_or(
    own: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any
) -> Any:
    plain = not more and not options and q.shape[-1] == k.shape[-1] == cos.shape[-1] and cos.dim() == 3
    alike = q.dtype == k.dtype == cos.dtype and cos.stride(-1) == 1 and cos.stride() == sin.stride()
    return rotate(q, k, cos, sin) if plain and alike else own(q, k, cos, sin, *more, **options)


def _same(module: nn.Module, ours: Callable[[Tensor], Tensor]) -> bool:
    """Result and gradients of a module and its replacement; not a matrix' own, which may take a gigabyte: it follows
    from those of its input and output."""
    weight, results = next(module.parameters()), []
    draw = torch.Generator(weight.device).manual_seed(0)
    x, grad = (torch.randn(5, 3, weight.shape[-1], device=weight.device, generator=draw) for _ in range(2))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.dim() == 1]
    try:
        for forward in (functools.partial(type(module).forward, module), ours):
            row = x.to(weight.dtype).requires_grad_()
            with torch.inference_mode(False), torch.enable_grad():
                out = forward(row)
                results.append((out.detach(), *torch.autograd.grad(out, [row, *trained], grad.to(out.dtype))))
    except UNLIKE:
        return False
    return all(_close(a, b) for a, b in zip(*results, strict=True))


def _rotates_alike(own: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> bool:
    draw, shapes = torch.Generator(device).manual_seed(0), ((2, 4, 3, 16), (2, 2, 3, 16), (2, 3, 8))
    q, k, angle = (torch.randn(shape, device=device, generator=draw) for shape in shapes)
    angle = torch.cat([angle, angle], -1)
    arguments = [x.to(dtype) for x in (q, k, angle.cos(), angle.sin())]
    try:
        return all(_close(a, b) for a, b in zip(own(*arguments), rotate(*arguments), strict=True))
    except UNLIKE:
        return False


def _close(own: Tensor, ours: Tensor) -> bool:
    """Up to some roundings in their dtype."""
    error, scale = (own.float() - ours.float()).abs().max(), own.float().abs().max()
    return own.dtype == ours.dtype and bool(error <= 8 * torch.finfo(own.dtype).eps * scale)
