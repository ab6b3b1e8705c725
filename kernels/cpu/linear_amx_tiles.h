// The tile instructions of AMX. A build with PAGEFRAME_EMULATE_AMX has functions that do the same on a processor
// without them, for tests of what is made of tiles.
//
// A tile is up to 16 rows of up to 64 bytes, and a thread has 8 of them, shaped by the configuration it has loaded.
#pragma once

#include <cstdint>

namespace pageframe {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileRowBytes = 64;
constexpr int64_t kTileBytes = kTileRows * kTileRowBytes;
constexpr int kTiles = 8;

// As the processor reads it.
struct alignas(64) TileConfiguration {
    uint8_t palette = 1;  // what there is: 8 tiles of 1 KiB
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfiguration) == 64);

}  // namespace pageframe

#if defined(PAGEFRAME_EMULATE_AMX)
#include "linear_amx_emulated.h"
#else

namespace pageframe {

// Linux lets a process use tiles once it has asked; isa.py asks before it chooses AMX.

inline void configure_tiles(const TileConfiguration& configuration) {
    asm volatile("ldtilecfg %0" : : "m"(configuration));
}

// Also gives back what the processor would have to save for them.
inline void release_tiles() { asm volatile("tilerelease"); }

// Assembly, because GCC's intrinsics do not say which memory they read: it drops stores to it.

// Row i from `first` + i * stride bytes; of stride 0, all rows are the same.
template <int kTile>
inline void load_tile(const void* first, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(first), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void store_tile(void* first, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(first), "r"(stride), "i"(kTile) : "memory");
}

// sums[m][n] += rows[m] . columns[n], in pairs of bfloat16: a row of `kColumns` has a pair of each column.
template <int kSums, int kRows, int kColumns>
inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kColumns));
}

}  // namespace pageframe

#endif
