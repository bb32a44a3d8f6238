// Backward of the losses: what fastppo/ops/_loss.py hands to the kernel.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fastppo {

struct LossGradParams {
  const float* kept;      // [tokens]: d(sum)/d input
  const float* nll_kept;  // [tokens]: the same of the NLL term; may be null
  float factor;           // upstream * normaliser
  float nll_factor;
  void* grad;  // [tokens]: kept * factor + nll_kept * nll_factor
  Dtype dtype;
  int64_t tokens;
};

void loss_grad_cpu(const LossGradParams& params, int num_threads);

}  // namespace fastppo
