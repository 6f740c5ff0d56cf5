// SPDX-License-Identifier: Apache-2.0
//
// The work of the general backward on sm_90: a packed batch's table, items, and what lies in the workspace.
//
// A kernel's Config has kHeadDim, kHeadDimV, kRows and kKeys of a tile, kTileFloats of its dQ, and kParts, in which that is added.
#pragma once

#include "core/chains.h"
#include "core/workspace.h"
#include "cuda/ptx/sm80.cuh"
#include "cuda/work/items.cuh"
#include "cuda/work/tile_walk.cuh"

namespace sa::bwd_sm90 {

// One sequence, in the order of work. first_tile: its first row tile of a kv head, which ascends in the caller's order. first_use, _term,
// _carry: of those before it, over all kv heads; a term is an item's.
struct Entry {
    sa_sequence sequence;
    int64_t first_tile, first_use, first_term, first_carry;
    int64_t first_item;     // in the order of work; of all sequences side by side
    int64_t first_place;    // of its items that leave dK and dV apart; -1 if none does
    int first_block;        // of the sequences before it, key blocks of one kv head
    int waves, first_chain; // of sequences side by side: sa_waves_beside, and chains before its own; waves 0: alone
    sa_chains chains;
};

// A key block of a slice, and the row tiles of a chain that see some of it (core/chains.h). Copied whole, so no byte is left unwritten.
struct alignas(16) Item {
    int exists;                  // an int, as all here, so that no byte is padding
    int batch, q_begin, k_begin; // of the sequence
    int slice, key;              // slice: of all kv heads
    sa_band band;
    sa_row_tiles tiles;
    int finish_end;         // tiles before it have no later key block; -n where key blocks leave dQ apart, n parts a tile
    int first_tile;         // index of the head's first row tile
    int use, step;          // slot use of the last tile, and what is added to it from a tile to the one before; or the head's first part
    int idle_use, idle;     // uses that no tile has, which the item passes on
    int blind, round_tiles; // rounds begin at blind
    int part, num_parts;    // the first round that the item adds, and all of the block
    int carry; // index of the block's carried dK and dV; -1 where the item has all rounds; -2 - place where it may leave them apart
    unsigned carry_turn;        // whose turn it is there when the item's first round is added
    int slice_carry;            // where dK and dV of the block are handed from slice to slice
    int nth;                    // index of the item's terms in its head
    int round_begin, round_end; // tiles of the first round

    __device__ __forceinline__ bool has_tiles() const { return tiles.begin < tiles.end; }
    __device__ __forceinline__ bool has_place() const { return carry < -1; }
    __device__ __forceinline__ bool has_parts() const { return finish_end < 0; }
    // The number among the block's rounds, later rows first, of the one with tile t.
    __device__ __forceinline__ int part_of(int t) const { return part + (tiles.end - 1 - blind) / round_tiles - (t - blind) / round_tiles; }
};

// The tiles of an item's rounds, one after another.
struct Round {
    int begin, end;

    __device__ __forceinline__ void start(const Item &item) { *this = {item.round_begin, item.round_end}; }
    __device__ __forceinline__ bool is_last(const Item &item) const { return begin == item.tiles.begin; }
    __device__ __forceinline__ void advance(const Item &item) { *this = {max(begin - item.round_tiles, item.tiles.begin), begin}; }
};

struct BwdProblem {
    int64_t num_entries, num_carries; // carries that items share; one a block follows them
    int64_t places_at, num_places;    // carries of items that leave dK and dV apart, behind these
    sa_chain_room room;
    sa_chains chains;                       // of a dense batch
    int group, tokens, slices, num_q_heads; // heads and tokens of a tile of rows; slices of a kv head
    float scale, scale_log2;
    int64_t num_tiles, num_items; // upper bounds for one slice
    int dense_tiles;              // of a slice of a sequence, where all are alike
    int parts;                    // of dQ that a tile may have, which its key blocks leave apart; 0 where they add in turn
    sa_divisor by_heads, by_group, by_tokens, by_tiles; // slices, heads of one; tokens of a tile; dense_tiles

