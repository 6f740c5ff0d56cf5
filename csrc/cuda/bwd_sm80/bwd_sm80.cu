// SPDX-License-Identifier: Apache-2.0
//
// Backward for every architecture from sm_80: mma.sync, cp.async in two stages, three kernels.
//
//     rows   a block owns rows, meets keys:   S = Q K^T,   dP = dO V^T,   P, dS,   dQ += dS K
//     keys   a block owns keys, meets rows:   S = K Q^T,   dP = V dO^T,   P, dS,   dV += P dO,   dK += dS Q
//     sink   ds_aux of a head from its rows' terms
//
// The first two are one kernel template. The owned tile stays in shared memory and is the left side of S and dP; the met tiles pass through
// the stages, one after the other, and are their right side. A warp keeps the gradients of 16 or 32 owned rows (or keys) in registers. The
// rows kernel leaves lse and g - delta of every row for the keys kernel, and the row's term of ds_aux for the sink kernel. Met tiles ascend
// from key 0, or row 0 of the sequence, and the heads of a GQA group are in one sum: the same bits every time, without atomics, and each
// gradient is rounded once. The LSE that is read already holds the sink, which no kernel here adds again. Registers: 246 or 255; shared
// memory: 50 to 130 KiB; docs/kernels/bwd_sm80.md has the budget.

#include "cuda/bwd_sm80/keys.cuh"
#include "cuda/bwd_sm80/workspace.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/tile/mma.cuh"
#include "cuda/work/sink_terms.cuh"

