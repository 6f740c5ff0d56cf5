// SPDX-License-Identifier: Apache-2.0
//
// Forward for windows that fit a tile of keys on sm_90, head_dim up to 128, or 136 to 192 with values of at most 128 columns, with the bits
// of the general forward's rows.
//
//     key warp             K, V of a span, 16 keys at a time, through a ring ..
//     query warp           Q tile | Q tile | Q tile ..
//     checker warp         NaN and infinity in V; s_aux of the heads
//     3 math warpgroups    QK | softmax | PV | out                          each its own tiles
//
// A tile is 64 rows, whole tokens x the heads of a GQA group, against 160 or 176 keys, steps of 16, from the step of the first key that its
// first token sees; fewer keys where the window is shorter, without sink tokens. All scores are in registers at once (softmax.cuh). A block
// has an equal share of all tiles, side by side, which is a span or a few; neighbouring tiles share steps, so that a span loads each key
// once. The ring's first steps of K are loaded a second time behind its last ones, so that each part of a tile's keys is one operand
// wherever it begins.
//
// A tile's products are in two parts, of 5 steps, 8 at head_dim 64, and of the rest: the second part of S runs under the first's masks and
// maxima, the first part of P V under the second's exponentials. Up to head_dim 128 a warpgroup has two tiles of Q, and out leaves through
// the one that it has read, by bulk copies; for wider heads there is no room, and out leaves from registers.
//
// Up to 16 positional sink tokens, up to head_dim 128, are a step in front of the first part (softmax.cuh), which then ends before the
// second part of S begins.
//
// Shared memory: at head_dim 128 and (192, 128) 226 and 218 KiB, 14 or 12 steps of K and V, six or three tiles of Q. Registers at 128: S
// 80, then P 20, S 40 and O 64, of 160.

#include "cuda/fwd_wide_window_sm90/loads.cuh"
#include "cuda/fwd_wide_window_sm90/smem.cuh"
#include "cuda/fwd_wide_window_sm90/softmax.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/sink.cuh"

