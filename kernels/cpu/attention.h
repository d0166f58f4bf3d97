/* What attention and the writing of keys and values are told: one step's rows, and one layer's memory. */
#ifndef CBD_ATTENTION_H
#define CBD_ATTENTION_H

#include "common.h"

/* Rows [row, row + rows) of the step are tokens [start, start + rows) of the sequence in `slot`. */
struct tile {
    int32_t row, rows, start, slot;
};

/* The same in every layer but for qkv, layer and out. kernels/native_attention.py mirrors it field by field. */
struct attention {
    void *qkv;   /* rows of (heads + 2 kv_heads) * head_dim elements: queries, keys, values */
    void *layer; /* [page, K|V, kv_head, slot, head_dim] */
    void *out;   /* rows of heads * head_dim elements */
    const int32_t *pages;     /* [slot, page_width]: the pages of each sequence, in order */
    const struct tile *tiles; /* each row of the step is in one */
    const float *cosines, *sines; /* [position, head_dim / 2]; none: queries and keys are not turned */
    float *spans; /* of tiles of one row, whose spans are shared: group * (head_dim up to whole tiles + 2) for each span
                     and KV head; none: items are shared */
    int64_t qkv_stride, out_stride; /* elements from row to row */
    int32_t tile_count, rows, page_width;
    int32_t kv_heads, group, head_dim, page_size; /* `group`: query heads of a KV head */
    float scale;                                  /* of the scores */
    int32_t is_bf16;
};

/* Turn queries and keys in place, and put keys and values into their pages. */
void write_part(void *attention, int part, struct team *team);

/* After it, in all parts: fill `out`. */
void attention_part(void *attention, int part, struct team *team);

/* What it is in each dtype. */
void attention_bf16(const struct attention *attention, int part, struct team *team);
void attention_float(const struct attention *attention, int part, struct team *team);

#endif
