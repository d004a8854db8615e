/* Multiplication by matrices that are laid out in panels of PANEL columns, shared among the threads of a team. */

#pragma once

#include <sched.h>

#include "simd.h"

enum { LANES = SOME, TALL = SOME == 16 ? 8 : 6, PANEL = LANES * WIDE }; /* of a tile: its rows, and its columns */
enum { NEAR = 32 }; /* so many keys stay near from one query to the next */
typedef Vector Lanes;
typedef float Four __attribute__((vector_size(16)));

typedef struct {
    const float *panels, *bias; /* no bias: NULL */
    int64_t rows, columns;      /* of the matrix: inputs and outputs */
} Matrix;

/* Floats that a matrix takes in panels. */
int64_t panels_size(int64_t inputs, int64_t columns) { return (columns + PANEL - 1) / PANEL * PANEL * inputs; }

/* --- threads ---------------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t parts, arrived, phase, is_over;
} Team;

enum { SPINS = 2000 }; /* before a waiting thread gives its processor to others */

/* Wait until all threads of the team are here. */
static void barrier(Team *team) {
    if (team->parts == 1) return;
    int32_t phase = __atomic_load_n(&team->phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->parts) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team->phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&team->phase, __ATOMIC_ACQUIRE) == phase; spins++)
        if (spins > SPINS) sched_yield();
}

typedef struct {
    int64_t first, end;
} Part;

static Part part_of(int64_t n, int64_t part, const Team *team) {
    return (Part){n * part / team->parts, n * (part + 1) / team->parts};
}

/* --- matrices --------------------------------------------------------------------------------------------------- */

/* Lay `n` outputs (rows of `weight`) out as the columns from `first` on, each input multiplied by its scale. */
void lay_out(float *panels, int64_t first, int64_t n, int64_t inputs, const float *weight, const float *scale) {
    for (int64_t done = 0, some; done < n; done += some) {
        int64_t column = (first + done) % PANEL;
        some = PANEL - column < n - done ? PANEL - column : n - done;
        float *to = panels + (first + done - column) * inputs + column;
        const float *from = weight + done * inputs;
        for (int64_t k = 0; k < inputs; k++, to += PANEL)
            for (int64_t j = 0; j < some; j++) to[j] = from[j * inputs + k] * (scale ? scale[k] : 1.0f);
    }
}

static inline __attribute__((always_inline)) void tile(
    int tall, const float *x, int64_t inputs, const float *panel, const float *bias, float *y, int64_t stride,
    int64_t n, int adds) {
    Lanes sums[TALL][WIDE];
    for (int i = 0; i < tall; i++)
        for (int j = 0; j < WIDE; j++) sums[i][j] = (Lanes){0};
    for (int64_t k = 0; k < inputs; k++) {
        Lanes column[WIDE];
#pragma GCC unroll 4
        for (int j = 0; j < WIDE; j++) column[j] = *(const Lanes *)(panel + k * PANEL + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < tall; i++)
#pragma GCC unroll 4
            for (int j = 0; j < WIDE; j++) sums[i][j] += x[i * inputs + k] * column[j];
    }
    for (int i = 0; i < tall; i++) {
        float found[PANEL];
        memcpy(found, sums[i], sizeof found);
        float *to = y + i * stride;
        if (bias)
            for (int64_t j = 0; j < n; j++) found[j] += bias[j];
        if (adds)
            for (int64_t j = 0; j < n; j++) to[j] += found[j];
        else
            for (int64_t j = 0; j < n; j++) to[j] = found[j];
    }
}

/* y = x · matrix (+ bias), or that added to y: `m` rows, and of the columns a part. */
static void multiply(
    const Matrix *matrix, int64_t m, const float *x, float *y, int adds, int64_t part, const Team *team) {
    int64_t inputs = matrix->rows, columns = matrix->columns;
    Part panels = part_of((columns + PANEL - 1) / PANEL, part, team);
    for (int64_t first = panels.first * PANEL; first < columns && first < panels.end * PANEL; first += PANEL) {
        const float *panel = matrix->panels + first * inputs;
        const float *bias = matrix->bias ? matrix->bias + first : 0;
        int64_t n = columns - first < PANEL ? columns - first : PANEL;
        for (int64_t i = 0; i < m; i += TALL) {
            const float *rows = x + i * inputs;
            float *to = y + i * columns + first;
#define CASE(tall) case tall: tile(tall, rows, inputs, panel, bias, to, columns, n, adds); break;
            switch (m - i < TALL ? m - i : TALL) {
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(__AVX512F__) /* TALL */
                CASE(7) CASE(8)
#endif
            }
        }
    }
}

/* Rows divided by their lengths; `floor` is added to the sums of their squares. */
static void normed(const float *x, float *y, int64_t m, int64_t width, float floor) {
    for (int64_t i = 0; i < m; i++, x += width, y += width) {
        float total = floor;
#pragma omp simd reduction(+ : total)
        for (int64_t k = 0; k < width; k++) total += x[k] * x[k];
        float scale = 1.0f / sqrtf(total);
        for (int64_t k = 0; k < width; k++) y[k] = x[k] * scale;
    }
}
