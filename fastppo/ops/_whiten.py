"""`fastppo.whiten` of float32 by the compiled kernels: count, mean and squares about the mean, which are merged over
the ranks, and a pass that applies them. On a CPU they take a pass of their own; on a GPU the kernel of gae takes them
on its way. For `fastppo.gae(whiten=True)`."""

import torch
import torch.distributed as dist
from torch import Tensor

from fastppo import _build
from fastppo.dtypes import byte_flags
from fastppo.reference.advantages import WHITEN_EPS


def whiten(
    x: Tensor, mask: Tensor | None, moments: Tensor | None = None, *, group: "dist.ProcessGroup | None"
) -> Tensor:
    """x: float32, on a CPU, or on a GPU with its moments. Two all-reduces, in which every rank takes part, as in the
    definition."""
    if moments is None:
        moments = torch.ops.fastppo.moments(x, mask)
    if dist.is_available() and dist.is_initialized():
        moments = _merge(moments, group)
    result: Tensor = torch.ops.fastppo.apply_moments(x, mask, moments)
    return result


def _merge(moments: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
    """Count, mean and squares of all ranks: every rank's squares, moved from its own mean to the mean of all."""
    count, mean, squares = moments.unbind()
    total = torch.stack((count * mean, count))
    dist.all_reduce(total, group=group)
    mean_of_all = total[0] / total[1].clamp_min(1)
    squares = squares + count * (mean - mean_of_all).square()
    dist.all_reduce(squares, group=group)
    return torch.stack((total[1], mean_of_all, squares))


def _flat_mask(mask: Tensor | None) -> Tensor | None:
    """Bytes, contiguous like x."""
    flags = byte_flags(mask)
    return None if flags is None else flags.contiguous()


def _moments(x: Tensor, mask: Tensor | None) -> Tensor:
    x, flat = x.contiguous(), _flat_mask(mask)
    moments = torch.empty(3, dtype=torch.float64)
    module, _ = _build.load()
    if module is None:
        selected = x.flatten().double() if flat is None else x[flat != 0].double()
        count = torch.tensor(float(selected.numel()), dtype=torch.float64)
        mean = selected.sum() / count.clamp_min(1)
        return torch.stack((count, mean, (selected - mean).square().sum()))
    module.moments(
        x.data_ptr(), 0 if flat is None else flat.data_ptr(), x.numel(), moments.data_ptr(), torch.get_num_threads()
    )
    return moments


def _apply_moments(x: Tensor, mask: Tensor | None, moments: Tensor) -> Tensor:
    x, flat = x.contiguous(), _flat_mask(mask)
    module, _ = _build.load()
    if module is None:
        y = (x.double() - moments[1]) * torch.rsqrt(moments[2] / moments[0].clamp_min(1) + WHITEN_EPS)
        return y.float() if flat is None else torch.where(flat != 0, y, 0.0).float()
    out = torch.empty_like(x)
    on_gpu = x.device.type == "cuda"
    module.whiten(
        x.data_ptr(),
        0 if flat is None else flat.data_ptr(),
        x.numel(),
        moments.data_ptr(),
        out.data_ptr(),
        WHITEN_EPS,
        torch.get_num_threads(),
        x.device.index if on_gpu else -1,
        torch.cuda.current_stream(x.device).cuda_stream if on_gpu else 0,
    )
    return out


_LIBRARY = torch.library.Library("fastppo", "FRAGMENT")
_LIBRARY.define("moments(Tensor x, Tensor? mask) -> Tensor")
_LIBRARY.define("apply_moments(Tensor x, Tensor? mask, Tensor moments) -> Tensor")
for _name, _function in (("moments", _moments), ("apply_moments", _apply_moments)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")


@torch.library.register_fake("fastppo::moments", lib=_LIBRARY)
def _(x: Tensor, mask: Tensor | None) -> Tensor:
    return torch.empty(3, dtype=torch.float64)


@torch.library.register_fake("fastppo::apply_moments", lib=_LIBRARY)
def _(x: Tensor, mask: Tensor | None, moments: Tensor) -> Tensor:
    return torch.empty(x.shape, device=x.device)
