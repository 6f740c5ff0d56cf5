// SPDX-License-Identifier: Apache-2.0
//
// The last kernel of the general backward on sm_90: ds_aux from the terms of row tiles and key blocks, and what items left apart: dQ of
// tiles over key blocks, dK and dV of key blocks over rounds and slices.
#pragma once

#include "cuda/bwd_sm90/tile.cuh"
#include "cuda/bwd_sm90/work.cuh"

namespace sa::bwd_sm90 {

constexpr int kFinishThreads = 256;

// By a block: the sum of a head's terms, in an order that lengths alone decide.
static __device__ __forceinline__ void add_head_terms(
        const sinkattn_bwd_args &args, const BwdProblem &p, const BwdBuffers &buffers, int64_t head) {
    __shared__ double sums[kFinishThreads / 32];
    wait_for_previous_kernel();
    const Entry &end = buffers.entries[p.num_entries];
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < p.num_tiles; i += kFinishThreads) sum += buffers.row_terms[head * p.num_tiles + i];
    for (int64_t i = threadIdx.x; i < end.first_term / p.room.num_heads * 2; i += kFinishThreads)
        sum += buffers.key_terms[head * p.num_items * 2 + i];
    for (int x = 16; x > 0; x /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < kFinishThreads / 32; warp++) sum += sums[warp];
    sa_store(args.ds_aux, args.fwd.problem.s_aux_dtype, head, sum);
}

__device__ __forceinline__ float4 operator+(const float4 &a, const float4 &b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// The sum of `count` parts, at least one, in their order.
__device__ __forceinline__ float4 add_parts(const float4 *parts, int count, int64_t step) {
    constexpr int kAtOnce = 4; // loads in flight
    float4 sum;
    for (int first = 0; first < count; first += kAtOnce) {
        float4 part[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++)
            if (first + i < count) part[i] = __ldcg(parts + (first + i) * step);
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            if (first + i >= count) break;
            sum = first + i == 0 ? part[i] : sum + part[i];
        }
    }
    return sum;
}

// Writes the thread's two columns of row r, times a factor and rounded.
template <class Element> __device__ __forceinline__ void write_pair(uint16_t *to, const float4 &sum, int r, float factor) {
    const float x = r ? sum.z : sum.x, y = r ? sum.w : sum.y;
    *reinterpret_cast<uint32_t *>(to) = pack_halves<Element>(fmaf(x, factor, 0.0f), fmaf(y, factor, 0.0f));
}

// A piece is what the threads of a block hold in one float4 each: of a tile's dQ; of dK and dV of a key block (add_carry).
template <class C> constexpr int kDqPieces = C::kTileFloats / 4 / kFinishThreads;
template <class C> constexpr int kKeyPieces = C::kKeys * (C::kHeadDim + C::kHeadDimV) / 4 / kFinishThreads;

// The row and the first column of 128 threads in the n-th float4s of a tile's dQ.
struct DqPlace {
    int row, column;
};
template <class C> __device__ __forceinline__ DqPlace dq_place_of(int n) {
    if constexpr (C::kIsWide) {
        const int math_warpgroup = n / kDqPieces<C>, x = n % kDqPieces<C>;
        if (x < 8) return {0, 128 * math_warpgroup + 8 * x};
        return {0, (C::kLastPiece == 64 ? 128 * math_warpgroup + 64 : 64 + 32 * math_warpgroup) + 8 * (x - 8)};
    } else {
        return C::kRows == 64 ? DqPlace{0, 8 * n} : DqPlace{n / 8 * 64, n % 8 * 8};
    }
}

// Adds the n-th piece of dQ over the key blocks that see its row tile, and writes dq.
template <class C>
__device__ __forceinline__ void add_dq(const sinkattn_bwd_args &args, const BwdProblem &p, const BwdBuffers &buffers, int n) {
    const int nth = n / kDqPieces<C>, piece = n - nth * kDqPieces<C>;
    const TileSum of = buffers.tile_sums[nth];
    wait_for_previous_kernel();
    if (!of.count) return;
    const float4 sum = add_parts(of.parts + piece * kFinishThreads + threadIdx.x, of.count, C::kTileFloats / 4);
    const int heads = p.heads_of(nth % p.room.num_heads);
    const DqPlace place = dq_place_of<C>(2 * piece + static_cast<int>(threadIdx.x) / 128);
    const int column = place.column + fragment_column();
    if (column >= args.fwd.problem.head_dim) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = place.row + warpgroup_row(r), token = row / p.group, head = row - token * p.group;
        if (token < of.tokens && head < heads)
            write_pair<typename C::Element>(of.dq + token * args.dq.row_stride + head * args.dq.head_stride + column, sum, r, p.scale);
    }
}

// Which 8 columns of dK or dV the float4s of one index hold in a carry (add_carry), and from which key of the block on.
struct Columns {
    bool is_dv;
    int key, first;
};

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

// Adds the n-th piece of dK and dV as its items would: over rounds, later rows first, then over slices.
template <class C>
__device__ __forceinline__ void add_keys(const sinkattn_bwd_args &args, const BwdProblem &p, const BwdBuffers &buffers, int n) {
    const int nth = n / kKeyPieces<C>, piece = n - nth * kKeyPieces<C>;
    const KeySum &of = buffers.key_sums[nth];
    const int count = of.count;
    const bool exists = nth < buffers.entries[p.num_entries].first_block * args.fwd.problem.num_kv_heads;
    wait_for_previous_kernel();
    if (!exists || !count) return;
    const int float4s = 2 * piece + static_cast<int>(threadIdx.x) / 128, math_warpgroup = float4s / kKeyPieces<C>,
              x = float4s - math_warpgroup * kKeyPieces<C>;
    const float4 *parts = of.parts + math_warpgroup * kHalfCarry<C> + x * 128 + threadIdx.x % 128;
    float4 sum = add_parts(parts, count, of.step);
    for (int slice = 1; slice < p.slices; slice++) sum = sum + add_parts(parts + slice * 2 * kHalfCarry<C>, count, of.step);
    const Columns columns = columns_of<C>(x, math_warpgroup);
    const sinkattn_tensor &to = columns.is_dv ? args.dv : args.dk;
    const int64_t column = columns.first + fragment_column(),
                  width = columns.is_dv ? sa_head_dim_v(&args.fwd.problem) : args.fwd.problem.head_dim;
    if (column >= width) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int own = columns.key + warpgroup_row(r);
        if (own < of.keys)
            write_pair<typename C::Element>(
                    (columns.is_dv ? of.dv : of.dk) + own * to.row_stride + column, sum, r, columns.is_dv ? 1.0f : p.scale);
    }
}

// Blocks of the finish kernel: one a head where ds_aux is wanted, then one a piece of dQ and of dK and dV.
struct FinishBlocks {
    int64_t heads, dq, keys;
};

template <class C>
__global__ __launch_bounds__(kFinishThreads, 5) void finish_kernel(
        const __grid_constant__ sinkattn_bwd_args args, BwdProblem p, BwdBuffers buffers, FinishBlocks blocks) {
    int64_t n = blockIdx.x;
    if (n < blocks.heads) return add_head_terms(args, p, buffers, n);
    n -= blocks.heads;
    if (n < blocks.dq) return add_dq<C>(args, p, buffers, static_cast<int>(n));
    add_keys<C>(args, p, buffers, static_cast<int>(n - blocks.dq));
}

} // namespace sa::bwd_sm90
