/* What a cast to NVFP4 did, from the values and their codes: to every 16 values, the statistics of statistics.py, or summed up.

   It is a pass of its own, since the cast itself never holds what its codes stand for: it reads two and a half bytes an element. What
   is kept for every 16 values is one and a half more. Sums are of doubles, which hold the square of every float; eight of them are
   added at a time, then those eight.

   Whoever wants only sums (a push) has them from floats, of pairs of BF16 values, in units of the scale beneath: x / beneath is at most
   6 * 448 where the amax is the matrix's own, so that squares stay in range. A run with a value far beyond that, or with a scale of 0,
   is summed up from what is counted for every 16. */

#include <stdlib.h>

#include "fp8_tops.h"

#define SIMD(...) _Pragma(#__VA_ARGS__)
#define VECTORIZED(...) SIMD(omp simd __VA_ARGS__)

enum { VALUES = 16, LANES_OF_SUMS = 8 };

typedef struct fp4_count_job {
    const void *x;         /* rows x cols, in one piece */
    const uint8_t *codes;  /* rows x cols / 2 */
    const float *decode;   /* rows x cols / 16: what the codes of a block are multiplied with */
    uint8_t *underflow, *saturated, *nonfinite, *least_code, *largest_code; /* rows x cols / 16, as are those that follow */
    double *norm, *error_norm; /* roots of sums of squares: of 16 values near FP32's largest they are above it */
    float *amax;
    parallel_function *parallel;
    int64_t rows, cols;
    int32_t source, threads;
    float saturates_above;
    _Atomic int64_t next;
} fp4_count_job;

INLINE double root_of_sum(const double *restrict squares) {
    double sums[LANES_OF_SUMS];
    for (int i = 0; i < LANES_OF_SUMS; i++) sums[i] = squares[i] + squares[i + LANES_OF_SUMS];
    for (int half = LANES_OF_SUMS / 2; half; half /= 2) for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sqrt(sums[0]);
}

/* What was done to 16 values; `norm` and `error_norm` are roots of sums of squares. */
typedef struct { double norm, error_norm; float amax; uint32_t underflow, saturated, nonfinite, least_code, largest_code; } block;

/* What codes are made by: the reciprocal of what they are multiplied with, or the largest float. */
INLINE float factor_of(float decode) {
    float factor = 1.0f / decode;
    return factor > 3.40282346638528859812e+38f ? 3.40282346638528859812e+38f : factor;
}

INLINE block count_block(const uint32_t *restrict x, const uint8_t *from, float decode, uint32_t most) {
    float factor = factor_of(decode);
    double there[VALUES], lost[VALUES];
    uint32_t codes[VALUES], underflow = 0, saturated = 0, nonfinite = 0, top = 0, largest = 0, least = 7;
    uint64_t packed;
    memcpy(&packed, from, sizeof packed);
    VECTORIZED()
    for (int i = 0; i < VALUES; i++) codes[i] = (uint32_t)(packed >> 4 * i) & 15;
    VECTORIZED(reduction(+ : underflow, saturated, nonfinite) reduction(max : top, largest) reduction(min : least))
    for (int i = 0; i < VALUES; i++) {
        uint32_t u = x[i], size = u & 0x7fffffff, code = codes[i] & 7, finite = size < INFINITE;
        float v = value(finite ? u : 0), off = v - value(bits(magnitude_of_e2m1(code)) | (codes[i] & 8) << 28) * decode;
        uint32_t scaled = bits(value(size) * factor), below = (code - 1) & 7; /* of code 0 it is 7 */
        off = finite ? off : 0;
        there[i] = (double)v * v, lost[i] = (double)off * off;
        nonfinite += !finite;
        underflow += (code == 0) & finite & (size != 0);
        saturated += (scaled > most) & (scaled <= INFINITE);
        uint32_t number = size <= INFINITE ? size : 0;
        top = number > top ? number : top;
        largest = code > largest ? code : largest;
        least = below < least ? below : least;
    }
    return (block){root_of_sum(there), root_of_sum(lost), value(top), underflow, saturated, nonfinite, (least + 1) & 7, largest};
}

INLINE void store_block(const fp4_count_job *j, block b, int64_t t) {
    j->underflow[t] = (uint8_t)b.underflow, j->saturated[t] = (uint8_t)b.saturated, j->nonfinite[t] = (uint8_t)b.nonfinite;
    j->least_code[t] = (uint8_t)b.least_code, j->largest_code[t] = (uint8_t)b.largest_code;
    j->norm[t] = b.norm, j->error_norm[t] = b.error_norm, j->amax[t] = b.amax;
}

static void widen_row(const void *x, uint32_t *restrict to, int64_t n, int source) {
    if (source == BF16) for (int64_t i = 0; i < n; i++) to[i] = widen(x, i, BF16);
    else if (source == FP32) for (int64_t i = 0; i < n; i++) to[i] = widen(x, i, FP32);
    else for (int64_t i = 0; i < n; i++) to[i] = widen(x, i, FP16);
}

