// SPDX-License-Identifier: Apache-2.0
//
// Decode with invariant, under the windows that fwd_window_sm90 serves, with the bits of that forward's row.
//
//     one warp       K of steps 0 .. 8 through a ring of tiles | weights in registers | V of steps 0 .. 8 through the ring | out
//     four warps     all tiles at once; warp w scores steps w, w + 4, .. | P in shared memory | O += P V for 16 columns | out
//
// A stream is up to 8 q heads of one kv head for one token: at most 8 rows, in N of mma.sync; keys, or columns of O, are in M. Its keys
// come in 9 steps of 16 from the anchor on, the first key of the window of the first token of the forward's tile of tokens, which stands
// at a multiple of the tile's tokens; a step of positional sink tokens comes before them. As in the forward, the pivot is the maximum over
// all keys, O takes the steps in ascending order, and class c of a row, keys 2 c and 2 c + 1 of every 8, is one chain of sums. Lengths
// and pages are read before the preceding kernel ends, and again after.
//
// Four warps where such blocks fill the device at most once; else one. Shared memory: a ring of 6 tiles of 2 KiB, or all 18 or 20.

#include "cuda/decode_window_sm90/stream.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sink.cuh"
#include "cuda/work/decode_params.cuh"
#include "cuda/work/nvfp4.cuh"

namespace sa::decode_window_sm90 {
namespace {

// Scores of a step's tile: s[2 i + x] of key fragment_row(i) and row fragment_column() + x. -inf where the token does not see the key.
template <class C>
__device__ __forceinline__ void score(float (&s)[4], const Queries &queries, uint32_t k, const Stream<C> &stream, int step) {
    for (float &x : s) x = 0.0f;
    const uint32_t at = k + swizzled(left_row(threadIdx.x % 32), left_chunk(threadIdx.x % 32));
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; step++) {
        uint32_t keys[4];
        ldmatrix_x4(keys, pairs_on(at, step));
        mma_m16n8k16<typename C::Element>(s, keys, queries.q[step][0], queries.q[step][1]);
    }
#pragma unroll
    for (int x = 0; x < 4; x++)
        if (!stream.sees(step * kTileK + fragment_row(x / 2))) s[x] = -INFINITY;
}

// The weights of a step: P as the right side of O^T = V^T P^T, and for each 8 keys the sum of one class. Lane l has class l / 8 of row
// 2 (l % 4) + l / 4 % 2.
struct Weights {
    uint2 p;
    float sums[2];
};

template <class Element> __device__ __forceinline__ Weights weigh(float (&s)[4], const float (&from)[2], float scale_log2) {
    Weights weights;
#pragma unroll
    for (int x = 0; x < 4; x++) s[x] = exp2_approx(fmaf(s[x], scale_log2, -from[x % 2]));
    weights.p = {transposed(pack_halves<Element>(s[0], s[1])), transposed(pack_halves<Element>(s[2], s[3]))};
    const bool odd = threadIdx.x & 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float own = odd ? s[2 * i + 1] : s[2 * i], other = odd ? s[2 * i] : s[2 * i + 1];
        weights.sums[i] = __fadd_rn(own, __shfl_xor_sync(0xffffffffu, other, 4));
    }
    return weights;
}

template <class C> using Output = float[C::kColumns / 16][4];

// O^T += V^T P^T; first: the warp's first pair of chunks.
template <class C> __device__ __forceinline__ void multiply(Output<C> &o, uint32_t v, const uint2 &p, int first) {
    const uint32_t at = pairs_on(v + swizzled(right_row(threadIdx.x % 32), right_chunk(threadIdx.x % 32)), first);
#pragma unroll
    for (int j = 0; j < C::kColumns / 16; j++) {
        uint32_t values[4];
        ldmatrix_x4_trans(values, pairs_on(at, j));
        mma_m16n8k16<typename C::Element>(o[j], values, p.x, p.y);
    }
}

// A row's LSE, and what its O is multiplied by. Every lane of a row computes it, one writes.
__device__ __forceinline__ float end_row(const Params &params, int64_t stat, float pivot, float sum, float s_aux, bool writes) {
    const RowEnd end(pivot, sum, s_aux);
    if (writes) {
        params.lse[stat] = end.lse();
        if (params.lse_raw) params.lse_raw[stat] = raw_lse(pivot, sum);
    }
    return end.factor();
}

