// SPDX-License-Identifier: Apache-2.0
//
// Forward for windows that fit 160 keys on sm_90, head_dim 72 to 128, or 136 to 192 with values of at most 128 columns, with the bits of
// the general forward's rows.
//
//     key warp             K, V of a span, 16 keys at a time, through a ring ..
//     query warp           Q tile | Q tile | Q tile ..
//     checker warp         NaN and infinity in V; s_aux of the heads
//     3 math warpgroups    QK | softmax | PV | out                          each its own tiles
//
// A tile is 64 rows, whole tokens x the heads of a GQA group, against 160 keys, 10 steps of 16, from the step of the first key that its
// first token sees; 96 keys where the window is shorter. All of them are in registers at once (softmax.cuh). A block has an equal share of
// all tiles, side by side, which is a span or a few; neighbouring tiles share steps, so that a span loads each key once. The ring's first
// steps of K are loaded a second time behind its last ones, so that half a tile's keys are one operand wherever they begin. Out leaves
// from registers.
//
// Shared memory, 225 and 223 KiB: 20 or 12 steps of K and V, three tiles of Q. Registers: S 80, then P 40 and O 64, of 160.

#include "cuda/fwd_wide_window_sm90/loads.cuh"
#include "cuda/fwd_wide_window_sm90/smem.cuh"
#include "cuda/fwd_wide_window_sm90/softmax.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/sink.cuh"

