/* A decoder, for one step, as one call: the threads meet at barriers instead of being called anew for
 * each operator, and nothing returns to Python in between, where after a model's weights have gone through the caches
 * each small operator costs 20 to 100 us.
 *
 * Knows the order of the operators; each is in its own file, and a step that calls them one by one computes the same
 * bits. Rows are contiguous in all buffers, which are the caller's and hold `buffer_rows` of native_linear.py each.
 *
 * Ids are looked up where slots have them: attention's tiles say which slot and which positions each row is of.
 *
 * The form in single operators is cbdisagg/engine/model.py.
 */
#include "activation.h"
#include "attention.h"
#include "gemm.h"
#include "norm.h"
#include "simd.h"

/* kernels/native_layers.py mirrors both structs field by field. A norm without weight or bias has NULL there. */
struct layer {
    const struct weight *qkv, *out, *up, *down;
    const void *attention_weight, *attention_bias, *feed_weight, *feed_bias;
};

struct layers {
    const struct layer *layers;
    struct attention attention; /* whose qkv, layer and out are set here */
    char *pool;                 /* [layer, page, K|V, kv_head, slot, head_dim] */
    void *x;                    /* [rows, hidden]: out, and in if nothing is looked up */
    void *normed;               /* [rows, hidden] */
    void *qkv, *attended;
    void *up;      /* [rows, up's columns] */
    void *fed;     /* [rows, down's inputs]; may be `up` where the activation takes one input for each output */
    void *scratch; /* of a product of int8 */
    const int64_t *chosen; /* rows that go on after the last layer's attention, in the order wanted; NULL: all */
    const int32_t *ids;    /* [slot, ids_width] */
    const void *embedding; /* [vocab, hidden], float32 or bfloat16; NULL: x is given */
    const void *places;    /* [position, hidden], added; or NULL */
    const void *final_weight, *final_bias;
    const struct weight *head;
    float *logits;       /* [drawn, the head's columns] */
    int64_t layer_bytes; /* from one layer of the pool to the next */
    int64_t ids_width;
    int32_t first, last, count; /* of the `count` layers, those from `first` to before `last` */
    int32_t rows, chosen_rows;
    int32_t hidden, activation, norm_first, centres;
    float eps;
    int32_t is_bf16, embedding_is_bf16;
    int32_t normed_at_last; /* by the final norm */
    int32_t drawn;          /* rows, the first of what comes out, whose logits are wanted */
};

/* Rounded before the position is added, as operators do it. */
INLINE void look_up_row(const struct layers *job, int64_t row, int64_t id, int64_t position, int is_bf16) {
    const int64_t to = row * job->hidden, from = id * job->hidden, place = position * job->hidden;
    int n = 0;
    for (; n + VW <= job->hidden; n += VW) {
        store_row(job->x, to + n, load_row(job->embedding, from + n, job->embedding_is_bf16), is_bf16);
        if (!job->places) continue;
        vec sum = load_row(job->x, to + n, is_bf16) + load_row(job->places, place + n, is_bf16);
        store_row(job->x, to + n, sum, is_bf16);
    }
    for (; n < job->hidden; n++) {
        store_one(job->x, to + n, load_one(job->embedding, from + n, job->embedding_is_bf16), is_bf16);
        if (!job->places) continue;
        float sum = load_one(job->x, to + n, is_bf16) + load_one(job->places, place + n, is_bf16);
        store_one(job->x, to + n, sum, is_bf16);
    }
}

/* This thread's rows of x. */
static void look_up(const struct layers *job, int part, struct team *team) {
    int64_t begin, end, row = 0;
    share(job->rows, part, team->parts, &begin, &end);
    for (int n = 0; n < job->attention.tile_count; n++) {
        const struct tile *tile = job->attention.tiles + n;
        const int32_t *ids = job->ids + tile->slot * job->ids_width;
        for (int position = tile->start; position < tile->start + tile->rows; position++, row++) {
            if (row < begin || row >= end) continue;
            if (job->is_bf16)
                look_up_row(job, row, ids[position], position, 1);
            else
                look_up_row(job, row, ids[position], position, 0);
        }
    }
}

static void multiply(const struct layers *job, const struct weight *weight, const void *x, void *y, const void *residual,
                     int rows, int part, struct team *team) {
    struct product product = {
        .weight = weight, .x = x, .y = y, .residual = residual, .scratch = job->scratch, .rows = rows,
        .x_stride = weight->inputs, .y_stride = weight->columns, .residual_stride = weight->columns,
    };
    product_part(&product, part, team);
    team_barrier(team);
}

static void normalise(const struct layers *job, const void *weight, const void *bias, void *out, int rows, int part,
                      struct team *team) {
    struct norm norm = {
        .x = job->x, .weight = weight, .bias = bias, .out = out, .rows = rows, .width = job->hidden,
        .x_stride = job->hidden, .out_stride = job->hidden, .eps = job->eps, .centres = job->centres,
        .is_bf16 = job->is_bf16,
    };
    norm_part(&norm, part, team);
    team_barrier(team);
}

