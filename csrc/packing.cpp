#include "packing.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace octavo {
namespace {

constexpr int kMostCodes = 256;  // of a file's block
constexpr int kFp8Block = 128;
constexpr int kFp8Order[4] = {0, 2, 1, 3};  // where the byte of each of four inputs lies

// Fields of `bits` bits, as formats.py has them: `run` bytes hold 8 / bits runs of `run` codes, the first run in the
// lowest bits. Each is added to its code above the `up` lower bits.
void add_fields(uint8_t *codes, const uint8_t *packed, int bytes, int bits, int run, int up) {
  for (int begin = 0; begin < bytes; begin += run)
    for (int shift = 0; shift < 8; shift += bits, codes += run)
      for (int i = 0; i < run; i++) codes[i] |= static_cast<uint8_t>((packed[begin + i] >> shift & ((1 << bits) - 1)) << up);
}

// The lane of one row in a run of vectors: byte 4i + j goes to byte j of vector i.
void put_words(std::byte *lane, const uint8_t *bytes, int vectors) {
  for (int i = 0; i < vectors; i++) std::memcpy(lane + i * 64, bytes + i * 4, 4);
}

// 32 codes into the planes of their bits.
void put_codes(std::byte *lane, const uint8_t *codes, int bits) {
  if (bits == 8) return put_words(lane, codes, 8);
  int low = 0;  // bits that are placed
  if (bits >= 4) {
    uint8_t nibbles[16];
    for (int i = 0; i < 16; i++) nibbles[i] = static_cast<uint8_t>((codes[i] & 15) | codes[16 + i] << 4);
    put_words(lane, nibbles, 4);
    lane += 4 * 64;
    low = 4;
  }
  if (bits - low >= 2) {
    uint8_t pairs[8] = {};
    for (int i = 0; i < 32; i++) pairs[i / 16 * 4 + i % 4] |= static_cast<uint8_t>((codes[i] >> low & 3) << i % 16 / 4 * 2);
    put_words(lane, pairs, 2);
    lane += 2 * 64;
    low += 2;
  }
  if (bits - low == 1) {
    uint8_t tops[4] = {};
    for (int i = 0; i < 32; i++) tops[i % 4] |= static_cast<uint8_t>((codes[i] >> low & 1) << i / 4);
    put_words(lane, tops, 1);
  }
}

// Where one row's scales go in a record.
struct RecordLane {
  std::byte *record;
  int row;
  void half(int at, const uint8_t *from) { std::memcpy(record + at + row * 2, from, 2); }
  void byte(int at, int value) { record[at + row] = static_cast<std::byte>(value); }
};

struct FileBlock {
  int inputs, bytes;
};

FileBlock file_block(WeightType type) {
  using enum WeightType;
  switch (type) {
    case F32: return {1, 4};
    case F16:
    case BF16: return {1, 2};
    case FP8_E4M3: return {1, 1};
    case FP8_E4M3_BLOCK: return {kFp8Block, 4 + kFp8Block};
    case Q4_0:
    case IQ4_NL: return {32, 18};
    case Q4_1:
    case U4: return {32, 20};
    case Q5_0: return {32, 22};
    case Q5_1: return {32, 24};
    case Q8_0: return {32, 34};
    case INT8: return {32, 32};
    case U8: return {32, 36};
    case Q2_K: return {256, 84};
    case Q3_K: return {256, 110};
    case Q4_K: return {256, 144};
    case Q5_K: return {256, 176};
    case Q6_K: return {256, 210};
    case IQ4_XS: return {256, 136};
  }
  throw std::invalid_argument("unknown weight type");
}

// A block of the file: its codes (zeros before), unsigned, and its scales.
void unpack(WeightType type, const uint8_t *from, uint8_t *codes, RecordLane to) {
  using enum WeightType;
  uint8_t scales[16] = {};
  switch (type) {
    case Q4_0:
    case IQ4_NL: to.half(0, from); return add_fields(codes, from + 2, 16, 4, 16, 0);
    case Q4_1:
      to.half(0, from);
      to.half(32, from + 2);
      return add_fields(codes, from + 4, 16, 4, 16, 0);
    case Q5_0:
      to.half(0, from);
      add_fields(codes, from + 2, 4, 1, 1, 4);
      return add_fields(codes, from + 6, 16, 4, 16, 0);
    case Q5_1:
      to.half(0, from);
      to.half(32, from + 2);
      add_fields(codes, from + 4, 4, 1, 1, 4);
      return add_fields(codes, from + 8, 16, 4, 16, 0);
    case Q8_0:
      to.half(0, from);
      for (int i = 0; i < 32; i++) codes[i] = from[2 + i] ^ 0x80;
      return;
    case INT8:
      for (int i = 0; i < 32; i++) codes[i] = from[i] ^ 0x80;
      return;
    case U4:
      to.half(0, from);
      to.byte(32, from[2]);
      return add_fields(codes, from + 4, 16, 4, 16, 0);
    case U8:
      to.half(0, from);
      to.byte(32, from[2]);
      std::memcpy(codes, from + 4, 32);
      return;
    case Q2_K:
      to.half(0, from + 80);
      to.half(32, from + 82);
      for (int i = 0; i < 16; i++) to.byte(64 + i * kPanel, from[i]);
      return add_fields(codes, from + 16, 64, 2, 32, 0);
    case Q3_K:
      to.half(0, from + 108);
      add_fields(scales, from + 96, 8, 4, 8, 0);
      add_fields(scales, from + 104, 4, 2, 4, 4);
      for (int i = 0; i < 16; i++) to.byte(32 + i * kPanel, scales[i] - 32);
      add_fields(codes, from + 32, 64, 2, 32, 0);
      return add_fields(codes, from, 32, 1, 32, 2);
    case Q4_K:
    case Q5_K:
      to.half(0, from);
      to.half(32, from + 2);
      for (int i = 0; i < 4; i++) {  // 6 bits each, the upper two of the last four on top of the first eight bytes
        const uint8_t *s = from + 4 + i;
        to.byte(64 + i * 32, s[0] & 63);
        to.byte(80 + i * 32, s[4] & 63);
        to.byte(64 + (4 + i) * 32, (s[8] & 15) | s[0] >> 6 << 4);
        to.byte(80 + (4 + i) * 32, s[8] >> 4 | s[4] >> 6 << 4);
      }
      if (type == Q5_K) add_fields(codes, from + 16, 32, 1, 32, 4);
      return add_fields(codes, from + (type == Q5_K ? 48 : 16), 128, 4, 32, 0);
    case Q6_K:
      to.half(0, from + 208);
      for (int i = 0; i < 16; i++) to.byte(32 + i * kPanel, from[192 + i]);
      add_fields(codes, from, 128, 4, 64, 0);
      return add_fields(codes, from + 128, 64, 2, 32, 4);
    case IQ4_XS:
      to.half(0, from);
      add_fields(scales, from + 4, 4, 4, 1, 0);
      add_fields(scales, from + 2, 2, 2, 1, 4);
      for (int i = 0; i < 8; i++) to.byte(32 + i * kPanel, scales[i] - 32);
      return add_fields(codes, from + 8, 128, 4, 16, 0);
    default: return;
  }
}

void pack_blocks(const PackJob &job, const std::byte *rows, int count, std::byte *to) {
  BlockLayout layout = block_layout(job.type);
  int file_bytes = file_block(job.type).bytes, units = job.k / layout.unit, blocks = layout.unit / kBlock;
  std::byte *records = to + job.k / kBlock * layout.code_bytes();
  for (int r = 0; r < count; r++)
    for (int u = 0; u < units; u++) {
      uint8_t codes[kMostCodes] = {};
      const auto *from = reinterpret_cast<const uint8_t *>(rows + (static_cast<int64_t>(r) * units + u) * file_bytes);
      unpack(job.type, from, codes, {records + static_cast<int64_t>(u) * layout.record_bytes, r});
      for (int b = 0; b < blocks; b++)
        put_codes(to + (static_cast<int64_t>(u) * blocks + b) * layout.code_bytes() + r * 4, codes + b * kBlock, layout.bits);
    }
}

void pack_fp8(const PackJob &job, const std::byte *rows, int count, std::byte *to) {
  bool scaled = job.type == WeightType::FP8_E4M3_BLOCK;
  int unit = scaled ? kFp8Block : job.k, header = scaled ? 4 : 0;
  std::byte *scales = to + (job.k + 3) / 4 * 64;
  for (int r = 0; r < count; r++)
    for (int u = 0; u < job.k / unit; u++) {
      const std::byte *from = rows + (static_cast<int64_t>(r) * (job.k / unit) + u) * (unit + header);
      if (scaled) std::memcpy(scales + (u * kPanel + r) * 4, from, 4);
      for (int i = 0; i < unit; i++) {
        int k = u * unit + i;
        to[(k / 4 * kPanel + r) * 4 + kFp8Order[k % 4]] = from[header + i];
      }
    }
}

}  // namespace

