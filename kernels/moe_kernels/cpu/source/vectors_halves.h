// Included by vectors.h: sixteen lanes as two vectors of eight, for processors without AVX-512. GCC
// computes comparisons and choices of vectors that are wider than the processor's lane by lane.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef double f64x4 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

template <class V>
struct Halves {
  V low, high;

  using Lane = std::remove_reference_t<decltype(V{}[0])>;
  static constexpr int kHalf = sizeof(V) / sizeof(Lane);

  Lane operator[](int64_t i) const& { return i < kHalf ? low[i] : high[i - kHalf]; }
  Lane& operator[](int64_t i) & { return reinterpret_cast<Lane*>(this)[i]; }

  template <class W>
  explicit operator Halves<W>() const {  // the same bits
    return {(W)low, (W)high};
  }
};

using f32x16 = Halves<f32x8>;
using i32x16 = Halves<i32x8>;
using u32x16 = Halves<u32x8>;
using f64x8 = Halves<f64x4>;

#define FOR_HALVES(OP)                                                                            \
  template <class V>                                                                              \
  static inline auto operator OP(Halves<V> a, Halves<V> b) {                                      \
    return Halves<decltype(a.low OP b.low)>{a.low OP b.low, a.high OP b.high};                    \
  }                                                                                               \
  template <class V>                                                                              \
  static inline auto operator OP(Halves<V> a, typename Halves<V>::Lane b) {                       \
    return a OP Halves<V>{b - V{}, b - V{}};                                                      \
  }                                                                                               \
  template <class V>                                                                              \
  static inline auto operator OP(typename Halves<V>::Lane a, Halves<V> b) {                       \
    return Halves<V>{a - V{}, a - V{}} OP b;                                                      \
  }
#define AND_ASSIGNED(OP)                                                                          \
  FOR_HALVES(OP)                                                                                  \
  template <class V, class B>                                                                     \
  static inline Halves<V>& operator OP##=(Halves<V>& a, B b) {                                    \
    return a = a OP b;                                                                            \
  }
AND_ASSIGNED(+)
AND_ASSIGNED(-)
AND_ASSIGNED(*)
AND_ASSIGNED(/)
AND_ASSIGNED(&)
AND_ASSIGNED(|)
AND_ASSIGNED(^)
FOR_HALVES(<)
FOR_HALVES(>)
FOR_HALVES(>=)
FOR_HALVES(==)
FOR_HALVES(!=)
#undef AND_ASSIGNED
#undef FOR_HALVES

template <class V>
static inline Halves<V> operator-(Halves<V> a) { return {-a.low, -a.high}; }
template <class V>
static inline Halves<V> operator<<(Halves<V> a, int n) { return {a.low << n, a.high << n}; }
template <class V>
static inline Halves<V> operator>>(Halves<V> a, int n) { return {a.low >> n, a.high >> n}; }

static inline f32x16 splat(float value) { return {value - f32x8{}, value - f32x8{}}; }

template <class V>
static inline Halves<V> select(i32x16 mask, Halves<V> yes, Halves<V> no) {
  return {mask.low ? yes.low : no.low, mask.high ? yes.high : no.high};
}

