// SPDX-License-Identifier: Apache-2.0
//
// A chunk of a stream, or a stream, of decode_chain.cu: its pivots, its sums in the forward's order, and the way back where a pivot moves.
#pragma once

#include "cuda/decode/finish.cuh"
#include "cuda/tile/pivot.cuh"

namespace sa::decode {

struct ChainArguments : Extras {
    uint32_t streams, blocks, chunks, chunk_slots; // of a stream: blocks; chunks that its capacity holds, 1 where sums are not cut; slots
    sa_divisor by_streams;
    int32_t chunk_keys;
};

template <class Element_, int kHeadDim_> struct ChainConfig : TileSizes<kHeadDim_> {
    using Element = Element_;
    using TileSizes<kHeadDim_>::kHeadDim, TileSizes<kHeadDim_>::kHeadBytes, TileSizes<kHeadDim_>::kPartialRow;
    using Arguments = ChainArguments;
    static constexpr bool kExtras = true, kClusters = false;
    static constexpr int kWarps = 4, kThreads = 32 * kWarps, kHeads = 1, kEights = 1, kMostRows = 8;
    static constexpr int kTeams = kWarps, kTeamThreads = 32, kTeamWarps = 1; // a team: a warp that loads and scores 16 keys
    static constexpr int kPivotTiles = kHeadDim == 64 ? 8 : 5, kPivotKeys = kPivotTiles * kTileK; // of a key tile of the forward
    static_assert(kPivotKeys == (kHeadDim == 64 ? sa_fwd_cuda_sm90_d64_tile_k : sa_fwd_cuda_sm90_d128_tile_k), "the forward's tiles");
    static_assert(
            kPivotKeys == (kHeadDim == 64 ? sa_decode_cuda_sm90_chain_d64_tile_k : sa_decode_cuda_sm90_chain_d128_tile_k), "its chunks");
    static constexpr int kWalkKeys = kTileK;           // of a tile of stream.tiles
    static constexpr int kColumns = kHeadDim / kWarps; // of a warp
    static constexpr int kTeamBytes = kHeadBytes, kStageBytes = kTeams * kTeamBytes;
    static constexpr int kMostStages = kHeadDim == 64 ? 5 : 3, kBlocks = kHeadDim == 64 ? 4 : 2; // kBlocks: of an SM
    static constexpr bool kQueriesInRegisters = true;
    static constexpr int kQueryBytes = 0;
    static constexpr int kMine = (kPivotTiles + kWarps - 1) / kWarps; // tiles of 16 keys that a warp has of a key tile of the forward
    struct Rows {
        uint32_t q[kHeadDim / 16][2];
    };
    // Of a tile of 16 keys: P as the right side of P V; weights.
    struct Weights {
        uint2 rounded[32];
        float4 exact[32];
    };
    struct Smem : decode::Smem<kThreads> {
        float tops[2 * kWarps][kMostRows];
        bool large[kMostRows];
    };
    static constexpr int kWeightBytes = 2 * kWarps * static_cast<int>(sizeof(Weights));
    static_assert(2 * kTeams >= kPivotTiles, "two steps have a key tile of the forward");
    static_assert(kMostRows * kPartialRow * 4 <= kStageBytes, "a stage holds O in the end");
};

__device__ __forceinline__ Quad join_quads(const Quad &earlier, const Quad &later) {
    const Joint joint(earlier.pivot, later.pivot);
    Quad quad;
    for (int x = 0; x < 4; x++) quad.o[x] = joint.of(earlier.o[x], later.o[x]);
    quad.sum = joint.of(earlier.sum, later.sum);
    quad.pivot = joint.top;
    return quad;
}

// Writes a quad of the result, or of the chunk's partial. A block that has all chunks of its stream leaves those so far, in two slots by
// turns.
template <class C>
__device__ __forceinline__ void write_chunk(
        Quad quad, const typename C::Smem &smem, const typename C::Arguments &params, int row, int column) {
    const Part &part = smem.part;
    const bool has_all = params.blocks == 1;
    const auto slot = [&](uint32_t index) { return slot_of(part, params, has_all ? index % 2 : index) + row * C::kPartialRow; };
    if (has_all && part.index) quad = join_quads(load_quad<C>(slot(part.index - 1), column), quad);
    if (part.num_parts == 1 || (has_all && part.index + 1 == part.num_parts))
        write_out<C>(quad, smem, params, row, column);
    else
        store_quad<C>(slot(part.index), column, quad);
}

// By all of a block's threads, once it has written its chunks: the last of the stream's `blocks` joins all chunks, in order.
template <class C>
__device__ __forceinline__ void join_chunks(typename C::Smem &smem, const typename C::Arguments &params, uint32_t blocks) {
    constexpr int kAtOnce = 8;
    const Part &part = smem.part;
    __syncthreads();
    if (threadIdx.x == 0) smem.is_last = arrive(counter_of<C>(part, params), params.tag, blocks);
    __syncthreads();
    if (!smem.is_last) return;
    for_each_quad<C>(part.stream.num_rows, [&](int row, int column) {
        const float *from = slot_of(part, params, 0) + row * C::kPartialRow;
        Quad quad;
#pragma unroll 1
        for (uint32_t n = 0; n < part.num_parts; n += kAtOnce) {
            Quad chunks[kAtOnce];
#pragma unroll
            for (uint32_t i = 0; i < kAtOnce; i++)
                chunks[i] = load_quad<C>(from + min(n + i, part.num_parts - 1) * params.slot_floats, column);
#pragma unroll
            for (uint32_t i = 0; i < kAtOnce; i++) {
                if (n + i >= part.num_parts) break;
                quad = n + i ? join_quads(quad, chunks[i]) : chunks[i];
            }
        }
        write_out<C>(quad, smem, params, row, column);
    });
}

// Values that are not finite, of the 16 keys from first_key on, which not all rows see: adds them to a warp's columns of O, in the rows
// that see them, calls added() and leaves zeros. chunk_at(key, n): where 8 columns of a key lie, the warp's n-th.
template <class Element, int kBlocks, class ChunkAt, class Added>
__device__ __forceinline__ void hide_nonfinite(
        float (&o)[kBlocks][4], const Row *seen, int32_t first_key, const ChunkAt &chunk_at, const Added &added) {
    constexpr int kChunks = 2 * kBlocks;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    bool bad = false;
    for (int x = lane; x < kTileK * kChunks; x += 32) {
        const uint4 halves = *reinterpret_cast<const uint4 *>(chunk_at(x / kChunks, x % kChunks));
        for (const uint32_t pair : {halves.x, halves.y, halves.z, halves.w})
            bad |= is_nonfinite<Element>(pair) || is_nonfinite<Element>(pair >> 16);
    }
    if (!__any_sync(0xffffffffu, bad)) return;
#pragma unroll 1
    for (int key = 0; key < kTileK; key++)
#pragma unroll
        for (int j = 0; j < kBlocks; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const auto *chunk = reinterpret_cast<const uint16_t *>(chunk_at(key, 2 * j + i));
                const float value = nonfinite_part<Element>(static_cast<uint32_t>(chunk[fragment_row(0)]));
                for (int x = 0; x < 2; x++)
                    if (sees(seen[fragment_column() + x], first_key + key)) o[j][2 * i + x] += value;
            }
    added();
    __syncwarp();
    for (int x = lane; x < kTileK * kChunks * 8; x += 32) {
        auto &half = reinterpret_cast<uint16_t *>(chunk_at(x / 8 / kChunks, x / 8 % kChunks))[x % 8];
        if (is_nonfinite<Element>(static_cast<uint32_t>(half))) half = 0;
    }
    __syncwarp();
}

template <class C> struct Chain {
    typename C::Smem &smem;
    const typename C::Arguments &params;
    unsigned char *const shared;
    const uint32_t base; // address of `shared`
    typename C::Rows rows;
    float o[C::kColumns / 16][4] = {};
    float pivot[2], sum[2] = {}, tile_sum[2] = {}; // of rows fragment_column() and the next; sums of this lane's keys, in the last warp
    int pivot_tile = -1;                           // the key tile of the forward whose weights tile_sum has
    bool large = false;

    __device__ __forceinline__ Chain(typename C::Smem &smem, const typename C::Arguments &params, unsigned char *shared)
        : smem(smem), params(params), shared(shared), base(shared_address(shared)) {}

    __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    __device__ __forceinline__ static bool adds() { return warp() == C::kWarps - 1; }
    __device__ __forceinline__ static int first_column() { return warp() * C::kColumns; }
    __device__ __forceinline__ const Row *seen() const { return smem.rows[warp()]; }
    __device__ __forceinline__ int num_rows() const { return smem.part.stream.num_rows; }

    __device__ __forceinline__ typename C::Weights &weights(int parity, int tile) const {
        return reinterpret_cast<typename C::Weights *>(shared + params.stages * C::kStageBytes)[parity * C::kWarps + tile];
    }

    // The forward's key tile in which a row begins.
    __device__ __forceinline__ static int first_tile(const Row &row) {
        return row.sink_end || row.begin == row.end ? 0 : sa_tile_of(row.begin, C::kPivotKeys);
    }

    // s[2 i + x] = K Q^T: key fragment_row(i) of a tile, row fragment_column() + x. masked: -inf where the row does not see the key.
    __device__ __forceinline__ void scores(float (&s)[4], uint32_t tile, int32_t first_key, bool masked) const {
        for (float &x : s) x = 0.0f;
        const uint32_t k = tile + lane_rows<C>().q;
#pragma unroll
        for (int step = 0; step < C::kHeadDim / 16; step++) {
            uint32_t keys[4];
            ldmatrix_x4(keys, pairs_on(k, step));
            mma_m16n8k16<typename C::Element>(s, keys, rows.q[step][0], rows.q[step][1]);
        }
        if (__builtin_expect(masked, false))
#pragma unroll
            for (int x = 0; x < 4; x++)
                if (!sees(seen()[fragment_column() + x % 2], first_key + fragment_row(x / 2))) s[x] = -INFINITY;
    }

    // Leaves the largest scores of a tile's rows in tops[i].
    __device__ __forceinline__ void leave_tops(const float (&s)[4], int i) const {
#pragma unroll
        for (int x = 0; x < 2; x++) {
            const float top = column_max(fmaxf(s[x], s[2 + x]));
            if (lane() < 4) smem.tops[i][fragment_column() + x] = top;
        }
    }

    __device__ __forceinline__ float top_of(int row, int num) const {
        float top = -INFINITY;
        for (int i = 0; i < num; i++) top = fmaxf(top, smem.tops[i][row]);
        return top * params.scale_log2;
    }

    __device__ __forceinline__ void weigh(const float (&s)[4], typename C::Weights &to) const {
        float w[4];
#pragma unroll
        for (int x = 0; x < 4; x++) w[x] = exp2_approx(fmaf(s[x], params.scale_log2, -(pivot[x % 2] == -INFINITY ? 0.0f : pivot[x % 2])));
        to.rounded[lane()] = {
                transposed(pack_halves<typename C::Element>(w[0], w[1])), transposed(pack_halves<typename C::Element>(w[2], w[3]))};
        to.exact[lane()] = {w[0], w[1], w[2], w[3]};
    }

    // O += P V of a tile.
    __device__ __forceinline__ void multiply(uint32_t tile, const typename C::Weights &from) {
        const uint32_t v = pairs_on(tile + C::kTileBytes + lane_rows<C>().k, first_column() / 16);
        const uint2 p = from.rounded[lane()];
#pragma unroll
        for (int j = 0; j < C::kColumns / 16; j++) {
            uint32_t values[4];
            ldmatrix_x4_trans(values, pairs_on(v, j));
            mma_m16n8k16<typename C::Element>(o[j], values, p.x, p.y);
        }
    }

    // The forward's tile ends: even and odd keys of a class meet.
    __device__ __forceinline__ void end_tile(float (&total)[2]) const {
#pragma unroll
        for (int x = 0; x < 2; x++) total[x] = __fadd_rn(tile_sum[x], __shfl_xor_sync(0xffffffffu, tile_sum[x], 4));
    }

    __device__ __forceinline__ void add(const float4 &w) {
        tile_sum[0] = __fadd_rn(__fadd_rn(tile_sum[0], w.x), w.z);
        tile_sum[1] = __fadd_rn(__fadd_rn(tile_sum[1], w.y), w.w);
    }

    __device__ __forceinline__ bool is_large(float total, int x) const {
        return total > kLarge<typename C::Element> && fragment_column() + x < num_rows();
    }

    __device__ __forceinline__ void multiply_masked(int at, const typename C::Weights &from, int32_t first_key) {
        if (params.band.q_len > 1)
            hide_nonfinite<typename C::Element>(
                    o, seen(), first_key,
                    [&](int key, int n) { return shared + at + C::kTileBytes + swizzled(0, C::kRowBytes, key, first_column() / 8 + n); },
                    [] {});
        multiply(base + at, from);
    }

    // All rows begin in one key tile of the forward, and its keys are among the first two steps: the rows' pivots. False if some row has
    // none.
    __device__ __forceinline__ bool find_pivots(const Loader<C> &loader, int32_t count) {
        const int begin = first_tile(seen()[0]);
        const int own = min(lane(), num_rows() - 1);
        if (!__all_sync(0xffffffffu, first_tile(seen()[own]) == begin)) return false; // the same answer in all warps
        cp_async_wait_upto(params.stages - 2);
        __syncwarp(); // the warp's keys of two steps have landed
        for (int step = 0; step < 2; step++) {
            const int32_t n = warp() + step * C::kWarps, key = sa_key_tile_at(&loader.tiles, n) * kTileK;
            float s[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
            if (n < count && sa_tile_of(key, C::kPivotKeys) == begin)
                scores(s, base + step * C::kStageBytes + warp() * C::kTeamBytes, key, !loader.is_full(n));
            leave_tops(s, step * C::kWarps + warp());
        }
        __syncthreads();
        bool found = true;
        for (int x = 0; x < 2; x++) {
            const int row = fragment_column() + x;
            pivot[x] = row < num_rows() ? top_of(row, 2 * C::kWarps) : 0.0f;
            found &= pivot[x] > -INFINITY;
        }
        return __syncthreads_and(found);
    }

    // The scores of the warp's tile of the step that begins with tile `first`, once it has landed.
    __device__ __forceinline__ void begin_step(float (&s)[4], const Loader<C> &loader, int32_t first, int32_t count, int stage) const {
        __syncwarp();
        const int32_t n = first + warp();
        if (n < count)
            scores(s, base + stage * C::kStageBytes + warp() * C::kTeamBytes, sa_key_tile_at(&loader.tiles, n) * kTileK,
                    !loader.is_full(n));
    }

    __device__ __forceinline__ void close_tile() {
        float total[2];
        end_tile(total);
#pragma unroll
        for (int x = 0; x < 2; x++) {
            large |= is_large(total[x], x);
            sum[x] = __fadd_rn(sum[x], total[x]);
            tile_sum[x] = 0.0f;
        }
    }

    // Adds the weights of a step of neighbouring tiles, of which the first is the in_tile-th of its key tile of the forward.
    template <int kInTile = 0> __device__ __forceinline__ void add_neighbours(int parity, int in_tile) {
        if constexpr (kInTile + 1 < C::kPivotTiles)
            if (in_tile != kInTile) return add_neighbours<kInTile + 1>(parity, in_tile);
        float4 w[C::kWarps];
#pragma unroll
        for (int t = 0; t < C::kWarps; t++) {
            if (t % 4 == 0)
#pragma unroll
                for (int i = 0; i < 4; i++) w[t + i] = weights(parity, t + i).exact[lane()];
            if (t && (kInTile + t) % C::kPivotTiles == 0) close_tile();
            add(w[t]);
        }
    }

    // Adds a step's weights. simple: all of its tiles exist, side by side.
    __device__ __forceinline__ void add_step(const Loader<C> &loader, int32_t first, int32_t count, int parity, bool simple) {
        const auto enter = [&](int32_t tile) {
            if (tile / C::kPivotTiles != pivot_tile) close_tile();
            pivot_tile = tile / C::kPivotTiles;
        };
        if (__builtin_expect(simple, true)) {
            const int32_t tile = sa_key_tile_at(&loader.tiles, first);
            enter(tile);
            add_neighbours(parity, tile % C::kPivotTiles);
            pivot_tile = (tile + C::kWarps - 1) / C::kPivotTiles;
            return;
        }
#pragma unroll 1
        for (int t = 0; t < min(C::kWarps, count - first); t++) {
            enter(sa_key_tile_at(&loader.tiles, first + t));
            add(weights(parity, t).exact[lane()]);
        }
    }

    // One run over all keys with these pivots. False if one has to move.
    __device__ __forceinline__ bool run(Loader<C> &loader, int32_t count, Speculation &speculation) {
        const int stages = params.stages;
        int stage = 0, parity = 0;
        float s[4];
        cp_async_wait_upto(stages - 1);
        begin_step(s, loader, 0, count, 0);
#pragma unroll 1
        for (int32_t first = 0; first < count; first += C::kWarps) {
            const int32_t n = first + warp();
            const int at = stage * C::kStageBytes, next_stage = stage + 1 == stages ? 0 : stage + 1;
            if (n < count) weigh(s, weights(parity, warp()));
            if (__syncthreads_or(large)) return false; // weights and values of the step are there; the previous stage is free
            if (first) {
                const int32_t next = n + (stages - 1) * C::kWarps;
                if (next < count)
                    loader.template load<false>(
                            base + (stage ? stage - 1 : stages - 1) * C::kStageBytes + warp() * C::kTeamBytes, next, speculation);
                cp_async_commit();
            }
            cp_async_wait_upto(stages - 2); // in flight: copies of the steps after the next
            begin_step(s, loader, first + C::kWarps, count, next_stage);
            const bool whole = first + C::kWarps <= count;
            const bool seen_by_all = params.band.q_len == 1 || (loader.is_full(first) && loader.is_full(first + C::kWarps - 1));
            if (__builtin_expect(whole && seen_by_all, true)) {
#pragma unroll
                for (int t = 0; t < C::kWarps; t++) multiply(base + at + t * C::kTeamBytes, weights(parity, t));
            } else {
#pragma unroll 1
                for (int t = 0; t < min(C::kWarps, count - first); t++)
                    multiply_masked(at + t * C::kTeamBytes, weights(parity, t), sa_key_tile_at(&loader.tiles, first + t) * kTileK);
            }
            if (adds()) {
                const bool side_by_side =
                        sa_key_tile_at(&loader.tiles, first + C::kWarps - 1) == sa_key_tile_at(&loader.tiles, first) + C::kWarps - 1;
                add_step(loader, first, count, parity, whole && side_by_side);
            }
            parity ^= 1;
            stage = next_stage;
        }
        if (adds()) close_tile();
        return !__syncthreads_or(large);
    }

    // Copies a key's rows of K and V to shared memory: all of the block's threads, 16 keys from first_key on.
    __device__ __forceinline__ void copy_tile(uint32_t to, const Loader<C> &loader, int32_t first_key) const {
        const Part &part = smem.part;
        for (int x = static_cast<int>(threadIdx.x); x < kTileK * C::kChunks; x += C::kThreads) {
            const int row = x / C::kChunks, chunk = x % C::kChunks;
            const int32_t key = first_key + row, index = loader.params.page_index(key);
            const bool seen = is_seen(loader.tiles, key);
            const int32_t page = !params.block_table ? part.batch : seen ? load_relaxed(loader.pages + index) : -1;
            const bool valid = seen && loader.params.has_page(page) && chunk * 8 < params.head_dim;
            if (seen && !loader.params.has_page(page)) atomicOr(params.error_word, kBadBlockTable);
            const int64_t slot = key - index * params.page_size, column = chunk * 8;
            int64_t k_from = page * params.k_page + slot * params.k_row + wide(part.kv_head) * params.k_head + column,
                    v_from = page * params.v_page + slot * params.v_row + wide(part.kv_head) * params.v_head + column;
            if (page >= params.first_host_page) k_from += params.k_gap, v_from += params.v_gap;
            const uint32_t at = swizzled(to, C::kRowBytes, row, chunk);
            cp_async_16_once(at, params.k + k_from, valid);
            cp_async_16_once(at + C::kTileBytes, params.v + v_from, valid);
        }
    }

    // Moves the pivot of row x, O and the sum to a new maximum.
    __device__ __forceinline__ void follow(int x, float now, bool follows) {
        const float before = pivot[x];
        if (!follows || !(now > before + kLazy)) return;
        const float alpha = exp2_approx(before - now);
        pivot[x] = now;
        sum[x] = __fmul_rn(sum[x], alpha);
#pragma unroll
        for (int j = 0; j < C::kColumns / 16; j++)
            for (int i = 0; i < 2; i++) o[j][2 * i + x] = __fmul_rn(o[j][2 * i + x], alpha);
    }

    // As the forward does it: one key tile of the forward after another.
    __device__ __forceinline__ void run_carefully(const Loader<C> &loader, int32_t count) {
        for (int x = 0; x < 2; x++) {
            pivot[x] = -INFINITY;
            sum[x] = tile_sum[x] = 0.0f;
            for (int j = 0; j < C::kColumns / 16; j++) o[j][x] = o[j][2 + x] = 0.0f;
        }
        cp_async_wait<0>();
#pragma unroll 1
        for (int32_t first = 0; first < count;) {
            const int tile = sa_key_tile_at(&loader.tiles, first) / C::kPivotTiles;
            int here = 1; // tiles of 16 keys in it
            while (here < C::kPivotTiles && first + here < count && sa_key_tile_at(&loader.tiles, first + here) / C::kPivotTiles == tile)
                here++;
            __syncthreads(); // no thread reads the stages any more
            for (int t = 0; t < here; t++) copy_tile(base + t * C::kTeamBytes, loader, sa_key_tile_at(&loader.tiles, first + t) * kTileK);
            if (threadIdx.x < C::kMostRows) smem.large[threadIdx.x] = false;
            cp_async_commit();
            cp_async_wait<0>();
            __syncthreads();
            float s[C::kMine][4];
#pragma unroll
            for (int i = 0; i < C::kMine; i++) {
                const int t = warp() + i * C::kWarps;
                if (t >= here) continue;
                scores(s[i], base + t * C::kTeamBytes, sa_key_tile_at(&loader.tiles, first + t) * kTileK, true);
                leave_tops(s[i], t);
            }
            __syncthreads();
            float now[2];
            for (int x = 0; x < 2; x++) {
                const int row = fragment_column() + x;
                now[x] = top_of(row, here);
                follow(x, now[x], first_tile(seen()[row]) >= tile || pivot[x] == -INFINITY);
            }
            float total[2] = {};
#pragma unroll 1
            for (int pass = 0; pass < 2; pass++) {
#pragma unroll
                for (int i = 0; i < C::kMine; i++)
                    if (warp() + i * C::kWarps < here)
                        weigh(s[i], weights((warp() + i * C::kWarps) / C::kWarps, (warp() + i * C::kWarps) % C::kWarps));
                __syncthreads();
                if (adds()) {
                    tile_sum[0] = tile_sum[1] = 0.0f;
                    for (int t = 0; t < here; t++) add(weights(t / C::kWarps, t % C::kWarps).exact[lane()]);
                    end_tile(total);
                    for (int x = 0; x < 2; x++)
                        if (is_large(total[x], x)) smem.large[fragment_column() + x] = true;
                }
                __syncthreads();
                if (pass) break;
                bool any = false;
                for (int x = 0; x < 2; x++) {
                    const bool outgrown = smem.large[fragment_column() + x];
                    follow(x, now[x], outgrown);
                    any |= outgrown;
                }
                if (!__syncthreads_or(any)) break;
            }
            for (int t = 0; t < here; t++)
                multiply_masked(
                        t * C::kTeamBytes, weights(t / C::kWarps, t % C::kWarps), sa_key_tile_at(&loader.tiles, first + t) * kTileK);
            for (int x = 0; x < 2; x++) sum[x] = __fadd_rn(sum[x], total[x]);
            first += here;
        }
    }

    // Writes the rows, through shared memory.
    __device__ __forceinline__ void write() {
        auto *to = reinterpret_cast<float *>(shared);
        cp_async_wait<0>();
        __syncthreads(); // no thread reads the stages any more
#pragma unroll
        for (int x = 0; x < 2; x++) {
            const int row = fragment_column() + x;
            float total = sum[x];
            total += __shfl_xor_sync(0xffffffffu, total, 8);
            total += __shfl_xor_sync(0xffffffffu, total, 16);
#pragma unroll
            for (int j = 0; j < C::kColumns / 16; j++)
                for (int i = 0; i < 2; i++) to[row * C::kPartialRow + first_column() + 16 * j + fragment_row(i)] = o[j][2 * i + x];
            if (adds() && lane() < 4) *reinterpret_cast<float2 *>(to + row * C::kPartialRow + C::kHeadDim) = {pivot[x], total};
        }
        __syncthreads();
        for_each_quad<C>(num_rows(), [&](int row, int column) {
            const float *from = to + row * C::kPartialRow;
            Quad quad;
            for (int i = 0; i < 4; i++) quad.o[i] = from[column + i];
            quad.pivot = from[C::kHeadDim];
            quad.sum = from[C::kHeadDim + 1];
            write_chunk<C>(quad, smem, params, row, column);
        });
    }
};

} // namespace sa::decode
