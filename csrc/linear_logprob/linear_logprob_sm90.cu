// The head's product with its statistics, or the logits' gradient, taken from the float32 results in registers.
//
// Persistent blocks, in clusters of two: the two have the same 256 columns of the vocabulary and neighbouring 128 rows,
// and each fetches half of the weight's tile for both. One thread of a block keeps TMA, which copies tiles, four stages
// of 64 of the D numbers ahead; two warpgroups multiply 64 rows each and then do what follows with them. They meet
// nowhere but in the stages: one's exponentials run while the other multiplies.
//
// Every element is summed over D in the same order wherever its column stands: forward and backward form the same bits.
#include <algorithm>

#include "common/cuda_utils.h"
#include "linear_logprob/linear_logprob.h"
#include "linear_logprob/wgmma.cuh"

namespace fastppo {
namespace {

constexpr int kRows = 128, kColumns = 256, kDepth = 64;  // of a block's tile, and of a stage
constexpr int kStages = 4;
constexpr int kBlocks = 2;       // of a cluster
constexpr int kWarpgroup = 128;  // threads
constexpr int kWarpgroups = 2;   // that multiply
constexpr int kThreads = (1 + kWarpgroups) * kWarpgroup;
constexpr int kPairsOfRows = 8;  // tiles of two blocks that a wave goes through before the next columns
constexpr int kValues = kRows / kWarpgroups * kColumns / kWarpgroup;  // of a thread
constexpr int kPiece = 64;                                            // columns that a warpgroup writes at once
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kFloor = -1000.0f;       // exp of it is 0, and 0 * kFloor too
constexpr float kSmallExcess = 0.0625f;  // of a sum less 1: below it the rounding of the sum would show
constexpr float kNotHere = INFINITY;     // x_y of columns without the target
static_assert(kValues == 128 && kRows / kWarpgroups == 64, "multiply_tile is of 64 x 256");

template <typename T>
struct Shared {
  T hidden[kStages][kRows * kDepth];
  T weight[kStages][kColumns * kDepth];
  T out[kWarpgroups][2][64 * kPiece];
  uint64_t full[kStages], empty[kStages];
};
constexpr int kSharedAlignment = 1024;  // of a swizzled tile

// Where a tile stands. Neighbouring clusters share columns, and a wave few enough rows for them to stay in the L2.
struct Tile {
  int row, column;
};

struct Grid {
  int pairs, columns;  // of tiles
};

// The tiles of a cluster, one after the other.
class Walk {
 public:
  __device__ Walk(Grid grid, int first, int step) : grid_(grid), index_(first), step_(step) { enter_group(); }
  __device__ bool done() const { return pair_ >= grid_.pairs; }
  __device__ void next() {
    index_ += step_;
    enter_group();
  }
  __device__ Tile tile(int rank) const {
    const int rows = min(kPairsOfRows, grid_.pairs - pair_);
    const bool whole = rows == kPairsOfRows;  // spares all groups but the last a division
    const int row = whole ? index_ % kPairsOfRows : index_ % rows,
              column = whole ? index_ / kPairsOfRows : index_ / rows;
    return {((pair_ + row) * kBlocks + rank) * kRows, column * kColumns};
  }

 private:
  __device__ void enter_group() {
    const int size = kPairsOfRows * grid_.columns;
    while (index_ >= min(size, (grid_.pairs - pair_) * grid_.columns) && !done()) {
      index_ -= size;
      pair_ += kPairsOfRows;
    }
  }

  Grid grid_;
  int index_;     // in the group of rows
  int pair_ = 0;  // the group's first
  int step_;
};

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename T>
__device__ inline uint32_t pack(float low, float high);
template <>
__device__ inline uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}
template <>
__device__ inline uint32_t pack<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}

