/* Logits → a token, as kernels/sampling.py draws it: the same random number, the same truncation. */

#include "simd.h"

enum { SPAN = 64 };

/* How each row is sampled; see `SamplingColumns`. */
typedef struct {
    const float *temperature, *top_p, *min_p;
    const int64_t *top_k, *seed, *step;
} Sampling;

/* One number in [0, 1) for each (seed, step): splitmix64, as in `uniforms`. */
static double uniform(int64_t seed, int64_t step) {
    uint64_t z = (uint64_t)seed + ((uint64_t)step + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 40) / 16777216.0;
}

/* The weights of a row, exp((logit - most) · cold). */
static void weigh(const float *logits, int64_t n, float most, float cold, float *weights) {
    for (int64_t i = 0; i < n; i++) weights[i] = exp_of((logits[i] - most) * cold);
}

/* Leave out what is below the floor, and add up each span of the rest, and all. */
static double add_up(float *weights, int64_t n, float floor, float *sums) {
    double total = 0.0;
    for (int64_t first = 0, s = 0; first < n; first += SPAN, s++) {
        int64_t end = first + SPAN < n ? first + SPAN : n;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = first; i < end; i++) {
            weights[i] = weights[i] < floor ? 0.0f : weights[i];
            sum += weights[i];
        }
        sums[s] = sum;
        total += sum;
    }
    return total;
}

/* The lowest weight that is kept if those kept are to be `top_k`, or make up `enough`; the highest weight is 1. By the
   bits of the numbers, which are in the same order as the numbers. */
static float floor_of(const float *weights, int64_t n, int64_t top_k, double enough) {
    int32_t low = 0, high = 0x3f800001;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        float floor;
        memcpy(&floor, &middle, sizeof floor);
        double mass = 0.0;
        int64_t count = 0;
        for (int64_t first = 0; first < n; first += SPAN) {
            int64_t end = first + SPAN < n ? first + SPAN : n;
            float sum = 0.0f;
            int32_t kept = 0;
#pragma omp simd reduction(+ : sum, kept)
            for (int64_t i = first; i < end; i++) {
                sum += weights[i] >= floor ? weights[i] : 0.0f;
                kept += weights[i] >= floor;
            }
            mass += sum, count += kept;
        }
        if (count >= top_k || mass >= enough)
            low = middle;
        else
            high = middle;
    }
    float floor;
    memcpy(&floor, &low, sizeof floor);
    return floor;
}

/* The first token at which the running sum is above the target. */
static int64_t pick(const float *weights, const float *sums, int64_t n, double target) {
    double before = 0.0;
    int64_t first = 0, last = n - 1;
    for (int64_t s = 0; first + SPAN < n && before + sums[s] <= target; s++, first += SPAN) before += sums[s];
    for (int64_t i = first; i < n; i++) {
        before += weights[i];
        if (before > target) return i;
    }
    while (last > 0 && weights[last] == 0.0f) last--; /* rounding: never a token that cannot be */
    return last;
}

/* Floats of scratch space that drawing needs: the weights, and the sum of each span of them. */
int64_t draw_workspace(int64_t vocabulary) { return vocabulary + (vocabulary + SPAN - 1) / SPAN; }

/* One of `n` tokens; temperature 0 takes the likeliest. */
static int64_t drawn(
    const float *logits, int64_t n, const Sampling *sampling, int64_t row, float *logprob, float *raw,
    float *workspace) {
    float *sums = workspace + n, most = logits[0], temperature = sampling->temperature[row];
    float top_p = sampling->top_p[row], floor = sampling->min_p[row];
    int64_t top_k = sampling->top_k[row] > 0 ? sampling->top_k[row] : n; /* 0: no limit */
#pragma omp simd reduction(max : most)
    for (int64_t j = 0; j < n; j++) most = logits[j] > most ? logits[j] : most;
    weigh(logits, n, most, 1.0f, workspace);
    double whole = add_up(workspace, n, 0.0f, sums), total = whole;
    int64_t token = 0;
    if (temperature <= 0.0f) {
        while (token < n - 1 && logits[token] != most) token++;
    } else {
        if (temperature != 1.0f) {
            weigh(logits, n, most, 1.0f / temperature, workspace);
            total = add_up(workspace, n, 0.0f, sums);
        }
        if (top_p < 1.0f || top_k < n) {
            float lowest = floor_of(workspace, n, top_k, top_p < 1.0f ? top_p * total : INFINITY);
            floor = lowest > floor ? lowest : floor;
        }
        if (floor > 0.0f) total = add_up(workspace, n, floor, sums);
        token = pick(workspace, sums, n, uniform(sampling->seed[row], sampling->step[row]) * total);
    }
    float above = logits[token] - most;
    *raw = above - (float)log(whole);
    *logprob = temperature <= 0.0f ? *raw : above / temperature - (float)log(total);
    return token;
}
