// CPU kernel of gae. The recurrence of a sequence is a chain of dependent multiply-adds and waits on their latency; all
// the rest is independent from position to position. So SLOTS sequences are walked side by side, in tiles of kSteps
// positions each:
//   1. fill: along time, in short vectors: the next selected value, delta = reward + gamma * next - value, and the
//      factor of the chain;
//   2. chain: one scalar chain per slot, SLOTS of them interleaved, so that they hide each other's latency;
//   3. emit: along time, in short vectors: advantages and returns.
// An unselected position is delta = -0 and factor 1, which leaves any acc as it is, bit for bit. A slot whose sequence
// has ended takes the next one that no thread has taken. Padded rows of plain inputs are walked in squares of positions
// instead, which are transposed in registers (`walk_rows`), and time-major tensors, whose sequences lie side by side in
// memory, with a sequence per SIMD lane (`walk_lanes`). Each position's arithmetic is the same everywhere and no
// instruction set contracts into fused multiply-adds, so an answer depends on no layout, instruction set or number of
// threads.
//
// Legend: b sequence, t position in time, j position within a tile (t = start + j).
#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/cpu.h"
#include "common/macros.h"
#include "common/simd.h"
#include "common/thread_pool.h"
#include "gae/gae.h"

#ifdef FASTPPO_X86
#include <xmmintrin.h>
#endif

namespace fastppo {
namespace {

constexpr int kSteps = 128;
constexpr int kMinLanes = 4, kMaxLanes = 16;
constexpr int64_t kMinTokensPerTask = 16384;  // below this a thread costs more to wake than it saves

template <typename T>
FASTPPO_INLINE const T* address(const GaeTensor& x, int64_t b, int64_t t) {
  return static_cast<const T*>(x.data) + b * x.row_stride + t * x.time_stride;
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

// A tile of one sequence, ascending in time. Vectors are computed whole; a position that the tile does not have is
// unselected.
struct Tile {
  alignas(64) float rewards[kSteps];
  alignas(64) float values[kSteps + kMaxLanes];  // and one more: the next value of the last position
  alignas(64) float bootstrap[kSteps];
  alignas(64) float deltas[kSteps];  // then advantages
  alignas(64) float factors[kSteps];
  alignas(64) float deltas_returns[kSteps];  // then advantages under the lambda of the returns
  alignas(64) float factors_returns[kSteps];
  alignas(64) int32_t kept[kSteps];                 // 0 where acc does not pass, else all ones
  alignas(64) int32_t flags[kSteps];                // `selected` of those vectors that are selected in part
  alignas(64) int8_t selected[kSteps + kMaxLanes];  // all ones or 0; and one more: all ones
  alignas(64) int8_t terminated[kSteps];
  alignas(64) int8_t truncated[kSteps];
};

// A sequence on its walk.
struct Slot {
  int64_t b;
  int64_t start;
  int64_t left;  // positions that are still to be walked, the tile's included
  int n;         // positions of the tile
  float next_value;
  float acc, acc_returns;
  float factor, factor_returns;
  const float* values;  // of the tile: its own, or the input itself
  bool plain, stream;
};

enum class Selected { kNone, kSome, kAll };

// Whether inputs and outputs are more than the caches hold, so that nobody would find the outputs there.
bool past_caches(const GaeParams& p) {
  const int64_t positions = p.cu_seqlens != nullptr ? p.num_steps : p.num_seqs * p.num_steps;
  return positions * 4 * static_cast<int64_t>(sizeof(float)) > last_cache_bytes();
}

// Whether float inputs are read where they lie and no episode ends.
bool is_plain(const GaeParams& p) {
  return p.rewards.dtype == Dtype::kFloat32 && p.rewards.time_stride == 1 && p.values.dtype == Dtype::kFloat32 &&
         p.values.time_stride == 1 && (p.mask.data == nullptr || p.mask.time_stride == 1) &&
         p.terminated.data == nullptr && p.truncated.data == nullptr && !p.separate_returns;
}

// Whether sequences lie side by side in every tensor.
bool time_major(const GaeParams& p) {
  const auto fits = [](const GaeTensor& x) { return x.data == nullptr || x.row_stride == 1; };
  return p.cu_seqlens == nullptr && p.num_seqs >= kMaxLanes && p.out_row_stride == 1 && fits(p.rewards) &&
         fits(p.values) && fits(p.mask) && fits(p.terminated) && fits(p.truncated) && fits(p.bootstrap_values);
}

FASTPPO_INLINE bool aligned(const float* x) {
  return reinterpret_cast<uintptr_t>(x) % sizeof(Floats4) == 0;
}

// Sequences that are still to be walked; each thread takes the next `size` when it is done with some.
struct Shared {
  std::atomic<int64_t> next;
  int64_t end;
  int64_t size;

  // The first of those taken; -1 when there are no more.
  int64_t take() {
    const int64_t b = next.fetch_add(size, std::memory_order_relaxed);
    return b < end ? b : -1;
  }
};

// The kernel in vectors of kLanes: of the width that the instruction set has, because GCC keeps wider ones in memory.
template <int kLanes>
struct Kernel {
  using Floats = typename Simd<kLanes>::Floats;
  using Flags = typename Simd<kLanes>::Flags;
  using Bytes = typename Simd<kLanes>::Bytes;

  // kLanes bytes as flags: all ones where not 0. In two steps, for each of which every instruction set has an
  // instruction; for one from 8 to 32 bits GCC takes the bytes apart.
  static FASTPPO_INLINE Flags load_flags(const void* source) {
    typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));
    Bytes bytes;
    std::memcpy(&bytes, source, sizeof(bytes));
    return __builtin_convertvector(__builtin_convertvector(bytes != 0, Shorts), Flags);
  }

