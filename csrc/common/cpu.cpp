#include "common/cpu.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "common/macros.h"

#ifdef __linux__
#include <unistd.h>
#endif

namespace fastppo {
namespace {

CpuIsa best_isa() {
#ifdef FASTPPO_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return CpuIsa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return CpuIsa::kAvx2;
#endif
  return CpuIsa::kBaseline;
}

CpuIsa chosen_isa() {
  const CpuIsa best = best_isa();
  const char* name = std::getenv("FASTPPO_CPU_ISA");
  if (name == nullptr || *name == '\0') return best;
  for (CpuIsa isa : {CpuIsa::kBaseline, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (std::strcmp(name, cpu_isa_name(isa)) == 0 && isa <= best) return isa;
  }
  throw std::invalid_argument(
      std::string("FASTPPO_CPU_ISA must be one of baseline, avx2, avx512, and no more than this machine has, ") +
      cpu_isa_name(best) + "; got '" + name + "'");
}

}  // namespace

CpuIsa cpu_isa() {
  static const CpuIsa isa = chosen_isa();
  return isa;
}

const char* cpu_isa_name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kAvx512:
      return "avx512";
    case CpuIsa::kAvx2:
      return "avx2";
    default:
      return "baseline";
  }
}

int64_t last_cache_bytes() {
  static const int64_t bytes = [] {
    int64_t found = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
    found = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    constexpr int64_t usual = int64_t{32} << 20;
    return found > 0 ? std::min(found, usual) : usual;
  }();
  return bytes;
}

}  // namespace fastppo
