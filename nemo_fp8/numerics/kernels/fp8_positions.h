/* Where the elements of a list of a patch are: the two ways in which nemo_fp8/rollout/refit/patch.py codes n positions below `strip`.

       SMALL   as few bits as can be, for bytes that travel: the code of Elias and Fano
       QUICK   words of a bitmap, those that are not 0, after a bit for each word that says so, for bytes that do not travel

   Nothing that is read is believed: bytes are positions, or they are refused. */

#pragma once

#include "fp8.h"

enum { SMALL, QUICK };
enum { PAYS = 256 }; /* QUICK does where one element of so many changes, or more: fewer positions are soon written and read in any way */
INLINE int pays(int64_t strip, int64_t n) { return n * PAYS >= strip; }

static int low_bits(int64_t strip, int64_t n) { return 63 - __builtin_clzll((uint64_t)(strip / n)); }
static int64_t in_bytes(int64_t bits) { return (bits + 7) / 8; }
static int64_t low_bytes(int64_t strip, int64_t n) { return in_bytes(n * low_bits(strip, n)); }
static int64_t high_bits(int64_t strip, int64_t n) { return n + (strip >> low_bits(strip, n)) + 1; }
static int64_t words_of_bitmap(int64_t strip) { return (strip + 15) / 16; }
static int64_t size_of_tops(int64_t strip) { return in_bytes(words_of_bitmap(strip)); }

/* `n` positions, or words that have some. */
static int64_t size_of_positions(int64_t strip, int64_t n, int coding) {
    if (n == 0) return 0;
    if (coding == QUICK) return size_of_tops(strip) + 2 * n;
    return n == strip ? 0 : low_bytes(strip, n) + in_bytes(high_bits(strip, n));
}

static uint8_t *write_positions(uint8_t *to, int64_t strip, const uint32_t *positions, int64_t n) {
    if (n == 0 || n == strip) return to;
    int low = low_bits(strip, n), filled = 0;
    uint8_t *high = to + low_bytes(strip, n), *end = to + size_of_positions(strip, n, SMALL);
    uint64_t waiting = 0;
    memset(high, 0, (size_t)(end - high));
    for (int64_t i = 0; i < n; i++) {
        waiting |= (uint64_t)(positions[i] & ((1u << low) - 1)) << filled;
        for (filled += low; filled >= 8; filled -= 8, waiting >>= 8) *to++ = (uint8_t)waiting;
        int64_t one = (positions[i] >> low) + i;
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

INLINE uint64_t up_to_8(const uint8_t *from, int64_t bytes) {
    uint64_t word = 0;
    if (bytes >= 8) memcpy(&word, from, 8);
    else memcpy(&word, from, (size_t)bytes);
    return word;
}

static int64_t ones_in(const uint8_t *from, int64_t bytes) {
    int64_t ones = 0;
    for (int64_t at = 0; at < bytes; at += 8) ones += __builtin_popcountll(up_to_8(from + at, bytes - at));
    return ones;
}

/* Returns whether the bytes are n words of a bitmap of `strip` bits. */
static int are_words(const uint8_t *from, int64_t strip, int64_t n) {
    if (n == 0) return 1;
    int64_t tops = size_of_tops(strip), words = words_of_bitmap(strip);
    if (ones_in(from, tops) != n || (words % 8 && from[tops - 1] >> words % 8)) return 0;
    int ends = from[tops - 1] >> (words - 1) % 8 & 1;
    uint16_t last;
    memcpy(&last, from + tops + 2 * n - 2, 2);
    return !ends || strip % 16 == 0 || !(last >> strip % 16);
}

/* Reads what `are_words`; returns how many positions they have. */
static int64_t positions_of_words(const uint8_t *tops, const uint8_t *words, int64_t strip, uint32_t *positions) {
    int64_t found = 0, size = size_of_tops(strip);
    for (int64_t at = 0; at < size; at += 8)
        for (uint64_t left = up_to_8(tops + at, size - at); left; left &= left - 1, words += 2) {
            uint32_t first = (uint32_t)(at * 8 + __builtin_ctzll(left)) * 16, word = 0;
            memcpy(&word, words, 2);
            for (; word; word &= word - 1) positions[found++] = first + (uint32_t)__builtin_ctz(word);
        }
    return found;
}
