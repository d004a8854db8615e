/* Sample a token from logits, with the same random numbers and truncation as kernels/sampling.py. */

#include "simd.h"

enum { SPAN = 64 }; /* tokens whose weights are summed in float32; totals are in float64 */

/* Sampling parameters of each row; see `SamplingColumns`. */
typedef struct {
    const float *temperature, *top_p, *min_p;
    const int64_t *top_k, *seed, *step;
} Sampling;

/* One number in [0, 1) for each (seed, step), by splitmix64, as in `uniforms`. */
static double uniform(int64_t seed, int64_t step) {
    uint64_t z = (uint64_t)seed + ((uint64_t)step + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 40) / 16777216.0;
}

/* Unnormalised probabilities of a row: exp((logit - max) · inverse_temperature). */
static void weigh(const float *logits, int64_t n, float max, float inverse_temperature, float *weights) {
    for (int64_t i = 0; i < n; i++) weights[i] = exp_of((logits[i] - max) * inverse_temperature);
}

/* Zero the weights below the floor. Writes the sum of each span and returns the total. */
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

/* The lowest weight kept by top-k, or by top-p, which keeps weights up to a sum of `enough`. The highest weight is 1.
   Bisects the bit patterns of the floats, which have the same order as the floats. */
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

/* The first token at which the cumulative sum exceeds the target. */
static int64_t token_at(const float *weights, const float *sums, int64_t n, double target) {
    double before = 0.0;
    int64_t first = 0, last = n - 1;
    for (int64_t s = 0; first + SPAN < n && before + sums[s] <= target; s++, first += SPAN) before += sums[s];
    for (int64_t i = first; i < n; i++) {
        before += weights[i];
        if (before > target) return i;
    }
    while (last > 0 && weights[last] == 0.0f) last--; /* due to rounding: the last token with a non-zero weight */
    return last;
}

/* Workspace of `drawn` in floats: the weights, and the sum of each span. */
int64_t draw_workspace(int64_t vocabulary) { return vocabulary + (vocabulary + SPAN - 1) / SPAN; }

/* Sample one of `n` tokens. Temperature 0 takes the likeliest. */
static int64_t drawn(
    const float *logits, int64_t n, const Sampling *sampling, int64_t row, float *logprob, float *raw,
    float *workspace) {
    float *sums = workspace + n, max = logits[0], temperature = sampling->temperature[row];
    float top_p = sampling->top_p[row], floor = sampling->min_p[row];
    int64_t top_k = sampling->top_k[row] > 0 ? sampling->top_k[row] : n; /* 0: no limit */
#pragma omp simd reduction(max : max)
    for (int64_t j = 0; j < n; j++) max = logits[j] > max ? logits[j] : max;
    weigh(logits, n, max, 1.0f, workspace);
    double whole = add_up(workspace, n, 0.0f, sums), total = whole;
    int64_t token = 0;
    if (temperature <= 0.0f) {
        while (token < n - 1 && logits[token] != max) token++;
    } else {
        if (temperature != 1.0f) {
            weigh(logits, n, max, 1.0f / temperature, workspace);
            total = add_up(workspace, n, 0.0f, sums);
        }
        if (top_p < 1.0f || top_k < n) {
            float lowest = floor_of(workspace, n, top_k, top_p < 1.0f ? top_p * total : INFINITY);
            floor = lowest > floor ? lowest : floor;
        }
        if (floor > 0.0f) total = add_up(workspace, n, floor, sums);
        token = token_at(workspace, sums, n, uniform(sampling->seed[row], sampling->step[row]) * total);
    }
    float above = logits[token] - max;
    *raw = above - (float)log(whole);
    *logprob = temperature <= 0.0f ? *raw : above / temperature - (float)log(total);
    return token;
}
