"""Measured configurations of the Triton kernels, as data; each op's page in docs/kernels has the measurements."""

from typing import NamedTuple


class Logprob(NamedTuple):
    """Of the kernels of logprob."""

    groups: int  # of 16 bytes, a thread's load, in a tile of the statistics
    warps: int
    registers: int  # of a thread: more leave too few programs on a multiprocessor
    part_groups: int  # of a part, where whole rows would leave the device partly idle at the end
    least_groups: int  # of a part, where rows are few
    programs: int  # of the statistics that a multiprocessor has room for
    combined: int  # statistics that a program combines at a time
    gradient_bytes: int  # of a tile of the gradient
    gradient_tiles: int  # of a program of the gradient
    gradient_stages: int  # tiles in flight, and the one being written
    gradient_warps: int


# H100 80GB HBM3, bfloat16, 8192 rows of 32000 to 151936.
LOGPROB = Logprob(
    groups=64, warps=1, registers=64, part_groups=1200, least_groups=256, programs=32, combined=128,
    gradient_bytes=4096, gradient_tiles=4, gradient_stages=3, gradient_warps=4,
)  # fmt: skip
