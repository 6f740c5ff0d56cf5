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
// groups are out of step; it releases key tiles that only the other groups need. Out leaves through the place of the queries. A row's pivot
// is its maximum over its first key tile; later maxima are not looked for, and the rare row that outgrows its pivot is scored once more.
// Key tiles lie at multiples of kTileK from key 0 and a masked key adds zero: a row's bits are its own.
//
// Registers: S, P and O 128 of 160 (head_dim 64) or 124 (128). Shared memory: two tiles of Q, kStages of K and V: 176 and 216 KiB.

#include "cuda/fwd_sm90/rows.cuh"
#include "cuda/fwd_sm90/softmax.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/host/tensor_map.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/pipe.cuh"
#include "cuda/tile/wgmma.cuh"
#include "cuda/work/launch_counter.cuh"

namespace sa::fwd_sm90 {
namespace {

template <class C> struct Smem {
    alignas(1024) unsigned char queries[2][C::kHalves * C::kQueryHalf];
    alignas(1024) unsigned char keys[C::kStages][C::kHalves * C::kKeyHalf], values[C::kStages][C::kHalves * C::kKeyHalf];
    Rows<C> rows[C::kSlots];
    alignas(2) bool nonfinite[C::kStages][C::kCheckers];
    Barriers<2> q_full, q_empty;
    Barriers<C::kStages> k_full, k_empty, v_full, v_ready, v_empty; // ready: checked for values that are not finite
};

struct Maps {
    CUtensorMap q, k, v, out;
};

// Items of a block: one a round, in reverse block order every other round; with a counter, blockIdx.x first, then the next untaken item.
// Which block computes a tile does not change its bits.
__device__ __forceinline__ unsigned item_of_round(const Problem &p, unsigned round) {
    if (!p.counter) return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    return round == 0 ? blockIdx.x : gridDim.x + take_count(p.counter, p.tag, p.num_items);
}

template <class C> __device__ __forceinline__ void schedule(Smem<C> &smem, const sinkattn_fwd_args &args, const Problem &p) {
    const bool leader = threadIdx.x % 32 == 0;
    if (leader && p.counter) open_counter(p.counter, __ldcg(p.counter), p.tag);
    unsigned item = blockIdx.x, round = 0;
    for (Ring<C::kSlots> ring;; ring.n++) {
        Rows<C> &rows = smem.rows[ring.stage()];
        smem.rows[ring.stage()].empty.wait_previous(ring);
        bool exists = false;
        while (!exists && item < p.num_items) {
            const unsigned tile = p.num_tiles - 1 - item / p.num_kv_heads, b = sequence_of_tile(args, p, tile);
            if (leader) {
                const unsigned next = item_of_round(p, ++round); // arrives while this one is described
                exists = describe_tile<C>(args, p, item % p.num_kv_heads, b, tile, rows.work);
                item = next;
            }
            item = __shfl_sync(0xffffffffu, item, 0);
            exists = __shfl_sync(0xffffffffu, exists, 0);
        }
        if (leader) rows.exists = exists;
        __syncwarp(); // the lanes see the work
        if (exists) describe_rows<C>(rows, args, p);
        smem.rows[ring.stage()].full.arrive();
        if (!exists) return;
    }
}

template <class C> __device__ __forceinline__ void load_tiles(Smem<C> &smem, const Maps &maps, const Problem &p) {
    const auto load_keys = [&](unsigned char *to, const CUtensorMap &map, Barrier &full, const Work &work, int t) {
        full.arrive_expect(C::kHalves * C::kKeyHalf);
        for (int half = 0; half < C::kHalves; half++)
            tensor_load(to + half * C::kKeyHalf, &map, full, 64 * half, static_cast<int>(work.kv_head),
                        static_cast<int>(work.sequence.k_begin) + t * C::kTileK, static_cast<int>(work.sequence.batch));
    };
    Ring<C::kStages> ring;
    for (Ring<C::kSlots> tiles;; tiles.n++) {
        const Ring<2> queries{tiles.n};
        smem.rows[tiles.stage()].full.wait(tiles);
        if (!smem.rows[tiles.stage()].exists) return;
        Barrier &q_full = smem.q_full[queries.stage()];
        smem.q_empty.acquire(queries);
        const Work &work = smem.rows[tiles.stage()].work;
        const int end = work.tiles.end; // read before Q is sent: rows that see no keys may be gone once Q is there
        KeyTileWalk tile(work.tiles);
        q_full.arrive_expect(C::kHalves * p.tokens * p.group * kRowBytes);
        for (int half = 0; half < C::kHalves; half++)
            tensor_load(smem.queries[queries.stage()] + half * C::kQueryHalf, &maps.q, q_full, 64 * half,
                        static_cast<int>(work.kv_head * p.group), static_cast<int>(work.sequence.q_begin + work.tokens.begin),
                        static_cast<int>(work.sequence.batch));
        for (; tile.t < end; tile.advance(), ring.n++) {
            smem.k_empty.acquire(ring);
            load_keys(smem.keys[ring.stage()], maps.k, smem.k_full[ring.stage()], work, tile.t);
            smem.v_empty.acquire(ring);
            load_keys(smem.values[ring.stage()], maps.v, smem.v_full[ring.stage()], work, tile.t);
        }
    }
}

template <class C> __device__ __forceinline__ void check_tiles(Smem<C> &smem) {
    const int checker = threadIdx.x / 32 - 2;
    Ring<C::kStages> ring;
    for (Ring<C::kSlots> tiles;; tiles.n++) {
        smem.rows[tiles.stage()].full.wait(tiles);
        if (!smem.rows[tiles.stage()].exists) return;
        const Work &work = smem.rows[tiles.stage()].work;
        for (KeyTileWalk tile(work.tiles); tile.exists(); tile.advance(), ring.n++) {
            bool found = false;
            smem.v_full.wait(ring);
            if (!tile.is_full()) {
                constexpr int kBytes = C::kHalves * C::kKeyHalf, kLookers = 32 * C::kCheckers, kFirst = 64;
                found = any_nonfinite<typename C::Element, kLookers>(smem.values[ring.stage()], kBytes, threadIdx.x - kFirst);
                if (found) zero_nonfinite<typename C::Element, kLookers>(smem.values[ring.stage()], kBytes, threadIdx.x - kFirst);
                async_fence();
            }
            found = __any_sync(0xffffffffu, found);
            if (threadIdx.x % 32 == 0) smem.nonfinite[ring.stage()][checker] = found;
            smem.v_ready[ring.stage()].arrive();
        }
        smem.rows[tiles.stage()].empty.arrive();
    }
}

template <class C> __device__ __forceinline__ void qk_product(float (&s)[C::kTileK / 2], uint32_t q, uint32_t k) {
    wgmma_abt<typename C::Element, C::kHeadDim, C::kQueryHalf, C::kKeyHalf>(s, q, k);
}

template <class C>
__device__ __forceinline__ void add_hidden(float (&o)[C::kHeadDim / 2], const sinkattn_fwd_args &args, const Problem &p,
                                           const Rows<C> &rows, int math_group, int t) {
    const auto *data = static_cast<const uint16_t *>(args.v.data);
    const int token[2] = {ThreadRow(p, math_group, 0).token, ThreadRow(p, math_group, 1).token};
#pragma unroll 1
    for (int j = t * C::kTileK; j < (t + 1) * C::kTileK && j < rows.work.sequence.k_len; j++)
        add_nonfinite<typename C::Element>(o, data + key_offset(rows.work, args.v, j), args.problem.head_dim, [&](int i) {
            return (j >= rows.begin[token[i]] && j < rows.end[token[i]]) || j < rows.sink_end[token[i]];
        });
}

// To where the group's queries were, as they were.
template <class C> __device__ __forceinline__ void stage_out(uint32_t slot, const float (&o)[C::kHeadDim / 2], const float (&factor)[2]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    const uint32_t to = slot + row * kRowBytes;
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; n += 2) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = pack_halves<typename C::Element>(o[4 * n + 2 * i] * factor[i % 2], o[4 * n + 2 * i + 1] * factor[i % 2]);
        stmatrix_x4(to + n / 8 * C::kQueryHalf + ((n % 8 + lane / 16 ^ lane % 8) << 4), x);
    }
}

