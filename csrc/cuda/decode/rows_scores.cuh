// SPDX-License-Identifier: Apache-2.0
//
// The score warpgroup of the decode of many rows on sm_90: S = Q K^T of a stage, the weights of all its steps, then each to its slot, as
// decode/tile.cuh has them for its 16 rows: a thread's scores of a step lie as in that kernel's S.
#pragma once

#include "cuda/decode/rows_loads.cuh"
#include "cuda/decode/tile.cuh"
#include "cuda/tile/wgmma.cuh"

namespace sa::decode {
namespace many_rows {

// Of a team, for each of the thread's two rows; pivot in log2 units, sum over this lane's keys.
struct Team {
    float pivot[2] = {-INFINITY, -INFINITY}, sum[2] = {};
};

template <class C> struct Scores {
    using Element = typename C::Element;
    using Smem = typename C::Smem;
    Smem &smem;
    const typename C::Arguments &params;
    Ring<C::kStages> ring;
    Ring<C::kSlots> slots;

    // Sets scores of step j to -inf where the row does not see the key. tile: of 16 keys.
    __device__ __forceinline__ void mask(float (&s)[C::kKeys / 2], int j, int32_t tile) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const decode::Row row = smem.rows[warpgroup_row(i)];
#pragma unroll
            for (int x = 0; x < 4; x++)
                if (!decode::sees(row, tile * kTileK + 8 * (x / 2) + fragment_column() + x % 2))
                    s[8 * j + 4 * (x / 2) + 2 * i + x % 2] = -INFINITY;
        }
    }

