// SPDX-License-Identifier: Apache-2.0
//
// The rows kernel of the general backward on sm_90: what products add to S and dP of each row, terms of ds_aux, and the items.
#pragma once

#include "cuda/bwd_sm90/work.cuh"
#include "cuda/tile/wgmma.cuh"

namespace sa::bwd_sm90 {

// The sum of one head's terms over a tile's rows.
__device__ __forceinline__ float sum_head(const float *terms, const BwdProblem &p, int head) {
    float sum = 0.0f;
    for (int row = head; row < p.tokens * p.group; row += p.group) sum += terms[row];
    return sum;
}

// Stores out . dout of rows that kLanes lanes hold together: of the thread's i-th row after i * 128 / kLanes others.
template <class Element, int kLanes, int kBatch>
__device__ __forceinline__ void store_deltas(float *to, const uint4 (&out)[kBatch], const uint4 (&dout)[kBatch]) {
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
        float delta = dot<Element>(out[i], dout[i]);
#pragma unroll
        for (int x = kLanes / 2; x > 0; x /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, x);
        if (threadIdx.x % kLanes == 0) to[i * 128 / kLanes] = delta;
    }
}

// Zeroes dq of rows that see no key.
template <class C>
__device__ __forceinline__ void zero_dq(
        const sinkattn_bwd_args &args, const BwdProblem &p, const sa_sequence &sequence, int first, int rows, int first_head) {
    constexpr int kLanes = C::kHalvesV * 8;
#pragma unroll 1
    for (int row = static_cast<int>(threadIdx.x) / kLanes; row < rows; row += 128 / kLanes) {
        const int token = divide(row, p.by_group), head = first_head + row - token * p.group;
        auto *to = static_cast<uint16_t *>(args.dq.data) + sa_offset(&args.dq, sequence.batch, sequence.q_begin + first + token, head);
        for (int column = static_cast<int>(threadIdx.x) % kLanes * 8; head < p.num_q_heads && column < args.fwd.problem.head_dim;
                column += 8 * kLanes)
            *reinterpret_cast<uint4 *>(to + column) = uint4{0, 0, 0, 0};
    }
}

// A thread's place in rows of a tensor, and the distances to the next one's: usual, and what is added past the last head.
struct RowWalk {
    const uint16_t *at;
    int64_t step, wrap;
};

// delta of a tile's rows, each by kLanes lanes. Calls meanwhile() while the first loads are in flight.
template <class C, class Meanwhile>
__device__ __forceinline__ void find_deltas(float *deltas, const sinkattn_bwd_args &args, const BwdProblem &p, const sa_sequence &sequence,
        int first, int rows, int first_head, const Meanwhile &meanwhile) {
    constexpr int kLanes = C::kHalvesV * 8, kStep = 128 / kLanes, kSteps = C::kRows / kStep, kBatch = C::kIsWide ? 4 : 8; // loads at a time
    const int thread = static_cast<int>(threadIdx.x), lane_row = thread / kLanes, column = thread % kLanes * 8,
              step_tokens = divide(kStep, p.by_group), step_heads = kStep - step_tokens * p.group, token = divide(lane_row, p.by_group);
    int head = lane_row - token * p.group; // of the next row
    const auto walk_of = [&](const sinkattn_tensor &x) -> RowWalk {
        const int64_t at = sa_offset(&x, sequence.batch, sequence.q_begin + first + token, first_head + head) + column;
        return {static_cast<const uint16_t *>(x.data) + at, step_tokens * x.row_stride + step_heads * x.head_stride,
                x.row_stride - p.group * x.head_stride};
    };
    RowWalk outs = walk_of(args.fwd.out), douts = walk_of(args.dout);
    const int64_t columns = sa_head_dim_v(&args.fwd.problem);
#pragma unroll
    for (int first_step = 0; first_step < kSteps; first_step += kBatch) {
        uint4 out[kBatch] = {}, dout[kBatch] = {};
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
            if ((first_step + i) * kStep + lane_row < rows && first_head + head < p.num_q_heads && column < columns) {
                out[i] = *reinterpret_cast<const uint4 *>(outs.at);
                dout[i] = *reinterpret_cast<const uint4 *>(douts.at);
            }
            head += step_heads;
            const bool wraps = head >= p.group;
            if (wraps) head -= p.group;
            for (RowWalk *walk : {&outs, &douts}) walk->at += walk->step + (wraps ? walk->wrap : 0);
        }
        if (first_step == 0) meanwhile();
        store_deltas<typename C::Element, kLanes>(deltas + first_step * kStep + lane_row, out, dout);
    }
}

// The sum of a tile's dQ, which is the n-th of all slices, where key blocks leave their parts apart.
template <class C>
__device__ __forceinline__ TileSum tile_sum_of(const sinkattn_bwd_args &args, const BwdProblem &p, const BwdBuffers &buffers,
        const sa_sequence &sequence, const sa_band &band, int64_t n, int t, int slice) {
    const BlocksSeen seen = blocks_seen<C>(band, p, t);
    const int64_t row = static_cast<int64_t>(t) * p.tokens;
    return {reinterpret_cast<const float4 *>(buffers.slots + n * p.parts * C::kTileFloats),
            static_cast<uint16_t *>(args.dq.data) + sa_offset(&args.dq, sequence.batch, sequence.q_begin + row, slice * p.group),
            seen.before(seen.end), static_cast<int>(sa_min(p.tokens, sequence.q_len - row))};
}

