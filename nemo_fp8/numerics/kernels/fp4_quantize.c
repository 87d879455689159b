/* NVFP4 at memory speed: E2M1 codes two a byte, an E4M3 scale for 16 of them; nvfp4.py says which.

   As in fp8_quantize.c a strip, one row or the 16 rows of squares, is read twice, the second time from a cache, while the next one
   is prefetched. Its blocks' amaxes become scales, and scales become factors, a vector of blocks at a time. A code needs neither a
   branch nor a table. E2M1 is three grids of steps 1/2, 1 and 2, and where another grid than its own would count too far,

       code = min(round(2 |y|), round(|y|) + 2, round(|y| / 2) + 4, 7)

   The adder rounds: the last place of 2**23 is 1, ties go to even, and the low bits of the sum are the code. Two neighbouring BF16
   values are the halves of one 32-bit word and become one byte, which saves the shuffles. That is plain C, vectorized by the
   compiler. Tame BF16, nearly all there is, runs on vectors by hand where there is AVX-512 or AVX2: a third fewer instructions. */

#include "fp8_tops.h"

enum { VALUES = 16, BLOCKS = STRIP / VALUES, ASKED = 512 };

typedef struct fp4_job {
    const void *x;         /* rows x cols, `stride` elements from row to row; cols is a multiple of 16 */
    uint8_t *codes;        /* rows x cols / 2 */
    uint8_t *scales;       /* rows x cols / 16 */
    const float *encode;   /* the tensor's own scale, or one for each row: `encode_stride` is 0 or 1 */
    parallel_function *parallel;
    int64_t rows, cols, stride, encode_stride;
    int32_t source, tile_rows, vllm, threads;
    _Atomic int64_t next;
} fp4_job;

typedef struct {
    uint32_t tops[STRIP];
    float amax[BLOCKS], factor[BLOCKS], slots[STRIP / 2];
    uint8_t scales[BLOCKS] __attribute__((aligned(64))), row[STRIP / 2] __attribute__((aligned(64)));
} scratch4;

/* ------------------------------------------------------------------------------------------------- amaxes of blocks */

/* The bits of a block's largest magnitude; above INFINITE if one of them is NaN. */
INLINE uint32_t top_of_block(const void *x, int64_t first, int source) {
    uint32_t top = 0;
    for (int64_t i = first; i < first + VALUES; i++) {
        uint32_t u = source == FP32 ? ((const uint32_t *)x)[i] & 0x7fffffff : ((const uint16_t *)x)[i] & 0x7fffu;
        top = u > top ? u : top;
    }
    uint16_t half = (uint16_t)top;
    return source == FP32 ? top : widen(&half, 0, source);
}

static uint32_t top_number(const fp4_job *j, const char *x, int64_t rows, int64_t first) {
    uint32_t top = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = first; i < first + VALUES; i++) {
            uint32_t u = widen(x + r * j->stride * bytes_of(j->source), i, j->source) & 0x7fffffff;
            top = u > top && u <= INFINITE ? u : top;
        }
    return top;
}

/* The amax of every block; NaNs enter none. Returns whether all values are numbers. */
static int amaxes(const fp4_job *j, scratch4 *w, const char *x, int64_t rows, int64_t width) {
    const char *tops = x;
    int64_t n = width / VALUES, t = 0;
    uint32_t most = 0;
    if (rows > 1) find_tops(x, j->stride * bytes_of(j->source), rows, w->tops, width, j->source), tops = (const char *)w->tops;
#ifdef BLOCK
    if (j->source == BF16) for (; t + TOPS <= n; t += TOPS) tops_of_blocks((const uint16_t *)tops + t * VALUES, w->amax + t);
#endif
    if (j->source == FP32) for (; t < n; t++) w->amax[t] = value(top_of_block(tops, t * VALUES, FP32));
    else for (; t < n; t++) w->amax[t] = value(top_of_block(tops, t * VALUES, j->source));
    for (t = 0; t < n; t++) most = bits(w->amax[t]) > most ? bits(w->amax[t]) : most;
    for (t = 0; t < n && most > INFINITE; t++)
        if (bits(w->amax[t]) > INFINITE) w->amax[t] = value(top_number(j, x, rows, t * VALUES));
    return most <= INFINITE;
}

