// A part of a group of columns in few bits -> floats, as a product of floats reads them.
#pragma once

#include "form.h"

// Values k of [first, last) (multiples of 8, but for the last of all) of `num_panels` panels into
// out[(k - first) / kUnit<T>][num_panels][16]: the very values that the loader dequantises to.
template <class T>
void unpack(const Form& form, const char* cells, int64_t num_panels, int64_t first, int64_t last,
            uint32_t* out, const T*);
