/* FP8 casts at memory speed, in plain C that the compiler turns into whatever vectors the machine has.

   A strip is one row of tiles, at most STRIP columns wide, so that it stays in the core's second-level cache between
   its two readings: the first finds the largest magnitudes (as integers: the bits of positive floats sort like their
   values), the second multiplies, rounds and stores. Main memory is read once and written once.

   The cast has no branch and no table. To |y| a power of two is added whose last place is the step of the FP8 format
   at that magnitude, so the adder itself rounds to nearest even; below the smallest normal the step stops shrinking:

       e    = the power of two at or below max(|y|, smallest normal)
       sum  = |y| + e * 2**(23 - m)              the low bits of its mantissa count |y| in steps
       code = low bits of sum + (e's bits >> (23 - m))

   `magic` is 2**(23 - m) with a constant in its own low bits that makes up for the bias. Two neighbouring BF16 values
   are handled as the halves of one 32-bit word (PAIR), which spares the widening and most of the narrowing.

   Python (cpu.py) fills in a job and makes all choices. Compile without -ffast-math and with -ffp-contract=off. */

#include "fp8.h"

#ifdef __AVX512BW__
#include <immintrin.h>
#endif

enum scaling { GIVEN, TE, TE_POW2, DEEPGEMM, DEEPGEMM_POW2, E8M0 };

typedef struct job {
    const void *x;                                /* rows x cols, `stride` elements from row to row */
    uint8_t *codes;                               /* rows x cols, `codes_stride` from row to row */
    void *scale_inv;                              /* one a tile: floats, or bytes for E8M0; `scale_stride` from row to row */
    float *amax;                                  /* one a tile, if wanted */
    double *signal, *noise;                       /* one a tile, if wanted, and so all that follow */
    int32_t *underflow, *saturated, *nonfinite;
    uint8_t *least, *largest;
    int64_t rows, cols, stride, codes_stride, scale_stride, tile_rows, tile_cols;
    int32_t source, scaling, mantissa_bits, bias, threads;
    float format_max, saturates_above, given, scale_if_tiny;
    _Atomic int64_t next;
} job;

/* -------------------------------------------------------------------------------------------------- one element */

typedef struct { uint32_t drop, least, top; float magic, saturates_above; } format;

/* Statistics of a strip, of scaled values. A slot is a column, or two in a PAIR. A tile's first row sets them, the others
   add to them: tiles of one row are common, and clearing as much as is counted would cost as much. */
enum counting { NONE, SET, ADD };

typedef struct {
    float signal[STRIP], noise[STRIP];
    int32_t saturated[STRIP], nonfinite[STRIP];
    uint8_t lost[STRIP], least[STRIP], largest[STRIP]; /* lost: to zero, though not zero */
} counts;

/* The code of float x in the low byte, to be XORed with x's sign; the bits above it mean nothing. `tame` means that the
   scale came from the tile's own, finite amax: then nothing is too large, infinite or NaN. Every NaN becomes +NaN. */
