// SPDX-License-Identifier: Apache-2.0
//
// A value warpgroup of the decode of many rows on sm_90: O = O alpha + P V, a step at a time, for its teams or its columns; and its share
// of the end of a part.
#pragma once

#include "cuda/decode/rows_smem.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/wgmma.cuh"

namespace sa::decode {
namespace many_rows {

template <class C> struct Values {
    using Element = typename C::Element;
    using Smem = typename C::Smem;
    using Out = float[C::kOwnTeams][C::kColumns / C::kN][C::kN / 2];
    Smem &smem;
    const typename C::Arguments &params;
    const int warpgroup; // 0 or 1
    Ring<C::kStages> ring;
    uint32_t steps_before = 0; // of earlier parts: the n-th step of all takes slot n

    // The warpgroup's i-th step of a stage.
    __device__ __forceinline__ int own_step(int i) const {
        return C::kSplitsColumns ? i : C::kTeams == 2 ? 2 * i + warpgroup : 2 * warpgroup + i;
    }
    __device__ __forceinline__ int first_column() const { return C::kSplitsColumns ? warpgroup * C::kColumns : 0; }
    __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x % 128); }

    // Where values of a step that not all rows see are not finite: adds them to the rows that see them and leaves zeros. tile: of 16 keys.
    template <int kTeam> __device__ __forceinline__ void hide_nonfinite(Out &o, unsigned char *values, int32_t tile) {
        constexpr int kEights = C::kN / 8;
        hide_nonfinite_values<Element, C::kKeyHalf>(values, C::kColumns, kHideBarrier + warpgroup, [&] {
            const decode::Row rows[2] = {smem.rows[warpgroup_row(0)], smem.rows[warpgroup_row(1)]};
#pragma unroll 1
            for (int key = 0; key < kTileK; key++) {
                const bool meets[2] = {decode::sees(rows[0], tile * kTileK + key), decode::sees(rows[1], tile * kTileK + key)};
#pragma unroll
                for (int n = 0; n < C::kColumns / 8; n++) {
                    const uint32_t pair = *reinterpret_cast<const uint32_t *>(
                            values + n / 8 * C::kKeyHalf + swizzled(key, n % 8) + 2 * fragment_column());
#pragma unroll
                    for (int x = 0; x < 2; x++) {
                        const float value = nonfinite_part<Element>(static_cast<uint16_t>(pair >> 16 * x));
#pragma unroll
                        for (int i = 0; i < 2; i++) o[kTeam][n / kEights][4 * (n % kEights) + 2 * i + x] += meets[i] ? value : 0.0f;
                    }
                }
            }
        });
    }

