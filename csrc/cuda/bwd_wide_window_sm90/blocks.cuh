// SPDX-License-Identifier: Apache-2.0
//
// The launch of keys: its blocks, its shared memory, and the warps that load and check.
#pragma once

#include "cuda/bwd_wide_window_sm90/smem.cuh"
#include "cuda/tile/finite.cuh"

namespace sa::bwd_wide_window_sm90 {

enum KeysBarrier : int { kMathBarrier = 1 }; // of the first math warpgroup; 0 is __syncthreads

// kSinks: there are positional sink tokens.
template <class W, int kStages_, bool kSinks_> struct KeysConfig : W {
    using typename W::Element;
    using W::kHalves, W::kHalvesV, W::kRowHalf;
    static constexpr bool kSinks = kSinks_;
    static constexpr int kStages = kStages_, kKeyHalf = kBlockKeys * kRowBytes;
};

// In which order a block's tiles are loaded: pairs of one that only the first warpgroup needs and one that only the second needs, and those
// between. Every other block begins with those between: neighbours, which run side by side, then read the tiles that they share at nearly
// the same time, the second of them from the L2 cache. Half a block, of one warpgroup's keys, has that warpgroup's tiles in the same order.
struct TileOrder {
    int num_tiles, num_pairs, first; // first: 0, or 2 num_pairs, so that pairs come last; of half a block, where it begins
    int skipped;                     // tiles before all of them, of the other half alone

