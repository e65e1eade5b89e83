// Products of rows with a matrix of any form: what linear.cpp and experts.cpp multiply with.
#pragma once

#include "../panels.h"
#include "../scratch.h"
#include "few_rows.h"
#include "int8_rows.h"
#include "unpack.h"

template <class T>
static inline Group columns_of(const Form& form, const uint32_t* packed, int64_t num_panels,
                               int64_t group, int64_t width) {
  if (form.values == kFloats) return group_of<T>(packed, num_panels, group, width);
  return {packed + group * (cells_bytes(form, width, kGroupPanels) / 4),
          std::min(kGroupPanels, num_panels - group * kGroupPanels)};
}

// Rows `step` apart, and as whole numbers if the form wants them.
template <class T>
struct Rows {
  const T* data;
  int64_t step;
  QuantisedRows quantised;
};

template <class T>
static inline Rows<T> make_rows(const Form& form, const T* x, int64_t step, int64_t num_rows,
                                int64_t width, Scratch& scratch, int64_t threads) {
  if (form.values == kFloats || !form.has_int8_rows) return {x, step, {}};
  char* memory = scratch.get<char>(quantised_bytes(num_rows, width));
  return {x, step, quantise_rows(x, step, num_rows, width, memory, threads)};
}

constexpr int64_t kRowsAtOnce = 24;  // as multiply_group takes them

template <class Row, class Store>
static bool multiply_in_registers(const Form& form, Group g, int64_t width, int64_t num_rows,
                                  const Row& row, const Store& store) {
  if (num_rows > kFewRows || g.panels != kGroupPanels) return false;
  alignas(64) float c[kFewRows * kGroupColumns];
  const bf16* rows[kFewRows];
  for (int64_t m = 0; m < num_rows; ++m) rows[m] = row(m);
  if (!multiply_few_rows(form, rows, num_rows, width, (const char*)g.data, c)) return false;
  for (int64_t m = 0; m < num_rows; ++m) store(m, c + m * kGroupColumns);
  return true;
}

// Some cells at a time are unpacked into the first-level cache, where the products of all rows read
// them. A result's chain is put down between the blocks, which changes no bit.
template <class T, class Row, class Store>
static void multiply_unpacked(const Form& form, Group g, int64_t width, int64_t num_rows,
                              const Row& row, const Store& store) {
  if constexpr (sizeof(T) == sizeof(bf16))
    if (multiply_in_registers(form, g, width, num_rows, row, store)) return;
  constexpr int64_t kBlockBytes = 32 * 1024;
  static thread_local Scratch weights, sums;
  const int64_t block = kBlockBytes / (int64_t)sizeof(T) / kGroupColumns, step = g.panels * kLanes;
  uint32_t* floats = weights.get<uint32_t>(units<T>(block) * step);
  float* c = sums.get<float>(num_rows * kGroupColumns);
  const T* rows[kRowsAtOnce];
  for (int64_t k = 0; k < width; k += block) {
    const int64_t end = std::min(width, k + block);
    unpack(form, (const char*)g.data, g.panels, k, end, floats, (const T*)nullptr);
    for (int64_t m = 0; m < num_rows; m += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, num_rows - m);
      for (int64_t i = 0; i < count; ++i) rows[i] = row(m + i) + k;
      multiply_rows(rows, count, end - k, floats, step, g.panels, c + m * kGroupColumns,
                    kGroupColumns, k > 0);
    }
  }
  for (int64_t m = 0; m < num_rows; ++m) store(m, c + m * kGroupColumns);
}

// All rows against one group of columns: index(m) is the number of row m among `rows`, store(m, c)
// gets its sums, 16 for each panel. `next`: see multiply_group.
template <class T, class Index, class Store>
static void multiply_weight(const Form& form, Group g, const uint32_t* next, int64_t width,
                            const Rows<T>& rows, int64_t num_rows, const Index& index,
                            const Store& store) {
  auto row = [&](int64_t m) { return rows.data + index(m) * rows.step; };
  if (form.values == kFloats) {
    multiply_group<T>(g, next, width, num_rows, row, store);
  } else if (!form.has_int8_rows) {
    multiply_unpacked<T>(form, g, width, num_rows, row, store);
  } else {
    alignas(64) float c[kRowsAtOnce * kGroupColumns];
    int64_t indices[kRowsAtOnce];
    for (int64_t m = 0; m < num_rows; m += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, num_rows - m);
      for (int64_t i = 0; i < count; ++i) indices[i] = index(m + i);
      multiply_int8_rows(form, rows.quantised, indices, count, (const char*)g.data, g.panels, c,
                         kGroupColumns);
      for (int64_t i = 0; i < count; ++i) store(m + i, c + i * kGroupColumns);
    }
  }
}
