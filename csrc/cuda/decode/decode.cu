// SPDX-License-Identifier: Apache-2.0
//
// Decode for every architecture from sm_80, in one launch: a few rows a sequence against its cache, dense or paged.
//
//     key tiles of a stream     |  b0, part 0  |  part 1  | .. |  b1, part 0  | ..     a block each, for each kv head
//     a team's stages           load .. | S = Q K^T  mask, softmax  O = O alpha + P V  load again | ..
//     end of a part             teams merge in shared memory -> out; or a partial -> the stream's last block merges -> out; or a stream's
//                               parts are a cluster, and each of its blocks merges some columns
//
// A stream is 16 rows, (token, head) pairs of one kv head of a sequence, or of two with 8 rows each, against the tiles of 16 keys that
// they see. Every block finds its part from cache_seqlens by a prefix sum, so nothing is planned on the host and a captured graph follows
// the lengths. On 9.0 it does so before the preceding kernel ends, and checks again afterwards. Teams, of one warp up to 128 columns of V,
// take every kTeams-th tile, each with its own softmax and its own cp.async stages: the loop has no block barrier. Partials merge in the
// order of teams and parts, never of arrival, and the sink joins the last merge as the virtual partial (s, 1, 0).
//
// Shared memory: Q where a team has several warps, then the stages, K and V of one tile a team: 4 KiB a warp at head_dim 64, else 32 KiB a
// block, 40 at (192, 128). An SM holds 16 warps at head_dim 64, else 8, in blocks of 1 to 8, where 2 stages fit.
// Registers: Q, O and S of a warp, 16 + 32 + 8 at head_dim 64.
//
// Values may be narrower than keys in the instances with kNarrow: columns past head_dim and head_dim_v are zeros in shared memory, and
// neither read nor written in global memory.

#include <cmath>

#include "cuda/decode/finish.cuh"
#include "cuda/decode/keys.cuh"
#include "cuda/decode/load.cuh"
#include "cuda/decode/merge.cuh"
#include "cuda/decode/params.cuh"
#include "cuda/decode/tile.cuh"
#include "cuda/decode/work.cuh"
#include "cuda/host/launch.cuh"