__device__ __forceinline__ float s_aux_at(const Params &params, int head) {
    return params.s_aux ? static_cast<float>(sa_load(params.s_aux, params.s_aux_dtype, head)) : -INFINITY;
}

// Ends the rows and writes out, through shared memory.
template <class C>
__device__ __forceinline__ void write_rows(unsigned char *shared, Output<C> &o, const float (&pivot)[2], const float (&sum)[2],
        const float (&s_aux)[2], const Stream<C> &stream, const Params &params) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_head = stream.first_head;
    float factor[2];
#pragma unroll
    for (int x = 0; x < 2; x++) {
        const int row = fragment_column() + x;
        const int64_t heads = static_cast<int64_t>(params.num_heads) * params.num_rows;
        const int64_t stat = (stream.batch * heads + first_head + row) * params.band.q_len + stream.token;
        factor[x] = end_row(params, stat, pivot[x], sum[x], s_aux[x], lane < 4 && warp == 0 && row < params.num_rows);
    }
#pragma unroll
    for (int j = 0; j < C::kColumns / 16; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) { // 8 columns become a row's: lane l has columns 2 (l % 4) and the next of row l / 4
            const uint32_t pair = transposed(pack_halves<typename C::Element>(o[j][2 * i] * factor[0], o[j][2 * i + 1] * factor[1]));
            *reinterpret_cast<uint32_t *>(
                    shared + fragment_row(0) * kRowBytes + (warp * C::kColumns + 16 * j + 8 * i + fragment_column()) * 2) = pair;
        }
    sync<C>();
    for (int x = threadIdx.x; x < params.num_rows * (kHeadDim / 4); x += C::kThreads) {
        const int row = x / (kHeadDim / 4), column = x % (kHeadDim / 4) * 4, head = first_head + row;
        if (column >= params.head_dim) continue;
        const uint2 halves = *reinterpret_cast<const uint2 *>(shared + row * kRowBytes + column * 2);
        *reinterpret_cast<uint2 *>(params.out + stream.batch * params.out_batch + static_cast<int64_t>(stream.token) * params.out_row +
                                   static_cast<int64_t>(head) * params.out_head + column) = halves;
        if constexpr (C::kExtras) {
            const int64_t out_row =
                    (static_cast<int64_t>(stream.batch) * params.band.q_len + stream.token) * params.num_heads * params.num_rows + head;
            if (params.nvfp4_values)
                write_nvfp4<typename C::Element>(
                        params.nvfp4_values, params.nvfp4_scales, params.global_scale, params.head_dim, out_row, column, halves);
        }
    }
}

// The largest score of each of the lane's two rows, as a pivot.
template <class C, int kCount>
__device__ __forceinline__ void find_pivots(float (&pivot)[2], const float (&s)[kCount][4], float (*tops)[kRows], float scale_log2) {
#pragma unroll
    for (int x = 0; x < 2; x++) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < kCount; n++) top = fmaxf(top, fmaxf(s[n][x], s[n][2 + x]));
        top = column_max(top);
        if constexpr (C::kWarps > 1) {
            if (threadIdx.x % 32 < 4) tops[threadIdx.x / 32][fragment_column() + x] = top;
        }
        pivot[x] = top;
    }
    if constexpr (C::kWarps > 1) {
        __syncthreads();
        for (int x = 0; x < 2; x++)
            for (int w = 0; w < C::kWarps; w++) pivot[x] = fmaxf(pivot[x], tops[w][fragment_column() + x]);
    }
    for (float &x : pivot) x *= scale_log2;
}

// Adds the classes, in the order of the forward's four lanes; each lane gets the sums of its two rows.
__device__ __forceinline__ void sum_rows(float (&sum)[2], float chain) {
    chain += __shfl_xor_sync(0xffffffffu, chain, 8);
    chain += __shfl_xor_sync(0xffffffffu, chain, 16);
    const float other = __shfl_xor_sync(0xffffffffu, chain, 4);
    const bool odd = threadIdx.x & 4;
    sum[0] = odd ? other : chain;
    sum[1] = odd ? chain : other;
}

// Requests the tiles that fit.
template <class C> __device__ __forceinline__ void begin_copies(uint32_t q, const Stream<C> &stream, const Params &params) {
#pragma unroll
    for (int m = 0; m < C::kTiles; m++) {
        if (m % C::kSteps % C::kWarps == static_cast<int>(threadIdx.x) / 32)
            copy_tile<C>(q + m * kTileBytes, stream, params, m % C::kSteps, m >= C::kSteps);
        if (C::kWarps == 1 || m == C::kSteps - 1) cp_async_commit();
    }
    if (C::kWarps > 1) cp_async_commit();
}

