// SPDX-License-Identifier: Apache-2.0
//
// Backward for every mask on sm_90, head_dim up to 128.
//
//     table   one block: where each sequence's tiles and items begin
//     rows    lse and g - delta of every row; rows without keys are finished here
//     keys    a block owns 128 keys and meets the rows that see them:
//         loader warp   K and V | Q, dO and stats of a tile of rows | ...          by TMA
//         math groups   S = K Q^T, dP = V dO^T, P, dS;   dV += P dO,  dQ = dS^T K,  dK += dS Q       64 keys a group
//         adder warp    dQ of the tile, added in fp32 to what the keys before left of it
//     sink    ds_aux of a head from its rows' terms
//
// A tile of rows is tokens x the heads of a group. Its dQ is the sum over key blocks, in ascending order: each waits for its turn at the
// tile's slot of a ring of fp32 tiles; the first stores, the last rounds the sum to dq and frees the slot. Blocks take items in order, keys
// ascending, and walk rows down, so that a turn is one of an item taken before, and all but the first wait little.
//
// 0 * NaN is not 0: in tiles that need a mask, what is not finite in Q and dO becomes 0, and NaN comes back by way of lse and g - delta; in
// K it becomes 0 in every tile, and NaN comes back by way of V.

#include "cuda/attn/bwd_workspace.cuh"
#include "cuda/attn/unfinite.cuh"
#include "cuda/tensor_map.cuh"

