// RMSNorm of rows of float32.
#pragma once

#include <cmath>
#include <cstdint>

#include "types.h"
#include "vector_math.h"

namespace pageframe {

// x / sqrt(mean(x^2) + eps) * weight. Filled by Python (ctypes), which keeps the memory alive.
struct RowNorm {
    const float* weight;  // of each number
    float eps;
};

// 1 / sqrt(mean(x^2) + eps).
inline Floats rms_factor(const float* x, float eps, int64_t size) {
    Floats squares = broadcast(0.0f);
    for (int64_t i = 0; i < size; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    return broadcast(1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(size) + eps));
}

inline void norm_head(float* head, const RowNorm& norm, int64_t size) {
    const Floats factor = rms_factor(head, norm.eps, size);
    for (int64_t i = 0; i < size; i += kLanes)
        store(head + i, multiply(multiply(load(head + i), factor), load(norm.weight + i)));
}

inline void norm_row(const float* x, const RowNorm& norm, int64_t size, Act* out) {
    const Floats factor = rms_factor(x, norm.eps, size);
    for (int64_t i = 0; i < size; i += kLanes)
        store_act(out + i, multiply(multiply(load(x + i), factor), load(norm.weight + i)));
}

}  // namespace pageframe
