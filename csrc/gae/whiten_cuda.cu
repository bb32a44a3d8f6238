// Whitening on a GPU: merges moments that blocks of the gae kernels left, in float64, and applies them. The order of
// every sum is fixed by the number of parts.
#include <algorithm>

#include "common/cuda_utils.h"
#include "gae/whiten.h"

namespace fastppo {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;

// Chan, Golub and LeVeque 1979.
__device__ Moments merge(const Moments& a, const Moments& b) {
  if (b.count == 0.0) return a;
  const double count = a.count + b.count;
  const double apart = b.mean - a.mean;
  return {count, a.mean + apart * (b.count / count),
          a.squares + b.squares + apart * apart * (a.count * b.count / count)};
}

__global__ void __launch_bounds__(kThreads) merge_moments(const Moments* parts, int64_t count, Moments* merged) {
  __shared__ Moments shared[kThreads];
  const int thread = threadIdx.x;
  Moments mine{0.0, 0.0, 0.0};
  for (int64_t i = thread; i < count; i += kThreads) mine = merge(mine, parts[i]);
  shared[thread] = mine;
  for (int width = kThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (thread < width) shared[thread] = merge(shared[thread], shared[thread + width]);
  }
  if (thread == 0) *merged = shared[0];
}

__device__ __forceinline__ float whitened(float x, bool selected, double mean, double scale) {
  return selected ? static_cast<float>((static_cast<double>(x) - mean) * scale) : 0.0f;
}

template <bool ALIGNED>
__global__ void __launch_bounds__(kThreads) whiten_kernel(const WhitenParams p) {
  const double mean = p.moments->mean;
  const double scale = 1.0 / sqrt(p.moments->squares / fmax(p.moments->count, 1.0) + p.eps);
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPerThread;
  if (ALIGNED && i + kPerThread <= p.size) {
    const float4 x = *reinterpret_cast<const float4*>(p.x + i);
    const char4 mask = p.mask != nullptr ? *reinterpret_cast<const char4*>(p.mask + i) : char4{1, 1, 1, 1};
    *reinterpret_cast<float4*>(p.out + i) =
        make_float4(whitened(x.x, mask.x != 0, mean, scale), whitened(x.y, mask.y != 0, mean, scale),
                    whitened(x.z, mask.z != 0, mean, scale), whitened(x.w, mask.w != 0, mean, scale));
    return;
  }
  for (int64_t j = i; j < i + kPerThread && j < p.size; ++j) {
    p.out[j] = whitened(p.x[j], p.mask == nullptr || p.mask[j] != 0, mean, scale);
  }
}

}  // namespace

void merge_moments_cuda(const Moments* parts, int64_t count, Moments* merged, uint64_t stream) {
  launch("merge moments", merge_moments, 1, kThreads, stream, parts, count, merged);
}

void whiten_cuda(const WhitenParams& params, int device, uint64_t stream) {
  if (params.size == 0) return;
  const DeviceGuard guard(device);
  const auto aligned = [](const void* x, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(x) % bytes == 0; };
  const bool quads = aligned(params.x, 16) && aligned(params.out, 16) && aligned(params.mask, 4);
  const int64_t per_block = int64_t{kThreads} * kPerThread;
  launch("whiten", quads ? whiten_kernel<true> : whiten_kernel<false>, (params.size + per_block - 1) / per_block,
         kThreads, stream, params);
}

}  // namespace fastppo
