// A token's K and V into its slot: rounded to bfloat16, or to int8 with a scale for each head.
#pragma once

#include <cstdint>

#include "types.h"
#include "vector_math.h"

namespace pageframe {

constexpr float kMaxCode = 127.0f;

inline void store_bf16(Bf16* at, Floats numbers) {
#if defined(PAGEFRAME_ISA_AVX512)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), round_to_bf16(numbers));
#else
    float rounded[kLanes];
    store(rounded, numbers);
    for (int i = 0; i < kLanes; ++i) at[i] = to_bf16(rounded[i]);
#endif
}

inline void store_int8(int8_t* at, Floats codes) {
    float rounded[kLanes];
    store(rounded, nearest_integer(codes));
    for (int i = 0; i < kLanes; ++i) at[i] = static_cast<int8_t>(rounded[i]);
}

// Stores a head as codes in [-127, 127]; returns their scale.
inline float write_codes(const float* head, int64_t head_dim, int8_t* codes) {
    const Floats zero = broadcast(0.0f);
    Floats largest = zero;
    for (int64_t dim = 0; dim < head_dim; dim += kLanes) {
        const Floats number = load(head + dim);
        largest = max(largest, max(number, subtract(zero, number)));
    }
    const float most = reduce_max(largest);
    const Floats factor = broadcast(most > 0 ? kMaxCode / most : 0.0f);
    for (int64_t dim = 0; dim < head_dim; dim += kLanes) {
        const Floats code = multiply(load(head + dim), factor);
        store_int8(codes + dim, max(broadcast(-kMaxCode), min(broadcast(kMaxCode), code)));
    }
    return most / kMaxCode;
}

// k, v: float32 [num_kv_heads, head_dim]. Slot -1 writes nothing.
inline void write_token(const KvCache& cache, int64_t block_size, int64_t slot, const float* k, const float* v) {
    if (slot < 0) return;
    const int64_t block = slot / block_size, offset = slot % block_size;
    for (int64_t head = 0; head < 2 * cache.num_kv_heads; ++head) {
        const int64_t kv_head = head % cache.num_kv_heads;
        const float* const from = (head < cache.num_kv_heads ? k : v) + kv_head * cache.head_dim;
        const int64_t row = (block * 2 * cache.num_kv_heads + head) * block_size + offset;
        if (cache.scales != nullptr) {
            auto* const codes = static_cast<int8_t*>(cache.values) + row * cache.head_dim;
            cache.scales[row] = write_codes(from, cache.head_dim, codes);
            continue;
        }
        Bf16* const to = static_cast<Bf16*>(cache.values) + row * cache.head_dim;
        for (int64_t dim = 0; dim < cache.head_dim; dim += kLanes) store_bf16(to + dim, load(from + dim));
    }
}

}  // namespace pageframe
