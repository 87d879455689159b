/* Sums of a matrix of bytes, as 64-bit words, by row and by column, in one pass over memory; and in the same pass, if wanted, a copy
   of it and the largest magnitude of each row.

       of_rows[r] = sum_i w[r][i]        of_columns[i] = sum_r w[r][i]        both wrap; a row's last word is filled up with zeros

   Rows that are streamed past the caches go one by one: a line is written out when it is full, and with several begun at once they are
   written half empty, at an eighth of the speed. Each thread has sums of its own for the columns and adds them to the others' in the end. */

#include <stdlib.h>

#include "fp8_amx.h"
#include "fp8_sums.h"

enum { UNIT = 1 << 18 /* bytes that a thread takes at a time */ };

/* Every combination of choices is a loop of its own, in which they are constants. */
#define SOME(ROWS, M) \
    (copies == STREAMED ? sum_rows(j, row, ROWS, columns, 0, M, STREAMED) : copies ? sum_rows(j, row, ROWS, columns, 0, M, CACHED) \
                                                                        : sum_rows(j, row, ROWS, columns, 0, M, NOWHERE))
#define ROWS_OF(M) (rows == ABREAST ? SOME(ABREAST, M) : SOME(1, M))
static void some_rows(const sums_job *j, int64_t row, int rows, uint64_t *columns, enum copying copies) {
    switch (j->magnitudes) {
    case OF_HALVES: ROWS_OF(OF_HALVES); break;
    case OF_SINGLES: ROWS_OF(OF_SINGLES); break;
    case OF_BYTES: ROWS_OF(OF_BYTES); break;
    default: ROWS_OF(NO_MAGNITUDES);
    }
}

static void sum_groups(sums_job *j, uint64_t *columns) {
    for (int64_t row; (row = atomic_fetch_add(&j->next, OF_GROUP)) < j->rows;)
        sum_group(j->x + row * j->stride, j->bytes, 0, least_of(OF_GROUP, j->rows - row), j->of_rows + row, columns, 0);
}

/* A group is turned while its rows, which were just summed up, lie in a cache of this core. */
static void turn_groups(sums_job *j, uint64_t *columns) {
    const int streams = large(j->rows * j->bytes) && ((uintptr_t)j->to & 63) == 0;
    const int64_t unit = (UNIT / 4 / j->bytes + OF_GROUP) / OF_GROUP * OF_GROUP;
    for (int64_t first; (first = atomic_fetch_add(&j->next, unit)) < j->rows;)
        for (int64_t row = first; row < least_of(first + unit, j->rows); row += OF_GROUP) {
            for (int r = 0; r < OF_GROUP; r += ABREAST) some_rows(j, row + r, ABREAST, columns, NOWHERE);
            turn_group(j->x + row * j->stride, j->stride, j->bytes, j->to + row * j->bytes, streams);
        }
    if (streams) streamed();
}

static void sum_all(sums_job *j, uint64_t *columns) {
    int64_t unit = (UNIT / j->bytes + ABREAST) / ABREAST * ABREAST;
    enum copying copies = j->to ? CACHED : NOWHERE;
#ifdef BLOCK
    if (j->to && large(j->rows * j->bytes) && (((uintptr_t)j->to | (uintptr_t)j->to_stride) & (BLOCK - 1)) == 0) copies = STREAMED;
#endif
    for (int64_t row; (row = atomic_fetch_add(&j->next, unit)) < j->rows;) {
        int64_t end = least_of(row + unit, j->rows);
        for (; copies != STREAMED && row + ABREAST <= end; row += ABREAST) some_rows(j, row, ABREAST, columns, copies);
        for (; row < end; row++) some_rows(j, row, 1, columns, copies);
    }
    if (copies == STREAMED) streamed();
}

static void work_sums(void *argument) {
    sums_job *j = argument;
    int64_t wide = (j->bytes + 7) / 8;
    uint64_t *columns = calloc((size_t)wide, 8);
    if (!columns) { atomic_store(&j->failed, 1); return; }
    if (j->order == FOR_AMX && j->to) turn_groups(j, columns);
    else if (j->order == FOR_AMX) sum_groups(j, columns);
    else sum_all(j, columns);
    for (int64_t i = 0; i < wide; i++) __atomic_fetch_add(j->of_columns + i, (int64_t)columns[i], __ATOMIC_RELAXED);
    free(columns);
}

/* Returns whether all went well: not if a thread had no memory for its sums. */
int nemo_fp8_sums(sums_job *j) {
    share(work_sums, j, j->threads, j->parallel);
    return !j->failed;
}

static void work_on_several(void *argument) {
    several *s = argument;
    for (int64_t i = 0; i < s->larges; i++) work_sums((sums_job *)s->large + i);
    for (int64_t i; (i = atomic_fetch_add(&s->next, 1)) < s->n;) {
        sums_job j = ((const sums_job *)s->all)[s->which[i]];
        if (j.threads > 1) continue;
        j.x = s->x[i];
        if (!nemo_fp8_sums(&j)) s->failed = 1;
    }
}

int nemo_fp8_sums_several(several *s) {
    sums_job *large = s->large = malloc((size_t)s->n * sizeof *large + 1);
    if (!large) return 0;
    for (int64_t i = 0; i < s->n; i++) {
        sums_job j = ((const sums_job *)s->all)[s->which[i]];
        memset(j.of_columns, 0, (size_t)((j.bytes + 7) / 8 * 8));
        if (j.threads == 1) continue;
        j.x = s->x[i], j.threads = s->threads;
        large[s->larges++] = j;
    }
    share(work_on_several, s, s->threads, s->parallel);
    for (int64_t i = 0; i < s->larges; i++)
        if (large[i].failed) s->failed = 1;
    free(large);
    return !s->failed;
}
