// Compiler attributes behind one name each.
#pragma once

// Forced, because a body that is inlined into a function with a target attribute is compiled for that target.
#define FASTPPO_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
#define FASTPPO_X86 1
#define FASTPPO_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define FASTPPO_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))
#endif
