// Writing rows in the storage that a tensor has: the end of every operation that produces one.
namespace octavo::OCTAVO_ISA {

// Block b of an INT8_BLOCKS row.
OCTAVO_INLINE void store_block(std::byte *row, int width, int b, I32 lo, I32 hi, float scale) {
  store_int8(reinterpret_cast<int8_t *>(row) + b * kBlock, lo);
  store_int8(reinterpret_cast<int8_t *>(row) + b * kBlock + 16, hi);
  int32_t first = reduce_add(lo), sum = first + reduce_add(hi);
  Int8Block block{scale, scale * static_cast<float>(sum), sum, first};
  std::memcpy(row + width + b * sizeof block, &block, sizeof block);
}

// Block b of an int8 row from 32 floats: code = round(x / scale), scale = max |x| / 127, fine code = what that left.
// Blocks below 2^-119, whose inverse scale would overflow, count as zeros.
OCTAVO_INLINE void quantize_block(std::byte *row, int width, Storage storage, int b, F32 lo, F32 hi) {
  float top = reduce_max(vmax(abs(lo), abs(hi))), scale = top / 127.0f;
  F32 inverse = set1(top > 0x1p-119f ? 127.0f / top : 0.0f);
  lo = lo * inverse;
  hi = hi * inverse;
  I32 a = to_i32(lo), c = to_i32(hi);
  store_block(row, width, b, a, c, scale);
  if (storage == Storage::INT8_TWICE) {
    F32 steps = set1(kFineSteps);
    store_block(row + int8_row_bytes(width), width, b, to_i32((lo - to_f32(a)) * steps), to_i32((hi - to_f32(c)) * steps),
                scale / kFineSteps);
  }
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

OCTAVO_INLINE float int8_value(const std::byte *row, int width, int i) {
  Int8Block block;
  std::memcpy(&block, row + width + i / kBlock * sizeof block, sizeof block);
  return block.scale * static_cast<float>(static_cast<int8_t>(row[i]));
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
    for (int i = 0; i < t.width; i++) out[i] = int8_value(from, t.width, i);
    if (t.storage == Storage::INT8_TWICE)
      for (int i = 0; i < t.width; i++) out[i] += int8_value(from + int8_row_bytes(t.width), t.width, i);
  }
}

}  // namespace octavo::OCTAVO_ISA
