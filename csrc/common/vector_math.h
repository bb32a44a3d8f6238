// Elementary functions of float32 vectors, for every instruction set. Each is a few units in the last place from exact;
// an element's answer does not depend on its lane. Files that use them are compiled with contraction into fused
// multiply-adds (CMakeLists.txt), so answers differ in the last bit between instruction sets with and without them.
#pragma once

#include "common/simd.h"

namespace fastppo {

template <int LANES>
FASTPPO_INLINE typename Simd<LANES>::Floats max(const typename Simd<LANES>::Floats& a,
                                                const typename Simd<LANES>::Floats& b) {
  return a > b ? a : b;  // b where one is NaN
}

// exp(x) = scale * (1 + r + r * r * q): scale a power of two, |r| <= log(2)/2. For -87.33 <= x <= 88.37.
template <int LANES>
struct ExpParts {
  using Floats = typename Simd<LANES>::Floats;
  Floats scale, r, q;
};

// The coefficients of q are those of least relative error in that range; DEGREE 4 leaves 1.3e-7 of q, 5 leaves 3e-9.
template <int LANES, int DEGREE = 4>
FASTPPO_INLINE ExpParts<LANES> exp_parts(const typename Simd<LANES>::Floats& x) {
  using Floats = typename Simd<LANES>::Floats;
  using Bits = typename Simd<LANES>::Bits;
  static_assert(DEGREE == 4 || DEGREE == 5);
  // Added to a small number it leaves the nearest integer in the low bits.
  const float magic = 12582912.0f;  // 1.5 * 2^23
  const Floats shifted = x * 1.44269504f + magic;
  const Floats n = shifted - magic;
  // log(2) in two parts; the first has trailing zeros, so that n times it is exact without a fused multiply-add too.
  const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  const Floats scale = (Floats)(((Bits)shifted + 127u) << 23);
  if constexpr (DEGREE == 4) {
    Floats q = r * 0.00139012968f + 0.00836317055f;
    q = q * r + 0.0416668542f;
    q = q * r + 0.166665778f;
    return {scale, r, q * r + 0.5f};
  } else {
    Floats q = r * 0.000198578156f + 0.00139336428f;
    q = q * r + 0.00833336078f;
    q = q * r + 0.0416664667f;
    q = q * r + 0.166666672f;
    return {scale, r, q * r + 0.5f};
  }
}

// exp(x) for -87.33 <= x <= 88.37; NaN stays NaN.
template <int LANES>
FASTPPO_INLINE typename Simd<LANES>::Floats exp(const typename Simd<LANES>::Floats& x) {
  const ExpParts<LANES> e = exp_parts<LANES>(x);
  return ((e.q * e.r + 1.0f) * e.r + 1.0f) * e.scale;
}

// exp(x) - 1 in the range of exp, without cancellation near 0.
template <int LANES>
FASTPPO_INLINE typename Simd<LANES>::Floats expm1(const typename Simd<LANES>::Floats& x) {
  const ExpParts<LANES> e = exp_parts<LANES, 5>(x);
  return (e.q * e.r * e.r + e.r) * e.scale + (e.scale - 1.0f);
}

// exp(x) - 1 - x in the range of exp, without cancellation near 0.
template <int LANES>
FASTPPO_INLINE typename Simd<LANES>::Floats expm1_minus_x(const typename Simd<LANES>::Floats& x) {
  const ExpParts<LANES> e = exp_parts<LANES, 5>(x);
  const typename Simd<LANES>::Floats curved = e.q * e.r * e.r;
  return e.scale == 1.0f ? curved : (curved + e.r) * e.scale + (e.scale - 1.0f - x);
}

// tanh(x) for every x; NaN stays NaN.
template <int LANES>
FASTPPO_INLINE typename Simd<LANES>::Floats tanh(const typename Simd<LANES>::Floats& x) {
  using Floats = typename Simd<LANES>::Floats;
  using Bits = typename Simd<LANES>::Bits;
  const Floats size = (Floats)((Bits)x & 0x7fffffffu);
  const Floats square = x * x;
  Floats p = square * 0.00232130382f - 0.00837438088f;
  p = p * square + 0.0217806641f;
  p = p * square - 0.0539612249f;
  p = p * square + 0.133333161f;
  p = p * square - 0.333333343f;
  const Floats near = x + x * square * p;
  // 1 - tanh(10) is 4e-9: rounds to 1.
  const Floats bounded = size > 10.0f ? Floats{} + 10.0f : size;
  const Floats far = 1.0f - 2.0f / (exp<LANES>(bounded + bounded) + 1.0f);
  const Floats signed_far = (Floats)((Bits)far | ((Bits)x & 0x80000000u));
  return size < 0.625f ? near : (x == x ? signed_far : x);
}

// The sum of a vector's lanes, pairwise.
template <int LANES>
FASTPPO_INLINE float sum_lanes(const typename Simd<LANES>::Floats& x) {
  float lanes[LANES];
  store<LANES>(lanes, x);
  for (int width = LANES / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

}  // namespace fastppo
