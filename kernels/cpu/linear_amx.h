// Pieces of a linear by AMX. Written where there is no such processor: it has run in emulation only
// (linear_amx_emulated.h), and nothing here is tuned.
//
// Each output starts from its bias, and every 32 inputs are added by one instruction, whose order of additions for an
// output is the processor's and does not depend on the other rows. It multiplies bfloat16: codes are unpacked to
// scale * code + minimum, rounded, for one row and for many alike.
//
// As packed, 16 pairs of a strip are a tile of 1 KiB. For few rows codes are unpacked to one tile at a time, in the
// first cache; for many, strips are unpacked once.
#pragma once

#include "linear_amx_tiles.h"
#include "linear_weights.h"

namespace pageframe {

// Which tiles hold what. A product's latency is about that of four others, so four sums are in the making at once.
constexpr int kSumTiles = 0, kInputTiles = 4, kValueTiles = 6;
constexpr int64_t kMostSums = 4;
constexpr int64_t kMostRowTiles = 2;

constexpr int64_t kInputRows = kMostRowTiles * kTileRows;  // from more on, strips are unpacked once for all
constexpr int64_t kUnpackedStrips = kMostSums / kMostRowTiles;
constexpr int64_t kBlockBytes = 1 << 20;  // of activations, in a second cache of 2 MiB

inline int64_t linear_scratch_bytes(int64_t k) {
    return std::max(kMostSums * kTileBytes, kUnpackedStrips * k * kStrip * static_cast<int64_t>(sizeof(Bf16)));
}

inline __m512 load_half(const uint16_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

// tile: [16 pairs][16 outputs][2].
inline void unpack_tile(const Q4Record& record, void* tile) {
    const __m512 scale = load_half(record.scales), minimum = load_half(record.minimums);
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    alignas(64) static constexpr uint16_t kInTurn[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i in_turn = _mm512_load_si512(kInTurn);
    __m512i* pairs = static_cast<__m512i*>(tile);
    for (const uint32_t* codes = record.codes[0]; codes != record.codes[4]; codes += kStrip) {
        const __m512i line = _mm512_loadu_si512(codes);
        const auto values = [&](int shift) {  // the permutation reads the lower four bits, a code
            const __m512i code = _mm512_rorv_epi32(line, _mm512_set1_epi32(shift));
            return _mm512_fmadd_ps(_mm512_permutexvar_ps(code, numbers), scale, minimum);
        };
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            const __m512i halves = round_to_bf16(values(4 * pair + 19), values(4 * pair + 3));
            _mm512_store_si512(pairs++, _mm512_permutexvar_epi16(in_turn, halves));
        }
    }
}

inline void unpack_tile(const Q8Record& record, void* tile) {
    const __m512 scales = load_half(record.scales);
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512 lower = _mm512_permutexvar_ps(twice, scales);
    const __m512 upper = _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8)), scales);
    const auto values = [](const void* codes, __m512 scale) {
        const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(codes));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale);
    };
    __m512i* const pairs = static_cast<__m512i*>(tile);
    for (int pair = 0; pair < kGroup / 2; ++pair) {
        const auto& codes = record.codes[pair];
        const __m512i both = round_to_bf16(values(codes + kStrip / 2, upper), values(codes, lower));
        _mm512_store_si512(pairs + pair, both);
    }
}

// Where tiles of values come from, the weight's from a strip on.
struct Values {
    const void* stored;
    int64_t groups;  // in a strip
    int64_t ahead;   // as for Tile
    void* memory;    // for kMostSums tiles
};

struct StoredTiles : Values {
    const void* tile(int64_t strip, int64_t group) const {
        const char* const at = static_cast<const char*>(stored) + (strip * groups + group) * kTileBytes;
        if (ahead != 0) prefetch(at, ahead, kTileBytes);
        return at;
    }
};

template <class Record>
struct UnpackedTiles : Values {
    const void* tile(int64_t strip, int64_t group) const {
        const Record& record = static_cast<const Record*>(stored)[strip * groups + group];
        if (ahead != 0) prefetch(&record, ahead, sizeof record);
        void* const at = static_cast<char*>(memory) + strip * kTileBytes;
        unpack_tile(record, at);
        return at;
    }
};

