/* What both ways share: floats as bits, how the work is cut up and shared out among threads, and how memory is asked for. */

#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

enum { STRIP = 2048, ROWS_OF_A_UNIT = 16, MAX_THREADS = 256 };
enum type { BF16, FP16, FP32, PAIR /* BF16, two at a time */ };

#define INLINE static inline __attribute__((always_inline))
#define INFINITE 0x7f800000u

INLINE uint32_t bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INLINE float value(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t bytes_of(int type) { return type == FP32 ? 4 : 2; }

/* The processor's own prefetching stays behind a loop that computes; asking past the end is harmless. */
INLINE void ask_for(const void *x, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)x + i, 0, 3);
}

/* A unit is some rows of tiles, one strip wide; or as wide as the matrix where there are rows enough for all threads, since
   memory is read faster from one end to the other. */
typedef struct { int64_t strips, height, together, across, pieces, units; } plan;

static inline plan plan_for(int64_t rows, int64_t cols, int64_t tile_rows, int32_t threads) {
    plan p = {.strips = (cols + STRIP - 1) / STRIP, .height = (rows + tile_rows - 1) / tile_rows};
    p.together = (ROWS_OF_A_UNIT + tile_rows - 1) / tile_rows;
    int64_t high = (p.height + p.together - 1) / p.together;
    p.across = high >= 8 * threads ? p.strips : 1;
    p.pieces = (p.strips + p.across - 1) / p.across;
    p.units = high * p.pieces;
    return p;
}

/* `DO` for every strip of every row of tiles, as the units of the plan are taken by threads. */
#define FOR_EACH_STRIP(JOB, ROW, COLUMN, DO) \
    plan p_ = plan_for((JOB)->rows, (JOB)->cols, (JOB)->tile_rows, (JOB)->threads); \
    for (int64_t u_; (u_ = atomic_fetch_add(&(JOB)->next, 1)) < p_.units;) { \
        int64_t first_ = u_ / p_.pieces * p_.together, left_ = u_ % p_.pieces * p_.across; \
        for (int64_t ROW = first_; ROW < least_of(first_ + p_.together, p_.height); ROW++) \
            for (int64_t s_ = left_; s_ < least_of(left_ + p_.across, p_.strips); s_++) { int64_t COLUMN = s_ * STRIP; DO; } \
    }

/* New memory costs more than the cast: the kernel hands it out, and clears it, page by page. Large pages halve that. */
static inline void expect(void *out, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t first = ((uintptr_t)out + 4095) & ~(uintptr_t)4095, end = ((uintptr_t)out + (uintptr_t)bytes) & ~(uintptr_t)4095;
    if (bytes >= 4 << 20) (void)madvise((void *)first, end - first, MADV_HUGEPAGE); /* advice: if it is not taken, nothing is lost */
#else
    (void)out, (void)bytes;
#endif
}

/* Threads live as long as the call: starting one costs some 20 microseconds, and nothing is left to break in a fork. */
static inline void share(void *(*function)(void *), void *job, int threads) {
    pthread_t helpers[MAX_THREADS];
    int n = 0;
    while (n < threads - 1 && n < MAX_THREADS && !pthread_create(&helpers[n], NULL, function, job)) n++;
    function(job);
    while (n > 0) pthread_join(helpers[--n], NULL);
}
