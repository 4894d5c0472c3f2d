/* Kernels of target rows: from float32 logits to tickets in three passes, and the exponential function under them.
 *
 * Purpose: speed, and nothing else. dspark_exponentials computes what dspark/exponential.py computes, and
 * dspark_target_row what the numpy code of dspark/processors.py and dspark/tickets.py does, bit for bit; that code
 * is the fallback and the judge. All that rows.c says about refusals, memory and rounding holds here too.
 *
 * Invariants:
 *
 * - No libm: its exp has other bits on other machines. Every operation here is one that IEEE 754 rounds once.
 * - Weights are added in the order of numpy's pairwise sum, which depends on nothing but how many there are;
 *   dspark/collectives.py repeats the same tree over ranks.
 * - From the weights on there are only integers.
 *
 * Called through ctypes by dspark/native/kernels.py only.
 */

#include "rows.h"

/* --- exponentials --------------------------------------------------------------------------------------- */

/* The constants of dspark/exponential.py. */
#define LOWEST -708.0
#define LOG2_E 0x1.71547652b82fep+0
#define LN2_HIGH 0x1.62e42feep-1
#define LN2_LOW 0x1.a39ef35793c76p-33
#define TO_INTEGER 0x1.8p+52

static inline uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* exp(x) for x <= 0, within 1.01 ulp; 0 below LOWEST. A NaN stays one.
 *
 * x = whole * ln 2 + rest; the sum x * LOG2_E + TO_INTEGER is rounded to an integer and shows it in its lowest bits,
 * from where it goes into the exponent of the series. Below LOWEST all that is garbage, and is masked. */
static inline double exponential(double x)
{
    const double shifted = x * LOG2_E + TO_INTEGER;
    const double whole = shifted - TO_INTEGER;
    const double rest = (x - whole * LN2_HIGH) - whole * LN2_LOW;
    const double square = rest * rest, fourth = square * square;
    /* The Taylor series behind 1 + rest, in pairs of terms: short chains, for which an operation seldom waits. */
    const double from_2 = 1.0 / 2.0 + rest * (1.0 / 6.0);
    const double from_4 = 1.0 / 24.0 + rest * (1.0 / 120.0);
    const double from_6 = 1.0 / 720.0 + rest * (1.0 / 5040.0);
    const double from_8 = 1.0 / 40320.0 + rest * (1.0 / 362880.0);
    const double from_10 = 1.0 / 3628800.0 + rest * (1.0 / 39916800.0);
    const double from_12 = 1.0 / 479001600.0 + rest * (1.0 / 6227020800.0);
    const double upper = (from_6 + square * from_8) + fourth * (from_10 + square * from_12);
    const double series = 1.0 + (rest + square * ((from_2 + square * from_4) + fourth * upper));
    const uint64_t kept = (uint64_t)(x < LOWEST) - 1;
    const uint64_t bits = (bits_of(series) + (bits_of(shifted) << 52)) & kept;
    double result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* values[i] = exp(values[i]) for values <= 0. Returns 0. */
VECTOR EXPORT int64_t dspark_exponentials(double *values, int64_t length)
{
    for (int64_t i = 0; i < length; i++)
        values[i] = exponential(values[i]);
    return 0;
}

/* --- weights -------------------------------------------------------------------------------------------- */

enum {
    CHUNK = 2048, /* most weights that are made at once: they stay in the first-level cache until they are added */
    LEAF = 128,   /* most values that numpy's pairwise sum adds without halving them */
    LANES = 8     /* sums that it keeps side by side inside a leaf */
};

/* Where numpy's pairwise sum halves a vector. */
static inline int64_t left_half(int64_t length) { return length / 2 - length / 2 % LANES; }

/* The sum of up to LEAF values, in numpy's order. */
VECTOR static double leaf_sum(const double *values, int64_t length)
{
    double lanes[LANES], sum = 0.0;
    int64_t i = 0;
    if (length >= LANES) {
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] = values[lane];
        for (i = LANES; i + LANES <= length; i += LANES)
            for (int lane = 0; lane < LANES; lane++)
                lanes[lane] += values[i + lane];
        sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    }
    for (; i < length; i++)
        sum += values[i];
    return sum;
}

static double pairwise_sum(const double *values, int64_t length)
{
    if (length <= LEAF)
        return leaf_sum(values, length);
    const int64_t left = left_half(length);
    const double sum = pairwise_sum(values, left);
    return sum + pairwise_sum(values + left, length - left);
}

typedef struct {
    double peak;
    double temperature;
} Scale;

/* Weights of up to CHUNK logits. */
VECTOR static void weigh_chunk(const float *logits, int64_t length, Scale scale, double *weights)
{
    if (scale.temperature == 1.0)
        for (int64_t i = 0; i < length; i++)
            weights[i] = exponential((double)logits[i] - scale.peak);
    else
        for (int64_t i = 0; i < length; i++)
            weights[i] = exponential(((double)logits[i] - scale.peak) / scale.temperature);
}

/* Weights of any number of logits, left in `slots` as doubles; returns their pairwise sum. The depth of the calls is
 * the logarithm of length / CHUNK. */
