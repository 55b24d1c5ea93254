// Elementary functions over the vector vocabulary.
namespace octavo::OCTAVO_ISA {

// e^x by range reduction to |r| <= ln2/2 and a degree-6 polynomial (Cephes' expf); relative error below 2e-7.
// 0 below -87.3 (so e^-inf is exactly 0), finite up to 88.
OCTAVO_INLINE F32 exp(F32 x) {
  F32 clamped = vmin(vmax(x, set1(-87.33f)), set1(88.0f));
  F32 n = round_nearest(clamped * set1(1.44269504088896f));
  F32 r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  F32 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  I32 power = to_i32(n + set1(127.0f));
  F32 scale = bits_to_f32(shift_left_23(power));
  return where_less(x, set1(-87.33f), zero(), p * scale);
}

OCTAVO_INLINE F32 sigmoid(F32 x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }
OCTAVO_INLINE F32 silu(F32 x) { return x / (set1(1.0f) + exp(zero() - x)); }

// Near 0 an odd polynomial (Cephes' tanhf), which keeps small values' relative accuracy; elsewhere 1 - 2 / (e^2|x| + 1).
OCTAVO_INLINE F32 tanh(F32 x) {
  F32 magnitude = abs(x), square = x * x;
  F32 p = set1(-5.70498872745e-3f);
  p = fma(p, square, set1(2.06390887954e-2f));
  p = fma(p, square, set1(-5.37397155531e-2f));
  p = fma(p, square, set1(1.33314422036e-1f));
  p = fma(p, square, set1(-3.33332819422e-1f));
  F32 near = fma(p * square, x, x);
  F32 far = set1(1.0f) - set1(2.0f) / (exp(magnitude + magnitude) + set1(1.0f));
  return where_less(magnitude, set1(0.625f), near, where_less(x, zero(), zero() - far, far));
}

// x * Phi(x), Phi(-|x|) = erfc(z) / 2 with z = |x| / sqrt 2. erfc(z) = e^-z^2 * t * P(t), t = 1 / (1 + 0.35 z): our own
// least-squares fit on Chebyshev nodes, relative error below 8e-8. Absolute error of the result below 4e-7 * max(1, |x|).
OCTAVO_INLINE F32 gelu(F32 x) {
  F32 magnitude = abs(x);
  F32 t = set1(1.0f) / fma(magnitude, set1(0.35f * 0.70710678118654752f), set1(1.0f));
  F32 p = set1(0.0470847087f);
  p = fma(p, t, set1(-0.296791927f));
  p = fma(p, t, set1(0.601643768f));
  p = fma(p, t, set1(-0.429345038f));
  p = fma(p, t, set1(0.41947063f));
  p = fma(p, t, set1(0.0578947346f));
  p = fma(p, t, set1(0.207653286f));
  p = fma(p, t, set1(0.194785939f));
  p = fma(p, t, set1(0.197603842f));
  F32 tail = set1(0.5f) * exp(x * x * set1(-0.5f)) * (t * p);
  return x * where_less(x, zero(), tail, set1(1.0f) - tail);
}

// By tanh, which 1 + tanh(u) = 2 / (1 + e^-2u) makes one exponential.
OCTAVO_INLINE F32 gelu_tanh(F32 x) {
  constexpr float root = 0.79788456080286536f;  // sqrt(2 / pi)
  F32 u = x * fma(x * x, set1(root * 0.044715f), set1(root));
  return x / (set1(1.0f) + exp(u * set1(-2.0f)));
}

}  // namespace octavo::OCTAVO_ISA
