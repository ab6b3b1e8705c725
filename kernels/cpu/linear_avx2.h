// Tiles of a linear for AVX2: everything in float32.
//
// Each output is one chain of fused multiply-adds over k. kBf16: from the bias on. kQ4 and kQ8: for each group a chain
// over its inputs, from 0, with the codes as numbers; what comes out is scaled and added to a sum that starts from the
// bias.
#pragma once

#include "linear_weights.h"

namespace pageframe {

// A number for each output of a strip.
struct StripFloats {
    __m256 at[2];
};

struct StripPair {
    StripFloats first, second;  // of the pair's two inputs
};

inline StripFloats load_half(const uint16_t* at) {
    const __m128i* const halves = reinterpret_cast<const __m128i*>(at);
    return {{_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))}};
}

inline StripFloats load_bias(const LinearWeight& weight, int64_t strip) {
    float bias[kStrip] = {};
    const int64_t column = strip * kStrip;
    if (weight.bias != nullptr)
        std::copy(weight.bias + column, weight.bias + std::min(weight.n, column + kStrip), bias);
    return {{_mm256_loadu_ps(bias), _mm256_loadu_ps(bias + kLanes)}};
}

// A tile's sums. Loops over them must be unrolled: only then does the compiler keep them in registers.
template <int kRows, int kStrips>
struct Sums {
    StripFloats of[kRows][kStrips];

    void clear() {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int s = 0; s < kStrips; ++s) of[r][s] = {{_mm256_setzero_ps(), _mm256_setzero_ps()}};
    }

    void start_from_bias(const LinearWeight& weight, int64_t strip) {
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
            const StripFloats bias = load_bias(weight, strip + s);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) of[r][s] = bias;
        }
    }

    // Adds one input's products with strip s; x is the first row's activation.
    void add_products(int s, const StripFloats& values, const float* x, int64_t stride) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const __m256 activation = _mm256_broadcast_ss(x + r * stride);
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) of[r][s].at[h] = _mm256_fmadd_ps(activation, values.at[h], of[r][s].at[h]);
        }
    }

    void store(float* sums) const {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int s = 0; s < kStrips; ++s)
#pragma GCC unroll 2
                for (int h = 0; h < 2; ++h)
                    _mm256_storeu_ps(sums + r * kPieceWidth + s * kStrip + h * kLanes, of[r][s].at[h]);
    }
};

struct Bf16Tiles {
    static constexpr int kMaxRows[] = {0, 6, 3, 0, 1};  // by strips

    template <int kRows, int kStrips>
    static void compute(const LinearWeight& weight, const Inputs& x, int64_t row, int64_t strip, int64_t ahead,
                        float* out) {
        Sums<kRows, kStrips> sums;
        sums.start_from_bias(weight, strip);
        const int64_t pairs = weight.k / 2;
        const auto* const lines = static_cast<const __m256i*>(weight.values) + 2 * strip * pairs;
        const float* const first = x.values + row * x.stride;
        for (int64_t j = 0; j < pairs; ++j) {
#pragma GCC unroll 4
            for (int s = 0; s < kStrips; ++s) {
                const __m256i* const line = lines + 2 * (s * pairs + j);
                if (ahead != 0) prefetch(line, ahead, kCacheLine);
                const StripPair pair = unpack(line);
                sums.add_products(s, pair.first, first + 2 * j, x.stride);
                sums.add_products(s, pair.second, first + 2 * j + 1, x.stride);
            }
        }
        sums.store(out);
    }

  private:
    static StripPair unpack(const __m256i* line) {
        const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
        StripPair pair;
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const __m256i both = _mm256_loadu_si256(line + h);
            pair.first.at[h] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
            pair.second.at[h] = _mm256_castsi256_ps(_mm256_and_si256(both, upper));
        }
        return pair;
    }
};

struct Q4Codes {
    using Record = Q4Record;
    static constexpr int kPairsInLine = 4;
    struct Line {
        __m256i at[2];
    };

    static Line load(const Record& record, int line) {
        Line codes;
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const auto* const at = reinterpret_cast<const __m256i*>(record.codes[line]) + h;
            const __m256i turned = _mm256_loadu_si256(at);
            codes.at[h] = _mm256_or_si256(_mm256_srli_epi32(turned, 3), _mm256_slli_epi32(turned, 29));
        }
        return codes;
    }

    template <int kPair>
    static StripPair unpack(const Line& codes) {
        const __m256i lowest = _mm256_set1_epi32(15);
        StripPair pair;
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const __m256i first = _mm256_and_si256(_mm256_srli_epi32(codes.at[h], 4 * kPair), lowest);
            const __m256i second = _mm256_and_si256(_mm256_srli_epi32(codes.at[h], 16 + 4 * kPair), lowest);
            pair.first.at[h] = _mm256_cvtepi32_ps(first);
            pair.second.at[h] = _mm256_cvtepi32_ps(second);
        }
        return pair;
    }

    static constexpr bool kHasOffset = true;
    static StripFloats offset(const Record& record) { return load_half(record.minimums); }
};

