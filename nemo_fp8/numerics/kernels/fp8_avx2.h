/* The operations that differ between AVX2 and AVX-512 (fp8_avx512.h): here vectors of 32 bytes, no masks, and shuffles
   that stay within halves. */

#pragma once

#define V(NAME) _mm256_##NAME
#define V_BITS(NAME) _mm256_##NAME##_si256
#define REALS(WORDS) _mm256_castsi256_ps(WORDS)
#define WORDS(REALS) _mm256_castps_si256(REALS)
#define BLOCK 32
enum { LANES = 8 };
typedef __m256 reals;
typedef __m256i words;

/* Rounds y >= 0 to the format, as fp8_rows.h does. A table of 32 floats does not fit into registers. Instead a fused sum rounds once,
   and a multiplication adds the two halves of it: the upper half holds the exponent, and the lower half counts the steps, from
   minus the least exponent on. The result is code * 2**SPARE, with zeros above it. */
enum { SPARE = 5 }; /* for evens; odds, which become upper bytes, come out as code * 2**8 */
typedef struct { reals least, infinite, magic; words halves[2]; } steps;

INLINE steps steps_of(format f) {
    uint32_t mantissa_bits = 23 - f.drop, from = -(((f.least >> 23) + f.drop) << mantissa_bits) & 0xffff;
#define HALVES(UP) _mm256_set1_epi32(1 << (mantissa_bits + (UP) - 7 + 16) | 1 << (UP))
    return (steps){_mm256_set1_ps(value(f.least)), _mm256_set1_ps(value(INFINITE)), _mm256_set1_ps(value((127 + f.drop) << 23 | from)),
                   {HALVES(SPARE), HALVES(8)}};
}

INLINE words round_lanes(reals y, steps k, int odd, reals *rounded) {
    reals e = _mm256_and_ps(REALS(_mm256_max_epi32(WORDS(y), WORDS(k.least))), k.infinite), sum = _mm256_fmadd_ps(e, k.magic, y);
    *rounded = _mm256_fnmadd_ps(e, k.magic, sum);
    return _mm256_madd_epi16(WORDS(sum), k.halves[odd]);
}

/* Bytes packed from two vectors come with their halves interleaved. */
INLINE words in_order(words bytes) { return _mm256_permute4x64_epi64(bytes, 0xd8); }

/* Bytes in the order from which unpacking, which stays within halves too, brings them back; one of two bytes, by the sign of a third;
   16 bytes in every half. */
INLINE words to_unpack(words bytes) { return in_order(bytes); }
INLINE words either(words negative, words yes, words no) { return _mm256_blendv_epi8(no, yes, negative); }
#define V_EVERYWHERE(HALF) _mm256_broadcastsi128_si256(HALF)

/* The 32 codes of which `evens` and `odds` hold every other one of 16, in order and with the signs of x; `magnitudes` lack them. */
INLINE words join(const words *evens, const words *odds, words x0, words x1, words *magnitudes) {
    words a = _mm256_srli_epi16(_mm256_packs_epi32(evens[0], evens[1]), SPARE);
    words b = _mm256_packs_epi32(odds[0], odds[1]);
    words negative = _mm256_and_si256(_mm256_packs_epi16(x0, x1), _mm256_set1_epi8(-128)); /* saturates: the sign stays */
    words codes = in_order(_mm256_or_si256(_mm256_or_si256(a, b), negative));
    *magnitudes = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
    return codes;
}

/* One bit for each byte. */
INLINE uint64_t negative_of(words bytes) { return (uint32_t)_mm256_movemask_epi8(bytes); }
INLINE uint64_t numbers_of(words x0, words x1) { /* those that are not zero */
    words twice0 = _mm256_add_epi16(x0, x0), twice1 = _mm256_add_epi16(x1, x1), none = _mm256_setzero_si256(); /* without their signs */
    return ~negative_of(in_order(_mm256_packs_epi16(_mm256_cmpeq_epi16(twice0, none), _mm256_cmpeq_epi16(twice1, none))));
}
INLINE words add_bits(words bytes, uint64_t bits) {
    const words of_byte = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    words spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    return _mm256_sub_epi8(bytes, _mm256_cmpeq_epi8(_mm256_and_si256(spread, of_byte), of_byte));
}