// By one copy, which still reads the slot when this returns true; or by threads, where the group has tokens in part or some do not exist.
// The group has then read the queries and the rows.
template <class C>
__device__ __forceinline__ bool write_out(const unsigned char *slot, const sinkattn_fwd_args &args, const Maps &maps, const Problem &p,
                                          const Rows<C> &rows, int math_group) {
    const Work &work = rows.work;
    const int num_tokens = work.tokens.end - work.tokens.begin, first = math_group * p.copied;
    const int64_t token = work.sequence.q_begin + work.tokens.begin, head = work.kv_head * p.group;
    async_fence();
    bar_sync<128>(kMathBarrier + math_group);
    if (p.copied && first + p.copied <= num_tokens) {
        if (threadIdx.x % 128) return true;
        for (int half = 0; half < C::kHalves; half++)
            tensor_store(&maps.out, slot + half * C::kQueryHalf, 64 * half, static_cast<int>(head), static_cast<int>(token + first),
                         static_cast<int>(work.sequence.batch));
        store_commit();
        return true;
    }
    auto *out = static_cast<uint16_t *>(args.out.data) + sa_offset(&args.out, work.sequence.batch, token, head);
#pragma unroll 1
    for (int x = threadIdx.x % 128; x < 64 * 8 * C::kHalves; x += 128) {
        const int row = x / (8 * C::kHalves), column = x % (8 * C::kHalves) * 8;
        const int at = 64 * math_group + row, i = at * p.group_inverse >> 16;
        if (i >= num_tokens || column >= args.problem.head_dim) continue;
        *reinterpret_cast<uint4 *>(out + i * args.out.row_stride + (at - i * p.group) * args.out.head_stride + column) =
            *reinterpret_cast<const uint4 *>(slot + column / 64 * C::kQueryHalf + row * kRowBytes + ((column / 8 % 8 ^ row % 8) << 4));
    }
    async_fence();
    bar_sync<128>(kMathBarrier + math_group);
    return false;
}

