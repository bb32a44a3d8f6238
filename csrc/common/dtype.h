// Element types as the Python side names them, and their conversion to float32.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/macros.h"

namespace fastppo {

// The order is shared with _DTYPE_CODES of fastppo/ops/gae.py.
enum class Dtype : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

FASTPPO_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

FASTPPO_INLINE float to_float(float x) {
  return x;
}

FASTPPO_INLINE float to_float(BFloat16 x) {
  return bits_to_float(static_cast<uint32_t>(x.bits) << 16);
}

// Selects in place of branches, so that a loop over it vectorises without a half-precision instruction.
FASTPPO_INLINE float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & 0x0f800000u;
  const uint32_t rebias = 112u << 23;
  const uint32_t normal = magnitude + (exponent == 0x0f800000u ? 2 * rebias : rebias);
  // A subnormal m * 2^-24 is (2^-14 + m * 2^-24) - 2^-14, exactly, and no operand of that is subnormal in float32.
  const float small = bits_to_float(magnitude + (113u << 23)) - bits_to_float(113u << 23);
  uint32_t small_bits;
  std::memcpy(&small_bits, &small, sizeof(small_bits));
  return bits_to_float(sign | (exponent == 0 ? small_bits : normal));
}

}  // namespace fastppo
