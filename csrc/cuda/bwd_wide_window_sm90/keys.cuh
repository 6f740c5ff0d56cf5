// SPDX-License-Identifier: Apache-2.0
//
// The second launch of the wide windowed backward: dK and dV.
//
//     loader warp         K, V of a block | Q, dO, stats | Q, dO, stats | ..
//     checker warp        rows that are not finite, or that do not exist, become 0 where the first launch suspects any
//     2 math warpgroups   S = K Q^T, dP = V dO^T | P, dS | dV += P dO, dK += dS Q          64 keys each
//
// A block is 128 keys of a kv head, and the row tiles that see some of them, counted from the first such row on, with all heads of the
// GQA group: dK and dV are summed in registers and rounded once. P and dS are operands from registers; nothing passes between warpgroups.
// A tile's rows are columns here.
//
// The first tiles see keys of the first warpgroup alone, the last ones keys of the second: they come in pairs, one of each in turn, so that
// neither warpgroup waits for the other's.
#pragma once

#include "cuda/bwd_wide_window_sm90/smem.cuh"
#include "cuda/tile/finite.cuh"

namespace sa::bwd_wide_window_sm90 {

enum KeysBarrier : int { kMathBarrier = 1 }; // of the first math warpgroup; 0 is __syncthreads

template <class W, int kStages_> struct KeysConfig : W {
    using typename W::Element;
    using W::kHalves, W::kHalvesV, W::kRowHalf;
    static constexpr int kStages = kStages_, kKeyHalf = kBlockKeys * kRowBytes;
};

// In which order a block's tiles are loaded: pairs of one that only the first warpgroup needs and one that only the second needs, and those
// between. Every other block begins with those between: neighbours, which run side by side, then read the tiles that they share at nearly
// the same time, the second of them from the L2 cache.
struct TileOrder {
    int num_tiles, num_pairs, first;

