/* One step of a model of two layers with made-up weights, by all kernels, printed as numbers: for compilers and processors
 * whose libraries Python cannot load. test_native_portability.py compiles it with kernels/cpu and compares what it says.
 *
 * Two sequences, one that decodes and one with a chunk of its prompt in two tiles, over a pool that is full already.
 * For each kind of number: a line of logits, of tokens drawn, of log probabilities.
 */
#include "draw.c"
#include "layers.c"
#include "score.c"

#include <stdio.h>
#include <stdlib.h>

enum {
    LAYERS = 2, KV_HEADS = 2, PER_GROUP = 2, HEADS = KV_HEADS * PER_GROUP, DIM = 40, HIDDEN = HEADS * DIM, INNER = 168,
    ROWS_OF_STEP = 20, PAGE = 8, PAGES = 12, PAGE_WIDTH = 6, POSITIONS = PAGE * PAGE_WIDTH, VOCAB = 333, DRAWN = 3,
    ALTERNATIVES = 4,
};

void cbd_pack(const uint32_t *from, uint32_t *to, int64_t columns, int64_t words, int threads);
int64_t cbd_int8_panel_bytes(int64_t inputs);
int64_t cbd_int8_row_bytes(int64_t inputs);
void cbd_pack_int8(const void *from, int number, char *to, int64_t columns, int64_t inputs, int threads);
void cbd_product(const struct product *product, int threads);

static uint32_t state;

static float some_number(void) { /* in [-1, 1) */
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

static void *lines(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64 + 64); }

static void *numbers(int64_t count, float around, float spread, int is_bf16) {
    void *made = lines(count * 4);
    for (int64_t n = 0; n < count; n++) store_one(made, n, around + spread * some_number(), is_bf16);
    return made;
}

static struct weight *weight_of(int columns, int inputs, int is_int8, int is_bf16) {
    const int number = is_bf16 ? BFLOAT16 : FLOAT32;
    void *plain = numbers((int64_t)columns * inputs, 0, 0.15f, is_bf16);
    const int64_t panels = (columns + PANEL - 1) / PANEL, words = words_of(number, inputs);
    char *packed = lines(panels * (is_int8 ? cbd_int8_panel_bytes(inputs) : words * STEP_BYTES));
    if (is_int8)
        cbd_pack_int8(plain, number, packed, columns, inputs, 1);
    else
        cbd_pack(plain, (uint32_t *)packed, columns, words, 1);
    struct weight *weight = malloc(sizeof *weight);
    *weight = (struct weight){packed, numbers(columns, 0, 0.1f, 0), columns, inputs, is_int8 ? INT8 : number, number};
    return weight;
}

