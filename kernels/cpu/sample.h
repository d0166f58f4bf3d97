/* What drawing a token and telling log probabilities share. */
#ifndef CBD_SAMPLE_H
#define CBD_SAMPLE_H

#include "select.h"

enum { BLOCK = 256 }; /* ids whose weights are summed as one when the cumulative distribution is searched */

INLINE int64_t whole_blocks(int64_t count) { return (count + BLOCK - 1) / BLOCK * BLOCK; }

/* -inf if there is none but NaN. */
INLINE float largest_of(const float *x, int64_t count) {
    vec best[2] = {splat(-INFINITY), splat(-INFINITY)};
    int64_t n = 0;
    for (; n + 2 * VW <= count; n += 2 * VW) {
        best[0] = max_(load(x + n), best[0]); /* in this order a NaN is passed over */
        best[1] = max_(load(x + n + VW), best[1]);
    }
    float most = max_lanes(max_(best[0], best[1]));
    for (; n < count; n++) most = x[n] > most ? x[n] : most;
    return most;
}

/* The next of `count` rows that nobody has taken, or -1: rows cost very different times. */
INLINE int32_t take_row(int32_t *taken, int32_t count) {
    int32_t row = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
    return row < count ? row : -1;
}

#endif
