// What the packed weight types are: codes, scales and minima of a panel, 16 rows at a time. program.h draws the layout.
//
// A value is scale * (code - zero) + minimum, or for looked-up codes scale * (table[code] - zero).
namespace octavo::OCTAVO_ISA {

inline constexpr int32_t kEachByte = 0x01010101;

// IQ4's values + 128.
alignas(16) inline constexpr uint8_t kIq4Codes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// The codes of groups g and g + 4 (g = 0..3) of a block, a byte each.
template <int Bits>
OCTAVO_INLINE void plane_codes(const std::byte *block, int g, I32 &lo, I32 &hi) {
  if constexpr (Bits == 8) {
    lo = load_words(block + g * 64);
    hi = load_words(block + (g + 4) * 64);
    return;
  }
  constexpr bool nibbles = Bits >= 4, pairs = Bits == 2 || Bits == 3 || Bits == 6, tops = Bits == 3 || Bits == 5;
  if constexpr (nibbles) {
    I32 v = load_words(block + g * 64);
    lo = field(v, 0, 15 * kEachByte);
    hi = field(v, 4, 15 * kEachByte);
    block += 4 * 64;
  }
  if constexpr (pairs) {
    constexpr int up = Bits == 6 ? 4 : 0;
    I32 a = field(load_words(block), 2 * g - up, (3 << up) * kEachByte);
    I32 b = field(load_words(block + 64), 2 * g - up, (3 << up) * kEachByte);
    lo = nibbles ? lo | a : a;
    hi = nibbles ? hi | b : b;
    block += 2 * 64;
  }
  if constexpr (tops) {
    constexpr int up = Bits - 1;
    I32 v = load_words(block);
    lo = lo | field(v, g - up, (1 << up) * kEachByte);
    hi = hi | field(v, g + 4 - up, (1 << up) * kEachByte);
  }
}

OCTAVO_INLINE F32 byte_row(const std::byte *p) { return to_f32(widen_u8(p)); }
OCTAVO_INLINE F32 int8_row(const std::byte *p) { return to_f32(widen_i8(p)); }
OCTAVO_INLINE F32 half_row(const std::byte *p) { return load_f16(reinterpret_cast<const uint16_t *>(p)); }

// Each family says: kZero; kParts, the scales that 32 inputs have (1 or 2); kMinimum, whether there is one; kTable, what
// codes stand for, or null; and, from the record of a unit, the scale and minimum of part `i` of the unit.
struct Plain {
  static constexpr int kZero = 0, kParts = 1;
  static constexpr bool kMinimum = false;
  static constexpr const uint8_t *kTable = nullptr;
};
template <int Zero>
struct Scaled : Plain {
  static constexpr int kZero = Zero;
  OCTAVO_INLINE F32 scale(const std::byte *r, int) { return half_row(r); }
};
struct Affine : Scaled<0> {
  static constexpr bool kMinimum = true;
  OCTAVO_INLINE F32 minimum(const std::byte *r, int) { return half_row(r + 32); }
};
struct Zeroed : Affine {
  OCTAVO_INLINE F32 minimum(const std::byte *r, int) { return zero() - half_row(r) * byte_row(r + 32); }
};
struct AffineK : Affine {
  OCTAVO_INLINE F32 scale(const std::byte *r, int i) { return half_row(r) * byte_row(r + 64 + i * 32); }
  OCTAVO_INLINE F32 minimum(const std::byte *r, int i) { return zero() - half_row(r + 32) * byte_row(r + 80 + i * 32); }
};
template <int Zero, int Parts>
struct ScaledK : Plain {
  static constexpr int kZero = Zero, kParts = Parts;
  OCTAVO_INLINE F32 scale(const std::byte *r, int i) { return half_row(r) * int8_row(r + 32 + i * kPanel); }
};

// clang-format off
template <WeightType T> struct Format;
template <> struct Format<WeightType::Q4_0> : Scaled<8> {};
template <> struct Format<WeightType::Q4_1> : Affine {};
template <> struct Format<WeightType::Q5_0> : Scaled<16> {};
template <> struct Format<WeightType::Q5_1> : Affine {};
template <> struct Format<WeightType::Q8_0> : Scaled<128> {};
template <> struct Format<WeightType::U4> : Zeroed {};
template <> struct Format<WeightType::U8> : Zeroed {};
template <> struct Format<WeightType::Q4_K> : AffineK {};
template <> struct Format<WeightType::Q5_K> : AffineK {};
template <> struct Format<WeightType::Q6_K> : ScaledK<32, 2> {};
template <> struct Format<WeightType::Q3_K> : ScaledK<4, 2> {};
template <> struct Format<WeightType::IQ4_NL> : Scaled<128> { static constexpr const uint8_t *kTable = kIq4Codes; };
template <> struct Format<WeightType::IQ4_XS> : ScaledK<128, 1> { static constexpr const uint8_t *kTable = kIq4Codes; };
// clang-format on
template <>
struct Format<WeightType::INT8> : Plain {
  static constexpr int kZero = 128;
  OCTAVO_INLINE F32 scale(const std::byte *, int) { return set1(1.0f); }
};
template <>
struct Format<WeightType::Q2_K> : Plain {
  static constexpr int kParts = 2;
  static constexpr bool kMinimum = true;
  OCTAVO_INLINE F32 scale(const std::byte *r, int i) { return half_row(r) * to_f32(field(widen_u8(r + 64 + i * kPanel), 0, 15)); }
  OCTAVO_INLINE F32 minimum(const std::byte *r, int i) {
    return zero() - half_row(r + 32) * to_f32(field(widen_u8(r + 64 + i * kPanel), 4, 15));
  }
};

// Where the blocks of 32 inputs of a panel have their codes and scales.
template <WeightType T>
struct Blocks {
  using F = Format<T>;
  static constexpr BlockLayout kLayout = block_layout(T);
  static constexpr int kUnitBlocks = kLayout.unit / kBlock;

