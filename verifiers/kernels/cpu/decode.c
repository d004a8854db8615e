/* A decoder's forward pass for new tokens on a CPU. It writes keys and values to the paged KV cache and attends to it.

   Matrices are laid out in panels of PANEL columns, so that a product reads them sequentially. The weight of the norm
   before a matrix is multiplied into it (see model.py). Several threads may call the same function at once, each for
   its part of the work, without holding the GIL. The *_workspace functions return how many floats a call needs. */

#include "panels.h"
#include "sample.h"
#include "simd.h"

typedef struct {
    const float *q, *k; /* weights of the head norms of queries and keys, times √dim; NULL: no norm */
    float q_epsilon, k_epsilon; /* epsilon · dim */
} HeadNorms;

typedef struct {
    Matrix qkv, out, gate_up, down;
    HeadNorms norms;
    float input_epsilon, post_epsilon; /* epsilon · width of the two norms: added to sums of squares */
    float scale;
    int32_t rotates; /* 0: no rotary embedding */
    int64_t window; /* positions that a token attends to; 0: all */
} Layer;

typedef struct {
    int64_t heads, kv_heads, dim, length; /* length: of the longest possible sequence */
    const float *cos, *sin;             /* [positions, dim] */
} Heads;

/* The paged KV cache: position t of a sequence is at offset t % block of the block table[t / block]. */
typedef struct {
    float *store; /* [layers, 2, blocks, kv_heads, block, dim] */
    int64_t blocks, block; /* number of blocks; positions per block, a power of two */
    const int32_t *tables; /* [sequences, width] */
    int64_t width;
} Cache;

typedef struct {
    const Layer *layers;
    Matrix head;  /* lm_head */
    float final_epsilon; /* epsilon · width of the norm before the head */
    int64_t n_layers, width, inner;
    Heads heads;
    Cache cache;
} Model;

/* Keys (or values) of one head of a sequence, from position `first` on. They are contiguous within a block. */
typedef struct {
    const float *at; /* of this head in block 0 */
    const int32_t *table;
    int64_t stride, shift, dim, first; /* a block has 1 << shift positions; shifting avoids a slow division */
} Paged;

/* A pointer to position `t`. Reduces `*n` to the number of positions left in its block. */
static inline const float *contiguous_at(const Paged *paged, int64_t t, int64_t *n) {
    int64_t position = paged->first + t, block = (int64_t)1 << paged->shift, offset = position & (block - 1);
    if (*n > block - offset) *n = block - offset;
    return paged->at + paged->table[position >> paged->shift] * paged->stride + offset * paged->dim;
}

/* --- attention, gating ------------------------------------------------------------------------------------------ */

static void rotate(float *x, const float *cos, const float *sin, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float one = x[i], two = x[i + half];
        x[i] = one * cos[i] - two * sin[i];
        x[i + half] = two * cos[i + half] + one * sin[i + half];
    }
}

