/* From NVFP4 back to values: code * (scale * amax * (1 / largest)) in FP32, or code * scale where no amax is given, rounded once to
   BF16 if that is asked for.

   A byte becomes one 32-bit word of two BF16 values, or two FP32 values. The magnitude of a code is the largest of three lines, one
   for each grid: code / 2, code - 2 and 2 code - 8. With AVX-512 or AVX2 BF16 comes from tables, one for each block. */

#include "fp8_tops.h"

enum { VALUES = 16, BLOCKS = STRIP / VALUES };

typedef struct fp4_decode_job {
    const uint8_t *codes, *scales; /* rows x cols / 2, rows x cols / 16 */
    const float *amax;             /* one, or one for each row (`amax_stride` is 0 or 1); NULL for none */
    void *out;                     /* BF16 or FP32, rows x cols */
    parallel_function *parallel;
    int64_t rows, cols, amax_stride;
    float reciprocal;
    int32_t target, threads;
    _Atomic int64_t next;
} fp4_decode_job;

typedef struct { float scale[BLOCKS], slots[STRIP / 2]; uint32_t fours[BLOCKS], row[STRIP] __attribute__((aligned(64))); } scratch4;

static void scales_back(const uint8_t *restrict scales, float *restrict to, int64_t n) {
    for (int64_t t = 0; t < n; t++) to[t] = value_of_e4m3(scales[t]);
}

INLINE float value_of(uint32_t code, float scale) {
    int32_t c = (int32_t)(code & 7), twice = c, ones = 2 * c - 4, twos = 4 * c - 16;
    twice = ones > twice ? ones : twice;
    twice = twos > twice ? twos : twice;
    float v = (float)twice * 0.5f * scale;
    return value(bits(v) ^ (code & 8) << 28);
}

static void bf16_row(const uint8_t *restrict codes, uint32_t *restrict out, int64_t n, const float *restrict slots) {
    for (int64_t i = 0; i < n / 2; i++) {
        uint32_t both = codes[i];
        out[i] = rounded_to_bf16(value_of(both, slots[i])) | rounded_to_bf16(value_of(both >> 4, slots[i])) << 16;
    }
}

#ifdef BLOCK
/* BF16 on vectors, BLOCK columns at a time, by a table for each block. Its magnitudes are 0, and 4 and 6 times its scale, rounded, of
   which the others lie one to three binades below: a number of BF16 keeps its mantissa where the exponent moves. These eight words
   are 16 bytes, which is what a shuffle looks up: once for the lower bytes, and once for the upper ones with the signs.

   Beneath a scale of 0 all are 0, since the subtraction saturates. `fits_table` says which scales keep to BF16's normal numbers. */
INLINE int fits_table(float scale) { return bits(scale) == 0 || bits(scale) - bits(0x1p-120f) <= bits(0x1p120f) - bits(0x1p-120f); }

/* Two numbers for each block, the second in the upper half; returns whether all scales fit. */
static int fours_and_sixes(const float *restrict scale, uint32_t *restrict to, int64_t n) {
    int fit = 1;
    for (int64_t t = 0; t < n; t++) {
        to[t] = rounded_to_bf16(4 * scale[t]) | rounded_to_bf16(6 * scale[t]) << 16;
        fit &= fits_table(scale[t]);
    }
    return fit;
}

