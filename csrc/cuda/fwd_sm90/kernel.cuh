// SPDX-License-Identifier: Apache-2.0
//
// Forward for every mask on sm_90, head_dim up to 256, values as wide as keys or narrower: full causal, wide and two-sided windows, sink
// tokens.
//
//     scheduler warp  the next tile of rows, and the keys that each row sees ...
//     loader warp     Q | K0 | V0 | K1 | V1 | ...                     by TMA; Q of the next tile while this one is computed
//     checker warps       V0 | V1 | ...                               zero values that are not finite, in tiles that need a mask
//     math warpgroups S0 | S1 = Q K1^T, O += P0 V0 | S2, O += P1 V1 | ...       softmax of S1 while O += P0 V0 runs
//
// Over a cache, one of the checker warps loads V instead: cached.cuh, threads.cuh.
//
// A block stays on its multiprocessor and walks over tiles of rows (tokens x the heads of a GQA group), the last of a sequence first, and
// in dense batches in reverse every other round, which evens out the blocks' work. A math warpgroup owns 64 rows, with S, P and O in
// registers; they run out of step, and each releases key tiles that only the others need. Out leaves through the stage of the queries; with
// one tile of Q, from registers. A row's pivot is its maximum over its first key tile; later tiles are not searched for maxima, and the
// rare row that outgrows its pivot is scored again. Key tiles lie at multiples of kTileK from key 0 and a masked key adds zero, so a row's
// bits are its own. Up to head_dim 128 sums are cut into chunks of sa_chunk_tiles key tiles where the mask has no left side, so that blocks
// of decode_chain.cu may share a row: each chunk begins anew, and the sums of earlier ones wait in the workspace.
//
// Registers: S, P and O take 128 of 160 at head_dim 64, 108 at 96, 124 at 128 and at 192 with values of 128; 188 of 232 at 256, with two
// math warpgroups. Shared memory: one or two tiles of Q, kStages of K and V, 176 KiB, 216, 216, 222 and 224.
#pragma once

#include "cuda/fwd_sm90/cached.cuh"
#include "cuda/fwd_sm90/math.cuh"
#include "cuda/fwd_sm90/threads.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/host/tensor_map.cuh"
#include "cuda/work/launch_counter.cuh"

