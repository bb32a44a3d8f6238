// CPU kernel of gae. The recurrence is a chain of dependent multiply-adds, so one sequence alone waits on latency:
// LANES sequences advance together, one per SIMD lane, each aligned at its own end. kSteps positions of them at a time
// are gathered into a small transposed tile, walked, and scattered. Lanes never mix and no instruction set contracts
// into fused multiply-adds, so an answer depends neither on LANES, nor on the instruction set, nor on the threads.
//
// Legend: b sequence, t position in time, i step of the tile counted from the end, lane one sequence of a group.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/cpu.h"
#include "common/macros.h"
#include "common/simd.h"
#include "common/thread_pool.h"
#include "gae/gae.h"

namespace fastppo {
namespace {

constexpr int kSteps = 64;
constexpr int64_t kMinTokensPerBlock = 16384;  // below this a thread costs more to wake than it saves

struct Span {
  int64_t start;
  int64_t length;
};

FASTPPO_INLINE Span sequence(const GaeParams& p, int64_t b) {
  if (p.cu_seqlens == nullptr) return {0, p.num_steps};
  if (p.cu_seqlens_int64) {
    const int64_t* cu = static_cast<const int64_t*>(p.cu_seqlens);
    return {cu[b], cu[b + 1] - cu[b]};
  }
  const int32_t* cu = static_cast<const int32_t*>(p.cu_seqlens);
  return {cu[b], static_cast<int64_t>(cu[b + 1]) - cu[b]};
}

template <typename T>
FASTPPO_INLINE const T* address(const GaeTensor& x, int64_t b, int64_t t) {
  return static_cast<const T*>(x.data) + b * x.row_stride + t * x.time_stride;
}

template <int LANES>
using Matrix = float[kSteps][LANES];
template <int LANES>
using Bytes = int8_t[kSteps][LANES];

template <int LANES>
struct Tile {
  alignas(64) Matrix<LANES> rewards;
  alignas(64) Matrix<LANES> values;
  alignas(64) Matrix<LANES> next;  // the next value where cut
  alignas(64) Matrix<LANES> advantages;
  alignas(64) Matrix<LANES> returns;
  alignas(64) Bytes<LANES> selected;  // true where not 0
  alignas(64) Bytes<LANES> truncated;
  alignas(64) Bytes<LANES> terminated;
};

// The sequences of one group, and how far each has been walked.
template <int LANES>
struct Group {
  int64_t first;        // the sequence of lane 0
  int lanes;            // lanes in use
  Span spans[LANES];    // length 0 for a lane that is not in use
  int steps[LANES];     // positions of this tile
  int64_t last[LANES];  // t of step 0 of this tile
  bool level;           // every lane is in use, and at the same t

  // Whether step i of all lanes lies side by side in a tensor with these strides.
  bool side_by_side(int64_t row_stride) const { return level && row_stride == 1; }

