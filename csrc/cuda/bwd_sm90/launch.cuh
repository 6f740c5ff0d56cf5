// SPDX-License-Identifier: Apache-2.0
//
// The host's half of the general backward on sm_90: workspace, tensor maps, and the kernels in their order.
#pragma once

#include "cuda/bwd_sm90/copies.cuh"
#include "cuda/bwd_sm90/finish.cuh"
#include "cuda/bwd_sm90/rows.cuh"
#include "cuda/bwd_sm90/work.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/host/tensor_map.cuh"

namespace sa::bwd_sm90 {

// Launches the kernels of a Config; the keys kernels are named by their terms of ds_aux: none; of groups that divide 8, 16, ..; of any.
template <class C, auto kKernel, auto kKernelOfAny, auto... kKernelsOf>
sinkattn_status launch(const sinkattn_bwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    const sa_bwd_sm90_layout sizes = sa_bwd_sm90_layout_of(&problem, &plan);
    static_assert(C::kTileFloats == C::kRows * C::kHeadDim, "as the planner counts them");
    static_assert(sizeof(Smem<C>) <= 227 * 1024, "what a block of compute capability 9.0 may use");
    const int64_t items = sizes.items * sizes.heads, item_writers = sa_ceil_div(items, 128);
    if (sa_max(sizes.tiles, items) > INT32_MAX / 2)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld tiles of rows and %lld key blocks; a launch holds at most 2^30",
                static_cast<long long>(sizes.tiles), static_cast<long long>(items));
    BwdProblem p;
    p.num_entries = sizes.entries;
    p.num_carries = sizes.carries;
    p.places_at = sizes.carries + sizes.own_carries;
    p.num_places = sizes.places;
    p.room = sizes.room;
    p.group = static_cast<int>(sa_bwd_sm90_slice_heads(&problem, C::kRows));
    p.slices = static_cast<int>(sa_bwd_sm90_slices(&problem, C::kRows));
    p.num_q_heads = static_cast<int>(problem.num_q_heads);
    p.tokens = C::kRows / p.group;
    p.by_heads = divisor_of(sizes.heads);
    p.by_group = divisor_of(p.group);
    p.by_tokens = divisor_of(p.tokens);
    p.scale = static_cast<float>(sa_softmax_scale(&problem));
    p.scale_log2 = p.scale * kLog2e;
    p.num_tiles = sizes.tiles / sizes.heads;
    p.num_items = sizes.items;
    p.parts = static_cast<int>(sizes.parts);
    p.dense_tiles = static_cast<int>(sa_ceil_div(problem.q_len, p.tokens));
    p.by_tiles = divisor_of(p.dense_tiles);
    if (!problem.packed) {
        const sa_band band = sa_band_of(&problem.mask, static_cast<int>(problem.q_len), static_cast<int>(problem.k_len));
        p.chains = sa_chains_of(&band, p.tokens, C::kKeys, &p.room, sizes.rounds);
    }
    auto *base = reinterpret_cast<unsigned char *>((reinterpret_cast<uintptr_t>(context.workspace) + 127) / 128 * 128);
    auto *turns = reinterpret_cast<unsigned long long *>(base + sizes.turns_at);
    const BwdBuffers buffers = {reinterpret_cast<Entry *>(base + sizes.entries_at), reinterpret_cast<Item *>(base + sizes.items_at),
            reinterpret_cast<unsigned *>(turns), turns + 1, reinterpret_cast<unsigned long long *>(base + sizes.carry_turns_at),
            reinterpret_cast<TileSum *>(base + sizes.tile_sums_at), reinterpret_cast<KeySum *>(base + sizes.key_sums_at),
            base + sizes.stats_at, reinterpret_cast<float *>(base + sizes.slots_at), reinterpret_cast<float *>(base + sizes.carries_at),
            args.ds_aux ? reinterpret_cast<float *>(base + sizes.row_terms_at) : nullptr,
            reinterpret_cast<float *>(base + sizes.key_terms_at)};
    unsigned *error_word;
    Maps maps;
    sinkattn_problem of_values = problem;
    of_values.head_dim = sa_head_dim_v(&problem);
    SA_TRY(sa_cuda_error_word(&error_word));
    SA_TRY(map_rows(&maps.q, problem, args.fwd.q, p.tokens, p.group, "q"));
    SA_TRY(map_rows(&maps.dout, of_values, args.dout, p.tokens, p.group, "dout"));
    SA_TRY(map_keys(&maps.k, problem, args.fwd.k, C::kKeys, "k"));
    SA_TRY(map_keys(&maps.v, of_values, args.fwd.v, C::kKeys, "v"));
    const char *name = "sa_bwd_cuda_sm90";
    void *stream = context.stream;
    unsigned table_threads = 32;
    while (table_threads < kTableThreads && table_threads <= sa_max(p.num_entries, sa_min(kRoundsLanes * p.num_entries, 255)))
        table_threads *= 2;
    const auto row_blocks = static_cast<unsigned>(sizes.tiles + item_writers);
    if (problem.packed) {
        SA_TRY(launch_blocks<table_kernel<C>>(name, 1, table_threads, 0, stream, args, p, buffers, error_word));
        SA_TRY(launch_overlapping<rows_kernel<C>>(name, row_blocks, 128, 0, stream, args, p, buffers));
    } else {
        SA_TRY(launch_blocks<rows_kernel<C>>(name, row_blocks, 128, 0, stream, args, p, buffers));
    }
    decltype(&launch_blocks<kKernel, sinkattn_bwd_args, Maps, BwdProblem, BwdBuffers>) launch_keys[] = {
            launch_blocks<kKernel, sinkattn_bwd_args, Maps, BwdProblem, BwdBuffers>,
            launch_blocks<kKernelsOf, sinkattn_bwd_args, Maps, BwdProblem, BwdBuffers>...,
            launch_blocks<kKernelOfAny, sinkattn_bwd_args, Maps, BwdProblem, BwdBuffers>};
    constexpr int kOfAny = sizeof...(kKernelsOf) + 1;
    int of = args.ds_aux ? 1 : 0;
    while (of > 0 && of < kOfAny && 8 * of % p.group != 0) of++;
    SA_TRY(launch_keys[of](name, static_cast<unsigned>(plan.workers), C::kThreads, sizeof(Smem<C>), stream, args, maps, p, buffers));
    const FinishBlocks blocks = {args.ds_aux ? problem.num_q_heads : 0, sizes.parts ? sizes.tiles * kDqPieces<C> : 0,
            sizes.places ? sizes.blocks * problem.num_kv_heads * kKeyPieces<C> : 0};
    const int64_t finishing = blocks.heads + blocks.dq + blocks.keys;
    if (!finishing) return sa_ok();
    return launch_overlapping<finish_kernel<C>>(
            name, static_cast<unsigned>(finishing), kFinishThreads, 0, stream, args, p, buffers, blocks);
}

} // namespace sa::bwd_sm90
