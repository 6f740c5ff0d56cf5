// SPDX-License-Identifier: Apache-2.0
//
// The products, masks and softmax of the wide windowed forward, in the general forward's order of sums: its key tiles, here called regions,
// begin at multiples of kRegionSteps steps of 16 keys. A row's pivot is its maximum over the first region in which it has one, weights of a
// region are added up by themselves, and P V takes a step at a time. A tile meets one to three regions, which begin at step 0, at step
// `cut`, 1 to kRegionSteps, and at step cut + kRegionSteps. Where weights of a later region exceed kLarge, the warpgroup computes the tile
// again, one region after another, with pivots that move.
#pragma once

#include "cuda/fwd_wide_window_sm90/smem.cuh"
#include "cuda/tile/pivot.cuh"

namespace sa::fwd_wide_window_sm90 {

// A tile of a span.
template <class C> struct Tile {
    const PlannedSpan &span;
    const Ring<C::kQueries> queries;
    const int step; // its first, counted from key 0
    const uint32_t first_stage;

    __device__ __forceinline__ Tile(const PlannedSpan &span, const Problem &p, Ring<C::kQueries> queries)
        : span(span), queries(queries), step(span.tile_step(p, n())),
          first_stage(warp_uniform(static_cast<int>(Ring<C::kRing>{span.tile_use(p, n())}.stage()))) {}

    __device__ __forceinline__ int n() const { return static_cast<int>(queries.n - span.first_tile); } // of the span's tiles

    // The ring's stage that is `steps` behind the first one.
    __device__ __forceinline__ uint32_t stage(int steps) const {
        const uint32_t stage = first_stage + steps;
        return stage >= C::kRing ? stage - C::kRing : stage;
    }

    // The first step of the second region.
    __device__ __forceinline__ int cut() const { return C::kRegionSteps - step % C::kRegionSteps; }
};

// threadIdx.x, read again: no register is free to keep it.
__device__ __forceinline__ unsigned thread_again() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

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
struct Columns {
    int begin[2], end[2], all_begin, all_end;

    template <class C> __device__ __forceinline__ Columns(const Tile<C> &tile, const Problem &p) {
        const int base = tile.step * kStepKeys, first = tile.span.first_key + tile.n() * p.tokens - base,
                  high = static_cast<int>(tile.span.sequence.k_len) - base;
        for (int i = 0; i < 2; i++) {
            const int at = first + ThreadRow(p, i).token;
            begin[i] = max(at, 0) - fragment_column();
            end[i] = min(at + p.last_key + 1, high) - fragment_column();
        }
        all_begin = first + p.tokens - 1;
        all_end = min(first + p.last_key + 1, high);
    }

    __device__ __forceinline__ bool hides_some_of(int step) const {
        return kStepKeys * step < all_begin || kStepKeys * (step + 1) > all_end;
    }

