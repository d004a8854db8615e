/* Matrix products with weights laid out in panels of PANEL columns, split among the threads of a team. */

#pragma once

#include <sched.h>

#include "simd.h"

enum { LANES = SIMD, TILE_ROWS = SIMD == 16 ? 8 : 6, PANEL = LANES * TILE_VECTORS }; /* rows and columns of a tile */
enum { KEY_BLOCK = 32 }; /* keys processed at a time, which stay in the CPU's cache for all queries that share them */
typedef Vector Lanes;
typedef float Four __attribute__((vector_size(16)));

typedef struct {
    const float *panels, *bias; /* bias: NULL if there is none */
    int64_t rows, columns;      /* inputs and outputs */
} Matrix;

/* Size in floats of a matrix in panels. */
int64_t panels_size(int64_t inputs, int64_t columns) { return (columns + PANEL - 1) / PANEL * PANEL * inputs; }

/* --- threads ---------------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t parts, arrived, phase, is_over;
} Team;

enum { SPINS = 2000 }; /* spins before a waiting thread yields its core */

/* Wait for all threads of the team. */
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

/* Copy `n` rows (outputs) of `weight` to the columns from `first` on. Scales each input unless `scale` is NULL. */
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
    Lanes sums[TILE_ROWS][TILE_VECTORS];
    for (int i = 0; i < tall; i++)
        for (int j = 0; j < TILE_VECTORS; j++) sums[i][j] = (Lanes){0};
    for (int64_t k = 0; k < inputs; k++) {
        Lanes column[TILE_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < TILE_VECTORS; j++) column[j] = *(const Lanes *)(panel + k * PANEL + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < tall; i++)
#pragma GCC unroll 4
            for (int j = 0; j < TILE_VECTORS; j++) sums[i][j] += x[i * inputs + k] * column[j];
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

/* y = x · matrix (+ bias), or y += x · matrix (+ bias), for `m` rows and this thread's part of the columns. */
static void multiply(
    const Matrix *matrix, int64_t m, const float *x, float *y, int adds, int64_t part, const Team *team) {
    int64_t inputs = matrix->rows, columns = matrix->columns;
    Part panels = part_of((columns + PANEL - 1) / PANEL, part, team);
    for (int64_t first = panels.first * PANEL; first < columns && first < panels.end * PANEL; first += PANEL) {
        const float *panel = matrix->panels + first * inputs;
        const float *bias = matrix->bias ? matrix->bias + first : 0;
        int64_t n = columns - first < PANEL ? columns - first : PANEL;
        for (int64_t i = 0; i < m; i += TILE_ROWS) {
            const float *rows = x + i * inputs;
            float *to = y + i * columns + first;
#define CASE(tall) case tall: tile(tall, rows, inputs, panel, bias, to, columns, n, adds); break;
            switch (m - i < TILE_ROWS ? m - i : TILE_ROWS) {
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(__AVX512F__) /* TILE_ROWS */
                CASE(7) CASE(8)
#endif
            }
        }
    }
}

/* Divide rows by their L2 norms. `epsilon` is added to the sums of squares. */
static void normed(const float *x, float *y, int64_t m, int64_t width, float epsilon) {
    for (int64_t i = 0; i < m; i++, x += width, y += width) {
        float total = epsilon;
#pragma omp simd reduction(+ : total)
        for (int64_t k = 0; k < width; k++) total += x[k] * x[k];
        float scale = 1.0f / sqrtf(total);
        for (int64_t k = 0; k < width; k++) y[k] = x[k] * scale;
    }
}
