// Requests large pages for large weights (fewer address look-ups while they stream through the
// processor), and reports the instructions that the kernels are built for.

#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

extern "C" {
// Asks for huge pages in the whole ones of [address, address + bytes). Only a hint.
void moe_advise_huge_pages(char* address, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t size = 2 << 20;
  uintptr_t first = ((uintptr_t)address + size - 1) / size * size;
  uintptr_t last = ((uintptr_t)address + bytes) / size * size;
  if (last > first) madvise((void*)first, last - first, MADV_HUGEPAGE);
#else
  (void)address, (void)bytes;
#endif
}

// By the same tests as vectors.h and panels.cpp.
const char* moe_instruction_set() {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#if defined(__AVX512BF16__)
  return "AVX512-BF16";
#else
  return "AVX-512";
#endif
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__AVX__)
  return "AVX";
#elif defined(__ARM_FEATURE_SVE)
  return "SVE";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "no vector instructions";
#endif
}
}
