// What becomes of a linear's sums. An epilogue is called with `width` neighbouring outputs of one row:
//     epilogue(row, column, width, sums)
// where column is a multiple of 16 and sums holds `width` floats, and is readable up to the next multiple of 16. Each
// output is given to one thread, once.
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

inline void store_first_act(Act* at, Floats values, int64_t count) {
    if (count >= kLanes) return store_act(at, values);
    Act all[kLanes];
    store_act(all, values);
    std::copy(all, all + count, at);
}

// out[row][column] = sum.
struct Store {
    float* out;
    int64_t stride;

    void operator()(int64_t row, int64_t column, int64_t width, const float* sums) const {
        float* const at = out + row * stride + column;
        for (int64_t i = 0; i < width; i += kLanes) store_first(at + i, load(sums + i), width - i);
    }
};

// out[row][column] += sum.
struct AddTo {
    float* out;
    int64_t stride;

    void operator()(int64_t row, int64_t column, int64_t width, const float* sums) const {
        float* const at = out + row * stride + column;
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) store(at + i, add(load(at + i), load(sums + i)));
        for (; i < width; ++i) at[i] += sums[i];
    }
};

struct Silu {
    static Floats of(Floats x) { return multiply(x, sigmoid(x)); }
};

struct GeluTanh {  // x / 2 * (1 + tanh(u)) is x * sigmoid(2 u)
    static Floats of(Floats x) {
        const Floats cubic = multiply(broadcast(0.044715f), multiply(x, x));
        const Floats twice = multiply(broadcast(1.5957691216f), fma(cubic, x, x));  // 2 sqrt(2 / pi)
        return multiply(x, sigmoid(twice));
    }
};

// x times the normal distribution's function, within 2e-7 |x|: its tail by formula 7.1.26 of Abramowitz and Stegun.
struct Gelu {
    static Floats of(Floats x) {
        const Floats zero = broadcast(0.0f), one = broadcast(1.0f);
        const Floats z = multiply(max(x, subtract(zero, x)), broadcast(0.70710678f));
        const Floats t = divide(one, fma(broadcast(0.3275911f), z, one));
        Floats sum = broadcast(1.061405429f);
        for (const float coefficient : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
            sum = fma(sum, t, broadcast(coefficient));
        const Floats tail = multiply(multiply(broadcast(0.5f), multiply(sum, t)), exp(subtract(zero, multiply(z, z))));
        // x * (1 - tail) for a positive x, x * tail for a negative one.
        return subtract(max(x, zero), multiply(max(x, subtract(zero, x)), tail));
    }
};

// The sums are strips of gates and of ups in turn: out[row][column / 2] = Function(gate) * up, half as many columns.
template <class Function>
struct Gated {
    Act* out;
    int64_t stride;

    void operator()(int64_t row, int64_t column, int64_t width, const float* sums) const {
        Act* at = out + row * stride + column / 2;
        for (int64_t strip = 0; strip < width; strip += 2 * kStrip, at += kStrip)
            for (int64_t i = 0; i < kStrip; i += kLanes)
                store_act(at + i, multiply(Function::of(load(sums + strip + i)), load(sums + strip + kStrip + i)));
    }
};

using GatedSilu = Gated<Silu>;
using GatedGeluTanh = Gated<GeluTanh>;
using GatedGelu = Gated<Gelu>;

// out[row][column] = Function(sum).
template <class Function>
struct Activated {
    Act* out;
    int64_t stride;

    void operator()(int64_t row, int64_t column, int64_t width, const float* sums) const {
        Act* const at = out + row * stride + column;
        for (int64_t i = 0; i < width; i += kLanes) store_first_act(at + i, Function::of(load(sums + i)), width - i);
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
