// What AVX2 can do on this machine: peaks of its instructions, and plain panel kernels to hold octavo's against.
// bench/kernels.py compiles and runs it. Prints lines "NAME ROWS G", in 10^9 operations a second; a product and a sum
// are two operations.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <thread>
#include <vector>

// Of all threads: the machine may be shared.
static double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }
template <class F>
static double best_of(int repeats, int threads, F work) {
  double best = 1e9;
  for (int r = 0; r < repeats; r++) {
    double begin = processor_seconds();
    std::vector<std::thread> pool;
    for (int i = 1; i < threads; i++) pool.emplace_back(work, i);
    work(0);
    for (auto &t : pool) t.join();
    best = std::min(best, (processor_seconds() - begin) / threads);
  }
  return best;
}

// 16 outputs x 32 inputs with a scale an output: 4-bit codes (two a byte) or 8-bit ones.
template <int Bits>
struct Block {
  uint8_t codes[Bits][64];
  float scale[16];
};
struct Row {
  const int8_t *codes;
  const float *scale;
};

static __m256i dot(__m256i sum, __m256i codes, __m256i quad) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, quad), _mm256_set1_epi16(1)));
}
static __m256i signed_dot(__m256i sum, __m256i codes, __m256i quad) {
  return dot(sum, _mm256_abs_epi8(codes), _mm256_sign_epi8(quad, codes));
}

// out[m][16] = sum over blocks of scale * (codes . activations) * the activations' scale.
template <int Bits, int M>
static void panel(const Block<Bits> *w, int blocks, const Row *x, float *out, int64_t stride) {
  __m256 f[M][2];
  for (auto &row : f) row[0] = row[1] = _mm256_setzero_ps();
  const __m256i low = _mm256_set1_epi8(15);
  for (int b = 0; b < blocks; b++) {
    __m256i sum[M][2];
    for (auto &row : sum) row[0] = row[1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int g = 0; g < Bits; g++)
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w[b].codes[g]) + h);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          int32_t quads[2];
          std::memcpy(&quads[0], x[m].codes + b * 32 + g * 4, 4);
          if constexpr (Bits == 4) {
            std::memcpy(&quads[1], x[m].codes + b * 32 + 16 + g * 4, 4);
            sum[m][h] = dot(sum[m][h], _mm256_and_si256(v, low), _mm256_set1_epi32(quads[0]));
            sum[m][h] = dot(sum[m][h], _mm256_and_si256(_mm256_srli_epi16(v, 4), low), _mm256_set1_epi32(quads[1]));
          } else {
            sum[m][h] = signed_dot(sum[m][h], v, _mm256_set1_epi32(quads[0]));
          }
        }
      }
    for (int m = 0; m < M; m++)
      for (int h = 0; h < 2; h++) {
        __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(w[b].scale + 8 * h), _mm256_set1_ps(x[m].scale[b]));
        f[m][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[m][h]), scale, f[m][h]);
      }
  }
  for (int m = 0; m < M; m++)
    for (int h = 0; h < 2; h++) _mm256_storeu_ps(out + m * stride + 8 * h, f[m][h]);
}

// P panels at once, for one row alone has too few sums under way.
template <int M, int P>
static void float_panel(const float *w, int k, const float *x, float *out, int64_t stride) {
  __m256 f[M][P][2];
  for (auto &row : f)
    for (auto &sums : row) sums[0] = sums[1] = _mm256_setzero_ps();
  for (int i = 0; i < k; i++)
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
      for (int p = 0; p < P; p++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++)
          f[m][p][h] = _mm256_fmadd_ps(_mm256_loadu_ps(w + (p * k + i) * 16 + 8 * h), _mm256_set1_ps(x[m * k + i]), f[m][p][h]);
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++)
      for (int h = 0; h < 2; h++) _mm256_storeu_ps(out + m * stride + p * 16 + 8 * h, f[m][p][h]);
}

