/* What a decode step on a CPU does between its matrix products, in bfloat16: attention that reads K and V where they lie, RMS
 * norm, rotary embedding. Knows no requests and no memory but what it is handed; `cpu_kernels.py` compiles, checks and calls it.
 *
 * Sums are in float32, and each result is rounded once. What a row gives depends on that row alone, not on the batch.
 *
 * Vectors are the compiler's own (GCC's vector extensions): the same source becomes AVX-512, AVX2 or NEON.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

#define LANES 16
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline))

INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* To the nearest, and of two to the even one. A NaN stays one: it must not grow into an infinity. */
INLINE bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (bf16)(bits >> 16 | 0x40);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* --- vectors ----------------------------------------------------------------------------------------------------------- */

#ifdef __clang__
#define SHUFFLED(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else /* GCC knows the other only from 12 on */
#define SHUFFLED(x, y, ...) __builtin_shuffle(x, y, (ints){__VA_ARGS__})
#endif

/* 32 numbers, those at even places and those at odd ones: two operations, where keeping their order takes eight. */
typedef struct { floats even, odd; } pair;

INLINE pair load_pair(const bf16 *at) {
    words both;
    memcpy(&both, at, sizeof both);
    return (pair){(floats)(both << 16), (floats)(both & 0xffff0000u)};
}

