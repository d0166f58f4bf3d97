/* int8 products: weights and rows quantised in groups of 64 along k, symmetric; a row's largest magnitude becomes 127.
 *
 * y[m, n] = sum over groups g of ws[g, n] xs[m, g] (sum over k in g of w[n, k] x[m, k]); the inner sum is an exact
 * integer, the outer one float32, in order. Groups, because one large value spoils the scale of all that share it
 * (Dettmers et al. 2022 on outlier features; Yao et al. 2022, ZeroQuant, on groups).
 *
 * Layout of a panel (gemm.h), for each group: [16 steps of 128 bytes][32 scales in bfloat16]. vpdpbusd multiplies
 * unsigned by signed bytes, so a weight is kept as w + 128, and 128 times the group's sum of x is taken off again.
 * A weight's scales are bfloat16: of the numbers around the largest magnitude / 127 the one whose weights are nearest to
 * the true ones (least squares).
 *
 * Layout of a quantised row, for each group: [64 int8][float scale][int32: MAGIC - 128 times the sum of the 64].
 */
#include "gemm_vector.h"

#include <math.h>

/* As the bits of a float, 1.5 * 2^23, around which floats are 1 apart. So integers below 2^22 that are added to the bits
 * are added to the float, and the other way round: an integer is converted by an addition. A group's sum is below 2^20,
 * and where products keep the multipliers busy, adders are free (Zen 4). */
enum { MAGIC = 0x4b400000 };
static const float magic = 12582912.0f;

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

enum { PARTS = GROUP / LANES }; /* vectors of a group */

/* Bits of bfloat16 to floats. */
INLINE floats widen(const void *from) {
#if defined(CBD_AVX512)
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16);
#else
    typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
    halves bits;
    memcpy(&bits, from, sizeof bits);
    return (floats)(__builtin_convertvector(bits, words) << 16);
#endif
}

/* `count` numbers of a group, zeros behind them. */
INLINE void read_group(const char *x, int number, int64_t count, floats *out) {
    const int64_t size = number == FLOAT32 ? 4 : 2;
    char whole[GROUP * 4] __attribute__((aligned(64)));
    if (count < GROUP) {
        memset(whole, 0, sizeof whole);
        memcpy(whole, x, count * size);
        x = whole;
    }
    for (int n = 0; n < PARTS; n++)
        out[n] = number == FLOAT32 ? load_floats(x + n * sizeof(floats)) : widen(x + n * LANES * 2);
}

INLINE int32_t largest_lane(ints x) {
#if defined(CBD_AVX512)
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
#endif
}

INLINE int32_t sum_of_lanes(ints x) {
#if defined(CBD_AVX512)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
#endif
}

/* What 1 stands for: 0 if all are next to nothing, so that the inverse is finite; NaN if one is. */
INLINE float scale_of(const floats *x) {
    /* The bits of floats without their sign are ordered as the floats are, NaN above all. */
    ints most = {0};
    for (int n = 0; n < PARTS; n++) {
        ints bits = (ints)x[n] & 0x7fffffff, above = bits > most;
        most = (bits & above) | (most & ~above);
    }
    const int32_t best = largest_lane(most);
    float value;
    memcpy(&value, &best, sizeof value);
    return value < 1e-30f ? 0.0f : value / 127.0f;
}

/* x over the scale, to the nearest integers, ties to even. */
INLINE void round_group(const floats *x, float scale, ints *out) {
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    for (int n = 0; n < PARTS; n++) out[n] = (ints)(x[n] * inverse + magic) - MAGIC;
}

static void quantise_row(const char *x, int number, int64_t inputs, struct row_group *row) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    const int64_t size = number == FLOAT32 ? 4 : 2;
    for (int64_t first = 0; first < inputs; first += GROUP, row++) {
        floats values[PARTS];
        ints whole[PARTS], sums = {0};
        read_group(x + first * size, number, inputs - first < GROUP ? inputs - first : GROUP, values);
        row->scale = scale_of(values);
        round_group(values, row->scale, whole);
        for (int n = 0; n < PARTS; n++) {
            bytes narrow = __builtin_convertvector(whole[n], bytes);
            memcpy(row->x + n * LANES, &narrow, sizeof narrow);
            sums += whole[n];
        }
        row->offset = MAGIC - 128 * sum_of_lanes(sums);
    }
}

/* ---------------------------------------------------------------------------------------------------------- tile */

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
                fetch(ahead);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    uint32_t word = load_word((r < 3 ? x : x3) + r % 3 * stride);