// A block prepares one row tile of a slice; the last blocks write items instead: only these wait for a packed batch's table, the others
// overlap its kernel. Neighbouring heads have neighbouring blocks, as their rows are neighbours in memory.
template <class C>
__global__ __launch_bounds__(128, 4) void rows_kernel(const __grid_constant__ sinkattn_bwd_args args, BwdProblem p, BwdBuffers buffers) {
    __shared__ float deltas[C::kRows], terms[C::kRows];
    const int heads = p.room.num_heads, n = static_cast<int>(blockIdx.x), nth_tile = divide(n, p.by_heads), slice = n - nth_tile * heads;
    if (nth_tile >= p.num_tiles) return begin_items<C>(args, p, buffers, n - static_cast<int>(p.num_tiles) * heads);
    const sinkattn_problem &problem = args.fwd.problem;
    const auto b =
            problem.packed ? packed_sequence_of_tile(args.fwd, p.tokens, nth_tile) : static_cast<unsigned>(divide(nth_tile, p.by_tiles));
    const sa_sequence sequence = sequence_or_tail(args.fwd, b);
    const int first_tile = static_cast<int>(problem.packed ? packed_first_tile(args.fwd, p.tokens, b) : b * p.dense_tiles),
              t = nth_tile - first_tile, first = t * p.tokens, rows = min(p.tokens, static_cast<int>(sequence.q_len) - first) * p.group;
    const int row = threadIdx.x, token = divide(row, p.by_group), first_head = slice * p.group, head = first_head + row - token * p.group;
    if (p.parts && threadIdx.x == 0) buffers.tile_sums[n] = {};
    if (t < 0 || rows <= 0) { // a packed sequence may have one tile less than are counted
        if (buffers.row_terms && row < p.heads_of(slice)) buffers.row_terms[(first_head + row) * p.num_tiles + nth_tile] = 0.0f;
        return;
    }
    const bool is_tail = b >= problem.batch, has_sink = buffers.row_terms && args.fwd.s_aux && !is_tail;
    const sa_band band = sa_band_of(&problem.mask, sequence.q_len, sequence.k_len);
    const bool blind = is_tail || t < num_blind_tiles(p, band);
    const int64_t tile = int64_t{heads} * first_tile + slice * num_tiles_of(p, band.q_len) + t;
    if (threadIdx.x == 0 && p.parts && !blind) buffers.tile_sums[n] = tile_sum_of<C>(args, p, buffers, sequence, band, tile, t, slice);
    // Reads the row's statistics first: p_sink is computed from them while the longer reads of out and dO are in flight.
    const bool is_row = row < rows && head < p.num_q_heads;
    float found = 0.0f, g = 0.0f;
    double s_aux = 0.0;
    if (is_row) {
        const int64_t at = sa_row_index(&problem, &sequence, head, first + token);
        found = static_cast<const float *>(args.fwd.lse)[at];
        if (args.dlse) g = static_cast<const float *>(args.dlse)[at];
        if (has_sink) s_aux = sa_s_aux(&args.fwd, head);
    }
    if (blind) zero_dq<C>(args, p, sequence, first, rows, first_head);
    float p_sink = 0.0f;
    find_deltas<C>(deltas, args, p, sequence, first, rows, first_head, [&] {
        if (has_sink && is_row) p_sink = static_cast<float>(sa_exp_minus(s_aux, found));
    });
    __syncthreads();
    const bool is_dead = found == -INFINITY;
    constexpr float kMost = 3.38953139e38f; // of bfloat16: P of an infinite lse is 0, not NaN
    const float of_lse = is_dead ? 0.0f : found / -p.scale;
    auto &stats = *reinterpret_cast<RowStats<C> *>(buffers.stats + tile * stats_bytes<C>(buffers.row_terms));
    if (row < C::kRows) {
        store_addend<3>(stats.to_scores[row / 64], row % 64, of_lse > kMost ? kMost : of_lse < -kMost ? -kMost : of_lse);
        const float bias = store_addend<2>(stats.to_dp[row / 64], row % 64, g - deltas[row]);
        if (buffers.row_terms) stats.p_sink[row] = p_sink;
        // p_sink (g - sum_j P dP) without its part -p_sink sum_j dS, which the keys kernel adds; sum_j P is 1 - p_sink.
        terms[row] = has_sink ? p_sink * (is_dead || p_sink == 1.0f ? g : fmaf(bias, 1.0f - p_sink, g)) : 0.0f;
    }
    if (!buffers.row_terms) return;
    __syncthreads();
    if (row < p.heads_of(slice)) buffers.row_terms[(first_head + row) * p.num_tiles + nth_tile] = sum_head(terms, p, row);
}

} // namespace sa::bwd_sm90
