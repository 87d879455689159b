/* A product with a matrix of E4M3 codes, which are never written down as numbers:

       y[t][r]  =  sum over tiles b of   scale_inv[r / tile_rows][b] * sum over the tile's columns c of   x[t][c] * code[r][c]

   Codes become FP32 numbers in registers (fp8_decode.c says how), and all sums are FP32. So a weight is read once, at one byte an
   element: for a few rows of x, which are tokens that are generated, reading weights is what takes the time. The scale multiplies the
   sum of a tile, as on a GPU, and not every element; a row with a code that is no number has sums that are none.

   The trade-off: for every TOKENS_AT_ONCE rows of x the codes are decoded once more. From some number of rows on it is faster to decode
   the matrix once, and to multiply it with the best FP32 product there is. Without vectors for FP16 there is no such kernel. */

#include "fp8.h"

typedef struct multiply_job {
    const float *x;
    float *room; /* as large as x */
    const uint8_t *codes;
    const void *scale_inv; /* floats or E8M0 bytes, one a tile */
    float *y;
    parallel_function *parallel;
    int64_t tokens, rows, cols, tile_rows, tile_cols;
    int32_t e8m0, threads;
    _Atomic int64_t next;
} multiply_job;

#ifdef BLOCK
enum { GROUP = 2 * LANES, ROWS_AT_ONCE = 4, TOKENS_AT_ONCE = 4 };

/* Codes widen with the evens of a group first, and x is laid out in the same way. */
static void lay_out(const float *x, float *room, int64_t n) {
    for (int64_t c = 0; c < n; c++) room[c / GROUP * GROUP + c % 2 * LANES + c % GROUP / 2] = x[c];
}

INLINE float scale_of(const multiply_job *j, int64_t i) {
    if (!j->e8m0) return ((const float *)j->scale_inv)[i];
    uint32_t e = ((const uint8_t *)j->scale_inv)[i];
    return value(e == 0 ? 0x400000 : e == 255 ? 0x7fc00000 : e << 23);
}

INLINE int has_nan(words top) {
    uint16_t of_lane[GROUP];
    memcpy(of_lane, &top, sizeof top);
    int found = 0;
    for (int i = 0; i < GROUP; i++) found |= of_lane[i] == 0x7f00;
    return found;
}

INLINE float sum_of(reals v) {
    float lane[LANES], sum = 0;
    memcpy(lane, &v, sizeof v);
    for (int i = 0; i < LANES; i++) sum += lane[i];
    return sum;
}

/* An E4M3 code, one bit down from the upper byte of a word, is an FP16 number 256 times smaller, subnormals included. */
INLINE void multiply_block(const multiply_job *j, int64_t row, int64_t token, int rows, int tokens) {
    const words magnitude = V(set1_epi16)(0x7fff), as_fp16 = V(set1_epi16)((int16_t)0xbf80);
    int64_t tiles = j->cols / j->tile_cols;
    reals total[ROWS_AT_ONCE][TOKENS_AT_ONCE];
    words top[ROWS_AT_ONCE];
    for (int r = 0; r < rows; r++) {
        top[r] = V(set1_epi16)(0);
        for (int t = 0; t < tokens; t++) total[r][t] = V(setzero_ps)();
    }
    for (int64_t b = 0; b < tiles; b++) {
        reals sum[ROWS_AT_ONCE][TOKENS_AT_ONCE];
        for (int r = 0; r < rows; r++) {
            ask_for(j->codes + (row + r + rows) * j->cols + b * j->tile_cols, j->tile_cols);
            for (int t = 0; t < tokens; t++) sum[r][t] = V(setzero_ps)();
        }
        for (int64_t c = b * j->tile_cols; c < (b + 1) * j->tile_cols; c += GROUP) {
            for (int r = 0; r < rows; r++) {
                words codes = widen_codes(j->codes + (row + r) * j->cols + c);
                top[r] = V(max_epi16)(top[r], V_BITS(and)(codes, magnitude));
                codes = V_BITS(and)(V(srai_epi16)(codes, 1), as_fp16);
                reals even = low_halves(codes), odd = high_halves(codes);
                for (int t = 0; t < tokens; t++) {
                    const float *x = j->room + (token + t) * j->cols + c;
                    sum[r][t] = V(fmadd_ps)(even, V(loadu_ps)(x), sum[r][t]);
                    sum[r][t] = V(fmadd_ps)(odd, V(loadu_ps)(x + LANES), sum[r][t]);
                }
            }
        }
        for (int r = 0; r < rows; r++) {
            reals scale = V(set1_ps)(scale_of(j, (row + r) / j->tile_rows * tiles + b));
            for (int t = 0; t < tokens; t++)
                total[r][t] = V(fmadd_ps)(V(mul_ps)(sum[r][t], V(set1_ps)(256)), scale, total[r][t]);
        }
    }
    for (int r = 0; r < rows; r++) {
        int nan = has_nan(top[r]);
        for (int t = 0; t < tokens; t++) j->y[(token + t) * j->rows + row + r] = nan ? NAN : sum_of(total[r][t]);
    }
}

INLINE void multiply_rows(const multiply_job *j, int64_t row, int rows) {
    int64_t t = 0;
    for (; t + 4 <= j->tokens; t += 4) {
        if (rows == 4) multiply_block(j, row, t, 2, 4), multiply_block(j, row + 2, t, 2, 4); /* eight sums fit into registers */
        else multiply_block(j, row, t, 1, 4);
    }
    for (; t + 2 <= j->tokens; t += 2) multiply_block(j, row, t, rows, 2);
    if (t < j->tokens) multiply_block(j, row, t, rows, 1);
}

static void work_multiply(void *argument) {
    multiply_job *j = argument;
    for (int64_t row; (row = atomic_fetch_add(&j->next, ROWS_OF_A_UNIT)) < j->rows;) {
        int64_t end = least_of(row + ROWS_OF_A_UNIT, j->rows);
        for (; row + ROWS_AT_ONCE <= end; row += ROWS_AT_ONCE) multiply_rows(j, row, ROWS_AT_ONCE);
        for (; row < end; row++) multiply_rows(j, row, 1);
    }
}

/* Returns whether it did: whole tiles of whole groups are what it takes. */
int nemo_fp8_multiply(multiply_job *j) {
    if (j->tile_cols % GROUP || j->cols % j->tile_cols) return 0;
    lay_out(j->x, j->room, j->tokens * j->cols);
    share(work_multiply, j, j->threads, j->parallel);
    return 1;
}
#else
int nemo_fp8_multiply(multiply_job *j) { return (void)j, 0; }
#endif
