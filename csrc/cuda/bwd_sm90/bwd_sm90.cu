// SPDX-License-Identifier: Apache-2.0
//
// Backward for every mask on sm_90, head_dim up to 128.
//
//     table   if packed, one block: where each sequence's items begin
//     rows    lse and g - delta of every row, dq of rows without keys; behind the table the items of the keys kernel
//     keys    an item is 128 keys of a kv head, and the row tiles of a chain (core/chains.h) that see some of them:
//         loader warp   K and V | Q, dO and stats of a tile of rows | ...          by TMA
//         2 warpgroups  S = K Q^T, dP = V dO^T, P, dS;   dV += P dO,  dK += dS Q,  dQ = dS^T K       64 keys each
//         adders        dQ of tiles, or of halves of them, added in fp32 to the sum of the key blocks before
//     finish  ds_aux of a head, the sum of its row tiles' and key blocks' terms; dQ, dK and dV that items left apart
//
// A row tile is tokens x the heads of a GQA group. Its dQ is the sum over key blocks, in ascending order, in an accumulator slot of fp32:
// each block waits for its turn there; the first stores, the last rounds the sum to dq and frees the slot. Blocks take items in order, keys
// ascending, and walk rows down, so a block waits only for items taken before its own, and follows them at a distance of one addition.
//
// The LSE that is read already holds the sink, which no kernel here adds again.
//
// 0 * NaN is not 0. In tiles that need a mask, values of Q and dO that are not finite become 0, and NaN returns to S, and by g - delta to
// dS; in K they become 0 in every tile, and NaN returns through V.
//
// Shared memory and registers: docs/kernels/bwd_sm90.md, Budget.

#include "cuda/bwd_sm90/copies.cuh"
#include "cuda/bwd_sm90/finish.cuh"
#include "cuda/bwd_sm90/launch.cuh"
#include "cuda/bwd_sm90/rows.cuh"
#include "cuda/bwd_sm90/tile.cuh"
#include "cuda/bwd_sm90/work.cuh"
#include "cuda/tile/pipe.cuh"
#include "cuda/tile/wgmma.cuh"

