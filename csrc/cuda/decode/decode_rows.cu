// SPDX-License-Identifier: Apache-2.0
//
// Decode of many rows on sm_90: more than 32 rows of a kv head, query tokens times its query heads, against a cache, dense or paged. K and
// V are read once for 64 rows.
//
//     loader warp        K0 | V0 | K1 | V1 | ...                        by TMA, boxes of 16 keys; of one latent, K alone
//     score warpgroup    S0 | weights of steps 0, 1, .. | S1 | ...      S of a stage; pivots, weights to shared memory, 16 keys a step
//     value warpgroups        O += P V of steps 0, 1, .. | ...          each its teams, or its columns of O
//     end of a part      teams join -> out; or a partial -> the stream's last block merges -> out
//
// Streams, parts, shares, merges and the sink are decode.cu's, with tiles of 64 rows for 16. Steps are its key tiles, and teams its teams:
// team t has every kTeams-th step of a part and its own pivot, so that a row over the same part has the same bits. Weights go through
// shared memory, so that scores are computed once for all columns of O.
//
// Registers: O takes 128 of the value warpgroups' 184, 64 at head_dim 64. Shared memory: Q, the ring, the weights; one block an SM.

#include <cmath>

#include "cuda/decode/params.cuh"
#include "cuda/decode/rows_loads.cuh"
#include "cuda/decode/rows_scores.cuh"
#include "cuda/decode/rows_smem.cuh"
#include "cuda/decode/rows_values.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/host/tensor_map.cuh"