    __device__ __forceinline__ int tile(int n) const {
        n += first;
        if (n >= num_tiles) n -= num_tiles;
        if (n >= 2 * num_pairs) return n - num_pairs;
        return n % 2 ? num_tiles - num_pairs + n / 2 : n / 2;
    }
};

struct Block {
    sa_sequence sequence;
    sa_band band;
    int key, kv_head, first_token; // first_token: the first row that sees a key of the block
    TileOrder order;               // tile() is for the loader, which tells it by `uses`
    bool exists, hides;            // hides: the checker zeroed some of dO
};

template <class C> struct KeysSmem {
    alignas(1024) unsigned char keys[C::kHalves * C::kKeyHalf], values[C::kHalvesV * C::kKeyHalf];
    alignas(1024) unsigned char queries[C::kStages][C::kHalves * C::kRowHalf], douts[C::kStages][C::kHalvesV * C::kRowHalf];
    RowStats stats[C::kStages][kRows];
    int uses[C::kStages];         // the tile in each stage; ~tile is a block's last
    sa_range seen_by[kBlockKeys]; // rows that see each key, counted from the block's first one
    Block blocks[2];
    Barriers<2> block_full, block_empty;
    Barriers<1> kv_full, kv_empty;
    Barriers<C::kStages> row_full, row_ready, row_empty; // ready: the tile is checked
};

// Sequence b of key blocks: number `batch` of a packed batch is the keys past cu_seqlens_k[batch], which no row sees.
__device__ __forceinline__ sa_sequence keys_or_tail(const sinkattn_fwd_args &args, int64_t b) {
    if (b < args.problem.batch) return sa_sequence_at(&args, b);
    const int64_t begin = sa_packed_begin(args.cu_seqlens_k, args.problem.batch, args.problem.k_len);
    return {0, 0, 0, begin, args.problem.k_len - begin};
}

// The rows that see some key of [key, key + size).
__device__ __forceinline__ sa_range rows_of(const sa_band &band, int key, int size) {
    const int end = min(key + size, band.k_len);
    return key < end && band.q_len ? sa_keys_rows(&band, {key, end}) : sa_range{0, 0};
}

// Writes block n of the launch, if it exists. By a whole warp.
__device__ __forceinline__ bool describe_block(Block &to, unsigned n, const sinkattn_fwd_args &args, const Problem &p) {
    const Place place = find_place(n / p.num_kv_heads, kBlockKeys, p.batch_blocks, args.problem.batch,
            [&](int64_t b) { return sa_packed_begin(args.cu_seqlens_k, b, args.problem.k_len); });
    const sa_sequence sequence = keys_or_tail(args, place.b);
    // Offsets that decrease may leave a place in front of its sequence.
    if (place.within < 0 || static_cast<int64_t>(place.within) * kBlockKeys >= sequence.k_len) return false;
    if (threadIdx.x % 32 == 0) {
        to.exists = true;
        to.hides = false;
        to.sequence = sequence;
        to.band = band_of(args, sequence);
        to.kv_head = static_cast<int>(n % p.num_kv_heads);
        to.key = place.within * kBlockKeys;
        const sa_range rows = rows_of(to.band, to.key, kBlockKeys);
        to.first_token = rows.begin;
        const int num_tiles = sa_tile_from(rows.end - rows.begin, p.tokens);
        int num_pairs = 0;
        const sa_range of_first = rows_of(to.band, to.key, 64), of_second = rows_of(to.band, to.key + 64, 64);
        if (of_first.begin < of_first.end && of_second.begin < of_second.end)
            num_pairs = min(
                    min(sa_tile_of(of_second.begin - rows.begin, p.tokens), num_tiles - sa_tile_from(of_first.end - rows.begin, p.tokens)),
                    num_tiles / 2);
        to.order = {num_tiles, num_pairs, place.within % 2 * 2 * num_pairs};
    }
    __syncwarp();
    return true;
}

// A lane of the first few has a piece of 64 columns: of K and of Q, or of V and of dO; the next one has the statistics.
template <class C>
__device__ __forceinline__ void load_blocks(KeysSmem<C> &smem, const sinkattn_bwd_args &args, const Maps &maps, const Problem &p) {
    constexpr int kPieces = C::kHalves + C::kHalvesV;
    const int lane = threadIdx.x % 32, half = lane < C::kHalves ? lane : lane - C::kHalves;
    unsigned char *const keys = (lane < C::kHalves ? smem.keys : smem.values) + half * C::kKeyHalf;
    Ring<2> blocks;
    Ring<C::kStages> ring;
    for (unsigned n = blockIdx.x; n < p.num_blocks * p.num_kv_heads; n += gridDim.x) {
        smem.block_empty.acquire(blocks);
        if (!describe_block(smem.blocks[blocks.stage()], n, args.fwd, p)) continue;
        const Block &block = smem.blocks[blocks.stage()];
        smem.block_full.arrive(blocks);
        const int batch = static_cast<int>(block.sequence.batch), kv_head = block.kv_head;
        smem.kv_empty.acquire(Ring<1>{blocks.n});
        if (lane == 0) smem.kv_full[0].arrive_expect(kPieces * C::kKeyHalf);
        __syncwarp();
        if (lane < kPieces)
            tensor_load(keys, lane < C::kHalves ? &maps.k : &maps.v, smem.kv_full[0], 64 * half, kv_head,
                    static_cast<int>(block.sequence.k_begin) + block.key, batch);
#pragma unroll 1
        for (int use = 0; use < block.order.num_tiles; use++, ring.n++) {
            // In flight: K and V of the block; at most kStages tiles.
            const uint32_t stage = ring.stage();
            const int tile = block.order.tile(use), token = block.first_token + tile * p.tokens;
            smem.row_empty.acquire(ring);
            if (lane == 0) smem.uses[stage] = use + 1 < block.order.num_tiles ? tile : ~tile;
            if (lane == 0) smem.row_full[stage].arrive_expect(p.tile_rows() * static_cast<int>(kPieces * kRowBytes + sizeof(RowStats)));
            __syncwarp();
            if (lane < kPieces)
                tensor_load((lane < C::kHalves ? smem.queries[stage] : smem.douts[stage]) + half * C::kRowHalf,
                        lane < C::kHalves ? &maps.q : &maps.dout, smem.row_full[stage], 64 * half, kv_head * p.group,
                        static_cast<int>(block.sequence.q_begin) + token, batch);
            if (lane == kPieces)
                bulk_load(smem.stats[stage], p.stats_of(args.fwd.problem, block.sequence, kv_head, token),
                        p.tile_rows() * static_cast<int>(sizeof(RowStats)), smem.row_full[stage]);
        }
        blocks.n++;
    }
    smem.block_empty.acquire(blocks);
    if (lane == 0) smem.blocks[blocks.stage()].exists = false;
    smem.block_full.arrive(blocks);
}

// By the checker warp: zeroes rows behind the sequence, whose statistics may be anything, and values of Q and dO that are not finite, since
// P = 0 times NaN is NaN. NaN returns to P through lse, to dS through g - delta, to dV by add_hidden.
template <class C> __device__ __forceinline__ void check_rows(KeysSmem<C> &smem, const Problem &p) {
    using Element = typename C::Element;
    const int lane = threadIdx.x % 32;
    Ring<C::kStages> ring;
    for (Ring<2> blocks;; blocks.n++) {
        smem.block_full.wait(blocks);
        Block &block = smem.blocks[blocks.stage()];
        if (!block.exists) return;
        for (bool more = block.order.num_tiles > 0; more; ring.n++) {
            const uint32_t stage = ring.stage();
            smem.row_full.wait(ring);
            const int use = smem.uses[stage], t = use < 0 ? ~use : use;
            more = use >= 0;
            const int rows = min(p.tokens, block.band.q_len - block.first_token - t * p.tokens) * p.group; // that exist
            bool suspect = false;
            for (int row = lane; row < rows; row += 32) suspect |= smem.stats[stage][row].suspect != 0;
            const bool any = __any_sync(0xffffffffu, suspect);
            if (rows < p.tile_rows()) {
                zero_rows<C::kHalves>(smem.queries[stage], rows, p.tile_rows());
                zero_rows<C::kHalvesV>(smem.douts[stage], rows, p.tile_rows());
            }
            if (any) {
                for (int x = lane; x < static_cast<int>(sizeof smem.queries[0]) / 16; x += 32)
                    if (zero_nonfinite<Element, 1>(smem.queries[stage] + 16 * x, 16, 0))
                        smem.stats[stage][x % (C::kRowHalf / 16) / 8].lse = NAN;
                for (int x = lane; x < static_cast<int>(sizeof smem.douts[0]) / 16; x += 32)
                    if (zero_nonfinite<Element, 1>(smem.douts[stage] + 16 * x, 16, 0)) block.hides = true;
            }
            async_fence();
            smem.row_ready.arrive(ring);
        }
        smem.block_empty.release(blocks);
    }
}

// Which of a thread's columns see its two keys: a bit each, columns 8 n and 8 n + 1 after its first at bits 2 n and 2 n + 1.
struct Seen {
    uint32_t bits[2];

