/* Patches of bit patterns, in the format of nemo_fp8/rollout/refit/patch.py: found and written on one side, read and added on the other.

       find    one pass over the old rows and the new ones skips what is equal, takes the new words over, carries the sums of a
               fingerprint (fp8_sums.c) through them, and writes each patch as soon as its last word was seen; new rows that are
               codes are made here, a few at a time, and compared while they are in a cache: they never go to memory
       add     a patch is read, and refused if it is none, before its first difference is added; if wanted, its rows are summed up for
               a fingerprint, as they lie in memory then: a few at a time, as soon as these are patched, while a cache has them

   Threads take whole patches, of one tensor after the other, so nobody waits for the lists of another, nor for a tensor's last patch. Each
   has sums of its own for the columns of a tensor and adds them to the others' when it goes on to the next: few words change, and two
   threads that write to one line of the cache wait for it each time. */

#include <stdlib.h>

#include "fp8_amx.h"
#include "fp8_job.h"
#include "fp8_sums.h"

enum {
    AT_A_TIME = 512, /* words of a row that are compared before the next ones */
    MADE = 1 << 18,  /* bytes of codes that a thread makes before it compares them: fewer than its second-level cache has */
    SOON = 2048,     /* bytes of old rows, which no cache has, that are asked for before they are compared */
    AHEAD = 24,      /* positions of a patch, whose memory is asked for so early: each lies in another line of it */
    SUMMED = 1 << 14 /* bytes of rows that are patched before they are summed up: fewer than the first-level cache has */
};

INLINE uint64_t mask_of(int width) { return width == 4 ? 0xffffffff : width == 2 ? 0xffff : 0xff; }

/* ---------------------------------------------------------------------------------------------------------- positions */

static int low_bits(int64_t strip, int64_t n) { return 63 - __builtin_clzll((uint64_t)(strip / n)); }
static int64_t in_bytes(int64_t bits) { return (bits + 7) / 8; }
static int64_t low_bytes(int64_t strip, int64_t n) { return in_bytes(n * low_bits(strip, n)); }
static int64_t high_bits(int64_t strip, int64_t n) { return n + (strip >> low_bits(strip, n)) + 1; }
static int64_t size_of_positions(int64_t strip, int64_t n) {
    return n == 0 || n == strip ? 0 : low_bytes(strip, n) + in_bytes(high_bits(strip, n));
}

/* `shift` is 1 for positions with a bit behind them. */
static uint8_t *write_positions(uint8_t *to, int64_t strip, const uint32_t *positions, int64_t n, int shift) {
    if (n == 0 || n == strip) return to;
    int low = low_bits(strip, n), filled = 0;
    uint8_t *high = to + low_bytes(strip, n), *end = to + size_of_positions(strip, n);
    uint64_t waiting = 0;
    memset(high, 0, (size_t)(end - high));
    for (int64_t i = 0; i < n; i++) {
        uint32_t position = positions[i] >> shift;
        waiting |= (uint64_t)(position & ((1u << low) - 1)) << filled;
        for (filled += low; filled >= 8; filled -= 8, waiting >>= 8) *to++ = (uint8_t)waiting;
        int64_t one = (position >> low) + i;
        high[one / 8] |= (uint8_t)(1 << one % 8);
    }
    if (filled) *to = (uint8_t)waiting;
    return end;
}

/* Returns whether the bytes are n increasing positions below `strip`. */
static int read_positions(const uint8_t *from, int64_t strip, int64_t n, uint32_t *positions) {
    if (n == strip) { for (int64_t i = 0; i < n; i++) positions[i] = (uint32_t)i; }
    if (n == 0 || n == strip) return 1;
    int low = low_bits(strip, n), filled = 0;
    int64_t bits = high_bits(strip, n), found = 0, last = -1;
    const uint8_t *high = from + low_bytes(strip, n);
    uint64_t waiting = 0;
    for (int64_t first = 0; first < bits; first += 64) {
        uint64_t ones = 0;
        memcpy(&ones, high + first / 8, (size_t)least_of(8, in_bytes(bits - first)));
        if (bits - first < 64) ones &= ((uint64_t)1 << (bits - first)) - 1;
        for (; ones; ones &= ones - 1) {
            if (found == n) return 0;
            for (; filled < low; filled += 8) waiting |= (uint64_t)*from++ << filled;
            int64_t above = first + __builtin_ctzll(ones) - found, position = above << low | (int64_t)(waiting & ((1u << low) - 1));
            waiting >>= low, filled -= low;
            if (position <= last || position >= strip) return 0;
            positions[found++] = (uint32_t)(last = position);
        }
    }
    return found == n;
}