  OCTAVO_INLINE const std::byte *records(const std::byte *panel, int k) { return panel + k / kBlock * kLayout.code_bytes(); }
  OCTAVO_INLINE void codes(const std::byte *panel, int b, int g, I32 &lo, I32 &hi) {
    plane_codes<kLayout.bits>(panel + b * kLayout.code_bytes(), g, lo, hi);
    if constexpr (F::kTable != nullptr) {
      lo = lookup(F::kTable, lo);
      hi = lookup(F::kTable, hi);
    }
  }
  OCTAVO_INLINE F32 scale(const std::byte *records, int b, int part) {
    return F::scale(records + b / kUnitBlocks * kLayout.record_bytes, b % kUnitBlocks * F::kParts + part);
  }
  OCTAVO_INLINE F32 minimum(const std::byte *records, int b, int part) {
    return F::minimum(records + b / kUnitBlocks * kLayout.record_bytes, b % kUnitBlocks * F::kParts + part);
  }
};

// e4m3 to bfloat16, byte by byte: above 2^-6 the upper byte follows from the upper 3 bits of the magnitude and the lower
// byte is the lower 4; the 16 magnitudes below 2^-5 are looked up. (Arithmetic on float subnormals would be exact and
// wait for microcode.)
alignas(16) inline constexpr uint8_t kFp8Upper[16] = {0, 61, 62, 63, 64, 65, 66, 67};
alignas(16) inline constexpr uint8_t kFp8Small[16] = {255};  // a mask
alignas(16) inline constexpr uint8_t kFp8SmallUpper[16] = {0, 59, 59, 59, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60};
alignas(16) inline constexpr uint8_t kFp8SmallLower[16] = {0, 0x10, 0xa0, 0xf0, 0x40, 0x70, 0x20, 0x10};  // what differs

// Inputs 0 and 1, and 2 and 3, of a group of four as pairs of bfloat16, exactly; NaN counts as 480.
OCTAVO_INLINE void fp8_pairs(const std::byte *group, I32 &first, I32 &second) {
  constexpr auto odd_bytes = static_cast<int32_t>(0xff00ff00);
  I32 v = load_words(group), high = field(v, 4, 7 * kEachByte), low = field(v, 0, 15 * kEachByte);
  I32 small = lookup(kFp8Small, high);
  I32 upper = field(v, 0, static_cast<int32_t>(0x80808080)) | lookup(kFp8Upper, high) | (lookup(kFp8SmallUpper, low) & small);
  I32 lower = field(v, -4, static_cast<int32_t>(0xf0f0f0f0)) ^ (lookup(kFp8SmallLower, low) & small);
  first = field(lower, 0, ~odd_bytes) | field(upper, -8, odd_bytes);
  second = field(lower, 8, ~odd_bytes) | field(upper, 0, odd_bytes);
}
inline constexpr int kFp8Block = 128;
OCTAVO_INLINE F32 fp8_scale(const std::byte *panel, int k, int unit) {
  return load(reinterpret_cast<const float *>(panel + (k + 3) / 4 * 64) + unit * kPanel);
}

// The values of block b (32 inputs or what is left of k) of a panel, [inputs][16]: in `buffer`, or where they lie.
using Expand = const float *(*)(const std::byte *panel, int k, int b, float *buffer);

template <WeightType T>
static const float *expand(const std::byte *panel, int k, int b, float *buffer) {
  [[maybe_unused]] int first = b * kBlock, count = k - first < kBlock ? k - first : kBlock;
  if constexpr (T == WeightType::F32) {
    return reinterpret_cast<const float *>(panel) + first * kPanel;
  } else if constexpr (T == WeightType::F16) {
    for (int i = 0; i < count; i++)
      store(buffer + i * kPanel, load_f16(reinterpret_cast<const uint16_t *>(panel) + static_cast<int64_t>(first + i) * kPanel));
  } else if constexpr (T == WeightType::BF16) {
    for (int i = 0; i < count; i += 2) {
      I32 pair = load_words(panel + (first + i) / 2 * 64);
      store(buffer + i * kPanel, bf16_low(pair));
      store(buffer + (i + 1) * kPanel, bf16_high(pair));
    }
  } else if constexpr (T == WeightType::FP8_E4M3 || T == WeightType::FP8_E4M3_BLOCK) {
    F32 scale = T == WeightType::FP8_E4M3_BLOCK ? fp8_scale(panel, k, first / kFp8Block) : set1(1.0f);
    for (int i = 0; i < count; i += 4) {
      I32 pairs[2];
      fp8_pairs(panel + (first + i) / 4 * 64, pairs[0], pairs[1]);
      for (int j = 0; j < 2; j++) {
        store(buffer + (i + 2 * j) * kPanel, scale * bf16_low(pairs[j]));
        store(buffer + (i + 2 * j + 1) * kPanel, scale * bf16_high(pairs[j]));
      }
    }
  } else {
    using B = Blocks<T>;
    const std::byte *records = B::records(panel, k);
    auto put = [&](int group, I32 v) __attribute__((always_inline)) {
      int part = Format<T>::kParts == 2 ? group / 4 : 0;
      F32 scale = B::scale(records, b, part), zero_point = set1(static_cast<float>(Format<T>::kZero));
      F32 codes[4] = {byte_to_f32<0>(v), byte_to_f32<1>(v), byte_to_f32<2>(v), byte_to_f32<3>(v)};
      for (int j = 0; j < 4; j++) {
        F32 value = scale * (codes[j] - zero_point);
        if constexpr (Format<T>::kMinimum) value = value + B::minimum(records, b, part);
        store(buffer + (group * 4 + j) * kPanel, value);
      }
    };
    for (int g = 0; g < 4; g++) {
      I32 lo, hi;
      B::codes(panel, b, g, lo, hi);
      put(g, lo);
      put(g + 4, hi);
    }
  }
  return buffer;
}

// clang-format off
#define OCTAVO_WEIGHT_TYPES(X) \
  X(F32) X(F16) X(BF16) X(FP8_E4M3) X(FP8_E4M3_BLOCK) X(INT8) X(U4) X(U8) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) \
  X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS)
// clang-format on

static Expand expand_of(WeightType type) {
  switch (type) {
#define OCTAVO_CASE(T) \
  case WeightType::T: return expand<WeightType::T>;
    OCTAVO_WEIGHT_TYPES(OCTAVO_CASE)
#undef OCTAVO_CASE
  }
  return nullptr;
}

// Row `row` of a packed matrix as floats.
static void decode_row(const PackedWeight &w, int row, float *out) {
  alignas(64) float buffer[kBlock * kPanel];
  Expand expand = expand_of(w.type);
  float factor = w.row_scales ? w.row_scales[row] : 1.0f;
  for (int k = 0; k < w.k; k += kBlock) {
    const float *values = expand(w.panel(row / kPanel), w.k, k / kBlock, buffer) + row % kPanel;
    for (int i = 0; i < kBlock && k + i < w.k; i++) out[k + i] = values[i * kPanel] * factor;
  }
}

}  // namespace octavo::OCTAVO_ISA