template <typename T>
__device__ inline float2 unpack(uint32_t both);
template <>
__device__ inline float2 unpack<__nv_bfloat16>(uint32_t both) {
  // In assembly: the compiler would otherwise hold the tensor cores' results as integers, and wait for each product.
  float2 x;
  asm("{\n.reg .b32 high, low;\nshl.b32 low, %2, 16;\nand.b32 high, %2, 0xffff0000;\n"
      "mov.b32 %0, low;\nmov.b32 %1, high;\n}"
      : "=f"(x.x), "=f"(x.y)
      : "r"(both));
  return x;
}
template <>
__device__ inline float2 unpack<__half>(uint32_t both) {
  return __half22float2(reinterpret_cast<const __half2&>(both));
}

template <typename T>
__device__ inline uint32_t larger_of_both(uint32_t a, uint32_t b);
template <>
__device__ inline uint32_t larger_of_both<__nv_bfloat16>(uint32_t a, uint32_t b) {
  const __nv_bfloat162 both =
      __hmax2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(both);
}
template <>
__device__ inline uint32_t larger_of_both<__half>(uint32_t a, uint32_t b) {
  const __half2 both = __hmax2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(both);
}

// Rounds what a thread has to T; of each of its two rows the largest. A NaN is not the largest.
template <typename T>
__device__ __forceinline__ void round_all(float (&d)[kValues], float (&largest)[2]) {
  uint32_t packed[2];
#pragma unroll
  for (int i = 0; i < kValues; i += 2) {
    const uint32_t both = pack<T>(d[i], d[i + 1]);
    uint32_t& so_far = packed[i / 2 % 2];
    so_far = i < 4 ? both : larger_of_both<T>(so_far, both);
    const float2 rounded = unpack<T>(both);
    d[i] = rounded.x;
    d[i + 1] = rounded.y;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 both = unpack<T>(packed[half]);
    largest[half] = fmaxf(both.x, both.y);
  }
}

__device__ __forceinline__ void find_largest(const float (&d)[kValues], float (&largest)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float of_column[2] = {d[half * 2], d[half * 2 + 1]};
#pragma unroll
    for (int i = 4; i < kValues; i += 4) {
      of_column[0] = fmaxf(of_column[0], d[i + half * 2]);
      of_column[1] = fmaxf(of_column[1], d[i + half * 2 + 1]);
    }
    largest[half] = fmaxf(of_column[0], of_column[1]);
  }
}

// What a thread has of the rows of its warpgroup's part of a tile: two rows, of each 32 pairs of columns.
struct Place {
  int first_row;  // of the warpgroup
  int row;        // this thread's first; its other is 8 further
  int column;     // the tile's first
  int lane;       // of the four that share a row
  __device__ Place(Tile tile, int warpgroup, int thread)
      : first_row(tile.row + warpgroup * 64),
        row(first_row + thread / 32 * 16 + thread % 32 / 4),
        column(tile.column),
        lane(thread % 4) {}
  __device__ int column_of(int pair) const { return column + pair * 8 + lane * 2; }
};

// Writes the warpgroup's 64 rows of `d`, rounded, by way of two buffers in shared memory.
template <typename T>
__device__ __forceinline__ void write_tile(const float (&d)[kValues], Place place, const CUtensorMap* out,
                                           T (&buffers)[2][64 * kPiece], int warpgroup, int thread) {
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane % 16;  // whose address this thread has, of every other group of 8 columns
#pragma unroll
  for (int piece = 0; piece < kColumns / kPiece; ++piece) {
    T* const line = buffers[piece % 2] + row * kPiece;
#pragma unroll
    for (int group = 0; group < kPiece / 8; group += 2) {
      const float* const x = d + (piece * (kPiece / 8) + group) * 4;
      store_matrices(line + ((group + lane / 16) ^ (row % 8)) * 8, pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
                     pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
    }
    fence_for_tma();
    if (thread == 0) wait_for_boxes_read();  // the piece before: its buffer is the next piece's
    block_barrier_wait(1 + warpgroup, kWarpgroup);
    if (thread == 0) write_box(out, buffers[piece % 2], place.column + piece * kPiece, place.first_row);
  }
}

// --- after a forward product ---

struct StatsWork {
  const int64_t* targets;
  const float* temperature;
  float4* stats;
  int64_t start;
  int num_rows, num_columns;
  float scalar_temperature;
  bool round, with_entropy;
};

struct Sums {
  float excess, shifted;  // sum of e, less 1; sum of e * d * temperature
};

__device__ __forceinline__ float sum_of_four(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <int half, bool Entropy>
__device__ __forceinline__ Sums sum_row(const float (&d)[kValues], float reference, float to_log2) {
  float e_sum[2] = {0, 0}, shifted[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kValues; i += 4) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float distance = d[i + half * 2 + k] - reference;
      const float e = exp2_fast(distance * to_log2);
      e_sum[k] += e;
      if (Entropy) shifted[k] += e * distance;
    }
  }
  return {sum_of_four(e_sum[0] + e_sum[1]) - 1.0f, Entropy ? sum_of_four(shifted[0] + shifted[1]) : 0.0f};
}