/* --------------------------------------------------------------------------------------------------------------- find */

/* A part of the tensor whose fingerprint is carried: some rows, and some 64-bit words of each. */
typedef struct part { int64_t first_row, last_row, first_word, last_word; uint64_t *of_rows, *of_columns; /* which wrap */ } part;
typedef struct patch { int64_t steps, others, bytes, changed, largest; } patch;

typedef struct find_job {
    uint8_t *old;      /* rows of `row_bytes` bytes, of which the first is row `first_row` of the tensor; the new ones in the end */
    const uint8_t *now; /* the new rows; or NULL, and `cast` makes them */
    job *cast;
    uint8_t *out;      /* the patches, each at the offset of its first row */
    patch *patches;    /* each is of `patch_rows` rows, but for the last */
    const part *parts;
    int64_t rows, row_bytes, first_row, patch_rows;
    uint32_t sign;     /* its bit in a pattern of `width` bytes */
    int32_t width, parts_count;
} find_job;

/* Rows of several tensors, whose patches are found in this order. */
typedef struct finds_job {
    find_job *all;
    parallel_function *parallel;
    int64_t n;
    int32_t threads;
    _Atomic int64_t next, failed;
} finds_job;

INLINE int64_t patches_of(const find_job *j) { return (j->rows + j->patch_rows - 1) / j->patch_rows; }

/* What changed in a patch, and what changed in the sums of columns of all parts, one part after the other. */
typedef struct lists { uint32_t *steps, *others, *by, largest; int64_t steps_count, others_count; uint64_t *columns; } lists;

#if defined(__AVX512VBMI2__)

/* With instructions that pack elements side by side no word is looked at by itself. All of them are compared, taken over and summed up
   alike, a vector at a time, and what changed is sorted into the lists 16 at a time: where values change here and there, nobody could
   predict a branch. Of whatever is packed 16 elements are stored, of which as many count as there are. */
enum { BEYOND = 16 };

INLINE __m512i after_16(__m512i packed, int width) {
    const __m512i none = _mm512_setzero_si512();
    return width == 1 ? _mm512_alignr_epi64(none, packed, 2) : width == 2 ? _mm512_alignr_epi64(none, packed, 4) : none;
}

INLINE uint32_t largest_of(__m512i v, int width) {
    if (width == 2) v = _mm512_max_epu16(v, _mm512_srli_epi32(v, 16));
    if (width == 1) v = _mm512_max_epu8(v, _mm512_srli_epi32(v, 16)), v = _mm512_max_epu8(v, _mm512_srli_epi32(v, 8));
    return _mm512_reduce_max_epu32(_mm512_and_si512(v, _mm512_set1_epi32((int)mask_of(width))));
}

/* What changed in a piece of a row: the elements, counted from its first one, and by how much each is larger now. What a processor may
   store in a cycle is what this takes longest for, so both are as short as can be. */
typedef struct changes {
    int64_t n;
    uint16_t elements[8 * AT_A_TIME + BEYOND];
    uint8_t by[4 * (8 * AT_A_TIME + BEYOND)]; /* `width` bytes each */
    uint64_t words[AT_A_TIME];                /* by how much each word is larger, where more than one part may have it */
} changes;

INLINE void store_16(changes *c, int64_t n, __m512i elements, uint16_t first, __m512i by, int width) {
    uint8_t *to = c->by + n * width;
    __m256i all = _mm256_add_epi16(_mm256_set1_epi16((short)first), _mm256_cvtepu8_epi16(_mm512_castsi512_si128(elements)));
    _mm256_storeu_si256((__m256i *)(c->elements + n), all);
    if (width == 1) _mm_storeu_si128((__m128i *)to, _mm512_castsi512_si128(by));
    else if (width == 2) _mm256_storeu_si256((__m256i *)to, _mm512_castsi512_si256(by));
    else _mm512_storeu_si512(to, by);
}

INLINE __m512i by_of_16(const changes *c, int64_t n, int width) { /* as 32-bit words */
    const uint8_t *by = c->by + n * width;
    return width == 1 ? _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)by))
                      : width == 2 ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)by)) : _mm512_loadu_si512(by);
}

/* Takes over a piece of a row, and adds what its words are larger by to `columns`; returns the sum of that. `most` has the largest
   magnitudes among what changed. */
