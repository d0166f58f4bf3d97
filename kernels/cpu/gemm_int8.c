/* int8 products: weights and rows quantised in groups of 64 along k, absolute maximum to 127, symmetric.
 *
 * y[m, n] = sum over groups g of ws[g, n] xs[m, g] (sum over k in g of w[n, k] x[m, k]); the inner sum is an exact
 * integer, the outer one float32, in order. Groups, because one large value spoils the scale of all that share it
 * (Dettmers et al. 2022 on outlier features; Yao et al. 2022, ZeroQuant, on groups).
 *
 * Layout of a panel (gemm.h), for each group: [16 steps of 128 bytes][32 scales in bfloat16]. vpdpbusd multiplies
 * unsigned by signed bytes, so a weight is kept as w + 128, and 128 times the group's sum of x is taken off again.
 * Scales are rounded up to bfloat16 before they are used, so their rounding costs nothing.
 *
 * Layout of a quantised row, for each group: [64 int8][float scale][int32: -128 times the sum of the 64].
 */
#include "gemm_vector.h"

enum { GROUP_STEPS = GROUP / 4, SCALES = GROUP_STEPS * STEP_BYTES, GROUP_BYTES = SCALES + PANEL * 2 };

struct row_group {
    int8_t x[GROUP];
    float scale;
    int32_t offset;
};

INLINE int64_t groups_of(int64_t inputs) {
    return (inputs + GROUP - 1) / GROUP;
}

EXPORT int64_t cbd_int8_panel_bytes(int64_t inputs) {
    return groups_of(inputs) * GROUP_BYTES;
}

EXPORT int64_t cbd_int8_row_bytes(int64_t inputs) {
    return groups_of(inputs) * (int64_t)sizeof(struct row_group);
}

/* ------------------------------------------------------------------------------------------------------ quantise */

/* `count` numbers of x to floats, zeros behind them. */
static void read_group(const void *x, int number, int64_t at, int64_t count, float *out) {
    const bf16 *narrow = (const bf16 *)x + at;
    if (count < GROUP) memset(out, 0, GROUP * sizeof *out);
    if (number == FLOAT32)
        memcpy(out, (const float *)x + at, count * sizeof *out);
    else if (count == GROUP)
        for (int n = 0; n < GROUP; n++) out[n] = from_bf16(narrow[n]);
    else
        for (int n = 0; n < count; n++) out[n] = from_bf16(narrow[n]);
}

