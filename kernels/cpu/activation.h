/* The non-linear part of the feed-forward layer. */
#ifndef CBD_ACTIVATION_H
#define CBD_ACTIVATION_H

#include "common.h"

enum activation_kind { SILU_MUL, RELU, GELU };

/* kernels/native_small.py mirrors it field by field. */
struct activation {
    const void *x; /* [rows, width], for SILU_MUL [rows, 2 width]: gate, then up */
    void *out;     /* [rows, width]; may be x, but for SILU_MUL */
    int32_t rows, width;
    int32_t kind;
    int32_t is_bf16;
};

void activation_part(void *activation, int part, struct team *team);

#endif
