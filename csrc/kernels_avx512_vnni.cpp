// Kernels for AVX-512 with VNNI, without BF16 (Intel Cascade Lake, Ice Lake, Tiger Lake, Rocket Lake).
#define OCTAVO_ISA avx512_vnni
#include "simd_avx512.h"
#include "kernels/all.inl"
