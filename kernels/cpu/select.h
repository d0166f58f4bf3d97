/* Where a row of numbers is cut so that the largest of it make up a wanted count, or a wanted mass: top-k and top-p.
 *
 * No sort: the range between the least and the largest is halved, what lies above its middle is counted or weighed, and
 * the half in which the cut must be is kept, closed up, for the next turn (Hoare's selection, 1961, with the middle of a
 * range for a pivot). So most rows are read about three times. Turns halve the range in value, then in the bits of
 * floats; the latter alone needs 32 at most, whatever the numbers are.
 *
 * A row's results depend on the row alone.
 */
#ifndef CBD_SELECT_H
#define CBD_SELECT_H

#include "simd.h"

#include <float.h>
#include <math.h>

typedef float half_vec __attribute__((vector_size(2 * VW)));
typedef double dvec __attribute__((vector_size(4 * VW))); /* of half as many */

INLINE dvec add_wide(dvec sum, vec x) {
    half_vec half[2];
    memcpy(half, &x, sizeof half);
    return sum + __builtin_convertvector(half[0], dvec) + __builtin_convertvector(half[1], dvec);
}

INLINE double sum_wide(dvec x) {
    double sum = 0;
    for (int lane = 0; lane < VW / 2; lane++) sum += x[lane];
    return sum;
}

INLINE int any_lane(ivec mask) {
#if CBD_AVX512
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif CBD_AVX2
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    int64_t halves[2];
    memcpy(halves, &mask, sizeof halves);
    return (halves[0] | halves[1]) != 0;
#endif
}

/* Those of `x` from `pivot` on: how many, or where there are `weights` the sum of theirs, and the least of them; and the
 * largest of the others, from `low` on. */
struct cut {
    double above;
    float least, most;
};

INLINE struct cut cut_at(const float *x, const float *weights, int64_t count, float low, float pivot) {
    vec least = splat(INFINITY), most = splat(-INFINITY);
    ivec counted = {0};
    dvec mass = {0};
    for (int64_t n = 0; n < count; n += VW) {
        vec v = load(x + n);
        ivec above = v >= splat(pivot), below = (v < splat(pivot)) & (v >= splat(low));
        least = min_(least, select_(above, v, splat(INFINITY)));
        most = max_(most, select_(below, v, splat(-INFINITY)));
        if (weights)
            mass = add_wide(mass, (vec)((ivec)load(weights + n) & above));
        else
            counted -= above;
    }
    struct cut cut = {sum_wide(mass), -max_lanes(-least), max_lanes(most)};
    if (!weights)
        for (int lane = 0; lane < VW; lane++) cut.above += counted[lane];
    return cut;
}

/* Those of `x` from `low` to `high`, in order, to `to`, which may be `x`, filled up to a whole vector with -inf; and their
 * weights behind, `apart` further, if there are any. Returns their count with the filling. */
INLINE int64_t keep_between(const float *x, const float *weights, int64_t count, float low, float high, float *to,
                            int64_t apart) {
    int64_t kept = 0;
#if CBD_AVX512
    for (int64_t n = 0; n < count; n += VW) {
        __m512 v = (__m512)load(x + n);
        __mmask16 inside = _mm512_cmp_ps_mask(v, _mm512_set1_ps(low), _CMP_GE_OQ) &
                           _mm512_cmp_ps_mask(v, _mm512_set1_ps(high), _CMP_LE_OQ);
        if (!inside) continue;
        _mm512_storeu_ps(to + kept, _mm512_maskz_compress_ps(inside, v));
        if (weights)
            _mm512_storeu_ps(to + apart + kept, _mm512_maskz_compress_ps(inside, (__m512)load(weights + n)));
        kept += __builtin_popcount(inside);
    }
#else
    for (int64_t n = 0; n < count; n++) {
        const float v = x[n];
        to[kept] = v;
        if (weights) to[apart + kept] = weights[n];
        kept += (v >= low) & (v <= high);
    }
#endif
    int64_t whole = (kept + VW - 1) / VW * VW;
    for (; kept < whole; kept++) to[kept] = -INFINITY;
    return whole;
}

/* The number halfway, above `low` and not above `high`: between the values, or between their places among all floats. */
INLINE float halfway(float low, float high, int by_place) {
    if (!by_place) {
        float middle = low / 2 + high / 2;
        return middle > low && middle < high ? middle : high;
    }
    int32_t bits[2];
    memcpy(bits, &low, sizeof low);
    memcpy(bits + 1, &high, sizeof high);
    for (int n = 0; n < 2; n++) bits[n] ^= bits[n] >> 31 & INT32_MAX; /* as integers in the order of the floats */
    int32_t middle = (int32_t)(bits[1] - ((int64_t)bits[1] - bits[0]) / 2);
    middle ^= middle >> 31 & INT32_MAX;
    float value;
    memcpy(&value, &middle, sizeof value);
    return value > low ? value : high; /* -0 is not above 0 */
}

/* The largest t such that those of `x` from t on are `wanted` or more, or weigh that where there are `weights`; the least
 * of them if all together do not. `low` and `high` are the least and the largest that count, both finite; nothing is
 * above `high`. `count` is a multiple of VW; `spare` has room for as many, and for their weights. */
INLINE float cut_of(const float *x, const float *weights, int64_t count, float low, float high, double wanted,
                    float *spare) {
    const int64_t apart = count;
    for (int turn = 0; low < high; turn++) {
        struct cut cut = cut_at(x, weights, count, low, halfway(low, high, turn & 1));
        if (cut.above >= wanted) {
            low = cut.least;
        } else {
            wanted -= cut.above;
            high = cut.most;
        }
        count = keep_between(x, weights, count, low, high, spare, apart);
        x = spare;
        if (weights) weights = spare + apart;
    }
    return high;
}

#endif