INLINE uint64_t take_over(changes *c, uint8_t *old, const uint8_t *now, int64_t bytes, __m512i sign, __m512i *most,
                          uint64_t *restrict columns, int width) {
    static const uint8_t numbers[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                        22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
                                        44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
    const __m512i all = _mm512_loadu_si512(numbers);
    __m512i sum = _mm512_setzero_si512();
    int64_t n = 0;
    for (int64_t at = 0; at < bytes; at += 64) {
        __mmask64 there = ~(uint64_t)0 >> (bytes - at < 64 ? 64 - (bytes - at) : 0);
        __m512i before = _mm512_maskz_loadu_epi8(there, old + at), after = _mm512_maskz_loadu_epi8(there, now + at), by;
        uint64_t which;
        __builtin_prefetch(old + at + SOON, 1);
#define COMPARE(BITS, MASK) \
    MASK some = _mm512_cmpneq_epu##BITS##_mask(before, after); \
    by = _mm512_maskz_compress_epi##BITS(some, _mm512_sub_epi##BITS(after, before)), which = some; \
    *most = _mm512_mask_max_epu##BITS(*most, some, *most, _mm512_andnot_si512(sign, after))
        if (width == 1) { COMPARE(8, __mmask64); }
        else if (width == 2) { COMPARE(16, __mmask32); }
        else { COMPARE(32, __mmask16); }
        __m512i words = _mm512_sub_epi64(after, before), *column = (__m512i *)(columns + at / 8);
        _mm512_storeu_si512(column, _mm512_add_epi64(_mm512_loadu_si512(column), words));
        sum = _mm512_add_epi64(sum, words);
        if (bytes - at < 64) _mm512_mask_storeu_epi8(old + at, there, after);
        else _mm512_storeu_si512(old + at, after);
        __m512i changed = _mm512_maskz_compress_epi8(which, all);
        int count = __builtin_popcountll(which), done = 0;
        do { /* nearly always once */
            store_16(c, n + done, changed, (uint16_t)(at / width), by, width);
            changed = after_16(changed, 1), by = after_16(by, width);
        } while ((done += 16) < count);
        n += count;
    }
    c->n = n;
    return (uint64_t)_mm512_reduce_add_epi64(sum);
}

/* Puts each change of a piece, whose first element is `first`, into the list that it belongs to. */
INLINE void note(lists *l, const changes *c, int64_t first, int width) {
    const __m512i up = _mm512_set1_epi32(1), down = _mm512_set1_epi32((int)mask_of(width)), from = _mm512_set1_epi32((int)first);
    for (int64_t i = 0; i < c->n; i += 16) {
        __mmask16 there = (__mmask16)(0xffff >> (c->n - i < 16 ? 16 - (c->n - i) : 0));
        __m512i by = by_of_16(c, i, width), in_piece = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(c->elements + i)));
        __m512i element = _mm512_add_epi32(from, in_piece), twice = _mm512_add_epi32(element, element);
        __mmask16 ups = _mm512_mask_cmpeq_epi32_mask(there, by, up), steps = ups | _mm512_mask_cmpeq_epi32_mask(there, by, down);
        __mmask16 others = there & (__mmask16)~steps;
        _mm512_storeu_si512(l->steps + l->steps_count, _mm512_maskz_compress_epi32(steps, _mm512_mask_add_epi32(twice, ups, twice, up)));
        _mm512_storeu_si512(l->others + l->others_count, _mm512_maskz_compress_epi32(others, element));
        _mm512_storeu_si512(l->by + l->others_count, _mm512_maskz_compress_epi32(others, by));
        l->steps_count += __builtin_popcount(steps), l->others_count += __builtin_popcount(others);
    }
}

/* `first` is the piece's first word, of `n`. */
INLINE void carry(const find_job *j, lists *l, int64_t row, int64_t first, int64_t n, const uint64_t *by) {
    uint64_t *columns = l->columns;
    for (const part *p = j->parts; p < j->parts + j->parts_count; columns += p->last_word - p->first_word, p++) {
        int64_t from = p->first_word > first ? p->first_word : first, end = least_of(p->last_word, first + n);
        uint64_t sum = 0;
        if (row < p->first_row || row >= p->last_row) continue;
        for (int64_t i = from; i < end; i++) sum += by[i - first], columns[i - p->first_word] += by[i - first];
        p->of_rows[row - p->first_row] += sum;
    }
}

