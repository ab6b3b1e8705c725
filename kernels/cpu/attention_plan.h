// Which pieces of work one step's attention consists of, made once and used by every layer of the same kind.
//
// A piece is the queries of a few tokens of one request that share a KV head, over a run of key tiles. Pieces choose
// only who computes what: no result depends on them (see attention.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "types.h"

namespace pageframe {

constexpr int64_t kTileKeys = 128;    // keys of a tile; tile t holds the positions from 128 t on, in every request
constexpr int64_t kPieceRows = 192;   // about how many rows (token, query head) a piece has: one packing serves them
constexpr int64_t kTileCost = 8;      // of reading and packing a tile, in rows that are attended over it
constexpr int64_t kPiecesPerThread = 8;          // how finely the work is divided where it has to be
constexpr int64_t kMaxPartialRows = 64 * 1024;   // of split pieces: some 20 MB with a head_dim of 64

struct AttentionPiece {
    int32_t request, kv_head;
    int32_t first_token, num_tokens;  // first_token counts from the start of the step
    int32_t first_position;           // of first_token, in its request
    int32_t first_tile, num_tiles;
    // Where the sums of its tiles go, [tile][row], to be merged afterwards; -1: it merges them itself.
    int64_t partial_row;
};

struct AttentionPlan {
    int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
    int64_t window = 0;  // how many positions a query sees, its own included; 0: all
    int64_t partial_rows = 0;
    std::vector<AttentionPiece> pieces;  // the longest first
    std::vector<AttentionPiece> merges;  // the pieces that were split, whole; empty: no merge phase

    int64_t group() const { return num_heads / num_kv_heads; }  // query heads of a KV head
    int64_t tokens_per_piece() const { return std::max<int64_t>(1, kPieceRows / group()); }
    int64_t rows_per_piece() const { return tokens_per_piece() * group(); }
    int64_t first_visible(int64_t position) const {
        return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
    }
};

inline int64_t piece_cost(const AttentionPlan& plan, const AttentionPiece& piece) {
    return piece.num_tiles * (kTileCost + piece.num_tokens * plan.group());
}

// The pieces of the first KV head, whole. A request without context has one of no tiles, whose results are zeros.
inline void cut_queries(const Step& step, AttentionPlan& plan) {
    for (int64_t request = 0; request < step.num_requests; ++request) {
        const int32_t end = step.query_start[request + 1];
        const int32_t context = step.context_lens[request];
        const auto length = static_cast<int32_t>(plan.tokens_per_piece());
        for (int32_t token = step.query_start[request]; token < end; token += length) {
            AttentionPiece piece{static_cast<int32_t>(request), 0, token, std::min(length, end - token), 0, 0, 0, -1};
            if (context > 0) {
                piece.first_position = context - (end - token);
                const int64_t last = piece.first_position + piece.num_tokens - 1;
                piece.first_tile = static_cast<int32_t>(plan.first_visible(piece.first_position) / kTileKeys);
                piece.num_tiles = static_cast<int32_t>(last / kTileKeys + 1 - piece.first_tile);
            }
            plan.pieces.push_back(piece);
        }
    }
}

// How many runs of tiles to split a piece into. A run has two tiles at least: less is not worth a merge.
inline int64_t runs_of(const AttentionPlan& plan, const AttentionPiece& piece, int64_t most_cost) {
    const int64_t runs = std::min<int64_t>(divide_up(piece_cost(plan, piece), most_cost), piece.num_tiles / 2);
    const int64_t rows = piece.num_tiles * piece.num_tokens * plan.group() * plan.num_kv_heads;
    return plan.partial_rows + rows <= kMaxPartialRows ? runs : 1;
}

// Adds a whole piece to the plan, or its runs and its merge.
inline void add_runs(AttentionPlan& plan, AttentionPiece piece, int64_t runs) {
    if (runs <= 1) {
        plan.pieces.push_back(piece);
        return;
    }
    const int64_t rows = piece.num_tokens * plan.group();
    piece.partial_row = plan.partial_rows;
    plan.partial_rows += piece.num_tiles * rows;
    plan.merges.push_back(piece);
    for (int64_t run = 0; run < runs; ++run) {
        const int64_t begin = piece.num_tiles * run / runs;
        AttentionPiece part = piece;
        part.first_tile += static_cast<int32_t>(begin);
        part.num_tiles = static_cast<int32_t>(piece.num_tiles * (run + 1) / runs - begin);
        part.partial_row += begin * rows;
        plan.pieces.push_back(part);
    }
}

// Fills `plan`, whose memory is used again. `window` 0 means that a query sees everything before it.
inline void plan_attention(const Step& step, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t window,
                           int threads, AttentionPlan& plan) {
    plan.num_heads = num_heads;
    plan.num_kv_heads = num_kv_heads;
    plan.head_dim = head_dim;
    plan.window = window;
    plan.partial_rows = 0;
    plan.pieces.clear();
    plan.merges.clear();
    cut_queries(step, plan);

    const std::vector<AttentionPiece> whole(plan.pieces);
    std::vector<int64_t> order(whole.size());
    int64_t total_cost = 0;
    for (size_t i = 0; i < whole.size(); ++i) {
        order[i] = static_cast<int64_t>(i);
        total_cost += piece_cost(plan, whole[i]) * num_kv_heads;
    }
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
        return piece_cost(plan, whole[a]) > piece_cost(plan, whole[b]);
    });

    plan.pieces.clear();
    const int64_t most_cost = std::max<int64_t>(1, total_cost / (threads * kPiecesPerThread));
    for (const int64_t i : order) {
        const int64_t runs = threads > 1 ? runs_of(plan, whole[i], most_cost) : 1;
        for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
            AttentionPiece piece = whole[i];
            piece.kv_head = static_cast<int32_t>(kv_head);
            add_runs(plan, piece, runs);
        }
    }
}

}  // namespace pageframe
