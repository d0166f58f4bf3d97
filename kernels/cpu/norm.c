/* RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016) of rows that lie one after another.
 *
 * Statistics and products are in float32 whatever the dtype, rounded once at the end. A row is summed in VW lanes that
 * are added up at last, so its result depends on its width alone.
 *
 * The torch form is kernels/norm.py.
 */
#include "norm.h"
#include "simd.h"

#include <math.h>

/* Sum of (x - mean)^power over a row; power is 1 or 2. */
INLINE float moment(const struct norm *job, int64_t at, float mean, int power, int is_bf16) {
    vec sum = splat(0.0f);
    float rest = 0.0f;
    int n = 0;
    for (; n + VW <= job->width; n += VW) {
        vec x = load_row(job->x, at + n, is_bf16) - splat(mean);
        sum = power == 2 ? fma_(x, x, sum) : sum + x;
    }
    for (; n < job->width; n++) {
        float x = load_one(job->x, at + n, is_bf16) - mean;
        rest += power == 2 ? x * x : x;
    }
    return sum_lanes(sum) + rest;
}

INLINE void norm_row(const struct norm *job, int64_t row, int is_bf16) {
    int64_t at = row * job->x_stride, to = row * job->out_stride;
    float width = (float)job->width;
    float mean = job->centres ? moment(job, at, 0.0f, 1, is_bf16) / width : 0.0f;
    float factor = 1.0f / sqrtf(moment(job, at, mean, 2, is_bf16) / width + job->eps);
    int n = 0;
    for (; n + VW <= job->width; n += VW) {
        vec y = (load_row(job->x, at + n, is_bf16) - splat(mean)) * splat(factor);
        vec weight = job->weight ? load_row(job->weight, n, is_bf16) : splat(1.0f);
        vec bias = job->bias ? load_row(job->bias, n, is_bf16) : splat(0.0f);
        store_row(job->out, to + n, fma_(y, weight, bias), is_bf16);
    }
    for (; n < job->width; n++) {
        float y = (load_one(job->x, at + n, is_bf16) - mean) * factor;
        if (job->weight) y *= load_one(job->weight, n, is_bf16);
        if (job->bias) y += load_one(job->bias, n, is_bf16);
        store_one(job->out, to + n, y, is_bf16);
    }
}

void norm_part(void *job, int part, struct team *team) {
    const struct norm *norm = job;
    int64_t begin, end;
    share(norm->rows, part, team->parts, &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        if (norm->is_bf16)
            norm_row(norm, row, 1);
        else
            norm_row(norm, row, 0);
    }
}

EXPORT void cbd_norm(struct norm *job, int threads) { team_run(norm_part, job, threads); }
