/* What the kernels of rows share: how a function is exported and compiled for newer CPUs, and floats as integers. */
#ifndef DSPARK_ROWS_H
#define DSPARK_ROWS_H

#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* One binary for every x86-64: the loader takes the AVX2 clone where the CPU has it. It needs glibc's ifunc. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(DSPARK_NO_CLONES)
#define VECTOR __attribute__((target_clones("avx2", "default")))
#else
#define VECTOR
#endif

enum {
    REFUSED = -1,
    BLOCK = 256 /* elements that a vector loop hands to the next loop through the first-level cache */
};

#define RANK_OF_MINUS_INF (-0x7F800001)
#define RANK_OF_INF 0x7F800000

/* An integer that orders as the value does; NaN is above +inf or below -inf. -0.0 + 0.0 is 0.0: the two zeros
 * are one value. */
static inline int32_t rank_of(float value)
{
    int32_t bits;
    value += 0.0f;
    memcpy(&bits, &value, sizeof bits);
    return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

#endif
