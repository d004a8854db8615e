/* Reductions in LANES parallel lanes. The order of a sum depends only on its length. */

#pragma once

#include "simd.h"

enum { LANES = 16, TILE_ROWS = SIMD == 16 ? 8 : 4 }; /* parallel lanes of a reduction, and rows of a tile */

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* The sum of all lanes, halving repeatedly. */
static inline float sum_of(const float *lanes) {
    float parts[LANES / 2];
#pragma omp simd
    for (int l = 0; l < LANES / 2; l++) parts[l] = lanes[l] + lanes[l + LANES / 2];
    for (int half = LANES / 4; half; half /= 2)
        for (int l = 0; l < half; l++) parts[l] += parts[l + half];
    return parts[0];
}

/* The maximum of `n` numbers. Ignores NaN. */
static inline float max_of(const float *x, int64_t n) {
    float lanes[LANES], max = -INFINITY;
    int64_t whole = n / LANES * LANES;
    for (int l = 0; l < LANES; l++) lanes[l] = -INFINITY;
    for (int64_t j = 0; j < whole; j += LANES)
#pragma omp simd
        for (int l = 0; l < LANES; l++) lanes[l] = x[j + l] > lanes[l] ? x[j + l] : lanes[l];
    for (int64_t l = 0; l < n - whole; l++) lanes[l] = x[whole + l] > lanes[l] ? x[whole + l] : lanes[l];
#pragma omp simd reduction(max : max)
    for (int l = 0; l < LANES; l++) max = lanes[l] > max ? lanes[l] : max;
    return max;
}

/* Σ a · b, or Σ a · b · c unless c is NULL. */
static inline __attribute__((always_inline)) float dot(const float *a, const float *b, const float *c, int64_t n) {
    float lanes[LANES] = {0};
    int64_t whole = n / LANES * LANES;
    for (int64_t j = 0; j < whole; j += LANES)
#pragma omp simd
        for (int l = 0; l < LANES; l++) lanes[l] += c ? a[j + l] * b[j + l] * c[j + l] : a[j + l] * b[j + l];
    for (int64_t j = whole; j < n; j++) lanes[j - whole] += c ? a[j] * b[j] * c[j] : a[j] * b[j];
    return sum_of(lanes);
}

/* Σ exp((x - max) · factor). */
static inline float exp_sum(const float *x, int64_t n, float max, float factor) {
    float lanes[LANES] = {0};
    int64_t whole = n / LANES * LANES;
    for (int64_t j = 0; j < whole; j += LANES)
#pragma omp simd
        for (int l = 0; l < LANES; l++) lanes[l] += exp_of((x[j + l] - max) * factor);
    for (int64_t j = whole; j < n; j++) lanes[j - whole] += exp_of((x[j] - max) * factor);
    return sum_of(lanes);
}
