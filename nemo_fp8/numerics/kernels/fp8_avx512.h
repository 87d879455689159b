/* The operations that differ between AVX-512 and AVX2 (fp8_avx2.h): here vectors of 64 bytes. */

#pragma once

#define V(NAME) _mm512_##NAME
#define V_BITS(NAME) _mm512_##NAME##_si512
#define REALS(WORDS) _mm512_castsi512_ps(WORDS)
#define WORDS(REALS) _mm512_castps_si512(REALS)
#define BLOCK 64
enum { LANES = 16 };
typedef __m512 reals;
typedef __m512i words;

/* Rounds y >= 0 to the format, as fp8_rows.h does, with one table for the whole exponent: `step` of an exponent is the float
   whose last place is the format's step at that magnitude and whose low bits hold the code's exponent already, so that

       code = low bits of y + step[exponent of max(y, smallest normal)]

   is one look-up and one addition. */
typedef struct { reals low, high, least; } steps;

INLINE steps steps_of(format f) {
    float step[32];
    uint32_t first = f.least >> 23, mantissa_bits = 23 - f.drop;
    for (uint32_t e = first; e < first + 32; e++) step[e & 31] = value((e + f.drop) << 23 | ((e - first) << mantissa_bits & 0xff));
    return (steps){_mm512_loadu_ps(step), _mm512_loadu_ps(step + 16), _mm512_set1_ps(value(f.least))};
}

INLINE words round_lanes(reals y, steps k, int odd, reals *rounded) {
    (void)odd;
    words exponent = _mm512_srli_epi32(_mm512_max_epi32(WORDS(y), WORDS(k.least)), 23);
    reals step = _mm512_permutex2var_ps(k.low, exponent, k.high), sum = _mm512_add_ps(y, step);
    *rounded = _mm512_sub_ps(sum, step);
    return WORDS(sum);
}

/* The low bytes of 64 words, of which `evens` and `odds` hold every other one of 32, in order and with the signs of x;
   `magnitudes` lack them. */
INLINE words join(const words *evens, const words *odds, words x0, words x1, words *magnitudes) {
#ifdef __AVX512VBMI__ /* shuffles of bytes */
    /* Byte i of a half is byte i / 2 * 4 of the evens or, 64 further on, of the odds; the sign's byte is the upper one of word i. */
    static const uint8_t low[64] = {0, 64, 4, 68, 8, 72, 12, 76, 16, 80, 20, 84, 24, 88, 28, 92, 32, 96, 36, 100, 40, 104, 44, 108, 48, 112,
                                    52, 116, 56, 120, 60, 124, 0, 64, 4, 68, 8, 72, 12, 76, 16, 80, 20, 84, 24, 88, 28, 92, 32, 96, 36,
                                    100, 40, 104, 44, 108, 48, 112, 52, 116, 56, 120, 60, 124};
    static const uint8_t upper[64] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53,
                                      55, 57, 59, 61, 63, 65, 67, 69, 71, 73, 75, 77, 79, 81, 83, 85, 87, 89, 91, 93, 95, 97, 99, 101, 103,
                                      105, 107, 109, 111, 113, 115, 117, 119, 121, 123, 125, 127};
    words order = _mm512_loadu_si512(low), halves[2];
    for (int i = 0; i < 2; i++) halves[i] = _mm512_permutex2var_epi8(evens[i], order, odds[i]);
    *magnitudes = _mm512_mask_blend_epi64(0xf0, halves[0], halves[1]);
    words signs = _mm512_permutex2var_epi8(x0, _mm512_loadu_si512(upper), x1);
    return _mm512_ternarylogic_epi32(*magnitudes, signs, _mm512_set1_epi8(-128), 0xf8); /* first | second & third */
