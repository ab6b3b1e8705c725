// How packed weights lie in memory, and what else a linear reads; packing.py packs.
//
// A matrix W [n, k] is cut into strips of 16 outputs, and a strip of kQ4 or kQ8 into groups of 32 inputs. k is a
// multiple of 32. Outputs past the last are 0.
//
// kBf16   [strips][k / 2][16][2] bfloat16: element [s][j][o][h] is W[16 s + o, 2 j + h].
// kQ4     [strips][k / 32] Q4Record: W = scale * code + minimum, codes 0 to 15.
// kQ8     [strips][k / 32] Q8Record: W = scale * code, codes -128 to 127.
//
// A pair is two neighbouring inputs of a strip's 16 outputs: 64 bytes of bfloat16.
#pragma once

#include <algorithm>
#include <utility>

#include "linear_rows.h"

namespace pageframe {

constexpr int64_t kCacheLine = 64;

// Line i has the codes of pairs 4 i to 4 i + 3, a dword for each output: pair 4 i + p has its codes at bits 4 p (first
// input) and 16 + 4 p (second), and then the dword is rotated left by 3. Rotated right by 4 p, it has both codes of
// pair p where a bfloat16 has the upper four bits of its fraction.
struct Q4Record {
    uint32_t codes[4][kStrip];
    uint16_t scales[kStrip];  // float16
    uint16_t minimums[kStrip];
};

struct Q8Record {
    int8_t codes[kGroup / 2][kStrip][2];
    uint16_t scales[kStrip];
};

inline int64_t strip_count(const LinearWeight& weight) { return divide_up(weight.n, kStrip); }

inline int64_t strip_bytes(const LinearWeight& weight) {
    const int64_t groups = weight.k / kGroup;
    if (weight.kind == kQ4) return groups * static_cast<int64_t>(sizeof(Q4Record));
    if (weight.kind == kQ8) return groups * static_cast<int64_t>(sizeof(Q8Record));
    return weight.k * kStrip * static_cast<int64_t>(sizeof(Bf16));
}

constexpr int64_t kPieceStrips = 4;  // a piece of work has as many, or fewer
constexpr int64_t kPieceWidth = kPieceStrips * kStrip;

struct Piece {
    int64_t strip, strip_end, row, row_end;
};

// Computes a tile: `sums` [rows, kPieceWidth], from a row and a strip on, over all of k. What lies `ahead` bytes past
// the weights in use is asked into the L2 cache; 0 asks for nothing.
using Tile = void (*)(const LinearWeight& weight, const Inputs& x, int64_t row, int64_t strip, int64_t ahead,
                      float* sums);

inline void prefetch(const void* at, int64_t ahead, int64_t bytes) {
    const char* const first = static_cast<const char*>(at) + ahead;
    for (int64_t i = 0; i < bytes; i += kCacheLine) _mm_prefetch(first + i, _MM_HINT_T1);
}

// The tiles of a kind, by rows and strips. Null where their sums would not fit into the registers.
constexpr int kMaxTileRows = 8;
struct TileSet {
    struct Widths {
        Tile one, two, four;
    };
    struct Choice {
        Tile tile;
        int64_t strips;
    };
    int max_rows;
    Widths by_rows[kMaxTileRows + 1];

    // The tile with the most strips, but not more than so many.
    Choice widest(int64_t rows, int64_t strips) const {
        const Widths& widths = by_rows[rows];
        if (strips >= 4 && widths.four != nullptr) return {widths.four, 4};
        if (strips >= 2 && widths.two != nullptr) return {widths.two, 2};
        return {widths.one, 1};
    }
};

template <class Kernel, int kRows, int kStrips>
constexpr Tile tile_or_null() {
    if constexpr (kRows > 0 && kRows <= Kernel::kMaxRows[kStrips])
        return Kernel::template compute<kRows, kStrips>;
    else
        return nullptr;
}

template <class Kernel, int... kRows>
constexpr TileSet tile_set(std::integer_sequence<int, kRows...>) {
    using Widths = TileSet::Widths;
    return {Kernel::kMaxRows[1],
            {Widths{tile_or_null<Kernel, kRows, 1>(), tile_or_null<Kernel, kRows, 2>(),
                    tile_or_null<Kernel, kRows, 4>()}...}};
}

template <class Kernel>
constexpr TileSet tile_set() {
    return tile_set<Kernel>(std::make_integer_sequence<int, kMaxTileRows + 1>{});
}

// A kind's tiles, and if many rows are worth it, a function that unpacks strips once for all of them: their `unpacked`
// tiles have a weight whose values are the unpacked ones and whose scales are the stored ones.
struct KindTiles {
    TileSet stored;
    void (*unpack)(const LinearWeight& weight, int64_t strip, int64_t strips, int64_t ahead, void* memory);
    TileSet unpacked;
    int64_t unpack_rows = 0;  // from so many rows on; without `unpack` nothing
};

}  // namespace pageframe
