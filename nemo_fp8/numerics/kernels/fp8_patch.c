/* Patches of bit patterns, in the format of nemo_fp8/rollout/refit/patch.py: found and written on one side, read and added on the other.

       find    one pass over the old rows and the new ones takes the new words over, carries the sums of a fingerprint (fp8_sums.c)
               through them, and writes each patch as soon as its last word was seen; new rows that are codes are made here, a few at a
               time, and compared while they are in a cache: they never go to memory
       add     a patch is read, and refused if it is none, before its first difference is added; if wanted, its rows are summed up for
               a fingerprint, as they lie in memory then: as they are patched, or a few at a time while a cache has them

   Where instructions pack elements of vectors side by side (AVX-512 VBMI2) both sides have what goes up or down by one as bitmaps, and look
   at all elements alike; else as lists of those that changed.

   Threads take whole patches, of one tensor after the other, so nobody waits for the lists of another, nor for a tensor's last patch. Each
   has sums of its own for the columns of a tensor and adds them to the others' when it goes on to the next: few words change, and two
   threads that write to one line of the cache wait for it each time. */

#include <stdlib.h>

#include "fp8_amx.h"
#include "fp8_job.h"
#include "fp8_positions.h"
#include "fp8_sums.h"

enum {
    AT_A_TIME = 512, /* words of a row that are compared before the next ones */
    MADE = 1 << 18,  /* bytes of codes that a thread makes before it compares them: fewer than its second-level cache has */
    SOON = 2048,     /* bytes of old rows, which no cache has, that are asked for before they are compared */
    AHEAD = 24,      /* positions of a patch, whose memory is asked for so early: each lies in another line of it */
    SUMMED = 1 << 14 /* bytes of rows that are patched before they are summed up: fewer than the first-level cache has */
};

INLINE uint64_t mask_of(int width) { return width == 4 ? 0xffffffff : width == 2 ? 0xffff : 0xff; }

/* --------------------------------------------------------------------------------------------------------------- find */

/* A part of the tensor whose fingerprint is carried: some rows, and some 64-bit words of each. */
typedef struct part { int64_t first_row, last_row, first_word, last_word; uint64_t *of_rows, *of_columns; /* which wrap */ } part;
typedef struct patch { int64_t coding, ups, downs, others, bytes, changed, largest; } patch;

