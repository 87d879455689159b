/* What a cast to NVFP4 did to every 16 values, from the values and their codes: the statistics of statistics.py.

   It is a pass of its own, since the cast itself never holds what its codes stand for: it reads two and a half bytes an element and
   writes one and a half. Sums are of doubles, which hold the square of every float; eight of them are added at a time, then those eight. */

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

/* Block t, whose values are those at x. */
INLINE void count_block(const fp4_count_job *j, const uint32_t *restrict x, int64_t t) {
    const uint32_t most = bits(j->saturates_above);
    float decode = j->decode[t], factor = 1.0f / decode;
    double there[VALUES], lost[VALUES];
    uint32_t codes[VALUES], underflow = 0, saturated = 0, nonfinite = 0, top = 0, largest = 0, least = 7;
    uint64_t packed;
    factor = factor > 3.40282346638528859812e+38f ? 3.40282346638528859812e+38f : factor;
    memcpy(&packed, j->codes + t * (VALUES / 2), sizeof packed);
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
    j->underflow[t] = (uint8_t)underflow, j->saturated[t] = (uint8_t)saturated, j->nonfinite[t] = (uint8_t)nonfinite;
    j->least_code[t] = (uint8_t)((least + 1) & 7), j->largest_code[t] = (uint8_t)largest;
    j->norm[t] = root_of_sum(there), j->error_norm[t] = root_of_sum(lost), j->amax[t] = value(top);
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
        for (int64_t i = 0; i < width; i += VALUES) count_block(j, row + i, (first + i) / VALUES);
    }
}

void nemo_fp4_count(fp4_count_job *j) { share(work_count4, j, j->threads, j->parallel); }