namespace sa::decode {
namespace many_rows {
namespace {

template <class C> __device__ __forceinline__ void init_barriers(typename C::Smem &smem) {
    for (int i = 0; i < C::kStages; i++) {
        smem.k_full[i].init(1);
        smem.k_empty[i].init(C::kLatent ? 128 + kValueThreads : 128); // threads that read the keys
        smem.v_full[i].init(1);
        smem.v_empty[i].init(kValueThreads);
    }
    for (int i = 0; i < C::kSlots; i++) {
        smem.p_full[i].init(128);
        smem.p_empty[i].init(C::kSplitsColumns ? kValueThreads : 128);
    }
    barrier_init_fence();
}

// Calls attend() for each part of the block's share. All threads of the block come here, by roles, and meet between parts.
template <class C, class Attend>
__device__ __forceinline__ void for_each_part(
        typename C::Smem &smem, const typename C::Arguments &params, bool found, const Attend &attend) {
    while (found) {
        attend();
        found = decode::take_next<kThreads, kRows>(smem, params);
    }
    __syncthreads(); // nobody reads smem.part any more
}

template <class C>
__global__ __launch_bounds__(kThreads, 1) void decode_rows_kernel(
        const __grid_constant__ typename C::Arguments params, const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<typename C::Smem *>(shared);
    if (threadIdx.x == 0) {
        init_barriers<C>(smem);
        smem.part.found = false;
    }
    __syncthreads();
    wait_for_previous_kernel();
    decode::Speculation lengths = decode::speculate<kThreads>(params, blockIdx.x, false);
    if (lengths.batch >= 0) decode::check_length(params, lengths.length);
    decode::Split split = {};
    if (!params.num_splits) split = decode::split_streams<kThreads, kRows>(smem, params, lengths);
    const bool found = decode::take_part<kThreads, kRows>(smem, params, blockIdx.x, split, lengths);
    if (threadIdx.x >= kFirstLoader) {
        registers_down<C::kLoaderRegisters>();
        Loader<C> loader{smem, params, maps};
        for_each_part<C>(smem, params, found, [&] {
            if (threadIdx.x < kFirstLoader + 32) loader.load(smem.part);
        });
        let_next_kernel_start();
    } else if (threadIdx.x >= kFirstScoreThread) {
        registers_down<C::kScoreRegisters>();
        Scores<C> scores{smem, params, {}, {}};
        for_each_part<C>(smem, params, found, [&] {
            scores.attend();
            bar_sync<kValueThreads + 128>(kPartBarrier);
        });
        let_next_kernel_start();
    } else {
        registers_up<C::kValueRegisters>();
        Values<C> values{smem, params, warp_uniform(threadIdx.x / 128), {}};
        for_each_part<C>(smem, params, found, [&] { values.attend(); });
        let_next_kernel_start();
        decode::write_empty<C>(smem, params);
    }
#else
    __trap();
#endif
}

// The map of a cache's pages, or of a contiguous cache's sequences. Where there are none, of q: nothing of it is read then.
template <class C>
sinkattn_status map_cache(CUtensorMap *map, const sinkattn_decode_args &args, const sinkattn_tensor &tensor, int64_t pages, int64_t columns,
        const char *name) {
    sinkattn_problem problem = args.fwd.problem;
    problem.head_dim = columns;
    const int64_t rows = problem.page_size ? problem.page_size : problem.k_len;
    if (pages == 0 || rows == 0)
        return encode_map(map, args.fwd.problem, args.fwd.q, problem.batch, problem.q_len, problem.num_q_heads, kTileK, 1, name);
    return encode_map(map, problem, tensor, pages, rows, problem.num_kv_heads, kTileK, 1, name);
}

template <class C> sinkattn_status map_caches(Maps *maps, const sinkattn_decode_args &args) {
    const sinkattn_problem &problem = args.fwd.problem;
    const int64_t pages = problem.page_size ? problem.num_pages : problem.batch, columns = sa_head_dim_v(&problem);
    SA_TRY(map_cache<C>(&maps->k, args, args.fwd.k, pages, problem.head_dim, "k_cache"));
    SA_TRY(map_cache<C>(&maps->v, args, args.fwd.v, pages, columns, "v_cache"));
    if (!args.host.num_pages) return sa_ok();
    SA_TRY(map_cache<C>(&maps->host_k, args, args.host.k, args.host.num_pages, problem.head_dim, "k_cache_host"));
    return map_cache<C>(&maps->host_v, args, args.host.v, args.host.num_pages, columns, "v_cache_host");
}

// Steps whose keys and values have the bytes of a partial: parts are at least as long, and a stage.
template <class C> uint32_t least_steps(int64_t rows) {
    constexpr int64_t kStepBytes = (C::kKeyBytes + C::kValueBytes) / C::kSteps;
    return static_cast<uint32_t>(sa_max(C::kSteps, sa_ceil_div(rows * C::kPartialRow * 4, kStepBytes)));
}

// The parts of a stream past which merging costs more than splitting gains: P* of the plan's reason.
template <class C> int64_t most_parts(const sinkattn_problem &problem, int64_t rows) {
    const auto steps = static_cast<double>(sa_ceil_div(problem.k_len, kTileK));
    return sa_max(1, static_cast<int64_t>(std::ceil(std::sqrt(steps / least_steps<C>(rows)))));
}

constexpr uint32_t kBeginSteps = 16; // what starting on a stream counts as, in steps: a guess, to be measured

// Returns the blocks of the grid, one an SM, and sets what follows from their number.
template <class C> uint32_t cut_work(decode::Params &params, const sinkattn_problem &problem, const sinkattn_plan &plan) {
    const int64_t rows = sa_min(kRows, params.num_rows);
    const auto num_heads = static_cast<uint32_t>(problem.num_kv_heads),
               num_streams = static_cast<uint32_t>(problem.batch * params.row_tiles) * num_heads;
    const auto most = static_cast<uint32_t>(sa_min(plan.workers, num_streams * most_parts<C>(problem, rows)));
    params.cut = sa_cut_of(num_streams, num_heads, least_steps<C>(rows), kBeginSteps, most, most);
    return sa_is_balanced(&problem, &plan) ? params.cut.most : static_cast<uint32_t>(plan.num_items);
}

template <class C> sinkattn_status launch(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    static_assert(sizeof(typename C::Smem) <= 227 * 1024);
    const sinkattn_problem &problem = args.fwd.problem;
    typename C::Arguments params = {};
    Maps maps = {};
    SA_TRY(decode::check_sizes(args, plan, kRows));
    SA_TRY(sa_cuda_error_word(&params.error_word));
    SA_TRY(map_caches<C>(&maps, args));
    SA_TRY(allow_shared<decode_rows_kernel<C>>(sizeof(typename C::Smem)));
    decode::set_tensors(params, args, 1, kRows);
    set_extras(params, args);
    params.num_splits = sa_is_balanced(&problem, &plan) ? 0 : static_cast<uint32_t>(plan.num_splits);
    params.by_splits = divisor_of(params.num_splits);
    params.head_slots = static_cast<uint32_t>(sa_decode_num_slots(&problem, &plan) / problem.num_kv_heads);
    params.slots = reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(context.workspace) + 15) / 16 * 16);
    params.slot_floats = static_cast<uint32_t>(sa_decode_rows_a_slot(&problem, &plan) * C::kPartialRow);
    params.tag = next_launch_tag();
    const uint32_t grid = cut_work<C>(params, problem, plan);
    return launch_overlapping<decode_rows_kernel<C>>(
            "sa_decode_cuda_sm90_rows", grid, kThreads, sizeof(typename C::Smem), context.stream, params, maps);
}

// Whether the values are the first columns of the keys, of pages in both tiers.
bool are_first_columns(const sinkattn_tensor &v, const sinkattn_tensor &k) {
    return v.data == k.data && v.batch_stride == k.batch_stride && v.row_stride == k.row_stride && v.head_stride == k.head_stride;
}

// Latent: Rows with values in the keys' tiles, where there is one.
template <class Rows, class Latent>
sinkattn_status launch_values(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const bool latent = are_first_columns(args.fwd.v, args.fwd.k) && (!args.host.num_pages || are_first_columns(args.host.v, args.host.k));
    if (!std::is_same_v<Rows, Latent> && latent) return launch<Latent>(args, plan, context);
    return launch<Rows>(args, plan, context);
}

template <class Element, int kSteps, int kStages, int kHeadDim, int kHeadDimV>
using Rows = Config<Element, kHeadDim, kHeadDimV, kSteps, kStages, (kHeadDim > 256 ? 1 : 2), false>;
template <class Element> using Latent = Config<Element, 576, 512, 4, 2, 1, true>;

template <int kSteps, int kStages, int kHeadDim, int kHeadDimV>
sinkattn_status launch_dtype(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_decode_args *>(arguments);
    if (args.fwd.problem.batch == 0 || args.fwd.problem.q_len == 0) return sa_ok();
    using OfBf16 = Rows<Bf16, kSteps, kStages, kHeadDim, kHeadDimV>;
    using OfFp16 = Rows<Fp16, kSteps, kStages, kHeadDim, kHeadDimV>;
    constexpr bool kHasLatent = kHeadDim == 576;
    if (args.fwd.problem.dtype == SINKATTN_BF16)
        return launch_values<OfBf16, std::conditional_t<kHasLatent, Latent<Bf16>, OfBf16>>(args, *plan, *context);
    return launch_values<OfFp16, std::conditional_t<kHasLatent, Latent<Fp16>, OfFp16>>(args, *plan, *context);
}

} // namespace

#define SA_DECODE_ROWS(name, ...) \
    extern "C" sinkattn_status sa_decode_cuda_sm90_rows_##name( \
            const void *args, const sinkattn_plan *plan, const sinkattn_context *context) { \
        return launch_dtype<__VA_ARGS__>(args, plan, context); \
    }
// Steps a stage, stages, head_dim, head_dim_v.
SA_DECODE_ROWS(d64, 4, 8, 64, 64)
SA_DECODE_ROWS(d128, 4, 5, 128, 128)
SA_DECODE_ROWS(d192_v128, 4, 4, 192, 128)
SA_DECODE_ROWS(d256, 2, 5, 256, 256)
SA_DECODE_ROWS(d576, 2, 2, 576, 512)

} // namespace many_rows
} // namespace sa::decode
