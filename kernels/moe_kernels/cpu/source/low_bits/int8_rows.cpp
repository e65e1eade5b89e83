// Compiled with -ffp-contract=off: a product and a sum are never rounded together here.

#include "int8_rows.h"

#include "../panels.h"
#include "../threads.h"
#include "convert.h"

constexpr float kLeastMagnitude = 0x1p-100f;  // below it all count as 0

template <class T>
static void quantise_group(const T* x, int8_t* values, float* scale, int32_t* sum) {
  f32x16 v[2] = {load16(x), load16(x + 16)};
  i32x16 size[2] = {(i32x16)v[0] & 0x7fffffff, (i32x16)v[1] & 0x7fffffff};
  int32_t bits = largest(select(size[0] > size[1], size[0], size[1]));
  float most;
  memcpy(&most, &bits, sizeof most);
  if (bits >= 0x7f800000 || most < kLeastMagnitude) {  // NaN and infinity make the row NaN
    *scale = most < kLeastMagnitude ? 0.0f : __builtin_nanf("");
    memset(values, 0, kRowGroup);
    *sum = 0;
    return;
  }
  *scale = most / 127.0f;
  const float factor = 127.0f / most;
  i32x16 q[2];
  for (int i = 0; i < 2; ++i) {
    q[i] = to_ints(round16(v[i] * factor));
    i8x16 bytes = to_bytes(fours_mixed(q[i]));
    memcpy(values + 16 * i, &bytes, sizeof bytes);
  }
  *sum = fold(q[0] + q[1]);
}

template <class T>
QuantisedRows quantise_rows(const T* x, int64_t row_step, int64_t num_rows, int64_t width,
                            char* memory, int64_t threads) {
  const int64_t num_groups = width / kRowGroup, per_job = 16384 / width + 1;
  int8_t* values = (int8_t*)memory;
  float* scales = (float*)(memory + num_rows * width);
  int32_t* sums = (int32_t*)(scales + num_rows * num_groups);
  parallel_for((num_rows + per_job - 1) / per_job, num_rows * width > 32768 ? threads : 1,
               [&](int64_t j) {
                 for (int64_t r = j * per_job; r < std::min(num_rows, (j + 1) * per_job); ++r)
                   for (int64_t g = 0; g < num_groups; ++g)
                     quantise_group(x + r * row_step + g * kRowGroup,
                                    values + r * width + g * kRowGroup, scales + r * num_groups + g,
                                    sums + r * num_groups + g);
               });
  return {values, scales, sums, width};
}

template QuantisedRows quantise_rows(const bf16*, int64_t, int64_t, int64_t, char*, int64_t);
template QuantisedRows quantise_rows(const float*, int64_t, int64_t, int64_t, char*, int64_t);

// Four unsigned codes and four signed values of k in each lane: sums += their products. The sums of
// a group are held as the processor makes them until finish().
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int kWidth = 16, kMostRows = 6;
typedef __m512i Lanes;

static inline Lanes load_lanes(const uint32_t* p) { return _mm512_loadu_si512(p); }
static inline Lanes low_halves(Lanes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
static inline Lanes high_halves(Lanes v) { return low_halves(_mm512_srli_epi32(v, 4)); }
static inline Lanes look_up(__m128i table, Lanes codes) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
}

template <Values kValues>
struct GroupSum {
  Lanes sums;
  inline void start() { sums = _mm512_setzero_si512(); }
  inline void add(Lanes codes, int32_t row) {
    sums = _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(row));
  }
  inline void end_eight() {}
  inline Lanes finish() const { return sums; }
};
constexpr int32_t kByteOffset = 0;

#elif defined(__AVX2__)
constexpr int kWidth = 8, kMostRows = 3;
typedef __m256i Lanes;

static inline Lanes load_lanes(const uint32_t* p) {
  return _mm256_loadu_si256((const __m256i*)p);
}
static inline Lanes low_halves(Lanes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
static inline Lanes high_halves(Lanes v) { return low_halves(_mm256_srli_epi32(v, 4)); }
static inline Lanes look_up(__m128i table, Lanes codes) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}

