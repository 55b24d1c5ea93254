// Kernels for AVX-512 with VNNI and BF16 (Intel from Cooper Lake and Sapphire Rapids on, AMD from Zen 4 on).
#define OCTAVO_ISA avx512_bf16
#include "simd_avx512.h"
#include "kernels/all.inl"
