// CUDA kernels of gae. A selected position hands on to the selected one before it a single number,
//     c = gamma * value + decay * advantage,    decay = gamma * lam,
// and that one's advantage is (reward - value) + c. So a position is an affine map of c, an unselected one is the
// identity, and maps compose associatively: lanes, warps and blocks each compose theirs, and the compositions are
// composed in turn. A position that is terminated or truncated, or the last one of a packed sequence, closes the chain:
// its map forgets c by a select and not by a product with 0, so that no NaN passes.
//
// by_time takes inputs whose time is (or may be) contiguous: a lane owns four positions side by side, 16 bytes, a warp
// kSegments segments of 128, a block one chunk of one row or several short rows. by_rows takes time-major ones: a lane
// owns kSteps positions of a row of its own, 32 rows lie side by side.
//
// Where a row takes more than one block, a block publishes the map of its chunk and looks back, in time forward, at
// those of the following 31 chunks and at what the one after them handed on. Chunks are given out in this order by a
// counter, so a block waits for none that has not begun. What is composed, and in which order, depends on positions
// alone: the same bits every time.
//
// Legend: b sequence, t position, n chain (0: advantages; 1: those that returns are made of, where lam_returns is
// given).
#include <algorithm>

#include "common/cuda_utils.h"
#include "gae/gae.h"
#include "gae/maps.cuh"
#include "gae/positions.cuh"
#include "gae/whiten.h"

namespace fastppo {
namespace {

constexpr int kSegment = kWarp * kQuad;
constexpr int kSegments = 2;
constexpr int kWarps = 8;    // by_time
constexpr int kWindow = 32;  // chunks that a block looks back at: one per lane
constexpr int kSteps = 8;
constexpr int kRowWarps = 16;  // by_rows; and the chunks that a block looks back at: one per warp

// What blocks leave for each other, and for the moments of all.
struct Scratch {
  unsigned* ticket;               // null where every row is one chunk
  unsigned long long* maps;       // of chunks
  unsigned long long* handed_on;  // c of chunks, where a row has more of them than a window
  Moments* partial;               // of blocks; null where they are not asked for
};

// --- Whitening: count, mean and squares of a block's advantages ---

// The sum of a block's values, for every thread, in an order that depends on nothing but the threads' number.
__device__ __forceinline__ double block_sum(double x, double* shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int width = kWarp / 2; width > 0; width /= 2) x += __shfl_xor_sync(kAll, x, width);
  __syncthreads();  // the sum before this one has been read
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  double sum = 0.0;
  for (int i = 0; i < static_cast<int>(blockDim.x) / kWarp; ++i) sum += shared[i];
  return sum;
}

// Of those of x whose bit is set. In float64 and about the block's own mean: sums of squares would cancel.
template <int COUNT>
__device__ __forceinline__ void write_moments(const float (&x)[COUNT], unsigned selected, Moments* out) {
  __shared__ double shared[kWarp];
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) sum += selected >> i & 1 ? static_cast<double>(x[i]) : 0.0;
  const double count = block_sum(__popc(selected), shared);
  const double mean = count > 0.0 ? block_sum(sum, shared) / count : 0.0;
  double squares = 0.0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const double apart = static_cast<double>(x[i]) - mean;
    squares += selected >> i & 1 ? apart * apart : 0.0;
  }
  squares = block_sum(squares, shared);
  if (threadIdx.x == 0) *out = Moments{count, mean, squares};
}

// --- Time side by side ---

// How rows are cut up for by_time.
struct TimePlan {
  int row_warps;   // warps of a block that share a row
  int64_t chunks;  // of a row; where there are several, a block has one of them
  int64_t blocks;
  __host__ __device__ int64_t chunk_size() const { return int64_t{row_warps} * kSegments * kSegment; }
};

// Blocks that a multiprocessor should hold, so that some load while others compose: it limits the registers.
constexpr int min_blocks(int chains, bool closes) {
  return chains == 2 ? 3 : closes ? 4 : 5;
}

