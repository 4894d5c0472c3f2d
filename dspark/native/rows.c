/* Kernels of proposal rows: what numpy does in many passes over a whole vocabulary, done here in one or two.
 *
 * Purpose: speed, and nothing else. Every function computes what the numpy code of dspark/apportionment.py,
 * dspark/dyadic.py or dspark/dense.py computes, bit for bit; that code is the fallback and the judge.
 *
 * Invariants:
 *
 * - A function answers, or refuses with -1. It never explains: the caller asks numpy why, so that there is one
 *   set of error messages. Outputs are meaningless after a refusal.
 * - Nothing is allocated and nothing is kept: the caller passes outputs and scratch, and the sizes that are
 *   written below with every function are the caller's promise. Stack use is below 32 KiB.
 * - Time is linear in the input whatever the values are.
 * - Every float operation is rounded once: no multiplication is fused with an addition and no sum of floats is
 *   reordered (the build sets -ffp-contract=off, and there is no -ffast-math). So the AVX2 clone and the default
 *   one agree, and so do machines.
 * - Foreign floats are judged by their bits before they are converted: no conversion can overflow, and a
 *   thread that flushes subnormals to zero still refuses them. Each one is read once.
 *
 * Called through ctypes by dspark/native/kernels.py only. There is no Python.h here: plain C functions in a
 * shared object.
 */

#include "rows.h"

/* Raised with every change of a signature: a library that was built before such a change is not used. */
#define INTERFACE 2

enum {
    GROUP = 32,      /* values whose largest stands for them in the first pass of top-k */
    SHORT = 1024,    /* longest row whose remainders are all candidates; longer ones go through buckets */
    BUCKETS = 1024,  /* equal steps of a remainder in [0, 1) */
    LANES = 4        /* histograms side by side, so that equal neighbours do not wait for each other */
};

EXPORT int64_t dspark_rows_interface(void) { return INTERFACE; }

/* --- selection ------------------------------------------------------------------------------------------ */

/* All bits in which two of the keys differ. */
VECTOR static uint64_t differing(const uint64_t *keys, int64_t length)
{
    uint64_t bits = 0;
    for (int64_t i = 1; i < length; i++)
        bits |= keys[i] ^ keys[0];
    return bits;
}

/* The wanted-th largest of keys[0..length), 1 <= wanted <= length, by the bytes in which keys differ, highest
 * first. Destroys keys. *wanted becomes how many of the keys that equal the answer belong to the largest. */
static uint64_t nth_largest(uint64_t *keys, int64_t length, int64_t *wanted)
{
    for (;;) {
        const uint64_t bits = differing(keys, length);
        if (bits == 0)
            return keys[0];
        const int shift = (63 - __builtin_clzll(bits)) & ~7;
        int64_t bins[256] = {0};
        int digit = 255;
        int64_t kept = 0;
        for (int64_t i = 0; i < length; i++)
            bins[(keys[i] >> shift) & 255]++;
        while (bins[digit] < *wanted)
            *wanted -= bins[digit--];
        for (int64_t i = 0; i < length; i++)
            if ((int)((keys[i] >> shift) & 255) == digit)
                keys[kept++] = keys[i];
        length = kept;
    }
}

/* --- top-k ---------------------------------------------------------------------------------------------- */

/* A key that orders as (rank, lower index first); both fit, so the index can be read back. */
static inline uint64_t key_of(int32_t rank, int64_t index)
{
    return (uint64_t)((uint32_t)rank ^ 0x80000000u) << 32 | (uint32_t)~(uint32_t)index;
}

static inline int32_t key_rank(uint64_t key) { return (int32_t)((uint32_t)(key >> 32) ^ 0x80000000u); }

static inline int64_t key_index(uint64_t key) { return (int64_t)(uint32_t)~(uint32_t)key; }