namespace sa::bwd_sm90 {
namespace {

template <class Element_, int kHeadDim_, int kRows_, int kKeys_> struct Config {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDim, kRows = kRows_, kKeys = kKeys_;
    static constexpr bool kIsWide = false;
    static constexpr int kColumns = kRows; // rows that a math warpgroup's S has, as columns
    // A row is stored in kHalves pieces of 64 columns, k*Half bytes apart. Without kIsWhole the last has 32 that exist.
    static constexpr int kHalves = (kHeadDim + 63) / 64, kHalvesV = kHalves;
    static constexpr bool kIsWhole = kHeadDim % 64 == 0;
    static constexpr int kRowHalf = kRows * kRowBytes, kKeyHalf = kKeys * kRowBytes;
    static constexpr int kThreads = 384, kMathThreads = 256, kMathWarps = kMathThreads / 32;
    // With kIsLate the warpgroups compute dQ a tile late, half a tile apart, and each hands over its part. It does not pay at head_dim 128.
    static constexpr bool kIsLate = kHeadDim == 64;
    static constexpr int kStages = 2, kDsStages = kIsLate ? 2 : 1;                  // of row tiles; of dS
    static constexpr TermsOf kMostTerms = kHeadDim == 64 ? kTermsOf24 : kTermsOf16; // the longest period with sums of its own
    // Parts of a tile's dQ; buffers of a part, one an adder; their uses until a warpgroup has the same buffer again.
    static constexpr int kParts = kIsLate ? 2 : 1, kSums = kIsLate ? 3 : 2, kSumUses = kSums * kParts;
    static constexpr int kTileFloats = kRows * kHeadDim;
    static constexpr int kLoaderRegisters = 24, kMathRegisters = 240;
    static_assert(kKeys == 128, "two math warpgroups of 64 keys");
    static_assert(kRows / 64 * kHalves == 2, "a math warpgroup gets 64 x 64 of dQ");
};

constexpr int kComplete = -1; // in place of kPending: dQ has been waited for

// A math warpgroup: 64 keys in the rows of its accumulators, a row tile in the columns.
template <class C, TermsOf kTerms> struct Math {
    using Scores = float[C::kRows / 2];          // S, dP: keys x rows
    using Operands = uint32_t[C::kRows / 16][4]; // P, dS as packed pairs
    using Gradients = float[C::kHeadDim / 2];    // dK, dV

    Smem<C> &smem;
    const sinkattn_bwd_args &args;
    const BwdProblem &p;
    const BwdBuffers &buffers;
    const int math_warpgroup;
    const uint32_t begin; // address of smem, in a uniform register
    Ring<C::kStages> ring;
    Ring<C::kSumUses> dq_ring;
    Round round;

    // Uniform, as operands of wgmma should be. With kIsLate it is found at each use, as ptxas would spill what it keeps.
    __device__ __forceinline__ uint32_t address(const void *at) const {
        return (C::kIsLate ? static_cast<uint32_t>(pinned(static_cast<int>(begin))) : begin) +
               static_cast<uint32_t>(static_cast<const unsigned char *>(at) - reinterpret_cast<const unsigned char *>(&smem));
    }

    // begin_scores issues S of the ring's stage, begin_dp its dP; the caller waits.
    __device__ __forceinline__ void begin_scores(Scores &s) {
        const uint32_t stage = warp_uniform(ring.stage());
        smem.row_full[stage].wait(ring);
        wgmma_abt<typename C::Element, C::kHeadDim, C::kKeyHalf, C::kRowHalf>(s, address(smem.keys) + 64 * math_warpgroup * kRowBytes,
                address(smem.queries[stage]), [&] { wgmma_add_columns(s, address(&smem.halves), address(smem.stats[stage].to_scores)); });
    }
    __device__ __forceinline__ void begin_dp(Scores &dp) {
        const uint32_t stage = warp_uniform(ring.stage());
        wgmma_abt<typename C::Element, C::kHeadDim, C::kKeyHalf, C::kRowHalf>(dp, address(smem.values) + 64 * math_warpgroup * kRowBytes,
                address(smem.douts[stage]), [&] { wgmma_add_columns(dp, address(&smem.halves), address(smem.stats[stage].to_dp)); });
    }

    // Issues this warpgroup's part of dQ from dS in buffer `of`.
    __device__ __forceinline__ void begin_dq(float (&dq)[32], uint32_t of) {
        const uint32_t ds = address(smem.ds[0]) + of * static_cast<uint32_t>(sizeof smem.ds[0]), keys = address(smem.keys);
        if constexpr (C::kRows == 64)
            wgmma_ab<typename C::Element, C::kKeys, C::kRowHalf, 0>(dq, ds, keys + math_warpgroup * C::kKeyHalf, false);
        else
            dq_product<C>(dq, ds + math_warpgroup * C::kKeys * kRowBytes, keys);
    }

    // Waits for dQ, with kPending products issued after it, from dS in buffer `of`.
    template <int kPending> __device__ __forceinline__ void complete_dq(float (&dq)[32], uint32_t of) {
        if constexpr (kPending != kComplete) {
            wgmma_wait<kPending>();
            pin(dq);
            if (C::kIsLate) smem.ds_empty[of].arrive();
        }
    }

    // complete_dq, then hands this warpgroup's dQ to the adder; where the tile has no later key block, so that it `finishes`, adds the sum
    // and writes dq instead. next() may overwrite dq.
    template <int kPending, class Next>
    __device__ __forceinline__ void hand_over(float (&dq)[32], const Item &item, int t, bool finishes, uint32_t of, const Next &next) {
        const uint32_t sum = dq_ring.stage() % C::kSums;
        smem.dq_ready.wait(dq_ring);
        if (finishes) { // ptxas wants the wait in both branches
            complete_dq<kPending>(dq, of);
            finish_tile<C>(dq, smem.dq[sum], (C::kIsLate ? 0 : math_warpgroup) * 8, smem.finish_alone[sum], smem, args, p, item, t,
                    C::kRows == 64 ? 0 : 64 * math_warpgroup, C::kRows == 64 ? 64 * math_warpgroup : 0);
        } else {
            complete_dq<kPending>(dq, of);
            auto *to = reinterpret_cast<float4 *>(smem.dq[sum]) + (C::kIsLate ? 0 : math_warpgroup * 1024) + pinned(threadIdx.x % 128);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i < 4 || C::kIsWhole || math_warpgroup == 0) to[128 * i] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
        }
        next();
        __syncwarp();
        smem.dq_full[sum].arrive();
        dq_ring.n += C::kParts;
    }

