/* Rows in plain C, for every source and every input; the compiler vectorizes them for the machine.

   The cast has no branch and no table. To |y| a power of two is added whose last place is the step of the FP8 format
   at that magnitude, so the adder itself rounds to nearest even; below the smallest normal the step stops shrinking:

       e    = the power of two at or below max(|y|, smallest normal)
       sum  = |y| + e * 2**(23 - m)              the low bits of its mantissa count |y| in steps
       code = low bits of sum + (e's bits >> (23 - m))

   `magic` is 2**(23 - m) with a constant in its own low bits that corrects the bias. Two neighbouring BF16 values
   are handled as the halves of one 32-bit word (PAIR), which saves the widening and most of the narrowing. */

#pragma once

#include "fp8_tops.h"

/* Statistics of a strip, of scaled values. A slot is a column, or two in a PAIR. A tile's first row sets them, and the
   others add to them: tiles of one row are common, and for them clearing would cost as much as counting. */
enum counting { NONE, SET, ADD };

typedef struct {
    float signal[STRIP];
    uint8_t lost[STRIP]; /* counts nonzero values that became zero */
    uint8_t apart[STRIP / 4]; /* `signal` and `noise` are no multiple of 4 KiB apart, else loads here seem to depend on stores there */
    float noise[STRIP];
    int32_t saturated[STRIP], nonfinite[STRIP];
    uint8_t least[STRIP], largest[STRIP]; /* least: stored as code - 1, so that a zero code wraps to the largest value */
} counts;

/* The code of float x in the low byte, to be XORed with x's sign; the bits above it mean nothing. `tame` means that the
   scale came from the tile's own, finite amax: then nothing is too large, infinite or NaN. Every NaN becomes +NaN. */
INLINE uint32_t encode(uint32_t x, float scale, format f, int tame, int count, counts *restrict s, int64_t slot) {
    uint32_t magnitude = x & 0x7fffffff;
    float y = value(magnitude) * scale;
    uint32_t u = bits(y);
    if (!tame) u = u > f.top ? f.top : u;
    uint32_t e = (u > f.least ? u : f.least) & INFINITE;
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) /* e * magic is exact: both ways round once */
    float sum = __builtin_fmaf(value(e), f.magic, value(u));
#else
    float sum = value(u) + value(e) * f.magic;
#endif
    uint32_t code = bits(sum) + (e >> f.drop);
    if (!tame) code = bits(y) > INFINITE ? 0x7f | x >> 31 << 7 : code;
    if (count) {
        float lost = y - (sum - value(e) * f.magic), signal = y * y, noise = lost * lost;
        if (!tame) {
            int finite = magnitude < INFINITE, saturated = y > f.saturates_above;
            signal = finite ? signal : 0, noise = finite ? noise : 0;
            s->nonfinite[slot] = !finite + (count == ADD ? s->nonfinite[slot] : 0);
            s->saturated[slot] = saturated + (count == ADD ? s->saturated[slot] : 0);
        }
        s->signal[slot] = signal + (count == ADD ? s->signal[slot] : 0);
        s->noise[slot] = noise + (count == ADD ? s->noise[slot] : 0);
    }
    return code;
}

INLINE void cast_row(const void *x, uint8_t *restrict codes, int64_t n, const float *restrict scale, format f, int source, int tame,
                     int count, counts *restrict s) {
    if (source == PAIR) {
        for (int64_t i = 0; i < n / 2; i++) {
            uint32_t both;
            memcpy(&both, (const uint16_t *)x + 2 * i, 4);
            uint32_t a = encode(both << 16, scale[i], f, tame, count, s, i);
            uint32_t b = encode(both & 0xffff0000, scale[i], f, tame, count ? ADD : NONE, s, i);
            uint16_t out = (uint16_t)(((a & 0xff) | b << 8) ^ (both >> 8 & 0x80) ^ (both >> 16 & 0x8000));
            memcpy(codes + 2 * i, &out, 2);
        }
        if (n % 2 == 0) return;
        uint32_t u = widen(x, n - 1, BF16);
        codes[n - 1] = (uint8_t)(encode(u, scale[n / 2], f, tame, count, s, n / 2) ^ u >> 31 << 7);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = widen(x, i, source);
        codes[i] = (uint8_t)(encode(u, scale[i], f, tame, count, s, i) ^ u >> 31 << 7);
    }
}

/* Every combination of choices is compiled to a loop of its own, in which they are constants. */
typedef void row_function(const void *, uint8_t *, int64_t, const float *, format, counts *);
#define ROW(NAME, SOURCE, TAME, COUNT) \
    static void NAME(const void *x, uint8_t *codes, int64_t n, const float *scale, format f, counts *s) { \
        cast_row(x, codes, n, scale, f, SOURCE, TAME, COUNT, s); \
    }
#define ROWS(NAME) \
    ROW(NAME##_wild, NAME, 0, NONE) ROW(NAME##_wild_set, NAME, 0, SET) ROW(NAME##_wild_add, NAME, 0, ADD) \
    ROW(NAME##_tame, NAME, 1, NONE) ROW(NAME##_tame_set, NAME, 1, SET) ROW(NAME##_tame_add, NAME, 1, ADD)
#define NAMES(NAME) {{NAME##_wild, NAME##_wild_set, NAME##_wild_add}, {NAME##_tame, NAME##_tame_set, NAME##_tame_add}}
ROWS(BF16) ROWS(FP16) ROWS(FP32) ROWS(PAIR)
static row_function *const CAST[4][2][3] = {NAMES(BF16), NAMES(FP16), NAMES(FP32), NAMES(PAIR)};

/* Counters of bytes are exact because a tile has at most 255 rows. Returns whether any code is zero. */
INLINE int count_codes(const uint8_t *restrict codes, int64_t n, int add, counts *restrict s) {
    uint8_t any = 0;
    for (int64_t i = 0; i < n; i++) {
        uint8_t code = codes[i] & 0x7f, below = (uint8_t)(code - 1), number = code == 0x7f ? 0 : code, zero = code == 0;
        any |= zero;
        s->lost[i] = add ? (uint8_t)(s->lost[i] + zero) : zero;
        s->least[i] = add && s->least[i] < below ? s->least[i] : below;
        s->largest[i] = add && s->largest[i] > number ? s->largest[i] : number;
    }
    return any;
}

static int count_row(const void *x, const uint8_t *codes, int64_t n, int source, int add, counts *restrict s) {
    if (!(add ? count_codes(codes, n, 1, s) : count_codes(codes, n, 0, s))) return 0;
    if (source == FP32) for (int64_t i = 0; i < n; i++) s->lost[i] -= (((const uint32_t *)x)[i] & 0x7fffffff) == 0;
    else for (int64_t i = 0; i < n; i++) s->lost[i] -= (((const uint16_t *)x)[i] & 0x7fff) == 0;
    return 1;
}
