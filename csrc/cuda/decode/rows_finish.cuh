// SPDX-License-Identifier: Apache-2.0
//
// The end of a part in decode_rows.cu and decode_swapped.cu, which run one block an SM. Blocks of a cluster merge their parts from each
// other's shared memory, each some of the rows, into the result, or into a partial that the stream's last blocks merge with the others.
#pragma once

#include "cuda/decode/finish.cuh"

namespace sa::decode {
namespace many_rows {

constexpr int kMostBlocks = 8; // of a cluster

// Of write_part's scratch: a weight a row and block, later make_neutral's row.
constexpr int scratch_bytes(int rows, int columns) { return 4 * (rows * kMostBlocks > columns + 2 ? rows * kMostBlocks : columns + 2); }

struct Arguments : Extras {
    uint32_t cluster; // its blocks; 1: there are no clusters
    sa_divisor by_cluster;
    sa_cut spare; // parts of one length, taken where `cut` gives shares; most is 0 where these stay
};

// The block's cluster, and its rank there.
struct Place {
    uint32_t cluster, rank;
};

__device__ __forceinline__ Place place_of(const Arguments &params) {
    const uint32_t cluster = sa_divide(blockIdx.x, params.by_cluster);
    return {cluster, blockIdx.x - cluster * params.cluster};
}

// A run: the blocks of a cluster with parts of one stream; they leave one partial. A share's block is alone in its run.
struct Run {
    int first, before, blocks; // first: its first block's rank; before: its blocks before this one
    uint32_t index, count;     // of the stream's partials: the run's, and all
    bool in_cluster, even;     // even: the stream fills its clusters, so blocks of one rank merge the same rows in each
};

__device__ __forceinline__ Run run_of(const Part &part, const Arguments &params) {
    const uint32_t blocks = params.cluster, rank = place_of(params).rank;
    if (blocks == 1 || part.shares) return {static_cast<int>(rank), 0, 1, part.index, part.num_parts, false, false};
    const auto cluster_of = [&](uint32_t index) { return sa_divide(part.slot + index, params.by_cluster); };
    const uint32_t before = min(rank, part.index), first = rank - before, end = part.slot + part.num_parts;
    const bool even = cluster_of(0) * blocks == part.slot && sa_divide(end, params.by_cluster) * blocks == end;
    const uint32_t run = min(blocks - first, before + part.num_parts - part.index);
    return {static_cast<int>(first), static_cast<int>(before), static_cast<int>(run), cluster_of(part.index) - cluster_of(0),
            cluster_of(part.num_parts - 1) - cluster_of(0) + 1, true, even};
}

// The counter of the blocks that leave partials of the same rows, behind some row of the stream's first partial.
template <class C> __device__ __forceinline__ unsigned long long *run_counter(const Run &run, const Part &part, const Params &params) {
    const int row = run.even ? min(run.before, part.stream.num_rows - 1) : 0;
    return counter_of<C>(part, params) + row * (C::kPartialRow / 2);
}

// write_part's two barriers of the cluster, for threads that write nothing, or whose block joins nothing.
__device__ __forceinline__ void pass_cluster(const Arguments &params) {
    if (params.cluster == 1) return;
    __syncwarp();
    for (int i = 0; i < 2; i++) {
        cluster_arrive();
        cluster_wait();
    }
}

// By the threads of write_part, when the part begins: s_aux, and the counter.
template <class C> __device__ __forceinline__ void begin_part(typename C::Smem &smem, const typename C::Arguments &params) {
    const Part &part = smem.part;
    const Requested requested = request_rows<C>(smem, params);
    const Run run = run_of(part, params);
    if (threadIdx.x == 0 && run.count > 1) {
        unsigned long long *counter = run_counter<C>(run, part, params);
        open_counter(counter, __ldcg(counter), params.tag);
    }
    if (static_cast<int>(threadIdx.x) < part.stream.num_rows) smem.s_aux[threadIdx.x] = s_aux_of(params, requested);
}

// Joins pivots and sums of rows [first, last) over the run, in place: no other block reads these rows' stats here. weights: the factor of
// each block's O.
template <class C> __device__ __forceinline__ void join_rows(typename C::Smem &smem, float *weights, const Run &run, int first, int last) {
    for (int row = first + static_cast<int>(threadIdx.x); row < last; row += C::kThreads) {
        float2 stats[kMostBlocks];
        float top = -INFINITY, total = 0.0f;
#pragma unroll
        for (int n = 0; n < kMostBlocks; n++) {
            stats[n] = n < run.blocks ? *of_block(&smem.stats[row], run.first + n) : float2{-INFINITY, 0.0f};
            top = fmaxf(top, stats[n].x);
        }
#pragma unroll
        for (int n = 0; n < kMostBlocks; n++) {
            const float its = weight(stats[n].x, top);
            weights[row * kMostBlocks + n] = its;
            total = fmaf(stats[n].y, its, total);
        }
        smem.stats[row] = {top, total};
    }
    C::sync();
}

// merge_parts where a thread has many quads: several at once, four parts of each, so that their loads do not wait for each other.
template <class C>
__device__ __forceinline__ void merge_quads(const float *neutral, const typename C::Smem &smem, const typename C::Arguments &params,
        uint32_t count, int first_row, int last_row) {
    constexpr int kQuads = C::kMergedQuads, kParts = 4, kRowQuads = C::kHeadDimV / 4;
    const Part &part = smem.part;
    const int last = last_row * kRowQuads - 1;
#pragma unroll 1
    for (int first = first_row * kRowQuads + static_cast<int>(threadIdx.x); first <= last; first += kQuads * C::kThreads) {
        Quad quads[kQuads];
#pragma unroll 1
        for (uint32_t n = 0; n < count; n += kParts) {
            Partials<C, kParts> partials[kQuads];
#pragma unroll
            for (int i = 0; i < kQuads; i++) {
                const int x = min(first + i * C::kThreads, last);
                partials[i].load(slot_of(part, params, n) + x / kRowQuads * C::kPartialRow, static_cast<int>(count - n), params.slot_floats,
                        x % kRowQuads * 4, neutral);
            }
#pragma unroll
            for (int i = 0; i < kQuads; i++) partials[i].add_to(quads[i]);
        }
#pragma unroll
        for (int i = 0; i < kQuads; i++)
            if (const int x = first + i * C::kThreads; x <= last) write_out<C>(quads[i], smem, params, x / kRowQuads, x % kRowQuads * 4);
    }
}

// If smem.is_last, merges the stream's first `count` partials of rows [first, last) into the result. neutral: make_neutral's row.
template <class C>
__device__ __forceinline__ void merge_runs(
        const float *neutral, const typename C::Smem &smem, const typename C::Arguments &params, uint32_t count, int first, int last) {
    C::sync();
    if (!smem.is_last) return;
    if constexpr (C::kMergedQuads > 1) {
        merge_quads<C>(neutral, smem, params, count, first, last);
    } else {
        const auto merge = [&](int row, int column) { merge_quad<C>(neutral, smem, params, count, row, column); };
        for_each_quad<C>(last, merge, first);
    }
}

// Writes a part: its O is in `partial`, rows of C::kPartialRow floats, pivots and sums in smem.stats. scratch: of scratch_bytes bytes.
template <class C>
__device__ __forceinline__ void write_part(
        typename C::Smem &smem, const typename C::Arguments &params, const float *partial, float *scratch) {
    const Part &part = smem.part;
    const Run run = run_of(part, params);
    const int num_rows = part.stream.num_rows, each = (num_rows + run.blocks - 1) / run.blocks;
    int first = run.before * each, last = min(first + each, num_rows);
    const bool counts = run.count > 1 && (first < last || !run.even);
    if (run.in_cluster) {
        cluster_arrive();
        cluster_wait();
        join_rows<C>(smem, scratch, run, first, last);
    }
    const auto leave = [&](int row, int column) {
        const float *from = partial + row * C::kPartialRow + column;
        Quad quad;
        quad.pivot = smem.stats[row].x;
        quad.sum = smem.stats[row].y;
        constexpr int kAtOnce = 4; // reads that do not wait for each other
#pragma unroll 1
        for (int first_block = 0; first_block < run.blocks; first_block += kAtOnce) {
            float4 o[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; i++)
                if (first_block + i < run.blocks) o[i] = *reinterpret_cast<const float4 *>(of_block(from, run.first + first_block + i));
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const int n = first_block + i;
                if (n >= run.blocks) break;
                const float its = run.in_cluster ? scratch[row * kMostBlocks + n] : 1.0f, its_o[4] = {o[i].x, o[i].y, o[i].z, o[i].w};
                for (int x = 0; x < 4; x++) quad.o[x] = n ? fmaf(its_o[x], its, quad.o[x]) : its_o[x] * its;
            }
        }
        if (run.count > 1)
            store_quad<C>(slot_of(part, params, run.index) + row * C::kPartialRow, column, quad);
        else
            write_out<C>(quad, smem, params, row, column);
    };
    for_each_quad<C>(last, leave, first);
    __syncwarp();
    if (run.in_cluster) cluster_arrive(); // no more reads of other blocks' memory
    if (counts) {
        C::sync(); // all of the block's quads are written
        make_neutral<C>(scratch);
        if (threadIdx.x == 0) smem.is_last = arrive(run_counter<C>(run, part, params), params.tag, run.even ? run.count : part.num_parts);
        if (!run.even) first = 0, last = num_rows;
        merge_runs<C>(scratch, smem, params, run.count, first, last);
        __syncwarp();
    }
    if (run.in_cluster) cluster_wait();
}

} // namespace many_rows
} // namespace sa::decode
