/* Attention over the paged pool: rows of any number of sequences, each row over all keys up to its own.
 *
 * Layout. One layer of the pool is [page, K|V, kv_head, slot, head_dim], contiguous. Queries and results are rows of
 * heads * head_dim elements, some stride apart; the `group` query heads of a KV head are neighbours. The work is cut into
 * tiles of neighbouring rows of one sequence (a decoding sequence is a tile of one row); one KV head of one tile is an
 * item, and items are what threads share.
 *
 * An item goes over its keys in blocks of KEYS, counted from the sequence's first token. Each block is packed once for
 * all rows of the item: keys transposed, [head_dim, key], values as they are, [key, head_dim]. Then both products,
 * scores = Q K^T and result = P V, are the same small kernel over 6 rows at once, with the softmax between them kept as a
 * running maximum and sum (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; the blocks are
 * those of Dao et al. 2022, "FlashAttention").
 *
 * With AVX-512 a bfloat16 product multiplies pairs: of neighbouring head_dims in Q K^T, of neighbouring keys in P V, so
 * weights are rounded to bfloat16 there, as torch rounds them. Everywhere else the products are in float32.
 *
 * A row's result does not depend on its tile, nor on what is computed beside it: blocks begin at fixed keys, each sum
 * runs over the keys or dimensions in order, and what a mask hides is added as an exact zero.
 *
 * The torch form is kernels/attention.py.
 */
#include "attention.h"
#include "simd.h"

#include <math.h>

#if CBD_AVX512
enum { TILE_VECTORS = 4, HAS_PAIRS = 1 };
#else
enum { TILE_VECTORS = 2, HAS_PAIRS = 0 };
#endif

enum {
    TILE_COLUMNS = TILE_VECTORS * VW,
    KEYS = 64,
    ROWS = 6, /* of a product's register tile */
    MOST_ROWS = 96, /* query heads times rows of a tile */
    MOST_DIM = 256,
    PACKING = 4, /* rows of computing that packing a block costs as much as */
    LINE = 64,
};

/* Four bytes: a float, or two bfloat16 numbers that are multiplied as a pair. */
typedef union {
    float number;
    bf16 pair[2];
} cell;

struct scratch {
    cell query[MOST_ROWS * MOST_DIM]; /* [row, step] */
    cell keys[MOST_DIM * KEYS];       /* [step, key] */
    cell values[KEYS * MOST_DIM];     /* [step, head_dim rounded up to whole tiles] */
    cell weights[ROWS * KEYS];        /* [row, step] */
    float scores[ROWS * KEYS];
    float sums[MOST_ROWS * MOST_DIM]; /* [row, head_dim rounded up]: the result, before it is divided by `total` */
    float best[MOST_ROWS], total[MOST_ROWS];
} __attribute__((aligned(64)));

/* Where keys [first, first + count) of one KV head lie; the places behind the last repeat it, up to a multiple of 16. */
struct block {
    const char *keys[KEYS];
    int count;
    int64_t to_values; /* bytes from a key to its value */
};

INLINE int up_to(int n, int unit) { return (n + unit - 1) / unit * unit; }
INLINE int least(int a, int b) { return a < b ? a : b; }

/* ------------------------------------------------------------------------------------------------------ products */

INLINE vec add_product(cell a, vec b, vec sum, int pairs) {
#if CBD_AVX512
    if (pairs) {
        int32_t both;
        memcpy(&both, &a, sizeof both);
        return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)_mm512_set1_epi32(both));
    }
#endif
    (void)pairs;
    return fma_(splat(a.number), b, sum);
}

/* out[r, c] (+)= sum over k of a[r, k] b[k, c], for a register tile of `rows` rows. */
INLINE void product_tile(int rows, int steps, const cell *a, int a_stride, const cell *b, int b_stride, float *out,
                         int out_stride, int fresh, int pairs) {
    vec sum[ROWS][TILE_VECTORS], column[TILE_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] = fresh ? splat(0.0f) : load(out + r * out_stride + v * VW);
    for (int k = 0; k < steps; k++) {
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++) column[v] = load(&b[(int64_t)k * b_stride + v * VW].number);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < TILE_VECTORS; v++)
                sum[r][v] = add_product(a[r * a_stride + k], column[v], sum[r][v], pairs);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++) store(out + r * out_stride + v * VW, sum[r][v]);
}

