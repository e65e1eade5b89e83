// How a packed matrix stores its values, and where they lie.
//
// A matrix of floats lies as panels.h says. In few bits, a group of 64 columns is cut along k into
// *cells* of the values that share a scale. A cell of up to four panels holds
//
//     scales [panels][16], zeros [panels][16] of one byte if there are any,
//     values [eights of k][1 or 2 units][panels][16 columns]
//
// so that a group is read from front to back. Eight values of k are one unit of 32 bits in 4 bits,
// and two in 8 bits. They lie so that pairs (0, 1), (2, 3) .. are 16 bits apart, and that the bytes
// of a unit (of the low, and of the high halves of its bytes) are four values of k:
//
//     4 bits: value 2 j + p at bit 16 p + 4 j         8 bits: bytes 0 4 1 5, and 2 6 3 7
#pragma once

#include <algorithm>
#include <cstdint>

enum Values : int64_t { kFloats, kInt4, kInt8, kE4M3, kE2M1 };
enum FloatType : int64_t { kFloat32, kBfloat16, kFloat16, kE8M0 };

struct Form {  // mirrored in native_forms.py
  int64_t values;           // Values; kFloats: of the type of the rows, and nothing below counts
  int64_t group;            // neighbouring values of k that share a scale, a multiple of 8
  int64_t scales;           // FloatType
  int64_t has_zeros;        // a group has a code of its own that stands for 0
  int64_t zero;             // else this one stands for 0 in all
  int64_t rounding;         // FloatType that value times scale is rounded to first
  int64_t has_int8_rows;    // rows are quantised as well (int8_rows.h); else products are exact
};

constexpr int64_t kEight = 8;
constexpr int64_t kBytesAhead = 4096;  // that a loop over cells prefetches

static inline int64_t value_bits(const Form& f) {
  return f.values == kInt4 || f.values == kE2M1 ? 4 : 8;
}

static inline int64_t scale_bytes(const Form& f) {
  return f.scales == kFloat32 ? 4 : f.scales == kE8M0 ? 1 : 2;
}

// Bytes before the values of a cell.
static inline int64_t cell_head(const Form& f, int64_t num_panels) {
  return 16 * num_panels * (scale_bytes(f) + (f.has_zeros ? 1 : 0));
}

// Bytes of the values of `count` neighbours in k, the last eight being filled up.
static inline int64_t cell_values(const Form& f, int64_t count, int64_t num_panels) {
  return (count + kEight - 1) / kEight * value_bits(f) * 16 * num_panels;
}

// Bytes of the cells of a group of columns before value k, a multiple of the cells' size, or of all.
static inline int64_t cells_bytes(const Form& f, int64_t k, int64_t num_panels) {
  return (k + f.group - 1) / f.group * cell_head(f, num_panels) + cell_values(f, k, num_panels);
}