static void work_count4(void *argument) {
    fp4_count_job *j = argument;
    uint32_t row[STRIP];
    way through = way_through(plan_for(j->rows, j->cols, 1, j->threads), &j->next);
    for (spot at = go_on(&through), next; at.row >= 0; at = next) {
        next = go_on(&through);
        int64_t first = at.row * j->cols + at.column, width = at.width;
        widen_row((const char *)j->x + first * bytes_of(j->source), row, width, j->source);
        for (int64_t i = 0; i < width; i += VALUES) {
            int64_t t = (first + i) / VALUES;
            store_block(j, count_block(row + i, j->codes + t * (VALUES / 2), j->decode[t], bits(j->saturates_above)), t);
        }
    }
}

void nemo_fp4_count(fp4_count_job *j) { share(work_count4, j, j->threads, j->parallel); }

/* ------------------------------------------------------------------------------------------------------------- sums */

enum { RUN = 1024, PAIRS = RUN / 2, BLOCKS = RUN / VALUES, UNIT4 = 1 << 17 /* values that a thread takes at a time */ };

typedef struct fp4_total_job {
    const void *x;                  /* parts x rows x cols; all three lie row by row, at the strides below */
    const uint8_t *codes, *scales;
    const float *beneath;           /* of each part: its codes are multiplied with scale * beneath */
    total *totals;                  /* of each part */
    parallel_function *parallel;
    int64_t parts, rows, cols, x_part, x_row, codes_part, codes_row, scales_part, scales_row; /* strides of x are elements */
    int32_t source, threads;
    float saturates_above;
    _Atomic int64_t next;
    total *of_rows;                 /* made here */
} fp4_total_job;

typedef struct { float signal, noise; uint32_t underflow, saturated, top, above; } sums4;

/* A run of n BF16 values, by pairs: the byte of codes, the scale and the factor of each pair are all of one width, so that vectors of
   them take each other's place. `above` is the largest scaled value. */
static sums4 sums_of_pairs(const char *restrict x, const uint8_t *restrict codes, int64_t n, const float *restrict scales,
                           const float *restrict factors, uint32_t most) {
    uint32_t bytes[PAIRS], underflow = 0, saturated = 0, top = 0, above = 0;
    float scale[PAIRS], factor[PAIRS], signal = 0, noise = 0;
    for (int64_t t = 0; t < n / VALUES; t++)
        for (int64_t i = t * (VALUES / 2); i < (t + 1) * (VALUES / 2); i++) scale[i] = scales[t], factor[i] = factors[t];
    for (int64_t i = 0; i < n / 2; i++) bytes[i] = codes[i];
    VECTORIZED(reduction(+ : signal, noise, underflow, saturated) reduction(max : top, above))
    for (int64_t i = 0; i < n / 2; i++) {
        uint32_t both;
        memcpy(&both, x + 4 * i, sizeof both);
        uint32_t a = both << 16 & 0x7fffffff, b = both & 0x7fff0000, code_a = bytes[i] & 7, code_b = bytes[i] >> 4 & 7;
        float y = value(a) * factor[i], z = value(b) * factor[i], s = scale[i];
        float there_y = y * s, there_z = z * s, lost_y = (y - magnitude_of_e2m1(code_a)) * s, lost_z = (z - magnitude_of_e2m1(code_b)) * s;
        signal += there_y * there_y + there_z * there_z, noise += lost_y * lost_y + lost_z * lost_z;
        underflow += (uint32_t)((code_a == 0) & (a != 0)) + (uint32_t)((code_b == 0) & (b != 0));
        saturated += (uint32_t)(bits(y) > most) + (uint32_t)(bits(z) > most);
        uint32_t larger = a > b ? a : b, higher = bits(y) > bits(z) ? bits(y) : bits(z);
        top = larger > top ? larger : top, above = higher > above ? higher : above;
    }
    return (sums4){signal, noise, underflow, saturated, top, above};
}

#ifdef BLOCK
enum { TWICE = 2 * LANES /* values whose pairs fill a vector */ };

