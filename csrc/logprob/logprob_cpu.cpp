// CPU kernels of logprob. A row is worked on in chunks that stay in the first-level cache; rows are what threads share.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/cpu.h"
#include "common/streaming.h"
#include "common/thread_pool.h"
#include "common/vector_math.h"
#include "logprob/logprob.h"

namespace fastppo {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// exp of it is the smallest normal float32; a column below counts as none.
constexpr float kFloor = -87.33f;
// Rows are handed out in blocks of about this many elements, a few microseconds of work.
constexpr int64_t kElementsPerBlock = 1 << 15;
// Gradients larger than this do not stay in cache until they are read: they are written past it.
constexpr int64_t kStreamedBytes = 8 << 20;

template <typename T>
T* row_address(const LogprobRows& rows, int64_t r) {
  return static_cast<T*>(rows.data) + r / rows.inner * rows.outer_stride + r % rows.inner * rows.inner_stride;
}

// Vectors that advance together, to hide the latency of one.
template <int LANES>
constexpr int kUnroll = LANES == 16 ? 4 : 2;

// Columns of a chunk: it stays in the first-level cache, and a lane adds no more than 32 numbers in float32.
template <int LANES>
constexpr int kChunk = 32 * LANES * kUnroll<LANES>;

// UNROLL vectors of a chunk from column i on, softcapped; -inf beyond its end.
template <int LANES, bool CAP, typename T>
FASTPPO_INLINE void load_columns(const T* chunk, int i, int columns, float softcap,
                                 typename Simd<LANES>::Floats (&x)[kUnroll<LANES>]) {
  using Floats = typename Simd<LANES>::Floats;
  constexpr int kWidth = LANES * kUnroll<LANES>;
  if (i + kWidth <= columns) {
    for (int k = 0; k < kUnroll<LANES>; ++k) x[k] = load<LANES>(chunk + i + k * LANES);
  } else {
    float padded[kWidth];
    for (int k = 0; k < kWidth; ++k) padded[k] = i + k < columns ? to_float(chunk[i + k]) : -kInf;
    for (int k = 0; k < kUnroll<LANES>; ++k) x[k] = load<LANES>(padded + k * LANES);
  }
  if constexpr (CAP) {
    for (auto& v : x) {
      const Floats capped = tanh<LANES>(v / softcap) * softcap;
      v = v == -kInf ? v : (v == kInf ? Floats{} + kNan : capped);
    }
  }
}

// The largest of a chunk, and whether it holds a NaN.
template <int LANES, bool CAP, typename T>
FASTPPO_INLINE float largest(const T* chunk, int columns, float softcap, bool& nan) {
  using Floats = typename Simd<LANES>::Floats;
  Floats top = Floats{} - kInf;
  typename Simd<LANES>::Flags strange = {};
  for (int i = 0; i < columns; i += LANES * kUnroll<LANES>) {
    Floats x[kUnroll<LANES>];
    load_columns<LANES, CAP>(chunk, i, columns, softcap, x);
    for (const Floats& v : x) {
      strange |= v != v;
      top = max<LANES>(v, top);
    }
  }
  float result = -kInf;
  for (int lane = 0; lane < LANES; ++lane) {
    result = top[lane] > result ? top[lane] : result;
    nan = nan || strange[lane];
  }
  return result;
}

// d = (x - m) / temperature, not below kFloor, and e = exp(d), 0 there. NaN stays NaN in both.
template <int LANES, bool SCALED>
FASTPPO_INLINE void exponential(const typename Simd<LANES>::Floats& x, float m, float inverse_temperature,
                                typename Simd<LANES>::Floats& d, typename Simd<LANES>::Floats& e) {
  using Floats = typename Simd<LANES>::Floats;
  d = x - m;
  if constexpr (SCALED) d *= inverse_temperature;
  d = max<LANES>(Floats{} + kFloor, d);
  e = exp<LANES>(d);
  e = d == kFloor ? Floats{} : e;
}

// Sums over columns for one m. The columns at m, whose e is exactly 1, are counted apart: beside them a trained
// policy's other columns are so small that a float32 sum would lose them.
struct Sums {
  double at_m = 0;
  double others = 0;
  double shifted = 0;  // sum of e * d