namespace sa::bwd_sm80 {
namespace {

// A block owns a tile of kTile rows (or keys) and meets tiles of kStep keys (or rows); a warp owns kBlocks x 16.
template <class Element_, bool kOwnsKeys_, int kHeadDim, int kTile_, int kStep_, int kBlocks_> struct Config {
    using Element = Element_;
    static constexpr bool kOwnsKeys = kOwnsKeys_;
    static constexpr int kTile = kTile_, kStep = kStep_, kBlocks = kBlocks_, kWarpRows = 16 * kBlocks;
    // dK and dV of 16 keys x 256 would fill the registers: two warps share the keys, each with half of the columns.
    static constexpr int kColumns = kOwnsKeys && kHeadDim > 128 ? 128 : kHeadDim, kColumnParts = kHeadDim / kColumns;
    static constexpr int kRowWarps = kTile / kWarpRows, kThreads = 32 * kRowWarps * kColumnParts;
    static constexpr int kChunks = kHeadDim / 8, kRowBytes = kHeadDim * 2, kGradients = kOwnsKeys ? 2 : 1;
    static constexpr int kRowStep = kThreads / kChunks; // rows that the threads copy at once

    // Columns of V, dO and dV, and whether a real one of K or Q is one of theirs. Smaller kernels, whose values are as wide as keys, have
    // no register for it.
    __device__ __forceinline__ static int64_t head_dim_v(const sinkattn_problem &problem) {
        return kHeadDim > 128 ? sa_head_dim_v(&problem) : problem.head_dim;
    }
    __device__ __forceinline__ static bool is_value(bool is_real, int column, const sinkattn_problem &problem) {
        return kHeadDim > 128 ? is_real && column < sa_head_dim_v(&problem) : is_real;
    }

    static_assert(kHeadDim % 64 == 0 && kStep % 16 == 0 && kTile % kWarpRows == 0, "whole swizzled rows, 16 met rows a product");
    static_assert(kThreads % kChunks == 0 && kTile % kRowStep == 0 && kStep % kRowStep == 0 && kStep <= kThreads,
            "threads share the copies evenly");
};

// Each owned row sees keys [0, sink_end) and [begin, begin + length); each owned key is seen by rows [begin, begin + length).
template <class C> struct Seen {
    int32_t begin[C::kTile], sink_end[C::kTile];
    uint32_t length[C::kTile];

    __device__ __forceinline__ bool sees(int own, int32_t other) const {
        return static_cast<uint32_t>(other - begin[own]) < length[own] || other < sink_end[own];
    }
};

// The rows that see a warp's keys: those of [full_begin, full_end) see all of them, those outside [any_begin, any_end) none.
struct alignas(16) WarpRows {
    int32_t full_begin, full_end, any_begin, any_end;
};

template <class C> struct Smem {
    unsigned char owned[2][C::kTile * C::kRowBytes];                       // Q and dO, or K and V; in the end dQ, or dK and dV
    unsigned char met[2][2][C::kStep * C::kRowBytes];                      // by stage: K and V, or Q and dO
    Stats stats[C::kOwnsKeys ? 2 : 1][C::kOwnsKeys ? C::kStep : C::kTile]; // of the rows met, by stage, or of those owned
    Seen<C> seen;
    WarpRows warp_rows[C::kThreads / 32]; // in the keys kernel
    Work work;
    RowSteps steps;
    sa_range keys; // owned
    bool has_work;
};

template <class C> using Scores = float[C::kBlocks][C::kStep / 8][4];
template <class C> using Gradient = float[C::kBlocks][C::kColumns / 8][4];

// Sums over the met tiles: dQ, or dK and dV; and P dP of the thread's owned rows.
template <class C> struct Sums {
    Gradient<C> gradients[C::kGradients];
    float p_dp[2 * C::kBlocks];
};

// The warp's first row, in the tile, and its first chunk of the gradients' columns.
template <class C> __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 % C::kRowWarps * C::kWarpRows; }
template <class C> __device__ __forceinline__ int warp_chunk() { return threadIdx.x / 32 / C::kRowWarps * (C::kColumns / 8); }

// A thread copies one column of chunks, kRowStep rows apart.
template <class C> __device__ __forceinline__ int copy_row() { return threadIdx.x / C::kChunks; }
template <class C> __device__ __forceinline__ int copy_chunk() { return threadIdx.x % C::kChunks; }

// Loads rows first to first + kCount of q and dout, one tile behind the other; zeros outside `real` and past head_dim, of dout head_dim_v,
// where nothing is read.
template <class C, int kCount>
__device__ __forceinline__ void load_rows(
        unsigned char *to, const sinkattn_bwd_args &args, const Smem<C> &smem, int32_t first, sa_range real) {
    const Work &work = smem.work;
    const int column = copy_chunk<C>() * 8, begin = static_cast<int>(real.begin - first), end = static_cast<int>(real.end - first);
    const int32_t r = first + copy_row<C>();
    const uint32_t group = static_cast<uint32_t>(work.group);
    uint32_t head = static_cast<uint32_t>(r) % group;
    const auto *q =
            static_cast<const uint16_t *>(args.fwd.q.data) + query_offset(work, args.fwd.q, 0) + row_offset(args.fwd.q, work, r) + column;
    const auto *dout =
            static_cast<const uint16_t *>(args.dout.data) + query_offset(work, args.dout, 0) + row_offset(args.dout, work, r) + column;
#pragma unroll
    for (int n = 0; n < kCount / C::kRowStep; n++) {
        const int i = copy_row<C>() + n * C::kRowStep;
        const bool is_real = column < args.fwd.problem.head_dim && i >= begin && i < end;
        const bool has_dout = C::is_value(is_real, column, args.fwd.problem);
        const uint32_t at = shared_address(to) + swizzled<C::kRowBytes>(i, copy_chunk<C>());
        cp_async_16(at, is_real ? q : args.fwd.q.data, is_real);
        cp_async_16(at + kCount * C::kRowBytes, has_dout ? dout : args.dout.data, has_dout);
        head += smem.steps.head;
        q += smem.steps.q;
        dout += smem.steps.dout;
        if (head < group) continue;
        head -= group;
        q += smem.steps.q_token;
        dout += smem.steps.dout_token;
    }
}

// The same for k and v.
template <class C, int kCount>
__device__ __forceinline__ void load_keys(
        unsigned char *to, const sinkattn_fwd_args &args, const Work &work, int64_t first, sa_range real) {
    const int column = copy_chunk<C>() * 8, begin = static_cast<int>(real.begin - first), end = static_cast<int>(real.end - first);
    const auto *k = static_cast<const uint16_t *>(args.k.data) + key_offset(work, args.k, first + copy_row<C>()) + column;
    const auto *v = static_cast<const uint16_t *>(args.v.data) + key_offset(work, args.v, first + copy_row<C>()) + column;
#pragma unroll
    for (int n = 0; n < kCount / C::kRowStep; n++) {
        const int i = copy_row<C>() + n * C::kRowStep;
        const bool is_real = column < args.problem.head_dim && i >= begin && i < end;
        const bool has_v = C::is_value(is_real, column, args.problem);
        const uint32_t at = shared_address(to) + swizzled<C::kRowBytes>(i, copy_chunk<C>());
        cp_async_16(at, is_real ? k : args.k.data, is_real);
        cp_async_16(at + kCount * C::kRowBytes, has_v ? v : args.v.data, has_v);
        k += C::kRowStep * args.k.row_stride;
        v += C::kRowStep * args.v.row_stride;
    }
}

// Loads met tile t. Keys that no owned row sees, or rows that see no owned key, are not read.
template <class C>
__device__ __forceinline__ void load_met(Smem<C> &smem, const sinkattn_bwd_args &args, const Stats *stats, int t, int stage) {
    const sa_range real = sa_key_tile(&smem.work.tiles, t);
    if constexpr (C::kOwnsKeys) {
        load_rows<C, C::kStep>(smem.met[stage][0], args, smem, t * C::kStep, real);
        if (threadIdx.x < C::kStep) {
            const int32_t r = t * C::kStep + static_cast<int32_t>(threadIdx.x);
            const bool is_real = r >= real.begin && r < real.end;
            cp_async_8(shared_address(&smem.stats[stage][threadIdx.x]),
                    is_real ? stats + stats_index(args.fwd.problem, smem.work, r) : stats, is_real);
        }
    } else {
        load_keys<C, C::kStep>(smem.met[stage][0], args.fwd, smem.work, static_cast<int64_t>(t) * C::kStep, real);
    }
    cp_async_commit();
}

template <class C> __device__ __forceinline__ void load_first(Smem<C> &smem, const sinkattn_bwd_args &args, const Stats *stats) {
    const int t = sa_key_tile_from(&smem.work.tiles, 0);
    if (t < smem.work.tiles.end) load_met<C>(smem, args, stats, t, 0);
}

template <class C> __device__ __forceinline__ void find_rows_of_keys(Smem<C> &smem) {
    const int own = warp_row<C>() + threadIdx.x % C::kWarpRows;
    const sa_position_t key = smem.keys.begin + own;
    const sa_range tokens = key < smem.keys.end ? sa_keys_rows(&smem.work.band, {key, key + 1}) : sa_range{0, 0};
    const int32_t begin = static_cast<int32_t>(tokens.begin * smem.work.group), end = static_cast<int32_t>(tokens.end * smem.work.group);
    if (warp_chunk<C>() == 0 && threadIdx.x % 32 < C::kWarpRows) {
        smem.seen.begin[own] = begin;
        smem.seen.length[own] = static_cast<uint32_t>(end - begin);
        smem.seen.sink_end[own] = 0;
    }
    constexpr unsigned kAll = 0xffffffffu;
    const WarpRows warp_rows = {__reduce_max_sync(kAll, begin), __reduce_min_sync(kAll, end),
            __reduce_min_sync(kAll, begin < end ? begin : INT32_MAX), __reduce_max_sync(kAll, begin < end ? end : 0)};
    if (threadIdx.x % 32 == 0) smem.warp_rows[threadIdx.x / 32] = warp_rows;
}

template <class C> __device__ __forceinline__ void find_keys_of_rows(Smem<C> &smem) {
    for (int own = threadIdx.x; own < C::kTile; own += C::kThreads) {
        const int64_t r = smem.work.rows.begin + own;
        const bool is_real = r < smem.work.rows.end;
        const sa_range keys = is_real ? sa_row_band(&smem.work.band, r / smem.work.group) : sa_range{0, 0};
        smem.seen.begin[own] = static_cast<int32_t>(keys.begin);
        smem.seen.length[own] = static_cast<uint32_t>(keys.end - keys.begin);
        smem.seen.sink_end[own] = is_real ? static_cast<int32_t>(sa_row_sink_end(&smem.work.band, r / smem.work.group)) : 0;
    }
}

// Writes the owned rows' stats, with delta = dO . O from the chunks of dO that this thread copied. Waits for the copies and for the block.
template <class C> __device__ __forceinline__ void find_stats(Smem<C> &smem, const sinkattn_bwd_args &args, Stats *stats) {
    static_assert(C::kTile <= C::kThreads, "a thread a row");
    constexpr int kCopies = C::kTile / C::kRowStep;
    const Work &work = smem.work;
    const int32_t begin = static_cast<int32_t>(work.rows.begin), count = static_cast<int32_t>(work.rows.end - work.rows.begin);
    const auto *out = static_cast<const uint16_t *>(args.fwd.out.data) + query_offset(work, args.fwd.out, 0) + copy_chunk<C>() * 8;
    uint4 outs[kCopies] = {};
#pragma unroll
    for (int n = 0; n < kCopies; n++) {
        const int own = copy_row<C>() + n * C::kRowStep;
        if (own < count && copy_chunk<C>() * 8 < C::head_dim_v(args.fwd.problem))
            outs[n] = *reinterpret_cast<const uint4 *>(out + row_offset(args.fwd.out, work, begin + own));
    }
    const int own = threadIdx.x;
    float lse = -INFINITY, g = 0.0f;
    if (own < count) {
        const int64_t at = stat_index(work, args.fwd.problem, begin + own);
        lse = static_cast<const float *>(args.fwd.lse)[at];
        if (args.dlse) g = static_cast<const float *>(args.dlse)[at];
    }
    cp_async_wait<0>();
#pragma unroll
    for (int n = 0; n < kCopies; n++) {
        const int at = copy_row<C>() + n * C::kRowStep;
        const uint4 dout = *reinterpret_cast<const uint4 *>(smem.owned[1] + swizzled<C::kRowBytes>(at, copy_chunk<C>()));
        float delta = dot<typename C::Element>(outs[n], dout);
#pragma unroll
        for (int x = C::kChunks / 2; x > 0; x /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, x);
        if (copy_chunk<C>() == 0) smem.stats[0][at].bias = delta;
    }
    __syncthreads();
    if (own >= C::kTile) return;
    const Stats row = {lse == -INFINITY ? 0.0f : lse * kLog2e, g - smem.stats[0][own].bias};
    smem.stats[0][own] = row;
    if (own < count) stats[stats_index(args.fwd.problem, work, begin + own)] = row;
}

// s becomes P and dp becomes dS; a masked pair is zero in both. p_dp: sums of P dP of the thread's rows.
template <class C, bool kMasked, bool kSums>
__device__ __forceinline__ void gradient_step(
        Scores<C> &s, Scores<C> &dp, float (&p_dp)[2 * C::kBlocks], const Smem<C> &smem, int32_t first, int stage, float scale_log2) {
    const int column = fragment_column();
    int32_t begin[2 * C::kBlocks], sink_end[2 * C::kBlocks];
    uint32_t length[2 * C::kBlocks];
    Stats stats[2 * C::kBlocks];
#pragma unroll
    for (int i = 0; i < 2 * C::kBlocks; i++) {
        const int own = warp_row<C>() + fragment_row(i);
        if (kMasked) {
            begin[i] = smem.seen.begin[own] - first - column;
            length[i] = smem.seen.length[own];
            if (!C::kOwnsKeys) sink_end[i] = smem.seen.sink_end[own] - first - column;
        }
        if (!C::kOwnsKeys) stats[i] = smem.stats[0][own];
    }
#pragma unroll
    for (int n = 0; n < C::kStep / 8; n++) {
        Stats met[2];
        if (C::kOwnsKeys) {
            const float4 both = *reinterpret_cast<const float4 *>(&smem.stats[stage][8 * n + column]);
            met[0] = {both.x, both.y};
            met[1] = {both.z, both.w};
        }
#pragma unroll
        for (int i = 0; i < 2 * C::kBlocks; i++)
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const int32_t other = 8 * n + x;
                const Stats row = C::kOwnsKeys ? met[x] : stats[i];
                const bool seen = !kMasked || static_cast<uint32_t>(other - begin[i]) < length[i] || (!C::kOwnsKeys && other < sink_end[i]);
                float &score = s[i / 2][n][2 * (i & 1) + x], &product = dp[i / 2][n][2 * (i & 1) + x];
                const float p = exp2_approx(fmaf(score, scale_log2, -row.lse));
                score = seen ? p : 0.0f;
                if (kSums) p_dp[i] = fmaf(score, seen ? product : 0.0f, p_dp[i]);
                product = seen ? p * (product + row.bias) : 0.0f;
            }
    }
}

