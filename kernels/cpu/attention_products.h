// The two products of attention over one tile: queries with K, and weights with V.
//
// Every output is one chain of multiply_add in the order of the words, from 0. Keys that a row does not see have a
// weight of exactly 0, so it does not matter how far beyond them a chain goes. Many rows are worth a packed tile; a
// few, as in decode, multiply the slots as they come out of their blocks, in chains of the same order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_tiles.h"
#include "attention_words.h"
#include "types.h"
#include "vector_math.h"

namespace pageframe {

#if defined(PAGEFRAME_ISA_AVX512)
constexpr int kMaxSums = 24;     // registers of outputs, of 32
constexpr int kStreamRows = 8;   // up to so many rows are worth no packed tile
#else
constexpr int kMaxSums = 12;     // of 16
constexpr int kStreamRows = 6;
#endif
constexpr int kPanelRows = 6;
constexpr int kPanel = kMaxSums / kPanelRows;  // registers of outputs side by side
constexpr int64_t kPanelKeys = kPanel * kLanes;
constexpr int64_t kBlockRows = 4 * kPanelRows;  // rows whose scores over a tile are kept at a time: they fit in L1

// Calls work(std::integral_constant<int, rows>) for a number of rows from 1 to kMost.
template <int kMost, class Work>
inline void with_rows(int64_t rows, Work work) {
    if (rows == kMost)
        work(std::integral_constant<int, kMost>{});
    else if constexpr (kMost > 1)
        with_rows<kMost - 1>(rows, work);
}

// A matrix: row r starts at `at + r * stride`.
template <class T>
struct Matrix {
    T* at;
    int64_t stride;
};

// Registers of outputs: kRows x kVectors.
template <int kRows, int kVectors>
struct Outputs {
    Floats sums[kRows][kVectors];

    Outputs() {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[r][v] = broadcast(0.0f);
    }

    void load_from(Matrix<const float> in) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[r][v] = load(in.at + r * in.stride + v * kLanes);
    }

    // The next link of every chain: word `at` of each row with kVectors registers of words.
    void add(Matrix<const Word> left, int64_t at, const Words right[kVectors]) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Words word = broadcast_word(left.at + r * left.stride + at);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(sums[r][v], word, right[v]);
        }
    }

    void store_to(Matrix<float> out) const {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) store(out.at + r * out.stride + v * kLanes, sums[r][v]);
    }
};

// out[r][i] = the sum over the words w in [begin, end) of a[r][w] * b[w][i], for kRows rows and kVectors registers.
template <int kRows, int kVectors>
inline void multiply_panel(Matrix<const Word> a, Matrix<const Word> b, int64_t begin, int64_t end, Matrix<float> out) {
    Outputs<kRows, kVectors> outputs;
    for (int64_t w = begin; w < end; ++w) {
        Words right[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) right[v] = load_words(b.at + w * b.stride + v * kLanes);
        outputs.add(a, w, right);
    }
    outputs.store_to(out);
}

template <int kVectors>
inline void multiply_rows(int64_t rows, Matrix<const Word> a, Matrix<const Word> b, int64_t begin, int64_t end,
                          Matrix<float> out) {
    for (; rows >= kPanelRows; rows -= kPanelRows) {
        multiply_panel<kPanelRows, kVectors>(a, b, begin, end, out);
        a.at += kPanelRows * a.stride;
        out.at += kPanelRows * out.stride;
    }
    with_rows<kPanelRows - 1>(rows, [&](auto few) { multiply_panel<few.value, kVectors>(a, b, begin, end, out); });
}

// The product of a [rows, words] and b [words, width] over the words [begin, end); width is a multiple of 32.
inline void multiply_matrices(int64_t rows, int64_t width, Matrix<const Word> a, Matrix<const Word> b, int64_t begin,
                              int64_t end, Matrix<float> out) {
    int64_t column = 0;
    for (; column + kPanelKeys <= width; column += kPanelKeys)
        multiply_rows<kPanel>(rows, a, {b.at + column, b.stride}, begin, end, {out.at + column, out.stride});
    if (column < width) multiply_rows<2>(rows, a, {b.at + column, b.stride}, begin, end, {out.at + column, out.stride});
}

// Products of a few rows with the K of the keys [begin, end), multiples of kLanes; asks for the next tile's
// meanwhile.
template <int kRows, class Stored>
inline void stream_keys(const KeyTile<Stored>& tile, const KeyTile<Stored>& next, int64_t head_dim, int64_t begin,
                        int64_t end, Matrix<const Word> queries, Matrix<float> scores) {
    // All keys take some words before any takes the next ones: the chains of one key wait for each other.
    constexpr int64_t kWords = kLanes * kWordsPerRaw;
    for (int64_t word = 0; word < head_dim / kPerWord; word += kWords) {
        for (int64_t key = begin; key < end; key += kLanes) {
            next.prefetch_keys(key, key + kLanes, word * kPerWord, kWords * kPerWord);
            Words raw[kLanes];
            tile.load_keys(key, word, raw);
            Outputs<kRows, 1> outputs;
            if (word > 0) outputs.load_from({scores.at + key, scores.stride});
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                const Words first = word_of<Stored, 0>(raw[i]);
                outputs.add(queries, word + i * kWordsPerRaw, &first);
                if constexpr (kWordsPerRaw == 2) {
                    const Words second = word_of<Stored, 1>(raw[i]);
                    outputs.add(queries, word + 2 * i + 1, &second);
                }
            }
            outputs.store_to({scores.at + key, scores.stride});
        }
    }
}

// RowSums of V over the keys [begin, end), multiples of kPerWord, weighted for a few rows; asks for the next tile's
// meanwhile.
template <int kRows, int kVectors, class Stored>
inline void stream_values(const KeyTile<Stored>& tile, const KeyTile<Stored>& next, int64_t begin, int64_t end,
                          int64_t dim, Matrix<const Word> weights, Matrix<float> out) {
    Outputs<kRows, kVectors> outputs;
    for (int64_t key = begin; key < end; key += kPerWord) {
        next.prefetch_values(key, key + kPerWord, dim, kVectors * kLanes);
        Words right[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v += 2) load_values(tile.values + key, dim + v * kLanes, right + v);
        outputs.add(weights, key / kPerWord, right);
    }
    outputs.store_to({out.at + dim, out.stride});
}

template <int kRows, class Stored>
inline void stream_values(const KeyTile<Stored>& tile, const KeyTile<Stored>& next, int64_t head_dim, int64_t begin,
                          int64_t end, Matrix<const Word> weights, Matrix<float> out) {
    constexpr int kVectors = 4 * kRows <= kMaxSums ? 4 : 2;
    int64_t dim = 0;
    for (; dim + kVectors * kLanes <= head_dim; dim += kVectors * kLanes)
        stream_values<kRows, kVectors>(tile, next, begin, end, dim, weights, out);
    if (dim < head_dim) stream_values<kRows, 2>(tile, next, begin, end, dim, weights, out);
}

}  // namespace pageframe
