// CPU kernel of ppo_loss: one pass over the inputs in blocks of 256 tokens. A block's columns are read where they lie
// or converted into tiles that stay in the first-level cache; every option is a branch that is the same for all
// vectors, and what the tokens decide are selects, never products with a mask. A token's gradient depends on that
// token and on its sequence alone: not on its place in a vector, a block or the batch.
//
// Losses with one ratio per sequence (gspo, gmpo) and sequence masks take one more pass over log-probs before, and gspo
// and gmpo one over their token gradients after, both per sequence in the order of its tokens.
#include <cmath>
#include <memory>

#include "common/cpu.h"
#include "common/vector_math.h"
#include "ppo_loss/ppo_loss.h"

namespace fastppo {
namespace {

constexpr float kLogRatioBound = 20.0f;

constexpr bool per_sequence(LossType loss) {
  return loss == LossType::kGspo || loss == LossType::kGmpo;
}

// What is known of each sequence before the tokens are walked; empty where it is not needed.
struct SequenceTables {
  std::vector<int64_t> selected;
  std::vector<float> weight;             // of the aggregation
  std::vector<float> log_ratio;          // mean over the selected tokens
  std::vector<float> kept;               // 1 or 0: seq_mask_tis
  std::unique_ptr<float[]> token_grads;  // [B * T]: d(sum)/d log ratio of each token's sequence, through that token
  std::unique_ptr<uint8_t[]> passes;     // [B * T]: the token's own log ratio reaches the mean with slope 1/n
};

enum Sum { kPg, kKl, kPpoKl, kEntropy, kRatio, kRatioSq, kWeight, kWeighted, kNll, kSums };
enum Count { kTokens, kClipHigh, kClipLow, kDualClip, kClamped, kMissing, kNllTokens, kCounts };

struct Partial {
  double sums[kSums];
  int64_t counts[kCounts];
};

struct Tiles {
  alignas(64) float logprobs[kBlockTokens], old_logprobs[kBlockTokens], advantages[kBlockTokens];
  alignas(64) float entropy[kBlockTokens], ref_logprobs[kBlockTokens], rollout_logprobs[kBlockTokens];
  alignas(64) float seq_weight[kBlockTokens], seq_log_ratio[kBlockTokens], seq_kept[kBlockTokens];
  alignas(64) uint8_t mask[kBlockTokens], nll_mask[kBlockTokens], passes[kBlockTokens];
  alignas(64) float columns[kSums][kBlockTokens];  // what each token adds to a sum
  alignas(64) float grad[kBlockTokens], entropy_grad[kBlockTokens], nll_grad[kBlockTokens], token_grad[kBlockTokens];
};

// NaN stays NaN.
template <typename Floats>
FASTPPO_INLINE Floats clamp(const Floats& x, float low, float high) {
  const Floats raised = x < low ? Floats{} + low : x;
  return raised > high ? Floats{} + high : raised;
}

// NaN is, so that what it multiplies becomes NaN.
template <typename Floats>
FASTPPO_INLINE auto inside(const Floats& x, float bound) {
  return ~((x < -bound) | (x > bound));
}

// Where a block's column is written: in place if the block is whole, else to a tile that `finish` copies.
FASTPPO_INLINE float* target(float* out, int64_t first, int count, float* tile) {
  return count == kBlockTokens && out != nullptr ? out + first : tile;
}

FASTPPO_INLINE void finish(float* out, int64_t first, int count, const float* tile) {
  if (count != kBlockTokens && out != nullptr) std::memcpy(out + first, tile, static_cast<size_t>(count) * 4);
}

template <int LANES, LossType LOSS>
FASTPPO_INLINE void walk_block(const PpoLossParams& p, SequenceTables& s, int64_t first, int count, Tiles& tiles,
                               double (&lanes)[kSums][kSumLanes], typename Simd<LANES>::Flags (&counts)[kCounts]) {
  using Floats = typename Simd<LANES>::Floats;
  using Flags = typename Simd<LANES>::Flags;
  const Floats zero = {};
  const Floats one = zero + 1.0f;
  const float bound = kLogRatioBound;

  const float* logprobs = read_floats<LANES>(p.logprobs, p.shape, first, count, tiles.logprobs);
  const float* old_logprobs = p.old_logprobs.data == nullptr
                                  ? logprobs
                                  : read_floats<LANES>(p.old_logprobs, p.shape, first, count, tiles.old_logprobs);
  const float* advantages = read_floats<LANES>(p.advantages, p.shape, first, count, tiles.advantages);
  const float* entropy = read_floats<LANES>(p.entropy, p.shape, first, count, tiles.entropy);
  const float* ref_logprobs = read_floats<LANES>(p.ref_logprobs, p.shape, first, count, tiles.ref_logprobs);
  const float* rollout_logprobs = read_floats<LANES>(p.rollout_logprobs, p.shape, first, count, tiles.rollout_logprobs);
  const uint8_t* mask = read_flags(p.mask, p.shape, first, count, tiles.mask);
  const bool nll = p.nll_mask.data != nullptr;
  const uint8_t* nll_mask = nll ? read_flags(p.nll_mask, p.shape, first, count, tiles.nll_mask) : nullptr;
  const bool weighted = !s.weight.empty();
  const bool sequence_masked = !s.kept.empty();
  if (weighted) spread(p.sequences, s.weight.data(), first, count, tiles.seq_weight);
  if (per_sequence(LOSS)) spread(p.sequences, s.log_ratio.data(), first, count, tiles.seq_log_ratio);
  if (sequence_masked) spread(p.sequences, s.kept.data(), first, count, tiles.seq_kept);

  float* grad = target(p.grad, first, count, tiles.grad);
  float* entropy_grad = target(p.entropy_grad, first, count, tiles.entropy_grad);
  float* nll_grad = target(p.nll_grad, first, count, tiles.nll_grad);
  float* token_grad = target(s.token_grads.get(), first, count, tiles.token_grad);
  const float kl_coef = static_cast<float>(p.kl_coef);
  const float ent_coef = static_cast<float>(p.ent_coef);
  const int end = padded(count);

  for (int i = 0; i < end; i += LANES) {
    const Flags selected = load_flags<LANES>(mask + i);
    const Floats logp = selected ? load<LANES>(logprobs + i) : zero;
    const Floats old = selected ? load<LANES>(old_logprobs + i) : zero;
    const Floats adv = selected ? load<LANES>(advantages + i) : zero;
    const Floats token_log_ratio = logp - old;
    counts[kTokens] += selected;
    store<LANES>(tiles.columns[kPpoKl] + i, -clamp(token_log_ratio, -bound, bound));

    Floats log_ratio = token_log_ratio;
    Flags passes = selected;
    if (LOSS == LossType::kGmpo) {
      const Flags high = (adv >= 0.0f) & (token_log_ratio > p.log_ratio_high);
      const Flags low = (adv < 0.0f) & (token_log_ratio < p.log_ratio_low);
      counts[kClipHigh] += selected & high;
      counts[kClipLow] += selected & low;
      passes = selected & ~(high | low) & (token_log_ratio == token_log_ratio);
    }
    if (per_sequence(LOSS)) log_ratio = selected ? load<LANES>(tiles.seq_log_ratio + i) : zero;
    const Flags moves = inside(log_ratio, bound);
    counts[kClamped] += selected & ((log_ratio > bound) | (log_ratio < -bound));
    const Floats ratio = exp<LANES>(clamp(log_ratio, -bound, bound));
    store<LANES>(tiles.columns[kRatio] + i, selected ? ratio : zero);

    Floats pg, slope;  // of one token; d pg/d logp, or for a sequence's ratio d pg/d log ratio
    if (LOSS == LossType::kPpo || LOSS == LossType::kGspo) {
      const Floats unclipped = -adv * ratio;
      const Floats clipped = -adv * clamp(ratio, p.ratio_low, p.ratio_high);
      const Flags clips = selected & (clipped > unclipped);
      counts[kClipHigh] += clips & (ratio > 1.0f);
      counts[kClipLow] += clips & (ratio <= 1.0f);
      Flags taken = ~(clipped > unclipped);  // a tie is, and so is NaN: its gradient must not look like 0
      pg = taken ? unclipped : clipped;
      if (p.dual_clip != 0.0f) {
        const Floats limit = -adv * p.dual_clip;
        const Flags dual = (adv < 0.0f) & (limit < pg);
        pg = dual ? limit : pg;
        taken &= ~dual;
        counts[kDualClip] += selected & dual;
      }
      slope = (taken & moves) ? unclipped : zero;
    } else if (LOSS == LossType::kReinforce) {
      slope = -adv;
      pg = slope * logp;
    } else if (LOSS == LossType::kCispo) {
      counts[kClipHigh] += selected & (ratio > p.ratio_high);
      counts[kClipLow] += selected & (ratio < p.ratio_low);
      slope = -adv * clamp(ratio, p.ratio_low, p.ratio_high);
      pg = slope * logp;
    } else if (LOSS == LossType::kGmpo) {
      pg = -adv * ratio;
      slope = moves ? pg : zero;
    } else {
      const Floats tau = adv > 0.0f ? zero + p.sapo_tau[0] : zero + p.sapo_tau[1];
      const Floats gate = tanh<LANES>(tau * (ratio - 1.0f) * 0.5f);
      pg = -adv * (1.0f + gate) * (2.0f / tau);
      slope = moves ? -adv * (1.0f - gate * gate) * ratio : zero;
    }

    if (p.correction != Correction::kNone) {
      const Floats rollout = load<LANES>(rollout_logprobs + i);
      const Flags known = (rollout - rollout) == zero;  // neither infinite nor NaN
      const Floats log_weight = (selected & known) ? old - rollout : zero;
      Floats weight = exp<LANES>(clamp(log_weight, -bound, bound));
      if (p.correction == Correction::kTis) {
        weight = known ? clamp(weight, p.is_bounds[0], p.is_bounds[1]) : one;
      } else if (p.correction == Correction::kIcepop) {
        // NaN is not dropped in silence.
        weight = (known & ((weight < p.is_bounds[0]) | (weight > p.is_bounds[1]))) ? zero : weight;
      } else {
        weight = load<LANES>(tiles.seq_kept + i) != zero ? weight : zero;
      }
      const Flags dropped = weight == zero;
      pg = dropped ? zero : weight * pg;
      slope = dropped ? zero : weight * slope;
      counts[kMissing] += selected & ~known;
      store<LANES>(tiles.columns[kWeight] + i, selected ? weight : zero);
    }
    store<LANES>(tiles.columns[kPg] + i, selected ? pg : zero);

    Floats loss = pg, kl_slope = zero;
    if (ref_logprobs != nullptr) {
      const Floats difference = selected ? load<LANES>(ref_logprobs + i) - logp : zero;
      const Floats x = clamp(difference, -bound, bound);
      Floats kl;
      if (p.kl_type == KlType::kK1) {
        kl = -x;
      } else if (p.kl_type == KlType::kAbs) {
        kl = x < 0.0f ? -x : x;
      } else if (p.kl_type == KlType::kK2) {
        kl = 0.5f * x * x;
      } else {
        kl = expm1_minus_x<LANES>(x);
      }
      store<LANES>(tiles.columns[kKl] + i, kl);
      if (kl_coef != 0.0f) {
        loss += kl_coef * kl;
        const Floats steepness = p.kl_pathwise && p.kl_type == KlType::kK3 ? expm1<LANES>(x) : x;
        kl_slope = inside(difference, bound) ? -kl_coef * steepness : zero;
      }
    }
    if (entropy != nullptr) {
      const Floats h = selected ? load<LANES>(entropy + i) : zero;
      store<LANES>(tiles.columns[kEntropy] + i, h);
      if (ent_coef != 0.0f) loss -= ent_coef * h;
    }

    Floats entropy_slope = zero - ent_coef;
    if (weighted) {
      const Floats weight = load<LANES>(tiles.seq_weight + i);
      store<LANES>(tiles.columns[kWeighted] + i, selected ? loss * weight : zero);
      slope *= weight;
      kl_slope *= weight;
      entropy_slope *= weight;
    }
    if (p.grad != nullptr) {
      if (per_sequence(LOSS)) {
        store<LANES>(token_grad + i, selected ? slope : zero);
        store<LANES>(grad + i, selected ? kl_slope : zero);
        const typename Simd<LANES>::Bytes bytes = __builtin_convertvector(passes, typename Simd<LANES>::Bytes);
        std::memcpy(tiles.passes + i, &bytes, sizeof(bytes));
      } else {
        store<LANES>(grad + i, selected ? slope + kl_slope : zero);
      }
    }
    if (p.entropy_grad != nullptr) store<LANES>(entropy_grad + i, selected ? entropy_slope : zero);
    if (nll) {
      const Flags positive = selected & load_flags<LANES>(nll_mask + i);
      counts[kNllTokens] += positive;
      store<LANES>(tiles.columns[kNll] + i, positive ? -logp : zero);
      if (p.nll_grad != nullptr) store<LANES>(nll_grad + i, positive ? -one : zero);
    }
  }

  add_column(tiles.columns[kPg], end, lanes[kPg]);
  add_column(tiles.columns[kPpoKl], end, lanes[kPpoKl]);
  add_column(tiles.columns[kRatio], end, lanes[kRatio]);
  add_squares(tiles.columns[kRatio], end, lanes[kRatioSq]);
  if (ref_logprobs != nullptr) add_column(tiles.columns[kKl], end, lanes[kKl]);
  if (entropy != nullptr) add_column(tiles.columns[kEntropy], end, lanes[kEntropy]);
  if (p.correction != Correction::kNone) add_column(tiles.columns[kWeight], end, lanes[kWeight]);
  if (weighted) add_column(tiles.columns[kWeighted], end, lanes[kWeighted]);
  if (nll) add_column(tiles.columns[kNll], end, lanes[kNll]);

  finish(p.grad, first, count, grad);
  finish(p.entropy_grad, first, count, entropy_grad);
  finish(p.nll_grad, first, count, nll_grad);
  finish(s.token_grads.get(), first, count, token_grad);
  if (s.passes != nullptr) std::memcpy(s.passes.get() + first, tiles.passes, static_cast<size_t>(count));
}

template <int LANES, LossType LOSS>
FASTPPO_INLINE void walk_task(const PpoLossParams& p, SequenceTables& s, int64_t task, Partial& partial) {
  using Flags = typename Simd<LANES>::Flags;
  Tiles tiles;
  alignas(64) double lanes[kSums][kSumLanes] = {};
  Flags counts[kCounts] = {};
  const int64_t end = std::min((task + 1) * kTaskTokens, p.shape.tokens());
  for (int64_t first = task * kTaskTokens; first < end; first += kBlockTokens) {
    const int count = static_cast<int>(std::min<int64_t>(kBlockTokens, end - first));
    walk_block<LANES, LOSS>(p, s, first, count, tiles, lanes, counts);
  }
  for (int k = 0; k < kSums; ++k) partial.sums[k] = total(lanes[k]);
  for (int k = 0; k < kCounts; ++k) partial.counts[k] = count_true<LANES>(counts[k]);
}

using WalkTask = void (*)(const PpoLossParams&, SequenceTables&, int64_t, Partial&);

template <LossType LOSS>
void walk_task_baseline(const PpoLossParams& p, SequenceTables& s, int64_t task, Partial& partial) {
  walk_task<4, LOSS>(p, s, task, partial);
}

#ifdef FASTPPO_X86
template <LossType LOSS>
FASTPPO_TARGET_AVX2 void walk_task_avx2(const PpoLossParams& p, SequenceTables& s, int64_t task, Partial& partial) {
  walk_task<8, LOSS>(p, s, task, partial);
}
#endif

// AVX-512 takes the AVX2 code, which was no slower: docs/kernels/ppo_loss.md.
template <LossType LOSS>
WalkTask best_walk_task() {
#ifdef FASTPPO_X86
  if (cpu_isa() != CpuIsa::kBaseline) return walk_task_avx2<LOSS>;
#endif
  return walk_task_baseline<LOSS>;
}

WalkTask best_walk_task(LossType loss) {
  switch (loss) {
    case LossType::kReinforce:
      return best_walk_task<LossType::kReinforce>();
    case LossType::kCispo:
      return best_walk_task<LossType::kCispo>();
    case LossType::kGspo:
      return best_walk_task<LossType::kGspo>();
    case LossType::kGmpo:
      return best_walk_task<LossType::kGmpo>();
    case LossType::kSapo:
      return best_walk_task<LossType::kSapo>();
    default:
      return best_walk_task<LossType::kPpo>();
  }
}

// Means over a sequence: sums in float64 in the order of its tokens.
void sequence_means(const PpoLossParams& p, SequenceTables& s, int64_t b) {
  Tiles tiles;
  double log_ratios = 0, log_weights = 0;
  int64_t known = 0;
  const int64_t end = p.sequences.start(b + 1);
  for (int64_t first = p.sequences.start(b); first < end; first += kBlockTokens) {
    const int count = static_cast<int>(std::min<int64_t>(kBlockTokens, end - first));
    const uint8_t* mask = read_flags(p.mask, p.shape, first, count, tiles.mask);
    const float* logprobs = read_floats<4>(p.logprobs, p.shape, first, count, tiles.logprobs);
    const float* old_logprobs = p.old_logprobs.data == nullptr
                                    ? logprobs
                                    : read_floats<4>(p.old_logprobs, p.shape, first, count, tiles.old_logprobs);
    if (per_sequence(p.loss_type)) {
      const float* advantages = read_floats<4>(p.advantages, p.shape, first, count, tiles.advantages);
      const bool bounded = p.loss_type == LossType::kGmpo;
      for (int i = 0; i < count; ++i) {
        if (mask[i] == 0) continue;
        float log_ratio = logprobs[i] - old_logprobs[i];
        if (bounded && advantages[i] >= 0 && log_ratio > p.log_ratio_high) log_ratio = p.log_ratio_high;
        if (bounded && !(advantages[i] >= 0) && log_ratio < p.log_ratio_low) log_ratio = p.log_ratio_low;
        log_ratios += static_cast<double>(log_ratio);
      }
    }
    if (p.correction == Correction::kSeqMaskTis) {
      const float* rollout = read_floats<4>(p.rollout_logprobs, p.shape, first, count, tiles.rollout_logprobs);
      for (int i = 0; i < count; ++i) {
        if (mask[i] == 0 || !std::isfinite(rollout[i])) continue;
        log_weights += static_cast<double>(old_logprobs[i] - rollout[i]);
        ++known;
      }
    }
  }
  const size_t at = static_cast<size_t>(b);
  if (!s.log_ratio.empty()) {
    s.log_ratio[at] = static_cast<float>(log_ratios / static_cast<double>(std::max<int64_t>(s.selected[at], 1)));
  }
  if (!s.kept.empty()) {
    const float mean = static_cast<float>(log_weights / static_cast<double>(std::max<int64_t>(known, 1)));
    const float geometric_mean = std::exp(mean);
    s.kept[at] = geometric_mean < p.is_bounds[0] || geometric_mean > p.is_bounds[1] ? 0.0f : 1.0f;
  }
}

// Every token of a sequence moves its ratio: adds the mean of the token gradients to each one's own.
void spread_token_grads(const PpoLossParams& p, const SequenceTables& s, int64_t b) {
  const int64_t start = p.sequences.start(b), end = p.sequences.start(b + 1);
  double sum = 0;
  for (int64_t t = start; t < end; ++t) sum += static_cast<double>(s.token_grads[static_cast<size_t>(t)]);
  const double selected = static_cast<double>(std::max<int64_t>(s.selected[static_cast<size_t>(b)], 1));
  const float mean = static_cast<float>(sum / selected);
  for (int64_t t = start; t < end; ++t) p.grad[t] += s.passes[static_cast<size_t>(t)] != 0 ? mean : 0.0f;
}

}  // namespace

void ppo_loss_cpu(const PpoLossParams& p, int num_threads) {
  const int64_t tokens = p.shape.tokens();
  SequenceTables s;
  s.selected = count_selected(p.sequences, p.mask, p.shape, num_threads);
  if (p.normaliser.aggregation == Aggregation::kSeqMeanTokenMean) s.weight = sequence_weights(s.selected);
  if (per_sequence(p.loss_type)) s.log_ratio.resize(s.selected.size());
  if (p.correction == Correction::kSeqMaskTis) s.kept.resize(s.selected.size());
  if (tokens > 0 && !(s.log_ratio.empty() && s.kept.empty())) {
    parallel_for_sequences(p.sequences, tokens, num_threads, [&](int64_t b, int64_t last) {
      for (; b < last; ++b) sequence_means(p, s, b);
    });
  }
  const bool second_pass = tokens > 0 && per_sequence(p.loss_type) && p.grad != nullptr;
  if (second_pass) {
    s.token_grads.reset(new float[static_cast<size_t>(tokens)]);
    s.passes.reset(new uint8_t[static_cast<size_t>(tokens)]);
  }

  std::vector<Partial> partials(static_cast<size_t>((tokens + kTaskTokens - 1) / kTaskTokens));
  const WalkTask walk = best_walk_task(p.loss_type);
  parallel_for(static_cast<int64_t>(partials.size()), num_threads,
               [&](int64_t task) { walk(p, s, task, partials[static_cast<size_t>(task)]); });
  Partial all = {};
  for (const Partial& partial : partials) {
    for (int k = 0; k < kSums; ++k) all.sums[k] += partial.sums[k];
    for (int k = 0; k < kCounts; ++k) all.counts[k] += partial.counts[k];
  }
  if (second_pass) {
    parallel_for_sequences(p.sequences, tokens, num_threads, [&](int64_t b, int64_t last) {
      for (; b < last; ++b) spread_token_grads(p, s, b);
    });
  }

  const double selected = static_cast<double>(all.counts[kTokens]);
  const double seqs = static_cast<double>(
      std::count_if(s.selected.begin(), s.selected.end(), [](int64_t number) { return number > 0; }));
  double sum = all.sums[kWeighted];
  if (p.normaliser.aggregation != Aggregation::kSeqMeanTokenMean) {
    sum = all.sums[kPg];
    if (p.kl_coef != 0) sum += p.kl_coef * all.sums[kKl];
    if (p.ent_coef != 0) sum -= p.ent_coef * all.sums[kEntropy];
  }
  const double scale = scale_of(p.normaliser, selected, seqs);
  double loss = sum * scale;
  if (p.nll_mask.data != nullptr) {
    const double count = p.num_nll_tokens < 0 ? static_cast<double>(all.counts[kNllTokens]) : p.num_nll_tokens;
    const double nll_scale = p.nll_coef * reciprocal(count);
    loss += all.sums[kNll] * nll_scale;
    *p.nll_scale = static_cast<float>(nll_scale);
  }
  *p.loss = static_cast<float>(loss);
  *p.scale = static_cast<float>(scale);

  const bool corrected = p.correction != Correction::kNone;
  const double metrics[] = {selected,
                            seqs,
                            all.sums[kPg],
                            all.sums[kKl],
                            all.sums[kPpoKl],
                            all.sums[kEntropy],
                            static_cast<double>(all.counts[kClipHigh]),
                            static_cast<double>(all.counts[kClipLow]),
                            static_cast<double>(all.counts[kDualClip]),
                            static_cast<double>(all.counts[kClamped]),
                            all.sums[kRatio],
                            all.sums[kRatioSq],
                            corrected ? all.sums[kWeight] : selected,
                            static_cast<double>(all.counts[kMissing])};
  std::copy(std::begin(metrics), std::end(metrics), p.metrics);
}

}  // namespace fastppo