namespace sa::fwd_wide_window_sm90 {

// Adds the sink and writes the LSE; factor: what to multiply O by. Four lanes share two rows; the first two lanes write one LSE each.
template <class C>
__device__ __forceinline__ void finish_softmax(float (&factor)[2], const Softmax &softmax, const Smem<C> &smem,
        const sinkattn_fwd_args &args, const Tile<C> &tile, const Problem &p) {
    const unsigned thread = thread_again();
    const Row rows[2] = {smem.rows[warpgroup_row(thread % 128, 0)], smem.rows[warpgroup_row(thread % 128, 1)]};
    const float sums[2] = {quad_sum(softmax.sum[0]), quad_sum(softmax.sum[1])};
    const RowEnd ends[2] = {RowEnd(softmax.pivot[0], sums[0], tile.span.s_aux[rows[0].head]),
            RowEnd(softmax.pivot[1], sums[1], tile.span.s_aux[rows[1].head])};
    for (int i = 0; i < 2; i++) factor[i] = rows[i].token == kNoToken ? 0.0f : ends[i].factor(); // Q of no token stays 0 (stage_out)
    const bool second = thread % 4 == 1;
    const int token = second ? rows[1].token : rows[0].token;
    if (thread % 4 >= 2 || token >= tile.span.num_tokens - tile.n * p.tokens) return;
    const int64_t at = tile.span.lse + tile.n * p.tokens + (second ? rows[1].lse : rows[0].lse);
    RowEnd end = ends[0];
    if (second) end = ends[1];
    static_cast<float *>(args.lse)[at] = end.lse();
    if (args.lse_raw)
        static_cast<float *>(args.lse_raw)[at] = raw_lse(second ? softmax.pivot[1] : softmax.pivot[0], second ? sums[1] : sums[0]);
}

// Adds to O the values that the checker warp zeroed, in the rows that see them.
template <class C>
__device__ __forceinline__ void add_hidden(
        float (&o)[C::kHeadDimV / 2], const sinkattn_fwd_args &args, const Tile<C> &tile, const Problem &p) {
    const Columns<C> seen(tile, p);
    const int column = fragment_column();
    const auto add = [&](int key, const auto &sees) {
        const int64_t offset = offset_of(TensorKeys{}, tile.span.sequence, args.v, key, tile.span.kv_head);
        add_nonfinite<typename C::Element>(o, static_cast<const uint16_t *>(args.v.data) + offset, args.problem.head_dim, sees);
    };
#pragma unroll 1
    for (int j = C::kSinkSteps && seen.sink_end > -column ? -column : min(seen.begin[0], seen.begin[1]); j < max(seen.end[0], seen.end[1]);
            j++)
        add(tile.step * kStepKeys + column + j, [&](int r) { return seen.sees(r, j); });
    if constexpr (C::kSinkSteps > 0)
#pragma unroll 1
        for (int key = 0; tile.is_behind_sinks() && key < p.num_sinks; key++) add(key, [](int) { return true; });
}

// Where the thread's rows of O go: from its columns on, or NULL. A lane of four has the first or the last 4 of 8 columns of every other 8.
template <class C>
__device__ __forceinline__ void find_out(
        uint16_t *(&to)[2], const Smem<C> &smem, const sinkattn_fwd_args &args, const Tile<C> &tile, const Problem &p) {
    const unsigned thread = thread_again(), lane = thread % 4;
    for (int i = 0; i < 2; i++) {
        const Row row = smem.rows[warpgroup_row(thread % 128, i)];
        const int64_t at = tile.span.out + (tile.n * p.tokens + row.token) * args.out.row_stride + row.head * args.out.head_stride;
        to[i] = static_cast<uint16_t *>(args.out.data) + at + 8 * (lane % 2) + 4 * (lane / 2);
        if (row.token >= tile.span.num_tokens - tile.n * p.tokens) to[i] = nullptr;
    }
}

// Writes O, rounded, from registers, 16 columns of a row at a time.
template <class C>
__device__ __forceinline__ void write_out(
        uint16_t *const (&to)[2], const float (&o)[C::kHeadDimV / 2], const float (&factor)[2], int head_dim) {
    const bool odd = thread_again() % 2;
    const int columns = head_dim - (odd ? 8 : 0);
#pragma unroll
    for (int n = 0; n < C::kHeadDimV / 8; n += 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float *x = o + 4 * n + 2 * i;
            const uint32_t first = pack_halves<typename C::Element>(x[0] * factor[i], x[1] * factor[i]),
                           second = pack_halves<typename C::Element>(x[4] * factor[i], x[5] * factor[i]),
                           other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
            if (to[i] && 8 * n < columns)
                *reinterpret_cast<uint2 *>(to[i] + 8 * n) = odd ? make_uint2(other, second) : make_uint2(first, other);
        }
    }
}

