/* SiLU times up (SwiGLU, Shazeer 2020), ReLU, and GELU (Hendrycks and Gimpel 2016), over contiguous rows.
 *
 * In float32 whatever the dtype, rounded once. GELU's error function is Abramowitz and Stegun 7.1.26, within 1.5e-7.
 *
 * The torch form is kernels/activation.py.
 */
#include "activation.h"
#include "simd.h"

#define LOG2_E 1.44269504f

INLINE vec silu(vec x) { return x / (splat(1.0f) + exp2_(min_(x * splat(-LOG2_E), splat(126.0f)))); }

INLINE vec gelu(vec x) {
    vec z = max_(x, splat(0.0f) - x) * splat(0.707106781f);
    vec t = splat(1.0f) / fma_(splat(0.3275911f), z, splat(1.0f));
    vec p = splat(1.061405429f);
    p = fma_(p, t, splat(-1.453152027f));
    p = fma_(p, t, splat(1.421413741f));
    p = fma_(p, t, splat(-0.284496736f));
    p = fma_(p, t, splat(0.254829592f));
    vec tail = p * t * exp2_(z * z * splat(-LOG2_E)); /* 1 - erf(z) */
    vec both = select_(x < splat(0.0f), tail, splat(2.0f) - tail);
    return x * splat(0.5f) * both;
}

INLINE vec activate(const struct activation *job, vec x, vec up) {
    switch (job->kind) {
        case SILU_MUL: return silu(x) * up;
        case GELU: return gelu(x);
        default: return max_(x, splat(0.0f));
    }
}

INLINE void activate_row(const struct activation *job, int64_t row, int64_t begin, int64_t end, int is_bf16) {
    int64_t width = job->width, from = row * width * (job->kind == SILU_MUL ? 2 : 1), to = row * width;
    int64_t up = job->kind == SILU_MUL ? width : 0, n = begin;
    for (; n + VW <= end; n += VW) {
        vec x = load_row(job->x, from + n, is_bf16);
        store_row(job->out, to + n, activate(job, x, load_row(job->x, from + up + n, is_bf16)), is_bf16);
    }
    for (; n < end; n++) {
        vec x = splat(load_one(job->x, from + n, is_bf16)), other = splat(load_one(job->x, from + up + n, is_bf16));
        store_one(job->out, to + n, activate(job, x, other)[0], is_bf16);
    }
}

/* Shared by columns: a step of one row is work for all threads. */
void activation_part(void *job, int part, struct team *team) {
    const struct activation *activation = job;
    int64_t begin, end;
    share(activation->width / VW, part, team->parts, &begin, &end);
    begin *= VW;
    end = part + 1 == team->parts ? activation->width : end * VW;
    for (int row = 0; row < activation->rows; row++) {
        if (activation->is_bf16)
            activate_row(activation, row, begin, end, 1);
        else
            activate_row(activation, row, begin, end, 0);
    }
}

EXPORT void cbd_activation(struct activation *job, int threads) { team_run(activation_part, job, threads); }
