// SPDX-License-Identifier: Apache-2.0
//
// A team of the decode with swapped operands on sm_90: S^T = K Q^T of a stage, its weights through shared memory, O^T += V^T P^T; and the
// end of a part. In S^T a row is a column: element 4 m + 2 i + x of an accumulator belongs to row 8 m + fragment_column() + x.
#pragma once

#include "cuda/decode/rows_loads.cuh"
#include "cuda/decode/swapped_smem.cuh"
#include "cuda/decode/tile.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/pivot.cuh"
#include "cuda/tile/wgmma.cuh"

namespace sa::decode {
namespace swapped {

template <class C> struct Team {
    using Element = typename C::Element;
    using Smem = typename C::Smem;
    using Scores = float[C::kBlocks][C::kRows / 2]; // keys x rows
    using Out = float[C::kHalves][C::kRows / 2];    // columns of V x rows
    using Own = float[C::kOwn];                     // of each of the thread's rows

    Smem &smem;
    const typename C::Arguments &params;
    const int team;
    uint32_t stages_before = 0; // of earlier parts

    __device__ __forceinline__ int barrier() const { return kTeamBarrier + team; }
    __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x / 32 % 4); }
    static __device__ __forceinline__ int row_of(int e) { return 8 * (e / 2) + fragment_column() + e % 2; }
    // Element 4 m + 2 i + x of an accumulator, for row e = 2 m + x.
    static __device__ __forceinline__ constexpr int element(int e, int i) { return 4 * (e / 2) + 2 * i + e % 2; }

    // The number in the stage of the warp's step of block b.
    __device__ __forceinline__ int own_step(int b) const { return 4 * b + warp(); }

    // Sets scores to -inf where the row does not see the key; all of a step from `last` on.
    __device__ __forceinline__ void mask(Scores &s, int32_t step, int32_t last, const sa_range &full) const {
#pragma unroll
        for (int b = 0; b < C::kBlocks; b++) {
            const int32_t its = step + own_step(b);
            if (is_full(its, full)) continue;
            const int32_t key = sa_key_tile_at(&smem.part.stream.tiles, its) * kTileK + fragment_row(0);
#pragma unroll
            for (int e = 0; e < C::kOwn; e++) {
                const decode::Row row = smem.rows[row_of(e)];
                for (int i = 0; i < 2; i++)
                    if (its >= last || !decode::sees(row, key + 8 * i)) s[b][element(e, i)] = -INFINITY;
            }
        }
    }

    static __device__ __forceinline__ bool is_full(int32_t step, const sa_range &full) {
        return static_cast<uint32_t>(step - full.begin) < static_cast<uint32_t>(max(0, full.end - full.begin));
    }

    // The largest score of each row over the team's keys, in log2 units.
    __device__ __forceinline__ void find_maxima(Own &top, const Scores &s) {
#pragma unroll
        for (int e = 0; e < C::kOwn; e++) {
            top[e] = -INFINITY;
#pragma unroll
            for (int b = 0; b < C::kBlocks; b++) top[e] = fmaxf(top[e], fmaxf(s[b][element(e, 0)], s[b][element(e, 1)]));
            for (int lanes = 4; lanes < 32; lanes *= 2) top[e] = fmaxf(top[e], __shfl_xor_sync(0xffffffffu, top[e], lanes));
            if (threadIdx.x % 32 < 4) smem.tops[team][warp()][row_of(e)] = top[e];
        }
        bar_sync<128>(barrier());
        const float scale = fabsf(params.scale_log2);
#pragma unroll
        for (int e = 0; e < C::kOwn; e++) {
            const int row = row_of(e);
            for (int w = 0; w < 4; w++) top[e] = fmaxf(top[e], smem.tops[team][w][row]);
            top[e] *= scale;
        }
    }

    // Pivots follow the stage's maxima, where these exceed them by more than kLazy; O and the sums with them. True once all rows have one.
    __device__ __forceinline__ bool follow_maxima(const Scores &s, Out &o, Own &pivot, Own &sum) {
        Own top;
        find_maxima(top, s);
        bool all = true;
#pragma unroll
        for (int e = 0; e < C::kOwn; e++) {
            if (!(pivot[e] == -INFINITY ? top[e] > pivot[e] : top[e] > pivot[e] + kLazy)) {
                all &= pivot[e] != -INFINITY;
                continue;
            }
            const float alpha = exp2_approx(pivot[e] - top[e]);
            pivot[e] = top[e];
            sum[e] *= alpha;
#pragma unroll
            for (int h = 0; h < C::kHalves; h++)
                for (int i = 0; i < 2; i++) o[h][element(e, i)] *= alpha;
        }
        return __all_sync(0xffffffffu, all);
    }

