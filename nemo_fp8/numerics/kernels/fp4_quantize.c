/* NVFP4 at memory speed: E2M1 codes two a byte, an E4M3 scale for 16 of them; nvfp4.py says which.

   As in fp8_quantize.c a strip, one row or the 16 rows of squares, is read twice, the second time from a cache, while the next one
   is prefetched. Its blocks' amaxes become scales, and scales become factors, a vector of blocks at a time. A code needs neither a
   branch nor a table. E2M1 is three grids of steps 1/2, 1 and 2, and where another grid than its own would count too far,

       code = min(round(2 |y|), round(|y|) + 2, round(|y| / 2) + 4, 7)

   The adder rounds: the last place of 2**23 is 1, ties go to even, and the low bits of the sum are the code. Two neighbouring BF16
   values are the halves of one 32-bit word and become one byte, which saves the shuffles. That is plain C, vectorized by the
   compiler. Tame BF16, nearly all there is, runs on vectors by hand where there is AVX-512 or AVX2: a third fewer instructions.

   Columns are rows of a tile that was turned (fp4_turn.h). Rounding by chance reads a number for each value, so that whoever draws
   them decides. 4 over 6 is a choice of factors, made before the cast. */

#include "fp4_turn.h"

enum { VALUES = 16, BLOCKS = STRIP / VALUES, ASKED = 512 };
enum rule { TE, VLLM, SIX, FOUR }; /* how the amax of a block becomes its scale; the last two are the ways of 4 over 6 */
enum error { NO_CHOICE, MAE, MSE };

typedef struct fp4_job {
    const void *x;         /* rows x cols, `stride` elements from row to row; cols is a multiple of 16 */
    uint8_t *codes;        /* rows x cols / 2 */
    uint8_t *scales;       /* rows x cols / 16 */
    const float *encode;   /* the tensor's own scale, or one for each row: `encode_stride` is 0 or 1 */
    const float *amax;     /* the same for what `encode` was made of; only 4 over 6 reads it */
    const float *chance;   /* rows x cols, uniform from 0 to 1, for codes rounded by chance; NULL for the nearest */
    const float *signs;    /* 16 of +-1/4, for values that are transformed; NULL for values as they are */
    parallel_function *parallel;
    int64_t rows, cols, stride, encode_stride;
    int32_t source, tile_rows, vllm, turned /* `stride` is that from column to column */, error, scaled_errors, threads;
    float largest;         /* what `amax` becomes: 6 * 448, or 6 * 256 */
    _Atomic int64_t next;
    _Atomic uint32_t top;  /* of transformed values, as the bits of BF16 */
} fp4_job;

typedef struct {
    uint32_t tops[STRIP];
    float amax[BLOCKS], factor[BLOCKS], slots[STRIP / 2];
    uint8_t scales[BLOCKS] __attribute__((aligned(64))), row[STRIP / 2] __attribute__((aligned(64)));
    float four[BLOCKS], lost[STRIP], errors[2][ROWS_OF_A_UNIT][BLOCKS];
    uint8_t four_scales[BLOCKS];
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

static uint32_t top_number(const char *x, int64_t step, int64_t rows, int64_t first, int source) {
    uint32_t top = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = first; i < first + VALUES; i++) {
            uint32_t u = widen(x + r * step, i, source) & 0x7fffffff;
            top = u > top && u <= INFINITE ? u : top;
        }
    return top;
}

/* The amax of every block; NaNs enter none. Returns whether all values are numbers. */
static int amaxes(scratch4 *w, const char *x, int64_t step, int64_t rows, int64_t width, int source) {
    const char *tops = x;
    int64_t n = width / VALUES, t = 0;
    uint32_t most = 0;
    if (rows > 1) find_tops(x, step, rows, w->tops, width, source), tops = (const char *)w->tops;
#ifdef BLOCK
    if (source == BF16) for (; t + TOPS <= n; t += TOPS) tops_of_blocks((const uint16_t *)tops + t * VALUES, w->amax + t);
#endif
    if (source == FP32) for (; t < n; t++) w->amax[t] = value(top_of_block(tops, t * VALUES, FP32));
    else for (; t < n; t++) w->amax[t] = value(top_of_block(tops, t * VALUES, source));
    for (t = 0; t < n; t++) most = bits(w->amax[t]) > most ? bits(w->amax[t]) : most;
    for (t = 0; t < n && most > INFINITE; t++)
        if (bits(w->amax[t]) > INFINITE) w->amax[t] = value(top_number(x, step, rows, t * VALUES, source));
    return most <= INFINITE;
}

