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
 * That goes on for a span of SPAN keys; spans begin anew, and what they come to is put together in their order. So
 * threads may share the spans of one sequence, as they do where there are too few items for all of them (Dao et al.
 * 2023, "Flash-Decoding for long-context inference"), and nothing changes.
 *
 * With AVX-512 a bfloat16 product multiplies pairs: of neighbouring head_dims in Q K^T, of neighbouring keys in P V, so
 * weights are rounded to bfloat16 there, as torch rounds them. Everywhere else the products are in float32.
 *
 * A row's result does not depend on its tile, nor on what is computed beside it: blocks and spans begin at fixed keys,
 * each sum runs over the keys or dimensions in order, and what a mask hides is added as an exact zero.
 *
 * The torch form is kernels/attention.py. Whoever includes this file says for which dtype: IS_BF16, 0 or 1. Each dtype is
 * a file of its own, so that a compiler works on both at once; they take it longer than all the rest.
 */
#ifndef CBD_ATTENTION_ITEMS_H
#define CBD_ATTENTION_ITEMS_H

#include "attention_few.h"
#include "attention_tile.h"

#include <math.h>

enum { PAIRS = HAS_PAIRS && IS_BF16 };

/* Measured: inline, float32 decodes 5 to 8 % faster, and bfloat16 as fast, but takes a compiler 4 s longer. */
#if IS_BF16
#define ATTEND_INLINE static __attribute__((noinline))
#else
#define ATTEND_INLINE INLINE
#endif

/* ------------------------------------------------------------------------------------------------------- softmax */

/* Turn a row's scores, of which the first `seen` count, into weights, and bring its sums to the new maximum. The others
 * weigh 0, and whatever stands there is not looked at. */
INLINE void weigh(struct scratch *s, int row, int within, int seen, int width, float factor) {
    const vec nothing = splat(-INFINITY);
    struct state *state = &s->span;
    float *scores = s->scores + within * KEYS;
    cell *weights = s->weights + within * KEYS;
    if (seen <= 0) {
        memset(weights, 0, sizeof(cell) * KEYS);
        return;
    }
    vec score[KEYS / VW], best = nothing, total = splat(0.0f);
#pragma GCC unroll 16
    for (int v = 0; v < KEYS / VW; v++) {
        score[v] = select_(lane_numbers() < splat((float)(seen - v * VW)), load(scores + v * VW), nothing);
        best = max_(best, score[v]);
    }
    float before = state->best[row], now = max_lanes(best);
    now = now > before ? now : before;
    state->best[row] = now;
#pragma GCC unroll 16
    for (int v = 0; v < KEYS / VW; v++) {
        score[v] = exp2_((score[v] - splat(now)) * splat(factor));
        total = total + score[v];
        if (PAIRS)
            store_bf16(weights->pair + v * VW, score[v]);
        else
            store(&weights->number + v * VW, score[v]);
    }
    if (now == before) {
        state->total[row] += sum_lanes(total);
        return;
    }
    vec shrunk = exp2_((splat(before) - splat(now)) * splat(factor));
    state->total[row] = state->total[row] * shrunk[0] + sum_lanes(total);
    float *sums = state->sums + row * width;
    for (int d = 0; d < width; d += VW) store(sums + d, load(sums + d) * shrunk);
}

/* After no key. */
INLINE void forget(struct state *state, int rows, int width) {
    memset(state->sums, 0, sizeof(float) * (size_t)(rows * width));
    for (int n = 0; n < rows; n++) state->total[n] = 0.0f, state->best[n] = -INFINITY;
}

/* A row's state after the keys of `more`, which follow those of `state`. */
INLINE void put_together(struct state *state, const struct state *more, int row, int width, float factor) {
    const float *added = more->sums + row * width;
    float *sums = state->sums + row * width, last = more->best[row], best = state->best[row];
    if (last == -INFINITY) return; /* it sees none of them */
    float now = last > best ? last : best;
    vec kept = exp2_((splat(best) - splat(now)) * splat(factor));
    vec part = exp2_((splat(last) - splat(now)) * splat(factor));
    state->best[row] = now;
    state->total[row] = state->total[row] * kept[0] + more->total[row] * part[0];
    for (int d = 0; d < width; d += VW) store(sums + d, fma_(load(added + d), part, load(sums + d) * kept));
}

/* The state of rows to [sums][best][total], and back. */
INLINE void put_away(const struct state *state, float *to, int rows, int width) {
    memcpy(to, state->sums, sizeof(float) * (size_t)(rows * width));
    memcpy(to + rows * width, state->best, sizeof(float) * (size_t)rows);
    memcpy(to + rows * (width + 1), state->total, sizeof(float) * (size_t)rows);
}