    __device__ __forceinline__ int heads_of(int slice) const { return min(group, num_q_heads - slice * group); }
};

// What the last kernel adds to dq of a row tile, and where that begins: the first token and head.
struct TileSum {
    const float4 *parts;
    uint16_t *dq;
    int count, tokens; // 0 parts: nothing to add; tokens that exist
};

// The same of a key block and kv head.
struct KeySum {
    const float4 *parts; // of the first slice; those of the next are one carry behind
    int64_t step;        // from one to the next
    uint16_t *dk, *dv;
    int count, keys;
};

struct BwdBuffers {
    Entry *entries;                          // num_entries, if packed, and one behind them for the totals
    Item *items;                             // in the order of work
    unsigned *counter;                       // items taken so far
    unsigned long long *turns, *carry_turns; // whose turn it is at each slot and carry
    TileSum *tile_sums;                      // of each row tile and slice, where key blocks may leave parts of dQ apart
    KeySum *key_sums;                        // of each key block and kv head, where items may leave dK and dV apart
    unsigned char *stats;                    // RowStats of each tile
    float *slots, *carries;                  // slots: accumulators, or each tile's parts of dQ
    float *row_terms, *key_terms; // of ds_aux, [num_q_heads][num_tiles], [num_q_heads][num_items][2]; NULL where it is not wanted
};

// What products add to each row's S, -lse / scale, 0 for a row without keys and sink, and to its dP: g - delta, rounded to 16 bits, so off
// by at most 2^-17 of it, mostly less than delta is off by, as out is rounded. p_sink: only with ds_aux.
template <class C> struct alignas(16) RowStats {
    uint16_t to_scores[C::kRows / 64][3][64], to_dp[C::kRows / 64][2][64];
    float p_sink[C::kRows];
};
template <class C> __host__ __device__ constexpr int stats_bytes(bool has_p_sink) {
    static_assert(sizeof(RowStats<C>) == C::kRows * (SA_BWD_SM90_STATS_BYTES + SA_BWD_SM90_P_SINK_BYTES), "as the planner counts them");
    return C::kRows * (SA_BWD_SM90_STATS_BYTES + (has_p_sink ? SA_BWD_SM90_P_SINK_BYTES : 0));
}

__device__ __forceinline__ int divide(int x, sa_divisor by) { return static_cast<int>(sa_divide(static_cast<uint32_t>(x), by)); }

__device__ __forceinline__ int num_tiles_of(const BwdProblem &p, int q_len) { return divide(q_len + p.tokens - 1, p.by_tokens); }

// Blind: row tiles before the first row that sees a key, which use no slot.
__device__ __forceinline__ int num_blind_tiles(const BwdProblem &p, const sa_band &band) {
    const int row = sa_first_seeing_row(&band);
    return row < band.q_len ? divide(row, p.by_tokens) : num_tiles_of(p, band.q_len);
}

// The key blocks that see a row tile: those of its sink prefix, and those from its window's first key on.
struct BlocksSeen {
    int sinks, begin, end;

