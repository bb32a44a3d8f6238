"""Measured configurations of the Triton kernels, as data; each op's page in docs/kernels has the measurements."""

from typing import NamedTuple


class Gae(NamedTuple):
    """Of the kernel of gae."""

    steps: int  # of a tile of one row, along time
    rows_side_by_side: int  # of a tile of time-major inputs
    steps_of_those: int
    warps: int
    programs: int  # fewer that walk rows leave the card idle: rows are cut into tiles
    window: int  # tiles whose maps are scanned at once


# H100 80GB HBM3, float32 with a mask, 512 x 2048 to 1 x 131072.
GAE = Gae(steps=1024, rows_side_by_side=32, steps_of_those=64, warps=4, programs=256, window=1024)