namespace sa::fwd_sm90 {

// A block's item of a round: in order, and in reverse every other round; with a counter, blockIdx.x first, then the next untaken item.
// Which block computes a tile does not change its bits.
__device__ __forceinline__ unsigned item_of_round(const Problem &p, unsigned round) {
    if (!p.counter) return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    return round == 0 ? blockIdx.x : gridDim.x + take_count(p.counter, p.tag);
}

// Whether tiles come in ascending order. Over a cache a batch begins at the end whose sequence has fewer rows, say a decode's: one item, of
// all keys that its sequence has, for which a late begin is worst.
template <class C> __device__ __forceinline__ bool tiles_ascend(const sinkattn_fwd_args &args) {
    if (!C::Keys::kCached || !args.problem.packed || args.problem.batch < 2) return false;
    const int32_t *cu = args.cu_seqlens_q, *last = cu + args.problem.batch;
    return cu[1] - cu[0] < last[0] - last[-1];
}

// With a counter, a block takes its next item once at most kUnsent key tiles of this one are left to send: taken earlier, it would be kept
// from an idle block, and later, it would not be described in time. Behind tiles of few keys, but for those of the last two rounds, it
// takes it at once, and the counter's answer arrives while this one is described.
template <class C>
__device__ __forceinline__ void schedule(Smem<C> &smem, const sinkattn_fwd_args &args, const typename C::Keys &keys, const Problem &p) {
    constexpr int kFewKeyTiles = 8;
    const bool leader = threadIdx.x % 32 == 0, ascends = tiles_ascend<C>(args);
    if (leader && p.counter) open_counter(p.counter, __ldcg(p.counter), p.tag);
    unsigned item = blockIdx.x, round = 0;
    Ring<1> waits;
    for (Ring<C::kRowStages> ring;; ring.n++) {
        Rows<C> &rows = smem.rows[ring.stage()];
        if (ring.n > 0) rows.empty.wait_previous(ring);
        bool exists = false, awaited = false; // awaited: in the leader
        while (!exists && item < p.num_items) {
            const unsigned nth = sa_divide(item, p.by_kv_heads), tile = ascends ? nth : p.num_tiles - 1 - nth,
                           b = sequence_of_tile(args, p, tile);
            if (leader) {
                exists = describe_tile<C>(args, keys, p, item - nth * p.num_kv_heads, b, tile, ascends, rows.work);
                const sa_key_tiles &tiles = rows.work.tiles;
                awaited = exists && p.counter && (tiles.end - tiles.begin > kFewKeyTiles || item + 2 * gridDim.x >= p.num_items);
                if (!awaited) item = item_of_round(p, ++round);
            }
            exists = __shfl_sync(0xffffffffu, exists, 0);
            if (!exists) item = __shfl_sync(0xffffffffu, item, 0);
        }
        if (ring.n == 0) __syncthreads(); // meanwhile the other warps prepared the barriers
        if (leader) {
            rows.exists = exists;
            rows.awaited = awaited;
            rows.placed.arrive();
        }
        __syncwarp(); // the lanes see rows.work
        if (exists) describe_rows<C>(rows, args, p);
        rows.full.arrive();
        if (!exists) {
            if (leader && p.counter && item == gridDim.x + p.num_items - 1) reset_counter(p.counter, p.tag);
            return;
        }
        if (awaited) {
            smem.sent.wait(waits);
            waits.n++;
            item = item_of_round(p, ++round);
        }
        item = __shfl_sync(0xffffffffu, item, 0);
    }
}

template <class C> __device__ __forceinline__ void load_tiles(Smem<C> &smem, const Maps &maps, const Problem &p) {
    const auto load_keys = [&](unsigned char *to, int halves, const CUtensorMap &map, Barrier &full, const Work &work, int t) {
        full.arrive_expect(halves * C::kKeyHalf);
#pragma unroll
        for (int half = 0; half < halves; half++)
            tensor_load(to + half * C::kKeyHalf, &map, full, 64 * half, static_cast<int>(work.kv_head),
                    static_cast<int>(work.sequence.k_begin) + t * C::kTileK, static_cast<int>(work.sequence.batch));
    };
    Ring<C::kStages> ring;
    for (Ring<C::kRowStages> tiles;; tiles.n++) {
        const Ring<C::kQueries> queries{tiles.n};
        smem.rows[tiles.stage()].placed.wait(tiles);
        if (!smem.rows[tiles.stage()].exists) return;
        smem.q_empty.acquire(queries);
        const Work &work = smem.rows[tiles.stage()].work;
        // Read before Q is sent: once Q lands, the math may finish a tile without keys, and its stage be described anew.
        const int end = work.tiles.end;
        bool awaited = smem.rows[tiles.stage()].awaited;
        KeyTileWalk tile(work.tiles);
        load_queries<C>(smem, maps, p, queries, work);
        for (; tile.t < end; tile.advance(), ring.n++) {
            // In flight: K and V of at most kStages earlier key tiles; Q of up to kQueries row tiles, since the loader may pass a
            // row tile of few key tiles before its Q has landed.
            tell_unsent(smem, awaited, end - tile.t);
            smem.k_empty.acquire(ring);
            load_keys(smem.keys[ring.stage()], C::kHalves, maps.k, smem.k_full[ring.stage()], work, tile.t);
            smem.v_empty.acquire(ring);
            load_keys(smem.values[ring.stage()], C::kHalvesV, maps.v, smem.v_full[ring.stage()], work, tile.t);
        }
        tell_unsent(smem, awaited, 0);
    }
}

template <class C> __device__ __forceinline__ void check_tiles(Smem<C> &smem) {
    Ring<C::kStages> ring;
    for (Ring<C::kRowStages> tiles;; tiles.n++) {
        smem.rows[tiles.stage()].placed.wait(tiles);
        if (!smem.rows[tiles.stage()].exists) return;
        const Work &work = smem.rows[tiles.stage()].work;
        for (KeyTileWalk tile(work.tiles); tile.exists(); tile.advance(), ring.n++) {
            smem.v_full.wait(ring);
            check_values<C>(smem, ring, !tile.is_full(), static_cast<int>(threadIdx.x) - (128 - 32 * C::kCheckers));
        }
        smem.rows[tiles.stage()].empty.arrive();
    }
}

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void fwd_kernel(const __grid_constant__ sinkattn_fwd_args args,
        const __grid_constant__ Maps maps, const __grid_constant__ Problem p, unsigned *error_word,
        const __grid_constant__ typename C::Keys keys) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<Smem<C> *>(shared);
    fetch_params(args);
    fetch_params(p);
    if (threadIdx.x == 32)
        for (const CUtensorMap *map : {&maps.q, &maps.k, &maps.v}) tensor_map_prefetch(map);
    if (threadIdx.x == 64) {
        smem.sent.init(1);
        for (int i = 0; i < C::kRowStages; i++) {
            smem.rows[i].placed.init(1);
            smem.rows[i].full.init(32);
            smem.rows[i].empty.init(128 * C::kMathWarpgroups + (C::Keys::kCached ? 96 : 64)); // math; loaders of a cache; checkers
        }
        for (int i = 0; i < C::kQueries; i++) {
            smem.q_full[i].init(1);
            smem.q_empty[i].init((C::kStagesOut ? 1 : 4) * C::kMathWarpgroups);
        }
        for (int i = 0; i < C::kStages; i++) {
            smem.k_full[i].init(C::Keys::kByThreads ? 32 : 1); // one thread announces TMA's bytes
            smem.k_empty[i].init(4 * C::kMathWarpgroups);
            smem.v_full[i].init(C::Keys::kByThreads ? 32 : 1);
            smem.v_ready[i].init(32 * C::kCheckers);
            smem.v_empty[i].init((C::Keys::kCached ? 4 : 1) * C::kMathWarpgroups);
        }
        barrier_init_fence();
    }
    // Rows of a tile of Q past its whole tokens are never loaded; scores of what was there could outgrow their pivot in each key tile.
    // Where out leaves through the tile, such rows of it come next.
    zero_rows<C::kQueries * C::kHalves, C::kTileQ, C::kThreads>(smem.queries[0], p.tokens * p.group, C::kTileQ);
    async_fence();
    if (blockIdx.x == 0) check_lengths(args, keys, error_word);
    if (threadIdx.x >= 32) __syncthreads(); // the scheduler's stands in schedule()
    if (threadIdx.x < 128) {
        registers_down<C::kLoaderRegisters>();
        if (threadIdx.x < 32) schedule<C>(smem, args, keys, p);
        if constexpr (C::Keys::kCached) {
            if (threadIdx.x >= 32 && threadIdx.x < 64) load_cached<C, false>(smem, maps, p, keys, error_word);
            if (threadIdx.x >= 64 && threadIdx.x < 96) load_cached<C, true>(smem, maps, p, keys, error_word);
        } else {
            if (threadIdx.x == 32) load_tiles<C>(smem, maps, p);
        }
        if (threadIdx.x >= 128 - 32 * C::kCheckers) check_tiles<C>(smem);
    } else {
        if constexpr (C::kMathWarpgroups > 1) registers_up<C::kMathRegisters>();
        Math<C>{smem, args, keys, maps, p, warp_uniform(threadIdx.x / 128) - 1, threadIdx.x % 128 == 0, {}}.run();
    }
#else
    __trap();
#endif
}