  // Steps that each of four lanes has.
  int common_steps(int lane) const {
    return std::min(std::min(steps[lane], steps[lane + 1]), std::min(steps[lane + 2], steps[lane + 3]));
  }
};

FASTPPO_INLINE int8_t convert(uint8_t x) {
  return static_cast<int8_t>(x);
}
FASTPPO_INLINE float convert(float x) {
  return x;
}
FASTPPO_INLINE float convert(Half x) {
  return to_float(x);
}
FASTPPO_INLINE float convert(BFloat16 x) {
  return to_float(x);
}

// A lane's steps from i on, one by one.
template <typename T, int LANES, typename Element>
FASTPPO_INLINE void gather_lane(const GaeTensor& x, const Group<LANES>& g, int lane, int i,
                                Element (&tile)[kSteps][LANES]) {
  if (i >= g.steps[lane]) return;
  const T* source = address<T>(x, g.first + lane, g.last[lane]);
  for (; i < g.steps[lane]; ++i) tile[i][lane] = convert(source[-i * x.time_stride]);
}

template <typename T, int LANES, typename Element>
FASTPPO_INLINE void gather(const GaeTensor& x, const Group<LANES>& g, Element (&tile)[kSteps][LANES]) {
  if (g.side_by_side(x.row_stride)) {
    for (int i = 0; i < g.steps[0]; ++i) {
      const T* source = address<T>(x, g.first, g.last[0] - i);
      for (int lane = 0; lane < LANES; ++lane) tile[i][lane] = convert(source[lane]);
    }
    return;
  }
  if constexpr (std::is_same_v<Element, float>) {
    if (x.time_stride == 1) {
      for (int lane = 0; lane < LANES; lane += 4) {
        const T* source[4];
        for (int k = 0; k < 4; ++k) source[k] = address<T>(x, g.first + lane + k, g.last[lane + k]);
        int i = 0;
        for (const int common = g.common_steps(lane); i + 4 <= common; i += 4) {
          Floats4 a = load4(source[0] - i - 3), b = load4(source[1] - i - 3);
          Floats4 c = load4(source[2] - i - 3), d = load4(source[3] - i - 3);
          transpose(a, b, c, d);
          store4(&tile[i][lane], d);
          store4(&tile[i + 1][lane], c);
          store4(&tile[i + 2][lane], b);
          store4(&tile[i + 3][lane], a);
        }
        for (int k = 0; k < 4; ++k) gather_lane<T>(x, g, lane + k, i, tile);
      }
      return;
    }
  }
  for (int lane = 0; lane < g.lanes; ++lane) gather_lane<T>(x, g, lane, 0, tile);
}

template <int LANES>
FASTPPO_INLINE void gather_floats(const GaeTensor& x, const Group<LANES>& g, Matrix<LANES>& tile) {
  switch (x.dtype) {
    case Dtype::kFloat32:
      return gather<float>(x, g, tile);
    case Dtype::kFloat16:
      return gather<Half>(x, g, tile);
    case Dtype::kBFloat16:
      return gather<BFloat16>(x, g, tile);
  }
}

FASTPPO_INLINE float load_float(const GaeTensor& x, int64_t b, int64_t t) {
  switch (x.dtype) {
    case Dtype::kFloat16:
      return to_float(*address<Half>(x, b, t));
    case Dtype::kBFloat16:
      return to_float(*address<BFloat16>(x, b, t));
    default:
      return *address<float>(x, b, t);
  }
}

template <int LANES, bool CUTS>
FASTPPO_INLINE void load_tile(const GaeParams& p, const Group<LANES>& g, int steps, Tile<LANES>& tile) {
  for (int lane = 0; lane < LANES; ++lane) {
    for (int i = 0; i < g.steps[lane] && p.mask.data == nullptr; ++i) tile.selected[i][lane] = 1;
    for (int i = g.steps[lane]; i < steps; ++i) tile.selected[i][lane] = 0;
  }
  if (p.mask.data != nullptr) gather<uint8_t>(p.mask, g, tile.selected);
  gather_floats(p.rewards, g, tile.rewards);
  gather_floats(p.values, g, tile.values);
  if (!CUTS) return;
  if (p.terminated.data != nullptr) gather<uint8_t>(p.terminated, g, tile.terminated);
  if (p.truncated.data != nullptr) {
    gather<uint8_t>(p.truncated, g, tile.truncated);
    gather_floats(p.bootstrap_values, g, tile.next);
  }
}

template <int LANES>
FASTPPO_INLINE void store_tile(const GaeParams& p, const Group<LANES>& g, const Matrix<LANES>& tile, float* out) {
  const int64_t row_stride = p.out_row_stride;
  const int64_t time_stride = p.out_time_stride;
  if (g.side_by_side(row_stride)) {
    for (int i = 0; i < g.steps[0]; ++i) {
      std::memcpy(out + g.first + (g.last[0] - i) * time_stride, tile[i], sizeof(tile[i]));
    }
    return;
  }
  for (int lane = 0; lane < g.lanes; lane += 4) {
    float* target[4];
    for (int k = 0; k < 4; ++k) target[k] = out + (g.first + lane + k) * row_stride + g.last[lane + k] * time_stride;
    int i = 0;
    for (const int common = time_stride == 1 ? g.common_steps(lane) : 0; i + 4 <= common; i += 4) {
      Floats4 a = load4(&tile[i + 3][lane]), b = load4(&tile[i + 2][lane]);
      Floats4 c = load4(&tile[i + 1][lane]), d = load4(&tile[i][lane]);
      transpose(a, b, c, d);
      store4(target[0] - i - 3, a);
      store4(target[1] - i - 3, b);
      store4(target[2] - i - 3, c);
      store4(target[3] - i - 3, d);
    }
    for (int k = 0; k < 4; ++k) {
      for (int j = i; j < g.steps[lane + k]; ++j) target[k][-j * time_stride] = tile[j][lane + k];
    }
  }
}

template <int LANES>
FASTPPO_INLINE typename Simd<LANES>::Flags flags(const int8_t* bytes) {
  typename Simd<LANES>::Bytes loaded;
  std::memcpy(&loaded, bytes, sizeof(loaded));
  return __builtin_convertvector(loaded, typename Simd<LANES>::Flags) != 0;
}

template <int LANES, bool CUTS, bool SEPARATE_RETURNS>
FASTPPO_INLINE void walk_group(const GaeParams& p, int64_t first) {
  using Floats = typename Simd<LANES>::Floats;
  using Flags = typename Simd<LANES>::Flags;
  const Floats zero = {};

  Group<LANES> g;
  g.first = first;
  g.lanes = static_cast<int>(std::min<int64_t>(LANES, p.num_seqs - first));
  Floats acc = zero, acc_returns = zero, next_value = zero, decay = zero, decay_returns = zero;
  int64_t longest = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    g.spans[lane] = lane < g.lanes ? sequence(p, first + lane) : Span{0, 0};
    longest = std::max(longest, g.spans[lane].length);
    if (lane >= g.lanes) continue;
    const int64_t b = first + lane;
    decay[lane] = p.gamma * (p.lam_per_seq != nullptr ? p.lam_per_seq[b] : p.lam);
    decay_returns[lane] = p.gamma * (p.lam_returns_per_seq != nullptr ? p.lam_returns_per_seq[b] : p.lam_returns);
    if (p.final_values.data != nullptr) next_value[lane] = load_float(p.final_values, b, 0);
  }
  const Floats gamma = zero + p.gamma;