// The same where it costs more: elements of an e of 1 are counted apart from the others, beside which a float32 would
// lose them, and -inf is a distance that can be multiplied with 0.
template <int half, bool Entropy>
__device__ __forceinline__ Sums sum_row_exactly(const float (&d)[kValues], float reference, float to_log2) {
  const float floor = kFloor * kLog2e / to_log2;
  float others = 0, largest = 0, shifted = 0;
#pragma unroll
  for (int i = 0; i < kValues; i += 4) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float distance = d[i + half * 2 + k] - reference;
      const float e = exp2_fast(distance * to_log2);
      largest += e == 1.0f ? 1.0f : 0.0f;
      others += e == 1.0f ? 0.0f : e;
      if (Entropy) shifted += e * fmaxf(distance, floor);
    }
  }
  return {sum_of_four(largest) - 1.0f + sum_of_four(others), Entropy ? sum_of_four(shifted) : 0.0f};
}

// Of one of a thread's rows: (m, s - 1, t) over the tile's columns. `top`: the largest that the thread has; `ragged`:
// columns beyond the last are -inf.
template <int half, bool Entropy>
__device__ __forceinline__ float3 reduce_row(const float (&d)[kValues], float top, float temperature, bool ragged) {
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const float reference = top == -INFINITY ? 0.0f : top, to_log2 = kLog2e / temperature;
  Sums sums = sum_row<half, Entropy>(d, reference, to_log2);
  const bool rough = ragged || sums.excess < kSmallExcess || isnan(sums.shifted);
  if (__any_sync(~0u, rough)) {
    float again = reference;
    asm volatile("" : "+f"(again));  // else the exponentials of the first sum are kept for this one, in local memory
    const Sums exact = sum_row_exactly<half, Entropy>(d, again, to_log2);
    if (rough) sums = exact;  // and no other: a row's bits are not its neighbours' business
  }
  return {top, sums.excess, sums.shifted / temperature};
}

// x = value where a == b. In assembly, as the compiler would index the registers by a, which takes them to memory.
__device__ __forceinline__ void take_if_equal(float& x, int a, int b, float value) {
  asm("{\n.reg .pred p;\nsetp.eq.s32 p, %1, %2;\nselp.f32 %0, %3, %0, p;\n}" : "+f"(x) : "r"(a), "r"(b), "f"(value));
}

// x of column y, which one of the four threads of a row has.
template <int half>
__device__ __forceinline__ float element_of(const float (&d)[kValues], Place place, int64_t y) {
  float x = 0.0f;
  const bool here = y >= place.column && y < place.column + kColumns;
  const int at = here ? static_cast<int>(y) - place.column : 0;
  if (__any_sync(~0u, here)) {
#pragma unroll
    for (int i = 0; i < kValues / 4; ++i) {
      take_if_equal(x, at, i * 8 + place.lane * 2, d[i * 4 + half * 2]);
      take_if_equal(x, at, i * 8 + place.lane * 2 + 1, d[i * 4 + half * 2 + 1]);
    }
    x = __shfl_sync(~0u, x, at % 8 / 2, 4);
  }
  return here ? x : kNotHere;
}