/* The norm of all rows, in `normed`: where this thread is to read it. */
static const void *normed(const struct layers *job, const void *weight, const void *bias, int rows, int part,
                          struct team *team) {
    if (rows > ROWS_ALONE) {
        normalise(job, weight, bias, job->normed, rows, part, team);
        return job->normed;
    }
    struct team alone = {.parts = 1};
    void *own = (char *)job->normed + own_rows(rows, part) * job->hidden * (job->is_bf16 ? 2 : 4);
    normalise(job, weight, bias, own, rows, 0, &alone);
    return own;
}

/* Rows `chosen` of both buffers to their beginning, by way of `normed` and `qkv`, which are free then. */
static void keep_chosen(const struct layers *job, int width, int part, struct team *team) {
    const size_t size = job->is_bf16 ? 2 : 4, x_bytes = job->hidden * size, attended_bytes = width * size;
    int64_t begin, end;
    share(job->chosen_rows, part, team->parts, &begin, &end);
    for (int64_t n = begin; n < end; n++) {
        memcpy((char *)job->normed + n * x_bytes, (char *)job->x + job->chosen[n] * x_bytes, x_bytes);
        memcpy((char *)job->qkv + n * attended_bytes, (char *)job->attended + job->chosen[n] * attended_bytes,
               attended_bytes);
    }
    team_barrier(team);
    memcpy((char *)job->x + begin * x_bytes, (char *)job->normed + begin * x_bytes, (end - begin) * x_bytes);
    memcpy((char *)job->attended + begin * attended_bytes, (char *)job->qkv + begin * attended_bytes,
           (end - begin) * attended_bytes);
    team_barrier(team);
}

/* Keys and values of layer `n` into the pool, and what each row attends to, if `goes_on`. */
static void attend(const struct layers *job, int n, const void *x, int goes_on, int part, struct team *team) {
    struct attention attention = job->attention;
    attention.qkv = job->qkv;
    attention.layer = job->pool + n * job->layer_bytes;
    attention.out = job->attended;
    multiply(job, job->layers[n].qkv, x, job->qkv, NULL, job->rows, part, team);
    write_part(&attention, part, team);
    team_barrier(team);
    if (!goes_on) return;
    attention_part(&attention, part, team);
    team_barrier(team);
}

static void feed(const struct layers *job, const struct layer *layer, const void *x, int rows, int part,
                 struct team *team) {
    struct activation activation = {
        .x = job->up, .out = job->fed, .rows = rows, .width = layer->down->inputs, .kind = job->activation,
        .is_bf16 = job->is_bf16,
    };
    multiply(job, layer->up, x, job->up, NULL, rows, part, team);
    activation_part(&activation, part, team);
    team_barrier(team);
    multiply(job, layer->down, job->fed, job->x, job->x, rows, part, team);
}

/* What comes after the last layer. */
static void finish(const struct layers *job, int rows, int part, struct team *team) {
    if (job->normed_at_last) normalise(job, job->final_weight, job->final_bias, job->x, rows, part, team);
    if (!job->drawn) return;
    struct product product = {
        .weight = job->head, .x = job->x, .y = job->logits, .scratch = job->scratch, .rows = job->drawn,
        .x_stride = job->hidden, .y_stride = job->head->columns, .y_float = 1,
    };
    product_part(&product, part, team);
}

static void layers_part(void *data, int part, struct team *team) {
    const struct layers *job = data;
    if (job->first == 0 && job->embedding) {
        look_up(job, part, team);
        team_barrier(team);
    }
    for (int n = job->first; n < job->last; n++) {
        const struct layer *layer = job->layers + n;
        int ends = n == job->count - 1 && job->chosen, rows = ends ? job->chosen_rows : job->rows;
        const void *x = job->x;
        if (job->norm_first) x = normed(job, layer->attention_weight, layer->attention_bias, job->rows, part, team);
        attend(job, n, x, rows > 0, part, team);
        if (!rows) return;
        if (ends) keep_chosen(job, layer->out->inputs, part, team);
        multiply(job, layer->out, job->attended, job->x, job->x, rows, part, team);
        if (job->norm_first) {
            x = normed(job, layer->feed_weight, layer->feed_bias, rows, part, team);
            feed(job, layer, x, rows, part, team);
        } else {
            normalise(job, layer->attention_weight, layer->attention_bias, job->x, rows, part, team);
            feed(job, layer, job->x, rows, part, team);
            normalise(job, layer->feed_weight, layer->feed_bias, job->x, rows, part, team);
        }
        if (n == job->count - 1) finish(job, rows, part, team);
    }
}

EXPORT void cbd_layers(struct layers *job, int threads) { team_run(layers_part, job, threads); }
