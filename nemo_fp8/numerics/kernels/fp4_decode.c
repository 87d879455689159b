/* From NVFP4 back to values: code * (scale * amax * (1 / largest)) in FP32, or code * scale where no amax is given, rounded once to
   BF16 if that is asked for.

   A byte becomes one 32-bit word of two BF16 values, or two FP32 values. The magnitude of a code is the largest of three lines, one
   for each grid: code / 2, code - 2 and 2 code - 8. With AVX-512 or AVX2 a vector holds a table of them, and BF16 is made by hand. */

#include "fp8.h"

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

typedef struct { float scale[BLOCKS], slots[STRIP / 2]; uint32_t row[STRIP] __attribute__((aligned(64))); } scratch4;

/* E4M3 scales as floats: NaN is one code without its sign. */
static void scales_back(const uint8_t *restrict scales, float *restrict to, int64_t n) {
    for (int64_t t = 0; t < n; t++) {
        uint32_t code = scales[t] & 0x7f;
        float normal = value((code << 20) + (120u << 23)), small = (float)(int32_t)code * 0x1p-9f;
        float magnitude = code >> 3 ? normal : small;
        to[t] = value((code == 0x7f ? 0x7fc00000u : bits(magnitude)) | (uint32_t)(scales[t] & 0x80) << 24);
    }
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
/* BF16 on vectors, 2 * LANES columns at a time. Returns how many columns are done. */
static int64_t bf16_groups(const uint8_t *codes, uint16_t *out, int64_t n, const float *scale, int streams) {
    const e2m1_values k = values_of_e2m1();
    int64_t c = 0;
    streams = streams && ((uintptr_t)out & (BLOCK - 1)) == 0;
    for (; c + 2 * LANES <= n; c += 2 * LANES) {
        words bytes = spread_bytes(codes + c / 2);
        reals factor = of_blocks(scale + c / VALUES);
        words even = rounded(V(mul_ps)(look_up(bytes, k), factor)), odd = rounded(V(mul_ps)(look_up(V(srli_epi32)(bytes, 4), k), factor));
        words two = upper_halves(even, odd);
        if (streams) V_BITS(stream)((words *)(out + c), two);
        else V_BITS(storeu)((words *)(out + c), two);
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
        int64_t width = least_of(STRIP, j->cols - at.column), n = width / VALUES, first = at.row * j->cols + at.column;
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
        if (j->target == BF16) done = bf16_groups(j->codes + first / 2, (uint16_t *)out, width, w.scale, streams);
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
