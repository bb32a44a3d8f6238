// What the losses over tokens share: inputs of any strides and dtypes read as blocks of float32, sequences, sums in
// float64 whose order depends on the tokens alone, and the division by global counts.
//
// Legend: tokens are numbered row by row, [B, T] as [B * T]; a sequence is a run of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "common/dtype.h"
#include "common/macros.h"
#include "common/simd.h"
#include "common/thread_pool.h"

namespace fastppo {

constexpr int kBlockTokens = 256;       // a dozen float columns of a block stay in the first-level cache
constexpr int kSumLanes = 16;           // partial sums side by side, whatever the width of the vectors
constexpr int64_t kTaskTokens = 16384;  // what one thread takes at a time, and one partial sum; whole blocks
static_assert(kTaskTokens % kBlockTokens == 0 && kBlockTokens % kSumLanes == 0);

// Strides count elements; row_stride is not read where there is one row.
struct TokenTensor {
  const void* data;  // null where the argument was not given
  int64_t row_stride;
  int64_t col_stride;
  Dtype dtype;  // of floats; flags are bytes, true where not 0
};

struct TokenShape {
  int64_t rows;
  int64_t cols;

  int64_t tokens() const { return rows * cols; }
  bool flat(const TokenTensor& x) const { return rows == 1 || x.row_stride == cols * x.col_stride; }
};

struct TokenSequences {
  const void* cu_seqlens;  // [number + 1], contiguous, int32 or int64; null: the rows
  bool cu_seqlens_int64;
  int64_t number;  // 0 where sequences are unknown
  int64_t cols;

  int64_t start(int64_t b) const {
    if (cu_seqlens == nullptr) return b * cols;
    return cu_seqlens_int64 ? static_cast<const int64_t*>(cu_seqlens)[b] : static_cast<const int32_t*>(cu_seqlens)[b];
  }

  // The sequence that holds a token.
  int64_t holder(int64_t token) const {
    if (cu_seqlens == nullptr) return token / cols;
    int64_t low = 0, high = number;  // start(low) <= token < start(high)
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (start(middle) <= token ? low : high) = middle;
    }
    return low;
  }
};

// values[sequence of token] for `count` tokens from `first` on.
inline void spread(const TokenSequences& sequences, const float* values, int64_t first, int count, float* out) {
  int64_t b = sequences.holder(first);
  for (int i = 0; i < count; ++b) {
    const int end = static_cast<int>(std::min<int64_t>(count, sequences.start(b + 1) - first));
    for (; i < end; ++i) out[i] = values[b];
  }
}

// A whole number of vectors of every width.
FASTPPO_INLINE int padded(int count) {
  return (count + kSumLanes - 1) / kSumLanes * kSumLanes;
}

template <int LANES, typename T>
FASTPPO_INLINE void copy_run(const T* source, int64_t stride, int count, float* target) {
  int i = 0;
  if (stride == 1) {
    for (; i + LANES <= count; i += LANES) store<LANES>(target + i, load<LANES>(source + i));
  }
  for (; i < count; ++i) target[i] = to_float(source[i * stride]);
}

template <int LANES>
FASTPPO_INLINE void copy_run(const TokenTensor& x, int64_t offset, int count, float* target) {
  switch (x.dtype) {
    case Dtype::kFloat32:
      return copy_run<LANES>(static_cast<const float*>(x.data) + offset, x.col_stride, count, target);
    case Dtype::kFloat16:
      return copy_run<LANES>(static_cast<const Half*>(x.data) + offset, x.col_stride, count, target);
    case Dtype::kBFloat16:
      return copy_run<LANES>(static_cast<const BFloat16*>(x.data) + offset, x.col_stride, count, target);
  }
}

FASTPPO_INLINE void copy_run(const TokenTensor& x, int64_t offset, int count, uint8_t* target) {
  const uint8_t* source = static_cast<const uint8_t*>(x.data) + offset;
  if (x.col_stride == 1) {
    std::memcpy(target, source, static_cast<size_t>(count));
  } else {
    for (int i = 0; i < count; ++i) target[i] = source[i * x.col_stride];
  }
}