// Adds a met tile, whose first row (or key) is `first`, to the gradients. hide: it may hold values that are not finite.
template <class C>
__device__ __forceinline__ void add_tile(
        Sums<C> &sums, Smem<C> &smem, int32_t first, int stage, bool masked, bool hide, bool wants_p_dp, float scale_log2) {
    using Element = typename C::Element;
    Scores<C> s, dp;
    const uint32_t row = warp_row<C>() * C::kRowBytes, met[2] = {shared_address(smem.met[stage][0]), shared_address(smem.met[stage][1])};
    product_abt<Element, C::kRowBytes>(s, shared_address(smem.owned[0]) + row, met[0]);
    product_abt<Element, C::kRowBytes>(dp, shared_address(smem.owned[1]) + row, met[1]);
    if (wants_p_dp && masked)
        gradient_step<C, true, true>(s, dp, sums.p_dp, smem, first, stage, scale_log2);
    else if (wants_p_dp)
        gradient_step<C, false, true>(s, dp, sums.p_dp, smem, first, stage, scale_log2);
    else if (masked)
        gradient_step<C, true, false>(s, dp, sums.p_dp, smem, first, stage, scale_log2);
    else
        gradient_step<C, false, false>(s, dp, sums.p_dp, smem, first, stage, scale_log2);
    if (masked && hide) {
        const auto meets = [&](int i, int other) { return smem.seen.sees(warp_row<C>() + fragment_row(i), first + other); };
        if constexpr (C::kOwnsKeys) product_pb_hiding<Element, C::kRowBytes>(sums.gradients[1], s, met[1], warp_chunk<C>(), meets);
        product_pb_hiding<Element, C::kRowBytes>(sums.gradients[0], dp, met[0], warp_chunk<C>(), meets);
    } else {
        if constexpr (C::kOwnsKeys) product_pb<Element, C::kRowBytes>(sums.gradients[1], s, met[1], warp_chunk<C>());
        product_pb<Element, C::kRowBytes>(sums.gradients[0], dp, met[0], warp_chunk<C>());
    }
}

