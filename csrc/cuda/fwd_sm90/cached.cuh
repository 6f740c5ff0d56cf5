// SPDX-License-Identifier: Apache-2.0
//
// Loads of the general forward on sm_90 from a cache:
//
//     loader warp     Q | K0 | K1 | ...     a lane copies every 32nd box: keys of one page
//     value warp          V0 | V1 | ...     the same
//     checker warp            V0 | V1 | ...
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

// By all lanes of a warp.
template <class C, class Smem, class Maps>
__device__ __forceinline__ void load_queries_of_warp(
        Smem &smem, const Maps &maps, const Problem &p, Ring<C::kQueries> queries, const Work &work) {
    smem.q_empty.acquire(queries);
    __syncwarp();
    if (threadIdx.x % 32 == 0) load_queries<C>(smem, maps, p, queries, work);
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

// A lane's box of a key tile: keys of one page, looked up a tile ahead.
struct Box {
    bool exists, seen;
    int slot, page; // slot: of its first key in the page; page: as the table has it, -1 where no row sees the box
};

// at: of its first key, in the tile; behind the tile there is none.
template <class C> __device__ __forceinline__ Box find_box(const Work &work, const CacheKeys &cache, int t, int at) {
    Box box{at < C::kTileK, false, 0, -1};
    if (!box.exists) return box;
    const int key = t * C::kTileK + at;
    box.slot = cache.slot(key);
    box.seen = sees_some(work.tiles, key, key + cache.box);
    if (box.seen) box.page = cache.page_of(cache.row(work.sequence), key);
    return box;
}

// A key tile by TMA. What no row sees becomes zeros, and so does a page that does not exist: coordinates outside the map are not read.
// box: the lane's first; it copies every 32nd.
template <class C, int kHalves>
__device__ __forceinline__ void copy_boxes(unsigned char *to, const CUtensorMap &map, Barrier &full, const Work &work, int t,
        const CacheKeys &cache, Box box, unsigned *error_word) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) full.arrive_expect(kHalves * C::kKeyHalf);
    __syncwarp();
#pragma unroll 1
    for (int at = lane * cache.box; box.exists;) {
        if (box.seen && !cache.has_page(box.page)) atomicOr(error_word, kBadBlockTable);
        for (int half = 0; half < kHalves; half++)
            tensor_load(
                    to + half * C::kKeyHalf + at * kRowBytes, &map, full, 64 * half, static_cast<int>(work.kv_head), box.slot, box.page);
        at += 32 * cache.box;
        box = find_box<C>(work, cache, t, at);
    }
}

// By the loader warp, Q and K; by the value warp, V.
template <class C, bool kIsValues, class Smem, class Maps>
__device__ __forceinline__ void load_cached(Smem &smem, const Maps &maps, const Problem &p, const CacheKeys &cache, unsigned *error_word) {
    Ring<C::kStages> ring;
    for (Ring<C::kRowStages> tiles;; tiles.n++) {
        Rows<C> &rows = smem.rows[tiles.stage()];
        rows.placed.wait(tiles);
        if (!rows.exists) return;
        const Work &work = rows.work;
        const int first = threadIdx.x % 32 * cache.box;
        bool awaited = rows.awaited && threadIdx.x % 32 == 0;
        KeyTileWalk tile(work.tiles);
        Box next = find_box<C>(work, cache, tile.t, first);
        if constexpr (!kIsValues) load_queries_of_warp<C>(smem, maps, p, {tiles.n}, work);
        for (; tile.exists(); ring.n++) {
            const Box box = next;
            const int t = tile.t;
            if (!kIsValues) tell_unsent(smem, awaited, work.tiles.end - t);
            tile.advance();
            if (tile.exists()) next = find_box<C>(work, cache, tile.t, first);
            const uint32_t stage = ring.stage();
            if constexpr (kIsValues) {
                smem.v_empty.acquire(ring);
                copy_boxes<C, C::kHalvesV>(smem.values[stage], maps.v, smem.v_full[stage], work, t, cache, box, error_word);
            } else {
                smem.k_empty.acquire(ring);
                copy_boxes<C, C::kHalves>(smem.keys[stage], maps.k, smem.k_full[stage], work, t, cache, box, error_word);
            }
        }
        if (!kIsValues) tell_unsent(smem, awaited, 0);
        rows.empty.arrive();
    }
}

} // namespace sa::fwd_sm90
