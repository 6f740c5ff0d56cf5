// SPDX-License-Identifier: Apache-2.0
//
// The second launch of the wide windowed backward: dK and dV.
//
//     loader warp         K, V of a block | Q, dO, stats | Q, dO, stats | ..
//     checker warp        rows that are not finite, or that do not exist, become 0 where the first launch suspects any; statistics by field
//     2 math warpgroups   S = K Q^T, dP = V dO^T | P, dS | dV += P dO, dK += dS Q          64 keys each
//
// A block is 128 keys of a kv head, and the row tiles that see some of them, counted from the first such row on, with all heads of the
// GQA group: dK and dV are summed in registers and rounded once. P and dS are operands from registers; nothing passes between warpgroups.
// A tile's rows are columns here. S of a tile is issued before dV and dK of the tile before are awaited.
//
// The first tiles see keys of the first warpgroup alone, the last ones keys of the second: they come in pairs, one of each in turn, so that
// neither warpgroup waits for the other's. Where blocks are few, one's halves are two items, in each of which one warpgroup idles.
//
// A stretch is up to 32 row tiles whose rows see positional sink tokens before their windows, with the sequence's first 64 keys. The
// warpgroups take its tiles in turn. Sums of sink tokens, also those of the sequence's first block, go to the workspace.
#pragma once

#include "cuda/bwd_wide_window_sm90/blocks.cuh"

