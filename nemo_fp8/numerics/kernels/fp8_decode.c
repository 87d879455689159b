/* From FP8 codes back to values: code * scale_inv in FP32, rounded once to BF16 if that is asked for.

   Exponent and mantissa are shifted to where FP32 has them and the bias is corrected by an addition; subnormals, which
   have no hidden bit, are converted as integers. Two codes make one 32-bit word of two BF16 values (PAIR). Rows whose
   codes contain no infinities and NaNs take the shorter loop, or vectors if the processor has AVX-512 or AVX2 (wide tiles: fp8_tables.h). */

#include "fp8.h"

typedef struct decode_job {
    const uint8_t *codes;
    const void *scale_inv; /* floats or E8M0 bytes, one a tile */
    void *out;             /* BF16, PAIRs of them, or FP32 */
    parallel_function *parallel;
    int64_t rows, cols, tile_rows, tile_cols;
    int32_t target, e8m0, mantissa_bits, threads;
    _Atomic int64_t next;
} decode_job;

/* Infinities and NaNs are moved from the format's last binade into FP32's, where they mean the same; `tame` says that
   there are none. */
INLINE uint32_t decode(uint32_t code, float scale, uint32_t mantissa_bits, uint32_t bias, uint32_t special, int tame) {
    uint32_t magnitude = code & 0x7f, drop = 23 - mantissa_bits, last = 0x7fu >> mantissa_bits;
    uint32_t normal = (magnitude << drop) + (tame || magnitude < special ? (127 - bias) << 23 : (255 - last) << 23);
    float subnormal = (float)(int32_t)magnitude * value((128 - bias - mantissa_bits) << 23);
    return bits(scale * (magnitude >> mantissa_bits ? value(normal) : subnormal)) | (code & 0x80) << 24;
}

/* The upper half of the result is BF16. */
INLINE uint32_t round_to_bf16(uint32_t u, int tame) {
    uint32_t rounded = u + 0x7fff + (u >> 16 & 1);
    return !tame && (u & 0x7fffffff) > INFINITE ? u | 0x400000 : rounded;
}

typedef uint32_t __attribute__((aligned(2), may_alias)) word_of_two;
typedef uint16_t __attribute__((aligned(1), may_alias)) two_codes;

INLINE void decode_row(const uint8_t *restrict codes, void *restrict out, int64_t n, const float *restrict scale, int target,
                       uint32_t mantissa_bits, uint32_t bias, uint32_t special, int tame) {
    int64_t i = 0;
    if (target == PAIR)
        for (; i < n / 2; i++) {
            uint32_t both = ((const two_codes *)codes)[i];
            uint32_t a = round_to_bf16(decode(both & 0xff, scale[i], mantissa_bits, bias, special, tame), tame);
            uint32_t b = round_to_bf16(decode(both >> 8, scale[i], mantissa_bits, bias, special, tame), tame);
            word_of_two *to = (word_of_two *)out;
            to[i] = a >> 16 | (b & 0xffff0000);
        }
    for (int64_t k = 2 * i; k < n; k++) {
        uint32_t u = decode(codes[k], scale[target == PAIR ? i : k], mantissa_bits, bias, special, tame);
        if (target == FP32) ((uint32_t *)out)[k] = u;
        else ((uint16_t *)out)[k] = (uint16_t)(round_to_bf16(u, tame) >> 16);
    }
}

typedef void row_back_function(const uint8_t *, void *, int64_t, const float *);
#define BACK(NAME, TARGET, TAME, ...) \
    static void NAME(const uint8_t *codes, void *out, int64_t n, const float *scale) { \
        decode_row(codes, out, n, scale, TARGET, __VA_ARGS__, TAME); \
    }
