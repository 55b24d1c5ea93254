// Kernels for AVX-512 without VNNI and BF16 (Intel Skylake-X and Skylake-SP).
#define OCTAVO_ISA avx512
#include "simd_avx512.h"
#include "kernels/all.inl"