template <class C>
sinkattn_status launch(const sinkattn_fwd_args &args, typename C::Keys keys, const sinkattn_plan &plan, const sinkattn_context &context) {
    static_assert(sizeof(Smem<C>) <= 227 * 1024, "what a block of compute capability 9.0 may use");
    const sinkattn_problem &problem = args.problem;
    Problem p;
    p.group = static_cast<int>(problem.num_q_heads / problem.num_kv_heads);
    p.tokens = C::kTileQ / p.group;
    p.group_inverse = (65536 + p.group - 1) / p.group;
    const int64_t num_tiles = num_row_tiles(problem, p.tokens * p.group), num_items = num_tiles * problem.num_kv_heads;
    if (num_items > INT32_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld tiles of rows; a launch holds at most 2^31", static_cast<long long>(num_items));
    p.num_kv_heads = static_cast<unsigned>(problem.num_kv_heads);
    p.num_tiles = static_cast<unsigned>(num_tiles);
    p.num_items = static_cast<unsigned>(num_items);
    p.by_kv_heads = divisor_of(p.num_kv_heads);
    p.by_batch = divisor_of(problem.batch);
    p.copied_tokens = 64 % p.group ? 0 : 64 / p.group;
    p.scale_log2 = static_cast<float>(sa_softmax_scale(&problem)) * kLog2e;
    p.counter = nullptr;
    p.tag = 0;
    if (sa_counts_items(&problem) && p.num_items < kMaxCount) {
        p.counter = launch_counter(context.workspace);
        p.tag = next_launch_tag();
    }
    p.chunk_tiles = static_cast<int>(sa_chunk_tiles(C::kTileK));
    p.kept = reinterpret_cast<float4 *>(
            (reinterpret_cast<uintptr_t>(context.workspace) + (sa_counts_items(&problem) ? SA_COUNTER_BYTES : 0) + 15) / 16 * 16);
    unsigned *error_word;
    Maps maps;
    SA_TRY(sa_cuda_error_word(&error_word));
    // Of the two widths a kernel reads that of values alone, under both names; what is added back reads 32 bits of it where they are
    // enough.
    sinkattn_fwd_args values = args;
    values.problem.head_dim = values.problem.head_dim_v = static_cast<int32_t>(sa_head_dim_v(&problem));
    SA_TRY(map_rows(&maps.q, problem, args.q, p.tokens, p.group, "q"));
    SA_TRY(map_keys(&maps.k, problem, args.k, keys, C::kTileK, "k"));
    SA_TRY(map_keys(&maps.v, values.problem, args.v, keys, C::kTileK, "v"));
    if (C::kStagesOut && p.copied_tokens) SA_TRY(map_rows(&maps.out, values.problem, args.out, p.copied_tokens, p.group, "out"));
    const unsigned blocks = static_cast<unsigned>(sa_min(num_items, plan.workers));
    return launch_blocks<fwd_kernel<C>>(
            "sa_fwd_cuda_sm90", blocks, C::kThreads, sizeof(Smem<C>), context.stream, values, maps, p, error_word, keys);
}

template <class Element, class Shape, class Keys>
sinkattn_status launch_chunks(const sinkattn_fwd_args &args, const Keys &keys, const sinkattn_plan &plan, const sinkattn_context &context) {
    if constexpr (Shape::kHeadDim <= SA_CHUNKS_HEAD_DIM)
        if (sa_fwd_kept_bytes(&args.problem, &plan)) return launch<Config<Element, Keys, Shape, true>>(args, keys, plan, context);
    return launch<Config<Element, Keys, Shape, false>>(args, keys, plan, context);
}

template <class Shape, class Keys>
sinkattn_status launch_dtype(const sinkattn_fwd_args &args, const Keys &keys, const sinkattn_plan *plan, const sinkattn_context *context) {
    if (args.problem.dtype == SINKATTN_BF16) return launch_chunks<Bf16, Shape>(args, keys, *plan, *context);
    return launch_chunks<Fp16, Shape>(args, keys, *plan, *context);
}

// Boxes of fewer keys are slower than threads.
constexpr int kLeastBox = 4;

template <class Shape>
sinkattn_status launch_cached(const sinkattn_decode_args &args, const sinkattn_plan *plan, const sinkattn_context *context) {
    const CacheKeys keys(args, Shape::kTileK);
    if (keys.box < kLeastBox && ThreadKeys::serves(keys, args.fwd))
        return launch_dtype<Shape>(args.fwd, ThreadKeys(keys, args.fwd), plan, context);
    return launch_dtype<Shape>(args.fwd, keys, plan, context);
}

// The forward of tensors, of variants.def's row sm90_<name>.
#define SA_FWD_SM90_LAUNCHER(name, head_dim, head_dim_v, stages, row_stages, queries) \
    extern "C" sinkattn_status sa_fwd_cuda_sm90_##name( \
            const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) { \
        using Tiles = Shape<head_dim, head_dim_v, sa_fwd_cuda_sm90_##name##_tile_q, sa_fwd_cuda_sm90_##name##_tile_k, stages, row_stages, \
                queries>; \
        return launch_dtype<Tiles>(*static_cast<const sinkattn_fwd_args *>(arguments), TensorKeys{}, plan, context); \
    }

// And that of rows over a cache, a decode, of sm90_packed_<name>.
#define SA_FWD_SM90_LAUNCHERS(name, head_dim, head_dim_v, stages, row_stages, queries) \
    SA_FWD_SM90_LAUNCHER(name, head_dim, head_dim_v, stages, row_stages, queries) \
    extern "C" sinkattn_status sa_decode_cuda_sm90_packed_##name( \
            const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) { \
        using Tiles = Shape<head_dim, head_dim_v, sa_decode_cuda_sm90_packed_##name##_tile_q, sa_decode_cuda_sm90_packed_##name##_tile_k, \
                stages, row_stages, queries>; \
        const auto &args = *static_cast<const sinkattn_decode_args *>(arguments); \
        SA_TRY(check_no_host_pages(args)); \
        return launch_cached<Tiles>(args, plan, context); \
    }

} // namespace sa::fwd_sm90