    __device__ __forceinline__ bool operator()(int r, int column) const { return bits[r] >> (column / 4 + column % 2) & 1; }
};

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

    __device__ __forceinline__ void begin_scores(Scores &s, uint32_t stage) const {
        wgmma_abt<Element, C::kHeadDim, C::kKeyHalf, C::kRowHalf>(
                s, shared_address(smem.keys) + 64 * math_warpgroup * kRowBytes, shared_address(smem.queries[stage]));
    }
    template <int kSize> __device__ __forceinline__ void begin_dp(float (&dp)[kSize], uint32_t stage, int first) const {
        wgmma_abt<Element, C::kHeadDimV, C::kKeyHalf, C::kRowHalf>(
                dp, shared_address(smem.values) + 64 * math_warpgroup * kRowBytes, shared_address(smem.douts[stage]) + first * kRowBytes);
    }

    // Of the thread's key r.
    __device__ __forceinline__ const sa_range &seen_by(int r) const {
        const int thread = pinned(static_cast<int>(threadIdx.x));
        return smem.seen_by[64 * (thread / 128) + warpgroup_row(static_cast<unsigned>(thread) % 128, r)];
    }
    __device__ __forceinline__ Seen find_seen(int t) const {
        const auto bits_before = [&](int token) {
            const int column = min(max(token - t * p.tokens, 0), p.tokens) * p.group - fragment_column(),
                      count = column > 0 ? column / 8 * 2 + min(column % 8, 2) : 0;
            return count < 32 ? (1u << count) - 1 : ~0u;
        };
        const auto bits = [&](const sa_range &rows) { return bits_before(rows.end) & ~bits_before(rows.begin); };
        return {{bits(seen_by(0)), bits(seen_by(1))}};
    }

