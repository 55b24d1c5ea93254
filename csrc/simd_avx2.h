// The vector vocabulary on AVX2 with FMA and F16C: 16 lanes as two registers. simd_portable.h documents the names.
#pragma once
#if !(__AVX2__ && __FMA__ && __F16C__)
#error "the translation unit is not compiled for AVX2"
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

struct F32 {
  __m256 lo, hi;
};
struct I32 {
  __m256i lo, hi;
};

inline constexpr int kLanes = 16;
inline constexpr int kRowTile = 4;
inline constexpr int kQueryTile = 3;

OCTAVO_INLINE F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
OCTAVO_INLINE F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
OCTAVO_INLINE F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
OCTAVO_INLINE F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
OCTAVO_INLINE I32 operator+(I32 a, I32 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
OCTAVO_INLINE I32 operator&(I32 a, I32 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
OCTAVO_INLINE I32 operator^(I32 a, I32 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
OCTAVO_INLINE I32 operator|(I32 a, I32 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }

OCTAVO_INLINE F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
OCTAVO_INLINE I32 set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
OCTAVO_INLINE F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
OCTAVO_INLINE F32 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OCTAVO_INLINE void store(float *p, F32 v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
OCTAVO_INLINE I32 first_lanes(int n) {  // all bits of the first n lanes
  __m256i count = _mm256_set1_epi32(n);
  return {_mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
          _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}
OCTAVO_INLINE F32 load_n(const float *p, int n) {
  if (n == 16) return load(p);
  I32 m = first_lanes(n);
  return {_mm256_maskload_ps(p, m.lo), _mm256_maskload_ps(p + 8, m.hi)};
}
OCTAVO_INLINE void store_n(float *p, F32 v, int n) {
  if (n == 16) return store(p, v);
  I32 m = first_lanes(n);
  _mm256_maskstore_ps(p, m.lo, v.lo);
  _mm256_maskstore_ps(p + 8, m.hi, v.hi);
}
OCTAVO_INLINE __m256i load_256(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
OCTAVO_INLINE __m128i load_128(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
OCTAVO_INLINE I32 load_words(const void *p) { return {load_256(p), load_256(static_cast<const char *>(p) + 32)}; }
OCTAVO_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
OCTAVO_INLINE F32 vmax(F32 a, F32 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
OCTAVO_INLINE F32 vmin(F32 a, F32 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
OCTAVO_INLINE F32 where_less(F32 a, F32 b, F32 yes, F32 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
OCTAVO_INLINE F32 bits_to_f32(I32 v) { return {_mm256_castsi256_ps(v.lo), _mm256_castsi256_ps(v.hi)}; }
OCTAVO_INLINE F32 to_f32(I32 v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }
OCTAVO_INLINE F32 round_nearest(F32 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.lo, mode), _mm256_round_ps(x.hi, mode)};
}
OCTAVO_INLINE I32 to_i32(F32 x) { return {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }
OCTAVO_INLINE F32 abs(F32 x) {
  __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.lo, magnitude), _mm256_and_ps(x.hi, magnitude)};
}
OCTAVO_INLINE I32 shift_left_23(I32 v) { return {_mm256_slli_epi32(v.lo, 23), _mm256_slli_epi32(v.hi, 23)}; }
OCTAVO_INLINE F32 lane_index() { return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)}; }

OCTAVO_INLINE float reduce_add(F32 v) {
  __m256 a = _mm256_add_ps(v.lo, v.hi);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
OCTAVO_INLINE float reduce_max(F32 v) {
  __m256 a = _mm256_max_ps(v.lo, v.hi);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
OCTAVO_INLINE int32_t reduce_add(I32 v) {
  __m256i a = _mm256_add_epi32(v.lo, v.hi);
  __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
OCTAVO_INLINE void store_int8(int8_t *p, I32 v) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.lo, v.hi), 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), bytes);
}

OCTAVO_INLINE I32 widen_u16(const uint16_t *p) { return {_mm256_cvtepu16_epi32(load_128(p)), _mm256_cvtepu16_epi32(load_128(p + 8))}; }
OCTAVO_INLINE I32 widen_u8(const void *p) {
  __m128i v = load_128(p);
  return {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
}
OCTAVO_INLINE I32 widen_i8(const void *p) {
  __m128i v = load_128(p);
  return {_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))};
}
OCTAVO_INLINE F32 load_bf16(const uint16_t *p) {
  I32 v = widen_u16(p);
  return bits_to_f32({_mm256_slli_epi32(v.lo, 16), _mm256_slli_epi32(v.hi, 16)});
}
OCTAVO_INLINE __m256i bf16_bits(__m256 x) {  // nearest even, in the low half of each lane
  __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
  __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(64));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
OCTAVO_INLINE void store_bf16(uint16_t *p, F32 x) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(bf16_bits(x.lo), bf16_bits(x.hi)), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), words);
}
OCTAVO_INLINE F32 load_f16(const uint16_t *p) { return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 8))}; }
OCTAVO_INLINE void store_f16(uint16_t *p, F32 v) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(v.lo, mode));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p + 8), _mm256_cvtps_ph(v.hi, mode));
}

