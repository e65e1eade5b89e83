// The register tiles behind every product, and the packing of weights.

#include "panels.h"

// The processor's own vectors, and the most rows of a tile. The sums of 6 rows and 4 panels fill
// the 32 registers of AVX-512; with the 16 of AVX, more rows have fewer panels, and pairs of bf16,
// which are widened first, need registers too.
#if defined(__AVX512F__)
constexpr int kWidth = 16;
template <class T> constexpr int kTileRows = 6;
#elif defined(__AVX__)
constexpr int kWidth = 8;
template <class T> constexpr int kTileRows = sizeof(T) == 4 ? 6 : 4;
#else
constexpr int kWidth = 4;
template <class T> constexpr int kTileRows = 3;
#endif
typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Units __attribute__((vector_size(4 * kWidth)));
constexpr int kPanelVectors = (int)kLanes / kWidth;

template <class V, class P>
static inline V load(const P* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

// Keeps the compiler from knowing a value: it would widen a row's pair as an integer and broadcast
// both halves.
static inline void hide(Units& value) {
#if defined(__AVX512F__)
  asm("" : "+v"(value));
#elif defined(__AVX__)
  asm("" : "+x"(value));
#endif
}

// Lets nothing be loaded from these places before `sum` is there: values that are loaded early take
// registers that sums need.
static inline void load_after(Floats sum, int64_t& at, const uint32_t*& w) {
#if defined(__AVX512F__)
  asm("" : "+r"(at), "+r"(w) : "v"(sum));
#elif defined(__AVX__)
  asm("" : "+r"(at), "+r"(w) : "x"(sum));
#endif
}

// sums[m][n] += row(m) * column(n), with the fewer of both kept in registers.
template <int MR, int NV, class Row, class Column>
static inline void multiply_add(Floats (&sums)[MR][NV], const Row& row, const Column& column) {
  Floats kept[MR < NV ? MR : NV];
  if constexpr (MR < NV) {
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) kept[m] = row(m);
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) {
      const Floats values = column(n);
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) sums[m][n] += values * kept[m];
    }
  } else {
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) kept[n] = column(n);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const Floats value = row(m);
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sums[m][n] += kept[n] * value;
    }
  }
}

// Adds one unit of MR rows times one of NV vectors of columns. `row(m, at)` loads the former, and
// the latter begin at w.
template <int MR, int NV, class Row>
static inline void add_products(Floats (&sums)[MR][NV], const Row& row, int64_t at,
                                const uint32_t* w, const float*) {
  multiply_add<MR, NV>(
      sums, [&](int m) { return (Floats)(Units{} + row(m, at)); },
      [&](int n) { return load<Floats>(w + n * kWidth); });
}

// The even value of each pair before the odd one: together they need too many registers.
template <int MR, int NV, class Row>
static inline void add_products(Floats (&sums)[MR][NV], const Row& row, int64_t at,
                                const uint32_t* w, const bf16*) {
#if defined(__AVX512BF16__)
  Units columns[NV];
#pragma GCC unroll 8
  for (int n = 0; n < NV; ++n) columns[n] = load<Units>(w + n * kWidth);
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    const __m512i pair = _mm512_set1_epi32((int)row(m, at));
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n)
      sums[m][n] =
          (Floats)_mm512_dpbf16_ps((__m512)sums[m][n], (__m512bh)pair, (__m512bh)columns[n]);
  }
#else
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const auto widen = [&](Units pairs) {
      return (Floats)(half ? pairs & 0xffff0000u : pairs << 16);
    };
    if (half) load_after(sums[MR - 1][NV - 1], at, w);
    const auto wide_row = [&](int m) {
      Units pairs = Units{} + row(m, at);
      hide(pairs);
      return widen(pairs);
    };
    multiply_add<MR, NV>(sums, wide_row, [&](int n) { return widen(load<Units>(w + n * kWidth)); });
  }
#endif
}

constexpr int64_t kLineBytes = 64;

// Memory to prefetch while a tile computes: in every unit the next 1, 2 or 4 lines, until the last.
// Each line is requested once: a repeated request would keep others from being fetched.
struct Ahead {
  const char *next, *last;
  int lines;
  inline void fetch() {
    __builtin_prefetch(next);
    if (lines > 1) __builtin_prefetch(next + kLineBytes);
    if (lines > 2) {
      __builtin_prefetch(next + 2 * kLineBytes);
      __builtin_prefetch(next + 3 * kLineBytes);
    }
    next = std::min(next + lines * kLineBytes, last);
  }
};

// MR rows against NV vectors of columns.
template <class T, int MR, int NV>
static void tile(const T* const* rows, int64_t width, const uint32_t* w, int64_t step, float* c,
                 int64_t row_step, bool is_added, Ahead ahead) {
  Floats sums[MR][NV] = {};
  if (is_added)
    for (int m = 0; m < MR; ++m)
      for (int n = 0; n < NV; ++n) sums[m][n] = load<Floats>(c + m * row_step + n * kWidth);
  const T* a[MR];
  for (int m = 0; m < MR; ++m) a[m] = rows[m];
  int64_t whole = width / kUnit<T>;
  for (int64_t u = 0; u < whole; ++u) {
    ahead.fetch();
    add_products(sums, [&](int m, int64_t at) { return load<uint32_t>(a[m] + at); }, u * kUnit<T>,
                 w, (const T*)nullptr);
    w += step;
  }
  if (whole * kUnit<T> < width)
    add_products(sums, [&](int m, int64_t at) { return load_unit(a[m] + at, 1); }, width - 1, w,
                 (const T*)nullptr);
  for (int m = 0; m < MR; ++m)
    for (int n = 0; n < NV; ++n)
      memcpy(c + m * row_step + n * kWidth, &sums[m][n], sizeof(Floats));
}

