// CPU kernel of the losses' backward: one multiplication per token, and the rounding to the input's dtype.
#include <algorithm>

#include "common/cpu.h"
#include "common/simd.h"
#include "common/thread_pool.h"
#include "loss_grad/loss_grad.h"

namespace fastppo {
namespace {

constexpr int64_t kTaskTokens = 16384;

template <int LANES, typename T>
FASTPPO_INLINE void scale(const LossGradParams& p, int64_t first, int64_t last) {
  using Floats = typename Simd<LANES>::Floats;
  T* grad = static_cast<T*>(p.grad);
  for (int64_t i = first; i < last; i += LANES) {
    const int64_t count = std::min<int64_t>(LANES, last - i);
    Floats x = {}, nll = {};
    T out[LANES];
    const bool whole = count == LANES;
    if (whole) {
      x = load<LANES>(p.kept + i);
      if (p.nll_kept != nullptr) nll = load<LANES>(p.nll_kept + i);
    } else {
      for (int64_t k = 0; k < count; ++k) {
        x[k] = p.kept[i + k];
        if (p.nll_kept != nullptr) nll[k] = p.nll_kept[i + k];
      }
    }
    x *= p.factor;
    if (p.nll_kept != nullptr) x += nll * p.nll_factor;
    store<LANES>(whole ? grad + i : out, x);
    for (int64_t k = 0; k < count && !whole; ++k) grad[i + k] = out[k];
  }
}

template <int LANES>
FASTPPO_INLINE void scale_any(const LossGradParams& p, int64_t first, int64_t last) {
  switch (p.dtype) {
    case Dtype::kFloat32:
      return scale<LANES, float>(p, first, last);
    case Dtype::kFloat16:
      return scale<LANES, Half>(p, first, last);
    case Dtype::kBFloat16:
      return scale<LANES, BFloat16>(p, first, last);
  }
}

void scale_baseline(const LossGradParams& p, int64_t first, int64_t last) {
  scale_any<4>(p, first, last);
}

#ifdef FASTPPO_X86
FASTPPO_TARGET_AVX2 void scale_avx2(const LossGradParams& p, int64_t first, int64_t last) {
  scale_any<8>(p, first, last);
}
#endif

}  // namespace

void loss_grad_cpu(const LossGradParams& p, int num_threads) {
  auto* scale_range = scale_baseline;
#ifdef FASTPPO_X86
  if (cpu_isa() != CpuIsa::kBaseline) scale_range = scale_avx2;  // memory bounds it: AVX-512 would add nothing
#endif
  parallel_for((p.tokens + kTaskTokens - 1) / kTaskTokens, num_threads,
               [&](int64_t task) { scale_range(p, task * kTaskTokens, std::min((task + 1) * kTaskTokens, p.tokens)); });
}

}  // namespace fastppo
