/* A partial sum, times the scales of its rows and of its columns, added to what is there:

       y[r][c] = y[r][c] + (partial[r][c] * first) * last        the first product is rounded to FP32

   `exact` says that all of `last` are powers of two: then the second product and the addition are one, rounded once. Otherwise they are
   FP64's, which holds the product of two FP32 numbers, and the sum is rounded to FP32. */

#include "fp8.h"

typedef struct accumulate_job {
    float *y;
    const float *partial, *of_rows, *of_columns;
    parallel_function *parallel;
    int64_t rows, cols;
    int32_t columns_first, exact, threads;
    _Atomic int64_t next;
} accumulate_job;

INLINE void accumulate_row(float *restrict y, const float *restrict partial, float of_row, const float *restrict of_columns, int64_t n,
                           int columns_first, int exact) {
    for (int64_t i = 0; i < n; i++) {
        float first = columns_first ? of_columns[i] : of_row, last = columns_first ? of_row : of_columns[i], scaled = partial[i] * first;
        y[i] = exact ? fmaf(scaled, last, y[i]) : (float)((double)y[i] + (double)scaled * (double)last);
    }
}

static void work_accumulate(void *argument) {
    accumulate_job *j = argument;
    for (int64_t unit; (unit = atomic_fetch_add(&j->next, ROWS_OF_A_UNIT)) < j->rows;)
        for (int64_t r = unit; r < least_of(unit + ROWS_OF_A_UNIT, j->rows); r++) {
            float *y = j->y + r * j->cols;
            const float *partial = j->partial + r * j->cols;
            switch (2 * !!j->columns_first + !!j->exact) {
                case 0: accumulate_row(y, partial, j->of_rows[r], j->of_columns, j->cols, 0, 0); break;
                case 1: accumulate_row(y, partial, j->of_rows[r], j->of_columns, j->cols, 0, 1); break;
                case 2: accumulate_row(y, partial, j->of_rows[r], j->of_columns, j->cols, 1, 0); break;
                default: accumulate_row(y, partial, j->of_rows[r], j->of_columns, j->cols, 1, 1);
            }
        }
}

void nemo_fp8_accumulate(accumulate_job *j) { share(work_accumulate, j, j->threads, j->parallel); }