// What is to be done with a tile. It reads before the tile is multiplied what is needed afterwards, and waits for it
// only then.
struct StatsOfTile {
  int64_t target[2];
  float temperature[2];

  __device__ __forceinline__ StatsOfTile(const StatsWork& work, Place place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(place.row + half * 8, work.num_rows - 1);
      target[half] = work.targets[row];
      temperature[half] = work.temperature != nullptr ? work.temperature[row] : work.scalar_temperature;
    }
  }

  template <int half>
  __device__ __forceinline__ void finish_row(const StatsWork& work, const float (&d)[kValues], float largest,
                                             Place place) const {
    const int row = place.row + half * 8;
    const bool ragged = place.column + kColumns > work.num_columns;
    const float3 sums = work.with_entropy ? reduce_row<half, true>(d, largest, temperature[half], ragged)
                                          : reduce_row<half, false>(d, largest, temperature[half], ragged);
    const int64_t y = target[half] - work.start;
    const float x_y = element_of<half>(d, place, y < work.num_columns ? y : -1);
    if (row < work.num_rows && place.lane == 0) {
      __stcs(work.stats + static_cast<int64_t>(place.column / kColumns) * work.num_rows + row,
             make_float4(sums.x, sums.y, sums.z, x_y));
    }
  }

  template <typename T>
  __device__ __forceinline__ void finish(const StatsWork& work, const CUtensorMap*, float (&d)[kValues], Place place,
                                         T (&)[2][64 * kPiece], int, int) const {
    if (place.column + kColumns > work.num_columns) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (place.column_of(i / 4) + i % 2 >= work.num_columns) d[i] = -INFINITY;
      }
    }
    float largest[2];
    if (work.round) {
      round_all<T>(d, largest);
    } else {
      find_largest(d, largest);
    }
    finish_row<0>(work, d, largest[0], place);
    finish_row<1>(work, d, largest[1], place);
  }
};

// The statistics of a row's columns, from those of parts of them, added up in float64 in an order that is always the
// same.
struct Merged {
  float m = -INFINITY;
  double s = 0, t = 0;  // for that m
  float x_y = kNotHere;

  __device__ __forceinline__ void add(float other_m, double other_s, double other_t, float other_x_y,
                                      float temperature) {
    const float top = fmaxf(m, other_m), reference = top == -INFINITY ? 0.0f : top;
    const float d = distance(m - reference, temperature), other_d = distance(other_m - reference, temperature);
    const double scale = expf(d), other_scale = expf(other_d);
    t = scale * (t + d * s) + other_scale * (other_t + other_d * other_s);
    s = scale * s + other_scale * other_s;
    m = top;
    if (other_x_y != kNotHere) x_y = other_x_y;
  }

 private:
  static __device__ __forceinline__ float distance(float x, float temperature) {
    const float d = x / temperature;
    return d < kFloor ? kFloor : d;  // a NaN stays
  }
};

constexpr int kMergedRows = 32, kMergers = 16;  // of a block; each merger has every kMergers-th part

__global__ void __launch_bounds__(kMergedRows* kMergers)
    merge_stats(const float4* parts, int num_parts, int num_rows, const float* temperatures, float scalar_temperature,
                float4* stats) {
  __shared__ Merged of_mergers[kMergers][kMergedRows];
  const int lane = static_cast<int>(threadIdx.x) % kMergedRows, merger = static_cast<int>(threadIdx.x) / kMergedRows;
  const int row = static_cast<int>(blockIdx.x) * kMergedRows + lane;
  const bool inside = row < num_rows;
  const float temperature = inside && temperatures != nullptr ? temperatures[row] : scalar_temperature;
  Merged merged;
#pragma unroll 4
  for (int part = inside ? merger : num_parts; part < num_parts; part += kMergers) {
    const float4 x = parts[static_cast<int64_t>(part) * num_rows + row];
    merged.add(x.x, 1.0 + static_cast<double>(x.y), x.z, x.w, temperature);
  }
  of_mergers[merger][lane] = merged;
  __syncthreads();
  if (merger != 0 || !inside) return;
  for (int i = 1; i < kMergers; ++i) {
    const Merged& other = of_mergers[i][lane];
    merged.add(other.m, other.s, other.t, other.x_y, temperature);
  }
  stats[row] = make_float4(merged.m, static_cast<float>(merged.s - 1.0), static_cast<float>(merged.t), merged.x_y);
}

