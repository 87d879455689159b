/* FP8 casts at memory speed: how a job becomes tiles, tiles become scales, and rows of them become codes.

   A strip is one row of tiles, at most STRIP columns wide, so that it stays in the core's second-level cache between
   the two times that it is read: the first finds the largest magnitudes (as integers: the bits of positive floats sort like their
   values), the second multiplies, rounds and stores. Main memory is read once and written once: while a strip is
   cast the next one is prefetched, and large results are streamed past the caches, which saves reading what is overwritten.

   What the cast did to the values is kept for each tile, or, where only sums are wanted, for each of some equal parts of the rows:
   then nothing of a tile is stored. A row of codes can be summed up for a fingerprint (fp8_sums.c) while it is in registers or the
   first-level cache. Codes for AMX are made in plain order, in the second-level cache, and turned into their place a strip at a time.

   A strip is tame if none of its values is too large for its scale, infinite or NaN. Tame BF16 runs on vectors if the
   processor has AVX-512 or AVX2 (fp8_bf16.h); everything else runs in plain C (fp8_rows.h).

   Python (cpu.py) fills in a job and makes all choices. Compile without -ffast-math and with -ffp-contract=off. */

#include <stdlib.h>

#include "fp8_amx.h"
#include "fp8_job.h"
#include "fp8_rows.h"
#ifdef BLOCK
#include "fp8_bf16.h"
#endif

enum scaling { GIVEN, TE, TE_POW2, DEEPGEMM, DEEPGEMM_POW2, E8M0 };

INLINE int counted(const job *j) { return j->norm || j->totals; }
INLINE int64_t height_of(const job *j) { return (j->rows + j->tile_rows - 1) / j->tile_rows; } /* rows of tiles */
INLINE int streams_of(const job *j) { return j->order == IN_ROWS && large(j->rows * j->cols); } /* whether codes go past the caches */
INLINE int64_t apart_of(const job *j) { /* rows of codes, as they are made: not a power of two, for the caches' sake */
    return j->order == IN_ROWS ? j->codes_stride : width_of_strip(j->tile_rows) + 64;
}
INLINE int64_t strips_of(const job *j) { /* of a row of tiles */
    int64_t width = width_of_strip(j->tile_rows);
    return (j->cols + width - 1) / width;
}

/* The scratch memory of a thread: one entry for each column or each tile of a strip. */
typedef struct {
    uint32_t tops[STRIP];
    float amax[STRIP], scale[STRIP], scale_inv[STRIP], slots[STRIP];
    float signal[STRIP], noise[STRIP];
    int32_t underflow[STRIP], saturated[STRIP], nonfinite[STRIP];
    uint8_t least[STRIP], largest[STRIP], row[STRIP + 64] __attribute__((aligned(64))); /* what follows is aligned, too */
    counts counts;
    uint64_t *columns; /* this thread's part of of_columns */
    uint8_t *turned;   /* the codes of a strip, before they are turned */
} scratch;

typedef struct { const job *j; scratch *w; int64_t rows, width, tiles; const char *x; } strip; /* x: its first value */

/* The tile widths of all recipes are compile-time constants, so that their loops are unrolled. */
#define FOR_WIDTH(N, CALL) ((N) == 32 ? CALL(32) : (N) == 128 ? CALL(128) : CALL((N)))

/* ----------------------------------------------------------------------------------------------- largest magnitudes */

/* The bits of the largest of n magnitudes, as a float; above INFINITE if one of them is NaN. */
INLINE uint32_t highest_of(const void *x, int64_t n, int source) {
    if (source == FP32) {
        uint32_t top = 0;
        for (int64_t i = 0; i < n; i++) { uint32_t u = ((const uint32_t *)x)[i] & 0x7fffffff; top = u > top ? u : top; }
        return top;
    }
    uint16_t top = 0;
    for (int64_t i = 0; i < n; i++) { uint16_t u = ((const uint16_t *)x)[i] & 0x7fff; top = u > top ? u : top; }
    return widen(&top, 0, source);
}