namespace sa {
namespace {

template <class Element_, int kHeadDim_, int kRows_, int kKeys_> struct Config {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kRows = kRows_, kKeys = kKeys_;
    static constexpr int kHalves = kHeadDim / 64; // of a row, 64 columns each, apart in shared memory
    static constexpr int kRowHalf = kRows * kRowBytes, kKeyHalf = kKeys * kRowBytes;
    static constexpr int kThreads = 384, kMathThreads = 256, kMathWarps = kMathThreads / 32;
    static constexpr int kStages = 2, kSums = 2;                 // of rows; of dQ on its way out
    static constexpr int kTileFloats = kRows * kHeadDim + kRows; // dQ and the rows' sums of P dP
    static constexpr int kLoaderRegisters = 24, kMathRegisters = 240;
    static_assert(kKeys == 128, "two math groups of 64 keys");
    static_assert(kRows / 64 * kHalves == 2, "a math group gets 64 x 64 of dQ");
};

// One sequence, in the order of work; what begins before it, a kv head.
struct Entry {
    sa_sequence sequence;
    int64_t first_tile, first_slot, first_item, first_carry;
    bool has_sink;
};

struct Problem {
    int64_t num_entries, num_slots, num_carries;
    bool is_local;     // a window, of whose tiles each item's fit the slots
    int group, tokens; // heads and tokens of a tile of rows
    float scale, scale_log2;
};

struct Buffers {
    Entry *entries; // num_entries, and where the last ends
    unsigned long long *counter, *turns, *carry_turns;
    float *stats; // of each tile kRows lse in log2 units, 0 where there is nothing to normalise, and kRows g - delta
    float *slots, *carries, *terms;
};

struct Maps {
    CUtensorMap q, k, v, dout;
};

// A key block and the tiles of rows that see some of it.
struct Item {
    sa_sequence sequence;
    sa_band band;
    int64_t kv_head, first_stats;
    int64_t first_place;                  // of the last tile
    int key, q_len, num_sink;             // as the band has them
    int begin, end, full_begin, full_end; // tiles of rows; those that need no mask
    int finish_end;                       // tiles before it have no later key block
    bool exists, descending;
    int num_rounds, nth_round; // of the tiles that these keys meet, as the slots allow; dK and dV are summed over them
    int64_t carry;
    unsigned long long carry_turn;
};

template <class C> struct alignas(16) RowStats {
    float lse[C::kRows], bias[C::kRows];
};

template <class C> struct Smem {
    alignas(1024) unsigned char keys[C::kHalves * C::kKeyHalf], values[C::kHalves * C::kKeyHalf];
    alignas(1024) unsigned char queries[C::kStages][C::kHalves * C::kRowHalf], douts[C::kStages][C::kHalves * C::kRowHalf];
    alignas(1024) unsigned char ds[C::kRows / 64][C::kKeys * kRowBytes]; // keys x 64 rows
    alignas(128) float dq[C::kSums][C::kTileFloats];
    RowStats<C> stats[C::kStages];
    float sums[C::kMathWarps][C::kRows];
    int64_t dq_offset[C::kRows]; // of a tile's rows from its first
    int token[C::kRows];
    Item items[2];
    bool poisoned[C::kKeys], hides; // keys that were not finite; whether some dO was
    bool finish_alone;              // nothing was added before to the tile to be finished
    uint64_t item_full[2], item_empty[2], kv_full, kv_empty, rows_full[C::kStages], rows_empty[C::kStages];
    uint64_t dq_full[C::kSums], dq_empty[C::kSums], finish_full;
};

__device__ __forceinline__ int64_t num_tiles_of(const sa_sequence &sequence, int tokens) { return sa_ceil_div(sequence.q_len, tokens); }

// Tiles of rows before the first row that sees a key.
__device__ __forceinline__ int64_t num_blind_tiles(const sa_sequence &sequence, const sa_band &band, int tokens) {
    const int64_t row = sa_first_seeing_row(&band);
    return row < sequence.q_len ? row / tokens : num_tiles_of(sequence, tokens);
}

// A tile's slot is free when the tile so many places before is finished, by an item before: a sequence of more tiles comes in rounds, later
// tiles first, but for a window, where that holds anyway. Rounds are the same in a pack, as dK and dV are summed over them.
constexpr int64_t kSlotsBytes = 36 << 20, kPackedSlotsBytes = 64 << 20, kRoundBytes = 20 << 20;
template <class C> constexpr int64_t kMostTiles = kSlotsBytes / (4 * C::kTileFloats);
template <class C> constexpr int64_t kRoundTiles = kRoundBytes / (4 * C::kTileFloats);

template <class C> __device__ __forceinline__ int64_t num_rounds_of(int64_t tiles, const Problem &p) {
    return p.is_local || tiles <= kMostTiles<C> ? 1 : sa_ceil_div(tiles, kRoundTiles<C>);
}

// ---- table ----

template <class T, class Join> __device__ __forceinline__ T warp_scan(T x, const Join &join) {
    for (int distance = 1; distance < 32; distance *= 2) {
        const T before = __shfl_up_sync(0xffffffffu, x, distance);
        if (static_cast<int>(threadIdx.x % 32) >= distance) x = join(x, before);
    }
    return x;
}

template <class C>
__global__ __launch_bounds__(1024) void table_kernel(const __grid_constant__ sinkattn_bwd_args args, Problem p, Buffers buffers,
                                                     unsigned *error_word) {
    check_lengths(args.fwd, error_word);
    const sinkattn_problem &problem = args.fwd.problem;
    for (int64_t i = threadIdx.x; i < p.num_slots; i += blockDim.x) buffers.turns[i] = 0;
    for (int64_t i = threadIdx.x; i < p.num_carries; i += blockDim.x) buffers.carry_turns[i] = 0;
    if (threadIdx.x >= 32) return;
    if (threadIdx.x == 0) *buffers.counter = 0;
    const auto most = [](int64_t a, int64_t b) { return sa_max(a, b); };
    const auto sum = [](int64_t a, int64_t b) { return a + b; };
    const auto last = [](int64_t x) { return __shfl_sync(0xffffffffu, x, 31); };
    int64_t q_end = 0, k_end = 0, tiles = 0, slots = 0, items = 0, carries = 0;
    for (int64_t base = 0; base <= p.num_entries; base += 32) {
        const int64_t b = base + threadIdx.x;
        Entry entry = {};
        if (problem.packed) { // offsets that decrease are raised: sequences are disjoint, whatever the offsets hold
            const int64_t x = sa_min(b + 1, problem.batch), q = b < problem.batch ? args.fwd.cu_seqlens_q[x] : problem.q_len,
                          k = b < problem.batch ? args.fwd.cu_seqlens_k[x] : problem.k_len;
            const int64_t q_top = sa_max(q_end, warp_scan(sa_clamp(q, 0, problem.q_len), most)),
                          k_top = sa_max(k_end, warp_scan(sa_clamp(k, 0, problem.k_len), most));
            int64_t q_before = __shfl_up_sync(0xffffffffu, q_top, 1), k_before = __shfl_up_sync(0xffffffffu, k_top, 1);
            if (threadIdx.x == 0) q_before = q_end, k_before = k_end;
            entry.sequence = {0, q_before, q_top - q_before, k_before, k_top - k_before};
            q_end = last(q_top);
            k_end = last(k_top);
        } else if (b < problem.batch) {
            entry.sequence = sa_sequence_at(&args.fwd, b);
        }
        entry.has_sink = args.fwd.s_aux && b < problem.batch;
        if (b > p.num_entries - 1) entry.sequence = {};
        const bool is_tail = b >= problem.batch; // its rows see no keys, its keys are seen by none
        sa_sequence seen = entry.sequence;
        if (is_tail) seen.k_len = 0;
        const sa_band band = sa_band_of(&problem.mask, seen.q_len, seen.k_len);
        const int64_t own_tiles = num_tiles_of(seen, p.tokens), own_slots = own_tiles - num_blind_tiles(seen, band, p.tokens),
                      own_blocks = sa_ceil_div(entry.sequence.k_len, C::kKeys), own_rounds = is_tail ? 1 : num_rounds_of<C>(own_tiles, p),
                      own_items = own_blocks * own_rounds, own_carries = own_rounds > 1 ? own_blocks : 0;
        const int64_t tiles_to = tiles + warp_scan(own_tiles, sum), slots_to = slots + warp_scan(own_slots, sum),
                      items_to = items + warp_scan(own_items, sum), carries_to = carries + warp_scan(own_carries, sum);
        entry.first_tile = tiles_to - own_tiles;
        entry.first_slot = slots_to - own_slots;
        entry.first_item = items_to - own_items;
        entry.first_carry = carries_to - own_carries;
        if (b <= p.num_entries) buffers.entries[b] = entry;
        tiles = last(tiles_to);
        slots = last(slots_to);
        items = last(items_to);
        carries = last(carries_to);
    }
}

// The last entry whose `first` is at most n, a kv head; num_entries past the end.
__device__ __forceinline__ int64_t find_entry(const Entry *entries, int64_t num_entries, int64_t Entry::*first, int64_t n) {
    int64_t low = 0, high = num_entries + 1;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (entries[middle].*first <= n)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// ---- rows ----

template <class C>
__global__ __launch_bounds__(128) void rows_kernel(const __grid_constant__ sinkattn_bwd_args args, Problem p, Buffers buffers) {
    constexpr int kLanes = C::kHeadDim / 8, kStep = 128 / kLanes, kSteps = C::kRows / kStep;
    __shared__ float deltas[C::kRows];
    const int64_t heads = args.fwd.problem.num_kv_heads, n = blockIdx.x;
    const int64_t e = find_entry(buffers.entries, p.num_entries, &Entry::first_tile, n / heads);
    if (e >= p.num_entries) return;
    const Entry &entry = buffers.entries[e];
    const sa_sequence sequence = entry.sequence;
    const bool is_tail = args.fwd.problem.packed && e == p.num_entries - 1;
    const int64_t tiles = num_tiles_of(sequence, p.tokens), local = n - heads * entry.first_tile, kv_head = local / tiles,
                  t = local % tiles;
    const int64_t first = t * p.tokens;
    const sa_band band = sa_band_of(&args.fwd.problem.mask, sequence.q_len, is_tail ? 0 : sequence.k_len);
    const bool blind = is_tail || t < num_blind_tiles(sequence, band, p.tokens);
    const auto is_real = [&](int row) { return row < p.tokens * p.group && first + row / p.group < sequence.q_len; };
    const auto offset = [&](const sinkattn_tensor &tensor, int row) {
        return sa_offset(&tensor, sequence.batch, sequence.q_begin + first + row / p.group, kv_head * p.group + row % p.group);
    };
    const int column = threadIdx.x % kLanes * 8;
    uint4 out[kSteps] = {}, dout[kSteps] = {};
#pragma unroll
    for (int i = 0; i < kSteps; i++) {
        const int row = i * kStep + threadIdx.x / kLanes;
        if (!is_real(row) || column >= args.fwd.problem.head_dim) continue;
        out[i] = *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(args.fwd.out.data) + offset(args.fwd.out, row) + column);
        dout[i] = *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(args.dout.data) + offset(args.dout, row) + column);
        if (blind) *reinterpret_cast<uint4 *>(static_cast<uint16_t *>(args.dq.data) + offset(args.dq, row) + column) = uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kSteps; i++) {
        float delta = dot<typename C::Element>(out[i], dout[i]);
#pragma unroll
        for (int x = kLanes / 2; x > 0; x /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, x);
        if (threadIdx.x % kLanes == 0) deltas[i * kStep + threadIdx.x / kLanes] = delta;
    }
    __syncthreads();
    const int row = threadIdx.x;
    if (row >= C::kRows) return;
    float lse = 0.0f, bias = 0.0f;
    if (is_real(row)) {
        const int64_t head = kv_head * p.group + row % p.group,
                      at = sa_row_index(&args.fwd.problem, &sequence, head, first + row / p.group);
        const float found = static_cast<const float *>(args.fwd.lse)[at], g = args.dlse ? static_cast<const float *>(args.dlse)[at] : 0.0f;
        lse = found == -INFINITY ? 0.0f : found * kLog2e;
        bias = g - deltas[row];
        if (buffers.terms) { // the factor p_sink of rows that see keys
            const float p_sink = entry.has_sink ? static_cast<float>(sa_exp_minus(sa_s_aux(&args.fwd, head), found)) : 0.0f;
            buffers.terms[at] = !blind ? p_sink : entry.has_sink ? p_sink * g : 0.0f;
        }
    }
    float *stats = buffers.stats + n * 2 * C::kRows;
    stats[row] = lse;
    stats[C::kRows + row] = bias;
}

// ---- keys ----

template <class C>
__device__ __forceinline__ void find_item(Item &item, const sinkattn_bwd_args &args, const Problem &p, const Buffers &buffers) {
    const int64_t heads = args.fwd.problem.num_kv_heads, n = static_cast<int64_t>(atomicAdd(buffers.counter, 1ull));
    const int64_t e = find_entry(buffers.entries, p.num_entries, &Entry::first_item, n / heads);
    item.exists = e < p.num_entries;
    if (!item.exists) return;
    const Entry &entry = buffers.entries[e];
    const sa_sequence sequence = entry.sequence;
    const bool is_tail = args.fwd.problem.packed && e == p.num_entries - 1;
    const int64_t local = n - heads * entry.first_item, blocks = sa_ceil_div(sequence.k_len, C::kKeys), block = local % blocks;
    const int64_t tiles = num_tiles_of(sequence, p.tokens), rounds = is_tail ? 1 : num_rounds_of<C>(tiles, p),
                  nth_round = local / blocks % rounds;
    item.sequence = sequence;
    item.kv_head = local / blocks / rounds;
    item.num_rounds = static_cast<int>(rounds);
    item.nth_round = static_cast<int>(nth_round);
    item.carry = entry.first_carry + block;
    item.carry_turn = static_cast<unsigned long long>(item.kv_head * rounds + nth_round);
    item.key = static_cast<int>(block * C::kKeys);
    item.begin = item.end = item.finish_end = item.full_begin = item.full_end = 0;
    const sa_band band = sa_band_of(&args.fwd.problem.mask, is_tail ? 0 : sequence.q_len, sequence.k_len);
    item.band = band;
    if (is_tail || !sequence.q_len) return;
    const sa_range keys = {item.key, static_cast<sa_position_t>(sa_min(item.key + C::kKeys, sequence.k_len))},
                   rows = sa_keys_rows(&band, keys);
    const int64_t blind = num_blind_tiles(sequence, band, p.tokens), slots = tiles - blind;
    item.first_stats = heads * entry.first_tile + item.kv_head * tiles;
    item.descending = !p.is_local || slots <= p.num_slots;
    item.q_len = static_cast<int>(band.q_len);
    item.num_sink = static_cast<int>(band.num_sink);
    if (rows.begin >= rows.end) return;
    const int64_t first = (rounds - 1 - nth_round) * kRoundTiles<C>, past = rounds == 1 ? tiles : first + kRoundTiles<C>;
    item.begin = static_cast<int>(sa_max(rows.begin / p.tokens, first));
    item.end = static_cast<int>(sa_min(sa_ceil_div(rows.end, p.tokens), past));
    if (item.begin >= item.end) {
        item.begin = item.end = 0;
        return;
    }
    const int64_t nth = item.descending ? tiles - item.end : item.end - 1 - blind;
    item.first_place = heads * entry.first_slot + item.kv_head * slots + nth;
    const int64_t reach = sa_last_row_before(&band, keys.end - 1); // the last row whose last key lies here or before
    item.finish_end =
        keys.end == sequence.k_len || reach >= sequence.q_len - 1 ? item.end : static_cast<int>(sa_max(reach + 1, 0) / p.tokens);
    if (keys.end - keys.begin < C::kKeys) return;
    // The last key is seen latest; the first beyond the sink tokens is lost from sight first.
    const sa_position_t past_sink = sa_clamp(band.num_sink, keys.begin, keys.end - 1);
    item.full_begin = static_cast<int>(sa_ceil_div(sa_keys_rows(&band, {keys.end - 1, keys.end}).begin, p.tokens));
    item.full_end = static_cast<int>(sa_keys_rows(&band, {past_sink, past_sink + 1}).end / p.tokens);
}

// Where a tile's dQ is summed, from the item's last tile to its first: a slot, and how many tiles had it before.
struct Place {
    int slot;
    unsigned generation;