/* ------------------------------------------------------------------------------------------------ scales and factors */

/* E4M3 as fp8_rows.h rounds to it: the step at a magnitude is the last place of the magnitude times 2**20, in which the sum counts.

   Returns whether the blocks are tame: no value of theirs, multiplied, is as large as 7, which needs a code above 7, and none that
   BF16 has, multiplied, becomes 0 for being small, which would lose its sign: the least factor is that of the largest scale, or
   vLLM's of a scale that is 0. */
INLINE int factors_by(const float *restrict amax, float encode, int rule, uint8_t *restrict scales, float *restrict factor, int64_t n) {
    const float most = 3.40282346638528859812e+38f, sixth = 1.0f / 6.0f, decode = 1.0f / encode, folded = encode * sixth;
    const float magic = value(147u << 23);
    const uint32_t least = 121u << 23, top = 0x43e00000u; /* 2**-6, 448 */
    uint32_t largest = 0, zero = 0;
    for (int64_t t = 0; t < n; t++) {
        float s = rule == TE ? amax[t] * folded : rule == VLLM ? encode * (amax[t] * sixth) : amax[t] / 6.0f * encode;
        if (rule == FOUR) s *= 1.5f;
        uint32_t u = bits(s) < top ? bits(s) : top, e = (u > least ? u : least) & INFINITE;
        float step = value(e) * magic, sum = value(u) + step, d = (sum - step) * decode;
        scales[t] = (uint8_t)(bits(sum) + (e >> 20) - (least >> 20)); /* steps of the smallest normal on, and below it */
        if (rule == VLLM) zero |= d == 0, d = d == 0 ? 1e8f : d;
        float f = 1.0f / d;
        factor[t] = f = f < most ? f : most;
        uint32_t reaches = bits(amax[t] * f);
        largest = reaches > largest ? reaches : largest;
    }
    return !zero && largest < bits(7.0f) && 1.0f / (448.0f * decode) >= 0x1p-16f;
}

