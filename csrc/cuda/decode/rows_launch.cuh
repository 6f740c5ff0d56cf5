// SPDX-License-Identifier: Apache-2.0
//
// The block and the launch of the decodes on sm_90 that read the cache by TMA: decode_rows.cu and decode_swapped.cu.
#pragma once

#include <cmath>

#include "cuda/decode/params.cuh"
#include "cuda/decode/rows_smem.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/host/tensor_map.cuh"

namespace sa::decode {
namespace many_rows {

// The block's part, or the first of its share. By all of its threads.
template <int kThreads, int kRows, class Smem> __device__ __forceinline__ bool take_first(Smem &smem, const Params &params) {
    wait_for_previous_kernel();
    Speculation lengths = speculate<kThreads>(params, blockIdx.x, false);
    if (lengths.batch >= 0) check_length(params, lengths.length);
    Split split = {};
    if (!params.num_splits) split = split_streams<kThreads, kRows>(smem, params, lengths);
    return take_part<kThreads, kRows>(smem, params, blockIdx.x, split, lengths);
}

// Calls attend() for each part of the block's share. All threads of the block come here, by roles, and meet between parts.
template <int kThreads, int kRows, class Smem, class Attend>
__device__ __forceinline__ void for_each_part(Smem &smem, const Params &params, bool found, const Attend &attend) {
    while (found) {
        attend();
        found = take_next<kThreads, kRows>(smem, params);
    }
    __syncthreads(); // nobody reads smem.part any more
}

// The map of a cache's pages, or of a contiguous cache's sequences. Where there are none, of q: nothing of it is read then.
inline sinkattn_status map_cache(CUtensorMap *map, const sinkattn_decode_args &args, const sinkattn_tensor &tensor, int64_t pages,
        int64_t columns, const char *name) {
    sinkattn_problem problem = args.fwd.problem;
    problem.head_dim = columns;
    const int64_t rows = problem.page_size ? problem.page_size : problem.k_len;
    if (pages == 0 || rows == 0)
        return encode_map(map, args.fwd.problem, args.fwd.q, problem.batch, problem.q_len, problem.num_q_heads, kTileK, 1, name);
    return encode_map(map, problem, tensor, pages, rows, problem.num_kv_heads, kTileK, 1, name);
}

inline sinkattn_status map_caches(Maps *maps, const sinkattn_decode_args &args) {
    const sinkattn_problem &problem = args.fwd.problem;
    const int64_t pages = problem.page_size ? problem.num_pages : problem.batch, columns = sa_head_dim_v(&problem);
    SA_TRY(map_cache(&maps->k, args, args.fwd.k, pages, problem.head_dim, "k_cache"));
    SA_TRY(map_cache(&maps->v, args, args.fwd.v, pages, columns, "v_cache"));
    if (!args.host.num_pages) return sa_ok();
    SA_TRY(map_cache(&maps->host_k, args, args.host.k, args.host.num_pages, problem.head_dim, "k_cache_host"));
    return map_cache(&maps->host_v, args, args.host.v, args.host.num_pages, columns, "v_cache_host");
}

// Steps whose keys and values have the bytes of a partial.
template <class C> double partial_steps(int64_t rows) {
    return static_cast<double>(rows * C::kPartialRow * 4) / ((C::kKeyBytes + C::kValueBytes) / C::kSteps);
}

// Parts are at least so many steps long, and a stage.
template <class C> uint32_t least_steps(int64_t rows) {
    return static_cast<uint32_t>(sa_max(C::kSteps, static_cast<int64_t>(std::ceil(partial_steps<C>(rows)))));
}

// The parts of a stream past which merging costs more than splitting gains: P* of the plan's reason.
template <class C> int64_t most_parts(const sinkattn_problem &problem, int64_t rows) {
    const auto steps = static_cast<double>(sa_ceil_div(problem.k_len, kTileK));
    return sa_max(1, static_cast<int64_t>(std::ceil(std::sqrt(steps / partial_steps<C>(rows)))));
}

constexpr uint32_t kBeginSteps = 16; // what starting on a stream counts as, in steps: a guess, to be measured

// Returns the blocks of the grid, one an SM, and sets what follows from their number.
template <class C> uint32_t cut_work(Params &params, const sinkattn_problem &problem, const sinkattn_plan &plan) {
    const int64_t rows = sa_min(kRows, params.num_rows);
    const auto num_heads = static_cast<uint32_t>(problem.num_kv_heads),
               num_streams = static_cast<uint32_t>(problem.batch * params.row_tiles) * num_heads;
    const auto most = static_cast<uint32_t>(sa_min(plan.workers, num_streams * most_parts<C>(problem, rows)));
    params.cut = sa_cut_of(num_streams, num_heads, least_steps<C>(rows), kBeginSteps, most, most);
    return sa_is_balanced(&problem, &plan) ? params.cut.most : static_cast<uint32_t>(plan.num_items);
}

// Tiles of kRows rows, as planned; of fewer in an instance for so few.
template <class C, auto kKernel, int kThreads>
sinkattn_status launch(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    static_assert(sizeof(typename C::Smem) <= 227 * 1024, "what a block of compute capability 9.0 may use");
    const sinkattn_problem &problem = args.fwd.problem;
    if (problem.batch == 0 || problem.q_len == 0) return sa_ok();
    typename C::Arguments params = {};
    Maps maps = {};
    SA_TRY(check_sizes(args, plan, kRows));
    SA_TRY(sa_cuda_error_word(&params.error_word));
    if (problem.page_size % kTileK == 0) SA_TRY(map_caches(&maps, args)); // else threads copy
    SA_TRY(allow_shared<kKernel>(sizeof(typename C::Smem)));
    set_tensors(params, args, 1, kRows);
    set_extras(params, args);
    params.num_splits = sa_is_balanced(&problem, &plan) ? 0 : static_cast<uint32_t>(plan.num_splits);
    params.by_splits = divisor_of(params.num_splits);
    params.head_slots = static_cast<uint32_t>(sa_decode_num_slots(&problem, &plan) / problem.num_kv_heads);
    params.slots = reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(context.workspace) + 15) / 16 * 16);
    params.slot_floats = static_cast<uint32_t>(sa_decode_rows_a_slot(&problem, &plan) * C::kPartialRow);
    params.tag = next_launch_tag();
    const uint32_t grid = cut_work<C>(params, problem, plan);
    return launch_overlapping<kKernel>(
            sinkattn_variant(plan.variant)->name, grid, kThreads, sizeof(typename C::Smem), context.stream, params, maps);
}

} // namespace many_rows
} // namespace sa::decode
