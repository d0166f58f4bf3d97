/* The largest of each row and where it is: what a greedy sequence draws. The lowest place wins among equals.
 *
 * Each lane keeps its best and where it met it; a NaN is never the best.
 *
 * The torch form is kernels/argmax.py.
 */
#include "simd.h"

#include <math.h>

/* kernels/native_small.py mirrors it field by field. */
struct argmax {
    const void *x;   /* [rows, width] */
    int64_t *out;    /* [rows] */
    int64_t x_stride; /* elements from row to row */
    int32_t rows, width;
    int32_t is_bf16;
};

INLINE int64_t best_place(const struct argmax *job, int64_t at, int is_bf16) {
    vec best = splat(-INFINITY);
    ivec place = {0}, where = (ivec){0} + INT32_MAX;
    for (int lane = 0; lane < VW; lane++) place[lane] = lane;
    int n = 0;
    for (; n + VW <= job->width; n += VW, place = place + VW) {
        vec x = load_row(job->x, at + n, is_bf16);
        ivec better = x > best;
        best = select_(better, x, best);
        where = (better & place) | (~better & where);
    }
    float most = -INFINITY;
    int64_t found = 0;
    for (int lane = 0; lane < VW; lane++)
        if (best[lane] > most || (best[lane] == most && where[lane] < found)) most = best[lane], found = where[lane];
    for (; n < job->width; n++) {
        float x = load_one(job->x, at + n, is_bf16);
        if (x > most) most = x, found = n;
    }
    return found == INT32_MAX ? 0 : found;
}

static void argmax_part(void *job, int part, struct team *team) {
    const struct argmax *argmax = job;
    int64_t begin, end;
    share(argmax->rows, part, team->parts, &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        int64_t at = row * argmax->x_stride;
        argmax->out[row] = argmax->is_bf16 ? best_place(argmax, at, 1) : best_place(argmax, at, 0);
    }
}

EXPORT void cbd_argmax(struct argmax *job, int threads) { team_run(argmax_part, job, threads); }
