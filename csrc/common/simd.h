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
  typedef int8_t Bytes __attribute__((vector_size(4)));
};

template <>
struct Simd<16> {
  typedef float Floats __attribute__((vector_size(64)));
  typedef int32_t Flags __attribute__((vector_size(64)));
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

}  // namespace fastppo