template <int N, bool PACKED, bool ALIGNED, bool CLOSES>
__global__ void __launch_bounds__(kWarps* kWarp, min_blocks(N, CLOSES))
    by_time(const GaeParams p, const Scratch s, const TimePlan plan) {
  __shared__ Map<N> maps[kWarps];
  __shared__ float carry[N];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int first_warp = warp / plan.row_warps * plan.row_warps;  // of those that share the row
  const bool split = plan.chunks > 1;
  // Tickets go from the last chunk of the last row to the first one of the first.
  const int64_t tile = split ? plan.blocks - 1 - take_ticket(s.ticket) : blockIdx.x;
  const int64_t chunk = split ? tile % plan.chunks : 0;
  const int64_t b = PACKED ? 0 : split ? tile / plan.chunks : tile * (kWarps / plan.row_warps) + warp / plan.row_warps;
  // Quads are aligned in memory, so the first one may begin before the row.
  const int head = ALIGNED && !PACKED ? static_cast<int>(b * p.rewards.row_stride & (kQuad - 1)) : 0;
  const int64_t begin = chunk * plan.chunk_size() + (warp - first_warp) * (kSegments * kSegment) - head;

  // --- Load
  RawFloats raw_rewards[kSegments], raw_values[kSegments];
  unsigned raw_mask[kSegments], raw_over[kSegments], raw_cut_off[kSegments];
#pragma unroll
  for (int k = 0; k < kSegments; ++k) {
    const int64_t t = begin + k * kSegment + lane * kQuad;
    unsigned inside = 0xf;
    if (t < 0 || t + kQuad > p.num_steps || (!PACKED && b >= p.num_seqs)) {
      inside = 0;
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        inside |= static_cast<unsigned>((PACKED || b < p.num_seqs) && t + j >= 0 && t + j < p.num_steps) << j;
      }
    }
    raw_rewards[k] = load_floats<ALIGNED>(p.rewards, b, t, inside);
    raw_values[k] = load_floats<ALIGNED>(p.values, b, t, inside);
    // As bytes, 1 where the position is inside.
    raw_mask[k] =
        p.mask.data != nullptr ? load_flags<ALIGNED>(p.mask, b, t, inside) : inside * 0x00204081u & 0x01010101u;
    raw_over[k] = CLOSES && p.terminated.data != nullptr ? load_flags<ALIGNED>(p.terminated, b, t, inside) : 0u;
    raw_cut_off[k] = CLOSES && p.truncated.data != nullptr ? load_flags<ALIGNED>(p.truncated, b, t, inside) : 0u;
  }

  float x[kSegments * kQuad], v[kSegments * kQuad];
  unsigned selected = 0, cut = 0, ends = 0;  // a bit per position
  int64_t sequence[kSegments];               // packed: of the last position of the quad
  unsigned truncated[kSegments];
