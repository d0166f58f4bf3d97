/* How sequences draw their next tokens, a batch at once, a row by one thread: penalties, temperature, filters, the draw.
 *
 * Meaning and order are those of the reference, cbdisagg/engine/sampler.py: bias, penalties, banned ids; temperature;
 * min_p, top_k, top_p, each a threshold on what the one before has left; then the inverse of the cumulative distribution,
 * in id order, at one number of Philox4x32-10 (Salmon et al. 2011) from (seed, choice, position). Logits are adjusted and
 * scaled to the same bits as there; weights may differ in their last bits, so tokens may where a draw falls on an edge.
 *
 * Work on a row of logits: its largest, the scaled copy, the filters' cuts (select.h), weights, sums of blocks of 256 of
 * them, and one block in detail. Nothing is sorted. For 49,152 ids that takes 30 us without
 * filters, 40 with top-k, 90 with top-p, on a core of Zen 4.
 */
#include "sample.h"

/* One row. kernels/native_sampling.py mirrors both structs field by field. */
struct draw {
    const float *logits;   /* [vocab] */
    const int32_t *biased; /* ids, and what is added to each */
    const float *bias;
    const int32_t *seen;   /* the ids of prompt and output, each once, and how often it is in the output */
    const float *counts;
    const int32_t *banned; /* ids */
    uint64_t seed;
    double top_p;          /* 1 or more: off */
    float temperature;     /* 0: the best, the lowest id among equals */
    float floor;           /* ln(min_p), -inf: off */
    float repetition, presence, frequency;
    int32_t top_k;         /* 0, or vocab and more: off */
    int32_t biased_count, seen_count, banned_count;
    uint32_t choice, position;
    int32_t token;         /* what is drawn */
};

struct draws {
    struct draw *draws;
    float *scratch;        /* for each thread: cbd_draw_scratch() floats */
    int32_t count, vocab;
    int32_t taken;         /* 0 */
};

EXPORT int64_t cbd_draw_scratch(int64_t vocab) { return 4 * whole_blocks(vocab); }

/* -------------------------------------------------------------------------------------------------------- adjust */

/* Bias, penalties and bans, in place. `row` [vocab]. */
static void adjust(const struct draw *draw, float *row) {
    for (int n = 0; n < draw->biased_count; n++) row[draw->biased[n]] += draw->bias[n];
    for (int n = 0; n < draw->seen_count; n++) {
        float value = row[draw->seen[n]];
        if (draw->repetition != 1.0f) value = value > 0 ? value / draw->repetition : value * draw->repetition;
        value -= draw->frequency * draw->counts[n];
        row[draw->seen[n]] = value - (draw->counts[n] > 0 ? draw->presence : 0.0f);
    }
    for (int n = 0; n < draw->banned_count; n++) row[draw->banned[n]] = -INFINITY;
}

/* (x - best) / temperature to `row`, -inf behind; the least that is `floor` or more and finite, 0 if there is none. */
static float scale(const float *x, int64_t vocab, float best, float temperature, float floor, float *row) {
    const float low = floor > -FLT_MAX ? floor : -FLT_MAX;
    vec least = splat(0.0f);
    int64_t n = 0;
    for (; n + VW <= vocab; n += VW) {
        vec v = load(x + n) - splat(best);
        if (temperature != 1.0f) v = v / splat(temperature);
        store(row + n, v);
        least = min_(least, select_(v >= splat(low), v, splat(0.0f)));
    }
    float lowest = -max_lanes(-least);
    for (; n < vocab; n++) {
        row[n] = (x[n] - best) / temperature;
        if (row[n] >= low && row[n] < lowest) lowest = row[n];
    }
    for (; n < whole_blocks(vocab); n++) row[n] = -INFINITY;
    return lowest;
}

/* ---------------------------------------------------------------------------------------------------------- draw */

/* In [0, 1), 53 bits fine. */
static double uniform(uint64_t seed, uint32_t choice, uint32_t position) {
    uint32_t counter[4] = {position, 0, choice, 0}, key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t low = UINT64_C(0xD2511F53) * counter[0], high = UINT64_C(0xCD9E8D57) * counter[2];
        counter[0] = (uint32_t)(high >> 32) ^ counter[1] ^ key[0];
        counter[1] = (uint32_t)high;
        counter[2] = (uint32_t)(low >> 32) ^ counter[3] ^ key[1];
        counter[3] = (uint32_t)low;
        key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
    }
    uint64_t bits = (uint64_t)counter[1] << 32 | counter[0];
    return (double)(bits >> 11) * 0x1p-53;
}

