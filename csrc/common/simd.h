// Short vectors as the compiler's own vector types: one source for every instruction set that it is compiled for.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/dtype.h"
#include "common/macros.h"

namespace fastppo {

template <int LANES>
struct Simd;

template <>
struct Simd<4> {
  typedef float Floats __attribute__((vector_size(16)));
  typedef int32_t Flags __attribute__((vector_size(16)));
  typedef uint32_t Bits __attribute__((vector_size(16)));
  typedef uint16_t Halves __attribute__((vector_size(8)));
  typedef int8_t Bytes __attribute__((vector_size(4)));
};

template <>
struct Simd<8> {
  typedef float Floats __attribute__((vector_size(32)));
  typedef int32_t Flags __attribute__((vector_size(32)));
  typedef uint32_t Bits __attribute__((vector_size(32)));
  typedef uint16_t Halves __attribute__((vector_size(16)));
  typedef int8_t Bytes __attribute__((vector_size(8)));
};

template <>
struct Simd<16> {
  typedef float Floats __attribute__((vector_size(64)));
  typedef int32_t Flags __attribute__((vector_size(64)));
  typedef uint32_t Bits __attribute__((vector_size(64)));
  typedef uint16_t Halves __attribute__((vector_size(32)));
  typedef int8_t Bytes __attribute__((vector_size(16)));
};

using Floats4 = Simd<4>::Floats;

#ifdef __clang__
#define FASTPPO_SHUFFLE4(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define FASTPPO_SHUFFLE4(a, b, i, j, k, l) __builtin_shuffle(a, b, Simd<4>::Flags{i, j, k, l})
#endif

// Four vectors become the four columns of the matrix whose rows they were.
FASTPPO_INLINE void transpose(Floats4& a, Floats4& b, Floats4& c, Floats4& d) {
  const Floats4 ab_low = FASTPPO_SHUFFLE4(a, b, 0, 4, 1, 5);
  const Floats4 ab_high = FASTPPO_SHUFFLE4(a, b, 2, 6, 3, 7);
  const Floats4 cd_low = FASTPPO_SHUFFLE4(c, d, 0, 4, 1, 5);
  const Floats4 cd_high = FASTPPO_SHUFFLE4(c, d, 2, 6, 3, 7);
  a = FASTPPO_SHUFFLE4(ab_low, cd_low, 0, 1, 4, 5);
  b = FASTPPO_SHUFFLE4(ab_low, cd_low, 2, 3, 6, 7);
  c = FASTPPO_SHUFFLE4(ab_high, cd_high, 0, 1, 4, 5);
  d = FASTPPO_SHUFFLE4(ab_high, cd_high, 2, 3, 6, 7);
}

// Four neighbours from any address, as float32.
template <typename T>
FASTPPO_INLINE Floats4 load4(const T* source) {
  return Floats4{to_float(source[0]), to_float(source[1]), to_float(source[2]), to_float(source[3])};
}

FASTPPO_INLINE Floats4 load4(const float* source) {
  Floats4 x;
  std::memcpy(&x, source, sizeof(x));
  return x;
}

FASTPPO_INLINE void store4(float* target, const Floats4& x) {
  std::memcpy(target, &x, sizeof(x));
}

// LANES neighbours from any address, as float32.
template <int LANES>
FASTPPO_INLINE typename Simd<LANES>::Floats load(const float* source) {
  typename Simd<LANES>::Floats x;
  std::memcpy(&x, source, sizeof(x));
  return x;
}

template <int LANES>
FASTPPO_INLINE typename Simd<LANES>::Bits load_halves(const void* source) {
  typename Simd<LANES>::Halves x;
  std::memcpy(&x, source, sizeof(x));
  return __builtin_convertvector(x, typename Simd<LANES>::Bits);
}

template <int LANES>
FASTPPO_INLINE typename Simd<LANES>::Floats load(const BFloat16* source) {
  return (typename Simd<LANES>::Floats)(load_halves<LANES>(source) << 16);
}

// The arithmetic of to_float(Half), lane by lane.
template <int LANES>
FASTPPO_INLINE typename Simd<LANES>::Floats load(const Half* source) {
  using Floats = typename Simd<LANES>::Floats;
  using Bits = typename Simd<LANES>::Bits;
  const Bits x = load_halves<LANES>(source);
  const Bits magnitude = (x & 0x7fffu) << 13;
  const Bits exponent = magnitude & 0x0f800000u;
  const Bits rebias = Bits{} + (112u << 23);
  const Bits normal = magnitude + (exponent == 0x0f800000u ? 2 * rebias : rebias);
  const Floats small = (Floats)(magnitude + (113u << 23)) - bits_to_float(113u << 23);
  return (Floats)(((x & 0x8000u) << 16) | (exponent == 0u ? (Bits)small : normal));
}

template <int LANES>
FASTPPO_INLINE void store(float* target, const typename Simd<LANES>::Floats& x) {
  std::memcpy(target, &x, sizeof(x));
}

template <int LANES>
FASTPPO_INLINE void store_halves(void* target, const typename Simd<LANES>::Bits& bits) {
  const typename Simd<LANES>::Halves x = __builtin_convertvector(bits, typename Simd<LANES>::Halves);
  std::memcpy(target, &x, sizeof(x));
}

// Rounded to the nearest, ties to even; NaN stays NaN.
template <int LANES>
FASTPPO_INLINE void store(BFloat16* target, const typename Simd<LANES>::Floats& x) {
  using Bits = typename Simd<LANES>::Bits;
  const Bits bits = (Bits)x;
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  store_halves<LANES>(target, x == x ? rounded : Bits{} + 0x7fc0u);
}

// Rounded to the nearest, ties to even; beyond 65504 to infinity; NaN stays NaN.
template <int LANES>
FASTPPO_INLINE void store(Half* target, const typename Simd<LANES>::Floats& x) {
  using Floats = typename Simd<LANES>::Floats;
  using Bits = typename Simd<LANES>::Bits;
  const Bits bits = (Bits)x;
  const Bits magnitude = bits & 0x7fffffffu;
  const Bits normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves |x| in units of 2^-24, a subnormal's own, in the low bits, rounded by the addition.
  const Bits subnormal = (Bits)((Floats)magnitude + 0.5f) - 0x3f000000u;
  Bits half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? Bits{} + 0x7c00u : half;
  half = x == x ? half : Bits{} + 0x7e00u;
  store_halves<LANES>(target, half | ((bits >> 16) & 0x8000u));
}

}  // namespace fastppo
