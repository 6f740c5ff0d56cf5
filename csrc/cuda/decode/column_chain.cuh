// SPDX-License-Identifier: Apache-2.0
//
// The serial part of chain_cluster.cuh: a warpgroup adds P V of the block's columns, and the tiles' sums of weights, in the forward's
// order. With 16 columns in a block all warps have the same, with 32 each has those of another.
#pragma once

#include "cuda/decode/chain_cluster.cuh"
#include "cuda/tile/wgmma.cuh"

namespace sa::decode {

template <class C> struct ColumnChain : ClusterStream<C> {
    using Base = ClusterStream<C>;
    using Base::lane, Base::params, Base::smem, Base::warp;
    using Element = typename C::Element;
    static constexpr int kBarrier = 3;                     // of the warpgroup; the next ones, of warps with the same columns
    float o[1][4] = {}, pivot[2] = {-INFINITY, -INFINITY}; // the warp's columns fragment_row(i), rows fragment_column() + x
    float sum = 0.0f, sums_pivot = -INFINITY, limit;       // of class lane / 8 of row sums_row(); limit: of a tile's total
    float o_before[4], sum_before;                         // where a run stopped
    bool careful = false;                                  // one stopped in a round: later ones take single tiles

    __device__ __forceinline__ explicit ColumnChain(const Base &stream)
        : Base(stream), limit(sums_row() < this->num_rows() ? kLarge<Element> : INFINITY) {}

    __device__ __forceinline__ static int sums_row() { return fragment_column() + lane() / 4 % 2; }
    __device__ __forceinline__ static int first_column() { return 16 * warp() % C::kColumns; } // in the block's

    __device__ __forceinline__ void wait_for_products() {
        wgmma_wait<0>();
        pin(o[0]);
    }

    // Of the n-th tile, whose first key is first_key.
    __device__ __forceinline__ void hide_values(uint32_t n, int32_t first_key) {
        unsigned char *tile = smem.values[n % C::kStages];
#pragma unroll 1
        for (int t = 0; t < C::kSteps; t++) {
            if (this->all_see(first_key + t * kTileK)) continue;
            hide_nonfinite<Element>(
                    o, smem.rows, first_key + t * kTileK,
                    [&](int key, int n) { return tile + C::value_at(t * kTileK + key, first_column() / 8 + n); },
                    [] { // warps with the same columns read the same values
                        if (C::kColumns < 64) bar_sync<32 * 64 / C::kColumns>(kBarrier + 1 + first_column() / 16);
                    });
        }
        async_fence();
        bar_sync<32 * C::kChainWarps>(kBarrier);
    }

    // Takes the run's pivots.
    __device__ __forceinline__ void move_pivots() {
        const uint32_t large = smem.large; // of the run before
        bar_sync<32 * (C::kSets * C::kScorers + C::kChainWarps)>(2);
#pragma unroll
        for (int x = 0; x < 2; x++) {
            const float now = smem.pivot[fragment_column() + x];
            if (now == pivot[x]) continue;
            const float alpha = exp2_approx(pivot[x] - now);
            for (int i = 0; i < 2; i++) o[0][2 * i + x] = __fmul_rn(o[0][2 * i + x], alpha);
            pivot[x] = now;
        }
        const float now = smem.pivot[sums_row()];
        if (now != sums_pivot)
            sum = __fmul_rn(sum, exp2_approx(sums_pivot - now));
        else if (now > -INFINITY && large >> sums_row() & 1)
            limit = INFINITY; // it cannot move
        sums_pivot = now;
    }

    // The next run begins at tile i, from this state; where a total is large, with a new pivot of its row.
    __device__ __forceinline__ void stop_at(int32_t i, bool large, int32_t &stop) {
        for (int x = 0; x < 4; x++) o_before[x] = o[0][x];
        sum_before = sum;
        const uint32_t rows = __reduce_or_sync(0xffffffffu, large ? 1u << sums_row() : 0u);
        if (threadIdx.x) return;
        smem.large = rows;
        stop = i;
    }

    // Sums of the weights of the tile in the stage.
    __device__ __forceinline__ float total_of(uint32_t stage) const { return smem.sent[stage].totals[lane()]; }

    __device__ __forceinline__ void release(uint32_t stage) const {
        if (lane() == 0) smem.empty[stage].arrive();
    }

    // Issues o += P V of steps [from, to) of the tile in the stage-th stage behind `base`, which is in a uniform register.
    struct Stages {
        uint32_t values, weights;
    };
    __device__ __forceinline__ Stages stages_from(uint32_t stage) const {
        return {warp_uniform_register(shared_address(smem.values[stage])), warp_uniform_register(shared_address(smem.sent[stage].p))};
    }
    __device__ __forceinline__ void begin_products(const Stages &base, int stage, int from, int to) {
        const uint32_t values = base.values + stage * C::kValueBytes, weights = base.weights + stage * int{sizeof(typename C::WeightStage)};
        const uint64_t v = operand_of_rows(values, C::kValueRow, 0), p = operand_of_rows(weights, 16, 128);
#pragma unroll
        for (int t = from; t < to; t++)
            wgmma_shared_transposed<Element>(o[0], operand_at(v, t * kTileK * C::kValueRow), operand_at(p, t * 256), true);
    }

    // Any tile, by itself, the n-th of the run. Where a total is large, the next run begins here, from this state.
    __device__ __forceinline__ void run_tile(int32_t i, uint32_t n, bool &stopped, int32_t &stop) {
        const Ring<C::kStages> ring{n};
        smem.full.wait(ring);
        const float total = total_of(ring.stage());
        if (!stopped && __any_sync(0xffffffffu, total > limit)) {
            stopped = true;
            stop_at(i, total > limit, stop);
        }
        if (params.band.q_len > 1 && !this->is_full(i)) hide_values(n, this->first_key(i));
        sum = __fadd_rn(sum, total);
        wgmma_fence();
        begin_products(stages_from(ring.stage()), 0, 0, C::kSteps);
        wgmma_commit();
        wait_for_products();
        release(ring.stage());
    }

    // Rounds of kRound tiles from tile i on, the n-th of the run, before `end`, whose keys all rows see. Returns the first tile that is
    // left. A warp can issue no product before all but two of those before it have ended, so what else a tile takes lies between products.
    // Where a total is large, the next run begins at its round, and takes single tiles.
    static constexpr int kRound = 4;
    static_assert(C::kStages % kRound == 0, "a round's stages lie side by side");
    __device__ __forceinline__ int32_t run_rounds(int32_t i, uint32_t n, int32_t end, bool &stopped, int32_t &stop) {
        smem.full.wait(Ring<C::kStages>{n});
        float total = total_of(n % C::kStages);
#pragma unroll 1
        for (bool more = true; more; i += kRound) {
            if (!stopped) stop_at(i, false, stop);
            bool large = false;
            more = i + 2 * kRound <= end;
            const Stages base = stages_from(n % C::kStages);
            wgmma_fence();
#pragma unroll
            for (int x = 0; x < kRound; x++) {
                const Ring<C::kStages> next{++n};
                const bool exists = x + 1 < kRound || more;
                large |= total > limit;
                sum = __fadd_rn(sum, total);
                begin_products(base, x, 0, 2);
                wgmma_commit();
                if (x) {
                    wgmma_wait<1>(); // the products of the tile before
                    release((n - 2) % C::kStages);
                }
                const bool ready = exists && smem.full[next.stage()].is_over(next);
                begin_products(base, x, 2, C::kSteps - 1);
                if (exists && !ready) smem.full.wait(next);
                total = total_of(next.stage()); // of no meaning behind the last
                begin_products(base, x, C::kSteps - 1, C::kSteps);
                wgmma_commit();
            }
            wait_for_products();
            release((n - 1) % C::kStages);
            stopped |= __any_sync(0xffffffffu, large);
        }
        return i;
    }

    // A run over tiles [first, num_tiles).
    __device__ __forceinline__ void run(int32_t first, int32_t &stop) {
        move_pivots();
        const bool masks = params.band.q_len > 1;
        const int32_t full_begin = masks ? this->full.begin : first, full_end = masks ? this->full.end : this->num_tiles;
        int32_t i = first;
        const auto n = [&] { return static_cast<uint32_t>(i - first); };
        bool stopped = false;
#pragma unroll 1
        for (; i < this->num_tiles && (careful || i < full_begin || n() % kRound); i++) run_tile(i, n(), stopped, stop);
        if (!stopped && i + kRound <= full_end) {
            i = run_rounds(i, n(), full_end, stopped, stop);
            careful = stopped;
        }
#pragma unroll 1
        for (; i < this->num_tiles; i++) run_tile(i, n(), stopped, stop);
        if (!stopped) {
            if (threadIdx.x == 0) stop = this->num_tiles;
            return;
        }
        for (int x = 0; x < 4; x++) o[0][x] = o_before[x];
        sum = sum_before;
    }

    // Ends the rows and writes the block's columns.
    __device__ __forceinline__ void write() {
        if (warp() >= C::kColumns / 16) return;
        auto &out = smem.out[warp()];
        auto &sums = smem.sum[warp()];
        float of_row = sum;
        of_row += __shfl_xor_sync(0xffffffffu, of_row, 8);
        of_row += __shfl_xor_sync(0xffffffffu, of_row, 16);
        if (lane() < 8) sums[sums_row()] = of_row;
#pragma unroll
        for (int x = 0; x < 4; x++) out[fragment_column() + x % 2][fragment_row(x / 2)] = o[0][x];
        __syncwarp();
        const int row = lane() / 4, column = lane() % 4 * 4;
        if (row >= this->num_rows()) return;
        Quad quad;
        for (int x = 0; x < 4; x++) quad.o[x] = out[row][column + x];
        quad.pivot = this->num_tiles ? smem.pivot[row] : -INFINITY;
        quad.sum = sums[row];
        write_chunk<C>(quad, smem, params, row, static_cast<int>(this->rank) * C::kColumns + first_column() + column);
    }
};

} // namespace sa::decode
