// What attention multiplies: registers of 32-bit words, and how the numbers of a slot become such words.
//
// A word is two bfloat16 that one instruction multiplies and adds, or, where there is no such instruction, one float32.
//
// K is read as raw words, in which a slot's neighbours lie together, and turned: word_of<Stored, i>(raw) is the i-th of
// the kWordsPerRaw words in each. V is read as load_values() gives it, two registers for 2 * kLanes numbers of a slot
// in an order of their own, and sums of V keep that order until store_in_order() writes them.
#pragma once

#include <cstdint>
#include <cstring>

#include "types.h"
#include "vector_math.h"

namespace pageframe {

#if defined(PAGEFRAME_ISA_AVX512)

using Words = __m512i;

#if defined(PAGEFRAME_ISA_BF16)
using Word = uint32_t;
constexpr int64_t kPerWord = 2;  // numbers in a word
constexpr int kWordsPerRaw = 1;
#else
using Word = float;
constexpr int64_t kPerWord = 1;
constexpr int kWordsPerRaw = 2;
#endif

inline Words broadcast_word(const Word* at) {
    int bits;
    std::memcpy(&bits, at, sizeof bits);  // written as halves
    return _mm512_set1_epi32(bits);
}
inline Words load_words(const Word* at) { return _mm512_loadu_si512(at); }
inline void store_words(Word* at, Words a) { _mm512_storeu_si512(at, a); }
// Row r's word w goes to row w's word r.
inline void transpose(Words rows[kLanes]) {
    Words lanes[16];  // of 4 x 4 words, each transposed in itself
#pragma GCC unroll 4
    for (int r = 0; r < 16; r += 4) {
        const Words a = _mm512_unpacklo_epi32(rows[r], rows[r + 1]), b = _mm512_unpackhi_epi32(rows[r], rows[r + 1]);
        const Words c = _mm512_unpacklo_epi32(rows[r + 2], rows[r + 3]);
        const Words d = _mm512_unpackhi_epi32(rows[r + 2], rows[r + 3]);
        lanes[r] = _mm512_unpacklo_epi64(a, c);
        lanes[r + 1] = _mm512_unpackhi_epi64(a, c);
        lanes[r + 2] = _mm512_unpacklo_epi64(b, d);
        lanes[r + 3] = _mm512_unpackhi_epi64(b, d);
    }
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
        const Words a = _mm512_shuffle_i32x4(lanes[w], lanes[w + 4], 0x44);
        const Words b = _mm512_shuffle_i32x4(lanes[w], lanes[w + 4], 0xee);
        const Words c = _mm512_shuffle_i32x4(lanes[w + 8], lanes[w + 12], 0x44);
        const Words d = _mm512_shuffle_i32x4(lanes[w + 8], lanes[w + 12], 0xee);
        rows[w] = _mm512_shuffle_i32x4(a, c, 0x88);
        rows[w + 4] = _mm512_shuffle_i32x4(a, c, 0xdd);
        rows[w + 8] = _mm512_shuffle_i32x4(b, d, 0x88);
        rows[w + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

#if defined(PAGEFRAME_ISA_BF16)

inline Floats multiply_add(Floats sum, Words a, Words b) { return dot_bf16(sum, a, b); }

// kLanes raw words of a slot.
inline Words load_raw(const Bf16* at) { return _mm512_loadu_si512(at); }
inline Words load_raw(const int8_t* at) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
    return round_to_bf16(high, low);
}

template <class Stored, int kWord>
inline Words word_of(Words raw) {
    return raw;
}

// Two slots' next 2 * kLanes numbers, one of either in each word.
inline void pair_slots(const Words slots[kPerWord], Words out[2]) {
    // Which numbers make a word: i of the first slot, and i of the second, counted from 32 on.
    const __m512i i = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i low = _mm512_add_epi32(_mm512_add_epi32(i, _mm512_slli_epi32(i, 16)), _mm512_set1_epi32(32 << 16));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    out[0] = _mm512_permutex2var_epi16(slots[0], low, slots[1]);
    out[1] = _mm512_permutex2var_epi16(slots[0], high, slots[1]);
}
template <class Stored>
inline void load_values(const Stored* const slots[kPerWord], int64_t dim, Words out[2]) {
    const Words both[kPerWord] = {load_raw(slots[0] + dim), load_raw(slots[1] + dim)};
    pair_slots(both, out);
}
inline void store_in_order(Act* at, Floats first, Floats second) {
    store_act(at, first);
    store_act(at + kLanes, second);
}

#else

inline Floats multiply_add(Floats sum, Words a, Words b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

// Pairs of neighbours, as bfloat16 or 16-bit codes: their widening takes no shuffle.
inline Words load_raw(const Bf16* at) { return _mm512_loadu_si512(at); }
inline Words load_raw(const int8_t* at) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
template <class Stored, int kWord>
inline Words word_of(Words raw) {
    if constexpr (sizeof(Stored) == 1) {
        const __m512i code = _mm512_srai_epi32(kWord == 0 ? _mm512_slli_epi32(raw, 16) : raw, 16);
        return _mm512_castps_si512(_mm512_cvtepi32_ps(code));
    } else {
        return _mm512_castps_si512(kWord == 0 ? first_of_pairs(raw) : second_of_pairs(raw));
    }
}

// The first of each pair, and the second.
template <class Stored>
inline void load_values(const Stored* const slots[kPerWord], int64_t dim, Words out[2]) {
    const Words raw = load_raw(slots[0] + dim);
    out[0] = word_of<Stored, 0>(raw);
    out[1] = word_of<Stored, 1>(raw);
}
inline void store_in_order(Act* at, Floats first, Floats second) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    store_act(at, _mm512_permutex2var_ps(first, low, second));
    store_act(at + kLanes, _mm512_permutex2var_ps(first, high, second));
}

#endif

// x = power + rest with 0 <= rest < 1, also for x = -inf; a * 2^power.
inline Floats rest_of(Floats x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF); }
inline Floats times_floor_power(Floats a, Floats x) { return _mm512_scalef_ps(a, x); }

#else

using Word = float;
using Words = Floats;
constexpr int64_t kPerWord = 1;
constexpr int kWordsPerRaw = 1;

inline Words broadcast_word(const Word* at) { return _mm256_broadcast_ss(at); }
inline Words load_words(const Word* at) { return load(at); }
inline void store_words(Word* at, Words a) { store(at, a); }
inline Floats multiply_add(Floats sum, Words a, Words b) { return fma(a, b, sum); }

inline Words load_raw(const Bf16* at) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Words load_raw(const int8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}

template <class Stored, int kWord>
inline Words word_of(Words raw) {
    return raw;
}

inline void transpose(Words rows[kLanes]) {
    Words lanes[8];
#pragma GCC unroll 2
    for (int r = 0; r < 8; r += 4) {
        const Words a = _mm256_unpacklo_ps(rows[r], rows[r + 1]), b = _mm256_unpackhi_ps(rows[r], rows[r + 1]);
        const Words c = _mm256_unpacklo_ps(rows[r + 2], rows[r + 3]), d = _mm256_unpackhi_ps(rows[r + 2], rows[r + 3]);
        lanes[r] = _mm256_shuffle_ps(a, c, 0x44);
        lanes[r + 1] = _mm256_shuffle_ps(a, c, 0xee);
        lanes[r + 2] = _mm256_shuffle_ps(b, d, 0x44);
        lanes[r + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
        rows[w] = _mm256_permute2f128_ps(lanes[w], lanes[w + 4], 0x20);
        rows[w + 4] = _mm256_permute2f128_ps(lanes[w], lanes[w + 4], 0x31);
    }
}

template <class Stored>
inline void load_values(const Stored* const slots[kPerWord], int64_t dim, Words out[2]) {
    out[0] = load_raw(slots[0] + dim);
    out[1] = load_raw(slots[0] + dim + kLanes);
}
inline void store_in_order(Act* at, Floats first, Floats second) {
    store_act(at, first);
    store_act(at + kLanes, second);
}

constexpr float kLowestPower = -126.0f;

inline Floats rest_of(Floats x) {
    const Floats clamped = max(broadcast(kLowestPower), x);
    return subtract(clamped, _mm256_floor_ps(clamped));
}
inline Floats times_floor_power(Floats a, Floats x) {
    const Floats power = _mm256_floor_ps(max(broadcast(kLowestPower), x));
    return zero_below(x, broadcast(kLowestPower), times_power_of_two(a, power));
}

#endif

// 2^x within 1.5e-7 of it, relatively, for x <= 0; 0 for -inf.
inline Floats exp2(Floats x) {
    const Floats rest = rest_of(x);
    Floats sum = broadcast(0.00186713075f);
#pragma GCC unroll 5
    for (const float coefficient : {0.00901702885f, 0.0557999127f, 0.240164444f, 0.693151295f, 1.0f})
        sum = fma(sum, rest, broadcast(coefficient));
    return times_floor_power(sum, x);
}

}  // namespace pageframe
