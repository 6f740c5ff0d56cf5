// SPDX-License-Identifier: Apache-2.0
//
// Forward for every mask on sm_90, head_dim up to 128: full causal, wide and two-sided windows, sink tokens.
//
//     scheduler warp  the next tile of rows, and the keys that each row sees ...
//     loader warp     Q | K0 | V0 | K1 | V1 | ...                     by TMA; Q of the next tile while this one is computed
//     checker warps       V0 | V1 | ...                               zero values that are not finite, in tiles that need a mask
//     math warpgroups S0 | S1 = Q K1^T, O += P0 V0 | S2, O += P1 V1 | ...       softmax of S1 while O += P0 V0 runs
//
// A block stays on its multiprocessor and walks over tiles of rows (tokens x the heads of a GQA group), the last of a sequence first, and
// in reverse every other round, which evens out the blocks' work. A math warpgroup owns 64 rows, with S, P and O in registers; the three
// run out of step, and each releases key tiles that only the others need. Out leaves through the stage of the queries. A row's pivot is its
// maximum over its first key tile; later tiles are not searched for maxima, and the rare row that outgrows its pivot is scored again. Key
// tiles lie at multiples of kTileK from key 0 and a masked key adds zero, so a row's bits are its own.
//
// Registers: S, P and O take 128 of 160 at head_dim 64, 124 at 128. Shared memory: two tiles of Q, kStages of K and V, 176 and 216 KiB.

#include "cuda/fwd_sm90/cached.cuh"
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
    Rows<C> rows[C::kRowStages];
    alignas(2) bool nonfinite[C::kStages][C::kCheckers];
    Barriers<2> q_full, q_empty;
    Barriers<C::kStages> k_full, k_empty, v_full, v_ready, v_empty; // ready: checked for values that are not finite
};

struct Maps {
    CUtensorMap q, k, v, out;
};

// A block's item of a round: in order, and in reverse every other round; with a counter, blockIdx.x first, then the next untaken item.
// Which block computes a tile does not change its bits.
__device__ __forceinline__ unsigned item_of_round(const Problem &p, unsigned round) {
    if (!p.counter) return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    return round == 0 ? blockIdx.x : gridDim.x + take_count(p.counter, p.tag, p.num_items);
}

