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
// All scores of a row are in registers at once (kOnce), so delta is the sum of P dP in fp32 and out is not read; where a tile sees more
// than two pieces of 80 keys, S and dP are computed twice, first for delta.
#pragma once

#include "cuda/bwd_wide_window_sm90/smem.cuh"
#include "cuda/tile/finite.cuh"

namespace sa::bwd_wide_window_sm90 {

enum NamedBarrier : int { kCheckerBarrier = 1 }; // 0 is __syncthreads
constexpr int kCheckers = 96;

// kSteps: steps of keys in shared memory. kOnce: a tile sees at most two pieces of keys.
template <class W, int kSteps_, int kStages_, bool kOnce_> struct RowsConfig : W {
    using typename W::Element;
    using W::kHalves, W::kHalvesV, W::kRowHalf;
    static constexpr int kSteps = kSteps_, kStages = kStages_, kKeys = kSteps * kStepKeys, kKeyHalf = kKeys * kRowBytes;
    static constexpr bool kOnce = kOnce_;
    static constexpr int kFirstSteps = kOnce ? 2 * kPieceSteps : kPieceSteps; // behind a tile's first one, in shared memory
    static_assert(kStages % kWarpgroups == 0, "a stage is always the same warpgroup's, so none waits for a phase beyond the next");
    static_assert(kKeys <= 256, "a box of a tensor map");
};

struct Span {
    sa_sequence sequence;
    sa_band band;
    int first_token, num_tiles, first_key, kv_head; // first_key: of step 0, which may lie before key 0
    uint32_t first_use, number;                     // of the ring of row tiles; of the block's spans
    bool exists;
    float s_aux[kRows]; // of a head
};

template <class C> struct RowsSmem {
    alignas(1024) unsigned char keys[C::kHalves * C::kKeyHalf], values[C::kHalvesV * C::kKeyHalf];
    alignas(1024) unsigned char queries[C::kStages][C::kHalves * C::kRowHalf], douts[C::kStages][C::kHalvesV * C::kRowHalf];
    sinkattn_bwd_args args; // of the launch: no register is free to keep fields, and through a pointer constants take a load from memory
    Problem problem;
    Span spans[2];
    bool poisoned[C::kKeys], any_poisoned; // keys whose K was not finite
    Barriers<2> span_full, span_empty;
    Barriers<1> k_full, k_ready, k_empty, v_full, v_empty; // ready: K is checked
    Barriers<C::kStages> row_full, row_empty;
};

// Writes span n of the launch, if it exists. By a whole warp.
__device__ __forceinline__ bool describe_span(
        Span &to, unsigned n, uint32_t number, uint32_t first_use, const sinkattn_fwd_args &args, const Problem &p) {
    const Place place = find_place(
            n / p.num_kv_heads, p.span_tokens, p.batch_spans, args.problem.batch, [&](int64_t b) { return rows_before(args, b); });
    const sa_sequence sequence = sequence_or_tail(args, place.b);
    // Offsets that decrease may leave a place in front of its sequence.
    if (place.within < 0 || static_cast<int64_t>(place.within) * p.span_tokens >= sequence.q_len) return false;
    const int kv_head = static_cast<int>(n % p.num_kv_heads), first_token = place.within * p.span_tokens;
    if (threadIdx.x % 32 == 0) {
        to.exists = true;
        to.sequence = sequence;
        to.band = band_of(args, sequence);
        to.kv_head = kv_head;
        to.first_use = first_use;
        to.number = number;
        to.first_token = first_token;
        to.num_tiles = sa_tile_from(min(to.band.q_len - first_token, p.span_tokens), p.tokens);
        to.first_key = sa_window_begin(&to.band, sa_position(&to.band, first_token)) & -kStepKeys;
    }
    const bool has_sink = args.s_aux && place.b < static_cast<unsigned>(args.problem.batch);
#pragma unroll 1
    for (int head = static_cast<int>(threadIdx.x % 32); head < p.group; head += 32)
        to.s_aux[head] =
                has_sink ? static_cast<float>(sa_load(args.s_aux, args.problem.s_aux_dtype, static_cast<int64_t>(kv_head) * p.group + head))
                         : -INFINITY;
    __syncwarp();
    return true;
}

// A lane of the first few has a piece of 64 columns: of K and of Q, or of V and of dO.
template <class C>
__device__ __forceinline__ void load_rows(RowsSmem<C> &smem, const sinkattn_bwd_args &args, const Maps &maps, const Problem &p) {
    constexpr int kPieces = C::kHalves + C::kHalvesV;
    const int lane = threadIdx.x % 32, half = lane < C::kHalves ? lane : lane - C::kHalves;
    unsigned char *const keys = (lane < C::kHalves ? smem.keys : smem.values) + half * C::kKeyHalf;
    Ring<2> spans;
    Ring<C::kStages> ring;
    for (unsigned n = blockIdx.x; n < p.num_spans * p.num_kv_heads; n += gridDim.x) {
        smem.span_empty.acquire(spans);
        if (!describe_span(smem.spans[spans.stage()], n, spans.n, ring.n, args.fwd, p)) continue;
        const Span &span = smem.spans[spans.stage()];
        smem.span_full.arrive(spans);
        const int batch = static_cast<int>(span.sequence.batch), kv_head = span.kv_head;
        const int key = static_cast<int>(span.sequence.k_begin) + span.first_key;
        smem.k_empty.acquire(Ring<1>{spans.n});
        if (lane == 0) smem.k_full[0].arrive_expect(C::kHalves * C::kKeyHalf);
        __syncwarp();
        if (lane < C::kHalves) tensor_load(keys, &maps.k, smem.k_full[0], 64 * half, kv_head, key, batch);
        smem.v_empty.acquire(Ring<1>{spans.n});
        if (lane == 0) smem.v_full[0].arrive_expect(C::kHalvesV * C::kKeyHalf);
        __syncwarp();
        if (lane >= C::kHalves && lane < kPieces) tensor_load(keys, &maps.v, smem.v_full[0], 64 * half, kv_head, key, batch);
        int row = static_cast<int>(span.sequence.q_begin) + span.first_token;
#pragma unroll 1
        for (const uint32_t end = ring.n + span.num_tiles; ring.n != end; ring.n++, row += p.tokens) {
            // In flight: K and V of the span; at most kStages tiles.
            const uint32_t stage = ring.stage();
            smem.row_empty.acquire(ring);
            if (lane == 0) smem.row_full[stage].arrive_expect(kPieces * p.tile_rows() * kRowBytes);
            __syncwarp();
            if (lane < kPieces)
                tensor_load((lane < C::kHalves ? smem.queries[stage] : smem.douts[stage]) + half * C::kRowHalf,
                        lane < C::kHalves ? &maps.q : &maps.dout, smem.row_full[stage], 64 * half, kv_head * p.group, row, batch);
        }
        spans.n++;
    }
    smem.span_empty.acquire(spans);
    if (lane == 0) smem.spans[spans.stage()].exists = false;
    smem.span_full.arrive(spans);
}

// By the checker warps: a masked pair's dS = 0 times K must be zero. Math warpgroups may be reading K for S meanwhile, whose masked scores
// are not used; those of marked keys that a row sees become NaN.
template <class C> __device__ __forceinline__ void check_keys(RowsSmem<C> &smem) {
    using Element = typename C::Element;
    const int thread = static_cast<int>(threadIdx.x) - (kThreads - kCheckers);
    for (Ring<2> spans;; spans.n++) {
        smem.span_full.wait(spans);
        const bool exists = smem.spans[spans.stage()].exists;
        if (!exists) return;
        smem.k_full.wait(Ring<1>{spans.n});
        const bool any = bar_any<kCheckers>(kCheckerBarrier, any_nonfinite<Element, kCheckers>(smem.keys, sizeof smem.keys, thread));
        if (any) {
            for (int key = thread; key < C::kKeys; key += kCheckers) smem.poisoned[key] = false;
            bar_sync<kCheckers>(kCheckerBarrier);
            for (int x = thread; x < static_cast<int>(sizeof smem.keys) / 16; x += kCheckers)
                if (zero_nonfinite<Element, 1>(smem.keys + 16 * x, 16, 0)) smem.poisoned[x % (C::kKeyHalf / 16) / 8] = true;
        }
        async_fence(); // also of what was read, before a copy overwrites it
        if (thread == 0) smem.any_poisoned = any;
        smem.k_ready[0].arrive();
        smem.span_empty.release(spans);
    }
}

// Columns of a tile's keys that the thread's two rows see, counted from the thread's first one; columns [all_begin, all_end), counted from
// the tile's, are seen by all rows.
struct Columns {
    int begin[2], end[2], all_begin, all_end;