#else
    static const uint16_t order[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                       1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    words two[2]; /* codes in each 32-bit word */
    for (int i = 0; i < 2; i++) two[i] = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, evens[i], _mm512_slli_epi32(odds[i], 8));
    words four = _mm512_mask_blend_epi16(0xaaaaaaaa, two[0], _mm512_slli_epi32(two[1], 16));
    *magnitudes = _mm512_permutexvar_epi16(_mm512_loadu_si512(order), four);
    __mmask64 negative = _mm512_kunpackd(_mm512_movepi16_mask(x1), _mm512_movepi16_mask(x0));
    return _mm512_mask_add_epi8(*magnitudes, negative, *magnitudes, _mm512_set1_epi8(-128));
#endif
}

/* One bit for each byte. */
INLINE uint64_t negative_of(words bytes) { return _mm512_movepi8_mask(bytes); }
INLINE uint64_t numbers_of(words x0, words x1) { /* those that are not zero */
    const words magnitude = _mm512_set1_epi16(0x7fff);
    return _mm512_kunpackd(_mm512_test_epi16_mask(x1, magnitude), _mm512_test_epi16_mask(x0, magnitude));
}
INLINE words add_bits(words bytes, uint64_t bits) { return _mm512_mask_sub_epi8(bytes, bits, bytes, _mm512_set1_epi8(-1)); }

/* The last steps of a sum or a maximum across lanes: from four vectors, and from one. */
INLINE reals fold_sums(const reals *v) {
#define EVEN_QUARTERS(A, B) _mm512_shuffle_f32x4(A, B, 0x88)
#define ODD_QUARTERS(A, B) _mm512_shuffle_f32x4(A, B, 0xdd)
#define ADD_QUARTERS(A, B) _mm512_add_ps(EVEN_QUARTERS(A, B), ODD_QUARTERS(A, B))
    return ADD_QUARTERS(ADD_QUARTERS(v[0], v[1]), ADD_QUARTERS(v[2], v[3]));
}
INLINE __m256i word_sums_of_four(const words *v) { /* of 64 bits, of each vector */
#define ADD_NEIGHBOURS(A, B) _mm512_add_epi64(_mm512_unpacklo_epi64(A, B), _mm512_unpackhi_epi64(A, B))
#define ADD_PAIRS(A, B) _mm512_add_epi64(_mm512_shuffle_i64x2(A, B, 0x88), _mm512_shuffle_i64x2(A, B, 0xdd))
    words halves = ADD_PAIRS(ADD_NEIGHBOURS(v[0], v[1]), ADD_NEIGHBOURS(v[2], v[3]));
    return _mm512_castsi512_si256(ADD_PAIRS(halves, halves));
}
INLINE __m128i fold_tops(words v) {
    __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    return _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* Bytes in the order from which unpacking, which stays within quarters, brings them back; one of two bytes, by the sign of a third;
   16 bytes in every quarter. */
INLINE words to_unpack(words bytes) { return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes); }
INLINE words either(words negative, words yes, words no) { return _mm512_mask_blend_epi8(_mm512_movepi8_mask(negative), no, yes); }
#define V_EVERYWHERE(QUARTER) _mm512_broadcast_i32x4(QUARTER)

/* 32 codes as the upper bytes of 16-bit words, evens in the lower half and odds in the upper one; and from floats back to BF16. */
INLINE words widen_codes(const uint8_t *codes) {
    const __m128i evens = _mm_setr_epi8(-1, 0, -1, 2, -1, 4, -1, 6, -1, 8, -1, 10, -1, 12, -1, 14), one = _mm_set1_epi16(0x0100);
    const words order = _mm512_inserti64x4(_mm512_broadcast_i32x4(evens), _mm256_broadcastsi128_si256(_mm_add_epi8(evens, one)), 1);
    return _mm512_shuffle_epi8(_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)codes)), order);
}
INLINE words zeros_behind(const uint8_t *half) { return _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)half)); }
INLINE __m256 half_sum(reals v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }
INLINE reals in_halves(reals low, reals high) { return _mm512_mask_blend_ps(0xff00, low, high); }
INLINE words upper_halves(words evens, words odds) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(evens, 16), odds);
}
INLINE reals low_halves(words fp16) { return _mm512_cvtph_ps(_mm512_castsi512_si256(fp16)); }
INLINE reals high_halves(words fp16) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(fp16, 1)); }