/* Returns how many columns are done. */
static int64_t bf16_by_tables(const uint8_t *codes, uint16_t *out, int64_t n, const uint32_t *fours, int streams) {
    const words less = V_EVERYWHERE(_mm_setr_epi16(0, 0x180, 0x100, 0x100, 0x80, 0x80, 0, 0)), nibbles = V(set1_epi16)(0x0f0f);
    const words lows = V_EVERYWHERE(_mm_set1_epi64x(0x0e0c0a0806040200)), highs = V_EVERYWHERE(_mm_set1_epi64x(0x0f0d0b0907050301));
    const words signs = V_EVERYWHERE(_mm_set_epi64x((int64_t)0x8080808080808080, 0));
    int64_t c = 0;
    streams = streams && ((uintptr_t)out & (BLOCK - 1)) == 0;
    for (; c + BLOCK <= n; c += BLOCK) {
        words magnitudes = V(subs_epu16)(of_their_blocks(fours + c / VALUES), less);
        words low_bytes = V(shuffle_epi8)(magnitudes, lows);
        words high_bytes = V_BITS(or)(V(shuffle_epi8)(magnitudes, highs), signs);
        words both = in_words(codes + c / 2), each = V_BITS(and)(V_BITS(or)(both, V(slli_epi16)(both, 4)), nibbles);
        words low = V(shuffle_epi8)(low_bytes, each), high = V(shuffle_epi8)(high_bytes, each), *to = (words *)(out + c), in_order[2];
        join_halves(V(unpacklo_epi8)(low, high), V(unpackhi_epi8)(low, high), in_order);
        if (streams) V_BITS(stream)(to, in_order[0]), V_BITS(stream)(to + 1, in_order[1]);
        else V_BITS(storeu)(to, in_order[0]), V_BITS(storeu)(to + 1, in_order[1]);
    }
    return c;
}
#endif

static void fp32_row(const uint8_t *restrict codes, float *restrict out, int64_t n, const float *restrict slots) {
    for (int64_t i = 0; i < n / 2; i++) {
        out[2 * i] = value_of(codes[i], slots[i]);
        out[2 * i + 1] = value_of((uint32_t)codes[i] >> 4, slots[i]);
    }
}

static void work_back4(void *argument) {
    fp4_decode_job *j = argument;
    scratch4 w;
    int64_t size = bytes_of(j->target);
    int streams = large(j->rows * j->cols * size);
    way through = way_through(plan_for(j->rows, j->cols, 1, j->threads), &j->next);
    for (spot at = go_on(&through), next; at.row >= 0; at = next) {
        next = go_on(&through);
        int64_t width = at.width, n = width / VALUES, first = at.row * j->cols + at.column;
        if (next.row >= 0) {
            int64_t after = next.row * j->cols + next.column;
            ask_for(j->codes + after / 2, width / 2), ask_for(j->scales + after / VALUES, n);
        }
        scales_back(j->scales + first / VALUES, w.scale, n);
        if (j->amax) {
            float amax = j->amax[at.row * j->amax_stride], reciprocal = j->reciprocal;
            for (int64_t t = 0; t < n; t++) {
                float s = w.scale[t] * amax * reciprocal;
                w.scale[t] = value(bits(s) << 1 > INFINITE << 1 ? 0x7fc00000u : bits(s)); /* one NaN, which rounding leaves one */
            }
        }
        uint8_t *out = (uint8_t *)j->out + first * size;
        int64_t done = 0;
#ifdef BLOCK
        if (j->target == BF16 && fours_and_sixes(w.scale, w.fours, n))
            done = bf16_by_tables(j->codes + first / 2, (uint16_t *)out, width, w.fours, streams);
#endif
        if (done == width) continue;
        for (int64_t t = done / VALUES; t < n; t++) for (int64_t i = 0; i < VALUES / 2; i++) w.slots[t * (VALUES / 2) + i] = w.scale[t];
        void *row = streams ? (void *)w.row : (void *)(out + done * size);
        if (ROUNDS_TO_BF16 && j->target == BF16) {
            fp32_row(j->codes + (first + done) / 2, (float *)w.row, width - done, w.slots + done / 2);
            round_row_to_bf16((const float *)w.row, (uint16_t *)(out + done * size), width - done);
            continue;
        }
        if (j->target == FP32) fp32_row(j->codes + (first + done) / 2, row, width - done, w.slots + done / 2);
        else bf16_row(j->codes + (first + done) / 2, row, width - done, w.slots + done / 2);
        if (streams) stream(out + done * size, w.row, (width - done) * size);
    }
    streamed();
}

void nemo_fp4_decode(fp4_decode_job *j) {
    expect(j->out, j->rows * j->cols * bytes_of(j->target));
    share(work_back4, j, j->threads, j->parallel);
}
