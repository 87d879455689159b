/* Rows on AVX-512: BF16 whose tiles are all tame, 64 columns at a time. Codes equal those of fp8_rows.h to the bit.

   The same sum as there, with one table for the whole exponent: `step` of an exponent is the float whose last place is the
   format's step at that magnitude and whose low bits hold the code's exponent already, so that

       code = low bits of |y| + step[exponent of max(|y|, smallest normal)]

   is one look-up and one addition. BF16 values come as the halves of 32-bit words: evens shifted up, odds masked. Codes go
   back the same way, so that 64 of them need a single shuffle. Sums of statistics stay in registers along a row; a group of
   32 columns has 16 of them for each kind, evens and odds together, or 32 where each column is a tile, evens first. */

#pragma once

#include "fp8_rows.h"

typedef struct { __m512 low, high, least; } steps;

static steps steps_of(format f) {
    float step[32];
    uint32_t first = f.least >> 23, mantissa_bits = 23 - f.drop;
    for (uint32_t e = first; e < first + 32; e++) step[e & 31] = value((e + f.drop) << 23 | ((e - first) << mantissa_bits & 0xff));
    return (steps){_mm512_loadu_ps(step), _mm512_loadu_ps(step + 16), _mm512_set1_ps(value(f.least))};
}

INLINE __m512i encode16(__m512i magnitude, __m512 scale, steps k, int count, __m512 *signal, __m512 *noise) {
    __m512 y = _mm512_mul_ps(_mm512_castsi512_ps(magnitude), scale);
    __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(_mm512_max_ps(y, k.least)), 23);
    __m512 step = _mm512_permutex2var_ps(k.low, exponent, k.high), sum = _mm512_add_ps(y, step);
    if (count) {
        __m512 lost = _mm512_sub_ps(y, _mm512_sub_ps(sum, step));
        *signal = _mm512_fmadd_ps(y, y, *signal), *noise = _mm512_fmadd_ps(lost, lost, *noise);
    }
    return _mm512_castps_si512(sum);
}

/* 32 codes, two in each 32-bit word. Where each column is a tile, scales and sums of the odd ones follow those of the even ones. */
INLINE __m512i encode32(__m512i x, const float *scale, int columns, steps k, int count, float *signal, float *noise) {
    const __m512i upper = _mm512_set1_epi32(0x7fff0000);
    __m512 s = columns ? _mm512_loadu_ps(scale) : _mm512_set1_ps(*scale), signals[2], noises[2];
    for (int i = 0; i < 1 + columns; i++) {
        signals[i] = count == ADD ? _mm512_loadu_ps(signal + 16 * i) : _mm512_setzero_ps();
        noises[i] = count == ADD ? _mm512_loadu_ps(noise + 16 * i) : _mm512_setzero_ps();
    }
    __m512i a = encode16(_mm512_and_si512(_mm512_slli_epi32(x, 16), upper), s, k, count, signals, noises);
    if (columns) s = _mm512_loadu_ps(scale + 16);
    __m512i b = encode16(_mm512_and_si512(x, upper), s, k, count, signals + columns, noises + columns);
    for (int i = 0; count && i < 1 + columns; i++) {
        _mm512_storeu_ps(signal + 16 * i, signals[i]);
        _mm512_storeu_ps(noise + 16 * i, noises[i]);
    }
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xff), a, _mm512_slli_epi32(b, 8), 0xca); /* 0xca: first ? second : third */
}

typedef struct { const float *scale; int32_t *underflow; int shift, stream; } row_options;

/* Columns c to n of a row of BF16. `scale` is one for each tile of 2**shift >= 32 columns, or one for each column, evens of 32
   first; and so is `underflow`, which counts values that are not zero and become zero. What `ask` points to will be read next. */