    __device__ __forceinline__ int tile(int n) const {
        n += first;
        if (n >= num_tiles) n -= num_tiles;
        if (n >= 2 * num_pairs) return skipped + n - num_pairs;
        return n % 2 ? num_tiles - num_pairs + n / 2 : n / 2;
    }
    // The order of half a block, whose pairs' other tiles are the other half's.
    __device__ __forceinline__ TileOrder of_half(int half) const {
        const int begin = half == 0 ? first / 2 : first ? 0 : num_tiles - 2 * num_pairs;
        return {num_tiles - num_pairs, 0, begin, half * num_pairs};
    }
    // Tiles after the last one that the warpgroup needs: where pairs come last, the last tile is the second warpgroup's alone.
    __device__ __forceinline__ int rest_of(int warpgroup) const { return num_pairs && first && warpgroup == 0 ? 1 : 0; }
};

struct Block {
    sa_sequence sequence;
    sa_band band;
    int key, kv_head, first_token; // first_token: of the first tile
    int idle;                      // the warpgroup whose keys are another item's; 2: none
    TileOrder order;               // tile() is for the loader, which tells it by `uses`
    bool exists, hides;            // hides: the checker zeroed some of dO
    bool is_stretch;               // not a key block (keys.cuh)
    int64_t slot;                  // of the first warpgroup's partial of sink tokens; -1: none
};

template <class C> struct KeysSmem {
    alignas(1024) unsigned char keys[C::kHalves * C::kKeyHalf], values[C::kHalvesV * C::kKeyHalf];
    alignas(1024) unsigned char queries[C::kStages][C::kHalves * C::kRowHalf], douts[C::kStages][C::kHalvesV * C::kRowHalf];
    RowStats stats[C::kStages][kRows];
    alignas(64) unsigned char staged[kMathThreads / 32][kStagedBytes]; // dK and dV on their way out, a warp's
    int uses[C::kStages];                                              // the tile in each stage
    int parts[C::kStages][2];                                          // of each warpgroup in it: the tile, with bits of Part
    alignas(8) float lse[C::kStages][kRows], bias[C::kStages][kRows];  // of a tile's rows, from stats
    sa_range seen_by[kBlockKeys]; // a tile's rows, that see each key, counted from the block's first one
    Block blocks[2];
    Barriers<2> block_full, block_empty;
    Barriers<1> kv_full, kv_empty;
    Barriers<C::kStages> row_full, row_ready, row_empty; // ready: the tile is checked
};

// The rows that see some key of [key, key + size).
__device__ __forceinline__ sa_range rows_of(const sa_band &band, int key, int size) {
    const int end = min(key + size, band.k_len);
    return key < end && band.q_len ? sa_keys_rows(&band, {key, end}) : sa_range{0, 0};
}

// Writes stretch n from its first tile with a row that sees sink tokens before its window, if one exists. By a whole warp.
__device__ __forceinline__ bool describe_stretch(Block &to, unsigned n, const sinkattn_fwd_args &args, const Problem &p) {
    const Place place = find_place(
            n / p.num_kv_heads, p.stretch_tokens, p.batch_stretches, args.problem.batch, [&](int64_t b) { return rows_before(args, b); });
    const sa_sequence sequence = sequence_or_tail(args, place.b);
    if (place.within < 0 || static_cast<int64_t>(place.within) * p.stretch_tokens >= sequence.q_len) return false;
    const sa_band band = band_of(args, sequence);
    const int begin = place.within * p.stretch_tokens, end = begin + min(p.stretch_tokens, band.q_len - begin), row = p.first_row(band);
    if (row >= end) return false;
    if (threadIdx.x % 32 == 0) {
        to.exists = to.is_stretch = true;
        to.hides = false;
        to.sequence = sequence;
        to.band = band;
        to.key = 0;
        to.kv_head = static_cast<int>(n % p.num_kv_heads);
        to.first_token = max(sa_tile_of(row, p.tokens) * p.tokens, begin);
        to.idle = 2;
        to.order = {sa_tile_from(end - to.first_token, p.tokens), 0, 0, 0};
        to.slot = 2 * (p.first_stretch(sequence, place.b) + place.within);
    }
    __syncwarp();
    return true;
}

// Writes block n of the launch, or half of it, if it exists. By a whole warp.
template <bool kSinks>
__device__ __forceinline__ bool describe_block(Block &to, unsigned n, const sinkattn_fwd_args &args, const Problem &p) {
    const int half = static_cast<int>(n % p.halves);
    n /= p.halves;
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
        if constexpr (kSinks) {
            to.is_stretch = false;
            to.slot = to.key == 0 && p.first_row(to.band) < to.band.q_len ? p.window_slot(sequence, place.b) : -1;
        }
        const sa_range rows = rows_of(to.band, to.key, kBlockKeys);
        to.first_token = rows.begin;
        const int num_tiles = sa_tile_from(rows.end - rows.begin, p.tokens);
        int num_pairs = 0;
        const sa_range of_first = rows_of(to.band, to.key, 64), of_second = rows_of(to.band, to.key + 64, 64);
        if (of_first.begin < of_first.end && of_second.begin < of_second.end)
            num_pairs = min(
                    min(sa_tile_of(of_second.begin - rows.begin, p.tokens), num_tiles - sa_tile_from(of_first.end - rows.begin, p.tokens)),
                    num_tiles / 2);
        to.order = {num_tiles, num_pairs, place.within % 2 * 2 * num_pairs, 0};
        to.idle = p.halves == 1 ? 2 : 1 - half;
        if (p.halves > 1) to.order = to.order.of_half(half);
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
    const unsigned num_stretches = C::kSinks ? p.num_stretches * p.num_kv_heads : 0;
    for (unsigned n = blockIdx.x; n < p.num_blocks * p.num_kv_heads * p.halves + num_stretches; n += gridDim.x) {
        smem.block_empty.acquire(blocks);
        Block &block = smem.blocks[blocks.stage()];
        if (C::kSinks && n < num_stretches ? !describe_stretch(block, n, args.fwd, p)
                                           : !describe_block<C::kSinks>(block, n - num_stretches, args.fwd, p))
            continue;
        smem.block_full.arrive(blocks);
        const int batch = static_cast<int>(block.sequence.batch), kv_head = block.kv_head;
#pragma unroll 1
        for (int use = 0;; use++, ring.n++) {
            // In flight: K and V of the block; at most kStages tiles. The first tiles come before K and V, as their stages are free before.
            if (use == min(C::kStages, block.order.num_tiles)) {
                smem.kv_empty.acquire(Ring<1>{blocks.n});
                if (lane == 0) smem.kv_full[0].arrive_expect(kPieces * C::kKeyHalf);
                __syncwarp();
                if (lane < kPieces)
                    tensor_load(keys, lane < C::kHalves ? &maps.k : &maps.v, smem.kv_full[0], 64 * half, kv_head,
                            static_cast<int>(block.sequence.k_begin) + block.key, batch);
            }
            if (use == block.order.num_tiles) break;
            const uint32_t stage = ring.stage();
            const int tile = block.order.tile(use), token = block.first_token + tile * p.tokens;
            smem.row_empty.acquire(ring);
            if (lane == 0) smem.uses[stage] = tile;
            if (lane == 0) smem.row_full[stage].arrive_expect(p.tile_rows() * static_cast<int>(kPieces * kRowBytes + sizeof(RowStats)));
            __syncwarp();
            if (lane < kPieces)
                tensor_load((lane < C::kHalves ? smem.queries[stage] : smem.douts[stage]) + half * C::kRowHalf,
                        lane < C::kHalves ? &maps.q : &maps.dout, smem.row_full[stage], 64 * half, kv_head * p.group,
                        static_cast<int>(block.sequence.q_begin) + token, batch);
            if (ring.n == 0) wait_for_previous_kernel(); // the launch of rows, for its statistics
            if (lane == kPieces)
                bulk_load(smem.stats[stage], p.stats_of(args.fwd.problem, block.sequence, kv_head, token),
                        p.tile_rows() * static_cast<int>(sizeof(RowStats)), smem.row_full[stage]);
        }
        blocks.n++;
    }
    smem.block_empty.acquire(blocks);
    if (lane == 0) smem.blocks[blocks.stage()].exists = false;
    smem.block_full.arrive(blocks);
    wait_for_previous_kernel(); // even without a tile: the next launch reads statistics, too
    let_next_kernel_start();
}

// A warpgroup's part in a tile, above the tile's number: whether its keys are seen by some rows, by all; whether the tile is the last that
// it reads K and V for; whether it is the block's last.
enum Part : int { kTileMask = 0xffff, kSome = 1 << 16, kFull = 1 << 17, kLastOwn = 1 << 18, kLast = 1 << 19 };

// Tiles [begin, end) see keys of a warpgroup; [full_begin, full_end) of them see all, with all their rows.
struct Tiles {
    int begin, end, full_begin, full_end;

