/* Attention of packed rows, forward and backward. Each segment attends to its prefix and causally to itself. */

#pragma once

#include "lanes.h"

/* --- small matrix products -------------------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) void tile(
    int wide, int64_t depth, const float *a, int64_t row, int64_t step, const float *b, int64_t b_row, float *c,
    int64_t c_row, int adds) {
    Vector sums[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) sums[i][j] = adds ? *(Vector *)(c + i * c_row + j * SIMD) : (Vector){0};
    for (int64_t k = 0; k < depth; k++) {
        Vector one[TILE_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) one[j] = *(const Vector *)(b + k * b_row + j * SIMD);
#pragma GCC unroll 8
        for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 4
            for (int j = 0; j < wide; j++) sums[i][j] += a[i * row + k * step] * one[j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) *(Vector *)(c + i * c_row + j * SIMD) = sums[i][j];
}

/* c = a · b, or c += a · b. `m` is a multiple of TILE_ROWS, and `n` of LANES. a[i, k] is at i · row + k · step. */
static void multiply(
    int64_t m, int64_t n, int64_t depth, const float *a, int64_t row, int64_t step, const float *b, int64_t b_row,
    float *c, int64_t c_row, int adds) {
    for (int64_t i = 0; i < m; i += TILE_ROWS)
        for (int64_t j = 0; j < n;) {
            const float *from = a + i * row;
            float *to = c + i * c_row + j;
            if (n - j >= TILE_VECTORS * SIMD) {
                tile(TILE_VECTORS, depth, from, row, step, b + j, b_row, to, c_row, adds);
                j += TILE_VECTORS * SIMD;
            } else {
                tile(1, depth, from, row, step, b + j, b_row, to, c_row, adds);
                j += SIMD;
            }
        }
}

/* --- attention -------------------------------------------------------------------------------------------------- */

/* A segment of `tokens` tokens, which attend causally to the segment and to the `before` tokens of its prefix. */
typedef struct {
    int64_t first, tokens, prefix, before; /* first and prefix: the first token of the segment and of its prefix */
} Segment;

/* Queries are [tokens, groups · share, dim], keys and values [tokens, groups, dim]. `wide` is dim padded to LANES. */
typedef struct {
    int64_t groups, share, dim, wide;
    float scale;
} Shape;

/* LANES queries of one group (kv head), ordered by token, then head: their indices, and the number of keys that each
   attends to. Lanes without a query have the number of keys of the last query, and zeros as query. */
typedef struct {
    int64_t count, at[LANES];
    int32_t seen[LANES];
    int64_t few, most, rows; /* number of keys of the first query, and of the last; the latter padded to whole tiles */
} Queries;

