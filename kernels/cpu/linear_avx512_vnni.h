// How tiles for AVX512 multiply with dot products of 16-bit integers (VNNI), where there are none of bfloat16.
//
// A group's codes are multiplied with activations that are 16-bit codes of a scale of their own, and added in 32-bit
// integers: exact, since 32 products of 128 x 32,767 stay far below 2^31. Rounding to such codes moves an activation by
// at most 2^-16 of its group's largest.
#pragma once

#include "linear_tiles.h"

namespace pageframe {

constexpr int kBf16Rows = 8;     // of a tile of bfloat16 values
constexpr int kLinesAtOnce = 16;  // unrolled; with fewer, GCC 12 moves sums between registers from line to line
constexpr int64_t kUnpackRows = 64;  // from so many on, codes are unpacked once for all of them
constexpr int kUnpackedRows = 6, kUnpackedWideRows = 6;  // of a tile of unpacked codes

using GroupSums = __m512i;  // of a group's products, for 16 outputs

inline GroupSums no_products() { return _mm512_setzero_si512(); }
inline GroupSums add_products(GroupSums sums, __m512i values, __m512i pair) {
    // GCC 12 surrounds the intrinsic with copies of registers.
    asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(values), "v"(pair));
    return sums;
}
inline __m512 as_floats(GroupSums sums, const RowExtras& extras, int64_t group) {
    return _mm512_mul_ps(_mm512_set1_ps(extras.scales[group]), _mm512_cvtepi32_ps(sums));
}

struct Q4Codes {
    using Record = Q4Record;
    using Line = __m512i;
    static constexpr int kPairsInLine = 4;

    static Line load_line(const Record& record, int line) { return _mm512_loadu_si512(record.codes[line]); }

    // 8 * code, as it lies.
    template <int kPair>
    static __m512i unpack(Line codes) {
        const __m512i turned = kPair == 0 ? codes : _mm512_ror_epi32(codes, 4 * kPair);
        return _mm512_and_si512(turned, _mm512_set1_epi16(0x0078));
    }

    static __m512 scale(const Record& record) {
        return _mm512_mul_ps(_mm512_set1_ps(0.125f), load_half(record.scales));
    }

    static constexpr bool kHasOffset = true;
    static __m512 offset(const Record& record, __m512) { return load_half(record.minimums); }
};

struct Q8Codes {
    using Record = Q8Record;
    using Line = __m512i;
    static constexpr int kPairsInLine = 1;

    static Line load_line(const Record& record, int pair) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(record.codes[pair])));
    }

    template <int kPair>
    static __m512i unpack(Line line) {
        return line;
    }

    static __m512 scale(const Record& record) { return load_half(record.scales); }

    static constexpr bool kHasOffset = false;
};

// Adds one of the two inputs of each pair.
template <bool kSecond, int kRows, int kStrips>
inline void add_input(Sums<kRows, kStrips>& sums, const __m512i* pairs, const Act* x, int64_t stride) {
    __m512 values[kStrips];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s)
        values[s] = kSecond ? second_of_pairs(pairs[s]) : first_of_pairs(pairs[s]);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        const __m512 activation = _mm512_set1_ps(x[r * stride]);
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) sums.at[r][s] = _mm512_fmadd_ps(activation, values[s], sums.at[r][s]);
    }
}

// Adds a pair of inputs of bfloat16 values, multiplied as float32: one after the other. x is the first row's pair.
template <int kRows, int kStrips>
inline void add_pair(Sums<kRows, kStrips>& sums, const __m512i* values, const Act* x, int64_t stride) {
    add_input<false>(sums, values, x, stride);
    add_input<true>(sums, values, x + 1, stride);
}

}  // namespace pageframe