/* The part that a row is of, and its sums of columns, if that is one part alone and all of the row is in it; else NULL. */
INLINE const part *part_of(const find_job *j, const lists *l, int64_t row, uint64_t **columns) {
    const part *found = NULL;
    uint64_t *of_part = l->columns;
    for (const part *p = j->parts; p < j->parts + j->parts_count; of_part += p->last_word - p->first_word, p++) {
        if (row < p->first_row || row >= p->last_row) continue;
        if (found || p->first_word > 0 || p->last_word * 8 < j->row_bytes) return NULL;
        found = p, *columns = of_part;
    }
    return found;
}

INLINE void compare_row(const find_job *j, lists *l, int64_t row, const uint8_t *now, int64_t element, int width) {
    uint8_t *old = j->old + row * j->row_bytes;
    __m512i sign = _mm512_set1_epi32((int)(j->sign * (width == 1 ? 0x01010101 : width == 2 ? 0x10001 : 1))), most = _mm512_setzero_si512();
    uint64_t *columns = NULL, sum = 0;
    const part *only = part_of(j, l, j->first_row + row, &columns);
    changes c;
    for (int64_t at = 0, bytes; at < j->row_bytes; at += bytes) {
        bytes = least_of(8 * AT_A_TIME, j->row_bytes - at);
        if (!only) memset(c.words, 0, sizeof c.words);
        sum += take_over(&c, old + at, now + at, bytes, sign, &most, only ? columns + at / 8 : c.words, width);
        note(l, &c, element + at / width, width);
        if (!only) carry(j, l, j->first_row + row, at / 8, (bytes + 7) / 8, c.words);
    }
    if (only) only->of_rows[j->first_row + row - only->first_row] += sum;
    uint32_t largest = largest_of(most, width);
    if (largest > l->largest) l->largest = largest;
}

#else

enum { BEYOND = 8 }; /* words that may be written, and do not count */

#if defined(__AVX2__) && !defined(__AVX512VL__)
/* The places of the ones in a byte, one in each byte of a word, the first in the lowest. */
#define PLACE(M, I) ((uint64_t)((M) >> (I) & 1) * (I) << 8 * __builtin_popcount((M) & ((1 << (I)) - 1)))
#define PLACES(M) PLACE(M, 1) | PLACE(M, 2) | PLACE(M, 3) | PLACE(M, 4) | PLACE(M, 5) | PLACE(M, 6) | PLACE(M, 7)
#define FOUR(M) PLACES(M), PLACES((M) + 1), PLACES((M) + 2), PLACES((M) + 3)
#define SIXTEEN(M) FOUR(M), FOUR((M) + 4), FOUR((M) + 8), FOUR((M) + 12)
#define ALL(M) SIXTEEN(M), SIXTEEN((M) + 16), SIXTEEN((M) + 32), SIXTEEN((M) + 48)
static const uint64_t places_of_ones[256] = {ALL(0), ALL(64), ALL(128), ALL(192)};
#endif

/* One bit for each of eight words: whether it is another one. */
INLINE uint64_t others_in(const uint8_t *old, const uint8_t *now) {
    uint64_t which = 0;
#if defined(__AVX512F__)
    which = _mm512_cmpneq_epi64_mask(_mm512_loadu_si512(old), _mm512_loadu_si512(now));
#elif defined(__AVX2__)
    for (int i = 0; i < 2; i++) {
        __m256i a = _mm256_loadu_si256((const __m256i *)old + i), b = _mm256_loadu_si256((const __m256i *)now + i);
        which |= (uint64_t)(~_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(a, b))) & 15) << 4 * i;
    }
#else
    for (int i = 0; i < 8; i++) {
        uint64_t a, b;
        memcpy(&a, old + 8 * i, 8), memcpy(&b, now + 8 * i, 8);
        which |= (uint64_t)(a != b) << i;
    }
#endif
    return which;
}

INLINE void note(const find_job *j, lists *l, uint64_t before, uint64_t after, int64_t element, int width) {
    uint64_t mask = mask_of(width);
    for (uint64_t left = before ^ after; left;) {
        int at = __builtin_ctzll(left) / (8 * width), shift = at * 8 * width;
        uint32_t is = (uint32_t)(after >> shift & mask), by = (uint32_t)((is - (before >> shift)) & mask), place = (uint32_t)(element + at);
        int step = ((by + 1) & mask & ~2u) == 0; /* 1 or -1, in one branch: nobody could predict which of them */
        if (step) l->steps[l->steps_count++] = place << 1 | (by == 1);
        else l->by[l->others_count] = by, l->others[l->others_count++] = place;
        uint32_t magnitude = is & ~j->sign;
        if (magnitude > l->largest) l->largest = magnitude;
        left &= ~(mask << shift);
    }
}