template <class C>
__device__ __forceinline__ void attend_alone(
        unsigned char *shared, const Stream<C> &stream, const Queries &queries, const float (&s_aux)[2], const Params &params) {
    const uint32_t q = shared_address(shared);
    const auto next = [&](int m) { // tile m's place is free
        __syncwarp();
        m += C::kTiles;
        if (m < 2 * C::kSteps) copy_tile<C>(q + m % C::kTiles * kTileBytes, stream, params, m % C::kSteps, m >= C::kSteps);
        cp_async_commit();
    };
    float s[C::kSteps][4], pivot[2], from[2], sum[2], chain = 0.0f;
#pragma unroll
    for (int n = 0; n < C::kSteps; n++) { // in flight: kTiles tiles, K of steps n and after, then V's
        cp_async_wait<C::kTiles - 1>();
        __syncwarp();
        score<C>(s[n], queries, q + n % C::kTiles * kTileBytes, stream, n);
        next(n);
    }
    find_pivots<C>(pivot, s, nullptr, params.scale_log2);
    for (int x = 0; x < 2; x++) from[x] = pivot[x] == -INFINITY ? 0.0f : pivot[x];
    Output<C> o = {};
#pragma unroll
    for (int n = 0; n < C::kSteps; n++) {
        const Weights weights = weigh<typename C::Element>(s[n], from, params.scale_log2);
        for (float x : weights.sums) chain = __fadd_rn(chain, x);
        cp_async_wait<C::kTiles - 1>();
        __syncwarp();
        multiply<C>(o, q + (C::kSteps + n) % C::kTiles * kTileBytes, weights.p, 0);
        next(C::kSteps + n);
    }
    sum_rows(sum, chain);
    write_rows<C>(shared, o, pivot, sum, s_aux, stream, params);
}

