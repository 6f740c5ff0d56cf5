// SPDX-License-Identifier: Apache-2.0
//
// The general backward on sm_90 for wide heads: head_dim up to 256, or up to 192 with values of at most 128.
//
// Work, order of sums and the kernels around this one are those of bwd_sm90.cu; a tile is 64 rows x 64 keys:
//
//     loader warp         K and V | Q and stats (2 stages), dO | ...
//     2 math warpgroups   S = K Q^T, dP = V dO^T: 32 rows each; P and dS, to shared memory; they meet
//                         dQ = dS^T K in two pieces, dV += P dO, dK += dS Q: half of the columns each
//     2 adders            dQ of a warpgroup, piece after piece
//
// Shared memory and registers: docs/kernels/bwd_sm90.md, Budget.

#include "cuda/bwd_sm90/copies.cuh"
#include "cuda/bwd_sm90/finish.cuh"
#include "cuda/bwd_sm90/launch.cuh"
#include "cuda/bwd_sm90/rows.cuh"
#include "cuda/bwd_sm90/tile.cuh"
#include "cuda/bwd_sm90/wide.cuh"
#include "cuda/bwd_sm90/work.cuh"
#include "cuda/tile/pipe.cuh"
#include "cuda/tile/wgmma.cuh"

namespace sa::bwd_sm90 {
namespace {

template <class Element_, int kHeadDim_, int kHeadDimV_, int kRows_, int kKeys_> struct WideConfig {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kRows = kRows_, kKeys = kKeys_;
    static constexpr bool kIsWide = true;
    static constexpr int kColumns = kRows / 2;                               // rows that a math warpgroup's S has, as columns
    static constexpr int kHalves = kHeadDim / 64, kHalvesV = kHeadDimV / 64; // pieces of 64 columns, k*Half bytes apart
    static constexpr int kRowHalf = kRows * kRowBytes, kKeyHalf = kKeys * kRowBytes;
    static constexpr int kThreads = 384, kMathThreads = 256, kMathWarps = kMathThreads / 32;
    static constexpr int kStages = 2, kDoutStages = kHeadDim == 256 ? 1 : 2; // of Q and statistics; of dO
    // Of a tile's dQ: parts, one a math warpgroup, whose pieces have 64 and kLastPiece columns; buffers of a part.
    static constexpr int kParts = 2, kLastPiece = kHeadDim / 2 - 64, kSums = kHeadDim == 256 ? 1 : 2, kPieceFloats = kRows * 64;
    static constexpr int kTileFloats = kRows * kHeadDim;
    static constexpr int kLoaderRegisters = 40, kMathRegisters = 232;
    static_assert(kRows == 64 && kKeys == 64, "operands of one swizzled row");
    static_assert(kLastPiece == 64 || kLastPiece == 32, "what piece_column expects");
};

// A math warpgroup: all keys in the rows of its accumulators; of S and dP half of the rows, of dK and dV half of the columns.
template <class C, TermsOf kTerms> struct WideMath {
    using Element = typename C::Element;
    using Scores = float[C::kColumns / 2];          // S, dP: keys x rows
    using Operands = uint32_t[C::kColumns / 16][4]; // P, dS as packed pairs

    Smem<C> &smem;
    const sinkattn_bwd_args &args;
    const BwdProblem &p;
    const BwdBuffers &buffers;
    const int math_warpgroup;
    const uint32_t begin; // address of smem, in a uniform register
    Ring<C::kStages> ring;
    Ring<C::kSums> dq_ring;
    Round round;

    // Uniform, as operands of wgmma should be.
    __device__ __forceinline__ uint32_t address(const void *at) const {
        return static_cast<uint32_t>(pinned(static_cast<int>(begin))) +
               static_cast<uint32_t>(static_cast<const unsigned char *>(at) - reinterpret_cast<const unsigned char *>(&smem));
    }
    __device__ __forceinline__ Ring<C::kDoutStages> dout_ring() const { return {ring.n}; }

    // begin_scores issues S of the ring's stage, begin_dp its dP; the caller waits.
    __device__ __forceinline__ void begin_scores(Scores &s) {
        const uint32_t stage = warp_uniform(ring.stage());
        smem.row_full[stage].wait(ring);
        wgmma_abt<Element, C::kHeadDim, C::kKeyHalf, C::kRowHalf>(
                s, address(smem.keys), address(smem.queries[stage]) + first_row<C>(math_warpgroup) * kRowBytes, [&] {
                    wgmma_add_columns(s, address(&smem.halves), address(smem.stats[stage].to_scores) + 2 * first_row<C>(math_warpgroup));
                });
    }
    __device__ __forceinline__ void begin_dp(Scores &dp) {
        const uint32_t stage = warp_uniform(dout_ring().stage());
        smem.dout_full[stage].wait(dout_ring());
        wgmma_abt<Element, C::kHeadDimV, C::kKeyHalf, C::kRowHalf>(
                dp, address(smem.values), address(smem.douts[stage]) + first_row<C>(math_warpgroup) * kRowBytes, [&] {
                    wgmma_add_columns(
                            dp, address(&smem.halves), address(smem.stats[ring.stage()].to_dp) + 2 * first_row<C>(math_warpgroup));
                });
    }

    // Issues piece i of this warpgroup's dQ.
    template <int kSize> __device__ __forceinline__ void begin_dq(float (&dq)[kSize], int i) {
        const int column = piece_column<C>(i, math_warpgroup);
        dq_product<C>(dq, address(smem.ds), address(smem.keys) + column / 64 * C::kKeyHalf + column % 64 * 2);
    }

    // Waits for piece i of dQ, with kPending products issued after it. Hands it to the adder; where the tile has no later key block, adds
    // the sum to it and writes dq instead.
    template <int kPending, int kSize>
    __device__ __forceinline__ void hand_over(float (&dq)[kSize], const Item &item, int t, bool finishes, int i) {
        const uint32_t buffer = math_warpgroup * C::kSums + dq_ring.stage();
        float *sum = smem.dq[buffer];
        smem.dq_ready[buffer].wait(dq_ring);
        if (finishes) {
            wgmma_wait<kPending>();
            pin(dq);
            finish_tile<C>(dq, sum, 0, smem.finish_alone[math_warpgroup], smem, args, p, item, t, 0, piece_column<C>(i, math_warpgroup));
        } else {
            wgmma_wait<kPending>();
            pin(dq);
            auto *to = reinterpret_cast<float4 *>(sum) + pinned(threadIdx.x % 128);
#pragma unroll
            for (int n = 0; n < kSize / 4; n++) to[128 * n] = {dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]};
        }
        async_fence();
        __syncwarp();
        smem.dq_full[buffer].arrive();
        dq_ring.n++;
    }