INLINE void cast_bf16(const uint16_t *x, uint8_t *codes, int64_t c, int64_t n, const char *ask, row_options o, steps k, int columns,
                     int count, counts *restrict s) {
    static const uint16_t evens_then_odds[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    const __m512i order = _mm512_loadu_si512(evens_then_odds);
    int stream = o.stream && ((uintptr_t)codes & 63) == 0;
    for (; c < n; c += 64) {
        __mmask64 live = n - c >= 64 ? ~0ull : ~0ull >> (64 - (n - c));
        __m512i x0 = _mm512_maskz_loadu_epi16((__mmask32)live, x + c), x1 = _mm512_maskz_loadu_epi16((__mmask32)(live >> 32), x + c + 32);
        _mm_prefetch(ask + 2 * c, _MM_HINT_T1), _mm_prefetch(ask + 2 * c + 64, _MM_HINT_T1);
        const float *s0 = o.scale + (columns ? c : c >> o.shift), *s1 = o.scale + (columns ? c + 32 : (c + 32) >> o.shift);
        int64_t slot = columns ? c : c / 2, next = columns ? 32 : 16;
        __m512i a = encode32(x0, s0, columns, k, count, s->signal + slot, s->noise + slot);
        __m512i b = encode32(x1, s1, columns, k, count, s->signal + slot + next, s->noise + slot + next);
        __m512i mixed = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xffff), a, _mm512_slli_epi32(b, 16), 0xca);
        __m512i out = _mm512_permutexvar_epi16(order, mixed);
        if (count) {
            __m512i below = _mm512_sub_epi8(out, _mm512_set1_epi8(1));
            if (count == ADD) below = _mm512_min_epu8(below, _mm512_loadu_si512(s->least + c));
            else if (columns) _mm512_storeu_si512(s->lost + c, _mm512_setzero_si512());
            _mm512_storeu_si512(s->least + c, below);
            __mmask64 zero = _mm512_testn_epi8_mask(out, out);
            if (zero) {
                const __m512i magnitude = _mm512_set1_epi16(0x7fff);
                __mmask64 lost = zero & _mm512_kunpackd(_mm512_test_epi16_mask(x1, magnitude), _mm512_test_epi16_mask(x0, magnitude));
                if (columns) {
                    __m512i before = _mm512_loadu_si512(s->lost + c);
                    _mm512_storeu_si512(s->lost + c, _mm512_mask_sub_epi8(before, lost, before, _mm512_set1_epi8(-1)));
                } else {
                    o.underflow[c >> o.shift] += __builtin_popcount((uint32_t)lost);
                    o.underflow[(c + 32) >> o.shift] += __builtin_popcount((uint32_t)(lost >> 32));
                }
            }
        }
        __mmask64 negative = _mm512_kunpackd(_mm512_movepi16_mask(x1), _mm512_movepi16_mask(x0));
        out = _mm512_mask_add_epi8(out, negative, out, _mm512_set1_epi8(-128));
        if (stream && n - c >= 64) _mm512_stream_si512((void *)(codes + c), out);
        else _mm512_mask_storeu_epi8(codes + c, live, out);
    }
}

typedef void bf16_function(const uint16_t *, uint8_t *, int64_t, int64_t, const char *, row_options, steps, counts *);
#define BF16_ROW(NAME, COLUMNS, COUNT) \
    static void NAME(const uint16_t *x, uint8_t *codes, int64_t c, int64_t n, const char *ask, row_options o, steps k, counts *s) { \
        cast_bf16(x, codes, c, n, ask, o, k, COLUMNS, COUNT, s); \
    }
BF16_ROW(bf16_wide, 0, NONE) BF16_ROW(bf16_wide_set, 0, SET) BF16_ROW(bf16_wide_add, 0, ADD)
BF16_ROW(bf16_columns, 1, NONE) BF16_ROW(bf16_columns_set, 1, SET) BF16_ROW(bf16_columns_add, 1, ADD)
static bf16_function *const CAST_BF16[2][3] = {{bf16_wide, bf16_wide_set, bf16_wide_add},
                                               {bf16_columns, bf16_columns_set, bf16_columns_add}};

/* ------------------------------------------------------------------------------- from lanes to tiles, several at once */

#define UNROLLED _Pragma("GCC unroll 16")

/* Evens and odds of every 32 columns apart, and together again. */
static void apart(const float *from, float *to, int64_t n, int back) {
    static const int32_t evens[16] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    static const int32_t zipped[16] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    __m512i first = _mm512_loadu_si512(back ? zipped : evens);
    __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(back ? 8 : 1));
    for (int64_t i = 0; i < n; i += 32) {
        __m512 a = _mm512_loadu_ps(from + i), b = _mm512_loadu_ps(from + i + 16);
        _mm512_storeu_ps(to + i, _mm512_permutex2var_ps(a, first, b));
        _mm512_storeu_ps(to + i + 16, _mm512_permutex2var_ps(a, second, b));
    }
}

/* The sums of 16 vectors: each step adds up halves and leaves half as many vectors. */
INLINE __m512 sums_of_16(__m512 *v) {
#define ADD_HALVES(A, B, LOW, HIGH) _mm512_add_ps((__m512)LOW(A, B), (__m512)HIGH(A, B))
    UNROLLED
    for (int i = 0; i < 8; i++) v[i] = ADD_HALVES(v[2 * i], v[2 * i + 1], _mm512_unpacklo_ps, _mm512_unpackhi_ps);
    UNROLLED
    for (int i = 0; i < 4; i++) v[i] = ADD_HALVES((__m512d)v[2 * i], (__m512d)v[2 * i + 1], _mm512_unpacklo_pd, _mm512_unpackhi_pd);
#define EVEN_QUARTERS(A, B) _mm512_shuffle_f32x4(A, B, 0x88)
#define ODD_QUARTERS(A, B) _mm512_shuffle_f32x4(A, B, 0xdd)
    UNROLLED
    for (int i = 0; i < 2; i++) v[i] = ADD_HALVES(v[2 * i], v[2 * i + 1], EVEN_QUARTERS, ODD_QUARTERS);
    return ADD_HALVES(v[0], v[1], EVEN_QUARTERS, ODD_QUARTERS);
}

