// Included by vectors.h: the operations on sixteen floats for any processor.
#pragma once

static inline f32x16 load16(const bf16* p) {
  u16x16 h;
  memcpy(&h, p, sizeof h);
  return (f32x16)(__builtin_convertvector(h, u32x16) << 16);
}

// Round to nearest even; a NaN stays a NaN.
static inline void store16(bf16* p, f32x16 v) {
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 nan = (bits >> 16) | 0x40;
  u32x16 chosen = v != v ? nan : rounded;
  u16x16 h = __builtin_convertvector(chosen, u16x16);
  memcpy(p, &h, sizeof h);
}

static inline f32x16 store_rounded(bf16* p, f32x16 v) {
  store16(p, v);
  return load16(p);
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

static inline f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }

static inline f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) { return a * b + c; }

static inline f32x16 clamp_nan_stays(f32x16 x, float low, float high) {
  x = x < splat(low) ? splat(low) : x;
  return x > splat(high) ? splat(high) : x;
}

// To the nearest integer, for |x| < 2^22.
static inline f32x16 round16(f32x16 x) { return (x + 12582912.0f) - 12582912.0f; }

// x 2^n; 0 where n < -126. NaN stays: no comparison is true of it.
static inline f32x16 scale_by_power(f32x16 x, f32x16 n) {
  i32x16 power = __builtin_convertvector(n, i32x16);
  f32x16 scaled = x * (f32x16)((power + 127) << 23);
  return select(n < splat(-126.0f), splat(0.0f), scaled);
}

// Lane i is table[index[i] mod 16].
static inline f32x16 look_up(const float* table, u32x16 index) {
  f32x16 found;
  for (int i = 0; i < 16; ++i) found[i] = table[index[i] & 15];
  return found;
}

// x[i] lane j <-> x[j] lane i.
static inline void transpose16(u32x16* x) {
#pragma GCC unroll 4
  for (int d = 8; d; d /= 2) {
    u32x16 lo, hi;
    for (int i = 0; i < 16; ++i) {
      lo[i] = i & d ? 16 + i - d : i;
      hi[i] = i & d ? 16 + i : i + d;
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      if (!(i & d)) {
        u32x16 a = x[i], b = x[i + d];
        x[i] = __builtin_shuffle(a, b, lo);
        x[i + d] = __builtin_shuffle(a, b, hi);
      }
  }
}
