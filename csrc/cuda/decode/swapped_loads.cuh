// SPDX-License-Identifier: Apache-2.0
//
// Loads of the decode with swapped operands on sm_90: boxes of 16 keys by TMA, or keys by threads where page_size is no multiple.
#pragma once

#include "cuda/decode/rows_loads.cuh"
#include "cuda/decode/swapped_smem.cuh"

namespace sa::decode {
namespace swapped {

using many_rows::Maps;

// Steps past the part's end, and those of pages that do not exist, become zeros.
template <class C> struct BoxLoader : many_rows::Loader<C> {
    using Base = many_rows::Loader<C>;
    using Base::smem, Base::params, Base::maps;
    uint32_t n = 0; // of the block's stages

    __device__ __forceinline__ void copy_slot(
            Ring<C::kSlots> slot, const CUtensorMap *map, int32_t kv_head, const typename Base::Place &at) const {
        Barrier &full = smem.full[slot.stage()];
        smem.empty.acquire(slot);
        if (threadIdx.x % 32 == 0) full.arrive_expect(C::kSlotBytes);
        __syncwarp();
        Base::template copy<C::kHalves>(smem.ring[slot.stage()], full, map, kv_head, at);
    }

    __device__ __forceinline__ void load(const Part &part) {
        const int mine = static_cast<int>(threadIdx.x % 32) % C::kSteps;
        const int32_t last = last_step(part);
        typename Base::Place next = {0, 0};
        if (part.first + mine < last) next = this->find(part, part.first + mine);
#pragma unroll 1
        for (int32_t step = part.first; step < last; step += C::kSteps, n++) {
            typename Base::Place at = next;
            if (step + C::kSteps + mine < last) next = this->find(part, step + C::kSteps + mine);
            const bool exists = step + mine < last, inside = params.has_page(at.page);
            if (exists && !inside) atomicOr(params.error_word, kBadBlockTable);
            const bool on_host = exists && inside && at.page >= params.first_host_page;
            at.page = !exists || !inside ? -1 : on_host ? at.page - params.first_host_page : at.page;
            copy_slot(keys_of<C>(n), on_host ? &maps.host_k : &maps.k, part.kv_head, at);
            copy_slot(values_of<C>(n), on_host ? &maps.host_v : &maps.v, part.kv_head, at);
        }
    }
};

// A warp copies a quarter of a stage's keys: eight lanes a key, 16 bytes each of every 128. Lane l holds the place of the l-th key, and
// reads the page of the next stage's. Keys that no row sees, and keys of pages that do not exist, become zeros.
template <class C> struct ThreadLoader {
    static constexpr int kWarpKeys = C::kKeys / 4;
    using Smem = typename C::Smem;
    Smem &smem;
    const typename C::Arguments &params;
    uint32_t n = 0; // of the block's stages

    struct Place {
        int32_t page, slot; // page: as the table has it; slot: -1 where no row sees the key
    };

    __device__ __forceinline__ Place find(const Part &part, int32_t step, int32_t last) const {
        const int lane = static_cast<int>(threadIdx.x % 32), at = static_cast<int>(threadIdx.x / 32 % 4) * kWarpKeys + lane;
        const sa_key_tiles &tiles = part.stream.tiles;
        const int tile = sa_tile_of(at, kTileK);
        const int32_t its = step + tile, key = sa_key_tile_at(&tiles, its) * kTileK + at - tile * kTileK;
        const bool seen = lane < kWarpKeys && its < last && (key < tiles.sink_keys || (key >= tiles.band.begin && key < tiles.band.end));
        if (!seen) return {0, -1};
        const int32_t index = params.page_index(key);
        return {load_relaxed(params.block_table + part.batch * params.block_table_stride + index), key - index * params.page_size};
    }

    // offset: of the lane's key, in elements; -1 for none, which no offset is: below 0 lie those of host pages at lower addresses.
    __device__ __forceinline__ void copy_slot(Ring<C::kSlots> slot, const uint16_t *data, int64_t offset) const {
        const int lane = static_cast<int>(threadIdx.x % 32), chunk = lane % 8, first = static_cast<int>(threadIdx.x / 32 % 4) * kWarpKeys;
        const uint32_t to = shared_address(smem.ring[slot.stage()]);
        smem.empty.acquire(slot);
#pragma unroll
        for (int i = 0; i < kWarpKeys / 4; i++) {
            const int key = 4 * i + lane / 8;
            const int64_t at = __shfl_sync(0xffffffffu, offset, key);
#pragma unroll
            for (int half = 0; half < C::kHalves; half++)
                cp_async_16_once(to + half * C::kKeyHalf + swizzled(first + key, chunk), data + at + 64 * half + 8 * chunk,
                        at != -1 && 64 * half + 8 * chunk < params.head_dim);
        }
        smem.full[slot.stage()].arrive_copied();
    }

    __device__ __forceinline__ void load(const Part &part) {
        const int32_t last = last_step(part);
        const uint16_t *k = params.k + part.kv_head * wide(params.k_head), *v = params.v + part.kv_head * wide(params.v_head);
        Place next = find(part, part.first, last);
#pragma unroll 1
        for (int32_t step = part.first; step < last; step += C::kSteps, n++) {
            const Place at = next;
            if (step + C::kSteps < last) next = find(part, step + C::kSteps, last);
            const bool seen = at.slot >= 0, real = seen && params.has_page(at.page);
            if (seen && !real) atomicOr(params.error_word, kBadBlockTable);
            const bool on_host = at.page >= params.first_host_page;
            copy_slot(keys_of<C>(n), k, real ? at.page * params.k_page + wide(at.slot) * params.k_row + (on_host ? params.k_gap : 0) : -1);
            copy_slot(
                    values_of<C>(n), v, real ? at.page * params.v_page + wide(at.slot) * params.v_row + (on_host ? params.v_gap : 0) : -1);
        }
    }
};

} // namespace swapped
} // namespace sa::decode