    __device__ __forceinline__ int part(int t) const {
        if (t < begin || t >= end) return t;
        return t >= full_begin && t < full_end ? t | kSome | kFull : t | kSome;
    }
};

__device__ __forceinline__ Tiles find_tiles(const Block &block, int warpgroup, int tokens) {
    if (warpgroup == block.idle) return {0, 0, 0, 0};
    const int key = block.key + 64 * warpgroup;
    const sa_range some = rows_of(block.band, key, 64), of_first = rows_of(block.band, key, 1), of_last = rows_of(block.band, key + 63, 1);
    Tiles tiles = {0, 0, 0, 0};
    if (some.begin < some.end) {
        tiles.begin = sa_tile_of(some.begin - block.first_token, tokens);
        tiles.end = sa_tile_from(some.end - block.first_token, tokens);
    }
    if (of_last.begin < of_first.end && of_last.end > 0) {
        tiles.full_begin = sa_tile_from(of_last.begin - block.first_token, tokens);
        tiles.full_end = sa_tile_of(of_first.end - block.first_token, tokens);
    }
    return tiles;
}

// By the checker warp: zeroes rows behind the sequence, whose statistics may be anything, and values of Q and dO that are not finite, since
// P = 0 times NaN is NaN; and sorts the statistics by field. NaN returns to P through lse, to dS through g - delta, to dV by add_hidden.
template <class C> __device__ __forceinline__ void check_rows(KeysSmem<C> &smem, const Problem &p) {
    using Element = typename C::Element;
    const int lane = threadIdx.x % 32;
    Ring<C::kStages> ring;
    for (Ring<2> blocks;; blocks.n++) {
        smem.block_full.wait(blocks);
        Block &block = smem.blocks[blocks.stage()];
        if (!block.exists) return;
        const bool is_stretch = C::kSinks && block.is_stretch;
        const Tiles tiles = is_stretch ? Tiles{} : find_tiles(block, lane % 2, p.tokens);
        for (int n = 0; n < block.order.num_tiles; n++, ring.n++) {
            const uint32_t stage = ring.stage();
            smem.row_full.wait(ring);
            const int t = smem.uses[stage], left = block.order.num_tiles - 1 - n;
            const int part = is_stretch ? t | (t % 2 == lane ? kSome : 0) : tiles.part(t);
            if (lane < 2) smem.parts[stage][lane] = part | (left == block.order.rest_of(lane) ? kLastOwn : 0) | (left == 0 ? kLast : 0);
            const int rows = min(p.tokens, block.band.q_len - block.first_token - t * p.tokens) * p.group; // that exist
            bool suspect = false;
#pragma unroll 1
            for (int row = lane; row < p.tile_rows(); row += 32) {
                const RowStats &stats = smem.stats[stage][row];
                smem.lse[stage][row] = stats.lse;
                smem.bias[stage][row] = stats.bias;
                suspect |= row < rows && stats.suspect != 0;
            }
            const bool any = __any_sync(0xffffffffu, suspect);
            if (rows < p.tile_rows()) {
                zero_rows<C::kHalves>(smem.queries[stage], rows, p.tile_rows());
                zero_rows<C::kHalvesV>(smem.douts[stage], rows, p.tile_rows());
            }
            if (any) {
                __syncwarp();
                for (int x = lane; x < static_cast<int>(sizeof smem.queries[0]) / 16; x += 32)
                    if (zero_nonfinite<Element, 1>(smem.queries[stage] + 16 * x, 16, 0)) smem.lse[stage][x % (C::kRowHalf / 16) / 8] = NAN;
                for (int x = lane; x < static_cast<int>(sizeof smem.douts[0]) / 16; x += 32)
                    if (zero_nonfinite<Element, 1>(smem.douts[stage] + 16 * x, 16, 0)) block.hides = true;
            }
            async_fence(); // also of the statistics that were read, before a copy overwrites them
            smem.row_ready.arrive(ring);
        }
        smem.block_empty.release(blocks);
    }
}

} // namespace sa::bwd_wide_window_sm90