// Fills memory, [strips][groups] tiles.
template <class Record>
void unpack_strips(const void* stored, int64_t groups, int64_t strips, int64_t ahead, void* memory) {
    const Record* const records = static_cast<const Record*>(stored);
    for (int64_t i = 0; i < strips * groups; ++i) {
        if (ahead != 0) prefetch(records + i, ahead, sizeof(Record));
        unpack_tile(records[i], static_cast<char*>(memory) + i * kTileBytes);
    }
}

// Tiles of rows; of each, `sums` [16, kPieceWidth] starts from `bias` [strips][16].
struct Rows {
    const Act* first[kMostRowTiles];
    int64_t stride;
    const float* bias;
    float* sums;
};

// GCC 12 decides too late on its own to keep what these functions capture in registers.
#define PAGEFRAME_INLINED __attribute__((always_inline))

// Calls work(0), work(1), ... with numbers that instructions can have in them.
template <int... kIndices, class Work>
PAGEFRAME_INLINED inline void each(std::integer_sequence<int, kIndices...>, Work work) {
    (work(std::integral_constant<int, kIndices>{}), ...);
}

template <int kCount, class Work>
PAGEFRAME_INLINED inline void each(Work work) {
    each(std::make_integer_sequence<int, kCount>{}, work);
}

template <class Source, int kRowTiles, int kStrips>
void multiply(const Values& given, const Rows& rows) {
    static_assert(kRowTiles <= kMostRowTiles && kRowTiles * kStrips <= kMostSums);
    constexpr int64_t kSumsStride = kPieceWidth * sizeof(float);
    const Source source{given};  // copies: the assembly could change what is given
    const Rows local = rows;
    const int64_t stride = local.stride * static_cast<int64_t>(sizeof(Act));
    each<kStrips>([&](auto s) PAGEFRAME_INLINED {
        each<kRowTiles>([&](auto r) PAGEFRAME_INLINED {
            load_tile<kSumTiles + r * kStrips + s>(local.bias + s * kStrip, 0);
        });
    });
    for (int64_t g = 0; g < source.groups; ++g) {
        each<kRowTiles>([&](auto r) PAGEFRAME_INLINED {
            load_tile<kInputTiles + r>(local.first[r] + g * kGroup, stride);
        });
        each<kStrips>([&](auto s) PAGEFRAME_INLINED {
            constexpr int kColumns = kValueTiles + s % (kTiles - kValueTiles);
            load_tile<kColumns>(source.tile(s, g), kTileRowBytes);
            each<kRowTiles>([&](auto r) PAGEFRAME_INLINED {
                multiply_tiles<kSumTiles + r * kStrips + s, kInputTiles + r, kColumns>();
            });
        });
    }
    each<kStrips>([&](auto s) PAGEFRAME_INLINED {
        each<kRowTiles>([&](auto r) PAGEFRAME_INLINED {
            store_tile<kSumTiles + r * kStrips + s>(local.sums + r * kTileRows * kPieceWidth + s * kStrip, kSumsStride);
        });
    });
}

template <class Source>
void multiply_by(int64_t row_tiles, int64_t strips, const Values& values, const Rows& rows) {
    if (row_tiles == 2 && strips == 2) return multiply<Source, 2, 2>(values, rows);
    if (row_tiles == 2) return multiply<Source, 2, 1>(values, rows);
    if (strips == 4) return multiply<Source, 1, 4>(values, rows);
    if (strips == 2) return multiply<Source, 1, 2>(values, rows);
    multiply<Source, 1, 1>(values, rows);
}

// What one thread computes of a linear. While it lives, the thread's tiles are its own.
class PieceProducts {
  public:
    // Two tiles at least, so that rows cut in equal blocks fill one.
    static int64_t block_rows(const LinearWeight& weight) {
        return std::max<int64_t>(kInputRows, kBlockBytes / (weight.k * sizeof(Act)));
    }

