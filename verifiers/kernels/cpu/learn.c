/* What lies between the multiplications of a model that learns on a CPU, there and back, in one sweep each: norms,
   rotary embedding, gates, logprobs, and attention of packed rows.

   Numbers are float32, tensors are contiguous, and a call is one thread, which needs no Python while it runs. The same
   numbers come out each time: sums are taken in an order that only their lengths decide. */

#include "simd.h"

enum { LANES = 16 }; /* numbers that are taken side by side */

/* Of these one instruction takes SOME, and a tile of sums that stays in registers has rows, and vectors of each. */
#if defined(__AVX512F__)
enum { SOME = 16, TALL = 8, WIDE = 2 };
#elif defined(__AVX__)
enum { SOME = 8, TALL = 4, WIDE = 2 };
#elif defined(__aarch64__)
enum { SOME = 4, TALL = 4, WIDE = 4 };
#else
enum { SOME = 4, TALL = 4, WIDE = 2 };
#endif
typedef float Vector __attribute__((vector_size(4 * SOME), aligned(4)));

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

/* --- norms ------------------------------------------------------------------------------------------------------ */

/* The RMS norm of each row of `x`, or of `x` and `more`, whose sum is kept then; and by what each row was scaled. */
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

/* The gradient of what was normed, with that which goes `past` the norm, and that of the weight: either may be NULL. */
void norm_back(
    int64_t n, int64_t width, const float *x, const float *weight, const float *scale, const float *past,
    const float *grad, float *back, float *grad_weight) {
    if (grad_weight) memset(grad_weight, 0, width * sizeof(float));
    for (int64_t i = 0; i < n; i++, x += width, grad += width, back += width) {
        float by = scale[i], share = -dot(grad, weight, x, width) * by * by / width;
#pragma omp simd
        for (int64_t j = 0; j < width; j++) back[j] = (grad[j] * weight[j] + x[j] * share) * by;
        if (past) {
#pragma omp simd
            for (int64_t j = 0; j < width; j++) back[j] += past[j];
            past += width;
        }
        if (grad_weight)
#pragma omp simd
            for (int64_t j = 0; j < width; j++) grad_weight[j] += grad[j] * x[j] * by;
    }
}

/* --- rotary embedding, gates ------------------------------------------------------------------------------------ */

/* `n` tokens of some heads turned by the angles of their positions, of which there are so many that come again and
   again; or turned back. `y` may be `x`. */
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

void gated_back(int64_t n, const float *gate, const float *up, const float *grad, float *back_gate, float *back_up) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float share = 1.0f / (1.0f + exp_of(-gate[i])), part = grad[i] * share;
        back_up[i] = part * gate[i];
        back_gate[i] = part * up[i] * (1.0f + gate[i] * (1.0f - share));
    }
}

/* --- logprobs --------------------------------------------------------------------------------------------------- */

/* The logprob of each row's target, and the logarithm of the row's mass; the row whose target is no word, or -1. */
int64_t pick(
    int64_t n, int64_t words, const float *logits, const int64_t *target, float temperature, float *logprob,
    float *mass) {
    float by = 1.0f / temperature;
    for (int64_t i = 0; i < n; i++, logits += words) {
        if (target[i] < 0 || target[i] >= words) return i;
        float most = greatest(logits, words);
        double total = 0.0;
        for (int64_t first = 0; first < words; first += 1024) {
            total += exp_sum(logits + first, least(words - first, 1024), most, by);
        }
        float above = (float)log(total);
        mass[i] = most * by + above;
        logprob[i] = (logits[target[i]] - most) * by - above;
    }
    return -1;
}

/* Logits become their gradients, given those of the targets' logprobs. */
void pick_back(
    int64_t n, int64_t words, float *logits, const int64_t *target, float temperature, const float *mass,
    const float *grad) {
    float by = 1.0f / temperature;
    for (int64_t i = 0; i < n; i++, logits += words) {
        float share = grad[i] * by, mine = mass[i];
#pragma omp simd
        for (int64_t j = 0; j < words; j++) logits[j] = exp_of(logits[j] * by - mine) * -share;
        logits[target[i]] += share;
    }
}

