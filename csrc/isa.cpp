#include "kernel_table.h"

namespace octavo {

std::vector<const KernelTable *> available_kernels() {
  std::vector<const KernelTable *> found;
#if OCTAVO_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
    found.push_back(&kernels_avx512_bf16());
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) found.push_back(&kernels_avx2());
#endif
  found.push_back(&kernels_portable());
  return found;
}

}  // namespace octavo
