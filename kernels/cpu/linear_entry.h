// The linear alone, as Python calls it. x is float32 [rows, k]: first it is normalised where there is a norm, and
// rounded to what the processor multiplies.
#pragma once

#include <vector>

#include "linear.h"
#include "norm.h"

namespace pageframe {

// float32 rows as a linear reads them.
class RoundedRows {
  public:
    RoundedRows(ScratchLayout& layout, const LinearWeight& weight, const RowNorm* norm, const float* x, int64_t rows)
        : norm_(norm), x_(x), needs_extras_(needs_extras(weight)), values_(layout.take<Act>(rows * weight.k)),
          rows_(rows), k_(weight.k) {
        if (needs_extras_) extras_ = lay_out_extras(layout, rows, k_);
    }
    RoundedRows(const RoundedRows&) = delete;

    // By all threads of a team; a barrier comes after it.
    void fill(Team& team) {
        each_row(team, rows_, [&](int64_t row) {
            Act* const values = values_ + row * k_;
            const float* const x = x_ + row * k_;
            if (norm_ != nullptr)
                norm_row(x, *norm_, k_, values);
            else
                for (int64_t i = 0; i < k_; i += kLanes) store_act(values + i, load(x + i));
            if (needs_extras_) prepare_row(values, k_, row, extras_);
        });
    }

    Inputs inputs() const { return {values_, k_, extras_, rows_}; }

  private:
    const RowNorm* const norm_;
    const float* const x_;
    const bool needs_extras_;
    Act* const values_;
    RowExtras extras_{};
    int64_t rows_, k_;
};

// Calls epilogue_of(rank) for each thread's epilogue.
template <class EpilogueOf>
void linear_by_team(const LinearWeight& weight, const RowNorm* norm, const float* x, int64_t rows, int threads,
                    EpilogueOf epilogue_of) {
    const int64_t own_bytes = divide_up(linear_scratch_bytes(weight.k), kCacheLine) * kCacheLine;
    ScratchLayout sizes(nullptr);
    RoundedRows(sizes, weight, norm, x, rows);
    sizes.take<char>(threads * own_bytes);
    thread_local KeptMemory kept;
    ScratchLayout layout(kept.at_least(sizes.bytes()));
    RoundedRows rounded(layout, weight, norm, x, rows);
    char* const scratch = layout.take<char>(threads * own_bytes);
    run_team(threads, [&](Team& team, int rank) {
        rounded.fill(team);
        team.barrier();
        linear(team, weight, rounded.inputs(), epilogue_of(rank), scratch + rank * own_bytes);
    });
}

inline float as_float(Bf16 value) { return to_float(value); }
inline float as_float(float value) { return value; }

}  // namespace pageframe

// out float32 [rows, n] = norm(x) @ W.T + bias; a null norm changes nothing.
PAGEFRAME_EXPORT void pageframe_linear(const pageframe::LinearWeight* weight, const pageframe::RowNorm* norm,
                                       const float* x, float* out, int64_t rows, int threads) {
    using namespace pageframe;
    linear_by_team(*weight, norm, x, rows, threads, [&](int) { return Store{out, weight->n}; });
}

// Each row's largest output and the lowest column that has it; NaN counts as -inf. columns int64 [rows], values float32
// [rows].
PAGEFRAME_EXPORT void pageframe_arg_max(const pageframe::LinearWeight* weight, const pageframe::RowNorm* norm,
                                        const float* x, int64_t* columns, float* values, int64_t rows, int threads) {
    using namespace pageframe;
    std::vector<Best> best(threads * rows);
    for (Best& row : best) row.clear();
    linear_by_team(*weight, norm, x, rows, threads, [&](int rank) { return ArgMax{best.data() + rank * rows}; });
    for (int64_t row = 0; row < rows; ++row) {
        const Largest largest = merge_best(best.data() + row, threads, rows);
        columns[row] = largest.column;
        values[row] = largest.value;
    }
}

// out float32 [rows, n / 2] = silu(gate) * up, with the strips of gate and up taking turns; rounded as activations are.
PAGEFRAME_EXPORT void pageframe_gated_linear(const pageframe::LinearWeight* weight, const float* x, float* out,
                                             int64_t rows, int threads) {
    using namespace pageframe;
    const int64_t width = weight->n / 2;
    std::vector<Act> rounded(rows * width);
    linear_by_team(*weight, nullptr, x, rows, threads, [&](int) { return GatedSilu{rounded.data(), width}; });
    for (int64_t i = 0; i < rows * width; ++i) out[i] = as_float(rounded[i]);
}