    // How many of them come before this one.
    __device__ __forceinline__ int before(int block) const { return block < sinks ? block : sinks + block - begin; }
};

template <class C> __device__ __forceinline__ BlocksSeen blocks_seen(const sa_band &band, const BwdProblem &p, int t) {
    const int first = t * p.tokens, last = min(first + p.tokens, band.q_len) - 1;
    const int begin = sa_row_band(&band, first).begin, end = sa_row_band(&band, last).end;
    const int sinks = sa_tile_from(min(min(band.num_sink, end), begin), C::kKeys);
    return {sinks, max(sa_tile_of(begin, C::kKeys), sinks), sa_tile_from(end, C::kKeys)};
}

// The rows of the tail see no keys, its keys are seen by none.
__device__ __forceinline__ sa_band band_of(const sinkattn_bwd_args &args, const sa_sequence &sequence, bool is_tail) {
    return sa_band_of(&args.fwd.problem.mask, is_tail ? 0 : sequence.q_len, sequence.k_len);
}

// Sequences of a dense batch are alike, and the first has the items of all. A packed batch has a table.
__device__ __forceinline__ Entry entry_of(const sinkattn_bwd_args &args, const BwdProblem &p, const BwdBuffers &buffers, int64_t e) {
    if (args.fwd.problem.packed) return buffers.entries[e];
    return {sa_sequence_at(&args.fwd, e), e * p.dense_tiles, 0, 0, 0, 0, p.num_places ? 0 : -1, 0, 0, 0, p.chains};
}

template <class Join> __device__ __forceinline__ int64_t warp_scan(int64_t x, const Join &join) {
    for (int distance = 1; distance < 32; distance *= 2) {
        const int64_t before = __shfl_up_sync(0xffffffffu, x, distance);
        if (static_cast<int>(threadIdx.x % 32) >= distance) x = join(x, before);
    }
    return x;
}

constexpr int kTableThreads = 1024; // at most: as many as sort the sequences
constexpr int kRoundsLanes = 16;    // at most, of a sequence: as many numbers of rounds are tried

// Of each x of the block's threads up to this one the sum, of the first kMost the maximum; those of all threads are joined to `all`.
template <int kMost, int kCount> __device__ __forceinline__ void block_scan(int64_t (&x)[kCount], int64_t (&all)[kCount]) {
    __shared__ int64_t warps[kTableThreads / 32][kCount];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t of_warps[kCount];
    const auto join_of = [](int i) { return [i](int64_t a, int64_t b) { return i < kMost ? sa_max(a, b) : a + b; }; };
#pragma unroll
    for (int i = 0; i < kCount; i++) x[i] = warp_scan(x[i], join_of(i));
    __syncthreads(); // the warps of the scan before have been read
    if (lane == 31)
        for (int i = 0; i < kCount; i++) warps[warp][i] = x[i];
    __syncthreads();
    for (int i = 0; i < kCount; i++) of_warps[i] = lane < static_cast<int>(blockDim.x / 32) ? warps[lane][i] : 0;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        const auto join = join_of(i);
        const int64_t up_to = warp_scan(of_warps[i], join), before = __shfl_sync(0xffffffffu, up_to, warp > 0 ? warp - 1 : 0);
        if (warp > 0) x[i] = join(before, x[i]);
        x[i] = join(all[i], x[i]);
        all[i] = join(all[i], __shfl_sync(0xffffffffu, up_to, 31));
    }
}

// Sorts sequences, the longest first, so that no block is left with a long one at the end. More sequences than threads stay unsorted.
__device__ __forceinline__ void find_places(const sinkattn_fwd_args &args, int (&places)[kTableThreads]) {
    __shared__ uint64_t keys[kTableThreads];
    const auto thread = threadIdx.x, batch = static_cast<unsigned>(sa_min(args.problem.batch, kTableThreads));
    uint64_t own = UINT64_MAX;
    if (thread < batch) {
        const int64_t length = sa_max(rows_before(args, thread + 1) - rows_before(args, thread), 0);
        own = static_cast<uint64_t>(INT32_MAX - length) << 32 | thread;
    }
    for (unsigned run = 2; run < 2 * batch; run *= 2) // of sorted sequences, ascending and descending in turns
        for (unsigned distance = run / 2; distance > 0; distance /= 2) {
            uint64_t other;
            if (distance < 32) {
                other = __shfl_xor_sync(0xffffffffu, own, distance);
            } else {
                __syncthreads();
                keys[thread] = own;
                __syncthreads();
                other = keys[thread ^ distance];
            }
            const bool takes_less = ((thread & distance) == 0) == ((thread & run) == 0);
            if (takes_less == (other < own)) own = other;
        }
    if (own != UINT64_MAX) places[static_cast<uint32_t>(own)] = static_cast<int>(thread);
    __syncthreads();
}