// Over the key tiles that the rows see, one or more: O, and the factor that it still needs. scored: called when the first scores are there.
template <class C, class Scored>
__device__ __forceinline__ void attend(float (&o)[C::kHeadDim / 2], float (&factor)[2], Softmax &softmax, Smem<C> &smem,
                                       Ring<C::kStages> &ring, const sinkattn_fwd_args &args, const Problem &p, const Rows<C> &rows,
                                       int math_group, uint32_t q, int t, int end, const Scored &scored) {
    const sa_key_tiles &key_tiles = rows.group_tiles[math_group];
    const bool leader = threadIdx.x % 128 == 0;
    float s[C::kTileK / 2], total[2];
    uint32_t weights[C::kTileK / 16][4];
    smem.k_full.wait(ring);
    qk_product<C>(s, q, shared_address(smem.keys[ring.stage()]));
    const bool masked = !sa_key_tile_is_full(&key_tiles, t);
    wgmma_wait<0>();
    computed(s);
    if (threadIdx.x % 32 == 0) smem.k_empty.release(ring);
    scored();
    if (masked) mask_tile<C>(s, p, rows, math_group, t);
    follow_maxima<C>(s, o, softmax, p, rows, math_group, t);
    exponentials<C>(s, total, softmax, p.scale_log2);
    for (int r = 0; r < 2; r++) softmax.sum[r] += total[r];
    bool starting = begins_after<C>(softmax, p, rows, math_group, t);
    // Asked before the product that lets the stage go.
    const auto has_hidden = [&](uint32_t place) { return *reinterpret_cast<const uint16_t *>(smem.nonfinite[place]) != 0; };
    smem.v_ready.wait(ring);
    bool hidden = has_hidden(ring.stage());
    pack<typename C::Element>(weights, s);
    const auto finish_values = [&] {
        wgmma_wait<0>();
        computed(o);
        if (leader) smem.v_empty.release(ring);
        if (hidden) add_hidden<C>(o, args, p, rows, math_group, t);
        ring.n++;
    };
    // The scores of the next key tile, under the product of this one's weights and values.
    int next = sa_key_tile_from(&key_tiles, t + 1);
    if (next < end) smem.k_full.wait(ring.next());
    while (next < end) {
        const auto keys = ring.next();
        qk_product<C>(s, q, shared_address(smem.keys[keys.stage()]));
        wgmma_pb<typename C::Element, C::kKeyHalf>(o, weights, shared_address(smem.values[ring.stage()]));
        const bool next_masked = !sa_key_tile_is_full(&key_tiles, next);
        const int after_next = sa_key_tile_from(&key_tiles, next + 1);
        wgmma_wait<1>();
        computed(s);
        if (next_masked) mask_tile<C>(s, p, rows, math_group, next);
        if (starting) {
            wgmma_wait<0>();
            computed(o);
            follow_maxima<C>(s, o, softmax, p, rows, math_group, next);
            starting = begins_after<C>(softmax, p, rows, math_group, next);
        }
        exponentials<C>(s, total, softmax, p.scale_log2);
        const bool large = __any_sync(0xffffffffu, total[0] > kLarge<typename C::Element> || total[1] > kLarge<typename C::Element>);
        smem.v_ready.wait(keys);
        const bool next_hidden = has_hidden(keys.stage());
        if (after_next < end) smem.k_full.wait(keys.next());
        finish_values();
        if (large) outgrow<C>(s, total, o, softmax, p, rows, math_group, next, q, shared_address(smem.keys[keys.stage()]));
        if (threadIdx.x % 32 == 0) smem.k_empty.release(keys);
        for (int r = 0; r < 2; r++) softmax.sum[r] += total[r];
        t = next;
        hidden = next_hidden;
        next = after_next;
        pack<typename C::Element>(weights, s);
    }
    wgmma_pb<typename C::Element, C::kKeyHalf>(o, weights, shared_address(smem.values[ring.stage()]));
    finish_softmax<C>(factor, softmax, args, p, rows, math_group);
    finish_values();
}

