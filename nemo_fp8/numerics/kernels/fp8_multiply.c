/* A product with a matrix of E4M3 codes, which are never written down as numbers:

       y[t][r]  =  bias[r]  +  sum over tiles b of   scale_inv[r / tile_rows][b] * sum over the tile's columns c of   x[t][c] * code[r][c]

   Codes become BF16 numbers in registers, which hold them exactly, and all sums are FP32. So a weight is read once, at one byte an
   element: for a few rows of x, which are tokens that are generated, reading weights is what takes the time. The scale multiplies the
   sum of a tile, as on a GPU, and not every element; a row with a code that is no number has sums that are none. A result in BF16 is
   rounded once.

   Processors differ in how a code becomes a number, and in how numbers are multiplied:

       AVX-512 with shuffles of bytes     the two bytes of a number are looked up; elsewhere bits are shifted (`BEHIND`, below)
       dot products of BF16, and BF16 x   those, for which subnormal numbers are zero; elsewhere FP32

   The trade-off: for every TOKENS_AT_ONCE rows of x the codes become numbers once more. From some number of rows on it is faster to
   decode the matrix once, and to multiply it with the best product there is. Without AVX2 there is no such kernel. */

#include "product.h"

typedef struct multiply_job {
    const void *x; /* rows of BF16 or FP32 */
    void *room;    /* for each row of x one float, and one more for each column of `stride` */
    const uint8_t *codes;
    const void *scale_inv; /* floats or E8M0 bytes, one a tile */
    const float *bias;     /* one a row of codes, or NULL */
    void *y;               /* BF16 or FP32 */
    parallel_function *parallel;
    int64_t tokens, rows, cols, tile_rows, tile_cols, stride;
    int32_t x_type, y_type, e8m0, threads;
    _Atomic int64_t next;
} multiply_job;

#ifdef BLOCK
enum { GROUP = 4 * LANES, PARTS = 4 /* of a group */, AHEAD = 4 /* rows */, SMALL_TILE = 32 };
enum { ROWS_AT_ONCE = 2, TOKENS_AT_ONCE = 8 /* at most: as many sums as registers hold */ };

#ifdef __AVX512VBMI__
/* Bytes of two vectors become words within every 16 columns: the first eight in one vector, the others in another. */
INLINE int64_t column_of(int64_t lane, int64_t part) { return lane / 4 * 16 + part / 2 * 8 + lane % 4 * 2 + part % 2; }
enum { BEHIND = 0 };
typedef struct { words upper[2], lower[2]; } table; /* of the number of each magnitude */

INLINE table table_of_codes(void) {
    uint8_t upper[128], lower[128];
    for (uint32_t m = 0; m < 128; m++) {
        uint32_t u = m == 127 ? 0x7fc00000 : bits(m < 8 ? (float)m / 512 : value((m << 20) + (120 << 23)));
        upper[m] = (uint8_t)(u >> 24), lower[m] = (uint8_t)(u >> 16);
    }
    return (table){{_mm512_loadu_si512(upper), _mm512_loadu_si512(upper + 64)}, {_mm512_loadu_si512(lower), _mm512_loadu_si512(lower + 64)}};
}

INLINE void to_bf16(words codes, table n, words *two) {
    words upper = _mm512_permutex2var_epi8(n.upper[0], codes, n.upper[1]), lower = _mm512_permutex2var_epi8(n.lower[0], codes, n.lower[1]);
    upper = _mm512_ternarylogic_epi32(upper, codes, _mm512_set1_epi8(-128), 0xf8); /* first | second & third */
    two[0] = _mm512_unpacklo_epi8(lower, upper), two[1] = _mm512_unpackhi_epi8(lower, upper);
}
#else
/* A code whose four bits of exponent are put where BF16 has the lower ones of its eight is a number 2**BEHIND times smaller, subnormals
   included, and the NaN is a number like the others. So each row of x is multiplied by a power of two which takes its largest element to
   the end of FP32's range, and its sums are multiplied by what undoes both. That rounds nothing but what FP32 would lose in the sum. */
INLINE int64_t column_of(int64_t lane, int64_t part) { return 4 * lane + part / 2 + part % 2 * 2; } /* even bytes, odd bytes */
enum { BEHIND = 120 };
typedef struct { words kept; } table;

INLINE table table_of_codes(void) { return (table){V(set1_epi16)((int16_t)0x87f0)}; }

INLINE void to_bf16(words codes, table n, words *two) {
    two[0] = V_BITS(and)(V(srai_epi16)(V(slli_epi16)(codes, 8), 4), n.kept);
    two[1] = V_BITS(and)(V(srai_epi16)(codes, 4), n.kept);
}
#endif

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
enum { DOTS = 1 };
INLINE reals add_dots(reals sum, words a, const uint16_t *b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)_mm512_loadu_si512(b));
}
#else
enum { DOTS = 0 };
INLINE reals add_dots(reals sum, words a, const uint16_t *b) { return (void)a, (void)b, sum; }
#endif

