// One tile of a request's K and V: where its slots lie, and how they are packed for many rows.
//
// Slots outside [first, end) are never read: they count as zeros.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_plan.h"
#include "attention_words.h"
#include "types.h"
#include "vector_math.h"

namespace pageframe {

constexpr int64_t kMaxHeadDim = 256;

// The slots of a layer's cache.
template <class Stored>
struct Slots {
    const Stored* stored;  // [rows, head_dim]
    const float* scales;   // [rows], or null
    int64_t num_kv_heads, head_dim, block_size;

    Slots(const KvCache& cache, int64_t block_size)
        : stored(static_cast<const Stored*>(cache.values)), scales(cache.scales), num_kv_heads(cache.num_kv_heads),
          head_dim(cache.head_dim), block_size(block_size) {}

    int64_t value_rows() const { return num_kv_heads * block_size; }  // from a slot's K to its V
};

// Where the slots of one tile lie that a piece may read; outside [first, end) they are zeros somewhere else.
template <class Stored>
struct KeyTile {
    int64_t first, end;
    const Stored* keys[kTileKeys];
    const Stored* values[kTileKeys];
    int64_t row[kTileKeys];  // of K in the cache; -1 outside [first, end)

    void clear() {
        first = end = 0;
        clear(0, kTileKeys);
    }

    // Finds tile `index` of the piece's request.
    void locate(const Slots<Stored>& slots, const Step& step, const AttentionPlan& plan, const AttentionPiece& piece,
                int64_t index) {
        const int64_t start = index * kTileKeys;
        first = std::max<int64_t>(0, plan.first_visible(piece.first_position) - start);
        end = std::min<int64_t>(kTileKeys, piece.first_position + piece.num_tokens - start);
        clear(0, first);
        clear(end, kTileKeys);
        const int32_t* const table = step.tables + step.rows[piece.request] * step.table_stride;
        const int block_bits = __builtin_ctzll(slots.block_size);  // a power of two
        for (int64_t key = first; key < end;) {
            const int64_t block = (start + key) >> block_bits, offset = (start + key) & (slots.block_size - 1);
            const int64_t run = std::min(slots.block_size - offset, end - key);
            const int64_t at = ((table[block] * 2 * slots.num_kv_heads + piece.kv_head) << block_bits) + offset;
            for (int64_t i = 0; i < run; ++i) {
                row[key + i] = at + i;
                keys[key + i] = slots.stored + (at + i) * slots.head_dim;
                values[key + i] = keys[key + i] + slots.value_rows() * slots.head_dim;
            }
            key += run;
        }
    }

    // Ask for the keys [begin, end). Their blocks are anywhere, so the processor cannot guess the next one. Into L2:
    // L1 waits for too few lines at a time.
    void prefetch_keys(int64_t begin, int64_t end, int64_t dim, int64_t dims) const {
        prefetch(keys, begin, end, dim, dims);
    }
    void prefetch_values(int64_t begin, int64_t end, int64_t dim, int64_t dims) const {
        prefetch(values, begin, end, dim, dims);
    }

    // kLanes raw words of kLanes keys' K, from a word on, those of one raw word side by side.
    void load_keys(int64_t key, int64_t word, Words raw[kLanes]) const {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) raw[i] = load_raw(keys[key + i] + word * kPerWord);
        transpose(raw);
    }

    // Asks for all keys outside [begin, end).
    void prefetch_around(int64_t begin, int64_t end, int64_t head_dim) const {
        for (const auto* const slots : {keys, values}) {
            prefetch(slots, 0, begin, 0, head_dim);
            prefetch(slots, end, kTileKeys, 0, head_dim);
        }
    }

  private:
    void clear(int64_t from, int64_t to) {
        static const Stored zeros[kMaxHeadDim] = {};
        std::fill(keys + from, keys + to, zeros);
        std::fill(values + from, values + to, zeros);
        std::fill(row + from, row + to, -1);
    }

    static void prefetch(const Stored* const* slots, int64_t begin, int64_t end, int64_t dim, int64_t dims) {
        constexpr int64_t kLine = 64 / sizeof(Stored);
        for (int64_t key = begin; key < end; ++key)
            for (int64_t i = dim; i < dim + dims; i += kLine) __builtin_prefetch(slots[key] + i, 0, 2);
    }
};

// A tile as products of many rows read it.
struct PackedTile {
    Word* keys;           // [head_dim / kPerWord][kTileKeys]
    Word* values;         // [kTileKeys / kPerWord][head_dim]
    float* key_scales;    // [kTileKeys]; unused without scales
    float* value_scales;
};

template <class Stored>
inline void pack_scales(const Slots<Stored>& slots, const KeyTile<Stored>& tile, const PackedTile& packed) {
    if (slots.scales == nullptr) return;
    for (int64_t key = 0; key < kTileKeys; ++key) {
        const int64_t row = tile.row[key];
        packed.key_scales[key] = row < 0 ? 0.0f : slots.scales[row];
        packed.value_scales[key] = row < 0 ? 0.0f : slots.scales[row + slots.value_rows()];
    }
}

// Packs the keys [begin, end), multiples of kLanes, and asks for the next tile's meanwhile.
template <class Stored>
inline void pack_tile(const KeyTile<Stored>& tile, const KeyTile<Stored>& next, int64_t head_dim, int64_t begin,
                      int64_t end, const PackedTile& packed) {
    for (int64_t key = begin; key < end; key += kLanes) {
        next.prefetch_keys(key, key + kLanes, 0, head_dim);
        next.prefetch_values(key, key + kLanes, 0, head_dim);
        for (int64_t word = 0; word < head_dim / kPerWord; word += kLanes * kWordsPerRaw) {
            Words raw[kLanes];
            tile.load_keys(key, word, raw);
            Word* const out = packed.keys + word * kTileKeys + key;
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                store_words(out + i * kWordsPerRaw * kTileKeys, word_of<Stored, 0>(raw[i]));
                if constexpr (kWordsPerRaw == 2)
                    store_words(out + (2 * i + 1) * kTileKeys, word_of<Stored, 1>(raw[i]));
            }
        }
        for (int64_t i = key; i < key + kLanes; i += kPerWord) {
            Word* const out = packed.values + i / kPerWord * head_dim;
            for (int64_t dim = 0; dim < head_dim; dim += 2 * kLanes) {
                Words words[2];
                load_values(tile.values + i, dim, words);
                store_words(out + dim, words[0]);
                store_words(out + dim + kLanes, words[1]);
            }
        }
    }
}

}  // namespace pageframe