    __device__ __forceinline__ void advance(bool descending, int num_slots) {
        slot += descending ? 1 : -1;
        if (slot == num_slots) slot = 0, generation++;
        if (slot < 0) slot = num_slots - 1, generation--;
    }
};

// How many key blocks before this one see the tile: of sinks, and from that of the first row's first key on.
template <class C> __device__ __forceinline__ int find_turn(const Item &item, const Problem &p, int t) {
    const int first = t * p.tokens, last = min(first + p.tokens, item.q_len) - 1;
    const int begin = sa_row_band(&item.band, first).begin, end = sa_row_band(&item.band, last).end;
    const int sinks = (min(min(item.num_sink, end), begin) + C::kKeys - 1) / C::kKeys, block = item.key / C::kKeys;
    return block < sinks ? block : sinks + block - max(begin / C::kKeys, sinks);
}

__device__ __forceinline__ unsigned long long turn_value(unsigned generation, unsigned turn) {
    return static_cast<unsigned long long>(generation) << 32 | turn;
}

__device__ __forceinline__ void wait_for_turn(const unsigned long long *turns, unsigned long long value) {
    while (load_acquire(turns) != value) {
    }
}

template <class C>
__device__ __forceinline__ void load_tiles(Smem<C> &smem, const sinkattn_bwd_args &args, const Maps &maps, const Problem &p,
                                           const Buffers &buffers) {
    Ring<C::kStages> ring;
    for (Ring<2> items;; items.n++) {
        Item &item = smem.items[items.place()];
        barrier_wait(&smem.item_empty[items.place()], items.phase() ^ 1);
        find_item<C>(item, args, p, buffers);
        barrier_arrive(&smem.item_full[items.place()]);
        if (!item.exists) return;
        const int head = static_cast<int>(item.kv_head), batch = static_cast<int>(item.sequence.batch);
        barrier_wait(&smem.kv_empty, (items.n & 1) ^ 1);
        barrier_arrive_expect(&smem.kv_full, 2 * C::kHalves * C::kKeyHalf);
        for (int half = 0; half < C::kHalves; half++) {
            const int key = static_cast<int>(item.sequence.k_begin + item.key);
            tensor_load(smem.keys + half * C::kKeyHalf, &maps.k, &smem.kv_full, 64 * half, head, key, batch);
            tensor_load(smem.values + half * C::kKeyHalf, &maps.v, &smem.kv_full, 64 * half, head, key, batch);
        }
        for (int t = item.end - 1; t >= item.begin; t--, ring.n++) {
            uint64_t *full = &smem.rows_full[ring.place()];
            barrier_wait(&smem.rows_empty[ring.place()], ring.phase() ^ 1);
            barrier_arrive_expect(full, 2 * C::kHalves * p.tokens * p.group * kRowBytes + sizeof(RowStats<C>));
            const int row = static_cast<int>(item.sequence.q_begin) + t * p.tokens;
            for (int half = 0; half < C::kHalves; half++) {
                tensor_load(smem.queries[ring.place()] + half * C::kRowHalf, &maps.q, full, 64 * half, head * p.group, row, batch);
                tensor_load(smem.douts[ring.place()] + half * C::kRowHalf, &maps.dout, full, 64 * half, head * p.group, row, batch);
            }
            bulk_load(&smem.stats[ring.place()], buffers.stats + (item.first_stats + t) * 2 * C::kRows, sizeof(RowStats<C>), full);
        }
    }
}

template <class C> __device__ __forceinline__ void add_tiles(Smem<C> &smem, const Problem &p, const Buffers &buffers) {
    Ring<C::kSums> ring;
    for (Ring<2> items;; items.n++) {
        const Item &item = smem.items[items.place()];
        barrier_wait(&smem.item_full[items.place()], items.phase());
        if (!item.exists) return;
        if (item.begin == item.end) {
            barrier_arrive(&smem.item_empty[items.place()]);
            continue;
        }
        const int num_slots = static_cast<int>(p.num_slots);
        Place place = {static_cast<int>(item.first_place % num_slots), static_cast<unsigned>(item.first_place / num_slots)};
        for (int t = item.end - 1; t >= item.begin; t--, ring.n++, place.advance(item.descending, num_slots)) {
            const int turn = find_turn<C>(item, p, t), slot = place.slot;
            const unsigned long long value = turn_value(place.generation, turn);
            if (t < item.finish_end) {
                wait_for_turn(buffers.turns + slot, value);
                smem.finish_alone = turn == 0;
                if (turn == 0) {
                    barrier_arrive(&smem.finish_full);
                } else {
                    barrier_arrive_expect(&smem.finish_full, C::kTileFloats * sizeof(float));
                    bulk_load(smem.dq[ring.place()], buffers.slots + static_cast<int64_t>(slot) * C::kTileFloats,
                              C::kTileFloats * sizeof(float), &smem.finish_full);
                }
                barrier_wait(&smem.dq_full[ring.place()], ring.phase()); // the slot has been read
                store_release(buffers.turns + slot, turn_value(place.generation + 1, 0));
            } else {
                float *to = buffers.slots + static_cast<int64_t>(slot) * C::kTileFloats;
                wait_for_turn(buffers.turns + slot, value);
                barrier_wait(&smem.dq_full[ring.place()], ring.phase());
                if (turn == 0)
                    bulk_store(to, smem.dq[ring.place()], C::kTileFloats * sizeof(float));
                else
                    bulk_add(to, smem.dq[ring.place()], C::kTileFloats * sizeof(float));
                store_commit();
                store_wait();
                store_release(buffers.turns + slot, value + 1);
            }
            barrier_arrive(&smem.dq_empty[ring.place()]);
        }
        barrier_arrive(&smem.item_empty[items.place()]);
    }
}

// A thread's two keys, and the rows that see each: tokens [begin, end).
struct ThreadKeys {
    int begin[2], end[2];
};

__device__ __forceinline__ int thread_row(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i; }

template <class C> __device__ __forceinline__ ThreadKeys find_thread_keys(const Item &item, int math_group) {
    ThreadKeys keys;
    for (int r = 0; r < 2; r++) {
        const int key = item.key + 64 * math_group + thread_row(r);
        const sa_range rows = key < item.sequence.k_len ? sa_keys_rows(&item.band, {key, key + 1}) : sa_range{0, 0};
        keys.begin[r] = static_cast<int>(rows.begin);
        keys.end[r] = static_cast<int>(rows.end);
    }
    return keys;
}

// Values of rows that are not finite become 0, and bad(row) is called.
template <class C, int kHalfBytes, class Bad> __device__ __forceinline__ void zero_rows(unsigned char *tile, const Bad &bad) {
    for (int x = threadIdx.x - 128; x < C::kHalves * kHalfBytes / 16; x += C::kMathThreads)
        if (zero_unfinite<typename C::Element, 1>(tile + 16 * x, 16, 0)) bad(x % (kHalfBytes / 16) / 8);
}

template <class C> __device__ __forceinline__ void clean_keys(Smem<C> &smem) {
    const int i = threadIdx.x - 128;
    if (i < C::kKeys) smem.poisoned[i] = false;
    if (i == 0) smem.hides = false;
    bar_sync<C::kMathThreads>(1);
    zero_rows<C, C::kKeyHalf>(smem.keys, [&](int key) {
        smem.poisoned[key] = true;
        *reinterpret_cast<uint16_t *>(smem.values + key * kRowBytes + ((key & 7) << 4)) = 0x7fff;
    });
    async_fence();
    bar_sync<C::kMathThreads>(1);
}

// dS gets what was in dO from g - delta, dV at the end of the item.
template <class C> __device__ __forceinline__ void clean_rows(Smem<C> &smem, int stage) {
    zero_rows<C, C::kRowHalf>(smem.queries[stage], [&](int row) { smem.stats[stage].lse[row] = NAN; });
    zero_rows<C, C::kRowHalf>(smem.douts[stage], [&](int) { smem.hides = true; });
    async_fence();
    bar_sync<C::kMathThreads>(1);
}

// d = a b^T, a from row 64 * math_group on.
template <class C> __device__ __forceinline__ void product_abt(float (&d)[C::kRows / 2], uint32_t a, uint32_t b) {
    const uint64_t left = operand(a, 0), right = operand(b, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kHeadDim / 16; step++)
        wgmma_shared<typename C::Element>(d, operand_at(left, step / 4 * C::kKeyHalf + step % 4 * 32),
                                          operand_at(right, step / 4 * C::kRowHalf + step % 4 * 32), step > 0);
    wgmma_commit();
}

// d += p b, p as packed pairs.
template <class C>
__device__ __forceinline__ void product_pb(float (&d)[C::kHeadDim / 2], const uint32_t (&p)[C::kRows / 16][4], uint32_t b) {
    const uint64_t right = operand(b, C::kRowHalf);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kRows / 16; step++)
        wgmma_registers<typename C::Element>(d, p[step], operand_at(right, step * 16 * kRowBytes), true);
    wgmma_commit();
}