// `count` tokens from `first` on, copied to `target`, zeros up to padded(count).
template <int LANES, typename Element>
FASTPPO_INLINE void copy_block(const TokenTensor& x, const TokenShape& shape, int64_t first, int count,
                               Element* target) {
  const bool flat = shape.flat(x);
  for (int done = 0; done < count;) {
    const int64_t token = first + done;
    const int64_t row = flat ? 0 : token / shape.cols;
    const int64_t col = flat ? token : token % shape.cols;
    const int run = flat ? count : static_cast<int>(std::min<int64_t>(count - done, shape.cols - col));
    const int64_t offset = row * x.row_stride + col * x.col_stride;
    if constexpr (sizeof(Element) == 1) {
      copy_run(x, offset, run, target + done);
    } else {
      copy_run<LANES>(x, offset, run, target + done);
    }
    done += run;
  }
  for (int i = count; i < padded(count); ++i) target[i] = 0;
}

// One copy of the above per instruction set, called by the kernels in place of an inlined one per argument.
template <int LANES>
void copy_floats(const TokenTensor& x, const TokenShape& shape, int64_t first, int count, float* target);

template <>
inline void copy_floats<4>(const TokenTensor& x, const TokenShape& shape, int64_t first, int count, float* target) {
  copy_block<4>(x, shape, first, count, target);
}

#ifdef FASTPPO_X86
template <>
inline FASTPPO_TARGET_AVX2 void copy_floats<8>(const TokenTensor& x, const TokenShape& shape, int64_t first, int count,
                                               float* target) {
  copy_block<8>(x, shape, first, count, target);
}
#endif

// The block where it lies if it can be read there, else copied to `tile`.
template <int LANES>
FASTPPO_INLINE const float* read_floats(const TokenTensor& x, const TokenShape& shape, int64_t first, int count,
                                        float* tile) {
  if (x.data == nullptr) return nullptr;
  if (x.dtype == Dtype::kFloat32 && x.col_stride == 1 && count == kBlockTokens && shape.flat(x)) {
    return static_cast<const float*>(x.data) + first;
  }
  copy_floats<LANES>(x, shape, first, count, tile);
  return tile;
}

// The same for flags; those of an argument that was not given are true.
inline const uint8_t* read_flags(const TokenTensor& x, const TokenShape& shape, int64_t first, int count,
                                 uint8_t* tile) {
  if (x.data == nullptr) {
    std::memset(tile, 1, static_cast<size_t>(count));
    std::memset(tile + count, 0, static_cast<size_t>(padded(count) - count));
    return tile;
  }
  if (x.col_stride == 1 && count == kBlockTokens && shape.flat(x)) {
    return static_cast<const uint8_t*>(x.data) + first;
  }
  copy_block<4>(x, shape, first, count, tile);
  return tile;
}

template <int LANES>
FASTPPO_INLINE typename Simd<LANES>::Flags load_flags(const uint8_t* bytes) {
  typename Simd<LANES>::Bytes loaded;
  std::memcpy(&loaded, bytes, sizeof(loaded));
  return __builtin_convertvector(loaded, typename Simd<LANES>::Flags) != 0;
}

typedef double Doubles4 __attribute__((vector_size(32)));

// Adds a column of float32, or its squares, to sums in float64, one per lane.
template <bool SQUARES>
FASTPPO_INLINE void add_doubles(const float* column, int count, double (&lanes)[kSumLanes]) {
  Doubles4 sums[kSumLanes / 4];
  std::memcpy(sums, lanes, sizeof(sums));
  // Unrolled sixteen times over, a dozen of these loops would not fit the instruction cache.
#pragma GCC unroll 1
  for (int i = 0; i < count; i += kSumLanes) {
    for (int k = 0; k < kSumLanes / 4; ++k) {
      const float* four = column + i + 4 * k;
      // GCC makes one conversion of this, and two and a shuffle of __builtin_convertvector.
      const Doubles4 x = {static_cast<double>(four[0]), static_cast<double>(four[1]), static_cast<double>(four[2]),
                          static_cast<double>(four[3])};
      sums[k] += SQUARES ? x * x : x;
    }
  }
  std::memcpy(lanes, sums, sizeof(sums));
}