/* ---------------------------------------------------------------------------------------------- x, in the order of the sums */

/* The columns of a group go where `to_bf16` leaves those of codes: a vector for each part in FP32, one for two parts in BF16. */
INLINE void lay_out_row(const void *x, void *to, int64_t n, int type, int dots, float factor) {
    for (int64_t c = 0; c < n; c += GROUP) {
        uint32_t u[GROUP] = {0};
        for (int64_t i = 0, there = least_of(GROUP, n - c); i < there; i++) u[i] = fp32_of(x, c + i, type);
        for (int64_t part = 0; part < PARTS; part++)
            for (int64_t lane = 0; lane < LANES; lane++) {
                uint32_t from = u[column_of(lane, part)];
                if (dots) ((uint16_t *)to)[c + (part / 2 * LANES + lane) * 2 + part % 2] = (uint16_t)(from >> 16);
                else ((float *)to)[c + part * LANES + lane] = value(from) * factor;
            }
    }
}

/* Returns the exponent, as FP32 has it, of the power of two by which a row of x is multiplied. */
INLINE uint32_t exponent_for(const void *x, int64_t n, int type) {
    uint32_t top = 0;
    for (int64_t c = 0; c < n; c++) { uint32_t u = fp32_of(x, c, type) & INFINITE; top = u > top ? u : top; }
    return top == INFINITE ? 127 : 127 + (uint32_t)least_of(254 - (top >> 23), 127);
}

static void lay_out(const multiply_job *j, int type, int dots) {
    float *units = (float *)j->room + j->tokens * j->stride;
    for (int64_t t = 0; t < j->tokens; t++) {
        const char *x = (const char *)j->x + t * j->cols * bytes_of(type);
        uint32_t exponent = BEHIND ? exponent_for(x, j->cols, type) : 127;
        units[t] = value((127 + BEHIND - (exponent - 127)) << 23);
        lay_out_row(x, (char *)j->room + t * j->stride * (dots ? 2 : 4), j->cols, type, dots, value(exponent << 23));
    }
}

/* ------------------------------------------------------------------------------------------------------------- the product */

INLINE float scale_of(const multiply_job *j, int64_t i) {
    if (!j->e8m0) return ((const float *)j->scale_inv)[i];
    uint32_t e = ((const uint8_t *)j->scale_inv)[i];
    return value(e == 0 ? 0x400000 : e == 255 ? 0x7fc00000 : e << 23);
}

/* The scales of a vector's lanes, of which each has four columns: one, or on AVX-512 those of two small tiles, if there are two. */
INLINE reals scales_of(const multiply_job *j, int64_t i, int two, int there) {
    reals scale = V(set1_ps)(scale_of(j, i));
    return two ? in_halves(scale, V(set1_ps)(there ? scale_of(j, i + 1) : 0)) : scale;
}

INLINE words codes_at(const uint8_t *codes, int64_t there) {
    return GROUP == SMALL_TILE || there >= GROUP ? V_BITS(loadu)((const words *)codes) : zeros_behind(codes);
}

INLINE int has_nan(const uint8_t *codes, int64_t n) {
    uint8_t top = 0;
    for (int64_t i = 0; i < n; i++) { uint8_t code = codes[i] | 0x80; top = code > top ? code : top; }
    return top == 0xff;
}

