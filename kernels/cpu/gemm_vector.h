/* A cell's 16 columns as vectors of the instruction set, and what the tiles do with them.
 *
 * ROWS and CELLS are the shape of a tile: as many accumulators as registers allow beside a cell and a word of x.
 */
#ifndef CBD_GEMM_VECTOR_H
#define CBD_GEMM_VECTOR_H

#include "gemm.h"
#include "simd.h"

#if defined(CBD_AVX512)
enum { LANES = 16, CELLS = 2, ROWS = 12, INT8_ROWS = 6 };
#elif defined(CBD_AVX2)
enum { LANES = 8, CELLS = 1, ROWS = 6, INT8_ROWS = 2 };
#elif defined(__aarch64__)
enum { LANES = 4, CELLS = 1, ROWS = 4, INT8_ROWS = 2 };
#else
enum { LANES = 4, CELLS = 1, ROWS = 2, INT8_ROWS = 1 };
#endif

enum { VECTORS = CELL / LANES }; /* of a cell */

typedef float floats __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));

INLINE floats load_floats(const void *from) {
    floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE words load_words(const void *from) {
    words x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* x, and the compiler is not to load it again instead of keeping it. */
INLINE words in_register(words x) {
#if defined(__x86_64__)
    __asm__("" : "+v"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#endif
    return x;
}

INLINE uint32_t load_word(const void *from) {
    uint32_t x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE floats repeat_float(float x) {
    return x - (floats){0};
}

/* Two lines to L2. Where a step goes on by one line, each is asked for twice: a single request is often dropped. */
INLINE void fetch(const char *lines) {
    __builtin_prefetch(lines, 0, 2);
    __builtin_prefetch(lines + 64, 0, 2);
}

/* acc + a b; rounded once where the instruction set has that. */
INLINE floats multiply_add(floats acc, floats a, floats b) {
#if defined(CBD_AVX512)
    return _mm512_fmadd_ps(a, b, acc);
#elif defined(CBD_AVX2)
    return _mm256_fmadd_ps(a, b, acc);
#else
    return acc + a * b;
#endif
}

/* acc + the dot product of each column's word with a word of x. `number`: FLOAT32 or BFLOAT16, a constant. */
INLINE floats dot(const int number, floats acc, words cell, uint32_t x) {
    if (number == FLOAT32) {
        float value;
        memcpy(&value, &x, sizeof value);
        return multiply_add(acc, (floats)cell, repeat_float(value));
    }
#if defined(CBD_AVX512)
    return _mm512_dpbf16_ps(acc, (__m512bh)cell, (__m512bh)_mm512_set1_epi32((int)x));
#else
    acc = multiply_add(acc, (floats)(cell << 16), repeat_float(from_bf16((bf16)x)));
    return multiply_add(acc, (floats)(cell & 0xffff0000u), repeat_float(from_bf16((bf16)(x >> 16))));
#endif
}

/* acc + the sum of four products of each column's unsigned bytes with the signed bytes of a word of x; exact. */
INLINE ints dot_bytes(ints acc, words cell, uint32_t x) {
#if defined(CBD_AVX512)
    /* As an intrinsic, gcc 12 copies the accumulator around it. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(cell), "v"(_mm512_set1_epi32((int)x)));
    return acc;
#elif defined(CBD_AVX2)
    const __m256i bytes = _mm256_set1_epi32((int)x), low = _mm256_set1_epi16(0xff), pairs = (__m256i)cell;
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
    __m256i sum = _mm256_add_epi32((__m256i)acc, _mm256_madd_epi16(_mm256_and_si256(pairs, low), even));
    return (ints)_mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(pairs, 8), odd));
#else
    for (int shift = 0; shift < 32; shift += 8) acc += (ints)(cell >> shift & 0xff) * (int8_t)(x >> shift);
    return acc;
#endif
}

#endif