#define BACKS(TARGET) \
    BACK(e4m3_to_##TARGET##_wild, TARGET, 0, 3, 7, 0x7f) BACK(e4m3_to_##TARGET##_tame, TARGET, 1, 3, 7, 0x7f) \
    BACK(e5m2_to_##TARGET##_wild, TARGET, 0, 2, 15, 0x7c) BACK(e5m2_to_##TARGET##_tame, TARGET, 1, 2, 15, 0x7c)
#define BACK_NAMES(TARGET) \
    [TARGET] = {{e5m2_to_##TARGET##_wild, e5m2_to_##TARGET##_tame}, {e4m3_to_##TARGET##_wild, e4m3_to_##TARGET##_tame}}
BACKS(BF16) BACKS(FP32) BACKS(PAIR)
static row_back_function *const DECODE[4][2][2] = {BACK_NAMES(BF16), BACK_NAMES(FP32), BACK_NAMES(PAIR)};

static int all_numbers(const uint8_t *codes, int64_t n, uint8_t special) {
    uint8_t top = 0;
    for (int64_t i = 0; i < n; i++) { uint8_t code = codes[i] & 0x7f; top = code > top ? code : top; }
    return top < special;
}

#ifdef BLOCK
/* Tame codes to BF16 on vectors. An E5M2 code is the upper half of an FP16 number, and an E4M3 code, one bit further down, that of one
   256 times smaller: the processor converts both, subnormals included, and `scale` contains the 256. There is one scale for each tile
   of 2**shift >= 32 columns, or one for each column, evens of a group first. */
enum { GROUP = 2 * LANES };

INLINE words decode_group(const uint8_t *codes, const float *scale, int columns, int e4m3) {
    words fp16 = widen_codes(codes);
    if (e4m3) fp16 = V_BITS(and)(V(srai_epi16)(fp16, 1), V(set1_epi16)((int16_t)0xbf80));
    reals even = columns ? V(loadu_ps)(scale) : V(set1_ps)(*scale), odd = columns ? V(loadu_ps)(scale + LANES) : even;
    return upper_halves(rounded(V(mul_ps)(low_halves(fp16), even)), rounded(V(mul_ps)(high_halves(fp16), odd)));
}

INLINE void decode_bf16(const uint8_t *codes, uint16_t *out, int64_t n, const float *scale, int shift, int streams, int columns, int e4m3) {
    int64_t c = 0;
    streams = streams && ((uintptr_t)out & 63) == 0;
    for (; c + GROUP <= n; c += GROUP) {
        words two = decode_group(codes + c, scale + (columns ? c : c >> shift), columns, e4m3);
        if (streams) V_BITS(stream)((words *)(out + c), two);
        else V_BITS(storeu)((words *)(out + c), two);
    }
    if (c == n) return;
    uint8_t padded[GROUP] = {0};
    memcpy(padded, codes + c, (size_t)(n - c));
    words two = decode_group(padded, scale + (columns ? c : c >> shift), columns, e4m3);
    memcpy(out + c, &two, (size_t)(n - c) * 2);
}

typedef void bf16_back_function(const uint8_t *, uint16_t *, int64_t, const float *, int, int);
#define BF16_BACK(NAME, COLUMNS, E4M3) \
    static void NAME(const uint8_t *codes, uint16_t *out, int64_t n, const float *scale, int shift, int streams) { \
        decode_bf16(codes, out, n, scale, shift, streams, COLUMNS, E4M3); \
    }
BF16_BACK(e5m2_wide_back, 0, 0) BF16_BACK(e4m3_wide_back, 0, 1) BF16_BACK(e5m2_columns_back, 1, 0) BF16_BACK(e4m3_columns_back, 1, 1)
static bf16_back_function *const DECODE_BF16[2][2] = {{e5m2_wide_back, e4m3_wide_back}, {e5m2_columns_back, e4m3_columns_back}};

#include "fp8_tables.h"

typedef struct { int there; tables of[STRIP / LEAST_FOR_TABLES]; } tables_of_strip;

/* Makes the tables of a strip's tiles, if all of them can have some. */
static void make_tables_of_strip(const float *scale, int64_t n, int e4m3, tables_of_strip *to) {
    const first_codes f = e4m3 ? first_codes_of(1) : first_codes_of(0);
    to->there = 1;
    for (int64_t t = 0; t < n; t++) to->there &= fits_tables(scale[t]);
    for (int64_t t = 0; t < n && to->there; t++) make_tables(scale[t], &f, &to->of[t]);
}

static void decode_by_tables(const uint8_t *codes, uint16_t *out, int64_t n, const tables *of, int64_t wide, int e4m3, int streams) {
    streams = streams && ((uintptr_t)out & 63) == 0;
    for (int64_t c = 0; c < n; c += wide, of++) look_up_tile(codes + c, out + c, least_of(wide, n - c), of, e4m3 ? 1 : 2, streams);
}

/* Scales for `decode_group`; returns whether all are finite. */
static int scales_of_lanes(const float *restrict scale, float *restrict to, int64_t n, float factor, int columns) {
    uint32_t top = 0;
    for (int64_t c = 0; c < n; c++) {
        float s = scale[c] * factor;
        uint32_t u = bits(s) & INFINITE;
        to[columns ? c / GROUP * GROUP + c % 2 * LANES + c % GROUP / 2 : c] = s, top = u > top ? u : top;
    }
    return top < INFINITE;
}
#endif

typedef struct {
    float scale[STRIP], lanes[STRIP], slots[STRIP];
    uint32_t row[STRIP] __attribute__((aligned(64)));
#ifdef BLOCK
    tables_of_strip tables;
#endif
} scratch_back;

static void strip_back(const decode_job *j, scratch_back *w, spot at, int64_t grid) {
    int64_t size = bytes_of(j->target);
    int streams = large(j->rows * j->cols * size), spread = 0, e4m3 = j->mantissa_bits == 3;
    int64_t row = at.row, c0 = at.column, width = at.width, n = (width + j->tile_cols - 1) / j->tile_cols;
    int by_floats = ROUNDS_TO_BF16 && j->target != FP32; /* a row of floats, and then of BF16 */
    int64_t wide = j->tile_cols / (j->target == PAIR && !by_floats ? 2 : 1);
    uint32_t wild_scale = 0;
    for (int64_t t = 0, first = row * grid + c0 / j->tile_cols; t < n; t++) {
        uint32_t e = j->e8m0 ? ((const uint8_t *)j->scale_inv)[first + t] : 0;
        float s = j->e8m0 ? value(e == 0 ? 0x400000 : e == 255 ? 0x7fc00000 : e << 23) : ((const float *)j->scale_inv)[first + t];
        wild_scale |= (bits(s) & INFINITE) == INFINITE;
        w->scale[t] = s;
    }
#ifdef BLOCK
    int columns = j->tile_cols == 1, shift = 63 - __builtin_clzll((uint64_t)j->tile_cols);
    int vectors = j->target != FP32 && (columns || j->tile_cols >= 32) && scales_of_lanes(w->scale, w->lanes, n, e4m3 ? 256 : 1, columns);
    w->tables.there = 0;
    if (vectors && j->tile_cols >= LEAST_FOR_TABLES) make_tables_of_strip(w->lanes, n, e4m3, &w->tables);
#endif
    for (int64_t r = row * j->tile_rows; r < least_of((row + 1) * j->tile_rows, j->rows); r++) {
        const uint8_t *codes = j->codes + r * j->cols + c0;
        int tame = !wild_scale && all_numbers(codes, width, e4m3 ? 0x7f : 0x7c);
        ask_for(codes + j->cols, width);
        char *out = (char *)j->out + (r * j->cols + c0) * size;
#ifdef BLOCK
        if (tame && w->tables.there) {
            decode_by_tables(codes, (uint16_t *)out, width, w->tables.of, j->tile_cols, e4m3, streams);
            continue;
        }
        if (tame && vectors) {
            DECODE_BF16[columns][e4m3](codes, (uint16_t *)out, width, w->lanes, shift, streams);
            continue;
        }
#endif
        for (int64_t t = 0; t < n && !spread; t++) for (int64_t i = 0; i < wide; i++) w->slots[t * wide + i] = w->scale[t];
        spread = 1;
        if (by_floats) {
            DECODE[FP32][e4m3][tame](codes, w->row, width, w->slots);
            round_row_to_bf16((const float *)w->row, (uint16_t *)out, width);
            continue;
        }
        DECODE[j->target][e4m3][tame](codes, streams ? (char *)w->row : out, width, w->slots);
        if (streams) stream(out, w->row, width * size);
    }
}

static void work_back(void *argument) {
    decode_job *j = argument;
    scratch_back w;
    int64_t grid = (j->cols + j->tile_cols - 1) / j->tile_cols;
    way through = way_through(plan_for(j->rows, j->cols, j->tile_rows, j->threads), &j->next);
    for (spot at = go_on(&through); at.row >= 0; at = go_on(&through)) strip_back(j, &w, at, grid);
    streamed();
}

void nemo_fp8_decode(decode_job *j) {
    expect(j->out, j->rows * j->cols * bytes_of(j->target));
    share(work_back, j, j->threads, j->parallel);
}
