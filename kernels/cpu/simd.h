/* Vectors of float, as wide as the instruction set of this build, and rows of float32 or bfloat16 as vectors.
 *
 * Written with the vector extensions of gcc and clang, so that the portable build is these very lines; only what they
 * cannot say, or compilers translate badly, is an intrinsic.
 */
#ifndef CBD_SIMD_H
#define CBD_SIMD_H

#include "common.h"

#if CBD_AVX512 || CBD_AVX2
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if CBD_AVX512
enum { VW = 16 };
#elif CBD_AVX2
enum { VW = 8 };
#else
enum { VW = 4 };
#endif

typedef float vec __attribute__((vector_size(4 * VW)));
typedef int32_t ivec __attribute__((vector_size(4 * VW)));

INLINE vec splat(float x) { return (vec){0} + x; }

INLINE vec load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

INLINE vec fma_(vec a, vec b, vec c) {
#if CBD_AVX512
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif CBD_AVX2
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vec select_(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

INLINE vec min_(vec a, vec b) {
#if CBD_AVX512
    return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif CBD_AVX2
    return (vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select_(a < b, a, b);
#endif
}

INLINE vec max_(vec a, vec b) {
#if CBD_AVX512
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif CBD_AVX2
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select_(a > b, a, b);
#endif
}

/* Halves are folded onto each other, so the order of a sum depends on VW alone. */
INLINE float sum_lanes(vec v) {
#if CBD_AVX512
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lane[VW];
    store(lane, v);
    for (int half = VW / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
#endif
}

INLINE float max_lanes(vec v) {
#if CBD_AVX512
    return _mm512_reduce_max_ps((__m512)v);
#else
    float lane[VW], best;
    store(lane, v);
    best = lane[0];
    for (int i = 1; i < VW; i++) best = lane[i] > best ? lane[i] : best;
    return best;
#endif
}

INLINE vec lane_numbers(void) {
    static const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers);
}

/* 2^r times 2^n, for r in [-1/2, 1/2], within 2e-7 of it. `shifted`: n + 1.5 * 2^23, whose low bits are n. Minimax
 * polynomial of degree 6. */
INLINE vec exp2_parts(vec r, vec shifted) {
    vec p = splat(0.00015353362f);
    p = fma_(p, r, splat(0.0013398875f));
    p = fma_(p, r, splat(0.00961843692f));
    p = fma_(p, r, splat(0.0555033237f));
    p = fma_(p, r, splat(0.240226477f));
    p = fma_(p, r, splat(0.693147182f));
    p = fma_(p, r, splat(1.0f));
    return (vec)((ivec)p + ((ivec)shifted << 23));
}

/* 2^x for x under 127.5, within 2e-7 of it; 0 below -126, -inf included. */
INLINE vec exp2_(vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it leaves round(x) in the low bits */
    vec shifted = x + magic;
    vec power = exp2_parts(x - (shifted - magic), shifted);
    return (vec)((ivec)power & (x >= splat(-126.0f)));
}

/* e^x for x under 88, within 3e-7 of it; 0 below -87, -inf included. The logarithm of 2 is taken off in two parts, the
 * first short enough for its multiples to be exact (Cody and Waite 1980). */
INLINE vec exp_(vec x) {
    const vec magic = splat(12582912.0f), to_base_2 = splat(1.44269504f);
    vec shifted = x * to_base_2 + magic, n = shifted - magic;
    vec rest = (x - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
    return (vec)((ivec)exp2_parts(rest * to_base_2, shifted) & (x >= splat(-87.0f)));
}

/* ---------------------------------------------------------------------------------------------- the two dtypes */

INLINE vec load_bf16(const bf16 *from) {
#if CBD_AVX512
    __m256i half = _mm256_loadu_si256((const __m256i *)from);
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#elif CBD_AVX2
    __m128i half = _mm_loadu_si128((const __m128i *)from);
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#else
    float f[VW];
    for (int i = 0; i < VW; i++) f[i] = from_bf16(from[i]);
    return load(f);
#endif
}

INLINE void store_bf16(bf16 *to, vec v) {
#if CBD_AVX512
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    memcpy(to, &half, sizeof half);
#elif CBD_AVX2
    __m256i bits = (__m256i)v;
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i none = _mm256_castps_si256(_mm256_cmp_ps((__m256)v, (__m256)v, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), none);
    rounded = _mm256_srli_epi32(rounded, 16);
    __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    memcpy(to, &half, sizeof half);
#else
    float f[VW];
    store(f, v);
    for (int i = 0; i < VW; i++) to[i] = to_bf16(f[i]);
#endif
}

/* Elements [at, at + VW) of a row of either dtype. */
INLINE vec load_row(const void *row, int64_t at, int is_bf16) {
    return is_bf16 ? load_bf16((const bf16 *)row + at) : load((const float *)row + at);
}

INLINE void store_row(void *row, int64_t at, vec v, int is_bf16) {
    if (is_bf16)
        store_bf16((bf16 *)row + at, v);
    else
        store((float *)row + at, v);
}

INLINE float load_one(const void *row, int64_t at, int is_bf16) {
    return is_bf16 ? from_bf16(((const bf16 *)row)[at]) : ((const float *)row)[at];
}

INLINE void store_one(void *row, int64_t at, float x, int is_bf16) {
    if (is_bf16)
        ((bf16 *)row)[at] = to_bf16(x);
    else
        ((float *)row)[at] = x;
}

#endif