namespace sa::fwd_wide_window_sm90 {

// Whether the tile's row is a row of the sequence.
template <class C> __device__ __forceinline__ bool exists(const Tile<C> &tile, const ThreadRow &row, const Problem &p) {
    return row.token < p.tokens && tile.span.first_token + tile.n() * p.tokens + row.token < tile.span.sequence.q_len;
}

// Adds the sink and writes the LSE; factor: what to multiply O by. Four lanes share two rows; the first two lanes write one LSE each.
template <class C>
__device__ __forceinline__ void finish_softmax(
        float (&factor)[2], const Softmax &rows, const sinkattn_fwd_args &args, const Tile<C> &tile, const Problem &p) {
    const float sums[2] = {quad_sum(rows.sum[0]), quad_sum(rows.sum[1])};
#pragma unroll
    for (int i = 0; i < 2; i++) factor[i] = RowEnd(rows.pivot[i], sums[i], tile.span.s_aux[ThreadRow(p, i).head]).factor();
    const bool second = threadIdx.x % 4 == 1;
    const ThreadRow row(p, second);
    if (threadIdx.x % 4 >= 2 || !exists(tile, row, p)) return;
    const float pivot = second ? rows.pivot[1] : rows.pivot[0], sum = second ? sums[1] : sums[0];
    const int64_t at = tile.span.lse + row.head * args.problem.q_len + tile.n() * p.tokens + row.token;
    static_cast<float *>(args.lse)[at] = RowEnd(pivot, sum, tile.span.s_aux[row.head]).lse();
    if (args.lse_raw) static_cast<float *>(args.lse_raw)[at] = raw_lse(pivot, sum);
}

// Adds to O the values that the checker warp zeroed, in the rows that see them.
template <class C>
__device__ __forceinline__ void add_hidden(
        float (&o)[C::kHeadDimV / 2], const sinkattn_fwd_args &args, const Tile<C> &tile, const Problem &p) {
    const Columns seen(tile, p);
    const int column = fragment_column();
#pragma unroll 1
    for (int j = min(seen.begin[0], seen.begin[1]); j < max(seen.end[0], seen.end[1]); j++) {
        const int64_t offset = offset_of(TensorKeys{}, tile.span.sequence, args.v, tile.step * kStepKeys + column + j, tile.span.kv_head);
        add_nonfinite<typename C::Element>(
                o, static_cast<const uint16_t *>(args.v.data) + offset, args.problem.head_dim, [&](int r) { return seen.sees(r, j); });
    }
}

// Writes O, rounded, from registers.
template <class C>
__device__ __forceinline__ void write_out(const float (&o)[C::kHeadDimV / 2], const float (&factor)[2], const sinkattn_fwd_args &args,
        const Tile<C> &tile, const Problem &p) {
    const PlannedSpan &span = tile.span;
    for (int i = 0; i < 2; i++) {
        const ThreadRow row(p, i);
        const int64_t at = sa_offset(&args.out, span.sequence.batch,
                span.sequence.q_begin + span.first_token + tile.n() * p.tokens + row.token, span.kv_head * p.group + row.head);
        auto *to = exists(tile, row, p) ? static_cast<uint16_t *>(args.out.data) + at : nullptr;
        write_row<typename C::Element>(to, o, i, factor[i], static_cast<int>(args.problem.head_dim));
    }
}

// O of the tile's rows and the factor that it still needs; the LSE is written. Calls scored() once Q is read.
template <class C, class Scored>
__device__ __forceinline__ void attend(float (&o)[C::kHeadDimV / 2], float (&factor)[2], Smem<C> &smem, const sinkattn_fwd_args &args,
        const Tile<C> &tile, const Problem &p, const Scored &scored) {
    constexpr int kHalf = 4 * C::kSteps;
    Softmax rows;
    float s[8 * C::kSteps];
    uint32_t weights[C::kSteps][4];
    begin_scores<C>(*reinterpret_cast<float (*)[kHalf]>(s), smem, tile, 0);
    begin_scores<C>(*reinterpret_cast<float (*)[kHalf]>(s + kHalf), smem, tile, C::kHalfSteps);
    const Columns seen(tile, p);
    const int cut = tile.cut();
    wgmma_wait<0>();
    pin(s);
    mask<C>(s, seen);
    find_pivots<C>(rows, s, cut, p.scale_log2);
    const bool large = weigh<C>(weights, s, rows, cut, p.scale_log2);
    if (__any_sync(0xffffffffu, bar_any<128>(kMathBarrier + static_cast<int>(thread_again() / 128),
                                        large))) { // a vote: ptxas takes the branch for uniform
        attend_by_regions<C>(o, rows, smem, tile, p);
        scored();
        finish_softmax(factor, rows, args, tile, p);
    } else {
        begin_values<C, true>(o, weights, smem, tile, 0);
        scored();
        finish_softmax(factor, rows, args, tile, p); // P V in flight
        wgmma_wait<0>();
        pin(o);
    }
}

template <class C> __device__ __forceinline__ void compute_tiles(Smem<C> &smem, const sinkattn_fwd_args &args, const Problem &p) {
    Ring<C::kQueries> tiles{static_cast<uint32_t>(warp_uniform(threadIdx.x / 128))}; // its next tile; they go to the warpgroups in turn
    for (Ring<kSpans> spans;; spans.n++) {
        smem.planned.wait(spans);
        const PlannedSpan &span = smem.spans[spans.stage()];
        if (!span.exists) return;
        const auto first_use = [&](int n) { return n < span.num_tiles ? span.tile_use(p, n) : span.end_use; };
        // Of the n-th tile's steps, the first that the warpgroup's previous tile did not have.
        const auto first_new = [&](int n) {
            const uint32_t first = first_use(n), after = span.tile_use(p, n - kWarpgroups) + C::kSteps;
            return n >= kWarpgroups && static_cast<int32_t>(after - first) > 0 ? after : first;
        };
        // Each step as soon as it is ready: the ring need not hold those from `begin` to `end` at once.
        const auto release_steps = [&](uint32_t begin, uint32_t ready, uint32_t end) {
#pragma unroll 1
            for (Ring<C::kRing> ring{begin}; ring.n != end; ring.n++) {
                if (static_cast<int32_t>(ring.n - ready) >= 0) smem.ready.wait(ring);
                if (thread_again() % 32 == 0) smem.empty.release(ring);
            }
        };
        release_steps(span.first_use, span.first_use, first_use(static_cast<int>(tiles.n - span.first_tile)));
        // In flight at the top: no wgmma.
        for (; static_cast<int32_t>(span.end_tile - tiles.n) > 0; tiles.n += kWarpgroups) {
            const Tile<C> tile(span, p, tiles);
            float o[C::kHeadDimV / 2], factor[2];
            const uint32_t end = span.tile_use(p, tile.n()) + C::kSteps;
#pragma unroll 1
            for (Ring<C::kRing> ring{first_new(tile.n())}; ring.n != end; ring.n++) smem.ready.wait(ring);
            smem.q_full.wait(tiles);
            attend<C>(o, factor, smem, args, tile, p, [&] {
                if (thread_again() % 32 == 0) smem.q_empty.release(tiles);
            });
            const int lane = static_cast<int>(thread_again() % 32);
            const bool nonfinite = lane < C::kSteps && smem.nonfinite[tile.stage(min(lane, C::kSteps - 1))];
            const bool hidden = __any_sync(0xffffffffu, nonfinite);
            release_steps(span.tile_use(p, tile.n()), span.tile_use(p, tile.n()) + C::kSteps, first_use(tile.n() + kWarpgroups));
            if (hidden) add_hidden<C>(o, args, tile, p);
            write_out<C>(o, factor, args, tile, p);
        }
        spans.n = span.number; // no register is free to keep it
        smem.span_empty.release(spans);
    }
}

template <class C>
__global__ __launch_bounds__(kThreads, 1) void wide_window_kernel(const __grid_constant__ sinkattn_fwd_args args,
        const __grid_constant__ Maps maps, const __grid_constant__ Problem p, unsigned *error_word) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<Smem<C> *>(shared);
    if (threadIdx.x == 0) {
        for (const CUtensorMap *map : {&maps.q, &maps.k, &maps.v}) tensor_map_prefetch(map);
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
            smem.q_empty[i].init(4);
        }
        barrier_init_fence();
    }
    // Rows of a tile of Q past its whole tokens are never loaded.
    const int first = p.tokens * p.group * kRowBytes;
    for (int piece = 0; piece < C::kQueries * C::kHalves; piece++)
        for (int at = first + static_cast<int>(threadIdx.x) * 16; at < C::kQueryHalf; at += kThreads * 16)
            *reinterpret_cast<uint4 *>(smem.queries[0] + piece * C::kQueryHalf + at) = uint4{};
    async_fence();
    if (blockIdx.x == 0) check_lengths(args, error_word);
    __syncthreads();
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp < kMathThreads / 32) {
        registers_up<kMathRegisters>();
        compute_tiles<C>(smem, args, p);
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

#define SA_FWD_WIDE_WINDOW_LAUNCHER(name, head_dim, head_dim_v, ring, queries) \
    extern "C" sinkattn_status sa_fwd_cuda_sm90_##name##_window( \
            const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) { \
        constexpr int kTileK = sa_fwd_cuda_sm90_##name##_window_tile_k, kRegionK = sa_fwd_cuda_sm90_##name##_tile_k, kShortK = 96; \
        static_assert(sa_fwd_cuda_sm90_##name##_window_tile_q == kTileRows, "rows of a wgmma"); \
        const auto &args = *static_cast<const sinkattn_fwd_args *>(arguments); \
        if (fits(args.problem, kShortK)) \
            return launch_dtype<Shape<head_dim, head_dim_v, kShortK, kRegionK, ring, queries>>(args, plan, context); \
        return launch_dtype<Shape<head_dim, head_dim_v, kTileK, kRegionK, ring, queries>>(args, plan, context); \
    }

SA_FWD_WIDE_WINDOW_LAUNCHER(d128, 128, 128, 20, 3)
SA_FWD_WIDE_WINDOW_LAUNCHER(d192_v128, 192, 128, 12, 3)

} // namespace sa::fwd_wide_window_sm90
