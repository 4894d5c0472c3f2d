/* Products of a few rows with a big FP32 matrix: y[rows, n] = x[rows, k] @ w[n, k]^T.
 *
 * Purpose: a decode step multiplies 1 to some 50 rows with every weight of the model, so it is bound by reading the
 * weights once. They are kept in panels of 16 output columns, [n / 16][k][16], read from front to back by each thread.
 * Rows go through a panel in blocks of at most six, because six rows times two vectors of eight are the accumulators
 * that fit the register file; further blocks find the panel in the cache.
 *
 * Invariants:
 * - Every output is one chain of fused multiply-adds over k in ascending order, whatever the number of rows, their
 *   place in the batch and the number of threads: a row's result does not depend on who else is in the batch.
 * - No allocation; sizes are checked by the caller (dspark/models/panels.py). `scratch` holds rows * k floats.
 * - n is padded to whole panels with zero columns, which are computed and never stored.
 *
 * Called by dspark/models/panels.py through ctypes. OpenMP's team is the one of the process: the symbols are resolved
 * against the library that torch has loaded, because two teams on the same cores make each other many times slower.
 */
#include <stddef.h>
#include <string.h>

#include "portable.h"

#define PANEL 16
#define BLOCK 6
/* Floats ahead of the multiply-adds; hardware prefetchers stop at every page. */
#define AHEAD 512

/* Rows per block when `rows` are split as evenly as possible: the first blocks take the remainder. */
static size_t block_rows(size_t rows, size_t done, size_t blocks_left)
{
    return (rows - done + blocks_left - 1) / blocks_left;
}

static size_t block_count(size_t rows)
{
    return (rows + BLOCK - 1) / BLOCK;
}

INLINE void multiply(const float *restrict panel, const float *restrict x, size_t k, float *restrict y, size_t n,
                     size_t width, const size_t rows)
{
    lanes low[BLOCK], high[BLOCK];
    for (size_t r = 0; r < rows; r++)
        low[r] = high[r] = (lanes){0};
    for (size_t i = 0; i < k; i++) {
        lanes w0, w1;
        memcpy(&w0, panel + PANEL * i, sizeof w0);
        memcpy(&w1, panel + PANEL * i + LANES, sizeof w1);
        __builtin_prefetch(panel + PANEL * i + AHEAD);
        for (size_t r = 0; r < rows; r++) {
            const float value = x[rows * i + r];
            low[r] += w0 * value;
            high[r] += w1 * value;
        }
    }
    for (size_t r = 0; r < rows; r++) {
        float out[PANEL];
        memcpy(out, &low[r], sizeof low[r]);
        memcpy(out + LANES, &high[r], sizeof high[r]);
        memcpy(y + r * n, out, width * sizeof *out);
    }
}

/* One block of rows times one panel. The switch makes `rows` a constant, so that the accumulators are registers. */
FOR_EVERY_CPU static void multiply_block(const float *panel, const float *x, size_t k, float *y, size_t n,
                                         size_t width, size_t rows)
{
    switch (rows) {
    case 1: multiply(panel, x, k, y, n, width, 1); break;
    case 2: multiply(panel, x, k, y, n, width, 2); break;
    case 3: multiply(panel, x, k, y, n, width, 3); break;
    case 4: multiply(panel, x, k, y, n, width, 4); break;
    case 5: multiply(panel, x, k, y, n, width, 5); break;
    default: multiply(panel, x, k, y, n, width, BLOCK); break;
    }
}

/* Blocks of rows with their columns interleaved, so that a step over k reads neighbours. */
static void interleave(const float *restrict x, float *restrict out, size_t rows, size_t k)
{
    size_t done = 0;
    for (size_t left = block_count(rows); left > 0; left--) {
        const size_t block = block_rows(rows, done, left);
        for (size_t r = 0; r < block; r++)
            for (size_t i = 0; i < k; i++)
                out[done * k + i * block + r] = x[(done + r) * k + i];
        done += block;
    }
}

/* Raised whenever an argument of this library changes its meaning; decode_library.py asks for it. */
#define INTERFACE 1

int dspark_decode_interface(void)
{
    return INTERFACE;
}

/* Floats of a packed matrix of n rows and k columns. */
size_t dspark_packed_size(size_t n, size_t k)
{
    return (n + PANEL - 1) / PANEL * PANEL * k;
}

/* w[n, k], row-major, into panels. */
void dspark_pack(const float *restrict w, float *restrict packed, size_t n, size_t k)
{
    const size_t panels = (n + PANEL - 1) / PANEL;
    for (size_t p = 0; p < panels; p++)
        for (size_t i = 0; i < k; i++)
            for (size_t c = 0; c < PANEL; c++) {
                const size_t row = PANEL * p + c;
                packed[PANEL * (k * p + i) + c] = row < n ? w[row * k + i] : 0.0f;
            }
}

/* y[rows, n] = x[rows, k] @ w^T; rows, k, n >= 1. `scratch` holds rows * k floats and may not overlap x or y. */
void dspark_product(const float *restrict packed, const float *restrict x, float *restrict scratch, float *restrict y,
                    size_t rows, size_t k, size_t n, int threads)
{
    const size_t panels = (n + PANEL - 1) / PANEL;
    interleave(x, scratch, rows, k);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * k * n > SMALL)
    for (size_t p = 0; p < panels; p++) {
        const size_t width = n - PANEL * p < PANEL ? n - PANEL * p : PANEL;
        size_t done = 0;
        for (size_t left = block_count(rows); left > 0; left--) {
            const size_t block = block_rows(rows, done, left);
            multiply_block(packed + PANEL * k * p, scratch + done * k, k, y + done * n + PANEL * p, n, width, block);
            done += block;
        }
    }
}
