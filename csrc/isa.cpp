#include "kernel_table.h"

namespace octavo {

std::vector<const KernelTable *> available_kernels() {
  std::vector<const KernelTable *> found;
#if OCTAVO_X86
  // These ask the processor and, by XGETBV, whether the system saves the registers when it switches tasks.
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512dq");
  bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni && __builtin_cpu_supports("avx512bf16")) found.push_back(&kernels_avx512_bf16());
  if (vnni) found.push_back(&kernels_avx512_vnni());
  if (avx512) found.push_back(&kernels_avx512());
  if (avx2) found.push_back(&kernels_avx2());
#endif
  found.push_back(&kernels_portable());
  return found;
}

}  // namespace octavo
