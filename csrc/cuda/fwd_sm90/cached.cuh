// SPDX-License-Identifier: Apache-2.0
//
// Loads of the general forward on sm_90 from a cache:
//
//     loader warp     Q | K0 | V0 | K1 | V1 | ...     a lane copies every 32nd box: keys of one page
//     checker warps       V0 | V1 | ...
#pragma once

#include "cuda/fwd_sm90/rows.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/work/keys.cuh"

namespace sa::fwd_sm90 {

template <class C, class Smem, class Maps>
__device__ __forceinline__ void load_queries(Smem &smem, const Maps &maps, const Problem &p, Ring<C::kQueries> queries, const Work &work) {
    Barrier &full = smem.q_full[queries.stage()];
    full.arrive_expect(C::kHalves * p.tokens * p.group * kRowBytes);
    for (int half = 0; half < C::kHalves; half++)
        tensor_load(smem.queries[queries.stage()] + half * C::kQueryHalf, &maps.q, full, 64 * half,
                static_cast<int>(work.kv_head * p.group), static_cast<int>(work.sequence.q_begin + work.tokens.begin),
                static_cast<int>(work.sequence.batch));
}

// Zeroes values of the ring's stage that are not finite, if the tile needs a mask, and hands the stage on. By the checkers' threads.
template <class C, class Smem> __device__ __forceinline__ void check_values(Smem &smem, Ring<C::kStages> ring, bool masked, int thread) {
    constexpr int kBytes = C::kHalvesV * C::kKeyHalf, kThreads = 32 * C::kCheckers;
    bool found = false;
    if (masked) {
        found = any_nonfinite<typename C::Element, kThreads>(smem.values[ring.stage()], kBytes, thread);
        if (found) zero_nonfinite<typename C::Element, kThreads>(smem.values[ring.stage()], kBytes, thread);
        async_fence();
    }
    found = __any_sync(0xffffffffu, found);
    if (thread % 32 == 0) smem.nonfinite[ring.stage()][thread / 32] = found;
    smem.v_ready[ring.stage()].arrive();
}

// The page of the first key of a box, -1 where no row sees the box.
__device__ __forceinline__ int find_page(const Work &work, const CacheKeys &cache, int key, unsigned *error_word) {
    if (!sees_some(work.tiles, key, key + cache.box)) return -1;
    const int page = cache.page_of(cache.row(work.sequence), key);
    if (!cache.has_page(page)) atomicOr(error_word, kBadBlockTable);
    return page;
}

// A key tile by TMA. What no row sees becomes zeros, and so does a page that does not exist: coordinates outside the map are not read.
// first_page: of the lane's first box.
template <class C, int kHalves>
__device__ __forceinline__ void copy_boxes(unsigned char *to, const CUtensorMap &map, Barrier &full, const Work &work, int t,
        const CacheKeys &cache, int first_page, unsigned *error_word) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) full.arrive_expect(kHalves * C::kKeyHalf);
    __syncwarp();
    int page = first_page;
#pragma unroll 1
    for (int at = lane * cache.box; at < C::kTileK;) {
        const int key = t * C::kTileK + at;
        for (int half = 0; half < kHalves; half++)
            tensor_load(
                    to + half * C::kKeyHalf + at * kRowBytes, &map, full, 64 * half, static_cast<int>(work.kv_head), cache.slot(key), page);
        at += 32 * cache.box;
        if (at < C::kTileK) page = find_page(work, cache, key + 32 * cache.box, error_word);
    }
}

// By the loader warp.
template <class C, class Smem, class Maps>
__device__ __forceinline__ void load_cached_keys(
        Smem &smem, const Maps &maps, const Problem &p, const CacheKeys &cache, unsigned *error_word) {
    const int lane = threadIdx.x % 32;
    Ring<C::kStages> ring;
    for (Ring<C::kRowStages> tiles;; tiles.n++) {
        const Ring<C::kQueries> queries{tiles.n};
        smem.rows[tiles.stage()].full.wait(tiles);
        if (!smem.rows[tiles.stage()].exists) return;
        smem.q_empty.acquire(queries);
        const Work &work = smem.rows[tiles.stage()].work;
        const int end = work.tiles.end; // read before Q is sent, as in load_tiles
        KeyTileWalk tile(work.tiles);
        __syncwarp();
        if (lane == 0) load_queries<C>(smem, maps, p, queries, work);
        for (; tile.t < end; tile.advance(), ring.n++) {
            const int at = lane * cache.box;
            const int page = at < C::kTileK ? find_page(work, cache, tile.t * C::kTileK + at, error_word) : -1;
            smem.k_empty.acquire(ring);
            copy_boxes<C, C::kHalves>(smem.keys[ring.stage()], maps.k, smem.k_full[ring.stage()], work, tile.t, cache, page, error_word);
            smem.v_empty.acquire(ring);
            copy_boxes<C, C::kHalvesV>(smem.values[ring.stage()], maps.v, smem.v_full[ring.stage()], work, tile.t, cache, page, error_word);
        }
    }
}

} // namespace sa::fwd_sm90