    __device__ __forceinline__ bool hides_some_of(int step) const {
        return kStepKeys * step < all_begin || kStepKeys * (step + 1) > all_end;
    }
    __device__ __forceinline__ bool sees(int r, int column) const { return column >= begin[r] && column < end[r]; }
};

// The thread's r-th row of a tile; found again at each use, as registers are short. token: of the sequence.
struct ThreadRow {
    int token, head;
    bool exists;

    __device__ __forceinline__ ThreadRow(int r, const Problem &p, const Span &span, int first_token) {
        const int row = warpgroup_row(static_cast<unsigned>(pinned(static_cast<int>(threadIdx.x)) % 128), r), within = p.row_token(row);
        token = first_token + within;
        head = row - within * p.group;
        exists = within < p.tokens && token < span.band.q_len;
    }
};

// Of a row in lse and dlse.
__device__ __forceinline__ int64_t stats_index(const sinkattn_bwd_args &args, const Problem &p, const Span &span, const ThreadRow &row) {
    return sa_row_index(&args.fwd.problem, &span.sequence, static_cast<int64_t>(span.kv_head) * p.group + row.head, row.token);
}

// LSE in log2 units, as exponentials need it.
__device__ __forceinline__ float lse_in_log2(float lse) { return lse == -INFINITY ? 0.0f : lse * kLog2e; }

// LSE and g of the thread's rows; infinity and 0 where there is none.
__device__ __forceinline__ void load_stats(
        float (&lse)[2], float (&g)[2], const sinkattn_bwd_args &args, const Problem &p, const Span &span, int first_token) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const ThreadRow row(r, p, span, first_token);
        lse[r] = INFINITY;
        g[r] = 0.0f;
        if (!row.exists) continue;
        const int64_t at = stats_index(args, p, span, row);
        lse[r] = static_cast<const float *>(args.fwd.lse)[at];
        if (args.dlse) g[r] = static_cast<const float *>(args.dlse)[at];
    }
}

