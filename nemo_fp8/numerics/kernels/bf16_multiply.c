/* A product with a matrix of BF16 as it lies in a checkpoint, row by row:

       y[t][r]  =  bias[r]  +  sum over columns c of   x[t][c] * weight[r][c]

   All sums are FP32; a result in BF16 is rounded once. Both matrices lie in the order of the sums already, so nothing is packed, and
   whoever writes the weight has written all that there is. For a few rows of x, which are tokens that are generated, reading weights
   is what takes the time, and they are read once.

   Processors with dot products of BF16 use those, for which subnormal numbers are zero; the others multiply in FP32.

   The trade-off: for every TOKENS_AT_ONCE rows of x the weights are read again, from a cache. From some number of rows on a product
   is faster that packs the weight on the way. Without AVX2 there is no such kernel. */

#include "product.h"

typedef struct rows_job {
    const uint16_t *x, *weight; /* rows of BF16 */
    float *room;                /* as many floats as x has elements, where there are no dot products */
    const float *bias;          /* one a row of the weight, or NULL */
    void *y;                    /* BF16 or FP32 */
    parallel_function *parallel;
    int64_t tokens, rows, cols;
    int32_t y_type, threads;
    _Atomic int64_t next;
} rows_job;

#ifdef BLOCK
enum { GROUP = BLOCK / 2 /* columns in a vector */, ROWS_AT_ONCE = LANES / 4, TOKENS_AT_ONCE = 4 /* as many sums as registers hold */ };

#ifdef __AVX512BF16__
enum { DOTS = 1 };
INLINE reals add_products(const rows_job *j, reals sum, words weight, int64_t at) {
    return _mm512_dpbf16_ps(sum, (__m512bh)weight, (__m512bh)_mm512_loadu_si512(j->x + at));
}
#else
enum { DOTS = 0 };
INLINE reals add_products(const rows_job *j, reals sum, words weight, int64_t at) {
    const words upper = V(set1_epi32)((int32_t)0xffff0000);
    sum = V(fmadd_ps)(REALS(V(slli_epi32)(weight, 16)), V(loadu_ps)(j->room + at), sum);
    return V(fmadd_ps)(REALS(V_BITS(and)(weight, upper)), V(loadu_ps)(j->room + at + LANES), sum);
}
#endif

/* Of each group the even columns, then the odd ones, as the halves of 32-bit words come apart. */
static void lay_out(const rows_job *j) {
    for (int64_t c = 0; c < j->tokens * j->cols; c += GROUP)
        for (int64_t i = 0; i < GROUP; i++) j->room[c + i % 2 * LANES + i / 2] = value(fp32_of(j->x, c + i, BF16));
}

/* Some rows of the weight times some of x. `ask` has a bit for each of the next rows of the weight that is to be asked for meanwhile. */
INLINE void multiply_block(const rows_job *j, int64_t row, int64_t token, int rows, int tokens, unsigned ask) {
    reals total[ROWS_AT_ONCE * TOKENS_AT_ONCE];
    for (int i = 0; i < rows * tokens; i++) total[i] = V(setzero_ps)();
    for (int64_t c = 0; c < j->cols; c += GROUP) {
        words weight[ROWS_AT_ONCE];
        for (int r = 0; r < rows; r++) {
            const uint16_t *here = j->weight + (row + r) * j->cols + c;
            weight[r] = V_BITS(loadu)((const words *)here);
            if (ask >> r & 1) ask_for(here + rows * j->cols, BLOCK);
        }
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < rows; r++)
                total[r * tokens + t] = add_products(j, total[r * tokens + t], weight[r], (token + t) * j->cols + c);
    }
    put_sums((result){j->y, j->bias, j->rows, j->y_type}, total, row, token, rows, tokens);
}

/* Memory is asked for the next rows all the while: each pass over these ones asks for its share of them. */
INLINE void multiply_rows(const rows_job *j, int64_t row, int rows) {
    int64_t passes = (j->tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE, share = (rows + passes - 1) / passes, t = 0;
    unsigned ask = (1u << share) - 1;
    for (; t + TOKENS_AT_ONCE <= j->tokens; t += TOKENS_AT_ONCE, ask <<= share) multiply_block(j, row, t, rows, TOKENS_AT_ONCE, ask);
    for (; t + 2 <= j->tokens; t += 2, ask = 0) multiply_block(j, row, t, rows, 2, ask);
    if (t < j->tokens) multiply_block(j, row, t, rows, 1, ask);
}

static void work(void *job) {
    rows_job *j = job;
    unsigned control = _mm_getcsr();
    _mm_setcsr(control & ~0x8040u); /* subnormal numbers are numbers here */
    int64_t unit = j->rows / (16 * j->threads) / ROWS_OF_A_UNIT * ROWS_OF_A_UNIT + ROWS_OF_A_UNIT;
    for (int64_t row; (row = atomic_fetch_add(&j->next, unit)) < j->rows;) {
        int64_t end = least_of(row + unit, j->rows);
        for (; row + ROWS_AT_ONCE <= end; row += ROWS_AT_ONCE) multiply_rows(j, row, ROWS_AT_ONCE);
        for (; row < end; row++) multiply_rows(j, row, 1);
    }
    _mm_setcsr(control);
}

/* Returns whether it did: whole vectors of columns are what it takes. */
int nemo_fp8_multiply_rows(rows_job *j) {
    if (j->cols % GROUP) return 0;
    if (!DOTS) lay_out(j);
    share(work, j, j->threads, j->parallel);
    return 1;
}
#else
int nemo_fp8_multiply_rows(rows_job *j) { return (void)j, 0; }
#endif