/* The words of which some are other, without a branch: where values change here and there, nobody could predict it. */
INLINE int64_t words_in(const uint8_t *old, const uint8_t *now, int64_t from, int64_t end, uint32_t *words) {
    int64_t n = 0, at = from;
    for (; at + 64 <= end; at += 64) {
        __builtin_prefetch(old + at + SOON, 1);
        uint64_t which = others_in(old + at, now + at);
#if defined(__AVX512VL__)
        __m256i all = _mm256_add_epi32(_mm256_set1_epi32((int)(at / 8)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        _mm256_storeu_si256((__m256i *)(words + n), _mm256_maskz_compress_epi32((__mmask8)which, all));
        n += __builtin_popcountll(which);
#elif defined(__AVX2__)
        __m256i ones = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(places_of_ones + which)));
        _mm256_storeu_si256((__m256i *)(words + n), _mm256_add_epi32(_mm256_set1_epi32((int)(at / 8)), ones));
        n += __builtin_popcountll(which);
#else
        for (int i = 0; i < 8; i++) words[n] = (uint32_t)(at / 8 + i), n += which >> i & 1;
#endif
    }
    for (; at < end; at += 8) words[n] = (uint32_t)(at / 8), n += memcmp(old + at, now + at, (size_t)least_of(8, end - at)) != 0;
    return n;
}

/* Takes over words of a row, notes what changed of them, and says by how much each is larger now. */
INLINE void take_over(const find_job *j, lists *l, const uint32_t *words, int64_t n, uint64_t *by, const uint8_t *now, uint8_t *old,
                      int64_t element, int width) {
    for (int64_t i = 0; i < n; i++) {
        int64_t at = (int64_t)words[i] * 8;
        uint64_t before = 0, after = 0;
        if (at + 8 <= j->row_bytes) {
            memcpy(&before, old + at, 8), memcpy(&after, now + at, 8), memcpy(old + at, &after, 8);
        } else {
            size_t there = (size_t)(j->row_bytes - at);
            memcpy(&before, old + at, there), memcpy(&after, now + at, there), memcpy(old + at, &after, there);
        }
        note(j, l, before, after, element + at / width, width);
        by[i] = after - before;
    }
}

INLINE void carry(const find_job *j, lists *l, int64_t row, const uint32_t *words, const uint64_t *by, int64_t n) {
    uint64_t *columns = l->columns;
    for (const part *p = j->parts; p < j->parts + j->parts_count; columns += p->last_word - p->first_word, p++) {
        uint64_t sum = 0;
        if (row < p->first_row || row >= p->last_row) continue;
        for (int64_t i = 0; i < n; i++)
            if (words[i] >= p->first_word && words[i] < p->last_word) sum += by[i], columns[words[i] - p->first_word] += by[i];
        p->of_rows[row - p->first_row] += sum;
    }
}

INLINE void compare_row(const find_job *j, lists *l, int64_t row, const uint8_t *now, int64_t element, int width) {
    uint8_t *old = j->old + row * j->row_bytes;
    uint32_t words[AT_A_TIME + BEYOND];
    uint64_t by[AT_A_TIME];
    for (int64_t at = 0; at < j->row_bytes; at += 8 * AT_A_TIME) {
        int64_t n = words_in(old, now, at, least_of(at + 8 * AT_A_TIME, j->row_bytes), words);
        take_over(j, l, words, n, by, now, old, element, width);
        carry(j, l, j->first_row + row, words, by, n);
    }
}

#endif

INLINE void put_difference(uint8_t *to, uint32_t by, int width) {
    memcpy(to, &by, (size_t)width); /* the lower bytes */
}

static void write_patch(const lists *l, int64_t strip, int width, uint8_t *out, patch *made) {
    int64_t steps = l->steps_count, others = l->others_count, all = strip * width;
    int64_t size = size_of_positions(strip, steps) + in_bytes(steps) + size_of_positions(strip, others) + others * width;
    if (steps + others && size >= all) {
        *made = (patch){0, strip, all, steps + others, l->largest};
        memset(out, 0, (size_t)all);
        for (int64_t i = 0; i < steps; i++) put_difference(out + (l->steps[i] >> 1) * (uint32_t)width, l->steps[i] & 1 ? 1 : ~0u, width);
        for (int64_t i = 0; i < others; i++) put_difference(out + l->others[i] * (uint32_t)width, l->by[i], width);
        return;
    }
    *made = (patch){steps, others, size, steps + others, l->largest};
    out = write_positions(out, strip, l->steps, steps, 1);
    memset(out, 0, (size_t)in_bytes(steps));
    for (int64_t i = 0; i < steps; i++) out[i / 8] |= (uint8_t)((l->steps[i] & 1) << i % 8);
    out = write_positions(out + in_bytes(steps), strip, l->others, others, 0);
    for (int64_t i = 0; i < others; i++, out += width) put_difference(out, l->by[i], width);
}

