// Large outputs: memory in huge pages, and copies that bypass the cache.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/macros.h"

#ifdef FASTPPO_X86
#include <emmintrin.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace fastppo {

// Asks for huge pages under an output that nobody has touched yet: one page fault per 2 MiB in place of 512, which cost
// more than the writing. Advice that a system may ignore.
inline void advise_huge_pages(void* data, int64_t bytes) {
#ifdef __linux__
  const uintptr_t page = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (begin < end) static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
#else
  static_cast<void>(data);
  static_cast<void>(bytes);
#endif
}

// Like memcpy; with `streamed` the target's lines are written without being read first.
FASTPPO_INLINE void copy(void* target, const void* source, int64_t bytes, bool streamed) {
#ifdef FASTPPO_X86
  if (streamed && bytes >= 16) {
    char* to = static_cast<char*>(target);
    const char* from = static_cast<const char*>(source);
    const int64_t head = -reinterpret_cast<intptr_t>(to) & 15;
    std::memcpy(to, from, head);
    int64_t i = head;
    for (; i + 16 <= bytes; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
    std::memcpy(to + i, from + i, bytes - i);
    return;
  }
#endif
  static_cast<void>(streamed);
  std::memcpy(target, source, bytes);
}

// Orders streamed copies before whatever tells another thread that they are done.
FASTPPO_INLINE void finish_streaming() {
#ifdef FASTPPO_X86
  _mm_sfence();
#endif
}

}  // namespace fastppo