namespace sa::decode {
namespace {

// The M side of a tile's products: 16 rows; or keys, and columns of O, of one kv head with at most 8 rows, or of two with 8 each.
enum class Tile { kRows, kKeys, kKeysOfTwoHeads };

template <class Element_, class Sizes, int kWarps, bool kExtras_, Tile kTile, bool kClusters_ = false> struct Config : Sizes {
    using Element = Element_;
    using Sizes::kHeadDim, Sizes::kHeadDimV, Sizes::kRowThreads, Sizes::kRowBytes, Sizes::kHeadBytes, Sizes::kPartialRow;
    static constexpr bool kExtras = kExtras_, kClusters = kClusters_; // kClusters: a stream has kCluster parts, the blocks of a cluster
    static constexpr bool kKeysInM = kTile != Tile::kRows;
    static constexpr int kHeads = kTile == Tile::kKeysOfTwoHeads ? 2 : 1; // kv heads of a stream
    static constexpr int kEights = kTile == Tile::kKeys ? 1 : 2;          // a stream has at most 8 kEights rows
    using Arguments = std::conditional_t<kExtras, Extras, Params>;
    static constexpr int kStep = 512 / kHeadDimV; // tiles that make 32 KiB or 40, K and V together
    static constexpr int kThreads = 32 * kWarps, kTeams = (kStep < 4 ? kStep : 4) * kWarps / 4, kTeamThreads = kThreads / kTeams;
    static constexpr int kTeamWarps = kTeamThreads / 32;                        // each computes all scores and its own columns of O
    static constexpr int kBlocks = (kHeadDim <= 64 ? 16 : 8) / kWarps / kHeads; // of an SM
    using Smem = std::conditional_t<kClusters, ClusterSmem<kThreads>, decode::Smem<kThreads>>;
    using Rows = std::conditional_t<kKeysInM, RowsInN<Config>, decode::Rows<Config>>;
    static constexpr int kColumns = kHeadDimV / kTeamWarps, kStreamRows = kTileQ;
    static constexpr bool kQueriesInRegisters = kTeamWarps == 1;
    static constexpr int kTeamBytes = kHeads * kHeadBytes; // in a stage
    static constexpr int kQueryBytes = kQueriesInRegisters ? 0 : kTileQ * kRowBytes, kStageBytes = kTeams * kTeamBytes;
    static_assert(kTileQ * kPartialRow * 4 <= 2 * kHeadBytes, "a team's partial fits its two stages");
    static_assert(kTeamThreads % kRowThreads == 0, "threads share the work evenly");

    static __device__ __forceinline__ void sync() { __syncthreads(); } // of the threads that end a part
};

enum NamedBarrier : int { kTeamBarrier = 1 }; // one a team, from this one on; 0 is __syncthreads

template <class C> __device__ __forceinline__ void team_sync(int team) {
    if constexpr (C::kTeamWarps == 1)
        __syncwarp();
    else
        bar_sync<C::kTeamThreads>(kTeamBarrier + team);
}

// Writes the keys that each row sees, for this warp. Returns the lane's first row of Q.
template <class C> __device__ __forceinline__ const uint16_t *find_rows(typename C::Smem &smem, const Params &params) {
    const Part &part = smem.part;
    const int warp = threadIdx.x / 32, row = threadIdx.x % 32;
    const bool real = row < part.stream.num_rows;
    const TokenHead at = token_head(part, params, row);
    const sa_range keys = sa_row_band(&part.stream.band, at.token);
    if (row < kTileQ) smem.rows[warp][row] = real ? Row{keys.begin, keys.end, sa_row_sink_end(&part.stream.band, at.token)} : Row{0, 0, 0};
    __syncwarp();
    return query_row(part, params, min(row / 4, part.stream.num_rows - 1));
}

// (pivot, sum, O) of this team's tiles: every kTeams-th of the part. One loop fills the stages, a second one works through them: its time
// is a chain of dependent instructions, so it is kept short and straight, and the findings are acted on after it.
template <class C>
__device__ __forceinline__ Findings attend(typename C::Rows &rows, unsigned char *shared, typename C::Smem &smem,
        const typename C::Arguments &params, Speculation &speculation) {
    const Part &part = smem.part;
    const int team = threadIdx.x / C::kTeamThreads, first_chunk = threadIdx.x % C::kTeamThreads / 32 * (C::kColumns / 8);
    const int stages = params.stages, ahead = stages * C::kTeams, num_rows = part.stream.num_rows;
    const int32_t first = part.first + team;
    int keys = C::kQueryBytes + team * team_bytes<C>(params), stage = 0;
    const uint32_t q = shared_address(shared);
    const LaneRows lane = lane_rows<C>();
    const uint32_t lane_k = C::kKeysInM ? lane.q : lane.k,
                   lane_v = C::kKeysInM ? lane.k : lane.v; // with the keys in M, K is the left side
    const Row *seen = smem.rows[threadIdx.x / 32];
    Loader<C> loader(params, part, first);
    const sa_key_tiles &tiles = loader.tiles;
    const int32_t page_before = loader.page;
    const uint16_t *queries = find_rows<C>(smem, params);
    const bool speculated = speculation.before_wait, late = params.fills && loader.last - part.first >= 32 * C::kStep;
    if (!C::kExtras && speculated && !late && params.whole_tiles && loader.last - part.first >= 8 * C::kTeams)
        loader.fetch_ahead(first, part.kv_head);
    int32_t length_now = 0;
    Requested requested = {};
#pragma unroll 1
    for (; stage < stages; stage++, keys += C::kTeamBytes) {
        const int32_t n = first + stage * C::kTeams;
        if (n < loader.last) loader.template load<true>(q + keys, n, speculation);
        cp_async_commit();
        if (stage > 0) continue;
        speculation.wait();
        if (!late) let_next_kernel_start();
        length_now = read_length(params, speculation.batch);
        if (params.whole_tiles) loader.page = loader.find_page(first);
        load_queries<C>(rows, q, queries, part, params);
        requested = request_rows<C>(smem, params);
    }
    keys -= team_bytes<C>(params);
    stage = 0;
    const bool wrong = (loader.check_first_pages(first, page_before) | speculation.replace_length(params, length_now)) & speculated;
    if (threadIdx.x == 0) smem.counted = requested.count;
    if constexpr (!C::kQueriesInRegisters) {
        cp_async_wait_upto(stages - 2); // Q's copies are in the second stage's group
        __syncthreads();
    }
#pragma unroll 1
    for (int32_t n = first; n < loader.last; n += C::kTeams) {
        cp_async_wait_upto(stages - 1); // of the groups in flight, one for each of the next `stages` tiles, tile n's is complete then
        team_sync<C>(team);             // tile n has landed
        float s[C::kEights][4];
        qk_product(s, rows, q + lane.q, q + keys + lane_k, params.scale_log2);
        const bool masked = !loader.is_full(n);
        if (__builtin_expect(masked, false)) mask_tile(s, rows, seen, sa_key_tile_at(&tiles, n));
        softmax_step(s, rows, fabsf(params.scale_log2), num_rows);
        if constexpr (!C::kKeysInM)
            if (__builtin_expect(masked && params.band.q_len > 1, false))
                hide_nonfinite<C>(shared + keys + C::kTileBytes, rows, seen, sa_key_tile_at(&tiles, n), first_chunk);
        pv_product(rows, s, q + keys + lane_v + C::kTileBytes + first_chunk * 16);
        team_sync<C>(team); // no warp of the team reads the stage any more
        if (n + ahead < loader.last) loader.template load<false>(q + keys, n + ahead, speculation);
        cp_async_commit();
        stage++;
        keys += C::kTeamBytes;
        if (stage < stages) continue;
        stage = 0;
        keys -= team_bytes<C>(params);
    }
    if (late) let_next_kernel_start();
    if (threadIdx.x < num_rows) smem.s_aux[threadIdx.x] = s_aux_of(params, requested);
    return {wrong, loader.bad_page};
}

// A block without a part stays until the cluster's other blocks have written to shared memory: if lengths changed under the kernel, they
// might write to this block's.
template <class C> __device__ __forceinline__ void leave_cluster() {
    if (!C::kClusters) return;
    let_next_kernel_start();
    cluster_arrive();
    cluster_wait();
}

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kBlocks) void decode_kernel(const __grid_constant__ typename C::Arguments params) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ typename C::Smem smem;
    fetch_params(params);
    if (C::kClusters) cluster_arrive();
    const uint32_t number = C::kClusters ? blockIdx.x % kCluster * params.num_heads + blockIdx.x / kCluster : blockIdx.x;
    Speculation speculation = speculate<C::kThreads>(params, number, may_start_early());
    if (C::kClusters) cluster_wait(); // all blocks of the cluster have started
    for (bool begins = true;;) {
        if (begins && threadIdx.x == 0) smem.part.found = false;
        __syncwarp();
        if (begins &&
                !take_part(smem, params, number, params.num_splits ? Split{} : split_streams(smem, params, speculation), speculation)) {
            if (speculation.before_wait) {
                speculation.wait();
                if (__syncthreads_or(speculation.replace_length(params, read_length(params, speculation.batch)))) continue;
            }
            leave_cluster<C>();
            break;
        }
        typename C::Rows rows;
        const Findings findings = attend<C>(rows, shared, smem, params, speculation);
        begins = !finish<C>(rows, shared, smem, params, findings); // again after a stale speculation
        if (begins)
            speculation = speculate<C::kThreads>(params, number, false);
        else if (!kHasShares<C::kThreads> || !take_next(smem, params))
            break;
    }
    if constexpr (kHasShares<C::kThreads>) write_empty<C>(smem, params);
}