  static FASTPPO_INLINE Flags load_flags(const int32_t* source) {
    Flags flags;
    std::memcpy(&flags, source, sizeof(flags));
    return flags;
  }

  // a where a flag is set, else b: of bits, because GCC takes a select of vectors of 64 bytes apart where flags come
  // from memory.
  static FASTPPO_INLINE Floats select(const Flags& flags, const Floats& a, const Floats& b) {
    return (Floats)(((Flags)a & flags) | ((Flags)b & ~flags));
  }

  static FASTPPO_INLINE Selected selected_of(const int8_t* bytes) {
    // Whole words, of which there are one or two, or half a one.
    using Word = std::conditional_t<kLanes == 4, uint32_t, uint64_t>;
    Word words[kLanes / sizeof(Word)];
    std::memcpy(words, bytes, sizeof(words));
    Word any = 0, all = ~Word{0};
    for (const Word word : words) {
      any |= word;
      all &= word;
    }
    if (any == 0) return Selected::kNone;
    return all == ~Word{0} ? Selected::kAll : Selected::kSome;
  }

  static FASTPPO_INLINE int whole_vectors(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

  template <typename T>
  static FASTPPO_INLINE void copy(const T* source, int64_t stride, int n, float* target) {
    int j = 0;
    for (; stride == 1 && j + kLanes <= n; j += kLanes) store<kLanes>(target + j, load<kLanes>(source + j));
    for (; j < n; ++j) target[j] = to_float(source[j * stride]);
  }

  // Positions t to t + n of a float input, as float32.
  static FASTPPO_INLINE void copy_floats(const GaeTensor& x, int64_t b, int64_t t, int n, float* target) {
    switch (x.dtype) {
      case Dtype::kFloat32:
        return copy(address<float>(x, b, t), x.time_stride, n, target);
      case Dtype::kFloat16:
        return copy(address<Half>(x, b, t), x.time_stride, n, target);
      case Dtype::kBFloat16:
        return copy(address<BFloat16>(x, b, t), x.time_stride, n, target);
    }
  }

  // Positions t to t + n of flags, as all ones where not 0 and 0 where 0, and 0 up to a whole vector.
  static FASTPPO_INLINE void copy_flags(const GaeTensor& x, int64_t b, int64_t t, int n, int8_t* target) {
    const int8_t* source = address<int8_t>(x, b, t);
    int j = 0;
    for (; x.time_stride == 1 && j + kLanes <= n; j += kLanes) {
      Bytes bytes;
      std::memcpy(&bytes, source + j, sizeof(bytes));
      bytes = bytes != 0;
      std::memcpy(target + j, &bytes, sizeof(bytes));
    }
    for (; j < n; ++j) target[j] = source[j * x.time_stride] != 0 ? -1 : 0;
    for (; j % kLanes != 0; ++j) target[j] = 0;
  }

  // The next values of a vector of positions of which some are unselected, or are followed by one that is. Bits are
  // blended, because a branch would be mispredicted wherever a mask is irregular.
  static FASTPPO_INLINE void walk_next_values(const int8_t* selected, const float* values, float* next, int32_t* flags,
                                              float& next_value) {
    uint32_t carried;
    std::memcpy(&carried, &next_value, sizeof(carried));
    for (int k = kLanes - 1; k >= 0; --k) {
      uint32_t value;
      std::memcpy(&value, values + k, sizeof(value));
      const uint32_t flag = static_cast<uint32_t>(static_cast<int32_t>(selected[k]));
      std::memcpy(next + k, &carried, sizeof(carried));
      flags[k] = static_cast<int32_t>(flag);
      carried ^= (carried ^ value) & flag;
    }
    std::memcpy(&next_value, &carried, sizeof(carried));
  }

  // Elements PICK(0), PICK(1), ... of a, and of b where PICK counts on from kLanes.
  template <int (*PICK)(int), int... K>
  static FASTPPO_INLINE Floats shuffle(const Floats& a, const Floats& b, std::integer_sequence<int, K...>) {
    return __builtin_shufflevector(a, b, PICK(K)...);
  }

  template <int (*PICK)(int)>
  static FASTPPO_INLINE Floats shuffle(const Floats& a, const Floats& b) {
    return shuffle<PICK>(a, b, std::make_integer_sequence<int, kLanes>{});
  }

  static constexpr int pick_next(int k) { return k + 1; }

  template <int DISTANCE>
  static constexpr int pick_low(int k) {
    return (k & DISTANCE) == 0 ? k : k - DISTANCE + kLanes;
  }

  template <int DISTANCE>
  static constexpr int pick_high(int k) {
    return (k & DISTANCE) == 0 ? k + DISTANCE : k + kLanes;
  }

  // x from its second element on, and `last` behind it.
  static FASTPPO_INLINE Floats shifted_in(const Floats& x, float last) {
    return shuffle<pick_next>(x, Floats{} + last);
  }

  // rows[i][k] and rows[k][i] change places: squares of DISTANCE elements first, then the squares within them.
  template <int DISTANCE = kLanes / 2>
  static FASTPPO_INLINE void transpose(Floats* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & DISTANCE) != 0) continue;
      const Floats low = rows[i], high = rows[i + DISTANCE];
      rows[i] = shuffle<pick_low<DISTANCE>>(low, high);
      rows[i + DISTANCE] = shuffle<pick_high<DISTANCE>>(low, high);
    }
    if constexpr (DISTANCE > 1) transpose<DISTANCE / 2>(rows);
  }

  // `fill` of such inputs and a tile of whole vectors.
  static FASTPPO_INLINE void fill_plain(const GaeParams& p, Slot& slot, Tile& tile, int64_t t) {
    const float* rewards = address<float>(p.rewards, slot.b, t);
    const float* values = address<float>(p.values, slot.b, t);
    const int8_t* mask = p.mask.data == nullptr ? nullptr : address<int8_t>(p.mask, slot.b, t);
    const Floats zero = {}, one = zero + 1.0f, gamma = zero + p.gamma, factor = zero + slot.factor;
    const Bytes every = ~Bytes{};
    float next_value = slot.next_value;
    slot.values = values;
    for (int j = slot.n - kLanes; j >= 0; j -= kLanes) {
      Bytes bytes = every;
      if (mask != nullptr) {
        std::memcpy(&bytes, mask + j, sizeof(bytes));
        bytes = bytes != 0;
      }
      std::memcpy(tile.selected + j, &bytes, sizeof(bytes));
      const Selected kind = selected_of(tile.selected + j);
      Floats delta = -zero, factors = one;
      if (kind != Selected::kNone) {
        const Floats value = load<kLanes>(values + j);
        Floats next;
        Flags selected = Flags{} == 0;
        if (kind == Selected::kAll) {
          next = shifted_in(value, next_value);
          next_value = values[j];
        } else {
          alignas(64) float walked[kLanes];
          walk_next_values(tile.selected + j, values + j, walked, tile.flags + j, next_value);
          next = load<kLanes>(walked);
          selected = load_flags(tile.flags + j);
        }
        delta = load<kLanes>(rewards + j) + gamma * next - value;
        factors = factor;
        if (kind == Selected::kSome) {
          delta = select(selected, delta, -zero);
          factors = select(selected, factor, one);
        }
      }
      store<kLanes>(tile.deltas + j, delta);
      store<kLanes>(tile.factors + j, factors);
    }
    slot.next_value = next_value;
  }

  static FASTPPO_INLINE void fill(const GaeParams& p, Slot& slot, Tile& tile) {
    // The short tile, if there is one, is the last in time.
    const int rest = static_cast<int>(slot.left % kSteps);
    const int n = slot.n = rest != 0 ? rest : kSteps;
    const int64_t t = slot.start + slot.left - n;
    const int whole = whole_vectors(n);
    if (slot.plain && n == whole) return fill_plain(p, slot, tile, t);
    slot.values = tile.values;
    if (p.mask.data != nullptr) {
      copy_flags(p.mask, slot.b, t, n, tile.selected);
    } else {
      std::memset(tile.selected, -1, n);
      std::memset(tile.selected + n, 0, whole - n);
    }
    tile.selected[whole] = -1;
    copy_floats(p.values, slot.b, t, n, tile.values);
    tile.values[whole] = slot.next_value;
    const float* rewards = tile.rewards;
    if (p.rewards.dtype == Dtype::kFloat32 && p.rewards.time_stride == 1 && n == whole) {
      rewards = address<float>(p.rewards, slot.b, t);
    } else {
      copy_floats(p.rewards, slot.b, t, n, tile.rewards);
    }
    const bool terminated = p.terminated.data != nullptr, truncated = p.truncated.data != nullptr;
    if (terminated) copy_flags(p.terminated, slot.b, t, n, tile.terminated);
    if (truncated) {
      copy_flags(p.truncated, slot.b, t, n, tile.truncated);
      copy_floats(p.bootstrap_values, slot.b, t, n, tile.bootstrap);
    }

    const Floats zero = {}, one = zero + 1.0f, gamma = zero + p.gamma;
    const Floats factor = zero + slot.factor, factor_returns = zero + slot.factor_returns;
    float next_value = slot.next_value;
    for (int j = whole - kLanes; j >= 0; j -= kLanes) {
      const Selected kind = selected_of(tile.selected + j);
      Floats delta = -zero;
      Flags selected = {}, cut = {};
      if (kind != Selected::kNone) {
        Floats next;
        selected = selected == 0;
        if (kind == Selected::kAll && tile.selected[j + kLanes] != 0) {
          next = load<kLanes>(tile.values + j + 1);
          next_value = tile.values[j];
        } else {
          alignas(64) float walked[kLanes];
          walk_next_values(tile.selected + j, tile.values + j, walked, tile.flags + j, next_value);
          next = load<kLanes>(walked);
          selected = load_flags(tile.flags + j);
        }
        if (truncated) {
          cut = load_flags(tile.truncated + j);
          next = select(cut, load<kLanes>(tile.bootstrap + j), next);
        }
        if (terminated) {
          const Flags ended = load_flags(tile.terminated + j);
          next = select(ended, zero, next);
          cut |= ended;
        }
        delta = load<kLanes>(rewards + j) + gamma * next - load<kLanes>(tile.values + j);
        if (kind == Selected::kSome) delta = select(selected, delta, -zero);
      }
      store<kLanes>(tile.deltas + j, delta);
      store<kLanes>(tile.factors + j, select(selected, factor, one));
      if (p.separate_returns) {
        store<kLanes>(tile.deltas_returns + j, delta);
        store<kLanes>(tile.factors_returns + j, select(selected, factor_returns, one));
      }
      if (terminated || truncated) {
        const Flags kept = ~(cut & selected);
        std::memcpy(tile.kept + j, &kept, sizeof(kept));
      }
    }
    slot.next_value = next_value;
  }

  // acc = delta + factor * acc for all slots side by side, from position `steps` down; deltas become accs.
  template <int SLOTS, float (Tile::*DELTAS)[kSteps], float (Tile::*FACTORS)[kSteps], float Slot::* ACC>
  static FASTPPO_INLINE void chain(Slot* slots, Tile* tiles, int steps) {
    float acc[SLOTS];
    for (int i = 0; i < SLOTS; ++i) acc[i] = slots[i].*ACC;
    for (int j = steps - 1; j >= 0; --j) {
#pragma GCC unroll 8
      for (int i = 0; i < SLOTS; ++i) {
        acc[i] = (tiles[i].*DELTAS)[j] + (tiles[i].*FACTORS)[j] * acc[i];
        (tiles[i].*DELTAS)[j] = acc[i];
      }
    }
    for (int i = 0; i < SLOTS; ++i) slots[i].*ACC = acc[i];
  }

  // The same where acc does not pass everywhere. It is stopped by a mask of bits, not by a product, because it may be
  // NaN; in vectors, of which lane 0 alone counts, because bits of a scalar would travel through other registers.
  template <int SLOTS, float (Tile::*DELTAS)[kSteps], float (Tile::*FACTORS)[kSteps], float Slot::* ACC>
  static FASTPPO_INLINE void chain_with_cuts(Slot* slots, Tile* tiles, int steps) {
    Floats4 acc[SLOTS];
    for (int i = 0; i < SLOTS; ++i) acc[i] = Floats4{slots[i].*ACC};
    for (int j = steps - 1; j >= 0; --j) {
#pragma GCC unroll 8
      for (int i = 0; i < SLOTS; ++i) {
        const Simd<4>::Flags carried = (Simd<4>::Flags)acc[i] & Simd<4>::Flags{tiles[i].kept[j]};
        acc[i] = Floats4{(tiles[i].*DELTAS)[j]} + Floats4{(tiles[i].*FACTORS)[j]} * (Floats4)carried;
        (tiles[i].*DELTAS)[j] = acc[i][0];
      }
    }
    for (int i = 0; i < SLOTS; ++i) slots[i].*ACC = acc[i][0];
  }

  // What a slot's tile is shorter by than the others', as unselected positions.
  static FASTPPO_INLINE void pad(const GaeParams& p, Tile& tile, int n, int steps) {
    const Floats zero = {};
    for (int j = whole_vectors(n); j < steps; j += kLanes) {
      store<kLanes>(tile.deltas + j, -zero);
      store<kLanes>(tile.factors + j, zero + 1.0f);
      if (p.separate_returns) {
        store<kLanes>(tile.deltas_returns + j, -zero);
        store<kLanes>(tile.factors_returns + j, zero + 1.0f);
      }
      std::memset(tile.kept + j, -1, sizeof(int32_t) * kLanes);
    }
  }

  static FASTPPO_INLINE void store_row(const float* row, int n, float* out, int64_t time_stride) {
    for (int j = 0; j < n; ++j) out[j * time_stride] = row[j];
  }

  // Without reading the lines that are written. 16 bytes at a time, which every x86 has; neighbours are combined.
  static FASTPPO_INLINE void store_past_caches(float* target, const Floats& x) {
#ifdef FASTPPO_X86
    for (int k = 0; k < kLanes; k += 4) _mm_stream_ps(target + k, load4(reinterpret_cast<const float*>(&x) + k));
#else
    store<kLanes>(target, x);
#endif
  }

  static FASTPPO_INLINE void emit(const GaeParams& p, const Slot& slot, Tile& tile) {
    const int64_t t = slot.start + slot.left - slot.n;
    const int64_t offset = slot.b * p.out_row_stride + t * p.out_time_stride;
    const bool direct = p.out_time_stride == 1 && slot.n % kLanes == 0;
    float* advantages = direct ? p.advantages + offset : tile.deltas;
    float* returns = direct ? p.returns + offset : tile.rewards;
    const bool stream = direct && slot.stream && aligned(advantages) && aligned(returns);
    const float* of_returns = p.separate_returns ? tile.deltas_returns : tile.deltas;
    const Floats zero = {};
    for (int j = 0; j < slot.n; j += kLanes) {
      const Selected kind = selected_of(tile.selected + j);
      Floats advantage = zero, sum = zero;
      if (kind != Selected::kNone) {
        advantage = load<kLanes>(tile.deltas + j);
        sum = load<kLanes>(of_returns + j) + load<kLanes>(slot.values + j);
      }
      if (kind == Selected::kSome) {
        const Flags selected = load_flags(tile.flags + j);
        advantage = select(selected, advantage, zero);
        sum = select(selected, sum, zero);
      }
      if (stream) {
        store_past_caches(advantages + j, advantage);
        store_past_caches(returns + j, sum);
        continue;
      }
      store<kLanes>(advantages + j, advantage);
      store<kLanes>(returns + j, sum);
    }
    if (direct) return;
    store_row(advantages, slot.n, p.advantages + offset, p.out_time_stride);
    store_row(returns, slot.n, p.returns + offset, p.out_time_stride);
  }

  // Sequence b from its end.
  static FASTPPO_INLINE void begin(const GaeParams& p, int64_t b, bool plain, bool stream, Slot& slot) {
    int64_t start = 0, stop = p.num_steps;
    if (p.cu_seqlens != nullptr && p.cu_seqlens_int64) {
      start = static_cast<const int64_t*>(p.cu_seqlens)[b];
      stop = static_cast<const int64_t*>(p.cu_seqlens)[b + 1];
    } else if (p.cu_seqlens != nullptr) {
      start = static_cast<const int32_t*>(p.cu_seqlens)[b];
      stop = static_cast<const int32_t*>(p.cu_seqlens)[b + 1];
    }
    slot = Slot{};
    slot.b = b;
    slot.plain = plain;
    slot.stream = stream;
    slot.start = start;
    slot.left = stop - start;
    slot.factor = p.gamma * (p.lam_per_seq != nullptr ? p.lam_per_seq[b] : p.lam);
    slot.factor_returns = p.gamma * (p.lam_returns_per_seq != nullptr ? p.lam_returns_per_seq[b] : p.lam_returns);
    if (p.final_values.data != nullptr) slot.next_value = load_float(p.final_values, b, 0);
  }

  template <int SLOTS>
  static FASTPPO_INLINE void walk_slots(const GaeParams& p, Shared& sequences) {
    const bool cuts = p.terminated.data != nullptr || p.truncated.data != nullptr;
    const bool plain = is_plain(p), stream = past_caches(p);
    Slot slots[SLOTS] = {};
    Tile tiles[SLOTS];
    for (;;) {
      int steps = 0;
#pragma GCC unroll 1
      for (int i = 0; i < SLOTS; ++i) {
        slots[i].left -= slots[i].n;
        slots[i].n = 0;
        for (int64_t b; slots[i].left == 0 && (b = sequences.take()) >= 0;) begin(p, b, plain, stream, slots[i]);
        if (slots[i].left > 0) fill(p, slots[i], tiles[i]);
        steps = std::max(steps, whole_vectors(slots[i].n));
      }
      if (steps == 0) break;
#pragma GCC unroll 1
      for (int i = 0; i < SLOTS; ++i) pad(p, tiles[i], slots[i].n, steps);
      if (cuts) {
        chain_with_cuts<SLOTS, &Tile::deltas, &Tile::factors, &Slot::acc>(slots, tiles, steps);
      } else {
        chain<SLOTS, &Tile::deltas, &Tile::factors, &Slot::acc>(slots, tiles, steps);
      }
      if (p.separate_returns && cuts) {
        chain_with_cuts<SLOTS, &Tile::deltas_returns, &Tile::factors_returns, &Slot::acc_returns>(slots, tiles, steps);
      } else if (p.separate_returns) {
        chain<SLOTS, &Tile::deltas_returns, &Tile::factors_returns, &Slot::acc_returns>(slots, tiles, steps);
      }
#pragma GCC unroll 1
      for (int i = 0; i < SLOTS; ++i) emit(p, slots[i], tiles[i]);
    }
#ifdef FASTPPO_X86
    _mm_sfence();  // what went past the caches is there before another thread is told so
#endif
  }

  // kLanes padded sequences of plain inputs on their walk: one row each.
  struct Rows {
    const float *rewards, *values;
    const int8_t* mask;  // or null
    float *advantages, *returns;
    int64_t rewards_stride, values_stride, mask_stride, out_stride;
    Floats acc, factor;  // an element per row
    float next_value[kLanes];
    bool stream;
  };

  // `selected` of positions t to t + kLanes of row i.
  static FASTPPO_INLINE Bytes selected_bytes(const Rows& rows, int i, int64_t t) {
    Bytes bytes = ~Bytes{};
    if (rows.mask != nullptr) {
      std::memcpy(&bytes, rows.mask + i * rows.mask_stride + t, sizeof(bytes));
      bytes = bytes != 0;
    }
    return bytes;
  }

  static FASTPPO_INLINE void write(const Rows& rows, int i, int64_t t, const Floats& advantage, const Floats& sum) {
    float* advantages = rows.advantages + i * rows.out_stride + t;
    float* returns = rows.returns + i * rows.out_stride + t;
    if (rows.stream) {
      store_past_caches(advantages, advantage);
      store_past_caches(returns, sum);
    } else {
      store<kLanes>(advantages, advantage);
      store<kLanes>(returns, sum);
    }
  }

  // Positions t to t + kLanes of all rows, every one of them selected. Deltas are computed along time; transposed,
  // they are one chain with an element per row; transposed again, they are written along time.
  static FASTPPO_INLINE void walk_selected_square(Rows& rows, int64_t t, const Floats& gamma) {
    Floats square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const float* values = rows.values + i * rows.values_stride + t;
      const Floats value = load<kLanes>(values);
      const Floats next = shifted_in(value, rows.next_value[i]);
      rows.next_value[i] = values[0];
      square[i] = load<kLanes>(rows.rewards + i * rows.rewards_stride + t) + gamma * next - value;
    }
    transpose(square);
