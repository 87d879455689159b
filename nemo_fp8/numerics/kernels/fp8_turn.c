/* Rows as columns: a matrix, turned, or each of a stack, of bytes (codes) or of halves (BF16, FP16).

   Squares of 16 by 16 bytes, or of as many rows of halves by eight as turn_eight.h turns at once. Four times the same step turns bytes: put
   the lower eight rows between the upper eight, byte by byte. In the place of a byte, row and column in binary, each step moves the first bit
   of the row behind the last one of the column; after four, they have changed places.

   What is read and what is written goes from row to row of memory, a line of the cache in each, and such lines push each other out of the
   caches where rows are a power of two apart. So as many rows as a line has elements are read a line at a time, into scratch; they are
   turned there, into whole lines again, and these are written, past the caches if the matrix is large. */

#include "turn_eight.h"

enum { SIDE = 16, LINE = 64 /* bytes */ };

typedef struct turn_job {
    const char *x; /* parts x rows x cols, `part` bytes from part to part and `stride` from row to row */
    char *to;      /* parts x cols x rows, the same */
    parallel_function *parallel;
    int64_t parts, rows, cols, part, stride, to_part, to_stride;
    int32_t size, threads; /* bytes of an element: 1 or 2 */
    _Atomic int64_t next;
} turn_job;

INLINE void turn_each(const turn_job *j, int64_t part, int64_t r0, int64_t c0, int64_t high, int64_t wide, int size) {
    const char *x = j->x + part * j->part;
    char *to = j->to + part * j->to_part;
    for (int64_t c = c0; c < c0 + wide; c++)
        for (int64_t r = r0; r < r0 + high; r++) memcpy(to + c * j->to_stride + r * size, x + r * j->stride + c * size, (size_t)size);
}

/* Column i becomes the SIDE bytes at `to + i * LINE`. */
INLINE void turn_bytes(const char *x, int64_t step, char *to) {
#ifdef __SSE2__
    __m128i a[SIDE], b[SIDE];
    UNROLLED
    for (int i = 0; i < SIDE; i++) a[i] = _mm_loadu_si128((const __m128i *)(x + i * step));
    UNROLLED
    for (int round = 0; round < 4; round++) {
        UNROLLED
        for (int i = 0; i < SIDE / 2; i++) {
            b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + SIDE / 2]);
            b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + SIDE / 2]);
        }
        memcpy(a, b, sizeof a);
    }
    UNROLLED
    for (int i = 0; i < SIDE; i++) _mm_storeu_si128((__m128i *)(to + i * LINE), a[i]);
#else
    for (int c = 0; c < SIDE; c++)
        for (int r = 0; r < SIDE; r++) to[c * LINE + r] = x[r * step + c];
#endif
}

INLINE void turn_lines(turn_job *j, int size) {
    const int64_t line = LINE / size, tall = size == 1 ? SIDE : AT_ONCE, across = size == 1 ? SIDE : EIGHT;
    const int at_lines = (((uintptr_t)j->to | (uintptr_t)j->to_part | (uintptr_t)j->to_stride) & (LINE - 1)) == 0;
    const int streams = at_lines && large(j->parts * j->rows * j->cols * size);
    const int64_t strips = (j->rows + line - 1) / line;
    char from[LINE * LINE] __attribute__((aligned(LINE))), lines[LINE * LINE] __attribute__((aligned(LINE)));
    for (int64_t strip; (strip = atomic_fetch_add(&j->next, 1)) < j->parts * strips;) {
        int64_t part = strip / strips, top = strip % strips * line;
        int64_t high = least_of(line, j->rows - top), squares = high / tall * tall, c = 0;
        for (int64_t wide; (wide = least_of(line, (j->cols - c) / across * across)) > 0; c += wide) {
            for (int64_t r = 0; r < squares; r++) {
                const char *x = j->x + part * j->part + (top + r) * j->stride + c * size;
                if (wide == line) memcpy(from + r * LINE, x, LINE);
                else memcpy(from + r * LINE, x, (size_t)(wide * size));
            }
            for (int64_t r = 0; r < squares; r += tall)
                for (int64_t i = 0; i < wide; i += across) {
                    if (size == 1) turn_bytes(from + r * LINE + i, LINE, lines + i * LINE + r);
                    else turn_eight(from + r * LINE + i * 2, LINE, (uint16_t *)(lines + i * LINE) + r, LINE / 2);
                }
            for (int64_t i = 0; i < wide; i++) {
                char *to = j->to + part * j->to_part + (c + i) * j->to_stride + top * size;
                if (streams) stream(to, lines + i * LINE, squares * size);
                else memcpy(to, lines + i * LINE, (size_t)(squares * size));
            }
        }
        turn_each(j, part, top + squares, 0, high - squares, c, size);
        turn_each(j, part, top, c, high, j->cols - c, size);
    }
    if (streams) streamed();
}

static void work_turn(void *argument) {
    turn_job *j = argument;
    if (j->size == 1) turn_lines(j, 1);
    else turn_lines(j, 2);
}

void nemo_fp8_turn(turn_job *j) { share(work_turn, j, j->threads, j->parallel); }
