/* What attention_items.h is made of: where a block of keys lies, how it is packed, and the products with it.
 *
 * Layouts and the order of all sums are told there.
 */
#ifndef CBD_ATTENTION_TILE_H
#define CBD_ATTENTION_TILE_H

#include "attention.h"
#include "simd.h"

#if CBD_AVX512
enum { TILE_VECTORS = 4, HAS_PAIRS = 1 };
#else
enum { TILE_VECTORS = 2, HAS_PAIRS = 0 };
#endif

enum {
    TILE_COLUMNS = TILE_VECTORS * VW,
    KEYS = 64,
    SPAN = 256, /* keys: SPAN of native_attention.py */
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

/* What some keys come to, for each row: the largest score, the sum of the weights, and the sum of the weighed values,
 * [row, head_dim rounded up to whole tiles], which is not divided by that of the weights yet. */
struct state {
    float sums[MOST_ROWS * MOST_DIM];
    float best[MOST_ROWS], total[MOST_ROWS];
};

struct scratch {
    cell query[MOST_ROWS * MOST_DIM]; /* [row, step] */
    cell keys[MOST_DIM * KEYS];       /* [step, key] */
    cell values[KEYS * MOST_DIM];     /* [step, head_dim rounded up to whole tiles] */
    cell weights[ROWS * KEYS];        /* [row, step] */
    float scores[ROWS * KEYS];
    struct state span, before; /* of the span at hand, and of all before it */
} __attribute__((aligned(64)));

/* Where keys [first, first + count) of one KV head lie; the places behind the last repeat it, to a multiple of 16. */
struct block {
    const char *keys[KEYS];
    int count;
    int64_t to_values, to_head; /* bytes from a key to its value, and to the next KV head's */
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
INLINE __m512i quarters(const char *const *rows, int64_t at) {
    __m512i all = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[0] + at)));
    all = _mm512_mask_broadcast_i32x4(all, 0x00f0, _mm_loadu_si128((const __m128i *)(rows[4] + at)));
    all = _mm512_mask_broadcast_i32x4(all, 0x0f00, _mm_loadu_si128((const __m128i *)(rows[8] + at)));
    return _mm512_mask_broadcast_i32x4(all, 0xf000, _mm_loadu_si128((const __m128i *)(rows[12] + at)));
}

/* Four cells of 16 keys, `at` bytes from where each begins, transposed: a pair of bfloat16 or a float is four bytes. */
INLINE void turn_keys(const char *const *keys, int64_t at, __m512i *to) {
    __m512i a = quarters(keys, at), b = quarters(keys + 1, at), c = quarters(keys + 2, at), d = quarters(keys + 3, at);
    __m512i ab = _mm512_unpacklo_epi32(a, b), ab2 = _mm512_unpackhi_epi32(a, b);
    __m512i cd = _mm512_unpacklo_epi32(c, d), cd2 = _mm512_unpackhi_epi32(c, d);
    to[0] = _mm512_unpacklo_epi64(ab, cd), to[1] = _mm512_unpackhi_epi64(ab, cd);
    to[2] = _mm512_unpacklo_epi64(ab2, cd2), to[3] = _mm512_unpackhi_epi64(ab2, cd2);
}

INLINE void pack_keys(const char *const *keys, int steps, cell *to, int is_bf16) {
    (void)is_bf16;
    for (int k = 0; k < steps; k += 4) {
        __m512i turned[4];
        turn_keys(keys, 4 * k, turned);
        for (int i = 0; i < 4; i++) _mm512_store_si512(to + (k + i) * KEYS, turned[i]);
    }
}

/* Elements [dim, dim + 32) of two neighbouring keys' values, of which there are `head_dim`, interleaved. */
INLINE void pair_values(const char *first, const char *second, int dim, int head_dim, __m512i *to) {
    static const uint16_t order[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                       8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_loadu_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const int some = head_dim - dim;
    const __mmask32 mask = some >= 32 ? ~0u : some > 0 ? (1u << some) - 1 : 0;
    __m512i a = _mm512_maskz_loadu_epi16(mask, first + 2 * dim), b = _mm512_maskz_loadu_epi16(mask, second + 2 * dim);
    to[0] = _mm512_permutex2var_epi16(a, low, b), to[1] = _mm512_permutex2var_epi16(a, high, b);
}

INLINE void pack_value_pair(const char *first, const char *second, int head_dim, cell *to) {
    for (int d = 0; d < head_dim; d += 32) {
        __m512i paired[2];
        pair_values(first, second, d, head_dim, paired);
        _mm512_store_si512(to + d, paired[0]);
        _mm512_store_si512(to + d + 16, paired[1]);
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

/* Keys from `first` on that the last row of `tile` sees, at most KEYS. No tile, no keys. */
INLINE void find_block(const struct attention *job, const struct tile *tile, int head, int first, struct block *block) {
    int size = job->is_bf16 ? 2 : 4, page_size = job->page_size;
    int64_t row = (int64_t)job->head_dim * size, plane = row * page_size, page = 2 * plane * job->kv_heads;
    block->count = tile ? least(KEYS, tile->start + tile->rows - first) : 0;
    block->to_values = plane * job->kv_heads, block->to_head = plane;
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

#endif