typedef struct find_job {
    uint8_t *old;      /* rows of `row_bytes` bytes, of which the first is row `first_row` of the tensor; the new ones in the end */
    const uint8_t *now; /* the new rows; or NULL, and `cast` makes them */
    job *cast;
    uint8_t *out;      /* the patches, each at the offset of its first row */
    patch *patches;    /* each is of `patch_rows` rows, but for the last */
    const part *parts;
    int64_t rows, row_bytes, first_row, patch_rows;
    uint32_t sign;     /* its bit in a pattern of `width` bytes */
    int32_t width, quick, parts_count; /* `quick` asks for QUICK where it pays */
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

#if defined(__AVX512VBMI2__)
#define BITMAPS
#endif

/* Elements of a patch that go up by one, or down, and memory for both ways to code where they are. */
typedef struct marks {
#ifdef BITMAPS
    uint64_t *bits; /* one for each element */
    int64_t words_count;
#else
    int64_t n; /* of positions */
#endif
    uint32_t *positions;
    uint8_t *tops, *words;
} marks;

/* What changed in a patch, and what changed in the sums of columns of all parts, one part after the other. */
typedef struct lists { marks ups, downs; uint32_t *others, *by, largest; int64_t others_count; uint64_t *columns; } lists;

#ifdef BITMAPS

/* With instructions that pack elements side by side no word is looked at by itself. All of them are compared, taken over and summed up
   alike, a vector at a time, and a bit of a bitmap says what went up or down: where values change here and there, nobody could predict a
   branch. Of whatever is packed 16 elements are stored, of which as many count as there are. */
enum { BEYOND = 16, BITS_AT_A_TIME = 512 };

/* Makes words of a bitmap, and returns how many positions it has. */
static int64_t positions_found(marks *m, int64_t strip) {
    __m512i ones = _mm512_setzero_si512();
    m->words_count = 0;
    for (int64_t at = 0; at < strip; at += BITS_AT_A_TIME) {
        __m512i v = _mm512_loadu_si512(m->bits + at / 64);
        uint32_t some = _mm512_test_epi16_mask(v, v);
        memcpy(m->tops + at / 128, &some, 4);
        _mm512_storeu_si512(m->words + 2 * m->words_count, _mm512_maskz_compress_epi16(some, v));
        m->words_count += __builtin_popcount(some), ones = _mm512_add_epi64(ones, _mm512_popcnt_epi64(v));
    }
    return _mm512_reduce_add_epi64(ones);
}

static int64_t words_of(marks *m, int64_t strip) { return (void)strip, m->words_count; }
static int64_t positions_of(marks *m, int64_t strip) { return positions_of_words(m->tops, m->words, strip, m->positions); }

INLINE uint32_t largest_of(__m512i v, int width) {
    if (width == 2) v = _mm512_max_epu16(v, _mm512_srli_epi32(v, 16));
    if (width == 1) v = _mm512_max_epu8(v, _mm512_srli_epi32(v, 16)), v = _mm512_max_epu8(v, _mm512_srli_epi32(v, 8));
    return _mm512_reduce_max_epu32(_mm512_and_si512(v, _mm512_set1_epi32((int)mask_of(width))));
}

/* Puts bits of the elements from `element` on into a bitmap of zeros, wherever they begin in a word. */
INLINE void mark(uint64_t *bits, int64_t element, uint64_t which) {
    bits[element / 64] |= which << element % 64;
    bits[element / 64 + 1] |= which >> 1 >> (63 - element % 64);
}

INLINE __m512i after_16(__m512i packed, int width) {
    const __m512i none = _mm512_setzero_si512();
    return width == 1 ? _mm512_alignr_epi64(none, packed, 2) : width == 2 ? _mm512_alignr_epi64(none, packed, 4) : none;
}

/* Appends elements, of which the first is `element`, and by how much they are larger; returns their number. */
INLINE int64_t put_others(uint32_t *others, uint32_t *to, uint64_t which, int64_t element, __m512i by, int width) {
    static const uint8_t numbers[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                        22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
                                        44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
    __m512i changed = _mm512_maskz_compress_epi8(which, _mm512_loadu_si512(numbers));
    by = width == 1 ? _mm512_maskz_compress_epi8(which, by) : width == 2 ? _mm512_maskz_compress_epi16((__mmask32)which, by)
                                                                        : _mm512_maskz_compress_epi32((__mmask16)which, by);
    int64_t count = __builtin_popcountll(which);
    for (int64_t done = 0; done < count; done += 16) {
        __m128i few = _mm512_castsi512_si128(changed);
        _mm512_storeu_si512(others + done, _mm512_add_epi32(_mm512_set1_epi32((int)element), _mm512_cvtepu8_epi32(few)));
        _mm512_storeu_si512(to + done, width == 1 ? _mm512_cvtepu8_epi32(_mm512_castsi512_si128(by))
                                                  : width == 2 ? _mm512_cvtepu16_epi32(_mm512_castsi512_si256(by)) : by);
        changed = after_16(changed, 1), by = after_16(by, width);
    }
    return count;
}

/* Takes over a vector of each of some rows, `rows` of them a constant, of which the lanes `there` are of the rows; all of them if `whole`.
   The first one's first element is `element`. */
INLINE void take_over_some(const find_job *j, lists *l, uint8_t *old, const uint8_t *now, __mmask64 there, int whole, int64_t element,
                           int rows, __m512i *most, __m512i *column, __m512i *sums, int64_t *others, int width) {
    const int64_t step = j->row_bytes, across = step / width, ahead = rows > 1 ? rows * step : SOON;
    const __m512i sign = _mm512_set1_epi32((int)(j->sign * (width == 1 ? 0x01010101 : width == 2 ? 0x10001 : 1)));
    const __m512i one = width == 1 ? _mm512_set1_epi8(1) : width == 2 ? _mm512_set1_epi16(1) : _mm512_set1_epi32(1);
    const __m512i all = _mm512_set1_epi32(-1);
    const int aligned = across % (64 / width) == 0; /* bits of a vector lie in one word */
    uint64_t *const ups = l->ups.bits, *const downs = l->downs.bits;
    const size_t word = 8 / (size_t)width;
    __m512i of_column = _mm512_loadu_si512(column);
    UNROLLED
    for (int r = 0; r < rows; r++) {
        uint8_t *was = old + r * step;
        const uint8_t *is = now + r * step;
        const uint64_t place = (uint64_t)element + (uint64_t)(r * across);
        __m512i before = whole ? _mm512_loadu_si512(was) : _mm512_maskz_loadu_epi8(there, was);
        __m512i after = whole ? _mm512_loadu_si512(is) : _mm512_maskz_loadu_epi8(there, is), by;
        uint64_t some, up, down;
        __builtin_prefetch(was + ahead, 1);
#define COMPARE(BITS) \
    by = _mm512_sub_epi##BITS(after, before), some = _mm512_cmpneq_epu##BITS##_mask(before, after); \
    up = _mm512_cmpeq_epu##BITS##_mask(by, one), down = _mm512_cmpeq_epu##BITS##_mask(by, all); \
    *most = _mm512_mask_max_epu##BITS(*most, some, *most, _mm512_andnot_si512(sign, after))
        if (width == 1) { COMPARE(8); }
        else if (width == 2) { COMPARE(16); }
        else { COMPARE(32); }
        __m512i words = _mm512_sub_epi64(after, before);
        of_column = _mm512_add_epi64(of_column, words), sums[r] = _mm512_add_epi64(sums[r], words);
        if (whole) _mm512_storeu_si512(was, after);
        else _mm512_mask_storeu_epi8(was, there, after);
        if (aligned) memcpy((uint8_t *)ups + place / 8, &up, word), memcpy((uint8_t *)downs + place / 8, &down, word);
        else mark(ups, (int64_t)place, up), mark(downs, (int64_t)place, down);
        if (__builtin_expect(some != (up | down), 0)) { /* seldom, at the learning rates that patches are for */
            int64_t n = l->others_count + r * (across + BEYOND) + others[r];
            others[r] += put_others(l->others + n, l->by + n, some & ~(up | down), (int64_t)place, by, width);
        }
    }
    _mm512_storeu_si512(column, of_column);
}

/* Takes over a piece of some rows, and adds what its words are larger by to `columns` and, of each row, to `sums`. `most` has the largest
   magnitudes among what changed. */
INLINE void take_over(const find_job *j, lists *l, uint8_t *old, const uint8_t *now, int64_t bytes, int64_t element, int rows,
                      __m512i *most, uint64_t *restrict columns, __m512i *sums, int width) {
    int64_t others[ABREAST] = {0}, at = 0, before = l->others_count, across = j->row_bytes / width;
    __m512i *column = (__m512i *)columns;
    for (; at + 64 <= bytes; at += 64, column++)
        take_over_some(j, l, old + at, now + at, 0, 1, element + at / width, rows, most, column, sums, others, width);
    if (at < bytes) {
        __mmask64 there = ~(uint64_t)0 >> (64 - (bytes - at));
        take_over_some(j, l, old + at, now + at, there, 0, element + at / width, rows, most, column, sums, others, width);
    }
    for (int r = 0; r < rows; r++) { /* those of a row began where nothing of the rows before could come */
        int64_t n = before + r * (across + BEYOND);
        if (r && others[r]) {
            memmove(l->others + l->others_count, l->others + n, (size_t)others[r] * sizeof *l->others);
            memmove(l->by + l->others_count, l->by + n, (size_t)others[r] * sizeof *l->by);
        }
        l->others_count += others[r];
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

/* Compares some rows, as many as are taken over together; returns how many. `element` is the first one's. */
INLINE int64_t compare_rows(const find_job *j, lists *l, int64_t row, const uint8_t *now, int64_t rows, int64_t element, int width) {
    uint8_t *old = j->old + row * j->row_bytes;
    __m512i most = _mm512_setzero_si512(), sums[ABREAST];
    uint64_t *columns = NULL, words[AT_A_TIME + 8];
    const part *only = part_of(j, l, j->first_row + row, &columns);
    int abreast = only && rows >= ABREAST;
    for (int r = 1; r < ABREAST && abreast; r++) {
        uint64_t *same;
        abreast = part_of(j, l, j->first_row + row + r, &same) == only;
    }
    for (int r = 0; r < ABREAST; r++) sums[r] = _mm512_setzero_si512();
    if (abreast) take_over(j, l, old, now, j->row_bytes, element, ABREAST, &most, columns, sums, width);
    else if (only) take_over(j, l, old, now, j->row_bytes, element, 1, &most, columns, sums, width);
    else
        for (int64_t at = 0, bytes; at < j->row_bytes; at += bytes) {
            bytes = least_of(8 * AT_A_TIME, j->row_bytes - at);
            memset(words, 0, sizeof words);
            take_over(j, l, old + at, now + at, bytes, element + at / width, 1, &most, words, sums, width);
            carry(j, l, j->first_row + row, at / 8, (bytes + 7) / 8, words);
        }
    for (int r = 0; r < (abreast ? ABREAST : 1) && only; r++)
        only->of_rows[j->first_row + row + r - only->first_row] += (uint64_t)_mm512_reduce_add_epi64(sums[r]);
    uint32_t largest = largest_of(most, width);
    if (largest > l->largest) l->largest = largest;
    return abreast ? ABREAST : 1;
}

static void forget(lists *l, int64_t strip, int aligned) {
    for (marks *m = &l->ups; m; m = m == &l->ups ? &l->downs : NULL) {
        int64_t from = aligned ? strip / 64 : 0;
        memset(m->bits + from, 0, (size_t)(strip / 64 + BITS_AT_A_TIME / 64 + 1 - from) * 8);
    }
}

#else

enum { BEYOND = 8, BITS_AT_A_TIME = 64 }; /* words that may be written, and do not count */

/* Makes words of positions, and returns how many. */
static int64_t words_of(marks *m, int64_t strip) {
    int64_t n = 0, last = -1;
    uint16_t word = 0;
    memset(m->tops, 0, (size_t)size_of_tops(strip));
    for (int64_t i = 0; i < m->n; i++) {
        int64_t number = m->positions[i] / 16;
        if (number != last) m->tops[number / 8] |= (uint8_t)(1 << number % 8), word = 0, n++, last = number;
        word |= (uint16_t)(1 << m->positions[i] % 16);
        memcpy(m->words + 2 * n - 2, &word, 2);
    }
    return n;
}

static int64_t positions_of(marks *m, int64_t strip) { return (void)strip, m->n; }
static int64_t positions_found(marks *m, int64_t strip) { return (void)strip, m->n; }

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
        if (((by + 1) & mask & ~2u) == 0) { /* 1 or -1, in one branch: nobody could predict which of them */
            l->ups.positions[l->ups.n] = l->downs.positions[l->downs.n] = place;
            l->ups.n += by == 1, l->downs.n += by != 1;
        } else
            l->by[l->others_count] = by, l->others[l->others_count++] = place;
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

INLINE int64_t compare_rows(const find_job *j, lists *l, int64_t row, const uint8_t *now, int64_t rows, int64_t element, int width) {
    uint8_t *old = j->old + row * j->row_bytes;
    uint32_t words[AT_A_TIME + BEYOND];
    uint64_t by[AT_A_TIME];
    for (int64_t at = 0; at < j->row_bytes; at += 8 * AT_A_TIME) {
        int64_t n = words_in(old, now, at, least_of(at + 8 * AT_A_TIME, j->row_bytes), words);
        take_over(j, l, words, n, by, now, old, element, width);
        carry(j, l, j->first_row + row, words, by, n);
    }
    return (void)rows, 1; /* rows are looked at one by one */
}

static void forget(lists *l, int64_t strip, int aligned) { (void)strip, (void)aligned, l->ups.n = l->downs.n = 0; }

#endif

INLINE void put_difference(uint8_t *to, uint32_t by, int width) {
    memcpy(to, &by, (size_t)width); /* the lower bytes */
}

static uint8_t *write_marks(uint8_t *to, const marks *m, int64_t strip, int64_t n, int coding) {
    if (coding == SMALL || n == 0) return write_positions(to, strip, m->positions, n);
    memcpy(to, m->tops, (size_t)size_of_tops(strip)), to += size_of_tops(strip);
    return memcpy(to, m->words, (size_t)n * 2), to + 2 * n;
}

static void write_patch(lists *l, int64_t strip, int width, int quick, uint8_t *out, patch *made) {
    int64_t ups = positions_found(&l->ups, strip), downs = positions_found(&l->downs, strip), others = l->others_count;
    int coding = quick && pays(strip, ups + downs) ? QUICK : SMALL;
    int64_t changed = ups + downs + others, all = strip * width;
    ups = coding == QUICK ? words_of(&l->ups, strip) : positions_of(&l->ups, strip);
    downs = coding == QUICK ? words_of(&l->downs, strip) : positions_of(&l->downs, strip);
    int64_t size = size_of_positions(strip, ups, coding) + size_of_positions(strip, downs, coding);
    size += size_of_positions(strip, others, SMALL) + others * width;
    if (changed && size >= all) {
        *made = (patch){SMALL, 0, 0, strip, all, changed, l->largest};
        memset(out, 0, (size_t)all);
        ups = positions_of(&l->ups, strip), downs = positions_of(&l->downs, strip);
        for (int64_t i = 0; i < ups; i++) put_difference(out + l->ups.positions[i] * (uint32_t)width, 1, width);
        for (int64_t i = 0; i < downs; i++) put_difference(out + l->downs.positions[i] * (uint32_t)width, ~0u, width);
        for (int64_t i = 0; i < others; i++) put_difference(out + l->others[i] * (uint32_t)width, l->by[i], width);
        return;
    }
    *made = (patch){coding, ups, downs, others, size, changed, l->largest};
    out = write_marks(out, &l->ups, strip, ups, coding), out = write_marks(out, &l->downs, strip, downs, coding);
    out = write_positions(out, strip, l->others, others);
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
    forget(&l, (end - first) * across, across % (64 / width) == 0);
    for (int64_t row = first, some; row < end; row += some) {
        const uint8_t *now = made ? made : j->now + row * j->row_bytes;
        some = made ? least_of(rows_made(j), end - row) : end - row;
        if (made && !nemo_fp8_quantize_rows(j->cast, row, some, made)) return 0;
        for (int64_t r = 0; r < some;)
            r += compare_rows(j, &l, row + r, now + r * j->row_bytes, some - r, (row + r - first) * across, width);
    }
    write_patch(&l, (end - first) * across, width, j->quick, j->out + first * j->row_bytes, j->patches + number);
    return 1;
}

/* Adds a thread's sums of columns to those of all threads, and begins them anew. */
static void flush(const find_job *j, uint64_t *mine) {
    for (const part *p = j->parts; p < j->parts + j->parts_count; p++)
        for (int64_t i = 0; i < p->last_word - p->first_word; i++, mine++)
            if (*mine) __atomic_fetch_add(p->of_columns + i, *mine, __ATOMIC_RELAXED), *mine = 0;
}

/* Memory for what changed in a patch of `most` elements. Not all of it at once: it would be so much that it is given back each time. */
static int lists_made(lists *l, int64_t most) {
    int64_t room = (most + (ABREAST + 1) * BEYOND) * (int64_t)sizeof(uint32_t);
    l->others = malloc((size_t)room), l->by = malloc((size_t)room);
    int good = l->others && l->by;
    for (marks *m = &l->ups; good && m; m = m == &l->ups ? &l->downs : NULL) {
#ifdef BITMAPS
        good = (m->bits = malloc((size_t)(most / 64 + BITS_AT_A_TIME / 64 + 1) * 8)) != NULL;
#endif
        int64_t tops = (most + BITS_AT_A_TIME) / 128 + 8;
        m->positions = malloc((size_t)room), m->tops = malloc((size_t)(tops + most / 8 + 128));
        good = good && m->positions && m->tops, m->words = good ? m->tops + tops : NULL;
    }
    return good;
}

static void free_lists(lists *l) {
    for (marks *m = &l->ups; m; m = m == &l->ups ? &l->downs : NULL) {
#ifdef BITMAPS
        free(m->bits);
#endif
        free(m->positions), free(m->tops);
    }
    free(l->others), free(l->by), free(l->columns);
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
    lists l = {.columns = calloc((size_t)words + 8, sizeof *l.columns)};
    uint8_t *made = malloc((size_t)made_bytes + 1);
    int good = lists_made(&l, most) && made && l.columns;
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
    free_lists(&l), free(made);
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
    int64_t strip, ups, downs, others; /* elements of the strip, and the lengths of the lists, by their coding */
    int64_t first, rows, columns;      /* the place of the strip's first element; the rows of a matrix, and its columns */
    int32_t width, coding, places_count, back, summed; /* `back` subtracts; `summed` asks for sums of rows where there is memory for them */
    int32_t done; /* 1 if it was added; 0 if it is no patch, and -1 if there is no memory for it: then nothing was changed */
} add_job;

INLINE void add_to(char *x, uint32_t by, int width) {
    uint32_t is = 0;
    memcpy(&is, x, (size_t)width), is += by, memcpy(x, &is, (size_t)width);
}

/* A list of a patch, and how many of it were added: each differs by `one`, or, if that is 0, by what `by` says. After its positions comes
   one that is beyond any, and memory for AHEAD more. */
typedef struct list { const uint32_t *positions; const uint8_t *by; uint32_t one; int64_t done; } list;
enum { OF_UPS, OF_DOWNS, OF_OTHERS, LISTS };

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
    const uint8_t *by = l->by;
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
            uint32_t difference = l->one;
            if (!difference) memcpy(&difference, by + i * width, (size_t)width);
            add_to(element_of(to, positions[i] - from, wide, order), back ? -difference : difference, width);
        }
        while (positions[i] < last) i++;
    }
    l->done = i;
}

/* The 64-bit words of a row of a box. */
INLINE int64_t words_of_row(const add_job *j, const place *p) { return ((p->last[2] - p->first[2]) * j->width + 7) / 8; }

/* Adds what lies before position `end` of all lists. */
INLINE void add_lists(const add_job *j, const place *p, list *lists, int64_t end, int ahead, int width, int order) {
    for (int i = 0; i < LISTS; i++) add_list(j, p, lists + i, end, ahead, width, order);
}

/* Adds all lists, some rows at a time, and sums these up while a cache has them; the sums of columns are added to `columns`. As all of
   their memory is read, it is asked for in order, some rows early. */
INLINE void add_and_sum_rows(const add_job *j, const place *p, list *lists, uint64_t *columns, int width) {
    int64_t first = j->first / j->columns, end = (j->first + j->strip) / j->columns;
    if (first < p->first[1]) first = p->first[1];
    if (end > p->last[1]) end = p->last[1];
    sums_job s = {.x = p->to + (first - p->first[1]) * p->strides[1], .stride = p->strides[1]};
    s.of_rows = p->of_rows + (first - p->first[1]), s.bytes = (p->last[2] - p->first[2]) * j->width, s.rows = end - first;
    int64_t some = ABREAST * (1 + SUMMED / (ABREAST * s.bytes + 1));
    for (int64_t row = 0, last; row < s.rows; row = last) {
        last = least_of(row + some, s.rows);
        add_lists(j, p, lists, (first + last) * j->columns - j->first, 0, width, IN_ROWS);
        for (; row + ABREAST <= last; row += ABREAST)
            sum_rows(&s, row, ABREAST, columns, some * s.stride, NO_MAGNITUDES, NOWHERE);
        for (; row < last; row++) sum_rows(&s, row, 1, columns, 0, NO_MAGNITUDES, NOWHERE);
    }
}

/* The same a group at a time, in which the changes of a row lie all over. */
INLINE void add_and_sum_groups(const add_job *j, const place *p, list *lists, uint64_t *columns) {
    int64_t first = j->first / j->columns, end = (j->first + j->strip) / j->columns;
    int64_t bytes = p->last[2] - p->first[2], step = p->strides[1];
    if (first < p->first[1]) first = p->first[1];
    if (end > p->last[1]) end = p->last[1];
    for (int64_t row = first - p->first[1], last, rows = end - p->first[1]; row < rows; row = last) {
        int64_t group = row - row % OF_GROUP, up_to = (p->first[1] + (last = least_of(group + OF_GROUP, rows))) * j->columns - j->first;
        add_lists(j, p, lists, up_to, 0, 1, FOR_AMX);
        sum_group(p->to + group * step, bytes, row - group, last - group, p->of_rows + row, columns, OF_GROUP * step);
    }
}

#ifdef BITMAPS

/* Whether a place is of whole words of a bitmap, and its rows are to be summed up. */
static int is_of_words(const add_job *j, const place *p) {
    return p->of_rows && j->summed && j->width == 1 && p->order == IN_ROWS && j->columns % 64 == 0 && p->first[2] % 64 == 0;
}

/* Adds to a vector of each of some rows, `rows` of them a constant, what bitmaps say, and sums them up. Its lanes `there` are of the box;
   all of them if `whole`. */
INLINE void add_and_sum_some(char *x, int64_t stride, __mmask64 there, int whole, const uint64_t *ups, const uint64_t *downs, int64_t step,
                             int rows, __m512i *of_row, __m512i *column) {
    const __m512i one = _mm512_set1_epi8(1);
    __m512i of_column = _mm512_loadu_si512(column);
    for (int r = 0; r < rows; r++, x += stride, ups += step, downs += step) {
        __m512i v = whole ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi8(there, x);
        uint64_t up = whole ? *ups : *ups & there, down = whole ? *downs : *downs & there;
        __builtin_prefetch(x + rows * stride, 1);
        v = _mm512_mask_add_epi8(v, up, v, one), v = _mm512_mask_sub_epi8(v, down, v, one);
        if (whole) _mm512_storeu_si512(x, v);
        else _mm512_mask_storeu_epi8(x, there, v);
        of_row[r] = _mm512_add_epi64(of_row[r], v), of_column = _mm512_add_epi64(of_column, v);
    }
    _mm512_storeu_si512(column, of_column);
}

/* The same for all of some rows of a box, from row `row` of the matrix on. */
INLINE void add_and_sum_all(const add_job *j, const place *p, uint64_t *const *bits, int64_t row, int rows, uint64_t *restrict columns) {
    const int64_t bytes = p->last[2] - p->first[2], stride = p->strides[1], step = j->columns / 64;
    const int64_t word = (row * j->columns - j->first + p->first[2]) / 64;
    const uint64_t *ups = bits[OF_UPS] + word, *downs = bits[OF_DOWNS] + word;
    char *x = p->to + (row - p->first[1]) * stride;
    __m512i of_row[ABREAST];
    int64_t at = 0;
    for (int r = 0; r < rows; r++) of_row[r] = _mm512_setzero_si512();
    for (; at + 64 <= bytes; at += 64, ups++, downs++)
        add_and_sum_some(x + at, stride, 0, 1, ups, downs, step, rows, of_row, (__m512i *)(columns + at / 8));
    if (at < bytes) {
        __mmask64 there = ~(uint64_t)0 >> (64 - (bytes - at));
        add_and_sum_some(x + at, stride, there, 0, ups, downs, step, rows, of_row, (__m512i *)(columns + at / 8));
    }
    for (int r = 0; r < rows; r++) p->of_rows[row - p->first[1] + r] = _mm512_reduce_add_epi64(of_row[r]);
}

INLINE void add_and_sum_words(const add_job *j, const place *p, uint64_t *const *bits, uint64_t *columns) {
    int64_t row = most_of(j->first / j->columns, p->first[1]), end = least_of((j->first + j->strip) / j->columns, p->last[1]);
    for (; row + ABREAST <= end; row += ABREAST) add_and_sum_all(j, p, bits, row, ABREAST, columns);
    for (; row < end; row++) add_and_sum_all(j, p, bits, row, 1, columns);
}

/* Makes a bitmap of `are_words`, or of positions. */
static void bitmap_of_words(const uint8_t *tops, const uint8_t *words, int64_t strip, uint64_t *bits) {
    for (int64_t at = 0, size = size_of_tops(strip); at < size; at += 4) {
        uint32_t some = 0;
        if (size - at >= 4) memcpy(&some, tops + at, 4);
        else memcpy(&some, tops + at, (size_t)(size - at));
        __mmask32 packed = (__mmask32)(((uint64_t)1 << __builtin_popcount(some)) - 1);
        _mm512_storeu_si512(bits + at * 2, _mm512_maskz_expand_epi16(some, _mm512_maskz_loadu_epi16(packed, words)));
        words += 2 * __builtin_popcount(some);
    }
}

static void bitmap_of_positions(const uint32_t *positions, int64_t n, int64_t strip, uint64_t *bits) {
    memset(bits, 0, (size_t)(strip / 64 + 1) * 8);
    for (int64_t i = 0; i < n; i++) bits[positions[i] / 64] |= (uint64_t)1 << positions[i] % 64;
}

#else
INLINE int is_of_words(const add_job *j, const place *p) { return (void)j, (void)p, 0; }
#endif

/* `columns` is memory for the sums of columns. */
INLINE void add_in_order(const add_job *j, const place *p, list *lists, uint64_t *const *bits, uint64_t *columns, int width, int order) {
    if (!p->of_rows || !j->summed) { add_lists(j, p, lists, j->strip, AHEAD, width, order); return; }
    memset(columns, 0, (size_t)words_of_row(j, p) * 8);
#ifdef BITMAPS
    if (is_of_words(j, p)) add_list(j, p, lists + OF_OTHERS, j->strip, AHEAD, width, order), add_and_sum_words(j, p, bits, columns);
    else
#else
    (void)bits;
#endif
    if (order == FOR_AMX) add_and_sum_groups(j, p, lists, columns);
    else add_and_sum_rows(j, p, lists, columns, width);
    for (int64_t i = 0; i < words_of_row(j, p); i++) __atomic_fetch_add(p->of_columns + i, (int64_t)columns[i], __ATOMIC_RELAXED);
}

INLINE void add_all(const add_job *j, const list *lists, uint64_t *const *bits, uint64_t *columns, int width) {
    for (const place *p = j->places; p < j->places + j->places_count; p++) {
        list mine[LISTS] = {lists[0], lists[1], lists[2]};
        if (width == 1 && p->order == FOR_AMX) add_in_order(j, p, mine, bits, columns, 1, FOR_AMX);
        else add_in_order(j, p, mine, bits, columns, width, IN_ROWS);
    }
}

/* Reads a list: into positions, if `room` is memory for as many as there are, one and AHEAD more, and into a bitmap, if `bits` is memory
   for one. Returns whether it is a list; words were looked at already. */
static int read_list(const uint8_t *from, int64_t strip, int64_t n, int coding, uint32_t *room, uint64_t *bits) {
    const uint8_t *words = from + size_of_tops(strip);
    int64_t count = n;
    if (coding == SMALL && !read_positions(from, strip, n, room)) return 0;
    if (coding == QUICK && room && n) count = positions_of_words(from, words, strip, room);
    if (room) room[count] = UINT32_MAX, memset(room + count + 1, 0, AHEAD * sizeof *room);
#ifdef BITMAPS
    if (bits && coding == QUICK && n) bitmap_of_words(from, words, strip, bits);
    else if (bits) bitmap_of_positions(room, n, strip, bits);
#else
    (void)bits;
#endif
    return 1;
}

/* Reads all of a patch before anything of it is added. */
static int added(const add_job *j) {
    const int64_t lengths[LISTS] = {j->ups, j->downs, j->others}, bitmap = j->strip / 64 + BITS_AT_A_TIME / 64 + 1;
    const int codings[LISTS] = {j->coding, j->coding, SMALL};
    const uint8_t *raws[LISTS + 1] = {j->raw};
    int64_t across = 0, counts[LISTS], memory = 0;
    int by_words = 0, by_lists = j->places_count == 0, good = 1;
    for (const place *p = j->places; p < j->places + j->places_count; p++) {
        across = most_of(across, words_of_row(j, p));
        if (is_of_words(j, p)) by_words = 1;
        else by_lists = 1;
    }
    for (int i = 0; i < LISTS; i++) {
        raws[i + 1] = raws[i] + size_of_positions(j->strip, lengths[i], codings[i]), counts[i] = lengths[i];
        if (codings[i] == QUICK && !are_words(raws[i], j->strip, lengths[i])) return 0;
        if (codings[i] == QUICK && lengths[i]) counts[i] = by_lists ? ones_in(raws[i] + size_of_tops(j->strip), 2 * lengths[i]) : 0;
        memory += counts[i] + 1 + AHEAD;
    }
    across += 8; /* a vector of columns may end beyond the last one */
    uint64_t *columns = malloc((size_t)(across + by_words * 2 * bitmap) * sizeof *columns + (size_t)memory * sizeof(uint32_t));
    if (!columns) return -1;
    uint64_t *bits[2] = {columns + across, columns + across + bitmap};
    uint32_t *room = (uint32_t *)(columns + across + by_words * 2 * bitmap);
    list lists[LISTS];
    for (int i = 0; i < LISTS && good; room += counts[i++] + 1 + AHEAD) {
        uint32_t *positions = codings[i] == SMALL || by_lists ? room : NULL;
        lists[i] = (list){room, raws[LISTS], i == OF_UPS ? 1 : i == OF_DOWNS ? ~0u : 0, 0};
        good = read_list(raws[i], j->strip, lengths[i], codings[i], positions, by_words && i != OF_OTHERS ? bits[i] : NULL);
    }
    if (good && j->width == 1) add_all(j, lists, bits, columns, 1);
    else if (good && j->width == 2) add_all(j, lists, bits, columns, 2);
    else if (good) add_all(j, lists, bits, columns, 4);
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

/* Whether words of a bitmap are what this processor finds and adds quickest. */
int nemo_fp8_packs(void) {
#ifdef BITMAPS
    return 1;
#else
    return 0;
#endif
}
