#if defined(__x86_64__)
#include "simd_avx2.h"

namespace {

constexpr int kVecBlocks = 2;
using Codes = __m256i;
using Ints = __m256i;

inline Codes load_codes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Ints load_ints(const void* p) { return load_codes(p); }
inline Codes broadcast_codes(const void* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline Ints broadcast_ints(const void* p) { return broadcast_codes(p); }
inline Codes low_nibbles(Codes q) { return _mm256_and_si256(q, _mm256_set1_epi8(15)); }
inline Codes high_nibbles(Codes q) { return low_nibbles(_mm256_srli_epi16(q, 4)); }
inline Ints dot_ints(Ints offsets, Codes low, Codes a_low, Codes high, Codes a_high) {
  // Four products of at most 15 * 127 stay far from the limits of 16 bits.
  const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, a_low), _mm256_maddubs_epi16(high, a_high));
  return _mm256_add_epi32(offsets, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Vec to_float(Ints a) { return {_mm256_cvtepi32_ps(a)}; }
inline Ints add_in_fours(const Ints (&v)[4]) {
  return _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
}
inline Vec load_halves(const std::uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Vec spread(int step, Vec a) {
  const __m256i first = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  return {_mm256_permutevar8x32_ps(a.v, _mm256_add_epi32(first, _mm256_set1_epi32(2 * step)))};
}
// Natural order into that of add_in_fours: lane v + 4 l takes output 2 v + l.
inline Vec order_outputs(Vec a) { return {_mm256_permutevar8x32_ps(a.v, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7))}; }
inline Vec restore_outputs(Vec a) { return {_mm256_permutevar8x32_ps(a.v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))}; }

// Dwords in -127..127 of sixteen values.
inline __m128i narrow(__m256 a, __m256 b, __m256 inverse) {
  const __m256i words =
      _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(a, inverse)), _mm256_cvtps_epi32(_mm256_mul_ps(b, inverse)));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  return _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
}

inline float quantize_codes(const float* x, std::int8_t* low, std::int8_t* high, std::int32_t* offsets) {
  __m256 v[4];
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    // As bits, magnitudes ascend up to infinity and then NaN.
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(v[i]), _mm256_set1_epi32(0x7fffffff));
    largest = _mm256_max_epu32(largest, bits);
  }
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
  const float peak = _mm_cvtss_f32(_mm_castsi128_ps(m));
  const bool usable = peak >= 1e-30f && peak <= 3.402823466e38f;
  const __m256 inverse = _mm256_set1_ps(usable ? 127.0f / peak : 0.0f);
  const __m128i low_codes = narrow(v[0], v[1], inverse);
  const __m128i high_codes = narrow(v[2], v[3], inverse);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), low_codes);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), high_codes);
  const __m128i eight = _mm_set1_epi8(8);
  const __m128i pairs = _mm_add_epi16(_mm_maddubs_epi16(eight, low_codes), _mm_maddubs_epi16(eight, high_codes));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(offsets), _mm_madd_epi16(pairs, _mm_set1_epi16(-1)));
  return peak < 1e-30f ? 0.0f : peak / 127.0f;
}

// One row: a single stream of weights is what memory likes best. More than two: the registers are full.
constexpr int kTileColumnsOf(int rows) { return rows == 2 ? 2 : 1; }

}  // namespace

// After the vectors it is written in.
#include "q4_0_kernels_impl.h"

namespace ft::detail {

const Q4Kernels& q4_kernels_avx2() {
  static constexpr Q4Kernels table = {quantize_row, quantize_block, dot_rows, add_down, finish_down};
  return table;
}

}  // namespace ft::detail

#endif
