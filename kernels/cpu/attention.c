/* Attention over the paged pool: rows of any number of sequences, each row over all keys up to its own.
 *
 * Layout. One layer of the pool is [page, K|V, kv_head, slot, head_dim], contiguous. Queries and results are rows of
 * heads * head_dim elements, some stride apart; the `group` query heads of a KV head are neighbours. The work is cut
 * into tiles of neighbouring rows of one sequence (a decoding sequence is a tile of one row); one KV head of one tile
 * is an item, or all heads of a tile with few rows, and items are what threads share.
 *
 * An item goes over its keys in blocks of KEYS, counted from the sequence's first token. Each block is packed once for
 * all rows of the item: keys transposed, [head_dim, key], values as they are, [key, head_dim]. Then both products,
 * scores = Q K^T and result = P V, are the same small kernel over 6 rows at once, with the softmax between them kept as
 * a running maximum and sum (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; the blocks are
 * those of Dao et al. 2022, "FlashAttention"). Where an item has few rows nothing is packed: attention_few.h.
 *
 * With AVX-512 a bfloat16 product multiplies pairs: of neighbouring head_dims in Q K^T, of neighbouring keys in P V, so
 * weights are rounded to bfloat16 there, as torch rounds them. Everywhere else the products are in float32.
 *
 * A row's result does not depend on its tile, nor on what is computed beside it: blocks begin at fixed keys, each sum
 * runs over the keys or dimensions in order, and what a mask hides is added as an exact zero.
 *
 * The torch form is kernels/attention.py.
 */
#include "attention_few.h"
#include "attention_tile.h"

#include <math.h>

/* ------------------------------------------------------------------------------------------------------- softmax */

/* Turn a row's scores, of which the first `seen` count, into weights, and bring its sums to the new maximum. The others
 * weigh 0, and whatever stands there is not looked at. */
INLINE void weigh(struct scratch *s, int row, int within, int seen, int width, float factor, int pairs) {
    const vec nothing = splat(-INFINITY);
    float *scores = s->scores + within * KEYS;
    cell *weights = s->weights + within * KEYS;
    vec score[KEYS / VW], best = nothing, total = splat(0.0f);
#pragma GCC unroll 16
    for (int v = 0; v < KEYS / VW; v++) {
        score[v] = select_(lane_numbers() < splat((float)(seen - v * VW)), load(scores + v * VW), nothing);
        best = max_(best, score[v]);
    }
    float before = s->best[row], now = max_lanes(best);
    now = now > before ? now : before;
    s->best[row] = now;
#pragma GCC unroll 16
    for (int v = 0; v < KEYS / VW; v++) {
        score[v] = exp2_((score[v] - splat(now)) * splat(factor));
        total = total + score[v];
        if (pairs)
            store_bf16(weights->pair + v * VW, score[v]);
        else
            store(&weights->number + v * VW, score[v]);
    }
    if (now == before) {
        s->total[row] += sum_lanes(total);
        return;
    }
    vec shrunk = exp2_((splat(before) - splat(now)) * splat(factor));
    s->total[row] = s->total[row] * shrunk[0] + sum_lanes(total);
    float *sums = s->sums + row * width;
    for (int d = 0; d < width; d += VW) store(sums + d, load(sums + d) * shrunk);
}

/* --------------------------------------------------------------------------------------------------------- items */

/* The item's queries from row `to` on. */
INLINE void load_queries(const struct attention *job, const struct tile *tile, int head, struct scratch *s, int to,
                         int is_bf16, int pairs) {
    int size = is_bf16 ? 2 : 4, dim = job->head_dim, steps = pairs ? dim / 2 : dim;
    for (int n = 0; n < tile->rows * job->group; n++) {
        int64_t row = tile->row + n / job->group, at = (int64_t)(head * job->group + n % job->group) * dim;
        const char *from = (const char *)job->qkv + (row * job->qkv_stride + at) * size;
        if (pairs)
            memcpy(s->query + (to + n) * steps, from, (size_t)dim * 2);
        else
            widen(from, dim, &s->query[(to + n) * steps].number, is_bf16);
    }
}

INLINE void store_results(const struct attention *job, const struct tile *tile, int head, const struct scratch *s,
                          int from, int is_bf16) {
    int dim = job->head_dim, width = up_to(dim, TILE_COLUMNS);
    for (int n = 0; n < tile->rows * job->group; n++) {
        int64_t row = tile->row + n / job->group, at = (int64_t)(head * job->group + n % job->group) * dim;
        const float *sums = s->sums + (from + n) * width;
        float part = 1.0f / s->total[from + n];
        at += row * job->out_stride;
        int d = 0;
        for (; d + VW <= dim; d += VW) store_row(job->out, at + d, load(sums + d) * splat(part), is_bf16);
        for (; d < dim; d++) store_one(job->out, at + d, sums[d] * part, is_bf16);
    }
}