    __device__ __forceinline__ bool sees(int r, int column) const { return column >= begin[r] && column < end[r]; }
};

// pivot in log2 units; sum over this thread's columns.
struct Softmax {
    float pivot[2] = {-INFINITY, -INFINITY}, sum[2] = {};
};

template <class C> __device__ __forceinline__ void mask(float (&s)[8 * C::kSteps], const Columns &seen) {
#pragma unroll
    for (int step = 0; step < C::kSteps; step++) {
        if (!seen.hides_some_of(step)) continue;
#pragma unroll
        for (int i = 8 * step; i < 8 * step + 8; i++)
            if (!seen.sees(element_row(i), element_column(i))) s[i] = -INFINITY;
    }
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

// A row's pivot: its maximum over the first region in which it is not -inf.
template <class C> __device__ __forceinline__ void find_pivots(Softmax &rows, const float (&s)[8 * C::kSteps], int cut, float scale_log2) {
    const int third = cut + C::kRegionSteps;
    maxima<0, C::kRegionSteps>(rows.pivot, s, 0, cut, scale_log2);
    const auto any_without = [&] { return __any_sync(0xffffffffu, rows.pivot[0] == -INFINITY || rows.pivot[1] == -INFINITY); };
    const auto take = [&](const float (&now)[2]) {
        for (int r = 0; r < 2; r++)
            if (rows.pivot[r] == -INFINITY) rows.pivot[r] = now[r];
    };
    float now[2];
    if (!any_without()) return;
    maxima<1, C::kSteps>(now, s, cut, third, scale_log2);
    take(now);
    if (!any_without()) return;
    maxima<C::kRegionSteps + 1, C::kSteps>(now, s, third, C::kSteps, scale_log2);
    take(now);
}

__device__ __forceinline__ float shown(float pivot) { return pivot == -INFINITY ? 0.0f : pivot; }

// Weights exp2(s - pivot), rounded and packed as the left operand of P V, and their sums. True where a later region has weights above
// kLarge.
template <class C>
__device__ __forceinline__ bool weigh(
        uint32_t (&weights)[C::kSteps][4], const float (&s)[8 * C::kSteps], Softmax &rows, int cut, float scale_log2) {
    const float from[2] = {shown(rows.pivot[0]), shown(rows.pivot[1])};
    float sum[4] = {};
    bool large = false;
    const auto end_region = [&] {
        for (int r = 0; r < 2; r++) {
            const float total = sum[2 * r] + sum[2 * r + 1];
            large |= total > kLarge<typename C::Element>; // never in the first region of a row
            rows.sum[r] += total;
            sum[2 * r] = sum[2 * r + 1] = 0.0f;
        }
    };
#pragma unroll
    for (int step = 0; step < C::kSteps; step++) {
        if (step > 0 && step == (step <= C::kRegionSteps ? cut : cut + C::kRegionSteps)) end_region();
#pragma unroll
        for (int i = 8 * step; i < 8 * step + 8; i += 2) {
            const int r = element_row(i);
            const float x = exp2_approx(fmaf(s[i], scale_log2, -from[r])), y = exp2_approx(fmaf(s[i + 1], scale_log2, -from[r]));
            sum[2 * r] += x;
            sum[2 * r + 1] += y;
            weights[step][i / 2 % 4] = pack_halves<typename C::Element>(x, y);
        }
    }
    end_region();
    return large;
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
    wgmma_abt<typename C::Element, C::kHeadDim, C::kQueryHalf, C::kKeyHalf>(
            s, shared_address(smem.queries[tile.queries.stage()]), shared_address(smem.keys) + tile.stage(first) * kStepBytes);
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
    constexpr int kLength = 8 * C::kRegionSteps;
    const int cut = tile.cut();
    rows = {};
#pragma unroll
    for (float &x : o) x = 0.0f;
#pragma unroll 1
    for (int region = 0; region < 3; region++) {
        const int begin = region ? cut + (region - 1) * C::kRegionSteps : 0, end = min(cut + region * C::kRegionSteps, C::kSteps),
                  from = min(begin, C::kSteps - C::kRegionSteps);
        float s[kLength], now[2], total[2];
        uint32_t weights[C::kRegionSteps][4];
        begin_scores<C>(s, smem, tile, from);
        wgmma_wait<0>();
        pin(s);
        const Columns seen(tile, p);
#pragma unroll
        for (int i = 0; i < kLength; i++) {
            const int step = from + i / 8;
            if (step < begin || step >= end || !seen.sees(element_row(i), kStepKeys * from + element_column(i))) s[i] = -INFINITY;
        }
        maxima<0, C::kRegionSteps>(now, s, 0, C::kRegionSteps, p.scale_log2);
        for (int r = 0; r < 2; r++)
            if (rows.pivot[r] == -INFINITY) follow(r, now[r], o, rows);
        weights_of(total, s, rows, p.scale_log2, [](int, float) {});
        for (int r = 0; r < 2; r++)
            if (quad_any(total[r] > kLarge<Element>)) follow(r, now[r], o, rows);
        weights_of(total, s, rows, p.scale_log2, [&](int i, float x) { s[i] = x; });
        for (int r = 0; r < 2; r++) rows.sum[r] += total[r];
        pack<Element>(weights, s);
        begin_values<C, false>(o, weights, smem, tile, from);
        wgmma_wait<0>();
        pin(o);
    }
}

} // namespace sa::fwd_wide_window_sm90
