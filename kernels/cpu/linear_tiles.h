// What tiles for AVX512 share, however they multiply.
#pragma once

#include "linear_weights.h"

namespace pageframe {

inline __m512i broadcast_pair(const Dot* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return _mm512_set1_epi32(pair);
}

inline __m512 load_half(const uint16_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

inline __m512 load_bias(const LinearWeight& weight, int64_t strip) {
    if (weight.bias == nullptr) return _mm512_setzero_ps();
    const int64_t column = strip * kStrip;
    const int64_t width = std::min(kStrip, weight.n - column);
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << width) - 1), weight.bias + column);
}

// A tile's sums. Loops over them must be unrolled: only then does the compiler keep them in registers.
template <int kRows, int kStrips>
struct Sums {
    __m512 at[kRows][kStrips];
};

template <int kRows, int kStrips>
inline void start_from_bias(Sums<kRows, kStrips>& sums, const LinearWeight& weight, int64_t strip) {
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
        const __m512 bias = load_bias(weight, strip + s);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums.at[r][s] = bias;
    }
}

template <int kRows, int kStrips>
inline void store_tile_sums(const Sums<kRows, kStrips>& sums, float* out) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) _mm512_storeu_ps(out + r * kPieceWidth + s * kStrip, sums.at[r][s]);
}

}  // namespace pageframe