static double weigh(const float *logits, int64_t length, Scale scale, int64_t *slots)
{
    if (length <= CHUNK) {
        double weights[CHUNK];
        weigh_chunk(logits, length, scale, weights);
        memcpy(slots, weights, (size_t)length * sizeof *slots);
        return pairwise_sum(weights, length);
    }
    const int64_t left = left_half(length);
    const double sum = weigh(logits, left, scale, slots);
    return sum + weigh(logits + left, length - left, scale, slots + left);
}

/* --- tickets -------------------------------------------------------------------------------------------- */

#define TOTAL ((int64_t)1 << 60)
#define SLACK (TOTAL >> 36)

/* floor(weight * 2**60) of a weight in [0, 1], by its bits: 53 digits, shifted by what the exponent is below 1.
 * Beyond 2**-63 a shift would not be defined, and nothing is left. */
static inline int64_t floor_ticket(double weight)
{
    const uint64_t bits = bits_of(weight), one = (uint64_t)1 << 52;
    const uint64_t digits = (bits & (one - 1)) | one, below = 1023 - (bits >> 52);
    return below > 63 ? 0 : (int64_t)(digits << 8 >> (below & 63));
}

typedef struct {
    int64_t sum;   /* of all floors */
    int64_t place; /* the first index of the largest weight */
} Floors;

/* Replace the weights in `slots` by the floors of weight / total * 2**60. */
VECTOR static Floors take_floors(int64_t *slots, int64_t length, double total)
{
    Floors floors = {0, -1};
    const double largest = 1.0 / total; /* the weight of the peak is 1 */
    for (int64_t first = 0; first < length; first += BLOCK) {
        const int block = (int)(length - first < BLOCK ? length - first : BLOCK);
        double weights[BLOCK];
        int64_t found = 0;
        memcpy(weights, slots + first, (size_t)block * sizeof *weights);
        for (int j = 0; j < block; j++) {
            const double share = weights[j] / total;
            const int64_t ticket = floor_ticket(share);
            found |= share == largest;
            slots[first + j] = ticket;
            floors.sum += ticket;
        }
        for (int j = 0; found && floors.place < 0; j++)
            if (weights[j] / total == largest)
                floors.place = first + j;
    }
    return floors;
}

/* Tickets of finite logits with this peak. Returns 0, or -1 where numpy would refuse. */
static int64_t finite_row(const float *logits, int64_t length, Scale scale, int64_t *tickets)
{
    const double total = weigh(logits, length, scale, tickets);
    if (!(total >= 1.0 && total <= (double)length))
        return REFUSED;
    const Floors floors = take_floors(tickets, length, total);
    const int64_t leftover = TOTAL - floors.sum;
    if (leftover > length + SLACK || leftover < -(length + SLACK))
        return REFUSED;
    tickets[floors.place] += leftover;
    return 0;
}

/* The largest rank and the smallest one. */
VECTOR static void find_ends(const float *logits, int64_t length, int32_t *highest, int32_t *lowest)
{
    int32_t high = INT32_MIN, low = INT32_MAX;
    for (int64_t i = 0; i < length; i++) {
        const int32_t rank = rank_of(logits[i]);
        high = rank > high ? rank : high;
        low = rank < low ? rank : low;
    }
    *highest = high, *lowest = low;
}

/* The finite logits, in order; returns how many there are. `kept` has room for all. */
static int64_t keep_finite(const float *logits, int64_t length, float *kept)
{
    int64_t found = 0;
    for (int64_t i = 0; i < length; i++) {
        kept[found] = logits[i];
        found += rank_of(logits[i]) != RANK_OF_MINUS_INF;
    }
    return found;
}

/* Move the tickets of the finite logits from the front to their places; the others get 0. */
static void spread(const float *logits, int64_t length, int64_t found, int64_t *tickets)
{
    for (int64_t i = length - 1; i >= 0; i--) {
        const int64_t finite = rank_of(logits[i]) != RANK_OF_MINUS_INF;
        found -= finite;
        tickets[i] = finite ? tickets[found] : 0;
    }
}

/* Tickets with sum 2**60 of one row of logits at a temperature > 0; -inf is a removed token, which takes no part.
 *
 * logits, tickets [length], length >= 1; scratch: length entries. Returns 0, or -1 for a row that numpy would
 * refuse: NaN, +inf, or no finite logit. */
EXPORT int64_t dspark_target_row(const float *logits, int64_t length, double temperature, int64_t *tickets,
                                 float *scratch)
{
    int32_t highest, lowest;
    float peak;
    find_ends(logits, length, &highest, &lowest);
    if (highest >= RANK_OF_INF || highest <= RANK_OF_MINUS_INF || lowest < RANK_OF_MINUS_INF)
        return REFUSED;
    const int32_t bits = highest ^ (highest >> 31 & 0x7FFFFFFF); /* rank_of, backwards */
    memcpy(&peak, &bits, sizeof peak);
    const Scale scale = {peak, temperature};
    if (lowest > RANK_OF_MINUS_INF)
        return finite_row(logits, length, scale, tickets);
    const int64_t found = keep_finite(logits, length, scratch);
    if (finite_row(scratch, found, scale, tickets) < 0)
        return REFUSED;
    spread(logits, length, found, tickets);
    return 0;
}
