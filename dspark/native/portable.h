/* What the decode kernels share: vectors of eight floats, and one function compiled for old and new x86-64 CPUs. */
#ifndef DSPARK_PORTABLE_H
#define DSPARK_PORTABLE_H

#define LANES 8
/* Fewer multiply-adds than this are not worth waking the team. */
#define SMALL (1u << 16)

#if defined(__x86_64__) && defined(__gnu_linux__)
#define FOR_EVERY_CPU __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FOR_EVERY_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));

#endif
