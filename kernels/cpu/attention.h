// Causal attention of a step's queries over K and V where they lie in their blocks, and the writing of K and V.
//
// Keys are taken in tiles of 128 absolute positions. Over each tile a row has its own maximum, weights, sum of weights
// and sum of V; these are merged tile by tile in ascending order. So a row's bits depend on its own query and context
// alone: not on which other rows share a packed tile, on where a prompt's chunks end, or on how a plan splits a context
// over threads, since tiles that were computed apart are merged by the same operations in the same order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_plan.h"
#include "attention_products.h"
#include "attention_rows.h"
#include "attention_tiles.h"
#include "scratch.h"
#include "team.h"
#include "types.h"
#include "vector_math.h"

namespace pageframe {

// One layer's attention of a step.
struct AttentionCall {
    const Step* step;
    const AttentionPlan* plan;  // of this step
    KvCache cache;              // with the K and V of this step's tokens written
    float scale;                // of q . k
    float softcap;              // scores become softcap * tanh(score / softcap); 0: they stay
    const Act* q;               // [num_tokens, num_heads, head_dim], tokens q_stride apart
    int64_t q_stride;
    Act* out;                   // the same, tokens out_stride apart
    int64_t out_stride;
    char* partials;             // partials_bytes, shared by all threads
};

// What a thread needs for itself, and how much of it.
struct AttentionScratch {
    Word* queries;       // [rows of a piece, head_dim]
    int64_t* positions;  // [rows of a piece]
    PackedTile tile;
    float* scores;      // [kBlockRows, kTileKeys]
    Act* weights;       // [kBlockRows, kTileKeys]
    RowSums sums;       // of the rows of a piece
    RowSums tile_sums;  // likewise
};

inline RowSums take_sums(ScratchLayout& layout, int64_t rows, int64_t head_dim) {
    float* const top = layout.take<float>(rows);
    float* const weight = layout.take<float>(rows);
    return {top, weight, layout.take<float>(rows * head_dim)};
}

inline AttentionScratch lay_out(ScratchLayout& layout, int64_t rows, int64_t head_dim) {
    AttentionScratch scratch;
    scratch.queries = layout.take<Word>(rows * head_dim / kPerWord);
    scratch.positions = layout.take<int64_t>(rows);
    scratch.tile.keys = layout.take<Word>(head_dim / kPerWord * kTileKeys);
    scratch.tile.values = layout.take<Word>(kTileKeys / kPerWord * head_dim);
    scratch.tile.key_scales = layout.take<float>(kTileKeys);
    scratch.tile.value_scales = layout.take<float>(kTileKeys);
    scratch.scores = layout.take<float>(kBlockRows * kTileKeys);
    scratch.weights = layout.take<Act>(kBlockRows * kTileKeys);
    scratch.sums = take_sums(layout, rows, head_dim);
    scratch.tile_sums = take_sums(layout, rows, head_dim);
    return scratch;
}

// Bytes of each thread's scratch, which starts at a multiple of 64.
inline int64_t attention_scratch_bytes(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
    AttentionPlan plan;
    plan.num_heads = num_heads;
    plan.num_kv_heads = num_kv_heads;
    ScratchLayout layout(nullptr);
    lay_out(layout, plan.rows_per_piece(), head_dim);
    return layout.bytes();
}

// Bytes that all threads share, from `attend` to `merge`.
inline int64_t partials_bytes(const AttentionPlan& plan) {
    ScratchLayout layout(nullptr);
    take_sums(layout, plan.partial_rows, plan.head_dim);
    return layout.bytes();
}

inline bool must_merge(const AttentionPlan& plan) { return !plan.merges.empty(); }

// The sums of the rows from `row` on.
inline RowSums rows_from(const RowSums& sums, int64_t row, int64_t head_dim) {
    return {sums.top + row, sums.weight + row, sums.values + row * head_dim};
}

// What one thread computes of a call.
template <class Stored>
class PieceWork {
  public:
    PieceWork(const PieceWork&) = delete;
    PieceWork(const AttentionCall& call, char* scratch)
        : call_(call), step_(*call.step), plan_(*call.plan), rule_(call.scale, call.softcap),
          slots_(call.cache, call.step->block_size) {
        ScratchLayout own(scratch), shared(call.partials);
        scratch_ = lay_out(own, plan_.rows_per_piece(), plan_.head_dim);
        partials_ = take_sums(shared, plan_.partial_rows, plan_.head_dim);
    }

