// Which instruction set the CPU kernels of this process use.
#pragma once

namespace fastppo {

enum class CpuIsa { kBaseline, kAvx2, kAvx512 };

// The best that this machine has, or a lower one that the environment variable FASTPPO_CPU_ISA names
// ("baseline", "avx2", "avx512"); read once. Throws std::invalid_argument for any other name.
CpuIsa cpu_isa();

const char* cpu_isa_name(CpuIsa isa);

}  // namespace fastppo
