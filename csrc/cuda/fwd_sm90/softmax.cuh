// SPDX-License-Identifier: Apache-2.0
//
// The softmax of the general forward on sm_90. A thread has two of its math warpgroup's 64 rows; element i of its scores lies in row
// element_row(i) of the two.
#pragma once

#include "cuda/fwd_sm90/rows.cuh"
#include "cuda/tile/mma.cuh"
#include "cuda/tile/pivot.cuh"
#include "cuda/tile/sink.cuh"

namespace sa::fwd_sm90 {

// pivot in log2 units; sum over this thread's columns.
struct Softmax {
    float pivot[2] = {-INFINITY, -INFINITY}, sum[2] = {};
};

// Token and head of a row in the tile.
struct TokenHead {
    int token, head;
};

// The 64 rows of a math warpgroup in a tile of rows.
template <class C> struct WarpgroupRows {
    const Problem &p;
    const Rows<C> &rows;
    const int math_warpgroup;

    __device__ __forceinline__ const sa_key_tiles &tiles() const { return rows.warpgroup_tiles[math_warpgroup]; }

    // The i-th of the thread's two rows. Compiler fence: computed again at each use, which saves a register.
    __device__ __forceinline__ TokenHead row(int i) const {
        unsigned thread = threadIdx.x % 128;
        asm volatile("" : "+r"(thread));
        const int row = 64 * math_warpgroup + warpgroup_row(thread, i), token = row * p.group_inverse >> 16;
        return {token, row - token * p.group};
    }
};

// Sets scores to -inf where the row does not see the key: after its last one, or before its window and no sink token.
template <class C> __device__ __forceinline__ void mask_tile(float (&s)[C::kTileK / 2], const WarpgroupRows<C> &own, int t) {
    const int column = t * C::kTileK + fragment_column();
    const int token[2] = {own.row(0).token, own.row(1).token};
    if (t >= own.tiles().full_end) {
        const int end[2] = {own.rows.keys(token[0]).end - column, own.rows.keys(token[1]).end - column};
#pragma unroll
        for (int i = 0; i < C::kTileK / 2; i++)
            if (element_column(i) >= end[element_row(i)]) s[i] = -INFINITY;
    }
    if (t < own.tiles().full_begin) {
        int begin[2], sink_end[2];
        for (int r = 0; r < 2; r++) {
            const TokenKeys keys = own.rows.keys(token[r]);
            begin[r] = keys.begin - column;
            sink_end[r] = keys.sink_end - column;
        }
#pragma unroll
        for (int i = 0; i < C::kTileK / 2; i++) {
            const int j = element_column(i), r = element_row(i);
            if (j < begin[r] && j >= sink_end[r]) s[i] = -INFINITY;
        }
    }
}

// A row's pivot is its maximum in the first key tile that it sees. Later tiles are not searched for maxima, which would take a tenth of the
// time. The pivot moves only if a thread's sum of the row's weights in a tile exceeds kLarge, which P can still represent, and the maximum
// exceeds the pivot by more than kLazy in log2 units. Only the row's own data decide.

// Whether the thread's i-th row has seen no key before tile t, or nothing but -inf.
template <class C> __device__ __forceinline__ bool begins(int i, const Softmax &softmax, const WarpgroupRows<C> &own, int t) {
    return own.rows.first_tile(own.row(i).token) >= t || softmax.pivot[i] == -INFINITY;
}

// Whether any row of the warpgroup begins after tile t. All its warps get one answer, since they wait for products together.
template <class C> __device__ __forceinline__ bool begins_after(const Softmax &softmax, const WarpgroupRows<C> &own, int t) {
    return bar_any<128>(kMathBarrier + own.math_warpgroup, begins<C>(0, softmax, own, t + 1) || begins<C>(1, softmax, own, t + 1));
}

// The maximum of the thread's i-th row, in log2 units.
template <class C> __device__ __forceinline__ float maximum(int i, const float (&s)[C::kTileK / 2], float scale_log2) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; n++)
        for (int x = 0; x < 2; x++) top[x] = fmaxf(top[x], s[4 * n + 2 * i + x]);
    return quad_max(fmaxf(top[0], top[1])) * scale_log2;
}

// Makes `now` the row's pivot if it is larger by more than kLazy, and rescales the row's sum and O.
template <class C>
__device__ __forceinline__ void follow_maximum(int i, float now, float (&o)[C::kHeadDimV / 2], Softmax &softmax, bool follows) {
    const float before = softmax.pivot[i];
    if (!follows || !(now > before + kLazy)) return;
    const float alpha = exp2_approx(before - now);
    softmax.pivot[i] = now;
    softmax.sum[i] *= alpha;
#pragma unroll
    for (int n = 0; n < C::kHeadDimV / 8; n++)
        for (int x = 0; x < 2; x++) o[4 * n + 2 * i + x] *= alpha;
}