    // `next`, if not null, is what this thread will do after: its first slots are asked for meanwhile.
    void attend(const AttentionPiece& piece, const AttentionPiece* next) {
        const int64_t rows = piece.num_tokens * plan_.group(), head_dim = plan_.head_dim;
        const bool split = piece.partial_row >= 0;
        begin_piece(piece);
        if (!split) clear_sums(scratch_.sums, rows, head_dim);
        for (int64_t i = 0; i < piece.num_tiles; ++i) {
            if (i == 0) find_tile(&piece, 0);
            std::swap(tile_, coming_);
            if (i + 1 < piece.num_tiles)
                find_tile(&piece, i + 1);
            else
                find_tile(next, 0);
            const RowSums sums =
                split ? rows_from(partials_, piece.partial_row + i * rows, head_dim) : scratch_.tile_sums;
            attend_tile(piece, i, sums);
            if (!split) merge_tile(scratch_.sums, sums, rows, head_dim);
        }
        if (!split) write_out(piece, scratch_.sums);
    }

    // The results of a piece whose tiles were computed by several threads.
    void merge(const AttentionPiece& piece) {
        const int64_t rows = piece.num_tokens * plan_.group();
        clear_sums(scratch_.sums, rows, plan_.head_dim);
        for (int64_t i = 0; i < piece.num_tiles; ++i)
            merge_tile(scratch_.sums, rows_from(partials_, piece.partial_row + i * rows, plan_.head_dim), rows,
                       plan_.head_dim);
        write_out(piece, scratch_.sums);
    }

  private:
    // The piece's rows, token by token.
    void begin_piece(const AttentionPiece& piece) {
        const int64_t group = plan_.group(), size = group * plan_.head_dim;
        for (int64_t i = 0; i < piece.num_tokens; ++i) {
            const Act* const q = call_.q + (piece.first_token + i) * call_.q_stride;
            std::memcpy(scratch_.queries + i * size / kPerWord, q + piece.kv_head * size, size * sizeof(Act));
            std::fill_n(scratch_.positions + i * group, group, piece.first_position + i);
        }
    }

    // The piece's tile i is the coming one, if there is such a piece and tile.
    void find_tile(const AttentionPiece* piece, int64_t i) {
        if (piece != nullptr && i < piece->num_tiles)
            coming_->locate(slots_, step_, plan_, *piece, piece->first_tile + i);
        else
            coming_->clear();
    }

    // The keys of the piece's tile i that its row sees.
    KeyRange seen(const AttentionPiece& piece, int64_t i, int64_t row) const {
        const int64_t start = (piece.first_tile + i) * kTileKeys;
        const int64_t position = scratch_.positions[row];
        return {std::clamp<int64_t>(plan_.first_visible(position) - start, 0, kTileKeys),
                std::clamp<int64_t>(position + 1 - start, 0, kTileKeys)};
    }

    // The keys of tile i that any of the piece's rows [first, first + count) sees, out to multiples of `step`.
    KeyRange seen_by(const AttentionPiece& piece, int64_t i, int64_t first, int64_t count, int64_t step) const {
        const int64_t begin = seen(piece, i, first).begin / step * step;
        const int64_t end = divide_up(seen(piece, i, first + count - 1).end, step) * step;
        return {begin, std::max(begin, end)};
    }

    // What the piece's rows get out of its tile i.
    void attend_tile(const AttentionPiece& piece, int64_t i, const RowSums& sums) {
        const int64_t rows = piece.num_tokens * plan_.group();
        pack_scales(slots_, *tile_, scratch_.tile);
        if (rows <= kStreamRows) {
            with_rows<kStreamRows>(rows, [&](auto few) { stream_block<few.value>(piece, i, sums); });
            return;
        }
        const KeyRange live = seen_by(piece, i, 0, rows, kPanelKeys);
        pack_tile(*tile_, *coming_, plan_.head_dim, live.begin, live.end, scratch_.tile);
        coming_->prefetch_around(live.begin, live.end, plan_.head_dim);
        for (int64_t row = 0; row < rows; row += kBlockRows)
            multiply_block(piece, i, row, std::min(kBlockRows, rows - row), rows_from(sums, row, plan_.head_dim));
    }

    template <int kRows>
    void stream_block(const AttentionPiece& piece, int64_t i, const RowSums& sums) {
        const int64_t head_dim = plan_.head_dim;
        const KeyRange range = seen_by(piece, i, 0, kRows, kLanes);
        stream_keys<kRows>(*tile_, *coming_, head_dim, range.begin, range.end, {scratch_.queries, head_dim / kPerWord},
                           {scratch_.scores, kTileKeys});
        weigh_block(piece, i, 0, kRows, range, sums);
        stream_values<kRows>(*tile_, *coming_, head_dim, range.begin, live_end(range), weights(),
                             {sums.values, head_dim});
        coming_->prefetch_around(range.begin, live_end(range), head_dim);
    }