namespace sa::bwd_wide_window_sm90 {

// A math warpgroup: 64 keys in the rows of its accumulators, a tile's rows in the columns.
template <class C> struct KeysMath {
    using Element = typename C::Element;
    using Scores = float[kRows / 2];          // S, P, dP or dS: 64 keys x 64 rows
    using Operands = uint32_t[kRows / 16][4]; // P, dS as packed pairs

    KeysSmem<C> &smem;
    const sinkattn_bwd_args &args;
    const Problem &p;
    const int math_warpgroup;
    Ring<C::kStages> ring;
    int first_key; // the warpgroup's first key in the block; 0 for both in a stretch

    __device__ __forceinline__ void begin_scores(Scores &s, uint32_t stage) const {
        wgmma_abt<Element, C::kHeadDim, C::kKeyHalf, C::kRowHalf>(
                s, shared_address(smem.keys) + first_key * kRowBytes, shared_address(smem.queries[stage]));
    }
    template <int kSize> __device__ __forceinline__ void begin_dp(float (&dp)[kSize], uint32_t stage, int first) const {
        wgmma_abt<Element, C::kHeadDimV, C::kKeyHalf, C::kRowHalf>(
                dp, shared_address(smem.values) + first_key * kRowBytes, shared_address(smem.douts[stage]) + first * kRowBytes);
    }

    // Of the thread's key r.
    __device__ __forceinline__ const sa_range &seen_by(int r) const {
        const int thread = pinned(static_cast<int>(threadIdx.x));
        return smem.seen_by[64 * (thread / 128) + warpgroup_row(static_cast<unsigned>(thread) % 128, r)];
    }
    __device__ __forceinline__ Seen find_seen(int t) const {
        const auto before = [&](int row) { return Seen::before(min(row - t * p.tile_rows(), p.tile_rows()) - fragment_column()); };
        const auto bits = [&](const sa_range &rows) { return before(rows.end) & ~before(rows.begin); };
        return {{bits(seen_by(0)), bits(seen_by(1))}};
    }

    // Of the thread's columns from `first` on.
    template <int kSize> static __device__ __forceinline__ void load_field(float (&to)[kSize], const float *field, int first) {
#pragma unroll
        for (int n = 0; n < kSize; n += 2) {
            const float2 x = *reinterpret_cast<const float2 *>(field + first + fragment_column() + 4 * n);
            to[n] = x.x;
            to[n + 1] = x.y;
        }
    }
    // s, of columns from `first` on, becomes P.
    template <bool kMasked, int kSize>
    __device__ __forceinline__ void find_weights(float (&s)[kSize], const float (&lse)[kSize / 2], const Seen &seen, int first) const {
#pragma unroll
        for (int i = 0; i < kSize; i++) {
            const float weight = exp2_approx(fmaf(s[i], p.scale_log2, -lse[i / 4 * 2 + i % 2]));
            s[i] = !kMasked || seen(element_row(i), first + element_column(i)) ? weight : 0.0f;
        }
    }
    // dp becomes dS.
    template <bool kMasked, int kSize>
    __device__ __forceinline__ void find_ds(
            float (&dp)[kSize], const float (&weights)[kSize], const float (&bias)[kSize / 2], const Seen &seen, int first) const {
#pragma unroll
        for (int i = 0; i < kSize; i++) {
            const float ds = weights[i] * (dp[i] + bias[i / 4 * 2 + i % 2]);
            dp[i] = !kMasked || seen(element_row(i), first + element_column(i)) ? ds : 0.0f;
        }
    }

    // A tile: dV += P dO, dK += dS Q, in flight at the end. held: those of the tile before are in flight.
    __device__ __forceinline__ void add_tile(Wide<C> &dk, float (&dv)[64], uint32_t stage, int part, bool held) {
        const bool is_full = part & kFull;
        Scores s, dp;
        Operands weights, ds;
        float lse[kRows / 4], bias[kRows / 4];
        Seen seen;
        begin_scores(s, stage);
        if (!is_full) seen = find_seen(part & kTileMask);
        wgmma_wait<1>(); // dV, dK of the tile before complete; S still running
        pin(dv);
        dk.pin_all();
        if (held) release_last();
        begin_dp(dp, stage, 0);
        wgmma_wait<1>(); // S complete; dP still running
        pin(s);
        load_field(lse, smem.lse[stage], 0);
        if (is_full)
            find_weights<false>(s, lse, seen, 0);
        else
            find_weights<true>(s, lse, seen, 0);
        load_field(bias, smem.bias[stage], 0);
        wgmma_wait<0>(); // dP complete
        pin(dp);
        if (part & kLastOwn) smem.kv_empty[0].arrive();
        if (is_full)
            find_ds<false>(dp, s, bias, seen, 0);
        else
            find_ds<true>(dp, s, bias, seen, 0);
        pack<Element>(weights, s);
        pack<Element>(ds, dp);
        add_products(dk, dv, weights, ds, stage, 0);
    }

    // The same with dP of 32 rows at a time: S, dP of all 64 do not fit beside dK of 192 columns.
    __device__ __forceinline__ void add_tile_by_halves(Wide<C> &dk, float (&dv)[64], uint32_t stage, int part, bool held) {
        const bool is_full = part & kFull;
        constexpr int kHalf = kRows / 2;
        Seen seen;
        Scores all;
        begin_scores(all, stage);
        if (!is_full) seen = find_seen(part & kTileMask);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float s[kHalf / 2], dp[kHalf / 2], lse[kHalf / 4], bias[kHalf / 4];
            uint32_t weights[kHalf / 16][4], ds[kHalf / 16][4];
            if (half == 0) {
                wgmma_wait<1>(); // dV, dK of the tile before complete; S still running
                pin(dv);
                dk.pin_all();
                if (held) release_last();
            }
            begin_dp(dp, stage, half * kHalf);
            load_field(lse, smem.lse[stage], half * kHalf);
            if (half == 0) {
                wgmma_wait<1>(); // S complete; dP still running
                pin(all);
            }
#pragma unroll
            for (int i = 0; i < kHalf / 2; i++) s[i] = all[half * (kHalf / 2) + i];
            if (is_full)
                find_weights<false>(s, lse, seen, half * kHalf);
            else
                find_weights<true>(s, lse, seen, half * kHalf);
            load_field(bias, smem.bias[stage], half * kHalf);
            wgmma_wait<0>(); // dP complete, with dV and dK of the half before
            if (half) pin(dv);
            if (half) dk.pin_all();
            pin(dp);
            if (half && part & kLastOwn) smem.kv_empty[0].arrive();
            if (is_full)
                find_ds<false>(dp, s, bias, seen, half * kHalf);
            else
                find_ds<true>(dp, s, bias, seen, half * kHalf);
            pack<Element>(weights, s);
            pack<Element>(ds, dp);
            add_products(dk, dv, weights, ds, stage, half * kHalf);
        }
    }

    // Releases the tile before, whose products are complete.
    __device__ __forceinline__ void release_last() { smem.row_empty.release(Ring<C::kStages>{ring.n - 1}); }

