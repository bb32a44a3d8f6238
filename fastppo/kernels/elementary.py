"""Elementary functions of float32 tiles, as csrc/common/vector_math.h: a few units in the last place from exact.

Triton's own exp multiplies by log2(e) first, which loses log2|x| bits, and the interpreter has no libdevice.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def exp_parts(x):
    """exp(x) = scale * (1 + r + r * r * q): scale a power of two, |r| <= log(2)/2. For -87.33 <= x <= 88.37."""
    # Added to a small number, 1.5 * 2^23 leaves the nearest integer in the low bits.
    shifted = x * 1.44269504 + 12582912.0
    n = shifted - 12582912.0
    # log(2) in two parts; the first has trailing zeros, so that n times it is exact.
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    scale = ((shifted.to(tl.int32, bitcast=True) + 127) << 23).to(tl.float32, bitcast=True)
    q = r * 0.000198578156 + 0.00139336428
    q = q * r + 0.00833336078
    q = q * r + 0.0416664667
    q = q * r + 0.166666672
    return scale, r, q * r + 0.5


@triton.jit
def exp(x):
    scale, r, q = exp_parts(x)
    return ((q * r + 1.0) * r + 1.0) * scale


@triton.jit
def expm1(x):
    scale, r, q = exp_parts(x)
    return (q * r * r + r) * scale + (scale - 1.0)


@triton.jit
def expm1_minus_x(x):
    """exp(x) - 1 - x, without cancellation near 0."""
    scale, r, q = exp_parts(x)
    curved = q * r * r
    return tl.where(scale == 1.0, curved, (curved + r) * scale + (scale - 1.0 - x))


@triton.jit
def tanh(x):
    square = x * x
    p = square * 0.00232130382 - 0.00837438088
    p = p * square + 0.0217806641
    p = p * square - 0.0539612249
    p = p * square + 0.133333161
    p = p * square - 0.333333343
    near = x + x * square * p
    size = tl.abs(x)
    # 1 - tanh(10) is 4e-9: rounds to 1.
    bounded = tl.where(size > 10.0, 10.0, size)
    far = 1.0 - 2.0 / (exp(bounded + bounded) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def clamp(x, low, high):
    """NaN stays NaN."""
    raised = tl.where(x < low, low, x)
    return tl.where(raised > high, high, raised)
