/* Codes in the order in which AMX multiplies them: 32 rows, a group, beside one another, and two neighbours of a row as one unit.

       the pair (c, c + 1) of row 32 g + r lies at [g, c / 2, r]

   So a line of the cache has a pair of each row of a group, and a group of a matrix is as many bytes as in plain order, in one piece. Rows
   are turned into lines as matrices of 16-bit values are (fp8_turn.c). To be summed up for a fingerprint (fp8_sums.c) lines need not be
   turned back: a 64-bit word of a row is four pairs, which lie in four lines, and all sums wrap,

       sum of words = sum_q (sum of pairs 4 k + q) * 2**(16 q) */

#pragma once

#include "turn_eight.h"

enum order { IN_ROWS, FOR_AMX };
enum { OF_GROUP = 32 /* rows */, PAIRS = 2 * OF_GROUP /* bytes of a line */ };

/* Turns the rows of a group, `stride` bytes apart, into lines; `bytes`, of each row, is even. */
INLINE void turn_group(const char *x, int64_t stride, int64_t bytes, char *to, int streams) {
    uint16_t lines[EIGHT * OF_GROUP] __attribute__((aligned(64)));
    int64_t at = 0;
    for (; at + 2 * EIGHT <= bytes; at += 2 * EIGHT) {
        UNROLLED
        for (int r = 0; r < OF_GROUP; r += AT_ONCE) turn_eight(x + r * stride + at, stride, lines + r, OF_GROUP);
        if (streams) stream(to + at * OF_GROUP, lines, sizeof lines);
        else memcpy(to + at * OF_GROUP, lines, sizeof lines);
    }
    for (; at < bytes; at += 2)
        for (int r = 0; r < OF_GROUP; r++) memcpy(to + at * OF_GROUP + 2 * r, x + r * stride + at, 2);
}

/* Sums up rows [first, last) of a group, of `bytes` bytes each, by row and by column; the lines that lie `ahead` bytes further are asked
   for, unless that is 0. */
INLINE void sum_group(const char *x, int64_t bytes, int64_t first, int64_t last, int64_t *of_rows, uint64_t *restrict columns,
                      int64_t ahead) {
    enum { SOME = 1 << 17 /* pairs, of which the sums of each row and each place in a word fit in 32 bits */ };
    uint32_t kept[OF_GROUP] = {0};
    uint64_t sums[OF_GROUP] = {0};
    for (int64_t r = first; r < last; r++) kept[r] = 0xffff;
    for (int64_t begin = 0, end; begin < bytes / 2; begin = end) {
        uint32_t of_places[4][OF_GROUP] = {{0}};
        end = least_of(begin + SOME, bytes / 2);
        for (int64_t p = begin; p < end; p++) {
            uint32_t *restrict place = of_places[p % 4], of_line = 0;
            uint16_t pairs[OF_GROUP];
            memcpy(pairs, x + p * PAIRS, sizeof pairs);
            if (ahead) __builtin_prefetch(x + p * PAIRS + ahead, 0, 2);
            for (int r = 0; r < OF_GROUP; r++) { uint32_t pair = pairs[r] & kept[r]; place[r] += pair, of_line += pair; }
            columns[p / 4] += (uint64_t)of_line << 16 * (p % 4);
        }
        for (int q = 0; q < 4; q++)
            for (int r = 0; r < OF_GROUP; r++) sums[r] += (uint64_t)of_places[q][r] << 16 * q;
    }
    for (int64_t r = first; r < last; r++) of_rows[r - first] = (int64_t)sums[r];
}
