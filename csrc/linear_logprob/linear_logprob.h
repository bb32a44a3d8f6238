// The product of hidden states and the output head on Hopper, with what follows done on its float32 results while they
// are in registers: what fastppo/ops/_linear_sm90.py hands to linear_logprob_sm90.cu.
//
//     logits = hidden @ weight.T        hidden [N, D], weight [V, D], D numbers of a row side by side
//
// The logits are written nowhere.
#pragma once

#include <cstdint>
#include <string>

#include "common/dtype.h"

namespace fastppo {

struct HeadProduct {
  const void* hidden;     // [N, D], bfloat16 or float16, at a multiple of 16 bytes
  const void* weight;     // [V, D], likewise
  int64_t num_rows;       // N
  int64_t num_columns;    // V
  int64_t width;          // D
  int64_t hidden_stride;  // of rows, in numbers, a multiple of 8
  int64_t weight_stride;  // likewise
  Dtype dtype;            // of hidden and weight
  bool round;             // logits are rounded to `dtype` before anything is taken from them
};

// Of every row: the largest x, the sum of exp(d) less 1 and that of exp(d) * d, where d is (x - m) / temperature, and
// the target's x, or +inf where its column is not here.
struct HeadStats {
  HeadProduct product;
  const int64_t* targets;    // [N], ids
  const float* temperature;  // [N], or null: scalar_temperature
  float scalar_temperature;
  int64_t start;   // id of the first column
  float* stats;    // [N, 4]
  float* scratch;  // [ceil(V / 256), N, 4], the same of so many columns each
  bool with_entropy;
};

// What dlogits of a row are made of, from the statistics of whole rows as forward kept them.
struct HeadGradient {
  const int64_t* targets;    // [N], ids
  const float* temperature;  // [N], or null: scalar_temperature
  float scalar_temperature;
  const float* kept;      // [N, 4]: m, s - 1, t / s, (x_y - m) / temperature
  const float* upstream;  // [N, 2]: gradients of log-prob and entropy
  int64_t ignore_index;
  int64_t start;        // id of the first column
  int64_t num_columns;  // V
  int64_t num_rows;     // N
  float* coefficients;  // [N, 8], to be written
};

// dlogits of some of the columns.
struct HeadDlogits {
  HeadProduct product;  // of these columns' part of the weight
  int64_t first_column;
  const float* coefficients;  // [N, 8], of HeadGradient
  void* dlogits;              // [N, columns] of `dtype`, at a multiple of 16 bytes
  int64_t dlogits_stride;     // of rows, a multiple of 8
};

#ifdef FASTPPO_HAS_CUDA
void head_stats_sm90(const HeadStats& params, int device, uint64_t stream);
void head_gradient_sm90(const HeadGradient& params, int device, uint64_t stream);
void head_dlogits_sm90(const HeadDlogits& params, int device, uint64_t stream);

// Why the kernels cannot run on `device`; empty where they can.
std::string head_sm90_problem(int device);
#endif

}  // namespace fastppo
