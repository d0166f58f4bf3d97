/* Tiles of float32 and bfloat16 products: gemm.h has the layout. bfloat16 is summed in float32. */
#include "gemm_vector.h"

/* `number` and `rows` are constants where this is called, so that each shape has its accumulators in registers. */
INLINE void tile(const int number, const int rows, const struct product *product, int row, const char *panel,
                 const char *ahead, int ahead_stride, float out[][PANEL]) {
    const int64_t stride = product->x_stride * (number == FLOAT32 ? 4 : 2);
    const int steps = words_of(number, product->weight->inputs);
    for (int first = 0; first < PANEL / CELL; first += CELLS) {
        const char *x = (const char *)product->x + row * stride;
        const char *x3 = x + 3 * stride, *x6 = x + 6 * stride, *x9 = x + 9 * stride;
        const char *cells = panel + first * CELL * 4;
        floats acc[ROWS][CELLS * VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < CELLS * VECTORS; v++) acc[r][v] = (floats){0};
        for (int step = 0; step < steps; step++) {
            words cell[CELLS * VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < CELLS * VECTORS; v++) cell[v] = load_words(cells + v * sizeof(words));
            fetch(ahead);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                /* Four pointers and one stride reach twelve rows by the addressing modes of x86. */
                const char *from = r < 3 ? x : r < 6 ? x3 : r < 9 ? x6 : x9;
                uint32_t word = load_word(from + r % 3 * stride);
#pragma GCC unroll 8
                for (int v = 0; v < CELLS * VECTORS; v++) acc[r][v] = dot(number, acc[r][v], cell[v], word);
            }
            cells += STEP_BYTES;
            ahead += ahead_stride * CELLS / 2;
            x += 4, x3 += 4, x6 += 4, x9 += 4;
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < CELLS * VECTORS; v++)
                memcpy(out[r] + first * CELL + v * LANES, &acc[r][v], sizeof(floats));
    }
}

#define ROWS_CASE(NUMBER, COUNT)                                                                                       \
    case COUNT:                                                                                                        \
        if (COUNT <= ROWS) tile(NUMBER, COUNT <= ROWS ? COUNT : 1, product, row, panel, ahead, ahead_stride, out);     \
        return;

#define TILE(NAME, NUMBER)                                                                                             \
    static void NAME(const struct product *product, int row, int rows, const char *panel, const char *ahead,           \
                     int ahead_stride, float out[][PANEL]) {                                                           \
        switch (rows) {                                                                                                \
            ROWS_CASE(NUMBER, 1)                                                                                       \
            ROWS_CASE(NUMBER, 2)                                                                                       \
            ROWS_CASE(NUMBER, 3)                                                                                       \
            ROWS_CASE(NUMBER, 4)                                                                                       \
            ROWS_CASE(NUMBER, 5)                                                                                       \
            ROWS_CASE(NUMBER, 6)                                                                                       \
            ROWS_CASE(NUMBER, 7)                                                                                       \
            ROWS_CASE(NUMBER, 8)                                                                                       \
            ROWS_CASE(NUMBER, 9)                                                                                       \
            ROWS_CASE(NUMBER, 10)                                                                                      \
            ROWS_CASE(NUMBER, 11)                                                                                      \
            ROWS_CASE(NUMBER, 12)                                                                                      \
        }                                                                                                              \
    }

TILE(tile_f32, FLOAT32)
TILE(tile_bf16, BFLOAT16)

void float_part(const struct product *product, int part, struct team *team) {
    int number = product->weight->number;
    int64_t panel_bytes = (int64_t)words_of(number, product->weight->inputs) * STEP_BYTES;
    product_tiles(product, number == FLOAT32 ? tile_f32 : tile_bf16, ROWS, panel_bytes, part, team->parts);
}
