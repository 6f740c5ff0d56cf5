// SPDX-License-Identifier: Apache-2.0
//
// Loads of the general forward on sm_90 from a cache of small pages, by threads: a copy engine's box takes as long for one key as for 64.
//
//     loader warp     Q | K0 | K1 | ...      cp.async, a page number for each key
//     checker warps       V0 | V1 | ...      each half of the columns; then they check the values
#pragma once

#include "cuda/fwd_sm90/cached.cuh"

namespace sa::fwd_sm90 {

// A key tile's columns of one of kWarps warps. What no row sees, and what lies in no page, becomes zeros.
template <class C, int kWarps>
__device__ __forceinline__ void copy_tile(unsigned char *tile, const sinkattn_tensor &tensor, int head_dim, const Work &work, int t,
                                          const CacheKeys &cache, int warp, unsigned *error_word) {
    constexpr int kChunks = C::kHeadDim / 8 / kWarps, kRows = 32 / kChunks; // of 16 bytes, of a row; rows at a time
    const int lane = pinned(threadIdx.x % 32), chunk = warp * kChunks + lane % kChunks, row = lane / kChunks;
    const uint32_t to = shared_address(tile) + chunk / 8 * C::kKeyHalf + swizzled(row, chunk % 8);
    const auto *from = static_cast<const uint16_t *>(tensor.data) + work.kv_head * tensor.head_stride + chunk * 8;
    const int32_t *pages = cache.row(work.sequence).pages;
    const bool exists = chunk * 8 < head_dim;
    bool bad = false;
#pragma unroll 2
    for (int i = 0; i < C::kTileK; i += kRows) {
        const int key = t * C::kTileK + row + i, index = cache.page_index(key);
        const bool seen = sees_some(work.tiles, key, key + 1);
        const int page = seen ? __ldg(pages + index) : 0;
        const bool valid = seen && cache.has_page(page);
        bad |= seen && !valid;
        cp_async_16(rows_on(to, i),
                    from + page * tensor.batch_stride + static_cast<int64_t>(key - index * cache.page_size) * tensor.row_stride,
                    valid && exists);
    }
    if (bad) atomicOr(error_word, kBadBlockTable);
}

// By the loader warp: Q and K. In flight: K of the tile before, then of this one, if there is one.
template <class C, class Smem, class Maps>
__device__ __forceinline__ void load_keys_by_threads(Smem &smem, const sinkattn_fwd_args &args, const Maps &maps, const Problem &p,
                                                     const CacheKeys &cache, unsigned *error_word) {
    Ring<C::kStages> ring;
    for (Ring<C::kSlots> tiles;; tiles.n++) {
        const Ring<2> queries{tiles.n};
        smem.rows[tiles.stage()].full.wait(tiles);
        if (!smem.rows[tiles.stage()].exists) return;
        smem.q_empty.acquire(queries);
        const Work &work = smem.rows[tiles.stage()].work;
        const int end = work.tiles.end; // read before Q is sent, as in load_tiles
        KeyTileWalk tile(work.tiles);
        __syncwarp();
        if (threadIdx.x % 32 == 0) load_queries<C>(smem, maps, p, queries, work);
        for (bool copies = false; copies || tile.t < end; ring.n++) {
            const bool exists = tile.t < end;
            if (exists) {
                smem.k_empty.acquire(ring);
                copy_tile<C, 1>(smem.keys[ring.stage()], args.k, static_cast<int>(args.problem.head_dim), work, tile.t, cache, 0,
                                error_word);
                tile.advance();
            }
            cp_async_commit();
            cp_async_wait<1>();
            if (copies) {
                async_fence();
                smem.k_full.arrive({ring.n - 1});
            }
            if (!exists) break;
            copies = true;
        }
    }
}

// By the checker warps: V. A warp that skips a tile waits for V before it releases K, so V waits for K's release too.
template <class C, class Smem>
__device__ __forceinline__ void load_values_by_threads(Smem &smem, const sinkattn_fwd_args &args, const CacheKeys &cache,
                                                       unsigned *error_word) {
    Ring<C::kStages> ring;
    for (Ring<C::kSlots> tiles;; tiles.n++) {
        smem.rows[tiles.stage()].full.wait(tiles);
        if (!smem.rows[tiles.stage()].exists) return;
        const Work &work = smem.rows[tiles.stage()].work;
        KeyTileWalk tile(work.tiles);
        enum { kNone, kFull, kMasked } before = kNone; // the tile before this one
        for (;; ring.n++) {
            const bool exists = tile.exists();
            if (exists) {
                smem.k_empty.acquire(ring);
                smem.v_empty.acquire(ring);
                copy_tile<C, C::kCheckers>(smem.values[ring.stage()], args.v, static_cast<int>(args.problem.head_dim), work, tile.t, cache,
                                           pinned(threadIdx.x / 32) - 2, error_word);
            }
            cp_async_commit();
            cp_async_wait<1>();
            if (before != kNone) {
                async_fence();
                bar_sync<32 * C::kCheckers>(kCheckerBarrier);
                check_values<C>(smem, {ring.n - 1}, before == kMasked, pinned(threadIdx.x - 64)); // pinned: not kept for the next tile
            }
            if (!exists) break;
            before = tile.is_full() ? kFull : kMasked;
            tile.advance();
        }
        smem.rows[tiles.stage()].empty.arrive();
    }
}

} // namespace sa::fwd_sm90
