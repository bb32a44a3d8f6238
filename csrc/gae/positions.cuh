// Positions of the inputs: how they are loaded, which sequence they are of, and what one of them does to c.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gae/gae.h"
#include "gae/maps.cuh"

namespace fastppo {
namespace {

constexpr int kQuad = 4;  // positions side by side that a lane loads at once

// --- Inputs ---

__device__ __forceinline__ float load_float(const GaeTensor& x, int64_t b, int64_t t) {
  const int64_t at = b * x.row_stride + t * x.time_stride;
  switch (x.dtype) {
    case Dtype::kFloat16:
      return __half2float(static_cast<const __half*>(x.data)[at]);
    case Dtype::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(x.data)[at]);
    default:
      return static_cast<const float*>(x.data)[at];
  }
}

__device__ __forceinline__ bool load_flag(const GaeTensor& x, int64_t b, int64_t t) {
  return static_cast<const uint8_t*>(x.data)[b * x.row_stride + t * x.time_stride] != 0;
}

// Four positions as they lie in memory, or as float32 where they do not lie side by side. Loads and what is made of
// them stand apart: all of a lane's are to be in flight before the first one is waited for.
struct RawFloats {
  uint4 bits;
  bool as_they_lie;
};

// Positions t to t + 3, of which the bits of `inside` are there; 0 where not.
template <bool ALIGNED>
__device__ __forceinline__ RawFloats load_floats(const GaeTensor& x, int64_t b, int64_t t, unsigned inside) {
  RawFloats raw{{0, 0, 0, 0}, ALIGNED && inside == 0xf};
  if (raw.as_they_lie) {
    const int64_t at = b * x.row_stride + t;
    if (x.dtype == Dtype::kFloat32) {
      raw.bits = __ldcs(reinterpret_cast<const uint4*>(static_cast<const float*>(x.data) + at));
    } else {
      const uint2 four = __ldcs(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(x.data) + at));
      raw.bits.x = four.x, raw.bits.y = four.y;
    }
  } else if (inside != 0) {
    raw.bits.x = inside & 1 ? __float_as_uint(load_float(x, b, t)) : 0;
    raw.bits.y = inside & 2 ? __float_as_uint(load_float(x, b, t + 1)) : 0;
    raw.bits.z = inside & 4 ? __float_as_uint(load_float(x, b, t + 2)) : 0;
    raw.bits.w = inside & 8 ? __float_as_uint(load_float(x, b, t + 3)) : 0;
  }
  return raw;
}

__device__ __forceinline__ float half_to_float(Dtype dtype, unsigned bits) {
  return dtype == Dtype::kFloat16 ? __half2float(__ushort_as_half(static_cast<uint16_t>(bits)))
                                  : __uint_as_float(bits << 16);
}

__device__ __forceinline__ void convert(const RawFloats& raw, Dtype dtype, float (&out)[kQuad]) {
  out[0] = __uint_as_float(raw.bits.x), out[1] = __uint_as_float(raw.bits.y);
  out[2] = __uint_as_float(raw.bits.z), out[3] = __uint_as_float(raw.bits.w);
  if (raw.as_they_lie && dtype != Dtype::kFloat32) {
    out[0] = half_to_float(dtype, raw.bits.x & 0xffff), out[1] = half_to_float(dtype, raw.bits.x >> 16);
    out[2] = half_to_float(dtype, raw.bits.y & 0xffff), out[3] = half_to_float(dtype, raw.bits.y >> 16);
  }
}

// A byte per position t to t + 3; 0 where it is not inside.
template <bool ALIGNED>
__device__ __forceinline__ unsigned load_flags(const GaeTensor& x, int64_t b, int64_t t, unsigned inside) {
  if (ALIGNED && inside == 0xf) {
    return __ldcs(reinterpret_cast<const unsigned*>(static_cast<const uint8_t*>(x.data) + b * x.row_stride + t));
  }
  unsigned bytes = 0;
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    if (inside >> j & 1) bytes |= static_cast<unsigned>(load_flag(x, b, t + j)) << 8 * j;
  }
  return bytes;
}

