// SPDX-License-Identifier: Apache-2.0
//
// The last kernel of the general backward on sm_90: ds_aux from the terms of row tiles and key blocks, and, where items left them apart,
// dK and dV.
#pragma once

#include "cuda/bwd_sm90/tile.cuh"
#include "cuda/bwd_sm90/work.cuh"
#include "cuda/work/sink_terms.cuh"

namespace sa::bwd_sm90 {

// By a block: the sum of a head's terms, in an order that depends on sizes alone.
static __device__ __forceinline__ void add_head_terms(
        const sinkattn_bwd_args &args, const BwdProblem &p, const BwdBuffers &buffers, int64_t head) {
    __shared__ double sums[kSinkThreads / 32];
    const Entry &end = buffers.entries[p.num_entries];
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < end.first_tile; i += kSinkThreads) sum += buffers.row_terms[head * p.num_tiles + i];
    for (int64_t i = threadIdx.x; i < end.first_item / p.room.num_heads * 2; i += kSinkThreads)
        sum += buffers.key_terms[head * p.num_items * 2 + i];
    for (int x = 16; x > 0; x /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < kSinkThreads / 32; warp++) sum += sums[warp];
    sa_store(args.ds_aux, args.fwd.problem.s_aux_dtype, head, sum);
}

// Which 8 columns of dK or dV the float4s of one index hold in a carry (add_carry), and from which key of the block on.
struct Columns {
    bool is_dv;
    int key, first;
};

template <class C> constexpr int kPiecesOfBlock = kSinkThreads / C::kMathThreads;
template <class C> constexpr int kCarryFloat4s = C::kKeys * (C::kHeadDim + C::kHeadDimV) / 4 / C::kMathThreads;

template <class C> __device__ __forceinline__ Columns columns_of(int x, int math_warpgroup) {
    if constexpr (!C::kIsWide) {
        constexpr int kEach = C::kHeadDim / 8;
        return {x >= kEach, first_key<C>(math_warpgroup), x % kEach * 8};
    } else {
        constexpr int kOuter = C::kLastPiece == 32 ? 8 : 16, kOfV = C::kHeadDimV / 16;
        if (x < kOuter) return {false, 0, 128 * math_warpgroup + 8 * x};
        if (x < kOuter + kOfV) return {true, 0, 8 * (kOfV * math_warpgroup + x - kOuter)};
        return {false, 0, 64 + 32 * math_warpgroup + 8 * (x - kOuter - kOfV)};
    }
}

__device__ __forceinline__ float4 operator+(const float4 &a, const float4 &b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Adds the n-th piece, of the float4s with one index, of a key block's dK and dV as its items would: over rounds, later rows first, then
// over slices. An item that has all of a block has written it.
template <class C>
__device__ __forceinline__ void add_apart(
        const sinkattn_bwd_args &args, const BwdProblem &p, const BwdBuffers &buffers, const sa_chains &dense, int n) {
    constexpr int kPieces = kCarryFloat4s<C>, kCarry = 2 * C::kKeys * C::kHeadDim / 4, kAtOnce = 4;
    const auto kv_heads = static_cast<int>(args.fwd.problem.num_kv_heads);
    const int nth = n / kPieces, piece = n - nth * kPieces, nth_block = nth / kv_heads, kv_head = nth - nth_block * kv_heads;
    const bool is_packed = args.fwd.problem.packed;
    const int64_t e = is_packed ? find_entry(buffers.entries, p.num_entries, &Entry::first_block, nth_block) : nth_block / dense.blocks;
    if (e >= (is_packed ? p.num_entries : p.room.copies)) return;
    const Entry entry = entry_of(args, p, buffers, e);
    if (entry.first_place < 0) return;
    const sa_band band = band_of(args, entry.sequence, false);
    const sa_chains chains = is_packed ? sa_chains_of(&band, p.tokens, C::kKeys, &p.room) : dense;
    const int copy = is_packed ? 0 : static_cast<int>(e), block = nth_block - (is_packed ? entry.first_block : copy * chains.blocks),
              key = block * C::kKeys, thread = threadIdx.x % C::kMathThreads;
    const sa_range rows = sa_keys_rows(&band, {key, sa_first(key + C::kKeys, band.k_len)});
    sa_range rounds = sa_rounds_seeing(&chains, rows, p.tokens, chains.round_tiles);
    if (rounds.begin == rounds.end) rounds = {chains.rounds - 1, chains.rounds}; // its item has zeros
    if (rounds.end - rounds.begin == 1 && p.slices == 1) return;
    const auto *parts = reinterpret_cast<const float4 *>(buffers.carries) + (p.places_at + entry.first_place) * kCarry +
                        piece * C::kMathThreads + thread;
    const int last_place = sa_place_of(&chains, &band, p.tokens, C::kKeys, 0, static_cast<int>(rounds.end) - 1, block);
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int slice = 0; slice < p.slices; slice++) {
        int place = last_place + copy * p.room.num_heads + kv_head * p.slices + slice;
        float4 of_slice = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int end = static_cast<int>(rounds.end); end > rounds.begin; end -= kAtOnce) {
            float4 part[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const int round = end - 1 - i;
                if (round < rounds.begin) break;
                part[i] = __ldcg(parts + static_cast<int64_t>(place) * kCarry);
                if (round > rounds.begin) place -= sa_places_between(&chains, &band, p.tokens, C::kKeys, round);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                if (end - 1 - i < rounds.begin) break;
                if (i == 0 && end == rounds.end)
                    of_slice = part[i];
                else
                    of_slice = of_slice + part[i];
            }
        }
        sum = slice == 0 ? of_slice : sum + of_slice;
    }
    const Columns columns = columns_of<C>(piece, thread / 128);
    const sinkattn_tensor &to = columns.is_dv ? args.dv : args.dk;
    const int64_t column = columns.first + fragment_column(),
                  width = columns.is_dv ? sa_head_dim_v(&args.fwd.problem) : args.fwd.problem.head_dim;
    const float factor = columns.is_dv ? 1.0f : p.scale, d[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int own = key + columns.key + warpgroup_row(r);
        if (own >= band.k_len || column >= width) continue;
        auto *at = static_cast<uint16_t *>(to.data) + sa_offset(&to, entry.sequence.batch, entry.sequence.k_begin + own, kv_head) + column;
        *reinterpret_cast<uint32_t *>(at) =
                pack_halves<typename C::Element>(fmaf(d[2 * r], factor, 0.0f), fmaf(d[2 * r + 1], factor, 0.0f));
    }
}

// A block a head where ds_aux is wanted, then kPiecesOfBlock pieces a block.
template <class C>
__global__ __launch_bounds__(kSinkThreads) void finish_kernel(
        const __grid_constant__ sinkattn_bwd_args args, BwdProblem p, BwdBuffers buffers, sa_chains dense) {
    const int n = static_cast<int>(blockIdx.x) - (buffers.row_terms ? p.num_q_heads : 0);
    if (n < 0) return add_head_terms(args, p, buffers, blockIdx.x);
    add_apart<C>(args, p, buffers, dense, n * kPiecesOfBlock<C> + static_cast<int>(threadIdx.x) / C::kMathThreads);
}

} // namespace sa::bwd_sm90