static uint32_t highest(const void *x, int64_t n, int source) {
#define HIGHEST(N) highest_of(x, N, source)
    return FOR_WIDTH(n, HIGHEST);
}

/* Each value by itself. */
#define MAGNITUDES(SOURCE) for (int64_t i = 0; i < n; i++) to[i] = value(widen(x, i, SOURCE) & 0x7fffffff)
static void magnitudes(const void *restrict x, float *restrict to, int64_t n, int source) {
    if (source == FP32) MAGNITUDES(FP32);
    else if (source == FP16) MAGNITUDES(FP16);
    else MAGNITUDES(BF16);
}

static uint32_t highest_number(const strip *s, int64_t c, int64_t n) {
    uint32_t top = 0;
    for (int64_t r = 0; r < s->rows; r++)
        for (int64_t i = c; i < c + n; i++) {
            uint32_t u = widen(s->x + r * s->j->stride * bytes_of(s->j->source), i, s->j->source) & 0x7fffffff;
            top = u > top && u <= INFINITE ? u : top;
        }
    return top;
}

/* The amax of every tile; NaNs enter none. Returns whether all values are numbers. */
static int find_amaxes(const strip *s) {
    const job *j = s->j;
    const char *tops = s->x; /* a single row is its own row of largest magnitudes */
    int64_t size = bytes_of(j->source), wide = j->tile_cols, t = 0;
    uint32_t most = 0;
    if (s->rows > 1) {
        tops = (const char *)s->w->tops;
#ifdef BLOCK
        if (size == 2 && s->width <= 2 * NARROW && s->width % NARROW == 0)
            for (int64_t c = 0; c < s->width; c += NARROW)
                tops_of_narrow((const uint16_t *)s->x + c, j->stride, s->rows, (uint16_t *)s->w->tops + c);
        else
#endif
            find_tops(s->x, j->stride * size, s->rows, s->w->tops, s->width, j->source);
    }
    if (wide == 1) magnitudes(tops, s->w->amax, t = s->tiles, j->source);
#ifdef BLOCK
    else if (size == 2 && j->source != FP16) t = tops_of_tiles((const uint16_t *)tops, s->width / wide, wide, s->w->amax);
#endif
    for (; t < s->tiles; t++) s->w->amax[t] = value(highest(tops + t * wide * size, least_of(wide, s->width - t * wide), j->source));
    for (t = 0; t < s->tiles; t++) most = bits(s->w->amax[t]) > most ? bits(s->w->amax[t]) : most;
    for (t = 0; t < s->tiles && most > INFINITE; t++)
        if (bits(s->w->amax[t]) > INFINITE) s->w->amax[t] = value(highest_number(s, t * wide, least_of(wide, s->width - t * wide)));
    return most < INFINITE;
}

static void find_scales(const job *j, const float *restrict amax, float *restrict scale, float *restrict scale_inv, int64_t n) {
    const float max = j->format_max, reciprocal = (float)(1.0 / (double)max);
    const float if_tiny = j->scale_if_tiny, given = j->given; /* here, as every choice, so that the loops have none */
    const int pow2 = j->scaling == TE_POW2 || j->scaling == DEEPGEMM_POW2;
    const uint32_t kept = pow2 ? INFINITE : ~0u, up_to_it = pow2 ? 0x7fffff : 0;
    const int32_t least = 0x400000; /* the bits of 2**-127, whose exponent is 0 */
    switch (j->scaling) {
    case TE: case TE_POW2:
        for (int64_t i = 0; i < n; i++) {
            float s = max / amax[i];
            s = value(bits(bits(s) == INFINITE ? if_tiny : s) & kept);
            scale[i] = s = (amax[i] == 0) | (bits(amax[i]) == INFINITE) ? 1 : s;
            scale_inv[i] = 1 / s;
        }
        return;
    case DEEPGEMM: case DEEPGEMM_POW2:
        for (int64_t i = 0; i < n; i++) {
            float s = (amax[i] < 1e-4f ? 1e-4f : amax[i]) / max;
            s = value((bits(s) + up_to_it) & kept);
            scale_inv[i] = s = bits(amax[i]) == INFINITE ? 1 : s;
            scale[i] = 1 / s;
        }
        return;
    case E8M0:
        for (int64_t i = 0; i < n; i++) {
            int32_t u = (int32_t)bits(amax[i] * reciprocal), up = (u + 0x7fffff) >> 23, e = up < 254 ? up : 254;
            e = u > least ? e : 0;
            int32_t power = e << 23, inverse = (254 - e) << 23;
            scale_inv[i] = value((uint32_t)(power > least ? power : least));
            scale[i] = value((uint32_t)(inverse > least ? inverse : least));
        }
        return;
    default:
        for (int64_t i = 0; i < n; i++) scale[i] = given, scale_inv[i] = 1 / given;
    }
}

