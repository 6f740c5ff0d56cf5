// SPDX-License-Identifier: Apache-2.0
//
// The launch of rows: its spans, its shared memory, and the warps that load and check.
#pragma once

#include "cuda/bwd_wide_window_sm90/smem.cuh"
#include "cuda/tile/finite.cuh"

namespace sa::bwd_wide_window_sm90 {

enum NamedBarrier : int { kCheckerBarrier = 1 }; // 0 is __syncthreads
constexpr int kCheckers = 96;

// kSteps: steps of keys in shared memory. kOnce: a tile sees at most two pieces of keys. kSinks: there are positional sink tokens.
template <class W, int kSteps_, int kStages_, bool kOnce_, bool kSinks_> struct RowsConfig : W {
    using typename W::Element;
    using W::kHalves, W::kHalvesV, W::kRowHalf;
    static constexpr int kSteps = kSteps_, kStages = kStages_, kKeys = kSteps * kStepKeys, kKeyHalf = kKeys * kRowBytes;
    static constexpr bool kOnce = kOnce_, kSinks = kSinks_;
    static_assert(kOnce || !kSinks, "sink tokens need kOnce");
    static constexpr int kFirstSteps = kOnce ? 2 * kPieceSteps : kPieceSteps; // behind a tile's first one, in shared memory
    static_assert(kStages % kWarpgroups == 0, "a stage is always the same warpgroup's, so none waits for a phase beyond the next");
    static_assert(kKeys <= 256, "a box of a tensor map");
    static_assert(kKeys / 2 % 8 == 0, "both halves of the keys begin with a whole atom of the swizzle");
};

struct Span {
    sa_sequence sequence;
    sa_band band;
    int first_token, num_tiles, first_key, kv_head; // first_key: of step 0, which may lie before key 0
    int num_sinks;                                  // positional sink tokens that exist
    uint32_t first_use, number;                     // of the ring of row tiles; of the block's spans
    RowStats *stats;                                // of the first row
    uint16_t *dq;                                   // of the first token's first head
    bool exists;
    float s_aux[kRows]; // of a head
};

// K and V of positional sink tokens, and P of each thread's pairs with them, until delta is known; dP waits in `staged`.
template <class C, bool kSinks = C::kSinks> struct SinkStep {};
template <class C> struct SinkStep<C, true> {
    alignas(1024) unsigned char keys[C::kHalves * kSinkHalf], values[C::kHalvesV * kSinkHalf];
    float4 weights[2][kMathThreads];
    bool poisoned[kStepKeys], any_poisoned;
    Barriers<1> ready; // checked
};

template <class C> struct RowsSmem {
    alignas(1024) unsigned char keys[C::kHalves * C::kKeyHalf], values[C::kHalvesV * C::kKeyHalf];
    alignas(1024) unsigned char queries[C::kStages][C::kHalves * C::kRowHalf], douts[C::kStages][C::kHalvesV * C::kRowHalf];
    sinkattn_bwd_args args; // of the launch: no register is free to keep fields, and through a pointer constants take a load from memory
    Problem problem;
    Span spans[2];
    float lse[C::kStages][kRows], g[C::kStages][kRows];                // of a tile's rows; g is 0 without dlse
    alignas(64) unsigned char staged[kMathThreads / 32][kStagedBytes]; // a warp's dP of sink tokens, then its dQ
    bool poisoned[C::kKeys], any_poisoned;                             // keys whose K was not finite
    Barriers<2> span_full, span_empty;
    Barriers<1> k_full[2], k_ready, k_empty, v_full, v_empty; // full: of the first and the last kKeys / 2 keys; ready: K is checked
    Barriers<C::kStages> row_full, row_empty;
    SinkStep<C> sinks;
};

// Writes span n of the launch, if it exists. By a whole warp.
__device__ __forceinline__ bool describe_span(
        Span &to, unsigned n, uint32_t number, uint32_t first_use, const sinkattn_bwd_args &bwd, const Problem &p) {
    const sinkattn_fwd_args &args = bwd.fwd;
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
        to.stats = p.stats_of(args.problem, sequence, kv_head, first_token);
        to.dq = static_cast<uint16_t *>(bwd.dq.data) +
                sa_offset(&bwd.dq, sequence.batch, sequence.q_begin + first_token, static_cast<int64_t>(kv_head) * p.group);
        to.first_key = sa_window_begin(&to.band, sa_position(&to.band, first_token)) & -kStepKeys;
        to.num_sinks = min(p.num_sinks, to.band.k_len);
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

// A row of a tile. token: of the sequence.
struct TileRow {
    int row, token, head;
    bool exists;

    __device__ __forceinline__ TileRow(int row_, const Problem &p, const Span &span, int first_token) : row(row_) {
        const int within = p.row_token(row);
        token = first_token + within;
        head = row - within * p.group;
        exists = within < p.tokens && token < span.band.q_len;
    }
};

// The thread's r-th; found again at each use, as registers are short.
__device__ __forceinline__ TileRow thread_row(int r, const Problem &p, const Span &span, int first_token) {
    return {warpgroup_row(static_cast<unsigned>(pinned(static_cast<int>(threadIdx.x)) % 128), r), p, span, first_token};
}

// LSE and g of a tile's rows; 0 where there is none. By the loader warp.
template <class C>
__device__ __forceinline__ void load_stats(
        RowsSmem<C> &smem, uint32_t stage, const sinkattn_bwd_args &args, const Problem &p, const Span &span, int first_token) {
#pragma unroll
    for (int at = static_cast<int>(threadIdx.x % 32); at < kRows; at += 32) {
        const TileRow row(at, p, span, first_token);
        const int64_t from = row.exists ? sa_row_index(&args.fwd.problem, &span.sequence,
                                                  static_cast<int64_t>(span.kv_head) * p.group + row.head, row.token)
                                        : 0;
        cp_async_4(shared_address(&smem.lse[stage][at]), static_cast<const float *>(args.fwd.lse) + from, row.exists);
        if (args.dlse) cp_async_4(shared_address(&smem.g[stage][at]), static_cast<const float *>(args.dlse) + from, row.exists);
    }
    smem.row_full[stage].arrive_copied();
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
        if (!describe_span(smem.spans[spans.stage()], n, spans.n, ring.n, args, p)) continue;
        const Span &span = smem.spans[spans.stage()];
        smem.span_full.arrive(spans);
        const int batch = static_cast<int>(span.sequence.batch), kv_head = span.kv_head;
        const int key = static_cast<int>(span.sequence.k_begin) + span.first_key;
        int row = static_cast<int>(span.sequence.q_begin) + span.first_token;
#pragma unroll 1
        for (int tile = 0;; tile++, ring.n++, row += p.tokens) {
            // In flight: K and V of the span; at most kStages tiles. The first tiles come before K and V, as their stages are free before.
            if (tile == min(C::kStages, span.num_tiles)) {
                smem.v_empty.acquire(Ring<1>{spans.n});
                if (lane == 0) smem.v_full[0].arrive_expect(C::kHalvesV * C::kKeyHalf);
                __syncwarp();
                if (lane >= C::kHalves && lane < kPieces) tensor_load(keys, &maps.v, smem.v_full[0], 64 * half, kv_head, key, batch);
                smem.k_empty.acquire(Ring<1>{spans.n});
                if (lane < 2)
                    smem.k_full[lane][0].arrive_expect(C::kHalves * C::kKeyHalf / 2 + (C::kSinks && lane == 0 ? kPieces * kSinkHalf : 0));
                __syncwarp();
                if constexpr (C::kSinks)
                    if (lane < kPieces)
                        tensor_load((lane < C::kHalves ? smem.sinks.keys : smem.sinks.values) + half * kSinkHalf,
                                lane < C::kHalves ? &maps.sink_k : &maps.sink_v, smem.k_full[0][0], 64 * half, kv_head,
                                static_cast<int>(span.sequence.k_begin), batch);
                for (int part = 0; part < 2; part++)
                    if (lane < C::kHalves)
                        tensor_load(keys + part * (C::kKeyHalf / 2), &maps.k, smem.k_full[part][0], 64 * half, kv_head,
                                key + part * (C::kKeys / 2), batch);
            }
            if (tile == span.num_tiles) break;
            const uint32_t stage = ring.stage();
            smem.row_empty.acquire(ring);
            if (lane == 0) smem.row_full[stage].arrive_expect(kPieces * p.tile_rows() * kRowBytes);
            __syncwarp();
            if (lane < kPieces)
                tensor_load((lane < C::kHalves ? smem.queries[stage] : smem.douts[stage]) + half * C::kRowHalf,
                        lane < C::kHalves ? &maps.q : &maps.dout, smem.row_full[stage], 64 * half, kv_head * p.group, row, batch);
            load_stats(smem, stage, args, p, span, span.first_token + tile * p.tokens);
        }
        spans.n++;
    }
    smem.span_empty.acquire(spans);
    if (lane == 0) smem.spans[spans.stage()].exists = false;
    smem.span_full.arrive(spans);
}

// Zeroes values of K that are not finite and marks their keys; true if there are any. Pieces of 64 columns lie one after another. By the
// checker warps.
template <class Element, int kKeys, int kBytes>
__device__ __forceinline__ bool hide_keys(unsigned char (&keys)[kBytes], bool (&poisoned)[kKeys], int thread) {
    const bool any = bar_any<kCheckers>(kCheckerBarrier, any_nonfinite<Element, kCheckers>(keys, kBytes, thread));
    if (!any) return false;
    for (int key = thread; key < kKeys; key += kCheckers) poisoned[key] = false;
    bar_sync<kCheckers>(kCheckerBarrier);
    for (int x = thread; x < kBytes / 16; x += kCheckers)
        if (zero_nonfinite<Element, 1>(keys + 16 * x, 16, 0)) poisoned[x % (kKeys * kRowBytes / 16) / 8] = true;
    return true;
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
        smem.k_full[0].wait(Ring<1>{spans.n});
        if constexpr (C::kSinks) {
            const bool any = hide_keys<Element>(smem.sinks.keys, smem.sinks.poisoned, thread);
            async_fence();
            if (thread == 0) smem.sinks.any_poisoned = any;
            smem.sinks.ready[0].arrive();
        }
        smem.k_full[1].wait(Ring<1>{spans.n});
        const bool any = hide_keys<Element>(smem.keys, smem.poisoned, thread);
        async_fence(); // also of what was read, before a copy overwrites it
        if (thread == 0) smem.any_poisoned = any;
        smem.k_ready[0].arrive();
        smem.span_empty.release(spans);
    }
}

} // namespace sa::bwd_wide_window_sm90
