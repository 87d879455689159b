/* Codes of rows as codes of columns: a matrix of bytes, turned.

   Squares of 16 by 16 bytes. Four times the same step turns one: put the lower eight rows between the upper eight, byte by byte. In the
   place of a byte, row and column in binary, each step moves the first bit of the row behind the last one of the column; after four, they
   have changed places. Squares go by fours from above, so that whole cache lines are written. */

#include "fp8.h"

enum { SIDE = 16, LINE = 64 };

typedef struct turn_job {
    const uint8_t *from; /* rows x cols */
    uint8_t *to;         /* cols x rows */
    parallel_function *parallel;
    int64_t rows, cols;
    int32_t threads;
    _Atomic int64_t next;
} turn_job;

static void turn_bytes(const turn_job *j, int64_t r0, int64_t c0, int64_t high, int64_t wide) {
    for (int64_t c = c0; c < c0 + wide; c++)
        for (int64_t r = r0; r < r0 + high; r++) j->to[c * j->rows + r] = j->from[r * j->cols + c];
}

static void turn_square(const turn_job *j, int64_t r, int64_t c) {
#ifdef __SSE2__
    __m128i a[SIDE], b[SIDE];
    UNROLLED
    for (int i = 0; i < SIDE; i++) a[i] = _mm_loadu_si128((const __m128i *)(j->from + (r + i) * j->cols + c));
    UNROLLED
    for (int step = 0; step < 4; step++) {
        UNROLLED
        for (int i = 0; i < SIDE / 2; i++) {
            b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + SIDE / 2]);
            b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + SIDE / 2]);
        }
        memcpy(a, b, sizeof a);
    }
    UNROLLED
    for (int i = 0; i < SIDE; i++) _mm_storeu_si128((__m128i *)(j->to + (c + i) * j->rows + r), a[i]);
#else
    turn_bytes(j, r, c, SIDE, SIDE);
#endif
}

static void work_turn(void *argument) {
    turn_job *j = argument;
    for (int64_t top; (top = atomic_fetch_add(&j->next, LINE)) < j->rows;) {
        int64_t high = least_of(LINE, j->rows - top), squares = high / SIDE * SIDE, c = 0;
        for (; c + SIDE <= j->cols; c += SIDE)
            for (int64_t r = top; r < top + squares; r += SIDE) turn_square(j, r, c);
        turn_bytes(j, top + squares, 0, high - squares, c);
        turn_bytes(j, top, c, high, j->cols - c);
    }
}

void nemo_fp8_turn(turn_job *j) { share(work_turn, j, j->threads, j->parallel); }
