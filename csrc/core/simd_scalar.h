// Four-lane vectors in plain C++ for processors without AVX2; also the reference for the wider ones.
// Everything is in an anonymous namespace: each kernel file owns its copy, compiled with its own flags.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

constexpr int kLanes = 4;
// Register tile of a dot product: kTileRows activations x kTileColumns weight rows.
constexpr int kTileRows = 4;
constexpr int kTileColumns = 2;

struct Vec {
  float v[kLanes];
};

template <typename F>
inline Vec map_lanes(F f) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = f(i);
  return r;
}

inline Vec vec_zero() { return Vec{}; }
inline Vec vec_set1(float x) {
  return map_lanes([&](int) { return x; });
}
inline Vec vec_load(const float* p) {
  Vec r;
  __builtin_memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void vec_store(float* p, Vec a) { __builtin_memcpy(p, a.v, sizeof a.v); }
inline Vec vec_load_partial(const float* p, int n) {
  return map_lanes([&](int i) { return i < n ? p[i] : 0.0f; });
}
inline void vec_store_partial(float* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
inline Vec vec_add(Vec a, Vec b) {
  return map_lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec vec_sub(Vec a, Vec b) {
  return map_lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec vec_mul(Vec a, Vec b) {
  return map_lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec vec_div(Vec a, Vec b) {
  return map_lanes([&](int i) { return a.v[i] / b.v[i]; });
}
// a * b + c
inline Vec vec_fma(Vec a, Vec b, Vec c) {
  return map_lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
// b where either is NaN.
inline Vec vec_max(Vec a, Vec b) {
  return map_lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec vec_min(Vec a, Vec b) {
  return map_lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline float vec_reduce_add(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
inline float vec_reduce_max(Vec a) {
  float r = a.v[0];
  for (int i = 1; i < kLanes; ++i) r = a.v[i] > r ? a.v[i] : r;
  return r;
}
// Round to the nearest integer, ties to even, for |a| < 2^22.
inline Vec vec_round(Vec a) {
  return map_lanes([&](int i) { return (a.v[i] + 12582912.0f) - 12582912.0f; });
}
// a * 2^n for whole n in [-126, 127]; NaN stays NaN.
inline Vec vec_scale_pow2(Vec a, Vec n) {
  return map_lanes([&](int i) {
    if (n.v[i] != n.v[i]) return n.v[i];
    const std::int32_t bits = (static_cast<std::int32_t>(n.v[i]) + 127) << 23;
    float power;
    __builtin_memcpy(&power, &bits, 4);
    return a.v[i] * power;
  });
}
// a where not x < limit, else 0.
inline Vec vec_zero_where_less(Vec a, Vec x, float limit) {
  return map_lanes([&](int i) { return x.v[i] < limit ? 0.0f : a.v[i]; });
}

inline float widen_bf16(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// 2 * kLanes weights as two vectors in "packed" order: BF16 splits into even and odd elements, F32 into halves.
inline void load_pair(const float* p, Vec& a, Vec& b) {
  a = vec_load(p);
  b = vec_load(p + kLanes);
}
inline void load_pair(const std::uint16_t* p, Vec& a, Vec& b) {
  a = map_lanes([&](int i) { return widen_bf16(p[2 * i]); });
  b = map_lanes([&](int i) { return widen_bf16(p[2 * i + 1]); });
}

// kLanes consecutive elements in natural order.
inline Vec load_wide(const float* p) { return vec_load(p); }
inline Vec load_wide(const std::uint16_t* p) {
  return map_lanes([&](int i) { return widen_bf16(p[i]); });
}

// Transposes kLanes vectors in place.
inline void transpose(Vec (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    for (int j = i + 1; j < kLanes; ++j) {
      const float t = rows[i].v[j];
      rows[i].v[j] = rows[j].v[i];
      rows[j].v[i] = t;
    }
  }
}

}  // namespace