struct Q8Codes {
    using Record = Q8Record;
    static constexpr int kPairsInLine = 1;
    struct Line {
        __m256i at[2];  // the two codes of an output in each dword
    };

    static Line load(const Record& record, int pair) {
        const auto* const codes = reinterpret_cast<const __m128i*>(record.codes[pair]);
        return {{_mm256_cvtepi8_epi16(_mm_loadu_si128(codes)), _mm256_cvtepi8_epi16(_mm_loadu_si128(codes + 1))}};
    }

    template <int kPair>
    static StripPair unpack(const Line& codes) {
        StripPair pair;
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const __m256i first = _mm256_srai_epi32(_mm256_slli_epi32(codes.at[h], 16), 16);
            pair.first.at[h] = _mm256_cvtepi32_ps(first);
            pair.second.at[h] = _mm256_cvtepi32_ps(_mm256_srai_epi32(codes.at[h], 16));
        }
        return pair;
    }

    static constexpr bool kHasOffset = false;
};

template <class Codes>
struct GroupedTiles {
    using Record = typename Codes::Record;
    static constexpr int kMaxRows[] = {0, 6, 1, 0, 0};  // by strips

    template <int kRows, int kStrips>
    static void compute(const LinearWeight& weight, const Inputs& x, int64_t row, int64_t strip, int64_t ahead,
                        float* out) {
        Sums<kRows, kStrips> sums;
        sums.start_from_bias(weight, strip);
        const int64_t groups = weight.k / kGroup;
        const Record* records = static_cast<const Record*>(weight.values) + strip * groups;
        for (int64_t g = 0; g < groups; ++g, ++records) {
            if (ahead != 0)
                for (int s = 0; s < kStrips; ++s) prefetch(records + s * groups, ahead, sizeof(Record));
            Sums<kRows, kStrips> products;
            products.clear();
            const float* const first = x.values + row * x.stride + g * kGroup;
            for (int line = 0; line < kGroup / 2 / Codes::kPairsInLine; ++line)
#pragma GCC unroll 4
                for (int s = 0; s < kStrips; ++s)
                    add_line(products, s, Codes::load(records[s * groups], line),
                             first + line * 2 * Codes::kPairsInLine, x.stride);
            add_scaled(sums, products, records, groups, x.extras.group_sums + row * groups + g);
        }
        sums.store(out);
    }

  private:
    template <int kPair = 0, int kRows, int kStrips>
    static void add_line(Sums<kRows, kStrips>& products, int s, const typename Codes::Line& line, const float* x,
                         int64_t stride) {
        const StripPair pair = Codes::template unpack<kPair>(line);
        products.add_products(s, pair.first, x + 2 * kPair, stride);
        products.add_products(s, pair.second, x + 2 * kPair + 1, stride);
        if constexpr (kPair + 1 < Codes::kPairsInLine) add_line<kPair + 1>(products, s, line, x, stride);
    }

    // group_sums is the first row's of this group; the rows' and the strips' records are `groups` apart.
    template <int kRows, int kStrips>
    static void add_scaled(Sums<kRows, kStrips>& sums, const Sums<kRows, kStrips>& products, const Record* records,
                           int64_t groups, const float* group_sums) {
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
            const StripFloats scale = load_half(records[s * groups].scales);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
                for (int h = 0; h < 2; ++h)
                    sums.of[r][s].at[h] =
                        _mm256_fmadd_ps(scale.at[h], products.of[r][s].at[h], sums.of[r][s].at[h]);
            if constexpr (Codes::kHasOffset)
                sums.add_products(s, Codes::offset(records[s * groups]), group_sums, groups);
        }
    }
};

inline const KindTiles& tiles_of(int32_t kind) {
    static constexpr KindTiles bf16{tile_set<Bf16Tiles>(), nullptr, {}};
    static constexpr KindTiles q4{tile_set<GroupedTiles<Q4Codes>>(), nullptr, {}};
    static constexpr KindTiles q8{tile_set<GroupedTiles<Q8Codes>>(), nullptr, {}};
    return kind == kQ4 ? q4 : kind == kQ8 ? q8 : bf16;
}

}  // namespace pageframe
