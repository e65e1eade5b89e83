// Products of few rows with weights that are unpacked in registers.
#pragma once

#include "form.h"

constexpr int64_t kFewRows = 4;  // for more rows, floats in a buffer pay

// c[m][0 .. 64) = rows[m] . columns, with the bits of multiply_rows over the unpacked columns. False,
// and c is not defined, if the form, the width or a scale has no such product.
bool multiply_few_rows(const Form& form, const uint16_t* const* rows, int64_t num_rows,
                       int64_t width, const char* cells, float* c);
