#if defined(__x86_64__)
#include "simd_avx512.h"

namespace {

constexpr int kVecBlocks = 4;
using Codes = __m512i;
using Ints = __m512i;

inline Codes load_codes(const void* p) { return _mm512_loadu_si512(p); }
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline Codes broadcast_codes(const void* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline Ints broadcast_ints(const void* p) { return broadcast_codes(p); }
inline Codes low_nibbles(Codes q) { return _mm512_and_si512(q, _mm512_set1_epi8(15)); }
inline Codes high_nibbles(Codes q) { return low_nibbles(_mm512_srli_epi16(q, 4)); }
inline Ints dot_ints(Ints offsets, Codes low, Codes a_low, Codes high, Codes a_high) {
  return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(offsets, low, a_low), high, a_high);
}
inline Vec to_float(Ints a) { return {_mm512_cvtepi32_ps(a)}; }
inline Ints add_in_fours(const Ints (&v)[4]) {
  const Ints ab = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
  const Ints cd = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}
inline Vec load_halves(const std::uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Vec spread(int step, Vec a) {
  const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return {_mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(4 * step)), a.v)};
}
// Natural order into that of add_in_fours: lane v + 4 l takes output 4 v + l. The permutation is its own inverse.
inline Vec order_outputs(Vec a) {
  return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), a.v)};
}
inline Vec restore_outputs(Vec a) { return order_outputs(a); }

inline float quantize_codes(const float* x, std::int8_t* low, std::int8_t* high, std::int32_t* offsets) {
  const __m512 a = _mm512_loadu_ps(x);
  const __m512 b = _mm512_loadu_ps(x + 16);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  // As bits, magnitudes ascend up to infinity and then NaN.
  const __m512i largest = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), magnitude),
                                           _mm512_and_si512(_mm512_castps_si512(b), magnitude));
  const std::uint32_t bits = _mm512_reduce_max_epu32(largest);
  float peak;
  __builtin_memcpy(&peak, &bits, sizeof peak);
  const bool usable = peak >= 1e-30f && peak <= 3.402823466e38f;
  const __m512 inverse = _mm512_set1_ps(usable ? 127.0f / peak : 0.0f);
  const __m128i low_codes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)));
  const __m128i high_codes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(b, inverse)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), low_codes);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), high_codes);
  const __m128i eight = _mm_set1_epi8(8);
  const __m128i sums = _mm_dpbusd_epi32(_mm_dpbusd_epi32(_mm_setzero_si128(), eight, low_codes), eight, high_codes);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(offsets), _mm_sub_epi32(_mm_setzero_si128(), sums));
  return peak < 1e-30f ? 0.0f : peak / 127.0f;
}

// One row: a single stream of weights is what memory likes best.
constexpr int kTileColumnsOf(int rows) { return rows == 1 ? 1 : 2; }

}  // namespace

// After the vectors it is written in.
#include "q4_0_kernels_impl.h"

namespace ft::detail {

const Q4Kernels& q4_kernels_avx512vnni() {
  static constexpr Q4Kernels table = {quantize_row, quantize_block, dot_rows, add_down, finish_down};
  return table;
}

}  // namespace ft::detail

#endif