/* The key of the largest rank of each whole group of GROUP values. Returns 0, or -1 for NaN anywhere. */
VECTOR static int64_t find_peaks(const float *values, int64_t length, uint64_t *peaks)
{
    int nan = 0;
    for (int64_t group = 0; group < length / GROUP; group++) {
        int32_t peak = INT32_MIN;
        for (int j = 0; j < GROUP; j++) {
            const int32_t rank = rank_of(values[group * GROUP + j]);
            nan |= (rank > RANK_OF_INF) | (rank < RANK_OF_MINUS_INF);
            peak = rank > peak ? rank : peak;
        }
        peaks[group] = key_of(peak, group);
    }
    for (int64_t i = length - length % GROUP; i < length; i++)
        nan |= values[i] != values[i];
    return nan ? REFUSED : 0;
}

typedef struct {
    uint64_t *keys;
    int64_t held;
    int64_t equal; /* how many of them sit at the bar */
} Candidates;

/* Add values[first..stop) that can belong to the `wanted` largest: those above the bar, and the first at it. */
static void add_candidates(const float *values, int64_t first, int64_t stop, int32_t bar, int64_t wanted,
                           Candidates *candidates)
{
    for (int64_t i = first; i < stop; i++) {
        const int32_t rank = rank_of(values[i]);
        const int at_bar = rank == bar && bar > RANK_OF_MINUS_INF && candidates->equal < wanted;
        if (rank > bar || at_bar) {
            candidates->keys[candidates->held++] = key_of(rank, i);
            candidates->equal += at_bar;
        }
    }
}

/* Keep the wanted largest of keys[0..length), in their order; length > wanted. scratch: length entries. */
static int64_t keep_largest(uint64_t *keys, int64_t length, int64_t wanted, uint64_t *scratch)
{
    int64_t kept = 0, left = wanted;
    memcpy(scratch, keys, (size_t)length * sizeof *keys);
    const uint64_t last = nth_largest(scratch, length, &left);
    for (int64_t i = 0; i < length; i++)
        if (keys[i] >= last)
            keys[kept++] = keys[i];
    return kept;
}

/* One row of dspark_top_rows.
 *
 * The bar is the wanted-th largest peak: `wanted` groups reach it, so nothing below it is among the largest.
 * Fewer than `wanted` groups hold a value above it, and of those at it only the first `wanted` are taken: with
 * the last, incomplete group there are at most wanted * (GROUP + 1) candidates. */
static int64_t top_row(const float *values, int64_t length, int64_t wanted, uint64_t *scratch, int64_t room,
                       int64_t *chosen)
{
    const int64_t groups = length / GROUP;
    uint64_t *peaks = scratch, *keys = scratch + room, *spare = scratch + 2 * room;
    Candidates candidates = {keys, 0, 0};
    int64_t left = wanted;
    if (find_peaks(values, length, peaks) < 0)
        return REFUSED;
    memcpy(spare, peaks, (size_t)groups * sizeof *peaks);
    const int32_t bar = key_rank(nth_largest(spare, groups, &left));
    for (int64_t group = 0; group < groups; group++)
        if (key_rank(peaks[group]) >= bar)
            add_candidates(values, group * GROUP, (group + 1) * GROUP, bar, wanted, &candidates);
    add_candidates(values, groups * GROUP, length, bar, wanted, &candidates);
    if (candidates.held > wanted)
        candidates.held = keep_largest(keys, candidates.held, wanted, spare);
    for (int64_t i = 0; i < candidates.held; i++)
        chosen[i] = key_index(keys[i]);
    return candidates.held;
}

/* Ascending indices of the `wanted` largest values of each row, ties to the lowest index, -inf left out.
 *
 * values [rows, length]; wanted >= 1, wanted * (GROUP + 1) <= length < 2**31. scratch: 3 * room entries, room at
 * least length / GROUP and wanted * (GROUP + 1). Out: found [rows] says how many of chosen [rows, wanted] are
 * set. Returns 0, or -1 for NaN and for a room that is too small. */
EXPORT int64_t dspark_top_rows(const float *values, int64_t rows, int64_t length, int64_t wanted,
                               uint64_t *scratch, int64_t room, int64_t *chosen, int64_t *found)
{
    if (wanted < 1 || wanted > length / (GROUP + 1) || room < length / GROUP || room < wanted * (GROUP + 1))
        return REFUSED;
    for (int64_t row = 0; row < rows; row++) {
        found[row] = top_row(values + row * length, length, wanted, scratch, room, chosen + row * wanted);
        if (found[row] < 0)
            return REFUSED;
    }
    return 0;
}

