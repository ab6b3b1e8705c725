// The threads of one parallel region: they wait for one another at barriers and claim numbered pieces of work between.
//
// Waiting spins, since a phase takes microseconds, and gives the core away after a while, since whoever is waited for
// may have lost its own to another process. Pieces are claimed and not dealt out for the same reason.
#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace pageframe {

constexpr int kSpins = 2000;  // of some 40 cycles each, before a core is given away

class Team {
  public:
    int size() const { return size_.load(std::memory_order_relaxed); }

    // Each thread says how many there are before it does anything else: OpenMP may give fewer than it was asked for.
    void join(int size) { size_.store(size, std::memory_order_relaxed); }

    // Every thread's writes before it are seen by all after it. The claims start from 0 again.
    void barrier() {
        if (size() == 1) {
            next_.store(0, std::memory_order_relaxed);
            return;
        }
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
            if (spins < kSpins)
                _mm_pause();
            else
                sched_yield();
        }
    }

    // The next piece of work that nobody has claimed since the last barrier: 0, 1, 2, ...
    int64_t claim() { return next_.fetch_add(1, std::memory_order_relaxed); }

  private:
    std::atomic<int> size_{1};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

// Claims the rows [0, num_rows) in pieces and calls work(row) for each.
template <class Work>
void each_row(Team& team, int64_t num_rows, Work work) {
    const int64_t piece = std::max<int64_t>(1, num_rows / (8 * team.size()));
    for (int64_t begin; (begin = piece * team.claim()) < num_rows;)
        for (int64_t row = begin; row < std::min(num_rows, begin + piece); ++row) work(row);
}

// Runs work(team, rank) on `threads` threads at once.
template <class Work>
void run_team(int threads, Work work) {
    Team team;
    if (threads == 1) {
        work(team, 0);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        team.join(omp_get_num_threads());
        work(team, omp_get_thread_num());
    }
}

}  // namespace pageframe