/* --- small multiplications -------------------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) void tile(
    int wide, int64_t depth, const float *a, int64_t row, int64_t step, const float *b, int64_t b_row, float *c,
    int64_t c_row, int adds) {
    Vector sums[TALL][WIDE];
#pragma GCC unroll 8
    for (int i = 0; i < TALL; i++)
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) sums[i][j] = adds ? *(Vector *)(c + i * c_row + j * SOME) : (Vector){0};
    for (int64_t k = 0; k < depth; k++) {
        Vector one[WIDE];
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) one[j] = *(const Vector *)(b + k * b_row + j * SOME);
#pragma GCC unroll 8
        for (int i = 0; i < TALL; i++)
#pragma GCC unroll 4
            for (int j = 0; j < wide; j++) sums[i][j] += a[i * row + k * step] * one[j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < TALL; i++)
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) *(Vector *)(c + i * c_row + j * SOME) = sums[i][j];
}

/* c = a · b, or that added to c. `m` is a multiple of TALL, `n` of LANES; a[i, k] is at i · row + k · step. */
static void multiply(
    int64_t m, int64_t n, int64_t depth, const float *a, int64_t row, int64_t step, const float *b, int64_t b_row,
    float *c, int64_t c_row, int adds) {
    for (int64_t i = 0; i < m; i += TALL)
        for (int64_t j = 0; j < n;) {
            const float *from = a + i * row;
            float *to = c + i * c_row + j;
            if (n - j >= WIDE * SOME) {
                tile(WIDE, depth, from, row, step, b + j, b_row, to, c_row, adds);
                j += WIDE * SOME;
            } else {
                tile(1, depth, from, row, step, b + j, b_row, to, c_row, adds);
                j += SOME;
            }
        }
}

/* --- attention -------------------------------------------------------------------------------------------------- */

/* A run of tokens, each of which sees the `before` tokens from `head` on, the earlier ones of its run, and itself. */
typedef struct {
    int64_t first, tokens, head, before;
} Run;

/* Queries are [tokens, groups · share, dim], keys and values [tokens, groups, dim]; `wide` is dim in whole vectors. */
typedef struct {
    int64_t groups, share, dim, wide;
    float scale;
} Shape;

/* LANES queries of one group, one head of a token after the other: where they are, and how many keys each sees. Lanes
   without a query see what the last one does, and are 0. */
typedef struct {
    int64_t count, at[LANES];
    int32_t seen[LANES];
    int64_t few, most, rows; /* keys that the first sees, and the last; the latter in whole tiles */
} Queries;

static void find(const Shape *shape, const Run *run, int64_t group, int64_t first, Queries *to) {
    int64_t token = first / shape->share, head = first % shape->share;
    to->count = 0;
    to->few = to->most = run->before + token + 1;
    for (int l = 0; l < LANES; l++) {
        if (token < run->tokens) {
            to->at[l] = ((run->first + token) * shape->groups + group) * shape->share + head;
            to->most = run->before + token + 1;
            to->count++;
            if (++head == shape->share) head = 0, token++;
        }
        to->seen[l] = to->most;
    }
    to->rows = (to->most + TALL - 1) / TALL * TALL;
}

/* Keys or values of a run, in rows of whole vectors, and as many rows as go into whole tiles. */
static void gather(const Shape *shape, const Run *run, const float *x, int64_t group, float *to) {
    int64_t dim = shape->dim, wide = shape->wide, n = run->before + run->tokens;
    for (int64_t j = 0; j < n; j++, to += wide) {
        int64_t token = j < run->before ? run->head + j : run->first + j - run->before;
        memcpy(to, x + (token * shape->groups + group) * dim, dim * sizeof(float));
        if (wide > dim) memset(to + dim, 0, (wide - dim) * sizeof(float));
    }
    memset(to, 0, (padded(n) - n) * wide * sizeof(float));
}