// Issues P V of the tile, and begins its rows' softmax; calls issued() while Q K is in flight. True if one pivot a row does not do for the
// thread: weights are too large for it, or a row has none yet. In flight at the end: P V.
template <class C, class Issued>
__device__ __forceinline__ bool attend(
        float (&o)[C::kHeadDimV / 2], Softmax &rows, Smem<C> &smem, const Tile<C> &tile, const Problem &p, const Issued &issued) {
    using Element = typename C::Element;
    constexpr int kFirst = C::kFirstSteps, kSecond = C::kSecondSteps;
    float s[8 * C::kSteps];
    auto &first = *reinterpret_cast<float (*)[8 * kFirst]>(s);
    auto &second = *reinterpret_cast<float (*)[8 * kSecond]>(s + 8 * kFirst);
    constexpr bool kHasSinks = C::kSinkSteps > 0; // then registers hold one part of S at a time
    float sinks[8], of_sinks[2];
    uint32_t sink_weights[4];
    Sums sums;
    if constexpr (kHasSinks) begin_sink_scores(sinks, smem, tile);
    begin_scores<C>(first, smem, tile, 0);
    if constexpr (!kHasSinks) begin_scores<C>(second, smem, tile, kFirst);
    issued();
    const Columns<C> seen(tile, p);
    const int cut = tile.cut();
    wgmma_wait<kHasSinks ? 0 : 1>(); // in flight: the second part of S, if it has begun
    pin(first);
    mask_begin<0, kFirst, 0>(first, seen);
    mask_end<kFirst - 1, 0, 0>(first, seen);
    first_maxima<C>(rows.pivot, s, cut, p.scale_log2);
    bool large = false;
    if constexpr (kHasSinks) {
        pin(sinks);
        mask_sinks(of_sinks, sinks, tile.is_behind_sinks(), p);
        for (int r = 0; r < 2; r++) {
            if (!tile.has_sink_region())
                rows.pivot[r] = fmaxf(rows.pivot[r], of_sinks[r]);
            else if (of_sinks[r] != -INFINITY)
                rows.pivot[r] = of_sinks[r];
        }
        for (int r = 0; r < 2; r++) large |= rows.pivot[r] == -INFINITY && seen.end[r] > -fragment_column(); // it sees a key
    } else {
        wgmma_wait<0>();
        pin(second);
        if (any_without_pivot(rows)) {
            mask_end<C::kSteps - 1, kFirst, kFirst>(second, seen);
            find_later_pivots<C>(rows, s, cut, p.scale_log2);
        }
    }
    uint32_t first_weights[kFirst][4], second_weights[kSecond][4];
    if constexpr (kHasSinks) weigh_sinks(sink_weights, sinks, sums, rows, tile, p.scale_log2);
    weigh<C, 0>(first_weights, s, sums, rows, cut, p.scale_log2);
    large |= sums.end_region<Element>(rows.sum, 0) && tile.has_sink_region();
    if constexpr (kHasSinks) begin_sink_values<C, true>(o, sink_weights, smem);
    begin_values<C, !kHasSinks>(o, first_weights, smem, tile, 0);
    if constexpr (kHasSinks) {
        wgmma_wait<0>();
        pin(o);
        begin_scores<C>(second, smem, tile, kFirst);
        wgmma_wait<0>();
        pin(second);
    }
    // The first part of P V in flight, or complete. ptxas moves no weights of the second part in front of it, across this mask's branches.
    mask_end<C::kSteps - 1, kFirst, kFirst>(second, seen);
    pin(rows.pivot); // so that no register keeps the pivots as they are subtracted
    weigh<C, kFirst>(second_weights, s, sums, rows, cut, p.scale_log2);
    begin_values<C, false>(o, second_weights, smem, tile, kFirst);
    const bool second_large = sums.end_region<Element>(rows.sum, 1), third_large = sums.end_region<Element>(rows.sum, 2);
    return large || second_large || third_large;
}

// Whether x is true in any thread of the warpgroup, all of which are past the products of Q and K. A vote: ptxas takes it for uniform.
template <class C> __device__ __forceinline__ bool vote(const Tile<C> &tile, bool x) {
    return __any_sync(0xffffffffu, bar_any<128>(kMathBarrier + static_cast<int>(tile.queries), x));
}

// Writes the tile's rows of O through its tile of Q; from registers, where rows of the next sequence follow.
template <class C>
__device__ __forceinline__ void stage_out(const float (&o)[C::kHeadDimV / 2], const float (&factor)[2], Smem<C> &smem,
        const sinkattn_fwd_args &args, const Maps &maps, const Tile<C> &tile, const Problem &p) {
    const PlannedSpan &span = tile.span;
    if (!p.batch_tiles && (tile.n + 1) * p.tokens > span.num_tokens) {
        uint16_t *to[2];
        find_out(to, smem, args, tile, p);
        write_out<C>(to, o, factor, static_cast<int>(args.problem.head_dim));
        return;
    }
    unsigned char *const from = smem.queries[tile.queries];
    const unsigned thread = thread_again();
    store_accumulator<typename C::Element, C::kQueryHalf>(
            shared_address(from) + swizzled(store_row(thread), store_chunk(thread)), o, [&](int i) { return factor[i]; });
    async_fence();
    bar_sync<128>(kMathBarrier + static_cast<int>(tile.queries));
    if (thread % 128) return;
    const int head = static_cast<int>(span.kv_head * p.group), batch = static_cast<int>(span.sequence.batch),
              row = static_cast<int>(span.sequence.q_begin) + span.first_token + tile.n * p.tokens;
    for (int half = 0; half < C::kHalvesV; half++) tensor_store(&maps.out, from + half * C::kQueryHalf, 64 * half, head, row, batch);
    store_commit();
}

