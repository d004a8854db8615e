/* Vectors of the processor's width, and an exponential function that compilers can vectorise. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

/* SIMD: floats per vector. TILE_VECTORS: vectors per row of a tile of sums, which stays in registers. */
#if defined(__AVX512F__)
enum { SIMD = 16, TILE_VECTORS = 2 };
#elif defined(__AVX__)
enum { SIMD = 8, TILE_VECTORS = 2 };
#elif defined(__aarch64__)
enum { SIMD = 4, TILE_VECTORS = 4 };
#else
enum { SIMD = 4, TILE_VECTORS = 2 };
#endif
typedef float Vector __attribute__((vector_size(4 * SIMD), aligned(4)));

/* exp(x) to about 1 ulp; 0 below -87; NaN stays NaN. */
static inline float exp_of(float x) {
    float bounded = x < -87.0f ? -87.0f : x;
    bounded = bounded > 88.0f ? 88.0f : bounded;
    float shifted = bounded * 1.44269504f + 12582912.0f; /* rounds to an integer */
    float whole = shifted - 12582912.0f;
    float r = bounded - whole * 0.693145752f;
    r -= whole * 1.42860677e-6f;
    float p = 1.98756915e-4f;
    p = p * r + 1.39819995e-3f;
    p = p * r + 8.33345191e-3f;
    p = p * r + 4.16657963e-2f;
    p = p * r + 1.66666655e-1f;
    p = p * r + 5.0e-1f;
    p = p * r * r + r + 1.0f;
    /* The low bits of `shifted` are that integer. Unsigned, so that no x is undefined behaviour, not even NaN. */
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4B400000u + 127u) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}
