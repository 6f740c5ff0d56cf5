// SPDX-License-Identifier: Apache-2.0
//
// The products, masks and softmax of the wide windowed forward, in the general forward's order of sums: its key tiles, here called regions,
// begin at multiples of kRegionSteps steps of 16 keys. A row's pivot is its maximum over the first region in which it has one, weights of a
// region are added up by themselves, and P V takes a step at a time. A tile meets one to three regions, which begin at step 0, at step
// `cut`, 1 to kRegionSteps, and at step cut + kRegionSteps. Where weights of a later region exceed kLarge, the warpgroup computes the tile
// again, one region after another, with pivots that move.
//
// With positional sink tokens the sequence's first step, which is the sink step, comes before the steps of a tile that begins behind it. It
// belongs to the tile's first region, if that is the sequence's first, or else is a region by itself.
#pragma once

#include "cuda/fwd_wide_window_sm90/smem.cuh"
#include "cuda/tile/pivot.cuh"

namespace sa::fwd_wide_window_sm90 {

// The n-th tile of a span.
template <class C> struct Tile {
    const PlannedSpan &span;
    const int n, first, step;            // first: of the first token's window, counted from key 0; step: the tile's first
    const uint32_t queries, first_stage; // stages of Q and of the first step

    __device__ __forceinline__ Tile(const PlannedSpan &span, int n, int first, uint32_t queries)
        : span(span), n(n), first(first), step(step_of(first)), queries(queries),
          first_stage(warp_uniform(static_cast<int>(use().stage()))) {}

    // The first step's use of the ring.
    __device__ __forceinline__ Ring<C::kRing> use() const { return {span.key_use + step}; }

    // The ring's stage that is `steps` behind the first one.
    __device__ __forceinline__ uint32_t stage(int steps) const {
        const uint32_t stage = first_stage + steps;
        return stage >= C::kRing ? stage - C::kRing : stage;
    }

    // The use of the first step that the warpgroup's next tile has.
    __device__ __forceinline__ uint32_t next_use(const Problem &p) const {
        return n + kWarpgroups < span.num_tiles ? span.key_use + step_of(first + kWarpgroups * p.tokens) : span.end_use;
    }

    // The first step of the second region.
    __device__ __forceinline__ int cut() const { return C::kRegionSteps - step % C::kRegionSteps; }

    // Whether it begins behind the sink step, and whether that is a region by itself.
    __device__ __forceinline__ bool is_behind_sinks() const { return C::kSinkSteps && step > 0; }
    __device__ __forceinline__ bool has_sink_region() const { return C::kSinkSteps && step >= C::kRegionSteps; }
};

// The i-th of the thread's two rows of an accumulator: its token and head in the tile.
struct ThreadRow {
    int token, head;

