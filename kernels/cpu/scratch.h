// Arrays in one piece of memory, and memory that is kept from call to call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "types.h"

namespace pageframe {

// Lays arrays out one after the other, each on a line of its own. From null on it only counts their bytes.
class ScratchLayout {
  public:
    explicit ScratchLayout(char* start) : start_(start), at_(start) {}

    template <class T>
    T* take(int64_t count) {
        T* const taken = reinterpret_cast<T*>(at_);
        at_ += divide_up(count * static_cast<int64_t>(sizeof(T)), 64) * 64;
        return taken;
    }
    int64_t bytes() const { return at_ - start_; }

  private:
    char* start_;
    char* at_;
};

// Memory of one thread: it grows and is kept, since fresh memory costs more in page faults than the work in it.
class KeptMemory {
  public:
    // At a multiple of 64. What was in it is lost when it grows. bytes: a multiple of 64.
    char* at_least(int64_t bytes) {
        if (size_ < bytes) {
            memory_.reset(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(bytes))));
            if (memory_ == nullptr) std::abort();
            size_ = bytes;
        }
        return memory_.get();
    }

  private:
    std::unique_ptr<char, decltype(&std::free)> memory_{nullptr, std::free};
    int64_t size_ = 0;
};

}  // namespace pageframe