#pragma unroll
  for (int k = 0; k < kSegments; ++k) {
    float r4[kQuad], v4[kQuad];
    convert(raw_rewards[k], p.rewards.dtype, r4);
    convert(raw_values[k], p.values.dtype, v4);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) x[k * kQuad + j] = r4[j] - v4[j], v[k * kQuad + j] = v4[j];
    const unsigned chosen = to_bits(raw_mask[k]), over = to_bits(raw_over[k]), cut_off = to_bits(raw_cut_off[k]);
    truncated[k] = cut_off & chosen & ~over;
    selected |= chosen << k * kQuad;
    cut |= (over | cut_off) << k * kQuad;
  }
  if (PACKED) {
    const int64_t last_step = p.num_steps - 1;
    const int64_t low = find_sequence(p, begin, lane);
    const int64_t high = find_sequence(p, min(begin + kSegments * kSegment - 1, last_step), lane);
#pragma unroll
    for (int k = 0; k < kSegments; ++k) {
      const int64_t t = begin + k * kSegment + lane * kQuad;
      int64_t at = find_sequence_between(p, min(t + kQuad - 1, last_step), low, high);
      sequence[k] = at;
#pragma unroll
      for (int j = kQuad - 1; j >= 0; --j) {
        at = back_to(p, at, t + j);
        if (t + j < p.num_steps && offset(p, at + 1) == t + j + 1) ends |= 1u << (k * kQuad + j);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kSegments; ++k) {
    const int64_t t = begin + k * kSegment + lane * kQuad;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      if (truncated[k] >> j & 1) {
        const int64_t of = PACKED ? back_to(p, sequence[k], t + j) : b;
        x[k * kQuad + j] = fmaf(p.gamma, load_float(p.bootstrap_values, of, t + j), x[k * kQuad + j]);
      }
    }
  }

  // --- Compose: a lane's four positions, then the lanes after it, of each segment
  const bool uniform =
      !PACKED || (p.lam_per_seq == nullptr && p.lam_returns_per_seq == nullptr && p.final_values.data == nullptr);
  const Sequence<N> row = load_sequence<N>(p, b < p.num_seqs ? b : 0);
  Map<N> after_lane[kSegments], whole[kSegments];
#pragma unroll
  for (int k = 0; k < kSegments; ++k) {
    const int64_t t = begin + k * kSegment + lane * kQuad;
    Sequence<N> of = uniform ? row : load_sequence<N>(p, sequence[k]);
    Exact<N> own{identity<N>(), {}};
#pragma unroll
    for (int j = kQuad - 1; j >= 0; --j) {
      const int i = k * kQuad + j;
      if (PACKED && ends >> i & 1) {
        if (!uniform) of = load_sequence<N>(p, back_to(p, sequence[k], t + j));
#pragma unroll
        for (int n = 0; n < N; ++n) own.map.f[n] = -1.0f, own.map.d[n] = of.end;
      }
      prepend<CLOSES>(own, of, p.gamma, x[i], v[i], selected >> i & 1, cut >> i & 1);
    }
    const Map<N> map = scan<CLOSES>(own, lane);
    whole[k] = from_lane(map, 0);
    after_lane[k] = from_later_lane(map, 1);
    if (lane == kWarp - 1) after_lane[k] = identity<N>();
  }

  // --- What the positions after this warp's hand on
  float c[N];
#pragma unroll
  for (int n = 0; n < N; ++n) c[n] = PACKED ? 0.0f : row.end;
  if (plan.row_warps > 1) {
    Map<N> map = whole[kSegments - 1];
#pragma unroll
    for (int k = kSegments - 2; k >= 0; --k) map = compose<CLOSES>(whole[k], map);
    if (lane == 0) maps[warp] = map;
    __syncthreads();
    if (split) {
      if (warp == 0) {
        Map<N> block = scan<true, 1>(lane < kWarps ? maps[lane] : identity<N>(), lane);
        const int64_t later = plan.chunks - 1 - chunk;
        const int64_t words = tile * N;
        const bool windows = plan.chunks > kWindow;
        if (lane == 0) {
          publish_map(s.maps + words, block, 1);
          // What a closed chunk hands on is known.
          if (windows && block.f[0] < 0.0f) publish_handed_on(s.handed_on + words, block.d, 1);
        }
        map = identity<N>();
        if (lane < kWindow - 1 && lane < later) map = wait_for_map<N>(s.maps + words + (lane + 1) * N, 1);
        if (lane == kWindow - 1 && lane < later) map = wait_for_handed_on<N>(s.handed_on + words + kWindow * N, 1);
        apply<true>(scan<true, 1>(map, lane), c);
        if (lane == 0) {
#pragma unroll
          for (int n = 0; n < N; ++n) carry[n] = c[n];
          if (windows && block.f[0] >= 0.0f) {
            apply<true>(block, c);
            publish_handed_on(s.handed_on + words, c, 1);
          }
        }
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < N; ++n) c[n] = carry[n];
    }
    for (int i = first_warp + plan.row_warps - 1; i > warp; --i) apply<CLOSES>(maps[i], c);
  }

  // --- Walk
#pragma unroll
  for (int k = kSegments - 1; k >= 0; --k) {
    const int64_t t = begin + k * kSegment + lane * kQuad;
    Sequence<N> of = uniform ? row : load_sequence<N>(p, sequence[k]);
    float own[N];
#pragma unroll
    for (int n = 0; n < N; ++n) own[n] = c[n];
    apply<CLOSES>(after_lane[k], own);
    apply<CLOSES>(whole[k], c);
    float returns[kQuad];
#pragma unroll
    for (int j = kQuad - 1; j >= 0; --j) {
      const int i = k * kQuad + j;
      if (PACKED && ends >> i & 1) {
        if (!uniform) of = load_sequence<N>(p, back_to(p, sequence[k], t + j));
#pragma unroll
        for (int n = 0; n < N; ++n) own[n] = of.end;
      }
      float advantage[N];
      advance<CLOSES>(own, advantage, of, p.gamma, x[i], v[i], selected >> i & 1, cut >> i & 1);
      x[i] = advantage[0];
      returns[j] = selected >> i & 1 ? advantage[N - 1] + v[i] : 0.0f;
    }
    const int64_t at = b * p.out_row_stride + t * p.out_time_stride;
    const bool in_row = PACKED || b < p.num_seqs;
    if (ALIGNED && in_row && t >= 0 && t + kQuad <= p.num_steps) {
      const int i = k * kQuad;
      *reinterpret_cast<float4*>(p.advantages + at) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
      *reinterpret_cast<float4*>(p.returns + at) = make_float4(returns[0], returns[1], returns[2], returns[3]);
    } else if (in_row) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        if (t + j < 0 || t + j >= p.num_steps) continue;
        p.advantages[at + j * p.out_time_stride] = x[k * kQuad + j];
        p.returns[at + j * p.out_time_stride] = returns[j];
      }
    }
  }
  if (s.partial != nullptr) write_moments(x, selected, s.partial + tile);
}