FASTPPO_INLINE void add_column(const float* column, int count, double (&lanes)[kSumLanes]) {
  add_doubles<false>(column, count, lanes);
}

FASTPPO_INLINE void add_squares(const float* column, int count, double (&lanes)[kSumLanes]) {
  add_doubles<true>(column, count, lanes);
}

FASTPPO_INLINE double total(const double* lanes) {
  double sum = 0;
  for (int lane = 0; lane < kSumLanes; ++lane) sum += lanes[lane];
  return sum;
}

template <int LANES>
FASTPPO_INLINE int64_t count_true(const typename Simd<LANES>::Flags& minus_counts) {
  int64_t sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum -= minus_counts[lane];
  return sum;
}

// Calls body(first, last) for ranges of sequences of about kTaskTokens tokens together.
inline void parallel_for_sequences(const TokenSequences& sequences, int64_t tokens, int num_threads,
                                   const std::function<void(int64_t, int64_t)>& body) {
  const int64_t tasks = std::clamp<int64_t>(tokens / kTaskTokens, 1, sequences.number);
  parallel_for(tasks, num_threads,
               [&](int64_t task) { body(task * sequences.number / tasks, (task + 1) * sequences.number / tasks); });
}

// Selected tokens of every sequence; empty where sequences are unknown.
inline std::vector<int64_t> count_selected(const TokenSequences& sequences, const TokenTensor& mask,
                                           const TokenShape& shape, int num_threads) {
  std::vector<int64_t> selected(static_cast<size_t>(sequences.number));
  if (sequences.number == 0) return selected;
  parallel_for_sequences(
      sequences, mask.data == nullptr ? 0 : shape.tokens(), num_threads, [&](int64_t b, int64_t last) {
        uint8_t tile[kBlockTokens];
        for (; b < last; ++b) {
          const int64_t end = sequences.start(b + 1);
          int64_t number = mask.data == nullptr ? end - sequences.start(b) : 0;
          for (int64_t t = mask.data == nullptr ? end : sequences.start(b); t < end; t += kBlockTokens) {
            const int count = static_cast<int>(std::min<int64_t>(kBlockTokens, end - t));
            const uint8_t* flags = read_flags(mask, shape, t, count, tile);
            int here = 0;
            for (int i = 0; i < count; ++i) here += flags[i] != 0;
            number += here;
          }
          selected[static_cast<size_t>(b)] = number;
        }
      });
  return selected;
}

// The order is shared with AGGREGATIONS of fastppo/ops/_loss.py.
enum class Aggregation : int { kTokenMean = 0, kSeqMeanTokenMean = 1, kSeqMeanTokenSum = 2, kTokenSumNorm = 3 };

// Counts below 0 are those of this call.
struct Normaliser {
  Aggregation aggregation;
  double num_tokens;
  double num_seqs;
  double norm;
};

inline double reciprocal(double count) {
  return count > 0 ? 1 / count : 0;
}

inline double scale_of(const Normaliser& n, double tokens, double seqs) {
  if (n.aggregation == Aggregation::kTokenMean) return reciprocal(n.num_tokens < 0 ? tokens : n.num_tokens);
  const double scale = reciprocal(n.num_seqs < 0 ? seqs : n.num_seqs);
  return n.aggregation == Aggregation::kTokenSumNorm ? scale / n.norm : scale;
}

// 1 / selected tokens of every sequence.
inline std::vector<float> sequence_weights(const std::vector<int64_t>& selected) {
  std::vector<float> weights(selected.size());
  for (size_t b = 0; b < selected.size(); ++b) {
    weights[b] = static_cast<float>(1 / static_cast<double>(std::max<int64_t>(selected[b], 1)));
  }
  return weights;
}

}  // namespace fastppo