template <class V, class P>
static inline V load_half(const P* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline f32x16 load16(const float* p) {
  return {load_half<f32x8>(p), load_half<f32x8>(p + 8)};
}

static inline void store16(float* p, f32x16 v) {
  memcpy(p, &v.low, sizeof v.low);
  memcpy(p + 8, &v.high, sizeof v.high);
}

static inline u32x16 load_units16(const uint32_t* p) {
  return {load_half<u32x8>(p), load_half<u32x8>(p + 8)};
}

static inline f64x8 load8_wide(const float* p) {
  return {__builtin_convertvector(load_half<f32x4>(p), f64x4),
          __builtin_convertvector(load_half<f32x4>(p + 4), f64x4)};
}

static inline void store8(double* p, f64x8 v) { memcpy(p, &v, sizeof v); }

static inline void store8(float* p, f64x8 v) {  // rounded
  f32x4 low = __builtin_convertvector(v.low, f32x4), high = __builtin_convertvector(v.high, f32x4);
  memcpy(p, &low, sizeof low);
  memcpy(p + 4, &high, sizeof high);
}

static inline f32x16 to_floats(i32x16 v) {
  return {__builtin_convertvector(v.low, f32x8), __builtin_convertvector(v.high, f32x8)};
}

static inline i32x16 to_ints(f32x16 v) {  // towards 0
  return {__builtin_convertvector(v.low, i32x8), __builtin_convertvector(v.high, i32x8)};
}

// Sixteen of 16 bits or 8 bits -> lanes, and back. (GCC converts bytes one by one.)
static inline u32x16 widened_halves(const void* from) {
  const uint16_t* p = (const uint16_t*)from;
  return {__builtin_convertvector(load_half<u16x8>(p), u32x8),
          __builtin_convertvector(load_half<u16x8>(p + 8), u32x8)};
}

#if defined(__AVX2__)
static inline u32x16 widened_bytes(const void* from) {
  const char* p = (const char*)from;
  return {(u32x8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
          (u32x8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}

static inline i32x16 signed_bytes(i8x16 v) {
  return {(i32x8)_mm256_cvtepi8_epi32((__m128i)v),
          (i32x8)_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)v, 8))};
}

static inline u16x16 narrow_halves(u32x16 v) {  // of lanes below 2^16
  __m256i mixed = _mm256_packus_epi32((__m256i)v.low, (__m256i)v.high);
  return (u16x16)_mm256_permute4x64_epi64(mixed, 0xd8);
}

static inline i8x16 to_bytes(i32x16 v) {  // of lanes from -128 to 127
  __m256i mixed = _mm256_packs_epi32((__m256i)v.low, (__m256i)v.high);
  mixed = _mm256_permute4x64_epi64(mixed, 0xd8);
  return (i8x16)_mm_packs_epi16(_mm256_castsi256_si128(mixed), _mm256_extracti128_si256(mixed, 1));
}
#else
static inline u32x16 widened_bytes(const void* from) {
  u32x16 v;
  for (int i = 0; i < 16; ++i) v[i] = ((const uint8_t*)from)[i];
  return v;
}

static inline i32x16 signed_bytes(i8x16 bytes) {
  i32x16 v;
  for (int i = 0; i < 16; ++i) v[i] = bytes[i];
  return v;
}

static inline u16x16 narrow_halves(u32x16 v) {
  u16x16 narrow;
  for (int i = 0; i < 16; ++i) narrow[i] = (uint16_t)v[i];
  return narrow;
}

static inline i8x16 to_bytes(i32x16 v) {
  i8x16 bytes;
  for (int i = 0; i < 16; ++i) bytes[i] = (int8_t)v[i];
  return bytes;
}
#endif

static inline f32x16 load16(const bf16* p) { return (f32x16)(widened_halves(p) << 16); }

// fp32 -> bf16 in the low halves of the lanes, to nearest even; a NaN stays a NaN.
static inline u32x16 bf16_bits(f32x16 v) {
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return select(v != v, (bits >> 16) | 0x40, rounded);
}

static inline void store16(bf16* p, f32x16 v) {
  u16x16 narrow = narrow_halves(bf16_bits(v));
  memcpy(p, &narrow, sizeof narrow);
}

static inline f32x16 round_to(const bf16*, f32x16 v) { return (f32x16)(bf16_bits(v) << 16); }

static inline f32x16 store_rounded(bf16* p, f32x16 v) {
  u32x16 bits = bf16_bits(v);
  u16x16 narrow = narrow_halves(bits);
  memcpy(p, &narrow, sizeof narrow);
  return (f32x16)(bits << 16);
}

template <class T>
static inline f32x16 load_some(const T* p, int64_t count) {
  T padded[16] = {};
  memcpy(padded, p, count * sizeof(T));
  return load16(padded);
}

template <class T>
static inline void store_some(T* p, f32x16 v, int64_t count) {
  T padded[16];
  store16(padded, v);
  memcpy(p, padded, count * sizeof(T));
}

static inline f32x16 maximum(f32x16 a, f32x16 b) { return select(a > b, a, b); }

static inline f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) { return a * b + c; }