INLINE uint32_t encode(uint32_t x, float scale, format f, int tame, int count, counts *restrict s, int64_t slot) {
    uint32_t magnitude = x & 0x7fffffff;
    float y = value(magnitude) * scale;
    uint32_t u = bits(y);
    if (!tame) u = u > f.top ? f.top : u;
    uint32_t e = (u > f.least ? u : f.least) & INFINITE;
#ifdef __FMA__ /* e * magic is exact: both ways round once */
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

/* Element i as the bits of a float. */
INLINE uint32_t widen(const void *x, int64_t i, int source) {
    if (source == FP32) return ((const uint32_t *)x)[i];
    uint32_t u = ((const uint16_t *)x)[i];
    if (source != FP16) return u << 16;
    uint32_t magnitude = u & 0x7fff, subnormal = bits((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t normal = (magnitude << 13) + (magnitude < 0x7c00 ? 112u << 23 : 224u << 23);
    return (u & 0x8000) << 16 | (magnitude < 0x400 ? subnormal : normal);
}

/* ------------------------------------------------------------------------------------------------------ one row */

#ifdef __AVX512BW__
/* What the compiler makes of the PAIR loop below, with one shuffle for 64 codes where it takes a dozen. Returns how many it did. */
INLINE __m512i encode16(__m512i magnitude, __m512 scale, format f) {
    __m512 y = _mm512_mul_ps(_mm512_castsi512_ps(magnitude), scale);
    __m512i e = _mm512_max_epu32(_mm512_castps_si512(y), _mm512_set1_epi32((int)f.least));
    e = _mm512_and_si512(e, _mm512_set1_epi32((int)INFINITE));
    __m512 sum = _mm512_fmadd_ps(_mm512_castsi512_ps(e), _mm512_set1_ps(f.magic), y);
    return _mm512_add_epi32(_mm512_castps_si512(sum), _mm512_srl_epi32(e, _mm_cvtsi32_si128((int)f.drop)));
}

INLINE __m512i encode16_pairs(__m512i both, const float *scale, format f) {
    __m512 s = _mm512_loadu_ps(scale);
    __m512i a = encode16(_mm512_and_si512(_mm512_slli_epi32(both, 16), _mm512_set1_epi32(0x7fff0000)), s, f);
    __m512i b = encode16(_mm512_and_si512(both, _mm512_set1_epi32(0x7fff0000)), s, f);
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xff), a, _mm512_slli_epi32(b, 8), 0xca); /* 0xca: first ? second : third */
}

static int64_t cast_tame_pairs(const uint16_t *x, uint8_t *codes, int64_t n, const float *scale, format f) {
    static const uint16_t evens_then_odds[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    const __m512i order = _mm512_loadu_si512(evens_then_odds);
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        __m512i first = _mm512_loadu_si512(x + i), second = _mm512_loadu_si512(x + i + 32);
        __m512i a = encode16_pairs(first, scale + i / 2, f), b = encode16_pairs(second, scale + i / 2 + 16, f);
        __m512i mixed = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xffff), a, _mm512_slli_epi32(b, 16), 0xca);
        __m512i out = _mm512_permutexvar_epi16(order, mixed);
        __mmask64 negative = _mm512_kunpackd(_mm512_movepi16_mask(second), _mm512_movepi16_mask(first));
        _mm512_storeu_si512(codes + i, _mm512_mask_add_epi8(out, negative, out, _mm512_set1_epi8(-128)));
    }
    return i;
}
#endif

INLINE void cast_row(const void *x, uint8_t *restrict codes, int64_t n, const float *restrict scale, format f, int source, int tame,
                     int count, counts *restrict s) {
    int64_t i = 0;
    if (source == PAIR) {
#ifdef __AVX512BW__
        if (tame && !count) i = cast_tame_pairs(x, codes, n, scale, f) / 2;
#endif
        for (; i < n / 2; i++) {
            uint32_t both;
            memcpy(&both, (const uint16_t *)x + 2 * i, 4);
            uint32_t a = encode(both << 16, scale[i], f, tame, count, s, i);
            uint32_t b = encode(both & 0xffff0000, scale[i], f, tame, count ? ADD : NONE, s, i);
            uint16_t out = (uint16_t)(((a & 0xff) | b << 8) ^ (both >> 8 & 0x80) ^ (both >> 16 & 0x8000));
            memcpy(codes + 2 * i, &out, 2);
        }
        if (n % 2 == 0) return;
        uint32_t u = widen(x, n - 1, BF16);
        codes[n - 1] = (uint8_t)(encode(u, scale[i], f, tame, count, s, i) ^ u >> 31 << 7);
        return;
    }
    for (; i < n; i++) {
        uint32_t u = widen(x, i, source);
        codes[i] = (uint8_t)(encode(u, scale[i], f, tame, count, s, i) ^ u >> 31 << 7);
    }
}

/* Every combination becomes a loop of its own, in which the choices are constants. */
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

static void count_row(const void *x, const uint8_t *codes, int64_t n, int source, int add, counts *restrict s) {
    if (!(add ? count_codes(codes, n, 1, s) : count_codes(codes, n, 0, s))) return;
    if (source == FP32) for (int64_t i = 0; i < n; i++) s->lost[i] -= (((const uint32_t *)x)[i] & 0x7fffffff) == 0;
    else for (int64_t i = 0; i < n; i++) s->lost[i] -= (((const uint16_t *)x)[i] & 0x7fff) == 0;
}

/* `tops` raised to the magnitudes of `rows` rows (1 or 4), which lie `step` bytes apart. Four together keep memory busier. */
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

/* The row of largest magnitudes. A strip's rows lie pages apart, where the hardware looks ahead only after a few misses:
   so the beginnings of the next four are asked for early. */
