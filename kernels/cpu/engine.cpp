// The compiled CPU engine: one translation unit of all that is in this folder, and its entry points for Python.

#include "attention_entry.h"
#include "layer.h"
#include "linear_entry.h"
#include "weight_rows.h"

PAGEFRAME_EXPORT int64_t pageframe_layer_scratch_bytes(const pageframe::Layer* layer,
                                                       const pageframe::LayerStep* shared) {
    return pageframe::layer_scratch_bytes(*layer, *shared);
}

// hidden: float32 [num_tokens, hidden_size], changed. kv: the layer's blocks; scales: null where they are bfloat16.
PAGEFRAME_EXPORT void pageframe_layer(const pageframe::Layer* layer, const pageframe::LayerStep* shared, void* kv,
                                      float* scales, float* hidden) {
    using namespace pageframe;
    const KvCache cache{kv, scales, layer->num_kv_heads, layer->head_dim};
    const LayerRun run(*layer, *shared, cache, hidden);
    run_team(shared->threads, [&](Team& team, int rank) { run.run(team, rank); });
}
