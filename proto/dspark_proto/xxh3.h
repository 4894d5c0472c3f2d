/* XXH3-64 with seed 0 and the default secret, over bytes that come in pieces.
 *
 * Written from the XXH3 specification (doc/xxhash_spec.md of xxHash 0.8); the tests compare it with the xxhash wheel. It is
 * here so that a body is hashed while it is in the first-level cache, in the pass that copies it.
 */
#ifndef DSPARK_XXH3_H
#define DSPARK_XXH3_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define XXH3_STRIPE 64
#define XXH3_STRIPES_A_BLOCK 16
#define XXH3_SHORT 240

static const uint8_t xxh3_secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define PRIME32_1 0x9e3779b1u
#define PRIME32_2 0x85ebca77u
#define PRIME32_3 0xc2b2ae3du
#define PRIME64_1 0x9e3779b185ebca87ull
#define PRIME64_2 0xc2b2ae3d27d4eb4full
#define PRIME64_3 0x165667b19e3779f9ull
#define PRIME64_4 0x85ebca77c2b2ae63ull
#define PRIME64_5 0x27d4eb2f165667c5ull
#define PRIME_MX1 0x165667919e3779f9ull
#define PRIME_MX2 0x9fb21c651e98df25ull

static uint32_t xxh3_32(const uint8_t *at) {
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint64_t xxh3_64(const uint8_t *at) { return xxh3_32(at) | (uint64_t)xxh3_32(at + 4) << 32; }

static uint64_t xxh3_fold(uint64_t a, uint64_t b) {
    __extension__ typedef unsigned __int128 wide;
    wide product = (wide)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t xxh3_avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * PRIME_MX1;
    return hash ^ hash >> 32;
}

static uint64_t xxh3_avalanche_64(uint64_t hash) {
    hash = (hash ^ hash >> 33) * PRIME64_2;
    hash = (hash ^ hash >> 29) * PRIME64_3;
    return hash ^ hash >> 32;
}

static uint64_t xxh3_rotated(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

static uint64_t xxh3_mix(const uint8_t *at, int secret) {
    return xxh3_fold(xxh3_64(at) ^ xxh3_64(xxh3_secret + secret), xxh3_64(at + 8) ^ xxh3_64(xxh3_secret + secret + 8));
}

/* 0 to 16 bytes. */
static uint64_t xxh3_tiny(const uint8_t *at, size_t length) {
    if (length > 8) {
        uint64_t low = xxh3_64(at) ^ xxh3_64(xxh3_secret + 24) ^ xxh3_64(xxh3_secret + 32);
        uint64_t high = xxh3_64(at + length - 8) ^ xxh3_64(xxh3_secret + 40) ^ xxh3_64(xxh3_secret + 48);
        return xxh3_avalanche(length + __builtin_bswap64(low) + high + xxh3_fold(low, high));
    }
    if (length >= 4) {
        uint64_t value = xxh3_32(at + length - 4) + ((uint64_t)xxh3_32(at) << 32);
        value ^= xxh3_64(xxh3_secret + 8) ^ xxh3_64(xxh3_secret + 16);
        value ^= xxh3_rotated(value, 49) ^ xxh3_rotated(value, 24);
        value *= PRIME_MX2;
        value ^= (value >> 35) + length;
        value *= PRIME_MX2;
        return value ^ value >> 28;
    }
    if (length) {
        uint32_t value = (uint32_t)at[0] << 16 | (uint32_t)at[length >> 1] << 24 | at[length - 1] | (uint32_t)length << 8;
        return xxh3_avalanche_64(value ^ xxh3_32(xxh3_secret) ^ xxh3_32(xxh3_secret + 4));
    }
    return xxh3_avalanche_64(xxh3_64(xxh3_secret + 56) ^ xxh3_64(xxh3_secret + 64));
}

/* Up to XXH3_SHORT bytes. */
static uint64_t xxh3_short(const uint8_t *at, size_t length) {
    if (length <= 16)
        return xxh3_tiny(at, length);
    uint64_t hash = length * PRIME64_1;
    if (length <= 128) {
        for (int pair = (int)(length - 1) / 32; pair >= 0; pair--)
            hash += xxh3_mix(at + 16 * pair, 32 * pair) + xxh3_mix(at + length - 16 * (pair + 1), 32 * pair + 16);
        return xxh3_avalanche(hash);
    }
    int rounds = (int)(length / 16);
    for (int i = 0; i < 8; i++)
        hash += xxh3_mix(at + 16 * i, 16 * i);
    hash = xxh3_avalanche(hash);
    for (int i = 8; i < rounds; i++)
        hash += xxh3_mix(at + 16 * i, 16 * (i - 8) + 3);
    return xxh3_avalanche(hash + xxh3_mix(at + length - 16, 136 - 17));
}

/* ``count`` stripes, of which the first is number ``stripe`` of its block. */
typedef void (*xxh3_accumulator)(uint64_t *sums, const uint8_t *at, size_t stripe, size_t count);

#if defined(__x86_64__)

__attribute__((target("avx2"))) static __m256i xxh3_scrambled_avx2(__m256i sum, const uint8_t *secret) {
    __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    sum = _mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47));
    sum = _mm256_xor_si256(sum, _mm256_loadu_si256((const __m256i *)secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(sum, prime), _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"))) static void xxh3_accumulate_avx2(uint64_t *sums, const uint8_t *at, size_t stripe,
                                                                 size_t count) {
    __m256i low = _mm256_loadu_si256((const __m256i *)sums), high = _mm256_loadu_si256((const __m256i *)sums + 1);
    while (count) {
        size_t run = XXH3_STRIPES_A_BLOCK - stripe < count ? XXH3_STRIPES_A_BLOCK - stripe : count;
        const uint8_t *secret = xxh3_secret + 8 * stripe;
        stripe += run, count -= run;
#pragma GCC unroll 4
        for (; run; run--, at += XXH3_STRIPE, secret += 8) {
            __m256i data = _mm256_loadu_si256((const __m256i *)at), more = _mm256_loadu_si256((const __m256i *)at + 1);
            __m256i key = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)secret));
            __m256i other = _mm256_xor_si256(more, _mm256_loadu_si256((const __m256i *)secret + 1));
            __builtin_prefetch(at + 512);
            low = _mm256_add_epi64(low, _mm256_shuffle_epi32(data, 0x4e));
            high = _mm256_add_epi64(high, _mm256_shuffle_epi32(more, 0x4e));
            low = _mm256_add_epi64(low, _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32)));
            high = _mm256_add_epi64(high, _mm256_mul_epu32(other, _mm256_srli_epi64(other, 32)));
        }
        if (stripe == XXH3_STRIPES_A_BLOCK) {
            low = xxh3_scrambled_avx2(low, xxh3_secret + 128);
            high = xxh3_scrambled_avx2(high, xxh3_secret + 160);
            stripe = 0;
        }
    }
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)sums + 1, high);
}

