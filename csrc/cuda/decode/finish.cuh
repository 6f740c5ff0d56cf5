// SPDX-License-Identifier: Apache-2.0
//
// The end of a part: a block's teams merge in shared memory, into the result, or into a partial that the last block of the stream, or its
// cluster, merges with the others. Streams without keys, which belong to no share, get their result here as well.
#pragma once

#include "cuda/decode/load.cuh"
#include "cuda/decode/merge.cuh"
#include "cuda/tile/sink.cuh"
#include "cuda/work/nvfp4.cuh"

namespace sa::decode {

// Bytes of a team's stages; the first two hold its partial in the end.
template <class C> __device__ __forceinline__ int team_bytes(const Params &params) { return params.stages * C::kTeamBytes; }

// What a thread found while it worked on its tiles. Acted on at the end, when that costs no time.
struct Findings {
    bool stale, bad_page; // a speculative length or page was stale; the block table names a page outside the cache
};

// Loads of the first warp that are on their way: a row's s_aux in its own dtype, and the stream's counter.
struct Requested {
    uint32_t s_aux;
    unsigned long long count;
};

template <class C> __device__ __forceinline__ Requested request_rows(const typename C::Smem &smem, const Params &params) {
    const Part &part = smem.part;
    Requested requested = {};
    const int row = static_cast<int>(threadIdx.x);
    if (row == 0 && part.num_parts > 1 && !C::kClusters) requested.count = __ldcg(counter_of<C>(part, params));
    if (row < part.stream.num_rows && params.s_aux) {
        const int32_t head = token_head(part, params, row).head;
        if (params.s_aux_dtype == SINKATTN_FP32)
            requested.s_aux = static_cast<const uint32_t *>(params.s_aux)[head];
        else
            requested.s_aux = static_cast<const uint16_t *>(params.s_aux)[head];
    }
    return requested;
}

__device__ __forceinline__ float s_aux_of(const Params &params, const Requested &requested) {
    if (!params.s_aux) return -INFINITY;
    const uint16_t half = static_cast<uint16_t>(requested.s_aux);
    return params.s_aux_dtype == SINKATTN_FP32   ? __uint_as_float(requested.s_aux)
           : params.s_aux_dtype == SINKATTN_BF16 ? widen<Bf16>(half)
                                                 : widen<Fp16>(half);
}

// Columns of V, and of out.
template <class C> __device__ __forceinline__ int32_t value_columns(const Params &params) {
    return C::kNarrow ? params.head_dim_v : params.head_dim;
}

// Adds the sink to a row and writes four columns of out; column 0 also writes the LSE.
template <class C>
__device__ __forceinline__ void write_out(
        const Quad &quad, const typename C::Smem &smem, const typename C::Arguments &params, int row, int column) {
    const Part &part = smem.part;
    const TokenHead at = token_head(part, params, row);
    const RowEnd end(quad.pivot, quad.sum, smem.s_aux[row]);
    const float factor = end.factor();
    if (column == 0) {
        const int64_t stat = (wide(part.batch) * params.num_heads * params.group + at.head) * params.band.q_len + at.token;
        params.lse[stat] = end.lse();
        if (params.lse_raw) params.lse_raw[stat] = raw_lse(quad.pivot, quad.sum);
    }
    if (column >= value_columns<C>(params)) return;
    uint16_t *to = params.out + part.batch * params.out_batch + wide(at.token) * params.out_row + wide(at.head) * params.out_head + column;
    const uint2 halves = {pack_halves<typename C::Element>(quad.o[0] * factor, quad.o[1] * factor),
            pack_halves<typename C::Element>(quad.o[2] * factor, quad.o[3] * factor)};
    *reinterpret_cast<uint2 *>(to) = halves;
    if constexpr (C::kExtras) {
        const int64_t out_row = (wide(part.batch) * params.band.q_len + at.token) * params.num_heads * params.group + at.head;
        if (params.nvfp4_values)
            write_nvfp4<typename C::Element>(
                    params.nvfp4_values, params.nvfp4_scales, params.global_scale, value_columns<C>(params), out_row, column, halves);
    }
}

// Calls visit(row, column) for each of the thread's quads of the rows before `last`, from `first` on.
template <class C, class Visit> __device__ __forceinline__ void for_each_quad(int last, const Visit &visit, int first = 0) {
#pragma unroll 1
    for (int x = first * (C::kHeadDimV / 4) + threadIdx.x; x < last * (C::kHeadDimV / 4); x += C::kThreads)
        visit(x / (C::kHeadDimV / 4), x % (C::kHeadDimV / 4) * 4);
}

// Writes a row of a partial that adds nothing.
template <class C> __device__ __forceinline__ void make_neutral(float *row) {
    for (int x = threadIdx.x; x < C::kHeadDimV + 2; x += C::kThreads) row[x] = x == C::kHeadDimV ? -INFINITY : 0.0f;
}

// Merges a quad of the stream's first `count` partials into the result.
template <class C>
__device__ __forceinline__ void merge_quad(
        const float *neutral, const typename C::Smem &smem, const typename C::Arguments &params, uint32_t count, int row, int column) {
    const float *from = slot_of(smem.part, params, 0) + row * C::kPartialRow;
    const Quad quad = add_up<C>(from, count, params.slot_floats, column, neutral);
    write_out<C>(quad, smem, params, row, column);
}

// Merges a stream's parts into the result, where smem.is_last. neutral: make_neutral's.
template <class C>
__device__ __forceinline__ void merge_parts(const float *neutral, const typename C::Smem &smem, const typename C::Arguments &params) {
    const Part &part = smem.part;
    C::sync();
    if (!smem.is_last) return;
    for_each_quad<C>(part.stream.num_rows, [&](int row, int column) { merge_quad<C>(neutral, smem, params, part.num_parts, row, column); });
}

// The same in a cluster, one part a block: each block has sent the others their 2^bits quads, and merges its own.
template <class C>
__device__ __forceinline__ void merge_cluster(
        const typename C::Smem &smem, const typename C::Arguments &params, uint32_t num_quads, int bits) {
    const Part &part = smem.part;
    const uint32_t thread = threadIdx.x, x = (part.index << bits) + thread;
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    if (thread >> bits || x >= num_quads) return;
    const Quad quad = add_up_exchanged<C>(smem.o + thread, smem.stats + thread, part.num_parts, 1 << bits);
    write_out<C>(quad, smem, params, x / (C::kHeadDimV / 4), x % (C::kHeadDimV / 4) * 4);
}

// Merges the teams and writes the result, or the part's partial. False, before anything is written, if a thread's speculation was stale.
template <class C>
__device__ __forceinline__ bool finish(
        typename C::Rows &rows, unsigned char *shared, typename C::Smem &smem, const typename C::Arguments &params, Findings findings) {
    const Part &part = smem.part;
    const int team = threadIdx.x / C::kTeamThreads, first_column = threadIdx.x % C::kTeamThreads / 32 * C::kColumns;
    const int num_rows = part.stream.num_rows;
    const uint32_t num_parts = part.num_parts;
    const auto partial = [&](int n) { return reinterpret_cast<float *>(shared + C::kQueryBytes + n * team_bytes<C>(params)); };
    leave_partial(partial(team), rows, num_rows, first_column);
    if (__syncthreads_or(findings.stale)) return false; // after this barrier all partials are in shared memory
    if (findings.bad_page) atomicOr(params.error_word, kBadBlockTable);
    const bool counts = num_parts > 1 && !params.two_pass && !C::kClusters;
    const uint32_t num_quads = num_rows * (C::kHeadDimV / 4);
    const int bits = exchange_bits(num_quads, num_parts); // used in clusters only
    if (threadIdx.x == 0 && counts) open_counter(counter_of<C>(part, params), smem.counted, params.tag);
    for_each_quad<C>(num_rows, [&](int row, int column) {
        Partials<C, C::kTeams> teams;
        teams.load(partial(0) + row * C::kPartialRow, C::kTeams, team_bytes<C>(params) / 4, column, nullptr);
        Quad quad;
        teams.add_to(quad);
        if (num_parts == 1) {
            write_out<C>(quad, smem, params, row, column);
            return;
        }
        if constexpr (C::kClusters) {
            const uint32_t x = row * (C::kHeadDimV / 4) + column / 4, to = x >> bits, at = (part.index << bits) + x - (to << bits);
            *of_block(&smem.o[at], to) = {quad.o[0], quad.o[1], quad.o[2], quad.o[3]};
            *of_block(&smem.stats[at], to) = {quad.pivot, quad.sum};
        } else {
            store_quad<C>(slot_of(part, params, part.index) + row * C::kPartialRow, column, quad);
        }
    });
    // A stream of one part waits as well: if lengths changed under the kernel, other blocks might find more parts and write to this one.
    if constexpr (C::kClusters) merge_cluster<C>(smem, params, num_parts > 1 ? num_quads : 0, bits);
    if (!counts) return true;
    __syncthreads(); // all of the block's partial is written, and no thread reads the teams' any more
    float *neutral = reinterpret_cast<float *>(shared);
    make_neutral<C>(neutral);
    if (threadIdx.x == 0) smem.is_last = arrive(counter_of<C>(part, params), params.tag, num_parts);
    merge_parts<C>(neutral, smem, params);
    return true;
}

// Streams without keys belong to no share. Block i looks at streams i, i + gridDim.x, .., one a lane of the first warp, and writes the
// result of those without keys.
template <class C> __device__ __forceinline__ void write_empty(typename C::Smem &smem, const typename C::Arguments &params) {
    Part &part = smem.part;
    if (!part.shares) return;
    const uint32_t num_streams = params.batch * params.row_tiles * params.num_heads;
#pragma unroll 1
    for (uint32_t first = blockIdx.x; first < num_streams; first += 32 * gridDim.x) {
        const uint32_t x = first + threadIdx.x * gridDim.x;
        Stream stream;
        int32_t batch = 0;
        uint32_t kv_head = 0, empty = 0; // empty: the lanes of the first warp with a stream without keys
        if (threadIdx.x < 32) {
            const uint32_t real = min(x, num_streams - 1), of_heads = sa_divide(real, params.by_heads);
            kv_head = real - of_heads * params.num_heads;
            stream = stream_at<C::kStreamRows>(params, of_heads, batch);
            empty = __ballot_sync(0xffffffffu, x == real && sa_key_tile_count(&stream.tiles) == 0);
        }
        for (;; empty &= empty - 1) {
            C::sync(); // no thread reads the previous part any more
            if (threadIdx.x == 0) part.found = empty != 0;
            if (empty && static_cast<int>(threadIdx.x) == __ffs(static_cast<int>(empty)) - 1) {
                part.stream = stream;
                part.batch = batch;
                part.kv_head = static_cast<int32_t>(kv_head);
                part.num_parts = 1;
            }
            C::sync();
            if (!part.found) break;
            const Requested requested = request_rows<C>(smem, params);
            if (threadIdx.x < part.stream.num_rows) smem.s_aux[threadIdx.x] = s_aux_of(params, requested);
            C::sync();
            for_each_quad<C>(part.stream.num_rows, [&](int row, int column) { write_out<C>(Quad{}, smem, params, row, column); });
        }
    }
}

} // namespace sa::decode