template <class T>
using Tile = void (*)(const T* const*, int64_t, const uint32_t*, int64_t, float*, int64_t, bool,
                      Ahead);

// How many panels the largest tile of some rows has.
static constexpr int most_panels(int num_rows) {
#if defined(__AVX512F__)
  return 4;
#elif defined(__AVX__)
  return num_rows == 1 ? 4 : num_rows <= 3 ? 2 : 1;
#else
  return 1;
#endif
}

template <class T, int MR>
static Tile<T> tile_with(int64_t num_panels) {
  constexpr int kMost = most_panels(MR);
  if constexpr (kMost > 3)
    if (num_panels == 4) return tile<T, MR, 4 * kPanelVectors>;
  if constexpr (kMost > 2)
    if (num_panels == 3) return tile<T, MR, 3 * kPanelVectors>;
  if constexpr (kMost > 1)
    if (num_panels == 2) return tile<T, MR, 2 * kPanelVectors>;
  return tile<T, MR, kPanelVectors>;
}

template <class T, int MR = kTileRows<T>>
static Tile<T> tile_of(int64_t num_rows, int64_t num_panels) {
  if constexpr (MR > 1)
    if (num_rows < MR) return tile_of<T, MR - 1>(num_rows, num_panels);
  return tile_with<T, MR>(num_panels);
}

constexpr int64_t kUnitsAhead = 16;

template <class T>
void multiply_rows(const T* const* rows, int64_t num_rows, int64_t width, const uint32_t* w,
                   int64_t step, int64_t num_panels, float* c, int64_t row_step, bool is_added,
                   Prefetch next) {
  const int64_t row_tiles = (num_rows + kTileRows<T> - 1) / kTileRows<T>;
  const int64_t most = most_panels((num_rows + row_tiles - 1) / row_tiles);
  const int64_t num_tiles = row_tiles * ((num_panels + most - 1) / most);
  const int64_t share = next.bytes / num_tiles, pass = kLineBytes * units<T>(width);
  const int64_t lines = std::min<int64_t>((share + pass - 1) / pass, 4);
  for (int64_t n = 0, t = 0; n < num_panels; n += most) {
    int64_t wide = std::min<int64_t>(most, num_panels - n);
    for (int64_t i = 0, m = 0; i < row_tiles; ++i, ++t) {  // tiles as equal as can be
      int64_t count = (num_rows - m + row_tiles - i - 1) / (row_tiles - i);
      const uint32_t* columns = w + n * kLanes;
      const char* own = (const char*)(columns + kUnitsAhead * step);
      Ahead ahead{own, own + 4 * step * units<T>(width), 4};
      if (share && num_tiles > 1)
        ahead = {next.data + share * t, next.data + share * (t + 1), (int)lines};
      tile_of<T>(count, wide)(rows + m, width, columns, step, c + m * row_step + n * kLanes,
                              row_step, is_added, ahead);
      m += count;
    }
  }
}

template void multiply_rows(const float* const*, int64_t, int64_t, const uint32_t*, int64_t,
                            int64_t, float*, int64_t, bool, Prefetch);
template void multiply_rows(const bf16* const*, int64_t, int64_t, const uint32_t*, int64_t,
                            int64_t, float*, int64_t, bool, Prefetch);

constexpr int64_t kBlock = 128;  // values of k that are made contiguous at a time

// 16 columns of the result whose values of k do not lie together: block by block through `rows`.
template <class T>
static void pack_scattered(const T* source, int64_t row_step, int64_t column_step, int64_t count,
                           int64_t width, uint32_t* out, int64_t step) {
  T rows[kLanes * kBlock] = {};
  for (int64_t k = 0; k < width; k += kBlock) {
    int64_t wide = std::min(kBlock, width - k);
    for (int64_t j = 0; j < wide; ++j) {
      const T* from = source + (k + j) * column_step;
      for (int64_t i = 0; i < count; ++i) rows[i * kBlock + j] = from[i * row_step];
    }
    pack_panel(rows, kBlock, kLanes, wide, out + k / kUnit<T> * step, step);
  }
}

// A matrix [N, K] with any distances between rows and between columns, into panels first,
// first + stride, first + 2 stride ... of a packed matrix of num_panels.
template <class T>
static void pack(const T* source, int64_t row_step, int64_t column_step, int64_t num_rows,
                 int64_t width, uint32_t* packed, int64_t first, int64_t stride,
                 int64_t num_panels) {
  for (int64_t r = 0, panel = first; r < num_rows; r += kLanes, panel += stride) {
    Group g = group_of<T>(packed, num_panels, panel / kGroupPanels, width);
    int64_t step = g.panels * kLanes, count = std::min(kLanes, num_rows - r);
    uint32_t* out = const_cast<uint32_t*>(g.data) + panel % kGroupPanels * kLanes;
    const T* from = source + r * row_step;
    if (column_step == 1) pack_panel(from, row_step, count, width, out, step);
    else pack_scattered(from, row_step, column_step, count, width, out, step);
  }
}

#define EXPORT(T, suffix)                                                                         \
  void moe_pack_##suffix(const T* source, int64_t row_step, int64_t column_step,                  \
                         int64_t num_rows, int64_t width, uint32_t* packed, int64_t first,        \
                         int64_t stride, int64_t num_panels) {                                    \
    pack<T>(source, row_step, column_step, num_rows, width, packed, first, stride, num_panels);   \
  }

extern "C" {
EXPORT(bf16, bf16)
EXPORT(float, f32)
}
