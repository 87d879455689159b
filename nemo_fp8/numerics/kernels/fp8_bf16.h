/* Rows of BF16 whose tiles are all tame, on the vectors of AVX-512 or AVX2. Codes equal those of fp8_rows.h to the bit.

   BF16 values come as the halves of 32-bit words: evens shifted up, odds masked. Two such vectors are a block, whose codes fill one
   vector: 64 columns, or 32. A group of them is a vector's worth. Sums of statistics: 32 columns have LANES of each kind, evens and
   odds together, and where each column is a tile, a group has one for each, evens first. */

#pragma once

#include "fp8_rows.h"

enum { GROUP = 2 * LANES /* columns whose evens and odds come apart */ };

INLINE words encode_lanes(words magnitude, reals scale, steps k, int odd, int count, reals *signal, reals *noise) {
    reals y = V(mul_ps)(REALS(magnitude), scale), rounded;
    words code = round_lanes(y, k, odd, &rounded);
    if (count) {
        reals lost = V(sub_ps)(y, rounded);
        *signal = V(fmadd_ps)(y, y, *signal), *noise = V(fmadd_ps)(lost, lost, *noise);
    }
    return code;
}

typedef struct { const float *scale; int32_t *underflow; int shift, stream; } row_options;

/* The codes of a block. Evens and odds of a group have a scale each, and sums of their own if each column is a tile. */
INLINE words encode_block(words x0, words x1, const reals *of_evens, const reals *of_odds, steps k, int columns, int count,
                          reals *signals, reals *noises, words *magnitudes) {
    const words upper = V(set1_epi32)(0x7fff0000);
    words evens[2], odds[2];
    UNROLLED
    for (int g = 0; g < 2; g++) {
        words of_group = g ? x1 : x0;
        int i = columns ? 2 * g : g * BLOCK / 64, odd = columns ? i + 1 : i;
        evens[g] = encode_lanes(V_BITS(and)(V(slli_epi32)(of_group, 16), upper), of_evens[g], k, 0, count, signals + i, noises + i);
        odds[g] = encode_lanes(V_BITS(and)(of_group, upper), of_odds[g], k, 1, count, signals + odd, noises + odd);
    }
    return join(evens, odds, x0, x1, magnitudes);
}

/* Counts what became zero in a block from column c on, one bit each, for tiles that are no columns. */
INLINE void count_lost(uint64_t zeros, int64_t c, row_options o) {
    for (int64_t i = 0; i < BLOCK; i += 32) o.underflow[(c + i) >> o.shift] += __builtin_popcount((uint32_t)(zeros >> i));
}

/* BLOCK columns from c on: their values are at x, and their codes go to `to`. */
INLINE void cast_block(const uint16_t *x, uint8_t *to, int64_t c, row_options o, int stream, steps k, int columns, int count,
                       counts *restrict s) {
    int sums = columns ? 4 : BLOCK / 32; /* of each kind, in a block; a tile that is no column has 32 columns or more */
    int64_t first_sum = columns ? c : (c >> 5) * LANES;
    float *signal = s->signal + first_sum, *noise = s->noise + first_sum;
    words x0 = V_BITS(loadu)((const words *)x), x1 = V_BITS(loadu)((const words *)(x + GROUP));
    reals signals[4], noises[4], even[2], odd[2];
    UNROLLED
    for (int i = 0; i < 4; i++) {
        signals[i] = count == ADD && i < sums ? V(loadu_ps)(signal + LANES * i) : V(setzero_ps)();
        noises[i] = count == ADD && i < sums ? V(loadu_ps)(noise + LANES * i) : V(setzero_ps)();
    }
    UNROLLED
    for (int g = 0; g < 2; g++) {
        const float *scale = o.scale + (columns ? c + g * GROUP : (c + (sums > 1 ? g * GROUP : 0)) >> o.shift);
        even[g] = columns ? V(loadu_ps)(scale) : V(set1_ps)(*scale), odd[g] = columns ? V(loadu_ps)(scale + LANES) : even[g];
    }
    words magnitudes, out = encode_block(x0, x1, even, odd, k, columns, count, signals, noises, &magnitudes);
    UNROLLED
    for (int i = 0; i < sums && count; i++) V(storeu_ps)(signal + LANES * i, signals[i]), V(storeu_ps)(noise + LANES * i, noises[i]);
    if (count) {
        words below = V(sub_epi8)(magnitudes, V(set1_epi8)(1));
        words *least = (words *)(s->least + c), *lost = (words *)(s->lost + c);
        uint64_t zeros = negative_of(below);
        if (count == ADD) below = V(min_epu8)(below, V_BITS(loadu)(least));
        else if (columns) V_BITS(storeu)(lost, V_BITS(setzero)());
        V_BITS(storeu)(least, below);
        if (zeros) {
            zeros &= numbers_of(x0, x1);
            if (columns) V_BITS(storeu)(lost, add_bits(V_BITS(loadu)(lost), zeros));
            else count_lost(zeros, c, o);
        }
    }
    if (stream) V_BITS(stream)((words *)to, out);
    else V_BITS(storeu)((words *)to, out);
}