static int find_factors(const float *amax, float encode, int rule, uint8_t *scales, float *factor, int64_t n) {
    if (rule == TE) return factors_by(amax, encode, TE, scales, factor, n);
    if (rule == VLLM) return factors_by(amax, encode, VLLM, scales, factor, n);
    if (rule == SIX) return factors_by(amax, encode, SIX, scales, factor, n);
    return factors_by(amax, encode, FOUR, scales, factor, n);
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

/* One of the two codes around each value: the upper one as often as the value is near to it. A magnitude counts in steps of its
   grid, from the code on at which the grid begins: its exponent, from 0 to 2, is the grid's number. */
INLINE uint32_t code_by_chance(uint32_t x, float factor, float chance) {
    const uint32_t one = 127u << 23, six = 0x40c00000u; /* as integers, since the compiler vectorizes their minimum */
    float y = value(x) * factor;
    uint32_t u = bits(y) & 0x7fffffff;
    u = u < six ? u : six; /* so is NaN */
    uint32_t grid = ((u > one ? u : one) >> 23) - 127;
    float steps = value(u) * value((128 - grid) << 23);
    int32_t below = (int32_t)steps;
    uint32_t up = bits(chance - (steps - (float)below)) >> 31; /* whether it is less */
    return ((uint32_t)below + up + 2 * grid) | (y < 0 ? 8 : 0);
}

/* At most ASKED columns. */
INLINE void pack_by_chance(const char *x, uint8_t *restrict out, int64_t n, const float *factor, const float *chance, int source) {
    uint32_t codes[ASKED];
    for (int64_t c = 0; c < n; c += VALUES) {
        float scale = factor[c / VALUES];
        for (int i = 0; i < VALUES; i++) codes[c + i] = code_by_chance(widen(x + c * bytes_of(source), i, source), scale, chance[c + i]);
    }
    for (int64_t i = 0; i < n / 2; i++) {
        uint64_t two;
        memcpy(&two, codes + 2 * i, 8);
        out[i] = (uint8_t)(two | two >> 28);
    }
}

#ifdef BLOCK
enum { UNIT = 8 * LANES /* columns whose codes fill a vector */, SPARE4 = 6 };

/* As fp8_avx2.h rounds: a fused sum, whose upper half holds the grid and whose lower half counts its steps, and a multiplication that
   adds the two. The code of an even column comes out as code << SPARE4, that of an odd one four bits further up. */
typedef struct { words least, grid; reals magic; words even, odd; } grids;
INLINE grids grids_of_e2m1(void) {
    const uint32_t from = -(149 << 1) & 0xffff; /* 2**22, in whose binade the last place is 1/2, has the exponent 149 */
#define CODE_AT(UP) V(set1_epi32)(1 << (16 + (UP) - 6) | 1 << (UP))
    return (grids){V(set1_epi32)(127 << 23), V(set1_epi32)((int32_t)INFINITE), V(set1_ps)(value(149u << 23 | from)),
                   CODE_AT(SPARE4), CODE_AT(SPARE4 + 4)};
}
INLINE words code_lanes(words magnitude, reals scale, grids k, words to) {
    reals y = V(mul_ps)(REALS(magnitude), scale), grid = REALS(V_BITS(and)(V(max_epi32)(WORDS(y), k.least), k.grid));
    return V(madd_epi16)(WORDS(V(fmadd_ps)(grid, k.magic, y)), to);
}

/* The codes of two vectors of columns, a pair in each 16-bit word, with the signs of x but for -0. */
INLINE words code_pairs(const words *x, const reals *scale, grids k) {
    const words upper = V(set1_epi32)(0x7fff0000), no_sign = V(set1_epi16)((int16_t)0x8000);
    words codes[2], below[2];
    UNROLLED
    for (int g = 0; g < 2; g++) {
        words even = code_lanes(V_BITS(and)(V(slli_epi32)(x[g], 16), upper), scale[g], k, k.even);
        codes[g] = V_BITS(or)(even, code_lanes(V_BITS(and)(x[g], upper), scale[g], k, k.odd));
        below[g] = V(subs_epu16)(x[g], no_sign);
    }
    words negative = V(min_epu8)(V(packus_epi16)(below[0], below[1]), V(set1_epi8)(1)); /* saturated, so 0 only where it was */
    words signs = V(maddubs_epi16)(V(set1_epi16)((int16_t)0x8008), negative);
    return V_BITS(or)(V(srli_epi16)(V(packus_epi32)(codes[0], codes[1]), SPARE4), signs);
}

/* The same for tame BF16 on vectors: UNIT columns at a time. Returns how many columns are done. */
static int64_t pack_units(const uint16_t *x, uint8_t *out, int64_t n, const float *factor, const char *ask) {
    const grids k = grids_of_e2m1();
    int64_t c = 0;
    for (; c + UNIT <= n; c += UNIT) {
        words both[4];
        reals scale[4];
        for (int64_t i = 0; i < 2 * UNIT; i += 64) _mm_prefetch(ask + 2 * c + i, _MM_HINT_T1);
        UNROLLED
        for (int g = 0; g < 4; g++) {
            both[g] = V_BITS(loadu)((const words *)(x + c + g * 2 * LANES));
            scale[g] = of_blocks(factor + (c + g * 2 * LANES) / VALUES);
        }
        words bytes = V(packus_epi16)(code_pairs(both, scale, k), code_pairs(both + 2, scale + 2, k));
        V_BITS(storeu)((words *)(out + c / 2), twice_packed(bytes));
    }
    return c;
}
#endif

static void pack_row(const char *x, uint8_t *out, int64_t n, const float *slots, int source) {
    if (source == BF16) pack_pairs(x, out, n, slots, BF16);
    else if (source == FP32) pack_pairs(x, out, n, slots, FP32);
    else pack_pairs(x, out, n, slots, FP16);
}

static void pack_row_by_chance(const char *x, uint8_t *out, int64_t n, const float *factor, const float *chance, int source) {
    if (source == BF16) pack_by_chance(x, out, n, factor, chance, BF16);
    else if (source == FP32) pack_by_chance(x, out, n, factor, chance, FP32);
    else pack_by_chance(x, out, n, factor, chance, FP16);
}

static void spread_factors(const float *factor, float *slots, int64_t first, int64_t n) {
    for (int64_t t = first; t < n; t++) for (int64_t i = 0; i < VALUES / 2; i++) slots[t * (VALUES / 2) + i] = factor[t];
}

/* ---------------------------------------------------------------------------------------------------------- 4 over 6 */

/* What is lost of each value, whose code is code_of's. */
INLINE void losses(const void *x, float *restrict lost, int64_t n, float factor, float scale, float encode, float amax, float largest,
                   int scaled, int mse, int source) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = widen(x, i, source), code = code_of(u, factor);
        float v = value(bits(magnitude_of_e2m1(code & 7)) | (code & 8) << 28) * scale;
        float off = scaled ? v - value(u) * encode : v * amax / largest - value(u);
        lost[i] = mse ? off * off : value(bits(off) & 0x7fffffff);
    }
}

