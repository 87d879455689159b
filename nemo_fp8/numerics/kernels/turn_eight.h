/* Eight columns of 16-bit values as eight rows: three times two rows are put between each other, by 16, 32 and 64 bits. */

#pragma once

#include "fp8.h"

enum { EIGHT = 8 };

#ifdef __SSE2__
#ifdef __AVX2__ /* rows 0 to 7 in the lower half of a vector, 8 to 15 in the upper one */
enum { AT_ONCE = 16 };
typedef __m256i eight;
#define V8(NAME) _mm256_##NAME
#define ROW8(R) _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(x + (R) * step))), \
                                       _mm_loadu_si128((const __m128i *)(x + ((R) + 8) * step)), 1)
#define PUT8(TO, FROM) _mm256_storeu_si256((__m256i *)(TO), FROM)
#else
enum { AT_ONCE = 8 };
typedef __m128i eight;
#define V8(NAME) _mm_##NAME
#define ROW8(R) _mm_loadu_si128((const __m128i *)(x + (R) * step))
#define PUT8(TO, FROM) _mm_storeu_si128((__m128i *)(TO), FROM)
#endif
#else
enum { AT_ONCE = 16 };
#endif

/* Turns AT_ONCE rows, `step` bytes apart: column i becomes as many values at `to + i * apart`. */
INLINE void turn_eight(const char *x, int64_t step, uint16_t *to, int64_t apart) {
#ifdef __SSE2__
    eight a[EIGHT], b[EIGHT];
    UNROLLED
    for (int i = 0; i < 8; i++) a[i] = ROW8(i);
    UNROLLED
    for (int i = 0; i < 4; i++) /* columns 0 to 3 of rows 2i, 2i + 1, and 4 to 7 */
        b[i] = V8(unpacklo_epi16)(a[2 * i], a[2 * i + 1]), b[i + 4] = V8(unpackhi_epi16)(a[2 * i], a[2 * i + 1]);
    UNROLLED
    for (int i = 0; i < 8; i += 4) { /* columns i, i + 1 of rows 0 to 3 and 4 to 7, then i + 2, i + 3 */
        a[i] = V8(unpacklo_epi32)(b[i], b[i + 1]), a[i + 1] = V8(unpacklo_epi32)(b[i + 2], b[i + 3]);
        a[i + 2] = V8(unpackhi_epi32)(b[i], b[i + 1]), a[i + 3] = V8(unpackhi_epi32)(b[i + 2], b[i + 3]);
    }
    UNROLLED
    for (int i = 0; i < 8; i += 2) {
        PUT8(to + i * apart, V8(unpacklo_epi64)(a[i], a[i + 1]));
        PUT8(to + (i + 1) * apart, V8(unpackhi_epi64)(a[i], a[i + 1]));
    }
#else
    for (int c = 0; c < EIGHT; c++)
        for (int r = 0; r < AT_ONCE; r++) to[c * apart + r] = ((const uint16_t *)(x + r * step))[c];
#endif
}