template <class C> __device__ __forceinline__ void dq_product(float (&dq)[32], uint32_t ds, uint32_t keys) {
    const uint64_t left = operand(ds, 0), right = operand(keys, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; step++)
        wgmma_shared_transposed<typename C::Element>(dq, operand_at(left, step * 16 * kRowBytes), operand_at(right, step * 16 * kRowBytes),
                                                     step > 0);
    wgmma_commit();
}

template <class C> __device__ __forceinline__ void pack(uint32_t (&packed)[C::kRows / 16][4], const float (&x)[C::kRows / 2]) {
#pragma unroll
    for (int i = 0; i < C::kRows / 2; i += 2) packed[i / 8][i / 2 % 4] = pack_halves<typename C::Element>(x[i], x[i + 1]);
}

struct Seen {
    int begin[2];
    unsigned length[2];

    __device__ __forceinline__ bool operator()(int r, int column) const { return static_cast<unsigned>(column - begin[r]) < length[r]; }
};

// Of tile t, from the thread's first column.
__device__ __forceinline__ Seen find_seen(const ThreadKeys &keys, const Problem &p, int t) {
    Seen seen;
    for (int r = 0; r < 2; r++) {
        seen.begin[r] = (keys.begin[r] - t * p.tokens) * p.group - 2 * static_cast<int>(threadIdx.x % 4);
        seen.length[r] = static_cast<unsigned>((keys.end[r] - keys.begin[r]) * p.group);
    }
    return seen;
}