    // A tile's sum is complete only after the previous key block has added its part, so the item's last tile finishes behind dK and dV,
    // unless these wait for other items.
    __device__ __forceinline__ bool finishes_behind_keys(const Item &item) const {
        return item.tiles.begin < item.finish_end && (item.has_place() || (item.num_parts == 1 && p.slices == 1));
    }

    // A round's last dQ: handed over, or complete, for later.
    __device__ __forceinline__ void end_round(float (&dq)[32], const Item &item, int t, bool finishes, uint32_t of) {
        if (finishes_behind_keys(item))
            complete_dq<0>(dq, of);
        else
            hand_over<0>(dq, item, t, finishes, of, [] {});
    }

    // Waits for the last dQ of a round. Behind the item's last round no product reads K and V: they are released before dQ is handed over,
    // and true returned, unless the warp has yet to read what changes with them.
    __device__ __forceinline__ bool release_keys(float (&dq)[32], const Item &item) {
        wgmma_wait<0>();
        pin(dq);
        const bool *own = smem.poisoned + first_key<C>(math_warpgroup) + warpgroup_row(0);
        const bool hides = smem.hides[&item - smem.items], releases = round.is_last(item) && p.slices == 1 && !hides && !own[0] && !own[8];
        if (!__all_sync(0xffffffffu, releases)) return false;
        smem.kv_empty[0].arrive();
        return true;
    }

    // Walks over the row tiles of a round of the item, the last one first.
    __device__ __forceinline__ void meet_tiles(Gradients &dk, Gradients &dv, float (&dq)[32], const Item &item) {
        Scores s, dp;
        // Read once: a load from shared memory is slow beside wgmma.
        const int begin = warp_uniform(round.begin), finish_end = warp_uniform(item.finish_end),
                  full_begin = warp_uniform(item.tiles.full_begin), full_end = warp_uniform(item.tiles.full_end);
        begin_scores(s);
        begin_dp(dp);
        for (int t = round.end - 1;; t--) {
            // t descends. In flight: S(t), dP(t); dV, dK hold the tiles above t; dQ(t + 1) handed to its adder.
            Operands weights, ds;
            const uint32_t stage = warp_uniform(ring.stage());
            find_operands<C, kTerms>(s, dp, weights, ds, t >= full_begin && t < full_end, smem, p, item, t, stage, stage, math_warpgroup);
            wgmma_pb<typename C::Element, C::kRowHalf>(dv, weights, address(smem.douts[stage]));
            wgmma_pb<typename C::Element, C::kRowHalf>(dk, ds, address(smem.queries[stage]));
            const Ring<C::kSums> last = {dq_ring.n - 1};
            if (dq_ring.n > 0) smem.dq_full[last.stage()].wait(last); // dS of the previous tile has been read
            write_ds_by_rows<C>(smem, ds, math_warpgroup);
            async_fence();
            bar_sync<C::kMathThreads>(kMathBarrier);
            begin_dq(dq, 0);
            wgmma_wait<1>(); // dV, dK complete; dQ(t) still running
            pin(dv);
            pin(dk);
            smem.row_empty[stage].arrive();
            ring.n++;
            if (t == begin) break;
            begin_scores(s);
            hand_over<1>(dq, item, t, t < finish_end, 0, [&] { begin_dp(dp); });
        }
        end_round(dq, item, begin, begin < finish_end, 0);
    }

