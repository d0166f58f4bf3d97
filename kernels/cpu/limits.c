/* What this machine can do at most, to set a kernel's speed against: reading memory, and the products of gemm_vector.h
 * on registers alone. Timed by the caller.
 */
#include "gemm_vector.h"

struct reading {
    const char *memory;
    int64_t lines;
    int64_t sum; /* so that the reads are needed */
};

static void read_part(void *job, int part, struct team *team) {
    struct reading *reading = job;
    int64_t begin, end;
    share(reading->lines, part, team->parts, &begin, &end);
    words sums[VECTORS] = {{0}};
    for (int64_t line = begin; line < end; line++) {
        const char *from = reading->memory + line * 64;
        for (int v = 0; v < VECTORS; v++) sums[v] ^= load_words(from + v * sizeof(words));
    }
    int64_t sum = 0;
    for (int v = 0; v < VECTORS; v++)
        for (int lane = 0; lane < LANES; lane++) sum += sums[v][lane];
    __atomic_fetch_add(&reading->sum, sum, __ATOMIC_RELAXED);
}

/* Read `lines` cache lines of 64 bytes, once. */
EXPORT int64_t cbd_read(const void *memory, int64_t lines, int threads) {
    struct reading reading = {memory, lines, 0};
    team_run(read_part, &reading, threads);
    return reading.sum;
}

/* Independent sums: as many as are under way at once, with registers left. */
#if defined(CBD_AVX512)
enum { CHAINS = 12 };
#else
enum { CHAINS = 8 };
#endif

struct arithmetic {
    int number;
    int64_t rounds;
    int64_t sum;
};

INLINE int64_t chains(const int number, int64_t rounds) {
    words sums[CHAINS] = {{0}};
    words cell = in_register((words){0});
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
        for (int n = 0; n < CHAINS; n++) {
            if (number == INT8)
                sums[n] = (words)dot_bytes((ints)sums[n], cell, 0);
            else
                sums[n] = (words)dot(number, (floats)sums[n], cell, 0);
            sums[n] = in_register(sums[n]); /* which the compiler cannot foresee */
        }
    }
    int64_t sum = 0;
    for (int n = 0; n < CHAINS; n++) sum += sums[n][0];
    return sum;
}

static void arithmetic_part(void *job, int part, struct team *team) {
    struct arithmetic *arithmetic = job;
    (void)part, (void)team;
    int64_t rounds = arithmetic->rounds, sum;
    if (arithmetic->number == INT8)
        sum = chains(INT8, rounds);
    else if (arithmetic->number == BFLOAT16)
        sum = chains(BFLOAT16, rounds);
    else
        sum = chains(FLOAT32, rounds);
    __atomic_fetch_add(&arithmetic->sum, sum, __ATOMIC_RELAXED);
}

/* Multiply and add numbers of one kind, `rounds` times in each thread. Returns the operations of one round of one
 * thread; a multiplication is one and an addition another. */
EXPORT int64_t cbd_multiply(int number, int64_t rounds, int threads) {
    struct arithmetic arithmetic = {number, rounds, 0};
    team_run(arithmetic_part, &arithmetic, threads);
    return CHAINS * LANES * 2 * (number == FLOAT32 ? 1 : number == BFLOAT16 ? 2 : 4);
}