template <class C, bool kMasked>
__device__ __forceinline__ void find_weights(float (&s)[C::kRows / 2], const RowStats<C> &stats, const Seen &seen, float scale_log2) {
    const int column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < C::kRows / 8; n++) {
        const float2 lse = *reinterpret_cast<const float2 *>(&stats.lse[8 * n + column]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float p = exp2_approx(fmaf(s[4 * n + i], scale_log2, i % 2 ? -lse.y : -lse.x));
            s[4 * n + i] = !kMasked || seen(i / 2, 8 * n + i % 2) ? p : 0.0f;
        }
    }
}

// dp becomes dS; sums: P dP of the thread's columns.
template <class C, bool kMasked, bool kTerms>
__device__ __forceinline__ void find_ds(float (&dp)[C::kRows / 2], const float (&p)[C::kRows / 2], float (&sums)[C::kRows / 4],
                                        const RowStats<C> &stats, const Seen &seen) {
    const int column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < C::kRows / 8; n++) {
        const float2 bias = *reinterpret_cast<const float2 *>(&stats.bias[8 * n + column]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool is_seen = !kMasked || seen(i / 2, 8 * n + i % 2);
            float &x = dp[4 * n + i];
            if (kTerms) {
                const float product = is_seen ? x : 0.0f;
                sums[2 * n + i % 2] = i < 2 ? p[4 * n + i] * product : fmaf(p[4 * n + i], product, sums[2 * n + i % 2]);
            }
            x = is_seen ? p[4 * n + i] * (x + (i % 2 ? bias.y : bias.x)) : 0.0f;
        }
    }
}

// Lanes `kDistance` apart add each other's sums, and each keeps one half of them: the one from *first on.
template <int kDistance, int kHalf, int kLength> __device__ __forceinline__ void fold(float (&sums)[kLength], int &first) {
    const bool upper = threadIdx.x & kDistance;
#pragma unroll
    for (int i = 0; i < kHalf; i++) {
        const float got = __shfl_xor_sync(0xffffffffu, upper ? sums[i] : sums[i + kHalf], kDistance);
        sums[i] = (upper ? sums[i + kHalf] : sums[i]) + got;
    }
    first += upper ? kHalf : 0;
}

// Sums over the 8 lanes that hold the same columns.
template <class C> __device__ __forceinline__ void write_sums(float (&sums)[C::kRows / 4], float *to) {
    int first = 0;
    fold<16, C::kRows / 8>(sums, first);
    fold<8, C::kRows / 16>(sums, first);
    fold<4, C::kRows / 32>(sums, first);
    float2 *pairs = reinterpret_cast<float2 *>(to + first / 2 * 8 + 2 * (threadIdx.x % 4));
#pragma unroll
    for (int i = 0; i < C::kRows / 32; i += 2) pairs[2 * i] = {sums[i], sums[i + 1]};
}

template <class C> __device__ __forceinline__ void write_ds(Smem<C> &smem, const uint32_t (&ds)[C::kRows / 16][4], int math_group) {
    const int lane = threadIdx.x % 32, key = 64 * math_group + threadIdx.x % 128 / 32 * 16 + (lane & 15);
#pragma unroll
    for (int n = 0; n < C::kRows / 16; n++) {
        const int chunk = 2 * n % 8 + (lane >> 4);
        stmatrix_x4(shared_address(smem.ds[n / 4]) + key * kRowBytes + ((chunk ^ (key & 7)) << 4), ds[n]);
    }
}

// 8 lines of 16-bit pairs of the thread's row r, as whole chunks: columns column, column + 1 ... of each n, times a factor.
template <class Element, int kLength>
__device__ __forceinline__ void write_row(uint16_t *to, const float (&d)[kLength], int r, float factor, int first_column, int64_t head_dim,
                                          bool is_real) {
#pragma unroll
    for (int n = 0; n < kLength / 4; n += 4) {
        uint32_t x[4];
#pragma unroll
        for (int c = 0; c < 4; c++)
            x[c] = pack_halves<Element>(fmaf(d[4 * (n + c) + 2 * r], factor, 0.0f), fmaf(d[4 * (n + c) + 2 * r + 1], factor, 0.0f));
        quad_transpose(x);
        const int column = first_column + 8 * (n + threadIdx.x % 4);
        if (is_real && column < head_dim) *reinterpret_cast<uint4 *>(to + column) = {x[0], x[1], x[2], x[3]};
    }
}

// The tile's last part: `before` is what was added until now, and dq leaves.
template <class C>
__device__ __forceinline__ void finish_tile(float (&dq)[32], const float *before, const Smem<C> &smem, const sinkattn_bwd_args &args,
                                            const Problem &p, const Item &item, int t, int math_group) {
    const int first = t * p.tokens;
    auto *to = static_cast<uint16_t *>(args.dq.data) +
               sa_offset(&args.dq, item.sequence.batch, item.sequence.q_begin + first, item.kv_head * p.group);
    if (!smem.finish_alone) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float4 sum = reinterpret_cast<const float4 *>(before)[(math_group * 8 + i) * 128 + threadIdx.x % 128];
            dq[4 * i] += sum.x;
            dq[4 * i + 1] += sum.y;
            dq[4 * i + 2] += sum.z;
            dq[4 * i + 3] += sum.w;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = (C::kRows == 64 ? 0 : 64 * math_group) + thread_row(r);
        write_row<typename C::Element>(to + smem.dq_offset[row], dq, r, p.scale, C::kRows == 64 ? 64 * math_group : 0,
                                       args.fwd.problem.head_dim, first + smem.token[row] < item.q_len);
    }
}

