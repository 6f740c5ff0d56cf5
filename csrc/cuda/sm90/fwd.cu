// SPDX-License-Identifier: Apache-2.0
//
// Forward for every mask on sm_90, head_dim up to 128: full causal, wide and two-sided windows, sink tokens.
//
//     scheduler warp  next tile of rows, and what each row sees ...
//     loader warp     Q | K0 | V0 | K1 | V1 | ...                     by TMA, Q of the next tile while this one is computed
//     checker warps       V0 | V1 | ...                               values that are not finite, in tiles that need a mask
//     math groups     S0 | S1 = Q K1^T, O += P0 V0 | S2, O += P1 V1 | ...       softmax of S1 while O += P0 V0 runs
//
// A block stays on its multiprocessor and walks over tiles of rows, tokens x the heads of a group, the last of a sequence first; every
// other round in reverse, which evens out what the blocks get. A math group owns 64 rows; S, P and O live in its registers, and the three
// groups are out of step. The pivot of a row follows its maximum only when that has grown by 2^kLazy, so O is seldom rescaled. Key tiles
// lie at multiples of kTileK from key 0 and a masked key adds zero: a row's bits are its own.
//
// Registers: S, P and O 128 of 160 (head_dim 64) or 124 (128). Shared memory: two tiles of Q, kStages of K and V: 176 and 216 KiB.

#include "cuda/attn/launch_counter.cuh"
#include "cuda/attn/unfinite.cuh"
#include "cuda/tensor_map.cuh"