    __device__ __forceinline__ ThreadRow(const Problem &p, int i) {
        const int row = warpgroup_row(thread_again() % 128, i);
        token = row * p.group_inverse >> 16;
        head = row - token * p.group;
    }
};

// Columns of the tile that the thread's two rows see, counted from the thread's first; columns [all_begin, all_end) are seen by all rows.
// Columns before sink_end, if there may be any, are sink tokens.
template <class C> struct Columns {
    int begin[2], end[2], all_begin, all_end, sink_end = INT32_MIN;

    __device__ __forceinline__ Columns(const Tile<C> &tile, const Problem &p) {
        const int base = tile.step * kStepKeys, first = tile.first - base, high = static_cast<int>(tile.span.sequence.k_len) - base;
        const int column = fragment_column(thread_again());
        for (int i = 0; i < 2; i++) {
            const int at = first + ThreadRow(p, i).token;
            begin[i] = max(at, 0) - column;
            end[i] = min(at + p.last_key + 1, high) - column;
        }
        all_begin = first + p.tokens - 1;
        all_end = min(first + p.last_key + 1, high);
        if (C::kSinkSteps) sink_end = p.num_sinks - base - column;
    }

    __device__ __forceinline__ bool sees(int r, int column) const { return (column >= begin[r] || column < sink_end) && column < end[r]; }
};

// pivot in log2 units; sum over this thread's columns.
struct Softmax {
    float pivot[2] = {-INFINITY, -INFINITY}, sum[2] = {};
};

// Masks the keys in front of the rows' windows, from step kStep up to kEnd; step 0 without a branch. s begins at step kFrom.
template <int kStep, int kEnd, int kFrom, int kLength, class C>
__device__ __forceinline__ void mask_begin(float (&s)[kLength], const Columns<C> &seen) {
    constexpr bool kMayHaveSinks = C::kSinkSteps && kStep == 0;
    if constexpr (kStep < kEnd) {
        if (kStep > 0 && kStepKeys * kStep >= seen.all_begin) return;
#pragma unroll
        for (int i = 8 * kStep; i < 8 * kStep + 8; i++)
            if (element_column(i) < seen.begin[element_row(i)] && !(kMayHaveSinks && element_column(i) < seen.sink_end))
                s[i - 8 * kFrom] = -INFINITY;
        mask_begin<kStep + 1, kEnd, kFrom>(s, seen);
    }
}

// Masks the keys behind the rows' windows, from step kStep down to kEnd.
template <int kStep, int kEnd, int kFrom, int kLength, class C>
__device__ __forceinline__ void mask_end(float (&s)[kLength], const Columns<C> &seen) {
    if constexpr (kStep >= kEnd) {
        if (kStepKeys * (kStep + 1) <= seen.all_end) return;
#pragma unroll
        for (int i = 8 * kStep; i < 8 * kStep + 8; i++)
            if (element_column(i) >= seen.end[element_row(i)]) s[i - 8 * kFrom] = -INFINITY;
        mask_end<kStep - 1, kEnd, kFrom>(s, seen);
    }
}

// Maxima of the thread's rows over the first region, up to step `cut`, in log2 units.
template <class C> __device__ __forceinline__ void first_maxima(float (&now)[2], const float *s, int cut, float scale_log2) {
    float top[4];
#pragma unroll
    for (int i = 0; i < 4; i++) top[i] = fmaxf(s[i], s[i + 4]);
#pragma unroll
    for (int step = 1; step < C::kRegionSteps; step++) max_if(step < cut, top, s + 8 * step);
    for (int r = 0; r < 2; r++) now[r] = quad_max(fmaxf(top[2 * r], top[2 * r + 1])) * scale_log2;
}

// Maxima of the thread's rows over steps [begin, end), of those from kFirst to kLast - 1, in log2 units.
template <int kFirst, int kLast, int kLength>
__device__ __forceinline__ void maxima(float (&now)[2], const float (&s)[kLength], int begin, int end, float scale_log2) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int step = kFirst; step < kLast; step++) {
        if (step < begin || step >= end) continue;
#pragma unroll
        for (int i = 8 * step; i < 8 * step + 8; i++) top[element_row(i)] = fmaxf(top[element_row(i)], s[i]);
    }
    for (int r = 0; r < 2; r++) now[r] = quad_max(top[r]) * scale_log2;
}

__device__ __forceinline__ bool any_without_pivot(const Softmax &rows) {
    return __any_sync(0xffffffffu, rows.pivot[0] == -INFINITY || rows.pivot[1] == -INFINITY);
}

// Pivots of rows that the first region gave none: maxima over the next in which they are not -inf.
template <class C>
__device__ __forceinline__ void find_later_pivots(Softmax &rows, const float (&s)[8 * C::kSteps], int cut, float scale_log2) {
    const int third = cut + C::kRegionSteps;
    const auto take = [&](const float (&now)[2]) {
        for (int r = 0; r < 2; r++)
            if (rows.pivot[r] == -INFINITY) rows.pivot[r] = now[r];
    };
    float now[2];
    maxima<1, C::kSteps>(now, s, cut, third, scale_log2);
    take(now);
    if (!any_without_pivot(rows)) return;
    maxima<C::kRegionSteps + 1, C::kSteps>(now, s, third, C::kSteps, scale_log2);
    take(now);
}

__device__ __forceinline__ float shown(float pivot) { return pivot == -INFINITY ? 0.0f : pivot; }

// Sums of weights of the three regions, by chain.
struct Sums {
    float region[3][4] = {};

    // Adds up those of a region, in order. True where one exceeds kLarge, never in the first region of a row.
    template <class Element> __device__ __forceinline__ bool end_region(float (&sum)[2], int i) const {
        bool large = false;
        for (int r = 0; r < 2; r++) {
            const float total = region[i][2 * r] + region[i][2 * r + 1];
            large |= total > kLarge<Element>;
            sum[r] += total;
        }
        return large;
    }
};