#if defined(__AVXVNNI__)
template <Values kValues>
struct GroupSum {
  Lanes sums;
  inline void start() { sums = _mm256_setzero_si256(); }
  inline void add(Lanes codes, int32_t row) {
    sums = _mm256_dpbusd_avx_epi32(sums, codes, _mm256_set1_epi32(row));
  }
  inline void end_eight() {}
  inline Lanes finish() const { return sums; }
};
constexpr int32_t kByteOffset = 0;
#else
// Pairs of products add up in 16 bits: 8 of 15 x 127 x 2 stay below 2^15, and so do 4 of
// 24 x 127 x 2 (E2M1). Codes of 8 bits become signed, and their signs move to the row's values.
template <Values kValues>
struct GroupSum {
  Lanes pairs, sums;
  inline void start() { pairs = sums = _mm256_setzero_si256(); }
  inline void widen() {
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    pairs = _mm256_setzero_si256();
  }
  inline void add(Lanes codes, int32_t row) {
    Lanes values = _mm256_set1_epi32(row);
    if (kValues == kInt8) {
      Lanes weights = _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80));
      pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(values, weights));
      widen();
    } else pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes, values));
  }
  bool is_odd = false;
  inline void end_eight() {
    if (kValues == kE2M1 && is_odd) widen();
    is_odd = !is_odd;
  }
  inline Lanes finish() {
    if (kValues == kInt4) widen();
    return sums;
  }
};
constexpr int32_t kByteOffset = 128;  // that the codes of 8 bits are made smaller by
#endif

#else
constexpr int kWidth = 8, kMostRows = 2;
typedef u32x8 Lanes;

static inline Lanes load_lanes(const uint32_t* p) { return load_half<u32x8>(p); }
static inline Lanes low_halves(Lanes v) { return v & 0x0f0f0f0f; }
static inline Lanes high_halves(Lanes v) { return v >> 4 & 0x0f0f0f0f; }

template <Values kValues>
struct GroupSum {
  i32x8 sums;
  inline void start() { sums = i32x8{}; }
  inline void add(Lanes codes, int32_t row) {
    for (int i = 0; i < 4; ++i)
      sums += (i32x8)(codes >> 8 * i & 0xff) * (int32_t)(int8_t)(row >> 8 * i & 0xff);
  }
  inline void end_eight() {}
  inline Lanes finish() const { return (Lanes)sums; }
};
constexpr int32_t kByteOffset = 0;
#endif

typedef float LaneFloats __attribute__((vector_size(4 * kWidth)));
typedef int32_t LaneInts __attribute__((vector_size(4 * kWidth)));
constexpr int kVectors = (int)kLanes / kWidth;  // of a panel

// Twice the values of E2M1 are whole; this much is added to make them codes.
constexpr int32_t kDoubledZero = 12;

template <Values kValues>
static inline Lanes to_codes(Lanes halves) {
  if (kValues != kE2M1) return halves;
#if defined(__AVX2__)
  return look_up(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0), halves);
#else
  const uint8_t table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  Lanes codes = {};
  for (int lane = 0; lane < kWidth; ++lane)
    for (int i = 0; i < 32; i += 8) codes[lane] |= (uint32_t)table[halves[lane] >> i & 15] << i;
  return codes;
#endif
}

// The scales, and the codes of 0, of the panels' vectors in one cell.
template <Values kValues, int NV>
struct CellHead {
  LaneFloats scales[NV];
  LaneInts zeros[NV];

  inline void read(const Form& form, const char* cell, int64_t panel, int64_t num_panels) {
    const char* codes = cell + num_panels * kLanes * scale_bytes(form) + panel * kLanes;
    for (int p = 0; p < NV / kVectors; ++p) {
      f32x16 scale =
          load_scales(cell + (panel + p) * kLanes * scale_bytes(form), form.scales);
      if (kValues == kE2M1) scale *= 0.5f;
      memcpy(&scales[p * kVectors], &scale, sizeof scale);
      i32x16 zero = i32x16{} + (kValues == kE2M1 ? kDoubledZero : (int32_t)form.zero);
      if (form.has_zeros) zero = (i32x16)widened_bytes(codes + p * kLanes);
      if (kValues == kInt8) zero -= kByteOffset;
      memcpy(&zeros[p * kVectors], &zero, sizeof zero);
    }
  }
};