namespace sa {
namespace {

template <class Element_, int kHeadDim_, int kTileQ_, int kTileK_, int kStages_, int kSlots_> struct Config {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kTileQ = kTileQ_, kTileK = kTileK_, kStages = kStages_, kSlots = kSlots_;
    static constexpr int kGroups = kTileQ / 64, kThreads = 128 * (kGroups + 1), kCheckers = 2;
    static constexpr int kHalves = kHeadDim / 64; // of a row, 64 columns each, apart in shared memory
    static constexpr int kQueryHalf = kTileQ * kRowBytes, kKeyHalf = kTileK * kRowBytes;
    static constexpr bool kLooksAhead = kHeadDim > 64; // finds the tile after the next before P V is done; measured, either way
    static constexpr int kLoaderRegisters = 32, kMathRegisters = 160;
    static_assert(kTileQ * kTileQ < 65536, "row / group by a multiplication");
    static_assert(kHeadDim % 64 == 0 && kTileQ % 64 == 0 && kTileK % 16 == 0, "swizzled rows, rows of a wgmma, keys of a wgmma");
    static_assert(kLoaderRegisters + kGroups * kMathRegisters <= 512, "registers of a multiprocessor, for each of 128 threads");
};

// A tile of rows, and row by row what the math needs of it.
template <class C> struct Rows {
    Work work;
    bool exists;
    int begin[C::kTileQ], end[C::kTileQ], sink_end[C::kTileQ]; // keys: [begin, end) and [0, sink_end)
    float s_aux[C::kTileQ];
    int64_t out[C::kTileQ]; // offset; -1: no such row
    int64_t lse;            // offset, of the first row
};

template <class C> struct Smem {
    alignas(1024) unsigned char queries[2][C::kHalves * C::kQueryHalf];
    alignas(1024) unsigned char keys[C::kStages][C::kHalves * C::kKeyHalf], values[C::kStages][C::kHalves * C::kKeyHalf];
    Rows<C> rows[C::kSlots];
    bool unfinite[C::kStages][C::kCheckers];
    uint64_t rows_full[C::kSlots], rows_empty[C::kSlots], q_full[2], q_empty[2];
    uint64_t k_full[C::kStages], k_empty[C::kStages], v_full[C::kStages], v_ready[C::kStages], v_empty[C::kStages];
};

struct Maps {
    CUtensorMap q, k, v;
};

struct Problem {
    unsigned long long *counter, tag; // NULL: blocks take items in a fixed order
    unsigned num_tiles, num_items;
    int group, tokens; // heads and tokens of a tile of rows
    int group_inverse; // of 2^16, for row / group below kTileQ
    float scale_log2;
};

template <class C> __device__ __forceinline__ void describe_rows(Rows<C> &rows, const sinkattn_fwd_args &args, const Problem &p) {
    const Work &work = rows.work;
    if (threadIdx.x % 32 == 0) rows.lse = sa_row_index(&args.problem, &work.sequence, work.kv_head * p.group, work.tokens.begin);
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < C::kTileQ; row += 32) {
        const int64_t token = work.tokens.begin + row / p.group, head = work.kv_head * p.group + row % p.group;
        const bool real = token < work.tokens.end;
        const sa_range keys = real ? sa_row_band(&work.band, token) : sa_range{0, 0};
        rows.begin[row] = static_cast<int>(keys.begin);
        rows.end[row] = static_cast<int>(keys.end);
        rows.sink_end[row] = real ? static_cast<int>(sa_row_sink_end(&work.band, token)) : 0;
        rows.s_aux[row] = work.has_sink ? static_cast<float>(sa_load(args.s_aux, args.problem.s_aux_dtype, head)) : -INFINITY;
        rows.out[row] = real ? sa_offset(&args.out, work.sequence.batch, work.sequence.q_begin + token, head) : -1;
    }
}

// The items of a block: every so many of them, every other round in reverse; or, after the first, the next one that nobody has taken. Which
// block computes a tile does not change its bits.
__device__ __forceinline__ unsigned item_of_round(const Problem &p, unsigned round) {
    if (!p.counter) return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    return round == 0 ? blockIdx.x : gridDim.x + take_count(p.counter, p.tag, p.num_items);
}

template <class C> __device__ __forceinline__ void schedule(Smem<C> &smem, const sinkattn_fwd_args &args, const Problem &p) {
    const bool leader = threadIdx.x % 32 == 0;
    if (leader && p.counter) open_counter(p.counter, __ldcg(p.counter), p.tag);
    unsigned item = blockIdx.x, round = 0;
    for (Ring<C::kSlots> ring;; ring.n++) {
        Rows<C> &rows = smem.rows[ring.place()];
        barrier_wait(&smem.rows_empty[ring.place()], ring.phase() ^ 1);
        bool exists = false;
        if (leader) {
            while (!exists && item < p.num_items) {
                const unsigned next = item_of_round(p, ++round); // arrives while this one is described
                exists = find_work(args, p.tokens * p.group, C::kTileK, p.num_tiles, item, rows.work);
                item = next;
            }
            rows.exists = exists;
        }
        exists = __shfl_sync(0xffffffffu, exists, 0);
        __syncwarp(); // the lanes see the work
        if (exists) describe_rows<C>(rows, args, p);
        barrier_arrive(&smem.rows_full[ring.place()]);
        if (!exists) return;
    }
}

template <class C> __device__ __forceinline__ void load_tiles(Smem<C> &smem, const Maps &maps, const Problem &p) {
    const auto load_keys = [&](unsigned char *to, const CUtensorMap &map, uint64_t *full, const Work &work, int t) {
        barrier_arrive_expect(full, C::kHalves * C::kKeyHalf);
        for (int half = 0; half < C::kHalves; half++)
            tensor_load(to + half * C::kKeyHalf, &map, full, 64 * half, static_cast<int>(work.kv_head),
                        static_cast<int>(work.sequence.k_begin) + t * C::kTileK, static_cast<int>(work.sequence.batch));
    };
    Ring<C::kStages> ring;
    Ring<2> queries;
    for (Ring<C::kSlots> tiles;; tiles.n++, queries.n++) {
        barrier_wait(&smem.rows_full[tiles.place()], tiles.phase());
        if (!smem.rows[tiles.place()].exists) return;
        uint64_t *q_full = &smem.q_full[queries.place()];
        barrier_wait(&smem.q_empty[queries.place()], queries.phase() ^ 1);
        const Work &work = smem.rows[tiles.place()].work;
        const int end = work.tiles.end;
        int t = sa_key_tile_from(&work.tiles, 0); // once Q is there, a tile without keys may be gone
        barrier_arrive_expect(q_full, C::kHalves * p.tokens * p.group * kRowBytes);
        for (int half = 0; half < C::kHalves; half++)
            tensor_load(smem.queries[queries.place()] + half * C::kQueryHalf, &maps.q, q_full, 64 * half,
                        static_cast<int>(work.kv_head * p.group), static_cast<int>(work.sequence.q_begin + work.tokens.begin),
                        static_cast<int>(work.sequence.batch));
        for (; t < end; t = sa_key_tile_from(&work.tiles, t + 1), ring.n++) {
            barrier_wait(&smem.k_empty[ring.place()], ring.phase() ^ 1);
            load_keys(smem.keys[ring.place()], maps.k, &smem.k_full[ring.place()], work, t);
            barrier_wait(&smem.v_empty[ring.place()], ring.phase() ^ 1);
            load_keys(smem.values[ring.place()], maps.v, &smem.v_full[ring.place()], work, t);
        }
    }
}

template <class C> __device__ __forceinline__ void check_tiles(Smem<C> &smem) {
    const int checker = threadIdx.x / 32 - 2;
    Ring<C::kStages> ring;
    for (Ring<C::kSlots> tiles;; tiles.n++) {
        barrier_wait(&smem.rows_full[tiles.place()], tiles.phase());
        if (!smem.rows[tiles.place()].exists) return;
        const Work &work = smem.rows[tiles.place()].work;
        for (int t = sa_key_tile_from(&work.tiles, 0); t < work.tiles.end; t = sa_key_tile_from(&work.tiles, t + 1), ring.n++) {
            bool found = false;
            barrier_wait(&smem.v_full[ring.place()], ring.phase());
            if (!sa_key_tile_is_full(&work.tiles, t)) {
                found = zero_unfinite<typename C::Element, 32 * C::kCheckers>(smem.values[ring.place()], C::kHalves * C::kKeyHalf,
                                                                              threadIdx.x - 64);
                async_fence();
            }
            found = __any_sync(0xffffffffu, found);
            if (threadIdx.x % 32 == 0) smem.unfinite[ring.place()][checker] = found;
            barrier_arrive(&smem.v_ready[ring.place()]);
        }
        barrier_arrive(&smem.rows_empty[tiles.place()]);
    }
}

// pivot in log2 units; sum over this thread's columns.
struct Softmax {
    float pivot[2], sum[2];
};

template <class C> __device__ __forceinline__ void qk_product(float (&s)[C::kTileK / 2], uint32_t q, uint32_t k) {
    const uint64_t a = operand(q, 0), b = operand(k, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kHeadDim / 16; step++)
        wgmma_shared<typename C::Element>(s, operand_at(a, step / 4 * C::kQueryHalf + step % 4 * 32),
                                          operand_at(b, step / 4 * C::kKeyHalf + step % 4 * 32), step > 0);
    wgmma_commit();
}

template <class C>
__device__ __forceinline__ void pv_product(float (&o)[C::kHeadDim / 2], const uint32_t (&weights)[C::kTileK / 16][4], uint32_t v) {
    const uint64_t b = operand(v, C::kKeyHalf);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; step++)
        wgmma_registers<typename C::Element>(o, weights[step], operand_at(b, step * 16 * kRowBytes), true);
    wgmma_commit();
}