#pragma GCC unroll 8
                    for (int v = 0; v < CELLS * VECTORS; v++) sums[r][v] = dot_bytes(sums[r][v], cell[v], word);
                }
                cells += STEP_BYTES;
                ahead += ahead_stride * CELLS / 2;
                x += 4, x3 += 4;
            }
            floats scale[CELLS * VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < CELLS * VECTORS; v++) scale[v] = widen(scales + v * LANES * 2);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                float row_scale; /* x stands behind the group's bytes now */
                memcpy(&row_scale, (r < 3 ? x : x3) + r % 3 * stride, sizeof row_scale);
#pragma GCC unroll 8
                for (int v = 0; v < CELLS * VECTORS; v++)
                    acc[r][v] = multiply_add(acc[r][v], (floats)sums[r][v] - magic, scale[v] * repeat_float(row_scale));
            }
            cells += GROUP_BYTES - SCALES;
            scales += GROUP_BYTES;
            ahead += ahead_stride * CELLS / 4; /* the scales' line */
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
    struct product own = *product; /* of this thread: where its quantised rows are */
    own.scratch = (char *)product->scratch + own_rows(product->rows, part) * row_bytes;
    const int alone = product->rows <= ROWS_ALONE;
    share(product->rows, alone ? 0 : part, alone ? 1 : team->parts, &begin, &end);
    for (int64_t row = begin; row < end; row++)
        quantise_row((const char *)product->x + row * product->x_stride * size, weight->rows_number, weight->inputs,
                     (struct row_group *)((char *)own.scratch + row * row_bytes));
    if (!alone) team_barrier(team);
    product_tiles(&own, tile_int8, INT8_ROWS, cbd_int8_panel_bytes(weight->inputs), part, team->parts);
}

/* ---------------------------------------------------------------------------------------------------------- pack */

struct packing {
    const void *from;
    char *to;
    int64_t columns, inputs;
    int number;
};

/* Scales that are tried: so many steps of bfloat16, of 0.4 to 0.8 %, above the one that just clips nothing, and below it.
 * Clipping more hardly ever pays; larger ones do where weights lie on a grid of their own, as those do that were once
 * stored in four bits. */
enum { ABOVE = 32, BELOW = 8 };

/* x over the scale, to the nearest integers that a packed weight can be. */
INLINE void round_weights(const floats *x, float scale, ints *out) {
    round_group(x, scale, out);
    for (int n = 0; n < PARTS; n++) {
        ints low = out[n] < -128, high = out[n] > 127;
        out[n] = (low & -128) | (high & 127) | (~(low | high) & out[n]);
    }
}

/* Squared distance of the weights from what they become. */
static double distance(const floats *x, float scale) {
    ints whole[PARTS];
    float off[GROUP];
    double sums[8] = {0}, sum = 0;
    round_weights(x, scale, whole);
    for (int n = 0; n < PARTS; n++) {
        floats rest = x[n] - __builtin_convertvector(whole[n], floats) * repeat_float(scale);
        memcpy(off + n * LANES, &rest, sizeof rest);
    }
    for (int k = 0; k < GROUP; k += 8)
        for (int n = 0; n < 8; n++) sums[n] += (double)off[k + n] * off[k + n];
    for (int n = 0; n < 8; n++) sum += sums[n];
    return sum;
}

static bf16 choose_scale(const floats *x) {
    const float wanted = scale_of(x);
    uint32_t bits;
    memcpy(&bits, &wanted, sizeof bits);
    bf16 best = (bf16)((bits + 0xffff) >> 16);
    if (!(wanted > 0)) return best;
    double least = INFINITY;
    for (bf16 scale = best + ABOVE, last = best - BELOW - 1; scale > last; scale--) {
        double found = distance(x, from_bf16(scale));
        if (found < least) least = found, best = scale;
    }
    return best;
}

static void pack_column(const struct packing *packing, int64_t column, char *panel) {
    const int64_t n = column % PANEL, size = packing->number == FLOAT32 ? 4 : 2;
    const char *from = (const char *)packing->from + column * packing->inputs * size;
    for (int64_t first = 0; first < packing->inputs; first += GROUP, panel += GROUP_BYTES) {
        floats values[PARTS];
        ints whole[PARTS];
        int64_t count = packing->inputs - first < GROUP ? packing->inputs - first : GROUP;
        read_group(from + first * size, packing->number, count, values);
        const bf16 scale = choose_scale(values);
        round_weights(values, from_bf16(scale), whole);
        for (int k = 0; k < GROUP; k++)
            panel[k / 4 * STEP_BYTES + n * 4 + k % 4] = (char)(whole[k / LANES][k % LANES] + 128);
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
