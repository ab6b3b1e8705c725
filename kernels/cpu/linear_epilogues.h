// What becomes of a linear's sums. An epilogue is called with `width` neighbouring outputs of one row:
//     epilogue(row, column, width, sums)
// where column is a multiple of 16 and sums holds `width` floats, and is readable up to the next multiple of 16. Each
// output is given to one thread, once. Before, expect(row, column, width) may ask for the memory that they will go to:
// over many rows it is in no near cache, and a store does not wait in the shadow of products.
#pragma once

#include <limits>

#include "linear_weights.h"

namespace pageframe {

inline void store_first(float* at, Floats values, int64_t count) {
    if (count >= kLanes) return store(at, values);
    float all[kLanes];
    store(all, values);
    std::copy(all, all + count, at);
}

// Asks for `width` numbers that will be written.
template <class Number>
inline void expect_writes(const Number* at, int64_t width) {
    const char* const first = reinterpret_cast<const char*>(at);
    for (int64_t i = 0; i < width * static_cast<int64_t>(sizeof(Number)); i += kCacheLine)
        __builtin_prefetch(first + i, 1);
}

// out[row][column] = sum.
struct Store {
    float* out;
    int64_t stride;

    void expect(int64_t row, int64_t column, int64_t width) const {
        expect_writes(out + row * stride + column, width);
    }

    void operator()(int64_t row, int64_t column, int64_t width, const float* sums) const {
        float* const at = out + row * stride + column;
        for (int64_t i = 0; i < width; i += kLanes) store_first(at + i, load(sums + i), width - i);
    }
};

// out[row][column] += sum.
struct AddTo {
    float* out;
    int64_t stride;

    void expect(int64_t row, int64_t column, int64_t width) const {
        expect_writes(out + row * stride + column, width);
    }

    void operator()(int64_t row, int64_t column, int64_t width, const float* sums) const {
        float* const at = out + row * stride + column;
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) store(at + i, add(load(at + i), load(sums + i)));
        for (; i < width; ++i) at[i] += sums[i];
    }
};

// The sums are strips of gates and of ups in turn: out[row][column / 2] = silu(gate) * up, half as many columns.
struct GatedSilu {
    Act* out;
    int64_t stride;

    void expect(int64_t row, int64_t column, int64_t width) const {
        expect_writes(out + row * stride + column / 2, width / 2);
    }

    void operator()(int64_t row, int64_t column, int64_t width, const float* sums) const {
        Act* at = out + row * stride + column / 2;
        for (int64_t strip = 0; strip < width; strip += 2 * kStrip, at += kStrip)
            for (int64_t i = 0; i < kStrip; i += kLanes) {
                const Floats gate = load(sums + strip + i), up = load(sums + strip + kStrip + i);
                store_act(at + i, multiply(multiply(gate, sigmoid(gate)), up));
            }
    }
};

// The largest of the outputs that a thread has seen of a row, for each place in a strip.
struct Best {
    float values[kStrip];
    int32_t columns[kStrip];

    void clear() {
        std::fill(values, values + kStrip, -std::numeric_limits<float>::infinity());
        std::fill(columns, columns + kStrip, 0);
    }
};

// Keeps each row's largest output in `best`, the first of equals; NaN counts as the least. A thread's own:
// cleared before and merged by merge_best() after.
struct ArgMax {
    Best* best;  // [rows]

    void expect(int64_t, int64_t, int64_t) const {}

    void operator()(int64_t row, int64_t column, int64_t width, const float* sums) const {
        Best& kept = best[row];
        for (int64_t strip = 0; strip < width; strip += kStrip) {
            const int64_t count = std::min(kStrip, width - strip);
            for (int64_t i = 0; i < count; ++i) {  // a thread's columns ascend, so the first of equals stays
                const bool larger = sums[strip + i] > kept.values[i];
                kept.values[i] = larger ? sums[strip + i] : kept.values[i];
                kept.columns[i] = larger ? static_cast<int32_t>(column + strip + i) : kept.columns[i];
            }
        }
    }
};

struct Largest {
    float value;
    int32_t column;
};

// A row's largest output; `best` is every thread's of this row, `stride` apart.
inline Largest merge_best(const Best* best, int64_t threads, int64_t stride) {
    Largest largest{-std::numeric_limits<float>::infinity(), 0};
    for (int64_t t = 0; t < threads; ++t)
        for (int64_t i = 0; i < kStrip; ++i) {
            const float value = best[t * stride].values[i];
            const int32_t column = best[t * stride].columns[i];
            if (value > largest.value || (value == largest.value && column < largest.column))
                largest = {value, column};
        }
    return largest;
}

}  // namespace pageframe