/* The last step of a sum or a maximum across lanes: from two vectors, and from one. */
INLINE reals fold_sums(const reals *v) {
    return _mm256_add_ps(_mm256_permute2f128_ps(v[0], v[1], 0x20), _mm256_permute2f128_ps(v[0], v[1], 0x31));
}
INLINE __m256i word_sums_of_four(const words *v) { /* of 64 bits, of each vector */
#define ADD_NEIGHBOURS(A, B) _mm256_add_epi64(_mm256_unpacklo_epi64(A, B), _mm256_unpackhi_epi64(A, B))
    words low = ADD_NEIGHBOURS(v[0], v[1]), high = ADD_NEIGHBOURS(v[2], v[3]);
    return _mm256_add_epi64(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}
INLINE __m128i fold_tops(words v) { return _mm_max_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)); }

/* 16 codes as the upper bytes of 16-bit words, evens in the lower half and odds in the upper one; and from floats back to BF16. */
INLINE words widen_codes(const uint8_t *codes) {
    const words order = _mm256_setr_epi8(-1, 0, -1, 2, -1, 4, -1, 6, -1, 8, -1, 10, -1, 12, -1, 14,
                                         -1, 1, -1, 3, -1, 5, -1, 7, -1, 9, -1, 11, -1, 13, -1, 15);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codes)), order);
}
INLINE words zeros_behind(const uint8_t *half) { return _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)half)); }
INLINE __m256 half_sum(reals v) { return v; }
INLINE reals in_halves(reals low, reals high) { return _mm256_blend_ps(low, high, 0xf0); }
INLINE words upper_halves(words evens, words odds) { return _mm256_blend_epi16(_mm256_srli_epi32(evens, 16), odds, 0xaa); }
INLINE reals low_halves(words fp16) { return _mm256_cvtph_ps(_mm256_castsi256_si128(fp16)); }
INLINE reals high_halves(words fp16) { return _mm256_cvtph_ps(_mm256_extracti128_si256(fp16, 1)); }

/* FP4. A vector of words has two columns a word, and so one block of 16. */
INLINE reals of_blocks(const float *factor) { return _mm256_broadcast_ss(factor); }
/* Words packed twice, in order again. */
INLINE words twice_packed(words bytes) { return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }
enum { TOPS = 8 };
INLINE void tops_of_blocks(const uint16_t *x, float *amax) {
    words v[8];
    UNROLLED
    for (int t = 0; t < 8; t++) v[t] = _mm256_and_si256(_mm256_loadu_si256((const words *)(x + 16 * t)), _mm256_set1_epi16(0x7fff));
#define TOP_HALF(A, B, SIZE) _mm256_max_epu16(_mm256_unpacklo_epi##SIZE(A, B), _mm256_unpackhi_epi##SIZE(A, B))
    UNROLLED
    for (int i = 0; i < 4; i++) v[i] = TOP_HALF(v[2 * i], v[2 * i + 1], 16);
    UNROLLED
    for (int i = 0; i < 2; i++) v[i] = TOP_HALF(v[2 * i], v[2 * i + 1], 32);
    __m128i tops = fold_tops(TOP_HALF(v[0], v[1], 64));
    _mm256_storeu_si256((words *)amax, _mm256_slli_epi32(_mm256_cvtepu16_epi32(tops), 16));
}

/* Numbers of E2M1 codes, one in each word, whose other bits do not matter; and what became 0 and was not, counted in every lane. */
INLINE words bytes_in_words(const uint8_t *bytes) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes)); }
INLINE reals numbers_of_e2m1(void) { return _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6); }
INLINE reals number_of_lanes(reals numbers, words codes) { return _mm256_permutevar8x32_ps(numbers, codes); }
INLINE words count_zeroed(words counted, reals made, words of) {
    const words none = _mm256_setzero_si256();
    return _mm256_sub_epi32(counted, _mm256_andnot_si256(_mm256_cmpeq_epi32(of, none), _mm256_cmpeq_epi32(WORDS(made), none)));
}

/* Decoding, 32 columns and so two blocks, one for each half. Eight words of a block: 0, and its first or its second number. */
INLINE words of_their_blocks(const uint32_t *two) {
    int64_t both;
    memcpy(&both, two, 8);
    const __m128i first = _mm_setr_epi16(-1, 0x0100, 0x0100, 0x0302, 0x0100, 0x0302, 0x0100, 0x0302);
    const __m128i second = _mm_or_si128(first, _mm_set1_epi8(4)); /* four bytes further on; -1 stays */
    return _mm256_shuffle_epi8(_mm256_set1_epi64x(both), _mm256_setr_m128i(first, second));
}
INLINE words in_words(const uint8_t *half) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)half)); }
INLINE void join_halves(words firsts, words seconds, words *in_order) {
    in_order[0] = _mm256_permute2x128_si256(firsts, seconds, 0x20), in_order[1] = _mm256_permute2x128_si256(firsts, seconds, 0x31);
}
