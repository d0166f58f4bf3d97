/* How a product is cut among threads and tiles, and what becomes of a tile: gemm.h. */
#include "gemm_vector.h"

/* Sums to y: bias and residual, then rounded to y's type. `count`: columns of the panel, all but the last have PANEL. */
INLINE void finish(const struct product *product, int row, int rows, int column, const int count, float out[][PANEL]) {
    const struct weight *weight = product->weight;
    const int narrow = weight->rows_number == BFLOAT16;
    for (int r = 0; r < rows; r++) {
        float *sums = out[r];
        if (weight->bias)
            for (int n = 0; n < count; n++) sums[n] += weight->bias[column + n];
        if (product->residual) {
            int64_t at = (row + r) * product->residual_stride + column;
            if (narrow)
                for (int n = 0; n < count; n++) sums[n] += from_bf16(((const bf16 *)product->residual)[at + n]);
            else
                for (int n = 0; n < count; n++) sums[n] += ((const float *)product->residual)[at + n];
        }
        int64_t at = (row + r) * product->y_stride + column;
        if (!narrow || product->y_float) {
            memcpy((float *)product->y + at, sums, count * sizeof(float));
        } else {
            bf16 *y = (bf16 *)product->y + at;
            int n = 0;
#if defined(CBD_AVX512)
            for (; n + LANES <= count; n += LANES)
                _mm256_storeu_si256((__m256i *)(y + n), (__m256i)_mm512_cvtneps_pbh(load_floats(sums + n)));
#endif
            for (; n < count; n++) y[n] = to_bf16(sums[n]);
        }
    }
}

void product_tiles(const struct product *product, tile_function *tile, int most, int64_t panel_bytes, int part,
                   int parts) {
    const struct weight *weight = product->weight;
    const int64_t panels = (weight->columns + PANEL - 1) / PANEL;
    const int64_t tiles = (product->rows + most - 1) / most; /* of a panel, of nearly equal heights */
    float out[16][PANEL] __attribute__((aligned(64)));
    int64_t begin, end;
    share(panels * tiles, part, parts, &begin, &end);
    for (int64_t n = begin; n < end; n++) {
        int64_t column = n / tiles, t = n % tiles;
        int row = (int)(product->rows * t / tiles), rows = (int)(product->rows * (t + 1) / tiles) - row;
        const char *panel = (const char *)weight->packed + column * panel_bytes;
        /* With few rows a panel is used as fast as it comes, and the hardware's own prefetching does best. With more, the
         * first two tiles of a panel fetch half of the next one each, while they multiply. Measured on Zen 4: all of the
         * bandwidth, or all of the speed of weights in L2. */
        const char *ahead = panel;
        int ahead_stride = 0;
        if (product->rows > FEW_ROWS && column + 1 < panels && t < 2) {
            ahead += panel_bytes + panel_bytes * t / 2;
            ahead_stride = tiles == 1 ? STEP_BYTES : STEP_BYTES / 2;
        }
        tile(product, row, rows, panel, ahead, ahead_stride, out);
        const int first = (int)column * PANEL, count = weight->columns - first;
        if (count >= PANEL)
            finish(product, row, rows, first, PANEL, out);
        else
            finish(product, row, rows, first, count, out);
    }
}

void product_part(const struct product *product, int part, struct team *team) {
    (product->weight->number == INT8 ? int8_part : float_part)(product, part, team);
}

static void run(void *job, int part, struct team *team) {
    product_part(job, part, team);
}

EXPORT void cbd_product(const struct product *product, int threads) {
    team_run(run, (void *)product, threads);
}

/* ---------------------------------------------------------------------------------------------------------- pack */

struct packing {
    const uint32_t *from;
    uint32_t *to;
    int64_t columns, words;
};

static void pack_part(void *job, int part, struct team *team) {
    const struct packing *packing = job;
    int64_t begin, end, words = packing->words;
    share((packing->columns + PANEL - 1) / PANEL, part, team->parts, &begin, &end);
    for (int64_t panel = begin; panel < end; panel++) {
        uint32_t *to = packing->to + panel * PANEL * words;
        for (int64_t n = 0; n < PANEL; n++) {
            int64_t column = panel * PANEL + n;
            for (int64_t word = 0; word < words; word++)
                to[word * PANEL + n] = column < packing->columns ? packing->from[column * words + word] : 0;
        }
    }
}

/* [columns, words] to panels: `to` has room for whole panels. */
EXPORT void cbd_pack(const uint32_t *from, uint32_t *to, int64_t columns, int64_t words, int threads) {
    struct packing packing = {from, to, columns, words};
    team_run(pack_part, &packing, threads);
}
