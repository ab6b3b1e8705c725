// The rows that a linear is applied to, and what its weight needs of them besides their values.
#pragma once

#include <cstdint>
#include <cstring>

#include "scratch.h"
#include "types.h"
#include "vector_math.h"

namespace pageframe {

// What weights of 4 and 8 bits are multiplied with: activations as they are, or as 16-bit codes of one scale a group.
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
    float* scales;  // [rows, k / 32]
#endif
};

inline RowExtras lay_out_extras(ScratchLayout& layout, int64_t rows, int64_t k) {
    RowExtras extras;
    extras.group_sums = layout.take<float>(rows * (k / kGroup));
#if defined(PAGEFRAME_ISA_VNNI)
    extras.codes = layout.take<Dot>(rows * k);
    extras.scales = layout.take<float>(rows * (k / kGroup));
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

// The largest magnitude of a group: inf or NaN if there is one.
inline float largest_magnitude(__m512 low, __m512 high) {
    const __m512i magnitude = _mm512_set1_epi32(INT32_MAX);  // as integers in the same order, and NaN comes last
    const int32_t bits = static_cast<int32_t>(_mm512_reduce_max_epu32(
        _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(low), magnitude),
                         _mm512_and_si512(_mm512_castps_si512(high), magnitude))));
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    return largest;
}

// A group with inf or NaN has a scale that is one; so all of the row's outputs are one, as they would be without codes.
inline void prepare_row(const Act* row, int64_t k, int64_t index, const RowExtras& extras) {
    constexpr float kTiny = 1e-30f;  // whose inverse could not be written
    const int64_t groups = k / kGroup;
    Dot* codes = extras.codes + index * k;
    for (int64_t g = 0; g < groups; ++g, row += kGroup, codes += kGroup) {
        const __m512 low = _mm512_loadu_ps(row), high = _mm512_loadu_ps(row + kLanes);
        const float largest = largest_magnitude(low, high);
        const bool zero = largest < kTiny;
        const float scale = zero ? 0.0f : largest / kMaxDot;
        const __m512 factor = _mm512_set1_ps(zero ? 0.0f : kMaxDot / largest);
        const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, factor));
        const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, factor));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtsepi32_epi16(first));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + kLanes), _mm512_cvtsepi32_epi16(second));
        const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
        extras.scales[index * groups + g] = scale;
        extras.group_sums[index * groups + g] = scale * static_cast<float>(sum);
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