int64_t PackedWeight::panel_bytes(WeightType type, int64_t k) {
  switch (type) {
    case WeightType::F32: return k * kPanel * 4;
    case WeightType::F16: return (k + k % 2) * kPanel * 2;
    case WeightType::BF16: return (k + k % 2) * kPanel * 2;
    case WeightType::FP8_E4M3: return (k + 3) / 4 * 64;
    case WeightType::FP8_E4M3_BLOCK: return k / 4 * 64 + k / kFp8Block * kPanel * 4;
    default: {
      BlockLayout layout = block_layout(type);
      if (!layout.unit) throw std::invalid_argument("unknown weight type");
      return (k / kBlock * layout.code_bytes() + k / layout.unit * layout.record_bytes + 63) / 64 * 64;
    }
  }
}

int64_t file_row_bytes(WeightType type, int64_t k) {
  FileBlock block = file_block(type);
  if (k % block.inputs) throw std::invalid_argument("a row is not whole blocks");
  return k / block.inputs * block.bytes;
}

void pack_panel(const PackJob &job, int panel) {
  std::byte *to = job.to + panel * PackedWeight::panel_bytes(job.type, job.k);
  const std::byte *rows = job.rows + static_cast<int64_t>(panel) * kPanel * file_row_bytes(job.type, job.k);
  int count = std::min(kPanel, job.n - panel * kPanel);
  auto floats = [&](int64_t element, auto place) {
    for (int r = 0; r < count; r++)
      for (int k = 0; k < job.k; k++) std::memcpy(to + place(k, r), rows + (static_cast<int64_t>(r) * job.k + k) * element, element);
  };
  switch (job.type) {
    case WeightType::F32: return floats(4, [](int64_t k, int r) { return (k * kPanel + r) * 4; });
    case WeightType::F16: return floats(2, [](int64_t k, int r) { return (k * kPanel + r) * 2; });
    case WeightType::BF16: return floats(2, [](int64_t k, int r) { return ((k / 2 * kPanel + r) * 2 + k % 2) * 2; });
    case WeightType::FP8_E4M3:
    case WeightType::FP8_E4M3_BLOCK: return pack_fp8(job, rows, count, to);
    default: return pack_blocks(job, rows, count, to);
  }
}

}  // namespace octavo
