/* Products with a weight that never changes: y[m, n] = sum over k of x[m, k] W[n, k], + bias[n], + residual[m, n].
 *
 * Layout of a packed weight, the same for every instruction set. Columns n are cut into panels of 32, two cells of 16;
 * inputs k into words of 4 bytes: one float, two bfloat16 or four int8. A panel is
 *
 *     step:  [cell 0: 16 columns x 1 word][cell 1: 16 columns x 1 word]    128 bytes, one for each word of k, in order
 *
 * and panels follow each other, so a thread that computes neighbouring columns reads one stream. Columns beyond n and
 * inputs beyond k are zero. int8 panels have their scales in between, see gemm_int8.c. The idea, packing for the order of
 * use and keeping a tile of y in registers, is that of Goto and van de Geijn 2008; without their blocks along K, since the
 * panels of a language model's layers fit in L2.
 *
 * Each y is one sum, in the order of k, in one accumulator (int8: one for each group of 64 inputs, added up in order).
 * That holds in every tile shape, so a row's bits depend neither on the rows beside it nor on the number of threads.
 */
#ifndef CBD_GEMM_H
#define CBD_GEMM_H

#include "common.h"

enum { CELL = 16, PANEL = 32, STEP_BYTES = 128, GROUP = 64 };
enum { FEW_ROWS = 6 }; /* up to which a product waits for memory, and above it for arithmetic */

enum number { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

/* A packed weight. Mirrored by `Weight` in native_linear.py. */
struct weight {
    const void *packed;
    const float *bias;   /* [columns], or NULL */
    int32_t columns, inputs;
    int32_t number;      /* of the packed weight: enum number */
    int32_t rows_number; /* of x, residual and y: FLOAT32 or BFLOAT16; of an unquantised weight the weight's own */
};

/* One product. Strides are in elements; the last dimension is contiguous. Mirrored by `Product` in native_linear.py. */
struct product {
    const struct weight *weight;
    const void *x;
    void *y;
    const void *residual; /* added to y, or NULL; may be y itself */
    void *scratch;   /* quantised rows, for int8: cbd_int8_row_bytes() for each of `buffer_rows`; else unused */
    int64_t x_stride, y_stride, residual_stride;
    int32_t rows;
    int32_t y_float; /* y is float32 whatever x is: logits */
};

/* One thread's share. All threads of a team call it; y is whole after the next barrier. int8 may have a barrier inside. */
void product_part(const struct product *product, int part, struct team *team);

/* A tile: `rows` rows of x from `row` on times one panel into out. On the way it fetches what lies `ahead`, so much of it
 * with each step. */
typedef void tile_function(const struct product *product, int row, int rows, const char *panel, const char *ahead,
                           int ahead_stride, float out[][PANEL]);

/* Compute one thread's share with tiles of at most `most` rows. */
void product_tiles(const struct product *product, tile_function *tile, int most, int64_t panel_bytes, int part,
                   int parts);

void float_part(const struct product *product, int part, struct team *team);
void int8_part(const struct product *product, int part, struct team *team);

INLINE int words_of(int number, int inputs) {
    return number == FLOAT32 ? inputs : (inputs + 1) / 2;
}

#endif