/* Some rows of codes times some of x. `mx` allows scales that are no floats, and small tiles. */
INLINE void multiply_block(const multiply_job *j, table n, int64_t row, int64_t token, int rows, int tokens, int dots, int mx) {
    const words upper = V(set1_epi32)((int32_t)0xffff0000), sign = V(set1_epi8)(-128);
    const float *units = (const float *)j->room + j->tokens * j->stride + token;
    const int two = mx && j->tile_cols < GROUP;
    const uint8_t *codes = j->codes + row * j->cols;
    int64_t tiles = j->cols / j->tile_cols, tile = two ? GROUP : j->tile_cols, scales[ROWS_AT_ONCE];
    reals total[ROWS_AT_ONCE * TOKENS_AT_ONCE];
    words top = V_BITS(setzero)();
    for (int r = 0; r < rows; r++) {
        scales[r] = (row + r) / j->tile_rows * tiles;
        for (int t = 0; t < tokens; t++) total[r * tokens + t] = V(setzero_ps)();
    }
    for (int64_t first = 0, b = 0; first < j->cols; first += tile, b += 1 + two) {
        reals sum[ROWS_AT_ONCE][TOKENS_AT_ONCE];
        for (int r = 0; r < rows && token == 0; r++) ask_for(codes + (r + AHEAD) * j->cols + first, tile);
        UNROLLED /* sums stay in registers from here on */
        for (int i = 0; i < rows * tokens; i++) sum[i / tokens][i % tokens] = V(setzero_ps)();
        for (int64_t c = first; c < first + tile; c += GROUP) {
            words numbers[ROWS_AT_ONCE][2];
            for (int r = 0; r < rows; r++) {
                words of_row = codes_at(codes + r * j->cols + c, mx ? j->cols - c : GROUP);
                if (BEHIND) top = V(max_epu8)(top, V_BITS(or)(of_row, sign));
                to_bf16(of_row, n, numbers[r]);
            }
            for (int half = 0; half < 2; half++) {
                int64_t at = token * j->stride + c + half * GROUP / 2;
                if (dots)
                    for (int t = 0; t < tokens; t++)
                        for (int r = 0; r < rows; r++)
                            sum[r][t] = add_dots(sum[r][t], numbers[r][half], (const uint16_t *)j->room + at + t * j->stride);
                else
                    for (int odd = 0; odd < 2; odd++) {
                        reals number[ROWS_AT_ONCE];
                        for (int r = 0; r < rows; r++)
                            number[r] = REALS(odd ? V_BITS(and)(numbers[r][half], upper) : V(slli_epi32)(numbers[r][half], 16));
                        for (int t = 0; t < tokens; t++) {
                            reals x = V(loadu_ps)((const float *)j->room + at + t * j->stride + odd * LANES);
                            for (int r = 0; r < rows; r++) sum[r][t] = V(fmadd_ps)(number[r], x, sum[r][t]);
                        }
                    }
            }
        }
        for (int r = 0; r < rows; r++) {
            reals scale = mx ? scales_of(j, scales[r] + b, two, b + 1 < tiles)
                             : V(set1_ps)(((const float *)j->scale_inv)[scales[r] + b]);
            for (int t = 0; t < tokens; t++) {
                reals of_tile = BEHIND ? V(mul_ps)(sum[r][t], V(set1_ps)(units[t])) : sum[r][t];
                total[r * tokens + t] = V(fmadd_ps)(of_tile, scale, total[r * tokens + t]);
            }
        }
    }
    uint8_t tops[BLOCK];
    V_BITS(storeu)((words *)tops, top);
    if (has_nan(tops, BLOCK)) /* in one of these rows */
        for (int r = 0; r < rows; r++)
            if (has_nan(codes + r * j->cols, j->cols))
                for (int t = 0; t < tokens; t++) total[r * tokens + t] = V(set1_ps)(NAN);
    put_sums((result){j->y, j->bias, j->rows, j->y_type}, total, row, token, rows, tokens);
}

INLINE void multiply_rows(const multiply_job *j, table n, int64_t row, int rows, int dots, int mx) {
    int64_t t = 0;
    if (dots) for (; t + 8 <= j->tokens; t += 8) multiply_block(j, n, row, t, rows, 8, dots, mx);
    for (; t + 4 <= j->tokens; t += 4) multiply_block(j, n, row, t, rows, 4, dots, mx);
    for (; t + 2 <= j->tokens; t += 2) multiply_block(j, n, row, t, rows, 2, dots, mx);
    if (t < j->tokens) multiply_block(j, n, row, t, rows, 1, dots, mx);
}

INLINE void work(multiply_job *j, int dots, int mx) {
    table n = table_of_codes();
    unsigned control = _mm_getcsr();
    _mm_setcsr(control & ~0x8040u); /* subnormal numbers are numbers here */
    int64_t unit = j->rows / (16 * j->threads) / ROWS_OF_A_UNIT * ROWS_OF_A_UNIT + ROWS_OF_A_UNIT;
    for (int64_t row; (row = atomic_fetch_add(&j->next, unit)) < j->rows;) {
        int64_t end = least_of(row + unit, j->rows);
        for (; row + ROWS_AT_ONCE <= end; row += ROWS_AT_ONCE) multiply_rows(j, n, row, ROWS_AT_ONCE, dots, mx);
        for (; row < end; row++) multiply_rows(j, n, row, 1, dots, mx);
    }
    _mm_setcsr(control);
}
static void work_in_fp32(void *j) { work(j, 0, 0); }
static void work_in_dots(void *j) { work(j, 1, 0); }
static void mx_in_fp32(void *j) { work(j, 0, 1); }
static void mx_in_dots(void *j) { work(j, 1, 1); }

/* Returns whether it did: whole tiles of whole groups are what it takes, or tiles of SMALL_TILE columns. */
int nemo_fp8_multiply(multiply_job *j) {
    if (j->cols % j->tile_cols || (j->tile_cols % GROUP && j->tile_cols != SMALL_TILE)) return 0;
    int dots = DOTS && j->x_type == BF16;
    if (dots) lay_out(j, BF16, 1);
    else if (j->x_type == BF16) lay_out(j, BF16, 0);
    else lay_out(j, FP32, 0);
    if (j->e8m0 || j->tile_cols < GROUP) share(dots ? mx_in_dots : mx_in_fp32, j, j->threads, j->parallel);
    else share(dots ? work_in_dots : work_in_fp32, j, j->threads, j->parallel);
    return 1;
}
#else
int nemo_fp8_multiply(multiply_job *j) { return (void)j, 0; }
#endif
