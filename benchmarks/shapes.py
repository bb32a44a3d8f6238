"""The shapes of the CPU suite: what each covers, in one line.

Legend: B sequences, T positions; of logits tokens x vocabulary.
"""

# More sequences than SIMD lanes; and few long ones, where a lane a sequence leaves lanes idle.
GAE = {"256x2048": (256, 2048), "8x65536": (8, 65536)}

# What a call costs before any work is done.
TINY = (2, 8)

# Logits of a batch of 1024 tokens over a vocabulary of 49152: 192 MiB in float32, far beyond every cache.
LOGPROB = {"1024x49152": (1024, 49152)}

# Tokens of a large rollout, flat: a million.
LOSSES = {"1048576": 1 << 20}

# Tokens of a head of 49152 ids over 576 hidden numbers (SmolLM2-135M): a default run's micro-batch, and two chunks.
LINEAR = {"128": 128, "512": 512}
LINEAR_HEAD = (49152, 576)
