// Packs a stored matrix in few bits: form.h has the layout.

#include "../panels.h"
#include "form.h"

struct Stored {  // mirrored in native_forms.py; steps in items
  const uint8_t* bytes;  // 4 bits: two values in a byte, the low half first
  int64_t row_step, num_rows, width;
  const char* scales;  // of the form's type
  int64_t scale_row_step, scale_group_step;
  const uint8_t* zeros;  // codes
  int64_t zero_row_step, zero_group_step;
  int64_t flipped;  // bits of a byte to turn over: two's complement becomes an offset of half its range
};

static inline u32x16 gather(u32x16 x) {  // every second half byte, in the low 16 bits
  x &= 0x0f0f0f0f;
  x = (x | x >> 4) & 0x00ff00ff;
  return (x | x >> 8) & 0xffff;
}

// Eight values, first in the lowest bits of the first unit, to the layout's order.
static inline void reorder(const Form& form, u32x16* units) {
  if (value_bits(form) == 4) {
    units[0] = gather(units[0]) | gather(units[0] >> 4) << 16;
    return;
  }
  u32x16 a = units[0], b = units[1];
  units[0] = (a & 0xff) | (b & 0xff) << 8 | (a & 0xff00) << 8 | (b & 0xff00) << 16;
  units[1] = (a >> 16 & 0xff) | (b >> 8 & 0xff00) | (a >> 8 & 0xff0000) | (b & 0xff000000);
}

// Unit `u` of the eights from `k` of a row, what lies behind the row's end being `filler`.
static uint32_t load_codes(const Form& form, const Stored& s, int64_t row, int64_t k,
                           uint32_t filler) {
  int64_t per_byte = 8 / value_bits(form), first = k / per_byte;
  int64_t count = std::min<int64_t>(4, (s.width + per_byte - 1) / per_byte - first);
  uint32_t unit = filler;
  if (row < s.num_rows && count > 0) memcpy(&unit, s.bytes + row * s.row_step + first, count);
  unit ^= 0x01010101u * (uint32_t)s.flipped;
  if (per_byte == 2 && s.width % 2 && row < s.num_rows && k + 8 > s.width && k < s.width) {
    int64_t bit = (s.width - k) * 4;  // the odd one's neighbour
    if (bit < 32) unit = (unit & ~(0xfu << bit)) | ((filler & 0xf) << bit);
  }
  return unit;
}

// The values [first, last) of k of 16 rows: units of one panel, `step` apart.
static void pack_values(const Form& form, const Stored& s, int64_t row, int64_t first, int64_t last,
                        uint32_t* out, int64_t step) {
  const int64_t per_unit = 32 / value_bits(form), num_units = kEight / per_unit;
  const uint32_t filler = (uint32_t)form.zero * (value_bits(form) == 4 ? 0x11111111u : 0x01010101u) ^
                          0x01010101u * (uint32_t)s.flipped;
  for (int64_t k = first; k < last; k += 16 * per_unit) {
    u32x16 x[kLanes] = {};
    const int64_t block = std::min<int64_t>(16 * per_unit, (last - k + 7) / kEight * kEight);
    const bool is_whole = row + kLanes <= s.num_rows && k + block <= s.width;
    for (int64_t i = 0; i < kLanes; ++i) {
      if (is_whole) {
        const int64_t bits = value_bits(form);
        memcpy(&x[i], s.bytes + (row + i) * s.row_step + k * bits / 8, block * bits / 8);
        x[i] ^= 0x01010101u * (uint32_t)s.flipped;
      } else
        for (int64_t u = 0; u * per_unit < block; ++u)
          x[i][u] = load_codes(form, s, row + i, k + u * per_unit, filler);
    }
    transpose16(x);
    for (int64_t u = 0; u * per_unit < block; u += num_units) {
      reorder(form, x + u);
      for (int64_t v = u; v < u + num_units; ++v, out += step) memcpy(out, &x[v], sizeof x[v]);
    }
  }
}

static void pack_low_bits(const Form& form, const Stored& s, char* packed, int64_t first,
                          int64_t stride, int64_t num_panels) {
  const int64_t size = scale_bytes(form), whole = cells_bytes(form, s.width, kGroupPanels);
  for (int64_t row = 0, panel = first; row < s.num_rows; row += kLanes, panel += stride) {
    const int64_t group = panel / kGroupPanels, own = panel % kGroupPanels;
    const int64_t wide = std::min(kGroupPanels, num_panels - group * kGroupPanels);
    char* cells = packed + group * whole;
    for (int64_t k = 0, g = 0; k < s.width; k += form.group, ++g) {
      char* cell = cells + cells_bytes(form, k, wide);
      char *scales = cell + own * kLanes * size, *zeros = cell + wide * kLanes * size + own * kLanes;
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t r = row + i;
        if (r >= s.num_rows) memset(scales + i * size, 0, size);
        else
          memcpy(scales + i * size,
                 s.scales + (r * s.scale_row_step + g * s.scale_group_step) * size, size);
        if (!form.has_zeros) continue;
        zeros[i] = r < s.num_rows ? s.zeros[r * s.zero_row_step + g * s.zero_group_step] : 0;
      }
      uint32_t* values = (uint32_t*)(cell + cell_head(form, wide)) + own * kLanes;
      pack_values(form, s, row, k, std::min(s.width, k + form.group), values, wide * kLanes);
    }
  }
}

extern "C" {
// Bytes of a packed matrix of some panels.
int64_t moe_low_bit_bytes(const Form* form, int64_t width, int64_t num_panels) {
  const int64_t rest = num_panels % kGroupPanels;
  return num_panels / kGroupPanels * cells_bytes(*form, width, kGroupPanels) +
         (rest ? cells_bytes(*form, width, rest) : 0);
}

// Rows of a matrix into panels first, first + stride, first + 2 stride ... of num_panels.
void moe_pack_low_bits(const Form* form, const Stored* stored, char* packed, int64_t first,
                       int64_t stride, int64_t num_panels) {
  pack_low_bits(*form, *stored, packed, first, stride, num_panels);
}
}
