/* Tame codes to BF16 by tables, on vectors: under one scale the codes of two binades say what all others become.

   A product keeps its mantissa, rounding included, when its exponent moves. Therefore the 32 codes from zero on are multiplied and
   rounded, once a tile, and each of its codes takes one of them, byte by byte (16 entries are what a shuffle looks up), plus

       step * (upper bits of the exponent)      `step` is what 16 codes further on add to the upper byte of a BF16 number: 1 or 2

   The first 16 codes, subnormals among them, have a table of their own. Nothing may leave BF16's normal numbers: `fits_tables` says
   for which scales. A table costs as much as 32 columns converted one by one, so tiles are 128 columns wide or more. */

#pragma once

#include "fp8.h"

enum { LEAST_FOR_TABLES = 128 };

typedef struct { uint8_t low[32], high[32]; } tables; /* the bytes of the first 16 codes, then of the next 16 */
typedef struct { __m256 codes[4]; int step; } first_codes;

INLINE first_codes first_codes_of(int e4m3) { /* as FP16 has them; an E4M3 number is 256 times larger */
    first_codes f = {.step = e4m3 ? 1 : 2};
    UNROLLED
    for (int i = 0; i < 4; i++) {
        __m128i code = _mm_add_epi16(_mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7), _mm_set1_epi16((int16_t)(8 * i)));
        f.codes[i] = _mm256_cvtph_ps(e4m3 ? _mm_slli_epi16(code, 7) : _mm_slli_epi16(code, 8));
    }
    return f;
}

INLINE int fits_tables(float scale) { return bits(scale) - bits(0x1p-80f) <= bits(0x1p80f) - bits(0x1p-80f); }

/* AVX-512, too, makes them in vectors of 32 bytes: these are all the bytes there are. */
INLINE void make_tables(float scale, const first_codes *f, tables *to) {
    __m256i u[4];
    UNROLLED
    for (int i = 0; i < 4; i++) {
        __m256i y = _mm256_castps_si256(_mm256_mul_ps(f->codes[i], _mm256_set1_ps(scale)));
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(y, 16), _mm256_set1_epi32(1));
        u[i] = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(y, _mm256_set1_epi32(0x7fff)), odd), 16);
    }
    __m256i first = _mm256_packus_epi32(u[0], u[1]), next = _mm256_packus_epi32(u[2], u[3]), byte = _mm256_set1_epi16(0xff);
    next = _mm256_sub_epi16(next, _mm256_set1_epi16((int16_t)(f->step << 8)));
    __m256i low = _mm256_packus_epi16(_mm256_and_si256(first, byte), _mm256_and_si256(next, byte));
    __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(next, 8));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* two packs have interleaved the halves twice */
    _mm256_storeu_si256((__m256i *)to->low, _mm256_permutevar8x32_epi32(low, order));
    _mm256_storeu_si256((__m256i *)to->high, _mm256_permutevar8x32_epi32(high, order));
}

#define EVERYWHERE(BYTES) V_EVERYWHERE(_mm_loadu_si128((const __m128i *)(BYTES)))

/* n columns of one tile. */
INLINE void look_up_tile(const uint8_t *codes, uint16_t *out, int64_t n, const tables *t, int step, int streams) {
    const words first_low = EVERYWHERE(t->low), next_low = EVERYWHERE(t->low + 16);
    const words first_high = EVERYWHERE(t->high), next_high = EVERYWHERE(t->high + 16);
    const words nibble = V(set1_epi8)(15);
    const words firsts = V_EVERYWHERE(_mm_set1_epi64x(128)); /* an upper half of 0 or 8 is that of one of the first 16 codes */
    const int64_t counted = 0x0706050403020100 * step, signs = (int64_t)0x8080808080808080;
    const words sums = V_EVERYWHERE(_mm_set_epi64x(counted | signs, counted));
    for (int64_t c = 0; c < n; c += BLOCK) {
        uint8_t padded[BLOCK] = {0};
        uint16_t beyond[BLOCK], *to = out + c;
        const uint8_t *from = codes + c;
        if (n - c < BLOCK) memcpy(padded, from, (size_t)(n - c)), from = padded, to = beyond;
        words both = to_unpack(V_BITS(loadu)((const words *)from));
        words below = V_BITS(and)(both, nibble), above = V_BITS(and)(V(srli_epi16)(both, 4), nibble);
        words is_first = V(shuffle_epi8)(firsts, above), sum = V(shuffle_epi8)(sums, above);
#define LOOK_UP(BYTES) either(is_first, V(shuffle_epi8)(first_##BYTES, below), V(shuffle_epi8)(next_##BYTES, below))
        words low = LOOK_UP(low), high = V(add_epi8)(LOOK_UP(high), sum);
        words left = V(unpacklo_epi8)(low, high), right = V(unpackhi_epi8)(low, high);
        if (streams && to != beyond) V_BITS(stream)((words *)to, left), V_BITS(stream)((words *)to + 1, right);
        else V_BITS(storeu)((words *)to, left), V_BITS(storeu)((words *)to + 1, right);
        if (to == beyond) memcpy(out + c, beyond, (size_t)(n - c) * 2);
    }
}
