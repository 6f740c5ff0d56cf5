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
//     sink    ds_aux of a head from the terms of its tiles of rows and of the key blocks
//
// A tile of rows is tokens x the heads of a group. Its dQ is the sum over key blocks, in ascending order: each waits for its turn at the
// tile's slot of a ring of fp32 tiles; the first stores, the last rounds the sum to dq and frees the slot. Blocks take items in order, keys
// ascending, and walk rows down, so that a turn is one of an item taken before, and all but the first wait little.
//
// 0 * NaN is not 0: in tiles that need a mask, what is not finite in Q and dO becomes 0, and NaN comes back by way of lse and g - delta; in
// K it becomes 0 in every tile, and NaN comes back by way of V.

#include "cuda/attn/bwd_work.cuh"
#include "cuda/attn/wgmma_tile.cuh"
#include "cuda/tensor_map.cuh"

namespace sa {
namespace {

template <class Element_, int kHeadDim_, int kRows_, int kKeys_> struct Config {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kRows = kRows_, kKeys = kKeys_;
    static constexpr int kHalves = kHeadDim / 64; // of a row, 64 columns each, apart in shared memory
    static constexpr int kRowHalf = kRows * kRowBytes, kKeyHalf = kKeys * kRowBytes;
    static constexpr int kThreads = 384, kMathThreads = 256, kMathWarps = kMathThreads / 32;
    static constexpr int kStages = 2, kSums = 2; // of rows; of dQ on its way out
    static constexpr int kTileFloats = kRows * kHeadDim;
    static constexpr int kLoaderRegisters = kHeadDim == 64 ? 24 : 40, kMathRegisters = kHeadDim == 64 ? 240 : 232;
    static_assert(kKeys == 128, "two math groups of 64 keys");
    static_assert(kRows / 64 * kHalves == 2, "a math group gets 64 x 64 of dQ");
};

struct Maps {
    CUtensorMap q, k, v, dout;
};

// The one that the block works on: of a kv head.
struct OwnItem : Item {
    int kv_head;
    bool exists;
};

template <class C> struct Smem {
    alignas(1024) unsigned char keys[C::kHalves * C::kKeyHalf], values[C::kHalves * C::kKeyHalf];
    alignas(1024) unsigned char queries[C::kStages][C::kHalves * C::kRowHalf], douts[C::kStages][C::kHalves * C::kRowHalf];
    alignas(1024) unsigned char ds[C::kRows / 64][C::kKeys * kRowBytes]; // keys x 64 rows
    alignas(128) float dq[C::kSums][C::kTileFloats];
    RowStats<C> stats[C::kStages];
    float terms[C::kRows / 32][C::kMathThreads]; // of ds_aux, a thread's own: registers are short
    int64_t dq_offset[C::kRows];                 // of a tile's rows from its first
    int token[C::kRows];
    OwnItem items[2];
    sa_range seen_by[C::kKeys];     // rows that see each key
    bool poisoned[C::kKeys], hides; // keys that were not finite; whether some dO was
    bool finish_alone[C::kSums];    // nothing was added before to the tile to be finished
    uint64_t item_full[2], item_empty[2], kv_full, kv_empty, rows_full[C::kStages], rows_empty[C::kStages];
    uint64_t dq_ready[C::kSums], dq_full[C::kSums]; // room for a tile's dQ, or the sum that it completes; the tile's dQ, or its sum read
};

// ---- keys ----

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
template <class C> __device__ __forceinline__ int find_turn(const Item &item, const BwdProblem &p, int t) {
    const int first = t * p.tokens, last = min(first + p.tokens, item.band.q_len) - 1;
    const int begin = sa_row_band(&item.band, first).begin, end = sa_row_band(&item.band, last).end;
    const int sinks = (min(min(item.band.num_sink, end), begin) + C::kKeys - 1) / C::kKeys, block = item.key / C::kKeys;
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
__device__ __forceinline__ void load_tiles(Smem<C> &smem, const sinkattn_bwd_args &args, const Maps &maps, const BwdProblem &p,
                                           const BwdBuffers &buffers) {
    const int stats_bytes = stats_length<C>(buffers.row_terms) * 4;
    const auto all = static_cast<uint32_t>(buffers.entries[p.num_entries].first_item); // items of a kv head
    Ring<C::kStages> ring;
    for (Ring<2> items;; items.n++) {
        OwnItem &item = smem.items[items.place()];
        uint64_t *item_full = &smem.item_full[items.place()];
        barrier_wait(&smem.item_empty[items.place()], items.phase() ^ 1);
        const uint32_t n = atomicAdd(buffers.counter, 1u);
        item.exists = n < all * static_cast<uint32_t>(args.fwd.problem.num_kv_heads);
        if (!item.exists) return barrier_arrive(item_full);
        const int head = static_cast<int>(n / all);
        item.kv_head = head;
        barrier_arrive_expect(item_full, sizeof(Item));
        bulk_load(&item, buffers.items + n % all, sizeof(Item), item_full);
        barrier_wait(&smem.kv_empty, (items.n & 1) ^ 1);
        barrier_wait(item_full, items.phase());
        barrier_arrive_expect(&smem.kv_full, 2 * C::kHalves * C::kKeyHalf);
        for (int half = 0; half < C::kHalves; half++) {
            tensor_load(smem.keys + half * C::kKeyHalf, &maps.k, &smem.kv_full, 64 * half, head, item.k_begin + item.key, item.batch);
            tensor_load(smem.values + half * C::kKeyHalf, &maps.v, &smem.kv_full, 64 * half, head, item.k_begin + item.key, item.batch);
        }
        for (int t = item.end - 1; t >= item.begin; t--, ring.n++) {
            uint64_t *full = &smem.rows_full[ring.place()];
            barrier_wait(&smem.rows_empty[ring.place()], ring.phase() ^ 1);
            barrier_arrive_expect(full, 2 * C::kHalves * p.tokens * p.group * kRowBytes + stats_bytes);
            const int row = item.q_begin + t * p.tokens;
            for (int half = 0; half < C::kHalves; half++) {
                tensor_load(smem.queries[ring.place()] + half * C::kRowHalf, &maps.q, full, 64 * half, head * p.group, row, item.batch);
                tensor_load(smem.douts[ring.place()] + half * C::kRowHalf, &maps.dout, full, 64 * half, head * p.group, row, item.batch);
            }
            const int tile = item.first_tile + head * item.num_tiles + t;
            bulk_load(&smem.stats[ring.place()], buffers.stats + static_cast<int64_t>(tile) * (stats_bytes / 4), stats_bytes, full);
        }
    }
}

// One of kSums threads, each with every kSums-th tile: while the addition of one is on its way, the next is begun.
template <class C> __device__ __forceinline__ void add_tiles(Smem<C> &smem, const BwdProblem &p, const BwdBuffers &buffers, int nth) {
    const int num_slots = static_cast<int>(p.num_slots);
    float *dq = smem.dq[nth];
    uint32_t use = 0; // of dq
    int skip = nth;   // tiles until the next of this thread
    for (Ring<2> items;; items.n++) {
        const OwnItem &item = smem.items[items.place()];
        barrier_wait(&smem.item_full[items.place()], items.phase());
        if (!item.exists) return;
        const auto first = static_cast<unsigned>(item.first_place + item.kv_head * item.num_places);
        Place place = {static_cast<int>(first % num_slots), first / num_slots};
        for (int t = item.end - 1; t >= item.begin; t--, place.advance(item.descending, num_slots)) {
            if (skip-- > 0) continue;
            skip = C::kSums - 1;
            const int turn = find_turn<C>(item, p, t);
            unsigned long long *turns = buffers.turns + place.slot, value = turn_value(place.generation, turn);
            float *slot = buffers.slots + static_cast<int64_t>(place.slot) * C::kTileFloats;
            if (t < item.finish_end) {
                wait_for_turn(turns, value);
                smem.finish_alone[nth] = turn == 0;
                if (turn == 0) {
                    barrier_arrive(&smem.dq_ready[nth]);
                } else {
                    barrier_arrive_expect(&smem.dq_ready[nth], C::kTileFloats * sizeof(float));
                    bulk_load(dq, slot, C::kTileFloats * sizeof(float), &smem.dq_ready[nth]);
                }
                barrier_wait(&smem.dq_full[nth], use++ & 1); // the slot has been read
                store_release(turns, turn_value(place.generation + 1, 0));
            } else {
                barrier_arrive(&smem.dq_ready[nth]);
                wait_for_turn(turns, value);
                barrier_wait(&smem.dq_full[nth], use++ & 1);
                if (turn == 0)
                    bulk_store(slot, dq, C::kTileFloats * sizeof(float));
                else
                    bulk_add(slot, dq, C::kTileFloats * sizeof(float));
                store_commit();
                store_wait();
                store_release(turns, value + 1);
            }
        }
        barrier_arrive(&smem.item_empty[items.place()]);
    }
}

// A thread's two of 64 rows of an accumulator.
__device__ __forceinline__ int thread_row(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i; }

// Values of rows that are not finite become 0, and bad(row) is called.
template <class C, int kHalfBytes, class Bad> __device__ __forceinline__ void zero_rows(unsigned char *tile, const Bad &bad) {
    for (int x = computed_here(threadIdx.x - 128); x < C::kHalves * kHalfBytes / 16; x += C::kMathThreads)
        if (zero_unfinite<typename C::Element, 1>(tile + 16 * x, 16, 0)) bad(x % (kHalfBytes / 16) / 8);
}

template <class C> __device__ __forceinline__ void prepare_keys(Smem<C> &smem, const Item &item) {
    const int i = threadIdx.x - 128, key = item.key + i;
    if (i < C::kKeys) {
        smem.seen_by[i] = key < item.band.k_len ? sa_keys_rows(&item.band, {key, key + 1}) : sa_range{0, 0};
        smem.poisoned[i] = false;
    }
    if (i == 0) smem.hides = false;
    bar_sync<C::kMathThreads>(1);
    zero_rows<C, C::kKeyHalf>(smem.keys, [&](int key) {
        smem.poisoned[key] = true;
        *reinterpret_cast<uint16_t *>(smem.values + key * kRowBytes + ((key & 7) << 4)) = 0x7fff;
    });
    async_fence();
    bar_sync<C::kMathThreads>(1);
}

// A row of Q or dO that is not finite makes a column of S or dP that is not, whatever the keys: one of the thread's two tells.
template <class C> __device__ __forceinline__ bool any_unfinite(const float (&s)[C::kRows / 2], const float (&dp)[C::kRows / 2]) {
    float zero = 0.0f;
#pragma unroll
    for (int n = 0; n < C::kRows / 8; n++)
#pragma unroll
        for (int i = 4 * n; i < 4 * n + 2; i++) zero = fmaf(s[i], 0.0f, fmaf(dp[i], 0.0f, zero));
    return bar_any<C::kMathThreads>(1, zero != 0.0f);
}

// dS gets what was in dO from g - delta, dV at the end of the item.
template <class C> __device__ __forceinline__ void clean_rows(Smem<C> &smem, int stage) {
    zero_rows<C, C::kRowHalf>(smem.queries[stage], [&](int row) { smem.stats[stage].lse[row] = NAN; });
    zero_rows<C, C::kRowHalf>(smem.douts[stage], [&](int) { smem.hides = true; });
    async_fence();
    bar_sync<C::kMathThreads>(1);
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

// Which of a thread's columns of a tile its two keys see: a bit each, columns 8 n and 8 n + 1 after its first at 2 n and 2 n + 1.
struct Seen {
    uint32_t bits[2];

    __device__ __forceinline__ bool operator()(int r, int column) const { return bits[r] >> (column / 4 + column % 2) & 1; }
};

template <class C> __device__ __forceinline__ Seen find_seen(const Smem<C> &smem, const BwdProblem &p, int math_group, int t) {
    const auto bits_before = [&](int token) {
        const int column = min(max(token - t * p.tokens, 0), p.tokens) * p.group - 2 * static_cast<int>(threadIdx.x % 4),
                  count = column > 0 ? column / 8 * 2 + min(column % 8, 2) : 0;
        return count < 32 ? (1u << count) - 1 : ~0u;
    };
    const auto bits = [&](const sa_range &rows) { return bits_before(rows.end) & ~bits_before(rows.begin); };
    const sa_range *seen_by = smem.seen_by + 64 * math_group + thread_row(0);
    return {{bits(seen_by[0]), bits(seen_by[8])}};
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

enum TermsOf { kNoTerms, kTermsOf8, kTermsOfAny };

// Of p_sink dS, a thread keeps sums over its columns. Where heads repeat with 8 columns they are of two heads; for any other group lanes
// share the columns, and each has one of 32.
template <class C, TermsOf kTerms> constexpr int kTermSums = kTerms == kNoTerms ? 0 : kTerms == kTermsOf8 ? 2 : C::kRows / 32;

__device__ __forceinline__ int lane_column() { return threadIdx.x / 8 % 4 * 8 + threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2; }

// Of columns 8 n and 8 n + 1 after the lane's first, at 2 n and 2 n + 1: the sum over lanes of lane_column().
__device__ __forceinline__ float sum_column(float (&columns)[8]) {
#pragma unroll
    for (int kept = 4; kept > 0; kept /= 2) {
        const bool upper = threadIdx.x & 4 * kept;
#pragma unroll
        for (int i = 0; i < kept; i++) {
            const float got = __shfl_xor_sync(0xffffffffu, upper ? columns[i] : columns[i + kept], 4 * kept);
            columns[i] = (upper ? columns[i + kept] : columns[i]) + got;
        }
    }
    return columns[0];
}

// dp becomes dS.
template <class C, bool kMasked, TermsOf kTerms>
__device__ __forceinline__ void find_ds(float (&dp)[C::kRows / 2], const float (&p)[C::kRows / 2], float *terms, const RowStats<C> &stats,
                                        const Seen &seen) {
    const int column = 2 * (threadIdx.x % 4);
    float of_tile[2] = {0.0f, 0.0f}, columns[8];
#pragma unroll
    for (int n = 0; n < C::kRows / 8; n++) {
        const float2 bias = *reinterpret_cast<const float2 *>(&stats.bias[8 * n + column]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float &x = dp[4 * n + i];
            x = !kMasked || seen(i / 2, 8 * n + i % 2) ? p[4 * n + i] * (x + (i % 2 ? bias.y : bias.x)) : 0.0f;
        }
        if (kTerms == kNoTerms) continue;
        const float even = dp[4 * n] + dp[4 * n + 2], odd = dp[4 * n + 1] + dp[4 * n + 3];
        if (kTerms == kTermsOf8) {
            const float2 p_sink = *reinterpret_cast<const float2 *>(&stats.p_sink[8 * n + column]);
            of_tile[0] = fmaf(p_sink.x, even, of_tile[0]);
            of_tile[1] = fmaf(p_sink.y, odd, of_tile[1]);
        } else {
            columns[2 * n % 8] = even;
            columns[2 * n % 8 + 1] = odd;
            if (n % 4 == 3) terms[n / 4 * C::kMathThreads] += stats.p_sink[n / 4 * 32 + lane_column()] * sum_column(columns);
        }
    }
    if (kTerms == kTermsOf8) {
        terms[0] += of_tile[0];
        terms[C::kMathThreads] += of_tile[1];
    }
}

template <class C> __device__ __forceinline__ void write_ds(Smem<C> &smem, const uint32_t (&ds)[C::kRows / 16][4], int math_group) {
    const int thread = computed_here(threadIdx.x), key = 64 * math_group + thread % 128 / 32 * 16 + (thread & 15);
    const uint32_t first = shared_address(smem.ds[0]) + key * kRowBytes + ((thread % 32 >> 4 ^ (key & 7)) << 4);
#pragma unroll
    for (int n = 0; n < C::kRows / 16; n++) stmatrix_x4((first ^ 2 * n % 8 << 4) + n / 4 * static_cast<uint32_t>(sizeof smem.ds[0]), ds[n]);
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
__device__ __forceinline__ void finish_tile(float (&dq)[32], int sum, const Smem<C> &smem, const sinkattn_bwd_args &args,
                                            const BwdProblem &p, const OwnItem &item, int t, int math_group) {
    const int first = t * p.tokens;
    auto *to = static_cast<uint16_t *>(args.dq.data) + sa_offset(&args.dq, item.batch, item.q_begin + first, item.kv_head * p.group);
    if (!smem.finish_alone[sum]) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float4 before = reinterpret_cast<const float4 *>(smem.dq[sum])[(math_group * 8 + i) * 128 + threadIdx.x % 128];
            dq[4 * i] += before.x;
            dq[4 * i + 1] += before.y;
            dq[4 * i + 2] += before.z;
            dq[4 * i + 3] += before.w;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = (C::kRows == 64 ? 0 : 64 * math_group) + thread_row(r);
        write_row<typename C::Element>(to + smem.dq_offset[row], dq, r, p.scale, C::kRows == 64 ? 64 * math_group : 0,
                                       args.fwd.problem.head_dim, first + smem.token[row] < item.band.q_len);
    }
}

// Of each head of the item: what its rows and these keys add to ds_aux.
template <class C, TermsOf kTerms>
__device__ __forceinline__ void write_terms(const float *terms, Smem<C> &smem, const BwdProblem &p, const BwdBuffers &buffers,
                                            const OwnItem &item) {
    constexpr int kColumns = kTerms == kTermsOf8 ? 8 : C::kRows;
    auto *sums = reinterpret_cast<float *>(smem.ds); // of each warp
    auto *own = sums + (threadIdx.x / 32 - 4) * kColumns;
    bar_sync<C::kMathThreads>(1); // the last dS has been read
    if constexpr (kTerms == kTermsOf8) {
        for (int i = 0; i < 2; i++) {
            float sum = terms[i * C::kMathThreads];
            for (int x = 4; x < 32; x *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
            if (threadIdx.x % 32 < 4) own[threadIdx.x % 4 * 2 + i] = sum;
        }
    } else {
        for (int i = 0; i < kColumns / 32; i++) own[32 * i + lane_column()] = terms[i * C::kMathThreads];
    }
    bar_sync<C::kMathThreads>(1);
    const int head = threadIdx.x - 128;
    if (head >= p.group) return;
    float sum = 0.0f;
    for (int warp = 0; warp < C::kMathWarps; warp++)
        for (int column = head; column < kColumns; column += p.group) sum += sums[warp * kColumns + column];
    buffers.key_terms[(item.kv_head * p.group + head) * p.num_blocks + item.nth] = -sum;
}

// What is not finite in dO, in the tiles where it was left out, for the keys that its rows see.
template <class C>
__device__ __forceinline__ void add_hidden(float (&dv)[C::kHeadDim / 2], const Smem<C> &smem, const sinkattn_bwd_args &args,
                                           const BwdProblem &p, const OwnItem &item, int math_group) {
    const sa_range *seen_by = smem.seen_by + 64 * math_group + thread_row(0);
#pragma unroll 1
    for (int n = item.begin * C::kRows; n < item.end * C::kRows; n++) {
        const int t = n / C::kRows, row = n % C::kRows;
        const int64_t token = static_cast<int64_t>(t) * p.tokens + smem.token[row];
        if ((t >= item.full_begin && t < item.full_end) || token >= item.band.q_len) continue;
        const int64_t head = item.kv_head * p.group + row % p.group;
        add_unfinite<typename C::Element>(
            dv, static_cast<const uint16_t *>(args.dout.data) + sa_offset(&args.dout, item.batch, item.q_begin + token, head),
            args.fwd.problem.head_dim, [&](int r) { return token >= seen_by[8 * r].begin && token < seen_by[8 * r].end; });
    }
}

// dK and dV so far, of the rounds before and of this one; left for the next.
template <class C>
__device__ __forceinline__ void add_carry(float (&dk)[C::kHeadDim / 2], float (&dv)[C::kHeadDim / 2], const BwdBuffers &buffers,
                                          const OwnItem &item) {
    unsigned long long *turns = buffers.carry_turns + item.carry;
    const auto turn = static_cast<unsigned long long>(item.kv_head) * item.num_rounds + item.nth_round;
    wait_for_turn(turns, turn);
    auto *at =
        reinterpret_cast<float4 *>(buffers.carries + static_cast<int64_t>(item.carry) * 2 * C::kKeys * C::kHeadDim) + threadIdx.x - 128;
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
    if (threadIdx.x == 128) store_release(turns, turn + 1);
}

template <class C>
__device__ __forceinline__ void write_keys(float (&dk)[C::kHeadDim / 2], float (&dv)[C::kHeadDim / 2], const float (&poison)[2],
                                           const sinkattn_bwd_args &args, const BwdProblem &p, const OwnItem &item, int math_group) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int own = 64 * math_group + thread_row(r);
        const int64_t key = item.key + own;
        const bool real = key < item.band.k_len;
        const float added = poison[r];
        auto *to_dk = static_cast<uint16_t *>(args.dk.data), *to_dv = static_cast<uint16_t *>(args.dv.data);
        if (real) {
            to_dk += sa_offset(&args.dk, item.batch, item.k_begin + key, item.kv_head);
            to_dv += sa_offset(&args.dv, item.batch, item.k_begin + key, item.kv_head);
        }
        write_row<typename C::Element>(to_dk, dk, r, p.scale + added, 0, args.fwd.problem.head_dim, real);
        write_row<typename C::Element>(to_dv, dv, r, 1.0f + added, 0, args.fwd.problem.head_dim, real);
    }
}

template <class C, TermsOf kTerms> struct Math {
    Smem<C> &smem;
    const sinkattn_bwd_args &args;
    const BwdProblem &p;
    const BwdBuffers &buffers;
    const int math_group;
    const uint32_t begin; // of smem
    Ring<C::kStages> ring;
    Ring<C::kSums> dq_ring;

    // In a way that the compiler knows to be the same in all lanes.
    __device__ __forceinline__ uint32_t address(const void *at) const {
        return begin + static_cast<uint32_t>(static_cast<const unsigned char *>(at) - reinterpret_cast<const unsigned char *>(&smem));
    }

    __device__ __forceinline__ float *terms() const { return smem.terms[0] + threadIdx.x - 128; }

    // S and dP of the tile that the ring holds.
    __device__ __forceinline__ void begin_scores(float (&s)[C::kRows / 2]) {
        const uint32_t stage = warp_uniform(ring.place());
        barrier_wait(&smem.rows_full[stage], ring.phase());
        wgmma_abt<typename C::Element, C::kHeadDim, C::kKeyHalf, C::kRowHalf>(s, address(smem.keys) + 64 * math_group * kRowBytes,
                                                                              address(smem.queries[stage]));
    }
    __device__ __forceinline__ void begin_dp(float (&dp)[C::kRows / 2]) {
        const uint32_t stage = warp_uniform(ring.place());
        wgmma_abt<typename C::Element, C::kHeadDim, C::kKeyHalf, C::kRowHalf>(dp, address(smem.values) + 64 * math_group * kRowBytes,
                                                                              address(smem.douts[stage]));
    }

    // P and dS from S and dP, which have been begun.
    template <bool kMasked>
    __device__ __forceinline__ void find_operands(float (&s)[C::kRows / 2], float (&dp)[C::kRows / 2],
                                                  uint32_t (&weights)[C::kRows / 16][4], uint32_t (&ds)[C::kRows / 16][4], int t) {
        const RowStats<C> &stats = smem.stats[ring.place()];
        Seen seen;
        if (kMasked) {
            seen = find_seen<C>(smem, p, math_group, t);
            wgmma_wait<0>();
            computed(s);
            computed(dp);
            if (any_unfinite<C>(s, dp)) clean_rows<C>(smem, ring.place());
        }
        if (!kMasked) {
            wgmma_wait<1>();
            computed(s);
        }
        find_weights<C, kMasked>(s, stats, seen, p.scale_log2);
        pack<typename C::Element>(weights, s);
        if (!kMasked) {
            wgmma_wait<0>();
            computed(dp);
        }
        find_ds<C, kMasked, kTerms>(dp, s, terms(), stats, seen);
        pack<typename C::Element>(ds, dp);
    }

    // The group's part of dQ goes to the adder, or out.
    template <int kPending> __device__ __forceinline__ void pass_on(float (&dq)[32], const OwnItem &item, int t) {
        const uint32_t sum = dq_ring.place();
        barrier_wait(&smem.dq_ready[sum], dq_ring.phase());
        if (t < item.finish_end) {
            wgmma_wait<kPending>();
            computed(dq);
            finish_tile<C>(dq, sum, smem, args, p, item, t, math_group);
        } else {
            wgmma_wait<kPending>();
            computed(dq);
            auto *to = reinterpret_cast<float4 *>(smem.dq[sum]) + math_group * 1024 + computed_here(threadIdx.x % 128);
#pragma unroll
            for (int i = 0; i < 8; i++) to[128 * i] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
            async_fence();
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&smem.dq_full[sum]);
        dq_ring.n++;
    }

    // All tiles of an item. While dQ of one is passed on, S of the next is computed.
    __device__ __forceinline__ void meet_tiles(float (&dk)[C::kHeadDim / 2], float (&dv)[C::kHeadDim / 2], const OwnItem &item) {
        float s[C::kRows / 2], dp[C::kRows / 2], dq[32];
        begin_scores(s);
        begin_dp(dp);
        for (int t = item.end - 1;; t--) {
            uint32_t weights[C::kRows / 16][4], ds[C::kRows / 16][4];
            if (t >= item.full_begin && t < item.full_end)
                find_operands<false>(s, dp, weights, ds, t);
            else
                find_operands<true>(s, dp, weights, ds, t);
            const uint32_t stage = warp_uniform(ring.place());
            wgmma_pb<typename C::Element, C::kRowHalf>(dv, weights, address(smem.douts[stage]));
            wgmma_pb<typename C::Element, C::kRowHalf>(dk, ds, address(smem.queries[stage]));
            const Ring<C::kSums> last = {dq_ring.n - 1};
            if (dq_ring.n > 0) barrier_wait(&smem.dq_full[last.place()], last.phase()); // nobody reads the last dS
            write_ds<C>(smem, ds, math_group);
            async_fence();
            bar_sync<C::kMathThreads>(1);
            dq_product<C>(dq, address(smem.ds[C::kRows == 64 ? 0 : math_group]),
                          address(smem.keys) + (C::kRows == 64 ? math_group * C::kKeyHalf : 0));
            wgmma_wait<1>();
            computed(dv);
            computed(dk);
            if (threadIdx.x % 32 == 0) barrier_arrive(&smem.rows_empty[stage]);
            ring.n++;
            if (t == item.begin) break;
            begin_scores(s);
            pass_on<1>(dq, item, t);
            begin_dp(dp);
        }
        pass_on<0>(dq, item, item.begin);
    }

    __device__ __forceinline__ void run() {
        for (Ring<2> items;; items.n++) {
            const OwnItem &item = smem.items[items.place()];
            barrier_wait(&smem.item_full[items.place()], items.phase());
            if (!item.exists) return;
            float dk[C::kHeadDim / 2], dv[C::kHeadDim / 2];
#pragma unroll
            for (int i = 0; i < C::kHeadDim / 2; i++) dk[i] = dv[i] = 0.0f;
            for (int i = 0; i < kTermSums<C, kTerms>; i++) terms()[i * C::kMathThreads] = 0.0f;
            barrier_wait(&smem.kv_full, items.n & 1);
            prepare_keys<C>(smem, item);
            if (item.begin < item.end) meet_tiles(dk, dv, item);
            if (smem.hides) add_hidden<C>(dv, smem, args, p, item, math_group);
            float poison[2]; // it belongs to the keys, which go now
            for (int r = 0; r < 2; r++) {
                const int own = 64 * math_group + thread_row(r);
                poison[r] = smem.poisoned[own] && smem.seen_by[own].begin < smem.seen_by[own].end ? NAN : 0.0f;
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(&smem.kv_empty);
            if (item.num_rounds > 1) add_carry<C>(dk, dv, buffers, item);
            if (item.nth_round == item.num_rounds - 1) write_keys<C>(dk, dv, poison, args, p, item, math_group);
            if constexpr (kTerms != kNoTerms) write_terms<C, kTerms>(terms(), smem, p, buffers, item);
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(&smem.item_empty[items.place()]);
        }
    }
};

template <class C, TermsOf kTerms>
__global__ __launch_bounds__(C::kThreads, 1) void bwd_kernel(const __grid_constant__ sinkattn_bwd_args args,
                                                             const __grid_constant__ Maps maps, const __grid_constant__ BwdProblem p,
                                                             const __grid_constant__ BwdBuffers buffers) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<Smem<C> *>(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(&smem.item_full[i], 1);
            barrier_init(&smem.item_empty[i], C::kMathWarps + C::kSums);
            barrier_init(&smem.rows_full[i], 1);
            barrier_init(&smem.rows_empty[i], C::kMathWarps);
            barrier_init(&smem.dq_full[i], C::kMathWarps);
            barrier_init(&smem.dq_ready[i], 1);
        }
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
        const int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0 && warp > 0 && warp <= C::kSums) add_tiles<C>(smem, p, buffers, warp - 1);
    } else {
        registers_up<C::kMathRegisters>();
        const int math_group = warp_uniform(threadIdx.x / 128 - 1);
        Math<C, kTerms>{smem, args, p, buffers, math_group, warp_uniform_register(shared_address(shared)), {}, {}}.run();
    }
#else
    __trap();
#endif
}

// ---- host ----

template <class C, TermsOf kTerms>
sinkattn_status launch_kernel(const sinkattn_bwd_args &args, const Maps &maps, const BwdProblem &p, const BwdBuffers &buffers, int blocks,
                              cudaStream_t stream) {
    const sinkattn_status status = allow_shared<bwd_kernel<C, kTerms>>(sizeof(Smem<C>));
    if (!status.code)
        bwd_kernel<C, kTerms><<<static_cast<unsigned>(blocks), C::kThreads, sizeof(Smem<C>), stream>>>(args, maps, p, buffers);
    return status;
}

template <class C> sinkattn_status launch(const sinkattn_bwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    const BwdSizes sizes = sizes_of<C>(problem);
    const int64_t items = sizes.blocks * problem.num_kv_heads, item_writers = sa_ceil_div(sizes.blocks, 128);
    if (sa_max(sizes.tiles, items) > INT32_MAX / 2)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld tiles of rows and %lld key blocks; a launch holds at most 2^30",
                         static_cast<long long>(sizes.tiles), static_cast<long long>(items));
    BwdProblem p;
    p.num_entries = sizes.entries;
    p.num_slots = sizes.slots;
    p.num_carries = sizes.carries;
    p.is_local = sizes.is_local;
    p.group = static_cast<int>(problem.num_q_heads / problem.num_kv_heads);
    p.tokens = C::kRows / p.group;
    p.scale = static_cast<float>(sa_softmax_scale(&problem));
    p.scale_log2 = p.scale * kLog2e;
    p.num_tiles = sizes.tiles / problem.num_kv_heads;
    p.num_blocks = sizes.blocks;
    auto *base = reinterpret_cast<unsigned char *>((reinterpret_cast<uintptr_t>(context.workspace) + 127) / 128 * 128);
    auto *turns = reinterpret_cast<unsigned long long *>(base + sizes.turns_at);
    const BwdBuffers buffers = {reinterpret_cast<Entry *>(base + sizes.entries_at),
                                reinterpret_cast<Item *>(base + sizes.items_at),
                                reinterpret_cast<unsigned *>(turns),
                                turns + 1,
                                reinterpret_cast<unsigned long long *>(base + sizes.carry_turns_at),
                                reinterpret_cast<float *>(base + sizes.stats_at),
                                reinterpret_cast<float *>(base + sizes.slots_at),
                                reinterpret_cast<float *>(base + sizes.carries_at),
                                args.ds_aux ? reinterpret_cast<float *>(base + sizes.row_terms_at) : nullptr,
                                reinterpret_cast<float *>(base + sizes.key_terms_at)};
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
    const auto stream = static_cast<cudaStream_t>(context.stream);
    table_kernel<C><<<1, kTableThreads, 0, stream>>>(args, p, buffers, error_word);
    rows_kernel<C><<<static_cast<unsigned>(sizes.tiles + item_writers), 128, 0, stream>>>(args, p, buffers);
    const auto launch_keys = !args.ds_aux       ? launch_kernel<C, kNoTerms>
                             : 8 % p.group == 0 ? launch_kernel<C, kTermsOf8>
                                                : launch_kernel<C, kTermsOfAny>;
    status = launch_keys(args, maps, p, buffers, plan.workers, stream);
    if (status.code) return status;
    if (args.ds_aux) sink_kernel<<<static_cast<unsigned>(problem.num_q_heads), kSinkThreads, 0, stream>>>(args, p, buffers);
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
