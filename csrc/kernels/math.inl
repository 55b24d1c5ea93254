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

OCTAVO_INLINE F32 silu(F32 x) { return x / (set1(1.0f) + exp(zero() - x)); }

}  // namespace octavo::OCTAVO_ISA