    // Hands dK and dV of a round to bulk copies into the item's carry, or adds them there; what it held has been read. They leave from
    // where the warpgroup writes its dS, which no product reads any more.
    __device__ __forceinline__ void store_round(const Gradients &dk, const Gradients &dv, const Item &item, bool is_first) {
        constexpr int kPieces = 4, kPieceFloat4s = 512; // the warpgroup's keys, of 64 rows in a stage
        const int thread = pinned(threadIdx.x % 128);
        const auto piece = [&](int i) { return reinterpret_cast<float4 *>(smem.ds[i / 2][i % 2] + 64 * math_warpgroup * kRowBytes); };
        smem.ds_empty.acquire(ring);
        smem.ds_empty.acquire(ring.next());
#pragma unroll
        for (int i = 0; i < kPieces; i++) {
            const auto &d = i < 2 ? dk : dv;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float *of = d + 16 * (i % 2) + 4 * n;
                piece(i)[128 * n + thread] = {of[0], of[1], of[2], of[3]};
            }
        }
        async_fence();
        bar_sync<128>(kOwnBarrier + math_warpgroup);
        if (thread > 0) return;
        store_wait(); // the round before
        async_fence_global();
        float4 *to = own_carry<C>(buffers, carry_of(p, item), math_warpgroup);
        for (int i = 0; i < kPieces; i++) {
            if (is_first)
                bulk_store(to + i * kPieceFloat4s, piece(i), kPieceFloat4s * sizeof(float4));
            else
                bulk_add(reinterpret_cast<float *>(to + i * kPieceFloat4s), reinterpret_cast<float *>(piece(i)),
                        kPieceFloat4s * sizeof(float4));
        }
        store_commit();
    }

    // Until store_round's copies have left dS, or have arrived.
    __device__ __forceinline__ void wait_for_round(bool has_arrived) const {
        if (threadIdx.x % 128 == 0) {
            if (has_arrived)
                store_wait();
            else
                store_wait_read<0>();
        }
        bar_sync<128>(kOwnBarrier + math_warpgroup);
    }

    // The token goes from the first warpgroup to the second and back in every tile.
    __device__ __forceinline__ void take_token() const { bar_sync<C::kMathThreads>(kTokenBarrier + math_warpgroup); }
    __device__ __forceinline__ void pass_token() const { bar_arrive<C::kMathThreads>(kTokenBarrier + 1 - math_warpgroup); }

    // The same with dQ of a tile behind dK of the next, so that the warpgroups need not meet. A token holds them half a tile apart, one in
    // products while the other is in arithmetic; no result depends on it.
    __device__ __forceinline__ bool meet_tiles_late(Gradients &dk, Gradients &dv, float (&dq)[32], const Item &item) {
        Scores s, dp;
        begin_scores(s);
        begin_dp(dp);
        wait_for_round(false);
        const int begin = warp_uniform(round.begin), end = warp_uniform(round.end), finish_end = warp_uniform(item.finish_end),
                  full_begin = warp_uniform(item.tiles.full_begin), full_end = warp_uniform(item.tiles.full_end);
        for (int t = round.end - 1;; t--) {
            // t descends. In flight: S(t), dP(t); dV, dK hold the tiles above t; dQ(t + 2) handed to its adder, dS(t + 1) in shared memory.
            Operands weights, ds;
            const uint32_t stage = warp_uniform(ring.stage()); // of the row tile, and of its dS
            find_operands<C, kTerms>(s, dp, weights, ds, t >= full_begin && t < full_end, smem, p, item, t, stage, stage, math_warpgroup);
            smem.ds_empty.acquire(ring);
            write_ds<C>(smem, ds, math_warpgroup, stage);
            take_token();
            wgmma_pb<typename C::Element, C::kRowHalf>(dv, weights, address(smem.douts[stage]));
            wgmma_pb<typename C::Element, C::kRowHalf>(dk, ds, address(smem.queries[stage]));
            async_fence(); // of dS: the products hide it
            __syncwarp();
            smem.ds_full[stage].arrive();
            if (t != end - 1) smem.ds_full.wait(Ring<2>{ring.n - 1});
            begin_dq(dq, stage ^ 1); // of tile t + 1; of the first tile's, which has none, nothing is used
            pass_token();
            wgmma_wait<1>(); // dV, dK complete; dQ(t + 1) still running
            pin(dv);
            pin(dk);
            smem.row_empty[stage].arrive();
            ring.n++;
            if (t == begin) break;
            begin_scores(s);
            if (t == end - 1) {
                wgmma_wait<1>();
                pin(dq);
                begin_dp(dp);
            } else {
                hand_over<1>(dq, item, t + 1, t + 1 < finish_end, stage ^ 1, [&] { begin_dp(dp); });
            }
        }
        const Ring<2> last = {ring.n - 1};
        const uint32_t of = warp_uniform(last.stage());
        if (begin != end - 1) {
            hand_over<0>(dq, item, begin + 1, begin + 1 < finish_end, of ^ 1, [] {});
        } else {
            wgmma_wait<0>();
            pin(dq);
        }
        smem.ds_full.wait(last);
        begin_dq(dq, of);
        const bool has_released = release_keys(dq, item);
        end_round(dq, item, begin, begin < finish_end, of);
        return has_released;
    }