/* --------------------------------------------------------------------------------------------------------- statistics */

/* A tile's sums from those of its columns; `any`: whether a column has a code that is zero. */
INLINE void gather_one(const job *j, scratch *w, int64_t t, int64_t c, int64_t n, int tame, int any) {
    const counts *s = &w->counts;
    int64_t per = j->source == PAIR ? 2 : 1, first = c / per, slots = (n + per - 1) / per;
    float signal = 0, noise = 0;
    int32_t underflow = 0, saturated = 0, nonfinite = 0;
    uint8_t least = 255, largest = 0;
#pragma omp simd reduction(+ : signal, noise)
    for (int64_t i = 0; i < slots; i++) signal += s->signal[first + i], noise += s->noise[first + i];
    if (!tame)
        for (int64_t i = 0; i < slots; i++) saturated += s->saturated[first + i], nonfinite += s->nonfinite[first + i];
    if (any)
        for (int64_t i = 0; i < n; i++) underflow += s->lost[c + i];
    for (int64_t i = 0; i < n; i++) least = s->least[c + i] < least ? s->least[c + i] : least;
    for (int64_t i = 0; i < n; i++) largest = s->largest[c + i] > largest ? s->largest[c + i] : largest;
    w->signal[t] = signal, w->noise[t] = noise;
    w->underflow[t] = underflow, w->saturated[t] = saturated, w->nonfinite[t] = nonfinite;
    w->least[t] = least, w->largest[t] = largest;
}

static void gather(const strip *s, int tame, int any) {
    for (int64_t t = 0, c = 0; t < s->tiles; t++, c += s->j->tile_cols) {
#define GATHER(N) gather_one(s->j, s->w, t, c, N, tame, any)
        FOR_WIDTH(least_of(s->j->tile_cols, s->width - c), GATHER);
    }
}

/* Stores what a strip keeps for each tile. With many tiles this is more than the caches hold, so whole lines are streamed. */
INLINE void put(void *to, const void *from, int64_t bytes, int streams) {
    if (streams && ((uintptr_t)to & 63) == 0) stream(to, from, bytes);
    else memcpy(to, from, (size_t)bytes);
}

/* Computes a row of n bytes in `row`, rounded up to whole vectors. What the arrays hold after a strip's last tile is garbage, but
   a strip has few tiles, and a loop for the rest would go byte by byte. */
#define WHOLE(N) (((N) + 63) & ~(int64_t)63)
#define MAKE_BYTES(N, ROW, BYTE) \
    for (int64_t t = 0; t < WHOLE(N); t++) (ROW)[t] = (uint8_t)(BYTE)

static void store_exponents(uint8_t *to, const float *restrict scale_inv, int64_t n, uint8_t *restrict row, int streams) {
    MAKE_BYTES(n, row, bits(scale_inv[t]) >> 23);
    put(to, row, n, streams);
}

static void store_counters(char *to, const int32_t *restrict from, int64_t n, int64_t bytes, uint8_t *restrict row, int streams) {
    if (bytes == 4) { put(to, from, n * 4, streams); return; }
    MAKE_BYTES(n, row, from[t]);
    put(to, row, n, streams);
}

