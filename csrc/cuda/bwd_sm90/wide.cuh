// SPDX-License-Identifier: Apache-2.0
//
// Blocks of the general backward for wide heads: shared memory, the adders, and products of a math warpgroup.
//
// A warpgroup computes S and dP of all keys with its half of the rows, then a half of the columns of dK, dV and dQ over all rows and keys,
// from P and dS that both have written. Where head_dim / 2 is no multiple of 64, its half is 64 columns and, of the 64 in the middle, 32.
#pragma once

#include "cuda/bwd_sm90/copies.cuh"
#include "cuda/bwd_sm90/tile.cuh"
#include "cuda/tile/wgmma.cuh"

namespace sa::bwd_sm90 {

template <class C> struct Smem<C, true> {
    alignas(1024) unsigned char keys[C::kHalves * C::kKeyHalf], values[C::kHalvesV * C::kKeyHalf];
    alignas(1024) unsigned char queries[C::kStages][C::kHalves * C::kRowHalf], douts[C::kDoutStages][C::kHalvesV * C::kRowHalf];
    alignas(1024) unsigned char weights[C::kKeys * kRowBytes], ds[C::kKeys * kRowBytes]; // P, dS: keys x rows
    alignas(128) float dq[C::kParts * C::kSums][C::kPieceFloats];                        // of a warpgroup's pieces
    TileStats<C> stats[C::kStages];
    Halves halves;
    alignas(16) float p_sink[C::kStages][C::kRows];
    float terms[2][C::kMathThreads]; // each thread's sums for ds_aux
    int64_t dq_offset[C::kRows];     // of each row of a tile, in elements from its first
    int token[C::kRows];             // of each row of a tile, counted in the tile
    Item items[2];
    uint32_t first, all;
    sa_range seen_by[C::kKeys];        // rows that see each key
    bool poisoned[C::kKeys], hides[2]; // keys of K that were not finite; whether clean_rows zeroed any dO of each of `items`
    bool finish_alone[C::kParts];      // the tile to be finished has no earlier key block
    Barriers<2> item_full, item_empty;
    Barriers<1> kv_full, kv_empty;
    Barriers<C::kStages> row_full, row_empty; // of Q and stats
    Barriers<C::kDoutStages> dout_full, dout_empty;
    Barriers<1> operands_empty; // both warpgroups are done with P and dS
    // dq_ready: the buffer is free or, for a row tile's last key block, holds the sum of the earlier blocks. dq_full: the buffer holds this
    // block's dQ or, for the last key block, its sum has been read.
    Barriers<C::kParts * C::kSums> dq_ready, dq_full;
};

// The first column of piece i of a warpgroup's dQ.
template <class C> __device__ __forceinline__ int piece_column(int i, int math_warpgroup) {
    if (C::kLastPiece == 64) return 128 * math_warpgroup + 64 * i;
    return i == 0 ? 128 * math_warpgroup : 64 + 32 * math_warpgroup;
}

// Run by a thread a math warpgroup, for its part of each tile's dQ, which comes in two pieces.
template <class C> __device__ __forceinline__ void add_pieces(Smem<C> &smem, const BwdProblem &p, const BwdBuffers &buffers, int part) {
    constexpr int kBytes[2] = {C::kRows * 64 * 4, C::kRows * C::kLastPiece * 4};
    const int num_slots = p.room.num_slots;
    Ring<C::kSums> use;
    const auto buffer = [&] { return pinned(part) * C::kSums + use.stage(); };
    for (Ring<2> items;; items.n++) {
        const auto item = [&]() -> const Item & { return smem.items[pinned(items.n) % 2]; };
        smem.item_full.wait(items);
        if (!item().exists) return;
        Slot slot(item().use, num_slots);
        for (int t = item().tiles.end - 1; t >= item().tiles.begin; t--, slot.advance(item().step, num_slots)) {
            // In flight: no copy of this thread; at most one of the other adder.
            if (item().has_parts()) {
                float *to = part_of_tile<C>(buffers, p, item(), t) + part * (C::kTileFloats / C::kParts);
#pragma unroll
                for (int i = 0; i < 2; i++, use.n++) {
                    smem.dq_ready[buffer()].arrive();
                    smem.dq_full[buffer()].wait(use);
                    bulk_store(to + i * C::kPieceFloats, smem.dq[buffer()], kBytes[i]);
                    store_commit();
                    store_wait_read<0>();
                }
                continue;
            }
            const int turn = find_turn<C>(item(), p, t);
            unsigned long long *turns = buffers.turns + C::kParts * slot.index + part, value = turn_value(slot.generation, turn);
            float *sum = buffers.slots + (static_cast<int64_t>(C::kParts) * slot.index + part) * (C::kTileFloats / C::kParts);
            if (t < item().finish_end) {
                wait_for_turn(turns, value);
                smem.finish_alone[pinned(part)] = turn == 0;
#pragma unroll
                for (int i = 0; i < 2; i++, use.n++) {
                    Barrier &ready = smem.dq_ready[buffer()];
                    if (turn == 0) {
                        ready.arrive();
                    } else {
                        ready.arrive_expect(kBytes[i]);
                        bulk_load(smem.dq[buffer()], sum + i * C::kPieceFloats, kBytes[i], ready);
                    }
                    smem.dq_full[buffer()].wait(use); // the math has read the sum
                }
                store_release(turns, turn_value(slot.generation + 1, 0));
            } else {
                smem.dq_ready[buffer()].arrive();
                if (C::kSums == 2) smem.dq_ready[buffer() ^ 1].arrive();
                wait_for_turn(turns, value);
#pragma unroll
                for (int i = 0; i < 2; i++, use.n++) {
                    if (C::kSums == 1 && i == 1) {
                        store_wait_read<0>();
                        smem.dq_ready[buffer()].arrive();
                    }
                    smem.dq_full[buffer()].wait(use);
                    if (turn == 0)
                        bulk_store(sum + i * C::kPieceFloats, smem.dq[buffer()], kBytes[i]);
                    else
                        bulk_add(sum + i * C::kPieceFloats, smem.dq[buffer()], kBytes[i]);
                    store_commit();
                }
                store_wait();
                store_release(turns, value + 1);
            }
        }
        Slot idle(item().idle_use, num_slots);
        for (int i = 0; i < item().idle; i++, idle.advance(item().step, num_slots)) {
            unsigned long long *turns = buffers.turns + C::kParts * idle.index + part;
            wait_for_turn(turns, turn_value(idle.generation, 0));
            store_release(turns, turn_value(idle.generation + 1, 0));
        }
        smem.item_empty.release(items);
    }
}

// Stores the warpgroup's half of the rows of P or dS.
template <class C>
__device__ __forceinline__ void write_operands(uint32_t to, const uint32_t (&x)[C::kColumns / 16][4], int math_warpgroup) {
    const int thread = pinned(threadIdx.x);
    const uint32_t first = swizzled(to, kRowBytes, store_row(thread), C::kColumns / 8 * math_warpgroup + store_chunk(thread));
#pragma unroll
    for (int n = 0; n < C::kColumns / 16; n++) stmatrix_x4(pairs_on(first, n), x[n]);
}

// A warpgroup's columns of dK and dV.
template <class C> struct KeyGradients {
    static constexpr bool kHasMiddle = C::kLastPiece == 32;
    static constexpr int kWidth = kHasMiddle ? 64 : 128, kWidthV = C::kHeadDimV / 2;

    float dk[kWidth / 2], dv[kWidthV / 2], middle[kHasMiddle ? 16 : 1];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (float &x : dk) x = 0.0f;
#pragma unroll
        for (float &x : dv) x = 0.0f;
#pragma unroll
        for (float &x : middle) x = 0.0f;
    }
    __device__ __forceinline__ void add_poison(const float (&poison)[2]) {
        bwd_sm90::add_poison(dk, poison);
        bwd_sm90::add_poison(dv, poison);
        if constexpr (kHasMiddle) bwd_sm90::add_poison(middle, poison);
    }
    __device__ __forceinline__ void carry(const BwdProblem &p, const BwdBuffers &buffers, const Item &item, int part) {
        if constexpr (kHasMiddle)
            add_round<C>(p, buffers, item, part, dk, dv, middle);
        else
            add_round<C>(p, buffers, item, part, dk, dv);
    }
    __device__ __forceinline__ bool add_slice(const BwdProblem &p, const BwdBuffers &buffers, const Item &item) {
        if constexpr (kHasMiddle)
            return bwd_sm90::add_slice<C>(p, buffers, item, dk, dv, middle);
        else
            return bwd_sm90::add_slice<C>(p, buffers, item, dk, dv);
    }
    __device__ __forceinline__ void write(
            const float (&poison)[2], const sinkattn_bwd_args &args, const BwdProblem &p, const Item &item, int math_warpgroup) {
        const int64_t head_dim = args.fwd.problem.head_dim, head_dim_v = sa_head_dim_v(&args.fwd.problem);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int64_t key = item.key + warpgroup_row(r);
            const bool is_real = key < item.band.k_len;
            const float added = poison[r];
            auto *to_dk = static_cast<uint16_t *>(args.dk.data), *to_dv = static_cast<uint16_t *>(args.dv.data);
            if (is_real) {
                to_dk += sa_offset(&args.dk, item.batch, item.k_begin + key, item.slice / p.slices);
                to_dv += sa_offset(&args.dv, item.batch, item.k_begin + key, item.slice / p.slices);
            }
            write_row<typename C::Element>(to_dk, dk, r, p.scale + added, 128 * math_warpgroup, head_dim, is_real);
            if constexpr (kHasMiddle)
                write_row<typename C::Element>(to_dk, middle, r, p.scale + added, 64 + 32 * math_warpgroup, head_dim, is_real);
            write_row<typename C::Element>(to_dv, dv, r, 1.0f + added, kWidthV * math_warpgroup, head_dim_v, is_real);
        }
    }
};

} // namespace sa::bwd_sm90