/* The same for up to ROWS rows and `columns`, a multiple of TILE_COLUMNS. */
INLINE void product(int rows, int columns, int steps, const cell *a, int a_stride, const cell *b, int b_stride,
                    float *out, int out_stride, int fresh, int pairs) {
    for (int c = 0; c < columns; c += TILE_COLUMNS) {
        switch (rows) {
#define WITH_ROWS(n) \
    case n: product_tile(n, steps, a, a_stride, b + c, b_stride, out + c, out_stride, fresh, pairs); break;
            WITH_ROWS(1) WITH_ROWS(2) WITH_ROWS(3) WITH_ROWS(4) WITH_ROWS(5) WITH_ROWS(6)
#undef WITH_ROWS
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- packing */

#if CBD_AVX512

/* Four rows' quarters `at`, one in each quarter of the result: broadcast loads that are merged, so no shuffle. */
INLINE __m512i quarters(const char *const *rows, int at) {
    __m512i all = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[0] + at)));
    all = _mm512_mask_broadcast_i32x4(all, 0x00f0, _mm_loadu_si128((const __m128i *)(rows[4] + at)));
    all = _mm512_mask_broadcast_i32x4(all, 0x0f00, _mm_loadu_si128((const __m128i *)(rows[8] + at)));
    return _mm512_mask_broadcast_i32x4(all, 0xf000, _mm_loadu_si128((const __m128i *)(rows[12] + at)));
}

/* Cells of 16 keys, transposed: a pair of bfloat16 or a float is four bytes either way. */
INLINE void pack_keys(const char *const *keys, int steps, cell *to, int is_bf16) {
    (void)is_bf16;
    for (int k = 0; k < steps; k += 4) {
        __m512i a = quarters(keys, 4 * k), b = quarters(keys + 1, 4 * k);
        __m512i c = quarters(keys + 2, 4 * k), d = quarters(keys + 3, 4 * k);
        __m512i ab = _mm512_unpacklo_epi32(a, b), ab2 = _mm512_unpackhi_epi32(a, b);
        __m512i cd = _mm512_unpacklo_epi32(c, d), cd2 = _mm512_unpackhi_epi32(c, d);
        _mm512_store_si512(to + k * KEYS, _mm512_unpacklo_epi64(ab, cd));
        _mm512_store_si512(to + (k + 1) * KEYS, _mm512_unpackhi_epi64(ab, cd));
        _mm512_store_si512(to + (k + 2) * KEYS, _mm512_unpacklo_epi64(ab2, cd2));
        _mm512_store_si512(to + (k + 3) * KEYS, _mm512_unpackhi_epi64(ab2, cd2));
    }
}

/* Two neighbouring keys' values, interleaved. */
INLINE void pack_value_pair(const char *first, const char *second, int head_dim, cell *to) {
    static const uint16_t order[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                       8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_loadu_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int d = 0; d < head_dim; d += 32) {
        int some = least(32, head_dim - d);
        __mmask32 mask = some == 32 ? ~0u : (1u << some) - 1;
        __m512i a = _mm512_maskz_loadu_epi16(mask, first + 2 * d), b = _mm512_maskz_loadu_epi16(mask, second + 2 * d);
        _mm512_store_si512(to + d, _mm512_permutex2var_epi16(a, low, b));
        _mm512_store_si512(to + d + 16, _mm512_permutex2var_epi16(a, high, b));
    }
}

#else

typedef float quad __attribute__((vector_size(16)));
#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, (__typeof__((ivec4){0})){i, j, k, l})
typedef int32_t ivec4 __attribute__((vector_size(16)));
#endif

