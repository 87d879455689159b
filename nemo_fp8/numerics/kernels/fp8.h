/* What the casts and the decoding share: floats as bits, the division of work among threads, and prefetching. */

#pragma once

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#ifdef __SSE2__
#include <immintrin.h>
#endif
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#include <arm_neon.h>
enum { ROUNDS_TO_BF16 = 1 };
#else
enum { ROUNDS_TO_BF16 = 0 };
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "a pair of BF16 values is read as one word, of which the first is the lower half"
#endif

enum { STRIP = 4096, ROWS_OF_A_UNIT = 16, MAX_THREADS = 256, LARGE = 4 << 20 };
enum type { BF16, FP16, FP32, PAIR /* BF16, two at a time */ };

#define INLINE static inline __attribute__((always_inline))
#define INFINITE 0x7f800000u

INLINE uint32_t bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INLINE float value(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t bytes_of(int type) { return type == FP32 ? 4 : 2; }

/* The hardware's own prefetching is too slow for a loop that computes. Prefetching past the end is harmless. */
INLINE void ask_for(const void *x, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)x + i, 0, 2);
}

/* An FP8 format as the casts need it: fp8_rows.h says how. */
typedef struct { uint32_t drop, least, top; float magic, saturates_above; } format;

#define UNROLLED _Pragma("GCC unroll 16")

/* Vectors for tame BF16, if the processor has them; BLOCK is then their number of bytes. */
#if defined(__AVX512BW__)
#include "fp8_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "fp8_avx2.h"
#endif

#ifdef BLOCK
INLINE words rounded(reals y) { /* its upper halves are BF16 */
    words u = WORDS(y), odd = V_BITS(and)(V(srli_epi32)(u, 16), V(set1_epi32)(1));
    return V(add_epi32)(V(add_epi32)(u, V(set1_epi32)(0x7fff)), odd);
}

INLINE uint64_t sum_of_words(words v) { /* of 64 bits */
    uint64_t lanes[BLOCK / 8], sum = 0;
    V_BITS(storeu)((words *)lanes, v);
    for (int i = 0; i < BLOCK / 8; i++) sum += lanes[i];
    return sum;
}
#endif

/* BF16 of a float, to nearest even. NaN stays one: `| 0x400000` where rounding would carry it away. */
INLINE uint32_t rounded_to_bf16(float v) {
    uint32_t u = bits(v);
    return ((u & 0x7fffffff) > INFINITE ? u | 0x400000 : u + 0x7fff + (u >> 16 & 1)) >> 16;
}

/* A row of them. ARM processors of 2020 and later have an instruction with the same bits, those of NaN among them: an integer
   rounding is four. Only this rounding can use it: BF16 sources are widened by a shift, and FP8 codes come of one sum. */
INLINE void round_row_to_bf16(const float *restrict from, uint16_t *restrict to, int64_t n) {
    int64_t i = 0;
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    for (; i + 8 <= n; i += 8) {
        bfloat16x8_t half = vcvtq_low_bf16_f32(vld1q_f32(from + i)), both = vcvtq_high_bf16_f32(half, vld1q_f32(from + i + 4));
        vst1q_u16(to + i, vreinterpretq_u16_bf16(both));
    }
#endif
    for (; i < n; i++) to[i] = (uint16_t)rounded_to_bf16(from[i]);
}

/* ------------------------------------------------------------------------------------------------- division of work */

/* A strip is a piece of a row of tiles: STRIP columns of tiles that are lower than a unit, since what each strip costs is much beside
   so few values, and half of them of others, which stay in the caches with what is kept for each column, and with the next one.

   A unit of work is some rows of tiles, one strip wide. If there are enough rows for all threads, it is as wide as the matrix,
   since memory is read faster in order. */
typedef struct { int64_t cols, width, strips, height, together, across, pieces, units, threads; } plan;

INLINE int64_t width_of_strip(int64_t tile_rows) { return tile_rows >= ROWS_OF_A_UNIT ? STRIP / 2 : STRIP; }

static inline plan plan_for(int64_t rows, int64_t cols, int64_t tile_rows, int32_t threads) {
    plan p = {.cols = cols, .width = width_of_strip(tile_rows), .threads = threads};
    p.strips = (cols + p.width - 1) / p.width, p.height = (rows + tile_rows - 1) / tile_rows;
    p.together = (ROWS_OF_A_UNIT + tile_rows - 1) / tile_rows;
    int64_t high = (p.height + p.together - 1) / p.together;
    p.across = high >= 8 * threads ? p.strips : 1;
    p.pieces = (p.strips + p.across - 1) / p.across;
    p.units = high * p.pieces;
    return p;
}

