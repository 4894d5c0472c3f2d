/* What a prefix of drafts keeps by going on, for every supported token: the sums of block verification.
 *
 * Purpose: speed, and nothing else. dspark/block_verification.py computes the same in Python's integers, and is the
 * fallback and the judge; the names are those of its head. All that rows.c says about refusals and memory holds here
 * too.
 *
 * Invariants:
 *
 * - Integers only. Inputs are checked so that nothing exceeds 2**120: w, a <= 2**60, and the tickets of a row's
 *   support, one id after the other, sum to 2**60 at most.
 * - A compiler without 128-bit integers gives a function that always refuses.
 *
 * Called through ctypes by dspark/native/kernels.py only.
 */

#include "rows.h"

#define TOTAL ((int64_t)1 << 60)
#define MASS (1 << 24)

#ifdef __SIZEOF_INT128__

typedef unsigned __int128 wide;

/* K c w' with w' = min(N, floor(w a / (K c))), N = 2**60 and K = 2**36. */
static inline wide share_of(uint64_t weight, uint64_t ticket, uint64_t count)
{
    const wide held = (wide)weight * ticket;
    const uint64_t scaled = count << 36;
    const wide most = (wide)scaled << 60;
    return held >= most ? most : held / scaled * scaled;
}

static void write_wide(wide value, uint64_t *words)
{
    words[0] = (uint64_t)value;
    words[1] = (uint64_t)(value >> 64);
}

#endif

/* shares[i] = K c w' of ids[i], and their sum behind the last one; two words each, the lower one first.
 *
 * tickets [vocab]; ids, counts [entries]; 0 <= weight <= 2**60. Out: shares [entries + 1, 2]. Returns 0, or -1 for
 * ids that do not ascend in the vocabulary, counts outside [1, 2**24], and tickets that are no part of a row. */
EXPORT int64_t dspark_block_shares(const int64_t *tickets, int64_t vocab, const int32_t *ids, const int64_t *counts,
                                   int64_t entries, int64_t weight, uint64_t *shares)
{
#ifdef __SIZEOF_INT128__
    wide sum = 0;
    int64_t before = -1, left = TOTAL;
    if (weight < 0 || weight > TOTAL)
        return REFUSED;
    for (int64_t i = 0; i < entries; i++) {
        const int64_t id = ids[i], count = counts[i];
        if (id <= before || id >= vocab || count < 1 || count > MASS)
            return REFUSED;
        if (tickets[id] < 0 || tickets[id] > left)
            return REFUSED;
        const wide share = share_of((uint64_t)weight, (uint64_t)tickets[id], (uint64_t)count);
        write_wide(share, shares + 2 * i);
        sum += share;
        left -= tickets[id];
        before = id;
    }
    write_wide(sum, shares + 2 * entries);
    return 0;
#else
    (void)tickets, (void)vocab, (void)ids, (void)counts, (void)entries, (void)weight, (void)shares;
    return REFUSED;
#endif
}
