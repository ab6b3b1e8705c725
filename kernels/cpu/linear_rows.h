// The rows that a linear is applied to, and what its weight needs of them besides their values.
#pragma once

#include <cstdint>
#include <cstring>

#include "scratch.h"
#include "types.h"
#include "vector_math.h"

namespace pageframe {

// What weights of 4 and 8 bits are multiplied with: activations as they are, or as 16-bit codes of one scale a row.
#if defined(PAGEFRAME_ISA_VNNI)
using Dot = int16_t;
#else
using Dot = Act;
#endif

// What such weights need of the rows besides, made by prepare_row().
struct RowExtras {
    float* group_sums;  // [rows, k / 32]: of what is multiplied
#if defined(PAGEFRAME_ISA_VNNI)
    Dot* codes;     // [rows, k]
    float* scales;  // [rows]
#endif
};

inline RowExtras lay_out_extras(ScratchLayout& layout, int64_t rows, int64_t k) {
    RowExtras extras;
    extras.group_sums = layout.take<float>(rows * (k / kGroup));
#if defined(PAGEFRAME_ISA_VNNI)
    extras.codes = layout.take<Dot>(rows * k);
    extras.scales = layout.take<float>(rows);
#endif
    return extras;
}

// What a linear is applied to.
struct Inputs {
    const Act* values;  // [rows, k]
    int64_t stride;     // elements from a row to the next
    RowExtras extras;   // read if needs_extras(weight)
    int64_t rows;

    const Dot* dots(int64_t row) const {
#if defined(PAGEFRAME_ISA_VNNI)
        return extras.codes + row * stride;
#else
        return values + row * stride;
#endif
    }
};

// Minimums multiply the sums of groups of activations; AMX multiplies unpacked values.
inline bool needs_extras([[maybe_unused]] const LinearWeight& weight) {
#if defined(PAGEFRAME_ISA_AMX)
    return false;
#elif defined(PAGEFRAME_ISA_VNNI)
    return weight.kind != kBf16;
#else
    return weight.kind == kQ4;
#endif
}

#if defined(PAGEFRAME_ISA_VNNI)

constexpr float kMaxDot = 32767.0f;

// The largest magnitude of a row: inf or NaN if there is one.
inline float largest_magnitude(const float* row, int64_t k) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < k; i += kLanes)  // as integers, magnitudes have the same order, and NaN comes last
        most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(row + i), _mm512_set1_epi32(INT32_MAX)));
    const int32_t bits = static_cast<int32_t>(_mm512_reduce_max_epu32(most));
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    return largest;
}

// A row with inf or NaN has a scale that is one, so that all its outputs are NaN, as they would be without codes.
inline void prepare_row(const Act* row, int64_t k, int64_t index, const RowExtras& extras) {
    constexpr float kTiny = 1e-30f;  // whose inverse could not be written
    const float largest = largest_magnitude(row, k);
    const bool zero = largest < kTiny;
    const __m512 factor = _mm512_set1_ps(zero ? 0.0f : kMaxDot / largest);
    extras.scales[index] = zero ? 0.0f : largest / kMaxDot;
    Dot* const codes = extras.codes + index * k;
    float* const sums = extras.group_sums + index * (k / kGroup);
    for (int64_t i = 0; i < k; i += kGroup) {
        const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(row + i), factor));
        const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(row + i + kLanes), factor));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), _mm512_cvtsepi32_epi16(low));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i + kLanes), _mm512_cvtsepi32_epi16(high));
        sums[i / kGroup] = static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(low, high)));
    }
}

#else

inline void prepare_row(const Act* row, int64_t k, int64_t index, const RowExtras& extras) {
    for (int64_t g = 0; g < k / kGroup; ++g) {
        Floats sum = load_act(row + g * kGroup);
        for (int64_t i = kLanes; i < kGroup; i += kLanes) sum = add(sum, load_act(row + g * kGroup + i));
        extras.group_sums[index * (k / kGroup) + g] = reduce_add(sum);
    }
}

#endif

}  // namespace pageframe