// Releases a key tile that none of this warpgroup's rows see. Each warp waits for V before it releases K: the loader refills K, then V,
// once every warp has released K, and a warp still waiting for V would miss that phase.
template <class C> __device__ __forceinline__ void skip_tile(Smem<C> &smem, Ring<C::kStages> ring) {
    smem.k_full.wait(ring);
    smem.v_ready.wait(ring);
    __syncwarp();
    if (threadIdx.x % 32 == 0) smem.k_empty.release(ring);
    if (threadIdx.x % 128 == 0) smem.v_empty.release(ring);
}

template <class C>
__device__ __forceinline__ void compute_tiles(Smem<C> &smem, const sinkattn_fwd_args &args, const Maps &maps, const Problem &p) {
    const int math_group = warp_uniform(threadIdx.x / 128) - 1;
    const bool leader = threadIdx.x % 128 == 0;
    Ring<C::kStages> ring;
    bool copying = false; // out of the tile before, from where its queries were
    for (Ring<C::kSlots> tiles;; tiles.n++) {
        const Ring<2> queries{tiles.n};
        const auto end_copy = [&] {
            if (!copying || !leader) return;
            store_wait_read<0>();
            smem.q_empty.release(queries.next()); // of two stages, also the previous one
        };
        Rows<C> &rows = smem.rows[tiles.stage()];
        rows.full.wait(tiles);
        if (!rows.exists) break;
        smem.q_full.wait(queries);
        const uint32_t q = shared_address(smem.queries[queries.stage()]) + 64 * math_group * kRowBytes;
        float o[C::kHeadDim / 2] = {}, factor[2];
        Softmax softmax;
        const int end = rows.group_tiles[math_group].end, t = sa_key_tile_from(&rows.group_tiles[math_group], 0);
        if (t < end) {
            static_assert((C::kTileQ - 64) / C::kTileK + 1 < C::kStages, "what is not seen stays until the first scores are there");
            Ring<C::kStages> unseen = ring;
            ring.n += t - sa_key_tile_from(&rows.work.tiles, 0);
            attend<C>(o, factor, softmax, smem, ring, args, p, rows, math_group, q, t, end, [&] {
                end_copy();
#pragma unroll 1
                for (; unseen.n != ring.n; unseen.n++) skip_tile<C>(smem, unseen);
            });
        } else {
            finish_softmax<C>(factor, softmax, args, p, rows, math_group);
            end_copy();
        }
        unsigned char *slot = smem.queries[queries.stage()] + 64 * math_group * kRowBytes;
        stage_out<C>(q, o, factor);
        copying = write_out<C>(slot, args, maps, p, rows, math_group);
#pragma unroll 1
        for (KeyTileWalk unseen(rows.work.tiles, end); unseen.exists(); unseen.advance(), ring.n++) skip_tile<C>(smem, ring);
        rows.empty.arrive();
        if (leader && !copying) smem.q_empty.release(queries);
    }
    if (leader) store_wait();
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
            smem.rows[i].full.init(32);
            smem.rows[i].empty.init(128 * C::kGroups + 32 * C::kCheckers);
        }
        for (int i = 0; i < 2; i++) {
            smem.q_full[i].init(1);
            smem.q_empty[i].init(C::kGroups);
        }
        for (int i = 0; i < C::kStages; i++) {
            smem.k_full[i].init(1);
            smem.k_empty[i].init(4 * C::kGroups);
            smem.v_full[i].init(1);
            smem.v_ready[i].init(32 * C::kCheckers);
            smem.v_empty[i].init(C::kGroups);
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
        compute_tiles<C>(smem, args, maps, p);
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
    p.num_kv_heads = static_cast<unsigned>(problem.num_kv_heads);
    p.num_tiles = static_cast<unsigned>(num_tiles);
    p.num_items = static_cast<unsigned>(num_items);
    p.copied = 64 % p.group ? 0 : 64 / p.group;
    p.scale_log2 = static_cast<float>(sa_softmax_scale(&problem)) * kLog2e;
    p.counter = nullptr;
    p.tag = 0;
    if (problem.packed && p.num_items < kMaxCount) { // sequences differ, and only the device knows by how much
        p.counter = launch_counter(context.workspace);
        p.tag = next_launch_tag();
    }
    unsigned *error_word;
    Maps maps;
    SA_TRY(sa_cuda_error_word(&error_word));
    SA_TRY(map_rows(&maps.q, problem, args.q, p.tokens, p.group, "q"));
    SA_TRY(map_keys(&maps.k, problem, args.k, C::kTileK, "k"));
    SA_TRY(map_keys(&maps.v, problem, args.v, C::kTileK, "v"));
    if (p.copied) SA_TRY(map_rows(&maps.out, problem, args.out, p.copied, p.group, "out"));
    const unsigned blocks = static_cast<unsigned>(sa_min(num_items, plan.workers));
    return launch_blocks<fwd_kernel<C>>("sa_fwd_cuda_sm90", blocks, C::kThreads, sizeof(Smem<C>), context.stream, args, maps, p,
                                        error_word);
}

template <int kHeadDim, int kTileQ, int kTileK, int kStages, int kSlots>
sinkattn_status launch_dtype(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_fwd_args *>(arguments);
    if (args.problem.dtype == SINKATTN_BF16) return launch<Config<Bf16, kHeadDim, kTileQ, kTileK, kStages, kSlots>>(args, *plan, *context);
    return launch<Config<Fp16, kHeadDim, kTileQ, kTileK, kStages, kSlots>>(args, *plan, *context);
}

} // namespace

extern "C" sinkattn_status sa_fwd_cuda_sm90_d64(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return launch_dtype<64, sa_fwd_cuda_sm90_d64_tile_q, sa_fwd_cuda_sm90_d64_tile_k, 4, 4>(args, plan, context);
}

extern "C" sinkattn_status sa_fwd_cuda_sm90_d128(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return launch_dtype<128, sa_fwd_cuda_sm90_d128_tile_q, sa_fwd_cuda_sm90_d128_tile_k, 3, 2>(args, plan, context);
}

} // namespace sa::fwd_sm90