// A thread's row's term of ds_aux, p_sink (g - sum of P dP): its factors are read ahead.
struct Term {
    float *at = nullptr;
    float p_sink, g;

    template <class C>
    __device__ __forceinline__ Term(const Smem<C> &smem, const sinkattn_bwd_args &args, const Problem &p, const Buffers &buffers,
                                    const Item &item, int t, int row) {
        if (row >= C::kRows || t * p.tokens + smem.token[row] >= item.q_len) return;
        const int64_t head = item.kv_head * p.group + row - smem.token[row] * p.group,
                      index = sa_row_index(&args.fwd.problem, &item.sequence, head, t * p.tokens + smem.token[row]);
        at = buffers.terms + index;
        p_sink = *at; // until now
        g = args.dlse ? static_cast<const float *>(args.dlse)[index] : 0.0f;
    }
};

template <class C, bool kTerms> struct Math {
    Smem<C> &smem;
    const sinkattn_bwd_args &args;
    const Problem &p;
    const Buffers &buffers;
    const int math_group;
    Ring<C::kStages> ring;
    Ring<C::kSums> dq_ring;
    uint32_t finished; // tiles

    template <bool kMasked>
    __device__ __forceinline__ void step(float (&dk)[C::kHeadDim / 2], float (&dv)[C::kHeadDim / 2], const Item &item,
                                         const ThreadKeys &keys, int t) {
        const uint32_t stage = __shfl_sync(0xffffffffu, ring.place(), 0); // known to be the same in a warp
        const bool lane0 = threadIdx.x % 32 == 0;
        const uint32_t own = 64 * math_group * kRowBytes;
        float s[C::kRows / 2], dp[C::kRows / 2], sums[C::kRows / 4];
        product_abt<C>(s, shared_address(smem.keys) + own, shared_address(smem.queries[stage]));
        product_abt<C>(dp, shared_address(smem.values) + own, shared_address(smem.douts[stage]));
        Seen seen;
        if (kMasked) {
            clean_rows<C>(smem, stage); // before P, dV and dK; what S and dP read of such rows makes no difference
            seen = find_seen(keys, p, t);
        }
        wgmma_wait<1>();
        computed(s);
        find_weights<C, kMasked>(s, smem.stats[stage], seen, p.scale_log2);
        uint32_t weights[C::kRows / 16][4], ds[C::kRows / 16][4];
        pack<C>(weights, s);
        wgmma_wait<0>();
        computed(dp);
        find_ds<C, kMasked, kTerms>(dp, s, sums, smem.stats[stage], seen);
        pack<C>(ds, dp);
        product_pb<C>(dv, weights, shared_address(smem.douts[stage]));
        const Ring<C::kSums> last = {dq_ring.n - 1};
        if (dq_ring.n > 0) barrier_wait(&smem.dq_full[last.place()], last.phase()); // nobody reads the last dS
        write_ds<C>(smem, ds, math_group);
        if (kTerms) write_sums<C>(sums, smem.sums[threadIdx.x / 32 - 4]);
        async_fence();
        bar_sync<C::kMathThreads>(1);
        float dq[32], *to = smem.dq[dq_ring.place()];
        dq_product<C>(dq, shared_address(smem.ds[C::kRows == 64 ? 0 : math_group]),
                      shared_address(smem.keys) + (C::kRows == 64 ? math_group * C::kKeyHalf : 0));
        product_pb<C>(dk, ds, shared_address(smem.queries[stage]));
        float *to_sums = to + C::kRows * C::kHeadDim;
        const int row = threadIdx.x - 128;
        float sum = 0.0f;
        if (kTerms && row < C::kRows) {
#pragma unroll
            for (int w = 0; w < C::kMathWarps; w++) sum += smem.sums[w][row];
        }
        if (t < item.finish_end) {
            if constexpr (kTerms) {
                const Term term(smem, args, p, buffers, item, t, row);
                barrier_wait(&smem.finish_full, finished++ & 1);
                if (term.at) *term.at = term.p_sink * (term.g - (smem.finish_alone ? sum : sum + to_sums[row]));
            } else {
                barrier_wait(&smem.finish_full, finished++ & 1);
            }
            wgmma_wait<0>();
            computed(dq);
            computed(dv);
            computed(dk);
            finish_tile<C>(dq, to, smem, args, p, item, t, math_group);
        } else {
            barrier_wait(&smem.dq_empty[dq_ring.place()], dq_ring.phase() ^ 1);
            if (kTerms && row < C::kRows) to_sums[row] = sum;
            wgmma_wait<1>();
            computed(dq);
            computed(dv);
#pragma unroll
            for (int i = 0; i < 8; i++)
                reinterpret_cast<float4 *>(to)[(math_group * 8 + i) * 128 + threadIdx.x % 128] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2],
                                                                                                  dq[4 * i + 3]};
            async_fence();
        }
        __syncwarp();
        if (lane0) barrier_arrive(&smem.dq_full[dq_ring.place()]);
        wgmma_wait<0>();
        computed(dk);
        if (lane0) barrier_arrive(&smem.rows_empty[stage]);
        ring.n++;
        dq_ring.n++;
    }

    __device__ __forceinline__ void run() {
        for (Ring<2> items;; items.n++) {
            const Item &item = smem.items[items.place()];
            barrier_wait(&smem.item_full[items.place()], items.phase());
            if (!item.exists) return;
            const ThreadKeys keys = find_thread_keys<C>(item, math_group);
            float dk[C::kHeadDim / 2], dv[C::kHeadDim / 2];
#pragma unroll
            for (int i = 0; i < C::kHeadDim / 2; i++) dk[i] = dv[i] = 0.0f;
            barrier_wait(&smem.kv_full, items.n & 1);
            clean_keys<C>(smem);
            for (int t = item.end - 1; t >= item.begin; t--) {
                barrier_wait(&smem.rows_full[ring.place()], ring.phase());
                if (t >= item.full_begin && t < item.full_end)
                    step<false>(dk, dv, item, keys, t);
                else
                    step<true>(dk, dv, item, keys, t);
            }
            if (threadIdx.x % 32 == 0) barrier_arrive(&smem.kv_empty);
            if (smem.hides) add_hidden(dv, item, keys);
            if (item.num_rounds > 1) add_carry(dk, dv, item);
            if (item.nth_round == item.num_rounds - 1) write_keys(dk, dv, item, keys);
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(&smem.item_empty[items.place()]);
        }
    }

    // What is not finite in dO, in the tiles where it was left out, for the keys that its rows see.
    __device__ __forceinline__ void add_hidden(float (&dv)[C::kHeadDim / 2], const Item &item, const ThreadKeys &keys) {
#pragma unroll 1
        for (int n = item.begin * C::kRows; n < item.end * C::kRows; n++) {
            const int t = n / C::kRows, row = n % C::kRows;
            const int64_t token = static_cast<int64_t>(t) * p.tokens + smem.token[row];
            if ((t >= item.full_begin && t < item.full_end) || token >= item.q_len) continue;
            const Seen seen = find_seen(keys, p, t);
            const int64_t head = item.kv_head * p.group + row % p.group;
            add_unfinite<typename C::Element>(dv,
                                              static_cast<const uint16_t *>(args.dout.data) +
                                                  sa_offset(&args.dout, item.sequence.batch, item.sequence.q_begin + token, head),
                                              args.fwd.problem.head_dim,
                                              [&](int i) { return seen(i, row - 2 * static_cast<int>(threadIdx.x % 4)); });
        }
    }

    // dK and dV so far, of the rounds before and of this one; left for the next.
    __device__ __forceinline__ void add_carry(float (&dk)[C::kHeadDim / 2], float (&dv)[C::kHeadDim / 2], const Item &item) {
        unsigned long long *turns = buffers.carry_turns + item.carry;
        wait_for_turn(turns, item.carry_turn);
        auto *at = reinterpret_cast<float4 *>(buffers.carries + item.carry * 2 * C::kKeys * C::kHeadDim) + threadIdx.x - 128;
        const auto add = [&](float (&d)[C::kHeadDim / 2]) {
#pragma unroll
            for (int i = 0; i < C::kHeadDim / 2; i += 4, at += C::kMathThreads) {
                if (item.nth_round > 0) {
                    const float4 sum = __ldcg(at);
                    d[i] += sum.x;
                    d[i + 1] += sum.y;
                    d[i + 2] += sum.z;
                    d[i + 3] += sum.w;
                }
                if (item.nth_round < item.num_rounds - 1) __stcg(at, float4{d[i], d[i + 1], d[i + 2], d[i + 3]});
            }
        };
        add(dk);
        add(dv);
        bar_sync<C::kMathThreads>(1);
        if (threadIdx.x == 128) store_release(turns, item.carry_turn + 1);
    }

    __device__ __forceinline__ void write_keys(float (&dk)[C::kHeadDim / 2], float (&dv)[C::kHeadDim / 2], const Item &item,
                                               const ThreadKeys &keys) {
        const sa_sequence &sequence = item.sequence;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int own = 64 * math_group + thread_row(r);
            const int64_t key = item.key + own;
            const bool real = key < sequence.k_len;
            const bool has_rows = keys.begin[r] < keys.end[r];
            const float poison = smem.poisoned[own] && has_rows ? NAN : 0.0f;
            auto *to_dk = static_cast<uint16_t *>(args.dk.data), *to_dv = static_cast<uint16_t *>(args.dv.data);
            if (real) {
                to_dk += sa_offset(&args.dk, sequence.batch, sequence.k_begin + key, item.kv_head);
                to_dv += sa_offset(&args.dv, sequence.batch, sequence.k_begin + key, item.kv_head);
            }
            write_row<typename C::Element>(to_dk, dk, r, p.scale + poison, 0, args.fwd.problem.head_dim, real);
            write_row<typename C::Element>(to_dv, dv, r, 1.0f + poison, 0, args.fwd.problem.head_dim, real);
        }
    }
};

