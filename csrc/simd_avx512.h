// The vector vocabulary on AVX-512 F, BW, VL and DQ; with VNNI and BF16 where its translation unit is compiled with them.
// simd_portable.h documents the names.
#pragma once
#if !(__AVX512F__ && __AVX512BW__ && __AVX512VL__ && __AVX512DQ__)
#error "the translation unit is not compiled for AVX-512"
#endif
#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#define OCTAVO_INLINE static inline __attribute__((always_inline))
#define OCTAVO_PRAGMA(text) _Pragma(#text)
#define OCTAVO_UNROLL(n) OCTAVO_PRAGMA(GCC unroll n)

namespace octavo::OCTAVO_ISA {

using F32 = __m512;
typedef int32_t I32 __attribute__((vector_size(64)));  // not __m512i: operators on that add 64-bit lanes

inline constexpr int kLanes = 16;
inline constexpr int kRowTile = 6;
inline constexpr int kQueryTile = 6;

OCTAVO_INLINE F32 set1(float x) { return _mm512_set1_ps(x); }
OCTAVO_INLINE I32 set1(int32_t x) { return (I32)_mm512_set1_epi32(x); }
OCTAVO_INLINE F32 zero() { return _mm512_setzero_ps(); }
OCTAVO_INLINE F32 load(const float *p) { return _mm512_loadu_ps(p); }
OCTAVO_INLINE void store(float *p, F32 v) { _mm512_storeu_ps(p, v); }
OCTAVO_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
OCTAVO_INLINE F32 load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
OCTAVO_INLINE void store_n(float *p, F32 v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
OCTAVO_INLINE I32 load_words(const void *p) { return (I32)_mm512_loadu_si512(p); }
OCTAVO_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
OCTAVO_INLINE F32 vmax(F32 a, F32 b) { return _mm512_max_ps(a, b); }
OCTAVO_INLINE F32 vmin(F32 a, F32 b) { return _mm512_min_ps(a, b); }
OCTAVO_INLINE F32 where_less(F32 a, F32 b, F32 yes, F32 no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }
OCTAVO_INLINE F32 bits_to_f32(I32 v) { return (F32)v; }
OCTAVO_INLINE F32 to_f32(I32 v) { return _mm512_cvtepi32_ps((__m512i)v); }
OCTAVO_INLINE F32 round_nearest(F32 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
OCTAVO_INLINE I32 to_i32(F32 x) { return (I32)_mm512_cvtps_epi32(x); }
OCTAVO_INLINE F32 abs(F32 x) { return _mm512_abs_ps(x); }
OCTAVO_INLINE I32 shift_left_23(I32 v) { return v << 23; }
OCTAVO_INLINE F32 lane_index() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

OCTAVO_INLINE float reduce_add(F32 v) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
OCTAVO_INLINE float reduce_max(F32 v) { return _mm512_reduce_max_ps(v); }
OCTAVO_INLINE int32_t reduce_add(I32 v) { return _mm512_reduce_add_epi32((__m512i)v); }
OCTAVO_INLINE void store_int8(int8_t *p, I32 v) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtsepi32_epi8((__m512i)v)); }

OCTAVO_INLINE __m256i load_256(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
OCTAVO_INLINE __m128i load_128(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
OCTAVO_INLINE I32 widen_u8(const void *p) { return (I32)_mm512_cvtepu8_epi32(load_128(p)); }
OCTAVO_INLINE I32 widen_i8(const void *p) { return (I32)_mm512_cvtepi8_epi32(load_128(p)); }
OCTAVO_INLINE F32 load_bf16(const uint16_t *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16)); }
OCTAVO_INLINE __m256i bf16_bits(F32 x) {  // nearest even
#if __AVX512BF16__
  return std::bit_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
  I32 u = (I32)x, high = (I32)_mm512_srli_epi32((__m512i)u, 16);
  I32 rounded = (I32)_mm512_srli_epi32((__m512i)(u + 0x7fff + (high & 1)), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32((__m512i)rounded, nan, (__m512i)high, _mm512_set1_epi32(64)));
#endif
}
OCTAVO_INLINE void store_bf16(uint16_t *p, F32 x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), bf16_bits(x)); }
OCTAVO_INLINE F32 load_f16(const uint16_t *p) { return _mm512_cvtph_ps(load_256(p)); }
OCTAVO_INLINE void store_f16(uint16_t *p, F32 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

OCTAVO_INLINE F32 load_2x8(const float *a, const float *b) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(a)), _mm256_loadu_ps(b), 1);
}
OCTAVO_INLINE F32 load_f16_2x8(const uint16_t *a, const uint16_t *b) { return _mm512_cvtph_ps(_mm256_set_m128i(load_128(b), load_128(a))); }
OCTAVO_INLINE I32 load_pairs_2x8(const uint16_t *a, const uint16_t *b) {
  return (I32)_mm512_inserti64x4(_mm512_castsi256_si512(load_256(a)), load_256(b), 1);
}

#if __AVX512VNNI__
inline constexpr bool kNarrowSums = false;
inline constexpr int kLargeZero = 0;
OCTAVO_INLINE I32 dot_large(I32 acc, I32 codes, int32_t quad) {
  return (I32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(quad));
}
OCTAVO_INLINE I32 dot_small(I32 sums, I32 codes, int32_t quad) { return dot_large(sums, codes, quad); }
OCTAVO_INLINE I32 widen(I32 sums) { return sums; }
#else  // as in simd_avx2.h
inline constexpr bool kNarrowSums = true;
inline constexpr int kLargeZero = 128;
OCTAVO_INLINE I32 dot_small(I32 sums, I32 codes, int32_t quad) {
  return (I32)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(quad)));
}
OCTAVO_INLINE I32 widen(I32 sums) { return (I32)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)); }
OCTAVO_INLINE I32 dot_large(I32 acc, I32 codes, int32_t quad) {
  __m512i v = (__m512i)(codes ^ static_cast<int32_t>(0x80808080)), q = _mm512_set1_epi32(quad);
  __m512i signed_quad = _mm512_mask_sub_epi8(q, _mm512_movepi8_mask(v), _mm512_setzero_si512(), q);
  return acc + widen((I32)_mm512_maddubs_epi16(_mm512_abs_epi8(v), signed_quad));
}
#endif
OCTAVO_INLINE I32 field(I32 w, int shift, int32_t mask) { return (shift < 0 ? w << -shift : w >> shift) & mask; }
OCTAVO_INLINE I32 lookup(const uint8_t *table, I32 w) {
  return (I32)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_128(table)), (__m512i)w);
}
template <int J>
OCTAVO_INLINE F32 byte_to_f32(I32 w) {
  return to_f32((w >> (8 * J)) & 255);
}

OCTAVO_INLINE F32 bf16_low(I32 w) { return (F32)(w << 16); }
OCTAVO_INLINE F32 bf16_high(I32 w) { return (F32)(w & static_cast<int32_t>(0xffff0000)); }
OCTAVO_INLINE F32 dot_bf16(F32 acc, I32 w, uint32_t pair) {
#if __AVX512BF16__
  return _mm512_dpbf16_ps(acc, std::bit_cast<__m512bh>(w), std::bit_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(pair))));
#else
  acc = fma(bf16_low(w), set1(std::bit_cast<float>(pair << 16)), acc);
  return fma(bf16_high(w), set1(std::bit_cast<float>(pair & 0xffff0000)), acc);
#endif
}

}  // namespace octavo::OCTAVO_ISA
