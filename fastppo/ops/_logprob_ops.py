"""The registered ops under `logprob` and the linear ops: one list of them for every device, dtype and backend.

    logprob_stats     a rank's columns -> (m, s - 1, t, zy) per row     (`vocab.py` says what they are)
    logprob_combine   all ranks' statistics -> logprobs, entropy, and what backward needs, (m, s - 1, t/s, d_y) per row
    logprob_forward   both, where this rank has all columns: one kernel on a GPU
    logprob_dlogits   the logits' gradient, anew; logprob_dlogits_ writes it into the logits

"cpu" is csrc/logprob, "triton" is kernels/logprob.py, "torch" is `_logprob_rows.py`. Shapes are checked in the public
functions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo import _build
from fastppo.backends import resolve
from fastppo.checks import check_like, check_number, check_tensor, contents_checked
from fastppo.dtypes import CODES, accumulator
from fastppo.ops import _logprob_rows as rows
from fastppo.ops._row_blocks import for_blocks, rows_of, unit_columns
from fastppo.vocab import combine_stats

ROWS_AT_ONCE = 256  # that are moved by way of a copy


class RowOptions(NamedTuple):
    """What all these ops are told about the rows, in the order of their schemas."""

    temperature: float  # read where there is no tensor of them
    softcap: float | None
    ignore_index: int
    with_entropy: bool
    start: int  # id of this rank's first column
    used: int  # this rank's columns that are real ids
    backend: str


def check_rows(
    targets: Tensor, temperature: float | Tensor, softcap: float | None, ignore_index: int, size: int
) -> None:
    """What the public ops say of these arguments; `size` ids are in the vocabulary."""
    if softcap is not None:
        check_number("softcap", softcap, above=0)
    if isinstance(temperature, Tensor):
        check_tensor("temperature", temperature)
        check_like("temperature", temperature, "targets", targets)
        if contents_checked(temperature):
            wrong = ~(temperature > 0) & (targets != ignore_index)
            if bool(wrong.any()):
                raise ValueError(f"temperature must be > 0, got {temperature[wrong].min().item()}")
    else:
        check_number("temperature", temperature, above=0)
    if contents_checked(targets) and targets.numel():
        low, high = torch.aminmax(targets)
        if low < 0 or high >= size:  # or ignored
            outside = ((targets < 0) | (targets >= size)) & (targets != ignore_index)
            if bool(outside.any()):
                raise IndexError(
                    f"targets must be in [0, {size}) or ignore_index={ignore_index}, got {targets[outside][0].item()}"
                )


def _logprob_stats(logits: Tensor, targets: Tensor, temperature: Tensor | None, *options: Any) -> Tensor:
    opt = RowOptions(*options)
    chosen, _ = resolve("logprob", opt.backend, logits.device, logits.dtype)
    if chosen == "torch":
        return rows.stats(logits, targets, temperature, *options[:-1])
    if chosen == "triton":
        stats: Tensor = _triton().stats(logits, targets, temperature, opt)
        return stats
    result = torch.empty(targets.numel(), 4, dtype=torch.float32, device=logits.device)
    logits = unit_columns(logits)
    targets, temperature = targets.contiguous(), _float32(temperature)

    def call(logits: Tensor, first: int, count: int) -> None:
        arguments = _row_arguments(logits, targets, temperature, first, count, opt)
        _build.module().logprob_stats(*arguments, result.data_ptr() + 16 * first, torch.get_num_threads())

    for_blocks(call, logits)
    return result


def _logprob_combine(
    gathered: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    scalar_temperature: float,
    ignore_index: int,
    with_entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    count = targets.numel()
    chosen, _ = resolve("logprob", backend, gathered.device, gathered.dtype)
    if chosen == "torch":
        dtype = gathered.dtype
        divisor = scalar_temperature if temperature is None else temperature.double()
        m, excess, t, zy = combine_stats(gathered, divisor).unbind(-1)
        log_s, mean_d = excess.log1p(), t / (1 + excess)
        d_y = ((zy - m) / divisor).to(dtype).double()  # rounded here, so that backward sees what forward saw
        used = targets != ignore_index
        logprobs = torch.where(used, d_y - log_s, 0.0).to(dtype)
        entropy = torch.where(used, log_s - mean_d, 0.0).to(dtype) if with_entropy else logprobs.new_empty(0)
        kept = torch.where(used[:, None], torch.stack((m, excess, mean_d, d_y), -1), 0.0).to(dtype)
        return logprobs, entropy, kept
    if chosen == "triton":
        opt = RowOptions(scalar_temperature, None, ignore_index, with_entropy, 0, 0, backend)
        results: tuple[Tensor, Tensor, Tensor] = _triton().combine(gathered, targets, temperature, opt)
        return results
    gathered, targets, temperature = gathered.contiguous(), targets.contiguous(), _float32(temperature)
    logprobs = torch.empty(count, dtype=torch.float32)
    entropy = torch.empty(count if with_entropy else 0, dtype=torch.float32)
    kept = torch.empty(count, 4, dtype=torch.float32)
    _build.module().logprob_combine(
        gathered.data_ptr(),
        gathered.shape[0],
        count,
        targets.data_ptr(),
        _address(temperature),
        scalar_temperature,
        ignore_index,
        logprobs.data_ptr(),
        entropy.data_ptr() if with_entropy else 0,
        kept.data_ptr(),
    )
    return logprobs, entropy, kept


def _logprob_forward(
    logits: Tensor, targets: Tensor, temperature: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    opt = RowOptions(*options)
    chosen, _ = resolve("logprob", opt.backend, logits.device, logits.dtype)
    if chosen == "triton":
        results: tuple[Tensor, Tensor, Tensor] = _triton().forward(logits, targets, temperature, opt)
        return results
    gathered = _logprob_stats(logits, targets, temperature, *options).unsqueeze(0)
    return _logprob_combine(
        gathered, targets, temperature, opt.temperature, opt.ignore_index, opt.with_entropy, opt.backend
    )


def _logprob_dlogits(logits: Tensor, *arguments: Any) -> Tensor:
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_dlogits(dlogits, logits, *arguments)
    return dlogits


def _logprob_dlogits_(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    kept: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    *options: Any,
) -> None:
    """With a `source` after the options the i-th row of logits becomes the gradient of their row source[i], which is i
    or lies beyond all that are written."""
    opt = RowOptions(*options[: len(RowOptions._fields)])
    source: Tensor | None = options[-1] if len(options) > len(opt) else None
    per_row = targets, temperature, kept, grad_logprobs, grad_entropy
    if source is None:
        _write_dlogits(logits, logits, *per_row, *opt)
        return
    out = logits[: source.numel()]
    if resolve("logprob", opt.backend, logits.device, logits.dtype)[0] == "triton" and logits.stride(1) == 1:
        _triton().write_dlogits(out, logits, *per_row, opt._replace(with_entropy=grad_entropy is not None), source)
        torch.autograd.graph.increment_version(logits)
        return
    for moved in (source >= source.numel()).nonzero()[:, 0].split(ROWS_AT_ONCE):
        out[moved] = logits.index_select(0, source[moved])
    _write_dlogits(out, out, *per_row, *opt)


def _write_dlogits(
    out: Tensor,
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    kept: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    *options: Any,
) -> None:
    opt = RowOptions(*options)
    chosen, _ = resolve("logprob", opt.backend, logits.device, logits.dtype)
    if chosen == "torch":
        upstream = kept.new_zeros(targets.numel(), 2)
        for column, grad in enumerate((grad_logprobs, grad_entropy)):
            if grad is not None:
                upstream[:, column] = grad
        opt = opt._replace(with_entropy=grad_entropy is not None)
        return rows.write_dlogits(out, logits, targets, temperature, kept, upstream, *opt[:-1])
    if out is logits and logits.stride(-1) != 1 and logits.shape[-1] != 1:
        logits = logits.contiguous()
        _write_dlogits(logits, logits, targets, temperature, kept, grad_logprobs, grad_entropy, *options)
        out.copy_(logits)
        return
    in_place = out is logits
    logits = unit_columns(logits)
    opt = opt._replace(with_entropy=grad_entropy is not None)
    write = _triton().write_dlogits if chosen == "triton" else _write_dlogits_cpu
    write(logits if in_place else out, logits, targets, temperature, kept, grad_logprobs, grad_entropy, opt)
    if in_place:
        torch.autograd.graph.increment_version(out)  # who saved the logits learns that they are gone


def _write_dlogits_cpu(
    out: Tensor,
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    kept: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    opt: RowOptions,
) -> None:
    targets, temperature, kept = targets.contiguous(), _float32(temperature), kept.contiguous()
    grads = [None if grad is None else grad.float() for grad in (grad_logprobs, grad_entropy)]

    def call(out: Tensor, logits: Tensor, first: int, count: int) -> None:
        upstream: list[int] = []
        for grad in grads:
            upstream += (0, 0) if grad is None else (grad.data_ptr() + 4 * first * grad.stride(0), grad.stride(0))
        _build.module().logprob_dlogits(
            *_row_arguments(logits, targets, temperature, first, count, opt),
            (out.data_ptr(), *rows_of(out)),
            kept.data_ptr() + 16 * first,
            *upstream,
            torch.get_num_threads(),
        )

    for_blocks(call, out, logits)


def _triton() -> Any:
    from fastppo.kernels import logprob

    return logprob


def _row_arguments(
    logits: Tensor, targets: Tensor, temperature: Tensor | None, first: int, count: int, opt: RowOptions
) -> tuple[Any, ...]:
    return (
        (logits.data_ptr(), *rows_of(logits)),
        CODES[logits.dtype],
        targets.data_ptr() + 8 * first,
        0 if temperature is None else temperature.data_ptr() + 4 * first,
        opt.temperature,
        opt.softcap or 0.0,
        opt.ignore_index,
        opt.with_entropy,
        count,
        logits.shape[-1],
        opt.start,
        opt.used,
    )


def _float32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


ROW_SCHEMA = (
    "float scalar_temperature, float? softcap, int ignore_index, bool with_entropy, int start, int used, str backend"
)
_GRADIENT = (
    "Tensor targets, Tensor? temperature, Tensor kept, Tensor? grad_logprobs, Tensor? grad_entropy, " + ROW_SCHEMA
)
_LIBRARY = torch.library.Library("fastppo", "FRAGMENT")
_LIBRARY.define(f"logprob_stats(Tensor logits, Tensor targets, Tensor? temperature, {ROW_SCHEMA}) -> Tensor")
_LIBRARY.define(
    "logprob_combine(Tensor gathered, Tensor targets, Tensor? temperature, float scalar_temperature, "
    "int ignore_index, bool with_entropy, str backend) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    f"logprob_forward(Tensor logits, Tensor targets, Tensor? temperature, {ROW_SCHEMA}) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(f"logprob_dlogits(Tensor logits, {_GRADIENT}) -> Tensor")
_LIBRARY.define(f"logprob_dlogits_(Tensor(a!) logits, {_GRADIENT}, Tensor? source=None) -> ()")
_LIBRARY.impl("logprob_stats", _logprob_stats, "CompositeExplicitAutograd")
_LIBRARY.impl("logprob_combine", _logprob_combine, "CompositeExplicitAutograd")
_LIBRARY.impl("logprob_forward", _logprob_forward, "CompositeExplicitAutograd")
_LIBRARY.impl("logprob_dlogits", _logprob_dlogits, "CompositeExplicitAutograd")
_LIBRARY.impl("logprob_dlogits_", _logprob_dlogits_, "CompositeExplicitAutograd")


@torch.library.register_fake("fastppo::logprob_stats", lib=_LIBRARY)
def _(logits: Tensor, targets: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(targets.numel(), 4, dtype=accumulator(logits))


@torch.library.register_fake("fastppo::logprob_combine", lib=_LIBRARY)
def _(
    gathered: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    scalar: float,
    ignored: int,
    with_entropy: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    count = targets.numel()
    return (
        gathered.new_empty(count),
        gathered.new_empty(count if with_entropy else 0),
        gathered.new_empty(count, 4),
    )


@torch.library.register_fake("fastppo::logprob_forward", lib=_LIBRARY)
def _(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    scalar: float,
    softcap: float | None,
    ignored: int,
    with_entropy: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    count, dtype = targets.numel(), accumulator(logits)
    return (
        logits.new_empty(count, dtype=dtype),
        logits.new_empty(count if with_entropy else 0, dtype=dtype),
        logits.new_empty(count, 4, dtype=dtype),
    )


@torch.library.register_fake("fastppo::logprob_dlogits", lib=_LIBRARY)
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.register_fake("fastppo::logprob_dlogits_", lib=_LIBRARY)
def _(*_: Any) -> None:
    return None
