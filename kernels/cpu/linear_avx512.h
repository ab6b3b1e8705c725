// Tiles of a linear for AVX512 with bf16 dot products.
//
// Each output is one chain of operations over k. kBf16: from the bias on, one dot product per pair. kQ4 and kQ8: for
// each group a chain over its pairs, from 0, with the codes as bfloat16, which holds them exactly; what comes out is
// scaled and added to a sum that starts from the bias.
#pragma once

#include "linear_weights.h"

namespace pageframe {

inline __m512bh broadcast_pair(const Act* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
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

    void clear() {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int s = 0; s < kStrips; ++s) at[r][s] = _mm512_setzero_ps();
    }

    void start_from_bias(const LinearWeight& weight, int64_t strip) {
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
            const __m512 bias = load_bias(weight, strip + s);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) at[r][s] = bias;
        }
    }

    // Adds one pair's products; x is the first row's pair.
    void add_products(const __m512bh* values, const Act* x, int64_t stride) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const __m512bh pair = broadcast_pair(x + r * stride);
#pragma GCC unroll 4
            for (int s = 0; s < kStrips; ++s) at[r][s] = _mm512_dpbf16_ps(at[r][s], values[s], pair);
        }
    }

    void store(float* sums) const {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int s = 0; s < kStrips; ++s) _mm512_storeu_ps(sums + r * kPieceWidth + s * kStrip, at[r][s]);
    }
};

struct Bf16Tiles {
    static constexpr int kMaxRows[] = {0, 6, 6, 0, 6};  // by strips

    template <int kRows, int kStrips>
    static void compute(const LinearWeight& weight, const Inputs& x, int64_t row, int64_t strip, int64_t ahead,
                        float* out) {
        Sums<kRows, kStrips> sums;
        sums.start_from_bias(weight, strip);
        const int64_t pairs = weight.k / 2;
        const __m512i* const lines = static_cast<const __m512i*>(weight.values) + strip * pairs;
        const Act* const first = x.values + row * x.stride;
        for (int64_t j = 0; j < pairs; ++j) {
            __m512bh values[kStrips];
#pragma GCC unroll 4
            for (int s = 0; s < kStrips; ++s) {
                const __m512i* const line = lines + s * pairs + j;
                if (ahead != 0) prefetch(line, ahead, sizeof *line);
                values[s] = (__m512bh)_mm512_loadu_si512(line);
            }
            sums.add_products(values, first + 2 * j, x.stride);
        }
        sums.store(out);
    }
};

struct Q4Codes {
    using Record = Q4Record;
    using Line = __m512i;
    static constexpr int kPairsInLine = 4;

    static Line load_line(const Record& record, int line) { return _mm512_loadu_si512(record.codes[line]); }

    // 16 + code: the code is the upper bits of the fraction, and 16 the rest of the number.
    template <int kPair>
    static __m512bh unpack(Line codes) {
        constexpr int kFirstAndSecondOrThird = 0xea;
        const __m512i turned = kPair == 0 ? codes : _mm512_ror_epi32(codes, 4 * kPair);
        return (__m512bh)_mm512_ternarylogic_epi32(turned, _mm512_set1_epi16(0x0078), _mm512_set1_epi16(0x4180),
                                                   kFirstAndSecondOrThird);
    }

    static constexpr bool kHasOffset = true;
    static __m512 offset(const Record& record, __m512 scale) {
        return _mm512_fnmadd_ps(_mm512_set1_ps(16.0f), scale, load_half(record.minimums));
    }
};

struct Q8Codes {
    using Record = Q8Record;
    using Line = __m512bh;
    static constexpr int kPairsInLine = 1;

    static Line load_line(const Record& record, int pair) {
        const auto* const codes = reinterpret_cast<const __m128i*>(record.codes[pair]);
        const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes)));
        const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes + 1)));
        return (__m512bh)_mm512_cvtne2ps_pbh(second, first);
    }

    template <int kPair>
    static __m512bh unpack(Line line) {
        return line;
    }

    static constexpr bool kHasOffset = false;
};

// Where tiles have a group's codes from: the records that codes and scales are stored in.
template <class Codes>
struct StoredCodes : Codes {
    using Record = typename Codes::Record;
    const Record* records;  // of the first strip
    int64_t groups;

    StoredCodes(const LinearWeight& weight, int64_t strip) : StoredCodes(weight.values, weight.k / kGroup, strip) {}

    StoredCodes(const void* all, int64_t groups, int64_t strip)
        : records(static_cast<const Record*>(all) + strip * groups), groups(groups) {}

    const Record& record(int64_t strip, int64_t group) const { return records[strip * groups + group]; }

    typename Codes::Line load(int64_t strip, int64_t group, int line) const {
        return Codes::load_line(record(strip, group), line);
    }
};

// Or, for many rows, memory where they are unpacked; the records are then the weight's `scales`.
template <class Codes>
struct UnpackedCodes : StoredCodes<Codes> {
    using Line = __m512bh;
    static constexpr int kPairsInLine = 1;
    const __m512i* pairs;  // of the first strip