INLINE quad load_quad(const char *row, int at, int is_bf16) {
    quad q;
    if (!is_bf16) {
        memcpy(&q, row + 4 * at, sizeof q);
        return q;
    }
    bf16 half[4];
    memcpy(half, row + 2 * at, sizeof half);
    return (quad){from_bf16(half[0]), from_bf16(half[1]), from_bf16(half[2]), from_bf16(half[3])};
}

/* Floats of 16 keys, transposed four by four. */
INLINE void pack_keys(const char *const *keys, int steps, cell *to, int is_bf16) {
    for (int key = 0; key < 16; key += 4) {
        for (int k = 0; k < steps; k += 4) {
            quad a = load_quad(keys[key], k, is_bf16), b = load_quad(keys[key + 1], k, is_bf16);
            quad c = load_quad(keys[key + 2], k, is_bf16), d = load_quad(keys[key + 3], k, is_bf16);
            quad ab = PICK(a, b, 0, 4, 1, 5), ab2 = PICK(a, b, 2, 6, 3, 7);
            quad cd = PICK(c, d, 0, 4, 1, 5), cd2 = PICK(c, d, 2, 6, 3, 7);
            quad turned[4] = {PICK(ab, cd, 0, 1, 4, 5), PICK(ab, cd, 2, 3, 6, 7), PICK(ab2, cd2, 0, 1, 4, 5),
                              PICK(ab2, cd2, 2, 3, 6, 7)};
            for (int i = 0; i < 4; i++) memcpy(to + (k + i) * KEYS + key, &turned[i], sizeof turned[i]);
        }
    }
}

#endif

/* A row of either dtype as floats. */
INLINE void widen(const void *from, int count, float *to, int is_bf16) {
    int n = 0;
    for (; n + VW <= count; n += VW) store(to + n, load_row(from, n, is_bf16));
    for (; n < count; n++) to[n] = load_one(from, n, is_bf16);
}

INLINE void prefetch_row(const char *row, int bytes) {
    for (int at = 0; at < bytes; at += LINE) __builtin_prefetch(row + at, 0, 2);
}

/* Keys and values of `now`, packed; those of `next` on their way from memory meanwhile. */
INLINE void pack(struct scratch *s, const struct block *now, const struct block *next, int head_dim, int is_bf16,
                 int pairs) {
    int width = up_to(head_dim, TILE_COLUMNS), bytes = head_dim * (is_bf16 ? 2 : 4);
    for (int key = 0; key < now->count; key += 16) {
        for (int n = key; n < least(key + 16, next->count); n++) prefetch_row(next->keys[n], bytes);
        pack_keys(now->keys + key, pairs ? head_dim / 2 : head_dim, s->keys + key, is_bf16);
    }
    for (int key = 0; key < now->count; key += 2) {
        const char *first = now->keys[key] + now->to_values, *second = now->keys[key + 1] + now->to_values;
        for (int n = key; n < least(key + 2, next->count); n++) prefetch_row(next->keys[n] + next->to_values, bytes);
#if CBD_AVX512
        if (pairs) {
            pack_value_pair(first, second, head_dim, s->values + key / 2 * width);
            continue;
        }
#endif
        widen(first, head_dim, &s->values[key * width].number, is_bf16);
        widen(second, head_dim, &s->values[(key + 1) * width].number, is_bf16);
    }
}

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

/* Keys from `first` on that the last row of `tile` sees, at most KEYS. No tile, no keys. */
INLINE void find_block(const struct attention *job, const struct tile *tile, int head, int first, struct block *block) {
    int size = job->is_bf16 ? 2 : 4, page_size = job->page_size;
    int64_t row = (int64_t)job->head_dim * size, plane = row * page_size, page = 2 * plane * job->kv_heads;
    block->count = tile ? least(KEYS, tile->start + tile->rows - first) : 0;
    block->to_values = plane * job->kv_heads;
    if (block->count <= 0) return;
    const int32_t *pages = job->pages + (int64_t)tile->slot * job->page_width;
    int key = 0, at = first / page_size, slot = first % page_size;
    while (key < block->count) {
        const char *keys = (const char *)job->layer + pages[at++] * page + head * plane + slot * row;
        for (; slot < page_size && key < block->count; slot++, keys += row) block->keys[key++] = keys;
        slot = 0;
    }
    for (; key % 16; key++) block->keys[key] = block->keys[block->count - 1];
}

