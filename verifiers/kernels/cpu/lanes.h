/* Sums and maxima over LANES numbers side by side, in an order that only their count decides. */

#pragma once

#include "simd.h"

enum { LANES = 16, TALL = SOME == 16 ? 8 : 4 }; /* numbers that are taken side by side, and rows of a tile */

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* Sums and maxima are taken lane by lane, and over the lanes at the end: halves upon halves. */
static inline float sum_of(const float *lanes) {
    float parts[LANES / 2];
#pragma omp simd
    for (int l = 0; l < LANES / 2; l++) parts[l] = lanes[l] + lanes[l + LANES / 2];
    for (int half = LANES / 4; half; half /= 2)
        for (int l = 0; l < half; l++) parts[l] += parts[l + half];
    return parts[0];
}

/* The greatest of `n` numbers; those that are none do not count. */
static inline float greatest(const float *x, int64_t n) {
    float lanes[LANES], most = -INFINITY;
    int64_t whole = n / LANES * LANES;
    for (int l = 0; l < LANES; l++) lanes[l] = -INFINITY;
    for (int64_t j = 0; j < whole; j += LANES)
#pragma omp simd
        for (int l = 0; l < LANES; l++) lanes[l] = x[j + l] > lanes[l] ? x[j + l] : lanes[l];
    for (int64_t l = 0; l < n - whole; l++) lanes[l] = x[whole + l] > lanes[l] ? x[whole + l] : lanes[l];
#pragma omp simd reduction(max : most)
    for (int l = 0; l < LANES; l++) most = lanes[l] > most ? lanes[l] : most;
    return most;
}

/* The sum of a · b, or of a · b · c. */
static inline __attribute__((always_inline)) float dot(const float *a, const float *b, const float *c, int64_t n) {
    float lanes[LANES] = {0};
    int64_t whole = n / LANES * LANES;
    for (int64_t j = 0; j < whole; j += LANES)
#pragma omp simd
        for (int l = 0; l < LANES; l++) lanes[l] += c ? a[j + l] * b[j + l] * c[j + l] : a[j + l] * b[j + l];
    for (int64_t j = whole; j < n; j++) lanes[j - whole] += c ? a[j] * b[j] * c[j] : a[j] * b[j];
    return sum_of(lanes);
}

/* The sum of e to the (x - most) · by. */
static inline float exp_sum(const float *x, int64_t n, float most, float by) {
    float lanes[LANES] = {0};
    int64_t whole = n / LANES * LANES;
    for (int64_t j = 0; j < whole; j += LANES)
#pragma omp simd
        for (int l = 0; l < LANES; l++) lanes[l] += exp_of((x[j + l] - most) * by);
    for (int64_t j = whole; j < n; j++) lanes[j - whole] += exp_of((x[j] - most) * by);
    return sum_of(lanes);
}