/* ------------------------------------------------------------------------------------------------ scales and factors */

/* E4M3 as fp8_rows.h rounds to it: the step at a magnitude is the last place of the magnitude times 2**20.

   Returns whether the blocks are tame: no value of theirs, multiplied, is as large as 7, which needs a code above 7, and none that
   BF16 has, multiplied, becomes 0 for being small, which would lose its sign. */
static int find_factors(const float *restrict amax, float encode, int vllm, uint8_t *restrict scales, float *restrict factor, int64_t n) {
    const float most = 3.40282346638528859812e+38f, sixth = 1.0f / 6.0f, decode = 1.0f / encode, folded = encode * sixth;
    const float magic = value(147u << 23), if_zero = vllm ? 1e8f : 0.0f;
    const uint32_t least = 121u << 23, top = 0x43e00000u; /* 2**-6, 448 */
    uint32_t largest = 0, smallest = INFINITE;
    for (int64_t t = 0; t < n; t++) {
        float s = vllm ? encode * (amax[t] * sixth) : amax[t] * folded;
        uint32_t u = bits(s), e = u > least ? u : least;
        u = u > top ? top : u;
        e = (e > top ? top : e) & INFINITE;
        float step = value(e) * magic, rounded = (value(u) + step) - step, d = rounded * decode;
        uint32_t c = bits(rounded), normal = (c - (120u << 23)) >> 20, small = (uint32_t)(int32_t)(rounded * 512.0f);
        scales[t] = (uint8_t)(c < least ? small : normal);
        d = d == 0 ? if_zero : d;
        float f = 1.0f / d;
        factor[t] = f = f < most ? f : most;
        uint32_t reaches = bits(amax[t] * f);
        largest = reaches > largest ? reaches : largest;
        smallest = bits(f) < smallest ? bits(f) : smallest;
    }
    return largest < bits(7.0f) && smallest >= bits(0x1p-16f);
}

/* ------------------------------------------------------------------------------------------------------------- codes */

INLINE uint32_t code_of(uint32_t x, float factor) {
    const float one = 8388608.0f; /* the magnitude whose last place is 1 */
    float y = value(x) * factor, m = value(bits(y) & 0x7fffffff);
    float halves = m * 2 + one, ones = m + (one + 2), twos = m * 0.5f + (one + 4);
    float least = halves < ones ? halves : ones;
    least = least < twos ? least : twos;
    least = least < one + 7 ? least : one + 7; /* so is NaN, which is not less */
    return (bits(least) & 7) | (y < 0 ? 8 : 0);
}

INLINE void pack_pairs(const void *x, uint8_t *restrict out, int64_t n, const float *restrict slots, int source) {
    for (int64_t i = 0; i < n / 2; i++) {
        uint32_t even, odd;
        if (source == BF16) {
            uint32_t both;
            memcpy(&both, (const uint16_t *)x + 2 * i, 4);
            even = both << 16, odd = both & 0xffff0000;
        } else {
            even = widen(x, 2 * i, source), odd = widen(x, 2 * i + 1, source);
        }
        out[i] = (uint8_t)(code_of(even, slots[i]) | code_of(odd, slots[i]) << 4);
    }
}

#ifdef BLOCK
enum { UNIT = 8 * LANES /* columns whose codes are BLOCK bytes, or half of them */ };

