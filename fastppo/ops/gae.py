"""Generalised advantage estimation, for padded, time-major and packed sequences.

    A_t = r_t + gamma * V_next - V_t + gamma * lambda * A_next,   returns_t = A_t + V_t,

walked from each sequence's end, where "next" is the next *selected* position, so that what the mask leaves out vanishes
(Schulman et al. 2015, arXiv:1506.02438, eq. 16; decoupled lambdas: VAPO, arXiv:2504.05118).

Nothing is kept for backward: advantages and returns are constants of the loss. Every position's answer needs its whole
sequence on this rank; under tensor parallel all ranks hold the same inputs and get bitwise the same answer.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastppo import _build
from fastppo.backends import resolve
from fastppo.checks import FLOATS, check_device, check_floats_like, check_like, check_tensor, contents_checked
from fastppo.dtypes import CODES, accumulator, byte_flags
from fastppo.ops._tracing import traced
from fastppo.ops._whiten import whiten as whiten_by_kernel
from fastppo.ops.advantages import whiten as whiten_anywhere
from fastppo.packing import check_cu_seqlens_contents, check_cu_seqlens_form
from fastppo.reference.gae import gae as definition

Strided = tuple[Tensor, int, int]  # a tensor and its strides of rows and of time


class GAEOutput(NamedTuple):
    advantages: Tensor
    returns: Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    lam_returns: float | Tensor | None = None,
    mask: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    time_dim: int = -1,
    whiten: bool = False,
    group: "dist.ProcessGroup | None" = None,
    backend: Literal["auto", "cuda", "triton", "cpu", "torch"] = "auto",
) -> GAEOutput:
    """Advantages and returns by generalised advantage estimation.

    Each sequence is walked from its end with acc = 0 and nv = 0. At a selected position

        A_t = r_t + gamma * nv - v_t + gamma * lam * acc,   then acc = A_t, nv = v_t,

    after acc = nv = 0 where `terminated`, acc = 0 and nv = the bootstrap value where `truncated` (terminated wins).
    At an unselected position nothing is read, acc and nv are carried over and both outputs are 0: a tool's output
    inside a dialogue vanishes. Whatever an unselected position holds, NaN included, reaches nothing.

    Args:
        rewards: [B, T], [T, B] with time_dim=0, or [T]: one sequence, or B packed ones with cu_seqlens. float16,
            bfloat16, float32 or float64, in reward units, any strides.
        values: like rewards, in any of these dtypes; values[t] is V of the state before token t.
        gamma: in [0, 1].
        lam: in [0, 1], a number or [B].
        lam_returns: in [0, 1], a number or [B]: the lambda of the returns. None: lam.
        mask: like rewards, selected where != 0. None: every position.
        terminated: like rewards, true where != 0: step t's own transition ended the episode.
        truncated: like rewards, true where != 0: step t's own transition was cut off; needs bootstrap_values.
        bootstrap_values: V of the state after a cut-off, like values or [B]; read only where truncated. With
            truncated=None, [B] bootstraps each sequence's last selected position unless it is terminated, and the full
            shape is read nowhere.
        cu_seqlens: [B + 1], int32 or int64: first 0, last T, non-decreasing.
        time_dim: the dimension of time.
        whiten: advantages (not returns) become (A - mean) * rsqrt(var + 1e-8) over the selected positions of all ranks.
        group: the process group of these ranks; None: this process, or the default group where one is initialised.
        backend: "auto", "cuda", "triton", "cpu" or "torch" (the reference).

    Returns:
        GAEOutput(advantages, returns): like rewards, float32 (float64 where an input is, computed by the reference). No
        gradient flows.

    Raises:
        TypeError: integer or other unsupported dtypes, a DTensor.
        ValueError: shapes or devices disagree, gamma or a lambda outside [0, 1], truncated without bootstrap_values,
            cu_seqlens together with a time_dim other than -1, or with wrong contents; an unknown backend. Contents are
            looked at on a CPU, and on a GPU under FASTPPO_CHECK=1.
        RuntimeError: a backend that is not available here.
    """
    num_seqs = _check(rewards, values, mask, terminated, truncated, bootstrap_values, cu_seqlens, time_dim)
    _check_unit("gamma", gamma)
    _check_lam("lam", lam, rewards, num_seqs)
    if lam_returns is not None:
        _check_lam("lam_returns", lam_returns, rewards, num_seqs)
    number, per_seq = (0.0, lam) if isinstance(lam, Tensor) else (lam, None)
    of_returns, of_returns_per_seq = (None, lam_returns) if isinstance(lam_returns, Tensor) else (lam_returns, None)
    # Where a kernel of ours whitens: on a GPU from moments that the kernel of gae takes on its way.
    kernel = ""
    if whiten and rewards.device.type in ("cpu", "cuda"):
        dtype = accumulator(rewards, values, bootstrap_values)
        kernel, _ = resolve("gae", backend, rewards.device, dtype)
    others = (mask, terminated, truncated, bootstrap_values, cu_seqlens, per_seq, of_returns_per_seq)
    op = torch.ops.fastppo.gae if traced(rewards, values, *others) else _gae
    advantages, returns, moments = op(
        rewards,
        values,
        gamma,
        number,
        per_seq,
        of_returns,
        of_returns_per_seq,
        mask,
        terminated,
        truncated,
        bootstrap_values,
        cu_seqlens,
        time_dim,
        backend,
        kernel == "cuda",
    )
    if kernel in ("cpu", "cuda"):
        advantages = whiten_by_kernel(advantages, mask, moments if kernel == "cuda" else None, group=group)
    elif whiten:
        advantages = whiten_anywhere(advantages, mask, group=group)
    return GAEOutput(advantages, returns)


def _check(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None,
    terminated: Tensor | None,
    truncated: Tensor | None,
    bootstrap_values: Tensor | None,
    cu_seqlens: Tensor | None,
    time_dim: int,
) -> int:
    """Everything that needs no tensor's values; returns the number of sequences."""
    check_tensor("rewards", rewards)
    if rewards.dim() not in (1, 2):
        raise ValueError(f"rewards must have shape [T], [B, T] or [T, B], got {list(rewards.shape)}")
    check_floats_like("values", values, "rewards", rewards)
    for name, flag in (("mask", mask), ("terminated", terminated), ("truncated", truncated)):
        if flag is not None:
            check_tensor(name, flag, None)
            check_like(name, flag, "rewards", rewards)

    if cu_seqlens is not None:
        check_cu_seqlens_form(cu_seqlens, like=rewards)
        if time_dim != -1:
            raise ValueError(f"time_dim must be -1 with cu_seqlens, got {time_dim}")
        if rewards.dim() != 1:
            raise ValueError(f"rewards must have shape [T] with cu_seqlens, got {list(rewards.shape)}")
    elif not -rewards.dim() <= time_dim < rewards.dim():
        raise ValueError(f"time_dim must be in [{-rewards.dim()}, {rewards.dim() - 1}], got {time_dim}")
    num_seqs = _num_seqs(rewards, cu_seqlens, time_dim)

    if bootstrap_values is not None:
        check_tensor("bootstrap_values", bootstrap_values)
        if bootstrap_values.shape != values.shape and bootstrap_values.shape != (num_seqs,):
            raise ValueError(
                f"bootstrap_values must have values' shape {list(values.shape)} or [B] = [{num_seqs}], "
                f"got {list(bootstrap_values.shape)}"
            )
        check_device("bootstrap_values", bootstrap_values, "rewards", rewards)
    elif truncated is not None:
        raise ValueError("bootstrap_values must be given with truncated, got None")
    return num_seqs