// The second pass of num_splits < 0, a block a stream: merges the parts as the last block of a stream does in one launch.
template <class C> __global__ __launch_bounds__(C::kThreads) void reduce_kernel(const __grid_constant__ typename C::Arguments params) {
    __shared__ typename C::Smem smem;
    __shared__ __align__(16) float neutral[C::kPartialRow];
    const uint32_t stream = sa_divide(blockIdx.x, params.by_heads), head = blockIdx.x - stream * params.num_heads;
    const uint32_t number = stream * params.num_splits * params.num_heads + head; // of its first part
    wait_for_previous_kernel();
    let_next_kernel_start();
    const Speculation speculation = speculate<C::kThreads>(params, number, false);
    if (threadIdx.x == 0) {
        smem.part.found = false;
        smem.is_last = true;
    }
    if (!take_part(smem, params, number, Split{}, speculation) || smem.part.num_parts == 1) return;
    const Requested requested = request_rows<C>(smem, params);
    if (threadIdx.x < smem.part.stream.num_rows) smem.s_aux[threadIdx.x] = s_aux_of(params, requested);
    make_neutral<C>(neutral);
    merge_parts<C>(neutral, smem, params);
}

// The blocks of an SM, at most kBlocks, halved until each has two stages; and the stages of each.
template <class C> sinkattn_status choose_stages(int32_t *stages, int32_t *blocks) {
    int device = 0, block_bytes = 0, sm_bytes = 0, reserved = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
    if (error != cudaSuccess) return sa_cuda_status("cudaDeviceGetAttribute", error);
    const auto fit = [](int64_t bytes) {
        return (bytes - C::kQueryBytes - static_cast<int64_t>(sizeof(typename C::Smem))) / C::kStageBytes;
    };
    for (*blocks = C::kBlocks; *blocks > 1 && fit(sm_bytes / *blocks - reserved) < 2;) *blocks /= 2;
    *stages = static_cast<int32_t>(sa_min(kMaxStages, fit(sa_min(block_bytes, sm_bytes / *blocks - reserved))));
    if (*stages >= 2) return sa_ok();
    return sa_status(SINKATTN_UNSUPPORTED, "a block may use %d bytes of shared memory; this kernel needs %d", block_bytes,
            C::kQueryBytes + 2 * C::kStageBytes + static_cast<int>(sizeof(typename C::Smem)));
}

