/* A cast as a job: what fp8_quantize.c is asked for, by Python or by another kernel. */

#pragma once

#include "fp8_tops.h"

typedef struct job {
    const void *x;                                /* rows x cols, `stride` elements from row to row */
    uint8_t *codes;                               /* rows x cols, `codes_stride` from row to row; or FOR_AMX (fp8_amx.h), in whole groups */
    void *scale_inv;                              /* one a tile: floats, or bytes for E8M0; `scale_stride` from row to row */
    float *norm, *error_norm;                     /* one a tile, NULL if not wanted; these and all that follow lie in one piece of memory */
    float *amax;                                  /* may be wanted alone */
    void *underflow;                              /* `count_bytes` each: 1 for tiles of few elements, else 4 */
    void *saturated, *nonfinite;                  /* likewise; or both NULL, and `wild` becomes 1 if any of them is not 0 */
    uint8_t *least, *largest;
    total *totals;                                /* one for each `rows_of_total` rows, or NULL; instead of what is kept for a tile */
    int64_t *of_rows, *of_columns;                /* the sums of the codes as 64-bit words; both or NULL */
    parallel_function *parallel;
    int64_t rows, cols, stride, codes_stride, scale_stride, tile_rows, tile_cols, rows_of_total;
    int32_t source, scaling, mantissa_bits, bias, count_bytes, threads;
    float format_max, saturates_above, given, scale_if_tiny;
    _Atomic int64_t next, wild, failed;
    total *of_strips;                             /* made here: one for each strip */
    const char *ahead;                            /* of some rows: the first value of those that come next, or NULL */
    int64_t order;                                /* of the codes: IN_ROWS or FOR_AMX */
} job;

int nemo_fp8_quantize_rows(job *all, int64_t first, int64_t rows, uint8_t *codes);