/* What 1 stands for: 0 if all are next to nothing, so that the inverse is finite; NaN if one is. */
static float scale_of(const float *x) {
    /* The bits of floats without their sign are ordered as the floats are, NaN above all. */
    int32_t most = 0;
    for (int n = 0; n < GROUP; n++) {
        int32_t bits;
        memcpy(&bits, x + n, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float value;
    memcpy(&value, &most, sizeof value);
    return value < 1e-30f ? 0.0f : value / 127.0f;
}

INLINE float inverse_of(float scale) {
    return scale == 0.0f ? 0.0f : 1.0f / scale;
}

/* x times `inverse`, to the nearest integer, ties to even: the sum lands where floats are 1 apart. */
INLINE int32_t rounded(float x, float inverse) {
    const float magic = 12582912.0f; /* 1.5 * 2^23 */
    float moved = x * inverse + magic;
    int32_t bits;
    memcpy(&bits, &moved, sizeof bits);
    return bits - 0x4b400000;
}

static void quantise_row(const void *x, int number, int64_t inputs, struct row_group *row) {
    float values[GROUP];
    for (int64_t first = 0; first < inputs; first += GROUP, row++) {
        read_group(x, number, first, inputs - first < GROUP ? inputs - first : GROUP, values);
        row->scale = scale_of(values);
        float inverse = inverse_of(row->scale);
        int32_t sum = 0;
        for (int n = 0; n < GROUP; n++) {
            int32_t q = rounded(values[n], inverse);
            row->x[n] = (int8_t)q;
            sum += q;
        }
        row->offset = -128 * sum;
    }
}

/* ---------------------------------------------------------------------------------------------------------- tile */

/* acc + the sum of four products of each column's unsigned bytes with the signed bytes of a word of x; exact. */
INLINE ints dot_bytes(ints acc, words cell, uint32_t x) {
#if defined(CBD_AVX512)
    /* As an intrinsic, gcc 12 copies the accumulator around it. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(cell), "v"(_mm512_set1_epi32((int)x)));
    return acc;
#elif defined(CBD_AVX2)
    const __m256i bytes = _mm256_set1_epi32((int)x), low = _mm256_set1_epi16(0xff), pairs = (__m256i)cell;
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
    __m256i sum = _mm256_add_epi32((__m256i)acc, _mm256_madd_epi16(_mm256_and_si256(pairs, low), even));
    return (ints)_mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(pairs, 8), odd));
#else
    for (int shift = 0; shift < 32; shift += 8) acc += (ints)(cell >> shift & 0xff) * (int8_t)(x >> shift);
    return acc;
#endif
}

INLINE floats load_scales(const char *from) {
#if defined(CBD_AVX512)
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
    halves bits;
    memcpy(&bits, from, sizeof bits);
    return (floats)(__builtin_convertvector(bits, words) << 16);
#endif
}

INLINE void tile(const int rows, const struct product *product, int row, const char *panel, const char *ahead,
                 int ahead_stride, float out[][PANEL]) {
    const int64_t groups = groups_of(product->weight->inputs), stride = groups * (int64_t)sizeof(struct row_group);
    for (int first = 0; first < PANEL / CELL; first += CELLS) {
        const char *x = (const char *)product->scratch + row * stride, *x3 = x + 3 * stride;
        const char *cells = panel + first * CELL * 4, *scales = panel + SCALES + first * CELL * 2;
        floats acc[INT8_ROWS][CELLS * VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < CELLS * VECTORS; v++) acc[r][v] = (floats){0};
        for (int64_t group = 0; group < groups; group++) {
            ints sums[INT8_ROWS][CELLS * VECTORS];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const char *from = (r < 3 ? x : x3) + r % 3 * stride;
                const int32_t offset = (int32_t)load_word(from + offsetof(struct row_group, offset));
#pragma GCC unroll 8
                for (int v = 0; v < CELLS * VECTORS; v++) sums[r][v] = offset - (ints){0};
            }
#pragma GCC unroll 1
            for (int step = 0; step < GROUP_STEPS; step++) {
                words cell[CELLS * VECTORS];
#pragma GCC unroll 8
                for (int v = 0; v < CELLS * VECTORS; v++) cell[v] = in_register(load_words(cells + v * sizeof(words)));
                __builtin_prefetch(ahead, 0, 2);
                __builtin_prefetch(ahead + 64, 0, 2);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    uint32_t word = load_word((r < 3 ? x : x3) + r % 3 * stride);
#pragma GCC unroll 8
                    for (int v = 0; v < CELLS * VECTORS; v++) sums[r][v] = dot_bytes(sums[r][v], cell[v], word);
                }
                cells += STEP_BYTES;
                ahead += ahead_stride;
                x += 4, x3 += 4;
            }
            floats scale[CELLS * VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < CELLS * VECTORS; v++) scale[v] = load_scales(scales + v * LANES * 2);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                float row_scale; /* x stands behind the group's bytes now */
                memcpy(&row_scale, (r < 3 ? x : x3) + r % 3 * stride, sizeof row_scale);
#pragma GCC unroll 8
                for (int v = 0; v < CELLS * VECTORS; v++)
                    acc[r][v] = multiply_add(acc[r][v], __builtin_convertvector(sums[r][v], floats),
                                             scale[v] * repeat_float(row_scale));
            }
            cells += GROUP_BYTES - SCALES;
            scales += GROUP_BYTES;
            ahead += ahead_stride / 2; /* the scales' line */
            x += sizeof(struct row_group) - GROUP, x3 += sizeof(struct row_group) - GROUP;
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < CELLS * VECTORS; v++)
                memcpy(out[r] + first * CELL + v * LANES, &acc[r][v], sizeof(floats));
    }
}