static void run_layers(void *x, int is_int8, int is_bf16) {
    static const int32_t pages[2][PAGE_WIDTH] = {{7, 2, 9, 0, 11, 4}, {3, 10, 1, 8, 5, 6}};
    static const struct tile tiles[3] = {{0, 1, 37, 0}, {1, 12, 5, 1}, {13, 7, 17, 1}};
    struct layer layers[LAYERS];
    for (int n = 0; n < LAYERS; n++)
        layers[n] = (struct layer){
            weight_of((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, is_int8, is_bf16),
            weight_of(HIDDEN, HEADS * DIM, is_int8, is_bf16),
            weight_of(2 * INNER, HIDDEN, is_int8, is_bf16),
            weight_of(HIDDEN, INNER, is_int8, is_bf16),
            numbers(HIDDEN, 1, 0.2f, is_bf16), NULL, numbers(HIDDEN, 1, 0.2f, is_bf16), NULL,
        };
    const int64_t layer_numbers = (int64_t)PAGES * 2 * KV_HEADS * PAGE * DIM;
    float *cosines = numbers(POSITIONS * DIM / 2, 0, 1, 0), *sines = lines(POSITIONS * DIM * 2);
    for (int n = 0; n < POSITIONS * DIM / 2; n++) sines[n] = sqrtf(1 - cosines[n] * cosines[n]);
    struct layers job = {
        .layers = layers, .pool = numbers(LAYERS * layer_numbers, 0, 1, is_bf16), .x = x,
        .normed = lines(ROWS_OF_STEP * HIDDEN * 4), .qkv = lines(ROWS_OF_STEP * (HEADS + 2 * KV_HEADS) * DIM * 4),
        .attended = lines(ROWS_OF_STEP * HEADS * DIM * 4), .up = lines(ROWS_OF_STEP * 2 * INNER * 4),
        .fed = lines(ROWS_OF_STEP * INNER * 4), .scratch = lines(ROWS_OF_STEP * cbd_int8_row_bytes(2 * INNER)),
        .layer_bytes = layer_numbers * (is_bf16 ? 2 : 4), .last = LAYERS, .count = LAYERS, .rows = ROWS_OF_STEP,
        .hidden = HIDDEN, .activation = SILU_MUL, .norm_first = 1, .eps = 1e-5f, .is_bf16 = is_bf16,
        .attention = {
            .pages = pages[0], .tiles = tiles, .cosines = cosines, .sines = sines, .tile_count = 3,
            .qkv_stride = (HEADS + 2 * KV_HEADS) * DIM, .out_stride = HEADS * DIM, .rows = ROWS_OF_STEP,
            .page_width = PAGE_WIDTH, .kv_heads = KV_HEADS, .group = PER_GROUP, .head_dim = DIM, .page_size = PAGE,
            .scale = 0.158f, .is_bf16 = is_bf16,
        },
    };
    cbd_layers(&job, 1);
}

static void draw_and_score(const float *logits) {
    static const int32_t seen[2] = {5, 77};
    static const float counts[2] = {0, 2};
    struct draw draws[DRAWN] = {
        {.seed = 7, .top_p = 1, .temperature = 0.8f},
        {.seed = 8, .top_p = 0.7, .temperature = 1.3f, .top_k = 50},
        {.seed = 9, .top_p = 0.9, .temperature = 1, .seen = seen, .counts = counts, .seen_count = 2, .frequency = 0.5f},
    };
    int32_t ids[DRAWN][ALTERNATIVES];
    float values[DRAWN][ALTERNATIVES];
    struct score scores[DRAWN];
    for (int n = 0; n < DRAWN; n++) {
        draws[n].logits = logits + n * VOCAB;
        draws[n].floor = -INFINITY, draws[n].repetition = 1, draws[n].position = (uint32_t)n;
        scores[n] = (struct score){logits + n * VOCAB, ids[n], values[n], ALTERNATIVES, n, 0};
    }
    struct draws drawing = {draws, lines(cbd_draw_scratch(VOCAB) * 4), DRAWN, VOCAB, 0};
    struct scores scoring = {scores, lines(cbd_score_scratch(VOCAB) * 4), DRAWN, VOCAB, 0};
    cbd_draw(&drawing, 1);
    cbd_score(&scoring, 1);
    for (int n = 0; n < DRAWN; n++) printf("%d ", draws[n].token);
    printf("\n");
    for (int n = 0; n < DRAWN; n++) {
        printf("%.9g ", scores[n].logprob);
        for (int k = 0; k < ALTERNATIVES; k++) printf("%d %.9g ", ids[n][k], values[n][k]);
    }
    printf("\n");
}

int main(void) {
    for (int kind = 0; kind < 4; kind++) {
        const int is_int8 = kind / 2, is_bf16 = kind % 2;
        state = 1;
        void *x = numbers(ROWS_OF_STEP * HIDDEN, 0, 1, is_bf16);
        run_layers(x, is_int8, is_bf16);
        float *logits = lines(ROWS_OF_STEP * VOCAB * 4);
        struct weight *head = weight_of(VOCAB, HIDDEN, is_int8, is_bf16);
        struct product product = {
            .weight = head, .x = x, .y = logits, .scratch = lines(ROWS_OF_STEP * cbd_int8_row_bytes(HIDDEN)),
            .x_stride = HIDDEN, .y_stride = VOCAB, .rows = ROWS_OF_STEP, .y_float = 1,
        };
        cbd_product(&product, 1);
        for (int n = 0; n < ROWS_OF_STEP * VOCAB; n++) printf("%.9g ", logits[n]);
        printf("\n");
        draw_and_score(logits);
    }
    return 0;
}
