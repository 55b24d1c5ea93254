// The kernels of one instruction set: for each operation, a function that appends its phases for a step.
#pragma once
#include "program.h"
#include "sampling.h"

namespace octavo {

struct PhaseSink {  // keeps the growth of a std::vector out of the instruction sets' translation units
  PhaseList *list;
  void (*add)(PhaseList *, Phase);
  void operator()(Phase phase) const { add(list, phase); }
};

struct KernelTable {
  const char *name;
#define OCTAVO_PLAN_MEMBER(Op) void (*plan_##Op)(const Op &, const Step &, PhaseSink);
  OCTAVO_OPERATIONS(OCTAVO_PLAN_MEMBER)
#undef OCTAVO_PLAN_MEMBER
  void (*sample_row)(const SampleArgs &, int row, void *scratch);
  void (*score_row)(const SampleArgs &, int row, void *scratch);
  void (*read_row)(const TensorView &, int row, float *out);
};

const KernelTable &kernels_portable();
#if OCTAVO_X86
const KernelTable &kernels_avx2();
const KernelTable &kernels_avx512();
const KernelTable &kernels_avx512_vnni();
const KernelTable &kernels_avx512_bf16();
#endif

// Instruction sets that this build has and this machine can run, best first.
std::vector<const KernelTable *> available_kernels();

inline constexpr size_t kScratchBytes = 1 << 19;  // a thread's private memory for operations

}  // namespace octavo
