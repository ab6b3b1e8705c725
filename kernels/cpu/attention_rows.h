// A row's weights over one tile, and how its tiles are merged. A row is one query head of one token.
//
// Scores count in powers of two: they contain the factor log2(e), and weights are 2^(score - the highest).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "attention_tiles.h"
#include "attention_words.h"
#include "types.h"
#include "vector_math.h"

namespace pageframe {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

constexpr float kLog2E = 1.44269504f;

// How products become scores.
class ScoreRule {
  public:
    // A softcap of 0 is none.
    ScoreRule(float scale, float softcap)
        : factor_(softcap > 0 ? scale / softcap : scale * kLog2E), cap_(softcap * kLog2E) {}

    bool capped() const { return cap_ > 0; }
    Floats scale(Floats product) const { return multiply(product, broadcast(factor_)); }
    Floats cap(Floats score) const { return multiply(tanh(score), broadcast(cap_)); }

  private:
    float factor_, cap_;
};

// Keys of a tile: [begin, end).
struct KeyRange {
    int64_t begin, end;
};

// Added to scores: 0 where the row sees the key, else -inf.
inline Floats visibility(KeyRange seen, int64_t key) {
    struct Steps {
        float falling[2 * kTileKeys], rising[2 * kTileKeys];  // 0 to -inf, -inf to 0, half way
        Steps() {
            for (int64_t i = 0; i < kTileKeys; ++i) {
                falling[i] = rising[kTileKeys + i] = 0.0f;
                falling[kTileKeys + i] = rising[i] = kHidden;
            }
        }
    };
    static const Steps steps;
    return add(load(steps.falling + kTileKeys - seen.end + key), load(steps.rising + kTileKeys - seen.begin + key));
}

// Products to scores, in place, over the keys of `range`, which begins and ends at multiples of kLanes. Returns the
// highest.
template <bool kScaled, bool kCapped, bool kMasked>
inline float finish_scores(const ScoreRule& rule, const PackedTile& tile, KeyRange range, KeyRange seen,
                           float* scores) {
    Floats top = broadcast(kHidden);
    for (int64_t key = range.begin; key < range.end; key += kLanes) {
        Floats score = rule.scale(load(scores + key));
        if (kScaled) score = multiply(score, load(tile.key_scales + key));
        if (kCapped) score = rule.cap(score);
        if (kMasked) score = add(score, visibility(seen, key));
        store(scores + key, score);
        top = max(top, score);
    }
    return reduce_max(top);
}

// Scores to weights, and the weights' sum.
template <bool kScaled>
inline float weigh(const PackedTile& tile, KeyRange range, float top, const float* scores, Act* weights) {
    Floats sum = broadcast(0.0f);
    for (int64_t key = range.begin; key < range.end; key += kLanes) {
        Floats weight = exp2(subtract(load(scores + key), broadcast(top)));
        sum = add(sum, weight);
        if (kScaled) weight = multiply(weight, load(tile.value_scales + key));
        store_act(weights + key, weight);
    }
    return reduce_add(sum);
}

// Rows' sums over the tiles so far.
struct RowSums {
    float* top;     // [rows]
    float* weight;  // [rows]
    float* values;  // [rows, head_dim]
};

inline void clear_sums(const RowSums& sums, int64_t rows, int64_t head_dim) {
    std::fill(sums.top, sums.top + rows, kHidden);
    std::fill(sums.weight, sums.weight + rows, 0.0f);
    std::fill(sums.values, sums.values + rows * head_dim, 0.0f);
}

// Scores and weights of `count` rows, in place of their products with K, over the keys of `range`, of which row r sees
// seen[r]. Their sums get the highest score and the sum of weights; -inf and 0 for a row that sees nothing.
template <bool kScaled, bool kCapped>
inline void weigh_rows(const ScoreRule& rule, const PackedTile& tile, int64_t count, KeyRange range,
                       const KeyRange* seen, float* scores, Act* weights, const RowSums& sums) {
    for (int64_t row = 0; row < count; ++row) {
        const bool masked = seen[row].begin > range.begin || seen[row].end < range.end;
        float* const own = scores + row * kTileKeys;
        sums.top[row] = masked ? finish_scores<kScaled, kCapped, true>(rule, tile, range, seen[row], own)
                               : finish_scores<kScaled, kCapped, false>(rule, tile, range, seen[row], own);
    }
    // Only now: each row's highest score takes long to find, and other rows' do not wait for it.
    for (int64_t row = 0; row < count; ++row) {
        Act* const own = weights + row * kTileKeys;
        if (seen[row].begin < seen[row].end) {
            sums.weight[row] = weigh<kScaled>(tile, range, sums.top[row], scores + row * kTileKeys, own);
        } else {
            sums.weight[row] = 0.0f;
            std::fill(own + range.begin, own + range.end, Act{0});
        }
    }
}

// Adds the next tile's to them. `tile` is the same for this tile alone; rows of it that see nothing change nothing.
inline void merge_tile(const RowSums& sums, const RowSums& tile, int64_t rows, int64_t head_dim) {
    for (int64_t first = 0; first < rows; first += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, rows - first);
        float old_top[kLanes], new_top[kLanes], kept[kLanes], added[kLanes];
        std::fill(old_top, old_top + kLanes, 0.0f);
        std::fill(new_top, new_top + kLanes, 0.0f);
        std::copy(sums.top + first, sums.top + first + count, old_top);
        std::copy(tile.top + first, tile.top + first + count, new_top);
        const Floats top = max(load(old_top), load(new_top));
        store(kept, exp2(subtract(load(old_top), top)));
        store(added, exp2(subtract(load(new_top), top)));
        for (int64_t row = first; row < first + count; ++row) {
            if (tile.weight[row] == 0.0f) continue;
            const float keep = kept[row - first], add = added[row - first];
            sums.top[row] = std::max(sums.top[row], tile.top[row]);
            sums.weight[row] = std::fma(tile.weight[row], add, sums.weight[row] * keep);
            float* const values = sums.values + row * head_dim;
            const float* const more = tile.values + row * head_dim;
            for (int64_t dim = 0; dim < head_dim; dim += kLanes)
                store(values + dim,
                      fma(load(more + dim), broadcast(add), multiply(load(values + dim), broadcast(keep))));
        }
    }
}

}  // namespace pageframe
