// All kernels of one instruction set; included once by its translation unit after the vector vocabulary.
#include "kernel_table.h"
#include "kernels/math.inl"
#include "kernels/store.inl"
#include "kernels/formats.inl"
#include "kernels/rows.inl"
#include "kernels/linear.inl"
#include "kernels/experts.inl"
#include "kernels/attention.inl"
#include "kernels/sample.inl"

namespace octavo::OCTAVO_ISA {

static void sample_row_untyped(const SampleArgs &args, int row, void *scratch) {
  sample_row(args, row, static_cast<SampleScratch *>(scratch));
}

static void score_row_untyped(const SampleArgs &args, int row, void *scratch) {
  score_row(args, row, static_cast<SampleScratch *>(scratch));
}

#define OCTAVO_STRING(x) OCTAVO_STRING_(x)
#define OCTAVO_STRING_(x) #x
static const KernelTable table = {
    OCTAVO_STRING(OCTAVO_ISA),
#define OCTAVO_PLAN_ENTRY(Op) static_cast<void (*)(const Op &, const Step &, PhaseSink)>(&plan),
    OCTAVO_OPERATIONS(OCTAVO_PLAN_ENTRY)
#undef OCTAVO_PLAN_ENTRY
        & sample_row_untyped,
    &score_row_untyped,
    &read_row,
};

}  // namespace octavo::OCTAVO_ISA

namespace octavo {
#define OCTAVO_JOIN(a, b) OCTAVO_JOIN_(a, b)
#define OCTAVO_JOIN_(a, b) a##b
const KernelTable &OCTAVO_JOIN(kernels_, OCTAVO_ISA)() { return OCTAVO_ISA::table; }
}  // namespace octavo