// The n-th tile: waits for its Q and steps, releases Q and the steps before the warpgroup's next tile, and writes its rows.
template <class C>
__device__ __forceinline__ void compute_tile(Smem<C> &smem, const sinkattn_fwd_args &args, const Maps &maps, const Tile<C> &tile,
        Ring<C::kQueries / kWarpgroups> round, const Problem &p) {
    Softmax rows;
    float o[C::kHeadDimV / 2], factor[2];
    uint16_t *to[2];
    smem.ready.wait(Ring<C::kRing>{tile.use().n + C::kSteps - 1}); // and so are the steps before
    smem.q_full[tile.queries].wait(round);
    bool large = attend<C>(o, rows, smem, tile, p, [&] {
        if (!C::kStaged || thread_again() % 128 || round.n == 0) return;
        store_wait_read<0>(); // of the previous tile
        smem.q_empty[tile.queries >= kWarpgroups ? tile.queries - kWarpgroups : tile.queries + kWarpgroups].arrive();
    });
    // P V in flight.
    const unsigned thread = thread_again() % 128;
    const int lane = static_cast<int>(thread % 32);
    if constexpr (!C::kStaged) {
        large = vote(tile, large);
        if (!large && thread == 0) smem.q_empty[tile.queries].arrive();
    }
    finish_softmax(factor, rows, smem, args, tile, p);
    if constexpr (!C::kStaged) find_out(to, smem, args, tile, p);
    const bool hidden = __any_sync(0xffffffffu, lane < C::kSteps && smem.nonfinite[tile.stage(min(lane, C::kSteps - 1))]) ||
                        (tile.is_behind_sinks() && smem.nonfinite[C::kRing + C::kSinkSteps - 1]);
    // Computed here where registers are free.
    const auto releases = [&] { return lane < min(static_cast<int>(tile.next_use(p) - tile.use().n), C::kSteps); };
    const bool releases_lane = C::kStaged && releases();
    if constexpr (C::kStaged) large = vote(tile, large);
    wgmma_wait<0>();
    pin(o);
    if (large) {
        attend_by_regions<C>(o, rows, smem, tile, p);
        vote(tile, false);
        if (!C::kStaged && thread == 0) smem.q_empty[tile.queries].arrive();
        finish_softmax(factor, rows, smem, args, tile, p);
    }
    if (C::kStaged ? releases_lane : releases()) smem.empty[tile.stage(lane)].arrive();
    if (hidden) add_hidden<C>(o, args, tile, p);
    if constexpr (C::kStaged)
        stage_out<C>(o, factor, smem, args, maps, tile, p);
    else
        write_out<C>(to, o, factor, static_cast<int>(args.problem.head_dim));
}

template <class C>
__device__ __forceinline__ void compute_tiles(Smem<C> &smem, const sinkattn_fwd_args &args, const Maps &maps, const Problem &p) {
    const int warpgroup = warp_uniform(threadIdx.x / 128);
    Ring<C::kQueries / kWarpgroups> round; // the warpgroup's uses of its tiles of Q; tiles go to the warpgroups in turn
    for (Ring<kSpans> spans;; spans.n++) {
        smem.planned.wait(spans);
        const PlannedSpan &span = smem.spans[spans.stage()];
        if (!span.exists) break;
        // Each step as soon as it is ready: the ring need not hold them all at once.
        const auto release_steps = [&](uint32_t begin, uint32_t end) {
#pragma unroll 1
            for (Ring<C::kRing> ring{begin}; static_cast<int32_t>(end - ring.n) > 0; ring.n++) {
                smem.ready.wait(ring);
                if (thread_again() % 32 == 0) smem.empty.release(ring);
            }
        };
        int n = static_cast<int>(warpgroup + kWarpgroups * round.n - span.first_tile), first = span.first_key + n * p.tokens;
        release_steps(span.first_use, n < span.num_tiles ? span.key_use + step_of(first) : span.end_use);
        // In flight at the top: no wgmma.
        for (; n < span.num_tiles; n += kWarpgroups, first += kWarpgroups * p.tokens, round.n++) {
            const Tile<C> tile(span, n, first, pinned(warpgroup) + kWarpgroups * round.stage());
            compute_tile<C>(smem, args, maps, tile, round, p);
            release_steps(tile.use().n + C::kSteps, tile.next_use(p));
        }
        spans.n = span.number; // no register is free to keep it
        smem.span_empty.release(spans);
    }
    if (threadIdx.x % 128 == 0) store_wait();
}