#endif

static void xxh3_add_stripe(uint64_t *sums, const uint8_t *at, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        uint64_t value = xxh3_64(at + 8 * i), key = value ^ xxh3_64(secret + 8 * i);
        sums[i ^ 1] += value;
        sums[i] += (key & 0xffffffffu) * (key >> 32);
    }
}

static void xxh3_accumulate_plainly(uint64_t *sums, const uint8_t *at, size_t stripe, size_t count) {
    for (; count; count--, at += XXH3_STRIPE) {
        xxh3_add_stripe(sums, at, xxh3_secret + 8 * stripe);
        if (++stripe < XXH3_STRIPES_A_BLOCK)
            continue;
        for (int i = 0; i < 8; i++)
            sums[i] = (sums[i] ^ sums[i] >> 47 ^ xxh3_64(xxh3_secret + 128 + 8 * i)) * PRIME32_1;
        stripe = 0;
    }
}

static xxh3_accumulator xxh3_accumulate = xxh3_accumulate_plainly;

static void xxh3_choose(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        xxh3_accumulate = xxh3_accumulate_avx2;
#endif
}

/* A stripe is taken when a byte is known to follow it, for the last 64 bytes are hashed in another way. ``tail`` has the
 * bytes that wait, ``before`` the stripe before them, ``first`` the beginning, in case that it stays short. */
typedef struct {
    uint64_t sums[8], length;
    size_t stripes, waiting;
    uint8_t before[XXH3_STRIPE], tail[XXH3_STRIPE], first[XXH3_SHORT];
} Xxh3;

static void xxh3_begin(Xxh3 *state) {
    static const uint64_t sums[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                     PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(state->sums, sums, sizeof sums);
    state->length = state->stripes = state->waiting = 0;
}

static void xxh3_take(Xxh3 *state, const uint8_t *at, size_t count) {
    xxh3_accumulate(state->sums, at, state->stripes, count);
    state->stripes = (state->stripes + count) % XXH3_STRIPES_A_BLOCK;
}

static void xxh3_update(Xxh3 *state, const uint8_t *at, size_t count) {
    if (state->length < XXH3_SHORT) {
        size_t room = XXH3_SHORT - (size_t)state->length;
        memcpy(state->first + state->length, at, count < room ? count : room);
    }
    state->length += count;
    if (state->waiting) {
        size_t fill = XXH3_STRIPE - state->waiting;
        if (count <= fill) {
            memcpy(state->tail + state->waiting, at, count);
            state->waiting += count;
            return;
        }
        memcpy(state->tail + state->waiting, at, fill);
        xxh3_take(state, state->tail, 1);
        memcpy(state->before, state->tail, XXH3_STRIPE);
        at += fill, count -= fill;
    }
    size_t whole = count ? (count - 1) / XXH3_STRIPE : 0;
    if (whole) {
        xxh3_take(state, at, whole);
        at += whole * XXH3_STRIPE, count -= whole * XXH3_STRIPE;
        memcpy(state->before, at - XXH3_STRIPE, XXH3_STRIPE);
    }
    memcpy(state->tail, at, count);
    state->waiting = count;
}

static uint64_t xxh3_end(const Xxh3 *state) {
    if (state->length <= XXH3_SHORT)
        return xxh3_short(state->first, (size_t)state->length);
    uint8_t last[XXH3_STRIPE];
    uint64_t sums[8];
    memcpy(sums, state->sums, sizeof sums);
    memcpy(last, state->before + state->waiting, XXH3_STRIPE - state->waiting);
    memcpy(last + XXH3_STRIPE - state->waiting, state->tail, state->waiting);
    xxh3_add_stripe(sums, last, xxh3_secret + 192 - XXH3_STRIPE - 7);
    uint64_t hash = state->length * PRIME64_1;
    for (int i = 0; i < 4; i++)
        hash += xxh3_fold(sums[2 * i] ^ xxh3_64(xxh3_secret + 11 + 16 * i),
                          sums[2 * i + 1] ^ xxh3_64(xxh3_secret + 11 + 16 * i + 8));
    return xxh3_avalanche(hash);
}

#endif
