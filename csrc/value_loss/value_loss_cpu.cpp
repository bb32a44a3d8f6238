// CPU kernel of value_loss: one pass over the inputs in blocks of 256 tokens, as csrc/ppo_loss/ppo_loss_cpu.cpp.
#include "common/cpu.h"
#include "value_loss/value_loss.h"

namespace fastppo {
namespace {

enum Sum { kLoss, kErr, kErrSq, kRet, kRetSq, kWeighted, kSums };
enum Count { kTokens, kClipped, kCounts };

struct Partial {
  double sums[kSums];
  int64_t counts[kCounts];
};

struct Tiles {
  alignas(64) float values[kBlockTokens], old_values[kBlockTokens], returns[kBlockTokens], seq_weight[kBlockTokens];
  alignas(64) uint8_t mask[kBlockTokens];
  alignas(64) float loss[kBlockTokens], err[kBlockTokens], ret[kBlockTokens], weighted[kBlockTokens];
  alignas(64) float grad[kBlockTokens];
};

template <int LANES>
FASTPPO_INLINE void walk_block(const ValueLossParams& p, const std::vector<float>& seq_weight, int64_t first, int count,
                               Tiles& tiles, double (&lanes)[kSums][kSumLanes],
                               typename Simd<LANES>::Flags (&counts)[kCounts]) {
  using Floats = typename Simd<LANES>::Floats;
  using Flags = typename Simd<LANES>::Flags;
  const Floats zero = {};
  const float* values = read_floats<LANES>(p.values, p.shape, first, count, tiles.values);
  const float* old_values = read_floats<LANES>(p.old_values, p.shape, first, count, tiles.old_values);
  const float* returns = read_floats<LANES>(p.returns, p.shape, first, count, tiles.returns);
  const uint8_t* mask = read_flags(p.mask, p.shape, first, count, tiles.mask);
  const bool weighted = !seq_weight.empty();
  if (weighted) spread(p.sequences, seq_weight.data(), first, count, tiles.seq_weight);
  float* grad = count == kBlockTokens && p.grad != nullptr ? p.grad + first : tiles.grad;
  const int end = padded(count);

  for (int i = 0; i < end; i += LANES) {
    const Flags selected = load_flags<LANES>(mask + i);
    const Floats v = selected ? load<LANES>(values + i) : zero;
    const Floats ret = selected ? load<LANES>(returns + i) : zero;
    const Floats error = v - ret;
    Floats loss = 0.5f * error * error, slope = error;
    counts[kTokens] += selected;
    if (old_values != nullptr) {
      const Floats old = selected ? load<LANES>(old_values + i) : zero;
      const Floats moved = v - old;
      const Floats low = zero - p.clip_eps, high = zero + p.clip_eps;
      const Floats bounded = old + (moved < low ? low : (moved > high ? high : moved)) - ret;
      const Floats other = 0.5f * bounded * bounded;
      // Inside the range old + (v - old) is v but for its rounding, which may not decide.
      const Flags clipped = ((moved < low) | (moved > high)) & (other > loss);
      loss = clipped ? other : loss;
      slope = clipped ? zero : slope;
      counts[kClipped] += selected & clipped;
    }
    store<LANES>(tiles.loss + i, loss);
    store<LANES>(tiles.err + i, -error);
    store<LANES>(tiles.ret + i, ret);
    if (weighted) {
      const Floats weight = load<LANES>(tiles.seq_weight + i);
      store<LANES>(tiles.weighted + i, selected ? loss * weight : zero);
      slope *= weight;
    }
    if (p.grad != nullptr) store<LANES>(grad + i, selected ? slope : zero);
  }

  add_column(tiles.loss, end, lanes[kLoss]);
  add_column(tiles.err, end, lanes[kErr]);
  add_squares(tiles.err, end, lanes[kErrSq]);
  add_column(tiles.ret, end, lanes[kRet]);
  add_squares(tiles.ret, end, lanes[kRetSq]);
  if (weighted) add_column(tiles.weighted, end, lanes[kWeighted]);
  if (count != kBlockTokens && p.grad != nullptr) {
    std::memcpy(p.grad + first, tiles.grad, static_cast<size_t>(count) * sizeof(float));
  }
}

template <int LANES>
FASTPPO_INLINE void walk_task(const ValueLossParams& p, const std::vector<float>& seq_weight, int64_t task,
                              Partial& partial) {
  Tiles tiles;
  alignas(64) double lanes[kSums][kSumLanes] = {};
  typename Simd<LANES>::Flags counts[kCounts] = {};
  const int64_t end = std::min((task + 1) * kTaskTokens, p.shape.tokens());
  for (int64_t first = task * kTaskTokens; first < end; first += kBlockTokens) {
    const int count = static_cast<int>(std::min<int64_t>(kBlockTokens, end - first));
    walk_block<LANES>(p, seq_weight, first, count, tiles, lanes, counts);
  }
  for (int k = 0; k < kSums; ++k) partial.sums[k] = total(lanes[k]);
  for (int k = 0; k < kCounts; ++k) partial.counts[k] = count_true<LANES>(counts[k]);
}

void walk_task_baseline(const ValueLossParams& p, const std::vector<float>& seq_weight, int64_t task,
                        Partial& partial) {
  walk_task<4>(p, seq_weight, task, partial);
}

#ifdef FASTPPO_X86
FASTPPO_TARGET_AVX2 void walk_task_avx2(const ValueLossParams& p, const std::vector<float>& seq_weight, int64_t task,
                                        Partial& partial) {
  walk_task<8>(p, seq_weight, task, partial);
}

FASTPPO_TARGET_AVX512 void walk_task_avx512(const ValueLossParams& p, const std::vector<float>& seq_weight,
                                            int64_t task, Partial& partial) {
  walk_task<8>(p, seq_weight, task, partial);
}
#endif

}  // namespace

void value_loss_cpu(const ValueLossParams& p, int num_threads) {
  const std::vector<int64_t> selected = count_selected(p.sequences, p.mask, p.shape, num_threads);
  std::vector<float> seq_weight;
  if (p.normaliser.aggregation == Aggregation::kSeqMeanTokenMean) seq_weight = sequence_weights(selected);

  auto* walk = walk_task_baseline;
#ifdef FASTPPO_X86
  if (cpu_isa() == CpuIsa::kAvx2) walk = walk_task_avx2;
  if (cpu_isa() == CpuIsa::kAvx512) walk = walk_task_avx512;
#endif
  std::vector<Partial> partials(static_cast<size_t>((p.shape.tokens() + kTaskTokens - 1) / kTaskTokens));
  parallel_for(static_cast<int64_t>(partials.size()), num_threads,
               [&](int64_t task) { walk(p, seq_weight, task, partials[static_cast<size_t>(task)]); });
  Partial all = {};
  for (const Partial& partial : partials) {
    for (int k = 0; k < kSums; ++k) all.sums[k] += partial.sums[k];
    for (int k = 0; k < kCounts; ++k) all.counts[k] += partial.counts[k];
  }

  const double tokens = static_cast<double>(all.counts[kTokens]);
  const double seqs =
      static_cast<double>(std::count_if(selected.begin(), selected.end(), [](int64_t number) { return number > 0; }));
  const double scale = scale_of(p.normaliser, tokens, seqs);
  *p.loss = static_cast<float>((seq_weight.empty() ? all.sums[kLoss] : all.sums[kWeighted]) * scale);
  *p.scale = static_cast<float>(scale);
  const double metrics[] = {tokens,          all.sums[kLoss],  static_cast<double>(all.counts[kClipped]),
                            all.sums[kErr],  all.sums[kErrSq], all.sums[kRet],
                            all.sums[kRetSq]};
  std::copy(std::begin(metrics), std::end(metrics), p.metrics);
}

}  // namespace fastppo
