// SPDX-License-Identifier: Apache-2.0
//
// The first launch of the wide windowed backward: dQ, and of each row lse, g - delta and its term of ds_aux.
//
//     loader warp         K, V of a span | Q, dO | Q, dO | ..
//     3 checker warps     K of the span: values that are not finite become 0, and their keys are marked
//     2 math warpgroups   S = Q K^T, dP = dO V^T | P, delta, dS | dQ = dS K          each its own tiles
//
// A span is row tiles of one sequence and kv head whose keys lie in shared memory:
// kSteps steps of 16 keys from the step of the first key that its first token sees. Steps lie at multiples of 16 keys from key 0 of the
// sequence, sums run over them in ascending order and keys that a row does not see add zeros: so a row's bits do not depend on the tile.
//
// All scores of a row's window are in registers at once (kOnce), so delta is the sum of P dP in fp32 and out is not read; where a tile sees
// more than two pieces of 80 keys, S and dP are computed twice, first for delta. Positional sink tokens are one step before; its P and dP
// wait in smem.
#pragma once

#include "cuda/bwd_wide_window_sm90/spans.cuh"

namespace sa::bwd_wide_window_sm90 {

// Columns of a tile's keys that the thread's two rows see, counted from the thread's first one; columns [all_begin, all_end), counted from
// the tile's, are seen by all rows.
struct Columns {
    int begin[2], end[2], all_begin, all_end;

    __device__ __forceinline__ bool hides_some_of(int step) const {
        return kStepKeys * step < all_begin || kStepKeys * (step + 1) > all_end;
    }
    // Of a piece from step `first` on, without its steps before `own`.
    __device__ __forceinline__ Seen of_piece(int first, int own) const {
        Seen seen;
#pragma unroll
        for (int r = 0; r < 2; r++)
            seen.bits[r] =
                    Seen::before(end[r] - kStepKeys * first) & ~Seen::before(begin[r] - kStepKeys * first) & ~0u << 4 * (own - first);
        return seen;
    }
};

// LSE in log2 units, as exponentials need it.
__device__ __forceinline__ float lse_in_log2(float lse) { return lse == -INFINITY ? 0.0f : lse * kLog2e; }

__device__ __forceinline__ Columns find_columns(const Problem &p, const Span &span, int first_token, int first_key) {
    Columns seen;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const TileRow row = thread_row(r, p, span, first_token);
        const sa_range keys = row.exists ? sa_row_band(&span.band, row.token) : sa_range{first_key, first_key};
        seen.begin[r] = keys.begin - first_key - fragment_column();
        seen.end[r] = keys.end - first_key - fragment_column();
    }
    const int last = min(first_token + p.tokens, span.band.q_len) - 1;
    seen.all_begin = warp_uniform(sa_row_band(&span.band, last).begin - first_key);
    seen.all_end = warp_uniform(sa_row_band(&span.band, first_token).end - first_key);
    return seen;
}

using Piece = float[kPieceKeys / 2];    // S, P, dP or dS: 64 rows x 80 keys
using SinkPiece = float[kStepKeys / 2]; // the same of 16 keys

