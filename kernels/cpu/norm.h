/* RMSNorm and LayerNorm over rows. */
#ifndef CBD_NORM_H
#define CBD_NORM_H

#include "common.h"

/* kernels/native_small.py mirrors it field by field. */
struct norm {
    const void *x;      /* [rows, width] */
    const void *weight; /* [width], or none: 1 */
    const void *bias;   /* [width], or none: 0 */
    void *out;          /* [rows, width]; may be x */
    int64_t x_stride, out_stride; /* elements from row to row */
    int32_t rows, width;
    float eps;
    int32_t centres; /* LayerNorm: subtracts the mean */
    int32_t is_bf16;
};

void norm_part(void *norm, int part, struct team *team);

#endif