    void multiply_block(const AttentionPiece& piece, int64_t i, int64_t first, int64_t count, const RowSums& sums) {
        const int64_t words = plan_.head_dim / kPerWord;
        const KeyRange range = seen_by(piece, i, first, count, kPanelKeys);
        multiply_matrices(count, range.end - range.begin, {scratch_.queries + first * words, words},
                          {scratch_.tile.keys + range.begin, kTileKeys}, 0, words,
                          {scratch_.scores + range.begin, kTileKeys});
        weigh_block(piece, i, first, count, range, sums);
        multiply_matrices(count, plan_.head_dim, weights(), {scratch_.tile.values, plan_.head_dim},
                          range.begin / kPerWord, live_end(range) / kPerWord, {sums.values, plan_.head_dim});
    }

    // Where the range's words end that are not all of dead keys.
    int64_t live_end(KeyRange range) const { return std::min(range.end, divide_up(tile_->end, kPerWord) * kPerWord); }

    Matrix<const Word> weights() const {
        return {reinterpret_cast<const Word*>(scratch_.weights), kTileKeys / kPerWord};
    }

    void weigh_block(const AttentionPiece& piece, int64_t i, int64_t first, int64_t count, KeyRange range,
                     const RowSums& sums) {
        constexpr bool kScaled = sizeof(Stored) == 1;
        KeyRange visible[kBlockRows];
        for (int64_t row = 0; row < count; ++row) visible[row] = seen(piece, i, first + row);
        if (rule_.capped())
            weigh_rows<kScaled, true>(rule_, scratch_.tile, count, range, visible, scratch_.scores, scratch_.weights,
                                      sums);
        else
            weigh_rows<kScaled, false>(rule_, scratch_.tile, count, range, visible, scratch_.scores, scratch_.weights,
                                       sums);
    }

    void write_out(const AttentionPiece& piece, const RowSums& sums) const {
        const int64_t group = plan_.group(), head_dim = plan_.head_dim;
        for (int64_t row = 0; row < piece.num_tokens * group; ++row) {
            const float factor = sums.weight[row] > 0 ? 1.0f / sums.weight[row] : 0.0f;
            Act* const out = call_.out + (piece.first_token + row / group) * call_.out_stride +
                             (piece.kv_head * group + row % group) * head_dim;
            const float* const values = sums.values + row * head_dim;
            for (int64_t dim = 0; dim < head_dim; dim += 2 * kLanes)
                store_in_order(out + dim, multiply(load(values + dim), broadcast(factor)),
                               multiply(load(values + dim + kLanes), broadcast(factor)));
        }
    }

    const AttentionCall& call_;
    const Step& step_;
    const AttentionPlan& plan_;
    ScoreRule rule_;
    Slots<Stored> slots_;
    AttentionScratch scratch_;
    RowSums partials_;
    KeyTile<Stored> tiles_[2];
    KeyTile<Stored>* tile_ = &tiles_[0];    // at work
    KeyTile<Stored>* coming_ = &tiles_[1];  // the next, perhaps another piece's
};

// Claims pieces until there are none. Each knows its successor one piece ahead.
template <class Stored>
inline void attend_as(Team& team, const AttentionCall& call, char* scratch) {
    const std::vector<AttentionPiece>& pieces = call.plan->pieces;
    const auto claim = [&] {
        const auto i = static_cast<size_t>(team.claim());
        return i < pieces.size() ? &pieces[i] : nullptr;
    };
    PieceWork<Stored> work(call, scratch);
    const AttentionPiece* next = nullptr;
    for (const AttentionPiece* piece = claim(); piece != nullptr; piece = next) {
        next = claim();
        work.attend(*piece, next);
    }
}

// Each thread of the team calls it, with attention_scratch_bytes of its own. After it comes a barrier, and, if the plan
// must_merge, `merge` and another barrier.
inline void attend(Team& team, const AttentionCall& call, char* scratch) {
    if (call.cache.scales == nullptr)
        attend_as<Bf16>(team, call, scratch);
    else
        attend_as<int8_t>(team, call, scratch);
}

inline void merge(Team& team, const AttentionCall& call, char* scratch) {
    const std::vector<AttentionPiece>& merges = call.plan->merges;
    PieceWork<Bf16> work(call, scratch);
    for (size_t i; (i = static_cast<size_t>(team.claim())) < merges.size();) work.merge(merges[i]);
}

}  // namespace pageframe
