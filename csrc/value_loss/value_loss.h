// Value loss: what fastppo/ops/value_loss.py hands to the kernel. fastppo/reference/value_loss.py is the definition.
//
// Per selected token 0.5 (v - R)^2, or the larger of that and the same of old + clamp(v - old, +-clip_eps), summed with
// the weights of the aggregation; d(sum)/d values is written without the normaliser. Unselected tokens are read as 0
// and get 0.
#pragma once

#include "common/token_blocks.h"

namespace fastppo {

struct ValueLossParams {
  TokenShape shape;        // [B, T], or one row of T
  TokenTensor values;      // [B, T], as all that follow
  TokenTensor old_values;  // null: no clipping
  TokenTensor returns;
  TokenTensor mask;  // bytes; null: every token
  TokenSequences sequences;
  float clip_eps;
  Normaliser normaliser;
  float* grad;      // [B, T] contiguous; null: not wanted
  float* loss;      // [1]
  float* scale;     // [1]
  double* metrics;  // [7], in the order of VALUE_METRICS
};

void value_loss_cpu(const ValueLossParams& params, int num_threads);

}  // namespace fastppo