    // Scores of step j become weights; alpha: what the rows of the team's O are multiplied by first.
    __device__ __forceinline__ void weigh(float (&s)[C::kKeys / 2], int j, Team &team, float (&alpha)[2], float scale_log2) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float *own = s + 8 * j + 2 * i;
            const float top = quad_max(fmaxf(fmaxf(own[0], own[1]), fmaxf(own[4], own[5]))) * scale_log2, before = team.pivot[i];
            const float pivot = top > before ? top : before;
            const float from = pivot == -INFINITY ? 0.0f : pivot;
            alpha[i] = before == pivot ? 1.0f : exp2_approx(before - from);
            float sum = 0.0f;
#pragma unroll
            for (int x = 0; x < 4; x++) {
                float &score = own[4 * (x / 2) + x % 2];
                score = exp2_approx(fmaf(score, scale_log2, -from));
                sum += score;
            }
            team.pivot[i] = pivot;
            team.sum[i] = team.sum[i] * alpha[i] + sum;
        }
    }

    // Writes the weights of step j and alpha to the slot `ahead` after the next, once it is free.
    __device__ __forceinline__ void store(const float (&s)[C::kKeys / 2], int j, const float (&alpha)[2], uint32_t ahead) {
        const Ring<C::kSlots> its{slots.n + ahead};
        const int thread = threadIdx.x % 128, row = store_row(thread);
        const uint32_t n = its.stage();
        const auto tile = static_cast<uint32_t>(n / C::kTileSlots * kRowHalf);
        const int chunk = static_cast<int>(n % C::kTileSlots * (C::kSlotBytes / 16)) + store_chunk(thread);
        const uint32_t to = shared_address(smem.weights) + tile;
        uint32_t high[4], rest[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const decode::RoundedPair pair = decode::round_pair<Element>(s[8 * j + 2 * i], s[8 * j + 2 * i + 1]);
            high[i] = pair.high;
            rest[i] = pair.rest;
        }
        smem.p_empty.acquire(its);
        stmatrix_x4(swizzled(to, kRowBytes, row, chunk), high);
        if constexpr (C::kSplitsP) stmatrix_x4(swizzled(to, kRowBytes, row, chunk + 2), rest);
        if (thread % 4 == 0)
            for (int i = 0; i < 2; i++) smem.alpha[n][warpgroup_row(thread, i)] = alpha[i];
        const bool moves = __any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f);
        if (thread % 32 == 0) smem.moves[n][thread / 32] = moves;
    }

    // Hands on the slots that were written last.
    __device__ __forceinline__ void hand_on(uint32_t count) {
        async_fence();
        for (uint32_t i = 0; i < count; i++, slots.n++) smem.p_full.arrive(slots);
    }

    // All steps' weights before the first is stored: chains of arithmetic that do not wait for each other. Where slots are fewer than
    // steps, each is handed on by itself. kWhole: the part has all steps of the stage.
    template <bool kWhole>
    __device__ __forceinline__ void take_steps(
            float (&s)[C::kKeys / 2], Team (&teams)[C::kTeams], int32_t step, int32_t last, const sa_range &full) {
        constexpr bool kAtOnce = kWhole && C::kSlots >= C::kSteps;
        float alpha[C::kSteps][2];
#pragma unroll
        for (int j = 0; j < C::kSteps; j++)
            if (static_cast<uint32_t>(step + j - full.begin) >= static_cast<uint32_t>(max(0, full.end - full.begin)))
                mask(s, j, sa_key_tile_at(&smem.part.stream.tiles, step + j));
#pragma unroll
        for (int j = 0; j < C::kSteps; j++)
            if (kWhole || step + j < last) weigh(s, j, teams[j % C::kTeams], alpha[j], fabsf(params.scale_log2));
#pragma unroll
        for (int j = 0; j < C::kSteps; j++) {
            if (!kWhole && step + j >= last) break;
            store(s, j, alpha[j], kAtOnce ? j : 0);
            if (!kAtOnce) hand_on(1);
        }
        if (kAtOnce) hand_on(C::kSteps);
    }

    // Joins the teams, in their order, as decode/merge.cuh's Partials does: their factors, and the part's pivot and sum.
    __device__ __forceinline__ void join(const Team (&teams)[C::kTeams]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = warpgroup_row(i);
            float top = -INFINITY, sum = 0.0f;
#pragma unroll
            for (int t = 0; t < C::kTeams; t++) top = fmaxf(top, teams[t].pivot[i]);
#pragma unroll
            for (int t = 0; t < C::kTeams; t++) {
                const float added = sa::weight(teams[t].pivot[i], top);
                sum = fmaf(quad_sum(teams[t].sum[i]), added, sum);
                if (threadIdx.x % 4 == 0) smem.factor[t][row] = added;
            }
            if (threadIdx.x % 4 == 0) smem.stats[row] = {top, sum};
        }
    }

    __device__ __forceinline__ void attend() {
        const Part &part = smem.part;
        const uint32_t q = shared_address(smem.queries);
        const sa_range full = sa_full_key_tiles(&part.stream.tiles);
        const int32_t last = last_step(part);
        Team teams[C::kTeams];
        begin_rows<C, 128>(smem, params);
        land_rows();
        bar_sync<128>(kScoreBarrier);
#pragma unroll 1
        for (int32_t step = part.first; step < last; step += C::kSteps, ring.n++) {
            float s[C::kKeys / 2];
            smem.k_full.wait(ring);
            wgmma_abt<Element, C::kHeadDim, kRowHalf, C::kKeyHalf>(s, q, shared_address(smem.keys(ring.stage())));
            wgmma_wait<0>(); // S complete; products of values of earlier steps still running
            pin(s);
            smem.k_empty.release(ring);
            if (params.scale_log2 < 0.0f) // its sign moves to the scores, whose maximum becomes the pivot
#pragma unroll
                for (int i = 0; i < C::kKeys / 2; i++) s[i] = -s[i];
            if (step + C::kSteps <= last)
                take_steps<true>(s, teams, step, last, full);
            else
                take_steps<false>(s, teams, step, last, full);
        }
        join(teams);
    }
};

} // namespace many_rows
} // namespace sa::decode