    __device__ __forceinline__ void run() {
        if (C::kIsLate) dq_ring.n = math_warpgroup;
        if (C::kIsLate && math_warpgroup == 1) pass_token();
        for (Ring<2> items;; items.n++) {
            const Item &item = smem.items[items.stage()];
            smem.item_full.wait(items);
            if (!item.exists) {
                if (C::kIsLate && math_warpgroup == 0) take_token();
                if (C::kIsLate) wait_for_round(false);
                return;
            }
            Gradients dk, dv;
            float dq[32];
            bool has_released = false;
            smem.kv_full.wait({items.n});
            round.start(item);
            if (item.has_tiles()) {
                prepare_keys<C>(smem, p, item, math_warpgroup);
                for (int i = 0; i < kNumTerms<C, kTerms>; i++) smem.terms[i][threadIdx.x - 128] = 0.0f;
            }
            for (;;) {
#pragma unroll
                for (int i = 0; i < C::kHeadDim / 2; i++) dk[i] = dv[i] = 0.0f;
                if (!item.has_tiles()) break;
                if constexpr (C::kIsLate)
                    has_released = meet_tiles_late(dk, dv, dq, item);
                else
                    meet_tiles(dk, dv, dq, item);
                if (round.is_last(item)) break;
                const int part = item.part_of(round.begin);
                if (C::kIsLate && item.carry < 0) // of this block of threads: the item's last round finds all others there
                    store_round(dk, dv, item, part == 0);
                else
                    add_round<C>(p, buffers, item, part, dk, dv);
                round.advance(item);
            }
            float poison[2] = {0.0f, 0.0f};
            if (!has_released) {
                if (item.has_tiles() && smem.hides[items.stage()])
                    add_hidden<C>(dv, smem, args, p, item, math_warpgroup, 0, args.fwd.problem.head_dim);
                find_poison<C>(poison, smem, item, math_warpgroup); // before the keys' stage is released
                __syncwarp();
                smem.kv_empty[0].arrive();
            }
            const int part = item.has_tiles() ? item.part_of(item.tiles.begin) : 0;
            const bool is_apart = is_left_apart(p, item);
            if (is_apart) add_poison(dk, poison), add_poison(dv, poison);
            if (C::kIsLate && is_apart) {
                if (!item.has_tiles()) wait_for_round(false); // meet_tiles_late does
                store_round(dk, dv, item, true);
            } else if (item.num_parts > 1 || is_apart) {
                if (C::kIsLate && item.carry == -1) wait_for_round(true);
                add_round<C>(p, buffers, item, part, dk, dv);
            }
            if (!is_apart && part == item.num_parts - 1 && add_slice<C>(p, buffers, item, dk, dv))
                write_keys<C>(dk, dv, poison, args, p, item, math_warpgroup);
            if constexpr (kTerms != kNoTerms) write_terms<C, kTerms>(smem, p, buffers, item, math_warpgroup);
            if (item.has_tiles() && finishes_behind_keys(item)) hand_over<kComplete>(dq, item, item.tiles.begin, true, 0, [] {});
            __syncwarp();
            smem.item_empty.release(items);
        }
    }
};