static inline float sum_of(Lanes x) {
    Four parts[LANES / 4];
    memcpy(parts, &x, sizeof x);
    for (int half = LANES / 8; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

/* out[d ...] += Σ weight · value over positions [t, end), for some vectors of dimensions from `d` on. */
static inline __attribute__((always_inline)) void weighted(
    int vectors, int64_t d, int64_t t, int64_t end, int64_t dim, const float *weights, const Paged *values, float *out) {
    Lanes seen[4];
    for (int j = 0; j < vectors; j++) seen[j] = *(const Lanes *)(out + d + j * LANES);
    for (int64_t n; t < end; t += n) {
        n = end - t;
        const float *value = contiguous_at(values, t, &n) + d;
        for (int64_t i = 0; i < n; i++, value += dim)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) seen[j] += weights[t + i] * *(const Lanes *)(value + j * LANES);
    }
    for (int j = 0; j < vectors; j++) *(Lanes *)(out + d + j * LANES) = seen[j];
}

/* Scores of keys [t, end). */
static inline __attribute__((always_inline)) void score(
    int64_t dim, const float *q, const Paged *keys, int64_t t, int64_t end, float scale, float *scores) {
    int64_t whole = dim / LANES * LANES;
    for (int64_t n; t < end; t += n) {
        n = end - t;
        const float *key = contiguous_at(keys, t, &n);
        for (int64_t i = 0; i < n; i++, key += dim) {
            Lanes sums = {0};
            for (int64_t d = 0; d < whole; d += LANES) sums += *(const Lanes *)(q + d) * *(const Lanes *)(key + d);
            float dot = sum_of(sums);
            for (int64_t d = whole; d < dim; d++) dot += q[d] * key[d];
            scores[t + i] = dot * scale;
        }
    }
}

/* Softmax in place. `scores` must have room for LANES more scores. */
static void softmax(float *scores, int64_t n) {
    for (int64_t t = n; t < n + LANES; t++) scores[t] = -INFINITY; /* pads to whole vectors */
    Lanes most = *(const Lanes *)scores, sums = {0};
    for (int64_t t = 0; t < n; t += LANES)
#pragma omp simd
        for (int64_t l = 0; l < LANES; l++) most[l] = scores[t + l] > most[l] ? scores[t + l] : most[l];
    float greatest = most[0];
    for (int64_t l = 1; l < LANES; l++) greatest = most[l] > greatest ? most[l] : greatest;
    for (int64_t t = 0; t < n; t += LANES) {
#pragma omp simd
        for (int64_t l = 0; l < LANES; l++) scores[t + l] = exp_of(scores[t + l] - greatest);
        sums += *(const Lanes *)(scores + t);
    }
    float share = 1.0f / sum_of(sums);
    for (int64_t t = 0; t < n; t++) scores[t] *= share;
}

static inline __attribute__((always_inline)) void add_values(
    int64_t dim, const float *weights, const Paged *values, int64_t t, int64_t end, float *out) {
    int64_t d = 0;
    for (; dim - d >= 4 * LANES; d += 4 * LANES) weighted(4, d, t, end, dim, weights, values, out);
    for (; dim - d >= 2 * LANES; d += 2 * LANES) weighted(2, d, t, end, dim, weights, values, out);
    for (; dim - d >= LANES; d += LANES) weighted(1, d, t, end, dim, weights, values, out);
    for (int64_t n; d < dim && t < end; t += n) {
        n = end - t;
        const float *value = contiguous_at(values, t, &n);
        for (int64_t i = 0; i < n; i++, value += dim)
            for (int64_t rest = d; rest < dim; rest++) out[rest] += weights[t + i] * value[rest];
    }
}

/* Attention of the `share` queries of one kv head over `n` keys, KEY_BLOCK keys at a time, so that they stay in the
   CPU's cache for all queries. `scores` has room for n + LANES floats per query. */
static inline __attribute__((always_inline)) void attend_by(
    int64_t dim, int64_t share, const float *q, const Paged *keys, const Paged *values, int64_t n, float scale,
    float *scores, float *out) {
    int64_t stride = n + LANES;
    for (int64_t t = 0; t < n; t += KEY_BLOCK)
        for (int64_t h = 0; h < share; h++)
            score(dim, q + h * dim, keys, t, n - t < KEY_BLOCK ? n : t + KEY_BLOCK, scale, scores + h * stride);
    for (int64_t h = 0; h < share; h++) softmax(scores + h * stride, n);
    memset(out, 0, share * dim * sizeof(float));
    for (int64_t t = 0; t < n; t += KEY_BLOCK)
        for (int64_t h = 0; h < share; h++)
            add_values(dim, scores + h * stride, values, t, n - t < KEY_BLOCK ? n : t + KEY_BLOCK, out + h * dim);
}

static void attend(
    int64_t dim, int64_t share, const float *q, const Paged *keys, const Paged *values, int64_t n, float scale,
    float *scores, float *out) {
    switch (dim) { /* loops of constant length are unrolled */
        case 32: attend_by(32, share, q, keys, values, n, scale, scores, out); break;
        case 64: attend_by(64, share, q, keys, values, n, scale, scores, out); break;
        case 128: attend_by(128, share, q, keys, values, n, scale, scores, out); break;
        default: attend_by(dim, share, q, keys, values, n, scale, scores, out);
    }
}

/* RMS norm of each head. */
static void norm_heads(float *x, int64_t heads, int64_t dim, const float *weight, float floor) {
    normed(x, x, heads, dim, floor);
    for (int64_t h = 0; h < heads; h++, x += dim)
        for (int64_t i = 0; i < dim; i++) x[i] *= weight[i];
}

/* Norm and rotate the queries and keys of some tokens; write keys and values to the KV cache. */
static void store(
    const Heads *heads, const Cache *cache, const Layer *layer, Part tokens, float *qkv, const int64_t *sequence,
    const int64_t *position, float *keys, float *values) {
    const HeadNorms *norms = &layer->norms;
    int64_t dim = heads->dim, kv_heads = heads->kv_heads, across = (heads->heads + 2 * kv_heads) * dim;
    for (int64_t i = tokens.first; i < tokens.end; i++) {
        const float *cos = heads->cos + position[i] * dim, *sin = heads->sin + position[i] * dim;
        float *q = qkv + i * across, *k = q + heads->heads * dim, *v = k + kv_heads * dim;
        if (norms->q) norm_heads(q, heads->heads, dim, norms->q, norms->q_epsilon);
        if (norms->k) norm_heads(k, kv_heads, dim, norms->k, norms->k_epsilon);
        for (int64_t h = 0; layer->rotates && h < heads->heads + kv_heads; h++) rotate(q + h * dim, cos, sin, dim);
        for (int64_t g = 0; g < kv_heads; g++) {
            int64_t block = cache->tables[sequence[i] * cache->width + position[i] / cache->block];
            int64_t at = ((block * kv_heads + g) * cache->block + position[i] % cache->block) * dim;
            memcpy(keys + at, k + g * dim, dim * sizeof(float));
            memcpy(values + at, v + g * dim, dim * sizeof(float));
        }
    }
}

/* Attention of some tokens. `scores` is workspace for the queries of one kv head. */
static void attend_blocks(
    const Heads *heads, const Cache *cache, Part tokens, const float *qkv, const int64_t *sequence,
    const int64_t *position, const Layer *layer, const float *keys, const float *values, float *scores, float *out) {
    int64_t dim = heads->dim, kv_heads = heads->kv_heads, across = (heads->heads + 2 * kv_heads) * dim;
    int64_t share = heads->heads / kv_heads, window = layer->window;
    for (int64_t i = tokens.first; i < tokens.end; i++) {
        int64_t first = window && position[i] >= window ? position[i] - window + 1 : 0;
        for (int64_t g = 0; g < kv_heads; g++) {
            int64_t at = g * cache->block * dim, stride = kv_heads * cache->block * dim;
            const int32_t *table = cache->tables + sequence[i] * cache->width;
            int64_t shift = __builtin_ctzll((uint64_t)cache->block);
            Paged k = {keys + at, table, stride, shift, dim, first}, v = {values + at, table, stride, shift, dim, first};
            attend(
                dim, share, qkv + i * across + g * share * dim, &k, &v, position[i] - first + 1, layer->scale, scores,
                out + (i * kv_heads + g) * share * dim);
        }
    }
}

/* SiLU(gate) · up. */
static void gate(float *x, const float *both, Part rows, int64_t inner) {
    for (int64_t i = rows.first; i < rows.end; i++)
        for (int64_t j = 0; j < inner; j++) {
            float g = both[2 * i * inner + j], up = both[(2 * i + 1) * inner + j];
            x[i * inner + j] = g / (1.0f + exp_of(-g)) * up;
        }
}

/* --- the model -------------------------------------------------------------------------------------------------- */

/* Maximum number of floats per token in the inputs of a matrix product, and in the outputs. */
static int64_t most_before(const Model *model) {
    int64_t queries = model->heads.heads * model->heads.dim;
    int64_t most = model->width > queries ? model->width : queries;
    return most > model->inner ? most : model->inner;
}

static int64_t most_after(const Model *model) {
    int64_t across = (model->heads.heads + 2 * model->heads.kv_heads) * model->heads.dim;
    return 2 * model->inner > across ? 2 * model->inner : across;
}

/* Workspace of one thread for the scores of the queries of one kv head. */
static int64_t scores_workspace(const Model *model) {
    return model->heads.heads / model->heads.kv_heads * (model->heads.length + LANES);
}

/* Workspace of `run` in floats for `m` tokens and `parts` threads. */
int64_t run_workspace(const Model *model, int64_t m, int64_t parts) {
    return m * (most_before(model) + most_after(model)) + parts * scores_workspace(model);
}

/* Run `m` tokens with embeddings `hidden`, each at `position` of a sequence. Writes the logits of those in `keep`. */
void run(
    const Model *model, int64_t m, float *hidden, const int64_t *sequence, const int64_t *position, const int64_t *keep,
    int64_t n_keep, float *logits, float *workspace, int64_t part, Team *team) {
    const Heads *heads = &model->heads;
    const Cache *cache = &model->cache;
    int64_t width = model->width, per_layer = cache->blocks * heads->kv_heads * cache->block * heads->dim;
    float *x = workspace, *y = x + m * most_before(model), *scores = y + m * most_after(model);
    Part rows = part_of(m, part, team), kept = part_of(n_keep, part, team);
    int64_t first = rows.first * width, n = rows.end - rows.first;
    scores += part * scores_workspace(model);
    for (int64_t l = 0; l < model->n_layers; l++) {
        const Layer *layer = model->layers + l;
        float *keys = cache->store + 2 * l * per_layer, *values = keys + per_layer;
        normed(hidden + first, x + first, n, width, layer->input_epsilon);
        barrier(team);
        multiply(&layer->qkv, m, x, y, 0, part, team);
        barrier(team);
        store(heads, cache, layer, rows, y, sequence, position, keys, values);
        barrier(team);
        attend_blocks(heads, cache, rows, y, sequence, position, layer, keys, values, scores, x);
        barrier(team);
        multiply(&layer->out, m, x, hidden, 1, part, team);
        barrier(team);
        normed(hidden + first, x + first, n, width, layer->post_epsilon);
        barrier(team);
        multiply(&layer->gate_up, m, x, y, 0, part, team);
        barrier(team);
        gate(x, y, rows, model->inner);
        barrier(team);
        multiply(&layer->down, m, x, hidden, 1, part, team);
        barrier(team);
    }
    for (int64_t i = kept.first; i < kept.end; i++)
        normed(hidden + keep[i] * width, x + i * width, 1, width, model->final_epsilon);
    barrier(team);
    multiply(&model->head, n_keep, x, logits, 0, part, team);
    barrier(team);
}

/* --- tokens ----------------------------------------------------------------------------------------------------- */

/* Sample a token for each of `m` rows of logits. See `draw_workspace` for `workspace`. */
void draw(
    int64_t m, int64_t vocabulary, const float *logits, const Sampling *sampling, int64_t *token, float *logprob,
    float *raw, float *workspace) {
    for (int64_t i = 0; i < m; i++)
        token[i] = drawn(logits + i * vocabulary, vocabulary, sampling, i, logprob + i, raw + i, workspace);
}

/* Workspace of `decode` in floats for `m` sequences and `parts` threads. */
int64_t decode_workspace(const Model *model, int64_t m, int64_t parts) {
    int64_t vocabulary = model->head.columns;
    return parts * draw_workspace(vocabulary) + m * (model->width + vocabulary) + run_workspace(model, m, parts);
}

/* Sample at most `n` tokens for each of `m` sequences, until one of them samples an end token or has logits that are
   not finite. Returns the number of steps. `token`, `position` and `step` describe the last tokens and are advanced.
   Results are [steps, m]. */
int64_t decode(
    const Model *model, const float *embedding, int64_t m, int64_t n, int64_t *token, int64_t *position,
    const int64_t *sequence, const Sampling *sampling, int64_t *step, const uint8_t *is_end, int64_t *tokens,
    float *logprobs, float *raws, float *workspace, int64_t part, Team *team) {
    int64_t width = model->width, vocabulary = model->head.columns;
    Part rows = part_of(m, part, team);
    int64_t of_one = draw_workspace(vocabulary);
    float *weights = workspace + part * of_one, *hidden = workspace + team->parts * of_one;
    float *logits = hidden + m * width, *rest = logits + m * vocabulary;
    for (int64_t done = 1;; done++, tokens += m, logprobs += m, raws += m) {
        for (int64_t i = rows.first; i < rows.end; i++)
            memcpy(hidden + i * width, embedding + token[i] * width, width * sizeof(float));
        run(model, m, hidden, sequence, position, sequence, m, logits, rest, part, team);
        for (int64_t i = rows.first; i < rows.end; i++)
            tokens[i] = drawn(logits + i * vocabulary, vocabulary, sampling, i, logprobs + i, raws + i, weights);
        barrier(team);
        if (part == 0) {
            team->is_over = done == n;
            for (int64_t i = 0; i < m; i++) {
                team->is_over |= is_end[tokens[i]] || !isfinite(raws[i]);
                token[i] = tokens[i], position[i]++, step[i]++;
            }
        }
        barrier(team);
        if (team->is_over) return done;
    }
}
