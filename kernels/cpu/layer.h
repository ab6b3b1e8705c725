// One decoder layer: norm, q k v, rotary positions, K/V write, attention, output, norm, MLP, with the residual stream
// in float32. All of it runs in one parallel region; between two phases stands a barrier.
//
// Every row's arithmetic is its own: a phase hands out rows, outputs or heads, and how many there are never changes the
// order of anybody's additions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "attention_write.h"
#include "linear.h"
#include "norm.h"
#include "team.h"
#include "types.h"
#include "vector_math.h"

namespace pageframe {

// Filled by Python (ctypes), which keeps the memory alive. hidden_size, intermediate_size and head_dim are multiples of
// 32.
struct Layer {
    LinearWeight qkv, o, gate_up, down;  // gate_up: strips of gate and up in turn
    const float* attention_norm;         // [hidden_size]
    const float* mlp_norm;               // [hidden_size]
    const float* qk_norm;                // [num_heads + num_kv_heads, head_dim], or null
    int64_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
    int64_t window;  // tokens that a query looks back, itself included; 0 for all
    float norm_eps, attention_scale;
};

// What all layers of a step share. Filled by Python.
struct LayerStep {
    const Step* step;
    const AttentionPlan* plan;  // of layers with this window
    const float* cos;           // rows of rotary_stride numbers, by position; the first head_dim / 2 are used
    const float* sin;
    int64_t rotary_stride;
    char* scratch;  // layer_scratch_bytes, at a multiple of 64
    int32_t threads;
    int32_t reserved;
};

// Memory of one call, shared by its threads, and a part for each thread alone.
struct LayerBuffers {
    Act* normed;     // [num_tokens, hidden_size]
    float* qkv;      // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    Act* q;          // [num_tokens, num_heads * head_dim]
    Act* attended;   // the same
    Act* activated;  // [num_tokens, intermediate_size]
    RowExtras extras;  // of the longest row
    char* partials;  // of split attention
    char* own;       // a part for each thread
    int64_t own_bytes;
};

inline LayerBuffers lay_out(ScratchLayout& layout, const Layer& layer, const LayerStep& shared) {
    const int64_t num_tokens = shared.step->num_tokens;
    const int64_t q_size = layer.num_heads * layer.head_dim;
    const int64_t longest = std::max({layer.hidden_size, q_size, layer.intermediate_size});
    LayerBuffers buffers;
    buffers.normed = layout.take<Act>(num_tokens * layer.hidden_size);
    buffers.qkv = layout.take<float>(num_tokens * layer.qkv.n);
    buffers.q = layout.take<Act>(num_tokens * q_size);
    buffers.attended = layout.take<Act>(num_tokens * q_size);
    buffers.activated = layout.take<Act>(num_tokens * layer.intermediate_size);
    buffers.extras = lay_out_extras(layout, num_tokens, longest);
    buffers.partials = layout.take<char>(partials_bytes(*shared.plan));
    const int64_t attention = attention_scratch_bytes(layer.num_heads, layer.num_kv_heads, layer.head_dim);
    buffers.own_bytes = divide_up(std::max(attention, linear_scratch_bytes(longest)), 64) * 64;
    buffers.own = layout.take<char>(shared.threads * buffers.own_bytes);
    return buffers;
}

inline int64_t layer_scratch_bytes(const Layer& layer, const LayerStep& shared) {
    ScratchLayout layout(nullptr);
    lay_out(layout, layer, shared);
    return layout.bytes();
}

// Turns the pairs (i, i + head_dim / 2) of a head by their position's angles, in place.
inline void rotate(float* head, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += kLanes) {
        const Floats first = load(head + i), second = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(head + i, subtract(multiply(first, c), multiply(second, s)));
        store(head + half + i, fma(first, s, multiply(second, c)));
    }
}

// One layer of one step.
class LayerRun {
  public:
    // hidden: [num_tokens, hidden_size], the residual stream; changed.
    LayerRun(const Layer& layer, const LayerStep& shared, const KvCache& cache, float* hidden)
        : layer_(layer), shared_(shared), step_(*shared.step), cache_(cache), hidden_(hidden) {
        ScratchLayout layout(shared.scratch);
        buffers_ = lay_out(layout, layer, shared);
        const int64_t q_size = layer.num_heads * layer.head_dim;
        attention_ = {shared.step, shared.plan, cache,  layer.attention_scale, 0.0f,
                      buffers_.q,  q_size,      buffers_.attended, q_size, buffers_.partials};
    }

