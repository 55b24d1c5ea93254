// Kernels for any processor.
#define OCTAVO_ISA portable
#include "simd_portable.h"
#include "kernels/all.inl"