template <class C, bool kTerms>
__global__ __launch_bounds__(C::kThreads, 1) void bwd_kernel(const __grid_constant__ sinkattn_bwd_args args,
                                                             const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                                                             const __grid_constant__ Buffers buffers) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<Smem<C> *>(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(&smem.item_full[i], 1);
            barrier_init(&smem.item_empty[i], C::kMathWarps + 1);
            barrier_init(&smem.rows_full[i], 1);
            barrier_init(&smem.rows_empty[i], C::kMathWarps);
            barrier_init(&smem.dq_full[i], C::kMathWarps);
            barrier_init(&smem.dq_empty[i], 1);
        }
        barrier_init(&smem.finish_full, 1);
        barrier_init(&smem.kv_full, 1);
        barrier_init(&smem.kv_empty, C::kMathWarps);
        barrier_init_fence();
    }
    for (int row = threadIdx.x; row < C::kRows; row += C::kThreads) {
        const int token = row / p.group;
        smem.token[row] = row < p.tokens * p.group ? token : INT32_MAX / 2; // past every sequence
        smem.dq_offset[row] = token * args.dq.row_stride + (row - token * p.group) * args.dq.head_stride;
    }
    if (p.tokens * p.group < C::kRows) { // rows that no copy writes must not hold NaN
        for (int i = threadIdx.x; i < static_cast<int>(sizeof smem.queries) / 16; i += C::kThreads) {
            reinterpret_cast<uint4 *>(smem.queries[0])[i] = uint4{0, 0, 0, 0};
            reinterpret_cast<uint4 *>(smem.douts[0])[i] = uint4{0, 0, 0, 0};
        }
        async_fence();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<C::kLoaderRegisters>();
        if (threadIdx.x == 0) load_tiles<C>(smem, args, maps, p, buffers);
        if (threadIdx.x == 32) add_tiles<C>(smem, p, buffers);
    } else {
        registers_up<C::kMathRegisters>();
        const int math_group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128 - 1, 0); // known to be the same in a warp
        Math<C, kTerms>{smem, args, p, buffers, math_group, {}, {}, 0}.run();
    }
#else
    __trap();
#endif
}

// ---- host ----

struct Sizes {
    int64_t entries, tiles, slots, carries, entries_at, turns_at, carry_turns_at, stats_at, slots_at, carries_at, terms_at, bytes;
    bool is_local;
};