// Runs tile(panel, row, rows) over all of a product, the panels divided among the threads, 8 panels at a time. A tile takes
// `step` panels.
template <class Tile>
static double product(int threads, int panels, int rows, int k, int step, Tile tile) {
  double operations = 2.0 * panels * 16 * k * rows;
  int inner = std::max(1, static_cast<int>(1e9 / operations));
  double seconds = best_of(7, threads, [&](int id) {
    for (int i = 0; i < inner; i++)
      for (int first = panels * id / threads, end = panels * (id + 1) / threads, p = first; p < end; p += 8)
        for (int m = 0; m < rows; m += 4)
          for (int q = p; q < std::min(p + 8, end); q += step) tile(q, m, std::min(rows - m, 4));
  });
  return operations * inner / seconds / 1e9;
}

template <int Bits>
static void integer_products(int threads, int n, int k, int rows) {
  int panels = n / 16, blocks = k / 32;
  std::vector<Block<Bits>> w(static_cast<size_t>(panels) * blocks);
  auto *bytes = reinterpret_cast<uint8_t *>(w.data());
  for (size_t i = 0; i < w.size() * sizeof(w[0]); i++) bytes[i] = static_cast<uint8_t>(i * 2654435761u >> 24) & 63;
  std::vector<int8_t> codes(static_cast<size_t>(rows) * k, 3);
  std::vector<float> scales(static_cast<size_t>(rows) * blocks, 0.1f), out(static_cast<size_t>(rows) * n);
  std::vector<Row> x;
  for (int m = 0; m < rows; m++) x.push_back({&codes[static_cast<size_t>(m) * k], &scales[static_cast<size_t>(m) * blocks]});
  double rate = product(threads, panels, rows, k, 1, [&](int p, int m, int count) {
    const auto *from = &w[static_cast<size_t>(p) * blocks];
    float *to = &out[static_cast<size_t>(m) * n + p * 16];
    count == 4 ? panel<Bits, 4>(from, blocks, &x[m], to, n) : panel<Bits, 1>(from, blocks, &x[m], to, n);
  });
  std::printf("int%d %d %.1f\n", Bits, rows, rate);
}

static void float_products(int threads, int n, int k, int rows) {
  std::vector<float> w(static_cast<size_t>(n) * k, 0.5f), x(static_cast<size_t>(rows) * k, 0.5f), out(static_cast<size_t>(rows) * n);
  double rate = product(threads, n / 16, rows, k, rows == 1 ? 4 : 1, [&](int p, int m, int count) {
    const float *from = &w[static_cast<size_t>(p) * 16 * k], *at = &x[static_cast<size_t>(m) * k];
    float *to = &out[static_cast<size_t>(m) * n + p * 16];
    count == 4 ? float_panel<4, 1>(from, k, at, to, n) : float_panel<1, 4>(from, k, at, to, n);
  });
  std::printf("float %d %.1f\n", rows, rate);
}

int main(int, char **arguments) {
  int threads = std::atoi(arguments[1]), n = std::atoi(arguments[2]), k = std::atoi(arguments[3]);
  constexpr int64_t kTimes = 20000000;
#define TEN(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9)
  double integer = best_of(5, threads, [](int) {
    __m256i one = _mm256_set1_epi16(1), t;
#define DECLARE(i) __m256i a##i = one;
    TEN(DECLARE)
    for (int64_t i = 0; i < kTimes; i++) {
#define DOT(i) asm volatile("vpmaddubsw %2,%2,%1; vpmaddwd %2,%1,%1; vpaddd %1,%0,%0" : "+x"(a##i), "=&x"(t) : "x"(one));
      TEN(DOT)
    }
  });
  double floats = best_of(5, threads, [](int) {
    __m256 one = _mm256_set1_ps(1);
#define DECLARE_FLOAT(i) __m256 a##i = one;
    TEN(DECLARE_FLOAT)
    for (int64_t i = 0; i < kTimes; i++) {
#define FMA(i) asm volatile("vfmadd231ps %1,%1,%0" : "+x"(a##i) : "x"(one));
      TEN(FMA)
    }
  });
  std::printf("int-peak 0 %.1f\nfloat-peak 0 %.1f\n", threads * kTimes * 10 * 64 / integer / 1e9,
              threads * kTimes * 10 * 16 / floats / 1e9);
  for (int rows : {1, 8, 512}) {
    integer_products<4>(threads, n, k, rows);
    integer_products<8>(threads, n, k, rows);
    float_products(threads, n, k, rows);
  }
}
