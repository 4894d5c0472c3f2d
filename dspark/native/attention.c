/* Attention of a few new rows of one request over its own keys and values, FP32.
 *
 * Purpose: decode and verify steps. The new keys and values are stored first; row i then sees positions 0 to start + i.
 *
 * Invariants:
 * - A row's result depends on its query, its position and the keys and values up to it, never on how many rows come
 *   with it: every dot product, sum and weighted sum runs over positions in ascending order, in the same lanes.
 * - No allocation; sizes are checked by the caller (dspark/models/decode_attention.py). `scratch` holds `threads` times
 *   start + rows floats, rounded up to whole lanes.
 * - head_dim is a multiple of LANES; heads is a multiple of kv_heads.
 *
 * Called by dspark/models/decode_attention.py through ctypes.
 */
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "portable.h"

/* Vectors of columns that are summed at once. */
#define GROUPS 8

typedef int32_t whole __attribute__((vector_size(LANES * sizeof(int32_t))));

INLINE void load(lanes *out, const float *from)
{
    memcpy(out, from, sizeof *out);
}

INLINE float sum_of(const lanes *x)
{
    float v[LANES];
    memcpy(v, x, sizeof v);
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* exp of values in [-87, 0], within 2 ulp: 2^n times a polynomial of the remainder (Cephes' coefficients). */
INLINE void exp_of(lanes *x)
{
    const lanes shift = (lanes){0} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to the nearest integer */
    const lanes n = (*x * 1.44269504f + shift) - shift;
    const lanes r = *x - n * 0.693359375f - n * -2.12194440e-4f;
    lanes p = (lanes){0} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const whole exponent = (__builtin_convertvector(n, whole) + 127) << 23;
    lanes scale;
    memcpy(&scale, &exponent, sizeof scale);
    *x = p * scale;
}

/* scores[j] = scale * q . key_j for j < count, and their maximum. */
INLINE float score(const float *restrict q, const float *restrict keys, size_t dim, size_t count, float scale,
                   float *restrict scores)
{
    float top = -INFINITY;
    for (size_t j = 0; j < count; j++) {
        lanes even = {0}, odd = {0};
        size_t d = 0;
        for (; d + 2 * LANES <= dim; d += 2 * LANES) {
            lanes a, b;
            load(&a, q + d);
            load(&b, keys + j * dim + d);
            even += a * b;
            load(&a, q + d + LANES);
            load(&b, keys + j * dim + d + LANES);
            odd += a * b;
        }
        if (d < dim) {
            lanes a, b;
            load(&a, q + d);
            load(&b, keys + j * dim + d);
            even += a * b;
        }
        even += odd;
        scores[j] = scale * sum_of(&even);
        top = scores[j] > top ? scores[j] : top;
    }
    return top;
}

/* scores to exp(score - top), zero beyond count up to whole lanes; returns their sum. A NaN score stays one. */
INLINE float weigh(float *restrict scores, size_t count, float top)
{
    lanes total = {0};
    for (size_t j = count; j % LANES; j++)
        scores[j] = -INFINITY;
    for (size_t j = 0; j < count; j += LANES) {
        lanes x;
        load(&x, scores + j);
        x -= top;
        const whole kept = ~(x < -87.0f);
        x = (lanes)((whole)x & kept); /* what vanishes must not overflow on the way */
        exp_of(&x);
        x = (lanes)((whole)x & kept);
        memcpy(scores + j, &x, sizeof x);
        total += x;
    }
    return sum_of(&total);
}

/* out = sum of weight_j * value_j / total for `groups` * LANES columns, whose sums are registers. */
INLINE void mix_columns(const float *restrict weights, const float *restrict values, size_t dim, size_t count,
                        float total, float *restrict out, const size_t groups)
{
    lanes sums[GROUPS];
    for (size_t g = 0; g < groups; g++)
        sums[g] = (lanes){0};
    for (size_t j = 0; j < count; j++)
        for (size_t g = 0; g < groups; g++) {
            lanes v;
            load(&v, values + j * dim + g * LANES);
            sums[g] += v * weights[j];
        }
    for (size_t g = 0; g < groups; g++) {
        sums[g] /= total;
        memcpy(out + g * LANES, &sums[g], sizeof sums[g]);
    }
}

INLINE void mix(const float *weights, const float *values, size_t dim, size_t count, float total, float *out)
{
    size_t d = 0;
    for (; d + GROUPS * LANES <= dim; d += GROUPS * LANES)
        mix_columns(weights, values + d, dim, count, total, out + d, GROUPS);
    for (; d < dim; d += LANES)
        mix_columns(weights, values + d, dim, count, total, out + d, 1);
}

FOR_EVERY_CPU static void attend_row(const float *q, const float *keys, const float *values, size_t dim, size_t count,
                                     float scale, float *scores, float *out)
{
    const float top = score(q, keys, dim, count, scale, scores);
    mix(scores, values, dim, count, weigh(scores, count, top), out);
}

/* Rows [rows, kv_heads, dim] at `stride` floats a row into [kv_heads, length, dim] at position start. */
static void store(const float *rows_in, size_t stride, float *cache, size_t rows, size_t kv_heads, size_t dim,
                  size_t length, size_t start)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t h = 0; h < kv_heads; h++)
            memcpy(cache + (h * length + start + r) * dim, rows_in + r * stride + h * dim, dim * sizeof(float));
}

/* q [rows, heads, dim], k and v [rows, kv_heads, dim], each with its own row stride; keys and values
 * [kv_heads, length, dim]; out [rows, heads, dim] without gaps. start + rows <= length. */
void dspark_attention(const float *q, const float *k, const float *v, float *keys, float *values, float *out,
                      float *scratch, size_t q_stride, size_t k_stride, size_t v_stride, size_t rows, size_t heads,
                      size_t kv_heads, size_t dim, size_t length, size_t start, int threads)
{
    const size_t room = (start + rows + LANES - 1) / LANES * LANES;
    const float scale = 1.0f / sqrtf((float)dim);
    store(k, k_stride, keys, rows, kv_heads, dim, length, start);
    store(v, v_stride, values, rows, kv_heads, dim, length, start);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * heads * dim * (start + rows) > SMALL)
    for (size_t task = 0; task < rows * heads; task++) {
        const size_t h = task / rows, r = task % rows, place = h / (heads / kv_heads) * length * dim;
        attend_row(q + r * q_stride + h * dim, keys + place, values + place, dim, start + r + 1, scale,
                   scratch + room * (size_t)omp_get_thread_num(), out + (r * heads + h) * dim);
    }
}