static void find_tops(const char *x, int64_t step, int64_t rows, void *tops, int64_t n, int source) {
    memset(tops, 0, (size_t)(n * bytes_of(source)));
    int64_t r = 0, ahead = least_of(1024, n * bytes_of(source));
    for (; r + 4 <= rows; r += 4) {
        for (int64_t c = 0; c < ahead; c += 64)
            for (int64_t next = r + 4; next < least_of(r + 8, rows); next++) __builtin_prefetch(x + next * step + c, 0, 2);
        raise(x + r * step, step, 4, tops, n, source);
    }
    for (; r < rows; r++) raise(x + r * step, step, 1, tops, n, source);
}

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

/* The widths of all recipes are constants to the compiler, which makes their loops straight lines. */
#define FOR_WIDTH(N, CALL) ((N) == 32 ? CALL(32) : (N) == 128 ? CALL(128) : CALL(N))

static uint32_t highest(const void *x, int64_t n, int source) {
#define HIGHEST(N) highest_of(x, N, source)
    return FOR_WIDTH(n, HIGHEST);
}

/* ------------------------------------------------------------------------------------------------ one row of tiles */

static void find_scales(const job *j, const float *restrict amax, float *restrict scale, float *restrict scale_inv, int64_t n) {
    const float max = j->format_max, reciprocal = (float)(1.0 / (double)max);
    switch (j->scaling) {
    case TE: case TE_POW2:
        for (int64_t i = 0; i < n; i++) {
            float s = max / amax[i];
            s = bits(s) == INFINITE ? j->scale_if_tiny : s;
            s = j->scaling == TE_POW2 ? value(bits(s) & INFINITE) : s;
            scale[i] = s = amax[i] == 0 || bits(amax[i]) == INFINITE ? 1 : s;
            scale_inv[i] = 1 / s;
        }
        return;
    case DEEPGEMM: case DEEPGEMM_POW2:
        for (int64_t i = 0; i < n; i++) {
            float s = (amax[i] < 1e-4f ? 1e-4f : amax[i]) / max;
            s = j->scaling == DEEPGEMM_POW2 ? value((bits(s) + 0x7fffff) & INFINITE) : s;
            scale_inv[i] = s = bits(amax[i]) == INFINITE ? 1 : s;
            scale[i] = 1 / s;
        }
        return;
    case E8M0: /* scale_inv holds the bytes, as floats */
        for (int64_t i = 0; i < n; i++) {
            uint32_t u = bits(amax[i] * reciprocal), e = u >> 23, m = u & 0x7fffff;
            e += m && e != 254 && !(e == 0 && m <= 0x400000);
            e = u == INFINITE ? 254 : e;
            scale_inv[i] = (float)(int32_t)e;
            scale[i] = value(e == 254 ? 0x400000 : (254 - e) << 23);
        }
        return;
    default:
        for (int64_t i = 0; i < n; i++) scale[i] = j->given, scale_inv[i] = 1 / j->given;
    }
}

typedef struct { uint32_t tops[STRIP]; float amax[STRIP], scale[STRIP], scale_inv[STRIP], slots[STRIP]; counts counts; } scratch;

INLINE void store_counts_of(const job *j, const counts *s, int64_t at, float scale, int64_t c, int64_t n, int tame) {
    int64_t per = j->source == PAIR ? 2 : 1, first = c / per, slots = (n + per - 1) / per;
    float signal = 0, noise = 0;
    int32_t underflow = 0, saturated = 0, nonfinite = 0;
    uint8_t least = 255, largest = 0;
#pragma omp simd reduction(+ : signal, noise)
    for (int64_t i = 0; i < slots; i++) signal += s->signal[first + i], noise += s->noise[first + i];
    if (!tame)
        for (int64_t i = 0; i < slots; i++) saturated += s->saturated[first + i], nonfinite += s->nonfinite[first + i];
    for (int64_t i = 0; i < n; i++) underflow += s->lost[c + i];
    for (int64_t i = 0; i < n; i++) least = s->least[c + i] < least ? s->least[c + i] : least;
    for (int64_t i = 0; i < n; i++) largest = s->largest[c + i] > largest ? s->largest[c + i] : largest;
    double inverse = 1.0 / (double)scale;
    j->signal[at] = (double)signal * inverse * inverse, j->noise[at] = (double)noise * inverse * inverse;
    j->underflow[at] = underflow, j->saturated[at] = saturated, j->nonfinite[at] = nonfinite;
    j->least[at] = (uint8_t)(least + 1), j->largest[at] = largest;
}