// --- Rows side by side ---

struct RowPlan {
  int64_t groups;  // of 32 rows
  int64_t chunks;  // of a group; a block has one
  __host__ __device__ int64_t blocks() const { return groups * chunks; }
};

constexpr int kRowChunk = kRowWarps * kSteps;

// `steps` positions of a row from t on, the rest 0: all loads first.
template <typename T>
__device__ __forceinline__ void load_steps_of(const T* data, int64_t stride, int steps, T (&out)[kSteps]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) out[i] = i < steps ? __ldcs(data + i * stride) : T{};
}

__device__ __forceinline__ void load_steps(const GaeTensor& x, int64_t b, int64_t t, int steps, float (&out)[kSteps]) {
  const int64_t at = b * x.row_stride + t * x.time_stride;
  if (x.dtype == Dtype::kFloat32)
    return load_steps_of(static_cast<const float*>(x.data) + at, x.time_stride, steps, out);
  unsigned short bits[kSteps];
  load_steps_of(static_cast<const unsigned short*>(x.data) + at, x.time_stride, steps, bits);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) out[i] = half_to_float(x.dtype, bits[i]);
}

__device__ __forceinline__ unsigned load_bits(const GaeTensor& x, int64_t b, int64_t t, int steps) {
  unsigned char bytes[kSteps];
  load_steps_of(static_cast<const unsigned char*>(x.data) + b * x.row_stride + t * x.time_stride, x.time_stride, steps,
                bytes);
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) bits |= static_cast<unsigned>(bytes[i] != 0) << i;
  return bits;
}

template <int N>
__global__ void __launch_bounds__(kRowWarps* kWarp) by_rows(const GaeParams p, const Scratch s, const RowPlan plan) {
  __shared__ Map<N> maps[kRowWarps][kWarp];
  __shared__ Map<N> later_maps[kRowWarps][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const bool split = plan.chunks > 1;
  const int64_t tile = split ? plan.blocks() - 1 - take_ticket(s.ticket) : blockIdx.x;
  const int64_t chunk = tile % plan.chunks;
  const int64_t b = tile / plan.chunks * kWarp + lane;
  const int64_t begin = chunk * kRowChunk + warp * kSteps;

  float x[kSteps], v[kSteps];
  const int steps = b < p.num_seqs ? static_cast<int>(min(max(p.num_steps - begin, int64_t{0}), int64_t{kSteps})) : 0;
  const unsigned inside = (1u << steps) - 1;
  load_steps(p.rewards, b, begin, steps, x);
  load_steps(p.values, b, begin, steps, v);
  const unsigned selected = p.mask.data != nullptr ? load_bits(p.mask, b, begin, steps) : inside;
  const unsigned over = p.terminated.data != nullptr ? load_bits(p.terminated, b, begin, steps) : 0u;
  const unsigned cut_off = p.truncated.data != nullptr ? load_bits(p.truncated, b, begin, steps) : 0u;
  const unsigned cut = over | cut_off, truncated = cut_off & selected & ~over;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) x[i] -= v[i];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (truncated >> i & 1) x[i] = fmaf(p.gamma, load_float(p.bootstrap_values, b, begin + i), x[i]);
  }

  const Sequence<N> row = load_sequence<N>(p, b < p.num_seqs ? b : 0);
  Exact<N> own{identity<N>(), {}};
#pragma unroll
  for (int i = kSteps - 1; i >= 0; --i) {
    prepend<true>(own, row, p.gamma, x[i], v[i], selected >> i & 1, cut >> i & 1);
  }
  Map<N> map = own.map;
  maps[warp][lane] = map;
  __syncthreads();

  float c[N];