// A math warpgroup.
template <class C> struct RowsMath {
    using Element = typename C::Element;

    RowsSmem<C> &smem;
    const sinkattn_bwd_args &args;
    const Problem &p;
    Ring<C::kStages> ring; // the warpgroup's next tile; they go to the warpgroups in turn

    // Issues a piece of S, or of dP, from `step` of the span on; the caller waits.
    __device__ __forceinline__ void begin_scores(Piece &s, uint32_t stage, int step) const {
        wgmma_abt<Element, C::kHeadDim, C::kRowHalf, C::kKeyHalf>(
                s, shared_address(smem.queries[stage]), shared_address(smem.keys) + step * kStepKeys * kRowBytes);
    }
    __device__ __forceinline__ void begin_dp(Piece &dp, uint32_t stage, int step) const {
        wgmma_abt<Element, C::kHeadDimV, C::kRowHalf, C::kKeyHalf>(
                dp, shared_address(smem.douts[stage]), shared_address(smem.values) + step * kStepKeys * kRowBytes);
    }

    // s becomes P. first: the piece's first step in the tile; of steps before `own` another piece has the pairs.
    __device__ __forceinline__ void find_weights(
            Piece &s, const Columns &columns, const Seen &seen, const float (&all_lse)[2], int first, int own) const {
        const float lse[2] = {lse_in_log2(all_lse[0]), lse_in_log2(all_lse[1])};
#pragma unroll
        for (int k = 0; k < kPieceSteps; k++) {
#pragma unroll
            for (int i = 8 * k; i < 8 * k + 8; i++) s[i] = exp2_approx(fmaf(s[i], p.scale_log2, -lse[element_row(i)]));
            if (!columns.hides_some_of(first + k) && first + k >= own) continue;
#pragma unroll
            for (int i = 8 * k; i < 8 * k + 8; i++)
                if (!seen(element_row(i), element_column(i))) s[i] = 0.0f;
        }
    }
    // P of keys whose K was not finite becomes NaN where it is seen. step: of the piece, in the span.
    __device__ __forceinline__ void poison(Piece &weights, const Seen &seen, int step) const {
#pragma unroll
        for (int i = 0; i < kPieceKeys / 2; i++)
            if (seen(element_row(i), element_column(i)) && smem.poisoned[step * kStepKeys + element_column(i) + fragment_column()])
                weights[i] = NAN;
    }
    // Zeroes dP where a row does not see a key.
    __device__ __forceinline__ void hide(Piece &dp, const Columns &columns, const Seen &seen, int first, int own) const {
#pragma unroll
        for (int k = 0; k < kPieceSteps; k++) {
            if (!columns.hides_some_of(first + k) && first + k >= own) continue;
#pragma unroll
            for (int i = 8 * k; i < 8 * k + 8; i++)
                if (!seen(element_row(i), element_column(i))) dp[i] = 0.0f;
        }
    }
    template <int kSize>
    static __device__ __forceinline__ void add_delta(float (&delta)[2], const float (&weights)[kSize], const float (&dp)[kSize]) {
#pragma unroll
        for (int i = 0; i < kSize; i++) delta[element_row(i)] = fmaf(weights[i], dp[i], delta[element_row(i)]);
    }
    // dp becomes dS: 0 in a row without keys of the thread's, whatever its bias.
    static __device__ __forceinline__ void find_ds(Piece &dp, const Piece &weights, const float (&all_bias)[2], const Seen &seen) {
        float bias[2];
        for (int r = 0; r < 2; r++) bias[r] = seen.bits[r] ? all_bias[r] : 0.0f;
#pragma unroll
        for (int i = 0; i < kPieceKeys / 2; i++) dp[i] = weights[i] * (dp[i] + bias[element_row(i)]);
    }

    // Positional sink tokens that the thread's two rows see before their windows.
    static __device__ __forceinline__ Seen find_sinks(const Columns &columns, int num_sinks, int first_key) {
        Seen seen;
#pragma unroll
        for (int r = 0; r < 2; r++)
            seen.bits[r] =
                    columns.begin[r] < columns.end[r] ? Seen::before(min(num_sinks - fragment_column(), columns.begin[r] + first_key)) : 0;
        return seen;
    }
    __device__ __forceinline__ float4 *kept_dp() const {
        static_assert(kStagedBytes == 2 * 32 * sizeof(float4), "8 of dP a thread");
        return reinterpret_cast<float4 *>(smem.staged[threadIdx.x / 32]) + threadIdx.x % 32;
    }
    // Keeps the sink tokens' P and dP, 0 where a row does not see a key, and adds P dP to delta.
    __device__ __forceinline__ void keep_sinks(
            SinkPiece &s, SinkPiece &dp, float (&delta)[2], const Seen &seen, const float (&all_lse)[2]) const {
#pragma unroll
        for (int i = 0; i < kStepKeys / 2; i++) {
            const int r = element_row(i), key = element_column(i);
            const bool sees = seen(r, key);
            s[i] = sees ? exp2_approx(fmaf(s[i], p.scale_log2, -lse_in_log2(all_lse[r]))) : 0.0f;
            if (smem.sinks.any_poisoned && sees && smem.sinks.poisoned[key + fragment_column()]) s[i] = NAN;
            dp[i] = sees ? dp[i] : 0.0f;
        }
        add_delta(delta, s, dp);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            smem.sinks.weights[i][threadIdx.x] = {s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]};
            kept_dp()[32 * i] = {dp[4 * i], dp[4 * i + 1], dp[4 * i + 2], dp[4 * i + 3]};
        }
    }
    // Issues dQ = dS K of the sink tokens. dS is 0 where P is 0; a bias of NaN still reaches dQ through the row's window.
    __device__ __forceinline__ void begin_sinks_dq(Wide<C> &dq, const float (&bias)[2], bool are_kept) const {
        SinkPiece dp;
        uint32_t ds[1][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 s = smem.sinks.weights[i][threadIdx.x], d = kept_dp()[32 * i];
            const float each[4] = {s.x, s.y, s.z, s.w}, of[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
            for (int n = 0; n < 4; n++) dp[4 * i + n] = !are_kept || each[n] == 0.0f ? 0.0f : each[n] * (of[n] + bias[n / 2]);
        }
        pack<Element>(ds, dp);
        dq.template add_product<kSinkHalf>(ds, shared_address(smem.sinks.keys), false);
    }

    // delta: of this thread's columns. bias: g - delta.
    static __device__ __forceinline__ void find_bias(float (&bias)[2], const float (&delta)[2], const float (&g)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) bias[r] = g[r] - quad_sum(delta[r]);
    }
    // Four lanes share two rows; the first one writes.
    __device__ __forceinline__ void write_stats(
            const float (&bias)[2], const float (&all_lse)[2], uint32_t suspects, const Span &span, int first_token) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const TileRow row = thread_row(r, smem.problem, span, first_token);
            if (row.exists && threadIdx.x % 4 == 0) {
                const float lse = all_lse[r], s_aux = span.s_aux[row.head];
                float p_sink = s_aux == lse ? 1.0f : exp2_approx((s_aux - lse) * kLog2e);
                if (s_aux == -INFINITY) p_sink = 0.0f;
                span.stats[(first_token - span.first_token) * smem.problem.group + row.row] = {
                        lse_in_log2(lse), bias[r], p_sink == 0.0f ? 0.0f : p_sink * bias[r], suspects >> r & 1};
            }
        }
    }

    // Bit r: row r of Q, or of dO, may not be finite, since that makes its row of S, or of dP, so, whatever the keys.
    static __device__ __forceinline__ uint32_t find_suspects(const Piece &product) {
        uint32_t found = 0;
        for (int r = 0; r < 2; r++)
            if (fmaf(product[2 * r], 0.0f, 0.0f) != 0.0f) found |= 1u << r;
        return found;
    }

    __device__ __forceinline__ void begin_dq(Wide<C> &dq, const uint32_t (&ds)[kPieceSteps][4], int step, bool adds) const {
        dq.template add_product<C::kKeyHalf>(ds, shared_address(smem.keys) + step * kStepKeys * kRowBytes, adds);
    }

    // The thread's rows of dQ; NULL where there is none.
    __device__ __forceinline__ void find_rows(uint16_t *(&to)[2], const Span &span, int first_token) const {
        const sinkattn_tensor &tensor = smem.args.dq;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const TileRow row = thread_row(r, smem.problem, span, first_token);
            to[r] = row.exists ? span.dq + (row.token - span.first_token) * tensor.row_stride + row.head * tensor.head_stride : nullptr;
        }
    }
    __device__ __forceinline__ void write(const Wide<C> &dq, uint16_t *const (&to)[2]) const {
        dq.write(to, p.scale, static_cast<int>(smem.args.fwd.problem.head_dim), smem.staged[threadIdx.x / 32]);
    }

    __device__ __forceinline__ void read_stats(float (&lse)[2], float (&g)[2], uint32_t stage) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            lse[r] = smem.lse[stage][warpgroup_row(r)];
            g[r] = smem.g[stage][warpgroup_row(r)];
        }
    }

    // dQ of a tile whose keys lie in two pieces from `step` of the span on. is_last: the warpgroup's last one of the span.
    __device__ __forceinline__ void differentiate_once(Wide<C> &dq, const Span &span, int first_token, int step, bool is_last) {
        const uint32_t stage = warp_uniform(ring.stage());
        Piece s0, s1, dp0, dp1;
        smem.k_full[0].wait(Ring<1>{span.number});
        if (step * kStepKeys + kPieceKeys > C::kKeys / 2) smem.k_full[1].wait(Ring<1>{span.number});
        begin_scores(s0, stage, step);
        smem.k_full[1].wait(Ring<1>{span.number});
        begin_scores(s1, stage, step + kPieceSteps);
        // S issued
        float lse[2], g[2], delta[2] = {}, bias[2];
        read_stats(lse, g, stage);
        const Columns columns = find_columns(smem.problem, span, first_token, span.first_key + step * kStepKeys);
        const Seen seen0 = columns.of_piece(0, 0), seen1 = columns.of_piece(kPieceSteps, kPieceSteps);
        bool meets = false; // sink tokens
        if constexpr (C::kSinks) {
            const int first_key = span.first_key + step * kStepKeys;
            meets = columns.all_begin + first_key > 0;
            smem.sinks.ready.wait(Ring<1>{span.number});
            if (meets) {
                SinkPiece s, dp;
                wgmma_abt<Element, C::kHeadDim, C::kRowHalf, kSinkHalf>(
                        s, shared_address(smem.queries[stage]), shared_address(smem.sinks.keys));
                wgmma_abt<Element, C::kHeadDimV, C::kRowHalf, kSinkHalf>(
                        dp, shared_address(smem.douts[stage]), shared_address(smem.sinks.values));
                wgmma_wait<0>(); // all complete, S too
                pin(s);
                pin(dp);
                keep_sinks(s, dp, delta, find_sinks(columns, span.num_sinks, first_key), lse);
            }
        }
        smem.v_full.wait(Ring<1>{span.number});
        begin_dp(dp0, stage, step);
        begin_dp(dp1, stage, step + kPieceSteps);
        // S, dP issued
        wgmma_wait<2>(); // S complete; dP still running
        pin(s0);
        pin(s1);
        uint32_t suspects = find_suspects(s0);
        find_weights(s0, columns, seen0, lse, 0, 0);
        find_weights(s1, columns, seen1, lse, kPieceSteps, 0);
        wgmma_wait<0>();
        pin(dp0);
        pin(dp1);
        smem.row_empty.release(ring);
        if (is_last) smem.v_empty[0].arrive();
        suspects |= find_suspects(dp0);
        smem.k_ready.wait(Ring<1>{span.number});
        if (smem.any_poisoned) {
            poison(s0, seen0, step);
            poison(s1, seen1, step + kPieceSteps);
        }
        hide(dp0, columns, seen0, 0, 0);
        hide(dp1, columns, seen1, kPieceSteps, 0);
        add_delta(delta, s0, dp0);
        add_delta(delta, s1, dp1);
        find_bias(bias, delta, g);
        uint32_t ds0[kPieceSteps][4], ds1[kPieceSteps][4];
        find_ds(dp0, s0, bias, seen0);
        pack<Element>(ds0, dp0);
        find_ds(dp1, s1, bias, seen1);
        pack<Element>(ds1, dp1);
        if constexpr (C::kSinks) begin_sinks_dq(dq, bias, meets);
        begin_dq(dq, ds0, step, C::kSinks);
        begin_dq(dq, ds1, step + kPieceSteps, true);
        // dQ issued
        write_stats(bias, lse, suspects, span, first_token);
        uint16_t *to[2];
        find_rows(to, span, first_token);
        wgmma_wait<0>();
        dq.pin_all();
        if (is_last) smem.k_empty[0].arrive();
        write(dq, to);
    }

    // The same in pieces of which S and dP are computed twice.
    __device__ __forceinline__ void differentiate_twice(Wide<C> &dq, const Span &span, int first_token, int step, bool is_last) {
        const uint32_t stage = warp_uniform(ring.stage());
        float lse[2], g[2], delta[2] = {}, bias[2] = {};
        read_stats(lse, g, stage);
        const Columns columns = find_columns(smem.problem, span, first_token, span.first_key + step * kStepKeys);
        const int last = min(first_token + p.tokens, span.band.q_len) - 1,
                  end = warp_uniform(sa_row_band(&span.band, last).end - span.first_key - step * kStepKeys),
                  num_pieces = max(sa_tile_from(max(end, 0), kPieceKeys), 1);
        // Once K is loaded, the span before is done with its K and V. A warpgroup without a tile there, which skipped k_ready and v_full,
        // would else wait for a phase beyond the next, and pass.
        smem.k_full[0].wait(Ring<1>{span.number});
        smem.k_ready.wait(Ring<1>{span.number});
        smem.v_full.wait(Ring<1>{span.number});
        uint32_t suspects = 0;
        dq.clear();
#pragma unroll 1
        for (int n = 0; n < 2 * num_pieces; n++) { // the first time for delta
            const int piece = n < num_pieces ? n : n - num_pieces, own = piece * kPieceSteps,
                      first = min(own, C::kSteps - kPieceSteps - step); // the last piece must lie in shared memory
            Piece s, dp;
            begin_scores(s, stage, step + first);
            begin_dp(dp, stage, step + first);
            wgmma_wait<0>();
            pin(s);
            pin(dp);
            if (n == 0) suspects = find_suspects(s) | find_suspects(dp);
            const Seen seen = columns.of_piece(first, own);
            find_weights(s, columns, seen, lse, first, own);
            if (smem.any_poisoned) poison(s, seen, step + first);
            hide(dp, columns, seen, first, own);
            if (n < num_pieces) {
                add_delta(delta, s, dp);
                if (n < num_pieces - 1) continue;
                find_bias(bias, delta, g);
                write_stats(bias, lse, suspects, span, first_token);
                continue;
            }
            uint32_t ds[kPieceSteps][4];
            find_ds(dp, s, bias, seen);
            pack<Element>(ds, dp);
            begin_dq(dq, ds, step + first, true);
            wgmma_wait<0>();
            dq.pin_all();
        }
        smem.row_empty.release(ring);
        if (is_last) smem.v_empty[0].arrive();
        if (is_last) smem.k_empty[0].arrive();
        uint16_t *to[2];
        find_rows(to, span, first_token);
        write(dq, to);
    }

    __device__ __forceinline__ void run() {
        for (Ring<2> spans;; spans.n++) {
            smem.span_full.wait(spans);
            const Span &span = smem.spans[spans.stage()];
            if (!warp_uniform(span.exists)) return;
            // Read again at each use: no register is free to keep them.
            const auto nth = [&] { return warp_uniform(static_cast<int>(ring.n - span.first_use)); };
            const auto first_token_of = [&](int n) { return warp_uniform(span.first_token) + n * p.tokens; };
            // No tile of the span is this warpgroup's. It skips sinks.ready, k_ready and v_full: the other one waits for all before it
            // releases K.
            if (nth() >= warp_uniform(span.num_tiles)) {
                for (Barriers<1> &full : smem.k_full) full.wait(Ring<1>{spans.n});
                smem.v_empty[0].arrive();
                smem.k_empty[0].arrive();
            }
            // In flight at the top: no wgmma.
            for (; nth() < warp_uniform(span.num_tiles); ring.n += kWarpgroups) {
                const int first_token = first_token_of(nth());
                const int first_key = sa_window_begin(&span.band, sa_position(&span.band, first_token)) - span.first_key;
                const int step = warp_uniform(min(sa_tile_of(first_key, kStepKeys), C::kSteps - C::kFirstSteps));
                const bool is_last = nth() + kWarpgroups >= warp_uniform(span.num_tiles);
                Wide<C> dq;
                smem.row_full.wait(ring);
                if constexpr (C::kOnce)
                    differentiate_once(dq, span, first_token, step, is_last);
                else
                    differentiate_twice(dq, span, first_token, step, is_last);
            }
            spans.n = span.number;
            smem.span_empty.release(spans);
        }
    }
};