/* --- allocation ----------------------------------------------------------------------------------------- */

/* weight * mass; adding 0.0 turns -0.0 into 0.0, so that the bits of a remainder order as its value does. */
static inline double scale(double weight, double mass) { return weight * mass + 0.0; }

/* What the floor leaves of a scaled weight in [0, 2**29 + 1]: exact, in [0, 1). */
static inline double remainder_of(double scaled) { return scaled - (double)(int32_t)scaled; }

static uint64_t remainder_key(double weight, double mass)
{
    const double remainder = remainder_of(scale(weight, mass));
    uint64_t key;
    memcpy(&key, &remainder, sizeof key);
    return key;
}

typedef struct {
    int64_t floors;    /* sum of the floors */
    int64_t fractions; /* how many weights leave a remainder */
    int positive;      /* whether a weight is above zero */
} Split;

/* counts[i] = floor(weights[i] * mass). Returns 0, or -1 for a weight that is NaN, negative or too large. */
VECTOR static int64_t take_floors(const double *weights, int64_t length, double mass, int64_t *counts,
                                  Split *split)
{
    int64_t floors = 0, fractions = 0;
    int positive = 0;
    for (int64_t first = 0; first < length; first += BLOCK) {
        const int block = (int)(length - first < BLOCK ? length - first : BLOCK);
        double scaled[BLOCK];
        int outside = 0;
        for (int j = 0; j < block; j++) {
            scaled[j] = scale(weights[first + j], mass);
            outside |= !((scaled[j] >= 0.0) & (scaled[j] <= mass + 1.0));
            positive |= scaled[j] > 0.0;
        }
        if (outside)
            return REFUSED;
        for (int j = 0; j < block; j++) {
            const int32_t floor = (int32_t)scaled[j];
            counts[first + j] = floor;
            floors += floor;
            fractions += (double)floor != scaled[j];
        }
    }
    *split = (Split){floors, fractions, positive};
    return 0;
}

/* Bucket of each remainder of up to BLOCK weights: a monotone function of it. */
static inline void find_buckets(const double *weights, int block, double mass, int32_t *buckets)
{
    for (int j = 0; j < block; j++)
        buckets[j] = (int32_t)(remainder_of(scale(weights[j], mass)) * BUCKETS);
}

/* The bucket that holds the wanted-th largest remainder; *wanted becomes its rank inside that bucket. */
VECTOR static int cut_bucket(const double *weights, int64_t length, double mass, int64_t *wanted)
{
    int32_t lanes[LANES][BUCKETS] = {{0}};
    for (int64_t first = 0; first < length; first += BLOCK) {
        const int block = (int)(length - first < BLOCK ? length - first : BLOCK);
        int32_t buckets[BLOCK];
        find_buckets(weights + first, block, mass, buckets);
        for (int j = 0; j < block; j++)
            lanes[j % LANES][buckets[j]]++;
    }
    for (int bucket = BUCKETS - 1;; bucket--) {
        int64_t inside = 0;
        for (int lane = 0; lane < LANES; lane++)
            inside += lanes[lane][bucket];
        if (inside >= *wanted)
            return bucket;
        *wanted -= inside;
    }
}

/* One more ticket to every remainder above the cut bucket; places[0..result) are those inside it. */
VECTOR static int64_t raise_above(const double *weights, int64_t length, double mass, int cut, int64_t *counts,
                                  int32_t *places)
{
    int64_t candidates = 0;
    for (int64_t first = 0; first < length; first += BLOCK) {
        const int block = (int)(length - first < BLOCK ? length - first : BLOCK);
        int32_t buckets[BLOCK];
        int inside = 0;
        find_buckets(weights + first, block, mass, buckets);
        for (int j = 0; j < block; j++) {
            counts[first + j] += buckets[j] > cut;
            inside |= buckets[j] == cut;
        }
        for (int j = 0; inside && j < block; j++)
            if (buckets[j] == cut)
                places[candidates++] = (int32_t)(first + j);
    }
    return candidates;
}