    // A field of the statistics of the thread's columns from `first` on.
    template <float RowStats::*kField, int kSize>
    static __device__ __forceinline__ void load_field(float (&to)[kSize], const RowStats *stats, int first) {
#pragma unroll
        for (int n = 0; n < kSize; n++) to[n] = stats[first + fragment_column() + 8 * (n / 2) + n % 2].*kField;
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

    // A tile: dV += P dO, dK += dS Q.
    template <bool kMasked> __device__ __forceinline__ void add_tile(Wide<C> &dk, float (&dv)[64], uint32_t stage, int t) const {
        const RowStats *stats = smem.stats[stage];
        Scores s, dp;
        Operands weights, ds;
        float lse[kRows / 4], bias[kRows / 4];
        Seen seen;
        begin_scores(s, stage);
        begin_dp(dp, stage, 0);
        if (kMasked) seen = find_seen(t);
        wgmma_wait<1>(); // S complete; dP still running
        pin(s);
        load_field<&RowStats::lse>(lse, stats, 0);
        find_weights<kMasked>(s, lse, seen, 0);
        pack<Element>(weights, s);
        wgmma_wait<0>();
        pin(dp);
        load_field<&RowStats::bias>(bias, stats, 0);
        find_ds<kMasked>(dp, s, bias, seen, 0);
        pack<Element>(ds, dp);
        add_products(dk, dv, weights, ds, stage, 0);
        wgmma_wait<0>();
        pin(dv);
        dk.pin_all();
    }

    // The same 32 rows at a time: S, dP of all 64 do not fit beside dK of 192 columns.
    template <bool kMasked> __device__ __forceinline__ void add_tile_by_halves(Wide<C> &dk, float (&dv)[64], uint32_t stage, int t) const {
        constexpr int kHalf = kRows / 2;
        const RowStats *stats = smem.stats[stage];
        Seen seen;
        if (kMasked) seen = find_seen(t);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float s[kHalf / 2], dp[kHalf / 2], lse[kHalf / 4], bias[kHalf / 4];
            uint32_t weights[kHalf / 16][4], ds[kHalf / 16][4];
            wgmma_abt<Element, C::kHeadDim, C::kKeyHalf, C::kRowHalf>(s, shared_address(smem.keys) + 64 * math_warpgroup * kRowBytes,
                    shared_address(smem.queries[stage]) + half * kHalf * kRowBytes);
            begin_dp(dp, stage, half * kHalf);
            load_field<&RowStats::lse>(lse, stats, half * kHalf);
            wgmma_wait<1>(); // S complete; dP still running
            pin(s);
            find_weights<kMasked>(s, lse, seen, half * kHalf);
            load_field<&RowStats::bias>(bias, stats, half * kHalf);
            wgmma_wait<0>();
            pin(dp);
            find_ds<kMasked>(dp, s, bias, seen, half * kHalf);
            pack<Element>(weights, s);
            pack<Element>(ds, dp);
            add_products(dk, dv, weights, ds, stage, half * kHalf);
            wgmma_wait<0>();
            pin(dv);
            dk.pin_all();
        }
    }

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
        for (int n = 0; n < block.order.num_tiles * p.tokens * p.group; n++) {
            const int token = n / p.group, head = block.kv_head * p.group + n % p.group;
            if (block.first_token + token >= block.band.q_len) return;
            add_nonfinite<Element>(dv,
                    static_cast<const uint16_t *>(args.dout.data) +
                            sa_offset(&args.dout, block.sequence.batch, block.sequence.q_begin + block.first_token + token, head),
                    sa_head_dim_v(&args.fwd.problem), [&](int r) { return token >= seen_by(r).begin && token < seen_by(r).end; });
        }
    }

    __device__ __forceinline__ void write(const Wide<C> &dk, const float (&dv)[64], const Block &block) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int key = block.key + 64 * math_warpgroup + warpgroup_row(r);
            uint16_t *to_dk = nullptr, *to_dv = nullptr;
            if (key < block.band.k_len) {
                const int64_t row = block.sequence.k_begin + key;
                to_dk = static_cast<uint16_t *>(args.dk.data) + sa_offset(&args.dk, block.sequence.batch, row, block.kv_head);
                to_dv = static_cast<uint16_t *>(args.dv.data) + sa_offset(&args.dv, block.sequence.batch, row, block.kv_head);
            }
            dk.write(to_dk, r, p.scale, static_cast<int>(args.fwd.problem.head_dim));
            write_row<Element>(to_dv, dv, r, 1.0f, static_cast<int>(sa_head_dim_v(&args.fwd.problem)));
        }
    }

    // Tiles [begin, end) see keys of the warpgroup; [full_begin, full_end) of them see all, with all their rows.
    struct Tiles {
        int begin, end, full_begin, full_end;
    };
    __device__ __forceinline__ Tiles find_tiles(const Block &block) const {
        const int key = block.key + 64 * math_warpgroup;
        const sa_range some = rows_of(block.band, key, 64), of_first = rows_of(block.band, key, 1),
                       of_last = rows_of(block.band, key + 63, 1);
        Tiles tiles = {0, 0, 0, 0};
        if (some.begin < some.end) {
            tiles.begin = sa_tile_of(some.begin - block.first_token, p.tokens);
            tiles.end = sa_tile_from(some.end - block.first_token, p.tokens);
        }
        if (of_last.begin < of_first.end && of_last.end > 0) {
            tiles.full_begin = sa_tile_from(of_last.begin - block.first_token, p.tokens);
            tiles.full_end = sa_tile_of(of_first.end - block.first_token, p.tokens);
        }
        return {warp_uniform(tiles.begin), warp_uniform(tiles.end), warp_uniform(tiles.full_begin), warp_uniform(tiles.full_end)};
    }

    __device__ __forceinline__ void run() {
        for (Ring<2> blocks;; blocks.n++) {
            smem.block_full.wait(blocks);
            const Block &block = smem.blocks[blocks.stage()];
            if (!warp_uniform(block.exists)) return;
            Wide<C> dk;
            float dv[64];
            dk.clear();
#pragma unroll
            for (float &x : dv) x = 0.0f;
            const Tiles tiles = find_tiles(block);
            bar_sync<128>(kMathBarrier + math_warpgroup); // all warps are done with the block before
            const int key = static_cast<int>(threadIdx.x);
            if (key % 128 < 64) { // each warpgroup those of its own keys
                const int own = key / 128 * 64 + key % 128;
                const sa_range rows = rows_of(block.band, block.key + own, 1);
                smem.seen_by[own] = {rows.begin - block.first_token, rows.end - block.first_token};
            }
            bar_sync<128>(kMathBarrier + math_warpgroup);
            smem.kv_full.wait(Ring<1>{blocks.n});
#pragma unroll 1
            for (bool more = warp_uniform(block.order.num_tiles) > 0; more; ring.n++) {
                // In flight at the top: no wgmma.
                const uint32_t stage = warp_uniform(ring.stage());
                smem.row_ready.wait(ring);
                const int use = warp_uniform(smem.uses[stage]), t = use < 0 ? ~use : use;
                more = use >= 0;
                if (t < tiles.begin || t >= tiles.end) { // of the other warpgroup alone
                    smem.row_empty.release(ring);
                    continue;
                }
                const bool is_full = t >= tiles.full_begin && t < tiles.full_end;
                if constexpr (C::kHeadDim > 128) {
                    if (is_full)
                        add_tile_by_halves<false>(dk, dv, stage, t);
                    else
                        add_tile_by_halves<true>(dk, dv, stage, t);
                } else {
                    if (is_full)
                        add_tile<false>(dk, dv, stage, t);
                    else
                        add_tile<true>(dk, dv, stage, t);
                }
                async_fence(); // of the statistics that were read, before a copy overwrites them
                smem.row_empty.release(ring);
            }
            smem.kv_empty[0].arrive();
            if (block.hides) add_hidden(dv, block);
            write(dk, dv, block);
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
            for (int row = p.tile_rows() + static_cast<int>(threadIdx.x % 32); row < kRows; row += 32)
                smem.stats[stage][row] = {INFINITY, 0.0f, 0.0f, 0};
        }
    async_fence();
    __syncthreads();
    if (warp < kMathThreads / 32) {
        registers_up<kMathRegisters>();
        KeysMath<C>{smem, args, p, warp / 4, {}}.run();
        return;
    }
    registers_down<kLoaderRegisters>();
    if (warp == kMathThreads / 32) load_blocks<C>(smem, args, maps, p);
    if (warp == kMathThreads / 32 + 1) check_rows<C>(smem, p);
#else
    __trap();
#endif
}

} // namespace sa::bwd_wide_window_sm90