template <class C>
__device__ __forceinline__ void follow_maxima(
        const float (&s)[C::kTileK / 2], float (&o)[C::kHeadDimV / 2], Softmax &softmax, const WarpgroupRows<C> &own, int t) {
    const float now[2] = {maximum<C>(0, s, own.p.scale_log2), maximum<C>(1, s, own.p.scale_log2)};
#pragma unroll
    for (int i = 0; i < 2; i++) follow_maximum<C>(i, now[i], o, softmax, begins<C>(i, softmax, own, t));
}

// Scores become exp2(s - pivot). total: their sums, added in four independent chains.
template <class C>
__device__ __forceinline__ void exponentials(float (&s)[C::kTileK / 2], float (&total)[2], const Softmax &softmax, float scale_log2) {
    float sum[4] = {}, from[2];
#pragma unroll
    for (int r = 0; r < 2; r++) from[r] = softmax.pivot[r] == -INFINITY ? 0.0f : softmax.pivot[r];
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; i++) {
        s[i] = exp2_approx(fmaf(s[i], scale_log2, -from[element_row(i)]));
        sum[i % 4] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) total[r] = sum[2 * r] + sum[2 * r + 1];
}

// Scores again the rows whose weights in tile t exceed kLarge. Their scores are gone, so each warp recomputes them by mma.sync and treats
// those rows as if they began here. Other rows are unchanged. q, k: addresses of the warpgroup's first query and of the key tile.
template <class C>
__device__ __forceinline__ void outgrow(float (&s)[C::kTileK / 2], float (&total)[2], float (&o)[C::kHeadDimV / 2], Softmax &softmax,
        const WarpgroupRows<C> &own, int t, uint32_t q, uint32_t k) {
    const int lane = threadIdx.x % 32;
    bool large[2];
#pragma unroll
    for (int i = 0; i < 2; i++) large[i] = quad_any(total[i] > kLarge<typename C::Element>);
    q += warp_first_row(threadIdx.x) * kRowBytes;
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; n += 2) {
        float x[2][4] = {};
#pragma unroll 1
        for (int step = 0; step < C::kHeadDim / 16; step++) {
            uint32_t left[4], right[4];
            ldmatrix_x4(left, q + step / 4 * C::kQueryHalf + swizzled(left_row(lane), 2 * (step % 4) + left_chunk(lane)));
            ldmatrix_x4(right, k + step / 4 * C::kKeyHalf + swizzled(8 * n + right_row(lane), 2 * (step % 4) + right_chunk(lane)));
            mma_m16n8k16<typename C::Element>(x[0], left, right[0], right[1]);
            mma_m16n8k16<typename C::Element>(x[1], left, right[2], right[3]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (large[element_row(i)]) s[4 * n + i] = x[i / 4][i % 4];
    }
    __syncwarp(); // the lanes have read the keys
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int token = own.row(r).token, column = t * C::kTileK + fragment_column();
        const TokenKeys keys = own.rows.keys(token);
        const int begin = keys.begin - column, end = keys.end - column, sink_end = keys.sink_end - column;
#pragma unroll
        for (int i = 2 * r; i < C::kTileK / 2; i += i % 2 ? 3 : 1) {
            const int j = element_column(i);
            if (large[r] && (j >= end || (j < begin && j >= sink_end))) s[i] = -INFINITY;
        }
        follow_maximum<C>(r, maximum<C>(r, s, own.p.scale_log2), o, softmax, large[r]);
        float sum[2] = {};
#pragma unroll
        for (int i = 2 * r; i < C::kTileK / 2; i += i % 2 ? 3 : 1) {
            if (large[r]) s[i] = exp2_approx(fmaf(s[i], own.p.scale_log2, -softmax.pivot[r]));
            sum[i % 2] += s[i];
        }
        if (large[r]) total[r] = sum[0] + sum[1];
    }
}

// Ends each row: adds the sink and finds the factor of its O; two lanes of four write the LSE and, if requested, the raw one. Runs while
// the last product of values is in flight.
template <class C>
__device__ __forceinline__ void finish_softmax(
        float (&factor)[2], const Softmax &softmax, const sinkattn_fwd_args &args, const WarpgroupRows<C> &own) {
    for (int r = 0; r < 2; r++) factor[r] = RowEnd(softmax.pivot[r], softmax.sum[r], own.rows.s_aux[own.row(r).head]).factor();
    const int r = threadIdx.x % 4;
    const TokenHead row = own.row(r);
    if (r >= 2 || row.token >= own.rows.num_tokens()) return;
    const float pivot = r ? softmax.pivot[1] : softmax.pivot[0], its_sum = r ? softmax.sum[1] : softmax.sum[0];
    const int64_t at = own.rows.lse + row.head * args.problem.q_len + row.token;
    static_cast<float *>(args.lse)[at] = RowEnd(pivot, its_sum, own.rows.s_aux[row.head]).lse();
    if (args.lse_raw) static_cast<float *>(args.lse_raw)[at] = raw_lse(pivot, its_sum);
}

} // namespace sa::fwd_sm90
