// Kernels for AVX2 with FMA and F16C (Intel from Haswell on, AMD from Zen on).
#define OCTAVO_ISA avx2
#include "simd_avx2.h"
#include "kernels/all.inl"