// MR rows against NV vectors of columns, from `panel` on.
template <Values kValues, int MR, int NV>
static void tile(const Form& form, const QuantisedRows& x, const int64_t* rows, const char* cells,
                 int64_t panel, int64_t num_panels, float* c, int64_t row_step) {
  constexpr int kUnits = kValues == kInt8 ? 2 : 1;
  const int64_t step = num_panels * kLanes, num_groups = x.width / kRowGroup;
  LaneFloats total[MR][NV] = {};
  const char* cell = cells;
  for (int64_t k = 0; k < x.width; k += form.group) {
    CellHead<kValues, NV> head;
    head.read(form, cell, panel, num_panels);
    const uint32_t* units = (const uint32_t*)(cell + cell_head(form, num_panels)) + panel * kLanes;
    const int64_t last = std::min(x.width, k + form.group);
    for (int64_t at = k; at < last; at += kRowGroup) {
      GroupSum<kValues> sums[MR][NV];
      for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NV; ++n) sums[m][n].start();
#pragma GCC unroll 4
      for (int eight = 0; eight < 4; ++eight) {
        Lanes codes[2][NV];
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n) {
          __builtin_prefetch((const char*)(units + n * kWidth) + kBytesAhead);
          Lanes unit = load_lanes(units + n * kWidth);
          if (kUnits == 2) {
            codes[0][n] = unit;
            codes[1][n] = load_lanes(units + step + n * kWidth);
            __builtin_prefetch((const char*)(units + step + n * kWidth) + kBytesAhead);
          } else {
            codes[0][n] = to_codes<kValues>(low_halves(unit));
            codes[1][n] = to_codes<kValues>(high_halves(unit));
          }
        }
        units += kUnits * step;
#pragma GCC unroll 6
        for (int m = 0; m < MR; ++m) {
          int32_t quads[2];
          memcpy(quads, x.values + rows[m] * x.width + at + eight * 8, sizeof quads);
#pragma GCC unroll 4
          for (int n = 0; n < NV; ++n) {
            sums[m][n].add(codes[0][n], quads[0]);
            sums[m][n].add(codes[1][n], quads[1]);
            sums[m][n].end_eight();
          }
        }
      }
#pragma GCC unroll 6
      for (int m = 0; m < MR; ++m) {
        const int64_t group = rows[m] * num_groups + at / kRowGroup;
        const float row_scale = x.scales[group];
        const int32_t row_sum = x.sums[group];
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n) {
          LaneInts whole = (LaneInts)sums[m][n].finish() - head.zeros[n] * row_sum;
          LaneFloats value = __builtin_convertvector(whole, LaneFloats);
          total[m][n] = total[m][n] + value * (head.scales[n] * row_scale);
        }
      }
    }
    cell += cell_head(form, num_panels) + cell_values(form, last - k, num_panels);
  }
  for (int m = 0; m < MR; ++m)
    for (int n = 0; n < NV; ++n)
      memcpy(c + m * row_step + panel * kLanes + n * kWidth, &total[m][n], sizeof(LaneFloats));
}

using Tile = void (*)(const Form&, const QuantisedRows&, const int64_t*, const char*, int64_t,
                      int64_t, float*, int64_t);

template <Values kValues, int NV>
static Tile tile_of(int64_t num_rows) {
  switch (num_rows) {
#if defined(__AVX512VNNI__)
    case 6: return tile<kValues, 6, NV>;
    case 5: return tile<kValues, 5, NV>;
    case 4: return tile<kValues, 4, NV>;
#endif
#if defined(__AVX2__)
    case 3: return tile<kValues, 3, NV>;
#endif
    case 2: return tile<kValues, 2, NV>;
    default: return tile<kValues, 1, NV>;
  }
}

// Up to four rows: all panels at once, as they lie in memory. More: two panels at a time, so that
// unpacked codes serve more rows.
template <Values kValues>
static void multiply(const Form& form, const QuantisedRows& x, const int64_t* rows,
                     int64_t num_rows, const char* cells, int64_t num_panels, float* c,
                     int64_t row_step) {
#if defined(__AVX512VNNI__)
  if (num_rows <= 4 && num_panels == kGroupPanels) {
    constexpr Tile kFew[] = {tile<kValues, 1, 4>, tile<kValues, 2, 4>, tile<kValues, 3, 4>,
                             tile<kValues, 4, 4>};
    kFew[num_rows - 1](form, x, rows, cells, 0, num_panels, c, row_step);
    return;
  }
#endif
  constexpr int kPanels = kVectors == 1 && kMostRows == 6 ? 2 : 1;
  const int64_t num_tiles = (num_rows + kMostRows - 1) / kMostRows;
  for (int64_t panel = 0; panel < num_panels;) {
    const int64_t wide = panel + kPanels <= num_panels ? kPanels : 1;
    for (int64_t i = 0, m = 0; i < num_tiles; ++i) {
      int64_t count = (num_rows - m + num_tiles - i - 1) / (num_tiles - i);
      Tile one = wide == kPanels ? tile_of<kValues, kPanels * kVectors>(count)
                                 : tile_of<kValues, kVectors>(count);
      one(form, x, rows + m, cells, panel, num_panels, c + m * row_step, row_step);
      m += count;
    }
    panel += wide;
  }
}

void multiply_int8_rows(const Form& form, const QuantisedRows& x, const int64_t* rows,
                        int64_t num_rows, const char* cells, int64_t num_panels, float* c,
                        int64_t row_step) {
  auto run = form.values == kInt4   ? multiply<kInt4>
             : form.values == kInt8 ? multiply<kInt8>
                                    : multiply<kE2M1>;
  run(form, x, rows, num_rows, cells, num_panels, c, row_step);
}