/* How many rows are made at a time: whole tiles. */
static int64_t rows_made(const find_job *j) {
    int64_t high = j->cast->tile_rows, tiles = MADE / j->row_bytes / high;
    return high * (tiles > 0 ? tiles : 1);
}

/* `made` is memory for rows that are made here. Returns whether they could be. */
INLINE int find_patch(const find_job *j, lists room, uint8_t *made, int64_t number, int width) {
    int64_t first = number * j->patch_rows, end = least_of(first + j->patch_rows, j->rows), across = j->row_bytes / width;
    lists l = room; /* one of its own, so that its counts can be kept in registers */
    for (int64_t row = first, some; row < end; row += some) {
        const uint8_t *now = made ? made : j->now + row * j->row_bytes;
        some = made ? least_of(rows_made(j), end - row) : end - row;
        if (made && !nemo_fp8_quantize_rows(j->cast, row, some, made)) return 0;
        for (int64_t r = 0; r < some; r++) compare_row(j, &l, row + r, now + r * j->row_bytes, (row + r - first) * across, width);
    }
    write_patch(&l, (end - first) * across, width, j->out + first * j->row_bytes, j->patches + number);
    return 1;
}

/* Adds a thread's sums of columns to those of all threads, and begins them anew. */
static void flush(const find_job *j, uint64_t *mine) {
    for (const part *p = j->parts; p < j->parts + j->parts_count; p++)
        for (int64_t i = 0; i < p->last_word - p->first_word; i++, mine++)
            if (*mine) __atomic_fetch_add(p->of_columns + i, *mine, __ATOMIC_RELAXED), *mine = 0;
}

static void work_find(void *argument) {
    finds_job *f = argument;
    int64_t most = 0, words = 0, made_bytes = 0, before = 0;
    for (const find_job *j = f->all; j < f->all + f->n; j++) {
        int64_t of_parts = 0;
        for (int i = 0; i < j->parts_count; i++) of_parts += j->parts[i].last_word - j->parts[i].first_word;
        words = most_of(words, of_parts), most = most_of(most, least_of(j->patch_rows, j->rows) * (j->row_bytes / j->width));
        if (j->cast) made_bytes = most_of(made_bytes, rows_made(j) * j->row_bytes);
    }
    uint32_t *room = malloc((size_t)(most + BEYOND) * 3 * sizeof *room);
    uint8_t *made = malloc((size_t)made_bytes + 1);
    lists l = {room, room + most + BEYOND, room + 2 * (most + BEYOND), .columns = calloc((size_t)words + 8, sizeof *l.columns)};
    int good = room && made && l.columns;
    const find_job *j = f->all, *end = f->all + f->n;
    while (good) {
        const find_job *last = j;
        int64_t number = atomic_fetch_add(&f->next, 1) - before;
        for (; j < end && number >= patches_of(j); j++) number -= patches_of(j), before += patches_of(j);
        if (j != last) flush(last, l.columns);
        if (j == end) break;
        uint8_t *here = j->cast ? made : NULL;
        good = j->width == 1 ? find_patch(j, l, here, number, 1) : j->width == 2 ? find_patch(j, l, here, number, 2)
                                                                                 : find_patch(j, l, here, number, 4);
    }
    if (!good) atomic_store(&f->failed, 1);
    free(room), free(made), free(l.columns);
}

/* Returns whether all went well: not if a thread had no memory for its lists, or for codes. */
int nemo_fp8_find(finds_job *f) {
    share(work_find, f, f->threads, f->parallel);
    return !f->failed;
}

/* ---------------------------------------------------------------------------------------------------------------- add */

/* Where a box of a tensor [matrices, rows, columns] lies: its first element, and the bytes from one to the next in each dimension. A box
   of the only matrix, whose rows lie in one piece each, may have memory for the sums of all of its rows, and of its columns: those of the
   rows that a patch is of are put there, and added to these. Of a box FOR_AMX (fp8_amx.h) the first row begins a group, and columns are
   even; strides[1] times OF_GROUP is where the next group begins. */