template <class C>
__device__ __forceinline__ void schedule(Smem<C> &smem, const sinkattn_fwd_args &args, const typename C::Keys &keys, const Problem &p) {
    const bool leader = threadIdx.x % 32 == 0;
    if (leader && p.counter) open_counter(p.counter, __ldcg(p.counter), p.tag);
    unsigned item = blockIdx.x, round = 0;
    for (Ring<C::kRowStages> ring;; ring.n++) {
        Rows<C> &rows = smem.rows[ring.stage()];
        smem.rows[ring.stage()].empty.wait_previous(ring);
        bool exists = false;
        while (!exists && item < p.num_items) {
            const unsigned tile = p.num_tiles - 1 - item / p.num_kv_heads, b = sequence_of_tile(args, p, tile);
            if (leader) {
                const unsigned next = item_of_round(p, ++round); // the counter's answer arrives while this item is described
                exists = describe_tile<C>(args, keys, p, item % p.num_kv_heads, b, tile, rows.work);
                item = next;
            }
            item = __shfl_sync(0xffffffffu, item, 0);
            exists = __shfl_sync(0xffffffffu, exists, 0);
        }
        if (leader) rows.exists = exists;
        __syncwarp(); // the lanes see rows.work
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
    for (Ring<C::kRowStages> tiles;; tiles.n++) {
        const Ring<2> queries{tiles.n};
        smem.rows[tiles.stage()].full.wait(tiles);
        if (!smem.rows[tiles.stage()].exists) return;
        smem.q_empty.acquire(queries);
        const Work &work = smem.rows[tiles.stage()].work;
        // Read before Q is sent: once Q lands, the math may finish a tile without keys, and its stage be described anew.
        const int end = work.tiles.end;
        KeyTileWalk tile(work.tiles);
        load_queries<C>(smem, maps, p, queries, work);
        for (; tile.t < end; tile.advance(), ring.n++) {
            // In flight: K and V of at most kStages earlier key tiles; Q of up to two row tiles, since the loader may pass a row
            // tile of few key tiles before its Q has landed.
            smem.k_empty.acquire(ring);
            load_keys(smem.keys[ring.stage()], maps.k, smem.k_full[ring.stage()], work, tile.t);
            smem.v_empty.acquire(ring);
            load_keys(smem.values[ring.stage()], maps.v, smem.v_full[ring.stage()], work, tile.t);
        }
    }
}

template <class C> __device__ __forceinline__ void check_tiles(Smem<C> &smem) {
    Ring<C::kStages> ring;
    for (Ring<C::kRowStages> tiles;; tiles.n++) {
        smem.rows[tiles.stage()].full.wait(tiles);
        if (!smem.rows[tiles.stage()].exists) return;
        const Work &work = smem.rows[tiles.stage()].work;
        for (KeyTileWalk tile(work.tiles); tile.exists(); tile.advance(), ring.n++) {
            smem.v_full.wait(ring);
            check_values<C>(smem, ring, !tile.is_full(), static_cast<int>(threadIdx.x) - 64);
        }
        smem.rows[tiles.stage()].empty.arrive();
    }
}

// A math warpgroup: S, P and O of its 64 rows.
template <class C> struct Math {
    using Element = typename C::Element;
    using Scores = float[C::kTileK / 2];
    using Weights = uint32_t[C::kTileK / 16][4]; // P as packed pairs
    using Out = float[C::kHeadDim / 2];

    Smem<C> &smem;
    const sinkattn_fwd_args &args;
    const typename C::Keys &keys;
    const Maps &maps;
    const Problem &p;
    const int math_warpgroup;
    const bool leader; // of the warpgroup
    Ring<C::kStages> ring;

    // Issues S = Q K^T of the stage's keys; the caller waits. q: the address of the warpgroup's first query.
    __device__ __forceinline__ void begin_scores(Scores &s, uint32_t q, uint32_t stage) {
        wgmma_abt<Element, C::kHeadDim, C::kQueryHalf, C::kKeyHalf>(s, q, shared_address(smem.keys[stage]));
    }

    // Issues O += P V of the ring's stage; end_values waits.
    __device__ __forceinline__ void begin_values(Out &o, const Weights &weights) {
        wgmma_pb<Element, C::kKeyHalf>(o, weights, shared_address(smem.values[ring.stage()]));
    }

    __device__ __forceinline__ bool has_nonfinite(uint32_t stage) const {
        return *reinterpret_cast<const uint16_t *>(smem.nonfinite[stage]) != 0;
    }

    // Adds to O the values of tile t that the checkers zeroed, in the rows that see them.
    __device__ __forceinline__ void add_back(Out &o, const WarpgroupRows<C> &own, int t) {
        const auto *data = static_cast<const uint16_t *>(args.v.data);
        const int token[2] = {own.row(0).token, own.row(1).token};
        const Rows<C> &rows = own.rows;
#pragma unroll 1
        for (int j = t * C::kTileK; j < (t + 1) * C::kTileK && j < rows.work.sequence.k_len; j++) {
            const int64_t offset = offset_of(keys, rows.work.sequence, args.v, j, rows.work.kv_head);
            if (C::Keys::kCached && offset < 0) continue;
            add_nonfinite<Element>(o, data + offset, args.problem.head_dim, [&](int i) {
                return (j >= rows.begin[token[i]] && j < rows.end[token[i]]) || j < rows.sink_end[token[i]];
            });
        }
    }

    // Waits for the product of tile t's values, then goes to the next stage.
    __device__ __forceinline__ void end_values(Out &o, const WarpgroupRows<C> &own, int t, bool nonfinite) {
        wgmma_wait<0>();
        pin(o);
        if (leader) smem.v_empty.release(ring);
        if (nonfinite) add_back(o, own, t);
        ring.n++;
    }

    // O over the key tiles from `tile` to `end` that the rows see, at least one, and the factor that it still needs. Calls scored() once
    // the first scores are complete.
    template <class Scored>
    __device__ __forceinline__ void attend(Out &o, float (&factor)[2], Softmax &softmax, const WarpgroupRows<C> &own, uint32_t q,
                                           KeyTileWalk tile, int end, const Scored &scored) {
        Scores s;
        float total[2];
        Weights weights;
        smem.k_full.wait(ring);
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
            // No wgmma in flight; P(t) in registers; V(t) and K(next) landed.
            const auto keys = ring.next();
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
        begin_values(o, weights);
        finish_softmax<C>(factor, softmax, args, own);
        end_values(o, own, tile.t, nonfinite);
    }

    // Releases a key tile that none of this warpgroup's rows see. Each warp waits for V before it releases K: the loader refills K, then V,
    // once every warp has released K, and a warp still waiting for V would miss that phase.
    __device__ __forceinline__ void skip_tile(Ring<C::kStages> skipped) {
        smem.k_full.wait(skipped);
        smem.v_ready.wait(skipped);
        __syncwarp();
        if (threadIdx.x % 32 == 0) smem.k_empty.release(skipped);
        if (leader) smem.v_empty.release(skipped);
    }

    // Writes O, rounded, over the warpgroup's queries and in their layout.
    __device__ __forceinline__ void stage_out(uint32_t stage, const Out &o, const float (&factor)[2]) {
        const int lane = threadIdx.x % 32;
        const uint32_t to = stage + store_row(threadIdx.x) * kRowBytes;
#pragma unroll
        for (int n = 0; n < C::kHeadDim / 8; n += 2) {
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
        const int num_tokens = work.tokens.end - work.tokens.begin, first = math_warpgroup * p.copied_tokens;
        const int64_t token = work.sequence.q_begin + work.tokens.begin, head = work.kv_head * p.group;
        async_fence();
        bar_sync<128>(kMathBarrier + math_warpgroup);
        if (p.copied_tokens && first + p.copied_tokens <= num_tokens) {
            if (!leader) return true;
            for (int half = 0; half < C::kHalves; half++)
                tensor_store(&maps.out, stage + half * C::kQueryHalf, 64 * half, static_cast<int>(head), static_cast<int>(token + first),
                             static_cast<int>(work.sequence.batch));
            store_commit();
            return true;
        }
        auto *out = static_cast<uint16_t *>(args.out.data) + sa_offset(&args.out, work.sequence.batch, token, head);
#pragma unroll 1
        for (int x = threadIdx.x % 128; x < 64 * 8 * C::kHalves; x += 128) {
            const int row = x / (8 * C::kHalves), column = x % (8 * C::kHalves) * 8;
            const int at = 64 * math_warpgroup + row, i = at * p.group_inverse >> 16;
            if (i >= num_tokens || column >= args.problem.head_dim) continue;
            *reinterpret_cast<uint4 *>(out + i * args.out.row_stride + (at - i * p.group) * args.out.head_stride + column) =
                *reinterpret_cast<const uint4 *>(stage + column / 64 * C::kQueryHalf + row * kRowBytes + chunk_offset(row, column / 8 % 8));
        }
        async_fence();
        bar_sync<128>(kMathBarrier + math_warpgroup);
        return false;
    }

    __device__ __forceinline__ void run() {
        bool copying = false; // a bulk copy of the previous tile's out may still read its stage
        for (Ring<C::kRowStages> tiles;; tiles.n++) {
            const Ring<2> queries{tiles.n};
            const auto end_copy = [&] {
                if (!copying || !leader) return;
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
            const int end = own.tiles().end;
            const KeyTileWalk tile(own.tiles());
            if (tile.t < end) {
                static_assert((C::kTileQ - 64) / C::kTileK + 1 < C::kStages, "skipped tiles stay until the first scores are complete");
                Ring<C::kStages> skipped = ring;
                ring.n += tile.t - KeyTileWalk(rows.work.tiles).t;
                attend(o, factor, softmax, own, q, tile, end, [&] {
                    end_copy();
#pragma unroll 1
                    for (; skipped.n != ring.n; skipped.n++) skip_tile(skipped);
                });
            } else {
                finish_softmax<C>(factor, softmax, args, own);
                end_copy();
            }
            unsigned char *stage = smem.queries[queries.stage()] + 64 * math_warpgroup * kRowBytes;
            stage_out(q, o, factor);
            copying = write_out(stage, rows);
#pragma unroll 1
            for (KeyTileWalk unseen(rows.work.tiles, end); unseen.exists(); unseen.advance(), ring.n++) skip_tile(ring);
            rows.empty.arrive();
            if (leader && !copying) smem.q_empty.release(queries);
        }
        if (leader) store_wait();
    }
};

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void fwd_kernel(const __grid_constant__ sinkattn_fwd_args args,
                                                             const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                                                             unsigned *error_word, const __grid_constant__ typename C::Keys keys) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<Smem<C> *>(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kRowStages; i++) {
            smem.rows[i].full.init(32);
            smem.rows[i].empty.init(128 * C::kMathWarpgroups + 32 * C::kCheckers);
        }
        for (int i = 0; i < 2; i++) {
            smem.q_full[i].init(1);
            smem.q_empty[i].init(C::kMathWarpgroups);
        }
        for (int i = 0; i < C::kStages; i++) {
            smem.k_full[i].init(1);
            smem.k_empty[i].init(4 * C::kMathWarpgroups);
            smem.v_full[i].init(1);
            smem.v_ready[i].init(32 * C::kCheckers);
            smem.v_empty[i].init(C::kMathWarpgroups);
        }
        barrier_init_fence();
    }
    if (blockIdx.x == 0) check_lengths(args, keys, error_word);
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<C::kLoaderRegisters>();
        if (threadIdx.x < 32) schedule<C>(smem, args, keys, p);
        if constexpr (C::Keys::kCached) {
            if (threadIdx.x >= 32 && threadIdx.x < 64) load_cached_keys<C>(smem, maps, p, keys, error_word);
        } else {
            if (threadIdx.x == 32) load_tiles<C>(smem, maps, p);
        }
        if (threadIdx.x >= 64) check_tiles<C>(smem);
    } else {
        registers_up<C::kMathRegisters>();
        Math<C>{smem, args, keys, maps, p, warp_uniform(threadIdx.x / 128) - 1, threadIdx.x % 128 == 0, {}}.run();
    }
#else
    __trap();
#endif
}

