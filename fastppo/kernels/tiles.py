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


class TokenTiles(NamedTuple):
    """How a pass over tokens is cut: groups of `vector` tokens, which a thread reads at once, `groups` to a tile."""

    groups: int
    vector: int
    warps: int
    programs: int  # at most; each walks over tiles and leaves one row of partial sums
    stages: int  # tiles in flight, and the one being worked on

    @property
    def tokens(self) -> int:
        return self.groups * self.vector


# --- ppo_loss, value_loss: H100, float32 ------------------------------------------------------------------------------

LOSS_TOKENS = TokenTiles(groups=128, vector=4, warps=4, programs=396, stages=3)
# Rows of partial sums that the last step adds at a time, and its warps.
LOSS_FINISH_ROWS, LOSS_FINISH_WARPS = 256, 8
# A sequence is summed in chunks of so many tokens, counted from its own start, in tiles of the second number.
LOSS_CHUNK, LOSS_CHUNK_TILE, LOSS_CHUNK_WARPS = 4096, 1024, 4
# Sequences whose chunks one program adds, and how many of each at a time.
LOSS_SEQUENCES, LOSS_SLOTS = 16, 16
LOSS_GRAD_TOKENS, LOSS_GRAD_WARPS = 2048, 4

# --- scale: H100, not tuned -------------------------------------------------------------------------------------------

SCALE_ELEMENTS, SCALE_WARPS, SCALE_PROGRAMS = 4096, 8, 1056