// Weights exp2(s - pivot) of steps from kFirst on, rounded and packed as the left operand of P V, and their sums.
template <class C, int kFirst, int kCount>
__device__ __forceinline__ void weigh(
        uint32_t (&weights)[kCount][4], const float (&s)[8 * C::kSteps], Sums &sums, const Softmax &rows, int cut, float scale_log2) {
    const float from[2] = {shown(rows.pivot[0]), shown(rows.pivot[1])};
#pragma unroll
    for (int step = kFirst; step < kFirst + kCount; step++) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = exp2_approx(fmaf(s[8 * step + i], scale_log2, -from[element_row(i)]));
#pragma unroll
        for (int i = 0; i < 8; i += 2) weights[step - kFirst][i / 2] = pack_halves<typename C::Element>(x[i], x[i + 1]);
        // The second region begins at step 1 to kRegionSteps, the third kRegionSteps later.
        const int region = step / C::kRegionSteps, within = step % C::kRegionSteps;
        if (within)
            add_to_either(within >= cut, sums.region[region], sums.region[region + 1], x);
        else
            for (int i = 0; i < 8; i++) sums.region[region][i % 4] += x[i];
    }
}

// Calls take(i, x) for the weight x of each score i of a region; total: their sums.
template <int kLength, class Take>
__device__ __forceinline__ void weights_of(
        float (&total)[2], const float (&s)[kLength], const Softmax &rows, float scale_log2, const Take &take) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < kLength; i++) {
        const float x = exp2_approx(fmaf(s[i], scale_log2, -shown(rows.pivot[element_row(i)])));
        sum[i % 4] += x;
        take(i, x);
    }
    for (int r = 0; r < 2; r++) total[r] = sum[2 * r] + sum[2 * r + 1];
}

// Makes `now` the row's pivot if it is larger by more than kLazy, and rescales the row's sum and O.
template <int kLength> __device__ __forceinline__ void follow(int r, float now, float (&o)[kLength], Softmax &rows) {
    const float before = rows.pivot[r];
    if (!(now > before + kLazy)) return;
    const float alpha = exp2_approx(before - now);
    rows.pivot[r] = now;
    rows.sum[r] = __fmul_rn(rows.sum[r], alpha); // never contracted with the sum that follows
#pragma unroll
    for (int n = 0; n < kLength / 4; n++)
        for (int x = 0; x < 2; x++) o[4 * n + 2 * r + x] *= alpha;
}

// Issues s = Q K^T of the tile's steps from `first` on, which lie side by side, wrapped or not; the caller waits.
template <class C, int kLength>
__device__ __forceinline__ void begin_scores(float (&s)[kLength], Smem<C> &smem, const Tile<C> &tile, int first) {
    uint32_t queries = shared_address(smem.queries[tile.queries]);
    if (C::kHeadDim > 128) queries = warp_uniform(queries); // else ptxas keeps all operands for the second product, and spills
    wgmma_abt<typename C::Element, C::kHeadDim, C::kQueryHalf, C::kKeyHalf>(
            s, queries, shared_address(smem.keys) + tile.stage(first) * kStepBytes);
}

// Issues scores of the sink step; the caller waits.
template <class C> __device__ __forceinline__ void begin_sink_scores(float (&s)[8], Smem<C> &smem, const Tile<C> &tile) {
    wgmma_abt<typename C::Element, C::kHeadDim, C::kQueryHalf, kStepBytes>(
            s, shared_address(smem.queries[tile.queries]), shared_address(smem.sink_keys));
}

// Masks scores of the sink step, all where it is not seen; their maxima of the thread's rows, in log2 units.
__device__ __forceinline__ void mask_sinks(float (&now)[2], float (&s)[8], bool is_seen, const Problem &p) {
    const int end = is_seen ? p.num_sinks - fragment_column(thread_again()) : 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (element_column(i) >= end) s[i] = -INFINITY;
    maxima<0, 1>(now, s, 0, 1, p.scale_log2);
}

