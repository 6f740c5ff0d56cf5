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

__device__ __forceinline__ void prefetch_maps(const Maps &maps) {
    tensor_map_prefetch(&maps.k);
    tensor_map_prefetch(&maps.v);
}

// The block's part, or the first of its share. By all of its threads. The next launch starts once all blocks run, so it
// takes room from none.
template <int kThreads, int kRows, class Smem> __device__ __forceinline__ bool take_first(Smem &smem, const Arguments &params) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    Speculation lengths = speculate<kThreads>(params, blockIdx.x, false); // a part's number: there are no clusters with num_splits
    if (lengths.batch >= 0) check_length(params, lengths.length);
    Split split = {};
    if (!params.num_splits) split = split_streams<kThreads, kRows>(smem, params, lengths, params.cut);
    if (split.shares && params.spare.most) split = split_streams<kThreads, kRows>(smem, params, lengths, params.spare);
    // Blocks of a cluster have neighbouring parts of one kv head.
    const Place at = place_of(params);
    const uint32_t of_heads = sa_divide(at.cluster, params.by_heads), head = at.cluster - of_heads * params.num_heads;
    return take_part<kThreads, kRows>(smem, params, (of_heads * params.cluster + at.rank) * params.num_heads + head, split, lengths);
}

// Calls attend() for each part of the block's share. All threads of the block come here, by roles, and meet between parts. kWrites:
// attend() ends in write_part.
template <int kThreads, int kRows, bool kWrites, class Smem, class Attend>
__device__ __forceinline__ void for_each_part(Smem &smem, const Arguments &params, bool found, const Attend &attend) {
    const bool joins = found && !smem.part.shares;
    while (found) {
        attend();
        if (!kWrites && joins) pass_cluster(params);
        found = take_next<kThreads, kRows>(smem, params);
    }
    __syncthreads();                  // nobody reads smem.part any more
    if (!joins) pass_cluster(params); // even if lengths changed under the kernel, no block ends while others read its memory
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

// Bytes of a step's keys and values; the bytes of a partial, in steps.
template <class C> double step_bytes() { return static_cast<double>(C::kKeyBytes + C::kValueBytes) / C::kSteps; }
template <class C> double partial_steps(int64_t rows) { return static_cast<double>(rows * C::kPartialRow * 4) / step_bytes<C>(); }

// Parts are at least so many steps long, and a stage.
template <class C> uint32_t least_steps(int64_t rows) {
    return static_cast<uint32_t>(sa_max(C::kSteps, static_cast<int64_t>(std::ceil(partial_steps<C>(rows)))));
}

constexpr uint32_t kBeginSteps = 16; // what starting on a stream counts as, in steps: a guess, to be measured

// Bytes of K and V that a block reads in 1 us, a cluster's barriers, and in 3 us: writing, counting and reading partials.
constexpr double kMetBytes = 24 << 10, kCountedBytes = 64 << 10;

// In steps: one of a stream's `parts`, of which more than most_busy gain nothing, and their merge, at twice the rate of K and V.
template <class C> double cost_of(double steps, double parts, double most_busy, double partial, double blocks) {
    const double waits = (blocks > 1.0 ? kMetBytes : 0.0) + (parts > blocks ? kCountedBytes : 0.0);
    return steps / std::fmin(parts, most_busy) + parts * partial / (2.0 * blocks * blocks) + waits / step_bytes<C>();
}

// Sets how the work is cut, and the grid: one block an SM, in clusters of the size that costs least.
template <class C, auto kKernel>
sinkattn_status cut_work(Arguments &params, const sinkattn_problem &problem, const sinkattn_plan &plan, unsigned threads, uint32_t *grid) {
    params.cluster = 1;
    params.by_cluster = sa_divisor_of(1);
    *grid = static_cast<uint32_t>(plan.num_items);
    if (!sa_is_balanced(&problem, &plan)) return sa_ok();
    const int64_t rows = sa_min(kRows, params.num_rows), num_streams = problem.batch * params.row_tiles * problem.num_kv_heads;
    const double steps = static_cast<double>(sa_ceil_div(problem.k_len, kTileK)), partial = partial_steps<C>(rows),
                 most_busy = C::kBusySms * static_cast<double>(plan.workers) / static_cast<double>(num_streams);
    int64_t most = plan.workers; // where streams are more
    double least = INFINITY;
    for (int blocks = 1; blocks <= kMostBlocks && blocks * num_streams <= plan.workers; blocks++) {
        int64_t workers = plan.workers;
        if (blocks > 1) {
            int at_once = 0;
            SA_TRY(clusters_at_once<kKernel>(&at_once, blocks, threads, sizeof(typename C::Smem)));
            workers = sa_min(workers, int64_t{at_once} * blocks);
        }
        // In clusters, `blocks` times the planner's sqrt(t / r).
        const auto wanted = static_cast<int64_t>(std::ceil(blocks * std::sqrt(steps / partial)));
        const int64_t parts = sa_min(workers / num_streams, wanted) / blocks * blocks;
        if (parts == 0) continue;
        const double cost = cost_of<C>(steps, static_cast<double>(parts), most_busy, partial, blocks);
        if (cost >= least) continue;
        least = cost;
        most = parts * num_streams;
        params.cluster = static_cast<uint32_t>(blocks);
    }
    params.cut = sa_cut_of(static_cast<uint32_t>(num_streams), static_cast<uint32_t>(problem.num_kv_heads), least_steps<C>(rows),
            kBeginSteps, static_cast<uint32_t>(most), static_cast<uint32_t>(most));
    if (params.cluster > 1) { // no multiple of 8 is needed
        const auto into = [&](int64_t parts) {
            sa_cut cut = params.cut;
            cut.most = static_cast<uint32_t>(parts);
            cut.by_most = sa_divisor_of(cut.most);
            return cut;
        };
        params.by_cluster = sa_divisor_of(params.cluster);
        params.cut = into(most);
        if (8 * num_streams <= most) params.spare = into(most - num_streams); // a stream's short last part adds one at most
    }
    *grid = params.cut.most;
    return sa_ok();
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
    uint32_t grid = 0;
    SA_TRY((cut_work<C, kKernel>(params, problem, plan, kThreads, &grid)));
    return launch_clusters<kKernel>(
            sinkattn_variant(plan.variant)->name, grid, params.cluster, kThreads, sizeof(typename C::Smem), context.stream, params, maps);
}

} // namespace many_rows
} // namespace sa::decode