static void store_one_more(uint8_t *to, const uint8_t *restrict from, int64_t n, uint8_t *restrict row, int streams) {
    MAKE_BYTES(n, row, from[t] + 1);
    put(to, row, n, streams);
}

static void unscale_roots(float *restrict sums, const float *restrict scale_inv, int64_t n) {
    for (int64_t t = 0; t < n; t++) sums[t] = sqrtf(sums[t]) * scale_inv[t];
}

/* The same of a tile with an infinity, whose scale does not fit its other values: beneath that of E8M0 their squares would be zero. */
static void find_roots_beside_infinity(const strip *s, format f, int64_t t) {
    const job *j = s->j;
    int64_t first = t * j->tile_cols, last = least_of(first + j->tile_cols, s->width);
    double unit = (double)value(f.least + (126u << 23)) * s->w->scale_inv[t], signal = 0, noise = 0; /* a code's bits, as a float's, times it */
    for (int64_t r = 0; r < s->rows; r++)
        for (int64_t c = first; c < last; c++) {
            uint32_t u = widen(s->x + r * j->stride * bytes_of(j->source), c, j->source) & 0x7fffffff;
            if (u >= INFINITE) continue;
            double x = value(u), lost = x - value((encode(u, s->w->scale[t], f, 0, NONE, NULL, 0) & 0x7f) << f.drop) * unit;
            signal += x * x, noise += lost * lost;
        }
    s->w->signal[t] = (float)sqrt(signal), s->w->noise[t] = (float)sqrt(noise);
}

/* Sums are of scaled values. Their unscaled roots are in the range of floats; unscaled sums would need doubles. */
static void find_roots(const strip *s, format f, int tame) {
    scratch *w = s->w;
    unscale_roots(w->signal, w->scale_inv, s->tiles), unscale_roots(w->noise, w->scale_inv, s->tiles);
    for (int64_t t = 0; t < s->tiles && !tame; t++)
        if (bits(w->amax[t]) == INFINITE) find_roots_beside_infinity(s, f, t);
}

/* What is kept for each tile lies in one piece of memory, from the norms to the largest codes. */
static int64_t bytes_of_counts(const job *j) {
    return (char *)j->largest - (char *)j->norm + height_of(j) * ((j->cols + j->tile_cols - 1) / j->tile_cols);
}

/* Stores complete in order: one that waits for its cache line delays all that follow, once for each kind of statistics. */
static void ask_for_counts(const job *j, int64_t at, int64_t n) {
    const void *floats[] = {j->amax + at, j->norm + at, j->error_norm + at}, *counters[] = {j->underflow, j->saturated, j->nonfinite};
    for (int i = 0; i < 3; i++) ask_for(floats[i], n * 4);
    for (int i = 0; i < (j->saturated ? 3 : 1); i++) ask_for((const char *)counters[i] + at * j->count_bytes, n * j->count_bytes);
    ask_for(j->least + at, n), ask_for(j->largest + at, n);
}

static void store_counts(const job *j, scratch *w, int64_t at, int64_t n, int tame, int streams) {
    int64_t bytes = j->count_bytes;
    put(j->norm + at, w->signal, n * 4, streams), put(j->error_norm + at, w->noise, n * 4, streams);
    store_counters((char *)j->underflow + at * bytes, w->underflow, n, bytes, w->row, streams);
    if (j->saturated) {
        if (tame) memset(w->saturated, 0, (size_t)n * 4), memset(w->nonfinite, 0, (size_t)n * 4);
        store_counters((char *)j->saturated + at * bytes, w->saturated, n, bytes, w->row, streams);
        store_counters((char *)j->nonfinite + at * bytes, w->nonfinite, n, bytes, w->row, streams);
    }
    store_one_more(j->least + at, w->least, n, w->row, streams);
    put(j->largest + at, w->largest, n, streams);
}