    // What each thread of the team does.
    void run(Team& team, int rank) const {
        attend_rows(team, rank);
        feed_forward(team, rank);
    }

  private:
    void attend_rows(Team& team, int rank) const {
        norm_rows(team, layer_.attention_norm, layer_.qkv);
        team.barrier();
        apply(team, rank, layer_.qkv, buffers_.normed, Store{buffers_.qkv, layer_.qkv.n});
        team.barrier();
        each_row(team, step_.num_tokens, [&](int64_t token) { place_token(token); });
        team.barrier();
        attend(team, attention_, own(rank));
        team.barrier();
        if (must_merge(*shared_.plan)) {
            merge(team, attention_, own(rank));
            team.barrier();
        }
        prepare_rows(team, layer_.o, buffers_.attended);
        apply(team, rank, layer_.o, buffers_.attended, AddTo{hidden_, layer_.hidden_size});
        team.barrier();
    }

    void feed_forward(Team& team, int rank) const {
        norm_rows(team, layer_.mlp_norm, layer_.gate_up);
        team.barrier();
        apply(team, rank, layer_.gate_up, buffers_.normed, GatedSilu{buffers_.activated, layer_.intermediate_size});
        team.barrier();
        prepare_rows(team, layer_.down, buffers_.activated);
        apply(team, rank, layer_.down, buffers_.activated, AddTo{hidden_, layer_.hidden_size});
    }

    char* own(int rank) const { return buffers_.own + rank * buffers_.own_bytes; }

    // The rows of `weight`, and what `next` needs of them.
    void norm_rows(Team& team, const float* weight, const LinearWeight& next) const {
        const int64_t size = layer_.hidden_size;
        each_row(team, step_.num_tokens, [&](int64_t token) {
            Act* const normed = buffers_.normed + token * size;
            norm_row(hidden_ + token * size, {weight, layer_.norm_eps}, size, normed);
            if (needs_extras(next)) prepare_row(normed, size, token, buffers_.extras);
        });
    }

    // What the weight needs of its rows besides their values; a phase of its own.
    void prepare_rows(Team& team, const LinearWeight& weight, const Act* x) const {
        if (!needs_extras(weight)) return;
        each_row(team, step_.num_tokens,
                 [&](int64_t token) { prepare_row(x + token * weight.k, weight.k, token, buffers_.extras); });
        team.barrier();
    }

    template <class Epilogue>
    void apply(Team& team, int rank, const LinearWeight& weight, const Act* x, Epilogue epilogue) const {
        const Inputs inputs{x, weight.k, buffers_.extras, step_.num_tokens};
        linear(team, weight, inputs, epilogue, own(rank));
    }

    // Normalises and rotates a token's q and k heads; q is rounded for its product, k and v go to their slot.
    void place_token(int64_t token) const {
        const int64_t head_dim = layer_.head_dim, half = head_dim / 2, q_size = layer_.num_heads * head_dim;
        const int64_t place = step_.positions[token] * shared_.rotary_stride;
        float* const heads = buffers_.qkv + token * layer_.qkv.n;
        for (int64_t h = 0; h < layer_.num_heads + layer_.num_kv_heads; ++h) {
            float* const head = heads + h * head_dim;
            if (layer_.qk_norm != nullptr)
                norm_head(head, {layer_.qk_norm + h * head_dim, layer_.norm_eps}, head_dim);
            rotate(head, shared_.cos + place, shared_.sin + place, half);
        }
        for (int64_t i = 0; i < q_size; i += kLanes) store_act(buffers_.q + token * q_size + i, load(heads + i));
        const float* const k = heads + q_size;
        write_token(cache_, step_.block_size, step_.slots[token], k, k + layer_.num_kv_heads * head_dim);
    }

    const Layer& layer_;
    const LayerStep& shared_;
    const Step& step_;
    const KvCache& cache_;
    float* const hidden_;
    LayerBuffers buffers_;
    AttentionCall attention_;
};

}  // namespace pageframe