#define ROWS_CASE(COUNT)                                                                                               \
    case COUNT:                                                                                                        \
        if (COUNT <= INT8_ROWS)                                                                                        \
            tile(COUNT <= INT8_ROWS ? COUNT : 1, product, row, panel, ahead, ahead_stride, out);                       \
        return;

static void tile_int8(const struct product *product, int row, int rows, const char *panel, const char *ahead,
                      int ahead_stride, float out[][PANEL]) {
    switch (rows) {
        ROWS_CASE(1)
        ROWS_CASE(2)
        ROWS_CASE(3)
        ROWS_CASE(4)
        ROWS_CASE(5)
        ROWS_CASE(6)
    }
}

void int8_part(const struct product *product, int part, struct team *team) {
    const struct weight *weight = product->weight;
    const int64_t row_bytes = cbd_int8_row_bytes(weight->inputs);
    const int64_t size = weight->rows_number == FLOAT32 ? 4 : 2;
    int64_t begin, end;
    share(product->rows, part, team->parts, &begin, &end);
    for (int64_t row = begin; row < end; row++)
        quantise_row((const char *)product->x + row * product->x_stride * size, weight->rows_number, weight->inputs,
                     (struct row_group *)((char *)product->scratch + row * row_bytes));
    team_barrier(team);
    product_tiles(product, tile_int8, INT8_ROWS, cbd_int8_panel_bytes(weight->inputs), part, team->parts);
}

/* ---------------------------------------------------------------------------------------------------------- pack */

struct packing {
    const void *from;
    char *to;
    int64_t columns, inputs;
    int number;
};

static void pack_column(const struct packing *packing, int64_t column, char *panel) {
    const int64_t n = column % PANEL;
    float values[GROUP];
    for (int64_t first = 0; first < packing->inputs; first += GROUP, panel += GROUP_BYTES) {
        int64_t count = packing->inputs - first < GROUP ? packing->inputs - first : GROUP;
        read_group(packing->from, packing->number, column * packing->inputs + first, count, values);
        const float wanted = scale_of(values);
        uint32_t bits;
        memcpy(&bits, &wanted, sizeof bits);
        const bf16 scale = (bf16)((bits + 0xffff) >> 16);
        const float inverse = inverse_of(from_bf16(scale));
        for (int k = 0; k < GROUP; k++)
            panel[k / 4 * STEP_BYTES + n * 4 + k % 4] = (char)(rounded(values[k], inverse) + 128);
        memcpy(panel + SCALES + n * 2, &scale, sizeof scale);
    }
}

static void pack_part(void *job, int part, struct team *team) {
    const struct packing *packing = job;
    const int64_t panel_bytes = cbd_int8_panel_bytes(packing->inputs);
    int64_t begin, end;
    share((packing->columns + PANEL - 1) / PANEL, part, team->parts, &begin, &end);
    memset(packing->to + begin * panel_bytes, 0, (end - begin) * panel_bytes);
    for (int64_t column = begin * PANEL; column < end * PANEL && column < packing->columns; column++)
        pack_column(packing, column, packing->to + column / PANEL * panel_bytes);
}

/* Quantise and pack [columns, inputs] of `number`, FLOAT32 or BFLOAT16; `to` has room for whole panels. */
EXPORT void cbd_pack_int8(const void *from, int number, char *to, int64_t columns, int64_t inputs, int threads) {
    struct packing packing = {from, to, columns, inputs, number};
    team_run(pack_part, &packing, threads);
}