// sa_rounds_of, by so many lanes, each of which tries a number of rounds at a time: a thread alone takes microseconds.
__device__ __forceinline__ int rounds_by_lanes(const sa_band &band, const BwdProblem &p, int keys, int lanes) {
    const int tiles = sa_seeing_tiles(&band, p.tokens), blocks = sa_seen_blocks(&band, keys, &p.room),
              first_lane = static_cast<int>(threadIdx.x % 32) / lanes * lanes;
    const bool is_few = sa_has_few_blocks(blocks, tiles);
    sa_best_rounds best = {1, INT64_MAX};
    int rounds = 1;
    for (int i = first_lane; i < static_cast<int>(threadIdx.x % 32); i++) rounds = sa_next_rounds(rounds);
    for (;;) {
        const bool tries = is_few && sa_may_have_rounds(&p.room, blocks, tiles, rounds);
        if (!__any_sync(0xffffffffu, tries)) break;
        const int64_t time = tries ? sa_time_of_rounds(&band, p.tokens, keys, &p.room, blocks, tiles, rounds) : INT64_MAX / 2;
        for (int lane = first_lane; lane < first_lane + lanes; lane++)
            sa_try_rounds(&best, __shfl_sync(0xffffffffu, rounds, lane), __shfl_sync(0xffffffffu, time, lane));
        for (int i = 0; i < lanes; i++) rounds = sa_next_rounds(rounds);
    }
    return is_few ? best.rounds : sa_rounds_of_many(&band, keys, blocks, tiles);
}