/* The same summed up over the tiles of a strip; roots are rounded to floats as there, and their squares are added as doubles. */
static total total_of(scratch *w, int64_t n, int tame) {
    total sum = {0};
    for (int64_t t = 0; t < n; t++) {
        sum.signal += (double)w->signal[t] * w->signal[t], sum.noise += (double)w->noise[t] * w->noise[t];
        sum.largest = w->amax[t] > sum.largest ? w->amax[t] : sum.largest, sum.underflow += w->underflow[t];
        if (!tame) sum.saturated += w->saturated[t], sum.nonfinite += w->nonfinite[t];
    }
    return sum;
}

/* In the order of the strips, so that the same values have the same sums whatever thread had which of them. */
static void add_up_strips(const job *j) {
    memset(j->totals, 0, (size_t)(j->rows / j->rows_of_total) * sizeof(total));
    int64_t height = height_of(j), strips = strips_of(j), of_one = (j->rows_of_total + j->tile_rows - 1) / j->tile_rows;
    for (int64_t i = 0; i < height * strips; i++) add_total(j->totals + i / strips / of_one, j->of_strips + i);
}

/* --------------------------------------------------------------------------------------------------- one row of tiles */

/* Puts n codes of a row in their place, and adds them to the sums of their columns; returns the sum of their words. They lie in the
   first-level cache, and may be followed by up to 7 bytes of anything. */
INLINE uint64_t put_and_sum(uint8_t *to, uint8_t *codes, int64_t n, uint64_t *restrict columns, int streams) {
    uint64_t sum = 0, word;
    int64_t i = 0;
#ifdef BLOCK
    if (streams && ((uintptr_t)to & (BLOCK - 1)) == 0) {
        words all = V_BITS(setzero)();
        for (; i + BLOCK <= n; i += BLOCK) {
            words some = V_BITS(loadu)((const words *)(codes + i)), *column = (words *)(columns + i / 8);
            V_BITS(stream)((words *)(to + i), some);
            V_BITS(storeu)(column, V(add_epi64)(V_BITS(loadu)(column), some)), all = V(add_epi64)(all, some);
        }
        sum = sum_of_words(all);
    }
#endif
    put(to + i, codes + i, n - i, streams);
    if (n % 8) memset(codes + n, 0, (size_t)(8 - n % 8));
    for (; i < n; i += 8) memcpy(&word, codes + i, 8), columns[i / 8] += word, sum += word;
    return sum;
}

INLINE void add_to_row(const job *j, int64_t row, uint64_t sum) { /* of several strips other threads may have the others */
    if (strips_of(j) == 1) j->of_rows[row] = (int64_t)sum;
    else __atomic_fetch_add(j->of_rows + row, (int64_t)sum, __ATOMIC_RELAXED);
}

static void cast_strip(const strip *s, uint8_t *codes, spot at, format f, int tame) {
    const job *j = s->j;
    scratch *w = s->w;
    int64_t step = j->stride * bytes_of(j->source), per = j->source == PAIR ? 2 : 1, wide = j->tile_cols / per;
    const float *slots = w->scale;
    int streams = streams_of(j), any = 0, beside = streams || j->of_rows;
    if (j->tile_cols > 1) {
        for (int64_t t = 0; t < s->tiles; t++) for (int64_t i = 0; i < wide; i++) w->slots[t * wide + i] = w->scale[t];
        slots = w->slots;
    }
    for (int64_t r = 0; r < s->rows; r++) {
        const char *x = s->x + r * step;
        uint8_t *out = codes + r * apart_of(j), *row = beside ? w->row : out;
        if (r + 1 < s->rows) ask_for(x + step, s->width * bytes_of(j->source));
        CAST[j->source][tame][counted(j) ? r ? ADD : SET : NONE](x, row, s->width, slots, f, &w->counts);
        if (counted(j)) any |= count_row(x, row, s->width, j->source, r > 0, &w->counts);
        if (j->of_rows) add_to_row(j, at.row * j->tile_rows + r, put_and_sum(out, row, s->width, w->columns + at.column / 8, streams));
        else if (beside) stream(out, row, s->width);
    }
    if (counted(j)) gather(s, tame, any);
}

