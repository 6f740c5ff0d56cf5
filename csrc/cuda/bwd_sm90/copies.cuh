// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of the general backward's blocks on sm_90, and the threads around the math: the loader, and the adders, which add dQ to the
// sums over key blocks.
//
// A kernel's Config has kIsWide, kHalves, kHalvesV, kRowHalf, kKeyHalf, kStages, kSums and kMathThreads, beside the fields that work.cuh
// needs; up to head_dim 128 kDsStages, kIsLate, kSumUses and kMostTerms too, above it kDoutStages and kPieceFloats.
#pragma once

#include "cuda/bwd_sm90/work.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/pipe.cuh"
#include "cuda/tile/wgmma.cuh"

namespace sa::bwd_sm90 {

// Of both math warpgroups; 0 is __syncthreads. Warpgroup g takes the token at kTokenBarrier + g; its warps meet at kOwnBarrier + g.
enum NamedBarrier : int { kMathBarrier = 1, kTokenBarrier = 2, kOwnBarrier = 4 };

constexpr int kNoToken = INT32_MAX / 2; // of a row that does not exist: past every sequence

struct Maps {
    CUtensorMap q, k, v, dout;
};

// RowStats of a tile as the products take them: bytes that no copy writes stay zero.
template <class C> struct TileStats {
    alignas(1024) unsigned char to_scores[C::kRows / 64][kAddendBytes], to_dp[C::kRows / 64][kAddendBytes];
};

template <class C, bool kIsWide = C::kIsWide> struct Smem {
    alignas(1024) unsigned char keys[C::kHalves * C::kKeyHalf], values[C::kHalves * C::kKeyHalf];
    alignas(1024) unsigned char queries[C::kStages][C::kHalves * C::kRowHalf], douts[C::kStages][C::kHalves * C::kRowHalf];
    alignas(1024) unsigned char ds[C::kDsStages][C::kRows / 64][C::kKeys * kRowBytes]; // keys x 64 rows, or 64 rows x keys
    alignas(128) float dq[C::kSums][C::kTileFloats / C::kParts];                       // of a tile, or a math warpgroup's part
    TileStats<C> stats[C::kStages];
    Halves halves;
    alignas(16) float p_sink[C::kStages][C::kRows];
    float terms[2 * C::kMostTerms][C::kMathThreads]; // each thread's sums for ds_aux: registers are short
    int64_t dq_offset[C::kRows];                     // of each row of a tile, in elements from its first
    int token[C::kRows];                             // of each row of a tile, counted in the tile
    Item items[2];
    uint32_t first, all;               // the block's first item; how many there are
    sa_range seen_by[C::kKeys];        // rows that see each key
    bool poisoned[C::kKeys], hides[2]; // keys of K that were not finite; whether clean_rows zeroed any dO of each of `items`
    bool finish_alone[C::kSums];       // the tile to be finished has no earlier key block
    Barriers<2> item_full, item_empty;
    Barriers<1> kv_full, kv_empty;
    Barriers<C::kStages> row_full, row_empty;
    // dq_ready: the buffer is free or, for a row tile's last key block, holds the sum of the earlier blocks. dq_full: the buffer holds this
    // block's dQ or, for the last key block, its sum has been read. With parts, a warpgroup has every other use of a buffer and does not
    // wait for the uses between, so it has barriers of its own: a parity tells a phase from the one before alone.
    Barriers<C::kSumUses> dq_ready;
    Barriers<C::kSums> dq_full;
    Barriers<2> ds_full, ds_empty; // with kIsLate. ds_empty: both warpgroups have their dQ
};

// Takes the next item that exists; at least `all` where there is none.
__device__ __forceinline__ uint32_t take_item(const BwdBuffers &buffers, uint32_t all) {
    uint32_t n;
    do n = atomicAdd(buffers.counter, 1u);
    while (n < all && !buffers.items[n].exists);
    return n;
}

// By all threads: where the rows of a tile lie, and what no copy writes. Meanwhile one takes the first item.
template <class C>
__device__ __forceinline__ void prepare_block(
        Smem<C> &smem, const sinkattn_bwd_args &args, const Maps &maps, const BwdProblem &p, const BwdBuffers &buffers) {
    let_next_kernel_start(); // finish_kernel waits for this one
    if (threadIdx.x == 96) {
        smem.all = static_cast<uint32_t>(buffers.entries[p.num_entries].first_item);
        smem.first = take_item(buffers, smem.all);
    }
    if (threadIdx.x == 32)
        for (const CUtensorMap *map : {&maps.q, &maps.dout, &maps.k, &maps.v}) tensor_map_prefetch(map);
    smem.halves.fill();
    for (int i = threadIdx.x; i < static_cast<int>(sizeof smem.stats) / 16; i += C::kThreads)
        reinterpret_cast<uint4 *>(smem.stats)[i] = uint4{0, 0, 0, 0};
    for (int row = threadIdx.x; row < C::kRows; row += C::kThreads) {
        const int token = row / p.group;
        smem.token[row] = row < p.tokens * p.group ? token : kNoToken;
        smem.dq_offset[row] = token * args.dq.row_stride + (row - token * p.group) * args.dq.head_stride;
    }
    if (p.tokens * p.group < C::kRows) { // rows that no copy writes must not hold NaN
        for (int i = threadIdx.x; i < static_cast<int>(sizeof smem.queries) / 16; i += C::kThreads) {
            reinterpret_cast<uint4 *>(smem.queries[0])[i] = uint4{0, 0, 0, 0};
            if (i < static_cast<int>(sizeof smem.douts) / 16) reinterpret_cast<uint4 *>(smem.douts[0])[i] = uint4{0, 0, 0, 0};
        }
    }
    async_fence();
}

// The accumulator slot of a use, and how many uses it had before.
struct Slot {
    int index;
    unsigned generation;

