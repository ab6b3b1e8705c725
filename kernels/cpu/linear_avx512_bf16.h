// How tiles for AVX512 multiply with bfloat16 dot products.
//
// A group's codes are multiplied as bfloat16, which holds them exactly, with activations that were rounded to it.
#pragma once

#include "linear_tiles.h"

namespace pageframe {

constexpr int kBf16Rows = 6;  // of a tile of bfloat16 values
constexpr int kLinesAtOnce = 2;  // unrolled
constexpr int64_t kUnpackRows = 24;  // from so many on, codes are unpacked once for all of them
constexpr int kUnpackedRows = 8, kUnpackedWideRows = 3;  // of a tile of unpacked codes

using GroupSums = __m512;  // of a group's products, for 16 outputs

inline GroupSums no_products() { return _mm512_setzero_ps(); }
inline GroupSums add_products(GroupSums sums, __m512i values, __m512i pair) {
    return dot_bf16(sums, values, pair);
}
inline __m512 as_floats(GroupSums sums, const RowExtras&, int64_t) { return sums; }

struct Q4Codes {
    using Record = Q4Record;
    using Line = __m512i;
    static constexpr int kPairsInLine = 4;

    static Line load_line(const Record& record, int line) { return _mm512_loadu_si512(record.codes[line]); }

    // 16 + code: the code is the upper bits of the fraction, and 16 the rest of the number.
    template <int kPair>
    static __m512i unpack(Line codes) {
        constexpr int kFirstAndSecondOrThird = 0xea;
        const __m512i turned = kPair == 0 ? codes : _mm512_ror_epi32(codes, 4 * kPair);
        return _mm512_ternarylogic_epi32(turned, _mm512_set1_epi16(0x0078), _mm512_set1_epi16(0x4180),
                                         kFirstAndSecondOrThird);
    }

    static __m512 scale(const Record& record) { return load_half(record.scales); }

    static constexpr bool kHasOffset = true;
    static __m512 offset(const Record& record, __m512 scale) {
        return _mm512_fnmadd_ps(_mm512_set1_ps(16.0f), scale, load_half(record.minimums));
    }
};

struct Q8Codes {
    using Record = Q8Record;
    using Line = __m512i;
    static constexpr int kPairsInLine = 1;

    static Line load_line(const Record& record, int pair) {
        const auto* const codes = reinterpret_cast<const __m128i*>(record.codes[pair]);
        const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes)));
        const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes + 1)));
        return round_to_bf16(second, first);
    }

    template <int kPair>
    static __m512i unpack(Line line) {
        return line;
    }

    static __m512 scale(const Record& record) { return load_half(record.scales); }

    static constexpr bool kHasOffset = false;
};

// Adds a pair of inputs of bfloat16 values: one dot product. x is the first row's pair.
template <int kRows, int kStrips>
inline void add_pair(Sums<kRows, kStrips>& sums, const __m512i* values, const Act* x, int64_t stride) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        const __m512i pair = broadcast_pair(x + r * stride);
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) sums.at[r][s] = dot_bf16(sums.at[r][s], values[s], pair);
    }
}

}  // namespace pageframe