// A bit for each byte that is not 0: the highest one of each, then these side by side.
__device__ __forceinline__ unsigned to_bits(unsigned bytes) {
  const unsigned set = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) >> 7 & 0x01010101u;
  return set * 0x01020408u >> 24 & 0xfu;
}

// --- Packed sequences ---

__device__ __forceinline__ int64_t offset(const GaeParams& p, int64_t b) {
  const int64_t at =
      p.cu_seqlens_int64 ? static_cast<const int64_t*>(p.cu_seqlens)[b] : static_cast<const int32_t*>(p.cu_seqlens)[b];
  // The contents are not checked on the device by default: a wrong offset may give wrong numbers, not a wild access.
  return min(max(at, int64_t{0}), p.num_steps);
}

__device__ __forceinline__ int64_t sequence_within(const GaeParams& p, int64_t t) {
  return min(max(t, int64_t{0}), p.num_seqs - 1);
}

// The sequence of position t, found by all lanes of a warp: the last one that begins at or before it.
__device__ __forceinline__ int64_t find_sequence(const GaeParams& p, int64_t t, int lane) {
  int64_t begun = 0, left = p.num_seqs + 1;  // the answer is in [begun, begun + left] of the offsets
  while (left > 0) {
    const int64_t part = (left + kWarp - 1) / kWarp;
    const int64_t last = (lane + 1) * part - 1;
    const int parts = __popc(__ballot_sync(kAll, last < left && offset(p, begun + last) <= t));
    begun += parts * part;
    left = min(part - 1, left - parts * part);
  }
  return sequence_within(p, begun - 1);
}

// The same for a lane of its own, between two sequences that are known to enclose it.
__device__ __forceinline__ int64_t find_sequence_between(const GaeParams& p, int64_t t, int64_t low, int64_t high) {
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (offset(p, middle) <= t) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The sequence of a position at or before one of sequence b.
__device__ __forceinline__ int64_t back_to(const GaeParams& p, int64_t b, int64_t t) {
  while (b > 0 && offset(p, b) > t) --b;
  return b;
}

// What is of a sequence and not of a position.
template <int N>
struct Sequence {
  float decay[N];
  float end;  // c after the last position
};

template <int N>
__device__ __forceinline__ Sequence<N> load_sequence(const GaeParams& p, int64_t b) {
  Sequence<N> s;
  s.decay[0] = p.gamma * (p.lam_per_seq != nullptr ? p.lam_per_seq[b] : p.lam);
  if (N == 2) s.decay[N - 1] = p.gamma * (p.lam_returns_per_seq != nullptr ? p.lam_returns_per_seq[b] : p.lam_returns);
  s.end = p.final_values.data != nullptr ? p.gamma * load_float(p.final_values, b, 0) : 0.0f;
  return s;
}

// --- One position ---

// A position's map, with reward - value = x (plus gamma * bootstrap where cut), put before that of later ones.
template <bool CLOSES, int N>
__device__ __forceinline__ void prepend(Exact<N>& later, const Sequence<N>& s, float gamma, float x, float v,
                                        bool selected, bool cut) {
  Exact<N> all = later;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float d = fmaf(s.decay[n], x, gamma * v);
    const float joined = fmaf(s.decay[n], later.map.d[n], d);
    const bool closed = CLOSES && (cut || later.map.f[n] < 0.0f);
    multiply(all, n, s.decay[n], 0.0f);
    later.map.d[n] = selected ? (CLOSES && cut ? d : joined) : later.map.d[n];
    later.map.f[n] = selected ? (closed ? -1.0f : all.map.f[n]) : later.map.f[n];
    later.low[n] = selected ? all.low[n] : later.low[n];
  }
}

// The advantage of that position, 0 where it is not selected, when c comes from what is later; then c is what it hands
// on.
template <bool CLOSES, int N>
__device__ __forceinline__ void advance(float (&c)[N], float (&advantage)[N], const Sequence<N>& s, float gamma,
                                        float x, float v, bool selected, bool cut) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float own = CLOSES && cut ? x : x + c[n];
    c[n] = selected ? fmaf(s.decay[n], own, gamma * v) : c[n];
    advantage[n] = selected ? own : 0.0f;
  }
}

}  // namespace
}  // namespace fastppo
