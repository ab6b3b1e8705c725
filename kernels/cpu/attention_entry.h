// The attention as functions of their own, for layers that are put together in Python and for tests.
#pragma once

#include "attention.h"
#include "attention_write.h"
#include "scratch.h"
#include "team.h"

// Of one number of q and of the result: 2 for bfloat16, 4 for float32.
PAGEFRAME_EXPORT int32_t pageframe_act_bytes() { return sizeof(pageframe::Act); }

PAGEFRAME_EXPORT pageframe::AttentionPlan* pageframe_new_plan() { return new pageframe::AttentionPlan(); }

PAGEFRAME_EXPORT void pageframe_delete_plan(pageframe::AttentionPlan* plan) { delete plan; }

// window 0: a query sees everything before it.
PAGEFRAME_EXPORT void pageframe_plan_attention(pageframe::AttentionPlan* plan, const pageframe::Step* step,
                                               int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                               int64_t window, int threads) {
    pageframe::plan_attention(*step, num_heads, num_kv_heads, head_dim, window, threads, *plan);
}

// The call's partials are this function's business.
PAGEFRAME_EXPORT void pageframe_attention(const pageframe::AttentionCall* asked, int threads) {
    using namespace pageframe;
    thread_local KeptMemory shared;
    AttentionCall call = *asked;
    call.partials = shared.at_least(partials_bytes(*call.plan));
    const int64_t own_bytes =
        attention_scratch_bytes(call.plan->num_heads, call.plan->num_kv_heads, call.plan->head_dim);
    run_team(threads, [&](Team& team, int) {
        thread_local KeptMemory own;
        char* const scratch = own.at_least(own_bytes);
        attend(team, call, scratch);
        if (!must_merge(*call.plan)) return;
        team.barrier();
        merge(team, call, scratch);
    });
}

// k, v: float32 [num_tokens, num_kv_heads, head_dim]; slots: int64 [num_tokens].
PAGEFRAME_EXPORT void pageframe_write_kv(const pageframe::KvCache* cache, int64_t block_size, const float* k,
                                         const float* v, const int64_t* slots, int64_t num_tokens) {
    const int64_t size = cache->num_kv_heads * cache->head_dim;
    for (int64_t token = 0; token < num_tokens; ++token)
        pageframe::write_token(*cache, block_size, slots[token], k + token * size, v + token * size);
}