def _num_seqs(rewards: Tensor, cu_seqlens: Tensor | None, time_dim: int) -> int:
    if cu_seqlens is not None:
        return cu_seqlens.shape[0] - 1
    return 1 if rewards.dim() == 1 else rewards.shape[_row_dim(time_dim)]


def _row_dim(time_dim: int) -> int:
    """The other dimension of [B, T] or [T, B]."""
    return 1 - time_dim % 2


def _check_unit(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


def _check_lam(name: str, value: float | Tensor, rewards: Tensor, num_seqs: int) -> None:
    if not isinstance(value, Tensor):
        return _check_unit(name, value)
    check_tensor(name, value, FLOATS)
    if value.shape != (num_seqs,):
        raise ValueError(f"{name} must be a number or have shape [B] = [{num_seqs}], got {list(value.shape)}")
    check_device(name, value, "rewards", rewards)


def _gae(
    rewards: Tensor,
    values: Tensor,
    gamma: float,
    lam: float,
    lam_per_seq: Tensor | None,
    lam_returns: float | None,
    lam_returns_per_seq: Tensor | None,
    mask: Tensor | None,
    terminated: Tensor | None,
    truncated: Tensor | None,
    bootstrap_values: Tensor | None,
    cu_seqlens: Tensor | None,
    time_dim: int,
    backend: str,
    with_moments: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The registered op, unwhitened: checks contents, where they may be looked at, and calls the backend.

    The third output is count, mean and squares about the mean of the selected advantages, float64 [3], which backend
    "cuda" can give; [0] where they are not asked for.
    """
    for name, per_seq in (("lam", lam_per_seq), ("lam_returns", lam_returns_per_seq)):
        if per_seq is not None and contents_checked(per_seq):
            outside = ~((per_seq >= 0) & (per_seq <= 1))
            if bool(outside.any()):
                raise ValueError(f"{name} must be in [0, 1], got {per_seq[outside][0].item()}")
    num_steps = rewards.shape[time_dim]
    if cu_seqlens is not None and contents_checked(cu_seqlens):
        check_cu_seqlens_contents(cu_seqlens, num_steps)

    dtype = accumulator(rewards, values, bootstrap_values)
    chosen, _ = resolve("gae", backend, rewards.device, dtype)
    moments = torch.empty(3 if with_moments else 0, dtype=torch.float64, device=rewards.device)
    if chosen == "torch":
        with torch.no_grad():
            advantages, returns = definition(
                rewards,
                values,
                gamma=gamma,
                lam=lam if lam_per_seq is None else lam_per_seq,
                lam_returns=lam_returns if lam_returns_per_seq is None else lam_returns_per_seq,
                mask=mask,
                terminated=terminated,
                truncated=truncated,
                bootstrap_values=bootstrap_values,
                cu_seqlens=cu_seqlens,
                time_dim=time_dim,
            )
        return advantages, returns, moments

    advantages = torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device)
    returns = torch.empty_like(advantages)
    num_seqs = _num_seqs(rewards, cu_seqlens, time_dim)

    row_dim = _row_dim(time_dim)

    def strided(x: Tensor) -> Strided:  # with its strides of rows and of time
        both = x.stride()
        return (x, 0, both[0]) if len(both) == 1 else (x, both[row_dim], both[time_dim])

    bootstrap = final = None
    if bootstrap_values is not None:
        if truncated is not None and bootstrap_values.shape == values.shape:
            bootstrap = strided(bootstrap_values)
        elif bootstrap_values.shape == (num_seqs,):
            one_per_seq = (bootstrap_values, bootstrap_values.stride(0), 0)
            bootstrap, final = (None, one_per_seq) if truncated is None else (one_per_seq, None)

    # Converted tensors keep a name until the launch: their memory must not be another's before it is read.
    flags = [byte_flags(x) for x in (mask, terminated, truncated)]
    inputs = [
        strided(rewards),
        strided(values),
        *(None if x is None else strided(x) for x in flags),
        bootstrap,
        final,
    ]
    lams = [None if x is None else x.to(torch.float32).contiguous() for x in (lam_per_seq, lam_returns_per_seq)]
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.contiguous()
    lam_of_returns = lam if lam_returns is None else lam_returns
    separate = lam_returns is not None or lam_returns_per_seq is not None

    if chosen == "triton":
        from fastppo.kernels.gae import gae as triton_gae

        triton_gae(
            inputs,
            (lams[0], lams[1]),
            cu_seqlens,
            strided(advantages),
            strided(returns),
            num_seqs,
            num_steps,
            gamma,
            lam,
            lam_of_returns,
            separate,
        )
        return advantages, returns, moments

    _, out_row_stride, out_time_stride = strided(advantages)
    on_gpu = chosen == "cuda"
    scratch = None
    if on_gpu:
        size = _build.module().gae_scratch(
            num_seqs, num_steps, cu_seqlens is not None, out_time_stride != 1, separate, with_moments
        )
        scratch = torch.empty(size, dtype=torch.uint8, device=rewards.device) if size else None
    _build.module().gae(
        *(None if x is None else (x[0].data_ptr(), *x[1:], CODES.get(x[0].dtype, 0)) for x in inputs),
        *(0 if x is None else x.data_ptr() for x in lams),
        0 if cu_seqlens is None else cu_seqlens.data_ptr(),
        cu_seqlens is not None and cu_seqlens.dtype == torch.int64,
        advantages.data_ptr(),
        returns.data_ptr(),
        out_row_stride,
        out_time_stride,
        num_seqs,
        num_steps,
        gamma,
        lam,
        lam_of_returns,
        separate,
        0 if scratch is None else scratch.data_ptr(),
        moments.data_ptr() if with_moments else 0,
        torch.get_num_threads(),
        rewards.device.index if on_gpu else -1,
        torch.cuda.current_stream(rewards.device).cuda_stream if on_gpu else 0,
    )
    return advantages, returns, moments


_LIBRARY = torch.library.Library("fastppo", "FRAGMENT")
_LIBRARY.define(
    "gae(Tensor rewards, Tensor values, float gamma, float lam, Tensor? lam_per_seq, float? lam_returns, "
    "Tensor? lam_returns_per_seq, Tensor? mask, Tensor? terminated, Tensor? truncated, Tensor? bootstrap_values, "
    "Tensor? cu_seqlens, int time_dim, str backend, bool with_moments=False) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("gae", _gae, "CompositeExplicitAutograd")
# No gradient flows: autograd steps aside.
_LIBRARY.impl("gae", torch.library.fallthrough_kernel, "Autograd")


@torch.library.register_fake("fastppo::gae", lib=_LIBRARY)
def _(rewards: Tensor, values: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulator(rewards, values, options[8])
    shape, device = rewards.shape, rewards.device
    with_moments = len(options) > 12 and options[12]
    return (
        torch.empty(shape, dtype=dtype, device=device),
        torch.empty(shape, dtype=dtype, device=device),
        torch.empty(3 if with_moments else 0, dtype=torch.float64, device=device),
    )