    // Writes the stage's weights exp2(score - pivot) as rows of 64 keys; added: their sums over the thread's keys. True where one of these
    // is too large.
    __device__ __forceinline__ bool write_weights(const Scores &s, const Own &pivot, Own &added) {
        const float scale = fabsf(params.scale_log2);
        const int lane = static_cast<int>(threadIdx.x % 32);
        const uint32_t to = swizzled(shared_address(smem.weights[team]), kRowBytes, lane / 16 * 8 + lane % 8, 2 * warp() + lane / 8 % 2);
#pragma unroll
        for (float &x : added) x = 0.0f;
#pragma unroll
        for (int b = 0; b < C::kBlocks; b++)
#pragma unroll
            for (int m = 0; m < C::kRows / 8; m += 2) {
                uint32_t high[4], rest[4];
#pragma unroll
                for (int x = 0; x < 4; x++) { // eight keys, then the next eight; of eight rows, then of the next
                    const int e = 2 * (m + x / 2), i = x % 2;
                    float p[2];
                    for (int y = 0; y < 2; y++) {
                        p[y] = exp2_approx(fmaf(s[b][element(e + y, i)], scale, pivot[e + y] == -INFINITY ? 0.0f : -pivot[e + y]));
                        added[e + y] += p[y];
                    }
                    const decode::RoundedPair pair = decode::round_pair<Element>(p[0], p[1]);
                    high[x] = pair.high;
                    rest[x] = pair.rest;
                }
                const uint32_t its = to + b * C::kQueryHalf + m * 8 * kRowBytes;
                stmatrix_x4_trans(its, high);
                if constexpr (C::kSplitsP) stmatrix_x4_trans(its + C::kPartBytes, rest);
            }
        bool large = false;
#pragma unroll
        for (const float x : added) large |= x > kLarge<Element>;
        return large;
    }

    // Issues S^T of the stage; the caller waits.
    __device__ __forceinline__ void begin_scores(Scores &s, uint32_t n) {
        const Ring<C::kSlots> slot = keys_of<C>(n);
        smem.full.wait(slot);
        if constexpr (C::kByThreads) async_fence();
        const uint32_t keys = warp_uniform_register(shared_address(smem.ring[slot.stage()]));
#pragma unroll
        for (int b = 0; b < C::kBlocks; b++)
            wgmma_abt<Element, C::kHeadDim, C::kKeyHalf, C::kQueryHalf>(s[b], keys + b * 64 * kRowBytes, shared_address(smem.queries));
    }

    // Issues O^T += V^T P^T of the stage, upper parts of the weights first.
    __device__ __forceinline__ void begin_values(Out &o, uint32_t n) {
        const uint64_t values = operand(warp_uniform_register(shared_address(smem.ring[values_of<C>(n).stage()])), 0),
                       weights = operand(warp_uniform_register(shared_address(smem.weights[team])), 0);
        wgmma_fence();
#pragma unroll
        for (int h = 0; h < C::kHalves; h++)
#pragma unroll
            for (int j = 0; j < C::kSteps; j++) {
                const uint64_t left = operand_at(values, h * C::kKeyHalf + j * kTileK * kRowBytes),
                               right = operand_at(weights, j / 4 * C::kQueryHalf + j % 4 * 32);
                wgmma_shared_columns<Element>(o[h], left, right, true);
                if constexpr (C::kSplitsP) wgmma_shared_columns<Element>(o[h], left, operand_at(right, C::kPartBytes), true);
            }
        wgmma_commit();
    }

    // Where values of a step that not all rows see are not finite: adds them to the rows that see them and leaves zeros. values: of its
    // keys.
    __device__ __forceinline__ void hide_nonfinite(Out &o, unsigned char *values, int32_t tile) {
        const int lane = static_cast<int>(threadIdx.x % 32);
        hide_nonfinite_values<Element, C::kKeyHalf>(values, C::kHeadDim, barrier(), [&] {
#pragma unroll 1
            for (int key = 0; key < kTileK; key++)
#pragma unroll
                for (int h = 0; h < C::kHalves; h++)
                    for (int i = 0; i < 2; i++) {
                        const float value = nonfinite_part<Element>(*reinterpret_cast<const uint16_t *>(
                                values + h * C::kKeyHalf + swizzled(key, 2 * warp() + i) + lane / 4 * 2));
#pragma unroll
                        for (int e = 0; e < C::kOwn; e++)
                            o[h][element(e, i)] += decode::sees(smem.rows[row_of(e)], tile * kTileK + key) ? value : 0.0f;
                    }
        });
    }

    __device__ __forceinline__ void hide_values(Out &o, uint32_t n, int32_t step, int32_t last, const sa_range &full) {
        unsigned char *values = smem.ring[values_of<C>(n).stage()];
#pragma unroll 1
        for (int j = 0; j < C::kSteps && step + j < last; j++)
            if (!is_full(step + j, full))
                hide_nonfinite(o, values + j * kTileK * kRowBytes, sa_key_tile_at(&smem.part.stream.tiles, step + j));
    }

