"""The shapes of the suites: what each covers, in one line. Those named CUDA are the GPU suite's.

Legend: B sequences, T positions; of logits tokens x vocabulary.
"""

# More sequences than SIMD lanes; and few long ones, where a lane a sequence leaves lanes idle.
GAE = {"256x2048": (256, 2048), "8x65536": (8, 65536)}

GAMMA, LAM = 0.99, 0.95

# What a call costs before any work is done.
TINY = (2, 8)

# Logits of a batch of 1024 tokens over a vocabulary of 49152: 192 MiB in float32, far beyond every cache.
LOGPROB = {"1024x49152": (1024, 49152)}

# Tokens of a large rollout, flat: a million.
LOSSES = {"1048576": 1 << 20}

# Tokens of a head of 49152 ids over 576 hidden numbers (SmolLM2-135M): a default run's micro-batch, and two chunks.
LINEAR = {"128": 128, "512": 512}
LINEAR_HEAD = (49152, 576)

# A micro-batch over the vocabularies of Qwen and Llama 3, and one so small that start and end of a row count.
LOGPROB_CUDA = {"8192x151936": (8192, 151936), "8192x128256": (8192, 128256), "8192x32000": (8192, 32000)}

# A rollout; as many positions in few long rows, which one block a row leaves the chip idle on; many short rows, beyond
# the L2 cache; and one row alone.
GAE_CUDA = {"512x2048": (512, 2048), "32x32768": (32, 32768), "8192x1024": (8192, 1024), "1x131072": (1, 131072)}

# Tokens beyond the L2 cache; and a micro-batch, which is over before the host has launched the next.
LOSSES_CUDA = {"4194304": 1 << 22, "65536": 1 << 16}

# Heads of an 8B and a 1.7B model over the vocabularies of Qwen and Llama 3: N, D, V.
LINEAR_CUDA = {
    "8192x4096x151936": (8192, 4096, 151936), "8192x2048x151936": (8192, 2048, 151936),
    "16384x4096x128256": (16384, 4096, 128256),
}  # fmt: skip