// Adds all met tiles in order; the copies of the first have begun.
template <class C>
__device__ __forceinline__ void add_tiles(
        Sums<C> &sums, Smem<C> &smem, const sinkattn_bwd_args &args, const Workspace &workspace, float scale_log2, bool hide) {
    const sa_key_tiles &tiles = smem.work.tiles;
    const int end = tiles.end;
    for (int t = sa_key_tile_from(&tiles, 0), stage = 0; t < end; stage ^= 1) {
        const int next = sa_key_tile_from(&tiles, t + 1);
        cp_async_wait<0>(); // in flight: at most tile t's copies and, before the keys kernel's first tile, those of the owned keys
        __syncthreads();    // tile t has landed, and no thread reads the other stage any more
        if (next < end) load_met<C>(smem, args, workspace.stats, next, stage ^ 1);
        const int32_t first = t * C::kStep;
        bool masked, needed = true;
        if constexpr (C::kOwnsKeys) {
            const WarpRows rows = smem.warp_rows[threadIdx.x / 32];
            masked = first < rows.full_begin || first + C::kStep > rows.full_end;
            needed = first < rows.any_end && first + C::kStep > rows.any_begin;
        } else {
            masked = !sa_key_tile_is_full(&tiles, t);
        }
        if (needed) add_tile<C>(sums, smem, first, stage, masked, hide, workspace.terms && !C::kOwnsKeys, scale_log2);
        t = next;
    }
}