#ifdef BLOCK
/* The same for tame BF16, a piece of PIECE columns in each of ABREAST rows at a time: memory is faster in several places at once
   than in one, and with AVX-512 the cast is fast enough to notice. `ask` is what to prefetch. */
enum { PIECE = BLOCK == 64 ? 512 : STRIP, TALLEST = 255 /* rows of a tile */ };

static void largest_codes(const float *restrict amax, const float *restrict scale, uint8_t *restrict to, int64_t n, format f) {
    for (int64_t t = 0; t < WHOLE(n); t++) to[t] = (uint8_t)encode(bits(amax[t]), scale[t], f, 1, NONE, NULL, 0);
}

static void cast_strip_bf16(const strip *s, uint8_t *codes, spot at, format f, const steps *k, const char *ask) {
    const job *j = s->j;
    scratch *w = s->w;
    int columns = j->tile_cols == 1, streams = streams_of(j);
    int64_t step = apart_of(j);
    row_options o = {w->scale, w->underflow, 63 - __builtin_clzll((uint64_t)j->tile_cols), streams && !j->of_rows};
    int abreast = !columns && counted(j) && s->width % BLOCK == 0 && s->rows % ABREAST == 0;
    if (columns) apart(w->scale, w->slots, s->width, 0), o.scale = w->slots;
    else if (counted(j)) memset(w->underflow, 0, (size_t)s->tiles * 4);
    uint64_t of_rows[TALLEST] = {0};
    if (abreast) {
        int lines = streams && ((uintptr_t)codes & (BLOCK - 1)) == 0 && step % BLOCK == 0; /* every row begins with a whole one */
        (j->of_rows ? all_abreast_summed : all_abreast)((const uint16_t *)s->x, codes, (matrix_of){j->stride, step, s->width, lines}, s->rows,
                                                        ask, &o, k, &w->counts, w->columns + at.column / 8, of_rows);
    } else for (int64_t first = 0; first < s->rows; first += ABREAST)
        for (int64_t c = 0; c < s->width; c += PIECE)
            for (int64_t r = first, last = least_of(first + ABREAST, s->rows), end = least_of(c + PIECE, s->width); r < last; r++) {
                uint8_t *out = codes + r * step, *row = j->of_rows ? w->row : out;
                CAST_BF16[columns][counted(j) ? r ? ADD : SET : NONE](
                    (const uint16_t *)s->x + r * j->stride, row, c, end, ask + r * j->stride * 2, &o, k, &w->counts);
                if (row == out) continue;
                of_rows[r] += put_and_sum(out + c, row + c, end - c, w->columns + (at.column + c) / 8, streams);
            }
    for (int64_t r = 0; r < s->rows && j->of_rows; r++) add_to_row(j, at.row * j->tile_rows + r, of_rows[r]);
    if (!counted(j)) return;
    int64_t there = (s->width + BLOCK - 1) / BLOCK * BLOCK, n = s->tiles;
    if (columns) {
        apart(w->counts.signal, w->signal, there, 1), apart(w->counts.noise, w->noise, there, 1);
        memcpy(w->least, w->counts.least, (size_t)n);
        for (int64_t t = 0; t < n; t++) w->underflow[t] = w->counts.lost[t];
    } else {
#define GATHER_WIDE(N) gather_wide(&w->counts, N, n, there, w->signal, w->noise, w->least)
        FOR_WIDTH(j->tile_cols, GATHER_WIDE);
    }
    largest_codes(w->amax, w->scale, w->largest, n, f);
}
#endif

static void turn_strip(const strip *s, spot at) {
    const job *j = s->j;
    char *to = (char *)j->codes + at.row * j->tile_rows * j->codes_stride + at.column * OF_GROUP;
    int streams = large(j->rows * j->cols) && ((uintptr_t)to & (PAIRS - 1)) == 0;
    for (int64_t r = 0; r < s->rows; r += OF_GROUP, to += OF_GROUP * j->codes_stride)
        turn_group((const char *)s->w->turned + r * apart_of(j), apart_of(j), s->width, to, streams);
}

