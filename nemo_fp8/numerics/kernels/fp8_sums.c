/* Sums of a matrix of bytes, as 64-bit words, by row and by column, in one pass over memory; and in the same pass, if wanted, a copy
   of it and the largest magnitude of each row.

       of_rows[r] = sum_i w[r][i]        of_columns[i] = sum_r w[r][i]        both wrap; a row's last word is filled up with zeros

   Four rows are read at once: memory is faster in several places than in one, and a word of the columns' sums is read and written once
   for four. Rows that are streamed past the caches go one by one: a line is written out when it is full, and with several begun at
   once they are written half empty, at an eighth of the speed. Each thread has sums of its own for the columns and adds them to the others' in the end. */

#include <stdlib.h>

#include "fp8.h"

enum { UNIT = 1 << 18 /* bytes that a thread takes at a time */, ABREAST = 4 };
enum { NO_MAGNITUDES, OF_HALVES /* BF16 or FP16 */, OF_SINGLES };
enum copying { NOWHERE, CACHED, STREAMED };

typedef struct sums_job {
    const char *x; /* rows of `bytes` bytes, `stride` from row to row */
    char *to;      /* where they are copied to, `to_stride` from row to row; NULL if nowhere */
    int64_t *of_rows, *of_columns;
    uint32_t *largest; /* the bits of each row's largest magnitude: a NaN is larger than an infinity; NULL if not wanted */
    parallel_function *parallel;
    int64_t rows, bytes, stride, to_stride;
    int32_t magnitudes, threads;
    _Atomic int64_t next, failed;
} sums_job;

INLINE uint32_t higher(uint32_t a, uint32_t b) { return a > b ? a : b; }

INLINE uint32_t highest_in(uint64_t word, int magnitudes) {
    if (magnitudes == OF_SINGLES) return higher((uint32_t)word & 0x7fffffff, (uint32_t)(word >> 32) & 0x7fffffff);
    uint32_t top = 0;
    for (int i = 0; i < 64; i += 16) top = higher(top, (uint32_t)(word >> i) & 0x7fff);
    return top;
}

/* Some rows, `rows` of them a constant. */
INLINE void sum_rows(const sums_job *j, int64_t row, int rows, uint64_t *restrict columns, int magnitudes, enum copying copies) {
    const char *x = j->x + row * j->stride;
    char *to = j->to + row * j->to_stride;
    uint64_t sums[ABREAST] = {0};
    uint32_t top[ABREAST] = {0};
    int64_t at = 0;
#ifdef BLOCK
    enum { LANES64 = BLOCK / 8 };
    const words kept = magnitudes == OF_SINGLES ? V(set1_epi32)(0x7fffffff) : V(set1_epi16)(0x7fff);
    words of_row[ABREAST], tops[ABREAST];
    for (int r = 0; r < rows; r++) of_row[r] = tops[r] = V_BITS(setzero)();
    for (; at + BLOCK <= j->bytes; at += BLOCK) {
        words *column = (words *)(columns + at / 8), of_column = V_BITS(loadu)(column);
        for (int r = 0; r < rows; r++) {
            words w = V_BITS(loadu)((const words *)(x + r * j->stride + at));
            if (copies == STREAMED) V_BITS(stream)((words *)(to + r * j->to_stride + at), w);
            else if (copies == CACHED) V_BITS(storeu)((words *)(to + r * j->to_stride + at), w);
            of_row[r] = V(add_epi64)(of_row[r], w), of_column = V(add_epi64)(of_column, w);
            if (magnitudes == OF_HALVES) tops[r] = V(max_epu16)(tops[r], V_BITS(and)(w, kept));
            else if (magnitudes == OF_SINGLES) tops[r] = V(max_epu32)(tops[r], V_BITS(and)(w, kept));
        }
        V_BITS(storeu)(column, of_column);
    }
    uint64_t lanes[LANES64];
    for (int r = 0; r < rows; r++) {
        sums[r] = sum_of_words(of_row[r]);
        V_BITS(storeu)((words *)lanes, tops[r]);
        for (int i = 0; i < LANES64 && magnitudes; i++) top[r] = higher(top[r], highest_in(lanes[i], magnitudes));
    }
#endif
    for (; at < j->bytes; at += 8) {
        size_t there = (size_t)least_of(8, j->bytes - at);
        for (int r = 0; r < rows; r++) {
            uint64_t w = 0;
            memcpy(&w, x + r * j->stride + at, there);
            if (copies) memcpy(to + r * j->to_stride + at, &w, there);
            sums[r] += w, columns[at / 8] += w;
            if (magnitudes) top[r] = higher(top[r], highest_in(w, magnitudes));
        }
    }
    for (int r = 0; r < rows; r++) j->of_rows[row + r] = (int64_t)sums[r];
    for (int r = 0; r < rows && magnitudes; r++) j->largest[row + r] = top[r];
}

/* Every combination of choices is a loop of its own, in which they are constants. */
#define SOME(ROWS, M) \
    (copies == STREAMED ? sum_rows(j, row, ROWS, columns, M, STREAMED) : copies ? sum_rows(j, row, ROWS, columns, M, CACHED) \
                                                                        : sum_rows(j, row, ROWS, columns, M, NOWHERE))
#define ROWS_OF(M) (rows == ABREAST ? SOME(ABREAST, M) : SOME(1, M))
static void some_rows(const sums_job *j, int64_t row, int rows, uint64_t *columns, enum copying copies) {
    j->magnitudes == OF_HALVES ? ROWS_OF(OF_HALVES) : j->magnitudes == OF_SINGLES ? ROWS_OF(OF_SINGLES) : ROWS_OF(NO_MAGNITUDES);
}

static void work_sums(void *argument) {
    sums_job *j = argument;
    int64_t wide = (j->bytes + 7) / 8, unit = (UNIT / j->bytes + ABREAST) / ABREAST * ABREAST;
    uint64_t *columns = calloc((size_t)wide, 8);
    enum copying copies = j->to ? CACHED : NOWHERE;
    if (!columns) { atomic_store(&j->failed, 1); return; }
#ifdef BLOCK
    if (j->to && large(j->rows * j->bytes) && (((uintptr_t)j->to | (uintptr_t)j->to_stride) & (BLOCK - 1)) == 0) copies = STREAMED;
#endif
    for (int64_t row; (row = atomic_fetch_add(&j->next, unit)) < j->rows;) {
        int64_t end = least_of(row + unit, j->rows);
        for (; copies != STREAMED && row + ABREAST <= end; row += ABREAST) some_rows(j, row, ABREAST, columns, copies);
        for (; row < end; row++) some_rows(j, row, 1, columns, copies);
    }
    if (copies == STREAMED) streamed();
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
    for (int64_t i; (i = atomic_fetch_add(&s->next, 1)) < s->n;) {
        sums_job j = ((const sums_job *)s->all)[s->which[i]];
        j.x = s->x[i], j.threads = 1;
        memset(j.of_columns, 0, (size_t)((j.bytes + 7) / 8 * 8));
        if (!nemo_fp8_sums(&j)) s->failed = 1;
    }
}

int nemo_fp8_sums_several(several *s) {
    share(work_on_several, s, s->threads, s->parallel);
    return !s->failed;
}