/* What there is of some queries, as columns, and as rows of whole vectors if there is room for these. */
static void gather_queries(
    const Shape *shape, const Queries *queries, const float *x, int64_t skipped, float by, float *columns,
    float *rows) {
    int64_t dim = shape->dim, wide = shape->wide;
    for (int64_t l = 0; l < LANES; l++) {
        const float *from = l < queries->count ? x + (queries->at[l] - skipped) * dim : 0;
        for (int64_t d = 0; d < dim; d++) columns[d * LANES + l] = from ? from[d] * by : 0.0f;
        if (rows)
            for (int64_t d = 0; d < wide; d++) rows[l * wide + d] = from && d < dim ? from[d] * by : 0.0f;
    }
}

static void hide(const Queries *queries, float *scores) {
    for (int64_t j = queries->few; j < queries->rows; j++)
#pragma omp simd
        for (int l = 0; l < LANES; l++)
            scores[j * LANES + l] = (int32_t)j < queries->seen[l] ? scores[j * LANES + l] : -INFINITY;
}

static int64_t queries_of(int64_t n_runs, const Run *runs) {
    const Run *last = runs + n_runs - 1;
    return last->first + last->tokens - runs->first;
}

/* Floats of room that attention over so many keys needs. */
int64_t attention_room(int64_t keys, int64_t dim) {
    return 4 * padded(keys) * padded(dim) + 2 * padded(keys) * LANES + 5 * LANES * padded(dim);
}

/* What tokens see of the values. `out` begins with the first run, and so does what the way back needs (`sums`): the
   greatest score of each query, and after these all sums, over its keys, of e to the score less that. */
void attention(
    int64_t n_runs, const Run *runs, int64_t groups, int64_t share, int64_t dim, float scale, const float *q,
    const float *k, const float *v, float *out, float *sums, float *room) {
    Shape shape = {groups, share, dim, padded(dim), scale};
    int64_t wide = shape.wide, skipped = runs->first * groups * share, n = queries_of(n_runs, runs) * groups * share;
    for (const Run *run = runs; run < runs + n_runs; run++) {
        int64_t all = padded(run->before + run->tokens);
        float *keys = room, *values = keys + all * wide, *scores = values + all * wide;
        float *columns = scores + all * LANES, *found = columns + wide * LANES;
        for (int64_t g = 0; g < groups; g++) {
            gather(&shape, run, k, g, keys);
            gather(&shape, run, v, g, values);
            for (int64_t first = 0; first < run->tokens * share; first += LANES) {
                Queries queries;
                float greatest[LANES], total[LANES] = {0};
                find(&shape, run, g, first, &queries);
                gather_queries(&shape, &queries, q, 0, scale, columns, 0);
                multiply(queries.rows, LANES, dim, keys, wide, 1, columns, LANES, scores, LANES, 0);
                hide(&queries, scores);
                memcpy(greatest, scores, sizeof greatest);
                for (int64_t j = 1; j < queries.most; j++)
#pragma omp simd
                    for (int l = 0; l < LANES; l++) {
                        float one = scores[j * LANES + l];
                        greatest[l] = one > greatest[l] ? one : greatest[l];
                    }
                for (int64_t j = 0; j < queries.most; j++)
#pragma omp simd
                    for (int l = 0; l < LANES; l++) {
                        float one = exp_of(scores[j * LANES + l] - greatest[l]);
                        scores[j * LANES + l] = one;
                        total[l] += one;
                    }
                multiply(LANES, wide, queries.most, scores, 1, LANES, values, wide, found, wide, 0);
                for (int64_t l = 0; l < queries.count; l++) {
                    int64_t at = queries.at[l] - skipped;
                    float by = 1.0f / total[l];
                    sums[at] = greatest[l];
                    sums[n + at] = total[l];
                    for (int64_t d = 0; d < dim; d++) out[at * dim + d] = found[l * wide + d] * by;
                }
            }
        }
    }
}