    // O of a team, alpha and all, after the n-th step of all. values: the warpgroup's columns of the step's keys.
    template <int kTeam> __device__ __forceinline__ void take_step(Out &o, unsigned char *values, uint32_t n, int32_t hidden_tile) {
        const Ring<C::kSlots> use{n};
        const uint32_t slot = use.stage();
        smem.p_full.wait(use);
        if (smem.moves[slot][thread() / 32]) {
            const float alpha[2] = {smem.alpha[slot][warpgroup_row(0)], smem.alpha[slot][warpgroup_row(1)]};
#pragma unroll
            for (auto &columns : o[kTeam])
#pragma unroll
                for (int i = 0; i < C::kN / 2; i++) columns[i] *= alpha[element_row(i)];
        }
        if (__builtin_expect(hidden_tile >= 0, false)) hide_nonfinite<kTeam>(o, values, hidden_tile);
        // In a cluster an address has the block's rank in its upper byte, where a descriptor has half_step.
        const uint64_t left = operand(shared_address(smem.slot(slot)), 0), right = operand(shared_address(values) & 0x3ffff, C::kKeyHalf);
        for (auto &columns : o[kTeam]) pin(columns);
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < C::kColumns / C::kN; n++) {
            const uint64_t its = operand_at(right, n * (C::kN / 64) * C::kKeyHalf);
            wgmma_shared_rows<Element>(o[kTeam][n], left, its, true);
            if constexpr (C::kSplitsP) wgmma_shared_rows<Element>(o[kTeam][n], operand_at(left, 32), its, true);
        }
        wgmma_commit();
        wgmma_wait<0>(); // the other value warpgroup's product and the scores of later stages still running
        for (auto &columns : o[kTeam]) pin(columns);
        smem.p_empty.release(use);
    }

    // The i-th own step of a stage, which begins with `step` of the part and is the n-th of all.
    template <int kTeam>
    __device__ __forceinline__ void take_own_step(Out &o, unsigned char *values, int32_t step, int i, const sa_range &full, uint32_t n) {
        const decode::Part &part = smem.part;
        const int j = own_step(i);
        if (step + j >= last_step(part)) return;
        const bool is_full = static_cast<uint32_t>(step + j - full.begin) < static_cast<uint32_t>(max(0, full.end - full.begin));
        take_step<kTeam>(o, values + j * kTileK * kRowBytes, n + static_cast<uint32_t>(j),
                is_full ? -1 : sa_key_tile_at(&part.stream.tiles, step + j));
    }

    __device__ __forceinline__ void take_own_steps(Out &o, unsigned char *values, int32_t step, const sa_range &full, uint32_t n) {
        if constexpr (C::kOwnTeams == 2) {
            take_own_step<0>(o, values, step, 0, full, n);
            take_own_step<1>(o, values, step, 1, full, n);
        } else {
#pragma unroll 1
            for (int i = 0; i < C::kOwnSteps; i++) take_own_step<0>(o, values, step, i, full, n);
        }
    }

    // Leaves the part's O in the ring, rows of kPartialRow floats: the teams', times their factors, in the order of teams.
    __device__ __forceinline__ void leave(const Out &o) {
        auto *partial = reinterpret_cast<float *>(smem.ring);
        if (!C::kSplitsColumns && warpgroup == 1) C::sync(); // the first warpgroup's sums are there
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = warpgroup_row(i);
            float *to = partial + row * C::kPartialRow + first_column() + fragment_column();
            float factor[C::kOwnTeams];
#pragma unroll
            for (int t = 0; t < C::kOwnTeams; t++) factor[t] = smem.factor[(C::kSplitsColumns ? 0 : warpgroup * C::kOwnTeams) + t][row];
#pragma unroll
            for (int n = 0; n < C::kColumns / 8; n++) {
                auto *pair = reinterpret_cast<float2 *>(to + 8 * n);
                float2 sum = {0.0f, 0.0f};
                if (!C::kSplitsColumns && warpgroup == 1) sum = *pair;
#pragma unroll
                for (int t = 0; t < C::kOwnTeams; t++) {
                    const float *its = o[t][n / (C::kN / 8)] + 4 * (n % (C::kN / 8)) + 2 * i;
                    sum.x = fmaf(its[0], factor[t], sum.x);
                    sum.y = fmaf(its[1], factor[t], sum.y);
                }
                *pair = sum;
            }
        }
        if (!C::kSplitsColumns && warpgroup == 0) C::sync();
        C::sync();
    }

    __device__ __forceinline__ void attend() {
        const decode::Part &part = smem.part;
        const sa_range full = sa_full_key_tiles(&part.stream.tiles);
        const int32_t first = part.first, last = last_step(part);
        begin_part<C>(smem, params);
        Out o = {};
#pragma unroll 1
        for (int32_t step = first; step < last; step += C::kSteps, ring.n++) {
            auto &full_barriers = C::kLatent ? smem.k_full : smem.v_full;
            auto &empty_barriers = C::kLatent ? smem.k_empty : smem.v_empty;
            full_barriers.wait(ring);
            unsigned char *values = smem.values(ring.stage()) + first_column() / 64 * C::kKeyHalf;
            take_own_steps(o, values, step, full, steps_before + static_cast<uint32_t>(step - first));
            empty_barriers.release(ring);
        }
        steps_before += static_cast<uint32_t>(max(0, last - first));
        bar_sync<kValueThreads + 128>(kPartBarrier); // the scores' factors are there; nobody reads the ring
        leave(o);
        write_part<C>(smem, params, reinterpret_cast<const float *>(smem.ring), reinterpret_cast<float *>(smem.weights));
        async_fence(); // before copies into the ring
    }
};

} // namespace many_rows
} // namespace sa::decode
