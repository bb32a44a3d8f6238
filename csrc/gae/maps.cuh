// Affine maps c -> f * c + d, their composition by lanes and warps, and the words by which blocks pass them on.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>

namespace fastppo {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

// c -> f * c + d, of each of N chains; where f < 0, closed: c -> d, whatever c was.
template <int N>
struct Map {
  float f[N];
  float d[N];
};

template <int N>
__device__ __forceinline__ Map<N> identity() {
  Map<N> map;
#pragma unroll
  for (int n = 0; n < N; ++n) map.f[n] = 1.0f, map.d[n] = 0.0f;
  return map;
}

// A product of factors above 0 stays above 0, as it does along a walk: 0 * inf would be a NaN. So it is at least this.
__device__ __forceinline__ float smallest(float a, float b) {
  return fminf(fminf(a, b), FLT_MIN);
}

// `map` of what `later`, later in time, hands on; without CLOSES neither is closed. By selects: lanes differ.
template <bool CLOSES, int N>
__device__ __forceinline__ Map<N> compose(Map<N> map, const Map<N>& later) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const bool closed = CLOSES && map.f[n] < 0.0f;
    const float f = fmaxf(map.f[n] * later.f[n], smallest(map.f[n], later.f[n]));
    const float d = fmaf(map.f[n], later.d[n], map.d[n]);
    map.d[n] = closed ? map.d[n] : d;
    map.f[n] = closed || (CLOSES && later.f[n] < 0.0f) ? -1.0f : f;
  }
  return map;
}

template <bool CLOSES, int N>
__device__ __forceinline__ void apply(const Map<N>& map, float (&c)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float handed_on = fmaf(map.f[n], c[n], map.d[n]);
    c[n] = CLOSES && map.f[n] < 0.0f ? map.d[n] : handed_on;
  }
}

template <int N>
__device__ __forceinline__ Map<N> from_lane(Map<N> map, int lane) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    map.f[n] = __shfl_sync(kAll, map.f[n], lane);
    map.d[n] = __shfl_sync(kAll, map.d[n], lane);
  }
  return map;
}

template <int N>
__device__ __forceinline__ Map<N> from_later_lane(Map<N> map, int width) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    map.f[n] = __shfl_down_sync(kAll, map.f[n], width);
    map.d[n] = __shfl_down_sync(kAll, map.d[n], width);
  }
  return map;
}

// Each lane's map composed with those of all later lanes.
template <bool CLOSES, int FIRST, int N>
__device__ __forceinline__ Map<N> scan(Map<N> map, int lane) {
#pragma unroll
  for (int width = FIRST; width < kWarp; width *= 2) {
    const Map<N> later = from_later_lane(map, width);
    const Map<N> both = compose<CLOSES>(map, later);
    if (lane + width < kWarp) map = both;
  }
  return map;
}

// A map whose f is f + low. Powers of one decay round alike wherever they are formed, so that the power of 128 as a
// product of products would be wrong by dozens of roundings, and all sums that it goes into in the same direction. The
// first products matter: each rounding is multiplied by the number of times that the product is used.
template <int N>
struct Exact {
  Map<N> map;
  float low[N];
};

template <int N>
__device__ __forceinline__ void multiply(Exact<N>& x, int n, float f, float low) {
  const float rounded = __fmul_rn(x.map.f[n], f);  // never contracted
  const float rest = fmaf(x.map.f[n], f, -rounded) + fmaf(x.low[n], f, x.map.f[n] * low);
  const float high = rounded + rest;
  x.map.f[n] = fmaxf(high, smallest(x.map.f[n], f));
  x.low[n] = rounded - high + rest;
}

// The same as the scan above, exactly as far as four lanes.
template <bool CLOSES, int N>
__device__ __forceinline__ Map<N> scan(Exact<N> x, int lane) {
#pragma unroll
  for (int width = 1; width < 4; width *= 2) {
    const Map<N> later = from_later_lane(x.map, width);
    const Map<N> map = compose<CLOSES>(x.map, later);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float low = __shfl_down_sync(kAll, x.low[n], width);
      if (lane + width < kWarp) {
        const bool open = !CLOSES || map.f[n] >= 0.0f;
        multiply(x, n, later.f[n], low);
        x.map.f[n] = open ? x.map.f[n] : -1.0f;
        x.map.d[n] = map.d[n];
      }
    }
  }
  return scan<CLOSES, 4>(x.map, lane);
}

// --- Chunks of a row, in blocks that wait for each other ---

// Words begin as 0 and are written once, whole: what they hold needs no fence.
__device__ __forceinline__ unsigned long long wait_for(const unsigned long long* word) {
  unsigned long long bits;
  do {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(bits) : "l"(word) : "memory");
  } while (bits == 0);
  return bits;
}

__device__ __forceinline__ void publish(unsigned long long* word, unsigned high, float low) {
  const unsigned long long bits = static_cast<unsigned long long>(high) << 32 | __float_as_uint(low);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(bits) : "memory");
}

// A chunk's words are `stride` apart from those of the next one; chain n's are n * stride / N further.
template <int N>
__device__ __forceinline__ void publish_map(unsigned long long* words, const Map<N>& map, int64_t apart) {
  // One more than f's bits, which are never those of a NaN, is not 0.
#pragma unroll
  for (int n = 0; n < N; ++n) publish(words + n * apart, __float_as_uint(map.f[n]) + 1, map.d[n]);
}

template <int N>
__device__ __forceinline__ Map<N> wait_for_map(const unsigned long long* words, int64_t apart) {
  Map<N> map;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const unsigned long long bits = wait_for(words + n * apart);
    map.f[n] = __uint_as_float(static_cast<unsigned>(bits >> 32) - 1);
    map.d[n] = __uint_as_float(static_cast<unsigned>(bits));
  }
  return map;
}

template <int N>
__device__ __forceinline__ void publish_handed_on(unsigned long long* words, const float (&c)[N], int64_t apart) {
#pragma unroll
  for (int n = 0; n < N; ++n) publish(words + n * apart, 1, c[n]);
}

template <int N>
__device__ __forceinline__ Map<N> wait_for_handed_on(const unsigned long long* words, int64_t apart) {
  Map<N> map;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    map.f[n] = -1.0f;
    map.d[n] = __uint_as_float(static_cast<unsigned>(wait_for(words + n * apart)));
  }
  return map;
}

__global__ void __launch_bounds__(1024) clear(unsigned long long* words, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) words[i] = 0;
}

// The number of this block's turn: blocks that have one of a lower number have begun.
__device__ __forceinline__ int64_t take_ticket(unsigned* ticket) {
  __shared__ unsigned taken;
  if (threadIdx.x == 0) taken = atomicAdd(ticket, 1u);
  __syncthreads();
  return taken;
}

}  // namespace
}  // namespace fastppo
