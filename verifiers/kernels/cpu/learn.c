/* Training on a CPU without the matrix products: norms, rotary embedding, gates, logprobs, and attention of packed
   rows, forward and backward, each in one pass.

   Tensors are float32 and contiguous. A call uses one thread and does not hold the GIL; the caller splits rows, or
   attention heads, among threads. Results are deterministic: the order of a sum depends only on its length. */

#include "lanes.h"
#include "packed_attention.h"
#include "simd.h"

/* --- norms ------------------------------------------------------------------------------------------------------ */

/* RMS norm of each row of `x`, or of `x` + `more` (then also writes the sum `total`), and each row's inverse RMS. */
void norm(
    int64_t n, int64_t width, const float *x, const float *more, const float *weight, float epsilon, float *total,
    float *normed, float *scale) {
    for (int64_t i = 0; i < n; i++, x += width, normed += width) {
        const float *row = x;
        if (more) {
#pragma omp simd
            for (int64_t j = 0; j < width; j++) total[j] = x[j] + more[j];
            row = total;
            more += width;
            total += width;
        }
        float by = scale[i] = 1.0f / sqrtf(dot(row, row, 0, width) / width + epsilon);
#pragma omp simd
        for (int64_t j = 0; j < width; j++) normed[j] = row[j] * by * weight[j];
    }
}

/* Gradients of the input and of the weight. Adds `residual`, the gradient of the residual connection, to the input's.
   `residual` and `grad_weight` may be NULL. */
void norm_back(
    int64_t n, int64_t width, const float *x, const float *weight, const float *scale, const float *residual,
    const float *grad, float *back, float *grad_weight) {
    if (grad_weight) memset(grad_weight, 0, width * sizeof(float));
    for (int64_t i = 0; i < n; i++, x += width, grad += width, back += width) {
        float by = scale[i], share = -dot(grad, weight, x, width) * by * by / width;
#pragma omp simd
        for (int64_t j = 0; j < width; j++) back[j] = (grad[j] * weight[j] + x[j] * share) * by;
        if (residual) {
#pragma omp simd
            for (int64_t j = 0; j < width; j++) back[j] += residual[j];
            residual += width;
        }
        if (grad_weight)
#pragma omp simd
            for (int64_t j = 0; j < width; j++) grad_weight[j] += grad[j] * x[j] * by;
    }
}

/* --- rotary embedding, gates ------------------------------------------------------------------------------------ */

/* Rotary embedding of `n` tokens with `heads` heads, or its backward. Token t has the angle t modulo `angles`. `y` may
   be `x`. */
void rotate(
    int64_t n, int64_t heads, int64_t dim, const float *x, float *y, int64_t angles, const float *cos, const float *sin,
    int back) {
    int64_t half = dim / 2;
    float sign = back ? -1.0f : 1.0f;
    for (int64_t t = 0; t < n; t++) {
        const float *c = cos + t % angles * dim, *s = sin + t % angles * dim;
        const float *first = back ? s + half : s, *second = back ? s : s + half;
        for (int64_t h = 0; h < heads; h++, x += dim, y += dim)
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float one = x[i], two = x[i + half];
                y[i] = one * c[i] - two * first[i] * sign;
                y[i + half] = two * c[i + half] + one * second[i] * sign;
            }
    }
}

/* SiLU of `gate` times `up`. */
void gated(int64_t n, const float *gate, const float *up, float *product) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) product[i] = gate[i] / (1.0f + exp_of(-gate[i])) * up[i];
}

/* Gradients of `gate` and `up`. */
void gated_back(int64_t n, const float *gate, const float *up, const float *grad, float *back_gate, float *back_up) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float share = 1.0f / (1.0f + exp_of(-gate[i])), part = grad[i] * share;
        back_up[i] = part * gate[i];
        back_gate[i] = part * up[i] * (1.0f + gate[i] * (1.0f - share));
    }
}

/* --- logprobs --------------------------------------------------------------------------------------------------- */

/* The logprob of each row's target, and the row's logsumexp. Returns a row whose target is out of range, or -1. */
int64_t logprobs(
    int64_t n, int64_t vocabulary, const float *logits, const int64_t *target, float temperature, float *logprob,
    float *lse) {
    float by = 1.0f / temperature;
    for (int64_t i = 0; i < n; i++, logits += vocabulary) {
        if (target[i] < 0 || target[i] >= vocabulary) return i;
        float max = max_of(logits, vocabulary);
        double total = 0.0;
        for (int64_t first = 0; first < vocabulary; first += 1024) {
            total += exp_sum(logits + first, min_of(vocabulary - first, 1024), max, by);
        }
        float above = (float)log(total);
        lse[i] = max * by + above;
        logprob[i] = (logits[target[i]] - max) * by - above;
    }
    return -1;
}

/* Replace logits by their gradients, given the gradients of the targets' logprobs. */
void logprobs_back(
    int64_t n, int64_t vocabulary, float *logits, const int64_t *target, float temperature, const float *lse,
    const float *grad) {
    float by = 1.0f / temperature;
    for (int64_t i = 0; i < n; i++, logits += vocabulary) {
        float share = grad[i] * by, mine = lse[i];
#pragma omp simd
        for (int64_t j = 0; j < vocabulary; j++) logits[j] = exp_of(logits[j] * by - mine) * -share;
        logits[target[i]] += share;
    }
}