  void rescale(double d) {  // to an m that is larger: d = (old - new) / temperature
    const double scale = std::exp(d);
    shifted = scale * (shifted + d * (at_m + others));
    others = scale * (at_m + others);
    at_m = 0;
  }
};

// Adds a chunk's columns; returns its largest x. Without AT_M the caller knows that no column is at m.
template <int LANES, bool CAP, bool SCALED, bool ENTROPY, bool AT_M, typename T>
FASTPPO_INLINE float sum_chunk(const T* chunk, int columns, float softcap, float m, float inverse_temperature,
                               Sums& total) {
  using Floats = typename Simd<LANES>::Floats;
  constexpr int kVectors = kUnroll<LANES>;
  Floats others[kVectors] = {}, shifted[kVectors] = {}, at_m[kVectors] = {}, tops[kVectors];
  for (auto& v : tops) v = Floats{} - kInf;
  for (int i = 0; i < columns; i += LANES * kVectors) {
    Floats x[kVectors];
    load_columns<LANES, CAP>(chunk, i, columns, softcap, x);
    for (int k = 0; k < kVectors; ++k) {
      Floats d, e;
      exponential<LANES, SCALED>(x[k], m, inverse_temperature, d, e);
      tops[k] = max<LANES>(x[k], tops[k]);
      if constexpr (AT_M) {
        at_m[k] += x[k] == m ? e : Floats{};
        e = x[k] == m ? Floats{} : e;
      }
      others[k] += e;
      if constexpr (ENTROPY) shifted[k] += e * d;
    }
  }
  for (int k = 1; k < kVectors; ++k) {
    others[0] += others[k];
    shifted[0] += shifted[k];
    at_m[0] += at_m[k];
    tops[0] = max<LANES>(tops[k], tops[0]);
  }
  total.at_m += sum_lanes<LANES>(at_m[0]);
  total.others += sum_lanes<LANES>(others[0]);
  total.shifted += sum_lanes<LANES>(shifted[0]);
  float top = tops[0][0];
  for (int lane = 1; lane < LANES; ++lane) top = tops[0][lane] > top ? tops[0][lane] : top;
  return top;
}

template <int LANES, bool CAP, bool SCALED, bool ENTROPY, typename T>
FASTPPO_INLINE void row_stats(const LogprobParams& p, int64_t r, float* stats) {
  const T* row = row_address<const T>(p.logits, r);
  const float temperature = p.temperature != nullptr ? p.temperature[r] : p.scalar_temperature;
  const float inverse = 1.0f / temperature;
  float m = -kInf;
  Sums sums;
  bool nan = false;
  for (int64_t first = 0; first < p.used; first += kChunk<LANES>) {
    const T* chunk = row + first;
    const int columns = static_cast<int>(std::min<int64_t>(kChunk<LANES>, p.used - first));
    if (m == -kInf) {
      m = largest<LANES, CAP>(chunk, columns, p.softcap, nan);
      if (m != -kInf) sum_chunk<LANES, CAP, SCALED, ENTROPY, true>(chunk, columns, p.softcap, m, inverse, sums);
      continue;
    }
    // Most chunks stay below the largest so far; one that does not is summed again.
    Sums below = sums;
    const float top = sum_chunk<LANES, CAP, SCALED, ENTROPY, false>(chunk, columns, p.softcap, m, inverse, below);
    if (top < m || top != top) {
      sums = below;
      continue;
    }
    if (top > m) {
      sums.rescale(std::max(-1000.0, (double{m} - top) / temperature));
      m = top;
    }
    sum_chunk<LANES, CAP, SCALED, ENTROPY, true>(chunk, columns, p.softcap, m, inverse, sums);
  }
  stats[0] = m;
  stats[1] = nan ? kNan : static_cast<float>((sums.at_m - 1) + sums.others);
  stats[2] = static_cast<float>(sums.shifted);
  const int64_t y = p.targets[r] - p.start;
  stats[3] = kNotHere;
  if (y >= 0 && y < p.used) {
    typename Simd<LANES>::Floats x[kUnroll<LANES>];
    load_columns<LANES, CAP>(row + y, 0, 1, p.softcap, x);
    stats[3] = x[0][0];
  }
}

template <int LANES, bool CAP, bool SCALED, bool ENTROPY, typename T>
FASTPPO_INLINE void stats_of_rows(const LogprobParams& p, int64_t first, int64_t last, float* stats) {
  for (int64_t r = first; r < last; ++r) {
    float* out = stats + 4 * r;
    if (p.targets[r] == p.ignore_index) {
      out[0] = -kInf;
      out[1] = -1;
      out[2] = 0;
      out[3] = kNotHere;
    } else {
      row_stats<LANES, CAP, SCALED, ENTROPY, T>(p, r, out);
    }
  }
}

template <int LANES, bool CAP, bool SCALED, bool ENTROPY, typename T>
FASTPPO_INLINE void row_dlogits(const LogprobParams& p, const LogprobGrads& g, int64_t r, float g_lp, float g_h,
                                bool streamed) {
  using Floats = typename Simd<LANES>::Floats;
  const T* row = row_address<const T>(p.logits, r);
  T* out = row_address<T>(g.dlogits, r);
  const float m = g.row[4 * r], excess = g.row[4 * r + 1], mean_d = g.row[4 * r + 2], d_y = g.row[4 * r + 3];
  const double s = 1.0 + excess;
  const float temperature = p.temperature != nullptr ? p.temperature[r] : p.scalar_temperature;
  const float inverse = 1.0f / temperature;
  // A target that no rank holds leaves its whole row NaN.
  const double scale = 1 / (s * temperature);
  const float a = d_y == d_y ? static_cast<float>((double{g_h} * mean_d - g_lp) * scale) : kNan;
  const float b = static_cast<float>(-g_h * scale);
  const int64_t y = p.targets[r] - p.start;
  const float inverse_softcap = CAP ? 1.0f / p.softcap : 0.0f;

  alignas(64) T block[kChunk<LANES>];
  for (int64_t first = 0; first < p.used; first += kChunk<LANES>) {
    const int columns = static_cast<int>(std::min<int64_t>(kChunk<LANES>, p.used - first));
    for (int i = 0; i < columns; i += LANES * kUnroll<LANES>) {
      Floats x[kUnroll<LANES>];
      load_columns<LANES, CAP>(row + first, i, columns, p.softcap, x);
      for (int k = 0; k < kUnroll<LANES>; ++k) {
        Floats d, e;
        exponential<LANES, SCALED>(x[k], m, inverse, d, e);
        Floats gradient = e * a;
        if constexpr (ENTROPY) gradient = e * (d * b + a);
        if constexpr (CAP) {
          const Floats tanh_x = x[k] * inverse_softcap;
          gradient = x[k] == -kInf ? e * a : gradient * (1.0f - tanh_x * tanh_x);
        }
        store<LANES>(block + i + k * LANES, gradient);
      }
    }
    if (y >= first && y < first + columns) {
      // The target's element is computed apart and rounded once; a - p would cancel where p is near 1.
      double at_y = g_lp * -std::expm1(d_y - std::log1p(double{excess}));
      if constexpr (ENTROPY) {
        const double d = d_y < -1000.0f ? -1000.0 : d_y;
        at_y -= g_h * std::exp(d) / s * (d - mean_d);
      }
      at_y /= temperature;
      if constexpr (CAP) {
        const double z = to_float(row[y]);
        const double tanh_y = std::tanh(z / p.softcap);
        if (z != -kInf) at_y *= 1 - tanh_y * tanh_y;  // -inf stays -inf: no cap, no slope of one
      }
      T rounded[LANES];
      store<LANES>(rounded, Floats{} + static_cast<float>(at_y));
      block[y - first] = rounded[0];
    }
    copy(out + first, block, columns * sizeof(T), streamed);
  }
}

template <int LANES, bool CAP, bool SCALED, bool ENTROPY, typename T>
FASTPPO_INLINE void dlogits_of_rows(const LogprobParams& p, const LogprobGrads& g, int64_t first, int64_t last,
                                    bool streamed) {
  for (int64_t r = first; r < last; ++r) {
    const float g_lp = g.grad_logprobs != nullptr ? g.grad_logprobs[r * g.grad_logprobs_stride] : 0.0f;
    const float g_h = g.grad_entropy != nullptr ? g.grad_entropy[r * g.grad_entropy_stride] : 0.0f;
    T* out = row_address<T>(g.dlogits, r);
    if (p.targets[r] == p.ignore_index || (g_lp == 0 && g_h == 0)) {
      std::memset(out, 0, p.width * sizeof(T));
    } else {
      row_dlogits<LANES, CAP, SCALED, ENTROPY, T>(p, g, r, g_lp, g_h, streamed);
      std::memset(out + p.used, 0, (p.width - p.used) * sizeof(T));
    }
  }
  if (streamed) finish_streaming();
}

// The two loops compiled for one instruction set.
#define FASTPPO_LOGPROB_LOOPS(NAME, TARGET, LANES)                                                       \
  template <bool CAP, bool SCALED, bool ENTROPY, typename T>                                             \
  TARGET void stats_##NAME(const LogprobParams& p, int64_t first, int64_t last, float* stats) {          \
    stats_of_rows<LANES, CAP, SCALED, ENTROPY, T>(p, first, last, stats);                                \
  }                                                                                                      \
  template <bool CAP, bool SCALED, bool ENTROPY, typename T>                                             \
  TARGET void dlogits_##NAME(const LogprobParams& p, const LogprobGrads& g, int64_t first, int64_t last, \
                             bool streamed) {                                                            \
    dlogits_of_rows<LANES, CAP, SCALED, ENTROPY, T>(p, g, first, last, streamed);                        \
  }

