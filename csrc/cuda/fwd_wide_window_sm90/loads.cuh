// SPDX-License-Identifier: Apache-2.0
//
// The wide windowed forward's loader warps: one plans spans and loads their K and V, one loads tiles of Q, one checks V.
#pragma once

#include "cuda/fwd_wide_window_sm90/smem.cuh"
#include "cuda/tile/finite.cuh"

namespace sa::fwd_wide_window_sm90 {

// The block's span that begins with `item`, the first that has rows, up to `end`; then `item` is the one behind it. Item i is tile
// i % num_tiles of kv head i / num_tiles. By a whole warp.
__device__ __forceinline__ Span next_span(unsigned &item, unsigned end, const sinkattn_fwd_args &args, const Problem &p) {
    Span span = {};
    while (item < end && !span.exists) {
        const unsigned tile = item % p.num_tiles, b = p.batch_tiles ? tile / p.batch_tiles : packed_sequence_of_tile(args, p.tokens, tile);
        const int within =
                p.batch_tiles ? static_cast<int>(tile % p.batch_tiles) : static_cast<int>(tile - packed_first_tile(args, p.tokens, b));
        span.kv_head = item / p.num_tiles;
        span.has_sink = args.s_aux && b < static_cast<unsigned>(args.problem.batch);
        span.sequence = sequence_or_tail(args, b);
        const int num_tiles = sa_tile_from(static_cast<sa_position_t>(span.sequence.q_len), p.tokens);
        span.exists = within >= 0 && within < num_tiles; // offsets that decrease may leave a tile in front of its sequence
        span.num_tiles = span.exists ? static_cast<int>(min(static_cast<unsigned>(num_tiles - within), end - item)) : 1;
        span.first_token = within * p.tokens;
        const sa_band band = sa_band_of(
                &args.problem.mask, static_cast<sa_position_t>(span.sequence.q_len), static_cast<sa_position_t>(span.sequence.k_len));
        span.first_key = sa_window_begin(&p.window, sa_position(&band, span.first_token));
        span.num_tokens = static_cast<int>(min(span.sequence.q_len - span.first_token, static_cast<int64_t>(span.num_tiles) * p.tokens));
        span.out = sa_offset(&args.out, span.sequence.batch, span.sequence.q_begin + span.first_token, span.kv_head * p.group);
        span.lse = sa_row_index(&args.problem, &span.sequence, span.kv_head * p.group, span.first_token);
        item += span.num_tiles;
    }
    return span;
}

// In flight at the top: K and V of the steps before, at most kRing.
template <class C>
__device__ __forceinline__ void load_keys(Smem<C> &smem, const sinkattn_fwd_args &args, const Maps &maps, const Problem &p) {
    const int lane = threadIdx.x % 32;
    // A lane has one piece of 64 columns of each step: of K, of V, or of K's mirror.
    const bool is_value = lane >= C::kHalves && lane < C::kHalves + C::kHalvesV, is_mirror = lane >= C::kHalves + C::kHalvesV;
    const int half = is_mirror ? lane - C::kHalves - C::kHalvesV : is_value ? lane - C::kHalves : lane;
    unsigned char *const to =
            is_value ? smem.values + half * C::kValueHalf : smem.keys + half * C::kKeyHalf + (is_mirror ? C::kRing * kStepBytes : 0);
    const CUtensorMap *const map = is_value ? &maps.v : &maps.k;
    unsigned item = static_cast<unsigned>(static_cast<uint64_t>(p.num_items) * blockIdx.x / gridDim.x);
    const auto end = static_cast<unsigned>(static_cast<uint64_t>(p.num_items) * (blockIdx.x + 1) / gridDim.x);
    uint32_t tiles = 0;
    Ring<C::kRing> ring;
    for (Ring<kSpans> spans;; spans.n++) {
        Span span = next_span(item, end, args, p);
        const int first_step = step_of(span.first_key);
        span.first_use = ring.n;
        span.key_use = ring.n - first_step;
        span.end_use = span.key_use + step_of(span.first_key + (span.num_tiles - 1) * p.tokens) + C::kSteps;
        span.number = spans.n;
        span.first_tile = tiles;
        tiles += span.num_tiles;
        span.has_sink_step = C::kSinkSteps && span.exists && step_of(span.first_key + (span.num_tiles - 1) * p.tokens) > 0;
        smem.span_empty.acquire(spans);
        if (span.has_sink_step) smem.span_empty.acquire(spans.next()); // no tile of the span before reads its sink step
        if (lane == 0) {
            static_cast<Span &>(smem.spans[spans.stage()]) = span;
            smem.planned.arrive(spans);
        }
        if (!span.exists) return;
        int key = first_step * kStepKeys;
        for (; ring.n != span.end_use; ring.n++, key += kStepKeys) {
            const uint32_t stage = ring.stage();
            // Zeros, from behind the tensor, where the sequence has no keys.
            const int row = static_cast<int>(key < span.sequence.k_len ? span.sequence.k_begin + key : args.problem.k_len);
            const int pieces = C::kHalves + C::kHalvesV + (stage < C::kMirror ? C::kHalves : 0);
            const bool loads_sinks = span.has_sink_step && ring.n == span.first_use;
            smem.empty.acquire(ring);
            if (lane == 0) smem.full[stage].arrive_expect((pieces + (loads_sinks ? C::kHalves + C::kHalvesV : 0)) * kStepBytes);
            __syncwarp();
            if constexpr (C::kSinkSteps > 0)
                if (loads_sinks && lane < C::kHalves + C::kHalvesV)
                    tensor_load((is_value ? smem.sink_values : smem.sink_keys) + half * kStepBytes, map, smem.full[stage], 64 * half,
                            static_cast<int>(span.kv_head), static_cast<int>(span.sequence.k_begin), static_cast<int>(span.sequence.batch));
            if (lane < pieces)
                tensor_load(to + stage * kStepBytes, map, smem.full[stage], 64 * half, static_cast<int>(span.kv_head), row,
                        static_cast<int>(span.sequence.batch));
        }
    }
}

// Tiles to the math warpgroups in turn. In flight at the top: Q of the tiles before, at most kQueries.
template <class C> __device__ __forceinline__ void load_queries(Smem<C> &smem, const Maps &maps, const Problem &p) {
    Ring<C::kQueries> tiles;
    for (Ring<kSpans> spans;; spans.n++) {
        smem.planned.wait(spans);
        const Span &span = smem.spans[spans.stage()];
        if (!span.exists) return;
        const int head = static_cast<int>(span.kv_head * p.group), first = static_cast<int>(span.sequence.q_begin + span.first_token),
                  batch = static_cast<int>(span.sequence.batch);
        for (int n = 0; n < span.num_tiles; n++, tiles.n++) {
            const uint32_t stage = tiles.stage();
            smem.q_empty.acquire(tiles);
            if (threadIdx.x % 32) continue;
            smem.q_full[stage].arrive_expect(C::kHalves * p.tokens * p.group * kRowBytes);
            for (int half = 0; half < C::kHalves; half++)
                tensor_load(smem.queries[stage] + half * C::kQueryHalf, &maps.q, smem.q_full[stage], 64 * half, head, first + n * p.tokens,
                        batch);
        }
        smem.span_empty.release(spans);
    }
}

// Loads s_aux of a span's heads, and zeroes values of V that are not finite.
template <class C> __device__ __forceinline__ void check_values(Smem<C> &smem, const sinkattn_fwd_args &args, const Problem &p) {
    using Element = typename C::Element;
    const int lane = threadIdx.x % 32;
    Ring<C::kRing> ring;
    for (Ring<kSpans> spans;; spans.n++) {
        smem.planned.wait(spans);
        PlannedSpan &span = smem.spans[spans.stage()];
        if (!span.exists) return;
        for (int i = lane; i < p.group; i += 32)
            span.s_aux[i] = span.has_sink ? static_cast<float>(sa_load(args.s_aux, args.problem.s_aux_dtype, span.kv_head * p.group + i))
                                          : -INFINITY;
        // Of a step's V, whose pieces are value_half bytes apart.
        const auto check = [&](unsigned char *values, int value_half, bool &nonfinite) {
            bool found = false;
            for (int half = 0; half < C::kHalvesV; half++)
                found |= any_nonfinite<Element, 32>(values + half * value_half, kStepBytes, lane);
            found = __any_sync(0xffffffffu, found);
            for (int half = 0; found && half < C::kHalvesV; half++)
                zero_nonfinite<Element, 32>(values + half * value_half, kStepBytes, lane);
            if (found) async_fence();
            if (lane == 0) nonfinite = found;
        };
        for (const uint32_t end = span.end_use; ring.n != end; ring.n++) {
            smem.full.wait(ring);
            check(smem.values + ring.stage() * kStepBytes, C::kValueHalf, smem.nonfinite[ring.stage()]);
            if constexpr (C::kSinkSteps > 0)
                if (span.has_sink_step && ring.n == span.first_use) check(smem.sink_values, kStepBytes, smem.nonfinite[C::kRing]);
            smem.ready.arrive(ring);
        }
        smem.span_empty.release(spans);
    }
}

} // namespace sa::fwd_wide_window_sm90
