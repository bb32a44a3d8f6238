// Masked moments and whitening on a CPU, in float64. A block of elements, small enough for the first-level cache, is
// read twice, for its mean and for its squares about that mean; blocks are merged in order (Chan, Golub and LeVeque
// 1979). The lanes that sums are kept in and the blocks are fixed, so results depend on neither threads nor instruction
// set.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/cpu.h"
#include "common/macros.h"
#include "common/thread_pool.h"
#include "gae/whiten.h"

namespace fastppo {
namespace {

constexpr int kLanes = 8;
constexpr int64_t kBlock = 4096;
constexpr int64_t kBlocksPerTask = 4;

typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef int64_t Flags __attribute__((vector_size(8 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

// Elements i to i + kLanes of a block, those past `size` unselected.
struct Vector {
  Doubles x;
  Flags selected;
};

// Each conversion doubles the width: for more at once GCC takes vectors apart.
template <bool MASKED>
FASTPPO_INLINE Vector load(const float* x, const int8_t* mask) {
  Floats floats;
  std::memcpy(&floats, x, sizeof(floats));
  Vector v{__builtin_convertvector(floats, Doubles), Flags{} == 0};
  if (MASKED) {
    Bytes bytes;
    std::memcpy(&bytes, mask, sizeof(bytes));
    const Shorts shorts = __builtin_convertvector(bytes != 0, Shorts);
    v.selected = __builtin_convertvector(__builtin_convertvector(shorts, Ints), Flags);
  }
  return v;
}

// Bits, not a product: an unselected element may be NaN.
FASTPPO_INLINE Doubles only(const Flags& selected, const Doubles& x) {
  return (Doubles)((Flags)x & selected);
}

// Calls body(Vector, offset) for each vector of a block, the last one filled up with unselected elements.
template <bool MASKED, typename Body>
FASTPPO_INLINE void for_vectors(const float* x, const int8_t* mask, int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(load<MASKED>(x + i, mask + i), i);
  if (i == n) return;
  float rest[kLanes] = {};
  int8_t chosen[kLanes] = {};
  for (int64_t j = i; j < n; ++j) {
    rest[j - i] = x[j];
    chosen[j - i] = MASKED ? mask[j] : 1;
  }
  body(load<true>(rest, chosen), i);
}

FASTPPO_INLINE double sum_of(const Doubles& x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

template <bool MASKED>
FASTPPO_INLINE Moments moments_of_block(const float* x, const int8_t* mask, int64_t n) {
  Doubles sum = {}, squares = {};
  Flags count = {};
  for_vectors<MASKED>(x, mask, n, [&](const Vector& v, int64_t) __attribute__((always_inline)) {
    sum += only(v.selected, v.x);
    count -= v.selected;
  });
  double selected = 0;
  for (int lane = 0; lane < kLanes; ++lane) selected += static_cast<double>(count[lane]);
  if (selected == 0) return Moments{0, 0, 0};
  const double mean = sum_of(sum) / selected;
  for_vectors<MASKED>(x, mask, n, [&](const Vector& v, int64_t) __attribute__((always_inline)) {
    const Doubles centred = only(v.selected, v.x - mean);
    squares += centred * centred;
  });
  return Moments{selected, mean, sum_of(squares)};
}

template <bool MASKED>
FASTPPO_INLINE void whiten_block(const float* x, const int8_t* mask, int64_t n, double mean, double scale, float* out) {
  for_vectors<MASKED>(x, mask, n, [&](const Vector& v, int64_t i) __attribute__((always_inline)) {
    const Floats y = __builtin_convertvector(only(v.selected, (v.x - mean) * scale), Floats);
    std::memcpy(out + i, &y, std::min<int64_t>(kLanes, n - i) * sizeof(float));
  });
}

struct Block {
  const float* x;
  const int8_t* mask;  // null where there is none
  int64_t n;
};

Block block_of(const WhitenParams& p, int64_t index) {
  const int64_t begin = index * kBlock;
  return {p.x + begin, p.mask != nullptr ? p.mask + begin : nullptr, std::min(kBlock, p.size - begin)};
}

FASTPPO_INLINE Moments moments_any(const Block& b) {
  return b.mask != nullptr ? moments_of_block<true>(b.x, b.mask, b.n) : moments_of_block<false>(b.x, b.mask, b.n);
}

FASTPPO_INLINE void whiten_any(const Block& b, double mean, double scale, float* out) {
  b.mask != nullptr ? whiten_block<true>(b.x, b.mask, b.n, mean, scale, out)
                    : whiten_block<false>(b.x, b.mask, b.n, mean, scale, out);
}

Moments moments_baseline(const Block& b) {
  return moments_any(b);
}
void whiten_baseline(const Block& b, double mean, double scale, float* out) {
  whiten_any(b, mean, scale, out);
}

#ifdef FASTPPO_X86
FASTPPO_TARGET_AVX2 Moments moments_avx2(const Block& b) {
  return moments_any(b);
}
FASTPPO_TARGET_AVX2 void whiten_avx2(const Block& b, double mean, double scale, float* out) {
  whiten_any(b, mean, scale, out);
}
FASTPPO_TARGET_AVX512 Moments moments_avx512(const Block& b) {
  return moments_any(b);
}
FASTPPO_TARGET_AVX512 void whiten_avx512(const Block& b, double mean, double scale, float* out) {
  whiten_any(b, mean, scale, out);
}
#endif

int64_t blocks_of(const WhitenParams& p) {
  return (p.size + kBlock - 1) / kBlock;
}

template <typename Body>
void for_blocks(const WhitenParams& p, int num_threads, const Body& body) {
  const int64_t blocks = blocks_of(p);
  parallel_for((blocks + kBlocksPerTask - 1) / kBlocksPerTask, num_threads, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kBlocksPerTask, blocks);
    for (int64_t i = task * kBlocksPerTask; i < end; ++i) body(i);
  });
}

}  // namespace

void moments_cpu(const WhitenParams& params, int num_threads) {
  auto of = moments_baseline;
#ifdef FASTPPO_X86
  if (cpu_isa() == CpuIsa::kAvx2) of = moments_avx2;
  if (cpu_isa() == CpuIsa::kAvx512) of = moments_avx512;
#endif
  std::vector<Moments> parts(static_cast<size_t>(blocks_of(params)));
  for_blocks(params, num_threads, [&](int64_t i) { parts[static_cast<size_t>(i)] = of(block_of(params, i)); });
  Moments all = {0, 0, 0};
  for (const Moments& part : parts) {
    if (part.count == 0) continue;
    const double count = all.count + part.count;
    const double apart = part.mean - all.mean;
    all.mean += apart * (part.count / count);
    all.squares += part.squares + apart * apart * (all.count * part.count / count);
    all.count = count;
  }
  *params.moments = all;
}

void whiten_cpu(const WhitenParams& params, int num_threads) {
  auto whiten_one = whiten_baseline;
#ifdef FASTPPO_X86
  if (cpu_isa() == CpuIsa::kAvx2) whiten_one = whiten_avx2;
  if (cpu_isa() == CpuIsa::kAvx512) whiten_one = whiten_avx512;
#endif
  const double count = std::max(params.moments->count, 1.0);
  const double mean = params.moments->mean;
  const double scale = 1.0 / std::sqrt(params.moments->squares / count + params.eps);
  for_blocks(params, num_threads,
             [&](int64_t i) { whiten_one(block_of(params, i), mean, scale, params.out + i * kBlock); });
}

}  // namespace fastppo
