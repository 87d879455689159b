/* What products of a few tokens share, whatever the weights are: x as floats in the order of the sums, and sums as results. */

#pragma once

#include "fp8.h"

#ifdef BLOCK
INLINE uint32_t fp32_of(const void *x, int64_t i, int type) {
    return type == BF16 ? (uint32_t)((const uint16_t *)x)[i] << 16 : ((const uint32_t *)x)[i];
}

/* Where a product goes: one row for each token, of BF16 or FP32. */
typedef struct { void *y; const float *bias; /* one a row of the weight, or NULL */ int64_t rows; int type; } result;

INLINE void put(result to, int64_t token, int64_t row, float sum) {
    int64_t i = token * to.rows + row;
    if (to.bias) sum += to.bias[row];
    if (to.type == FP32) ((float *)to.y)[i] = sum;
    else ((uint16_t *)to.y)[i] = (uint16_t)((sum != sum ? 0x7fc00000 : bits(sum) + 0x7fff + (bits(sum) >> 16 & 1)) >> 16);
}

/* The sums of the lanes of four vectors. */
INLINE void sums_of_four(const reals *v, float *four) {
    __m256 half[4];
    for (int i = 0; i < 4; i++) half[i] = half_sum(v[i]);
    __m256 quarters = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(four, _mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps(quarters, 1)));
}

/* Each vector of `total` holds the sum of one row and one token in its lanes, the tokens of a row one after the other. */
INLINE void put_sums(result to, const reals *total, int64_t row, int64_t token, int rows, int tokens) {
    for (int i = 0; i < rows * tokens; i += 4) {
        reals v[4];
        float sum_of[4];
        for (int k = 0; k < 4; k++) v[k] = total[i + k < rows * tokens ? i + k : i];
        sums_of_four(v, sum_of);
        for (int k = 0; k < 4 && i + k < rows * tokens; k++) put(to, token + (i + k) % tokens, row + (i + k) / tokens, sum_of[k]);
    }
}
#endif
