// SPDX-License-Identifier: Apache-2.0
//
// Forward for windows that fit one key tile, head_dim up to 64, on sm_90.
//
//     key warp             K, V of a span             K, V of the next span ..
//     query warp           Q tile | Q tile | Q tile ..
//     checker warp         NaN and infinity in V; s_aux of the heads
//     4 math warpgroups    QK | softmax | PV | out                          each its own tiles
//
// A tile is 64 rows, tokens x the heads of a GQA group, against the 144 keys from the first key of its first token's window on; a wgmma
// operand may start at any row of a swizzled tile. All keys of a row are in registers at once, so nothing is rescaled. A block computes
// spans of at most 96 tokens: K and V of a span and of its window, at most 240 keys, are loaded once. Tiles lie at multiples of their
// tokens counted from position 0, so a row's bits do not depend on where the call begins.
//
// Up to 16 positional sink tokens come first: their scores before the window's in S, their k16 step before the window's in PV. A key that
// counts as a sink token is masked in the window.
//
// Shared memory, 217 KiB: two stages of K and V, 120 KiB; twelve buffers of Q, then out, 96 KiB. Registers: S 72, then P 36 and O
// 32, of 104; a block of 640 threads begins with 96 each, and setmaxnreg moves 32 of each loader's to the math. With sink tokens 8 KiB
// more; S of 8 of them and of 136 keys is 72 too, else three math warpgroups have 144 registers.

#include "cuda/fwd_window_sm90/loads.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/sink.cuh"
#include "cuda/tile/wgmma.cuh"

namespace sa::fwd_window_sm90 {
namespace {

struct Tile {
    const Span &span;
    const float *s_aux;    // of the GQA group's heads
    int first;             // the tile's first token, counted from the span's; as many keys lie before the tile's first key
    unsigned char *buffer; // of Q, then of out
};

// The i-th of a thread's two rows of an accumulator, its token and head in the tile.
struct ThreadRow {
    int row, token, head;

    __device__ __forceinline__ ThreadRow(const Problem &p, int i) {
        const unsigned thread = thread_again() % 128;
        row = warpgroup_row(thread, i);
        token = row >> p.group_log2;
        head = row & (p.group - 1);
    }
};

// Columns of the tile that the thread's two rows see: their windows, clipped to the sequence.
struct Columns {
    int begin[2], end[2];
    bool edge; // columns 16 to 119 may be hidden too