/* e^x of those from `floor` on; what stands elsewhere has no meaning. */
static void weigh(const float *row, int64_t padded, float floor, float *weights) {
    for (int64_t n = 0; n < padded; n += VW) {
        vec v = load(row + n);
        if (any_lane(v >= splat(floor))) store(weights + n, exp_(v));
    }
}

/* `running` [blocks]: the weights of those from `floor` on, of all blocks up to each. Returns the last. */
static double sum_blocks(const float *row, const float *weights, int64_t padded, float floor, double *running) {
    double total = 0;
    for (int64_t first = 0; first < padded; first += BLOCK) {
        dvec sum = {0};
        for (int64_t n = first; n < first + BLOCK; n += VW) {
            ivec kept = load(row + n) >= splat(floor);
            if (any_lane(kept)) sum = add_wide(sum, (vec)((ivec)load(weights + n) & kept));
        }
        total += sum_wide(sum);
        running[first / BLOCK] = total;
    }
    return total;
}

/* The first id of those from `floor` on at which the running sum of weights exceeds u times the whole. */
static int32_t inverse_cdf(const float *row, const float *weights, int64_t padded, float floor, double u,
                           double *running) {
    const double total = sum_blocks(row, weights, padded, floor, running);
    double aim = u * total;
    if (aim >= total) aim = nextafter(total, 0.0);
    int64_t block = 0, blocks = padded / BLOCK;
    while (block < blocks && running[block] <= aim) block++;
    if (block == blocks) return 0; /* all weights are 0 or not numbers */
    if (block) aim -= running[block - 1];
    /* Summed in another order than the block, so the last bit may differ: stay at the last that has weight. */
    double sum = 0;
    int64_t last = block * BLOCK;
    for (int64_t n = last; n < (block + 1) * BLOCK && sum <= aim; n++) {
        if (!(row[n] >= floor) || weights[n] == 0) continue;
        last = n;
        sum += weights[n];
    }
    return (int32_t)last;
}

static int32_t first_place(const float *x, int64_t count, float value) {
    int64_t n = 0;
    for (; n + VW <= count; n += VW)
        if (any_lane(load(x + n) == splat(value))) break;
    while (n < count && x[n] != value) n++;
    return n < count ? (int32_t)n : 0;
}

/* `memory` has room for four rows. */
static int32_t draw_row(const struct draw *draw, int64_t vocab, float *memory) {
    const int64_t padded = whole_blocks(vocab);
    float *row = memory, *weights = row + padded, *spare = weights + padded;
    const float *logits = draw->logits;
    if (draw->biased_count | draw->seen_count | draw->banned_count) {
        memcpy(row, logits, vocab * sizeof(float));
        adjust(draw, row);
        logits = row;
    }
    const float best = largest_of(logits, vocab);
    if (draw->temperature == 0.0f) return first_place(logits, vocab, best);
    float floor = draw->floor, lowest = scale(logits, vocab, best, draw->temperature, floor, row);
    if (draw->top_k > 0 && draw->top_k < vocab)
        floor = lowest = cut_of(row, NULL, padded, lowest, 0.0f, draw->top_k, spare);
    weigh(row, padded, floor, weights);
    if (draw->top_p < 1.0) {
        const double wanted = draw->top_p * sum_blocks(row, weights, padded, floor, (double *)spare);
        floor = cut_of(row, weights, padded, lowest, 0.0f, wanted, spare);
    }
    const double u = uniform(draw->seed, draw->choice, draw->position);
    return inverse_cdf(row, weights, padded, floor, u, (double *)spare);
}

static void draw_part(void *data, int part, struct team *team) {
    (void)team;
    struct draws *job = data;
    float *memory = job->scratch + part * cbd_draw_scratch(job->vocab);
    for (int32_t n; (n = take_row(&job->taken, job->count)) >= 0;)
        job->draws[n].token = draw_row(&job->draws[n], job->vocab, memory);
}

EXPORT void cbd_draw(struct draws *job, int threads) { team_run(draw_part, job, threads); }