// Begins the rows' softmax with the sink step's weights, packed as the left operand of P V.
template <class C>
__device__ __forceinline__ void weigh_sinks(
        uint32_t (&weights)[4], const float (&s)[8], Sums &sums, Softmax &rows, const Tile<C> &tile, float scale_log2) {
    float x[8], sum[4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = exp2_approx(fmaf(s[i], scale_log2, -shown(rows.pivot[element_row(i)])));
        sum[i % 4] += x[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i += 2) weights[i / 2] = pack_halves<typename C::Element>(x[i], x[i + 1]);
    for (int i = 0; i < 4; i++) sums.region[0][i] = tile.has_sink_region() ? 0.0f : sum[i];
    for (int r = 0; r < 2; r++) rows.sum[r] = tile.has_sink_region() ? sum[2 * r] + sum[2 * r + 1] : 0.0f;
}

// Issues O += P V of the sink step; the caller waits. kBegins: the product begins O.
template <class C, bool kBegins>
__device__ __forceinline__ void begin_sink_values(float (&o)[C::kHeadDimV / 2], const uint32_t (&weights)[4], Smem<C> &smem) {
    wgmma_fence();
    wgmma_registers<typename C::Element>(o, weights, operand(shared_address(smem.sink_values), kStepBytes), !kBegins);
    wgmma_commit();
}

// Issues O += P V of the tile's steps from `first` on; the caller waits. kBegins: the product begins O.
template <class C, bool kBegins, int kWeights>
__device__ __forceinline__ void begin_values(
        float (&o)[C::kHeadDimV / 2], const uint32_t (&weights)[kWeights][4], Smem<C> &smem, const Tile<C> &tile, int first) {
    const uint64_t values = operand(shared_address(smem.values), C::kValueHalf);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kWeights; i++)
        wgmma_registers<typename C::Element>(o, weights[i], operand_at(values, tile.stage(first + i) * kStepBytes), !kBegins || i > 0);
    wgmma_commit();
}

// O and the rows' sums, one region after another, each by the kRegionSteps steps around it: pivots follow maxima as in fwd_sm90.
template <class C>
__device__ __forceinline__ void attend_by_regions(
        float (&o)[C::kHeadDimV / 2], Softmax &rows, Smem<C> &smem, const Tile<C> &tile, const Problem &p) {
    using Element = typename C::Element;
    constexpr int kSink = 8 * C::kSinkSteps, kLength = 8 * C::kRegionSteps; // scores of the sink step come first
    const int cut = tile.cut(), first = tile.has_sink_region() ? -1 : 0;
    rows = {};
#pragma unroll
    for (float &x : o) x = 0.0f;
#pragma unroll 1
    for (int region = first; region < 3; region++) {
        const int begin = region > 0 ? cut + (region - 1) * C::kRegionSteps : 0,
                  end = region < 0 ? 0 : min(cut + region * C::kRegionSteps, C::kSteps), from = min(begin, C::kSteps - C::kRegionSteps);
        float s[kSink + kLength], now[2], of_sinks[2], total[2];
        auto &sinks = *reinterpret_cast<float (*)[8]>(s); // only where there is a sink step
        auto &window = *reinterpret_cast<float (*)[kLength]>(s + kSink);
        uint32_t weights[C::kSinkSteps + C::kRegionSteps][4];
        if constexpr (C::kSinkSteps > 0) begin_sink_scores(sinks, smem, tile);
        begin_scores<C>(window, smem, tile, from);
        wgmma_wait<0>();
        pin(s);
        if constexpr (C::kSinkSteps > 0) mask_sinks(of_sinks, sinks, tile.is_behind_sinks() && region == first, p);
        const Columns<C> seen(tile, p);
#pragma unroll
        for (int i = 0; i < kLength; i++) {
            const int step = from + i / 8;
            if (step < begin || step >= end || !seen.sees(element_row(i), kStepKeys * from + element_column(i))) window[i] = -INFINITY;
        }
        maxima<0, C::kRegionSteps>(now, window, 0, C::kRegionSteps, p.scale_log2);
        for (int r = 0; r < 2; r++) {
            if (C::kSinkSteps) now[r] = fmaxf(now[r], of_sinks[r]);
            if (rows.pivot[r] == -INFINITY) follow(r, now[r], o, rows);
        }
        weights_of(total, s, rows, p.scale_log2, [](int, float) {});
        for (int r = 0; r < 2; r++)
            if (quad_any(total[r] > kLarge<Element>)) follow(r, now[r], o, rows);
        weights_of(total, s, rows, p.scale_log2, [&](int i, float x) { s[i] = x; });
        for (int r = 0; r < 2; r++) rows.sum[r] += total[r];
        pack<Element>(weights, s);
        if constexpr (C::kSinkSteps > 0) begin_sink_values<C, false>(o, weights[0], smem);
        begin_values<C, false>(o, *reinterpret_cast<uint32_t (*)[C::kRegionSteps][4]>(weights + C::kSinkSteps), smem, tile, from);
        wgmma_wait<0>();
        pin(o);
    }
}

} // namespace sa::fwd_wide_window_sm90