__device__ __forceinline__ Columns find_columns(const Problem &p, const Span &span, int first_token, int first_key) {
    Columns seen;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const ThreadRow row(r, p, span, first_token);
        const sa_range keys = row.exists ? sa_row_band(&span.band, row.token) : sa_range{first_key, first_key};
        seen.begin[r] = keys.begin - first_key - fragment_column();
        seen.end[r] = keys.end - first_key - fragment_column();
    }
    const int last = min(first_token + p.tokens, span.band.q_len) - 1;
    seen.all_begin = warp_uniform(sa_row_band(&span.band, last).begin - first_key);
    seen.all_end = warp_uniform(sa_row_band(&span.band, first_token).end - first_key);
    return seen;
}

using Piece = float[kPieceKeys / 2]; // S, P, dP or dS: 64 rows x 80 keys

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
            Piece &s, const Columns &seen, const float (&all_lse)[2], int first, int own, int step) const {
        const float lse[2] = {lse_in_log2(all_lse[0]), lse_in_log2(all_lse[1])};
        if (smem.any_poisoned) {
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int i = 0; i < kPieceKeys / 2; i++)
                    if (element_row(i) == r && smem.poisoned[step * kStepKeys + element_column(i) + fragment_column()]) s[i] = NAN;
        }
#pragma unroll
        for (int k = 0; k < kPieceSteps; k++) {
#pragma unroll
            for (int i = 8 * k; i < 8 * k + 8; i++) s[i] = exp2_approx(fmaf(s[i], p.scale_log2, -lse[element_row(i)]));
            if (!seen.hides_some_of(first + k) && first + k >= own) continue;
#pragma unroll
            for (int i = 8 * k; i < 8 * k + 8; i++)
                if (first + k < own || !seen.sees(element_row(i), kStepKeys * first + element_column(i))) s[i] = 0.0f;
        }
    }
    // Zeroes dP where a row does not see a key.
    __device__ __forceinline__ void hide(Piece &dp, const Columns &seen, int first, int own) const {
#pragma unroll
        for (int k = 0; k < kPieceSteps; k++) {
            if (!seen.hides_some_of(first + k) && first + k >= own) continue;
#pragma unroll
            for (int i = 8 * k; i < 8 * k + 8; i++)
                if (first + k < own || !seen.sees(element_row(i), kStepKeys * first + element_column(i))) dp[i] = 0.0f;
        }
    }
    static __device__ __forceinline__ void add_delta(float (&delta)[2], const Piece &weights, const Piece &dp) {
#pragma unroll
        for (int i = 0; i < kPieceKeys / 2; i++) delta[element_row(i)] = fmaf(weights[i], dp[i], delta[element_row(i)]);
    }
    // dp becomes dS.
    static __device__ __forceinline__ void find_ds(Piece &dp, const Piece &weights, const float (&bias)[2]) {
#pragma unroll
        for (int i = 0; i < kPieceKeys / 2; i++) dp[i] = weights[i] * (dp[i] + bias[element_row(i)]);
    }

    // delta: of this thread's columns. bias: g - delta, 0 for a row without keys. Four lanes share two rows; the first one writes.
    __device__ __forceinline__ void finish_rows(float (&bias)[2], const float (&delta)[2], const float (&all_lse)[2], const float (&g)[2],
            uint32_t suspects, const Columns &seen, const Span &span, int first_token) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            bias[r] = g[r] - quad_sum(delta[r]);
            const ThreadRow row(r, smem.problem, span, first_token);
            if (row.exists && threadIdx.x % 4 == 0) {
                const float lse = all_lse[r], s_aux = span.s_aux[row.head];
                float p_sink = s_aux == lse ? 1.0f : exp2_approx((s_aux - lse) * kLog2e);
                if (s_aux == -INFINITY) p_sink = 0.0f;
                smem.problem.stats_of(smem.args.fwd.problem, span.sequence, span.kv_head, row.token)[row.head] = {
                        lse_in_log2(lse), bias[r], p_sink == 0.0f ? 0.0f : p_sink * bias[r], suspects >> r & 1};
            }
            if (seen.begin[r] == seen.end[r]) bias[r] = 0.0f;
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

    // dQ of a tile whose keys lie in two pieces from `step` of the span on. is_last: the warpgroup's last one of the span.
    __device__ __forceinline__ void differentiate_once(Wide<C> &dq, const Span &span, int first_token, int step, bool is_last) {
        const uint32_t stage = warp_uniform(ring.stage());
        Piece s0, s1, dp0, dp1;
        begin_scores(s0, stage, step);
        begin_scores(s1, stage, step + kPieceSteps);
        smem.v_full.wait(Ring<1>{span.number});
        begin_dp(dp0, stage, step);
        begin_dp(dp1, stage, step + kPieceSteps);
        // S, dP issued
        float lse[2], g[2], delta[2] = {}, bias[2] = {};
        load_stats(lse, g, smem.args, smem.problem, span, first_token);
        const Columns seen = find_columns(smem.problem, span, first_token, span.first_key + step * kStepKeys);
        smem.k_ready.wait(Ring<1>{span.number});
        wgmma_wait<2>(); // S complete; dP still running
        pin(s0);
        pin(s1);
        pin(lse); // else it is awaited before S
        uint32_t suspects = find_suspects(s0);
        find_weights(s0, seen, lse, 0, 0, step);
        find_weights(s1, seen, lse, kPieceSteps, 0, step + kPieceSteps);
        wgmma_wait<0>();
        pin(dp0);
        pin(dp1);
        smem.row_empty.release(ring);
        if (is_last) smem.v_empty[0].arrive();
        suspects |= find_suspects(dp0);
        hide(dp0, seen, 0, 0);
        hide(dp1, seen, kPieceSteps, 0);
        add_delta(delta, s0, dp0);
        add_delta(delta, s1, dp1);
        finish_rows(bias, delta, lse, g, suspects, seen, span, first_token);
        uint32_t ds0[kPieceSteps][4], ds1[kPieceSteps][4];
        find_ds(dp0, s0, bias);
        pack<Element>(ds0, dp0);
        find_ds(dp1, s1, bias);
        pack<Element>(ds1, dp1);
        begin_dq(dq, ds0, step, false);
        begin_dq(dq, ds1, step + kPieceSteps, true);
        wgmma_wait<0>();
        dq.pin_all();
        if (is_last) smem.k_empty[0].arrive();
    }

    // The same in pieces of which S and dP are computed twice.
    __device__ __forceinline__ void differentiate_twice(Wide<C> &dq, const Span &span, int first_token, int step, bool is_last) {
        const uint32_t stage = warp_uniform(ring.stage());
        float lse[2], g[2], delta[2] = {}, bias[2] = {};
        load_stats(lse, g, smem.args, smem.problem, span, first_token);
        const Columns seen = find_columns(smem.problem, span, first_token, span.first_key + step * kStepKeys);
        const int last = min(first_token + p.tokens, span.band.q_len) - 1,
                  end = warp_uniform(sa_row_band(&span.band, last).end - span.first_key - step * kStepKeys),
                  num_pieces = max(sa_tile_from(max(end, 0), kPieceKeys), 1);
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
            find_weights(s, seen, lse, first, own, step + first);
            hide(dp, seen, first, own);
            if (n < num_pieces) {
                add_delta(delta, s, dp);
                if (n == num_pieces - 1) finish_rows(bias, delta, lse, g, suspects, seen, span, first_token);
                continue;
            }
            uint32_t ds[kPieceSteps][4];
            find_ds(dp, s, bias);
            pack<Element>(ds, dp);
            begin_dq(dq, ds, step + first, true);
            wgmma_wait<0>();
            dq.pin_all();
        }
        smem.row_empty.release(ring);
        if (!is_last) return;
        smem.v_empty[0].arrive();
        smem.k_empty[0].arrive();
    }

    __device__ __forceinline__ void write(const Wide<C> &dq, const Span &span, int first_token) const {
        const sinkattn_tensor &tensor = smem.args.dq;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const ThreadRow row(r, smem.problem, span, first_token);
            auto *to = static_cast<uint16_t *>(tensor.data);
            to = row.exists ? to + sa_offset(&tensor, span.sequence.batch, span.sequence.q_begin + row.token,
                                           static_cast<int64_t>(span.kv_head) * smem.problem.group + row.head)
                            : nullptr;
            dq.write(to, r, p.scale, static_cast<int>(smem.args.fwd.problem.head_dim));
        }
    }

    __device__ __forceinline__ void run() {
        for (Ring<2> spans;; spans.n++) {
            smem.span_full.wait(spans);
            const Span &span = smem.spans[spans.stage()];
            if (!warp_uniform(span.exists)) return;
            smem.k_full.wait(Ring<1>{spans.n});
            // Read again at each use: no register is free to keep them.
            const auto nth = [&] { return warp_uniform(static_cast<int>(ring.n - span.first_use)); };
            const auto first_token_of = [&](int n) { return warp_uniform(span.first_token) + n * p.tokens; };
            // No tile of the span is this warpgroup's. It skips k_ready and v_full: the other one waits for both before it releases K.
            if (nth() >= warp_uniform(span.num_tiles)) {
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
                write(dq, span, first_token_of(nth()));
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
        for (int i = 0; i < 2; i++) {
            smem.span_full[i].init(32);
            smem.span_empty[i].init(kMathThreads + kCheckers);
        }
        smem.k_full[0].init(1);
        smem.k_ready[0].init(kCheckers);
        smem.v_full[0].init(1);
        for (Barriers<1> *empty : {&smem.k_empty, &smem.v_empty}) (*empty)[0].init(kMathThreads);
        smem.args = args;
        smem.problem = p;
        for (int i = 0; i < C::kStages; i++) {
            smem.row_full[i].init(1);
            smem.row_empty[i].init(128);
        }
        barrier_init_fence();
    }
    const int warp = warp_uniform(threadIdx.x / 32);
    // Rows of a tile past its whole tokens are never loaded; what they hold reaches rows that are not written alone.
    if (blockIdx.x == 0) check_lengths(args.fwd, error_word);
    __syncthreads();
    if (warp < kMathThreads / 32) {
        registers_up<kMathRegisters>();
        RowsMath<C>{smem, args, p, {static_cast<uint32_t>(warp) / 4}}.run();
        return;
    }
    registers_down<kLoaderRegisters>();
    if (warp == kMathThreads / 32)
        load_rows<C>(smem, args, maps, p);
    else
        check_keys<C>(smem);
#else
    __trap();
#endif
}

} // namespace sa::bwd_wide_window_sm90
