// SPDX-License-Identifier: Apache-2.0
//
// Loads of the general forward on sm_90 from a cache of small pages, by threads: a box of TMA takes as long for one key as for 64.
//
//     loader warp     Q | K0 | K1 | ...
//     value warp          V0 | V1 | ...
//     checker warp            V0 | V1 | ...
//
// A lane of eight copies 16 bytes of a key's 128, by cp.async, which announces itself: no thread waits for its copies. They are made by
// the generic proxy, and wgmma reads by the async one, so math warpgroups fence between their wait and their products.
#pragma once

#include "cuda/fwd_sm90/cached.cuh"

namespace sa::fwd_sm90 {

// The page of a key, as the table has it; -1 where no row sees the key, or it lies behind its tile. at: its place in the tile.
template <class C> __device__ __forceinline__ int look_up_page(const Work &work, const ThreadKeys &cache, int key, int at) {
    return at < C::kTileK && sees_some(work.tiles, key, key + 1) ? __ldg(cache.row(work.sequence).pages + cache.page_index(key)) : -1;
}

// Of 32 keys, whose offsets lie as [key % 4, key / 4].
__device__ __forceinline__ int place_of(int key) { return key % 4 * 8 + key / 4; }

// Copies key tile t; what no row sees, and what lies in no page, becomes zeros. page: of the lane's key of the first 32; becomes that of
// tile next_t, unless that is negative. offsets: room for a tile's.
template <class C, int kHalves>
__device__ __forceinline__ void copy_tile(uint32_t to, Barrier &full, const ThreadKeys::Pool &pool, const Work &work, int t, int next_t,
        const ThreadKeys &cache, int &page, uint32_t *offsets, unsigned *error_word) {
    constexpr uint32_t kNone = ~0u;
    const int lane = pinned(threadIdx.x % 32), chunk = lane % 8, row = lane / 8, left = pool.columns - 8 * chunk;
    const uint4 *head = static_cast<const uint4 *>(pool.data) + static_cast<uint32_t>(work.kv_head) * static_cast<uint64_t>(pool.head);
    const uint4 *from = pinned(head + chunk); // pinned: an address is one addition to it
    to += swizzled(row, chunk);
    int key = t * C::kTileK + lane;
#pragma unroll 1
    for (int at = 0; at < C::kTileK; at += 32) {
        const int its_page = page;
        const bool ends = at >= C::kTileK - 32;
        if (!ends)
            page = look_up_page<C>(work, cache, key + 32, at + 32 + lane);
        else if (next_t >= 0)
            page = look_up_page<C>(work, cache, next_t * C::kTileK + lane, lane);
        uint32_t offset = kNone;
        if (cache.has_page(its_page))
            offset = static_cast<uint32_t>(its_page) * pool.page + static_cast<uint32_t>(cache.slot(key)) * pool.row;
        else if (at + lane < C::kTileK && sees_some(work.tiles, key, key + 1))
            atomicOr(error_word, kBadBlockTable);
        offsets[at + place_of(lane)] = offset;
        __syncwarp(); // all lanes have read those of the tile before, two or more barriers ago
#pragma unroll
        for (int j = 0; j < 32; j += 8) { // a lane's chunk of keys row + j and row + j + 4
            if (C::kTileK % 32 && j == 16 && ends) break;
            const uint2 two = *reinterpret_cast<const uint2 *>(offsets + at + row * 8 + j / 4);
            const uint32_t its[] = {two.x, two.y};
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int half = 0; half < kHalves; half++)
                    cp_async_16(rows_on(to, j + 4 * i) + half * C::kKeyHalf, from + its[i] + 8 * half,
                            its[i] != kNone && 64 * half < (kHalves == 3 ? pinned(left) : left));
        }
        to += 32 * kRowBytes;
        key += 32;
    }
    full.arrive_copied();
}

__device__ __forceinline__ int tile_or_none(const KeyTileWalk &tile) { return tile.exists() ? tile.t : -1; }

// By the loader warp, Q and K; by the value warp, V.
template <class C, bool kIsValues, class Smem, class Maps>
__device__ __forceinline__ void load_cached(Smem &smem, const Maps &maps, const Problem &p, const ThreadKeys &cache, unsigned *error_word) {
    Ring<C::kStages> ring;
    for (Ring<C::kRowStages> tiles;; tiles.n++) {
        Rows<C> &rows = smem.rows[tiles.stage()];
        rows.placed.wait(tiles);
        if (!rows.exists) return;
        const Work &work = rows.work;
        bool awaited = rows.awaited && threadIdx.x % 32 == 0;
        int next = tile_or_none(KeyTileWalk(work.tiles)), page = -1;
        if (next >= 0) page = look_up_page<C>(work, cache, next * C::kTileK + static_cast<int>(threadIdx.x % 32), 0);
        if constexpr (!kIsValues) load_queries_of_warp<C>(smem, maps, p, {tiles.n}, work);
        for (; next >= 0; ring.n++) {
            const int t = next;
            if (!kIsValues) tell_unsent(smem, awaited, work.tiles.end - t);
            next = tile_or_none(KeyTileWalk(work.tiles, t + 1));
            const uint32_t stage = ring.stage();
            if constexpr (kIsValues) {
                smem.v_empty.acquire(ring);
                copy_tile<C, C::kHalvesV>(shared_address(smem.values[stage]), smem.v_full[stage], cache.v, work, t, next, cache, page,
                        smem.offsets[1], error_word);
            } else {
                smem.k_empty.acquire(ring);
                copy_tile<C, C::kHalves>(shared_address(smem.keys[stage]), smem.k_full[stage], cache.k, work, t, next, cache, page,
                        smem.offsets[0], error_word);
            }
        }
        if (!kIsValues) tell_unsent(smem, awaited, 0);
        rows.empty.arrive();
    }
}

} // namespace sa::fwd_sm90
