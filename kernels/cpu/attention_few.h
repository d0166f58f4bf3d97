/* A block's products for so few rows that a key is used as soon as it is turned: packing it would cost as much as all
 * the rest. So decoding sequences are attended. The sums are those of `product` on packed blocks, in the same order.
 *
 * `head`: so many KV heads behind the block's own. While a part of a block is worked on, the same part of the next one
 * is on its way from memory.
 */
#ifndef CBD_ATTENTION_FEW_H
#define CBD_ATTENTION_FEW_H

#include "attention_tile.h"

#if CBD_AVX512

/* Scores of up to 32 keys from `key` on, in two halves; with 16 or fewer the second repeats the first. */
INLINE void score_tile(int rows, const struct block *now, const struct block *next, int key, int head, int steps,
                       const cell *query, float *scores) {
    const int other = key + (now->count - key > 16 ? 16 : 0);
    const int64_t at = head * now->to_head, next_at = head * next->to_head;
    vec sum[2][ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sum[0][r] = sum[1][r] = splat(0.0f);
    const int fetched = key + 32 < now->count ? key + 32 : KEYS; /* in the end all others: this block may be short */
    for (int n = key; n < least(fetched, next->count); n++) prefetch_row(next->keys[n] + next_at, 4 * steps);
    for (int k = 0; k < steps; k += 4) {
        __m512i turned[2][4];
        turn_keys(now->keys + key, at + 4 * k, turned[0]);
        turn_keys(now->keys + other, at + 4 * k, turned[1]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const cell each = query[r * steps + k + i];
                sum[0][r] = add_product(each, (vec)turned[0][i], sum[0][r], 1);
                sum[1][r] = add_product(each, (vec)turned[1][i], sum[1][r], 1);
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        store(scores + r * KEYS + key, sum[0][r]);
        store(scores + r * KEYS + other, sum[1][r]);
    }
}

/* The weighed values' dimensions [dim, dim + TILE_COLUMNS), added to the sums. */
INLINE void value_tile(int rows, const struct block *now, const struct block *next, int dim, int head, int head_dim,
                       const cell *weights, float *sums, int width) {
    const int64_t at = now->to_values + head * now->to_head, next_at = next->to_values + head * next->to_head + 2 * dim;
    const int bytes = 2 * least(TILE_COLUMNS, head_dim - dim);
    vec sum[ROWS][TILE_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] = load(sums + r * width + dim + v * VW);
    for (int key = 0; key < now->count; key += 2) {
        const char *first = now->keys[key] + at, *second = now->keys[key + 1] + at;
        __m512i paired[TILE_VECTORS];
        pair_values(first, second, dim, head_dim, paired);
        pair_values(first, second, dim + 32, head_dim, paired + 2);
        for (int n = key; n < least(key + 2, next->count); n++) prefetch_row(next->keys[n] + next_at, bytes);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < TILE_VECTORS; v++)
                sum[r][v] = add_product(weights[r * KEYS + key / 2], (vec)paired[v], sum[r][v], 1);
    }
    for (int n = now->count; n < next->count; n++) prefetch_row(next->keys[n] + next_at, bytes);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++) store(sums + r * width + dim + v * VW, sum[r][v]);
}

/* `call` with the number of rows as the constant COUNT. */
#define WITH_COUNT(rows, call)                        \
    switch (rows) {                                   \
        case 1: { enum { COUNT = 1 }; call; break; }  \
        case 2: { enum { COUNT = 2 }; call; break; }  \
        case 3: { enum { COUNT = 3 }; call; break; }  \
        case 4: { enum { COUNT = 4 }; call; break; }  \
        case 5: { enum { COUNT = 5 }; call; break; }  \
        case 6: { enum { COUNT = 6 }; call; break; }  \
    }

/* Scores of a block for rows [row, row + rows). */
INLINE void score_few(struct scratch *s, int row, int rows, const struct block *now, const struct block *next, int head,
                      int steps) {
    for (int key = 0; key < now->count; key += 32)
        WITH_COUNT(rows, score_tile(COUNT, now, next, key, head, steps, s->query + row * steps, s->scores))
}

/* Its values, by the weights, to the rows' sums. */
INLINE void value_few(struct scratch *s, int row, int rows, const struct block *now, const struct block *next, int head,
                      int head_dim, int width) {
    float *sums = s->span.sums + row * width;
    for (int dim = 0; dim < width; dim += TILE_COLUMNS)
        WITH_COUNT(rows, value_tile(COUNT, now, next, dim, head, head_dim, s->weights, sums, width))
}

#endif

#endif
