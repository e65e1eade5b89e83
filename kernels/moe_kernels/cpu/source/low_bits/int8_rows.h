// Products of rows and a matrix in few bits, both as whole numbers.
//
// A row is cut into groups of 32 values. Each becomes whole numbers of 8 bits: with m the largest
// magnitude, scale = m / 127 and q = round(x (127 / m)), to nearest even. The product of a group is
// an exact sum of whole numbers, so its order cannot show; the groups add up in one chain of fp32,
//
//     c = c + float(sum) (weight scale x row scale),   groups in ascending order,
//
// each operation rounded by itself. So a result depends on its row and column alone, and every
// processor has the same bits; moe_kernels/reference/int8_rows.py is the definition.
#pragma once

#include "form.h"

constexpr int64_t kRowGroup = 32;

struct QuantisedRows {
  const int8_t* values;  // [rows][width], each eight in the order of form.h
  const float* scales;   // [rows][width / 32]
  const int32_t* sums;   // [rows][width / 32], of the values
  int64_t width;
};

static inline int64_t quantised_bytes(int64_t num_rows, int64_t width) {
  return num_rows * (width + width / kRowGroup * 8);
}

// Quantises rows into memory of quantised_bytes.
template <class T>
QuantisedRows quantise_rows(const T* x, int64_t row_step, int64_t num_rows, int64_t width,
                            char* memory, int64_t threads);

// c[m][0 .. 16 panels) of up to 24 rows against a group of columns. Weights in 4 or 8 bits, and
// E2M1; not E4M3. A width and groups that 32 divides.
void multiply_int8_rows(const Form& form, const QuantisedRows& x, const int64_t* rows,
                        int64_t num_rows, const char* cells, int64_t num_panels, float* c,
                        int64_t row_step);