/* All rows of a tile over the packed block from key `first` on. */
INLINE void attend_packed(const struct attention *job, const struct tile *tile, int first, struct scratch *s,
                          float factor, int pairs) {
    int dim = job->head_dim, width = up_to(dim, TILE_COLUMNS), steps = pairs ? dim / 2 : dim;
    int rows = tile->rows * job->group;
    for (int row = 0; row < rows; row += ROWS) {
        int some = least(ROWS, rows - row);
        int span = least(KEYS, tile->start + (row + some - 1) / job->group + 1 - first);
        if (span <= 0) continue;
        product(some, KEYS, steps, s->query + row * steps, steps, s->keys, KEYS, s->scores, KEYS, 1, pairs);
        for (int n = 0; n < some; n++)
            weigh(s, row + n, n, tile->start + (row + n) / job->group + 1 - first, width, factor, pairs);
        product(some, width, pairs ? (span + 1) / 2 : span, s->weights, KEYS, s->values, width, s->sums + row * width,
                width, 0, pairs);
    }
}

/* KV heads [head, head + heads) of a tile; more than one only if its rows are few. */
struct item {
    const struct tile *tile;
    int head, heads;
};

INLINE void attend(const struct attention *job, const struct item *item, const struct item *after, struct scratch *s,
                   int is_bf16) {
    const struct tile *tile = item->tile;
    const int pairs = HAS_PAIRS && is_bf16;
    int dim = job->head_dim, width = up_to(dim, TILE_COLUMNS), steps = pairs ? dim / 2 : dim;
    int rows = tile->rows * job->group, keys = tile->start + tile->rows;
    float factor = job->scale * 1.44269504f; /* log2 of e: weights are powers of 2 */
    struct block blocks[2];
    for (int h = 0; h < item->heads; h++) load_queries(job, tile, item->head + h, s, h * rows, is_bf16, pairs);
    memset(s->sums, 0, sizeof(float) * (size_t)(item->heads * rows * width));
    for (int n = 0; n < item->heads * rows; n++) s->total[n] = 0.0f, s->best[n] = -INFINITY;

    find_block(job, tile, item->head, 0, &blocks[0]);
    for (int first = 0, turn = 0; first < keys; first += KEYS, turn ^= 1) {
        const struct block *now = &blocks[turn], *next = &blocks[turn ^ 1];
        const int last = first + KEYS >= keys;
        const struct item *then = last ? after : item;
        find_block(job, then->tile, then->head, last ? 0 : first + KEYS, &blocks[turn ^ 1]);
        if (!HAS_PAIRS || !pairs || rows > ROWS) {
            pack(s, now, next, dim, is_bf16, pairs);
            attend_packed(job, tile, first, s, factor, pairs);
            continue;
        }
#if CBD_AVX512
        for (int h = 0; h < item->heads; h++) {
            score_few(s, h * rows, rows, now, next, h, steps);
            for (int n = 0; n < rows; n++)
                weigh(s, h * rows + n, n, tile->start + n / job->group + 1 - first, width, factor, pairs);
            value_few(s, h * rows, rows, now, next, h, dim, width);
        }
#endif
    }
    for (int h = 0; h < item->heads; h++) store_results(job, tile, item->head + h, s, h * rows, is_bf16);
}

/* How many KV heads of a tile are one item. All of them read a page in one go, which memory is fastest at; as long as
 * there are enough tiles for all threads to be busy to the end. */
INLINE int heads_together(const struct attention *job, const struct tile *tile, int parts, int is_bf16) {
    const int rows = tile->rows * job->group;
    return HAS_PAIRS && is_bf16 && rows <= ROWS && rows * job->kv_heads <= MOST_ROWS && job->tile_count >= 4 * parts
               ? job->kv_heads
               : 1;
}

INLINE int64_t cost(const struct attention *job, const struct tile *tile) {
    int64_t keys = tile->start + (tile->rows + 1) / 2;
    return (keys / KEYS + 1) * (PACKING + tile->rows * job->group);
}

/* The items whose middle, as costs go, lies in this part of the whole: a run of neighbours. */
INLINE void attend_part(const struct attention *job, int part, int parts, int is_bf16) {
    struct scratch scratch;
    int64_t whole = 0, before = 0;
    int width = up_to(job->head_dim, TILE_COLUMNS);
    if (width > job->head_dim) memset(scratch.values, 0, sizeof(cell) * (size_t)(KEYS * width));
    for (int n = 0; n < job->tile_count; n++) whole += cost(job, &job->tiles[n]) * job->kv_heads;
    for (int n = 0; n < job->tile_count; n++) {
        const struct tile *tile = job->tiles + n;
        const int heads = heads_together(job, tile, parts, is_bf16);
        const int64_t each = cost(job, tile) * heads;
        for (int head = 0; head < job->kv_heads; head += heads, before += each) {
            if ((2 * before + each) * parts / (2 * whole) != part) continue;
            const int wraps = head + heads == job->kv_heads, ends = wraps && n + 1 == job->tile_count;
            const struct item item = {tile, head, heads};
            const struct item after = {ends ? NULL : tile + wraps, wraps ? 0 : head + heads, heads};
            attend(job, &item, &after, &scratch, is_bf16);
        }
    }
}

void attention_part(void *job, int part, struct team *team) {
    const struct attention *attention = job;
    if (attention->is_bf16)
        attend_part(attention, part, team->parts, 1);
    else
        attend_part(attention, part, team->parts, 0);
}

EXPORT void cbd_attention(struct attention *job, int threads) { team_run(attention_part, job, threads); }