/* The sums of 16 vectors: neighbours are added four times over. */
INLINE floats sums(floats *x) {
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++)
            x[i] = SHUFFLED(x[2 * i], x[2 * i + 1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
                 + SHUFFLED(x[2 * i], x[2 * i + 1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return x[0];
}

INLINE floats pick(ints where, floats x, floats y) { return (floats)(((ints)x & where) | ((ints)y & ~where)); }

#define TURNED(x, n) SHUFFLED(x, x, n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7, (n + 8) % LANES, (n + 9) % LANES, \
    (n + 10) % LANES, (n + 11) % LANES, (n + 12) % LANES, (n + 13) % LANES, (n + 14) % LANES, (n + 15) % LANES)

INLINE float total(floats x) {
    x += TURNED(x, 8);
    x += TURNED(x, 4);
    x += TURNED(x, 2);
    return x[0] + x[1];
}

INLINE float largest(floats x) {
    x = pick(TURNED(x, 8) > x, TURNED(x, 8), x);
    x = pick(TURNED(x, 4) > x, TURNED(x, 4), x);
    x = pick(TURNED(x, 2) > x, TURNED(x, 2), x);
    return x[0] > x[1] ? x[0] : x[1];
}

/* e to the power of x ≤ 0, to 3e-7 of it, and 2^-126 for all that is less: 2^n × 2^f with |f| ≤ 0.5, the second as its Taylor
 * polynomial. NaN stays NaN. */
INLINE floats exp_nonpositive(floats x) {
    const float rounds = 12582912.0f; /* 1.5 × 2^23: adding it leaves no fraction */
    const floats least = (floats){0} - 126.0f;
    floats t = x * 1.44269504f;
    t = pick(t < least, least, t);
    floats n = (t + rounds) - rounds, f = t - n;
    floats power = f * 1.5403530e-4f + 1.3333558e-3f;
    power = power * f + 9.6181291e-3f;
    power = power * f + 5.5504109e-2f;
    power = power * f + 2.4022651e-1f;
    power = power * f + 6.9314718e-1f;
    power = power * f + 1.0f;
    return power * (floats)((__builtin_convertvector(n, ints) + 127) << 23);
}

/* --- attention --------------------------------------------------------------------------------------------------------- */

#define TILE LANES /* tokens that are looked at together: one vector of scores */
#define MAX_PAIRS 8 /* head_dim 256 */

/* `rows` [TILE][pairs]. What lies behind the sequence's last token is not read. */
INLINE void widen_rows(pair *rows, const bf16 *in, int num_tokens, int64_t stride, int pairs) {
    for (int t = 0; t < TILE; t++)
        for (int p = 0; p < pairs; p++)
            rows[t * pairs + p] = t < num_tokens ? load_pair(in + t * stride + p * 2 * LANES) : (pair){{0}, {0}};
}

/* One tile for the query heads of one KV head. `query` and `found` [group][pairs], `top` and `sum` [group]: the largest score so
 * far, and what the weights up to here sum to, relative to it ("online softmax", Milakov and Gimelshein, arXiv 1805.02867). */
INLINE void attend_tile(pair *found, float *top, float *sum, const pair *query, const bf16 *keys, const bf16 *values,
                        int num_tokens, int64_t stride, int group, int pairs) {
    pair key_rows[TILE * MAX_PAIRS], value_rows[TILE * MAX_PAIRS];
    ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ints is_token = lane < num_tokens;
    widen_rows(key_rows, keys, num_tokens, stride, pairs);
    widen_rows(value_rows, values, num_tokens, stride, pairs);
    for (int g = 0; g < group; g++) {
        floats products[TILE];
        for (int t = 0; t < TILE; t++) {
            floats product = query[g * pairs].even * key_rows[t * pairs].even;
            product += query[g * pairs].odd * key_rows[t * pairs].odd;
            for (int p = 1; p < pairs; p++) {
                product += query[g * pairs + p].even * key_rows[t * pairs + p].even;
                product += query[g * pairs + p].odd * key_rows[t * pairs + p].odd;
            }
            products[t] = product;
        }
        floats scores = sums(products);
        scores = pick(is_token, scores, (floats){0} - INFINITY);
        float new_top = largest(scores);
        new_top = top[g] > new_top ? top[g] : new_top;
        floats fall = {top[g] - new_top};
        float shrink = exp_nonpositive(fall)[0];
        floats weights = pick(is_token, exp_nonpositive(scores - new_top), (floats){0});
        top[g] = new_top;
        sum[g] = sum[g] * shrink + total(weights);
        for (int p = 0; p < pairs; p++) {
            floats even = found[g * pairs + p].even * shrink, odd = found[g * pairs + p].odd * shrink;
            for (int t = 0; t < TILE; t++) {
                even += weights[t] * value_rows[t * pairs + p].even;
                odd += weights[t] * value_rows[t * pairs + p].odd;
            }
            found[g * pairs + p] = (pair){even, odd};
        }
    }
}

/* `num_heads` KV heads of one sequence, and the `group` query heads of each. */
INLINE void attend_sequence(bf16 *out, const bf16 *query, const bf16 *keys, const bf16 *values, const int64_t *table,
                            int64_t length, int64_t block_size, int64_t stride, int num_heads, int group, int pairs,
                            float scale) {
    pair states[num_heads * group * pairs], found[num_heads * group * pairs]; /* 128 heads of 128: 64 KiB each */
    float top[num_heads * group], sum[num_heads * group];
    int dim = pairs * 2 * LANES;
    for (int i = 0; i < num_heads * group * pairs; i++) {
        pair state = load_pair(query + i * 2 * LANES);
        states[i] = (pair){state.even * scale, state.odd * scale};
        found[i] = (pair){{0}, {0}};
    }
    for (int h = 0; h < num_heads * group; h++) {
        top[h] = -INFINITY;
        sum[h] = 0;
    }
    for (int64_t start = 0; start < length; start += TILE) {
        int num_tokens = length - start < TILE ? (int)(length - start) : TILE;
        int64_t at = (table[start / block_size] * block_size + start % block_size) * stride;
        for (int h = 0; h < num_heads; h++)
            attend_tile(found + h * group * pairs, top + h * group, sum + h * group, states + h * group * pairs,
                        keys + at + h * dim, values + at + h * dim, num_tokens, stride, group, pairs);
    }
    for (int h = 0; h < num_heads * group; h++)
        for (int p = 0; p < pairs; p++)
            for (int i = 0; i < LANES; i++) {
                out[h * dim + p * 2 * LANES + 2 * i] = narrow(found[h * pairs + p].even[i] / sum[h]);
                out[h * dim + p * 2 * LANES + 2 * i + 1] = narrow(found[h * pairs + p].odd[i] / sum[h]);
            }
}

/* One token of each sequence. `out` [seqs][heads][dim]; `query` the same, `query_stride` from one sequence to the next; `keys`
 * and `values` [blocks][block_size][kv_heads][dim]; `tables` [seqs][width]; `lengths` [seqs], this token included. */
void decode_attention(bf16 *out, const bf16 *query, int64_t query_stride, const bf16 *keys, const bf16 *values,
                      const int64_t *tables, int64_t width, const int64_t *lengths, int64_t num_seqs, int64_t block_size,
                      int64_t num_kv_heads, int64_t group, int64_t dim, float scale) {
    /* A few sequences are divided by heads, so that all cores have some. Whole ones read memory in its order. */
    int64_t parts = num_seqs < 8 ? num_kv_heads : 1, heads = num_kv_heads / parts;
    /* Who is done takes the next: contexts differ in length. One of 1,900 tokens among three of 100: 4.6 ms, not 7.0. */
    #pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < num_seqs * parts; i++) {
        int64_t seq = i / parts, head = i % parts * heads;
        bf16 *o = out + (seq * num_kv_heads + head) * group * dim;
        const bf16 *q = query + seq * query_stride + head * group * dim, *k = keys + head * dim, *v = values + head * dim;
        const int64_t *table = tables + seq * width;
        int64_t length = lengths[seq], stride = num_kv_heads * dim;
        int pairs = (int)dim / (2 * LANES);
        /* The usual sizes as constants: what is summed up then stays in registers. */
        if (pairs == 2) attend_sequence(o, q, k, v, table, length, block_size, stride, (int)heads, (int)group, 2, scale);
        else if (pairs == 4) attend_sequence(o, q, k, v, table, length, block_size, stride, (int)heads, (int)group, 4, scale);
        else attend_sequence(o, q, k, v, table, length, block_size, stride, (int)heads, (int)group, pairs, scale);
    }
}

/* --- rows -------------------------------------------------------------------------------------------------------------- */

/* `out`, `in` [rows][width]: in / sqrt(mean(in²) + eps) × weight */
void rms_norm(bf16 *out, const bf16 *in, const bf16 *weight, int64_t num_rows, int64_t width, float eps) {
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
        const bf16 *x = in + r * width;
        float sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += widen(x[i]) * widen(x[i]);
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        for (int64_t i = 0; i < width; i++) out[r * width + i] = narrow(widen(x[i]) * scale * widen(weight[i]));
    }
}

/* The first `num_heads` heads of each row of `states`, `stride` from one row to the next, in place: x × cos + swapped × sin, the
 * halves of each head swapped. `cos` and `sin` [rows][dim], `sin` with the sign that its half needs. */
void rotate(bf16 *states, int64_t stride, const bf16 *cos, const bf16 *sin, int64_t num_rows, int64_t num_heads, int64_t dim) {
    int64_t half = dim / 2;
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < num_rows; r++)
        for (int64_t h = 0; h < num_heads; h++) {
            bf16 *x = states + r * stride + h * dim;
            const bf16 *c = cos + r * dim, *s = sin + r * dim;
            for (int64_t d = 0; d < half; d++) {
                float first = widen(x[d]), second = widen(x[half + d]);
                x[d] = narrow(first * widen(c[d]) + second * widen(s[d]));
                x[half + d] = narrow(second * widen(c[half + d]) + first * widen(s[half + d]));
            }
        }
}