/* Columns c to n of a row of BF16. `scale` is one for each tile of 2**shift >= 32 columns, or one for each column, evens of a group
   first. `underflow` is laid out likewise and counts nonzero values that become zero. `ask` points to what to prefetch. */
INLINE void cast_bf16(const uint16_t *x, uint8_t *codes, int64_t c, int64_t n, const char *ask, row_options o, steps k, int columns,
                     int count, counts *restrict s) {
    int stream = o.stream && ((uintptr_t)codes & 63) == 0;
    for (; c + BLOCK <= n; c += BLOCK) {
        for (int64_t i = 0; i < 2 * BLOCK; i += 64) _mm_prefetch(ask + 2 * c + i, _MM_HINT_T1);
        cast_block(x + c, codes + c, c, o, stream, k, columns, count, s);
    }
    if (c == n) return;
    uint16_t padded[BLOCK] = {0};
    uint8_t there[BLOCK];
    memcpy(padded, x + c, (size_t)(n - c) * 2);
    cast_block(padded, there, c, o, 0, k, columns, count, s);
    memcpy(codes + c, there, (size_t)(n - c));
}

/* The same for ABREAST rows of whole blocks, counted, of tiles that are no columns; and with `sum` summed up, too. What is kept for a
   block of columns is loaded and stored once for all of these rows, and what is kept for a row stays in a register. */
enum { ABREAST = 4 };
typedef struct { int64_t stride /* of values */, to_stride /* of codes */, n; int stream; } matrix_of;

INLINE void cast_abreast(const uint16_t *x, uint8_t *to, matrix_of m, const char *ask, row_options o, steps k, int count,
                         counts *restrict s, int sum, uint64_t *restrict columns, uint64_t *restrict of_rows) {
    enum { SUMS = BLOCK / 32 };
    words rows[ABREAST];
    UNROLLED
    for (int r = 0; r < ABREAST; r++) rows[r] = V_BITS(setzero)();
    for (int64_t c = 0; c < m.n; c += BLOCK) {
        float *signal = s->signal + (c >> 5) * LANES, *noise = s->noise + (c >> 5) * LANES;
        words *least = (words *)(s->least + c), least_here = count == ADD ? V_BITS(loadu)(least) : V(set1_epi8)(-1);
        words *column = (words *)(columns + c / 8), of_column = sum ? V_BITS(loadu)(column) : V_BITS(setzero)();
        reals signals[SUMS], noises[SUMS], scale[2];
        UNROLLED
        for (int i = 0; i < SUMS; i++) {
            signals[i] = count == ADD ? V(loadu_ps)(signal + LANES * i) : V(setzero_ps)();
            noises[i] = count == ADD ? V(loadu_ps)(noise + LANES * i) : V(setzero_ps)();
        }
        for (int g = 0; g < 2; g++) scale[g] = V(set1_ps)(o.scale[(c + (SUMS > 1 ? g * GROUP : 0)) >> o.shift]);
        UNROLLED
        for (int r = 0; r < ABREAST; r++) {
            int64_t at = r * m.stride + c;
            for (int64_t i = 0; i < 2 * BLOCK; i += 64) _mm_prefetch(ask + 2 * at + i, _MM_HINT_T1);
            words x0 = V_BITS(loadu)((const words *)(x + at)), x1 = V_BITS(loadu)((const words *)(x + at + GROUP)), magnitudes;
            words out = encode_block(x0, x1, scale, scale, k, 0, count, signals, noises, &magnitudes);
            words below = V(sub_epi8)(magnitudes, V(set1_epi8)(1));
            uint64_t zeros = negative_of(below);
            if (zeros) count_lost(zeros & numbers_of(x0, x1), c, o);
            least_here = V(min_epu8)(below, least_here);
            if (sum) of_column = V(add_epi64)(of_column, out), rows[r] = V(add_epi64)(rows[r], out);
            words *there = (words *)(to + r * m.to_stride + c);
            if (m.stream) V_BITS(stream)(there, out);
            else V_BITS(storeu)(there, out);
        }
        UNROLLED
        for (int i = 0; i < SUMS; i++) V(storeu_ps)(signal + LANES * i, signals[i]), V(storeu_ps)(noise + LANES * i, noises[i]);
        V_BITS(storeu)(least, least_here);
        if (sum) V_BITS(storeu)(column, of_column);
    }
    if (sum) _mm256_storeu_si256((__m256i *)of_rows, word_sums_of_four(rows));
}