/* The same for tame BF16 on vectors: UNIT columns at a time. Returns how many columns are done. */
static int64_t pack_units(const uint16_t *x, uint8_t *out, int64_t n, const float *factor, const char *ask) {
    const words positive = V(set1_epi32)(0x7fff7fff), upper = V(set1_epi32)(0x7fff0000);
    const grids k = grids_of_e2m1();
    int64_t c = 0;
    for (; c + UNIT <= n; c += UNIT) {
        words codes[4];
        for (int64_t i = 0; i < 2 * UNIT; i += 64) _mm_prefetch(ask + 2 * c + i, _MM_HINT_T1);
        UNROLLED
        for (int g = 0; g < 4; g++) {
            words both = V_BITS(loadu)((const words *)(x + c + g * 2 * LANES));
            reals scale = of_blocks(factor + (c + g * 2 * LANES) / VALUES);
            reals even = V(mul_ps)(REALS(V(slli_epi32)(V_BITS(and)(both, positive), 16)), scale);
            reals odd = V(mul_ps)(REALS(V_BITS(and)(both, upper)), scale);
            codes[g] = code_pairs(even, odd, both, k);
        }
        put_pairs(out + c / 2, codes);
    }
    return c;
}
#endif

static void pack_row(const char *x, uint8_t *out, int64_t n, const float *slots, int source) {
    if (source == BF16) pack_pairs(x, out, n, slots, BF16);
    else if (source == FP32) pack_pairs(x, out, n, slots, FP32);
    else pack_pairs(x, out, n, slots, FP16);
}

static void spread_factors(scratch4 *w, int64_t first, int64_t n) {
    for (int64_t t = first; t < n; t++) for (int64_t i = 0; i < VALUES / 2; i++) w->slots[t * (VALUES / 2) + i] = w->factor[t];
}

/* One row of blocks, `rows` rows of values: 1, or up to 16 of squares. */
static void cast_blocks(const fp4_job *j, scratch4 *w, int64_t r0, int64_t rows, int64_t c0, int64_t width, const char *ask) {
    int64_t size = bytes_of(j->source), step = j->stride * size, n = width / VALUES, done = 0, spread = 0;
    const char *x = (const char *)j->x + (r0 * j->stride + c0) * size;
    int streams = large(j->rows * j->cols / 2);
    int numbers = amaxes(j, w, x, rows, width);
    int tame = find_factors(w->amax, j->encode[r0 * j->encode_stride], j->vllm, w->scales, w->factor, n) && numbers;
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = (r0 + r) * j->cols + c0;
        uint8_t *to = j->codes + at / 2, *row = streams ? w->row : to;
#ifdef BLOCK
        if (tame && j->source == BF16) done = pack_units((const uint16_t *)(x + r * step), row, width, w->factor, ask + r * step);
#endif
        if (done < width && !spread) spread = 1, spread_factors(w, done / VALUES, n);
        for (int64_t c = done; c < width; c += ASKED) {
            int64_t part = least_of(ASKED, width - c);
            ask_for(ask + r * step + c * size, part * size);
            pack_row(x + r * step + c * size, row + c / 2, part, w->slots + c / 2, j->source);
        }
        if (streams) stream(to, row, width / 2), stream(j->scales + at / VALUES, w->scales, n);
        else memcpy(j->scales + at / VALUES, w->scales, (size_t)n);
    }
}

/* Rows are taken ROWS_OF_A_UNIT at a time for blocks of one row, too: what is prefetched then lies far enough ahead. */
static void work4(void *argument) {
    fp4_job *j = argument;
    scratch4 w;
    int64_t size = bytes_of(j->source), high = ROWS_OF_A_UNIT;
    way through = way_through(plan_for(j->rows, j->cols, high, j->threads), &j->next);
    for (spot at = go_on(&through), next; at.row >= 0; at = next) {
        next = go_on(&through);
        spot ahead = next.row < 0 ? at : next;
        int64_t width = least_of(STRIP, j->cols - at.column), last = least_of((at.row + 1) * high, j->rows);
        for (int64_t r = at.row * high; r < last; r += j->tile_rows) {
            int64_t later = ahead.row * high + r - at.row * high;
            const char *ask = (const char *)j->x + (later * j->stride + ahead.column) * size;
            cast_blocks(j, &w, r, least_of(j->tile_rows, last - r), at.column, width, ask);
        }
    }
    streamed();
}

void nemo_fp4_quantize(fp4_job *j) {
    expect(j->codes, j->rows * j->cols / 2);
    share(work4, j, j->threads, j->parallel);
}
