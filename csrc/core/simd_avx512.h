// Sixteen-lane vectors: AVX-512 F, BW, VL, DQ. See simd_scalar.h for what each function means.
#pragma once

// GCC 12 warns inside its own header about the undefined pass-through operand of unmasked intrinsics (PR 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace {

constexpr int kLanes = 16;
constexpr int kTileRows = 4;
constexpr int kTileColumns = 4;

struct Vec {
  __m512 v;
};

inline __mmask16 lane_mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Vec vec_zero() { return {_mm512_setzero_ps()}; }
inline Vec vec_set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec vec_load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void vec_store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec vec_load_partial(const float* p, int n) { return {_mm512_maskz_loadu_ps(lane_mask(n), p)}; }
inline void vec_store_partial(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, lane_mask(n), a.v); }
inline Vec vec_add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec vec_sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec vec_mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec vec_div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec vec_fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec vec_max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec vec_min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline float vec_reduce_add(Vec a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float vec_reduce_max(Vec a) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Vec vec_round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec vec_scale_pow2(Vec a, Vec n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)))};
}
inline Vec vec_zero_where_less(Vec a, Vec x, float limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), a.v)};
}

inline void load_pair(const float* p, Vec& a, Vec& b) {
  a.v = _mm512_loadu_ps(p);
  b.v = _mm512_loadu_ps(p + kLanes);
}
inline void load_pair(const std::uint16_t* p, Vec& a, Vec& b) {
  const __m512i raw = _mm512_loadu_si512(p);
  a.v = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
  b.v = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline Vec load_wide(const float* p) { return vec_load(p); }
inline Vec load_wide(const std::uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}

inline void transpose(Vec (&rows)[kLanes]) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  // u[4g + c] holds, in each 128-bit part p, column 4p + c of rows 4g .. 4g+3.
  __m512 u[16];
  for (int g = 0; g < 16; g += 4) {
    u[g + 0] = _mm512_shuffle_ps(t[g], t[g + 2], 0x44);
    u[g + 1] = _mm512_shuffle_ps(t[g], t[g + 2], 0xee);
    u[g + 2] = _mm512_shuffle_ps(t[g + 1], t[g + 3], 0x44);
    u[g + 3] = _mm512_shuffle_ps(t[g + 1], t[g + 3], 0xee);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 low = _mm512_shuffle_f32x4(u[c], u[c + 4], 0x44);   // parts 0, 1
    const __m512 high = _mm512_shuffle_f32x4(u[c], u[c + 4], 0xee);  // parts 2, 3
    const __m512 low2 = _mm512_shuffle_f32x4(u[c + 8], u[c + 12], 0x44);
    const __m512 high2 = _mm512_shuffle_f32x4(u[c + 8], u[c + 12], 0xee);
    rows[c].v = _mm512_shuffle_f32x4(low, low2, 0x88);
    rows[c + 4].v = _mm512_shuffle_f32x4(low, low2, 0xdd);
    rows[c + 8].v = _mm512_shuffle_f32x4(high, high2, 0x88);
    rows[c + 12].v = _mm512_shuffle_f32x4(high, high2, 0xdd);
  }
}

}  // namespace

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