    // scratch: linear_scratch_bytes, at a multiple of 64.
    PieceProducts(const LinearWeight& weight, const Inputs& x, int64_t ahead, void* scratch)
        : weight_(weight), x_(x), ahead_(ahead), scratch_(scratch), height_(std::min(x.rows, kTileRows)) {
        TileConfiguration shapes;
        for (int tile = 0; tile < kTiles; ++tile) {
            shapes.rows[tile] = static_cast<uint8_t>(tile < kValueTiles ? height_ : kTileRows);
            shapes.row_bytes[tile] = kTileRowBytes;
        }
        configure_tiles(shapes);
    }
    ~PieceProducts() { release_tiles(); }
    PieceProducts(const PieceProducts&) = delete;
    PieceProducts& operator=(const PieceProducts&) = delete;

    template <class Epilogue>
    void compute(const Piece& piece, const Epilogue& epilogue) const {
        const int64_t most = piece.row_end - piece.row <= kTileRows ? kMostSums : kUnpackedStrips;
        for (Piece part = piece; part.strip < piece.strip_end; part.strip = part.strip_end) {
            int64_t strips = most;
            while (strips > piece.strip_end - part.strip) strips /= 2;
            part.strip_end = part.strip + strips;
            compute_strips(part, epilogue);
        }
    }

  private:
    template <class Epilogue>
    void compute_strips(const Piece& part, const Epilogue& epilogue) const {
        const int64_t column = part.strip * kStrip, strips = part.strip_end - part.strip;
        const int64_t width = std::min(strips * kStrip, weight_.n - column);
        alignas(64) float bias[kMostSums * kStrip] = {};
        if (weight_.bias != nullptr) std::copy_n(weight_.bias + column, width, bias);
        alignas(64) float sums[kInputRows * kPieceWidth];
        Values values{static_cast<const char*>(weight_.values) + part.strip * strip_bytes(weight_), weight_.k / kGroup,
                      ahead_, scratch_};
        const int32_t kind = part.row_end - part.row > kInputRows ? unpack(values, strips) : weight_.kind;
        for (int64_t row = part.row; row < part.row_end; row += kInputRows, values.ahead = 0) {
            const int64_t end = std::min(row + kInputRows, part.row_end);
            // Tiles are full: the last begins with rows of the one before it.
            const int64_t starts[] = {std::min(row, part.row_end - height_),
                                      std::min(row + kTileRows, part.row_end - height_)};
            const Rows rows{{row_at(starts[0]), row_at(starts[1])}, x_.stride, bias, sums};
            multiply_kind(kind, divide_up(end - row, kTileRows), strips, values, rows);
            for (int64_t r = row; r < end; ++r) {
                const int64_t tile = (r - row) / kTileRows;
                epilogue(r, column, width, sums + (tile * kTileRows + r - starts[tile]) * kPieceWidth);
            }
        }
    }

    const Act* row_at(int64_t row) const { return x_.values + row * x_.stride; }

    // Makes the values, if they are codes, unpacked ones; returns the kind that they are then.
    int32_t unpack(Values& values, int64_t strips) const {
        if (weight_.kind == kBf16) return kBf16;
        const auto unpack = weight_.kind == kQ4 ? unpack_strips<Q4Record> : unpack_strips<Q8Record>;
        unpack(values.stored, values.groups, strips, values.ahead, scratch_);
        values.stored = scratch_;
        values.ahead = 0;
        return kBf16;
    }

    static void multiply_kind(int32_t kind, int64_t row_tiles, int64_t strips, const Values& values, const Rows& rows) {
        if (kind == kQ4) return multiply_by<UnpackedTiles<Q4Record>>(row_tiles, strips, values, rows);
        if (kind == kQ8) return multiply_by<UnpackedTiles<Q8Record>>(row_tiles, strips, values, rows);
        multiply_by<StoredTiles>(row_tiles, strips, values, rows);
    }

    const LinearWeight& weight_;
    const Inputs& x_;
    const int64_t ahead_;
    void* const scratch_;
    const int64_t height_;  // of tiles: fewer rows than a tile's are one tile
};

}  // namespace pageframe