    UnpackedCodes(const LinearWeight& weight, int64_t strip)
        : StoredCodes<Codes>(weight.scales, weight.k / kGroup, strip),
          pairs(static_cast<const __m512i*>(weight.values) + strip * (weight.k / 2)) {}

    Line load(int64_t strip, int64_t group, int pair) const {
        return (__m512bh)_mm512_load_si512(pairs + (strip * this->groups + group) * (kGroup / 2) + pair);
    }

    template <int kPair>
    static __m512bh unpack(Line line) {
        return line;
    }
};

template <class Source>
struct GroupedTiles {
    static constexpr int kMaxRows[] = {0, 8, 8, 0, 3};  // by strips

    template <int kRows, int kStrips>
    static void compute(const LinearWeight& weight, const Inputs& x, int64_t row, int64_t strip, int64_t ahead,
                        float* out) {
        Sums<kRows, kStrips> sums;
        sums.start_from_bias(weight, strip);
        const Source source(weight, strip);
        for (int64_t g = 0; g < source.groups; ++g) {
            if (ahead != 0)
#pragma GCC unroll 4
                for (int s = 0; s < kStrips; ++s) prefetch(&source.record(s, g), ahead, sizeof(source.record(s, g)));
            Sums<kRows, kStrips> products;
            products.clear();
            const Act* const first = x.values + row * x.stride + g * kGroup;
#pragma GCC unroll 2
            for (int line = 0; line < kGroup / 2 / Source::kPairsInLine; ++line) {
                typename Source::Line lines[kStrips];
#pragma GCC unroll 4
                for (int s = 0; s < kStrips; ++s) lines[s] = source.load(s, g, line);
                add_line(products, lines, first + line * 2 * Source::kPairsInLine, x.stride);
            }
            add_scaled(sums, products, source, g, x.group_sums + row * source.groups + g);
        }
        sums.store(out);
    }

  private:
    template <int kPair = 0, int kRows, int kStrips>
    static void add_line(Sums<kRows, kStrips>& products, const typename Source::Line* lines, const Act* x,
                         int64_t stride) {
        __m512bh values[kStrips];
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) values[s] = Source::template unpack<kPair>(lines[s]);
        products.add_products(values, x + 2 * kPair, stride);
        if constexpr (kPair + 1 < Source::kPairsInLine) add_line<kPair + 1>(products, lines, x, stride);
    }

    // group_sums is the first row's of group g; the next rows' are source.groups apart.
    template <int kRows, int kStrips>
    static void add_scaled(Sums<kRows, kStrips>& sums, const Sums<kRows, kStrips>& products, const Source& source,
                           int64_t g, const float* group_sums) {
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
            const __m512 scale = load_half(source.record(s, g).scales);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) sums.at[r][s] = _mm512_fmadd_ps(scale, products.at[r][s], sums.at[r][s]);
            if constexpr (Source::kHasOffset) {
                const __m512 offset = Source::offset(source.record(s, g), scale);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r)
                    sums.at[r][s] =
                        _mm512_fmadd_ps(offset, _mm512_set1_ps(group_sums[r * source.groups]), sums.at[r][s]);
            }
        }
    }
};

template <class Codes, int kPair = 0>
void unpack_line(typename Codes::Line line, __m512i* pairs) {
    _mm512_store_si512(pairs + kPair, (__m512i)Codes::template unpack<kPair>(line));
    if constexpr (kPair + 1 < Codes::kPairsInLine) unpack_line<Codes, kPair + 1>(line, pairs);
}

// Fills memory, [strips][k / 2] pairs, with what tiles multiply.
template <class Codes>
void unpack_strips(const LinearWeight& weight, int64_t strip, int64_t strips, int64_t ahead, void* memory) {
    __m512i* pairs = static_cast<__m512i*>(memory);
    const StoredCodes<Codes> source(weight, strip);
    for (int64_t s = 0; s < strips; ++s)
        for (int64_t g = 0; g < source.groups; ++g) {
            if (ahead != 0) prefetch(&source.record(s, g), ahead, sizeof(source.record(s, g)));
            for (int line = 0; line < kGroup / 2 / Codes::kPairsInLine; ++line, pairs += Codes::kPairsInLine)
                unpack_line<Codes>(source.load(s, g, line), pairs);
        }
}

inline const KindTiles& tiles_of(int32_t kind) {
    static constexpr KindTiles bf16{tile_set<Bf16Tiles>(), nullptr, {}};
    static constexpr KindTiles q4{tile_set<GroupedTiles<StoredCodes<Q4Codes>>>(), unpack_strips<Q4Codes>,
                                  tile_set<GroupedTiles<UnpackedCodes<Q4Codes>>>()};
    static constexpr KindTiles q8{tile_set<GroupedTiles<StoredCodes<Q8Codes>>>(), nullptr, {}};  // no faster unpacked
    return kind == kQ4 ? q4 : kind == kQ8 ? q8 : bf16;
}

}  // namespace pageframe