static const char *first_of(const job *j, spot at) {
    return (const char *)j->x + (at.row * j->tile_rows * j->stride + at.column) * bytes_of(j->source);
}

/* `k` is the format as the vectors need it (fp8_bf16.h), made once a job: a strip is too little work to make it each time. */
#ifndef BLOCK
typedef struct { char none; } steps;
INLINE steps steps_of(format f) { (void)f; return (steps){0}; }
#endif

/* Returns whether the strip is tame. */
static int work_on(const job *j, format f, const steps *k, scratch *w, spot at, spot next) {
    int64_t r0 = at.row * j->tile_rows, grid = (j->cols + j->tile_cols - 1) / j->tile_cols, tile = at.column / j->tile_cols;
    strip s = {j, w, least_of(j->tile_rows, j->rows - r0), at.width, 0, first_of(j, at)};
    s.tiles = (s.width + j->tile_cols - 1) / j->tile_cols;

    int streams = j->norm && large(bytes_of_counts(j));
    if (j->norm && !streams) ask_for_counts(j, at.row * grid + tile, s.tiles);
    int tame = find_amaxes(&s);
    if (j->amax) put(j->amax + at.row * grid + tile, w->amax, s.tiles * 4, streams);
    if (!j->codes) return tame;
    find_scales(j, w->amax, w->scale, w->scale_inv, s.tiles);
    int64_t scales_at = at.row * j->scale_stride + tile;
    if (j->scaling == E8M0) store_exponents((uint8_t *)j->scale_inv + scales_at, w->scale_inv, s.tiles, w->row, streams);
    else if (j->scaling != GIVEN) memcpy((float *)j->scale_inv + scales_at, w->scale_inv, (size_t)s.tiles * 4);
    else for (int64_t t = 0; t < s.tiles; t++) tame &= w->amax[t] * j->given <= j->format_max;

    uint8_t *codes = j->order == FOR_AMX ? w->turned : j->codes + r0 * j->codes_stride + at.column;
#ifdef BLOCK
    int bf16 = j->source == BF16 || j->source == PAIR;
    if (tame && bf16 && (j->tile_cols == 1 || j->tile_cols >= 32))
        cast_strip_bf16(&s, codes, at, f, k, next.row >= 0 ? first_of(j, next) : j->ahead ? j->ahead : first_of(j, at));
    else
#endif
        cast_strip(&s, codes, at, f, tame);
    if (j->order == FOR_AMX) turn_strip(&s, at);
    if (counted(j)) find_roots(&s, f, tame);
    if (j->totals) j->of_strips[at.row * strips_of(j) + at.column / width_of_strip(j->tile_rows)] = total_of(w, s.tiles, tame);
    if (j->norm) store_counts(j, w, at.row * grid + tile, s.tiles, tame, streams);
    return tame;
}

/* ---------------------------------------------------------------------------------------------------- the whole job */

static void work(void *argument) {
    job *j = argument;
    scratch w;
    int64_t wide = j->of_rows ? (j->cols + 7) / 8 : 0;
    w.columns = calloc((size_t)wide + 1, 8);
    w.turned = j->order == FOR_AMX ? aligned_alloc(64, (size_t)(j->tile_rows * apart_of(j))) : NULL;
    if (!w.columns || (j->order == FOR_AMX && !w.turned)) {
        j->failed = 1;
        free(w.columns), free(w.turned);
        return;
    }
    uint32_t drop = 23 - (uint32_t)j->mantissa_bits, least = 128 - (uint32_t)j->bias;
    float magic = value((127 + drop) << 23 | (-(least << j->mantissa_bits) & 0xff));
    format f = {drop, least << 23, bits(j->format_max), magic, j->saturates_above};
    steps k = steps_of(f);
    way through = way_through(plan_for(j->rows, j->cols, j->tile_rows, j->threads), &j->next);
    for (spot at = go_on(&through), next; at.row >= 0; at = next) {
        next = go_on(&through);
        if (!work_on(j, f, &k, &w, at, next)) j->wild = 1;
    }
    streamed();
    for (int64_t i = 0; i < wide; i++) __atomic_fetch_add(j->of_columns + i, (int64_t)w.columns[i], __ATOMIC_RELAXED);
    free(w.columns), free(w.turned);
}