/* A thread's position in the strips. A thread takes its next unit before it has finished the last one, so that it knows one
   strip ahead what to prefetch. Units that are taken one after the other lie far apart in memory: threads that touch the same
   new page at the same time would all make the kernel clear it. */
typedef struct { int64_t row, column, width; } spot; /* a row of tiles, and columns; at the end the row is -1 */
typedef struct { plan p; _Atomic int64_t *next; int64_t row, last_row, strip, first_strip, last_strip; } way;

static inline way way_through(plan p, _Atomic int64_t *next) { return (way){.p = p, .next = next}; }

static inline spot go_on(way *w) {
    if (++w->strip >= w->last_strip) {
        w->strip = w->first_strip;
        if (++w->row >= w->last_row) {
            int64_t unit, apart = (w->p.units + w->p.threads - 1) / w->p.threads;
            do {
                int64_t turn = atomic_fetch_add(w->next, 1);
                if (turn >= apart * w->p.threads) return (spot){.row = -1};
                unit = turn % w->p.threads * apart + turn / w->p.threads;
            } while (unit >= w->p.units);
            w->row = unit / w->p.pieces * w->p.together, w->last_row = least_of(w->row + w->p.together, w->p.height);
            w->strip = w->first_strip = unit % w->p.pieces * w->p.across;
            w->last_strip = least_of(w->strip + w->p.across, w->p.strips);
        }
    }
    int64_t column = w->strip * w->p.width;
    return (spot){w->row, column, least_of(w->p.width, w->p.cols - column)};
}

/* Runs the work on the threads of torch's own OpenMP, if Python found it (`parallel` is its GOMP_parallel): these spin for a
   while after an operation of torch, and other threads would compete with them for the cores. Otherwise threads are started
   for each call, which costs about 20 microseconds a thread. */
typedef void parallel_function(void (*)(void *), void *, unsigned threads, unsigned flags);
typedef struct { void (*function)(void *); void *job; } errand;

static void *run_errand(void *e) { ((errand *)e)->function(((errand *)e)->job); return NULL; }

static inline void share(void (*function)(void *), void *job, int threads, parallel_function *parallel) {
    if (threads > 1 && parallel) { parallel(function, job, (unsigned)threads, 0); return; }
    pthread_t helpers[MAX_THREADS];
    errand e = {function, job};
    int n = 0;
    while (n < threads - 1 && n < MAX_THREADS && !pthread_create(&helpers[n], NULL, run_errand, &e)) n++;
    function(job);
    while (n > 0) pthread_join(helpers[--n], NULL);
}

/* Several jobs as one: those of `which` among `all`, with values that lie at `x`. All threads work at the large ones, which say so by more
   `threads` than one: one job after the other, and nobody waits for the others between two of them. A small one is one thread's. */
typedef struct several {
    const void *all;
    const int64_t *which;
    const void *const *x;
    parallel_function *parallel;
    int64_t n;
    int32_t threads;
    _Atomic int64_t next, failed;
    void *large; /* made here: the large ones, begun */
    int64_t larges;
} several;

/* ------------------------------------------------------------------------------------------------------ new memory */

/* New memory costs more than the cast, since the operating system maps and clears it page by page. Large pages halve that. */
static inline void expect(void *out, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t first = ((uintptr_t)out + 4095) & ~(uintptr_t)4095, end = ((uintptr_t)out + (uintptr_t)bytes) & ~(uintptr_t)4095;
    if (bytes >= LARGE) (void)madvise((void *)first, end - first, MADV_HUGEPAGE); /* advice: if it is not taken, nothing is lost */
#else
    (void)out, (void)bytes;
#endif
}

/* Large results bypass the caches, so that memory which is overwritten is not read first: a row is computed in the first-level
   cache and streamed from there. Code that streams calls `streamed` at its end. Without streaming stores (ARM) a row is computed
   in its place. */
INLINE int large(int64_t bytes) {
#ifdef __SSE2__
    return bytes >= LARGE;
#else
    return (void)bytes, 0;
#endif
}

INLINE void stream(void *to, const void *from, int64_t bytes) {
    int64_t i = 0;
#ifdef BLOCK
    if (((uintptr_t)to & (BLOCK - 1)) == 0)
        for (; i + BLOCK <= bytes; i += BLOCK)
            V_BITS(stream)((words *)((char *)to + i), V_BITS(loadu)((const words *)((const char *)from + i)));
#elif defined(__SSE2__)
    if (((uintptr_t)to & 15) == 0)
        for (; i + 16 <= bytes; i += 16)
            _mm_stream_si128((void *)((char *)to + i), _mm_loadu_si128((const void *)((const char *)from + i)));
#endif
    memcpy((char *)to + i, (const char *)from + i, (size_t)(bytes - i));
}

INLINE void streamed(void) {
#ifdef __SSE2__
    _mm_sfence();
#endif
}