// Writes the owned rows' terms of ds_aux.
template <class C>
__device__ __forceinline__ void write_terms(
        const float (&p_dp)[2 * C::kBlocks], const Smem<C> &smem, const sinkattn_bwd_args &args, float *terms) {
    const Work &work = smem.work;
#pragma unroll
    for (int i = 0; i < 2 * C::kBlocks; i++) {
        const float sum = quad_sum(p_dp[i]);
        const int64_t r = work.rows.begin + warp_row<C>() + fragment_row(i);
        if (r >= work.rows.end || threadIdx.x % 4 != 0) continue;
        const int64_t at = stat_index(work, args.fwd.problem, r);
        const float g = args.dlse ? static_cast<const float *>(args.dlse)[at] : 0.0f;
        const double s = sa_s_aux(&args.fwd, work.kv_head * work.group + r % work.group);
        const float p_sink = static_cast<float>(sa_exp_minus(s, static_cast<const float *>(args.fwd.lse)[at]));
        terms[at] = work.has_sink ? p_sink * (g - sum) : 0.0f; // rows past the last sequence have no sink; g may be anything there
    }
}

// Writes a gradient in whole 16-byte chunks, through an owned tile's shared memory.
template <class C>
__device__ __forceinline__ void write_gradient(unsigned char *shared, const Gradient<C> &gradient, float factor, const Smem<C> &smem,
        const sinkattn_tensor &tensor, int64_t head_dim) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * C::kBlocks; i++)
