// What this machine's processor is to the CPU kernels: the instruction set they use, and its cache.
#pragma once

#include <cstdint>

namespace fastppo {

enum class CpuIsa { kBaseline, kAvx2, kAvx512 };

// The best that this machine has, or a lower one that the environment variable FASTPPO_CPU_ISA names
// ("baseline", "avx2", "avx512"); read once. Throws std::invalid_argument for any other name.
CpuIsa cpu_isa();

const char* cpu_isa_name(CpuIsa isa);

// The last level of this machine's caches: what a few cores may count on, 32 MiB at most or where the system does not
// tell.
int64_t last_cache_bytes();

}  // namespace fastppo
