// What linear_amx_tiles.h does with AMX, without it, as the processor's manual describes it. Slow, for tests. What
// would be an illegal instruction ends the program.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "linear_amx_tiles.h"
#include "types.h"

namespace pageframe {

struct EmulatedTiles {
    bool configured = false;
    TileConfiguration configuration;
    alignas(64) char bytes[kTiles][kTileRows][kTileRowBytes];
};

inline thread_local EmulatedTiles emulated_tiles;

inline void check_tiles(bool legal) {
    if (!legal) std::abort();
}

inline void configure_tiles(const TileConfiguration& configuration) {
    emulated_tiles.configuration = configuration;
    emulated_tiles.configured = true;
    std::memset(emulated_tiles.bytes, 0, sizeof emulated_tiles.bytes);
}

inline void release_tiles() { emulated_tiles.configured = false; }

template <int kTile>
inline void load_tile(const void* first, int64_t stride) {
    EmulatedTiles& tiles = emulated_tiles;
    check_tiles(tiles.configured);
    std::memset(tiles.bytes[kTile], 0, kTileBytes);
    for (int row = 0; row < tiles.configuration.rows[kTile]; ++row)
        std::memcpy(tiles.bytes[kTile][row], static_cast<const char*>(first) + row * stride,
                    tiles.configuration.row_bytes[kTile]);
}

template <int kTile>
inline void store_tile(void* first, int64_t stride) {
    const EmulatedTiles& tiles = emulated_tiles;
    check_tiles(tiles.configured);
    for (int row = 0; row < tiles.configuration.rows[kTile]; ++row)
        std::memcpy(static_cast<char*>(first) + row * stride, tiles.bytes[kTile][row],
                    tiles.configuration.row_bytes[kTile]);
}

// Denormal numbers count as zero and become it.
inline float flushed(float value) { return std::fabs(value) < FLT_MIN ? std::copysign(0.0f, value) : value; }

template <class Number>
struct TileNumbers {
    Number at[kTileRows][kTileRowBytes / sizeof(Number)];

    explicit TileNumbers(int tile) { std::memcpy(at, emulated_tiles.bytes[tile], sizeof at); }
};

// The first numbers of a row's pairs and the second ones have a chain each; both are added up, and then to the sum.
template <int kSums, int kRows, int kColumns>
inline void multiply_tiles() {
    constexpr int kWidth = kTileRowBytes / sizeof(float);
    const TileConfiguration& shape = emulated_tiles.configuration;
    check_tiles(emulated_tiles.configured && shape.rows[kSums] == shape.rows[kRows] &&
                shape.row_bytes[kSums] == shape.row_bytes[kColumns] &&
                shape.row_bytes[kRows] == shape.rows[kColumns] * sizeof(float));
    TileNumbers<float> sums(kSums);
    const TileNumbers<Bf16> rows(kRows), columns(kColumns);
    for (int m = 0; m < shape.rows[kSums]; ++m) {
        float products[2][kWidth] = {};
        for (int pair = 0; pair < shape.rows[kColumns]; ++pair)
            for (int half = 0; half < 2; ++half) {
                const float factor = flushed(to_float(rows.at[m][2 * pair + half]));
                for (int n = 0; n < kWidth; ++n)
                    products[half][n] = flushed(std::fma(
                        factor, flushed(to_float(columns.at[pair][2 * n + half])), products[half][n]));
            }
        for (int n = 0; n < kWidth; ++n)
            sums.at[m][n] = flushed(flushed(sums.at[m][n]) + flushed(products[0][n] + products[1][n]));
    }
    std::memcpy(emulated_tiles.bytes[kSums], sums.at, sizeof sums.at);
}

}  // namespace pageframe
