/* Rotary positions and the writing of keys and values, in one pass over the step's rows.
 *
 * Layout as in attention.h. The pair (i, i + head_dim / 2) of a head is turned by its position's angle i (Su et al. 2021,
 * "RoFormer", in the half-split form of Llama's checkpoints), in float32 whatever the dtype, rounded once.
 *
 * The torch forms are kernels/rope.py and kernels/kv_write.py.
 */
#include "attention.h"
#include "simd.h"

INLINE void turn(void *heads, int64_t at, int half, const float *cosines, const float *sines, int is_bf16) {
    int i = 0;
    for (; i + VW <= half; i += VW) {
        vec first = load_row(heads, at + i, is_bf16), second = load_row(heads, at + half + i, is_bf16);
        vec c = load(cosines + i), s = load(sines + i);
        store_row(heads, at + i, fma_(first, c, splat(0.0f) - second * s), is_bf16);
        store_row(heads, at + half + i, fma_(second, c, first * s), is_bf16);
    }
    for (; i < half; i++) {
        float first = load_one(heads, at + i, is_bf16), second = load_one(heads, at + half + i, is_bf16);
        store_one(heads, at + i, first * cosines[i] - second * sines[i], is_bf16);
        store_one(heads, at + half + i, second * cosines[i] + first * sines[i], is_bf16);
    }
}

INLINE void write_row(const struct attention *job, const struct tile *tile, int row, int is_bf16) {
    int dim = job->head_dim, half = dim / 2, heads = job->kv_heads * job->group, position = tile->start + row;
    int64_t size = is_bf16 ? 2 : 4, at = (tile->row + row) * job->qkv_stride;
    if (job->cosines)
        for (int head = 0; head < heads + job->kv_heads; head++) {
            int64_t angle = (int64_t)position * half;
            turn(job->qkv, at + head * dim, half, job->cosines + angle, job->sines + angle, is_bf16);
        }
    int64_t page = job->pages[(int64_t)tile->slot * job->page_width + position / job->page_size];
    int64_t plane = (int64_t)job->page_size * dim;
    char *to = (char *)job->layer + (page * 2 * job->kv_heads * plane + position % job->page_size * dim) * size;
    const char *from = (const char *)job->qkv + (at + heads * dim) * size;
    for (int n = 0; n < 2 * job->kv_heads; n++) memcpy(to + n * plane * size, from + n * dim * size, (size_t)(dim * size));
}

void write_part(void *job, int part, struct team *team) {
    const struct attention *attention = job;
    int64_t begin, end, row = 0;
    share(attention->rows, part, team->parts, &begin, &end);
    for (int n = 0; n < attention->tile_count; n++) {
        const struct tile *tile = attention->tiles + n;
        for (int within = 0; within < tile->rows; within++, row++) {
            if (row < begin || row >= end) continue;
            if (attention->is_bf16)
                write_row(attention, tile, within, 1);
            else
                write_row(attention, tile, within, 0);
        }
    }
}

EXPORT void cbd_write(struct attention *job, int threads) { team_run(write_part, job, threads); }
