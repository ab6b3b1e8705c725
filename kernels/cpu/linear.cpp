// out = x @ W.T + bias with W in bfloat16 and everything else in float32, for x86-64 with AVX2 and FMA.
//
// W [n, k] is packed in strips of 16 outputs: [ceil(n / 16)][k][8][2], where element [i][0] belongs to output i of the
// strip and [i][1] to output i + 8. One 32-byte load thus holds, in each 32-bit lane, two weights that become float32
// by a shift and by a mask.
//
// Every output is one chain of fused multiply-adds over k = 0, 1, 2, ... that starts from its bias. Tiles, blocks and
// threads only choose which chains run side by side and where a chain's float32 sum waits in memory meanwhile, so a
// row's result is the same bits for any number of rows and threads.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t kStrip = 16;       // outputs in a strip
constexpr int64_t kTileRows = 6;     // 6 rows x 16 outputs: 12 sums, 2 weights, 1 activation, 1 mask are 16 registers
constexpr int64_t kBlockRows = 96;   // rows whose activations of one block of k stay in the L2 cache
constexpr int64_t kBlockDepth = 768; // depth of a block: its part of a strip (24 KB) stays in the L1 cache
constexpr int64_t kGroup = 4;        // strips in a unit of work

struct Problem {
    const float* x;           // [rows, k]
    const uint16_t* weight;   // packed
    const float* bias;        // [n] or null
    float* out;               // [rows, n]
    int64_t rows, n, k;
};

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Adds the products of depth `begin` to `end` to kRows x (kStrips x 16) sums: from the bias, or from `out`, to `out`.
template <int kRows, int kStrips>
__attribute__((target("avx2,fma"))) void tile(const Problem& p, int64_t row, int64_t strip, int64_t begin, int64_t end) {
    __m256 sums[kRows][kStrips][2];
    const int64_t column = strip * kStrip;
    const bool whole = column + kStrips * kStrip <= p.n;
    float* out = p.out + row * p.n + column;
    int64_t out_stride = p.n;
    float edge[kRows * kStrips * kStrip];  // the last strip's sums, some of which are of no output
    if (!whole) {
        std::fill(edge, edge + kRows * kStrips * kStrip, 0.0f);
        if (begin > 0)
            for (int r = 0; r < kRows; ++r)
                std::copy(out + r * p.n, out + r * p.n + (p.n - column), edge + r * kStrips * kStrip);
        else if (p.bias != nullptr)
            for (int r = 0; r < kRows; ++r)
                std::copy(p.bias + column, p.bias + p.n, edge + r * kStrips * kStrip);
        out = edge;
        out_stride = kStrips * kStrip;
    }
    for (int r = 0; r < kRows; ++r)
        for (int s = 0; s < kStrips; ++s)
            for (int h = 0; h < 2; ++h) {
                const int64_t offset = s * kStrip + h * 8;
                if (begin > 0 || !whole)
                    sums[r][s][h] = _mm256_loadu_ps(out + r * out_stride + offset);
                else
                    sums[r][s][h] = p.bias ? _mm256_loadu_ps(p.bias + column + offset) : _mm256_setzero_ps();
            }

    const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    const uint16_t* weight = p.weight + column * p.k;
    const float* x = p.x + row * p.k;
    for (int64_t d = begin; d < end; ++d) {
#pragma GCC unroll 8
        for (int s = 0; s < kStrips; ++s) {
            const uint16_t* at = weight + (s * p.k + d) * kStrip;
            const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
            const __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
            const __m256 high = _mm256_castsi256_ps(_mm256_and_si256(pairs, high_half));
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const __m256 activation = _mm256_broadcast_ss(x + r * p.k + d);
                sums[r][s][0] = _mm256_fmadd_ps(activation, low, sums[r][s][0]);
                sums[r][s][1] = _mm256_fmadd_ps(activation, high, sums[r][s][1]);
            }
        }
    }

    for (int r = 0; r < kRows; ++r)
        for (int s = 0; s < kStrips; ++s)
            for (int h = 0; h < 2; ++h) _mm256_storeu_ps(out + r * out_stride + s * kStrip + h * 8, sums[r][s][h]);
    if (!whole)
        for (int r = 0; r < kRows; ++r)
            std::copy(edge + r * kStrips * kStrip, edge + r * kStrips * kStrip + (p.n - column),
                      p.out + (row + r) * p.n + column);
}

using Tile = void (*)(const Problem&, int64_t, int64_t, int64_t, int64_t);
constexpr Tile kOneStrip[kTileRows + 1] = {nullptr,    tile<1, 1>, tile<2, 1>, tile<3, 1>,
                                           tile<4, 1>, tile<5, 1>, tile<6, 1>};

// A unit of work: rows `row` to `row_end` of strips `strip` to `strip_end`.
void unit(const Problem& p, int64_t row, int64_t row_end, int64_t strip, int64_t strip_end) {
    const int64_t rows = row_end - row;
    const int64_t tiles = divide_up(rows, kTileRows);
    const int64_t blocks = std::max<int64_t>(1, divide_up(p.k, kBlockDepth));
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t begin = p.k * b / blocks, end = p.k * (b + 1) / blocks;
        if (rows == 1 && strip_end - strip == kGroup) {  // one strip alone would wait for its two sums
            tile<1, kGroup>(p, row, strip, begin, end);
            continue;
        }
        for (int64_t s = strip; s < strip_end; ++s)
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t first = row + rows * t / tiles;  // tiles of nearly equal height
                kOneStrip[row + rows * (t + 1) / tiles - first](p, first, s, begin, end);
            }
    }
}

}  // namespace

extern "C" void pageframe_linear_bf16(const float* x, const uint16_t* weight, const float* bias, float* out,
                                      int64_t rows, int64_t n, int64_t k, int threads) {
    const Problem p{x, weight, bias, out, rows, n, k};
    const int64_t strips = divide_up(n, kStrip);
    const int64_t groups = divide_up(strips, kGroup);
    const int64_t row_blocks = divide_up(rows, kBlockRows);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t u = 0; u < groups * row_blocks; ++u) {
        const int64_t block = u / groups, strip = u % groups * kGroup;
        unit(p, rows * block / row_blocks, rows * (block + 1) / row_blocks, strip, std::min(strips, strip + kGroup));
    }
}