/* All rows of a strip like that, begun once: a narrow one has little to do for a few rows. */
#define ALL_ABREAST(NAME, SUM) \
    static void NAME(const uint16_t *x, uint8_t *to, matrix_of m, int64_t rows, const char *ask, const row_options *of, const steps *by, \
                     counts *s, uint64_t *columns, uint64_t *of_rows) { \
        row_options o = *of; \
        steps k = *by; \
        cast_abreast(x, to, m, ask, o, k, SET, s, SUM, columns, of_rows); \
        for (int64_t r = ABREAST; r < rows; r += ABREAST) \
            cast_abreast(x + r * m.stride, to + r * m.to_stride, m, ask + 2 * r * m.stride, o, k, ADD, s, SUM, columns, of_rows + r); \
    }
ALL_ABREAST(all_abreast, 0) ALL_ABREAST(all_abreast_summed, 1)

typedef void bf16_function(const uint16_t *, uint8_t *, int64_t, int64_t, const char *, const row_options *, const steps *, counts *);
#define BF16_ROW(NAME, COLUMNS, COUNT) \
    static void NAME(const uint16_t *x, uint8_t *codes, int64_t c, int64_t n, const char *ask, const row_options *o, const steps *k, \
                     counts *s) { \
        cast_bf16(x, codes, c, n, ask, *o, *k, COLUMNS, COUNT, s); \
    }
BF16_ROW(bf16_wide, 0, NONE) BF16_ROW(bf16_wide_set, 0, SET) BF16_ROW(bf16_wide_add, 0, ADD)
BF16_ROW(bf16_columns, 1, NONE) BF16_ROW(bf16_columns_set, 1, SET) BF16_ROW(bf16_columns_add, 1, ADD)
static bf16_function *const CAST_BF16[2][3] = {{bf16_wide, bf16_wide_set, bf16_wide_add},
                                               {bf16_columns, bf16_columns_set, bf16_columns_add}};

/* ------------------------------------------------------------------------------- from lanes to tiles, several at once */

/* Separates the even and odd columns of every group, and interleaves them again. */
static void apart(const float *restrict from, float *restrict to, int64_t n, int back) {
    for (int64_t c = 0; c < n; c += GROUP)
        for (int64_t i = 0; i < LANES; i++) {
            int64_t even = c + i, odd = c + LANES + i, first = c + 2 * i;
            if (back) to[first] = from[even], to[first + 1] = from[odd];
            else to[even] = from[first], to[odd] = from[first + 1];
        }
}

/* Sums up LANES vectors into one: each step adds halves and leaves half as many vectors. */
INLINE reals sums_of(reals *v) {
#define ADD_HALVES(A, B, LOW, HIGH) V(add_ps)((reals)LOW(A, B), (reals)HIGH(A, B))
    UNROLLED
    for (int i = 0; i < LANES / 2; i++) v[i] = ADD_HALVES(v[2 * i], v[2 * i + 1], V(unpacklo_ps), V(unpackhi_ps));
    UNROLLED
    for (int i = 0; i < LANES / 4; i++)
        v[i] = ADD_HALVES(V(castps_pd)(v[2 * i]), V(castps_pd)(v[2 * i + 1]), V(unpacklo_pd), V(unpackhi_pd));
    return fold_sums(v);
}

/* The sums of LANES tiles of `slots` floats each, of which `width` are there. */
INLINE void sum_tiles(const float *from, float *to, int64_t slots, int64_t width) {
    reals v[LANES];
    UNROLLED
    for (int64_t i = 0; i < LANES; i++) {
        v[i] = i * slots < width ? V(loadu_ps)(from + i * slots) : V(setzero_ps)();
        for (int64_t c = i * slots + LANES; c < least_of((i + 1) * slots, width); c += LANES)
            v[i] = V(add_ps)(v[i], V(loadu_ps)(from + c));
    }
    V(storeu_ps)(to, sums_of(v));
}

