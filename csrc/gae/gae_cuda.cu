// CUDA kernel of gae: one warp per sequence walks it from its end in tiles of 32 positions, one per lane.
//
// Within a tile the next selected value of each lane is found with a ballot, which turns the recurrence into a chain of
// affine maps A <- factor * A + delta (identity where unselected); a warp scan composes them from the last lane down,
// and lane 0 carries acc and next_value to the tile before. A position that is terminated or truncated cuts the chain:
// what comes after it is not multiplied by 0 but left out, so that no NaN passes. The order of every sum is fixed.
//
// Reads each input once and writes each output once. Legend: b sequence, t position, lane 0 is the earliest of its
// tile.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "common/cuda_utils.h"
#include "gae/gae.h"

namespace fastppo {
namespace {

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 4;
constexpr unsigned kAll = 0xffffffffu;

__device__ float load_float(const GaeTensor& x, int64_t b, int64_t t) {
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

__device__ bool load_flag(const GaeTensor& x, int64_t b, int64_t t) {
  return static_cast<const uint8_t*>(x.data)[b * x.row_stride + t * x.time_stride] != 0;
}

__device__ int64_t offset(const GaeParams& p, int64_t b) {
  const int64_t at =
      p.cu_seqlens_int64 ? static_cast<const int64_t*>(p.cu_seqlens)[b] : static_cast<const int32_t*>(p.cu_seqlens)[b];
  // The contents are not checked on the device by default: a wrong offset may give wrong numbers, not a wild write.
  return min(max(at, int64_t{0}), p.num_steps);
}

// acc before each position of the tile has been applied to it: lanes above a lane are later positions.
// `cuts` has a bit for every lane whose position starts the chain anew.
__device__ float scan_from_last_lane(float factor, float delta, unsigned cuts, int lane, float acc) {
#pragma unroll
  for (int width = 1; width < kWarp; width *= 2) {
    const float later_factor = __shfl_down_sync(kAll, factor, width);
    const float later_delta = __shfl_down_sync(kAll, delta, width);
    const unsigned covered = ((1u << width) - 1u) << lane;
    if (lane + width < kWarp && (cuts & covered) == 0) {
      delta = factor * later_delta + delta;
      factor *= later_factor;
    }
  }
  return (cuts & (kAll << lane)) == 0 ? factor * acc + delta : delta;
}

__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) gae_kernel(const GaeParams p) {
  const int lane = threadIdx.x % kWarp;
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
  if (b >= p.num_seqs) return;

  const int64_t start = p.cu_seqlens != nullptr ? offset(p, b) : 0;
  const int64_t end = p.cu_seqlens != nullptr ? offset(p, b + 1) : p.num_steps;
  const float decay = p.gamma * (p.lam_per_seq != nullptr ? p.lam_per_seq[b] : p.lam);
  const float decay_returns = p.gamma * (p.lam_returns_per_seq != nullptr ? p.lam_returns_per_seq[b] : p.lam_returns);
  float acc = 0.0f;
  float acc_returns = 0.0f;
  float next_value = p.final_values.data != nullptr ? load_float(p.final_values, b, 0) : 0.0f;

  for (int64_t tile_end = end; tile_end > start; tile_end -= kWarp) {
    const int64_t t = tile_end - kWarp + lane;
    const bool inside = t >= start;
    const bool selected = inside && (p.mask.data == nullptr || load_flag(p.mask, b, t));
    const float reward = selected ? load_float(p.rewards, b, t) : 0.0f;
    const float value = selected ? load_float(p.values, b, t) : 0.0f;
    const bool terminated = selected && p.terminated.data != nullptr && load_flag(p.terminated, b, t);
    const bool truncated = selected && !terminated && p.truncated.data != nullptr && load_flag(p.truncated, b, t);

    const unsigned selected_lanes = __ballot_sync(kAll, selected);
    const unsigned cuts = __ballot_sync(kAll, terminated || truncated);
    const unsigned later = lane == kWarp - 1 ? 0u : selected_lanes & (kAll << (lane + 1));
    const float later_value = __shfl_sync(kAll, value, later != 0 ? __ffs(later) - 1 : lane);
    float next = later != 0 ? later_value : next_value;
    if (terminated) next = 0.0f;
    if (truncated) next = load_float(p.bootstrap_values, b, t);

    const float delta = selected ? reward + p.gamma * next - value : 0.0f;
    const float advantage = scan_from_last_lane(selected ? decay : 1.0f, delta, cuts, lane, acc);
    float return_advantage = advantage;
    if (p.separate_returns) {
      return_advantage = scan_from_last_lane(selected ? decay_returns : 1.0f, delta, cuts, lane, acc_returns);
    }
    if (inside) {
      const int64_t at = b * p.out_row_stride + t * p.out_time_stride;
      p.advantages[at] = selected ? advantage : 0.0f;
      p.returns[at] = selected ? return_advantage + value : 0.0f;
    }
    acc = __shfl_sync(kAll, advantage, 0);
    acc_returns = __shfl_sync(kAll, return_advantage, 0);
    if (selected_lanes != 0) next_value = __shfl_sync(kAll, value, __ffs(selected_lanes) - 1);
  }
}

}  // namespace

void gae_cuda(const GaeParams& params, int device, uint64_t stream) {
  if (params.num_seqs == 0 || params.num_steps == 0) return;
  const DeviceGuard guard(device);
  const int64_t blocks = (params.num_seqs + kWarpsPerBlock - 1) / kWarpsPerBlock;
  gae_kernel<<<static_cast<unsigned>(blocks), kWarp * kWarpsPerBlock, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      params);
  check_cuda(cudaGetLastError(), "gae launch");
}

std::string gae_cuda_problem(int device) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && device >= count) return "CUDA device " + std::to_string(device) + " does not exist";
  if (error == cudaSuccess) {
    const DeviceGuard guard(device);
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, gae_kernel);
  }
  cudaGetLastError();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

}  // namespace fastppo