// The table of a packed batch.
template <class C>
__global__ __launch_bounds__(kTableThreads) void table_kernel(
        const __grid_constant__ sinkattn_bwd_args args, BwdProblem p, BwdBuffers buffers, unsigned *error_word) {
    let_next_kernel_start();
    check_lengths(args.fwd, error_word);
    const sinkattn_problem &problem = args.fwd.problem;
    __shared__ int places[kTableThreads];
    __shared__ int2 numbers[kTableThreads];
    const bool sorts = problem.batch <= kTableThreads;
    if (sorts) find_places(args.fwd, places);
    int64_t ends[2] = {};
    for (int64_t base = 0; base <= p.num_entries; base += blockDim.x) {
        // Decreasing offsets are raised: sequences are disjoint, whatever memory holds.
        const int64_t b = base + threadIdx.x;
        const auto offset = [&](const int32_t *cu_seqlens, int64_t x, int64_t total) {
            return x <= problem.batch ? sa_packed_begin(cu_seqlens, x, total) : total;
        };
        int64_t begins[] = {offset(args.fwd.cu_seqlens_q, b, problem.q_len), offset(args.fwd.cu_seqlens_k, b, problem.k_len)};
        const int64_t q_end = offset(args.fwd.cu_seqlens_q, b + 1, problem.q_len),
                      k_end = offset(args.fwd.cu_seqlens_k, b + 1, problem.k_len);
        block_scan<2>(begins, ends);
        if (b > p.num_entries) continue;
        Entry &entry = buffers.entries[sorts && b < problem.batch ? places[b] : b];
        entry.sequence = {};
        if (b < p.num_entries) entry.sequence = {0, begins[0], sa_max(q_end - begins[0], 0), begins[1], sa_max(k_end - begins[1], 0)};
        entry.first_tile = sa_packed_tiles(begins[0], p.tokens, b);
    }
    __syncthreads();
    int lanes = kRoundsLanes; // of a sequence
    while (lanes > 1 && lanes * p.num_entries > static_cast<int>(blockDim.x)) lanes /= 2;
    for (int64_t base = 0; base < p.num_entries; base += blockDim.x / lanes) {
        const int64_t b = base + threadIdx.x / lanes;
        const sa_sequence sequence = b < p.num_entries ? buffers.entries[b].sequence : sa_sequence{};
        const int rounds = rounds_by_lanes(band_of(args, sequence, b >= problem.batch), p, C::kKeys, lanes);
        if (b < p.num_entries && threadIdx.x % lanes == 0) buffers.entries[b].chains.rounds = rounds;
    }
    __syncthreads();
    enum { kUses, kTerms, kCarries, kBlocks, kPlaces, kChains, kSums };
    int64_t all[kSums] = {}, all_items[2] = {};
    int2 last = {}; // number and waves of the sequence before the first thread's
    for (int64_t base = 0; base <= p.num_entries; base += blockDim.x) {
        const int64_t b = base + threadIdx.x;
        const bool exists = b <= p.num_entries;
        Entry entry = {};
        int rounds = 1;
        if (exists) entry.sequence = buffers.entries[b].sequence, entry.first_tile = buffers.entries[b].first_tile;
        if (b < p.num_entries) rounds = buffers.entries[b].chains.rounds;
        const sa_band band = band_of(args, entry.sequence, b >= problem.batch);
        const sa_chains chains = entry.chains = sa_chains_of(&band, p.tokens, C::kKeys, &p.room, rounds);
        const bool is_apart = p.num_places && sa_is_apart(&chains);
        const int64_t own[kSums] = {static_cast<int64_t>(chains.count) * chains.uses, sa_num_chain_items(&chains),
                static_cast<int64_t>(sa_num_carries(&chains)) * (chains.is_long ? 1 : chains.heads), chains.blocks,
                is_apart ? sa_num_places(&chains) : 0, chains.count};
        int64_t end[kSums];
        for (int i = 0; i < kSums; i++) end[i] = own[i];
        block_scan<0>(end, all);
        const auto begin = [&](int i) { return end[i] - own[i]; };
        entry.first_use = begin(kUses);
        entry.first_term = begin(kTerms);
        entry.first_carry = begin(kCarries);
        entry.first_block = static_cast<int>(begin(kBlocks));
        // One that finds no room leaves none to those behind it.
        entry.first_place = is_apart && end[kPlaces] <= p.num_places ? begin(kPlaces) : -1;
        entry.waves = sa_may_be_beside(&chains, &p.room) ? sa_waves_beside(&chains) : 0;
        numbers[threadIdx.x] = {sa_number_beside(&p.room, end[kUses]), entry.waves};
        __syncthreads();
        const int2 number = numbers[threadIdx.x], before = threadIdx.x ? numbers[threadIdx.x - 1] : last;
        last = numbers[blockDim.x - 1]; // scans come before the next pass writes it
        const bool is_beside = entry.waves && number.x == before.x && number.y == before.y;
        const int64_t own_items = entry.waves ? own[kChains] * entry.waves : own[kTerms];
        int64_t items[2] = {is_beside ? 0 : begin(kChains), own_items}; // the first: chains before those that are side by side
        block_scan<1>(items, all_items);
        entry.first_chain = entry.waves ? static_cast<int>(begin(kChains) - items[0]) : 0;
        entry.first_item = items[1] - own_items - static_cast<int64_t>(entry.first_chain) * entry.waves;
        if (exists) buffers.entries[b] = entry;
    }
}

// The last of so many entries for which this holds, as it does for all before it.
template <class Holds> __device__ __forceinline__ int64_t last_entry(int64_t count, const Holds &holds) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (holds(middle))
            low = middle;
        else
            high = middle;
    }
    return low;
}

// The entry of item n, num_entries past the end, and its number there; -1 for one before the entry's first wave.
struct Found {
    int64_t entry, item;
};

__device__ __forceinline__ Found find_item(const Entry *entries, int64_t num_entries, int64_t n) {
    const int64_t last = last_entry(num_entries + 1, [&](int64_t e) { return entries[e].first_item <= n; }),
                  first_item = entries[last].first_item;
    const int waves = entries[last].waves;
    if (!waves) return {last, n - first_item};
    const int64_t chains = entries[last].first_chain + entries[last].chains.count, wave = (n - first_item) / chains,
                  chain = n - first_item - wave * chains;
    const auto begins_by = [&](int64_t e) { return entries[e].first_item < first_item || entries[e].first_chain <= chain; };
    const int64_t e = last_entry(last + 1, begins_by);
    return {e, sa_item_beside(&entries[e].chains, waves, static_cast<int>(wave), static_cast<int>(chain) - entries[e].first_chain)};
}