#pragma unroll
  for (int n = 0; n < N; ++n) c[n] = row.end;
  if (split) {
    const int64_t later = min(plan.chunks - 1 - chunk, int64_t{kRowWarps});
    const bool windows = plan.chunks > kRowWarps;
    const int64_t words = tile * N * kWarp + lane;
    if (warp == 0) {
      for (int i = 1; i < kRowWarps; ++i) map = compose<true>(map, maps[i][lane]);
      publish_map(s.maps + words, map, kWarp);
    }
    if (warp < later) {
      const int64_t there = words + (warp + 1) * N * kWarp;
      later_maps[warp][lane] = warp < kRowWarps - 1 ? wait_for_map<N>(s.maps + there, kWarp)
                                                    : wait_for_handed_on<N>(s.handed_on + there, kWarp);
    }
    __syncthreads();
    for (int i = static_cast<int>(later) - 1; i >= 0; --i) apply<true>(later_maps[i][lane], c);
    if (warp == 0 && windows) {
      float handed_on[N];
#pragma unroll
      for (int n = 0; n < N; ++n) handed_on[n] = c[n];
      apply<true>(map, handed_on);
      publish_handed_on(s.handed_on + words, handed_on, kWarp);
    }
  }
  for (int i = kRowWarps - 1; i > warp; --i) apply<true>(maps[i][lane], c);

#pragma unroll
  for (int i = kSteps - 1; i >= 0; --i) {
    float advantage[N];
    advance<true>(c, advantage, row, p.gamma, x[i], v[i], selected >> i & 1, cut >> i & 1);
    x[i] = advantage[0];
    if (b < p.num_seqs && begin + i < p.num_steps) {
      const int64_t at = b * p.out_row_stride + (begin + i) * p.out_time_stride;
      p.advantages[at] = advantage[0];
      p.returns[at] = selected >> i & 1 ? advantage[N - 1] + v[i] : 0.0f;
    }
  }
  if (s.partial != nullptr) write_moments(x, selected, s.partial + tile);
}

// --- Launches ---

TimePlan time_plan(int64_t num_seqs, int64_t num_steps, bool packed) {
  // A row whose quads are aligned in memory may begin with a part of one.
  const int64_t length = num_steps + (packed || num_steps % kQuad == 0 ? 0 : kQuad - 1);
  TimePlan plan{packed ? kWarps : 1, 0, 0};
  while (plan.row_warps < kWarps && plan.chunk_size() < length) plan.row_warps *= 2;
  plan.chunks = (length + plan.chunk_size() - 1) / plan.chunk_size();
  const int64_t rows = kWarps / plan.row_warps;  // of a block
  plan.blocks = packed ? plan.chunks : plan.chunks > 1 ? num_seqs * plan.chunks : (num_seqs + rows - 1) / rows;
  return plan;
}

RowPlan row_plan(int64_t num_seqs, int64_t num_steps) {
  return {(num_seqs + kWarp - 1) / kWarp, (num_steps + kRowChunk - 1) / kRowChunk};
}

// What a call needs of scratch memory: words that begin as 0, the first of them the ticket, then partial moments.
struct Needs {
  int64_t maps;
  int64_t handed_on;
  int64_t partial;
  int64_t words() const { return maps == 0 ? 0 : 1 + maps + handed_on; }
  int64_t bytes() const { return words() * 8 + partial * static_cast<int64_t>(sizeof(Moments)); }
};

Needs needs_of(int64_t blocks, int64_t chunks, int64_t window, int64_t words_per_chunk, bool moments) {
  const int64_t words = blocks * words_per_chunk;
  return {chunks > 1 ? words : 0, chunks > window ? words : 0, moments ? blocks : 0};
}

// Whether rows lie side by side in every tensor, and enough of them to fill a sector of memory.
bool rows_side_by_side(const GaeParams& p) {
  const auto fits = [](const GaeTensor& x) { return x.data == nullptr || x.row_stride == 1; };
  return p.cu_seqlens == nullptr && p.num_seqs >= 8 && p.out_row_stride == 1 && p.out_time_stride != 1 &&
         fits(p.rewards) && fits(p.values) && fits(p.mask) && fits(p.terminated) && fits(p.truncated);
}