INLINE void load_queries(const struct attention *job, const struct tile *tile, int head, struct scratch *s, int is_bf16,
                         int pairs) {
    int size = is_bf16 ? 2 : 4, dim = job->head_dim, steps = pairs ? dim / 2 : dim;
    for (int n = 0; n < tile->rows * job->group; n++) {
        int64_t row = tile->row + n / job->group, at = (int64_t)(head * job->group + n % job->group) * dim;
        const char *from = (const char *)job->qkv + (row * job->qkv_stride + at) * size;
        if (pairs)
            memcpy(s->query + n * steps, from, (size_t)dim * 2);
        else
            widen(from, dim, &s->query[n * steps].number, is_bf16);
    }
}

INLINE void store_results(const struct attention *job, const struct tile *tile, int head, const struct scratch *s,
                          int is_bf16) {
    int dim = job->head_dim, width = up_to(dim, TILE_COLUMNS);
    for (int n = 0; n < tile->rows * job->group; n++) {
        int64_t row = tile->row + n / job->group, at = (int64_t)(head * job->group + n % job->group) * dim;
        const float *sums = s->sums + n * width;
        float part = 1.0f / s->total[n];
        at += row * job->out_stride;
        int d = 0;
        for (; d + VW <= dim; d += VW) store_row(job->out, at + d, load(sums + d) * splat(part), is_bf16);
        for (; d < dim; d++) store_one(job->out, at + d, sums[d] * part, is_bf16);
    }
}

INLINE void attend(const struct attention *job, const struct tile *tile, int head, const struct tile *next_tile,
                   int next_head, struct scratch *s, int is_bf16) {
    const int pairs = HAS_PAIRS && is_bf16;
    int dim = job->head_dim, width = up_to(dim, TILE_COLUMNS), steps = pairs ? dim / 2 : dim;
    int rows = tile->rows * job->group, keys = tile->start + tile->rows;
    float factor = job->scale * 1.44269504f; /* log2 of e: weights are powers of 2 */
    struct block blocks[2];
    load_queries(job, tile, head, s, is_bf16, pairs);
    memset(s->sums, 0, sizeof(float) * (size_t)(rows * width));
    for (int n = 0; n < rows; n++) s->total[n] = 0.0f, s->best[n] = -INFINITY;

    find_block(job, tile, head, 0, &blocks[0]);
    for (int first = 0, turn = 0; first < keys; first += KEYS, turn ^= 1) {
        int last = first + KEYS >= keys;
        find_block(job, last ? next_tile : tile, last ? next_head : head, last ? 0 : first + KEYS, &blocks[turn ^ 1]);
        pack(s, &blocks[turn], &blocks[turn ^ 1], dim, is_bf16, pairs);
        for (int row = 0; row < rows; row += ROWS) {
            int some = least(ROWS, rows - row);
            int span = least(KEYS, tile->start + (row + some - 1) / job->group + 1 - first);
            if (span <= 0) continue;
            product(some, KEYS, steps, s->query + row * steps, steps, s->keys, KEYS, s->scores, KEYS, 1, pairs);
            for (int n = 0; n < some; n++)
                weigh(s, row + n, n, tile->start + (row + n) / job->group + 1 - first, width, factor, pairs);
            product(some, width, pairs ? (span + 1) / 2 : span, s->weights, KEYS, s->values, width,
                    s->sums + row * width, width, 0, pairs);
        }
    }
    store_results(job, tile, head, s, is_bf16);
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
        int64_t each = cost(job, tile);
        for (int head = 0; head < job->kv_heads; head++, before += each) {
            if ((2 * before + each) * parts / (2 * whole) != part) continue;
            int wraps = head + 1 == job->kv_heads, ends = wraps && n + 1 == job->tile_count;
            attend(job, tile, head, ends ? NULL : tile + wraps, wraps ? 0 : head + 1, &scratch, is_bf16);
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
