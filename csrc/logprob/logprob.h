// Log-probabilities and entropy of rows of logits: what fastppo/ops/logprob.py hands to the kernels.
//
// Per row, with x = softcap(logits), m = max x, d = (x - m) / temperature, e = exp(d):
//     statistics (m, s - 1, t, zy):  s = sum e,  t = sum e * d,  zy = x of the target, kNotHere where this rank lacks
//     it dlogits_j = e_j * (a + b * d_j) * slope_j, at the target plus g_lp / temperature * slope, rounded once:
//         a = (g_h * t/s - g_lp) / (s * temperature),  b = -g_h / (s * temperature),  slope = softcap'
// over this rank's columns start ... start + used of the vocabulary.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fastppo {

// Rows of logits or of their gradient. Row r lies at (r / inner) * outer_stride + (r % inner) * inner_stride elements;
// a row's columns are neighbours.
struct LogprobRows {
  void* data;
  int64_t inner;
  int64_t outer_stride;
  int64_t inner_stride;
};

struct LogprobParams {
  LogprobRows logits;  // [num_rows, width]
  Dtype dtype;
  const int64_t* targets;    // [num_rows], ids of the whole vocabulary
  const float* temperature;  // [num_rows], or null
  float scalar_temperature;  // read where `temperature` is null
  float softcap;             // 0: none
  int64_t ignore_index;
  bool with_entropy;  // forward: t is wanted; backward: the entropy has a gradient
  int64_t num_rows;
  int64_t width;
  int64_t start;
  int64_t used;  // columns that are real ids; the rest are padding
};

// What a rank's zy holds where the target is another rank's.
constexpr float kNotHere = __builtin_huge_valf();

// stats: [num_rows, 4], written. A row whose target is ignore_index is not read: (-inf, -1, 0, kNotHere).
void logprob_stats_cpu(const LogprobParams& params, float* stats, int num_threads);

struct LogprobCombine {
  const float* gathered;  // [num_ranks, num_rows, 4]
  int64_t num_ranks;
  int64_t num_rows;
  const int64_t* targets;
  const float* temperature;
  float scalar_temperature;
  int64_t ignore_index;
  float* logprobs;  // [num_rows]
  float* entropy;   // [num_rows], or null
  float* row;       // [num_rows, 4]: (m, s - 1, t/s, d of the target), what backward needs
};

// Statistics of whole rows from those of every rank, in rank order.
void logprob_combine_cpu(const LogprobCombine& params);

struct LogprobGrads {
  LogprobRows dlogits;         // [num_rows, width], may be the logits themselves
  const float* row;            // [num_rows, 4], of logprob_combine
  const float* grad_logprobs;  // [num_rows], or null for zeros
  int64_t grad_logprobs_stride;
  const float* grad_entropy;  // [num_rows], or null for zeros
  int64_t grad_entropy_stride;
};

void logprob_dlogits_cpu(const LogprobParams& params, const LogprobGrads& grads, int num_threads);

}  // namespace fastppo