/* The same on vectors, of n values; n is a multiple of TWICE. It does not count what saturates: `above` says whether anything does. */
static sums4 sums_of_vectors(const uint16_t *x, const uint8_t *codes, int64_t n, const float *scale, const float *factor) {
    const words upper = V(set1_epi32)(0x7fff0000);
    const reals numbers = numbers_of_e2m1();
    reals signal = V(setzero_ps)(), noise = signal;
    words underflow = V_BITS(setzero)(), top = underflow, above = underflow;
    for (int64_t c = 0; c < n; c += TWICE) {
        words both = V_BITS(loadu)((const words *)(x + c)), two = bytes_in_words(codes + c / 2);
        words pair[2] = {V_BITS(and)(V(slli_epi32)(both, 16), upper), V_BITS(and)(both, upper)}, code[2] = {two, V(srli_epi32)(two, 4)};
        reals f = of_blocks(factor + c / VALUES), s = of_blocks(scale + c / VALUES), there = V(setzero_ps)(), lost = there;
        UNROLLED
        for (int i = 0; i < 2; i++) {
            reals y = V(mul_ps)(REALS(pair[i]), f), made = number_of_lanes(numbers, code[i]), off = V(sub_ps)(y, made);
            there = V(fmadd_ps)(y, y, there), lost = V(fmadd_ps)(off, off, lost);
            underflow = count_zeroed(underflow, made, pair[i]);
            top = V(max_epu32)(top, pair[i]), above = V(max_epu32)(above, WORDS(y));
        }
        s = V(mul_ps)(s, s);
        signal = V(fmadd_ps)(there, s, signal), noise = V(fmadd_ps)(lost, s, noise);
    }
    float signals[LANES], noises[LANES];
    uint32_t counts[LANES], tops[LANES], highs[LANES];
    V(storeu_ps)(signals, signal), V(storeu_ps)(noises, noise);
    V_BITS(storeu)((words *)counts, underflow), V_BITS(storeu)((words *)tops, top), V_BITS(storeu)((words *)highs, above);
    sums4 sum = {0};
    for (int i = 0; i < LANES; i++) {
        sum.signal += signals[i], sum.noise += noises[i], sum.underflow += counts[i];
        sum.top = tops[i] > sum.top ? tops[i] : sum.top, sum.above = highs[i] > sum.above ? highs[i] : sum.above;
    }
    return sum;
}
#endif

static void total_blocks(const void *x, const uint8_t *codes, int64_t n, const float *scale, float beneath, int source, uint32_t most,
                         total *to) {
    uint32_t row[RUN];
    widen_row(x, row, n, source);
    for (int64_t t = 0; t < n / VALUES; t++) {
        block b = count_block(row + t * VALUES, codes + t * (VALUES / 2), scale[t] * beneath, most);
        total one = {b.norm * b.norm, b.error_norm * b.error_norm, b.saturated, b.underflow, b.nonfinite, b.amax};
        add_total(to, &one);
    }
}

static void total_row(const fp4_total_job *j, int64_t part, int64_t row) {
    const char *x = (const char *)j->x + (part * j->x_part + row * j->x_row) * bytes_of(j->source);
    const uint8_t *codes = j->codes + part * j->codes_part + row * j->codes_row;
    const uint8_t *scales = j->scales + part * j->scales_part + row * j->scales_row;
    uint32_t most = bits(j->saturates_above);
    float beneath = j->beneath[part], scale[BLOCKS], factor[BLOCKS];
    total sum = {0};
    for (int64_t at = 0, n; at < j->cols; at += n) {
        n = least_of(RUN, j->cols - at);
        int tame = j->source == BF16 && beneath >= 0x1p-100f && beneath <= 0x1p100f;
#ifdef BLOCK
        if (n > TWICE) n -= n % TWICE; /* the rest is a run of its own */
#endif
        for (int64_t t = 0; t < n / VALUES; t++) scale[t] = value_of_e4m3(scales[at / VALUES + t]);
        for (int64_t t = 0; t < n / VALUES; t++) factor[t] = factor_of(scale[t] * beneath), tame &= scale[t] > 0;
        if (tame) {
            sums4 s = {.above = INFINITE};
#ifdef BLOCK
            if (n % TWICE == 0) s = sums_of_vectors((const uint16_t *)(x + at * 2), codes + at / 2, n, scale, factor);
#endif
            if (s.above > most) s = sums_of_pairs(x + at * 2, codes + at / 2, n, scale, factor, most);
            if (s.above <= bits(0x1p20f)) {
                double unit = (double)beneath * beneath;
                total one = {s.signal * unit, s.noise * unit, s.saturated, s.underflow, 0, value(s.top)};
                add_total(&sum, &one);
                continue;
            }
        }
        total_blocks(x + at * bytes_of(j->source), codes + at / 2, n, scale, beneath, j->source, most, &sum);
    }
    j->of_rows[part * j->rows + row] = sum;
}

static void work_total4(void *argument) {
    fp4_total_job *j = argument;
    int64_t rows = j->parts * j->rows, unit = UNIT4 / j->cols + 1;
    for (int64_t row; (row = atomic_fetch_add(&j->next, unit)) < rows;)
        for (int64_t end = least_of(row + unit, rows); row < end; row++) total_row(j, row / j->rows, row % j->rows);
}

/* Adds rows up in their order, so that the same values have the same sums whatever thread had which. Returns 0 without memory. */
int nemo_fp4_total(fp4_total_job *j) {
    if (!(j->of_rows = malloc((size_t)(j->parts * j->rows) * sizeof(total)))) return 0;
    share(work_total4, j, j->threads, j->parallel);
    memset(j->totals, 0, (size_t)j->parts * sizeof(total));
    for (int64_t row = 0; row < j->parts * j->rows; row++) add_total(j->totals + row / j->rows, j->of_rows + row);
    free(j->of_rows);
    return 1;
}