template <class C>
__global__ __launch_bounds__(kThreads, 1) void wide_window_kernel(const __grid_constant__ sinkattn_fwd_args args,
        const __grid_constant__ Maps maps, const __grid_constant__ Problem p, unsigned *error_word) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<Smem<C> *>(shared);
    if (threadIdx.x == 0) {
        for (const CUtensorMap *map : {&maps.q, &maps.k, &maps.v, &maps.out}) tensor_map_prefetch(map);
        for (int i = 0; i < kSpans; i++) {
            smem.planned[i].init(1);
            smem.span_empty[i].init(kMathThreads + 64);
        }
        for (int i = 0; i < C::kRing; i++) {
            smem.full[i].init(1);
            smem.ready[i].init(32);
            smem.empty[i].init(4 * kWarpgroups);
        }
        for (int i = 0; i < C::kQueries; i++) {
            smem.q_full[i].init(1);
            smem.q_empty[i].init(1);
        }
        barrier_init_fence();
    }
    // Rows of a tile of Q past its whole tokens are never loaded.
    zero_rows<C::kQueries * C::kHalves, kTileRows, kThreads>(smem.queries[0], p.tokens * p.group, kTileRows);
    if constexpr (C::kSinkSteps > 0)
        zero_rows<C::kHalvesV, kStepKeys, kThreads>(smem.sink_values, 0, kStepKeys); // no NaN meets a weight of 0
    async_fence();
    if (threadIdx.x < kTileRows) {
        const int row = static_cast<int>(threadIdx.x), token = row / p.group, head = row % p.group;
        smem.rows[row] = {token < p.tokens ? token : kNoToken, head, head * args.problem.q_len + token};
    }
    if (blockIdx.x == 0) check_lengths(args, error_word);
    __syncthreads();
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp < kMathThreads / 32) {
        registers_up<kMathRegisters>();
        compute_tiles<C>(smem, args, maps, p);
        return;
    }
    registers_down<kLoaderRegisters>();
    if (warp == kMathThreads / 32) load_keys<C>(smem, args, maps, p);
    if (warp == kMathThreads / 32 + 1) load_queries<C>(smem, maps, p);
    if (warp == kMathThreads / 32 + 2) check_values<C>(smem, args, p);
#else
    __trap();
#endif
}

