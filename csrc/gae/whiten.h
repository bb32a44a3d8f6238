// Whitening: what fastppo/ops/_whiten.py hands to the kernel. All arrays are contiguous, of `size` elements.
#pragma once

#include <cstdint>

namespace fastppo {

// Of the selected elements.
struct Moments {
  double count;
  double mean;
  double squares;  // sum of (x - mean)^2
};

struct WhitenParams {
  const float* x;
  const int8_t* mask;  // selected where not 0; null: everywhere
  int64_t size;
  Moments* moments;
  float* out;
  double eps;
};

// Fills `moments`, whatever they were.
void moments_cpu(const WhitenParams& params, int num_threads);

// Fills `out` with (x - mean) / sqrt(squares / count + eps), and 0 where unselected, by the moments given.
void whiten_cpu(const WhitenParams& params, int num_threads);

#ifdef FASTPPO_HAS_CUDA
// The same on a GPU, where `moments` lies too.
void whiten_cuda(const WhitenParams& params, int device, uint64_t stream);

// Fills `merged` with the moments of all of `count` parts, on the current device.
void merge_moments_cuda(const Moments* parts, int64_t count, Moments* merged, uint64_t stream);
#endif

}  // namespace fastppo