// The parts of a stream past which merging costs more than splitting gains: P* of the plan's reason, rounded up to a multiple of 16.
template <class C> int64_t most_parts(const sinkattn_problem &problem) {
    const int64_t rows = sa_min(kTileQ, sa_kv_head_rows(&problem));
    const auto tile_partials = static_cast<double>(C::kHeadBytes) / static_cast<double>(rows * C::kPartialRow * 4);
    const double parts = std::sqrt(static_cast<double>(sa_ceil_div(problem.k_len, kTileK)) * tile_partials);
    return sa_max(1, sa_ceil_div(static_cast<int64_t>(std::ceil(parts)), 16)) * 16;
}

// Returns the blocks of the grid, where an SM holds `blocks`, and sets what follows from their number.
template <class C> uint32_t cut_work(Params &params, const sinkattn_problem &problem, const sinkattn_plan &plan, int32_t blocks) {
    params.row_tiles = static_cast<int32_t>(row_tiles_of(problem, kTileQ));
    const uint32_t num_heads = static_cast<uint32_t>(problem.num_kv_heads) / C::kHeads;
    const uint32_t num_streams = static_cast<uint32_t>(problem.batch * params.row_tiles) * num_heads;
    const int64_t parts = num_streams * most_parts<C>(problem);
    const auto workers = static_cast<uint32_t>(sa_min(plan.workers, parts)), room = static_cast<uint32_t>(blocks * plan.workers);
    const uint32_t most = C::kClusters ? kCluster * num_streams : C::kThreads > 128 ? workers : static_cast<uint32_t>(sa_min(room, parts));
    const uint32_t least = (most < workers ? most : workers) / C::kHeads, begin = C::kTeams > 1 ? 7 * C::kTeams : 4; // measured
    params.cut = sa_cut_of(num_streams, num_heads, C::kStep, begin, least, most);
    const uint32_t grid = sa_is_balanced(&problem, &plan) ? params.cut.most : static_cast<uint32_t>(plan.num_items);
    params.fills = 2 * grid > room;
    if (C::kHeadDim <= 64 && C::kHeads == 1 && params.fills) params.stages = 2; // 128 KiB in flight an SM suffice
    return grid;
}