template <class C>
sinkattn_status launch(const sinkattn_fwd_args &args, typename C::Keys keys, const sinkattn_plan &plan, const sinkattn_context &context) {
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
    p.copied_tokens = 64 % p.group ? 0 : 64 / p.group;
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
    SA_TRY(map_keys(&maps.k, problem, args.k, keys, C::kTileK, "k"));
    SA_TRY(map_keys(&maps.v, problem, args.v, keys, C::kTileK, "v"));
    if (p.copied_tokens) SA_TRY(map_rows(&maps.out, problem, args.out, p.copied_tokens, p.group, "out"));
    const unsigned blocks = static_cast<unsigned>(sa_min(num_items, plan.workers));
    return launch_blocks<fwd_kernel<C>>("sa_fwd_cuda_sm90", blocks, C::kThreads, sizeof(Smem<C>), context.stream, args, maps, p, error_word,
                                        keys);
}

template <int kHeadDim, int kTileQ, int kTileK, int kStages, int kRowStages, class Keys>
sinkattn_status launch_dtype(const sinkattn_fwd_args &args, const Keys &keys, const sinkattn_plan *plan, const sinkattn_context *context) {
    if (args.problem.dtype == SINKATTN_BF16)
        return launch<Config<Bf16, Keys, kHeadDim, kTileQ, kTileK, kStages, kRowStages>>(args, keys, *plan, *context);
    return launch<Config<Fp16, Keys, kHeadDim, kTileQ, kTileK, kStages, kRowStages>>(args, keys, *plan, *context);
}

} // namespace