// --- after a backward product ---

// dlogits = e * (a + b * d), but at the target; of a row without a gradient 0, whatever its logits are.
struct RowGradient {
  float m, a, b, to_log2, floor, at_y;
  int y;  // column of the target, -1 where it is not here
  int live;
};
static_assert(sizeof(RowGradient) == 32, "coefficients are [N, 8]");

struct DlogitsWork {
  const RowGradient* rows;
  int num_rows, first_column;  // which the tiles' columns are counted from
  bool round;
};

__global__ void row_gradients(HeadGradient p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= p.num_rows) return;
  const int64_t target = p.targets[row];
  const float temperature = p.temperature != nullptr ? p.temperature[row] : p.scalar_temperature;
  const float4 kept = reinterpret_cast<const float4*>(p.kept)[row];
  const float2 upstream = reinterpret_cast<const float2*>(p.upstream)[row];
  const double g = upstream.x, g_entropy = upstream.y, mean_d = kept.z, d_y = kept.w;
  const double s = 1.0 + static_cast<double>(kept.y), scale = 1.0 / (s * temperature);
  const int64_t y = target - p.start;
  RowGradient out{};
  out.live = target != p.ignore_index && (g != 0.0 || g_entropy != 0.0);
  out.y = y >= 0 && y < p.num_columns ? static_cast<int>(y) : -1;
  out.m = kept.x;
  out.to_log2 = kLog2e / temperature;
  out.floor = kFloor * temperature;
  if (isnan(kept.w)) {  // a target that no rank holds leaves its whole row NaN
    out.a = out.at_y = NAN;
  } else {
    out.a = static_cast<float>((g_entropy * mean_d - g) * scale);
    out.b = static_cast<float>(-g_entropy * scale / temperature);
    // Computed apart and rounded once; a - p would cancel where p is near 1.
    double value = g * -expm1(d_y - log1p(static_cast<double>(kept.y)));
    if (g_entropy != 0.0) {
      const double d = fmax(d_y, static_cast<double>(kFloor));
      value -= g_entropy * exp(d) / s * (d - mean_d);
    }
    out.at_y = static_cast<float>(value / temperature);
  }
  reinterpret_cast<RowGradient*>(p.coefficients)[row] = out;
}

struct DlogitsOfTile {
  RowGradient rows[2];

  __device__ __forceinline__ DlogitsOfTile(const DlogitsWork& work, Place place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half] = work.rows[min(place.row + half * 8, work.num_rows - 1)];
    }
  }

  template <int half>
  __device__ __forceinline__ void finish_row(const DlogitsWork& work, float (&d)[kValues], Place place) const {
    const RowGradient& r = rows[half];
#pragma unroll
    for (int i = half * 2; i < kValues; i += 4) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float distance = d[i + k] - r.m;
        d[i + k] = exp2_fast(distance * r.to_log2) * (fmaxf(distance, r.floor) * r.b + r.a);
      }
    }
    const int at = r.y - work.first_column - place.column;
    if (r.y >= 0 && at >= 0 && at < kColumns) {
#pragma unroll
      for (int i = 0; i < kValues / 4; ++i) {
        if (at == i * 8 + place.lane * 2) d[i * 4 + half * 2] = r.at_y;
        if (at == i * 8 + place.lane * 2 + 1) d[i * 4 + half * 2 + 1] = r.at_y;
      }
    }
    if (!r.live) {
#pragma unroll
      for (int i = half * 2; i < kValues; i += 4) d[i] = d[i + 1] = 0.0f;
    }
  }

  template <typename T>
  __device__ __forceinline__ void finish(const DlogitsWork& work, const CUtensorMap* out, float (&d)[kValues],
                                         Place place, T (&buffers)[2][64 * kPiece], int warpgroup, int thread) const {
    float unused[2];
    if (work.round) round_all<T>(d, unused);
    finish_row<0>(work, d, place);
    finish_row<1>(work, d, place);
    write_tile<T>(d, place, out, buffers, warpgroup, thread);
  }
};