template <class C> sinkattn_status launch(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    if (problem.batch == 0 || problem.q_len == 0) return sa_ok();
    typename C::Arguments params = {};
    int32_t blocks = 1;
    SA_TRY(check_sizes(args, plan, kTileQ));
    SA_TRY(choose_stages<C>(&params.stages, &blocks));
    SA_TRY(sa_cuda_error_word(&params.error_word));
    SA_TRY(allow_shared<decode_kernel<C>>(C::kQueryBytes + params.stages * C::kStageBytes)); // room for all stages; cut_work may use fewer
    const uint32_t grid = cut_work<C>(params, problem, plan, blocks);

    set_tensors(params, args, C::kHeads, kTileQ);
    params.num_splits = sa_is_balanced(&problem, &plan) ? 0 : static_cast<uint32_t>(plan.num_splits);
    params.by_splits = divisor_of(params.num_splits);
    params.head_slots = static_cast<uint32_t>(sa_decode_num_slots(&problem, &plan) / problem.num_kv_heads);
    params.slots = reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(context.workspace) + 15) / 16 * 16);
    params.slot_floats = static_cast<uint32_t>(sa_decode_rows_a_slot(&problem, &plan) * C::kHeads * C::kPartialRow);
    params.tag = next_launch_tag();
    params.two_pass = problem.num_splits < 0;
    if constexpr (C::kExtras) set_extras(params, args);

    const int shared_bytes = C::kQueryBytes + params.stages * C::kStageBytes;
    SA_TRY(launch_clusters<decode_kernel<C>>(
            "sa_decode_cuda_sm80", grid, C::kClusters ? kCluster : 1, C::kThreads, shared_bytes, context.stream, params));
    if (!params.two_pass || plan.num_splits == 1) return sa_ok();
    if constexpr (C::kThreads == 128 && !C::kKeysInM) // num_splits always takes such blocks
        return launch_overlapping<reduce_kernel<C>>(
                "sa_decode_cuda_sm80, second pass", grid / params.num_splits, C::kThreads, 0, context.stream, params);
    return sa_ok();
}

// Whether to process two kv heads of 8 rows as one of 16: if such pairs fill two blocks an SM, of three stages each, with long streams.
template <class C> sinkattn_status pairs_fit(bool *fit, const sinkattn_decode_args &args, const sinkattn_plan &plan) {
    const sinkattn_problem &problem = args.fwd.problem;
    const int64_t pairs = problem.batch * problem.num_kv_heads / 2, room = static_cast<int64_t>(C::kBlocks) * plan.workers;
    *fit = sa_is_balanced(&problem, &plan) && problem.num_q_heads == 8 * problem.num_kv_heads && problem.num_kv_heads % 2 == 0 &&
           problem.k_len >= kLeastPairKeys && pairs > room - room / 16 &&
           sa_max(args.fwd.k.head_stride, args.fwd.v.head_stride) <= INT32_MAX / 2;
    if (!*fit) return sa_ok();
    int32_t stages = 0, blocks = 0;
    SA_TRY(choose_stages<C>(&stages, &blocks));
    *fit = stages > 2 && blocks == C::kBlocks;
    return sa_ok();
}

