/* Log probabilities of rows of logits, as the api reports them: of one token, and of the best ones.
 *
 * ln p(n) = x[n] - (best + ln(sum of e^(x - best))), the sum in double. The best descend, equal ones in the order of their
 * ids; they are found by one cut (select.h), so only they are sorted.
 *
 * The reference is cbdisagg/engine/logprobs.py.
 */
#include "sample.h"

/* One row. kernels/native_sampling.py mirrors both structs field by field. */
struct score {
    const float *logits; /* [vocab] */
    int32_t *top_ids;    /* [alternatives] out, best first */
    float *top;          /* [alternatives] out, their log probabilities */
    int32_t alternatives; /* vocab at most */
    int32_t token;
    float logprob;       /* of `token`, out */
};

struct scores {
    struct score *scores;
    float *scratch;      /* for each thread: cbd_score_scratch() floats */
    int32_t count, vocab;
    int32_t taken;       /* 0 */
};

EXPORT int64_t cbd_score_scratch(int64_t vocab) { return 2 * whole_blocks(vocab); }

static float normaliser_of(const float *x, int64_t vocab, float best) {
    dvec sum = {0};
    int64_t n = 0;
    for (; n + VW <= vocab; n += VW) sum = add_wide(sum, exp_(load(x + n) - splat(best)));
    if (n < vocab) {
        float rest[VW];
        for (int lane = 0; lane < VW; lane++) rest[lane] = n + lane < vocab ? x[n + lane] - best : -INFINITY;
        sum = add_wide(sum, exp_(load(rest)));
    }
    return best + (float)log(sum_wide(sum));
}

/* The ids of the `count` largest, equal ones by id, in no order yet, and their logits. */
static void find_best(const float *x, int64_t vocab, int64_t count, float last, int32_t *ids, float *values) {
    int64_t found = 0;
    for (int64_t n = 0; n < vocab && found < count; n += VW) {
        int64_t end = n + VW < vocab ? n + VW : vocab;
        if (end == n + VW && !any_lane(load(x + n) > splat(last))) continue;
        for (int64_t id = n; id < end && found < count; id++)
            if (x[id] > last) ids[found] = (int32_t)id, values[found++] = x[id];
    }
    for (int64_t id = 0; id < vocab && found < count; id++)
        if (x[id] == last) ids[found] = (int32_t)id, values[found++] = x[id];
    for (; found < count; found++) ids[found] = 0, values[found] = NAN; /* where logits are not numbers */
}

/* Descending, equal ones as they were: those above the last come in the order of ids, then those that equal it. */
static void sort_best(int64_t count, int32_t *ids, float *values) {
    for (int64_t n = 1; n < count; n++) {
        const float value = values[n];
        const int32_t id = ids[n];
        int64_t at = n;
        for (; at > 0 && values[at - 1] < value; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
        values[at] = value, ids[at] = id;
    }
}

/* The `count`-th largest, -inf if fewer are finite. */
static float last_of_best(const float *x, int64_t vocab, int64_t count, float best, float *row, float *spare) {
    const int64_t padded = whole_blocks(vocab);
    memcpy(row, x, vocab * sizeof(float));
    for (int64_t n = vocab; n < padded; n++) row[n] = -INFINITY;
    vec least = splat(best);
    ivec counted = {0};
    for (int64_t n = 0; n < padded; n += VW) {
        vec v = load(row + n);
        ivec is_finite = v >= splat(-FLT_MAX);
        least = min_(least, select_(is_finite, v, splat(best)));
        counted -= is_finite;
    }
    int64_t finite = 0;
    for (int lane = 0; lane < VW; lane++) finite += counted[lane];
    return finite < count ? -INFINITY : cut_of(row, NULL, padded, -max_lanes(-least), best, (double)count, spare);
}

static void score_row(struct score *score, int64_t vocab, float *row, float *spare) {
    const float *x = score->logits, best = largest_of(x, vocab), normaliser = normaliser_of(x, vocab, best);
    score->logprob = x[score->token] - normaliser;
    if (!score->alternatives) return;
    float last = score->alternatives == 1 ? best : last_of_best(x, vocab, score->alternatives, best, row, spare);
    find_best(x, vocab, score->alternatives, last, score->top_ids, score->top);
    sort_best(score->alternatives, score->top_ids, score->top);
    for (int n = 0; n < score->alternatives; n++) score->top[n] -= normaliser;
}

static void score_part(void *data, int part, struct team *team) {
    (void)team;
    struct scores *job = data;
    float *row = job->scratch + part * cbd_score_scratch(job->vocab), *spare = row + whole_blocks(job->vocab);
    for (int32_t n; (n = take_row(&job->taken, job->count)) >= 0;)
        score_row(&job->scores[n], job->vocab, row, spare);
}

EXPORT void cbd_score(struct scores *job, int threads) { team_run(score_part, job, threads); }