FASTPPO_LOGPROB_LOOPS(baseline, , 4)
#ifdef FASTPPO_X86
FASTPPO_LOGPROB_LOOPS(avx2, FASTPPO_TARGET_AVX2, 8)
FASTPPO_LOGPROB_LOOPS(avx512, FASTPPO_TARGET_AVX512, 16)
#endif

struct Loops {
  void (*stats)(const LogprobParams&, int64_t, int64_t, float*);
  void (*dlogits)(const LogprobParams&, const LogprobGrads&, int64_t, int64_t, bool);
};

template <bool CAP, bool SCALED, bool ENTROPY, typename T>
Loops loops_of_isa() {
#ifdef FASTPPO_X86
  if (cpu_isa() == CpuIsa::kAvx512) {
    return {stats_avx512<CAP, SCALED, ENTROPY, T>, dlogits_avx512<CAP, SCALED, ENTROPY, T>};
  }
  if (cpu_isa() == CpuIsa::kAvx2) return {stats_avx2<CAP, SCALED, ENTROPY, T>, dlogits_avx2<CAP, SCALED, ENTROPY, T>};
#endif
  return {stats_baseline<CAP, SCALED, ENTROPY, T>, dlogits_baseline<CAP, SCALED, ENTROPY, T>};
}

// A softcap's loop always divides by the temperature: its cost does not show beside that of tanh.
template <typename T>
Loops loops_of_options(const LogprobParams& p) {
  const bool scaled = p.temperature != nullptr || p.scalar_temperature != 1.0f;
  if (p.softcap != 0)
    return p.with_entropy ? loops_of_isa<true, true, true, T>() : loops_of_isa<true, true, false, T>();
  if (scaled) return p.with_entropy ? loops_of_isa<false, true, true, T>() : loops_of_isa<false, true, false, T>();
  return p.with_entropy ? loops_of_isa<false, false, true, T>() : loops_of_isa<false, false, false, T>();
}