static inline f32x16 clamp_nan_stays(f32x16 x, float low, float high) {
  x = select(x < splat(low), splat(low), x);
  return select(x > splat(high), splat(high), x);
}

// To the nearest integer, for |x| < 2^22.
static inline f32x16 round16(f32x16 x) { return (x + 12582912.0f) - 12582912.0f; }

// x 2^n; 0 where n < -126. NaN stays: no comparison is true of it.
static inline f32x16 scale_by_power(f32x16 x, f32x16 n) {
  f32x16 scaled = x * (f32x16)((to_ints(n) + 127) << 23);
  return select(n < splat(-126.0f), splat(0.0f), scaled);
}

// Lane i is table[index[i] mod 16].
static inline f32x16 look_up(const float* table, u32x16 index) {
  const f32x16 all = load16(table);
  return {__builtin_shuffle(all.low, all.high, (i32x8)(index.low & 15)),
          __builtin_shuffle(all.low, all.high, (i32x8)(index.high & 15))};
}

// Of each eight lanes 0, 4, 1, 5, 2, 6, 3, 7.
static inline i32x16 fours_mixed(i32x16 v) {
  const i32x8 order = {0, 4, 1, 5, 2, 6, 3, 7};
  return {__builtin_shuffle(v.low, order), __builtin_shuffle(v.high, order)};
}

// The lanes 4, 2 or 1 further up come down; the others do not matter.
template <class V>
static inline V down4(V v) { return __builtin_shuffle(v, i32x8{4, 5, 6, 7, 4, 5, 6, 7}); }
template <class V>
static inline V down2(V v) { return __builtin_shuffle(v, i32x8{2, 3, 2, 3, 6, 7, 6, 7}); }
template <class V>
static inline V down1(V v) { return __builtin_shuffle(v, i32x8{1, 1, 3, 3, 5, 5, 7, 7}); }

// The lanes' sum, by distances 8, 4, 2, 1.
template <class V>
static inline typename Halves<V>::Lane fold(Halves<V> v) {
  V sum = v.low + v.high;
  sum += down4(sum);
  sum += down2(sum);
  return sum[0] + sum[1];
}

template <class V>
static inline typename Halves<V>::Lane largest(Halves<V> v) {
  V most = v.low > v.high ? v.low : v.high, other = down4(most);
  most = most > other ? most : other, other = down2(most);
  most = most > other ? most : other;
  return most[0] > most[1] ? most[0] : most[1];
}

// r[i] lane j <-> r[j] lane i, of eight rows: pairs, fours, halves.
static inline void transpose8(u32x8* r) {
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    u32x8 a = r[i], b = r[i + 1];
    r[i] = __builtin_shuffle(a, b, u32x8{0, 8, 1, 9, 4, 12, 5, 13});
    r[i + 1] = __builtin_shuffle(a, b, u32x8{2, 10, 3, 11, 6, 14, 7, 15});
  }
  u32x8 fours[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      u32x8 a = r[i + k], b = r[i + 2 + k];
      fours[i + 2 * k] = __builtin_shuffle(a, b, u32x8{0, 1, 8, 9, 4, 5, 12, 13});
      fours[i + 2 * k + 1] = __builtin_shuffle(a, b, u32x8{2, 3, 10, 11, 6, 7, 14, 15});
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = __builtin_shuffle(fours[i], fours[4 + i], u32x8{0, 1, 2, 3, 8, 9, 10, 11});
    r[4 + i] = __builtin_shuffle(fours[i], fours[4 + i], u32x8{4, 5, 6, 7, 12, 13, 14, 15});
  }
}

// x[i] lane j <-> x[j] lane i.
static inline void transpose16(u32x16* x) {
  const auto transposed = [&](int first, bool is_high, u32x8* block) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) block[i] = is_high ? x[first + i].high : x[first + i].low;
    transpose8(block);
  };
  u32x8 a[8], b[8];
  transposed(0, false, a);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i].low = a[i];
  transposed(0, true, a);
  transposed(8, false, b);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[8 + i].low = a[i], x[i].high = b[i];
  transposed(8, true, a);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[8 + i].high = a[i];
}