typedef struct place { char *to; int64_t first[3], last[3], strides[3]; int64_t *of_rows, *of_columns, order; } place;

typedef struct add_job {
    const uint8_t *raw;
    const place *places;
    int64_t strip, steps, others; /* elements of the strip, and the lengths of both lists */
    int64_t first, rows, columns; /* the place of the strip's first element; the rows of a matrix, and its columns */
    int32_t width, places_count, back, summed; /* `back` subtracts; `summed` asks for sums of rows where a place has memory for them */
    int32_t done; /* 1 if it was added; 0 if it is no patch, and -1 if there is no memory for it: then nothing was changed */
} add_job;

INLINE void add_to(char *x, uint32_t by, int width) {
    uint32_t is = 0;
    memcpy(&is, x, (size_t)width), is += by, memcpy(x, &is, (size_t)width);
}

/* A list of a patch, and how many of it were added. `ups` has a bit for each step; without it `by` has the differences. After its positions
   comes one that is beyond any, and memory for AHEAD more. */
typedef struct list { const uint32_t *positions; const uint8_t *ups, *by; int64_t done; } list;

/* Where row `r` of a box begins, and where its element `c` lies. */
INLINE char *row_of(const place *p, int64_t r, int order) {
    return order == FOR_AMX ? p->to + (r - r % OF_GROUP) * p->strides[1] + r % OF_GROUP * 2 : p->to + r * p->strides[1];
}

INLINE char *element_of(char *row, int64_t c, int64_t wide, int order) {
    return order == FOR_AMX ? row + c / 2 * PAIRS + c % 2 : row + c * wide;
}

/* Adds what lies before position `end`, and was not added yet, a row at a time. `ahead` says how many positions early memory is asked for;
   that is the right memory as long as rows lie one after the other. */
INLINE void add_list(const add_job *j, const place *p, list *l, int64_t end, int ahead, int width, int order) {
    const uint32_t *positions = l->positions;
    const uint8_t *ups = l->ups, *by = l->by;
    int64_t i = l->done, wide = p->strides[2], back = j->back;
    while (positions[i] < end) {
        int64_t line = (j->first + positions[i]) / j->columns, row = line % j->rows, matrix = line / j->rows;
        int64_t start = line * j->columns - j->first, last = least_of(start + j->columns, end), from = last, before = last;
        char *to = p->to;
        if (matrix >= p->first[0] && matrix < p->last[0] && row >= p->first[1] && row < p->last[1]) {
            to = row_of(p, row - p->first[1], order) + (matrix - p->first[0]) * p->strides[0];
            from = start + p->first[2], before = least_of(last, start + p->last[2]);
        }
        while (positions[i] < from && positions[i] < last) i++;
        for (; positions[i] < before; i++) {
            if (ahead) __builtin_prefetch(element_of(to, positions[i + ahead] - from, wide, order), 1);
            uint32_t difference = 0;
            if (ups) difference = (uint32_t)(ups[i / 8] >> i % 8 & 1) * 2 - 1;
            else memcpy(&difference, by + i * width, (size_t)width);
            add_to(element_of(to, positions[i] - from, wide, order), back ? -difference : difference, width);
        }
        while (positions[i] < last) i++;
    }
    l->done = i;
}

/* The 64-bit words of a row of a box. */
INLINE int64_t words_of(const add_job *j, const place *p) { return ((p->last[2] - p->first[2]) * j->width + 7) / 8; }

/* Adds both lists, some rows at a time, and sums these up while a cache has them; the sums of columns are added to `columns`. As all of
   their memory is read, it is asked for in order, some rows early. */
INLINE void add_and_sum_rows(const add_job *j, const place *p, list *steps, list *others, uint64_t *columns, int width) {
    int64_t first = j->first / j->columns, end = (j->first + j->strip) / j->columns;
    if (first < p->first[1]) first = p->first[1];
    if (end > p->last[1]) end = p->last[1];
    sums_job s = {.x = p->to + (first - p->first[1]) * p->strides[1], .stride = p->strides[1]};
    s.of_rows = p->of_rows + (first - p->first[1]), s.bytes = (p->last[2] - p->first[2]) * j->width, s.rows = end - first;
    int64_t some = ABREAST * (1 + SUMMED / (ABREAST * s.bytes + 1));
    for (int64_t row = 0, last; row < s.rows; row = last) {
        last = least_of(row + some, s.rows);
        add_list(j, p, steps, (first + last) * j->columns - j->first, 0, width, IN_ROWS);
        add_list(j, p, others, (first + last) * j->columns - j->first, 0, width, IN_ROWS);
        for (; row + ABREAST <= last; row += ABREAST)
            sum_rows(&s, row, ABREAST, columns, some * s.stride, NO_MAGNITUDES, NOWHERE);
        for (; row < last; row++) sum_rows(&s, row, 1, columns, 0, NO_MAGNITUDES, NOWHERE);
    }
}