template <class C, TermsOf kTerms>
__global__ __launch_bounds__(C::kThreads, 1) void bwd_kernel(const __grid_constant__ sinkattn_bwd_args args,
        const __grid_constant__ Maps maps, const __grid_constant__ BwdProblem p, const __grid_constant__ BwdBuffers buffers) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<Smem<C> *>(shared);
    if (threadIdx.x == 0) {
        static_assert(C::kStages == 2, "two of each barrier are initialised");
        for (int i = 0; i < 2; i++) {
            smem.item_full[i].init(1);
            smem.item_empty[i].init(C::kMathThreads + C::kSums);
            smem.row_full[i].init(1);
            smem.row_empty[i].init(C::kMathThreads);
            smem.ds_full[i].init(C::kMathThreads);
            smem.ds_empty[i].init(C::kMathThreads);
        }
        for (int i = 0; i < C::kSums; i++) smem.dq_full[i].init(C::kMathThreads / C::kParts);
        for (int i = 0; i < C::kSumUses; i++) smem.dq_ready[i].init(1);
        smem.kv_full[0].init(1);
        smem.kv_empty[0].init(C::kMathThreads);
        barrier_init_fence();
    }
    prepare_block<C>(smem, args, maps, p, buffers);
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<C::kLoaderRegisters>();
        if (threadIdx.x == 0) load_tiles<C>(smem, args, maps, p, buffers);
        const int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0 && warp > 0 && warp <= C::kSums) {
            if constexpr (C::kIsLate)
                add_halves<C>(smem, p, buffers, warp - 1);
            else
                add_tiles<C>(smem, p, buffers, warp - 1);
        }
    } else {
        registers_up<C::kMathRegisters>();
        const int math_warpgroup = warp_uniform(threadIdx.x / 128 - 1);
        Math<C, kTerms>{smem, args, p, buffers, math_warpgroup, warp_uniform_register(shared_address(shared)), {}, {}, {}}.run();
    }
#else
    __trap();
#endif
}

template <class C>
sinkattn_status launch_config(const sinkattn_bwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    if constexpr (C::kMostTerms == kTermsOf24)
        return launch<C, bwd_kernel<C, kNoTerms>, bwd_kernel<C, kTermsOfAny>, bwd_kernel<C, kTermsOf8>, bwd_kernel<C, kTermsOf16>,
                bwd_kernel<C, kTermsOf24>>(args, plan, context);
    else
        return launch<C, bwd_kernel<C, kNoTerms>, bwd_kernel<C, kTermsOfAny>, bwd_kernel<C, kTermsOf8>, bwd_kernel<C, kTermsOf16>>(
                args, plan, context);
}

template <int kHeadDim, int kRows, int kKeys>
sinkattn_status launch_dtype(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_bwd_args *>(arguments);
    if (args.fwd.problem.dtype == SINKATTN_BF16) return launch_config<Config<Bf16, kHeadDim, kRows, kKeys>>(args, *plan, *context);
    return launch_config<Config<Fp16, kHeadDim, kRows, kKeys>>(args, *plan, *context);
}

} // namespace

extern "C" sinkattn_status sa_bwd_cuda_sm90_d64(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return launch_dtype<64, sa_bwd_cuda_sm90_d64_tile_q, sa_bwd_cuda_sm90_d64_tile_k>(args, plan, context);
}

extern "C" sinkattn_status sa_bwd_cuda_sm90_d96(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return launch_dtype<96, sa_bwd_cuda_sm90_d96_tile_q, sa_bwd_cuda_sm90_d96_tile_k>(args, plan, context);
}

extern "C" sinkattn_status sa_bwd_cuda_sm90_d128(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return launch_dtype<128, sa_bwd_cuda_sm90_d128_tile_q, sa_bwd_cuda_sm90_d128_tile_k>(args, plan, context);
}

} // namespace sa::bwd_sm90