// The i-th of a thread's two rows, in the tile.
__device__ __forceinline__ int thread_row(int math_group, int i) {
    return 64 * math_group + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
}

// Scores to -inf where the row does not see the key: past its last one, or before its window and not a sink.
template <class C> __device__ __forceinline__ void mask_tile(float (&s)[C::kTileK / 2], const Rows<C> &rows, int math_group, int t) {
    const int column = t * C::kTileK + 2 * (threadIdx.x % 4);
    if (t >= rows.work.tiles.full_end) {
        const int end[2] = {rows.end[thread_row(math_group, 0)] - column, rows.end[thread_row(math_group, 1)] - column};
#pragma unroll
        for (int i = 0; i < C::kTileK / 2; i++)
            if (8 * (i / 4) + (i & 1) >= end[i / 2 & 1]) s[i] = -INFINITY;
    }
    if (t < rows.work.tiles.full_begin) {
        int begin[2], sink_end[2];
        for (int r = 0; r < 2; r++) {
            begin[r] = rows.begin[thread_row(math_group, r)] - column;
            sink_end[r] = rows.sink_end[thread_row(math_group, r)] - column;
        }
#pragma unroll
        for (int i = 0; i < C::kTileK / 2; i++) {
            const int j = 8 * (i / 4) + (i & 1);
            if (j < begin[i / 2 & 1] && j >= sink_end[i / 2 & 1]) s[i] = -INFINITY;
        }
    }
}

// s becomes exp2(s - pivot); alpha is what to multiply O by. Four chains of maxima and of sums, since a chain waits for itself.
constexpr float kLazy = 8.0f;