static void losses_of(const fp4_job *j, const char *x, float *lost, int64_t n, float factor, float scale, float encode, float amax) {
#define BY_ERROR(SOURCE, SCALED) \
    if (j->error == MSE) losses(x, lost, n, factor, scale, encode, amax, j->largest, SCALED, 1, SOURCE); \
    else losses(x, lost, n, factor, scale, encode, amax, j->largest, SCALED, 0, SOURCE);
#define BY_SCALE(SOURCE) if (j->scaled_errors) { BY_ERROR(SOURCE, 1) } else { BY_ERROR(SOURCE, 0) }
    if (j->source == BF16) { BY_SCALE(BF16) }
    else if (j->source == FP32) { BY_SCALE(FP32) }
    else { BY_SCALE(FP16) }
}

/* E4M3 back to a float; no scale is NaN. */
INLINE float scale_of(uint32_t code) { return code >> 3 ? value((code << 20) + (120u << 23)) : (float)(int32_t)code * 0x1p-9f; }

/* Errors in the order of TE's kernel: one after the other in a row, and the rows of a square pair by pair. */
static void errors_of(const fp4_job *j, scratch4 *w, const char *x, int64_t step, int64_t r0, int64_t rows, int64_t width, int way) {
    const float *factor = way ? w->factor : w->four;
    const uint8_t *scales = way ? w->scales : w->four_scales;
    int64_t n = width / VALUES;
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = (r0 + r) * j->encode_stride;
        for (int64_t t = 0; t < n; t++) {
            int64_t first = t * VALUES;
            losses_of(j, x + r * step + first * bytes_of(j->source), w->lost + first, VALUES, factor[t], scale_of(scales[t]), j->encode[at], j->amax[at]);
        }
        for (int64_t t = 0; t < n; t++) {
            float total = 0;
            for (int64_t i = 0; i < VALUES; i++) total += w->lost[t * VALUES + i];
            w->errors[way][r][t] = total;
        }
    }
    if (rows == 1 && j->tile_rows == 1) return;
    for (int64_t r = rows; r < ROWS_OF_A_UNIT; r++) memset(w->errors[way][r], 0, sizeof w->errors[way][r]);
    for (int64_t half = ROWS_OF_A_UNIT / 2; half; half /= 2)
        for (int64_t r = 0; r < half; r++)
            for (int64_t t = 0; t < n; t++) w->errors[way][r][t] += w->errors[way][r + half][t];
}

/* Takes for each block the scale that makes its largest value 4, where that loses less than the one that makes it 6. */
static int choose_factors(const fp4_job *j, scratch4 *w, const char *x, int64_t step, int64_t r0, int64_t rows, int64_t width) {
    float encode = j->encode[r0 * j->encode_stride];
    int64_t n = width / VALUES;
    int four = find_factors(w->amax, encode, FOUR, w->four_scales, w->four, n), six = find_factors(w->amax, encode, SIX, w->scales, w->factor, n);
    for (int way = 0; way < 2; way++) errors_of(j, w, x, step, r0, rows, width, way);
    for (int64_t t = 0; t < n; t++)
        if (w->errors[0][0][t] < w->errors[1][0][t]) w->factor[t] = w->four[t], w->scales[t] = w->four_scales[t];
    return four && six;
}

/* ------------------------------------------------------------------------------------------------------------- blocks */