// --- the product ---

template <typename T, typename Work, typename OfTile>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kBlocks, 1, 1)
    head_product(const __grid_constant__ CUtensorMap hidden, const __grid_constant__ CUtensorMap weight,
                 const __grid_constant__ CUtensorMap out, const __grid_constant__ Work work, Grid grid, int depth) {
  extern __shared__ unsigned char storage[];
  Shared<T>& s = *reinterpret_cast<Shared<T>*>((reinterpret_cast<uintptr_t>(storage) + kSharedAlignment - 1) /
                                               kSharedAlignment * kSharedAlignment);
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup - 1;  // -1 fetches
  const int rank = static_cast<int>(cluster_rank());
  Walk walk(grid, static_cast<int>(blockIdx.x) / kBlocks, static_cast<int>(gridDim.x) / kBlocks);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kBlocks * kWarpgroups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_arrive_and_wait();

  if (warpgroup < 0) {
    give_registers<40>();
    if (threadIdx.x == 0) {
      int stage = 0, phase = 0;
      for (; !walk.done(); walk.next()) {
        const Tile tile = walk.tile(rank);
        for (int k = 0; k < depth; ++k) {
          barrier_wait(&s.empty[stage], phase ^ 1);
          barrier_expect(&s.full[stage], static_cast<int>(sizeof(s.hidden[0]) + sizeof(s.weight[0])));
          copy_box(&hidden, s.hidden[stage], &s.full[stage], k * kDepth, tile.row);
          copy_box_to_all(&weight, s.weight[stage] + rank * (kColumns / kBlocks) * kDepth, &s.full[stage], k * kDepth,
                          tile.column + rank * (kColumns / kBlocks), (1 << kBlocks) - 1);
          if (++stage == kStages) stage = 0, phase ^= 1;
        }
      }
    }
  } else {
    take_registers<232>();
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    int stage = 0, phase = 0;
    for (; !walk.done(); walk.next()) {
      const Place place(walk.tile(rank), warpgroup, thread);
      const OfTile of_tile(work, place);
      float d[kValues];
      int previous = 0;
#pragma unroll 1
      for (int k = 0; k < depth; ++k) {
        barrier_wait(&s.full[stage], phase);
        const uint64_t a = tile_descriptor(s.hidden[stage] + warpgroup * 64 * kDepth);
        const uint64_t b = tile_descriptor(s.weight[stage]);
        products_fence();
#pragma unroll
        for (int i = 0; i < kDepth / 16; ++i) multiply_tile<T>(d, a + i * 2, b + i * 2, k > 0 || i > 0);  // 32 bytes on
        products_commit();
        products_wait<1>();
        if (k > 0 && thread < kBlocks) barrier_arrive(&s.empty[previous], thread);
        previous = stage;
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
      products_wait<0>();
      products_done(d);
      if (thread < kBlocks) barrier_arrive(&s.empty[previous], thread);
      of_tile.template finish<T>(work, &out, d, place, s.out[warpgroup], warpgroup, thread);
    }
    if (thread == 0) wait_for_boxes_written();
  }
  cluster_arrive_and_wait();  // no block ends while the other may yet write into it
}

// --- launches ---

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode tensor_map_encoder() {
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status),
               "cuTensorMapEncodeTiled");
    if (found == nullptr) throw std::runtime_error("fastppo: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(found);
  }();
  return encode;
}

