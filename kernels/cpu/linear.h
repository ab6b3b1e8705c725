// x @ W.T + bias, for weights of every kind, by all threads of a team.
//
// Every thread of the team calls, between two barriers,
//     linear(team, weight, Inputs{x, x_stride, extras, rows}, epilogue, scratch)
// and hands over what it claims to its epilogue (linear_epilogues.h). scratch is the thread's own, of
// linear_scratch_bytes(k). A weight that needs_extras() has them made by prepare_row(), row by row, before the
// barrier. Each output is one chain of operations in an order that the weight alone decides: rows, threads and tiles
// only choose which chains run side by side.
//
// Prefetches past the end of the weight, so it is fastest where weights lie in memory in the order of their use.
#pragma once

#include "linear_epilogues.h"
#include "linear_weights.h"
#include "team.h"
#if defined(PAGEFRAME_ISA_AMX)
#include "linear_amx.h"
#elif defined(PAGEFRAME_ISA_AVX512)
#include "linear_avx512.h"
#else
#include "linear_avx2.h"
#endif

namespace pageframe {

// How a linear's strips and rows are cut into pieces of work. The last pieces are half as large, so that threads which
// claim their last at about the same time end so.
class Pieces {
  public:
    Pieces(int64_t strips, int64_t rows, int64_t block_rows, int64_t threads)
        : strips_(strips),
          rows_(rows),
          large_(std::max<int64_t>(0, strips - threads * kPieceStrips) / kPieceStrips),
          in_block_(large_ + divide_up(strips - large_ * kPieceStrips, kSmall)),
          blocks_(divide_up(rows, block_rows)) {}

    int64_t count() const { return blocks_ * in_block_; }

    Piece operator[](int64_t index) const {
        const int64_t block = index / in_block_, place = index % in_block_;
        const int64_t strip = place < large_ ? place * kPieceStrips : large_ * kPieceStrips + (place - large_) * kSmall;
        return {strip, std::min(strips_, strip + (place < large_ ? kPieceStrips : kSmall)), rows_ * block / blocks_,
                rows_ * (block + 1) / blocks_};
    }

  private:
    static constexpr int64_t kSmall = kPieceStrips / 2;
    int64_t strips_, rows_, large_, in_block_, blocks_;
};

#if !defined(PAGEFRAME_ISA_AMX)  // which has its own linear_scratch_bytes and PieceProducts

constexpr int64_t kBlockBytes = 384 << 10;  // of activations that stay in the L2 cache, beside a piece's weights
constexpr int64_t kUnpackInputs = 4096;     // more, unpacked, do not fit into the L2 cache

// Whether a piece's strips are unpacked once for so many rows.
inline bool must_unpack(const LinearWeight& weight, int64_t rows) {
    const KindTiles& tiles = tiles_of(weight.kind);
    return tiles.unpack != nullptr && rows >= tiles.unpack_rows && weight.k <= kUnpackInputs;
}

// Memory that each thread needs, at a multiple of 64.
inline int64_t linear_scratch_bytes(int64_t k) {
    return std::min(k, kUnpackInputs) * kPieceWidth * static_cast<int64_t>(sizeof(Bf16));
}

// The weight's outputs from a strip on, with unpacked values.
inline LinearWeight unpacked_part(const LinearWeight& weight, int64_t strip, const void* values) {
    const char* const stored = static_cast<const char*>(weight.values) + strip * strip_bytes(weight);
    const int64_t column = strip * kStrip;
    return {weight.kind, 0, weight.n - column, weight.k, values, stored, weight.bias ? weight.bias + column : nullptr};
}

// The piece's outputs in the strips [strip, strip + strips) of the weight given, a few rows at a time.
template <class Epilogue>
void compute_rows(const TileSet& tiles, const LinearWeight& weight, int64_t strip, const Inputs& x,
                  const Piece& piece, int64_t ahead, const Epilogue& epilogue) {
    alignas(64) float sums[kMaxTileRows * kPieceWidth];
    const int64_t rows = piece.row_end - piece.row, count = divide_up(rows, tiles.max_rows);
    const int64_t strips = piece.strip_end - piece.strip;
    const int64_t width = std::min(strips * kStrip, weight.n - strip * kStrip);
    for (int64_t t = 0; t < count; ++t) {  // heights as equal as can be
        const int64_t first = piece.row + rows * t / count, last = piece.row + rows * (t + 1) / count;
        for (int64_t row = first; row < last; ++row) epilogue.expect(row, piece.strip * kStrip, width);
        for (int64_t s = 0; s < strips;) {
            const auto [tile, done] = tiles.widest(last - first, strips - s);
            tile(weight, x, first, strip + s, t == 0 ? ahead : 0, sums + s * kStrip);
            s += done;
        }
        for (int64_t row = first; row < last; ++row)
            epilogue(row, piece.strip * kStrip, width, sums + (row - first) * kPieceWidth);
    }
}

// What one thread computes of a linear.
class PieceProducts {
  public:
    static int64_t block_rows(const LinearWeight& weight) {
        const int64_t bytes = weight.kind == kBf16 ? sizeof(Act) : sizeof(Dot);
        return std::max<int64_t>(kMaxTileRows, kBlockBytes / (weight.k * bytes));
    }

    PieceProducts(const LinearWeight& weight, const Inputs& x, int64_t ahead, void* scratch)
        : tiles_(tiles_of(weight.kind)), weight_(weight), x_(x), ahead_(ahead), scratch_(scratch) {}

    template <class Epilogue>
    void compute(const Piece& piece, const Epilogue& epilogue) const {
        if (must_unpack(weight_, piece.row_end - piece.row)) {
            tiles_.unpack(weight_, piece.strip, piece.strip_end - piece.strip, ahead_, scratch_);
            const LinearWeight part = unpacked_part(weight_, piece.strip, scratch_);
            compute_rows(tiles_.unpacked, part, 0, x_, piece, 0, epilogue);
        } else {
            compute_rows(tiles_.stored, weight_, piece.strip, x_, piece, ahead_, epilogue);
        }
    }

  private:
    const KindTiles& tiles_;
    const LinearWeight& weight_;
    const Inputs& x_;
    const int64_t ahead_;
    void* const scratch_;
};

#endif

template <class Epilogue>
void linear(Team& team, const LinearWeight& weight, const Inputs& x, const Epilogue& epilogue, void* scratch) {
    if (x.rows == 0) return;
    const Pieces pieces(strip_count(weight), x.rows, PieceProducts::block_rows(weight), team.size());
    const int64_t ahead = team.size() * kPieceStrips * strip_bytes(weight);
    const PieceProducts products(weight, x, ahead, scratch);
    for (int64_t index; (index = team.claim()) < pieces.count();) products.compute(pieces[index], epilogue);
}

}  // namespace pageframe