#pragma GCC unroll 16
    for (int k = kLanes - 1; k >= 0; --k) square[k] = rows.acc = square[k] + rows.factor * rows.acc;
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      write(rows, i, t, square[i], square[i] + load<kLanes>(rows.values + i * rows.values_stride + t));
    }
  }

  // The same where some are selected.
  static FASTPPO_INLINE void walk_mixed_square(Rows& rows, int64_t t, const Floats& gamma) {
    const Floats zero = {}, one = zero + 1.0f;
    Floats square[kLanes], factors[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      alignas(64) float next[kLanes];
      alignas(64) int32_t flags[kLanes];
      alignas(64) int8_t bytes[kLanes];
      const Bytes selected_of_row = selected_bytes(rows, i, t);
      std::memcpy(bytes, &selected_of_row, sizeof(bytes));
      const float* values = rows.values + i * rows.values_stride + t;
      walk_next_values(bytes, values, next, flags, rows.next_value[i]);
      const Flags selected = load_flags(flags);
      const Floats reward = load<kLanes>(rows.rewards + i * rows.rewards_stride + t);
      square[i] = select(selected, reward + gamma * load<kLanes>(next) - load<kLanes>(values), -zero);
      factors[i] = select(selected, zero + rows.factor[i], one);
    }
    transpose(square);
    transpose(factors);
    for (int k = kLanes - 1; k >= 0; --k) square[k] = rows.acc = square[k] + factors[k] * rows.acc;
    transpose(square);
    for (int i = 0; i < kLanes; ++i) {
      const Flags selected = load_flags(rows.mask + i * rows.mask_stride + t);
      const Floats sum = square[i] + load<kLanes>(rows.values + i * rows.values_stride + t);
      write(rows, i, t, select(selected, square[i], zero), select(selected, sum, zero));
    }
  }

  static FASTPPO_INLINE void walk_square(Rows& rows, int64_t t, const Floats& gamma) {
    Bytes any = {}, all = ~any;
    for (int i = 0; i < kLanes; ++i) {
      const Bytes selected = selected_bytes(rows, i, t);
      any |= selected;
      all &= selected;
    }
    if (selected_of(reinterpret_cast<const int8_t*>(&all)) == Selected::kAll) {
      walk_selected_square(rows, t, gamma);
    } else if (selected_of(reinterpret_cast<const int8_t*>(&any)) != Selected::kNone) {
      walk_mixed_square(rows, t, gamma);
    } else {
      for (int i = 0; i < kLanes; ++i) write(rows, i, t, Floats{}, Floats{});
    }
  }

  // kLanes padded sequences of plain inputs from b on.
  static FASTPPO_INLINE void walk_rows(const GaeParams& p, int64_t b, bool stream) {
    Rows rows{};
    rows.rewards = address<float>(p.rewards, b, 0);
    rows.values = address<float>(p.values, b, 0);
    rows.mask = p.mask.data == nullptr ? nullptr : address<int8_t>(p.mask, b, 0);
    rows.advantages = p.advantages + b * p.out_row_stride;
    rows.returns = p.returns + b * p.out_row_stride;
    rows.rewards_stride = p.rewards.row_stride;
    rows.values_stride = p.values.row_stride;
    rows.mask_stride = p.mask.row_stride;
    rows.out_stride = p.out_row_stride;
    for (int i = 0; i < kLanes; ++i) {
      rows.factor[i] = p.gamma * (p.lam_per_seq != nullptr ? p.lam_per_seq[b + i] : p.lam);
      rows.next_value[i] = p.final_values.data != nullptr ? load_float(p.final_values, b + i, 0) : 0.0f;
    }
    const Floats gamma = Floats{} + p.gamma;
    // Aligned writes where rows start so: what does not fill a square is walked where time ends, in a copy.
    const int64_t whole = p.num_steps / kLanes * kLanes;
    if (whole < p.num_steps) walk_rest(rows, whole, static_cast<int>(p.num_steps - whole), gamma);
    rows.stream = stream && p.out_row_stride % kLanes == 0 && aligned(p.advantages) && aligned(p.returns);
    for (int64_t t = whole - kLanes; t >= 0; t -= kLanes) walk_square(rows, t, gamma);
  }

  // Positions t to t + n of all rows, fewer than a square has, as one whose others are unselected.
  static FASTPPO_INLINE void walk_rest(Rows& rows, int64_t t, int n, const Floats& gamma) {
    alignas(64) float rewards[kLanes * kLanes] = {}, values[kLanes * kLanes] = {};
    alignas(64) float advantages[kLanes * kLanes], returns[kLanes * kLanes];
    alignas(64) int8_t mask[kLanes * kLanes] = {};
    for (int i = 0; i < kLanes; ++i) {
      for (int k = 0; k < n; ++k) {
        rewards[i * kLanes + k] = rows.rewards[i * rows.rewards_stride + t + k];
        values[i * kLanes + k] = rows.values[i * rows.values_stride + t + k];
        mask[i * kLanes + k] = rows.mask == nullptr || rows.mask[i * rows.mask_stride + t + k] != 0;
      }
    }
    Rows copy = rows;
    copy.rewards = rewards, copy.values = values, copy.mask = mask;
    copy.advantages = advantages, copy.returns = returns;
    copy.rewards_stride = copy.values_stride = copy.mask_stride = copy.out_stride = kLanes;
    walk_square(copy, 0, gamma);
    rows.acc = copy.acc;
    for (int i = 0; i < kLanes; ++i) {
      rows.next_value[i] = copy.next_value[i];
      store_row(advantages + i * kLanes, n, rows.advantages + i * rows.out_stride + t, 1);
      store_row(returns + i * kLanes, n, rows.returns + i * rows.out_stride + t, 1);
    }
  }

  // Positions t of kLanes sequences from b on, which lie side by side in memory.
  static FASTPPO_INLINE Floats load_floats(const GaeTensor& x, int64_t b, int64_t t) {
    switch (x.dtype) {
      case Dtype::kFloat16:
        return load<kLanes>(address<Half>(x, b, t));
      case Dtype::kBFloat16:
        return load<kLanes>(address<BFloat16>(x, b, t));
      default:
        return load<kLanes>(address<float>(x, b, t));
    }
  }

  // Those sequences, one per lane.
  static FASTPPO_INLINE void walk_lanes(const GaeParams& p, int64_t b) {
    const Floats zero = {}, gamma = zero + p.gamma;
    Floats factor, factor_returns, acc = zero, acc_returns = zero, next_value = zero;
    for (int lane = 0; lane < kLanes; ++lane) {
      factor[lane] = p.gamma * (p.lam_per_seq != nullptr ? p.lam_per_seq[b + lane] : p.lam);
      factor_returns[lane] =
          p.gamma * (p.lam_returns_per_seq != nullptr ? p.lam_returns_per_seq[b + lane] : p.lam_returns);
      if (p.final_values.data != nullptr) next_value[lane] = load_float(p.final_values, b + lane, 0);
    }
    for (int64_t t = p.num_steps - 1; t >= 0; --t) {
      const Floats reward = load_floats(p.rewards, b, t), value = load_floats(p.values, b, t);
      const Flags selected = p.mask.data != nullptr ? load_flags(address<int8_t>(p.mask, b, t)) : Flags{} == 0;
      Floats next = next_value;
      Flags cut = {};
      if (p.truncated.data != nullptr) {
        cut = load_flags(address<int8_t>(p.truncated, b, t));
        next = select(cut, load_floats(p.bootstrap_values, b, t), next);
      }
      if (p.terminated.data != nullptr) {
        const Flags ended = load_flags(address<int8_t>(p.terminated, b, t));
        next = select(ended, zero, next);
        cut |= ended;
      }
      const Floats delta = reward + gamma * next - value;
      const Floats advantage = delta + factor * select(cut, zero, acc);
      Floats of_returns = advantage;
      if (p.separate_returns) {
        of_returns = delta + factor_returns * select(cut, zero, acc_returns);
        acc_returns = select(selected, of_returns, acc_returns);
      }
      acc = select(selected, advantage, acc);
      next_value = select(selected, value, next_value);
      const int64_t offset = b + t * p.out_time_stride;
      store<kLanes>(p.advantages + offset, select(selected, advantage, zero));
      store<kLanes>(p.returns + offset, select(selected, of_returns + value, zero));
    }
  }

  // Rows `begin` to `end` of plain inputs, a multiple of kMinLanes, in vectors of as many lanes as there are rows.
  static FASTPPO_INLINE void walk_group(const GaeParams& p, int64_t begin, int64_t end, bool stream) {
    for (; end - begin >= kLanes; begin += kLanes) walk_rows(p, begin, stream);
    if constexpr (kLanes > kMinLanes) {
      if (begin < end) Kernel<kLanes / 2>::walk_group(p, begin, end, stream);
    }
  }

  static FASTPPO_INLINE void walk(const GaeParams& p, Shared& groups, Shared& sequences, bool few) {
    const bool side_by_side = time_major(p), stream = past_caches(p);
    for (int64_t begin; (begin = groups.take()) >= 0;) {
      const int64_t end = std::min(begin + groups.size, groups.end);
      if (!side_by_side) {
        walk_group(p, begin, end, stream);
        continue;
      }
      for (int64_t b = begin; b < end; b += kLanes) walk_lanes(p, b);
    }
    if (few) {
      walk_slots<4>(p, sequences);
    } else {
      walk_slots<8>(p, sequences);
    }
  }
};

