// Writing rows in the storage that a tensor has: the end of every operation that produces one.
namespace octavo::OCTAVO_ISA {

// Block b of an INT8_BLOCKS row from 32 floats: code = round(x / scale), scale = max |x| / 127.
OCTAVO_INLINE void quantize_block(std::byte *row, int width, int b, F32 lo, F32 hi) {
  int blocks = width / kBlock;
  auto *codes = reinterpret_cast<int8_t *>(row);
  auto *scale = reinterpret_cast<float *>(row + width), *sum = scale + blocks;
  auto *code_sum = reinterpret_cast<int32_t *>(sum + blocks);
  float top = reduce_max(vmax(abs(lo), abs(hi)));
  F32 inverse = set1(top > 0 ? 127.0f / top : 0.0f);
  I32 a = to_i32(lo * inverse), c = to_i32(hi * inverse);
  store_int8(codes + b * kBlock, a);
  store_int8(codes + b * kBlock + 16, c);
  int32_t total = reduce_add(a + c);
  scale[b] = top / 127.0f;
  sum[b] = scale[b] * static_cast<float>(total);
  code_sum[b] = total;
}

// Columns [column, column + n) of one row, n <= 32. For INT8_BLOCKS: column is a multiple of 32 and n is 32.
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
    quantize_block(to, t.width, column / kBlock, load(v), load(v + 16));
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
    auto *codes = reinterpret_cast<const int8_t *>(from);
    auto *scale = reinterpret_cast<const float *>(from + t.width);
    for (int i = 0; i < t.width; i++) out[i] = scale[i / kBlock] * static_cast<float>(codes[i]);
  }
}

}  // namespace octavo::OCTAVO_ISA