/* The sums of 16 tiles of `slots` floats each, of which `width` are there. */
INLINE void sum_16_tiles(const float *from, float *to, int64_t slots, int64_t width) {
    __m512 v[16];
    UNROLLED
    for (int64_t i = 0; i < 16; i++) {
        v[i] = _mm512_setzero_ps();
        for (int64_t c = i * slots; c < least_of((i + 1) * slots, width); c += 16) v[i] = _mm512_add_ps(v[i], _mm512_loadu_ps(from + c));
    }
    _mm512_storeu_ps(to, sums_of_16(v));
}

/* The least bytes of 16 tiles of n >= 32 columns, of which `width` are there, in the same way. */
INLINE void least_of_16_tiles(const uint8_t *from, uint8_t *to, int64_t n, int64_t width) {
    __m512i v[8];
    UNROLLED
    for (int64_t i = 0; i < 8; i++) { /* two tiles in each, one in each half */
        __m256i half[2] = {_mm256_set1_epi8(-1), _mm256_set1_epi8(-1)};
        for (int64_t k = 0; k < 2; k++)
            for (int64_t c = (2 * i + k) * n; c < least_of((2 * i + k + 1) * n, width); c += 32)
                half[k] = _mm256_min_epu8(half[k], _mm256_loadu_si256((const __m256i *)(from + c)));
        v[i] = _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
    }
#define LESS_HALF(A, B, SIZE) _mm512_min_epu8(_mm512_unpacklo_epi##SIZE(A, B), _mm512_unpackhi_epi##SIZE(A, B))
    UNROLLED
    for (int i = 0; i < 4; i++) v[i] = LESS_HALF(v[2 * i], v[2 * i + 1], 8);
    UNROLLED
    for (int i = 0; i < 2; i++) v[i] = LESS_HALF(v[2 * i], v[2 * i + 1], 16);
    v[0] = LESS_HALF(v[0], v[1], 32);
    v[0] = _mm512_min_epu8(v[0], _mm512_shuffle_epi32(v[0], 0x4e));
    v[0] = _mm512_min_epu8(v[0], _mm512_shuffle_i64x2(v[0], v[0], 0xb1));
    _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi8(_mm512_castsi512_si128(v[0]), _mm512_extracti64x2_epi64(v[0], 2)));
}

/* Signal, noise and least codes of wide tiles; writes up to a multiple of 16. */
INLINE void gather_wide(const counts *s, int64_t n, int64_t tiles, int64_t width, float *signal, float *noise, uint8_t *least) {
    for (int64_t t = 0; t < tiles; t += 16) {
        int64_t left = tiles - t >= 16 ? 16 * n : width - t * n;
        sum_16_tiles(s->signal + t * n / 2, signal + t, n / 2, left / 2), sum_16_tiles(s->noise + t * n / 2, noise + t, n / 2, left / 2);
        least_of_16_tiles(s->least + t * n, least + t, n, left);
    }
}

/* The largest magnitudes of 8 tiles of n >= 32 BF16 values, as floats. */
INLINE void tops_of_8(const uint16_t *x, int64_t n, float *amax) {
    __m512i v[8];
    UNROLLED
    for (int t = 0; t < 8; t++) {
        v[t] = _mm512_setzero_si512();
        for (int64_t c = 0; c < n; c += 32)
            v[t] = _mm512_max_epu16(v[t], _mm512_and_si512(_mm512_loadu_si512(x + t * n + c), _mm512_set1_epi16(0x7fff)));
    }
#define MORE_HALF(A, B, SIZE) _mm512_max_epu16(_mm512_unpacklo_epi##SIZE(A, B), _mm512_unpackhi_epi##SIZE(A, B))
    UNROLLED
    for (int i = 0; i < 4; i++) v[i] = MORE_HALF(v[2 * i], v[2 * i + 1], 16);
    UNROLLED
    for (int i = 0; i < 2; i++) v[i] = MORE_HALF(v[2 * i], v[2 * i + 1], 32);
    __m512i all = MORE_HALF(v[0], v[1], 64);
    __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    __m128i tops = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    _mm256_storeu_si256((__m256i *)amax, _mm256_slli_epi32(_mm256_cvtepu16_epi32(tops), 16));
}

static int64_t tops_of_tiles(const uint16_t *x, int64_t tiles, int64_t n, float *amax) {
    int64_t t = 0;
    if (n == 32) for (; t + 8 <= tiles; t += 8) tops_of_8(x + t * 32, 32, amax + t);
    else if (n == 128) for (; t + 8 <= tiles; t += 8) tops_of_8(x + t * 128, 128, amax + t);
    return t;
}