static int begin(job *j) {
    if (j->codes && j->codes_stride == j->cols) expect(j->codes, j->rows * j->cols);
    if (j->norm) expect(j->norm, bytes_of_counts(j));
    if (j->totals && !(j->of_strips = malloc((size_t)(height_of(j) * strips_of(j)) * sizeof(total)))) return 0;
    if (j->of_rows) {
        if (strips_of(j) > 1) memset(j->of_rows, 0, (size_t)j->rows * 8);
        memset(j->of_columns, 0, (size_t)((j->cols + 7) / 8) * 8);
    }
    return 1;
}

static int end(job *j) {
    if (j->totals) add_up_strips(j), free(j->of_strips);
    return !j->failed;
}

/* Returns whether all went well: not if there was no memory for sums, or for what is to be turned. */
int nemo_fp8_quantize(job *j) {
    if (!begin(j)) return 0;
    share(work, j, j->threads, j->parallel);
    return end(j);
}

static void work_on_several(void *argument) {
    several *s = argument;
    for (int64_t i = 0; i < s->larges; i++) work((job *)s->large + i);
    for (int64_t i; (i = atomic_fetch_add(&s->next, 1)) < s->n;) {
        job j = ((const job *)s->all)[s->which[i]];
        if (j.threads > 1) continue;
        j.x = s->x[i];
        if (!nemo_fp8_quantize(&j)) s->failed = 1;
    }
}

int nemo_fp8_quantize_several(several *s) {
    job *large = s->large = malloc((size_t)s->n * sizeof *large + 1);
    if (!large) return 0;
    for (int64_t i = 0; i < s->n; i++) {
        job j = ((const job *)s->all)[s->which[i]];
        if (j.threads == 1) continue;
        j.x = s->x[i], j.threads = s->threads;
        if (begin(&j)) large[s->larges++] = j;
        else s->failed = 1;
    }
    share(work_on_several, s, s->threads, s->parallel);
    for (int64_t i = 0; i < s->larges; i++)
        if (!end(large + i)) s->failed = 1;
    free(large);
    return !s->failed;
}

/* Casts some rows of a job on this thread, into codes of their own; `first` is the first row of a tile. Tells the job what was wild. Goes
   WIDE columns at a time, since somebody else's rows are to stay in the same second-level cache. */
int nemo_fp8_quantize_rows(job *all, int64_t first, int64_t rows, uint8_t *codes) {
    enum { WIDE = STRIP / 4 };
    int64_t value = bytes_of(all->source), scale = all->scaling == E8M0 ? 1 : 4, tiles = WIDE / all->tile_cols, good = 1;
    int64_t wide = all->tile_cols * (tiles > 0 ? tiles : 1), next = first + rows + all->tile_rows <= all->rows;
    const char *x = (const char *)all->x + first * all->stride * value;
    char *scale_inv = (char *)all->scale_inv + first / all->tile_rows * all->scale_stride * scale;
    for (int64_t c = 0; c < all->cols; c += wide) {
        job j = *all;
        j.x = x + c * value, j.scale_inv = scale_inv + c / j.tile_cols * scale, j.codes = codes + c, j.codes_stride = all->cols;
        j.rows = rows, j.cols = least_of(wide, all->cols - c), j.threads = 1;
        j.ahead = c + wide < all->cols ? x + (c + wide) * value : next ? x + rows * j.stride * value : NULL;
        good &= nemo_fp8_quantize(&j);
        if (j.wild) all->wild = 1;
    }
    return (int)good;
}