/* One more ticket to the `wanted` largest remainders, ties to the lowest index; 1 <= wanted <= length.
 * keys, places: scratch of length entries each. */
static void raise_largest(const double *weights, int64_t length, double mass, int64_t wanted, int64_t *counts,
                          uint64_t *keys, int32_t *places)
{
    int64_t candidates = length;
    if (length > SHORT) {
        const int cut = cut_bucket(weights, length, mass, &wanted);
        candidates = raise_above(weights, length, mass, cut, counts, places);
    } else {
        for (int64_t i = 0; i < length; i++)
            places[i] = (int32_t)i;
    }
    for (int64_t i = 0; i < candidates; i++)
        keys[i] = remainder_key(weights[places[i]], mass);
    const uint64_t last = nth_largest(keys, candidates, &wanted);
    for (int64_t i = 0; i < candidates; i++) {
        const uint64_t key = remainder_key(weights[places[i]], mass);
        if (key > last || (key == last && wanted-- > 0))
            counts[places[i]]++;
    }
}

/* Counts with sum `mass` for each row of normalised weights: floors, then largest remainders.
 *
 * weights, counts [rows, length]; 1 <= length < 2**31; 1 <= mass <= 2**29. keys, places: scratch of length
 * entries. Returns 0, or -1 for a row that numpy would refuse. */
EXPORT int64_t dspark_allocate_rows(const double *weights, int64_t rows, int64_t length, int64_t mass,
                                    int64_t *counts, uint64_t *keys, int32_t *places)
{
    for (int64_t row = 0; row < rows; row++, weights += length, counts += length) {
        Split split;
        if (take_floors(weights, length, (double)mass, counts, &split) < 0 || !split.positive)
            return REFUSED;
        const int64_t leftover = mass - split.floors;
        if (leftover < 0 || leftover > split.fractions)
            return REFUSED;
        if (leftover > 0)
            raise_largest(weights, length, (double)mass, leftover, counts, keys, places);
    }
    return 0;
}

/* Move the nonzero counts to the front, in order; places[0..result) are their indices, result <= length. */
EXPORT int64_t dspark_drop_zeros(int64_t *counts, int64_t length, int32_t *places)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < length; i++) {
        const int64_t count = counts[i];
        counts[kept] = count;
        places[kept] = (int32_t)i;
        kept += count != 0;
    }
    return kept;
}

/* --- rows on the wire ----------------------------------------------------------------------------------- */

#define ONE_BITS 0x3F800000u    /* 1.0f */
#define TICKET_BITS 0x33800000u /* 2**-24, the smallest value of a count */
#define MASS (1 << 24)

/* The count of a wire value, -1 for a value that is no count / 2**24. Zero, or a pattern from 2**-24 to 1:
 * that shuts out -0.0, negative values, NaN, infinities and subnormals before any float operation. Masks instead
 * of branches, so that a vector loop can do it: `known` and `fine` are all ones or all zeros. */
static inline int32_t wire_count(const float *q)
{
    uint32_t bits;
    float value;
    memcpy(&bits, q, sizeof bits);
    const uint32_t known = -(uint32_t)((bits == 0) | (bits - TICKET_BITS <= ONE_BITS - TICKET_BITS));
    bits &= known;
    memcpy(&value, &bits, sizeof value);
    const float scaled = value * (float)MASS;
    const int32_t count = (int32_t)scaled;
    const uint32_t fine = known & -(uint32_t)((float)count == scaled);
    return (int32_t)((uint32_t)count | ~fine);
}

/* One row of dspark_sparse_reply. */
static int sparse_row_holds(int32_t token, int32_t entries, const int32_t *ids, const float *q, int64_t support,
                            int64_t vocab, int32_t *ids_out, int64_t *counts_out)
{
    int64_t sum = 0, before = -1;
    int drafted = 0;
    if (entries < 1 || entries > support)
        return 0;
    for (int64_t j = 0; j < support; j++) {
        const int32_t id = ids[j], count = wire_count(q + j);
        ids_out[j] = id;
        counts_out[j] = count;
        if (j >= entries) {
            if (id != 0 || count != 0)
                return 0;
        } else {
            if (count < 1 || id <= before || id >= vocab)
                return 0;
            before = id;
            sum += count;
            drafted |= id == token;
        }
    }
    return drafted && sum == MASS;
}