// Whether the same quads of positions are aligned in every tensor that is read by quads.
bool quads_aligned(const GaeParams& p) {
  const int64_t row_stride = p.rewards.row_stride % kQuad;
  const auto fits = [&](const void* data, int64_t size, int64_t of_row, int64_t of_time) {
    return data == nullptr || (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(size * kQuad) == 0 &&
                               of_time == 1 && of_row % kQuad == row_stride);
  };
  const auto floats = [&](const GaeTensor& x) {
    return fits(x.data, x.dtype == Dtype::kFloat32 ? 4 : 2, x.row_stride, x.time_stride);
  };
  const auto flags = [&](const GaeTensor& x) { return fits(x.data, 1, x.row_stride, x.time_stride); };
  return (row_stride == 0 || p.num_steps % kQuad != 0) && floats(p.rewards) && floats(p.values) && flags(p.mask) &&
         flags(p.terminated) && flags(p.truncated) && fits(p.advantages, 4, p.out_row_stride, p.out_time_stride) &&
         fits(p.returns, 4, p.out_row_stride, p.out_time_stride);
}

template <int N>
void start(const GaeParams& p, uint64_t stream) {
  const bool packed = p.cu_seqlens != nullptr, by_row = rows_side_by_side(p);
  const TimePlan time = time_plan(p.num_seqs, p.num_steps, packed);
  const RowPlan rows = row_plan(p.num_seqs, p.num_steps);
  const int64_t blocks = by_row ? rows.blocks() : time.blocks;
  const Needs needs = by_row ? needs_of(blocks, rows.chunks, kRowWarps, kWarp * N, p.moments != nullptr)
                             : needs_of(blocks, time.chunks, kWindow, N, p.moments != nullptr);
  Scratch s{};
  unsigned long long* const words = static_cast<unsigned long long*>(p.scratch);
  if (needs.words() > 0) {
    s.ticket = static_cast<unsigned*>(p.scratch);
    s.maps = words + 1;
    s.handed_on = s.maps + needs.maps;
    launch("gae scratch", clear, (needs.words() + 1023) / 1024, 1024, stream, words, needs.words());
  }
  if (p.moments != nullptr) s.partial = reinterpret_cast<Moments*>(words + needs.words());

  if (by_row) {
    launch("gae by rows", by_rows<N>, blocks, kRowWarps * kWarp, stream, p, s, rows);
  } else {
    const bool aligned = quads_aligned(p);
    const bool closes = p.terminated.data != nullptr || p.truncated.data != nullptr;
    const auto kernel = packed    ? aligned ? by_time<N, true, true, true> : by_time<N, true, false, true>
                        : !closes ? aligned ? by_time<N, false, true, false> : by_time<N, false, false, false>
                        : aligned ? by_time<N, false, true, true>
                                  : by_time<N, false, false, true>;
    launch("gae by time", kernel, blocks, kWarps * kWarp, stream, p, s, time);
  }
  if (p.moments != nullptr) merge_moments_cuda(s.partial, blocks, p.moments, stream);
}

}  // namespace

int64_t gae_cuda_scratch(int64_t num_seqs, int64_t num_steps, bool packed, bool time_major, bool separate_returns,
                         bool moments) {
  const int64_t chains = separate_returns ? 2 : 1;
  const TimePlan time = time_plan(num_seqs, num_steps, packed);
  int64_t bytes = needs_of(time.blocks, time.chunks, kWindow, chains, moments).bytes();
  if (time_major) {
    const RowPlan rows = row_plan(num_seqs, num_steps);
    bytes = std::max(bytes, needs_of(rows.blocks(), rows.chunks, kRowWarps, kWarp * chains, moments).bytes());
  }
  return bytes;
}

void gae_cuda(const GaeParams& params, int device, uint64_t stream) {
  const DeviceGuard guard(device);
  if (params.num_seqs == 0 || params.num_steps == 0) {
    if (params.moments != nullptr) merge_moments_cuda(nullptr, 0, params.moments, stream);
  } else if (params.separate_returns) {
    start<2>(params, stream);
  } else {
    start<1>(params, stream);
  }
}

std::string gae_cuda_problem(int device) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && device >= count) return "CUDA device " + std::to_string(device) + " does not exist";
  if (error == cudaSuccess) {
    const DeviceGuard guard(device);
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, by_rows<1>);
  }
  cudaGetLastError();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

}  // namespace fastppo
