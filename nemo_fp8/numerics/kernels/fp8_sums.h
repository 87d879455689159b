/* The sums of some rows of a matrix of bytes, as 64-bit words, by row and by column: what fp8_sums.c and fp8_patch.c make of memory.

   Four rows are read at once: memory is faster in several places than in one, and a word of the columns' sums is read and written once
   for four. */

#pragma once

#include "fp8.h"

enum { ABREAST = 4 };
enum { NO_MAGNITUDES, OF_HALVES /* BF16 or FP16 */, OF_SINGLES, OF_BYTES /* E4M3 */ };
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
    /* FOR_AMX (fp8_amx.h): with `to`, whole groups are copied into that order, in one piece; without, rows lie in it, `x` is where a group
       begins, and `stride` times OF_GROUP where the next one does */
    int64_t order;
} sums_job;

INLINE uint32_t higher(uint32_t a, uint32_t b) { return a > b ? a : b; }

INLINE uint32_t highest_in(uint64_t word, int magnitudes) {
    if (magnitudes == OF_SINGLES) return higher((uint32_t)word & 0x7fffffff, (uint32_t)(word >> 32) & 0x7fffffff);
    uint32_t top = 0, bits_of_each = magnitudes == OF_BYTES ? 8 : 16, kept = magnitudes == OF_BYTES ? 0x7f : 0x7fff;
    for (uint32_t i = 0; i < 64; i += bits_of_each) top = higher(top, (uint32_t)(word >> i) & kept);
    return top;
}

/* Some rows, `rows` of them a constant. Memory `ahead` bytes further is asked for, unless that is 0. */
INLINE void sum_rows(const sums_job *j, int64_t row, int rows, uint64_t *restrict columns, int64_t ahead, int magnitudes,
                     enum copying copies) {
    const char *x = j->x + row * j->stride;
    char *to = j->to + row * j->to_stride;
    uint64_t sums[ABREAST] = {0};
    uint32_t top[ABREAST] = {0};
    int64_t at = 0;
#ifdef BLOCK
    enum { LANES64 = BLOCK / 8 };
    const words kept = magnitudes == OF_SINGLES ? V(set1_epi32)(0x7fffffff) : V(set1_epi16)(magnitudes == OF_BYTES ? 0x7f7f : 0x7fff);
    words of_row[ABREAST], tops[ABREAST];
    for (int r = 0; r < rows; r++) of_row[r] = tops[r] = V_BITS(setzero)();
    for (; at + BLOCK <= j->bytes; at += BLOCK) {
        words *column = (words *)(columns + at / 8), of_column = V_BITS(loadu)(column);
        for (int r = 0; r < rows; r++) {
            words w = V_BITS(loadu)((const words *)(x + r * j->stride + at));
            if (ahead) __builtin_prefetch(x + r * j->stride + at + ahead, 0, 2);
            if (copies == STREAMED) V_BITS(stream)((words *)(to + r * j->to_stride + at), w);
            else if (copies == CACHED) V_BITS(storeu)((words *)(to + r * j->to_stride + at), w);
            of_row[r] = V(add_epi64)(of_row[r], w), of_column = V(add_epi64)(of_column, w);
            if (magnitudes == OF_HALVES) tops[r] = V(max_epu16)(tops[r], V_BITS(and)(w, kept));
            else if (magnitudes == OF_SINGLES) tops[r] = V(max_epu32)(tops[r], V_BITS(and)(w, kept));
            else if (magnitudes == OF_BYTES) tops[r] = V(max_epu8)(tops[r], V_BITS(and)(w, kept));
        }
        V_BITS(storeu)(column, of_column);
    }
    uint64_t lanes[LANES64];
    if (rows == ABREAST) _mm256_storeu_si256((__m256i *)sums, word_sums_of_four(of_row));
    for (int r = 0; r < rows; r++) {
        if (rows != ABREAST) sums[r] = sum_of_words(of_row[r]);
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
