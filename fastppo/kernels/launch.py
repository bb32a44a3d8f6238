"""Starts Triton kernels with little work on the host.

Triton's own front end binds and specialises every argument of every call, which takes longer than a kernel over 65536
tokens runs. Here the kernel that was compiled for a combination of dtypes and constants is kept, and later calls hand
their addresses to its launcher at once. A kernel for this takes, in this order: tensors (or None); numbers, each
annotated with its dtype; constants.
"""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# The launcher's arguments are no public interface of Triton: other versions go through its front end.
_LAUNCHER_IS_KNOWN = triton.__version__.split(".")[:2] == ["3", "6"]


def jit(function: Any, *, unaligned: bool = False) -> Any:
    """`triton.jit` of a kernel whose numbers make no variants of it: the arguments annotated with a dtype.

    With `unaligned` neither does where its tensors lie: it counts on no alignment that it has not found itself.
    """
    parameters = inspect.signature(function).parameters.values()
    plain = [x.name for x in parameters if x.annotation is not tl.constexpr]
    numbers = [x.name for x in parameters if isinstance(x.annotation, tl.dtype)]
    return triton.jit(function, do_not_specialize=plain if unaligned else numbers)


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr) -> None:
    """The stream's next kernel may be started now, if it begins with `wait_for_previous`, which holds it up."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr) -> None:
    """Until the stream's kernel before this one is done and what it wrote is seen."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@cache
def overlap_on(index: int | None) -> bool:
    """Whether a device starts a kernel before the one before it is done (programmatic dependent launch)."""
    known = hasattr(tl.extra.cuda, "gdc_wait") and torch.version.hip is None  # Triton 3.3 has none
    return index is not None and known and torch.cuda.get_device_capability(index) >= (9, 0)


class Launcher:
    """Calls one kernel on a grid of one dimension, on its tensors' device and the current stream there.

    `unaligned` as in `jit`; the options are Triton's. With `overlaps` the kernel's last constant is `overlap_on` its
    device; one that is `early` too may be started before the stream's kernel before it is done, and begins with
    `wait_for_previous`.
    """

    def __init__(
        self, kernel: Any, *, unaligned: bool = False, overlaps: bool = False, early: bool = False, **options: Any
    ) -> None:
        self.kernel, self.unaligned, self.options = kernel, unaligned, options
        self.overlaps, self.early = overlaps, early
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor | None],
        numbers: Sequence[float],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        first = tensors[0]
        assert first is not None
        index: int | None = first.device.index
        if index is not None and torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self(programs, tensors, numbers, constants, warps)
            return
        if self.overlaps:
            constants = (*constants, overlap_on(index))
        if index is None:  # CPU: interpreted
            self.kernel[(programs,)](*tensors, *numbers, *constants)
            return
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        aligned = self.unaligned
        if not aligned:
            together = 0
            for address in addresses:
                together |= address
            aligned = together % 16 == 0
        key = (index, warps, constants, *[None if x is None else x.dtype for x in tensors])
        launch = self.compiled.get(key) if aligned else None
        if launch is not None:
            launch(programs, 1, 1, torch._C._cuda_getCurrentRawStream(index), *addresses, *numbers, *constants)
            return
        options = {**self.options, "launch_pdl": True} if self.early and overlap_on(index) else self.options
        kernel = self.kernel[(programs,)](*tensors, *numbers, *constants, num_warps=warps, **options)
        if aligned and _LAUNCHER_IS_KNOWN:
            self.compiled[key] = _launch_of(kernel)


def _launch_of(kernel: Any) -> Any:
    """The C function under a compiled kernel, for calls (grid, stream, addresses, numbers, constants)."""
    launcher, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    launch = launcher.launch
    assert not launcher.global_scratch_size and not launcher.profile_scratch_size
    cooperative, overlapping = launcher.launch_cooperative_grid, launcher.launch_pdl

    def call(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        # No scratch memory, no launch metadata, no hooks at entry and exit.
        launch(x, y, z, stream, function, cooperative, overlapping, None, None, metadata, None, None, None, *arguments)

    return call