/* The same a group at a time, in which the changes of a row lie all over. */
INLINE void add_and_sum_groups(const add_job *j, const place *p, list *steps, list *others, uint64_t *columns) {
    int64_t first = j->first / j->columns, end = (j->first + j->strip) / j->columns;
    int64_t bytes = p->last[2] - p->first[2], step = p->strides[1];
    if (first < p->first[1]) first = p->first[1];
    if (end > p->last[1]) end = p->last[1];
    for (int64_t row = first - p->first[1], last, rows = end - p->first[1]; row < rows; row = last) {
        int64_t group = row - row % OF_GROUP, up_to = (p->first[1] + (last = least_of(group + OF_GROUP, rows))) * j->columns - j->first;
        add_list(j, p, steps, up_to, 0, 1, FOR_AMX);
        add_list(j, p, others, up_to, 0, 1, FOR_AMX);
        sum_group(p->to + group * step, bytes, row - group, last - group, p->of_rows + row, columns, OF_GROUP * step);
    }
}

/* `columns` is memory for the sums of columns. */
INLINE void add_in_order(const add_job *j, const place *p, list *steps, list *others, uint64_t *columns, int width, int order) {
    if (!p->of_rows || !j->summed) {
        add_list(j, p, steps, j->strip, AHEAD, width, order), add_list(j, p, others, j->strip, AHEAD, width, order);
        return;
    }
    memset(columns, 0, (size_t)words_of(j, p) * 8);
    if (order == FOR_AMX) add_and_sum_groups(j, p, steps, others, columns);
    else add_and_sum_rows(j, p, steps, others, columns, width);
    for (int64_t i = 0; i < words_of(j, p); i++) __atomic_fetch_add(p->of_columns + i, (int64_t)columns[i], __ATOMIC_RELAXED);
}

INLINE void add_all(const add_job *j, const uint32_t *positions, const uint8_t *ups, const uint8_t *by, uint64_t *columns, int width) {
    for (const place *p = j->places; p < j->places + j->places_count; p++) {
        list steps = {positions, ups, NULL, 0}, others = {positions + j->steps + 1, NULL, by, 0};
        if (width == 1 && p->order == FOR_AMX) add_in_order(j, p, &steps, &others, columns, 1, FOR_AMX);
        else add_in_order(j, p, &steps, &others, columns, width, IN_ROWS);
    }
}

static int added(const add_job *j) {
    int64_t words = 0;
    for (const place *p = j->places; p < j->places + j->places_count; p++) words = most_of(words, words_of(j, p));
    uint64_t *columns = malloc((size_t)words * sizeof *columns + (size_t)(j->steps + j->others + 2 + AHEAD) * sizeof(uint32_t));
    uint32_t *positions = (uint32_t *)(columns + words), *of_others = positions + j->steps + 1;
    if (!columns) return -1;
    const uint8_t *ups = j->raw + size_of_positions(j->strip, j->steps), *second = ups + in_bytes(j->steps);
    const uint8_t *by = second + size_of_positions(j->strip, j->others);
    int good = read_positions(j->raw, j->strip, j->steps, positions) && read_positions(second, j->strip, j->others, of_others);
    positions[j->steps] = of_others[j->others] = UINT32_MAX;
    memset(of_others + j->others + 1, 0, AHEAD * sizeof *positions);
    if (good && j->width == 1) add_all(j, positions, ups, by, columns, 1);
    else if (good && j->width == 2) add_all(j, positions, ups, by, columns, 2);
    else if (good) add_all(j, positions, ups, by, columns, 4);
    free(columns);
    return good;
}

/* Patches of different rows, so that threads can take one each. */
typedef struct adds_job { add_job *all; parallel_function *parallel; int64_t n; int32_t threads; _Atomic int64_t next; } adds_job;

static void work_add(void *argument) {
    adds_job *j = argument;
    for (int64_t i; (i = atomic_fetch_add(&j->next, 1)) < j->n;) j->all[i].done = added(j->all + i);
}

void nemo_fp8_add(adds_job *j) { share(work_add, j, j->threads, j->parallel); }
