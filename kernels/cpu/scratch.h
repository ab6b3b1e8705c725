// Arrays in one piece of memory.
#pragma once

#include <cstdint>

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

}  // namespace pageframe