    __device__ __forceinline__ Columns(const Tile &tile, const Problem &p) {
        const int low = min(max(tile.span.key_begin - tile.first, 0), kKeys), high = min(max(tile.span.key_end - tile.first, 0), kKeys);
        edge = low > 0 || high < kKeys || p.tile_tokens > 16 || p.last_key < 119;
        for (int i = 0; i < 2; i++) {
            const int token = ThreadRow(p, i).token;
            begin[i] = max(token, low);
            end[i] = min(token + p.last_key + 1, high);
        }
    }
};

// The first positional sink token that the thread's i-th row does not see.
__device__ __forceinline__ int sink_end(const Tile &tile, const Problem &p, int i) {
    const int last_key = tile.span.first_key + tile.first + ThreadRow(p, i).token + p.last_key;
    return min(num_sink_keys(tile.span.sequence, p), last_key + 1);
}

struct Softmax {
    float pivot[2], sum[2]; // pivot in log2 units
};

// S = Q K^T by instructions of 80 and of the other keys: one of 144 asks for 98 registers, and ptxas plans 96 for wgmma. The scores of
// sink tokens come first.
template <class C> __device__ __forceinline__ void qk_product(float (&s)[C::kScores], uint32_t q, uint32_t k, uint32_t sink_k) {
    using Element = typename C::Element;
    constexpr int kSecond = C::kWindowScores - 40;
    float *window = s + C::kSinkScores;
    float (&first)[40] = *reinterpret_cast<float (*)[40]>(window), (&second)[kSecond] = *reinterpret_cast<float (*)[kSecond]>(window + 40);
    const uint64_t left = operand(q, 0), right = operand(k, 0);
    wgmma_fence();
    if constexpr (C::kHasSinkTokens) {
        float (&sinks)[C::kSinkScores] = *reinterpret_cast<float (*)[C::kSinkScores]>(s);
#pragma unroll
        for (int step = 0; step < 4; step++)
            wgmma_shared<Element>(sinks, operand_at(left, 32 * step), operand_at(operand(sink_k, 0), 32 * step), step > 0);
    }
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma_shared<Element>(first, operand_at(left, 32 * step), operand_at(right, 32 * step), step > 0);
#pragma unroll
    for (int step = 0; step < 4; step++)
        wgmma_shared<Element>(second, operand_at(left, 32 * step), operand_at(right, 80 * kRowBytes + 32 * step), step > 0);
    wgmma_commit();
}

// Sets scores of hidden sink tokens to -inf.
template <class C> __device__ __forceinline__ void mask_sinks(float (&s)[C::kScores], const Tile &tile, const Problem &p) {
    const int column = fragment_column(), end[2] = {sink_end(tile, p, 0) - column, sink_end(tile, p, 1) - column};
#pragma unroll
    for (int i = 0; i < C::kSinkScores; i++)
        if (element_column(i) >= end[element_row(i)]) s[i] = -INFINITY;
}

// Sets scores of hidden keys of the window to -inf. Without seen.edge, only the first 16 columns and those from 120 on may be hidden.
template <class C> __device__ __forceinline__ void mask(float (&scores)[C::kScores], const Columns &seen, const Problem &p) {
    constexpr int kEights = C::kWindowScores / 4; // of keys
    float *s = scores + C::kSinkScores;
    const int column = fragment_column();
    const int begin[2] = {seen.begin[0] - column, seen.begin[1] - column}, end[2] = {seen.end[0] - column, seen.end[1] - column};
    const auto hide_first = [&](int n) {
#pragma unroll
        for (int i = 4 * n; i < 4 * n + 4; i++)
            if (element_column(i) < begin[element_row(i)]) s[i] = -INFINITY;
    };
    const auto hide_last = [&](int n) {
#pragma unroll
        for (int i = 4 * n; i < 4 * n + 4; i++)
            if (element_column(i) >= end[element_row(i)]) s[i] = -INFINITY;
    };
    if (seen.edge) {
#pragma unroll
        for (int n = 0; n < kEights; n++) {
            hide_first(n);
            hide_last(n);
        }
        return;
    }
    hide_first(0);
    if (p.tile_tokens > 8) hide_first(1);
    if (p.last_key < 127) hide_last(15);
    hide_last(16);
    if (kEights > 17) hide_last(17);
}

// Weights exp2(s - pivot), rounded and packed as the left operand of PV; sums over this thread's columns.
template <class C>
__device__ __forceinline__ Softmax softmax(uint32_t (&weights)[C::kSteps][4], const float (&s)[C::kScores], const Problem &p) {
    Softmax rows;
    float top[2] = {-INFINITY, -INFINITY}, from[2];
#pragma unroll
    for (int n = 0; n < C::kScores / 4; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) top[i] = fmaxf(top[i], fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rows.pivot[i] = quad_max(top[i]) * p.scale_log2;
        from[i] = rows.pivot[i] == -INFINITY ? 0.0f : rows.pivot[i];
        rows.sum[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 8 * C::kSteps; i += 2) { // of whole steps: keys that have no scores weigh nothing
        const int window = i - 8 * C::kSinkSteps, at = window < 0 ? i : C::kSinkScores + window, r = element_row(i);
        uint32_t &weight = weights[i / 8][i / 2 % 4];
        if (at >= (window < 0 ? C::kSinkScores : C::kScores)) {
            weight = 0;
            continue;
        }
        const float x = exp2_approx(fmaf(s[at], p.scale_log2, -from[r])), y = exp2_approx(fmaf(s[at + 1], p.scale_log2, -from[r]));
        rows.sum[r] += x + y;
        weight = pack_halves<typename C::Element>(x, y);
    }
    return rows;
}

// Adds the sink and writes the LSE; factor: what to multiply O by. Four lanes share two rows; the first two lanes write one LSE each.
__device__ __forceinline__ void finish_softmax(
        float (&factor)[2], Softmax &rows, const sinkattn_fwd_args &args, const Tile &tile, const Problem &p) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rows.sum[i] = quad_sum(rows.sum[i]);
        factor[i] = RowEnd(rows.pivot[i], rows.sum[i], tile.s_aux[ThreadRow(p, i).head]).factor();
    }
    const bool second = threadIdx.x % 4 == 1;
    const ThreadRow row(p, second);
    const int token = tile.first + row.token;
    if (threadIdx.x % 4 >= 2 || token < tile.span.token_begin || token >= tile.span.token_end) return;
    const float pivot = second ? rows.pivot[1] : rows.pivot[0], sum = second ? rows.sum[1] : rows.sum[0];
    const int64_t at = tile.span.lse + row.head * args.problem.q_len + token;
    static_cast<float *>(args.lse)[at] = RowEnd(pivot, sum, tile.s_aux[row.head]).lse();
    if (args.lse_raw) static_cast<float *>(args.lse_raw)[at] = raw_lse(pivot, sum);
}

// The sink tokens' step comes first.
template <class C>
__device__ __forceinline__ void pv_product(float (&o)[32], const uint32_t (&weights)[C::kSteps][4], uint32_t v, uint32_t sink_v) {
    using Element = typename C::Element;
    const uint64_t right = operand(v, kKeyBytes);
    wgmma_fence();
    if constexpr (C::kHasSinkTokens) wgmma_registers<Element>(o, weights[0], operand(sink_v, kSinkBytes), false);
#pragma unroll
    for (int step = C::kSinkSteps; step < C::kSteps; step++)
        wgmma_registers<Element>(o, weights[step], operand_at(right, (step - C::kSinkSteps) * 16 * kRowBytes), step > 0);
    wgmma_commit();
}

// Adds to O the values that the checker warp zeroed, in the rows that see them.
template <class C>
__device__ __forceinline__ void add_hidden(
        float (&o)[32], const sinkattn_fwd_args &args, const typename C::Keys &keys, const Tile &tile, const Problem &p) {
    const auto add = [&](sa_position_t key, const auto &sees) {
        const int64_t offset = offset_of(keys, tile.span.sequence, args.v, key, tile.span.kv_head);
        if (C::Keys::kCached && offset < 0) return;
        add_nonfinite<typename C::Element>(o, static_cast<const uint16_t *>(args.v.data) + offset, args.problem.head_dim, sees);
    };
    const sa_position_t first_key = tile.span.first_key + tile.first;
    const Columns seen(tile, p);
#pragma unroll 1
    for (int j = min(seen.begin[0], seen.begin[1]); j < max(seen.end[0], seen.end[1]); j++)
        add(first_key + j, [&](int i) { return j >= seen.begin[i] && j < seen.end[i]; });
    if (!C::kHasSinkTokens) return;
    const int end[2] = {sink_end(tile, p, 0), sink_end(tile, p, 1)};
#pragma unroll 1
    for (int j = 0; j < max(end[0], end[1]); j++) add(j, [&](int i) { return j < end[i]; });
}

// Writes this sequence's rows by the threads, where a copy would overwrite rows of another.
__device__ __forceinline__ void write_rows(const sinkattn_fwd_args &args, const Tile &tile, int64_t token, int group) {
    const Span &span = tile.span;
    auto *out = static_cast<uint16_t *>(args.out.data);
    for (int x = threadIdx.x % 128; x < kTileRows * 8; x += 128) {
        const int row = x / 8, chunk = x % 8;
        const int64_t i = token + row / group;
        if (i < 0 || i >= span.sequence.q_len || chunk * 8 >= args.problem.head_dim) continue;
        const int64_t at = sa_offset(&args.out, span.sequence.batch, span.sequence.q_begin + i, span.kv_head * group + row % group);
        auto *to = reinterpret_cast<uint4 *>(out + at + chunk * 8);
        *to = *reinterpret_cast<const uint4 *>(tile.buffer + swizzled(row, chunk));
    }
}

// Writes the buffer to out. Releases the previous tile's buffer, once its copy and the threads have read it.
__device__ __forceinline__ void write_tile(Smem &smem, Ring<kTileStages> tiles, const sinkattn_fwd_args &args, const Maps &maps,
        const Tile &tile, const Problem &p, int warpgroup) {
    const Span &span = tile.span;
    const bool whole = span.token_begin <= tile.first && tile.first + p.tile_tokens <= span.token_end;
    const sa_position_t token = span.first_token + tile.first;
    async_fence();
    bar_sync<128>(kMathBarrier + warpgroup);
    if (!whole) write_rows(args, tile, token, p.group);
    if (threadIdx.x % 128) return;
    if (whole)
        tensor_store(&maps.out, tile.buffer, 0, static_cast<int>(span.kv_head * p.group), static_cast<int>(span.sequence.q_begin + token),
                static_cast<int>(span.sequence.batch));
    store_commit();
    store_wait_read<1>();
    if (tiles.n) smem.q_empty[warpgroup].release({tiles.n - 1});
}

template <class C>
__device__ __forceinline__ void compute_tiles(
        typename C::Smem &smem, const sinkattn_fwd_args &args, const typename C::Keys &keys, const Maps &maps, const Problem &p) {
    using Element = typename C::Element;
    const int warpgroup = warp_uniform(threadIdx.x / 128);
    int n = warpgroup; // this warpgroup's next tile of the span; tiles go to the warpgroups in turn
    Ring<kTileStages> tiles;
    for (Ring<kStages> stages;; stages.n++) {
        const uint32_t stage = stages.stage();
        smem.kv_full.wait(stages);
        const Span &span = smem.spans[stage];
        if (!span.exists) break;
        // In flight at the top: no wgmma; the copy of the previous tile's out may still read its buffer.
        for (; n < span.num_tiles; n += C::kWarpgroups, tiles.n++) {
            const Tile tile{span, smem.s_aux[stage], (span.first_tile + n) * p.tile_tokens, smem.tiles[warpgroup][tiles.stage()]};
            const uint32_t first_row = (rows_before_span(keys, span) + tile.first) * kRowBytes;
            float s[C::kScores], o[32], factor[2];
            uint32_t weights[C::kSteps][4], sink_k = 0, sink_v = 0;
            if constexpr (C::kHasSinkTokens) {
                sink_k = shared_address(smem.sink_keys[stage]);
                sink_v = shared_address(smem.sink_values[stage]);
            }
            smem.q_full[warpgroup].wait(tiles);
            qk_product<C>(s, shared_address(tile.buffer), shared_address(smem.keys[stage]) + first_row, sink_k);
            const Columns seen(tile, p);
            smem.kv_ready.wait(stages);
            wgmma_wait<0>();
            pin(s);
            mask_sinks<C>(s, tile, p);
            mask<C>(s, seen, p);
            Softmax rows = softmax<C>(weights, s, p);
            pv_product<C>(o, weights, shared_address(smem.values[stage]) + first_row, sink_v);
            finish_softmax(factor, rows, args, tile, p); // PV in flight
            wgmma_wait<0>();
            pin(o);
            if (smem.nonfinite[stage]) add_hidden<C>(o, args, keys, tile, p);
            store_accumulator<Element, 0>(shared_address(tile.buffer) + swizzled(store_row(threadIdx.x), store_chunk(threadIdx.x)), o,
                    [&](int i) { return factor[i]; });
            write_tile(smem, tiles, args, maps, tile, p, warpgroup);
        }
        n -= span.num_tiles;
        // A warpgroup without a tile has not waited for kv_ready. Every span has a tile, so another warpgroup has, before it releases too.
        smem.kv_empty.release(stages);
    }
    if (threadIdx.x % 128 == 0) store_wait();
}

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void window_kernel(const __grid_constant__ sinkattn_fwd_args args,
        const __grid_constant__ typename C::Maps maps, const __grid_constant__ Problem p, unsigned *error_word,
        const __grid_constant__ typename C::Keys keys) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<typename C::Smem *>(shared);
    if (threadIdx.x == 0) {
        for (const CUtensorMap *map : {&maps.q, &maps.k, &maps.v, &maps.out}) tensor_map_prefetch(map);
        for (int i = 0; i < kStages; i++) {
            smem.planned[i].init(1);
            smem.kv_full[i].init(1);
            smem.kv_ready[i].init(32);
            smem.kv_empty[i].init(C::kMathThreads + 32);
        }
        for (int w = 0; w < C::kWarpgroups; w++)
            for (int i = 0; i < kTileStages; i++) {
                smem.q_full[w][i].init(1);
                smem.q_empty[w][i].init(1);
            }
        barrier_init_fence();
    }
    wait_for_previous_kernel();
    if (blockIdx.x == 0) check_lengths(args, keys, error_word);
    __syncthreads();
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp < C::kMathThreads / 32) {
        registers_up<C::kMathRegisters>();
        compute_tiles<C>(smem, args, keys, maps, p);
        return;
    }
    registers_down<C::kLoaderRegisters>();
    if (warp == C::kMathThreads / 32) load_keys<C>(smem, args, keys, maps, p, error_word);
    if (warp == C::kMathThreads / 32 + 1) load_queries<C>(smem, maps, p);
    if (warp == C::kMathThreads / 32 + 2) check_values<C>(smem, args, keys, p);
