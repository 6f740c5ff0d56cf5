// SPDX-License-Identifier: Apache-2.0
//
// The end of a run: the teams of a block merge, and what they have is the result, or a partial that the last block of the stream, or the
// stream's cluster, merges. And the result of streams that no block has a run of, since they are without keys.
#pragma once

#include "cuda/decode/load.cuh"
#include "cuda/decode/merge.cuh"
#include "cuda/decode/nvfp4.cuh"
#include "cuda/tile/sink.cuh"

namespace sa::decode {

// Of a team's stages, where it leaves its partial in the end.
template <class C> __device__ __forceinline__ int team_bytes(const Params &params) { return params.stages * C::kTeamBytes; }

// What a thread has found wrong in its tiles; said in the end, when it costs no time.
struct Doubts {
    bool wrong, bad_page; // the guess was; the block table names a page outside the cache
};

// What the first warp asks for: the sinks of the rows, as they lie in memory, and what the stream's counter holds.
struct Asked {
    uint32_t s_aux;
    unsigned long long count;
};

template <class C> __device__ __forceinline__ Asked ask_rows(const typename C::Smem &smem, const Params &params) {
    const Fragment &fragment = smem.fragment;
    Asked asked = {};
    const int row = static_cast<int>(threadIdx.x);
    if (row == 0 && fragment.num_parts > 1 && !C::kClusters) asked.count = __ldcg(counter_of<C>(fragment, params));
    if (row < fragment.stream.num_rows && params.s_aux) {
        const int32_t head = token_head(fragment, params, row).head;
        if (params.s_aux_dtype == SINKATTN_FP32)
            asked.s_aux = static_cast<const uint32_t *>(params.s_aux)[head];
        else
            asked.s_aux = static_cast<const uint16_t *>(params.s_aux)[head];
    }
    return asked;
}

__device__ __forceinline__ float s_aux_of(const Params &params, const Asked &asked) {
    if (!params.s_aux) return -INFINITY;
    const uint16_t half = static_cast<uint16_t>(asked.s_aux);
    return params.s_aux_dtype == SINKATTN_FP32   ? __uint_as_float(asked.s_aux)
           : params.s_aux_dtype == SINKATTN_BF16 ? widen<Bf16>(half)
                                                 : widen<Fp16>(half);
}

// out and lse of four columns of a row, with the sink.
template <class C>
__device__ __forceinline__ void write_out(const Quad &quad, const typename C::Smem &smem, const typename C::Arguments &params, int row,
                                          int column) {
    const Fragment &fragment = smem.fragment;
    const TokenHead at = token_head(fragment, params, row);
    const RowEnd end(quad.pivot, quad.sum, smem.s_aux[row]);
    const float factor = end.factor();
    if (column == 0) {
        const int64_t stat = (wide(fragment.batch) * params.num_heads * params.group + at.head) * params.band.q_len + at.token;
        params.lse[stat] = end.lse();
        if (params.lse_raw) params.lse_raw[stat] = raw_lse(quad.pivot, quad.sum);
    }
    if (column >= params.head_dim) return;
    uint16_t *to =
        params.out + fragment.batch * params.out_batch + wide(at.token) * params.out_row + wide(at.head) * params.out_head + column;
    const uint2 halves = {pack_halves<typename C::Element>(quad.o[0] * factor, quad.o[1] * factor),
                          pack_halves<typename C::Element>(quad.o[2] * factor, quad.o[3] * factor)};
    *reinterpret_cast<uint2 *>(to) = halves;
    if constexpr (C::kExtras) {
        const int64_t out_row = (wide(fragment.batch) * params.band.q_len + at.token) * params.num_heads * params.group + at.head;
        if (params.nvfp4_values) write_nvfp4<typename C::Element>(params, out_row, column, halves);
    }
}

// Calls visit(row, column) for each quadruple of columns that is this thread's.
template <class C, class Visit> __device__ __forceinline__ void for_each_quad(int num_rows, const Visit &visit) {
#pragma unroll 1
    for (int x = threadIdx.x; x < num_rows * (C::kHeadDim / 4); x += C::kThreads) visit(x / (C::kHeadDim / 4), x % (C::kHeadDim / 4) * 4);
}

// A partial of nothing, which adds nothing.
template <class C> __device__ __forceinline__ void make_nothing(float *row) {
    for (int x = threadIdx.x; x < C::kHeadDim + 2; x += C::kThreads) row[x] = x == C::kHeadDim ? -INFINITY : 0.0f;
}

// The result from a stream's parts, where smem.is_last.
template <class C>
__device__ __forceinline__ void merge_parts(const float *nothing, const typename C::Smem &smem, const typename C::Arguments &params) {
    const Fragment &fragment = smem.fragment;
    __syncthreads();
    if (!smem.is_last) return;
    for_each_quad<C>(fragment.stream.num_rows, [&](int row, int column) {
        const float *from = slot_of(fragment, params, 0) + row * C::kPartialRow;
        const Quad quad = add_up<C>(from, fragment.num_parts, params.slot_floats, column, nothing);
        write_out<C>(quad, smem, params, row, column);
    });
}

// The same where the parts are a cluster's blocks, of which each has left the others their runs of 2^bits of the stream's quads.
template <class C>
__device__ __forceinline__ void merge_cluster(const typename C::Smem &smem, const typename C::Arguments &params, uint32_t num_quads,
                                              int bits) {
    const Fragment &fragment = smem.fragment;
    const uint32_t thread = threadIdx.x, x = (fragment.part << bits) + thread;
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    if (thread >> bits || x >= num_quads) return;
    const Quad quad = add_up_exchanged<C>(smem.o + thread, smem.stats + thread, fragment.num_parts, 1 << bits);
    write_out<C>(quad, smem, params, x / (C::kHeadDim / 4), x % (C::kHeadDim / 4) * 4);
}

// False where nothing has been done, since a thread's guess was wrong.
template <class C>
__device__ __forceinline__ bool finish(typename C::Rows &rows, unsigned char *shared, typename C::Smem &smem,
                                       const typename C::Arguments &params, Doubts doubts) {
    const Fragment &fragment = smem.fragment;
    const int team = threadIdx.x / C::kTeamThreads, first_column = threadIdx.x % C::kTeamThreads / 32 * C::kColumns;
    const int num_rows = fragment.stream.num_rows;
    const uint32_t num_parts = fragment.num_parts;
    const auto partial = [&](int n) { return reinterpret_cast<float *>(shared + C::kQueryBytes + n * team_bytes<C>(params)); };
    leave_partial(partial(team), rows, num_rows, first_column);
    if (__syncthreads_or(doubts.wrong)) return false;
    if (doubts.bad_page) atomicOr(params.error_word, kBadBlockTable);
    const bool counts = num_parts > 1 && !params.two_pass && !C::kClusters;
    const uint32_t num_quads = num_rows * (C::kHeadDim / 4);
    const int bits = run_bits(num_quads, num_parts); // where there are clusters
    if (threadIdx.x == 0 && counts) open_counter(counter_of<C>(fragment, params), smem.counted, params.tag);
    for_each_quad<C>(num_rows, [&](int row, int column) {
        Chunk<C, C::kTeams> teams;
        teams.load(partial(0) + row * C::kPartialRow, C::kTeams, team_bytes<C>(params) / 4, column, nullptr);
        Quad quad;
        teams.add_to(quad);
        if (num_parts == 1) {
            write_out<C>(quad, smem, params, row, column);
            return;
        }
        if constexpr (C::kClusters) {
            const uint32_t x = row * (C::kHeadDim / 4) + column / 4, to = x >> bits, at = (fragment.part << bits) + x - (to << bits);
            *of_block(&smem.o[at], to) = {quad.o[0], quad.o[1], quad.o[2], quad.o[3]};
            *of_block(&smem.stats[at], to) = {quad.pivot, quad.sum};
        } else {
            store_quad<C>(slot_of(fragment, params, fragment.part) + row * C::kPartialRow, column, quad);
        }
    });
    // One part has nothing to merge, and yet waits: were lengths to change under the kernel, others might find more and write to it.
    if constexpr (C::kClusters) merge_cluster<C>(smem, params, num_parts > 1 ? num_quads : 0, bits);
    if (!counts) return true;
    __syncthreads(); // nobody reads the teams' any more
    float *nothing = reinterpret_cast<float *>(shared);
    make_nothing<C>(nothing);
    if (threadIdx.x == 0) smem.is_last = arrive(counter_of<C>(fragment, params), params.tag, num_parts);
    merge_parts<C>(nothing, smem, params);
    return true;
}

// Streams without keys are no part of a share: the i-th block writes the i-th of all streams, and so on, where it is one. Each lane of the
// first warp looks at one of them.
template <class C> __device__ __forceinline__ void write_empty(typename C::Smem &smem, const typename C::Arguments &params) {
    Fragment &fragment = smem.fragment;
    if (!fragment.shares) return;
    const uint32_t num_streams = params.batch * params.row_tiles * params.num_heads;
#pragma unroll 1
    for (uint32_t first = blockIdx.x; first < num_streams; first += 32 * gridDim.x) {
        const uint32_t x = first + threadIdx.x * gridDim.x;
        Stream stream;
        int32_t b = 0;
        uint32_t kv_head = 0, empty = 0; // of the first warp
        if (threadIdx.x < 32) {
            const uint32_t real = min(x, num_streams - 1), of_heads = sa_divide(real, params.by_heads);
            b = static_cast<int32_t>(sa_divide(of_heads, params.by_row_tiles));
            kv_head = real - of_heads * params.num_heads;
            const Guess here = {b, 0, false};
            stream = stream_of(params, here.look(params), static_cast<int32_t>(of_heads) - b * params.row_tiles);
            empty = __ballot_sync(0xffffffffu, x == real && sa_key_tile_count(&stream.tiles) == 0);
        }
        for (;; empty &= empty - 1) {
            __syncthreads(); // the fragment before is done with
            if (threadIdx.x == 0) fragment.found = empty != 0;
            if (empty && static_cast<int>(threadIdx.x) == __ffs(static_cast<int>(empty)) - 1) {
                fragment.stream = stream;
                fragment.batch = b;
                fragment.kv_head = static_cast<int32_t>(kv_head);
                fragment.num_parts = 1;
            }
            __syncthreads();
            if (!fragment.found) break;
            const Asked asked = ask_rows<C>(smem, params);
            if (threadIdx.x < fragment.stream.num_rows) smem.s_aux[threadIdx.x] = s_aux_of(params, asked);
            __syncthreads();
            for_each_quad<C>(fragment.stream.num_rows, [&](int row, int column) { write_out<C>(Quad{}, smem, params, row, column); });
        }
    }
}

} // namespace sa::decode
