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
__device__ __forceinline__ void load_queries(Smem &smem, const Maps &maps, const Problem &p, Ring<2> queries, const Work &work) {
    Barrier &full = smem.q_full[queries.stage()];
    full.arrive_expect(C::kHalves * p.tokens * p.group * kRowBytes);
    for (int half = 0; half < C::kHalves; half++)
        tensor_load(smem.queries[queries.stage()] + half * C::kQueryHalf, &maps.q, full, 64 * half,
                    static_cast<int>(work.kv_head * p.group), static_cast<int>(work.sequence.q_begin + work.tokens.begin),
                    static_cast<int>(work.sequence.batch));
}

// Zeroes values of the ring's stage that are not finite, if the tile needs a mask, and hands the stage on. By the checkers' threads.
template <class C, class Smem> __device__ __forceinline__ void check_values(Smem &smem, Ring<C::kStages> ring, bool masked, int thread) {
    constexpr int kBytes = C::kKeyBytes, kThreads = 32 * C::kCheckers;
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

// A lane's part of copying a key tile: so many boxes, of one page. It is looked up a tile ahead: the page arrives while the loader waits
// for room.
struct Piece {
    int boxes, page; // page: as the table has it, -1 where no row sees the keys
    bool seen;
};

// A box a lane; beyond 32 lanes, the lane's next one. at: of its first key, in the tile.
template <class C> __device__ __forceinline__ Piece piece_of(const Work &work, const CacheKeys &cache, int t, int at) {
    const int key = t * C::kTileK + at;
    Piece piece{at < C::kTileK, -1, false};
    piece.seen = piece.boxes && sees_some(work.tiles, key, key + cache.box);
    if (piece.seen) piece.page = cache.page_of(cache.row(work.sequence), key);
    return piece;
}

// The keys of a page that lie in the tile, in as few boxes as the maps allow, the largest first: a lane for each.
template <class C> __device__ __forceinline__ Piece joined_piece_of(const Work &work, const JoinedKeys &cache, int t, int at) {
    constexpr int kMost = 1 << (JoinedKeys::kMaps - 1);
    const int key = t * C::kTileK + at, slot = cache.slot(key);
    Piece piece{0, -1, false};
    if (at >= C::kTileK) return piece;
    const int before = min(at, slot) / cache.box, left = min(C::kTileK - at, cache.page_size - slot) / cache.box;
    const int largest = min(1 << (31 - __clz(left)), kMost);
    const bool begins = left >= kMost ? before % kMost == 0 : left == ((before + left) & (2 * largest - 1));
    if (!begins) return piece;
    piece.boxes = largest;
    piece.seen = sees_some(work.tiles, key, key + cache.box * largest);
    if (piece.seen) piece.page = cache.page_of(cache.row(work.sequence), key);
    return piece;
}

template <class C> __device__ __forceinline__ Piece look_up(const Work &work, const typename C::Keys &cache, int t) {
    const int at = threadIdx.x % 32 * cache.box;
    if constexpr (C::kJoined) return joined_piece_of<C>(work, cache, t, at);
    return piece_of<C>(work, cache, t, at);
}

__device__ __forceinline__ void check_page(const Piece &piece, const CacheKeys &cache, unsigned *error_word) {
    if (piece.seen && !cache.has_page(piece.page)) atomicOr(error_word, kBadBlockTable);
}

// A key tile by TMA. What no row sees becomes zeros, and so does a page that does not exist: coordinates outside the map are not read.
// piece: the lane's first.
template <class C>
__device__ __forceinline__ void copy_keys(unsigned char *to, const CUtensorMap *maps, Barrier &full, const Work &work, int t,
                                          const typename C::Keys &cache, int heads_a_page, const Piece &piece, unsigned *error_word) {
    if (threadIdx.x % 32 == 0) full.arrive_expect(C::kKeyBytes);
    __syncwarp();
    if (!piece.boxes) return;
    const int kv_head = static_cast<int>(work.kv_head);
    int at = threadIdx.x % 32 * cache.box;
    if constexpr (C::kJoined) {
        const int head = cache.has_page(piece.page) ? piece.page * heads_a_page + kv_head : -1;
        tensor_load(to + at / 8 * C::kKeyGroup, &maps[31 - __clz(piece.boxes)], full, {0, 0, 0, cache.slot(t * C::kTileK + at) / 8, head});
        return;
    }
    int page = piece.page;
#pragma unroll 1
    while (true) {
        for (int half = 0; half < C::kHalves; half++)
            tensor_load(to + half * C::kKeyHalf + at * kRowBytes, maps, full, 64 * half, kv_head, cache.slot(t * C::kTileK + at), page);
        at += 32 * cache.box;
        if (at >= C::kTileK) return;
        const Piece more = piece_of<C>(work, cache, t, at);
        check_page(more, cache, error_word);
        page = more.page;
    }
}

// By the loader warp.
template <class C, class Smem, class Maps>
__device__ __forceinline__ void load_cached_keys(Smem &smem, const Maps &maps, const Problem &p, const typename C::Keys &cache,
                                                 unsigned *error_word) {
    const int lane = threadIdx.x % 32;
    int k_page = 0, v_page = 0;
    if constexpr (C::kJoined) {
        k_page = cache.k_page;
        v_page = cache.v_page;
    }
    Ring<C::kStages> ring;
    for (Ring<C::kSlots> tiles;; tiles.n++) {
        const Ring<2> queries{tiles.n};
        smem.rows[tiles.stage()].full.wait(tiles);
        if (!smem.rows[tiles.stage()].exists) return;
        const Work &work = smem.rows[tiles.stage()].work;
        const int end = work.tiles.end; // read before Q is sent, as in load_tiles
        KeyTileWalk tile(work.tiles);
        Piece next = look_up<C>(work, cache, tile.t);
        smem.q_empty.acquire(queries);
        __syncwarp();
        if (lane == 0) load_queries<C>(smem, maps, p, queries, work);
        while (tile.t < end) {
            const Piece piece = next;
            const int t = tile.t;
            tile.advance();
            if (tile.t < end) next = look_up<C>(work, cache, tile.t); // while the tile's rows stay: its keys are not all sent
            check_page(piece, cache, error_word);
            smem.k_empty.acquire(ring);
            copy_keys<C>(smem.keys[ring.stage()], maps.k, smem.k_full[ring.stage()], work, t, cache, k_page, piece, error_word);
            smem.v_empty.acquire(ring);
            copy_keys<C>(smem.values[ring.stage()], maps.v, smem.v_full[ring.stage()], work, t, cache, v_page, piece, error_word);
            ring.n++;
        }
    }
}

} // namespace sa::fwd_sm90