// A [rows, width] matrix, to be copied in boxes of `box` rows and kDepth numbers.
CUtensorMap tensor_map(const void* data, Dtype dtype, int64_t rows, int64_t width, int64_t stride, int box) {
  static_assert(kDepth == kPiece, "boxes that are read and written are equally wide");
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t boxes[2] = {kDepth, static_cast<cuuint32_t>(box)}, steps[2] = {1, 1};
  const CUresult result = tensor_map_encoder()(
      &map, dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
      const_cast<void*>(data), sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("fastppo: cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)));
  }
  return map;
}

template <typename T, typename OfTile, typename Work>
void start(const char* what, const HeadProduct& p, const Work& work, const CUtensorMap& out, int device,
           uint64_t stream) {
  const auto kernel = head_product<T, Work, OfTile>;
  const int shared = static_cast<int>(sizeof(Shared<T>)) + kSharedAlignment;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), what);
  int processors = 0;
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), what);
  const auto parts = [](int64_t of, int64_t size) { return static_cast<int>((of + size - 1) / size); };
  const Grid grid{parts(p.num_rows, kRows * kBlocks), parts(p.num_columns, kColumns)};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(processors / kBlocks, grid.pairs * grid.columns) * kBlocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  const CUtensorMap hidden = tensor_map(p.hidden, p.dtype, p.num_rows, p.width, p.hidden_stride, kRows);
  const CUtensorMap weight = tensor_map(p.weight, p.dtype, p.num_columns, p.width, p.weight_stride, kColumns / kBlocks);
  check_cuda(cudaLaunchKernelEx(&config, kernel, hidden, weight, out, work, grid, parts(p.width, kDepth)), what);
}

template <typename OfTile, typename Work>
void start_of_dtype(const char* what, const HeadProduct& p, const Work& work, const CUtensorMap& out, int device,
                    uint64_t stream) {
  if (p.dtype == Dtype::kBFloat16) {
    start<__nv_bfloat16, OfTile>(what, p, work, out, device, stream);
  } else {
    start<__half, OfTile>(what, p, work, out, device, stream);
  }
}

}  // namespace

void head_stats_sm90(const HeadStats& params, int device, uint64_t stream) {
  const DeviceGuard guard(device);
  const HeadProduct& p = params.product;
  if (p.num_rows == 0 || p.num_columns == 0) return;
  const int rows = static_cast<int>(p.num_rows), columns = static_cast<int>(p.num_columns);
  float4* const parts = reinterpret_cast<float4*>(params.scratch);
  const StatsWork work{params.targets, params.temperature,        parts,   params.start,       rows,
                       columns,        params.scalar_temperature, p.round, params.with_entropy};
  start_of_dtype<StatsOfTile>("head statistics", p, work, CUtensorMap{}, device, stream);
  launch("head statistics of parts", merge_stats, (rows + kMergedRows - 1) / kMergedRows, kMergedRows * kMergers,
         stream, static_cast<const float4*>(parts), (columns + kColumns - 1) / kColumns, rows, params.temperature,
         params.scalar_temperature, reinterpret_cast<float4*>(params.stats));
}

void head_gradient_sm90(const HeadGradient& params, int device, uint64_t stream) {
  const DeviceGuard guard(device);
  if (params.num_rows == 0) return;
  launch("head coefficients", row_gradients, (params.num_rows + 127) / 128, 128, stream, params);
}

void head_dlogits_sm90(const HeadDlogits& params, int device, uint64_t stream) {
  const DeviceGuard guard(device);
  const HeadProduct& p = params.product;
  if (p.num_rows == 0 || p.num_columns == 0) return;
  const DlogitsWork work{reinterpret_cast<const RowGradient*>(params.coefficients), static_cast<int>(p.num_rows),
                         static_cast<int>(params.first_column), p.round};
  const CUtensorMap out = tensor_map(params.dlogits, p.dtype, p.num_rows, p.num_columns, params.dlogits_stride, 64);
  start_of_dtype<DlogitsOfTile>("head dlogits", p, work, out, device, stream);
}

std::string head_sm90_problem(int device) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return cudaGetErrorString(error);
  }
  if (major != 9 || minor != 0) {
    return "it is made for compute capability 9.0, not " + std::to_string(major) + "." + std::to_string(minor);
  }
  return "";
}

}  // namespace fastppo