INLINE void take_out(struct state *state, const float *from, int rows, int width) {
    memcpy(state->sums, from, sizeof(float) * (size_t)(rows * width));
    memcpy(state->best, from + rows * width, sizeof(float) * (size_t)rows);
    memcpy(state->total, from + rows * (width + 1), sizeof(float) * (size_t)rows);
}

/* --------------------------------------------------------------------------------------------------------- items */

/* The item's queries from row `to` on. */
INLINE void load_queries(const struct attention *job, const struct tile *tile, int head, struct scratch *s, int to) {
    int size = IS_BF16 ? 2 : 4, dim = job->head_dim, steps = PAIRS ? dim / 2 : dim;
    for (int n = 0; n < tile->rows * job->group; n++) {
        int64_t row = tile->row + n / job->group, at = (int64_t)(head * job->group + n % job->group) * dim;
        const char *from = (const char *)job->qkv + (row * job->qkv_stride + at) * size;
        if (PAIRS)
            memcpy(s->query + (to + n) * steps, from, (size_t)dim * 2);
        else
            widen(from, dim, &s->query[(to + n) * steps].number, IS_BF16);
    }
}

INLINE void store_results(const struct attention *job, const struct tile *tile, int head, const struct state *state,
                          int from) {
    int dim = job->head_dim, width = up_to(dim, TILE_COLUMNS);
    for (int n = 0; n < tile->rows * job->group; n++) {
        int64_t row = tile->row + n / job->group, at = (int64_t)(head * job->group + n % job->group) * dim;
        const float *sums = state->sums + (from + n) * width;
        float part = 1.0f / state->total[from + n];
        at += row * job->out_stride;
        int d = 0;
        for (; d + VW <= dim; d += VW) store_row(job->out, at + d, load(sums + d) * splat(part), IS_BF16);
        for (; d < dim; d++) store_one(job->out, at + d, sums[d] * part, IS_BF16);
    }
}

/* All rows of a tile over the packed block from key `first` on. */
INLINE void attend_packed(const struct attention *job, const struct tile *tile, int first, struct scratch *s,
                          float factor) {
    int dim = job->head_dim, width = up_to(dim, TILE_COLUMNS), steps = PAIRS ? dim / 2 : dim;
    int rows = tile->rows * job->group;
    for (int row = 0; row < rows; row += ROWS) {
        int some = least(ROWS, rows - row);
        int span = least(KEYS, tile->start + (row + some - 1) / job->group + 1 - first);
        if (span <= 0) continue;
        product(some, KEYS, steps, s->query + row * steps, steps, s->keys, KEYS, s->scores, KEYS, 1, PAIRS);
        for (int n = 0; n < some; n++)
            weigh(s, row + n, n, tile->start + (row + n) / job->group + 1 - first, width, factor);
        product(some, width, PAIRS ? (span + 1) / 2 : span, s->weights, KEYS, s->values, width,
                s->span.sums + row * width, width, 0, PAIRS);
    }
}

/* KV heads [head, head + heads) of a tile, more than one only if its rows are few; keys [begin, end), whole spans. */
struct item {
    const struct tile *tile;
    int head, heads, begin, end;
};

INLINE int spans_of(const struct tile *tile) { return (tile->start + tile->rows + SPAN - 1) / SPAN; }

INLINE struct item all_keys(const struct tile *tile, int head, int heads) {
    return (struct item){tile, head, heads, 0, tile ? tile->start + tile->rows : 0};
}

INLINE float factor_of(const struct attention *job) { return job->scale * 1.44269504f; } /* weights are powers of 2 */

/* The state of its rows after all its keys: in s->span if those are one span, in s->before if they are more. */
ATTEND_INLINE void attend(const struct attention *job, const struct item *item, const struct item *after,
                          struct scratch *s) {
    const struct tile *tile = item->tile;
    int dim = job->head_dim, width = up_to(dim, TILE_COLUMNS);
    int rows = tile->rows * job->group, all = item->heads * rows;
    float factor = factor_of(job);
    struct block blocks[2];
    for (int h = 0; h < item->heads; h++) load_queries(job, tile, item->head + h, s, h * rows);
    find_block(job, tile, item->head, item->begin, &blocks[0]);
    for (int first = item->begin, turn = 0; first < item->end; first += KEYS, turn ^= 1) {
        const struct block *now = &blocks[turn], *next = &blocks[turn ^ 1];
        const int last = first + KEYS >= item->end;
        const struct item *then = last ? after : item;
        find_block(job, then->tile, then->head, last ? after->begin : first + KEYS, &blocks[turn ^ 1]);
        if (first % SPAN == 0) forget(&s->span, all, width);
        if (!PAIRS || rows > ROWS) {
            pack(s, now, next, dim, IS_BF16, PAIRS);
            attend_packed(job, tile, first, s, factor);
        }
#if CBD_AVX512
        for (int h = 0; PAIRS && rows <= ROWS && h < item->heads; h++) {
            score_few(s, h * rows, rows, now, next, h, dim / 2);
            for (int n = 0; n < rows; n++)
                weigh(s, h * rows + n, n, tile->start + n / job->group + 1 - first, width, factor);
            value_few(s, h * rows, rows, now, next, h, dim, width);
        }
#endif
        if (item->end - item->begin <= SPAN || (!last && (first + KEYS) % SPAN)) continue;
        if (first - first % SPAN == item->begin) forget(&s->before, all, width);
        for (int n = 0; n < all; n++) put_together(&s->before, &s->span, n, width, factor);
    }
}

