// The vector vocabulary in portable C++ (GCC and Clang vector extensions): 16 lanes of 32 bits, as four registers of
// 16 bytes, which SSE2 and NEON have. GCC keeps larger vectors in memory.
// Every instruction set offers the same names, so that a kernel is written once. simd_avx2.h and simd_avx512.h are twins.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#define OCTAVO_INLINE static inline __attribute__((always_inline))
#define OCTAVO_PRAGMA(text) _Pragma(#text)
#define OCTAVO_UNROLL(n) OCTAVO_PRAGMA(GCC unroll n)

namespace octavo::OCTAVO_ISA {

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t UInt4 __attribute__((vector_size(16)));
typedef int16_t Short8 __attribute__((vector_size(16)));
typedef uint16_t UShort8 __attribute__((vector_size(16)));
typedef uint16_t UShort4 __attribute__((vector_size(8)));
typedef uint8_t Byte16 __attribute__((vector_size(16)));
typedef uint8_t Byte4 __attribute__((vector_size(4)));
typedef int8_t SByte4 __attribute__((vector_size(4)));

template <class Register>
struct Four {
  Register a, b, c, d;
};
using F32 = Four<Float4>;
using I32 = Four<Int4>;

template <class F, class... X>
OCTAVO_INLINE auto each(F f, X... x) {
  return Four<decltype(f(x.a...))>{f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}
#define OCTAVO_OPERATOR(V, op) \
  OCTAVO_INLINE V operator op(V x, V y) { return {x.a op y.a, x.b op y.b, x.c op y.c, x.d op y.d}; }
OCTAVO_OPERATOR(F32, +)
OCTAVO_OPERATOR(F32, -)
OCTAVO_OPERATOR(F32, *)
OCTAVO_OPERATOR(F32, /)
OCTAVO_OPERATOR(I32, +)
OCTAVO_OPERATOR(I32, &)
OCTAVO_OPERATOR(I32, ^)
OCTAVO_OPERATOR(I32, |)
#undef OCTAVO_OPERATOR

inline constexpr int kLanes = 16;
inline constexpr int kRowTile = 4;    // activation rows that a linear tile holds in registers
inline constexpr int kQueryTile = 2;  // query rows that an attention tile holds in registers

template <class T>
OCTAVO_INLINE T load_as(const void *p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
// Four registers from addresses `step` bytes apart.
template <class Register>
OCTAVO_INLINE Four<Register> load_four(const void *from, int step = sizeof(Register)) {
  auto *p = static_cast<const char *>(from);
  return {load_as<Register>(p), load_as<Register>(p + step), load_as<Register>(p + 2 * step), load_as<Register>(p + 3 * step)};
}
template <class Register>
OCTAVO_INLINE void store_four(void *to, Four<Register> v) {
  auto *p = static_cast<char *>(to);
  constexpr int step = sizeof(Register);
  std::memcpy(p, &v.a, step);
  std::memcpy(p + step, &v.b, step);
  std::memcpy(p + 2 * step, &v.c, step);
  std::memcpy(p + 3 * step, &v.d, step);
}

OCTAVO_INLINE F32 set1(float x) {
  Float4 v = {x, x, x, x};
  return {v, v, v, v};
}
OCTAVO_INLINE I32 set1(int32_t x) {
  Int4 v = {x, x, x, x};
  return {v, v, v, v};
}
OCTAVO_INLINE F32 zero() { return F32{}; }
OCTAVO_INLINE F32 load(const float *p) { return load_four<Float4>(p); }
OCTAVO_INLINE void store(float *p, F32 v) { store_four(p, v); }
// The first n lanes (0..16); the others are 0 when loaded and untouched when stored.
OCTAVO_INLINE F32 load_n(const float *p, int n) {
  if (n == 16) return load(p);
  float t[16] = {};
  std::memcpy(t, p, n * sizeof(float));
  return load(t);
}
OCTAVO_INLINE void store_n(float *p, F32 v, int n) {
  if (n == 16) return store(p, v);
  float t[16];
  store(t, v);
  std::memcpy(p, t, n * sizeof(float));
}
OCTAVO_INLINE I32 load_words(const void *p) { return load_four<Int4>(p); }
OCTAVO_INLINE F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
// The second operand where the first is NaN.
OCTAVO_INLINE F32 vmax(F32 a, F32 b) {
  return each([](Float4 x, Float4 y) { return x > y ? x : y; }, a, b);
}
OCTAVO_INLINE F32 vmin(F32 a, F32 b) {
  return each([](Float4 x, Float4 y) { return x < y ? x : y; }, a, b);
}
OCTAVO_INLINE F32 where_less(F32 a, F32 b, F32 yes, F32 no) {
  return each([](Float4 x, Float4 y, Float4 s, Float4 t) { return x < y ? s : t; }, a, b, yes, no);
}
OCTAVO_INLINE F32 bits_to_f32(I32 v) {
  return each([](Int4 x) { return std::bit_cast<Float4>(x); }, v);
}
OCTAVO_INLINE I32 f32_bits(F32 v) {
  return each([](Float4 x) { return std::bit_cast<Int4>(x); }, v);
}
OCTAVO_INLINE F32 to_f32(I32 v) {
  return each([](Int4 x) { return __builtin_convertvector(x, Float4); }, v);
}
// Nearest, ties to even; |x| below 2^22.
OCTAVO_INLINE F32 round_nearest(F32 x) {
  F32 magic = set1(12582912.0f);
  return (x + magic) - magic;
}
OCTAVO_INLINE I32 to_i32(F32 x) {
  return each([](Float4 v) { return __builtin_convertvector(v, Int4); }, round_nearest(x));
}
// Bits of each lane, moved down by `shift` (up if negative), where the mask has ones. It has none where a shift down
// would bring the sign.
OCTAVO_INLINE I32 field(I32 w, int shift, int32_t mask) {
  return each([=](Int4 x) { return (shift < 0 ? x << -shift : x >> shift) & mask; }, w);
}
OCTAVO_INLINE F32 abs(F32 x) { return bits_to_f32(field(f32_bits(x), 0, 0x7fffffff)); }
OCTAVO_INLINE I32 shift_left_23(I32 v) { return field(v, -23, -1); }
OCTAVO_INLINE F32 lane_index() { return {Float4{0, 1, 2, 3}, Float4{4, 5, 6, 7}, Float4{8, 9, 10, 11}, Float4{12, 13, 14, 15}}; }

// Reductions in one fixed tree: halves of 8, 4, 2, 1.
OCTAVO_INLINE float reduce_add(F32 v) {
  Float4 t = (v.a + v.c) + (v.b + v.d);
  return (t[0] + t[2]) + (t[1] + t[3]);
}
OCTAVO_INLINE float reduce_max(F32 v) {
  F32 swapped{v.c, v.d, v.a, v.b}, m = vmax(v, swapped);
  Float4 t = m.a > m.b ? m.a : m.b;
  float even = t[0] > t[2] ? t[0] : t[2], odd = t[1] > t[3] ? t[1] : t[3];
  return even > odd ? even : odd;
}
OCTAVO_INLINE int32_t reduce_add(I32 v) {
  Int4 t = (v.a + v.c) + (v.b + v.d);
  return (t[0] + t[2]) + (t[1] + t[3]);
}
OCTAVO_INLINE void store_int8(int8_t *p, I32 v) {
  store_four(p, each([](Int4 x) { return __builtin_convertvector(x, SByte4); }, v));
}

// Bytes, bfloat16 and float16.
OCTAVO_INLINE I32 widen_u8(const void *p) {
  return each([](Byte4 x) { return __builtin_convertvector(x, Int4); }, load_four<Byte4>(p));
}
OCTAVO_INLINE I32 widen_i8(const void *p) {
  return each([](SByte4 x) { return __builtin_convertvector(x, Int4); }, load_four<SByte4>(p));
}
OCTAVO_INLINE I32 widen_u16(const uint16_t *p) {
  return each([](UShort4 x) { return __builtin_convertvector(x, Int4); }, load_four<UShort4>(p));
}
OCTAVO_INLINE F32 load_bf16(const uint16_t *p) { return bits_to_f32(field(widen_u16(p), -16, -1)); }
OCTAVO_INLINE void store_bf16(uint16_t *p, F32 x) {  // nearest even
  store_four(p, each(
                    [](Float4 f) {
                      UInt4 u = std::bit_cast<UInt4>(f), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, quiet = (u >> 16) | 64;
                      return __builtin_convertvector(f == f ? rounded : quiet, UShort4);
                    },
                    x));
}
OCTAVO_INLINE Float4 f16_to_f32(UShort4 bits) {
  Int4 h = __builtin_convertvector(bits, Int4), infinite = (h & 0x7c00) == 0x7c00;
  Float4 magnitude = std::bit_cast<Float4>((h & 0x7fff) << 13) * 0x1p112f;
  return std::bit_cast<Float4>(std::bit_cast<Int4>(magnitude) | (infinite & 0x7f800000) | ((h & 0x8000) << 16));
}
OCTAVO_INLINE F32 load_f16(const uint16_t *p) {
  return each([](UShort4 x) { return f16_to_f32(x); }, load_four<UShort4>(p));
}
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
  float t[16];
  store(t, v);
  for (int i = 0; i < 16; i++) p[i] = f32_to_f16(t[i]);
}

// Two runs of 8 values as one vector: micro-tiles of 8 tokens lie apart in memory.
OCTAVO_INLINE F32 load_2x8(const float *a, const float *b) {
  return {load_as<Float4>(a), load_as<Float4>(a + 4), load_as<Float4>(b), load_as<Float4>(b + 4)};
}
OCTAVO_INLINE F32 load_f16_2x8(const uint16_t *a, const uint16_t *b) {
  return {f16_to_f32(load_as<UShort4>(a)), f16_to_f32(load_as<UShort4>(a + 4)), f16_to_f32(load_as<UShort4>(b)),
          f16_to_f32(load_as<UShort4>(b + 4))};
}
OCTAVO_INLINE I32 load_pairs_2x8(const uint16_t *a, const uint16_t *b) {
  return {load_as<Int4>(a), load_as<Int4>(a + 8), load_as<Int4>(b), load_as<Int4>(b + 8)};
}

// Integer dot products: each 32-bit lane of `codes` holds 4 unsigned bytes, met by the 4 signed bytes of `quad`, which are
// -127 to 127. Products are made in 16 bits, even and odd bytes apart.
//
// dot_small adds to sums of two products a quad, which are 16 bits wide if kNarrowSums: whoever calls it sees to it that
// they fit. widen makes int32 of them. dot_large, for codes up to 255, adds to int32 and takes kLargeZero from each code.
inline constexpr bool kNarrowSums = true;
inline constexpr int kLargeZero = 128;
OCTAVO_INLINE Short8 two_in_turn(int8_t x, int8_t y) { return Short8{x, y, x, y, x, y, x, y}; }
OCTAVO_INLINE Short8 even_bytes(int32_t quad) { return two_in_turn(static_cast<int8_t>(quad), static_cast<int8_t>(quad >> 16)); }
OCTAVO_INLINE Short8 odd_bytes(int32_t quad) { return two_in_turn(static_cast<int8_t>(quad >> 8), static_cast<int8_t>(quad >> 24)); }
OCTAVO_INLINE Int4 add_halves(Int4 acc, Short8 sums) {
  Int4 v = std::bit_cast<Int4>(sums);
  return acc + ((v << 16) >> 16) + (v >> 16);
}
OCTAVO_INLINE I32 dot_small(I32 sums, I32 codes, int32_t quad) {
  Short8 evens = even_bytes(quad), odds = odd_bytes(quad);
  return each(
      [=](Int4 sum, Int4 bytes) {
        UShort8 v = std::bit_cast<UShort8>(bytes);
        return std::bit_cast<Int4>(std::bit_cast<Short8>(sum) + std::bit_cast<Short8>(v & 255) * evens +
                                   std::bit_cast<Short8>(v >> 8) * odds);
      },
      sums, codes);
}
OCTAVO_INLINE I32 widen(I32 sums) {
  return each([](Int4 sum) { return add_halves(Int4{}, std::bit_cast<Short8>(sum)); }, sums);
}
OCTAVO_INLINE I32 dot_large(I32 acc, I32 codes, int32_t quad) {  // 2 * 128 * 127 fits
  Short8 evens = even_bytes(quad), odds = odd_bytes(quad);
  return each(
      [=](Int4 sum, Int4 bytes) {
        Short8 v = std::bit_cast<Short8>(bytes ^ static_cast<int32_t>(0x80808080));
        return add_halves(sum, ((v << 8) >> 8) * evens + (v >> 8) * odds);
      },
      acc, codes);
}
OCTAVO_INLINE I32 lookup(const uint8_t *table, I32 w) {  // of 16 bytes, by the bytes of w, which are below 16
  Byte16 t = load_as<Byte16>(table);
  return each([=](Int4 x) { return std::bit_cast<Int4>(__builtin_shuffle(t, std::bit_cast<Byte16>(x))); }, w);
}
template <int J>
OCTAVO_INLINE F32 byte_to_f32(I32 w) {  // byte J of each lane, unsigned
  return to_f32(field(w, 8 * J, 255));
}

// Float dot products of bfloat16 pairs: each lane of w holds 2 values, met by the 2 of `pair`.
OCTAVO_INLINE F32 bf16_low(I32 w) { return bits_to_f32(field(w, -16, -1)); }
OCTAVO_INLINE F32 bf16_high(I32 w) { return bits_to_f32(field(w, 0, static_cast<int32_t>(0xffff0000))); }
OCTAVO_INLINE F32 dot_bf16(F32 acc, I32 w, uint32_t pair) {
  acc = fma(bf16_low(w), set1(std::bit_cast<float>(pair << 16)), acc);
  return fma(bf16_high(w), set1(std::bit_cast<float>(pair & 0xffff0000)), acc);
}

}  // namespace octavo::OCTAVO_ISA
