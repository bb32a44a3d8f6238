// Generalised advantage estimation: what fastppo/ops/gae.py hands to the kernels.
//
// B sequences. Padded: sequence b is row b of T positions. Packed: it is positions cu_seqlens[b] to cu_seqlens[b + 1]
// of one row of T. Every sequence is walked from its end with acc = 0 and next_value = final_values[b] (else 0); at a
// selected position
//     advantage = reward + gamma * next_value - value + gamma * lam * acc
// and acc = advantage, next_value = value; an unselected one is not read, leaves both as they are and gets 0.
#pragma once

#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "gae/whiten.h"

namespace fastppo {

// A [B, T] input; strides count elements, row_stride is 0 when packed.
struct GaeTensor {
  const void* data;  // null where the argument was not given
  int64_t row_stride;
  int64_t time_stride;
  Dtype dtype;  // of float inputs; flags are bytes, true where not 0
};

struct GaeParams {
  GaeTensor rewards;                 // [B, T] or [T]
  GaeTensor values;                  // like rewards
  GaeTensor mask;                    // like rewards, bytes
  GaeTensor terminated;              // like rewards, bytes
  GaeTensor truncated;               // like rewards, bytes
  GaeTensor bootstrap_values;        // like rewards, or with time_stride 0 one per sequence; read where truncated
  GaeTensor final_values;            // [B]: next_value after each sequence's last selected position
  const float* lam_per_seq;          // [B], contiguous, or null: lam
  const float* lam_returns_per_seq;  // [B], contiguous, or null: lam_returns
  const void* cu_seqlens;            // [B + 1], contiguous, int32 or int64; null when padded
  bool cu_seqlens_int64;
  float* advantages;  // shape and strides as below
  float* returns;
  int64_t out_row_stride;
  int64_t out_time_stride;
  int64_t num_seqs;   // B
  int64_t num_steps;  // T
  float gamma;
  float lam;
  float lam_returns;
  bool separate_returns;  // returns are advantages under lam_returns, plus values; otherwise under lam
  void* scratch;          // CUDA: gae_cuda_scratch() bytes, whatever they hold
  Moments* moments;       // CUDA: of the selected advantages; null where they are not asked for
};

void gae_cpu(const GaeParams& params, int num_threads);

#ifdef FASTPPO_HAS_CUDA
void gae_cuda(const GaeParams& params, int device, uint64_t stream);

// Bytes of device memory that a call needs at most; time_major where outputs are [T, B].
int64_t gae_cuda_scratch(int64_t num_seqs, int64_t num_steps, bool packed, bool time_major, bool separate_returns,
                         bool moments);

// Why the kernel cannot run on `device` (driver too old, no image for the card); empty where it can.
std::string gae_cuda_problem(int device);
#endif

}  // namespace fastppo
