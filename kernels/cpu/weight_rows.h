// Rows of a packed weight as float32: what an embedding looks up where it shares the output's matrix.
#pragma once

#include <algorithm>

#include "linear_weights.h"
#include "team.h"

namespace pageframe {

inline float half_to_float(uint16_t half) { return _cvtsh_ss(half); }

inline void copy_row_bf16(const LinearWeight& weight, int64_t row, float* out) {
    const Bf16* const pairs =
        static_cast<const Bf16*>(weight.values) + row / kStrip * weight.k * kStrip + row % kStrip * 2;
    for (int64_t i = 0; i < weight.k; ++i) out[i] = to_float(pairs[i / 2 * 2 * kStrip + i % 2]);
}

inline void copy_row_q8(const LinearWeight& weight, int64_t row, float* out) {
    const int64_t groups = weight.k / kGroup, place = row % kStrip;
    const Q8Record* const records = static_cast<const Q8Record*>(weight.values) + row / kStrip * groups;
    for (int64_t g = 0; g < groups; ++g) {
        const float scale = half_to_float(records[g].scales[place]);
        for (int64_t i = 0; i < kGroup; ++i) out[g * kGroup + i] = scale * records[g].codes[i / 2][place][i % 2];
    }
}

inline void copy_row_q4(const LinearWeight& weight, int64_t row, float* out) {
    const int64_t groups = weight.k / kGroup, place = row % kStrip;
    const Q4Record* const records = static_cast<const Q4Record*>(weight.values) + row / kStrip * groups;
    for (int64_t g = 0; g < groups; ++g) {
        const Q4Record& record = records[g];
        const float scale = half_to_float(record.scales[place]), minimum = half_to_float(record.minimums[place]);
        for (int64_t i = 0; i < kGroup; ++i) {
            const uint32_t rotated = record.codes[i / 8][place];
            const uint32_t line = rotated >> 3 | rotated << 29;
            const uint32_t code = line >> (i / 2 % 4 * 4 + i % 2 * 16) & 15;
            out[g * kGroup + i] = scale * static_cast<float>(code) + minimum;  // the product is exact
        }
    }
}

}  // namespace pageframe

// out float32 [count, k]: the rows `ids` of the weight. False, and nothing done, where one is not from 0 to n - 1.
PAGEFRAME_EXPORT bool pageframe_rows(const pageframe::LinearWeight* weight, const int64_t* ids, float* out,
                                     int64_t count, int threads) {
    using namespace pageframe;
    if (!std::all_of(ids, ids + count, [&](int64_t id) { return id >= 0 && id < weight->n; })) return false;
    constexpr int64_t kFew = 32;  // are read before other threads have woken
    const auto copy = weight->kind == kBf16 ? copy_row_bf16 : weight->kind == kQ8 ? copy_row_q8 : copy_row_q4;
    run_team(count <= kFew ? 1 : threads, [&](Team& team, int) {
        each_row(team, count, [&](int64_t row) { copy(*weight, ids[row], out + row * weight->k); });
    });
    return true;
}