    // The team's stages of the part.
    __device__ __forceinline__ void take_stages(Out &o, Own &pivot, Own &sum, int32_t first, int32_t last) {
        sa_range full = sa_full_key_tiles(&smem.part.stream.tiles);
        full.end = min(full.end, last);
        bool begun = false, pending = false;
        uint32_t n = stages_before + team;
#pragma unroll 1
        for (int32_t step = first + team * C::kSteps; step < last; step += C::kTeams * C::kSteps, n += C::kTeams) {
            // In flight at the top: O^T of the team's previous stage.
            Scores s;
            Own added;
            begin_scores(s, n);
            wgmma_wait<0>();
            for (auto &block : s) pin(block);
            for (auto &columns : o) pin(columns);
            smem.empty.release(keys_of<C>(n));
            if (pending) smem.empty.release(values_of<C>(n - C::kTeams));
            pending = true;
            if (params.scale_log2 < 0.0f) // its sign moves to the scores, whose maximum becomes the pivot
#pragma unroll
                for (auto &block : s)
                    for (float &x : block) x = -x;
            const bool is_whole = step >= full.begin && step + C::kSteps <= full.end;
            if (!is_whole) mask(s, step, last, full);
            if (!begun) begun = follow_maxima(s, o, pivot, sum);
            bar_sync<128>(barrier()); // no warp's product reads the previous weights any more
            const bool large = write_weights(s, pivot, added);
            async_fence();
            if (__builtin_expect(bar_any<128>(barrier(), large), false)) {
                follow_maxima(s, o, pivot, sum);
                write_weights(s, pivot, added);
                async_fence();
                bar_sync<128>(barrier());
            }
#pragma unroll
            for (int e = 0; e < C::kOwn; e++) sum[e] += added[e];
            smem.full.wait(values_of<C>(n));
            if constexpr (C::kByThreads) async_fence();
            if (!is_whole) hide_values(o, n, step, last, full);
            for (auto &columns : o) pin(columns);
            begin_values(o, n);
        }
        wgmma_wait<0>();
        for (auto &columns : o) pin(columns);
        if (pending) smem.empty.release(values_of<C>(n - C::kTeams));
        stages_before += static_cast<uint32_t>(max(0, last - first + C::kSteps - 1) / C::kSteps);
    }

    // Joins the teams, as decode/merge.cuh's Partials does: factors of the thread's rows, and the part's pivot and sum.
    __device__ __forceinline__ void join(Own &factor, const Own &pivot, const Own &sum) {
        if (warp() == 0 && threadIdx.x % 32 < 4)
            for (int e = 0; e < C::kOwn; e++) smem.pivots[team][row_of(e)] = pivot[e];
#pragma unroll
        for (int e = 0; e < C::kOwn; e++) {
            float x = sum[e];
            for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
            if (threadIdx.x % 32 < 4) smem.tops[team][warp()][row_of(e)] = x;
        }
        C::sync();
        const auto top_of = [&](int row) {
            float top = smem.pivots[0][row];
            for (int t = 1; t < C::kTeams; t++) top = fmaxf(top, smem.pivots[t][row]);
            return top;
        };
        for (int e = 0; e < C::kOwn; e++) factor[e] = sa::weight(pivot[e], top_of(row_of(e)));
        const int row = static_cast<int>(threadIdx.x);
        if (row >= C::kRows) return;
        const float top = top_of(row);
        float total = 0.0f;
        for (int t = 0; t < C::kTeams; t++) {
            const float *warps = &smem.tops[t][0][row];
            const float of_team = (warps[0] + warps[C::kRows]) + (warps[2 * C::kRows] + warps[3 * C::kRows]);
            total = fmaf(of_team, sa::weight(smem.pivots[t][row], top), total);
        }
        smem.stats[row] = {top, total};
    }

    // Leaves the part's O in the ring, rows of kPartialRow floats: the teams', times their factors, in the order of teams.
    __device__ __forceinline__ void leave(const Out &o, const Own &factor) {
        auto *partial = reinterpret_cast<float *>(smem.ring);
        const int column = warpgroup_row(0);
#pragma unroll
        for (int t = 0; t < C::kTeams; t++) {
            if (t == team)
#pragma unroll
                for (int e = 0; e < C::kOwn; e++)
#pragma unroll
                    for (int h = 0; h < C::kHalves; h++)
                        for (int i = 0; i < 2; i++) {
                            float &to = partial[row_of(e) * C::kPartialRow + 64 * h + column + 8 * i];
                            to = fmaf(o[h][element(e, i)], factor[e], t ? to : 0.0f);
                        }
            C::sync();
        }
    }

    __device__ __forceinline__ void attend() {
        const decode::Part &part = smem.part;
        many_rows::begin_rows<C, C::kThreads>(smem, params);
        many_rows::begin_part<C>(smem, params);
        Out o = {};
        Own pivot, sum, factor;
#pragma unroll
        for (int e = 0; e < C::kOwn; e++) { // rows that do not exist need no pivot
            pivot[e] = row_of(e) < part.stream.num_rows ? -INFINITY : 0.0f;
            sum[e] = 0.0f;
        }
        many_rows::land_rows();
        C::sync();
        take_stages(o, pivot, sum, part.first, decode::last_step(part));
        join(factor, pivot, sum);
        leave(o, factor);
        many_rows::write_part<C>(smem, params, reinterpret_cast<const float *>(smem.ring), reinterpret_cast<float *>(smem.queries));
        async_fence(); // before copies into the ring
    }
};

} // namespace swapped
} // namespace sa::decode