static_assert(sizeof(Entry) == SA_BWD_SM90_ENTRY_BYTES && sizeof(Item) == SA_BWD_SM90_ITEM_BYTES &&
                      sizeof(TileSum) == SA_BWD_SM90_TILE_SUM_BYTES && sizeof(KeySum) == SA_BWD_SM90_KEY_SUM_BYTES,
        "as the planner counts them");

// Float4s of a carry, the sums of a block's dK and dV, that a math warpgroup holds.
template <class C> constexpr int kHalfCarry = C::kKeys * C::kHeadDim / 4;

// The sum of a block's dK and dV whose items leave theirs at places: over rounds, later rows first. An item that has all writes it.
template <class C>
__device__ __forceinline__ KeySum key_sum_of(const sinkattn_bwd_args &args, const BwdProblem &p, const BwdBuffers &buffers,
        const Entry &entry, const sa_band &band, const sa_chains &chains, int64_t first_place, int head, int kv_head, int block) {
    constexpr int64_t kCarry = 2 * kHalfCarry<C>;
    const int key = block * C::kKeys;
    const sa_range rounds =
            sa_rounds_seeing(&chains, sa_keys_rows(&band, {key, sa_first(key + C::kKeys, band.k_len)}), p.tokens, chains.round_tiles);
    const int count = max(static_cast<int>(rounds.end - rounds.begin), 1); // that of a block that no row sees has zeros
    const int64_t place = p.places_at + first_place + sa_place_of(&chains, head, count - 1, block);
    const auto at = [&](const sinkattn_tensor &to) {
        return static_cast<uint16_t *>(to.data) + sa_offset(&to, entry.sequence.batch, entry.sequence.k_begin + key, kv_head);
    };
    return {reinterpret_cast<const float4 *>(buffers.carries) + place * kCarry, -kCarry * chains.blocks * chains.heads, at(args.dk),
            at(args.dv), count == 1 && p.slices == 1 ? 0 : count, band.k_len - key};
}