/* How many KV heads of a tile are one item. All of them read a page in one go, which memory is fastest at; as long as
 * there are enough tiles for all threads to be busy to the end. */
INLINE int heads_together(const struct attention *job, const struct tile *tile, int parts) {
    const int rows = tile->rows * job->group;
    return PAIRS && rows <= ROWS && rows * job->kv_heads <= MOST_ROWS && job->tile_count >= 4 * parts
               ? job->kv_heads
               : 1;
}

INLINE int64_t cost(const struct attention *job, const struct tile *tile) {
    int64_t keys = tile->start + (tile->rows + 1) / 2;
    return (keys / KEYS + 1) * (PACKING + tile->rows * job->group);
}

/* The items whose middle, as costs go, lies in this part of the whole: a run of neighbours. */
INLINE void attend_items(const struct attention *job, struct scratch *s, int part, int parts) {
    int64_t whole = 0, before = 0;
    for (int n = 0; n < job->tile_count; n++) whole += cost(job, &job->tiles[n]) * job->kv_heads;
    for (int n = 0; n < job->tile_count; n++) {
        const struct tile *tile = job->tiles + n;
        const int heads = heads_together(job, tile, parts), rows = tile->rows * job->group;
        const int64_t each = cost(job, tile) * heads;
        for (int head = 0; head < job->kv_heads; head += heads, before += each) {
            if ((2 * before + each) * parts / (2 * whole) != part) continue;
            const int wraps = head + heads == job->kv_heads, ends = wraps && n + 1 == job->tile_count;
            const struct item item = all_keys(tile, head, heads);
            const struct item after = all_keys(ends ? NULL : tile + wraps, wraps ? 0 : head + heads, heads);
            attend(job, &item, &after, s);
            const struct state *state = item.end <= SPAN ? &s->span : &s->before;
            for (int h = 0; h < heads; h++) store_results(job, tile, head + h, state, h * rows);
        }
    }
}

/* Tiles of one row, so few that their spans are shared: each one's state to job->spans, and then a head's together. */
INLINE void attend_spans(const struct attention *job, struct scratch *s, int part, struct team *team) {
    const int rows = job->group, width = up_to(job->head_dim, TILE_COLUMNS), floats = rows * (width + 2);
    int64_t begin, end, at = 0, count = 0;
    for (int n = 0; n < job->tile_count; n++) count += spans_of(job->tiles + n) * job->kv_heads;
    share(count, part, team->parts, &begin, &end);
    for (int n = 0; n < job->tile_count; n++)
        for (int head = 0; head < job->kv_heads; head++)
            for (int span = 0, spans = spans_of(job->tiles + n); span < spans; span++, at++) {
                if (at < begin || at >= end) continue;
                struct item item = all_keys(job->tiles + n, head, 1), after = item;
                item.begin = span * SPAN, item.end = least(item.end, item.begin + SPAN);
                after.begin = item.end; /* the next span; behind the last there is none */
                attend(job, &item, &after, s);
                put_away(&s->span, job->spans + at * floats, rows, width);
            }
    team_barrier(team);
    share((int64_t)job->tile_count * job->kv_heads, part, team->parts, &begin, &end);
    at = 0;
    for (int64_t n = 0; n < end; n++) {
        const struct tile *tile = job->tiles + n / job->kv_heads;
        for (int span = 0, spans = spans_of(tile); span < spans; span++, at++) {
            if (n < begin) continue;
            if (!span) forget(&s->before, rows, width);
            take_out(&s->span, job->spans + at * floats, rows, width);
            for (int row = 0; row < rows; row++) put_together(&s->before, &s->span, row, width, factor_of(job));
        }
        if (n >= begin) store_results(job, tile, (int)(n % job->kv_heads), &s->before, 0);
    }
}

INLINE void attend_part(const struct attention *job, int part, struct team *team) {
    struct scratch scratch;
    int width = up_to(job->head_dim, TILE_COLUMNS);
    if (width > job->head_dim) memset(scratch.values, 0, sizeof(cell) * (size_t)(KEYS * width));
    if (job->spans)
        attend_spans(job, &scratch, part, team);
    else
        attend_items(job, &scratch, part, team->parts);
}

#endif
