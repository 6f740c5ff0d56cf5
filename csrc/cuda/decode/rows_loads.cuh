// SPDX-License-Identifier: Apache-2.0
//
// Loads of the decode of many rows on sm_90: keys and values by TMA, a box for each step of 16 keys and 64 columns; queries by threads.
#pragma once

#include "cuda/decode/load.cuh"
#include "cuda/decode/rows_smem.cuh"

namespace sa::decode {
namespace many_rows {

using decode::Part;

// A part's steps [first, last) by stages, and the lane's page of the next stage. By one warp.
template <class C> struct Loader {
    using Smem = typename C::Smem;
    Smem &smem;
    const typename C::Arguments &params;
    const Maps &maps;
    const uint64_t policy = evict_first();
    Ring<C::kStages> ring;

    struct Place {
        int32_t page, slot; // of the step's first key; page: as the table has it
    };

    // By lanes whose step is one of the part's.
    __device__ __forceinline__ Place find(const Part &part, int32_t step) const {
        const int32_t key = sa_key_tile_at(&part.stream.tiles, step) * kTileK;
        const int32_t index = params.page_index(key);
        const int32_t page =
                params.block_table ? load_relaxed(params.block_table + part.batch * params.block_table_stride + index) : part.batch;
        return {page, key - index * params.page_size};
    }

    // The lane's boxes of a tile: every kLanes-th of 64 columns. A page that does not exist becomes zeros: nothing lies at page -1.
    template <int kHalves>
    __device__ __forceinline__ void copy(unsigned char *to, Barrier &full, const CUtensorMap *map, int32_t kv_head, Place at) const {
        constexpr int kLanes = 32 / C::kSteps;
        const int lane = threadIdx.x % 32;
        to += lane % C::kSteps * kTileK * kRowBytes;
#pragma unroll 1
        for (int half = lane / C::kSteps; half < kHalves; half += kLanes) {
            if (params.row_tiles == 1) // no other block reads these
                tensor_load(to + half * C::kKeyHalf, map, full, 64 * half, kv_head, at.slot, at.page, policy);
            else
                tensor_load(to + half * C::kKeyHalf, map, full, 64 * half, kv_head, at.slot, at.page);
        }
    }

    __device__ __forceinline__ void load(const Part &part) {
        const int lane = threadIdx.x % 32, mine = lane % C::kSteps;
        const int32_t last = last_step(part);
        Place next = {0, 0};
        if (part.first + mine < last) next = find(part, part.first + mine);
#pragma unroll 1
        for (int32_t step = part.first; step < last; step += C::kSteps, ring.n++) {
            Place at = next;
            if (step + C::kSteps + mine < last) next = find(part, step + C::kSteps + mine);
            const bool exists = step + mine < last, inside = params.has_page(at.page);
            if (exists && !inside) atomicOr(params.error_word, kBadBlockTable);
            const bool on_host = inside && at.page >= params.first_host_page;
            at.page = !inside ? -1 : on_host ? at.page - params.first_host_page : at.page;
            const uint32_t stage = ring.stage(), steps = min(C::kSteps, last - step);
            smem.k_empty.acquire(ring);
            if (lane == 0) smem.k_full[stage].arrive_expect(steps * C::kHalves * kTileK * kRowBytes);
            __syncwarp();
            if (exists) copy<C::kHalves>(smem.keys(stage), smem.k_full[stage], on_host ? &maps.host_k : &maps.k, part.kv_head, at);
            if constexpr (!C::kLatent) {
                smem.v_empty.acquire(ring);
                if (lane == 0) smem.v_full[stage].arrive_expect(steps * C::kHalvesV * kTileK * kRowBytes);
                __syncwarp();
                if (exists) copy<C::kHalvesV>(smem.values(stage), smem.v_full[stage], on_host ? &maps.host_v : &maps.v, part.kv_head, at);
            }
        }
    }
};

// By kThreads threads: the stream's queries, zeros past head_dim and num_rows, and the keys that each row sees. The queries are on their
// way; land_rows waits for the thread's.
template <class C, int kThreads> __device__ __forceinline__ void begin_rows(typename C::Smem &smem, const typename C::Arguments &params) {
    constexpr int kRows = C::kStreamRows, kRowHalf = kRows * kRowBytes;
    const Part &part = smem.part;
    const int thread = threadIdx.x % kThreads;
    const uint32_t to = shared_address(smem.queries);
#pragma unroll 1
    for (int x = thread; x < kRows * C::kHalves * 8; x += kThreads) {
        const int row = x / (C::kHalves * 8), chunk = x % (C::kHalves * 8);
        const bool real = row < part.stream.num_rows && chunk * 8 < params.head_dim;
        cp_async_16(swizzled(to + chunk / 8 * kRowHalf, kRowBytes, row, chunk % 8),
                real ? decode::query_row(part, params, row) + chunk * 8 : params.q, real);
    }
    cp_async_commit();
    if (thread < kRows) {
        const decode::TokenHead at = decode::token_head(part, params, thread);
        const sa_range keys = sa_row_band(&part.stream.band, at.token);
        smem.rows[thread] = thread < part.stream.num_rows ? decode::Row{keys.begin, keys.end, sa_row_sink_end(&part.stream.band, at.token)}
                                                          : decode::Row{0, 0, 0};
    }
}

__device__ __forceinline__ void land_rows() {
    cp_async_wait<0>();
    async_fence();
}

} // namespace many_rows
} // namespace sa::decode