static void store_counts(const job *j, const counts *s, int64_t at, float scale, int64_t c, int64_t n, int tame) {
#define STORE(N) store_counts_of(j, s, at, scale, c, N, tame)
    FOR_WIDTH(n, STORE);
}

static void tiles(const job *j, format f, scratch *w, int64_t row, int64_t c0) {
    int64_t r0 = row * j->tile_rows, r1 = least_of(r0 + j->tile_rows, j->rows), width = least_of(STRIP, j->cols - c0);
    int64_t n = (width + j->tile_cols - 1) / j->tile_cols, grid = (j->cols + j->tile_cols - 1) / j->tile_cols;
    int64_t first = row * grid + c0 / j->tile_cols, size = bytes_of(j->source), per = j->source == PAIR ? 2 : 1;
    const char *x = (const char *)j->x + (r0 * j->stride + c0) * size;
    int tame = j->scaling != GIVEN, count = j->signal != NULL;

    if (j->scaling != GIVEN || j->amax) {
        const void *tops = x; /* a single row is its own row of largest magnitudes */
        if (r1 - r0 > 1) {
            find_tops(x, j->stride * size, r1 - r0, w->tops, width, j->source);
            tops = w->tops;
        }
        for (int64_t t = 0; t < n; t++) {
            int64_t c = t * j->tile_cols, many = least_of(j->tile_cols, width - c);
            if (r1 - r0 == 1) ask_for((const char *)tops + c * size + 2048, many * size);
            uint32_t top = highest((const char *)tops + c * size, many, j->source);
            if (top > INFINITE) { /* NaNs enter no amax */
                top = 0;
                for (int64_t r = 0; r < r1 - r0; r++)
                    for (int64_t i = c; i < c + many; i++) {
                        uint32_t u = widen(x + r * j->stride * size, i, j->source) & 0x7fffffff;
                        top = u > top && u <= INFINITE ? u : top;
                    }
                tame = 0;
            }
            tame &= top < INFINITE;
            w->amax[t] = value(top);
        }
        if (j->amax) memcpy(j->amax + first, w->amax, (size_t)n * 4);
        if (!j->codes) return;
    }
    find_scales(j, w->amax, w->scale, w->scale_inv, n);
    int64_t scales_at = row * j->scale_stride + c0 / j->tile_cols;
    if (j->scaling == E8M0) for (int64_t t = 0; t < n; t++) ((uint8_t *)j->scale_inv)[scales_at + t] = (uint8_t)w->scale_inv[t];
    else if (j->scaling != GIVEN) memcpy((float *)j->scale_inv + scales_at, w->scale_inv, (size_t)n * 4);

    const float *slots = w->scale;
    if (j->tile_cols > 1) {
        for (int64_t t = 0; t < n; t++)
            for (int64_t i = 0; i < j->tile_cols / per; i++) w->slots[t * (j->tile_cols / per) + i] = w->scale[t];
        slots = w->slots;
    }
    for (int64_t r = 0; r < r1 - r0; r++) {
        const void *from = x + r * j->stride * size;
        uint8_t *codes = j->codes + (r0 + r) * j->codes_stride + c0;
        if (r + 1 < r1 - r0 || (j->scaling == GIVEN && !j->amax)) ask_for((const char *)from + j->stride * size, width * size);
        CAST[j->source][tame][count ? r ? ADD : SET : NONE](from, codes, width, slots, f, &w->counts);
        if (count) count_row(from, codes, width, j->source, r > 0, &w->counts);
    }
    if (count)
        for (int64_t t = 0, c = 0; t < n; t++, c += j->tile_cols)
            store_counts(j, &w->counts, first + t, w->scale[t], c, least_of(j->tile_cols, width - c), tame);
}

/* ---------------------------------------------------------------------------------------------------- the whole job */

static void *work(void *argument) {
    job *j = argument;
    scratch w;
    uint32_t drop = 23 - (uint32_t)j->mantissa_bits, least = 128 - (uint32_t)j->bias;
    float magic = value((127 + drop) << 23 | (-(least << j->mantissa_bits) & 0xff));
    format f = {drop, least << 23, bits(j->format_max), magic, j->saturates_above};
    FOR_EACH_STRIP(j, row, column, tiles(j, f, &w, row, column))
    return NULL;
}

void nemo_fp8_quantize(job *j) {
    if (j->codes && j->codes_stride == j->cols) expect(j->codes, j->rows * j->cols);
    share(work, j, j->threads);
}
