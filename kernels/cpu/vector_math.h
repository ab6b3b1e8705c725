// A register of float32 numbers, as wide as the instruction set has them, and the functions of it that the engine uses.
//
// Every function computes each lane by itself, or all lanes in a fixed order, so a value's bits depend on nothing but
// the arguments.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

#include "types.h"
#if defined(PAGEFRAME_ISA_AVX512)
#include "bf16.h"
#endif

namespace pageframe {

#if defined(PAGEFRAME_ISA_AVX512)

using Floats = __m512;
constexpr int kLanes = 16;

inline Floats load(const float* at) { return _mm512_loadu_ps(at); }
inline void store(float* at, Floats a) { _mm512_storeu_ps(at, a); }
inline Floats broadcast(float value) { return _mm512_set1_ps(value); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// Where either is NaN: b.
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats nearest_integer(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }
// a * 2^power for an integer power in [-126, 127].
inline Floats times_power_of_two(Floats a, Floats power) { return _mm512_scalef_ps(a, power); }
// a, or 0 where x < limit.
inline Floats zero_below(Floats x, Floats limit, Floats a) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), a);
}
inline Floats with_sign_of(Floats magnitude, Floats sign) {
    const __m512i sign_bit = _mm512_set1_epi32(INT32_MIN);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(sign_bit, _mm512_castps_si512(sign),
                                                         _mm512_castps_si512(magnitude), 0xca));
}
inline float reduce_add(Floats a) { return _mm512_reduce_add_ps(a); }
inline float reduce_max(Floats a) { return _mm512_reduce_max_ps(a); }

#if defined(PAGEFRAME_ISA_BF16)
// Rounded to nearest even.
inline void store_act(Act* at, Floats a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), round_to_bf16(a));
}
inline Floats load_act(const Act* at) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
#else
inline void store_act(Act* at, Floats a) { store(at, a); }
inline Floats load_act(const Act* at) { return load(at); }
#endif

#else

using Floats = __m256;
constexpr int kLanes = 8;

inline Floats load(const float* at) { return _mm256_loadu_ps(at); }
inline void store(float* at, Floats a) { _mm256_storeu_ps(at, a); }
inline Floats broadcast(float value) { return _mm256_set1_ps(value); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats nearest_integer(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power_of_two(Floats a, Floats power) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Floats zero_below(Floats x, Floats limit, Floats a) {
    return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), a);
}
inline Floats with_sign_of(Floats magnitude, Floats sign) {
    const Floats sign_bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(sign_bit, magnitude), _mm256_and_ps(sign_bit, sign));
}
inline float reduce_add(Floats a) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
inline float reduce_max(Floats a) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

inline void store_act(Act* at, Floats a) { _mm256_storeu_ps(at, a); }
inline Floats load_act(const Act* at) { return _mm256_loadu_ps(at); }

#endif

// e^x within 2e-7 of it, relatively. 0 below -87 (so for -inf), e^88 above 88; NaN stays NaN.
inline Floats exp(Floats x) {
    const Floats lowest = broadcast(-87.0f);
    const Floats clamped = min(broadcast(88.0f), max(lowest, x));
    // x = power * ln 2 + rest, and ln 2 in two parts, the first with so few bits that power times it is exact.
    const Floats power = nearest_integer(multiply(clamped, broadcast(1.44269504f)));
    const Floats rest = fma(power, broadcast(2.12194440e-4f), fma(power, broadcast(-0.693359375f), clamped));
    Floats sum = broadcast(1.0f / 5040);
    for (const float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = fma(sum, rest, broadcast(coefficient));
    return zero_below(x, lowest, times_power_of_two(sum, power));
}

// tanh(x) within 2e-7 of it.
inline Floats tanh(Floats x) {
    const Floats one = broadcast(1.0f);
    const Floats grown = exp(add(x, x));
    return subtract(one, divide(broadcast(2.0f), add(grown, one)));
}

// 1 / (1 + e^-x).
inline Floats sigmoid(Floats x) {
    const Floats one = broadcast(1.0f);
    return divide(one, add(one, exp(subtract(broadcast(0.0f), x))));
}

}  // namespace pageframe