template <class C>
__device__ __forceinline__ void attend_together(
        unsigned char *shared, const Stream<C> &stream, const Queries &queries, const float (&s_aux)[2], const Params &params) {
    __shared__ float tops[C::kWarps][kRows];
    const uint32_t q = shared_address(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto weights_of = [&](int step) { return reinterpret_cast<Weights *>(shared + step * kTileBytes) + lane; }; // in place of K
    float s[C::kMine][4], pivot[2], from[2], sum[2], chain = 0.0f;
#pragma unroll
    for (int i = 0; i < C::kMine; i++) {
        const int step = warp + i * C::kWarps;
        if (step < C::kSteps)
            score<C>(s[i], queries, q + step * kTileBytes, stream, step);
        else
            for (float &x : s[i]) x = -INFINITY;
    }
    find_pivots<C>(pivot, s, tops, params.scale_log2);
    for (int x = 0; x < 2; x++) from[x] = pivot[x] == -INFINITY ? 0.0f : pivot[x];
#pragma unroll
    for (int i = 0; i < C::kMine; i++) {
        const int step = warp + i * C::kWarps;
        if (step < C::kSteps) *weights_of(step) = weigh<typename C::Element>(s[i], from, params.scale_log2);
    }
    cp_async_wait<0>();
    __syncthreads(); // V and all weights are there
    Output<C> o = {};
#pragma unroll
    for (int n = 0; n < C::kSteps; n++) {
        const Weights weights = *weights_of(n);
        for (float x : weights.sums) chain = __fadd_rn(chain, x);
        multiply<C>(o, q + (C::kSteps + n) * kTileBytes, weights.p, warp * C::kColumns / 16);
    }
    sum_rows(sum, chain);
    __syncthreads(); // no warp reads the weights any more
    write_rows<C>(shared, o, pivot, sum, s_aux, stream, params);
}

template <class C> __global__ __launch_bounds__(C::kThreads, C::kBlocks) void window_decode_kernel(const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char shared[];
    Stream<C> stream(params);
    stream.look_up(params);
    wait_for_previous_kernel();
    begin_copies<C>(shared_address(shared), stream, params);
    let_next_kernel_start();
    Queries queries;
    load_queries<C>(queries, stream, params);
    float s_aux[2];
    for (int x = 0; x < 2; x++) s_aux[x] = s_aux_at(params, stream.first_head + min(fragment_column() + x, params.num_rows - 1));
    const bool stale = stream.look_up(params);
    if constexpr (C::kWarps > 1) cp_async_wait<1>();
    if (sync_or<C>(stale)) { // the preceding kernel wrote them
        cp_async_wait<0>();
        sync<C>();
        begin_copies<C>(shared_address(shared), stream, params);
        if constexpr (C::kWarps > 1) cp_async_wait<1>();
        sync<C>();
    }
    if (threadIdx.x == 0 && static_cast<uint32_t>(stream.length) > static_cast<uint32_t>(params.band.k_len))
        atomicOr(params.error_word, kBadCacheSeqlens);
    if (stream.bad_page(params)) atomicOr(params.error_word, kBadBlockTable);
    if constexpr (C::kWarps == 1)
        attend_alone<C>(shared, stream, queries, s_aux, params);
    else
        attend_together<C>(shared, stream, queries, s_aux, params);
#else
    __trap();
#endif
}

void set_params(Params &params, const sinkattn_decode_args &args) {
    const sinkattn_problem &problem = args.fwd.problem;
    const auto group = static_cast<int32_t>(problem.num_q_heads / problem.num_kv_heads);
    set_cache(params, args);
    set_extras(params, args);
    // Over a tile of keys at least: sa_band_of clamps `left` to q_len + k_len, but the anchor is the forward's in a shorter cache too.
    params.band = sa_band_of(&problem.mask, static_cast<int32_t>(problem.q_len),
            static_cast<int32_t>(sa_max(problem.k_len, sa_decode_cuda_sm90_window_tile_k)));
    params.band = sa_band_with_keys(params.band, static_cast<int32_t>(problem.k_len));
    params.num_rows = group < kRows ? group : kRows;
    while (params.num_rows << params.streams_log2 < group) params.streams_log2++;
    params.num_heads = static_cast<uint32_t>(problem.num_kv_heads) << params.streams_log2;
    params.by_heads = divisor_of(params.num_heads);
    params.by_q_len = divisor_of(params.band.q_len);
    params.tile_tokens = static_cast<int32_t>(sa_decode_cuda_sm90_window_tile_q) / group;
}

int64_t num_streams(const sinkattn_problem &problem) {
    const int64_t group = problem.num_q_heads / problem.num_kv_heads;
    return problem.batch * problem.q_len * problem.num_kv_heads * sa_ceil_div(group, kRows);
}

template <class C> sinkattn_status launch(const sinkattn_decode_args &args, const sinkattn_context &context) {
    constexpr int kBytes = C::kTiles * kTileBytes;
    Params params = {};
    SA_TRY(sa_cuda_error_word(&params.error_word));
    set_params(params, args);
    const auto grid = static_cast<unsigned>(num_streams(args.fwd.problem));
    return launch_overlapping<window_decode_kernel<C>>("sa_decode_cuda_sm90_window", grid, C::kThreads, kBytes, context.stream, params);
}

template <class Element, bool kHasSinkTokens, bool kExtras>
sinkattn_status launch_width(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const int64_t streams = num_streams(args.fwd.problem);
    if (streams == 0) return sa_ok();
    SA_TRY(check_decode_strides(args, streams));
    using Four = Config<Element, 4, kHasSinkTokens, kExtras>;
    return streams <= static_cast<int64_t>(Four::kBlocks) * plan.workers
                   ? launch<Four>(args, context)
                   : launch<Config<Element, 1, kHasSinkTokens, kExtras>>(args, context);
}

template <class Element>
sinkattn_status launch_kind(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const bool extras = args.host.num_pages || args.nvfp4.values;
    if (args.fwd.problem.mask.num_sink_tokens)
        return extras ? launch_width<Element, true, true>(args, plan, context) : launch_width<Element, true, false>(args, plan, context);
    return extras ? launch_width<Element, false, true>(args, plan, context) : launch_width<Element, false, false>(args, plan, context);
}

} // namespace
} // namespace sa::decode_window_sm90

extern "C" sinkattn_status sa_decode_cuda_sm90_window(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_decode_args *>(arguments);
    return args.fwd.problem.dtype == SINKATTN_BF16 ? sa::decode_window_sm90::launch_kind<sa::Bf16>(args, *plan, *context)
                                                   : sa::decode_window_sm90::launch_kind<sa::Fp16>(args, *plan, *context);
}