/* Gradients of queries, keys and values, which are added to what is there. */
void attention_back(
    int64_t n_runs, const Run *runs, int64_t groups, int64_t share, int64_t dim, float scale, const float *q,
    const float *k, const float *v, const float *out, const float *sums, const float *grad, float *back_q,
    float *back_k, float *back_v, float *room) {
    Shape shape = {groups, share, dim, padded(dim), scale};
    int64_t wide = shape.wide, skipped = runs->first * groups * share, m = queries_of(n_runs, runs) * groups * share;
    for (const Run *run = runs; run < runs + n_runs; run++) {
        int64_t n = run->before + run->tokens, all = padded(n);
        float *keys = room, *values = keys + all * wide, *grad_keys = values + all * wide;
        float *grad_values = grad_keys + all * wide, *shares = grad_values + all * wide, *back = shares + all * LANES;
        float *columns = back + all * LANES, *grad_columns = columns + wide * LANES;
        float *rows = grad_columns + wide * LANES, *grad_rows = rows + wide * LANES, *found = grad_rows + wide * LANES;
        for (int64_t g = 0; g < groups; g++) {
            gather(&shape, run, k, g, keys);
            gather(&shape, run, v, g, values);
            memset(grad_keys, 0, 2 * all * wide * sizeof(float));
            for (int64_t first = 0; first < run->tokens * share; first += LANES) {
                Queries queries;
                float greatest[LANES] = {0}, part[LANES] = {0}, past[LANES] = {0};
                find(&shape, run, g, first, &queries);
                gather_queries(&shape, &queries, q, 0, scale, columns, rows);
                gather_queries(&shape, &queries, grad, skipped, 1.0f, grad_columns, grad_rows);
                multiply(queries.rows, LANES, dim, keys, wide, 1, columns, LANES, shares, LANES, 0);
                multiply(queries.rows, LANES, dim, values, wide, 1, grad_columns, LANES, back, LANES, 0);
                hide(&queries, shares);
                for (int64_t l = 0; l < queries.count; l++) {
                    int64_t at = queries.at[l] - skipped;
                    greatest[l] = sums[at];
                    part[l] = 1.0f / sums[m + at];
                    past[l] = dot(grad_rows + l * wide, out + at * dim, 0, dim);
                }
                for (int64_t j = 0; j < queries.rows; j++)
#pragma omp simd
                    for (int l = 0; l < LANES; l++) {
                        float one = exp_of(shares[j * LANES + l] - greatest[l]) * part[l];
                        shares[j * LANES + l] = one;
                        back[j * LANES + l] = one * (back[j * LANES + l] - past[l]);
                    }
                multiply(LANES, wide, queries.most, back, 1, LANES, keys, wide, found, wide, 0);
                multiply(queries.rows, wide, LANES, back, LANES, 1, rows, wide, grad_keys, wide, 1);
                multiply(queries.rows, wide, LANES, shares, LANES, 1, grad_rows, wide, grad_values, wide, 1);
                for (int64_t l = 0; l < queries.count; l++)
                    for (int64_t d = 0; d < dim; d++) back_q[queries.at[l] * dim + d] += found[l * wide + d] * scale;
            }
            for (int64_t j = 0; j < n; j++) {
                int64_t token = j < run->before ? run->head + j : run->first + j - run->before;
                int64_t at = (token * groups + g) * dim;
                for (int64_t d = 0; d < dim; d++) back_k[at + d] += grad_keys[j * wide + d];
                for (int64_t d = 0; d < dim; d++) back_v[at + d] += grad_values[j * wide + d];
            }
        }
    }
}
