/* Runs one job of the kernels for a test that cannot load them, since they are for another processor.

   From stdin: how many pointers the job begins with, its size, the size of the memory; the job; the memory. A pointer is an offset
   into that memory, or 0. To stdout: the job and the memory, after the job. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void nemo_fp8_quantize(void *);
void nemo_fp8_decode(void *);
void nemo_fp8_sums(void *);
void nemo_fp8_turn(void *);
void nemo_fp4_quantize(void *);
void nemo_fp4_transformed_top(void *);
void nemo_fp4_decode(void *);
void nemo_fp4_total(void *);

static const struct { const char *name; void (*run)(void *); } FUNCTIONS[] = {
    {"nemo_fp8_quantize", nemo_fp8_quantize},
    {"nemo_fp8_decode", nemo_fp8_decode},
    {"nemo_fp8_sums", nemo_fp8_sums},
    {"nemo_fp8_turn", nemo_fp8_turn},
    {"nemo_fp4_quantize", nemo_fp4_quantize},
    {"nemo_fp4_transformed_top", nemo_fp4_transformed_top},
    {"nemo_fp4_decode", nemo_fp4_decode},
    {"nemo_fp4_total", nemo_fp4_total},
};

static void *read_all(size_t bytes) {
    char *to = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!to || fread(to, 1, bytes, stdin) != bytes) exit(2);
    return to;
}

int main(int count, char **arguments) {
    int64_t *sizes = read_all(3 * sizeof *sizes), *job = read_all((size_t)sizes[1]);
    char *memory = read_all((size_t)sizes[2]);
    for (int64_t i = 0; i < sizes[0]; i++) if (job[i]) job[i] += (int64_t)(intptr_t)memory;
    for (size_t i = 0; count == 2 && i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++)
        if (!strcmp(arguments[1], FUNCTIONS[i].name)) {
            FUNCTIONS[i].run(job);
            return fwrite(job, 1, (size_t)sizes[1], stdout) != (size_t)sizes[1]
                || fwrite(memory, 1, (size_t)sizes[2], stdout) != (size_t)sizes[2];
        }
    return 3;
}
