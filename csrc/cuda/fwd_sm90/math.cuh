// SPDX-License-Identifier: Apache-2.0
//
// The math warpgroups of the general forward on sm_90.
#pragma once

#include "cuda/fwd_sm90/smem.cuh"
#include "cuda/fwd_sm90/softmax.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/work/keys.cuh"

namespace sa::fwd_sm90 {

// A math warpgroup: S, P and O of its 64 rows.
template <class C> struct Math {
    using Element = typename C::Element;
    using Scores = float[C::kTileK / 2];
    using Weights = uint32_t[C::kTileK / 16][4]; // P as packed pairs
    using Out = float[C::kHeadDimV / 2];

    Smem<C> &smem;
    const sinkattn_fwd_args &args;
    const typename C::Keys &keys;
    const Maps &maps;
    const Problem &p;
    const int math_warpgroup;
    const bool leader; // of the warpgroup
    Ring<C::kStages> ring;

    // Between the wait for keys and values and their products, where threads copied them.
    __device__ __forceinline__ void fence_copies() {
        if constexpr (C::Keys::kByThreads) async_fence();
    }

    // Once the warp has read V, and whether all of it is finite. A cache's V is refilled whether or not K is, so each warp must have waited
    // for it.
    __device__ __forceinline__ void release_values(Ring<C::kStages> use) {
        if constexpr (C::Keys::kCached) __syncwarp();
        if (C::Keys::kCached ? threadIdx.x % 32 == 0 : leader) smem.v_empty.release(use);
    }

    // Issues S = Q K^T of the stage's keys; the caller waits. q: the address of the warpgroup's first query.
    __device__ __forceinline__ void begin_scores(Scores &s, uint32_t q, uint32_t stage) {
        wgmma_abt<Element, C::kHeadDim, C::kQueryHalf, C::kKeyHalf>(s, q, shared_address(smem.keys[stage]));
    }

    // Issues O += P V of the ring's stage; end_values waits.
    __device__ __forceinline__ void begin_values(Out &o, const Weights &weights) {
        wgmma_pb<Element, C::kKeyHalf>(o, weights, shared_address(smem.values[ring.stage()]));
    }

    __device__ __forceinline__ bool has_nonfinite(uint32_t stage) const {
        if constexpr (C::kCheckers == 1) return smem.nonfinite[stage][0];
        return *reinterpret_cast<const uint16_t *>(smem.nonfinite[stage]) != 0;
    }

    // Adds to O the values of tile t that the checkers zeroed, in the rows that see them.
    __device__ __forceinline__ void add_back(Out &o, const WarpgroupRows<C> &own, int t) {
        const auto *data = static_cast<const uint16_t *>(args.v.data);
        const int token[2] = {own.row(0).token, own.row(1).token};
        const Rows<C> &rows = own.rows;
        const TokenKeys seen[2] = {rows.keys(token[0]), rows.keys(token[1])};
#pragma unroll 1
        for (int j = t * C::kTileK; j < (t + 1) * C::kTileK && j < rows.work.sequence.k_len; j++) {
            const int64_t offset = offset_of(keys, rows.work.sequence, args.v, j, rows.work.kv_head);
            if (C::Keys::kCached && offset < 0) continue;
            if constexpr (C::kStoresBounds) { // read again, for want of registers to keep them in
                add_nonfinite<Element>(o, data + offset, args.problem.head_dim,
                        [&](int i) { return (j >= rows.begin[token[i]] && j < rows.end[token[i]]) || j < rows.sink_end[token[i]]; });
            } else {
                add_nonfinite<Element>(o, data + offset, args.problem.head_dim_v,
                        [&](int i) { return (j >= seen[i].begin && j < seen[i].end) || j < seen[i].sink_end; });
            }
        }
    }

    // Waits for the product of tile t's values, then goes to the next stage.
    __device__ __forceinline__ void end_values(Out &o, const WarpgroupRows<C> &own, int t, bool nonfinite) {
        wgmma_wait<0>();
        pin(o);
        release_values(ring);
        if (nonfinite) add_back(o, own, t);
        ring.n++;
    }

    // Where a block has one tile of Q: the warp reads no more of it.
    __device__ __forceinline__ void release_queries(Ring<C::kQueries> queries) {
        if (!C::kStagesOut && threadIdx.x % 32 == 0) smem.q_empty.release(queries);
    }

    // O over the key tiles from `tile` to `end` that the rows see, at least one. Calls scored() once the first scores are complete, and
    // summed() under the last product.
    template <class Scored, class Summed>
    __device__ __forceinline__ void attend(Out &o, Softmax &softmax, const WarpgroupRows<C> &own, uint32_t q, KeyTileWalk tile, int end,
            const Scored &scored, const Summed &summed) {
        Scores s;
        float total[2];
        Weights weights;
        smem.k_full.wait(ring);
        fence_copies();
        begin_scores(s, q, ring.stage());
        const bool masked = !tile.is_full();
        wgmma_wait<0>();
        pin(s);
        if (threadIdx.x % 32 == 0) smem.k_empty.release(ring);
        scored();
        if (masked) mask_tile<C>(s, own, tile.t);
        follow_maxima<C>(s, o, softmax, own, tile.t);
        exponentials<C>(s, total, softmax, p.scale_log2);
        for (int r = 0; r < 2; r++) softmax.sum[r] += total[r];
        bool starting = begins_after<C>(softmax, own, tile.t);
        smem.v_ready.wait(ring);
        bool nonfinite = has_nonfinite(ring.stage()); // read before end_values releases the stage
        pack<Element>(weights, s);
        KeyTileWalk next = tile.next();
        if (next.t < end) smem.k_full.wait(ring.next());
        while (next.t < end) {
            // No wgmma in flight; P(t) in registers; V(t) and K(next) landed, copies ahead of them as in load_tiles.
            const auto keys = ring.next();
            fence_copies();
            begin_scores(s, q, keys.stage());
            begin_values(o, weights);
            const bool next_masked = !next.is_full();
            const KeyTileWalk after_next = next.next();
            wgmma_wait<1>(); // S(next) complete; O += P(t) V(t) still running under its softmax
            pin(s);
            if (next_masked) mask_tile<C>(s, own, next.t);
            if (starting) {
                wgmma_wait<0>();
                pin(o);
                follow_maxima<C>(s, o, softmax, own, next.t);
                starting = begins_after<C>(softmax, own, next.t);
            }
            exponentials<C>(s, total, softmax, p.scale_log2);
            const bool large = __any_sync(0xffffffffu, total[0] > kLarge<Element> || total[1] > kLarge<Element>);
            smem.v_ready.wait(keys);
            const bool next_nonfinite = has_nonfinite(keys.stage());
            if (after_next.t < end) smem.k_full.wait(keys.next());
            end_values(o, own, tile.t, nonfinite);
            if (large) outgrow<C>(s, total, o, softmax, own, next.t, q, shared_address(smem.keys[keys.stage()]));
            if (threadIdx.x % 32 == 0) smem.k_empty.release(keys);
            for (int r = 0; r < 2; r++) softmax.sum[r] += total[r];
            tile = next;
            nonfinite = next_nonfinite;
            next = after_next;
            pack<Element>(weights, s);
        }
        fence_copies();
        begin_values(o, weights);
        for (float &x : softmax.sum) x = quad_sum(x);
        summed();
        end_values(o, own, tile.t, nonfinite);
    }

    // Where the thread keeps its sums over a row's earlier chunks, between chunks: pivots and sums, then O, four floats at a time.
    __device__ __forceinline__ float4 *kept() const {
        return p.kept + static_cast<int64_t>(blockIdx.x * C::kMathWarpgroups + math_warpgroup) * (128 * (1 + C::kHeadDimV / 8)) +
               threadIdx.x % 128;
    }

    // Joins earlier chunks' pivots and sums with these, and finds what both O are scaled by.
    __device__ __forceinline__ void join_sums(Joint (&joints)[2], Softmax &softmax) const {
        const float4 before = *kept();
        for (int i = 0; i < 2; i++) {
            joints[i] = Joint(i ? before.y : before.x, softmax.pivot[i]);
            softmax.sum[i] = joints[i].of(i ? before.w : before.z, softmax.sum[i]);
            softmax.pivot[i] = joints[i].top;
        }
    }

    __device__ __forceinline__ void join_out(Out &o, const Joint (&joints)[2]) const {
#pragma unroll
        for (int n = 0; n < C::kHeadDimV / 8; n++) {
            const float4 x = kept()[128 * (1 + n)];
            const float before[4] = {x.x, x.y, x.z, x.w};
            for (int i = 0; i < 4; i++) o[4 * n + i] = joints[i / 2].of(before[i], o[4 * n + i]);
        }
    }

    // Keeps the sums, and begins anew.
    __device__ __forceinline__ void keep(Out &o, Softmax &softmax) const {
        *kept() = {softmax.pivot[0], softmax.pivot[1], softmax.sum[0], softmax.sum[1]};
#pragma unroll
        for (int n = 0; n < C::kHeadDimV / 8; n++) {
            kept()[128 * (1 + n)] = {o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]};
            for (int i = 0; i < 4; i++) o[4 * n + i] = 0.0f;
        }
        softmax = {};
    }