OCTAVO_INLINE F32 load_2x8(const float *a, const float *b) { return {_mm256_loadu_ps(a), _mm256_loadu_ps(b)}; }
OCTAVO_INLINE F32 load_f16_2x8(const uint16_t *a, const uint16_t *b) {
  return {_mm256_cvtph_ps(load_128(a)), _mm256_cvtph_ps(load_128(b))};
}
OCTAVO_INLINE I32 load_pairs_2x8(const uint16_t *a, const uint16_t *b) { return {load_256(a), load_256(b)}; }

// Pairs of products are summed in 16 bits. Large codes are met as signed bytes, whose signs the other factor takes over:
// 2 * 128 * 127 fits.
inline constexpr bool kNarrowSums = true;
inline constexpr int kLargeZero = 128;
OCTAVO_INLINE I32 dot_small(I32 sums, I32 codes, int32_t quad) {
  __m256i q = _mm256_set1_epi32(quad);
  return {_mm256_add_epi16(sums.lo, _mm256_maddubs_epi16(codes.lo, q)), _mm256_add_epi16(sums.hi, _mm256_maddubs_epi16(codes.hi, q))};
}
OCTAVO_INLINE I32 widen(I32 sums) {
  __m256i one = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(sums.lo, one), _mm256_madd_epi16(sums.hi, one)};
}
OCTAVO_INLINE __m256i signed_products(__m256i codes, __m256i quad) {
  __m256i v = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
  return _mm256_maddubs_epi16(_mm256_abs_epi8(v), _mm256_sign_epi8(quad, v));
}
OCTAVO_INLINE I32 dot_large(I32 acc, I32 codes, int32_t quad) {
  __m256i q = _mm256_set1_epi32(quad);
  return acc + widen({signed_products(codes.lo, q), signed_products(codes.hi, q)});
}
OCTAVO_INLINE I32 field(I32 w, int shift, int32_t mask) {
  __m256i m = _mm256_set1_epi32(mask);
  if (shift < 0) return {_mm256_and_si256(_mm256_slli_epi32(w.lo, -shift), m), _mm256_and_si256(_mm256_slli_epi32(w.hi, -shift), m)};
  return {_mm256_and_si256(_mm256_srli_epi32(w.lo, shift), m), _mm256_and_si256(_mm256_srli_epi32(w.hi, shift), m)};
}
OCTAVO_INLINE I32 lookup(const uint8_t *table, I32 w) {
  __m256i t = _mm256_broadcastsi128_si256(load_128(table));
  return {_mm256_shuffle_epi8(t, w.lo), _mm256_shuffle_epi8(t, w.hi)};
}
template <int J>
OCTAVO_INLINE F32 byte_to_f32(I32 w) {
  __m256i low = _mm256_set1_epi32(255);
  return to_f32({_mm256_and_si256(_mm256_srli_epi32(w.lo, 8 * J), low), _mm256_and_si256(_mm256_srli_epi32(w.hi, 8 * J), low)});
}

OCTAVO_INLINE F32 bf16_low(I32 w) { return bits_to_f32({_mm256_slli_epi32(w.lo, 16), _mm256_slli_epi32(w.hi, 16)}); }
OCTAVO_INLINE F32 bf16_high(I32 w) {
  __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
  return bits_to_f32({_mm256_and_si256(w.lo, high), _mm256_and_si256(w.hi, high)});
}
OCTAVO_INLINE F32 dot_bf16(F32 acc, I32 w, uint32_t pair) {
  acc = fma(bf16_low(w), set1(std::bit_cast<float>(pair << 16)), acc);
  return fma(bf16_high(w), set1(std::bit_cast<float>(pair & 0xffff0000)), acc);
}

}  // namespace octavo::OCTAVO_ISA