/* Check a sparse reply and copy it out.
 *
 * tokens, entries [depth]; ids, q [depth, support]. Out: ids_out, counts_out [depth, support].
 * Returns 0, or -1 for a reply that numpy would refuse. */
EXPORT int64_t dspark_sparse_reply(const int32_t *tokens, const int32_t *entries, const int32_t *ids,
                                   const float *q, int64_t depth, int64_t support, int64_t vocab,
                                   int32_t *ids_out, int64_t *counts_out)
{
    for (int64_t row = 0; row < depth; row++) {
        const int64_t at = row * support;
        if (!sparse_row_holds(tokens[row], entries[row], ids + at, q + at, support, vocab, ids_out + at,
                              counts_out + at))
            return REFUSED;
    }
    return 0;
}

/* Check one dense row and copy its nonzero entries out.
 *
 * q [width], 1 <= vocab <= width, vocab < 2**31: what lies beyond the vocabulary must be zero. Out: ids, counts
 * of vocab entries. Returns how many of them are set, or -1 for a row that numpy would refuse. */
VECTOR EXPORT int64_t dspark_dense_row(const float *q, int64_t width, int64_t vocab, int64_t token,
                                       int32_t *ids, int64_t *counts)
{
    int64_t kept = 0, sum = 0, drafted = 0;
    uint32_t padding = 0;
    for (int64_t first = 0; first < vocab; first += BLOCK) {
        const int block = (int)(vocab - first < BLOCK ? vocab - first : BLOCK);
        int32_t read[BLOCK], faults = 0;
        for (int j = 0; j < block; j++) {
            read[j] = wire_count(q + first + j);
            faults |= read[j];
        }
        if (faults < 0)
            return REFUSED;
        for (int j = 0; j < block; j++)
            sum += read[j];
        if (token >= first && token < first + block)
            drafted = read[token - first];
        for (int j = 0; j < block; j++) {
            ids[kept] = (int32_t)(first + j);
            counts[kept] = read[j];
            kept += read[j] != 0;
        }
    }
    for (int64_t i = vocab; i < width; i++) {
        uint32_t bits;
        memcpy(&bits, q + i, sizeof bits);
        padding |= bits;
    }
    return padding == 0 && drafted > 0 && sum == MASS ? kept : REFUSED;
}

/* Write one dense row: count / 2**24 at every id, exact, and zero everywhere else.
 *
 * ids, counts [entries]; q [width], vocab <= width. Returns 0, or -1 for an id beyond the vocabulary. */
EXPORT int64_t dspark_write_dense_row(const int32_t *ids, const int64_t *counts, int64_t entries, int64_t vocab,
                                      float *q, int64_t width)
{
    memset(q, 0, (size_t)width * sizeof *q);
    for (int64_t i = 0; i < entries; i++) {
        if (ids[i] < 0 || ids[i] >= vocab)
            return REFUSED;
        q[ids[i]] = (float)counts[i] * (1.0f / MASS);
    }
    return 0;
}

/* --- drawing -------------------------------------------------------------------------------------------- */

/* The first index whose cumulative count is above `uniform`, or -1 when the counts do not reach it. */
VECTOR EXPORT int64_t dspark_draw(const int64_t *counts, int64_t length, int64_t uniform)
{
    int64_t reached = 0;
    for (int64_t first = 0; first < length; first += BLOCK) {
        const int64_t stop = length - first < BLOCK ? length : first + BLOCK;
        int64_t inside = 0;
        for (int64_t i = first; i < stop; i++)
            inside += counts[i];
        if (reached + inside > uniform) {
            for (int64_t i = first; i < stop; i++) {
                reached += counts[i];
                if (reached > uniform)
                    return i;
            }
        }
        reached += inside;
    }
    return REFUSED;
}