    // Releases a key tile that none of this warpgroup's rows see. Each warp waits for V before it releases K: the loader refills K, then V,
    // once every warp has released K, and a warp still waiting for V would miss that phase.
    __device__ __forceinline__ void skip_tile(Ring<C::kStages> skipped) {
        smem.k_full.wait(skipped);
        smem.v_ready.wait(skipped);
        __syncwarp();
        if (threadIdx.x % 32 == 0) smem.k_empty.release(skipped);
        release_values(skipped);
    }

    // Writes O, rounded, over the warpgroup's queries and in their layout.
    __device__ __forceinline__ void stage_out(uint32_t stage, const Out &o, const float (&factor)[2]) {
        const int lane = threadIdx.x % 32;
        const uint32_t to = stage + store_row(threadIdx.x) * kRowBytes;
#pragma unroll
        for (int n = 0; n < C::kHeadDimV / 8; n += 2) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = pack_halves<Element>(o[4 * n + 2 * i] * factor[i % 2], o[4 * n + 2 * i + 1] * factor[i % 2]);
            stmatrix_x4(to + n / 8 * C::kQueryHalf + chunk_offset(lane, n % 8 + store_chunk(lane)), x);
        }
    }

    // Copies from the stage to global memory. True: one bulk copy does it and still reads the stage. False: the threads did it, because the
    // warpgroup's rows are not whole tokens or not all tokens exist. After the barrier here the warpgroup reads no query.
    __device__ __forceinline__ bool write_out(const unsigned char *stage, const Rows<C> &rows) {
        const Work &work = rows.work;
        const int num_tokens = rows.num_tokens(), first = math_warpgroup * p.copied_tokens;
        const int64_t token = work.sequence.q_begin + work.tokens.begin, head = work.kv_head * p.group;
        async_fence();
        bar_sync<128>(kMathBarrier + math_warpgroup);
        if (p.copied_tokens && first + p.copied_tokens <= num_tokens) {
            if (!leader) return true;
            for (int half = 0; half < C::kHalvesV; half++)
                tensor_store(&maps.out, stage + half * C::kQueryHalf, 64 * half, static_cast<int>(head), static_cast<int>(token + first),
                        static_cast<int>(work.sequence.batch));
            store_commit();
            return true;
        }
        auto *out = static_cast<uint16_t *>(args.out.data) + sa_offset(&args.out, work.sequence.batch, token, head);
#pragma unroll 1
        for (int x = threadIdx.x % 128; x < 64 * 8 * C::kHalvesV; x += 128) {
            const int row = x / (8 * C::kHalvesV), column = x % (8 * C::kHalvesV) * 8;
            const int at = 64 * math_warpgroup + row, i = at * p.group_inverse >> 16;
            if (i >= num_tokens || column >= args.problem.head_dim) continue;
            *reinterpret_cast<uint4 *>(out + i * args.out.row_stride + (at - i * p.group) * args.out.head_stride + column) =
                    *reinterpret_cast<const uint4 *>(
                            stage + column / 64 * C::kQueryHalf + row * kRowBytes + chunk_offset(row, column / 8 % 8));
        }
        async_fence();
        bar_sync<128>(kMathBarrier + math_warpgroup);
        return false;
    }

    // Writes O, rounded, from registers.
    __device__ __forceinline__ void write_from_registers(const Out &o, const float (&factor)[2], const WarpgroupRows<C> &own) {
        const Work &work = own.rows.work;
        const int64_t first = work.sequence.q_begin + work.tokens.begin, first_head = work.kv_head * p.group;
        for (int i = 0; i < 2; i++) {
            const TokenHead row = own.row(i);
            const int64_t at = sa_offset(&args.out, work.sequence.batch, first + row.token, first_head + row.head);
            auto *to = row.token < own.rows.num_tokens() ? static_cast<uint16_t *>(args.out.data) + at : nullptr;
            write_row<Element>(to, o, i, factor[i], args.problem.head_dim_v);
        }
    }

    __device__ __forceinline__ void run() {
        bool copying = false; // a bulk copy of the previous tile's out may still read its stage
        for (Ring<C::kRowStages> tiles;; tiles.n++) {
            const Ring<C::kQueries> queries{tiles.n};
            const auto end_copy = [&] {
                if (!C::kStagesOut || !copying || !leader) return;
                store_wait_read<0>();
                smem.q_empty.release(queries.next()); // the next of two stages is also the previous one
            };
            Rows<C> &rows = smem.rows[tiles.stage()];
            rows.full.wait(tiles);
            if (!rows.exists) break;
            smem.q_full.wait(queries);
            const uint32_t q = shared_address(smem.queries[queries.stage()]) + 64 * math_warpgroup * kRowBytes;
            const WarpgroupRows<C> own{p, rows, math_warpgroup};
            Out o = {};
            float factor[2];
            Softmax softmax;
            KeyTileWalk tile(own.tiles());
            if (tile.exists()) {
                static_assert((C::kTileQ - 65) / C::kTileK + 1 < C::kStages, "skipped tiles stay until the first scores are complete");
                ring.n += tile.t - KeyTileWalk(rows.work.tiles).t;
                for (int end = 0;;) { // of a chunk, or of all tiles
                    end = C::kChunks ? min(end + p.chunk_tiles, own.tiles().end) : own.tiles().end;
                    const bool joins = C::kChunks && end > p.chunk_tiles;
                    const auto is_last = [&] { return !C::kChunks || end == own.tiles().end; };
                    Joint joints[2];
                    attend(
                            o, softmax, own, q, tile, end,
                            [&] {
                                if (joins) return;
                                end_copy();
                                Ring<C::kStages> skipped{ring.n - (tile.t - KeyTileWalk(rows.work.tiles).t)};
#pragma unroll 1
                                for (; skipped.n != ring.n; skipped.n++) skip_tile(skipped);
                            },
                            [&] {
                                if (joins) join_sums(joints, softmax);
                                if (!is_last()) return;
                                release_queries(queries);
                                finish_softmax<C>(factor, softmax, args, own);
                            });
                    if (joins) join_out(o, joints);
                    if (is_last()) break;
                    keep(o, softmax);
                    tile = KeyTileWalk(own.tiles(), end);
                }
            } else {
                release_queries(queries);
                finish_softmax<C>(factor, softmax, args, own);
                end_copy();
            }
            if constexpr (C::kStagesOut) {
                stage_out(q, o, factor);
                copying = write_out(smem.queries[queries.stage()] + 64 * math_warpgroup * kRowBytes, rows);
            } else {
                write_from_registers(o, factor, own);
            }
#pragma unroll 1
            for (KeyTileWalk unseen(rows.work.tiles, own.tiles().end); unseen.exists(); unseen.advance(), ring.n++) skip_tile(ring);
            rows.empty.arrive();
            if (C::kStagesOut && leader && !copying) smem.q_empty.release(queries);
        }
        if (C::kStagesOut && leader) store_wait();
    }
};

} // namespace sa::fwd_sm90