    __device__ __forceinline__ Slot(int use, int num_slots) : index(use % num_slots), generation(use / num_slots) {}

    // Moves to the slot of use + step; step is at least -num_slots and at most num_slots.
    __device__ __forceinline__ void advance(int step, int num_slots) {
        index += step;
        if (index >= num_slots) index -= num_slots, generation++;
        if (index < 0) index += num_slots, generation--;
    }
};

// How many key blocks before the item's see row tile t.
template <class C> __device__ __forceinline__ int find_turn(const Item &item, const BwdProblem &p, int t) {
    return blocks_seen<C>(item.band, p, t).before(sa_tile_of(item.key, C::kKeys));
}

// Where an item that has parts leaves that of tile t.
template <class C> __device__ __forceinline__ float *part_of_tile(const BwdBuffers &buffers, const BwdProblem &p, const Item &item, int t) {
    return buffers.slots + static_cast<int64_t>(item.use - t * item.finish_end + find_turn<C>(item, p, t)) * C::kTileFloats;
}

__device__ __forceinline__ unsigned long long turn_value(unsigned generation, unsigned turn) {
    return static_cast<unsigned long long>(generation) << 32 | turn;
}

__device__ __forceinline__ void wait_for_turn(const unsigned long long *turns, unsigned long long value) {
    while (load_acquire(turns) != value) {
    }
    async_fence_global(); // for the bulk copies of a slot
}

template <class C>
__device__ __forceinline__ void load_tiles(
        Smem<C> &smem, const sinkattn_bwd_args &args, const Maps &maps, const BwdProblem &p, const BwdBuffers &buffers) {
    const int row_stats = stats_bytes<C>(buffers.row_terms);
    const uint32_t all = smem.all;
    uint32_t n = smem.first;
    // Under a window, a row tile would leave the L2 cache before the next block meets it, and evict slots until then.
    const uint64_t policy = evict_first();
    const auto load = [&](void *to, const CUtensorMap *map, uint64_t *full, int half, int head, int row, int batch) {
        if (p.room.is_local)
            tensor_load(to, map, full, 64 * half, head, row, batch, policy);
        else
            tensor_load(to, map, full, 64 * half, head, row, batch);
    };
    const auto load_stats = [&](uint32_t stage, int64_t nth, uint64_t *full) {
        const auto &of = *reinterpret_cast<const RowStats<C> *>(buffers.stats + nth * row_stats);
        for (int half = 0; half < C::kRows / 64; half++) {
            bulk_load(smem.stats[stage].to_scores[half], of.to_scores[half], sizeof of.to_scores[0], full);
            bulk_load(smem.stats[stage].to_dp[half], of.to_dp[half], sizeof of.to_dp[0], full);
        }
        if (buffers.row_terms) bulk_load(smem.p_sink[stage], of.p_sink, sizeof of.p_sink, full);
    };
    Ring<C::kStages> ring;
    for (Ring<2> items;; items.n++, n = take_item(buffers, all)) {
        Item &item = smem.items[items.stage()];
        Barrier &item_full = smem.item_full[items.stage()];
        smem.item_empty.acquire(items);
        async_fence();
        if (n >= all) {
            item.exists = false;
            return item_full.arrive();
        }
        smem.hides[items.stage()] = false;
        item_full.arrive_expect(sizeof(Item));
        bulk_load(&item, buffers.items + n, sizeof(Item), item_full);
        smem.kv_empty.acquire({items.n});
        item_full.wait(items);
        if (item.tiles.begin == item.tiles.end) {
            smem.kv_full[0].arrive();
            continue;
        }
        const int head = item.slice / p.slices, first_head = item.slice * p.group;
        smem.kv_full[0].arrive_expect((C::kHalves + C::kHalvesV) * C::kKeyHalf);
        for (int half = 0; half < C::kHalves; half++) {
            load(smem.keys + half * C::kKeyHalf, &maps.k, smem.kv_full[0], half, head, item.k_begin + item.key, item.batch);
            if (half < C::kHalvesV)
                load(smem.values + half * C::kKeyHalf, &maps.v, smem.kv_full[0], half, head, item.k_begin + item.key, item.batch);
        }
        for (RowTileWalk tile(item.tiles); tile.exists(); tile.advance(), ring.n++) {
            // In flight: copies of at most kStages tiles above t, loaded before it, and of K and V.
            uint64_t *full = smem.row_full[ring.stage()];
            smem.row_empty.acquire(ring);
            if constexpr (C::kIsWide) {
                const int row = item.q_begin + tile.t * p.tokens, half_bytes = p.tokens * p.group * kRowBytes;
                barrier_arrive_expect(full, C::kHalves * half_bytes + row_stats);
                for (int half = 0; half < C::kHalves; half++)
                    load(smem.queries[ring.stage()] + half * C::kRowHalf, &maps.q, full, half, first_head, row, item.batch);
                load_stats(ring.stage(), item.first_tile + tile.t, full);
                const Ring<C::kDoutStages> douts = {ring.n};
                uint64_t *dout_full = smem.dout_full[douts.stage()];
                smem.dout_empty.acquire(douts);
                barrier_arrive_expect(dout_full, C::kHalvesV * half_bytes);
                for (int half = 0; half < C::kHalvesV; half++)
                    load(smem.douts[douts.stage()] + half * C::kRowHalf, &maps.dout, dout_full, half, first_head, row, item.batch);
            } else {
                barrier_arrive_expect(full, 2 * C::kHalves * p.tokens * p.group * kRowBytes + row_stats);
                const int row = item.q_begin + tile.t * p.tokens;
                for (int half = 0; half < C::kHalves; half++) {
                    load(smem.queries[ring.stage()] + half * C::kRowHalf, &maps.q, full, half, first_head, row, item.batch);
                    load(smem.douts[ring.stage()] + half * C::kRowHalf, &maps.dout, full, half, first_head, row, item.batch);
                }
                load_stats(ring.stage(), item.first_tile + tile.t, full);
            }
        }
    }
}

// Waits until the math has written or read a buffer of dQ, and orders that before copies of it.
__device__ __forceinline__ void receive(Barrier &full, uint32_t use) {
    full.wait(Ring<1>{use});
    async_fence();
}

// Run by kSums threads, each for every kSums-th tile: while one waits for its addition, the next waits for its turn. Registers are short:
// what is cheap to find again is not kept.
template <class C> __device__ __forceinline__ void add_tiles(Smem<C> &smem, const BwdProblem &p, const BwdBuffers &buffers, int nth) {
    const int num_slots = p.room.num_slots;
    const auto dq = [&] { return smem.dq[pinned(nth)]; };
    Ring<1> use;    // uses of dq
    int skip = nth; // tiles until this thread's next
    for (Ring<2> items;; items.n++) {
        const auto item = [&]() -> const Item & { return smem.items[pinned(items.n) % 2]; };
        smem.item_full.wait(items);
        if (!item().exists) return;
        Slot slot(item().use, num_slots);
        for (int t = item().tiles.end - 1; t >= item().tiles.begin; t--, slot.advance(item().step, num_slots)) {
            // In flight: no copy of this thread; at most one of each other adder.
            if (skip-- > 0) continue;
            skip = C::kSums - 1;
            if (item().has_parts()) {
                smem.dq_ready[nth].arrive();
                receive(smem.dq_full[nth], use.n++);
                bulk_store(part_of_tile<C>(buffers, p, item(), t), dq(), C::kTileFloats * sizeof(float));
                store_commit();
                store_wait_read<0>();
                continue;
            }
            const int turn = find_turn<C>(item(), p, t);
            unsigned long long *turns = buffers.turns + slot.index, value = turn_value(slot.generation, turn);
            float *sum = buffers.slots + static_cast<int64_t>(slot.index) * C::kTileFloats;
            if (t < item().finish_end) {
                wait_for_turn(turns, value);
                smem.finish_alone[nth] = turn == 0;
                if (turn == 0) {
                    smem.dq_ready[nth].arrive();
                } else {
                    smem.dq_ready[nth].arrive_expect(C::kTileFloats * sizeof(float));
                    bulk_load(dq(), sum, C::kTileFloats * sizeof(float), smem.dq_ready[nth]);
                }
                receive(smem.dq_full[nth], use.n++); // the math has read the sum: the slot is free
                store_release(turns, turn_value(slot.generation + 1, 0));
            } else {
                smem.dq_ready[nth].arrive();
                wait_for_turn(turns, value);
                receive(smem.dq_full[nth], use.n++);
                if (turn == 0)
                    bulk_store(sum, dq(), C::kTileFloats * sizeof(float));
                else
                    bulk_add(sum, dq(), C::kTileFloats * sizeof(float));
                store_commit();
                store_wait();
                store_release(turns, value + 1);
            }
        }
        Slot idle(item().idle_use, num_slots);
        for (int i = 0; i < item().idle && nth == 0; i++, idle.advance(item().step, num_slots)) {
            wait_for_turn(buffers.turns + idle.index, turn_value(idle.generation, 0));
            store_release(buffers.turns + idle.index, turn_value(idle.generation + 1, 0));
        }
        smem.item_empty.release(items);
    }
}

// The same with kIsLate, each for every kSums-th half of a tile.
template <class C> __device__ __forceinline__ void add_halves(Smem<C> &smem, const BwdProblem &p, const BwdBuffers &buffers, int nth) {
    static_assert(C::kSums == 3, "uses of a buffer are 3 halves apart and tiles begin at even ones, so use and half ^ nth have one parity");
    constexpr int kFloats = C::kTileFloats / 2, kBytes = kFloats * sizeof(float);
    const int num_slots = p.room.num_slots;
    int skip = nth; // halves until this thread's next
    for (Ring<2> items;; items.n++) {
        const auto item = [&]() -> const Item & { return smem.items[pinned(items.n) % 2]; };
        smem.item_full.wait(items);
        if (!item().exists) return;
        Slot slot(item().use, num_slots);
        for (int t = item().tiles.end - 1; t >= item().tiles.begin; t--, slot.advance(item().step, num_slots)) {
            // In flight: no copy of this thread; at most one of each other adder.
            skip -= 2;
            if (skip >= 0) continue;
            const auto half = [&] { return pinned(skip) + 2; };
            const auto buffer = [&] { return pinned(nth); };
            if (item().has_parts()) {
                const uint32_t use = half() ^ nth;
                smem.dq_ready[buffer() + C::kSums * (use % 2)].arrive();
                receive(smem.dq_full[buffer()], use);
                bulk_store(part_of_tile<C>(buffers, p, item(), t) + half() * kFloats, smem.dq[buffer()], kBytes);
                store_commit();
                store_wait_read<0>();
                skip += C::kSums;
                continue;
            }
            const int turn = find_turn<C>(item(), p, t);
            unsigned long long *turns = buffers.turns + 2 * slot.index + half(), value = turn_value(slot.generation, turn);
            float *sum = buffers.slots + (2 * static_cast<int64_t>(slot.index) + half()) * kFloats;
            const uint32_t use = half() ^ nth; // its parity
            const auto ready = [&]() -> Barrier & { return smem.dq_ready[buffer() + C::kSums * (use % 2)]; };
            if (t < item().finish_end) {
                wait_for_turn(turns, value);
                smem.finish_alone[buffer()] = turn == 0;
                if (turn == 0) {
                    ready().arrive();
                } else {
                    ready().arrive_expect(kBytes);
                    bulk_load(smem.dq[buffer()], sum, kBytes, ready());
                }
                receive(smem.dq_full[buffer()], use); // the math has read the sum: the slot is free
                store_release(turns, turn_value(slot.generation + 1, 0));
            } else {
                ready().arrive();
                wait_for_turn(turns, value);
                receive(smem.dq_full[buffer()], use);
                if (turn == 0)
                    bulk_store(sum, smem.dq[buffer()], kBytes);
                else
                    bulk_add(sum, smem.dq[buffer()], kBytes);
                store_commit();
                store_wait();
                store_release(turns, value + 1);
            }
            skip += C::kSums;
        }
        Slot idle(item().idle_use, num_slots);
        for (int i = 0; i < item().idle && nth < 2; i++, idle.advance(item().step, num_slots)) {
            wait_for_turn(buffers.turns + 2 * idle.index + nth, turn_value(idle.generation, 0));
            store_release(buffers.turns + 2 * idle.index + nth, turn_value(idle.generation + 1, 0));
        }
        smem.item_empty.release(items);
    }
}

} // namespace sa::bwd_sm90