#pragma unroll
        for (int n = 0; n < C::kColumns / 8; n++) {
            const float *pair = &gradient[i / 2][n][2 * (i & 1)];
            const int at = swizzled<C::kRowBytes>(warp_row<C>() + fragment_row(i), warp_chunk<C>() + n) + 4 * (lane % 4);
            *reinterpret_cast<uint32_t *>(shared + at) = pack_halves<typename C::Element>(pair[0] * factor, pair[1] * factor);
        }
    __syncwarp();
    auto *to = static_cast<uint16_t *>(tensor.data) +
               (C::kOwnsKeys ? key_offset(smem.work, tensor, smem.keys.begin) : query_offset(smem.work, tensor, 0));
    const int64_t count = C::kOwnsKeys ? smem.keys.end - smem.keys.begin : smem.work.rows.end - smem.work.rows.begin;
    for (int x = lane; x < C::kWarpRows * C::kColumns / 8; x += 32) {
        const int own = warp_row<C>() + x / (C::kColumns / 8), chunk = warp_chunk<C>() + x % (C::kColumns / 8);
        if (own >= count || chunk * 8 >= head_dim) continue;
        const int64_t offset =
                C::kOwnsKeys ? own * tensor.row_stride : row_offset(tensor, smem.work, static_cast<int32_t>(smem.work.rows.begin) + own);
        *reinterpret_cast<uint4 *>(to + offset + chunk * 8) = *reinterpret_cast<const uint4 *>(shared + swizzled<C::kRowBytes>(own, chunk));
    }
}

template <class C>
__global__ __launch_bounds__(C::kThreads) void bwd_kernel(
        const __grid_constant__ sinkattn_bwd_args args, Workspace workspace, int64_t num_tiles, float scale, unsigned *error_word) {
    extern __shared__ __align__(128) unsigned char shared[];
    Smem<C> &smem = *reinterpret_cast<Smem<C> *>(shared);
    const sinkattn_problem &problem = args.fwd.problem;
    if (!C::kOwnsKeys && blockIdx.x == 0) check_lengths(args.fwd, error_word);
    if (threadIdx.x == 0) {
        smem.has_work = C::kOwnsKeys ? find_key_work(args.fwd, C::kTile, C::kStep, blockIdx.x, smem.work, smem.keys)
                                     : find_work(args.fwd, C::kTile, C::kStep, num_tiles, blockIdx.x, smem.work);
        smem.steps = row_steps(args.fwd.q, args.dout, smem.work, C::kRowStep);
    }
    __syncthreads();
    if (!smem.has_work) return;

    if constexpr (C::kOwnsKeys)
        load_keys<C, C::kTile>(smem.owned[0], args.fwd, smem.work, smem.keys.begin, smem.keys);
    else
        load_rows<C, C::kTile>(smem.owned[0], args, smem, static_cast<int32_t>(smem.work.rows.begin), smem.work.rows);
    cp_async_commit();
    load_first<C>(smem, args, workspace.stats);
    if constexpr (C::kOwnsKeys) {
        find_rows_of_keys<C>(smem);
    } else {
        find_keys_of_rows<C>(smem);
        find_stats<C>(smem, args, workspace.stats);
    }

    Sums<C> sums;
    for (bool hide = false;; hide = true) {
        sums = {};
        add_tiles<C>(sums, smem, args, workspace, scale * kLog2e, hide);
        cp_async_wait<0>(); // the owned tile has landed even if no tile was met
        // A value that is not finite meets 0 in masked tiles and leaves NaN everywhere: if so, compute again with such values hidden.
        bool finite = true;
        for (auto &gradient : sums.gradients) finite = finite && is_finite(gradient);
        if (!__syncthreads_or(!hide && !finite)) break;
        load_first<C>(smem, args, workspace.stats);
    }
    if constexpr (C::kOwnsKeys) {
        write_gradient<C>(smem.owned[0], sums.gradients[0], scale, smem, args.dk, problem.head_dim);
        write_gradient<C>(smem.owned[1], sums.gradients[1], 1.0f, smem, args.dv, C::head_dim_v(problem));
    } else {
        if (workspace.terms) write_terms<C>(sums.p_dp, smem, args, workspace.terms);
        write_gradient<C>(smem.owned[0], sums.gradients[0], scale, smem, args.dq, problem.head_dim);
    }
}

