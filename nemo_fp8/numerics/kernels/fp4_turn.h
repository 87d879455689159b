/* Columns as rows: a tile of the source, turned into scratch and there cast like any other rows.

   A GEMM that contracts the rows of a matrix wants 16 of them in a block. A patch, 16 rows of the source by WIDE columns, becomes 16
   neighbours in each of WIDE rows. A tile is HIGH rows high, so that what is written for one of its columns fills whole cache lines,
   and one cache line wide. With signs the patch is first transformed: x @ (signs * H) / 4 of 16 values is four steps of sums and
   differences, here of whole rows, and rounded to BF16. */

#pragma once

#include "fp8_tops.h"
#include "turn_eight.h"

enum { AHEAD = 64, PATCH = 16, WIDE = 32, HIGH = 512, APART = HIGH + 32 /* between turned rows: not a power of two, for the caches' sake */ };

typedef struct {
    float sums[PATCH * WIDE] __attribute__((aligned(64)));
    uint32_t patch[PATCH * WIDE] __attribute__((aligned(64)));
    uint32_t rows[WIDE * APART] __attribute__((aligned(64)));
} turned;

/* Prefetches a patch some rows ahead, in this tile or at the beginning of the next. Not more: rows that lie a power of two apart
   share a few places in a cache. */
INLINE void ask_for_patch(const char *x, const char *next, int64_t step, int64_t r, int64_t high, int64_t bytes) {
    const char *from = r < high ? x + r * step : next + (r - high) * step;
    for (int64_t i = 0; i < PATCH; i++) ask_for(from + i * step, bytes);
}

/* Patches at the right edge are filled up with zeros. */
static const char *whole_patch(const char *x, int64_t *step, int64_t width, int64_t size, turned *t) {
    if (width == WIDE) return x;
    memset(t->patch, 0, (size_t)(PATCH * WIDE * size));
    for (int64_t r = 0; r < PATCH; r++) memcpy((char *)t->patch + r * WIDE * size, x + r * *step, (size_t)(width * size));
    *step = WIDE * size;
    return (const char *)t->patch;
}

/* Transforms a patch of BF16 into `t->patch`. */
static void transform(const char *x, int64_t step, const float *restrict signs, turned *t) {
    for (int r = 0; r < PATCH; r++)
        for (int c = 0; c < WIDE; c++) t->sums[r * WIDE + c] = value((uint32_t)((const uint16_t *)(x + r * step))[c] << 16) * signs[r];
    for (int apart = 1; apart < PATCH; apart *= 2)
        for (int r = 0; r < PATCH; r++) {
            if (r & apart) continue;
            float *restrict first = t->sums + r * WIDE, *restrict second = t->sums + (r + apart) * WIDE;
            for (int c = 0; c < WIDE; c++) {
                float a = first[c], b = second[c];
                first[c] = a + b, second[c] = a - b;
            }
        }
    round_row_to_bf16(t->sums, (uint16_t *)t->patch, PATCH * WIDE);
}

/* Turns a patch: column c becomes the 16 values at `to + c * APART`. */
static void turn_halves(const char *x, int64_t step, uint16_t *to) {
    for (int r = 0; r < PATCH; r += AT_ONCE)
        for (int c = 0; c < WIDE; c += EIGHT) turn_eight(x + r * step + 2 * c, step, to + r + c * APART, APART);
}

static void turn_words(const char *x, int64_t step, uint32_t *to) {
    for (int c = 0; c < WIDE; c++)
        for (int r = 0; r < PATCH; r++) to[c * APART + r] = ((const uint32_t *)(x + r * step))[c];
}

/* Turns `high` rows (a multiple of PATCH) and `width` columns at x; prefetches as many rows at `ask`. */
static void turn_tile(const char *x, int64_t step, int64_t high, int64_t width, int source, const float *signs, const char *ask, turned *t) {
    int64_t size = bytes_of(source);
    for (int64_t r = 0; r < high; r += PATCH) {
        int64_t apart = step;
        ask_for_patch(x, ask, step, r + AHEAD, high, width * size);
        const char *patch = whole_patch(x + r * step, &apart, width, size, t);
        if (signs) transform(patch, apart, signs, t), patch = (const char *)t->patch, apart = WIDE * size;
        if (source == FP32) turn_words(patch, apart, t->rows + r);
        else turn_halves(patch, apart, (uint16_t *)t->rows + r);
    }
}

/* The largest magnitude of the transformed tile, as the bits of BF16; NaN is skipped. */
static uint32_t top_of_transformed(const char *x, int64_t step, int64_t high, int64_t width, const float *signs, const char *ask, turned *t) {
    uint16_t tops[WIDE], top = 0;
    for (int64_t r = 0; r < high; r += PATCH) {
        int64_t apart = step;
        ask_for_patch(x, ask, step, r + AHEAD, high, 2 * width);
        const char *patch = whole_patch(x + r * step, &apart, width, 2, t);
        transform(patch, apart, signs, t);
        const uint16_t *found = (const uint16_t *)t->patch;
        find_tops((const char *)found, 2 * WIDE, PATCH, tops, WIDE, BF16);
        for (int c = 0; c < WIDE; c++) {
            if (tops[c] <= INFINITE >> 16) top = tops[c] > top ? tops[c] : top;
            else
                for (int i = c; i < PATCH * WIDE; i += WIDE) {
                    uint16_t u = found[i] & 0x7fff;
                    top = u > top && u <= INFINITE >> 16 ? u : top;
                }
        }
    }
    return top;
}
