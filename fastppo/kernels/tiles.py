"""Measured configurations of the Triton kernels, as data."""

from typing import NamedTuple


class TokenTiles(NamedTuple):
    """How a pass over tokens is cut: groups of `vector` tokens, which a thread reads at once, `groups` to a tile."""

    groups: int
    vector: int
    warps: int
    programs: int  # at most; each walks over tiles and leaves one row of partial sums

    @property
    def tokens(self) -> int:
        return self.groups * self.vector


# --- ppo_loss, value_loss: H100, float32 ------------------------------------------------------------------------------

LOSS_TOKENS = TokenTiles(groups=256, vector=4, warps=8, programs=528)
# Rows of partial sums that the last step adds at a time, and its warps.
LOSS_FINISH_ROWS, LOSS_FINISH_WARPS = 128, 8
# A sequence is summed in chunks of so many tokens, counted from its own start, in tiles of the second number.
LOSS_CHUNK, LOSS_CHUNK_TILE, LOSS_CHUNK_WARPS = 4096, 1024, 4
# Sequences whose chunks one program adds, and how many of each at a time.
LOSS_SEQUENCES, LOSS_SLOTS = 16, 16
LOSS_GRAD_TOKENS, LOSS_GRAD_WARPS = 2048, 4