Loops loops(const LogprobParams& p) {
  switch (p.dtype) {
    case Dtype::kFloat16:
      return loops_of_options<Half>(p);
    case Dtype::kBFloat16:
      return loops_of_options<BFloat16>(p);
    default:
      return loops_of_options<float>(p);
  }
}

int64_t element_size(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : 2;
}

template <typename Body>
void for_rows(const LogprobParams& p, int num_threads, Body body) {
  const int64_t rows_per_block = std::max<int64_t>(1, kElementsPerBlock / std::max<int64_t>(1, p.width));
  const int64_t blocks = (p.num_rows + rows_per_block - 1) / rows_per_block;
  parallel_for(blocks, num_threads, [&](int64_t block) {
    body(block * rows_per_block, std::min(p.num_rows, (block + 1) * rows_per_block));
  });
}

}  // namespace

void logprob_stats_cpu(const LogprobParams& params, float* stats, int num_threads) {
  const Loops loop = loops(params);
  for_rows(params, num_threads, [&](int64_t first, int64_t last) { loop.stats(params, first, last, stats); });
}

void logprob_dlogits_cpu(const LogprobParams& params, const LogprobGrads& grads, int num_threads) {
  const Loops loop = loops(params);
  const bool in_place = grads.dlogits.data == params.logits.data;
  const int64_t bytes = params.num_rows * params.width * element_size(params.dtype);
  const bool large = !in_place && bytes > kStreamedBytes;
  if (large) advise_huge_pages(grads.dlogits.data, bytes);
  for_rows(params, num_threads, [&](int64_t first, int64_t last) { loop.dlogits(params, grads, first, last, large); });
}

