"""Measured configurations of the Triton kernels, as data; each op's page in docs/kernels has the measurements."""

from typing import NamedTuple


class Logprob(NamedTuple):
    """Of the kernels of logprob."""

    groups: int  # of 16 bytes, a thread's load, in a tile of the statistics
    warps: int
    registers: int  # of a thread
    programs: int  # of the statistics that a multiprocessor should have: fewer rows are cut into parts
    gradient_bytes: int  # of a tile of the gradient
    gradient_tiles: int  # of a program of the gradient
    gradient_stages: int  # tiles in flight, and the one being written
    gradient_warps: int
    combined_rows: int  # of a program that combines statistics


# H100 80GB HBM3, bfloat16, 8192 rows of 32000 to 151936.
LOGPROB = Logprob(
    groups=64, warps=1, registers=64, programs=32,
    gradient_bytes=4096, gradient_tiles=4, gradient_stages=3, gradient_warps=4,
    combined_rows=64,
)  # fmt: skip
