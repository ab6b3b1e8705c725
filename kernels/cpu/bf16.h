// Products of bfloat16 and rounding to it: the instructions for them, or, where the build has none, the same in others.
#pragma once

#include <immintrin.h>

namespace pageframe {

// The first of each dword's two bfloat16, and the second, as float32.
inline __m512 first_of_pairs(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 second_of_pairs(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

#if defined(__AVX512BF16__)

// sums + the two products of each dword's bfloat16.
inline __m512 dot_bf16(__m512 sums, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }

// Rounded to nearest even.
inline __m256i round_to_bf16(__m512 a) { return (__m256i)_mm512_cvtneps_pbh(a); }

// The same of 32 numbers.
inline __m512i round_to_bf16(__m512 high, __m512 low) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

#else

// For tests, on processors without the instruction.
inline __m512 dot_bf16(__m512 sums, __m512i a, __m512i b) {
    const __m512 seconds = _mm512_fmadd_ps(second_of_pairs(a), second_of_pairs(b), sums);
    return _mm512_fmadd_ps(first_of_pairs(a), first_of_pairs(b), seconds);
}

inline __m256i round_to_bf16(__m512 a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(nearest, is_nan, quiet), 16));
}

inline __m512i round_to_bf16(__m512 high, __m512 low) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(round_to_bf16(low)), round_to_bf16(high), 1);
}

#endif

}  // namespace pageframe