static void locate(const Shape *shape, const Segment *segment, int64_t group, int64_t first, Queries *to) {
    int64_t token = first / shape->share, head = first % shape->share;
    to->count = 0;
    to->few = to->most = segment->before + token + 1;
    for (int l = 0; l < LANES; l++) {
        if (token < segment->tokens) {
            to->at[l] = ((segment->first + token) * shape->groups + group) * shape->share + head;
            to->most = segment->before + token + 1;
            to->count++;
            if (++head == shape->share) head = 0, token++;
        }
        to->seen[l] = to->most;
    }
    to->rows = (to->most + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
}

/* Keys or values of a segment and its prefix, padded to whole vectors and whole tiles. */
static void gather(const Shape *shape, const Segment *segment, const float *x, int64_t group, float *to) {
    int64_t dim = shape->dim, wide = shape->wide, n = segment->before + segment->tokens;
    for (int64_t j = 0; j < n; j++, to += wide) {
        int64_t token = j < segment->before ? segment->prefix + j : segment->first + j - segment->before;
        memcpy(to, x + (token * shape->groups + group) * dim, dim * sizeof(float));
        if (wide > dim) memset(to + dim, 0, (wide - dim) * sizeof(float));
    }
    memset(to, 0, (padded(n) - n) * wide * sizeof(float));
}

/* Copy some queries (or their gradients) times `by` to `columns`, and as padded rows to `rows` unless it is NULL. */
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

/* Causal mask: set the scores of keys that a query does not attend to to -∞. */
static void mask(const Queries *queries, float *scores) {
    for (int64_t j = queries->few; j < queries->rows; j++)
#pragma omp simd
        for (int l = 0; l < LANES; l++)
            scores[j * LANES + l] = (int32_t)j < queries->seen[l] ? scores[j * LANES + l] : -INFINITY;
}

static int64_t queries_of(int64_t n_segments, const Segment *segments) {
    const Segment *last = segments + n_segments - 1;
    return last->first + last->tokens - segments->first;
}

/* Workspace in floats for attention over `keys` keys. */
int64_t attention_workspace(int64_t keys, int64_t dim) {
    return 4 * padded(keys) * padded(dim) + 2 * padded(keys) * LANES + 5 * LANES * padded(dim);
}

/* Attention of the heads of some groups. `out` begins with the first segment, and so does `sums`, the softmax
   statistics for the backward: first the maximum score m of each query, then each query's sum of exp(score - m). */
void attention(
    int64_t n_segments, const Segment *segments, int64_t groups, int64_t share, int64_t dim, float scale,
    int64_t first_group, int64_t end_group, const float *q, const float *k, const float *v, float *out, float *sums,
    float *workspace) {
    Shape shape = {groups, share, dim, padded(dim), scale};
    int64_t wide = shape.wide, skipped = segments->first * groups * share;
    int64_t n = queries_of(n_segments, segments) * groups * share;
    for (const Segment *segment = segments; segment < segments + n_segments; segment++) {
        int64_t all = padded(segment->before + segment->tokens);
        float *keys = workspace, *values = keys + all * wide, *scores = values + all * wide;
        float *columns = scores + all * LANES, *found = columns + wide * LANES;
        for (int64_t g = first_group; g < end_group; g++) {
            gather(&shape, segment, k, g, keys);
            gather(&shape, segment, v, g, values);
            for (int64_t first = 0; first < segment->tokens * share; first += LANES) {
                Queries queries;
                float maximum[LANES], total[LANES] = {0};
                locate(&shape, segment, g, first, &queries);
                gather_queries(&shape, &queries, q, 0, scale, columns, 0);
                multiply(queries.rows, LANES, dim, keys, wide, 1, columns, LANES, scores, LANES, 0);
                mask(&queries, scores);
                memcpy(maximum, scores, sizeof maximum);
                for (int64_t j = 1; j < queries.most; j++)
#pragma omp simd
                    for (int l = 0; l < LANES; l++) {
                        float one = scores[j * LANES + l];
                        maximum[l] = one > maximum[l] ? one : maximum[l];
                    }
                for (int64_t j = 0; j < queries.most; j++)
#pragma omp simd
                    for (int l = 0; l < LANES; l++) {
                        float one = exp_of(scores[j * LANES + l] - maximum[l]);
                        scores[j * LANES + l] = one;
                        total[l] += one;
                    }
                multiply(LANES, wide, queries.most, scores, 1, LANES, values, wide, found, wide, 0);
                for (int64_t l = 0; l < queries.count; l++) {
                    int64_t at = queries.at[l] - skipped;
                    float by = 1.0f / total[l];
                    sums[at] = maximum[l];
                    sums[n + at] = total[l];
                    for (int64_t d = 0; d < dim; d++) out[at * dim + d] = found[l * wide + d] * by;
                }
            }
        }
    }
}

/* Gradients of queries, keys and values. They are added to the outputs. */
void attention_back(
    int64_t n_segments, const Segment *segments, int64_t groups, int64_t share, int64_t dim, float scale,
    int64_t first_group, int64_t end_group, const float *q, const float *k, const float *v, const float *out,
    const float *sums, const float *grad, float *back_q, float *back_k, float *back_v, float *workspace) {
    Shape shape = {groups, share, dim, padded(dim), scale};
    int64_t wide = shape.wide, skipped = segments->first * groups * share;
    int64_t m = queries_of(n_segments, segments) * groups * share;
    for (const Segment *segment = segments; segment < segments + n_segments; segment++) {
        int64_t n = segment->before + segment->tokens, all = padded(n);
        float *keys = workspace, *values = keys + all * wide, *grad_keys = values + all * wide;
        float *grad_values = grad_keys + all * wide, *shares = grad_values + all * wide, *back = shares + all * LANES;
        float *columns = back + all * LANES, *grad_columns = columns + wide * LANES;
        float *rows = grad_columns + wide * LANES, *grad_rows = rows + wide * LANES, *found = grad_rows + wide * LANES;
        for (int64_t g = first_group; g < end_group; g++) {
            gather(&shape, segment, k, g, keys);
            gather(&shape, segment, v, g, values);
            memset(grad_keys, 0, 2 * all * wide * sizeof(float));
            for (int64_t first = 0; first < segment->tokens * share; first += LANES) {
                Queries queries;
                float maximum[LANES] = {0}, part[LANES] = {0}, past[LANES] = {0};
                locate(&shape, segment, g, first, &queries);
                gather_queries(&shape, &queries, q, 0, scale, columns, rows);
                gather_queries(&shape, &queries, grad, skipped, 1.0f, grad_columns, grad_rows);
                multiply(queries.rows, LANES, dim, keys, wide, 1, columns, LANES, shares, LANES, 0);
                multiply(queries.rows, LANES, dim, values, wide, 1, grad_columns, LANES, back, LANES, 0);
                mask(&queries, shares);
                for (int64_t l = 0; l < queries.count; l++) {
                    int64_t at = queries.at[l] - skipped;
                    maximum[l] = sums[at];
                    part[l] = 1.0f / sums[m + at];
                    past[l] = dot(grad_rows + l * wide, out + at * dim, 0, dim);
                }
                for (int64_t j = 0; j < queries.rows; j++)
#pragma omp simd
                    for (int l = 0; l < LANES; l++) {
                        float one = exp_of(shares[j * LANES + l] - maximum[l]) * part[l];
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
                int64_t token = j < segment->before ? segment->prefix + j : segment->first + j - segment->before;
                int64_t at = (token * groups + g) * dim;
                for (int64_t d = 0; d < dim; d++) back_k[at + d] += grad_keys[j * wide + d];
                for (int64_t d = 0; d < dim; d++) back_v[at + d] += grad_values[j * wide + d];
            }
        }
    }
}
