/* Sources and E4M3 scales as floats, and the largest magnitudes in several rows of values: what casts to FP8 and to FP4 share. */

#pragma once

#include "fp8.h"

/* What a cast did to some values: sums, and the largest magnitude. */
typedef struct { double signal, noise, saturated, underflow, nonfinite, largest; } total;

INLINE void add_total(total *to, const total *from) {
    to->signal += from->signal, to->noise += from->noise, to->saturated += from->saturated;
    to->largest = from->largest > to->largest ? from->largest : to->largest;
    to->underflow += from->underflow, to->nonfinite += from->nonfinite;
}

/* The magnitude of an E2M1 code without its sign: the largest of three lines, one for each grid. */
INLINE float magnitude_of_e2m1(uint32_t code) {
    float c = (float)(int32_t)code, halves = c * 0.5f, ones = c - 2, twos = c * 2 - 8, most = halves > ones ? halves : ones;
    return most > twos ? most : twos;
}

/* An E4M3 scale: NaN is one code without its sign. */
INLINE float value_of_e4m3(uint32_t byte) {
    uint32_t code = byte & 0x7f;
    float normal = value((code << 20) + (120u << 23)), small = (float)(int32_t)code * 0x1p-9f;
    float magnitude = code >> 3 ? normal : small;
    return value((code == 0x7f ? 0x7fc00000u : bits(magnitude)) | (byte & 0x80) << 24);
}

/* Element i as the bits of a float. */
INLINE uint32_t widen(const void *x, int64_t i, int source) {
    if (source == FP32) return ((const uint32_t *)x)[i];
    uint32_t u = ((const uint16_t *)x)[i];
    if (source != FP16) return u << 16;
    uint32_t magnitude = u & 0x7fff, subnormal = bits((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t normal = (magnitude << 13) + (magnitude < 0x7c00 ? 112u << 23 : 224u << 23);
    return (u & 0x8000) << 16 | (magnitude < 0x400 ? subnormal : normal);
}

/* Raises `tops` to the magnitudes of `rows` rows (1 or 4), `step` bytes apart. Four rows at once use more memory bandwidth. */
#define HIGHER(A, B) ((A) > (B) ? (A) : (B))
#define RAISE(TYPE, MASK, ROWS) \
    for (int64_t i = 0; i < n; i++) { \
        TYPE top = ((TYPE *)tops)[i]; \
        for (int r = 0; r < (ROWS); r++) top = HIGHER(((const TYPE *)(x + r * step))[i] & (TYPE)(MASK), top); \
        ((TYPE *)tops)[i] = top; \
    }
static void raise(const char *restrict x, int64_t step, int64_t rows, void *restrict tops, int64_t n, int source) {
    if (source == FP32 && rows == 4) RAISE(uint32_t, 0x7fffffff, 4)
    else if (source == FP32) RAISE(uint32_t, 0x7fffffff, 1)
    else if (rows == 4) RAISE(uint16_t, 0x7fff, 4)
    else RAISE(uint16_t, 0x7fff, 1)
}

/* The row of largest magnitudes. A strip's rows lie pages apart, where the hardware prefetches only after a few misses,
   so the beginnings of the next four rows are prefetched here. */
static void find_tops(const char *x, int64_t step, int64_t rows, void *tops, int64_t n, int source) {
    memset(tops, 0, (size_t)(n * bytes_of(source)));
    int64_t r = 0, ahead = least_of(1024, n * bytes_of(source));
    for (; r + 4 <= rows; r += 4) {
        for (int64_t next = r + 4; next < least_of(r + 8, rows); next++) ask_for(x + next * step, ahead);
        raise(x + r * step, step, 4, tops, n, source);
    }
    for (; r < rows; r++) raise(x + r * step, step, 1, tops, n, source);
}
