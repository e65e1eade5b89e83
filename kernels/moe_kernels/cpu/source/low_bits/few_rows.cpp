#include "few_rows.h"

#include "../panels.h"
#include "decoders.h"

#if defined(HAS_DECODERS)
constexpr int kPanels = (int)kGroupPanels;

template <class Decoder, int MR>
static bool multiply(const Decoder& decoder, const Form& form, const bf16* const* rows,
                     int64_t width, const char* cells, float* c) {
  __m512 sums[MR][kPanels];
  for (int m = 0; m < MR; ++m)
    for (int p = 0; p < kPanels; ++p) sums[m][p] = _mm512_setzero_ps();
  const int64_t step = kPanels * kLanes;
  for (int64_t k = 0; k < width; k += form.group) {
    typename Decoder::Scales scales[kPanels];
    bool are_decoded = true;
    for (int p = 0; p < kPanels; ++p)
      are_decoded &= decoder.prepare(cell_scales(form, cells, p),
                                     cell_zeros(form, cells, p, kPanels), scales[p]);
    if (!are_decoded) return false;
    const int64_t count = std::min(form.group, width - k);
    const uint32_t* from = (const uint32_t*)(cells + cell_head(form, kPanels));
    for (int64_t at = k; at < k + count; at += kEight) {
      __m512i units[kPanels][Decoder::kUnits];
#pragma GCC unroll 2
      for (int u = 0; u < Decoder::kUnits; ++u, from += step)
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) {
          __builtin_prefetch((const char*)(from + p * kLanes) + kBytesAhead);
          units[p][u] = _mm512_loadu_si512(from + p * kLanes);
        }
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) {
          const __m512i columns = decoder.pair(units[p], j, scales[p]);
#pragma GCC unroll 4
          for (int m = 0; m < MR; ++m) {
            int pair;
            memcpy(&pair, rows[m] + at + 2 * j, sizeof pair);
            sums[m][p] = _mm512_dpbf16_ps(sums[m][p], (__m512bh)_mm512_set1_epi32(pair),
                                          (__m512bh)columns);
          }
        }
      }
    }
    cells += cell_head(form, kPanels) + cell_values(form, count, kPanels);
  }
  for (int m = 0; m < MR; ++m)
    for (int p = 0; p < kPanels; ++p)
      _mm512_storeu_ps(c + m * kGroupColumns + p * kLanes, sums[m][p]);
  return true;
}

bool multiply_few_rows(const Form& form, const bf16* const* rows, int64_t num_rows, int64_t width,
                       const char* cells, float* c) {
  if (width % kEight) return false;
  return with_decoder(form, [&](const auto& decoder) {
    using Decoder = std::decay_t<decltype(decoder)>;
    switch (num_rows) {
      case 1: return multiply<Decoder, 1>(decoder, form, rows, width, cells, c);
      case 2: return multiply<Decoder, 2>(decoder, form, rows, width, cells, c);
      case 3: return multiply<Decoder, 3>(decoder, form, rows, width, cells, c);
      default: return multiply<Decoder, 4>(decoder, form, rows, width, cells, c);
    }
  });
}
#else
bool multiply_few_rows(const Form&, const bf16* const*, int64_t, int64_t, const char*, float*) {
  return false;
}
#endif