    // Walks over the row tiles of a round of the item, the last one first.
    __device__ __forceinline__ void meet_tiles(KeyGradients<C> &sums, const Item &item) {
        Scores s, dp;
        const int begin = warp_uniform(round.begin), finish_end = warp_uniform(item.finish_end),
                  full_begin = warp_uniform(item.tiles.full_begin), full_end = warp_uniform(item.tiles.full_end);
        begin_scores(s);
        begin_dp(dp);
        for (int t = round.end - 1;; t--) {
            // t descends. In flight: S(t), dP(t); dV, dK hold the tiles above t; dQ(t + 1) handed to its adder.
            Operands weights, ds;
            const uint32_t stage = warp_uniform(ring.stage()), dout_stage = warp_uniform(dout_ring().stage());
            find_operands<C, kTerms>(
                    s, dp, weights, ds, t >= full_begin && t < full_end, smem, p, item, t, stage, dout_stage, math_warpgroup);
            smem.operands_empty.acquire(Ring<1>{ring.n});
            write_operands<C>(shared_address(smem.weights), weights, math_warpgroup);
            write_operands<C>(shared_address(smem.ds), ds, math_warpgroup);
            async_fence();
            bar_sync<C::kMathThreads>(kMathBarrier);
            float dq[32], last[C::kLastPiece / 2];
            begin_dq(dq, 0);
            wgmma_ab<Element, C::kRows, 0, C::kRowHalf>(sums.dv, address(smem.weights),
                    address(smem.douts[dout_stage]) + KeyGradients<C>::kWidthV / 64 * math_warpgroup * C::kRowHalf, true);
            const bool finishes = t < finish_end;
            hand_over<1>(dq, item, t, finishes, 0); // dV running
            wgmma_ab<Element, C::kRows, 0, C::kRowHalf>(
                    sums.dk, address(smem.ds), address(smem.queries[stage]) + 2 * math_warpgroup * C::kRowHalf, true);
            if constexpr (KeyGradients<C>::kHasMiddle)
                wgmma_ab<Element, C::kRows, 0, C::kRowHalf>(
                        sums.middle, address(smem.ds), address(smem.queries[stage]) + C::kRowHalf + math_warpgroup * kRowBytes / 2, true);
            wgmma_wait<KeyGradients<C>::kHasMiddle ? 2 : 1>(); // dV complete; dK running
            pin(sums.dv);
            smem.dout_empty[dout_stage].arrive();
            begin_dq(last, 1);
            wgmma_wait<1>(); // dK complete; the last piece of dQ running
            pin(sums.dk);
            pin(sums.middle);
            smem.row_empty[stage].arrive();
            ring.n++;
            if (t == begin) {
                hand_over<0>(last, item, t, finishes, 1);
                smem.operands_empty[0].arrive();
                return;
            }
            begin_scores(s);
            hand_over<1>(last, item, t, finishes, 1);
            smem.operands_empty[0].arrive();
            begin_dp(dp);
        }
    }