template <class C>
__device__ __forceinline__ void softmax_step(float (&s)[C::kTileK / 2], Softmax &softmax, float (&alpha)[2], float scale_log2) {
    float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, sum[4] = {}, from[2];
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; i++) top[i % 4] = fmaxf(top[i % 4], s[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) top[r] = fmaxf(top[2 * r], top[2 * r + 1]);
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
#pragma unroll
        for (int r = 0; r < 2; r++) top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], distance));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float before = softmax.pivot[r], now = top[r] * scale_log2;
        const float pivot = now > before + kLazy ? now : before; // a NaN in s_aux stays
        from[r] = pivot == -INFINITY ? 0.0f : pivot;
        alpha[r] = before == pivot ? 1.0f : exp2_approx(before - from[r]);
        softmax.pivot[r] = pivot;
    }
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; i++) {
        s[i] = exp2_approx(fmaf(s[i], scale_log2, -from[i / 2 & 1]));
        sum[i % 4] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) softmax.sum[r] = softmax.sum[r] * alpha[r] + (sum[2 * r] + sum[2 * r + 1]);
}

template <class C> __device__ __forceinline__ void pack(uint32_t (&weights)[C::kTileK / 16][4], const float (&s)[C::kTileK / 2]) {
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; i += 2) weights[i / 8][i / 2 % 4] = pack_halves<typename C::Element>(s[i], s[i + 1]);
}

template <class C> __device__ __forceinline__ void rescale(float (&o)[C::kHeadDim / 2], const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < C::kHeadDim / 2; i++) o[i] *= alpha[i / 2 & 1];
}

template <class C>
__device__ __forceinline__ void add_hidden(float (&o)[C::kHeadDim / 2], const sinkattn_fwd_args &args, const Rows<C> &rows, int math_group,
                                           int t) {
    const auto *data = static_cast<const uint16_t *>(args.v.data);
    const int row[2] = {thread_row(math_group, 0), thread_row(math_group, 1)};
#pragma unroll 1
    for (int j = t * C::kTileK; j < (t + 1) * C::kTileK && j < rows.work.sequence.k_len; j++)
        add_unfinite<typename C::Element>(o, data + key_offset(rows.work, args.v, j), args.problem.head_dim, [&](int i) {
            return (j >= rows.begin[row[i]] && j < rows.end[row[i]]) || j < rows.sink_end[row[i]];
        });
}

template <class C>
__device__ __forceinline__ void write_rows(const float (&o)[C::kHeadDim / 2], const Softmax &softmax, const sinkattn_fwd_args &args,
                                           const Problem &p, const Rows<C> &rows, int math_group) {
    auto *out = static_cast<uint16_t *>(args.out.data);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = quad_sum(softmax.sum[r]), factor = sum == 0.0f ? 0.0f : reciprocal_approx(sum);
        const int row = thread_row(math_group, r);
        const int64_t at = rows.out[row];
        if (at >= 0 && threadIdx.x % 4 == 0) {
            const float s_aux = rows.s_aux[row];
            const float pivot = softmax.pivot[r] == s_aux * kLog2e ? s_aux : softmax.pivot[r] * kLn2; // without keys: s_aux itself
            const int token = row * p.group_inverse >> 16;
            static_cast<float *>(args.lse)[rows.lse + (row - token * p.group) * args.problem.q_len + token] =
                sum == 0.0f ? -INFINITY : pivot + logf(sum);
        }
#pragma unroll
        for (int n = 0; n < C::kHeadDim / 8; n += 4) {
            uint32_t x[4];
#pragma unroll
            for (int c = 0; c < 4; c++)
                x[c] = pack_halves<typename C::Element>(o[4 * (n + c) + 2 * r] * factor, o[4 * (n + c) + 2 * r + 1] * factor);
            quad_transpose(x);
            const int column = 8 * (n + threadIdx.x % 4);
            if (at >= 0 && column < args.problem.head_dim) *reinterpret_cast<uint4 *>(out + at + column) = {x[0], x[1], x[2], x[3]};
        }
    }
}

// The sink's part of each of the thread's rows.
template <class C> __device__ __forceinline__ Softmax start_softmax(const Rows<C> &rows, int math_group) {
    Softmax softmax;
    for (int r = 0; r < 2; r++) {
        const float s_aux = rows.s_aux[thread_row(math_group, r)];
        softmax.pivot[r] = s_aux * kLog2e;
        softmax.sum[r] = threadIdx.x % 4 == 0 ? static_cast<float>(sa_sink_sum(s_aux)) : 0.0f;
    }
    return softmax;
}

