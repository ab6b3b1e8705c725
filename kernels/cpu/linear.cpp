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

constexpr int64_t kStrip = 16;         // outputs in a strip
constexpr int64_t kTileRows = 6;       // 6 rows x 16 outputs: 12 sums, 2 weights, 1 activation, 1 mask are 16 registers
constexpr int64_t kBlockRows = 96;     // rows whose activations of one block of k stay in the L2 cache
constexpr int64_t kBlockDepth = 768;   // depth of a block: its part of a strip (24 KB) stays in the L1 cache
constexpr int64_t kGroup = 4;          // strips in a unit of work
constexpr int64_t kPrefetch = 1024;    // bytes ahead of the weights in use; past the last one it asks for nothing

struct Problem {
    const float* x;           // [rows, k]
    const uint16_t* weight;   // packed
    const float* bias;        // [n] or null
    float* out;               // [rows, n]
    int64_t rows, n, k;
};

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Adds the products of depth `begin` to `end` to kRows x (kStrips x 16) sums, which start from the bias or, from the
// second block of depth on, from what the one before left in `out`. Loops over sums must be unrolled: only then does
// the compiler keep them in registers.
template <int kRows, int kStrips>
__attribute__((target("avx2,fma"))) void tile(const Problem& p, int64_t row, int64_t strip, int64_t begin,
                                              int64_t end) {
    constexpr int64_t kWidth = kStrips * kStrip;
    static const float zeros[kWidth] = {};
    const int64_t column = strip * kStrip;
    const int64_t width = std::min(kWidth, p.n - column);
    float* const out = p.out + row * p.n + column;
    const float* from = begin > 0 ? out : p.bias != nullptr ? p.bias + column : zeros;
    int64_t from_stride = begin > 0 ? p.n : 0;
    float* to = out;
    int64_t to_stride = p.n;
    float edge[kRows * kWidth];
    if (width < kWidth) {  // the last strip has sums that are of no output
        std::fill(edge, edge + kRows * kWidth, 0.0f);
        for (int r = 0; r < kRows; ++r)
            std::copy(from + r * from_stride, from + r * from_stride + width, edge + r * kWidth);
        from = to = edge;
        from_stride = to_stride = kWidth;
    }

    __m256 sums[kRows][2 * kStrips];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int h = 0; h < 2 * kStrips; ++h) sums[r][h] = _mm256_loadu_ps(from + r * from_stride + h * 8);

    const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    const uint16_t* weight = p.weight + column * p.k;
    const float* x[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) x[r] = p.x + (row + r) * p.k;
    for (int64_t d = begin; d < end; ++d) {
#pragma GCC unroll 8
        for (int s = 0; s < kStrips; ++s) {
            const uint16_t* at = weight + (s * p.k + d) * kStrip;
            _mm_prefetch(reinterpret_cast<const char*>(at) + kPrefetch, _MM_HINT_T0);
            const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
            const __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
            const __m256 high = _mm256_castsi256_ps(_mm256_and_si256(pairs, high_half));
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const __m256 activation = _mm256_broadcast_ss(x[r] + d);
                sums[r][2 * s] = _mm256_fmadd_ps(activation, low, sums[r][2 * s]);
                sums[r][2 * s + 1] = _mm256_fmadd_ps(activation, high, sums[r][2 * s + 1]);
            }
        }
    }

#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int h = 0; h < 2 * kStrips; ++h) _mm256_storeu_ps(to + r * to_stride + h * 8, sums[r][h]);
    if (width < kWidth)
        for (int r = 0; r < kRows; ++r) std::copy(edge + r * kWidth, edge + r * kWidth + width, out + r * p.n);
}

struct Tile {
    void (*add)(const Problem&, int64_t row, int64_t strip, int64_t begin, int64_t end);
    int64_t strips;
};
constexpr Tile kOneStrip[] = {{nullptr, 0},    {tile<1, 1>, 1}, {tile<2, 1>, 1}, {tile<3, 1>, 1},
                              {tile<4, 1>, 1}, {tile<5, 1>, 1}, {tile<6, 1>, 1}};
// A few rows of one strip are too few sums to keep the multipliers busy while each waits for its last product.
constexpr Tile kFewRows[] = {{nullptr, 0}, {tile<1, 4>, 4}, {tile<2, 2>, 2}, {tile<3, 2>, 2}};

// A unit of work: rows `row` to `row_end` of strips `strip` to `strip_end`.
void compute_unit(const Problem& p, int64_t row, int64_t row_end, int64_t strip, int64_t strip_end) {
    const int64_t rows = row_end - row;
    const int64_t tiles = divide_up(rows, kTileRows);
    const int64_t blocks = std::max<int64_t>(1, divide_up(p.k, kBlockDepth));
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t begin = p.k * b / blocks, end = p.k * (b + 1) / blocks;
        int64_t s = strip;
        if (rows <= 3)
            for (const Tile& few = kFewRows[rows]; s + few.strips <= strip_end; s += few.strips)
                few.add(p, row, s, begin, end);
        for (; s < strip_end; ++s)
            for (int64_t t = 0; t < tiles; ++t) {  // tiles of nearly equal height
                const int64_t first = row + rows * t / tiles, last = row + rows * (t + 1) / tiles;
                kOneStrip[last - first].add(p, first, s, begin, end);
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
        compute_unit(p, rows * block / row_blocks, rows * (block + 1) / row_blocks, strip,
                     std::min(strips, strip + kGroup));
    }
}