    // Issues dV += P dO, dK += dS Q for rows from `first` on; the caller waits.
    template <int kSteps>
    __device__ __forceinline__ void add_products(Wide<C> &dk, float (&dv)[64], const uint32_t (&weights)[kSteps][4],
            const uint32_t (&ds)[kSteps][4], uint32_t stage, int first) const {
        wgmma_pb<Element, C::kRowHalf>(dv, weights, shared_address(smem.douts[stage]) + first * kRowBytes);
        dk.template add_product<C::kRowHalf>(ds, shared_address(smem.queries[stage]) + first * kRowBytes, true);
    }

    // Adds the values of dO that the checker zeroed to dV of the keys that their rows see.
    __device__ __forceinline__ void add_hidden(float (&dv)[64], const Block &block) const {
#pragma unroll 1
        for (int n = 0; n < (block.order.skipped + block.order.num_tiles) * p.tokens * p.group; n++) {
            const int token = n / p.group, head = block.kv_head * p.group + n % p.group;
            if (block.first_token + token >= block.band.q_len) return;
            add_nonfinite<Element>(dv,
                    static_cast<const uint16_t *>(args.dout.data) +
                            sa_offset(&args.dout, block.sequence.batch, block.sequence.q_begin + block.first_token + token, head),
                    sa_head_dim_v(&args.fwd.problem), [&](int r) { return n >= seen_by(r).begin && n < seen_by(r).end; });
        }
    }

    // The rows that see a key of the block; in a stretch, the rows whose windows begin after the key.
    __device__ __forceinline__ sa_range tokens_seeing(const Block &block, int key) const {
        const sa_range rows = rows_of(block.band, block.key + key, 1);
        if (!C::kSinks || !block.is_stretch) return rows;
        const int end = min(block.first_token + block.order.num_tiles * p.tokens, block.band.q_len);
        return {max(rows.end, block.first_token), key < min(p.num_sinks, block.band.k_len) ? end : 0};
    }

    // dK and dV of the thread's sink tokens.
    __device__ __forceinline__ void write_partials(const Wide<C> &dk, const float (&dv)[64], const Block &block) const {
        for (int r = 0; r < 2; r++) {
            const int key = first_key + warpgroup_row(r);
            if (key >= p.num_sinks) continue;
            float *const to = p.partial_of(block.kv_head, block.slot + (block.is_stretch ? math_warpgroup : 0), key) + fragment_column();
#pragma unroll
            for (int n = 0; n < 16; n++) {
                *reinterpret_cast<float2 *>(to + 8 * n) = {dk.low[4 * n + 2 * r], dk.low[4 * n + 2 * r + 1]};
                *reinterpret_cast<float2 *>(to + 128 + 8 * n) = {dv[4 * n + 2 * r], dv[4 * n + 2 * r + 1]};
            }
        }
    }

