// SPDX-License-Identifier: Apache-2.0
// Attention in one tile, to learn from and to compare with: a block holds all scores of ROWS rows of one head at once, so
// the softmax is three plain loops, and the length is limited by shared memory. sinkattn's kernels hold one tile of keys at
// a time instead. Causal, packed, with a window, sinks and GQA. naive.py compiles it at run time, without headers, and
// defines HEAD_DIM, ROWS, THREADS and IS_BF16.

typedef unsigned short element; // bits of bf16 or fp16

constexpr int SHARE = ROWS * HEAD_DIM / THREADS; // rows of out that a thread sums up, in one column

__device__ float to_float(element x) {
    if (IS_BF16) return __uint_as_float((unsigned)x << 16);
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

__device__ element from_float(float x) {
    element y;
    if (IS_BF16)
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    else
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// One of 32 values, the greatest or the sum, known to the whole warp.
template <bool MAXIMUM> __device__ float reduce(float x) {
    for (int other = 16; other; other /= 2) {
        float y = __shfl_xor_sync(~0u, x, other);
        x = MAXIMUM ? fmaxf(x, y) : x + y;
    }
    return x;
}

// The tile of rows from `first` on. queries: [ROWS][HEAD_DIM], then scores [ROWS][keys].
__device__ void attend(const element *q, const element *k, const element *v, const float *s_aux, int begin, int length, int first,
                       element *out, float *queries, int num_q_heads, int num_kv_heads, int window) {
    int rows = min(ROWS, length - first);
    int head = blockIdx.y, kv_head = head / (num_q_heads / num_kv_heads);
    int from = max(0, first - window + 1), keys = first + rows - from; // that some row sees
    float *scores = queries + ROWS * HEAD_DIM;
    q += ((long long)(begin + first) * num_q_heads + head) * HEAD_DIM;
    out += ((long long)(begin + first) * num_q_heads + head) * HEAD_DIM;
    k += ((long long)(begin + from) * num_kv_heads + kv_head) * HEAD_DIM;
    v += ((long long)(begin + from) * num_kv_heads + kv_head) * HEAD_DIM;

    for (int i = threadIdx.x; i < rows * HEAD_DIM; i += THREADS)
        queries[i] = to_float(q[(long long)(i / HEAD_DIM) * num_q_heads * HEAD_DIM + i % HEAD_DIM]) * rsqrtf(HEAD_DIM);
    __syncthreads();

    for (int key = threadIdx.x; key < keys; key += THREADS) {
        float sums[ROWS] = {};
        for (int d = 0; d < HEAD_DIM; ++d) {
            float x = to_float(k[(long long)key * num_kv_heads * HEAD_DIM + d]);
            for (int row = 0; row < ROWS; ++row) sums[row] += queries[row * HEAD_DIM + d] * x;
        }
        for (int row = 0; row < ROWS; ++row) {
            int behind = first + row - (from + key);
            scores[row * keys + key] = behind >= 0 && behind < window ? sums[row] : __int_as_float(0xff800000); // -inf
        }
    }
    __syncthreads();

    for (int row = threadIdx.x / 32; row < rows; row += THREADS / 32) {
        float pivot = s_aux[head], sum = 0;
        for (int key = threadIdx.x % 32; key < keys; key += 32) pivot = fmaxf(pivot, scores[row * keys + key]);
        pivot = reduce<true>(pivot);
        for (int key = threadIdx.x % 32; key < keys; key += 32) {
            float weight = __expf(scores[row * keys + key] - pivot);
            scores[row * keys + key] = weight;
            sum += weight;
        }
        sum = reduce<false>(sum) + __expf(s_aux[head] - pivot);
        for (int key = threadIdx.x % 32; key < keys; key += 32) scores[row * keys + key] /= sum;
    }
    __syncthreads();

    int d = threadIdx.x % HEAD_DIM, mine = threadIdx.x / HEAD_DIM * SHARE;
    float sums[SHARE] = {};
    for (int key = 0; key < keys; ++key) {
        float x = to_float(v[(long long)key * num_kv_heads * HEAD_DIM + d]);
        for (int i = 0; i < SHARE; ++i) sums[i] += scores[(mine + i) * keys + key] * x;
    }
    for (int i = 0; i < SHARE && mine + i < rows; ++i) out[(long long)(mine + i) * num_q_heads * HEAD_DIM + d] = from_float(sums[i]);
}

// q, out [total, num_q_heads, HEAD_DIM]; k, v [total, num_kv_heads, HEAD_DIM]; s_aux [num_q_heads], -inf for none.
// Grid (tiles of ROWS rows of the longest sequence, num_q_heads, sequences); a block takes every gridDim.x-th tile of its
// sequence, so with gridDim.x = 1 all of a sequence and head. A row sees `window` keys, itself the last.
extern "C" __global__ void __launch_bounds__(THREADS)
    naive_forward(const element *q, const element *k, const element *v, const float *s_aux, const int *cu_seqlens, element *out,
                  int num_q_heads, int num_kv_heads, int window) {
    extern __shared__ float shared[];
    int begin = cu_seqlens[blockIdx.z], length = cu_seqlens[blockIdx.z + 1] - begin;
    for (int first = blockIdx.x * ROWS; first < length; first += gridDim.x * ROWS) {
        attend(q, k, v, s_aux, begin, length, first, out, shared, num_q_heads, num_kv_heads, window);
        __syncthreads(); // the next tile overwrites the scores
    }
}