/* One row of blocks at x, `rows` rows of values `step` bytes apart: 1, or up to 16 of squares. Their place is row r0, column c0. */
static void cast_blocks(const fp4_job *j, scratch4 *w, const char *x, int64_t step, int64_t r0, int64_t rows, int64_t c0, int64_t width,
                        const char *ask) {
    int64_t size = bytes_of(j->source), n = width / VALUES, done = 0, spread = 0;
    int streams = large(j->rows * j->cols / 2), tame = amaxes(w, x, step, rows, width, j->source);
    if (j->error) tame &= choose_factors(j, w, x, step, r0, rows, width);
    else tame &= find_factors(w->amax, j->encode[r0 * j->encode_stride], j->vllm ? VLLM : TE, w->scales, w->factor, n);
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = (r0 + r) * j->cols + c0;
        uint8_t *to = j->codes + at / 2, *row = streams ? w->row : to;
#ifdef BLOCK
        if (tame && j->source == BF16 && !j->chance) done = pack_units((const uint16_t *)(x + r * step), row, width, w->factor, ask + r * step);
#endif
        if (done < width && !spread && !j->chance) spread = 1, spread_factors(w->factor, w->slots, done / VALUES, n);
        for (int64_t c = done; c < width; c += ASKED) {
            int64_t part = least_of(ASKED, width - c);
            const char *from = x + r * step + c * size;
            ask_for(ask + r * step + c * size, part * size);
            if (j->chance) pack_row_by_chance(from, row + c / 2, part, w->factor + c / VALUES, j->chance + at + c, j->source);
            else pack_row(from, row + c / 2, part, w->slots + c / 2, j->source);
        }
        if (streams) stream(to, row, width / 2), stream(j->scales + at / VALUES, w->scales, n);
        else memcpy(j->scales + at / VALUES, w->scales, (size_t)n);
    }
}

/* Rows are taken ROWS_OF_A_UNIT at a time for blocks of one row, too: what is prefetched then lies far enough ahead. */
static void work4(void *argument) {
    fp4_job *j = argument;
    scratch4 w;
    int64_t size = bytes_of(j->source), high = ROWS_OF_A_UNIT, step = j->stride * size;
    const char *x = j->x;
    way through = way_through(plan_for(j->rows, j->cols, high, j->threads), &j->next);
    for (spot at = go_on(&through), next; at.row >= 0; at = next) {
        next = go_on(&through);
        spot ahead = next.row < 0 ? at : next;
        int64_t width = at.width, last = least_of((at.row + 1) * high, j->rows);
        for (int64_t r = at.row * high; r < last; r += j->tile_rows) {
            int64_t later = ahead.row * high + r - at.row * high;
            cast_blocks(j, &w, x + r * step + at.column * size, step, r, least_of(j->tile_rows, last - r), at.column, width,
                        x + later * step + ahead.column * size);
        }
    }
    streamed();
}

/* ------------------------------------------------------------------------------------------------------------- turned */

/* A tile of the source: `high` of its rows, which are columns of the matrix that is cast, and `wide` of its columns. The next one
   lies beside it. */
typedef struct { const char *x, *ask; int64_t row, column, high, wide; } tile;

static int next_tile(fp4_job *j, tile *t) {
    int64_t beside = (j->rows + WIDE - 1) / WIDE, tiles = beside * ((j->cols + HIGH - 1) / HIGH), at = atomic_fetch_add(&j->next, 1);
    if (at >= tiles) return 0;
    int64_t size = bytes_of(j->source);
    t->row = at % beside * WIDE, t->column = at / beside * HIGH;
    t->wide = least_of(WIDE, j->rows - t->row), t->high = least_of(HIGH, j->cols - t->column);
    t->x = (const char *)j->x + (t->column * j->stride + t->row) * size;
    t->ask = t->x + WIDE * size * j->threads;
    return 1;
}

static void work_turned(void *argument) {
    fp4_job *j = argument;
    scratch4 w;
    turned columns;
    tile t;
    int64_t size = bytes_of(j->source), step = APART * size;
    while (next_tile(j, &t)) {
        turn_tile(t.x, j->stride * size, t.high, t.wide, j->source, j->signs, t.ask, &columns);
        for (int64_t r = 0; r < t.wide; r += j->tile_rows) {
            const char *row = (const char *)columns.rows + r * step;
            cast_blocks(j, &w, row, step, t.row + r, least_of(j->tile_rows, t.wide - r), t.column, t.high, row);
        }
    }
    streamed();
}

static void work_top(void *argument) {
    fp4_job *j = argument;
    turned columns;
    tile t;
    uint32_t top = 0;
    while (next_tile(j, &t)) {
        uint32_t found = top_of_transformed(t.x, j->stride * 2, t.high, t.wide, j->signs, t.ask, &columns);
        top = found > top ? found : top;
    }
    uint32_t old = atomic_load(&j->top);
    while (old < top && !atomic_compare_exchange_weak(&j->top, &old, top)) {}
}

void nemo_fp4_quantize(fp4_job *j) {
    expect(j->codes, j->rows * j->cols / 2);
    share(j->turned ? work_turned : work4, j, j->threads, j->parallel);
}

/* The largest magnitude of the values that nemo_fp4_quantize would cast after their transform. */
void nemo_fp4_transformed_top(fp4_job *j) { share(work_top, j, j->threads, j->parallel); }