/* FP4. A vector of words has two columns a word, and so two blocks of 16. */
INLINE reals of_blocks(const float *factor) {
    return _mm512_mask_broadcastss_ps(_mm512_set1_ps(factor[0]), 0xff00, _mm_load_ss(factor + 1));
}
/* Words packed twice, in order again. */
INLINE words twice_packed(words bytes) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
}
enum { TOPS = 16 };
INLINE void tops_of_blocks(const uint16_t *x, float *amax) {
    words v[8];
    UNROLLED
    for (int t = 0; t < 8; t++) v[t] = _mm512_and_si512(_mm512_loadu_si512(x + 32 * t), _mm512_set1_epi16(0x7fff));
#define TOP_HALF(A, B, SIZE) _mm512_max_epu16(_mm512_unpacklo_epi##SIZE(A, B), _mm512_unpackhi_epi##SIZE(A, B))
    UNROLLED
    for (int i = 0; i < 4; i++) v[i] = TOP_HALF(v[2 * i], v[2 * i + 1], 16);
    UNROLLED
    for (int i = 0; i < 2; i++) v[i] = TOP_HALF(v[2 * i], v[2 * i + 1], 32);
    v[0] = TOP_HALF(v[0], v[1], 64);
    __m256i even = _mm512_castsi512_si256(v[0]), odd = _mm512_extracti64x4_epi64(v[0], 1); /* two quarters of a block each */
    __m128i e = _mm_max_epu16(_mm256_castsi256_si128(even), _mm256_extracti128_si256(even, 1));
    __m128i o = _mm_max_epu16(_mm256_castsi256_si128(odd), _mm256_extracti128_si256(odd, 1));
    __m256i tops = _mm256_setr_m128i(_mm_unpacklo_epi16(e, o), _mm_unpackhi_epi16(e, o));
    _mm512_storeu_si512(amax, _mm512_slli_epi32(_mm512_cvtepu16_epi32(tops), 16));
}

/* Numbers of E2M1 codes, one in each word, whose other bits do not matter; and what became 0 and was not, counted in every lane. */
INLINE words bytes_in_words(const uint8_t *bytes) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes)); }
INLINE reals numbers_of_e2m1(void) { return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6); }
INLINE reals number_of_lanes(reals numbers, words codes) { return _mm512_permutexvar_ps(codes, numbers); }
INLINE words count_zeroed(words counted, reals made, words of) {
    __mmask16 lost = _mm512_mask_test_epi32_mask(_mm512_testn_epi32_mask(WORDS(made), WORDS(made)), of, of);
    return _mm512_mask_sub_epi32(counted, lost, counted, _mm512_set1_epi32(-1));
}

/* Decoding, 64 columns and so four blocks, one for each quarter. Eight words of a block: 0, and its first or its second number. */
INLINE words of_their_blocks(const uint32_t *four) {
    const __m128i first = _mm_setr_epi16(-1, 0x0100, 0x0100, 0x0302, 0x0100, 0x0302, 0x0100, 0x0302);
    const words further = _mm512_setr_epi64(0, 0, 0x0404040404040404, 0x0404040404040404, 0x0808080808080808, 0x0808080808080808,
                                            0x0c0c0c0c0c0c0c0c, 0x0c0c0c0c0c0c0c0c); /* -1 stays */
    return _mm512_shuffle_epi8(V_EVERYWHERE(_mm_loadu_si128((const __m128i *)four)), _mm512_or_si512(V_EVERYWHERE(first), further));
}
INLINE words in_words(const uint8_t *half) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)half)); }
INLINE void join_halves(words firsts, words seconds, words *in_order) {
    in_order[0] = _mm512_permutex2var_epi64(firsts, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), seconds);
    in_order[1] = _mm512_permutex2var_epi64(firsts, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), seconds);
}