template <class C> Sizes sizes_of(const sinkattn_problem &problem) {
    const int64_t group = problem.num_q_heads / problem.num_kv_heads, tokens = C::kRows / group, tile_bytes = C::kTileFloats * 4;
    const sa_band band = sa_band_of(&problem.mask, problem.q_len, problem.k_len);
    const int64_t longest = sa_ceil_div(problem.q_len, tokens);
    Sizes sizes;
    sizes.entries = problem.batch + problem.packed;
    sizes.tiles = (problem.packed ? problem.q_len / tokens + problem.batch + 1 : problem.batch * longest) * problem.num_kv_heads;
    sizes.is_local = sa_window_keys(&problem.mask) < INT64_MAX && !problem.mask.num_sink_tokens &&
                     sa_ceil_div(C::kKeys + sa_window_size(&band) - 1, tokens) + 2 <= kMostTiles<C>;
    const bool has_rounds = !sizes.is_local && longest > kMostTiles<C>;
    sizes.slots = sa_min(sizes.tiles, problem.packed ? kPackedSlotsBytes / tile_bytes : has_rounds ? kRoundTiles<C> : kMostTiles<C>);
    sizes.carries = !has_rounds      ? 0
                    : problem.packed ? problem.k_len / C::kKeys + longest / kMostTiles<C> + 1
                                     : problem.batch * sa_ceil_div(problem.k_len, C::kKeys);
    int64_t at = 0;
    const auto take = [&](int64_t bytes) {
        const int64_t from = at;
        at = sa_ceil_div(at + bytes, 128) * 128;
        return from;
    };
    sizes.entries_at = take((sizes.entries + 1) * static_cast<int64_t>(sizeof(Entry)));
    sizes.turns_at = take((sizes.slots + 1) * 8);
    sizes.carry_turns_at = take(sizes.carries * 8);
    sizes.stats_at = take(sizes.tiles * static_cast<int64_t>(sizeof(RowStats<C>)));
    sizes.slots_at = take(sizes.slots * tile_bytes);
    sizes.carries_at = take(sizes.carries * 2 * C::kKeys * C::kHeadDim * 4);
    sizes.terms_at = take(problem.s_aux_dtype ? num_stats(problem) * 4 : 0);
    sizes.bytes = at + 127;
    return sizes;
}

template <class C> sinkattn_status launch(const sinkattn_bwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    const Sizes sizes = sizes_of<C>(problem);
    if (sizes.tiles > INT32_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld tiles of rows; a launch holds less than 2^31", static_cast<long long>(sizes.tiles));
    Problem p;
    p.num_entries = sizes.entries;
    p.num_slots = sizes.slots;
    p.num_carries = sizes.carries;
    p.is_local = sizes.is_local;
    p.group = static_cast<int>(problem.num_q_heads / problem.num_kv_heads);
    p.tokens = C::kRows / p.group;
    p.scale = static_cast<float>(sa_softmax_scale(&problem));
    p.scale_log2 = p.scale * kLog2e;
    auto *base = reinterpret_cast<unsigned char *>((reinterpret_cast<uintptr_t>(context.workspace) + 127) / 128 * 128);
    auto *turns = reinterpret_cast<unsigned long long *>(base + sizes.turns_at);
    const Buffers buffers = {reinterpret_cast<Entry *>(base + sizes.entries_at),
                             turns,
                             turns + 1,
                             reinterpret_cast<unsigned long long *>(base + sizes.carry_turns_at),
                             reinterpret_cast<float *>(base + sizes.stats_at),
                             reinterpret_cast<float *>(base + sizes.slots_at),
                             reinterpret_cast<float *>(base + sizes.carries_at),
                             args.ds_aux ? reinterpret_cast<float *>(base + sizes.terms_at) : nullptr};
    Encode encode = nullptr;
    unsigned *error_word;
    Maps maps;
    sinkattn_status status = find_encode(&encode);
    if (!status.code) status = sa_cuda_error_word(&error_word);
    if (!status.code) status = encode_map(encode, &maps.q, problem, args.fwd.q, problem.q_len, problem.num_q_heads, p.tokens, p.group, "q");
    if (!status.code)
        status = encode_map(encode, &maps.dout, problem, args.dout, problem.q_len, problem.num_q_heads, p.tokens, p.group, "dout");
    if (!status.code) status = encode_map(encode, &maps.k, problem, args.fwd.k, problem.k_len, problem.num_kv_heads, C::kKeys, 1, "k");
    if (!status.code) status = encode_map(encode, &maps.v, problem, args.fwd.v, problem.k_len, problem.num_kv_heads, C::kKeys, 1, "v");
    if (status.code) return status;
    const auto kernel = args.ds_aux ? bwd_kernel<C, true> : bwd_kernel<C, false>;
    status = args.ds_aux ? allow_shared<bwd_kernel<C, true>>(sizeof(Smem<C>)) : allow_shared<bwd_kernel<C, false>>(sizeof(Smem<C>));
    if (status.code) return status;
    const auto stream = static_cast<cudaStream_t>(context.stream);
    table_kernel<C><<<1, 1024, 0, stream>>>(args, p, buffers, error_word);
    rows_kernel<C><<<static_cast<unsigned>(sizes.tiles), 128, 0, stream>>>(args, p, buffers);
    kernel<<<static_cast<unsigned>(plan.workers), C::kThreads, sizeof(Smem<C>), stream>>>(args, maps, p, buffers);
    if (args.ds_aux)
        add_sink_terms<<<static_cast<unsigned>(problem.num_q_heads), kSinkThreads, 0, stream>>>(
            args, buffers.terms, problem.packed ? 1 : problem.batch, problem.q_len);
    return sa_cuda_status("sa_bwd_cuda_sm90", cudaGetLastError());
}

template <int kHeadDim, int kRows, int kKeys>
sinkattn_status launch_dtype(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_bwd_args *>(arguments);
    if (args.fwd.problem.dtype == SINKATTN_BF16) return launch<Config<Bf16, kHeadDim, kRows, kKeys>>(args, *plan, *context);
    return launch<Config<Fp16, kHeadDim, kRows, kKeys>>(args, *plan, *context);
}

} // namespace
} // namespace sa

extern "C" int64_t sa_cuda_bwd_sm90_workspace(const sinkattn_problem *problem, int64_t head_dim) {
    using namespace sa;
    if (head_dim == 64) return sizes_of<Config<Bf16, 64, sa_bwd_cuda_sm90_d64_tile_q, sa_bwd_cuda_sm90_d64_tile_k>>(*problem).bytes;
    return sizes_of<Config<Bf16, 128, sa_bwd_cuda_sm90_d128_tile_q, sa_bwd_cuda_sm90_d128_tile_k>>(*problem).bytes;
}

extern "C" sinkattn_status sa_bwd_cuda_sm90_d64(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return sa::launch_dtype<64, sa::sa_bwd_cuda_sm90_d64_tile_q, sa::sa_bwd_cuda_sm90_d64_tile_k>(args, plan, context);
}

extern "C" sinkattn_status sa_bwd_cuda_sm90_d128(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return sa::launch_dtype<128, sa::sa_bwd_cuda_sm90_d128_tile_q, sa::sa_bwd_cuda_sm90_d128_tile_k>(args, plan, context);
}