template <class C>
sinkattn_status launch_kernel(const sinkattn_bwd_args &args, const Workspace &workspace, int64_t num_tiles, void *stream) {
    const int64_t num_blocks = num_tiles * args.fwd.problem.num_kv_heads;
    if (num_blocks == 0) return sa_ok();
    if (num_blocks > INT32_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld tiles of %s; a CUDA launch holds less than 2^31", static_cast<long long>(num_blocks),
                C::kOwnsKeys ? "keys" : "rows");
    static_assert(C::kChunks > 16 || sizeof(Smem<C>) <= 99 * 1024, "a block of 8.6 has room: SA_ROOMY_VARIANT");
    unsigned *error_word;
    SA_TRY(sa_cuda_error_word(&error_word));
    const float scale = static_cast<float>(sa_softmax_scale(&args.fwd.problem));
    return launch_blocks<bwd_kernel<C>>("sa_bwd_cuda_sm80", static_cast<unsigned>(num_blocks), C::kThreads, sizeof(Smem<C>), stream, args,
            workspace, num_tiles, scale, error_word);
}

template <class RowsConfig, class KeysConfig> sinkattn_status launch(const sinkattn_bwd_args &args, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    const int64_t rows = sa_kv_head_rows(&problem), most = INT32_MAX - 128; // tiles may reach past the end
    if (rows > most || problem.k_len > most || problem.num_q_heads > INT32_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld rows of a kv head, %lld keys; this kernel counts less than 2^31 of either",
                static_cast<long long>(rows), static_cast<long long>(problem.k_len));
    const Workspace workspace = workspace_of(args, context);
    SA_TRY(launch_kernel<RowsConfig>(args, workspace, num_row_tiles(problem, RowsConfig::kTile), context.stream));
    SA_TRY(launch_kernel<KeysConfig>(args, workspace, num_key_tiles(problem, KeysConfig::kTile), context.stream));
    if (!workspace.terms) return sa_ok();
    const int64_t num_batches = problem.packed ? 1 : problem.batch;
    return launch_blocks<add_sink_terms>("sa_bwd_cuda_sm80", static_cast<unsigned>(problem.num_q_heads), kSinkThreads, 0, context.stream,
            args, workspace.terms, num_batches, problem.q_len);
}

// kTileQ and kTileK are variants.def's; kStepK and kStepQ, the tiles met, and the blocks a warp owns are as large as the registers allow.
template <int kHeadDim, int kTileQ, int kStepK, int kRowBlocks, int kTileK, int kStepQ, int kKeyBlocks>
sinkattn_status launch_dtype(const void *arguments, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_bwd_args *>(arguments);
    if (args.fwd.problem.dtype == SINKATTN_BF16)
        return launch<Config<Bf16, false, kHeadDim, kTileQ, kStepK, kRowBlocks>, Config<Bf16, true, kHeadDim, kTileK, kStepQ, kKeyBlocks>>(
                args, *context);
    return launch<Config<Fp16, false, kHeadDim, kTileQ, kStepK, kRowBlocks>, Config<Fp16, true, kHeadDim, kTileK, kStepQ, kKeyBlocks>>(
            args, *context);
}

} // namespace

extern "C" sinkattn_status sa_bwd_cuda_sm80_d64(const void *args, const sinkattn_plan *, const sinkattn_context *context) {
    return launch_dtype<64, sa_bwd_cuda_sm80_d64_tile_q, 64, 2, sa_bwd_cuda_sm80_d64_tile_k, 32, 2>(args, context);
}

extern "C" sinkattn_status sa_bwd_cuda_sm80_d128(const void *args, const sinkattn_plan *, const sinkattn_context *context) {
    return launch_dtype<128, sa_bwd_cuda_sm80_d128_tile_q, 32, 2, sa_bwd_cuda_sm80_d128_tile_k, 64, 1>(args, context);
}

extern "C" sinkattn_status sa_bwd_cuda_sm80_d256(const void *args, const sinkattn_plan *, const sinkattn_context *context) {
    return launch_dtype<256, sa_bwd_cuda_sm80_d256_tile_q, 32, 1, sa_bwd_cuda_sm80_d256_tile_k, 32, 1>(args, context);
}

} // namespace sa::bwd_sm80