/* The least bytes of 16 tiles of n >= 32 columns, of which `width` are there, in the same way. */
INLINE void least_of_16_tiles(const uint8_t *from, uint8_t *to, int64_t n, int64_t width) {
    __m256i v[16];
    UNROLLED
    for (int64_t i = 0; i < 16; i++) {
        v[i] = i * n < width ? _mm256_loadu_si256((const __m256i *)(from + i * n)) : _mm256_set1_epi8(-1);
        for (int64_t c = i * n + 32; c < least_of((i + 1) * n, width); c += 32)
            v[i] = _mm256_min_epu8(v[i], _mm256_loadu_si256((const __m256i *)(from + c)));
    }
#define LESS_HALF(A, B, SIZE) _mm256_min_epu8(_mm256_unpacklo_epi##SIZE(A, B), _mm256_unpackhi_epi##SIZE(A, B))
    UNROLLED
    for (int i = 0; i < 8; i++) v[i] = LESS_HALF(v[2 * i], v[2 * i + 1], 8);
    UNROLLED
    for (int i = 0; i < 4; i++) v[i] = LESS_HALF(v[2 * i], v[2 * i + 1], 16);
    UNROLLED
    for (int i = 0; i < 2; i++) v[i] = LESS_HALF(v[2 * i], v[2 * i + 1], 32);
    v[0] = LESS_HALF(v[0], v[1], 64);
    _mm_storeu_si128((__m128i *)to, _mm_min_epu8(_mm256_castsi256_si128(v[0]), _mm256_extracti128_si256(v[0], 1)));
}

/* Signal, noise and least codes of wide tiles; writes up to a multiple of 16. */
INLINE void gather_wide(const counts *s, int64_t n, int64_t tiles, int64_t width, float *signal, float *noise, uint8_t *least) {
    int64_t slots = n / 32 * LANES, t = 0;
#define SUMS(WIDTH) \
    sum_tiles(s->signal + t * slots, signal + t, slots, WIDTH), sum_tiles(s->noise + t * slots, noise + t, slots, WIDTH)
    for (; t + LANES <= tiles && (t + LANES) * n <= width; t += LANES) SUMS(LANES * slots); /* nothing to check */
    for (; t < tiles; t += LANES) SUMS((width + 31) / 32 * LANES - t * slots);
    for (t = 0; t + 16 <= tiles && (t + 16) * n <= width; t += 16) least_of_16_tiles(s->least + t * n, least + t, n, 16 * n);
    for (; t < tiles; t += 16) least_of_16_tiles(s->least + t * n, least + t, n, width - t * n);
}

/* The largest magnitude of each of NARROW columns, in so many rows of 16-bit floats: in registers from the first row to the last. With so
   few columns that is faster than a few rows at a time (fp8_tops.h), which are hardly begun when they end. */
enum { NARROW = 128 };
#define MAGNITUDES_AT(X) V_BITS(and)(V_BITS(loadu)((const words *)(X)), V(set1_epi16)(0x7fff))

static void tops_of_narrow(const uint16_t *x, int64_t stride, int64_t rows, uint16_t *tops) {
    words v[NARROW / GROUP];
    UNROLLED
    for (int i = 0; i < NARROW / GROUP; i++) v[i] = V_BITS(setzero)();
    for (int64_t r = 0; r < rows; r++, x += stride)
        UNROLLED
        for (int i = 0; i < NARROW / GROUP; i++) v[i] = V(max_epu16)(v[i], MAGNITUDES_AT(x + i * GROUP));
    UNROLLED
    for (int i = 0; i < NARROW / GROUP; i++) V_BITS(storeu)((words *)(tops + i * GROUP), v[i]);
}

/* The largest magnitudes of 8 tiles of n >= 32 BF16 values, as floats. */
INLINE void tops_of_8(const uint16_t *x, int64_t n, float *amax) {
    words v[8];
    UNROLLED
    for (int t = 0; t < 8; t++) {
        v[t] = MAGNITUDES_AT(x + t * n);
        for (int64_t c = GROUP; c < n; c += GROUP) v[t] = V(max_epu16)(v[t], MAGNITUDES_AT(x + t * n + c));
    }
#define MORE_HALF(A, B, SIZE) V(max_epu16)(V(unpacklo_epi##SIZE)(A, B), V(unpackhi_epi##SIZE)(A, B))
    UNROLLED
    for (int i = 0; i < 4; i++) v[i] = MORE_HALF(v[2 * i], v[2 * i + 1], 16);
    UNROLLED
    for (int i = 0; i < 2; i++) v[i] = MORE_HALF(v[2 * i], v[2 * i + 1], 32);
    __m128i tops = fold_tops(MORE_HALF(v[0], v[1], 64));
    _mm256_storeu_si256((__m256i *)amax, _mm256_slli_epi32(_mm256_cvtepu16_epi32(tops), 16));
}

static int64_t tops_of_tiles(const uint16_t *x, int64_t tiles, int64_t n, float *amax) {
    int64_t t = 0;
    if (n == 32) for (; t + 8 <= tiles; t += 8) tops_of_8(x + t * 32, 32, amax + t);
    else if (n == 128) for (; t + 8 <= tiles; t += 8) tops_of_8(x + t * 128, 128, amax + t);
    return t;
}