void walk_baseline(const GaeParams& p, Shared& groups, Shared& sequences, bool few) {
  Kernel<4>::walk(p, groups, sequences, few);
}

#ifdef FASTPPO_X86
FASTPPO_TARGET_AVX2 void walk_avx2(const GaeParams& p, Shared& groups, Shared& sequences, bool few) {
  Kernel<8>::walk(p, groups, sequences, few);
}

FASTPPO_TARGET_AVX512 void walk_avx512(const GaeParams& p, Shared& groups, Shared& sequences, bool few) {
  Kernel<16>::walk(p, groups, sequences, few);
}
#endif

}  // namespace

void gae_cpu(const GaeParams& params, int num_threads) {
  if (params.num_seqs == 0 || params.num_steps == 0) return;
  auto walk_some = walk_baseline;
#ifdef FASTPPO_X86
  if (cpu_isa() == CpuIsa::kAvx2) walk_some = walk_avx2;
  if (cpu_isa() == CpuIsa::kAvx512) walk_some = walk_avx512;
#endif
  const int64_t positions = params.cu_seqlens != nullptr ? params.num_steps : params.num_seqs * params.num_steps;
  const int64_t most = std::min<int64_t>(num_threads, params.num_seqs);
  const int64_t tasks = std::clamp<int64_t>(positions / kMinTokensPerTask, 1, most);
  int64_t group = kMaxLanes, grouped = 0;  // sequences of a group, and of all groups
  if (time_major(params)) {
    grouped = params.num_seqs / group * group;
  } else if (params.cu_seqlens == nullptr && params.out_time_stride == 1 && is_plain(params)) {
    // The largest of which every thread has one.
    while (group > kMinLanes && params.num_seqs / group < tasks) group /= 2;
    grouped = params.num_seqs / kMinLanes * kMinLanes;
  }
  Shared groups{{0}, grouped, group}, sequences{{grouped}, params.num_seqs, 1};
  // Where there are fewer sequences than all threads have slots, each leaves the others theirs.
  const bool few = params.num_seqs - sequences.next <= 4 * tasks;
  parallel_for(tasks, num_threads, [&](int64_t) { walk_some(params, groups, sequences, few); });
}

}  // namespace fastppo