    __device__ __forceinline__ void write(const Wide<C> &dk, const float (&dv)[64], const Block &block) const {
        if (C::kSinks && block.slot >= 0) write_partials(dk, dv, block);
        if (C::kSinks && block.is_stretch) return;
        uint16_t *to_dk[2] = {}, *to_dv[2] = {};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int key = block.key + first_key + warpgroup_row(r);
            if (key >= block.band.k_len || (C::kSinks && block.slot >= 0 && key < p.num_sinks)) continue;
            const int64_t row = block.sequence.k_begin + key;
            to_dk[r] = static_cast<uint16_t *>(args.dk.data) + sa_offset(&args.dk, block.sequence.batch, row, block.kv_head);
            to_dv[r] = static_cast<uint16_t *>(args.dv.data) + sa_offset(&args.dv, block.sequence.batch, row, block.kv_head);
        }
        unsigned char *const staged = smem.staged[threadIdx.x / 32];
        dk.write(to_dk, p.scale, static_cast<int>(args.fwd.problem.head_dim), staged);
        uint4 chunks[4][2];
        exchange<Element>(chunks, dv, 1.0f, staged);
        write_rows(to_dv, chunks, static_cast<int>(sa_head_dim_v(&args.fwd.problem)));
    }

    __device__ __forceinline__ void run() {
        for (Ring<2> blocks;; blocks.n++) {
            smem.block_full.wait(blocks);
            const Block &block = smem.blocks[blocks.stage()];
            if (!warp_uniform(block.exists)) return;
            first_key = C::kSinks && warp_uniform(block.is_stretch) ? 0 : 64 * math_warpgroup;
            Wide<C> dk;
            float dv[64];
            dk.clear();
#pragma unroll
            for (float &x : dv) x = 0.0f;
            bar_sync<128>(kMathBarrier + math_warpgroup); // all warps are done with the block before
            const int key = static_cast<int>(threadIdx.x);
            if (key % 128 < 64) { // each warpgroup those of its own keys
                const int own = key / 128 * 64 + key % 128;
                const sa_range tokens = tokens_seeing(block, first_key + key % 128);
                smem.seen_by[own] = tokens.begin < tokens.end ? sa_range{(tokens.begin - block.first_token) * p.group,
                                                                        (tokens.end - block.first_token) * p.group}
                                                              : sa_range{0, 0};
            }
            bar_sync<128>(kMathBarrier + math_warpgroup);
            smem.kv_full.wait(Ring<1>{blocks.n});
            bool held = false; // the tile before: its dV and dK are in flight
#pragma unroll 1
            for (bool more = warp_uniform(block.order.num_tiles) > 0; more; ring.n++) {
                // In flight at the top: dV, dK of the tile that is held.
                const uint32_t stage = warp_uniform(ring.stage());
                smem.row_ready.wait(ring);
                const int part = warp_uniform(smem.parts[stage][math_warpgroup]);
                more = !(part & kLast);
                if (!(part & kSome)) { // of the other warpgroup alone
                    wgmma_wait<0>();
                    pin(dv);
                    dk.pin_all();
                    if (held) release_last();
                    held = false;
                    smem.row_empty.release(ring);
                    if (part & kLastOwn) smem.kv_empty[0].arrive();
                    continue;
                }
                if constexpr (C::kHeadDim > 128)
                    add_tile_by_halves(dk, dv, stage, part, held);
                else
                    add_tile(dk, dv, stage, part, held);
                held = true;
            }
            wgmma_wait<0>();
            pin(dv);
            dk.pin_all();
            if (held) release_last();
            if (warp_uniform(block.order.num_tiles) == 0) smem.kv_empty[0].arrive();
            if (block.hides) add_hidden(dv, block);
            if (math_warpgroup != block.idle) write(dk, dv, block);
            smem.block_empty.release(blocks);
        }
    }
};

template <class C>
__global__ __launch_bounds__(kThreads, 1) void keys_kernel(
        const __grid_constant__ sinkattn_bwd_args args, const __grid_constant__ Maps maps, const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<KeysSmem<C> *>(shared);
    if (threadIdx.x == 0) {
        for (const CUtensorMap *map : {&maps.q, &maps.dout, &maps.k, &maps.v}) tensor_map_prefetch(map);
        for (int i = 0; i < 2; i++) {
            smem.block_full[i].init(32);
            smem.block_empty[i].init(kMathThreads + 32);
        }
        smem.kv_full[0].init(1);
        smem.kv_empty[0].init(kMathThreads);
        for (int i = 0; i < C::kStages; i++) {
            smem.row_full[i].init(1);
            smem.row_ready[i].init(32);
            smem.row_empty[i].init(kMathThreads);
        }
        barrier_init_fence();
    }
    const int warp = warp_uniform(threadIdx.x / 32);
    if (p.tile_rows() < kRows) // rows past the whole tokens are never loaded; P is 0 there
        for (int stage = warp; stage < C::kStages; stage += kThreads / 32) {
            zero_rows<C::kHalves>(smem.queries[stage], p.tile_rows(), kRows);
            zero_rows<C::kHalvesV>(smem.douts[stage], p.tile_rows(), kRows);
            for (int row = p.tile_rows() + static_cast<int>(threadIdx.x % 32); row < kRows; row += 32) {
                smem.lse[stage][row] = INFINITY;
                smem.bias[stage][row] = 0.0f;
            }
        }
    async_fence();
    __syncthreads();
    if (warp < kMathThreads / 32) {
        registers_up<kKeysMathRegisters>();
        KeysMath<C>{smem, args, p, warp / 4, {}, 0}.run();
        return;
    }
    registers_down<kKeysLoaderRegisters>();
    if (warp == kMathThreads / 32) load_blocks<C>(smem, args, maps, p);
    if (warp == kMathThreads / 32 + 1) check_rows<C>(smem, p);
#else
    __trap();
#endif
}

} // namespace sa::bwd_wide_window_sm90