    __device__ __forceinline__ void run() {
        for (Ring<2> items;; items.n++) {
            const Item &item = smem.items[items.stage()];
            smem.item_full.wait(items);
            if (!item.exists) return;
            KeyGradients<C> sums;
            smem.kv_full.wait({items.n});
            round.start(item);
            if (item.has_tiles()) {
                prepare_keys<C>(smem, p, item, math_warpgroup);
                for (int i = 0; i < kNumTerms<C, kTerms>; i++) smem.terms[i][threadIdx.x - 128] = 0.0f;
            }
            for (;;) {
                sums.clear();
                if (!item.has_tiles()) break;
                meet_tiles(sums, item);
                if (round.is_last(item)) break;
                sums.carry(p, buffers, item, item.part_of(round.begin));
                round.advance(item);
            }
            if (item.has_tiles() && smem.hides[items.stage()]) {
                const int first_column = KeyGradients<C>::kWidthV * math_warpgroup;
                const int64_t columns = sa_head_dim_v(&args.fwd.problem) - first_column;
                add_hidden<C>(sums.dv, smem, args, p, item, math_warpgroup, first_column, columns);
            }
            float poison[2];
            find_poison<C>(poison, smem, item, math_warpgroup); // before the keys' stage is released
            __syncwarp();
            smem.kv_empty[0].arrive();
            const int part = item.has_tiles() ? item.part_of(item.tiles.begin) : 0;
            const bool is_apart = is_left_apart(p, item);
            if (is_apart) sums.add_poison(poison);
            if (item.num_parts > 1 || is_apart) sums.carry(p, buffers, item, part);
            if (!is_apart && part == item.num_parts - 1 && sums.add_slice(p, buffers, item))
                sums.write(poison, args, p, item, math_warpgroup);
            if constexpr (kTerms != kNoTerms) write_terms<C, kTerms>(smem, p, buffers, item, math_warpgroup);
            __syncwarp();
            smem.item_empty.release(items);
        }
    }
};

template <class C, TermsOf kTerms>
__global__ __launch_bounds__(C::kThreads, 1) void wide_kernel(const __grid_constant__ sinkattn_bwd_args args,
        const __grid_constant__ Maps maps, const __grid_constant__ BwdProblem p, const __grid_constant__ BwdBuffers buffers) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<Smem<C> *>(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            smem.item_full[i].init(1);
            smem.item_empty[i].init(C::kMathThreads + C::kParts);
        }
        for (int i = 0; i < C::kStages; i++) {
            smem.row_full[i].init(1);
            smem.row_empty[i].init(C::kMathThreads);
        }
        for (int i = 0; i < C::kDoutStages; i++) {
            smem.dout_full[i].init(1);
            smem.dout_empty[i].init(C::kMathThreads);
        }
        for (int i = 0; i < C::kParts * C::kSums; i++) {
            smem.dq_ready[i].init(1);
            smem.dq_full[i].init(C::kMathThreads / C::kParts);
        }
        smem.kv_full[0].init(1);
        smem.kv_empty[0].init(C::kMathThreads);
        smem.operands_empty[0].init(C::kMathThreads);
        barrier_init_fence();
    }
    prepare_block<C>(smem, args, maps, p, buffers);
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<C::kLoaderRegisters>();
        if (threadIdx.x == 0) load_tiles<C>(smem, args, maps, p, buffers);
        const int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0 && warp > 0 && warp <= C::kParts) add_pieces<C>(smem, p, buffers, warp - 1);
    } else {
        registers_up<C::kMathRegisters>();
        const int math_warpgroup = warp_uniform(threadIdx.x / 128 - 1);
        WideMath<C, kTerms>{smem, args, p, buffers, math_warpgroup, warp_uniform_register(shared_address(shared)), {}, {}, {}}.run();
    }
#else
    __trap();
#endif
}

template <class C>
sinkattn_status launch_config(const sinkattn_bwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    return launch<C, wide_kernel<C, kNoTerms>, wide_kernel<C, kTermsOfAny>, wide_kernel<C, kTermsOf8>>(args, plan, context);
}

template <int kHeadDim, int kHeadDimV, int kRows, int kKeys>
sinkattn_status launch_dtype(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_bwd_args *>(arguments);
    if (args.fwd.problem.dtype == SINKATTN_BF16)
        return launch_config<WideConfig<Bf16, kHeadDim, kHeadDimV, kRows, kKeys>>(args, *plan, *context);
    return launch_config<WideConfig<Fp16, kHeadDim, kHeadDimV, kRows, kKeys>>(args, *plan, *context);
}

} // namespace

extern "C" sinkattn_status sa_bwd_cuda_sm90_d256(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return launch_dtype<256, 256, sa_bwd_cuda_sm90_d256_tile_q, sa_bwd_cuda_sm90_d256_tile_k>(args, plan, context);
}

extern "C" sinkattn_status sa_bwd_cuda_sm90_d192_v128(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return launch_dtype<192, 128, sa_bwd_cuda_sm90_d192_v128_tile_q, sa_bwd_cuda_sm90_d192_v128_tile_k>(args, plan, context);
}

} // namespace sa::bwd_sm90