template <class C> sinkattn_status launch(const sinkattn_fwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    static_assert(sizeof(Smem<C>) <= 227 * 1024, "what a block of compute capability 9.0 may use");
    const sinkattn_problem &problem = args.problem;
    Problem p;
    p.group = static_cast<int>(problem.num_q_heads / problem.num_kv_heads);
    p.tokens = kTileRows / p.group;
    p.group_inverse = (65536 + p.group - 1) / p.group;
    p.window = sa_band_of(&problem.mask, C::kSteps * kStepKeys, C::kSteps * kStepKeys);
    p.last_key = static_cast<int>(sa_window_size(&p.window)) - 1;
    p.num_sinks = static_cast<int>(problem.mask.num_sink_tokens);
    p.scale_log2 = static_cast<float>(sa_softmax_scale(&problem)) * kLog2e;
    const int64_t num_tiles = num_row_tiles(problem, p.tokens * p.group), num_items = num_tiles * problem.num_kv_heads;
    if (num_items > INT32_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld tiles of rows; a launch holds at most 2^31", static_cast<long long>(num_items));
    p.num_tiles = static_cast<unsigned>(num_tiles);
    p.num_items = static_cast<unsigned>(num_items);
    p.batch_tiles = problem.packed ? 0 : static_cast<unsigned>(num_tiles / problem.batch);
    unsigned *error_word;
    Maps maps;
    SA_TRY(sa_cuda_error_word(&error_word));
    // Of the two widths a kernel reads that of values alone, under both names.
    sinkattn_fwd_args values = args;
    values.problem.head_dim = values.problem.head_dim_v = static_cast<int32_t>(sa_head_dim_v(&problem));
    SA_TRY(map_rows(&maps.q, problem, args.q, p.tokens, p.group, "q"));
    SA_TRY(map_keys(&maps.k, problem, args.k, kStepKeys, "k"));
    SA_TRY(map_keys(&maps.v, values.problem, args.v, kStepKeys, "v"));
    SA_TRY(map_rows(&maps.out, values.problem, args.out, p.tokens, p.group, "out"));
    const auto blocks = static_cast<unsigned>(sa_min(num_items, plan.workers));
    return launch_blocks<wide_window_kernel<C>>(
            "sa_fwd_cuda_sm90_wide_window", blocks, kThreads, sizeof(Smem<C>), context.stream, values, maps, p, error_word);
}

template <class Shape>
sinkattn_status launch_dtype(const sinkattn_fwd_args &args, const sinkattn_plan *plan, const sinkattn_context *context) {
    if (args.problem.dtype == SINKATTN_BF16) return launch<Config<Bf16, Shape>>(args, *plan, *context);
    return launch<Config<Fp16, Shape>>(args, *plan, *context);
}

// Whether a tile's rows see at most this many keys from a multiple of 16 on.
static bool fits(const sinkattn_problem &problem, int64_t keys) {
    const int64_t tokens = kTileRows / (problem.num_q_heads / problem.num_kv_heads);
    return sa_window_keys(&problem.mask) + tokens - 1 + kStepKeys - 1 <= keys;
}

// kShortK: keys of a smaller tile, for shorter windows. A sink step takes the place of a step of the ring.
template <int kHeadDim, int kHeadDimV, int kTileK, int kShortK, int kRegionK, int kRing, int kQueries>
sinkattn_status launch_shape(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_fwd_args *>(arguments);
    if constexpr (kHeadDim <= 128)
        if (args.problem.mask.num_sink_tokens)
            return launch_dtype<Shape<kHeadDim, kHeadDimV, kTileK, kRegionK, kRing - 1, kQueries, 1>>(args, plan, context);
    if (fits(args.problem, kShortK))
        return launch_dtype<Shape<kHeadDim, kHeadDimV, kShortK, kRegionK, kRing, kQueries, 0>>(args, plan, context);
    return launch_dtype<Shape<kHeadDim, kHeadDimV, kTileK, kRegionK, kRing, kQueries, 0>>(args, plan, context);
}

#define SA_FWD_WIDE_WINDOW_LAUNCHER(name, head_dim, head_dim_v, short_k, ring, queries) \
    extern "C" sinkattn_status sa_fwd_cuda_sm90_##name##_window( \
            const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) { \
        constexpr int kTileK = sa_fwd_cuda_sm90_##name##_window_tile_k, kRegionK = sa_fwd_cuda_sm90_##name##_tile_k; \
        static_assert(sa_fwd_cuda_sm90_##name##_window_tile_q == kTileRows, "rows of a wgmma"); \
        return launch_shape<head_dim, head_dim_v, kTileK, short_k, kRegionK, ring, queries>(arguments, plan, context); \
    }

SA_FWD_WIDE_WINDOW_LAUNCHER(d64, 64, 64, 160, 24, 6)
SA_FWD_WIDE_WINDOW_LAUNCHER(d128, 128, 128, 96, 14, 6)
SA_FWD_WIDE_WINDOW_LAUNCHER(d192_v128, 192, 128, 96, 12, 3)

} // namespace sa::fwd_wide_window_sm90