template <class C> __device__ __forceinline__ void compute_tiles(Smem<C> &smem, const sinkattn_fwd_args &args, const Problem &p) {
    const int math_group = (C::kLooksAhead ? warp_uniform(threadIdx.x / 128) : threadIdx.x / 128) - 1;
    const bool leader = threadIdx.x % 128 == 0;
    Ring<C::kStages> ring;
    Ring<2> queries;
    for (Ring<C::kSlots> tiles;; tiles.n++, queries.n++) {
        barrier_wait(&smem.rows_full[tiles.place()], tiles.phase());
        const Rows<C> &rows = smem.rows[tiles.place()];
        if (!rows.exists) return;
        barrier_wait(&smem.q_full[queries.place()], queries.phase());
        const uint32_t q = shared_address(smem.queries[queries.place()]) + 64 * math_group * kRowBytes;
        float o[C::kHeadDim / 2] = {};
        Softmax softmax = start_softmax<C>(rows, math_group);
        const sa_key_tiles &key_tiles = rows.work.tiles;
        const int end = key_tiles.end;
        int t = sa_key_tile_from(&key_tiles, 0);
        if (t < end) {
            float s[C::kTileK / 2], alpha[2];
            uint32_t weights[C::kTileK / 16][4];
            barrier_wait(&smem.k_full[ring.place()], ring.phase());
            qk_product<C>(s, q, shared_address(smem.keys[ring.place()]));
            const bool masked = !sa_key_tile_is_full(&key_tiles, t);
            wgmma_wait<0>();
            computed(s);
            if (leader) barrier_arrive(&smem.k_empty[ring.place()]);
            if (masked) mask_tile<C>(s, rows, math_group, t);
            softmax_step<C>(s, softmax, alpha, p.scale_log2);
            // Asked before the product that lets the stage go.
            const auto has_hidden = [&](uint32_t place) { return smem.unfinite[place][0] || smem.unfinite[place][1]; };
            barrier_wait(&smem.v_ready[ring.place()], ring.phase());
            bool hidden = masked && has_hidden(ring.place());
            pack<C>(weights, s);
            const auto finish_values = [&] {
                wgmma_wait<0>();
                computed(o);
                if (leader) barrier_arrive(&smem.v_empty[ring.place()]);
                if (hidden) add_hidden<C>(o, args, rows, math_group, t);
                ring.n++;
            };
            // The scores of the next key tile, under the product of this one's weights and values.
            int next = sa_key_tile_from(&key_tiles, t + 1);
            if (next < end) barrier_wait(&smem.k_full[ring.next().place()], ring.next().phase());
            while (next < end) {
                const auto keys = ring.next();
                qk_product<C>(s, q, shared_address(smem.keys[keys.place()]));
                pv_product<C>(o, weights, shared_address(smem.values[ring.place()]));
                const bool next_masked = !sa_key_tile_is_full(&key_tiles, next);
                const int after_next = C::kLooksAhead ? sa_key_tile_from(&key_tiles, next + 1) : 0;
                wgmma_wait<1>();
                computed(s);
                if (leader) barrier_arrive(&smem.k_empty[keys.place()]);
                if (next_masked) mask_tile<C>(s, rows, math_group, next);
                softmax_step<C>(s, softmax, alpha, p.scale_log2);
                const bool grown = __any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f);
                barrier_wait(&smem.v_ready[keys.place()], keys.phase());
                const bool next_hidden = next_masked && has_hidden(keys.place());
                if (C::kLooksAhead && after_next < end) barrier_wait(&smem.k_full[keys.next().place()], keys.next().phase());
                finish_values();
                if (grown) rescale<C>(o, alpha);
                t = next;
                hidden = next_hidden;
                next = C::kLooksAhead ? after_next : sa_key_tile_from(&key_tiles, t + 1);
                if (!C::kLooksAhead && next < end) barrier_wait(&smem.k_full[ring.next().place()], ring.next().phase());
                pack<C>(weights, s);
            }
            pv_product<C>(o, weights, shared_address(smem.values[ring.place()]));
            finish_values();
        }
        write_rows<C>(o, softmax, args, p, rows, math_group);
        bar_sync<128>(1 + math_group); // the group has read the queries and the rows
        if (leader) {
            barrier_arrive(&smem.rows_empty[tiles.place()]);
            barrier_arrive(&smem.q_empty[queries.place()]);
        }
    }
}

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void fwd_kernel(const __grid_constant__ sinkattn_fwd_args args,
                                                             const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                                                             unsigned *error_word) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<Smem<C> *>(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kSlots; i++) {
            barrier_init(&smem.rows_full[i], 32);
            barrier_init(&smem.rows_empty[i], C::kGroups + 32 * C::kCheckers);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(&smem.q_full[i], 1);
            barrier_init(&smem.q_empty[i], C::kGroups);
        }
        for (int i = 0; i < C::kStages; i++) {
            barrier_init(&smem.k_full[i], 1);
            barrier_init(&smem.k_empty[i], C::kGroups);
            barrier_init(&smem.v_full[i], 1);
            barrier_init(&smem.v_ready[i], 32 * C::kCheckers);
            barrier_init(&smem.v_empty[i], C::kGroups);
        }
        barrier_init_fence();
    }
    if (blockIdx.x == 0) check_lengths(args, error_word);
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<C::kLoaderRegisters>();
        if (threadIdx.x < 32) schedule<C>(smem, args, p);
        if (threadIdx.x == 32) load_tiles<C>(smem, maps, p);
        if (threadIdx.x >= 64) check_tiles<C>(smem);
    } else {
        registers_up<C::kMathRegisters>();
        compute_tiles<C>(smem, args, p);
    }
