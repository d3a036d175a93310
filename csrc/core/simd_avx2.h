// Eight-lane vectors: AVX2, FMA. See simd_scalar.h for what each function means.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace {

constexpr int kLanes = 8;
constexpr int kTileRows = 4;
constexpr int kTileColumns = 2;

struct Vec {
  __m256 v;
};

inline __m256i lane_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Vec vec_zero() { return {_mm256_setzero_ps()}; }
inline Vec vec_set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec vec_load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void vec_store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline Vec vec_load_partial(const float* p, int n) { return {_mm256_maskload_ps(p, lane_mask(n))}; }
inline void vec_store_partial(float* p, Vec a, int n) { _mm256_maskstore_ps(p, lane_mask(n), a.v); }
inline Vec vec_add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec vec_sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec vec_mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec vec_div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec vec_fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec vec_max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec vec_min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline float vec_reduce_add(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float vec_reduce_max(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Vec vec_round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec vec_scale_pow2(Vec a, Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}
inline Vec vec_zero_where_less(Vec a, Vec x, float limit) {
  return {_mm256_and_ps(a.v, _mm256_cmp_ps(x.v, _mm256_set1_ps(limit), _CMP_NLT_UQ))};
}

inline void load_pair(const float* p, Vec& a, Vec& b) {
  a.v = _mm256_loadu_ps(p);
  b.v = _mm256_loadu_ps(p + kLanes);
}
inline void load_pair(const std::uint16_t* p, Vec& a, Vec& b) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  a.v = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
  b.v = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline Vec load_wide(const float* p) { return vec_load(p); }
inline Vec load_wide(const std::uint16_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16))};
}

inline void transpose(Vec (&rows)[kLanes]) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
    t[i + 1] = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  __m256 u[8];
  for (int i = 0; i < 8; i += 4) {
    u[i + 0] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    rows[i + 4].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

}  // namespace
