// SPDX-License-Identifier: Apache-2.0
//
// The serial part of chain_cluster.cuh: a warp adds P V of the block's 16 columns, and the tiles' sums of weights, in the forward's order.
#pragma once

#include "cuda/decode/chain_cluster.cuh"

namespace sa::decode {

template <class C> struct ColumnChain : ClusterStream<C> {
    using Base = ClusterStream<C>;
    using Base::lane, Base::params, Base::smem;
    static constexpr int kAhead = C::kAhead;
    float o[4] = {}, pivot[2] = {-INFINITY, -INFINITY}; // columns fragment_row(i), rows fragment_column() + x
    float sum = 0.0f, sums_pivot = -INFINITY, limit;    // of class lane / 8 of row sums_row(); limit: of a tile's total
    uint32_t v[kAhead][4];                              // of the next k16 steps
    uint2 p[kAhead];

    __device__ __forceinline__ explicit ColumnChain(const Base &stream)
        : Base(stream), limit(sums_row() < this->num_rows() ? kLarge<typename C::Element> : INFINITY) {
        if (lane() < this->num_rows())
            smem.s_aux[lane()] =
                    params.s_aux ? static_cast<float>(sa_load(params.s_aux, params.s_aux_dtype, token_head(smem.part, params, lane()).head))
                                 : -INFINITY;
    }

    __device__ __forceinline__ static int sums_row() { return fragment_column() + lane() / 4 % 2; }

    // A value that is not finite, of 16 keys that not all rows see, is zeroed in shared memory and added explicitly to the rows that see
    // it.
    __device__ __forceinline__ void hide_nonfinite(uint32_t n, int32_t first_key) {
        unsigned char *tile = smem.values[n % C::kStages];
        const auto chunk_at = [&](int key, int chunk) { return tile + key * C::kValueRow + ((chunk ^ (key >> 2 & 1)) << 4); };
#pragma unroll 1
        for (int t = 0; t < C::kSteps; t++) {
            if (this->all_see(first_key + t * kTileK)) continue;
            auto *own = chunk_at(t * kTileK + lane() / 2, lane() % 2);
            bool bad = false;
            for (int x = 0; x < 8; x++)
                bad |= is_nonfinite<typename C::Element>(static_cast<uint32_t>(reinterpret_cast<uint16_t *>(own)[x]));
            if (!__any_sync(0xffffffffu, bad)) continue;
#pragma unroll 1
            for (int key = t * kTileK; key < (t + 1) * kTileK; key++)
                for (int i = 0; i < 2; i++) {
                    const uint16_t half = reinterpret_cast<const uint16_t *>(chunk_at(key, i))[lane() / 4];
                    const float value = nonfinite_part<typename C::Element>(static_cast<uint32_t>(half));
                    for (int x = 0; x < 2; x++)
                        if (sees(smem.rows[fragment_column() + x], first_key + key)) o[2 * i + x] += value;
                }
            __syncwarp();
            for (int x = 0; x < 8; x++) {
                uint16_t &half = reinterpret_cast<uint16_t *>(own)[x];
                if (is_nonfinite<typename C::Element>(static_cast<uint32_t>(half))) half = 0;
            }
            __syncwarp();
        }
    }

    // Waits for tile i, the n-th of all runs.
    __device__ __forceinline__ void wait(int32_t i, uint32_t n) {
        smem.full.wait(Ring<C::kStages>{n});
        if (__builtin_expect(params.band.q_len > 1, false)) hide_nonfinite(n, this->first_key(i));
    }

    // The lane's place in tile n: of V and of P.
    struct Place {
        uint32_t v;
        const uint2 *p;
    };

    __device__ __forceinline__ Place place(uint32_t n) const {
        const int row = right_row(lane());
        const uint32_t at = row * C::kValueRow + ((right_chunk(lane()) ^ (row >> 2 & 1)) << 4);
        return {shared_address(smem.values[n % C::kStages]) + at, &smem.sent[n % C::kStages].p[0][lane()]};
    }

    __device__ __forceinline__ void fetch(int t, const Place &from) {
        ldmatrix_x4_trans(v[t % kAhead], from.v + t * kTileK * C::kValueRow);
        p[t % kAhead] = from.p[32 * t];
    }

    // The lane is asked three times, which makes three predicates and no branch.
    __device__ __forceinline__ void release(uint32_t n) const {
        const Ring<C::kStages> ring{n};
        const uint32_t of_owner = address_of_block(shared_address(&smem.empty[n / C::kCluster % C::kRounds]), n % C::kCluster);
        if (lane() == 0) smem.v_empty.release(ring);
        if (lane() == 0) smem.full[ring.stage()].arrive_expect(sizeof(typename C::WeightStage));
        if (lane() == 0) arrive_at_block(of_owner);
    }

    // Takes the run's pivots.
    __device__ __forceinline__ void move_pivots() {
        bar_sync<32 * (C::kScorers + 1)>(2);
#pragma unroll
        for (int x = 0; x < 2; x++) {
            const float now = smem.pivot[fragment_column() + x];
            if (now == pivot[x]) continue;
            const float alpha = exp2_approx(pivot[x] - now);
            for (int i = 0; i < 2; i++) o[2 * i + x] = __fmul_rn(o[2 * i + x], alpha);
            pivot[x] = now;
        }
        const float now = smem.pivot[sums_row()];
        if (now != sums_pivot) sum = __fmul_rn(sum, exp2_approx(sums_pivot - now));
        sums_pivot = now;
    }

    // Some row's total of tile i is large: the next run begins here, from this state.
    __device__ __forceinline__ void stop_at(int32_t i, bool large, int32_t &stop) {
        for (int x = 0; x < 4; x++) smem.before[x][lane()] = o[x];
        smem.before[4][lane()] = sum;
        const uint32_t rows = __reduce_or_sync(0xffffffffu, large ? 1u << sums_row() : 0u);
        if (lane()) return;
        smem.large = rows;
        stop = i;
    }

    // Once the chain has the pivots, it has nothing but products and sums to wait for: fragments come kAhead steps ahead, what a tile needs
    // besides is done between the products, and a tile is released within the next one.
    __device__ __forceinline__ void run(int32_t first, uint32_t n, int32_t &stop) {
        constexpr int kNext = C::kSteps - kAhead; // the step after which the next tile is fetched
        move_pivots();
        wait(first, n);
        Place at = place(n);
        float total = smem.sent[n % C::kStages].totals[lane()], most = limit;
#pragma unroll
        for (int t = 0; t < kAhead; t++) fetch(t, at);
        bool stopped = false;
#pragma unroll 1
        for (int32_t i = first;; n++) {
            if (__builtin_expect(__any_sync(0xffffffffu, total > most), false)) {
                stop_at(i, total > most, stop);
                most = INFINITY;
                stopped = true;
            }
            sum = __fadd_rn(sum, total);
            const bool last = ++i == this->num_tiles;
            Place next;
#pragma unroll
            for (int t = 0; t < C::kSteps; t++) {
                mma_m16n8k16<typename C::Element>(o, v[t % kAhead], p[t % kAhead].x, p[t % kAhead].y);
                if (t == (kNext < 1 ? 0 : kNext - 1) && !last) wait(i, n + 1);
                if (t == kNext) {
                    next = place(n + 1);
                    total = smem.sent[(n + 1) % C::kStages].totals[lane()];
                }
                if (t < kNext)
                    fetch(t + kAhead, at);
                else
                    fetch(t - kNext, next); // past the last tile, of no meaning
                if (t == 1 && i > first + 1) release(n - 1);
            }
            if (last) break;
            at = next;
        }
        release(n);
        if (!stopped) {
            if (lane() == 0) stop = this->num_tiles;
            return;
        }
        for (int x = 0; x < 4; x++) o[x] = smem.before[x][lane()];
        sum = smem.before[4][lane()];
    }

    // Ends the rows and writes the block's columns.
    __device__ __forceinline__ void write() {
        float of_row = sum;
        of_row += __shfl_xor_sync(0xffffffffu, of_row, 8);
        of_row += __shfl_xor_sync(0xffffffffu, of_row, 16);
        if (lane() < 8) smem.sum[sums_row()] = of_row;
#pragma unroll
        for (int x = 0; x < 4; x++) smem.out[fragment_column() + x % 2][fragment_row(x / 2)] = o[x];
        __syncwarp();
        const int row = lane() / 4, column = lane() % 4 * 4;
        if (row >= this->num_rows()) return;
        Quad quad;
        for (int x = 0; x < 4; x++) quad.o[x] = smem.out[row][column + x];
        quad.pivot = this->num_tiles ? smem.pivot[row] : -INFINITY;
        quad.sum = smem.sum[row];
        write_chunk<C>(quad, smem, params, row, static_cast<int>(this->rank) * 16 + column);
    }
};

} // namespace sa::decode
