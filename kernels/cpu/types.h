// What all parts of the CPU engine share: number types, the structures that Python fills, and vectors of 16 floats.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// What Python calls.
#define PAGEFRAME_EXPORT extern "C" __attribute__((visibility("default")))

namespace pageframe {

using Bf16 = uint16_t;  // the upper half of a float32's bits

#if defined(PAGEFRAME_ISA_BF16)
using Act = Bf16;  // what a product reads: rounded to nearest even
#else
using Act = float;
#endif

inline float to_float(Bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

inline Bf16 to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<Bf16>((bits >> 16) | 0x40u);  // a NaN stays one
    return static_cast<Bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Outputs and inputs that weights are cut into: strips, and groups with a scale.
constexpr int64_t kStrip = 16;
constexpr int64_t kGroup = 32;

// How a linear map's values are stored; weights.py has the same numbers.
enum WeightKind : int32_t { kBf16 = 0, kQ4 = 1, kQ8 = 2 };

// x @ W.T + bias. Filled by Python (ctypes), which keeps the memory alive.
struct LinearWeight {
    int32_t kind;
    int32_t reserved;
    int64_t n, k;
    const void* values;
    const void* scales;  // null for kBf16
    const float* bias;   // float32 [n] or null
};

// One step's requests and tokens, decode requests first. Arrays of Python's, valid until the step ends.
struct Step {
    int64_t num_tokens, num_requests;
    const int64_t* positions;     // [num_tokens]
    const int64_t* slots;         // [num_tokens]; -1 writes nothing
    const int32_t* query_start;   // [num_requests + 1]
    const int32_t* context_lens;  // [num_requests], after this step's write
    const int32_t* rows;          // [num_requests], rows of the tables
    const int32_t* tables;        // [max_requests, table_stride]
    int64_t table_stride;
    int64_t block_size;
};

// One layer's K/V: [num_blocks, 2, num_kv_heads, block_size, head_dim].
struct KvCache {
    void* values;          // bfloat16, or int8 where there are scales
    float* scales;         // [num_blocks, 2, num_kv_heads, block_size], or null
    int64_t num_kv_heads, head_dim;
};

}  // namespace pageframe
