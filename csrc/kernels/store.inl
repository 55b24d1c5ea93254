// Writing rows in the storage that a tensor has: the end of every operation that produces one.
namespace octavo::OCTAVO_ISA {

// 32 codes; returns their sum.
OCTAVO_INLINE int32_t store_codes(std::byte *to, I32 lo, I32 hi) {
  store_int8(reinterpret_cast<int8_t *>(to), lo);
  store_int8(reinterpret_cast<int8_t *>(to) + 16, hi);
  return reduce_add(lo + hi);
}

// Block b of an int8 row from 32 floats: code = round(x / scale), scale = max |x| / 127, fine code = what that left.
// Blocks below 2^-119, whose inverse scale would overflow, count as zeros.
OCTAVO_INLINE void quantize_block(std::byte *row, int width, Storage storage, int b, F32 lo, F32 hi) {
  int blocks = width / kBlock, planes = storage == Storage::INT8_TWICE ? 2 : 1;
  auto *scale = reinterpret_cast<float *>(row + planes * width), *sum = scale + blocks;
  auto *code_sum = reinterpret_cast<int32_t *>(sum + blocks);
  float top = reduce_max(vmax(abs(lo), abs(hi)));
  F32 inverse = set1(top > 0x1p-119f ? 127.0f / top : 0.0f);
  lo = lo * inverse;
  hi = hi * inverse;
  I32 a = to_i32(lo), c = to_i32(hi);
  code_sum[b] = store_codes(row + b * kBlock, a, c);
  float total = static_cast<float>(code_sum[b]);
  if (planes == 2) {
    F32 steps = set1(kFineSteps);
    code_sum[blocks + b] = store_codes(row + width + b * kBlock, to_i32((lo - to_f32(a)) * steps), to_i32((hi - to_f32(c)) * steps));
    total += static_cast<float>(code_sum[blocks + b]) / kFineSteps;
  }
  scale[b] = top / 127.0f;
  sum[b] = scale[b] * total;
}

// Columns [column, column + n) of one row, n <= 32. For int8 storages: column is a multiple of 32 and n is 32.
OCTAVO_INLINE void store_columns(const TensorView &t, int row, int column, const float *v, int n) {
  std::byte *to = t.row(row);
  int first = n < 16 ? n : 16;
  if (t.storage == Storage::FLOAT32) {
    auto *p = reinterpret_cast<float *>(to) + column;
    store_n(p, load_n(v, first), first);
    if (n > 16) store_n(p + 16, load_n(v + 16, n - 16), n - 16);
  } else if (t.storage == Storage::BFLOAT16) {
    auto *p = reinterpret_cast<uint16_t *>(to) + column;
    uint16_t half[32];
    store_bf16(half, load_n(v, first));
    store_bf16(half + 16, n > 16 ? load_n(v + 16, n - 16) : zero());
    std::memcpy(p, half, n * sizeof(uint16_t));
    if (column + n == t.width && t.width % 2) p[n] = 0;
  } else {
    quantize_block(to, t.width, t.storage, column / kBlock, load(v), load(v + 16));
  }
}

OCTAVO_INLINE void store_row(const TensorView &t, int row, const float *v) {
  for (int c = 0; c < t.width; c += 32) store_columns(t, row, c, v + c, t.width - c < 32 ? t.width - c : 32);
}

// A row as floats, whatever its storage.
static void read_row(const TensorView &t, int row, float *out) {
  const std::byte *from = t.row(row);
  if (t.storage == Storage::FLOAT32) {
    std::memcpy(out, from, t.width * sizeof(float));
  } else if (t.storage == Storage::BFLOAT16) {
    auto *p = reinterpret_cast<const uint16_t *>(from);
    for (int i = 0; i < t.width; i++) out[i] = std::bit_cast<float>(static_cast<uint32_t>(p[i]) << 16);
  } else {
    bool twice = t.storage == Storage::INT8_TWICE;
    auto *codes = reinterpret_cast<const int8_t *>(from);
    auto *scale = reinterpret_cast<const float *>(from + (twice ? 2 : 1) * t.width);
    for (int i = 0; i < t.width; i++) {
      float fine = twice ? static_cast<float>(codes[t.width + i]) / kFineSteps : 0.0f;
      out[i] = scale[i / kBlock] * (static_cast<float>(codes[i]) + fine);
    }
  }
}

}  // namespace octavo::OCTAVO_ISA
