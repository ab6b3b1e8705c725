// Tiles of a linear for AVX512.
//
// Each output is one chain of operations over k. kQ4 and kQ8: for each group a chain over its pairs, from 0; what comes
// out is scaled and added to a sum. How pairs are multiplied is in the header of each kind of instructions.
#pragma once

#include "linear_tiles.h"
#if defined(PAGEFRAME_ISA_BF16)
#include "linear_avx512_bf16.h"
#else
#include "linear_avx512_vnni.h"
#endif

namespace pageframe {

// Values of bfloat16, pair by pair from the bias on.
struct Bf16Tiles {
    static constexpr int kMaxRows[] = {0, kBf16Rows, kBf16Rows, 0, 6};  // by strips

    template <int kRows, int kStrips>
    static void compute(const LinearWeight& weight, const Inputs& x, int64_t row, int64_t strip, int64_t ahead,
                        float* out) {
        Sums<kRows, kStrips> sums;
        start_from_bias(sums, weight, strip);
        const int64_t pairs = weight.k / 2;
        const __m512i* const lines = static_cast<const __m512i*>(weight.values) + strip * pairs;
        const Act* const first = x.values + row * x.stride;
        for (int64_t j = 0; j < pairs; ++j) {
            __m512i values[kStrips];
#pragma GCC unroll 4
            for (int s = 0; s < kStrips; ++s) {
                const __m512i* const line = lines + s * pairs + j;
                if (ahead != 0) prefetch(line, ahead, sizeof *line);
                values[s] = _mm512_loadu_si512(line);
            }
            add_pair(sums, values, first + 2 * j, x.stride);
        }
        store_tile_sums(sums, out);
    }
};

// Where tiles have a group's codes from: the records that codes and scales are stored in.
template <class Codes>
struct StoredCodes : Codes {
    using Record = typename Codes::Record;
    static constexpr int kMaxRows = 8, kMaxWideRows = 3;  // of a tile; wide: four strips
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
    using Line = __m512i;
    static constexpr int kPairsInLine = 1;
    static constexpr int kMaxRows = kUnpackedRows, kMaxWideRows = kUnpackedWideRows;
    const __m512i* pairs;  // of the first strip

    UnpackedCodes(const LinearWeight& weight, int64_t strip)
        : StoredCodes<Codes>(weight.scales, weight.k / kGroup, strip),
          pairs(static_cast<const __m512i*>(weight.values) + strip * (weight.k / 2)) {}

    Line load(int64_t strip, int64_t group, int pair) const {
        return _mm512_load_si512(pairs + (strip * this->groups + group) * (kGroup / 2) + pair);
    }

    template <int kPair>
    static __m512i unpack(Line line) {
        return line;
    }
};

// A group's products of a tile.
template <int kRows, int kStrips>
struct Products {
    GroupSums at[kRows][kStrips];

    Products() {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int s = 0; s < kStrips; ++s) at[r][s] = no_products();
    }
};

template <class Source>
struct GroupedTiles {
    static constexpr int kMaxRows[] = {0, Source::kMaxRows, Source::kMaxRows, 0, Source::kMaxWideRows};  // by strips

    template <int kRows, int kStrips>
    static void compute(const LinearWeight& weight, const Inputs& x, int64_t row, int64_t strip, int64_t ahead,
                        float* out) {
        Sums<kRows, kStrips> sums;
        start_from_bias(sums, weight, strip);
        const Source source(weight, strip);
        for (int64_t g = 0; g < source.groups; ++g) {
            if (ahead != 0)
#pragma GCC unroll 4
                for (int s = 0; s < kStrips; ++s) prefetch(&source.record(s, g), ahead, sizeof(source.record(s, g)));
            Products<kRows, kStrips> products;
            const Dot* const first = x.dots(row) + g * kGroup;
#pragma GCC unroll kLinesAtOnce
            for (int line = 0; line < kGroup / 2 / Source::kPairsInLine; ++line) {
                typename Source::Line lines[kStrips];
#pragma GCC unroll 4
                for (int s = 0; s < kStrips; ++s) lines[s] = source.load(s, g, line);
                add_line(products, lines, first + line * 2 * Source::kPairsInLine, x.stride);
            }
            add_scaled(sums, products, source, g, x.extras, row * source.groups + g);
        }
        store_tile_sums(sums, out);
    }

  private:
    template <int kPair = 0, int kRows, int kStrips>
    static void add_line(Products<kRows, kStrips>& products, const typename Source::Line* lines, const Dot* x,
                         int64_t stride) {
        __m512i values[kStrips];
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) values[s] = Source::template unpack<kPair>(lines[s]);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const __m512i pair = broadcast_pair(x + r * stride + 2 * kPair);
#pragma GCC unroll 4
            for (int s = 0; s < kStrips; ++s)
                products.at[r][s] = add_products(products.at[r][s], values[s], pair);
        }
        if constexpr (kPair + 1 < Source::kPairsInLine) add_line<kPair + 1>(products, lines, x, stride);
    }

    // `first` is the place of the first row's group g in the extras; the next rows' are source.groups apart.
    template <int kRows, int kStrips>
    static void add_scaled(Sums<kRows, kStrips>& sums, const Products<kRows, kStrips>& products,
                           const Source& source, int64_t g, const RowExtras& extras, int64_t first) {
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
            const __m512 scale = Source::scale(source.record(s, g));
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r)
                sums.at[r][s] = _mm512_fmadd_ps(
                    scale, as_floats(products.at[r][s], extras, first + r * source.groups), sums.at[r][s]);
            if constexpr (Source::kHasOffset) {
                const __m512 offset = Source::offset(source.record(s, g), scale);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r)
                    sums.at[r][s] =
                        _mm512_fmadd_ps(offset, _mm512_set1_ps(extras.group_sums[first + r * source.groups]),
                                        sums.at[r][s]);
            }
        }
    }
};

template <class Codes, int kPair = 0>
void unpack_line(typename Codes::Line line, __m512i* pairs) {
    _mm512_store_si512(pairs + kPair, Codes::template unpack<kPair>(line));
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
                                  tile_set<GroupedTiles<UnpackedCodes<Q4Codes>>>(), kUnpackRows};
    static constexpr KindTiles q8{tile_set<GroupedTiles<StoredCodes<Q8Codes>>>(), nullptr, {}};  // no faster unpacked
    return kind == kQ4 ? q4 : kind == kQ8 ? q8 : bf16;
}

}  // namespace pageframe
