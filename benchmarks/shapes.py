"""The shapes of the CPU suite: what each covers, in one line.

Legend: B sequences, T positions.
"""

# More sequences than SIMD lanes; and few long ones, where a lane a sequence leaves lanes idle.
GAE = {"256x2048": (256, 2048), "8x65536": (8, 65536)}

# What a call costs before any work is done.
TINY = (2, 8)