template <class C>
__global__ __launch_bounds__(kThreads, 1) void rows_kernel(const __grid_constant__ sinkattn_bwd_args args,
        const __grid_constant__ Maps maps, const __grid_constant__ Problem p, unsigned *error_word) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<RowsSmem<C> *>(shared);
    if (threadIdx.x == 0) {
        for (const CUtensorMap *map : {&maps.q, &maps.dout, &maps.k, &maps.v}) tensor_map_prefetch(map);
        if (C::kSinks)
            for (const CUtensorMap *map : {&maps.sink_k, &maps.sink_v}) tensor_map_prefetch(map);
        for (int i = 0; i < 2; i++) {
            smem.span_full[i].init(32);
            smem.span_empty[i].init(kMathThreads + kCheckers);
        }
        for (Barriers<1> &full : smem.k_full) full[0].init(1);
        smem.k_ready[0].init(kCheckers);
        if constexpr (C::kSinks) smem.sinks.ready[0].init(kCheckers);
        smem.v_full[0].init(1);
        for (Barriers<1> *empty : {&smem.k_empty, &smem.v_empty}) (*empty)[0].init(kMathThreads);
        smem.args = args;
        smem.problem = p;
        for (int i = 0; i < C::kStages; i++) {
            smem.row_full[i].init(1 + 32);
            smem.row_empty[i].init(128);
        }
        barrier_init_fence();
    }
    let_next_kernel_start(); // which waits for this one before it reads statistics
    const int warp = warp_uniform(threadIdx.x / 32);
    for (int i = static_cast<int>(threadIdx.x); i < C::kStages * kRows; i += kThreads) smem.g[i / kRows][i % kRows] = 0.0f;
    // Rows of a tile past its whole tokens are never loaded; what they hold reaches rows that are not written alone.
    if (blockIdx.x == 0) check_lengths(args.fwd, error_word);
    __syncthreads();
    if (warp < kMathThreads / 32) {
        registers_up<kRowsMathRegisters>();
        RowsMath<C>{smem, args, p, {static_cast<uint32_t>(warp) / 4}}.run();
        return;
    }
    registers_down<kRowsLoaderRegisters>();
    if (warp == kMathThreads / 32)
        load_rows<C>(smem, args, maps, p);
    else
        check_keys<C>(smem);
#else
    __trap();
#endif
}

} // namespace sa::bwd_wide_window_sm90
