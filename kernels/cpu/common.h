/* What every kernel shares: which instruction set this build is for, bfloat16, and a team of threads.
 *
 * One library is one instruction set: kernels/native.py compiles all files of this folder with the flags of the best set
 * that the CPU has, and a kernel asks the macros below which one that is. A kernel's results may differ between sets,
 * never between thread counts, nor with what else a call computes.
 *
 * Memory is the caller's, everywhere. Nothing here allocates, fails or prints.
 */
#ifndef CBD_COMMON_H
#define CBD_COMMON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define CBD_AVX512 1 /* with bw, dq, vl, bf16 and vnni */
#elif defined(__AVX2__) && defined(__FMA__)
#define CBD_AVX2 1
#else
#define CBD_PORTABLE 1
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* ---------------------------------------------------------------------------------------------------- bfloat16 */

typedef uint16_t bf16; /* the upper half of a float */

INLINE float from_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* To nearest, ties to even, as torch and vcvtneps2bf16 round (the latter flushes subnormals); a NaN stays one. */
INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (bf16)(bits >> 16 | 0x40);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* ---------------------------------------------------------------------------------------------------------- team */

/* The threads that run one call. They are torch's own OpenMP threads, see team.c. */
struct team {
    int parts;           /* threads at work, 1 or more; may be fewer than were asked for */
    int arrived, passed; /* the barrier's */
};

/* One thread's share of a call. `part` is from 0 to team->parts - 1. */
typedef void (*team_part)(void *job, int part, struct team *team);

/* Run `run` on up to `threads` threads, and wait for all of them. */
void team_run(team_part run, void *job, int threads);

/* Wait until all threads of the team are here. Yields the core when that takes long: it may be what they wait for. */
void team_barrier(struct team *team);

/* With so few rows each thread prepares all of them for itself, in a place of its own, instead of waiting for the others:
 * to norm or to quantise a row takes about as long as a barrier. */
enum { ROWS_ALONE = 2 };

/* The first of `rows` rows that are for `part`, in a buffer that has room for as many as `buffer_rows` of native_linear.py. */
INLINE int64_t own_rows(int64_t rows, int part) { return rows <= ROWS_ALONE ? rows * part : 0; }

/* Items [*begin, *end) of `count` are for `part`: `parts` runs of nearly equal length, in order. */
INLINE void share(int64_t count, int part, int parts, int64_t *begin, int64_t *end) {
    *begin = count * part / parts;
    *end = count * (part + 1) / parts;
}

#endif