void logprob_combine_cpu(const LogprobCombine& p) {
  for (int64_t r = 0; r < p.num_rows; ++r) {
    float* row = p.row + 4 * r;
    if (p.targets[r] == p.ignore_index) {
      std::memset(row, 0, 4 * sizeof(float));
      p.logprobs[r] = 0;
      if (p.entropy != nullptr) p.entropy[r] = 0;
      continue;
    }
    const float temperature = p.temperature != nullptr ? p.temperature[r] : p.scalar_temperature;
    float m = -kInf;
    for (int64_t rank = 0; rank < p.num_ranks; ++rank) m = std::max(m, p.gathered[(rank * p.num_rows + r) * 4]);
    if (m == -kInf) m = 0;
    double s = 0, t = 0;
    float zy = kNan;
    for (int64_t rank = 0; rank < p.num_ranks; ++rank) {
      const float* stats = p.gathered + (rank * p.num_rows + r) * 4;
      const double s_rank = 1.0 + stats[1];
      double d = (double{stats[0]} - m) / temperature;
      d = d < -1000.0 ? -1000.0 : d;  // of a rank without a finite column, too: its scale is 0
      const double scale = std::exp(d);
      s += scale * s_rank;
      t += scale * (stats[2] + d * s_rank);
      if (stats[3] != kNotHere) zy = stats[3];
    }
    const double log_s = std::log1p(s - 1);
    const double mean_d = t / s;
    row[0] = m;
    row[1] = static_cast<float>(s - 1);
    row[2] = static_cast<float>(mean_d);
    row[3] = (zy - m) / temperature;
    p.logprobs[r] = static_cast<float>(row[3] - log_s);
    if (p.entropy != nullptr) p.entropy[r] = static_cast<float>(log_s - mean_d);
  }
}

}  // namespace fastppo
