// Memory for intermediate results, kept between calls: each thread that asks has its own.
#pragma once

#include <cstdlib>
#include <new>

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { free(data_); }

  // At least `count` values of T, not initialised; what an earlier call returned is gone.
  template <class T>
  T* get(int64_t count) {
    size_t bytes = ((size_t)count * sizeof(T) + 127) / 64 * 64;
    if (bytes > size_) {
      free(data_);
      size_ = 0;
      data_ = aligned_alloc(64, bytes);
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};
