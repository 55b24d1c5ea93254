// The vector vocabulary in portable C++ (GCC and Clang vector extensions): 16 lanes of 32 bits.
// Every instruction set offers the same names, so that a kernel is written once. simd_avx2.h and simd_avx512.h are its twins.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#define OCTAVO_INLINE static inline __attribute__((always_inline))
#define OCTAVO_UNROLL(n)  // of a kernel's loop over a tile; plain C++ gains nothing and compiles four times as long

namespace octavo::OCTAVO_ISA {

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));

inline constexpr int kLanes = 16;
inline constexpr int kRowTile = 4;    // activation rows that a linear tile holds in registers
inline constexpr int kQueryTile = 2;  // query rows that an attention tile holds in registers

OCTAVO_INLINE F32 set1(float x) { return F32{} + x; }
OCTAVO_INLINE I32 set1(int32_t x) { return I32{} + x; }
OCTAVO_INLINE F32 zero() { return F32{}; }
OCTAVO_INLINE F32 load(const float *p) {
  F32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
OCTAVO_INLINE void store(float *p, F32 v) { std::memcpy(p, &v, sizeof v); }
// The first n lanes (0..16); the others are 0 when loaded and untouched when stored.
OCTAVO_INLINE F32 load_n(const float *p, int n) {
  F32 v{};
  std::memcpy(&v, p, n * sizeof(float));
  return v;
}
OCTAVO_INLINE void store_n(float *p, F32 v, int n) { std::memcpy(p, &v, n * sizeof(float)); }
OCTAVO_INLINE I32 load_words(const void *p) {
  I32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
OCTAVO_INLINE F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
// The second operand where the first is NaN.
OCTAVO_INLINE F32 vmax(F32 a, F32 b) { return a > b ? a : b; }
OCTAVO_INLINE F32 vmin(F32 a, F32 b) { return a < b ? a : b; }
OCTAVO_INLINE F32 where_less(F32 a, F32 b, F32 yes, F32 no) { return a < b ? yes : no; }
OCTAVO_INLINE F32 bits_to_f32(I32 v) { return std::bit_cast<F32>(v); }
OCTAVO_INLINE I32 f32_bits(F32 v) { return std::bit_cast<I32>(v); }
OCTAVO_INLINE F32 to_f32(I32 v) { return __builtin_convertvector(v, F32); }
// Nearest, ties to even; |x| below 2^22.
OCTAVO_INLINE F32 round_nearest(F32 x) {
  F32 magic = set1(12582912.0f);
  return (x + magic) - magic;
}
OCTAVO_INLINE I32 to_i32(F32 x) { return __builtin_convertvector(round_nearest(x), I32); }
OCTAVO_INLINE F32 abs(F32 x) { return bits_to_f32(std::bit_cast<I32>(x) & 0x7fffffff); }
OCTAVO_INLINE I32 shift_left_23(I32 v) { return v << 23; }
OCTAVO_INLINE F32 lane_index() { return F32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// Reductions in one fixed tree: halves of 8, 4, 2, 1.
OCTAVO_INLINE float reduce_add(F32 v) {
  float t[16];
  store(t, v);
  for (int h = 8; h; h /= 2)
    for (int i = 0; i < h; i++) t[i] = t[i] + t[i + h];
  return t[0];
}
OCTAVO_INLINE float reduce_max(F32 v) {
  float t[16];
  store(t, v);
  for (int h = 8; h; h /= 2)
    for (int i = 0; i < h; i++) t[i] = t[i] > t[i + h] ? t[i] : t[i + h];
  return t[0];
}
OCTAVO_INLINE int32_t reduce_add(I32 v) {
  int32_t s = 0;
  for (int i = 0; i < 16; i++) s += v[i];
  return s;
}
OCTAVO_INLINE void store_int8(int8_t *p, I32 v) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(v[i]);
}

// bfloat16 and float16.
OCTAVO_INLINE I32 widen_u16(const uint16_t *p) {
  uint16_t h[16];
  std::memcpy(h, p, sizeof h);
  I32 v;
  for (int i = 0; i < 16; i++) v[i] = h[i];
  return v;
}
OCTAVO_INLINE I32 widen_u8(const void *p) {
  uint8_t b[16];
  std::memcpy(b, p, sizeof b);
  I32 v;
  for (int i = 0; i < 16; i++) v[i] = b[i];
  return v;
}
OCTAVO_INLINE I32 widen_i8(const void *p) { return (widen_u8(p) ^ 128) - 128; }
OCTAVO_INLINE void store_u16(uint16_t *p, U32 v) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<uint16_t>(v[i]);
}
OCTAVO_INLINE F32 load_bf16(const uint16_t *p) { return bits_to_f32(widen_u16(p) << 16); }
OCTAVO_INLINE U32 bf16_bits(F32 x) {  // nearest even, in the low half of each lane
  U32 u = std::bit_cast<U32>(x);
  U32 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return x == x ? rounded : ((u >> 16) | 64);
}
OCTAVO_INLINE void store_bf16(uint16_t *p, F32 x) { store_u16(p, bf16_bits(x)); }
OCTAVO_INLINE F32 f16_to_f32(I32 h) {
  F32 magnitude = bits_to_f32((h & 0x7fff) << 13) * set1(0x1p112f);
  I32 special = (h & 0x7c00) == 0x7c00;
  I32 bits = std::bit_cast<I32>(magnitude) | (special & 0x7f800000) | ((h & 0x8000) << 16);
  return bits_to_f32(bits);
}
OCTAVO_INLINE F32 load_f16(const uint16_t *p) { return f16_to_f32(widen_u16(p)); }
OCTAVO_INLINE uint16_t f32_to_f16(float x) {  // nearest even
  uint32_t u = std::bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (a >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (a < 0x38800000) {  // subnormal: let the float adder do the rounding
    float f = std::bit_cast<float>(a) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(f) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((a + 0xfff + ((a >> 13) & 1) - 0x38000000) >> 13));
}
OCTAVO_INLINE void store_f16(uint16_t *p, F32 v) {
  for (int i = 0; i < 16; i++) p[i] = f32_to_f16(v[i]);
}

// Two runs of 8 values as one vector: micro-tiles of 8 tokens lie apart in memory.
OCTAVO_INLINE F32 load_2x8(const float *a, const float *b) {
  F32 v;
  std::memcpy(&v, a, 32);
  std::memcpy(reinterpret_cast<char *>(&v) + 32, b, 32);
  return v;
}
OCTAVO_INLINE F32 load_f16_2x8(const uint16_t *a, const uint16_t *b) {
  uint16_t h[16];
  std::memcpy(h, a, 16);
  std::memcpy(h + 8, b, 16);
  return load_f16(h);
}
OCTAVO_INLINE I32 load_pairs_2x8(const uint16_t *a, const uint16_t *b) {
  I32 v;
  std::memcpy(&v, a, 32);
  std::memcpy(reinterpret_cast<char *>(&v) + 32, b, 32);
  return v;
}

// Integer dot products: each 32-bit lane of w holds 4 unsigned bytes, met by the 4 signed bytes of `quad`.
OCTAVO_INLINE I32 dot_u8i8(I32 acc, I32 w, int32_t quad) {
  for (int j = 0; j < 4; j++) acc += ((w >> (8 * j)) & 255) * set1(static_cast<int32_t>(static_cast<int8_t>(quad >> (8 * j))));
  return acc;
}
OCTAVO_INLINE I32 dot_u7i8(I32 acc, I32 w, int32_t quad) { return dot_u8i8(acc, w, quad); }  // bytes of w are below 128
// Bits of each lane, moved down by `shift` (up if negative), where the mask has ones. It has none where a shift down
// would bring the sign.
OCTAVO_INLINE I32 field(I32 w, int shift, int32_t mask) { return (shift < 0 ? w << -shift : w >> shift) & mask; }
OCTAVO_INLINE I32 lookup(const uint8_t *table, I32 w) {  // of 16 bytes, by the bytes of w, which are below 16
  uint8_t b[64];
  std::memcpy(b, &w, sizeof b);
  for (uint8_t &x : b) x = table[x];
  return load_words(b);
}
template <int J>
OCTAVO_INLINE F32 byte_to_f32(I32 w) {  // byte J of each lane, unsigned
  return to_f32((w >> (8 * J)) & 255);
}

// Float dot products of bfloat16 pairs: each lane of w holds 2 values, met by the 2 of `pair`.
OCTAVO_INLINE F32 bf16_low(I32 w) { return bits_to_f32(w << 16); }
OCTAVO_INLINE F32 bf16_high(I32 w) { return bits_to_f32(w & static_cast<int32_t>(0xffff0000)); }
OCTAVO_INLINE F32 dot_bf16(F32 acc, I32 w, uint32_t pair) {
  acc = fma(bf16_low(w), set1(std::bit_cast<float>(pair << 16)), acc);
  return fma(bf16_high(w), set1(std::bit_cast<float>(pair & 0xffff0000)), acc);
}

}  // namespace octavo::OCTAVO_ISA