// Warps of a block: 4, as num_splits always takes, so that there a row's bits do not depend on the batch. 8 for few streams of one part
// each, or of one sequence, so that fewer partials are merged; fewer for more streams of one part than blocks of 4 that run at once.
template <class Element, class Sizes, bool kExtras, Tile kTile>
sinkattn_status launch_width(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    const int64_t streams = problem.batch * problem.num_kv_heads * row_tiles_of(problem, kTileQ);
    const bool is_free = problem.num_splits == 0, has_one_part = is_free && plan.num_splits == 1;
    if constexpr (Sizes::kHeadDim == 64) {
        using Clusters = Config<Element, Sizes, 8, kExtras, kTile, true>;
        bool fit = false;
        if (sa_is_balanced(&problem, &plan) && problem.batch == 1 && streams == problem.num_kv_heads && problem.k_len <= kMostClusterKeys &&
                plan.workers / (kCluster * streams) == 2) {
            SA_TRY(runs_code_of_90<decode_kernel<Clusters>>(&fit));
        }
        if (fit) return launch<Clusters>(args, plan, context);
        if constexpr (kTile == Tile::kKeys) {
            using Pairs = Config<Element, Sizes, 4, kExtras, Tile::kKeysOfTwoHeads>;
            SA_TRY(pairs_fit<Pairs>(&fit, args, plan));
            if (fit) return launch<Pairs>(args, plan, context);
        }
        if ((has_one_part || (is_free && problem.batch == 1)) && streams <= plan.workers)
            return launch<Config<Element, Sizes, 8, kExtras, kTile>>(args, plan, context);
        if (has_one_part && streams > 4 * plan.workers) return launch<Config<Element, Sizes, 1, kExtras, kTile>>(args, plan, context);
    } else if constexpr (Sizes::kHeadDimV == 128) {
        // Half as many partials are worth more than a second block a multiprocessor where they have many rows.
        const bool is_alone = is_free && problem.batch == 1 && streams <= sa_min(plan.workers, sa_min(kTileQ, sa_kv_head_rows(&problem)));
        if (is_alone || (has_one_part && 2 * streams <= plan.workers))
            return launch<Config<Element, Sizes, 8, kExtras, kTile>>(args, plan, context);
        if (has_one_part && streams > 4 * plan.workers) return launch<Config<Element, Sizes, 1, kExtras, kTile>>(args, plan, context);
    }
    if constexpr (Sizes::kHeadDim > 64 && Sizes::kHeadDimV <= 256)
        if (has_one_part && streams > 2 * plan.workers) return launch<Config<Element, Sizes, 2, kExtras, kTile>>(args, plan, context);
    return launch<Config<Element, Sizes, 4, kExtras, kTile>>(args, plan, context);
}

// Keys are in M where one token has at most 8 rows of a kv head; not with num_splits, where a row's bits do not depend on the number of
// rows.
template <class Element, class Sizes, bool kExtras>
sinkattn_status launch_tile(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    if constexpr (Sizes::kHeadDim == 64)
        if (problem.num_splits == 0 && problem.q_len == 1 && problem.num_q_heads <= 8 * problem.num_kv_heads)
            return launch_width<Element, Sizes, kExtras, Tile::kKeys>(args, plan, context);
    return launch_width<Element, Sizes, kExtras, Tile::kRows>(args, plan, context);
}

template <class Sizes> sinkattn_status launch_dtype(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_decode_args *>(arguments);
    const bool extras = args.host.num_pages || args.nvfp4.values;
    if (args.fwd.problem.dtype == SINKATTN_BF16)
        return extras ? launch_tile<Bf16, Sizes, true>(args, *plan, *context) : launch_tile<Bf16, Sizes, false>(args, *plan, *context);
    return extras ? launch_tile<Fp16, Sizes, true>(args, *plan, *context) : launch_tile<Fp16, Sizes, false>(args, *plan, *context);
}

} // namespace

#define SA_DECODE(name, ...) \
    extern "C" sinkattn_status sa_decode_cuda_sm80_##name(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) { \
        return launch_dtype<TileSizes<__VA_ARGS__>>(args, plan, context); \
    }
SA_DECODE(d64, 64) SA_DECODE(d128, 128) SA_DECODE(d192_v128, 192, 128) SA_DECODE(d256, 256) SA_DECODE(d512, 512)

} // namespace sa::decode