// The forward of tensors, and that of packed rows over a cache, a decode.
#define SA_LAUNCHERS(head_dim, stages, row_stages)                                                                                         \
    extern "C" sinkattn_status sa_fwd_cuda_sm90_d##head_dim(const void *arguments, const sinkattn_plan *plan,                              \
                                                            const sinkattn_context *context) {                                             \
        constexpr int kTileQ = sa_fwd_cuda_sm90_d##head_dim##_tile_q, kTileK = sa_fwd_cuda_sm90_d##head_dim##_tile_k;                      \
        const auto &args = *static_cast<const sinkattn_fwd_args *>(arguments);                                                             \
        return launch_dtype<head_dim, kTileQ, kTileK, stages, row_stages>(args, TensorKeys{}, plan, context);                              \
    }                                                                                                                                      \
    extern "C" sinkattn_status sa_decode_cuda_sm90_packed_d##head_dim(const void *arguments, const sinkattn_plan *plan,                    \
                                                                      const sinkattn_context *context) {                                   \
        constexpr int kTileQ = sa_decode_cuda_sm90_packed_d##head_dim##_tile_q, kTileK = sa_decode_cuda_sm90_packed_d##head_dim##_tile_k;  \
        const auto &args = *static_cast<const sinkattn_decode_args *>(arguments);                                                          \
        SA_TRY(check_no_host_pages(args));                                                                                                 \
        return launch_dtype<head_dim, kTileQ, kTileK, stages, row_stages>(args.fwd, CacheKeys(args, kTileK), plan, context);               \
    }
SA_LAUNCHERS(64, 4, 4)
SA_LAUNCHERS(128, 3, 2)

} // namespace sa::fwd_sm90
