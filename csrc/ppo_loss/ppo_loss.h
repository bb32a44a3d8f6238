// Policy losses: what fastppo/ops/ppo_loss.py hands to the kernel. fastppo/reference/ppo_loss.py is the definition.
//
// Per selected token weight * pg + kl_coef * KL - ent_coef * H, summed with the weights of the aggregation; the sum's
// derivatives are written without the normaliser. Unselected tokens are read as 0 and get 0.
#pragma once

#include <cstdint>

#include "common/token_blocks.h"

namespace fastppo {

// The orders are shared with LOSS_TYPES, KL_TYPES and CORRECTIONS of fastppo/ops/ppo_loss.py.
enum class LossType : int { kPpo = 0, kReinforce = 1, kCispo = 2, kGspo = 3, kGmpo = 4, kSapo = 5 };
enum class KlType : int { kK1 = 0, kAbs = 1, kK2 = 2, kK3 = 3 };
enum class Correction : int { kNone = 0, kTis = 1, kIcepop = 2, kSeqMaskTis = 3 };

struct PpoLossParams {
  TokenShape shape;          // [B, T], or one row of T
  TokenTensor logprobs;      // [B, T], as all that follow
  TokenTensor old_logprobs;  // null: logprobs
  TokenTensor advantages;
  TokenTensor mask;              // bytes; null: every token
  TokenTensor entropy;           // may be null
  TokenTensor ref_logprobs;      // may be null
  TokenTensor rollout_logprobs;  // null without correction
  TokenTensor nll_mask;          // bytes; null without nll_coef
  TokenSequences sequences;
  LossType loss_type;
  float ratio_low;       // 1 - clip_eps
  float ratio_high;      // 1 + clip_eps_high
  float log_ratio_low;   // -clip_eps
  float log_ratio_high;  // clip_eps_high
  float dual_clip;       // 0: off
  float sapo_tau[2];     // where the advantage is positive; elsewhere
  double ent_coef;
  double kl_coef;
  KlType kl_type;
  bool kl_pathwise;
  Correction correction;
  float is_bounds[2];
  Normaliser normaliser;
  double nll_coef;
  double num_nll_tokens;  // below 0: of this call
  float* grad;            // [B, T] contiguous: d(sum)/d logprobs; null: not wanted
  float* entropy_grad;    // the same for entropy
  float* nll_grad;        // d(sum of -logprobs)/d logprobs where nll_mask
  float* loss;            // [1]
  float* scale;           // [1]: the normaliser of the sum
  float* nll_scale;       // [1]: of the NLL term; null without nll_mask
  double* metrics;        // [14], in the order of PPO_METRICS
};

void ppo_loss_cpu(const PpoLossParams& params, int num_threads);

}  // namespace fastppo