#else
    __trap();
#endif
}

// The most tokens of a span whose keys, boxes of a cache at both ends, fit a stage.
int most_tokens(const TensorKeys &) { return kMaxSpan; }
int most_tokens(const CacheKeys &cache) { return kMaxSpan - (cache.box - 1); }

template <class C>
sinkattn_status launch(
        const sinkattn_fwd_args &args, const typename C::Keys &keys, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.problem;
    Problem p = {};
    p.group = static_cast<int>(problem.num_q_heads / problem.num_kv_heads);
    p.tile_tokens = kTileRows / p.group;
    while (1 << p.group_log2 < p.group) p.group_log2++;
    p.window = sa_band_of(&problem.mask, kKeys, kKeys);
    p.last_key = static_cast<int>(sa_window_size(&p.window)) - 1;
    p.span_tokens = choose_span(problem, p.tile_tokens, most_tokens(keys), plan.workers);
    const int64_t spans = num_spans(problem, p.span_tokens);
    if (spans > INT32_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld spans of rows; a launch holds at most 2^31", static_cast<long long>(spans));
    const auto heads = static_cast<unsigned>(problem.num_kv_heads), blocks = static_cast<unsigned>(sa_min(spans * heads, plan.workers));
    p.num_spans = static_cast<unsigned>(spans);
    p.step = blocks / heads;
    p.head_step = blocks % heads;
    p.batch_spans = problem.packed ? 0 : static_cast<unsigned>(problem.q_len / p.span_tokens + 2);
    p.scale_log2 = static_cast<float>(sa_softmax_scale(&problem)) * kLog2e;
    unsigned *error_word;
    typename C::Maps maps;
    SA_TRY(sa_cuda_error_word(&error_word));
    SA_TRY(map_rows(&maps.q, problem, args.q, p.tile_tokens, p.group, "q"));
    SA_TRY(map_keys(&maps.k, problem, args.k, keys, p.span_tokens + kKeys, "k"));
    SA_TRY(map_keys(&maps.v, problem, args.v, keys, p.span_tokens + kKeys, "v"));
    SA_TRY(map_rows(&maps.out, problem, args.out, p.tile_tokens, p.group, "out"));
    if constexpr (C::kHasSinkTokens && !C::Keys::kCached) {
        SA_TRY(map_keys(&maps.sink_k, problem, args.k, kSinkKeys, "k"));
        SA_TRY(map_keys(&maps.sink_v, problem, args.v, kSinkKeys, "v"));
    }
    return launch_overlapping<window_kernel<C>>(
            "sa_fwd_cuda_sm90_window", blocks, C::kThreads, sizeof(typename C::Smem), context.stream, args, maps, p, error_word, keys);
}

template <class Element, class Keys>
sinkattn_status launch_for(const sinkattn_fwd_args &args, const Keys &keys, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.problem;
    if (!problem.mask.num_sink_tokens) return launch<Config<Element, Keys, 0, kKeys>>(args, keys, plan, context);
    const int64_t reach = sa_window_keys(&problem.mask) - 1 + kTileRows / (problem.num_q_heads / problem.num_kv_heads);
    if (problem.mask.num_sink_tokens <= 8 && reach <= 136) return launch<Config<Element, Keys, 8, 136>>(args, keys, plan, context);
    return launch<Config<Element, Keys, kSinkKeys, kKeys>>(args, keys, plan, context);
}

template <class Keys>
sinkattn_status launch_dtype(const sinkattn_fwd_args &args, const Keys &keys, const sinkattn_plan *plan, const sinkattn_context *context) {
    if (args.problem.dtype == SINKATTN_BF16) return launch_for<Bf16>(args, keys, *plan, *context);
    return launch_for<Fp16>(args, keys, *plan, *context);
}

} // namespace

extern "C" sinkattn_status sa_fwd_cuda_sm90_window(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return launch_dtype(*static_cast<const sinkattn_fwd_args *>(args), TensorKeys{}, plan, context);
}

extern "C" sinkattn_status sa_decode_cuda_sm90_packed_window(
        const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_decode_args *>(arguments);
    SA_TRY(check_no_host_pages(args));
    return launch_dtype(args.fwd, CacheKeys(args, kSinkKeys), plan, context);
}

} // namespace sa::fwd_window_sm90
