// SPDX-License-Identifier: Apache-2.0
//
// One tile with at most 8 rows of a kv head: the functions of tile.cuh with keys, or columns of O, in M of mma.sync and the rows in N,
// which 8 rows fill. Two kv heads of 8 rows each may form a stream of 16: then a warp has two independent chains of instructions and reads
// 256 bytes a token where the heads are neighbours.
#pragma once

#include "cuda/decode/tile.cuh"

namespace sa::decode {

// The state of a warp's stream, Q and O transposed. o[j][n][2 i + x]: column 16 j + fragment_row(i) of row fragment_column() + x of head n.
// pivot[n][x], in log2 units, and sum[n][x], over this lane's keys, belong to that row.
template <class C> struct RowsInN {
    uint32_t q[C::kHeadDim / 16][C::kEights][2];
    float o[C::kHeadDimV / 16][C::kEights][4] = {};
    float pivot[C::kEights][2], sum[C::kEights][2] = {};

    __device__ __forceinline__ RowsInN() {
        for (auto &head : pivot) head[0] = head[1] = -INFINITY;
    }
};

template <class C> __device__ __forceinline__ void set_query(RowsInN<C> &rows, int half, int chunk, uint32_t x) {
    rows.q[chunk / 2][half][chunk % 2] = x;
}

// s[n][2 i + x] = K Q^T: key fragment_row(i), row fragment_column() + x of head n.
template <class C>
__device__ __forceinline__ void qk_product(float (&s)[C::kEights][4], const RowsInN<C> &rows, uint32_t, uint32_t k, float scale) {
    for (auto &head : s)
        for (float &x : head) x = 0.0f;
#pragma unroll
    for (int step = 0; step < C::kHeadDim / 16; step++)
#pragma unroll
        for (int n = 0; n < C::kEights; n++) {
            uint32_t keys[4];
            ldmatrix_x4(keys, pairs_on(k, step) + n * C::kHeadBytes);
            mma_m16n8k16<typename C::Element>(s[n], keys, rows.q[step][n][0], rows.q[step][n][1]);
        }
    if (scale < 0.0f)
        for (auto &head : s)
            for (float &x : head) x = -x;
}

// All rows belong to one token, so they see the same keys.
template <class C> __device__ __forceinline__ void mask_tile(float (&s)[C::kEights][4], const RowsInN<C> &, const Row *seen, int32_t tile) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (sees(*seen, tile * kTileK + fragment_row(i))) continue;
        for (int n = 0; n < C::kEights; n++) s[n][2 * i] = s[n][2 * i + 1] = -INFINITY;
    }
}

template <class C> __device__ __forceinline__ void softmax_step(float (&s)[C::kEights][4], RowsInN<C> &rows, float scale_log2, int) {
#pragma unroll
    for (int n = 0; n < C::kEights; n++) {
        float alpha[2];
#pragma unroll
        for (int x = 0; x < 2; x++) {
            const float top = column_max(fmaxf(s[n][x], s[n][2 + x])) * scale_log2, before = rows.pivot[n][x];
            const float pivot = top > before ? top : before;
            const float from = pivot == -INFINITY ? 0.0f : pivot;
            alpha[x] = before == pivot ? 1.0f : exp2_approx(before - from);
            s[n][x] = exp2_approx(fmaf(s[n][x], scale_log2, -from));
            s[n][2 + x] = exp2_approx(fmaf(s[n][2 + x], scale_log2, -from));
            rows.pivot[n][x] = pivot;
            rows.sum[n][x] = rows.sum[n][x] * alpha[x] + (s[n][x] + s[n][2 + x]);
        }
        if (!__any_sync(0xffffffffu, (alpha[0] != 1.0f) | (alpha[1] != 1.0f))) continue;
#pragma unroll
        for (int j = 0; j < C::kHeadDimV / 16; j++)
#pragma unroll
            for (int x = 0; x < 4; x++) rows.o[j][n][x] *= alpha[x % 2];
    }
}

template <class C> __device__ __forceinline__ void pv_product(RowsInN<C> &rows, const float (&p)[C::kEights][4], uint32_t v) {
    uint32_t b[C::kEights][2], rest[C::kEights][2];
#pragma unroll
    for (int x = 0; x < 2 * C::kEights; x++) {
        const RoundedPair pair = round_pair<typename C::Element>(p[x / 2][2 * (x & 1)], p[x / 2][2 * (x & 1) + 1]);
        b[x / 2][x & 1] = transposed(pair.high);
        if constexpr (kSplitsP<C>) rest[x / 2][x & 1] = transposed(pair.rest);
    }
#pragma unroll
    for (int j = 0; j < C::kHeadDimV / 16; j++)
#pragma unroll
        for (int n = 0; n < C::kEights; n++) {
            uint32_t values[4];
            ldmatrix_x4_trans(values, pairs_on(v, j) + n * C::kHeadBytes);
            mma_m16n8k16<typename C::Element>(rows.o[j][n], values, b[n][0], b[n][1]);
            if constexpr (kSplitsP<C>) mma_m16n8k16<Bf16>(rows.o[j][n], values, rest[n][0], rest[n][1]);
        }
}

// Writes the warp's rows to shared memory as a partial.
template <class C> __device__ __forceinline__ void leave_partial(float *partial, RowsInN<C> &rows, int num_rows, int) {
#pragma unroll
    for (int n = 0; n < C::kEights; n++)
#pragma unroll
        for (int x = 0; x < 2; x++) {
            const float sum = column_sum(rows.sum[n][x]);
            const int row = 8 * n + fragment_column() + x;
            if (row >= num_rows) continue;
            float *to = partial + row * C::kPartialRow;
#pragma unroll
            for (int j = 0; j < C::kHeadDimV / 16; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) to[16 * j + fragment_row(i)] = rows.o[j][n][2 * i + x];
            if (threadIdx.x % 32 < 4) *reinterpret_cast<float2 *>(to + C::kHeadDimV) = {rows.pivot[n][x], sum};
        }
}

} // namespace sa::decode