  Tile<LANES> tile = {};
  for (int64_t walked = 0; walked < longest; walked += kSteps) {
    const int steps = static_cast<int>(std::min<int64_t>(kSteps, longest - walked));
    for (int lane = 0; lane < LANES; ++lane) {
      const Span span = g.spans[lane];
      g.steps[lane] = static_cast<int>(std::clamp<int64_t>(span.length - walked, 0, steps));
      g.last[lane] = span.start + span.length - 1 - walked;
    }
    g.level = g.lanes == LANES;
    for (int lane = 1; lane < LANES; ++lane) {
      g.level = g.level && g.steps[lane] == g.steps[0] && g.last[lane] == g.last[0];
    }
    load_tile<LANES, CUTS>(p, g, steps, tile);
    for (int i = 0; i < steps; ++i) {
      const Floats reward = *reinterpret_cast<const Floats*>(tile.rewards[i]);
      const Floats value = *reinterpret_cast<const Floats*>(tile.values[i]);
      const Flags selected = flags<LANES>(tile.selected[i]);
      Floats next = next_value, carried = acc, carried_returns = acc_returns;
      if (CUTS) {
        const Flags terminated = flags<LANES>(tile.terminated[i]);
        const Flags truncated = flags<LANES>(tile.truncated[i]);
        next = truncated ? *reinterpret_cast<const Floats*>(tile.next[i]) : next;
        next = terminated ? zero : next;
        carried = truncated | terminated ? zero : carried;
        carried_returns = truncated | terminated ? zero : carried_returns;
      }
      const Floats delta = reward + gamma * next - value;
      const Floats advantage = delta + decay * carried;
      Floats return_advantage = advantage;
      if (SEPARATE_RETURNS) {
        return_advantage = delta + decay_returns * carried_returns;
        acc_returns = selected ? return_advantage : acc_returns;
      }
      acc = selected ? advantage : acc;
      next_value = selected ? value : next_value;
      *reinterpret_cast<Floats*>(tile.advantages[i]) = selected ? advantage : zero;
      *reinterpret_cast<Floats*>(tile.returns[i]) = selected ? return_advantage + value : zero;
    }
    store_tile(p, g, tile.advantages, p.advantages);
    store_tile(p, g, tile.returns, p.returns);
  }
}

template <int LANES>
FASTPPO_INLINE void walk(const GaeParams& p, int64_t first) {
  const bool cuts = p.terminated.data != nullptr || p.truncated.data != nullptr;
  if (cuts) {
    p.separate_returns ? walk_group<LANES, true, true>(p, first) : walk_group<LANES, true, false>(p, first);
  } else {
    p.separate_returns ? walk_group<LANES, false, true>(p, first) : walk_group<LANES, false, false>(p, first);
  }
}

template <int LANES>
void walk_baseline(const GaeParams& p, int64_t first) {
  walk<LANES>(p, first);
}

#ifdef FASTPPO_X86
template <int LANES>
FASTPPO_TARGET_AVX2 void walk_avx2(const GaeParams& p, int64_t first) {
  walk<LANES>(p, first);
}

template <int LANES>
FASTPPO_TARGET_AVX512 void walk_avx512(const GaeParams& p, int64_t first) {
  walk<LANES>(p, first);
}
#endif

template <int LANES>
void walk_all(const GaeParams& p, int num_threads) {
  void (*walk_one)(const GaeParams&, int64_t) = walk_baseline<LANES>;
#ifdef FASTPPO_X86
  if (cpu_isa() == CpuIsa::kAvx2) walk_one = walk_avx2<LANES>;
  if (cpu_isa() == CpuIsa::kAvx512) walk_one = walk_avx512<LANES>;
#endif
  const int64_t groups = (p.num_seqs + LANES - 1) / LANES;
  const int64_t tokens = p.cu_seqlens != nullptr ? p.num_steps : p.num_seqs * p.num_steps;
  const int64_t blocks = std::clamp<int64_t>(tokens / kMinTokensPerBlock, 1, groups);
  parallel_for(blocks, num_threads, [&](int64_t block) {
    for (int64_t group = block * groups / blocks; group < (block + 1) * groups / blocks; ++group) {
      walk_one(p, group * LANES);
    }
  });
}

}  // namespace

void gae_cpu(const GaeParams& params, int num_threads) {
  if (params.num_seqs == 0 || params.num_steps == 0) return;
  if (params.num_seqs >= 16 * static_cast<int64_t>(num_threads)) {
    walk_all<16>(params, num_threads);
  } else {
    walk_all<4>(params, num_threads);
  }
}

}  // namespace fastppo