template <class C>
__device__ __forceinline__ void write_item(const sinkattn_bwd_args &args, const BwdProblem &p, const BwdBuffers &buffers, int64_t n) {
    const bool is_packed = args.fwd.problem.packed;
    const Found found = is_packed ? find_item(buffers.entries, p.num_entries, n) : Found{0, n};
    const int64_t e = found.entry;
    if (e >= p.num_entries) return;
    if (found.item < 0) {
        buffers.items[n].exists = false;
        return;
    }
    const Entry entry = entry_of(args, p, buffers, e);
    const sa_band band = band_of(args, entry.sequence, is_packed && e == p.num_entries - 1);
    const sa_chains &chains = entry.chains;
    const auto all = static_cast<int32_t>(sa_num_chain_items(&chains)); // the launcher has refused more
    if (!is_packed) {
        if (n == 0) buffers.entries[p.num_entries] = {{}, 0, 0, all, 0, all, -1, chains.blocks * p.room.copies, 0, 0, {}};
        if (n >= all) return;
    }
    const sa_chain_item own = sa_chain_item_of(&chains, &band, p.tokens, C::kKeys, static_cast<int32_t>(found.item));
    const int copy = own.head / p.room.num_heads, slice = own.head - copy * p.room.num_heads;
    const Entry of_copy = entry_of(args, p, buffers, e + copy);
    const sa_sequence sequence = of_copy.sequence;
    Item item = {};
    item.exists = own.exists;
    item.batch = static_cast<int>(sequence.batch);
    item.q_begin = static_cast<int>(sequence.q_begin);
    item.k_begin = static_cast<int>(sequence.k_begin);
    item.slice = slice;
    item.key = own.block * C::kKeys;
    item.band = band;
    item.tiles = own.tiles;
    item.first_tile = static_cast<int>(p.room.num_heads * of_copy.first_tile) + slice * chains.tiles;
    item.use = static_cast<int>(entry.first_use) + own.use;
    item.step = own.step;
    item.idle_use = static_cast<int>(entry.first_use) + own.idle_use;
    item.idle = own.idle;
    item.blind = chains.blind;
    item.round_tiles = own.round_tiles;
    item.part = own.part;
    item.num_parts = own.num_parts;
    item.carry = -1;
    item.carry_turn = 0;
    if (entry.first_place >= 0 && own.num_parts) {
        item.carry = -2 - static_cast<int>(entry.first_place) - sa_place_of(&chains, own.head, own.num_parts - 1 - own.part, own.block);
    } else if (entry.first_place < 0 && own.block < sa_num_carries(&chains)) {
        item.carry = static_cast<int>(entry.first_carry) + (chains.is_long ? 0 : own.head * sa_num_carries(&chains)) + own.block;
        item.carry_turn = (chains.is_long ? own.head * own.num_parts : 0) + own.part;
    }
    const auto kv_heads = static_cast<int>(args.fwd.problem.num_kv_heads); // the last carries are those between slices
    const int kv_head = slice / p.slices, nth_block = (of_copy.first_block + copy * chains.blocks + own.block) * kv_heads + kv_head;
    item.slice_carry = static_cast<int>(p.num_carries) - 1 - nth_block;
    if (p.num_places && own.part == 0 && own.num_parts > 0 && slice % p.slices == 0) {
        KeySum &sum = buffers.key_sums[nth_block];
        sum = {};
        if (entry.first_place >= 0)
            sum = key_sum_of<C>(args, p, buffers, of_copy, band, chains, entry.first_place, own.head, kv_head, own.block);
    }
    item.nth = static_cast<int>(entry.first_term) / p.room.num_heads + copy * (all / chains.heads) + own.nth;
    const sa_range keys = {item.key, sa_first(item.key + C::kKeys, band.k_len)};
    item.finish_end = sa_row_tiles_before(&item.tiles, &band, keys, p.tokens);
    if (p.parts) {
        item.finish_end = -p.parts;
        item.use = item.first_tile * p.parts;
        item.step = item.idle = 0;
    }
    item.tiles.full_begin = item.tiles.full_end = 0;
    if (keys.end - keys.begin == C::kKeys) {
        const sa_range full = sa_row_tiles_full(&band, keys, p.tokens);
        item.tiles.full_begin = full.begin;
        item.tiles.full_end = full.end;
    }
    if (item.has_tiles()) {
        item.round_end = item.tiles.end;
        item.round_begin = max(sa_round_begin(item.blind, item.round_tiles, item.round_end), item.tiles.begin);
    }
    buffers.items[n] = item;
    if (item.exists || !buffers.row_terms) return;
    for (int i = 0; i < 2 * p.heads_of(slice); i++)
        buffers.key_terms[((slice * p.group + i / 2) * p.num_items + item.nth) * 2 + i % 2] = 0.0f;
}

// By the n-th block behind those of row tiles: an item a thread, and what the items begin with.
template <class C>
__device__ __forceinline__ void begin_items(const sinkattn_bwd_args &args, const BwdProblem &p, const BwdBuffers &buffers, int n) {
    wait_for_previous_kernel(); // the table
    const int item = n * 128 + static_cast<int>(threadIdx.x), all = (static_cast<int>(gridDim.x - blockIdx.x) + n) * 128;
    if (item == 0) *buffers.counter = 0;
    for (int i = item; i < C::kParts * p.room.num_slots; i += all) buffers.turns[i] = 0;
    for (int64_t i = item; i < p.num_carries; i += all) buffers.carry_turns[i] = 0;
    write_item<C>(args, p, buffers, item);
}

} // namespace sa::bwd_sm90