#else
    __trap();
#endif
}

template <class C> sinkattn_status launch(const sinkattn_fwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.problem;
    Problem p;
    p.group = static_cast<int>(problem.num_q_heads / problem.num_kv_heads);
    p.tokens = C::kTileQ / p.group;
    p.group_inverse = (65536 + p.group - 1) / p.group;
    const int64_t num_tiles = num_row_tiles(problem, p.tokens * p.group), num_items = num_tiles * problem.num_kv_heads;
    if (num_items > INT32_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld tiles of rows; a launch holds at most 2^31", static_cast<long long>(num_items));
    p.num_tiles = static_cast<unsigned>(num_tiles);
    p.num_items = static_cast<unsigned>(num_items);
    p.scale_log2 = static_cast<float>(sa_softmax_scale(&problem)) * kLog2e;
    p.counter = nullptr;
    p.tag = 0;
    if (problem.packed && p.num_items < kMaxCount) { // sequences differ, and only the device knows by how much
        p.counter = launch_counter(context.workspace);
        p.tag = next_launch_tag();
    }
    Encode encode = nullptr;
    unsigned *error_word;
    Maps maps;
    sinkattn_status status = find_encode(&encode);
    if (!status.code) status = sa_cuda_error_word(&error_word);
    if (!status.code) status = encode_map(encode, &maps.q, problem, args.q, problem.q_len, problem.num_q_heads, p.tokens, p.group, "q");
    if (!status.code) status = encode_map(encode, &maps.k, problem, args.k, problem.k_len, problem.num_kv_heads, C::kTileK, 1, "k");
    if (!status.code) status = encode_map(encode, &maps.v, problem, args.v, problem.k_len, problem.num_kv_heads, C::kTileK, 1, "v");
    if (!status.code) status = allow_shared<fwd_kernel<C>>(sizeof(Smem<C>));
    if (status.code) return status;
    const unsigned blocks = static_cast<unsigned>(sa_min(num_items, plan.workers));
    fwd_kernel<C><<<blocks, C::kThreads, sizeof(Smem<C>), static_cast<cudaStream_t>(context.stream)>>>(args, maps, p, error_word);
    return sa_cuda_status("sa_fwd_cuda_sm90", cudaGetLastError());
}

template <int kHeadDim, int kTileQ, int kTileK, int kStages, int kSlots>
sinkattn_status launch_dtype(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_fwd_args *>(arguments);
    if (args.problem.dtype == SINKATTN_BF16) return launch<Config<Bf16, kHeadDim, kTileQ, kTileK, kStages, kSlots>>(args, *plan, *context);
    return launch<Config<Fp16, kHeadDim, kTileQ, kTileK, kStages, kSlots>>(args, *plan, *context);
}

} // namespace
} // namespace sa

extern "C" sinkattn_status sa_fwd_cuda_sm90_d64(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return sa::launch_dtype<64, sa::sa_fwd_cuda_sm90_d64_tile_q, sa::sa_fwd_cuda_sm90_d64_tile_k, 4, 4>(args, plan, context);
}

extern "C" sinkattn_status sa_fwd_cuda_sm90_d128(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return sa::launch_dtype<128, sa::sa_fwd_cuda_sm90_d128_tile_q, sa::sa_fwd_cuda_sm90_d128_tile_k, 3, 2>(args, plan, context);
}
