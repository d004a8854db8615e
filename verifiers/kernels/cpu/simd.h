/* Vectors as wide as the processor's own, and the exponential function, written so that a compiler uses them. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Numbers that one instruction takes, and vectors of each row of a tile of sums that stays in registers. */
#if defined(__AVX512F__)
enum { SOME = 16, WIDE = 2 };
#elif defined(__AVX__)
enum { SOME = 8, WIDE = 2 };
#elif defined(__aarch64__)
enum { SOME = 4, WIDE = 4 };
#else
enum { SOME = 4, WIDE = 2 };
#endif
typedef float Vector __attribute__((vector_size(4 * SOME), aligned(4)));

/* e to the x, to about a unit in the last place: 0 below -87, and what is not a number stays so. */
static inline float exp_of(float x) {
    float bounded = x < -87.0f ? -87.0f : x;
    bounded = bounded > 88.0f ? 88.0f : bounded;
    float shifted = bounded * 1.44269504f + 12582912.0f; /* rounds to a whole number */
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
    /* The low bits of `shifted` are that whole number; unsigned, so that every x has a meaning, NaN too. */
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4B400000u + 127u) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}
