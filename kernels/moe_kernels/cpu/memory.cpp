// Large weights in large pages: fewer address look-ups while they stream through the processor.

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
}
