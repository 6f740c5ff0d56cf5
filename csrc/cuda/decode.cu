// SPDX-License-Identifier: Apache-2.0
//
// Decode for every architecture from sm_80, in one launch: a few rows a sequence against its cache, dense or paged.
//
//     key tiles of all sequences, end to end    |  b0 h0   |b0 h1 ..      | b1 h0          |b1 h1|..
//     blocks, equal shares of them              | 0    | 1    | 2    | 3    | 4    | 5    | 6  ..
//     a team's stages       load .. | S = Q K^T  mask, softmax  O = O alpha + P V | load again | ..
//     end of a fragment     teams merge in shared memory -> out; or a partial -> the last block of the stream merges -> out
//
// A stream is 16 rows, (token, head) pairs of one kv head of a sequence, against the tiles of 16 keys that they see. Every block finds
// its share from cache_seqlens by a prefix sum, so nothing is planned on the host and a captured graph follows the lengths. Teams, of one
// warp up to head_dim 128, take every kTeams-th tile, each with its own softmax and its own cp.async stages: the loop has no block barrier.
// Partials merge in the order of teams and parts, never of arrival, and the sink joins the last merge as the virtual partial (s, 1, 0).
//
// Shared memory: Q, then stages, K and V of one tile a team: 16 KiB at head_dim 64, else 32. Four blocks share an SM at head_dim 64, two
// elsewhere, where 2 stages fit. Registers: Q, O and S of a warp, 16 + 32 + 8 at head_dim 64.

#include "cuda/attn/decode_merge.cuh"
#include "cuda/cuda_backend.h"

namespace sa {
namespace {

template <class Element_, int kHeadDim_> struct Config {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kStep = 512 / kHeadDim; // tiles that make 32 KiB, K and V together
    static constexpr int kTeams = kStep < 4 ? kStep : 4;
    static constexpr int kTeamWarps = kHeadDim > 128 ? kHeadDim / 128 : 1; // each takes all scores and its own columns of O
    static constexpr int kTeamThreads = 32 * kTeamWarps, kThreads = kTeams * kTeamThreads;
    static constexpr int kBlocks = kHeadDim <= 64 ? 4 : 2; // an SM
    static constexpr int kColumns = kHeadDim / kTeamWarps;
    static constexpr bool kQueriesInRegisters = kHeadDim <= 128;
    static constexpr int kChunks = kHeadDim / 8, kRowBytes = 2 * kHeadDim, kTileBytes = kTileK * kRowBytes;
    static constexpr int kQueryBytes = kTileQ * kRowBytes, kStageBytes = kTeams * 2 * kTileBytes;
    static constexpr int kPartialRow = kHeadDim + 8;                // floats: O, pivot, sum, and room that spreads rows over the banks
    static constexpr int kItems = kTileQ * kHeadDim / 4 / kThreads; // quadruples of O a thread merges
    static_assert(kTeams * kTileQ * kPartialRow * 4 <= 2 * kStageBytes, "the teams' partials fit two stages");
    static_assert(kTeamThreads % kChunks == 0, "threads share the work evenly");
};

// ---- loads ----

template <class C> __device__ __forceinline__ void team_sync(int team) {
    if constexpr (C::kTeamWarps == 1)
        __syncwarp();
    else
        bar_sync<C::kTeamThreads>(team + 1);
}

// Copies the tiles of a team, every kTeams-th from n on, in this order. Where no tile lies in two pages, lane l holds the page of the l-th
// of 32 tiles, and of the 32 after those; else that of key l % 16 of the next tile. So no copy but the first waits for the block table.
template <class C> struct Loader {
    static constexpr int kRowStep = C::kTeamThreads / C::kChunks;
    const sinkattn_decode_args &args;
    const Schedule &schedule;
    const sa_key_tiles tiles;
    const int32_t *pages; // of this sequence, NULL: contiguous
    const uint16_t *k, *v;
    int32_t head_dim, batch, last, sink_keys, begin, end, page, page_ahead;
    int row, chunk, turn;

    // & and |, for a predicate without a branch.
    __device__ __forceinline__ bool is_seen(int32_t key) const { return (key < sink_keys) | ((key >= begin) & (key < end)); }

    __device__ __forceinline__ int32_t page_index(int32_t key) const {
        return static_cast<int32_t>(static_cast<unsigned long long>(key) * schedule.page_factor >> schedule.page_shift);
    }

    // The lane's, of tiles from the n-th on. A key that no row sees has no page.
    __device__ __forceinline__ int32_t find_page(int32_t n) const {
        if (!pages) return batch;
        const int lane = threadIdx.x % 32;
        if (schedule.whole_tiles) {
            n += lane * C::kTeams;
            return n < last ? __ldg(pages + page_index(sa_key_tile_at(&tiles, n) * kTileK)) : 0;
        }
        const int32_t key = sa_key_tile_at(&tiles, n) * kTileK + lane % kTileK;
        return n < last && is_seen(key) ? __ldg(pages + page_index(key)) : 0;
    }

    // The thread's chunk of K and V of a key, row r of the tile; zeros, and nothing is read, where no row sees it or it has no page.
    __device__ __forceinline__ void copy(uint32_t to, int r, int32_t key, int32_t its_page, int64_t k_offset, int64_t v_offset) const {
        const bool real = (its_page >= 0) & (chunk * 8 < head_dim) & is_seen(key);
        const uint32_t at = chunk_address(to, C::kRowBytes, r, chunk);
        cp_async_16(at, k + k_offset, real);
        cp_async_16(at + C::kTileBytes, v + v_offset, real);
    }

    // -1 for a page outside the cache.
    __device__ __forceinline__ int32_t check_page(int32_t its_page, bool seen) const {
        if (!pages || (its_page >= 0 && its_page < args.fwd.problem.num_pages)) return its_page;
        if (seen) atomicOr(schedule.error_word, kBadBlockTable);
        return -1;
    }

    __device__ __forceinline__ int32_t slot_of_key(int32_t key) const {
        return pages ? key - page_index(key) * static_cast<int32_t>(args.fwd.problem.page_size) : key;
    }

    __device__ __forceinline__ void load(uint32_t to, int32_t n) {
        const int32_t key = sa_key_tile_at(&tiles, n) * kTileK;
        const int64_t k_stride = args.fwd.k.row_stride, v_stride = args.fwd.v.row_stride;
        if (schedule.whole_tiles) {
            const int32_t its_page = check_page(__shfl_sync(0xffffffffu, page, turn), true), from = max(its_page, 0),
                          slot = slot_of_key(key);
            const int64_t k_offset = from * args.fwd.k.batch_stride + slot * k_stride;
            const int64_t v_offset = from * args.fwd.v.batch_stride + slot * v_stride;
#pragma unroll
            for (int i = 0; i < kTileK; i += kRowStep)
                copy(to, row + i, key + row + i, its_page, k_offset + i * k_stride, v_offset + i * v_stride);
            if (++turn < 32) return;
            turn = 0;
            page = page_ahead;
            page_ahead = find_page(n + 33 * C::kTeams);
            return;
        }
#pragma unroll 1
        for (int i = 0; i < kTileK; i += kRowStep) {
            const int32_t mine = key + row + i, slot = slot_of_key(mine) - row; // k and v point at the thread's first row
            const int32_t its_page = check_page(__shfl_sync(0xffffffffu, page, row + i), is_seen(mine)), from = max(its_page, 0);
            copy(to, row + i, mine, its_page, from * args.fwd.k.batch_stride + slot * k_stride,
                 from * args.fwd.v.batch_stride + slot * v_stride);
        }
        page = find_page(n + C::kTeams);
    }

    __device__ __forceinline__ Loader(const sinkattn_decode_args &args_, const Schedule &schedule_, const Fragment &fragment, int32_t n)
        : args(args_), schedule(schedule_), tiles(fragment.stream.tiles) {
        const int thread = threadIdx.x % C::kTeamThreads;
        row = thread / C::kChunks;
        chunk = thread % C::kChunks;
        turn = 0;
        pages = args.block_table ? args.block_table + fragment.batch * args.block_table_stride : nullptr;
        k = static_cast<const uint16_t *>(args.fwd.k.data) + fragment.kv_head * args.fwd.k.head_stride + row * args.fwd.k.row_stride +
            chunk * 8;
        v = static_cast<const uint16_t *>(args.fwd.v.data) + fragment.kv_head * args.fwd.v.head_stride + row * args.fwd.v.row_stride +
            chunk * 8;
        head_dim = static_cast<int32_t>(args.fwd.problem.head_dim);
        batch = static_cast<int32_t>(fragment.batch);
        last = min(fragment.last, sa_key_tile_count(&tiles));
        sink_keys = static_cast<int32_t>(tiles.sink_keys);
        begin = static_cast<int32_t>(tiles.band.begin);
        end = static_cast<int32_t>(tiles.band.end);
        page = find_page(n);
        page_ahead = schedule.whole_tiles ? find_page(n + 32 * C::kTeams) : 0;
    }
};

// Q to shared memory, rows past the stream's as zeros; a negative scale moves its sign to Q. And the sink and keys of each row.
template <class C>
__device__ __forceinline__ void load_rows(unsigned char *shared, Smem &smem, const sinkattn_decode_args &args, const Schedule &schedule) {
    const Fragment &fragment = smem.fragment;
    const uint32_t sign = schedule.scale_log2 < 0.0f ? 0x80008000u : 0;
    for (int x = threadIdx.x; x < kTileQ * C::kChunks; x += C::kThreads) {
        const int row = x / C::kChunks, chunk = x % C::kChunks, r = fragment.stream.row_begin + row;
        uint4 halves = {0, 0, 0, 0};
        if (row < fragment.stream.num_rows && chunk * 8 < args.fwd.problem.head_dim) {
            const int64_t at =
                sa_offset(&args.fwd.q, fragment.batch, r / schedule.group, fragment.kv_head * schedule.group + r % schedule.group);
            halves = *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(args.fwd.q.data) + at + chunk * 8);
            halves = {halves.x ^ sign, halves.y ^ sign, halves.z ^ sign, halves.w ^ sign};
        }
        *reinterpret_cast<uint4 *>(shared + row * C::kRowBytes + ((chunk ^ (row & 7)) << 4)) = halves;
    }
    if (threadIdx.x < kTileQ) {
        const int row = threadIdx.x, token = (fragment.stream.row_begin + row) / schedule.group;
        const bool real = row < fragment.stream.num_rows;
        const sa_range keys = real ? sa_row_band(&fragment.stream.band, token) : sa_range{0, 0};
        smem.begin[row] = static_cast<int32_t>(keys.begin);
        smem.end[row] = static_cast<int32_t>(keys.end);
        smem.sink_end[row] = real ? static_cast<int32_t>(sa_row_sink_end(&fragment.stream.band, token)) : 0;
        const int64_t head = fragment.kv_head * schedule.group + (fragment.stream.row_begin + row) % schedule.group;
        smem.s_aux[row] = real ? static_cast<float>(sa_s_aux(&args.fwd, head)) : -INFINITY;
    }
}

// The sink joins, and out and lse are written.
template <class C>
__device__ __forceinline__ void write_out(Merged<C> &merged, const Smem &smem, const sinkattn_decode_args &args, const Schedule &schedule) {
    const sinkattn_problem &problem = args.fwd.problem;
    const Fragment &fragment = smem.fragment;
    merged.for_each(fragment.stream.num_rows, [&](int i, int row, int column) {
        const int r = fragment.stream.row_begin + row, token = r / schedule.group;
        const int64_t head = fragment.kv_head * schedule.group + r % schedule.group;
        const float s = smem.s_aux[row], sink = s * kLog2e;
        merged.add(i, {0.0f, 0.0f, 0.0f, 0.0f}, sink, static_cast<float>(sa_sink_sum(s)));
        const float sum = merged.sum[i], factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (column == 0) {
            const float pivot = merged.pivot[i] == sink ? s : merged.pivot[i] * kLn2; // a row without keys gets s itself
            static_cast<float *>(args.fwd.lse)[(fragment.batch * problem.num_q_heads + head) * problem.q_len + token] =
                sum == 0.0f ? -INFINITY : pivot + logf(sum);
        }
        if (column >= problem.head_dim) return;
        uint2 halves = {pack_halves<typename C::Element>(merged.o[i][0] * factor, merged.o[i][1] * factor),
                        pack_halves<typename C::Element>(merged.o[i][2] * factor, merged.o[i][3] * factor)};
        const int64_t at = sa_offset(&args.fwd.out, fragment.batch, token, head) + column;
        *reinterpret_cast<uint2 *>(static_cast<uint16_t *>(args.fwd.out.data) + at) = halves;
    });
}

// ---- a fragment ----

// (pivot, sum, O) of this team's tiles: every kTeams-th of the fragment's. Returns how many teams have any, at least 1.
template <class C>
__device__ __forceinline__ int attend(Rows<C> &rows, unsigned char *shared, Smem &smem, const sinkattn_decode_args &args,
                                      const Schedule &schedule) {
    const Fragment &fragment = smem.fragment;
    const int team = threadIdx.x / C::kTeamThreads, first_chunk = threadIdx.x % C::kTeamThreads / 32 * (C::kColumns / 8);
    const int stages = schedule.stages, stage_begin = C::kQueryBytes + team * 2 * C::kTileBytes, num_rows = fragment.stream.num_rows;
    const uint32_t q = shared_address(shared);
    int32_t n = fragment.first + team;
    Loader<C> loader(args, schedule, fragment, n);
    const sa_key_tiles &tiles = loader.tiles;
#pragma unroll 1
    for (int i = 0; i < stages; i++) {
        if (n + i * C::kTeams < loader.last) loader.load(q + stage_begin + i * C::kStageBytes, n + i * C::kTeams);
        cp_async_commit();
    }
    if (threadIdx.x == 0 && fragment.num_parts > 1) open_counter(schedule.counters + fragment.counter, schedule.tag);
    load_rows<C>(shared, smem, args, schedule);
    __syncthreads();
    if constexpr (C::kQueriesInRegisters)
        for (int step = 0; step < C::kHeadDim / 16; step++) load_query(rows.q[step], q, C::kRowBytes, step);

#pragma unroll 1
    for (int stage = 0; n < loader.last; n += C::kTeams) {
        const int keys = stage_begin + stage * C::kStageBytes;
        const int32_t tile = sa_key_tile_at(&tiles, n), next = n + stages * C::kTeams;
        cp_async_wait_upto(stages - 1);
        team_sync<C>(team); // the tile has landed
        float s[2][4];
        qk_product<C>(s, rows, q, q + keys);
        const bool masked = !sa_key_tile_is_full(&tiles, tile);
        if (masked) mask_tile(s, smem, tile);
        softmax_step<C>(s, rows, fabsf(schedule.scale_log2), num_rows);
        if (masked) hide_unfinite<C>(shared + keys + C::kTileBytes, rows, smem, tile, first_chunk);
        pv_product<C>(rows, s, q + keys + C::kTileBytes, first_chunk);
        team_sync<C>(team); // and nobody reads it any more
        if (next < loader.last) loader.load(q + keys, next);
        cp_async_commit();
        stage = stage + 1 == stages ? 0 : stage + 1;
    }
    cp_async_wait<0>();
    return sa_clamp(loader.last - fragment.first, 1, C::kTeams);
}

template <class C>
__device__ __forceinline__ void finish(Rows<C> &rows, int count, unsigned char *shared, Smem &smem, const sinkattn_decode_args &args,
                                       const Schedule &schedule) {
    const Fragment &fragment = smem.fragment;
    float *partials = reinterpret_cast<float *>(shared + C::kQueryBytes);
    const int team = threadIdx.x / C::kTeamThreads, first_column = threadIdx.x % C::kTeamThreads / 32 * C::kColumns;
    const int num_rows = fragment.stream.num_rows;
    __syncthreads(); // the stages are free
    leave_partial<C>(partials + team * num_rows * C::kPartialRow, rows, num_rows, first_column);
    __syncthreads();
    Merged<C> merged;
    merged.clear();
    merged.add_partials(partials, count, num_rows);
    if (fragment.num_parts > 1) {
        store_partial<C>(slot_of(fragment, schedule, fragment.part), merged, num_rows);
        __syncthreads();
        if (threadIdx.x == 0) smem.is_last = arrive(schedule.counters + fragment.counter, schedule.tag, fragment.num_parts);
        __syncthreads();
        if (!smem.is_last) return;
        merge_parts<C>(partials, merged, fragment, schedule);
    }
    write_out<C>(merged, smem, args, schedule);
}

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kBlocks) void decode_kernel(const __grid_constant__ sinkattn_decode_args args,
                                                                         const __grid_constant__ Schedule schedule) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Smem smem;
    const bool balanced = schedule.num_splits == 0;
    if (balanced) take_share<C>(smem, args, schedule);
    do {
        __syncthreads(); // the cursor is written, the fragment before is done with
        if (threadIdx.x == 0) smem.alive = balanced ? next_share(smem, args, schedule) : take_part(smem, args, schedule);
        __syncthreads();
        if (!smem.alive) return;
        Rows<C> rows;
        for (int n = 0; n < C::kColumns / 8; n++)
            for (float &x : rows.o[n]) x = 0.0f;
        rows.pivot[0] = rows.pivot[1] = -INFINITY;
        rows.sum[0] = rows.sum[1] = 0.0f;
        const int count = attend<C>(rows, shared, smem, args, schedule);
        finish<C>(rows, count, shared, smem, args, schedule);
    } while (balanced);
}

// ---- host ----

// Distinct in each launch of the process, and no small number.
unsigned long long next_tag() {
    static unsigned long long launches;
    const unsigned long long launch = __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
    return launch * 0x9e3779b97bull & ((1ull << (64 - kCountBits)) - 1);
}

int64_t rows_a_slot(const sinkattn_problem &problem) {
    return sa_min(kTileQ, problem.q_len * (problem.num_q_heads / problem.num_kv_heads));
}

int64_t counter_bytes(const sinkattn_problem &problem, const sinkattn_plan &plan) {
    const int64_t counters = sa_is_balanced(&problem, &plan) ? plan.num_items : plan.num_items / plan.num_splits;
    return sa_ceil_div(counters, 2) * 16;
}

sinkattn_status check_sizes(const sinkattn_problem &problem, const sinkattn_plan &plan) {
    const int64_t group = problem.num_q_heads / problem.num_kv_heads, row_tiles = sa_ceil_div(problem.q_len * group, kTileQ);
    int64_t tiles;
    if (__builtin_mul_overflow(problem.batch * problem.num_kv_heads, row_tiles * sa_max(1, sa_ceil_div(problem.k_len, kTileK)), &tiles))
        tiles = INT64_MAX;
    const struct {
        const char *name;
        int64_t size, most;
    } limits[] = {{"batch", problem.batch, INT32_MAX},
                  {"num_kv_heads", problem.num_kv_heads, INT32_MAX},
                  {"q_len * group", problem.q_len * group, INT32_MAX - kTileQ},
                  {"k_len", problem.k_len, INT32_MAX - 65536}, // tiles are looked up ahead of the last
                  {"the number of tiles of 16 keys, of all sequences and kv heads,", tiles, INT32_MAX},
                  {"num_splits", plan.num_splits, (1 << kCountBits) - 1},
                  {"num_items", plan.num_items, INT32_MAX}};
    for (const auto &limit : limits)
        if (limit.size > limit.most)
            return sa_status(SINKATTN_UNSUPPORTED, "%s is %lld; a CUDA decode takes at most %lld", limit.name,
                             static_cast<long long>(limit.size), static_cast<long long>(limit.most));
    return sa_ok();
}

// Stages, and blocks that an SM then holds: as many, up to kBlocks, as have two stages each.
template <class C> sinkattn_status choose_stages(int32_t *stages, int32_t *blocks) {
    int device = 0, block_bytes = 0, sm_bytes = 0, reserved = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
    if (error != cudaSuccess) return sa_cuda_status("cudaDeviceGetAttribute", error);
    const auto fit = [](int64_t bytes) { return (bytes - C::kQueryBytes - static_cast<int64_t>(sizeof(Smem))) / C::kStageBytes; };
    for (*blocks = C::kBlocks; *blocks > 1 && fit(sm_bytes / *blocks - reserved) < 2;) *blocks /= 2;
    *stages = static_cast<int32_t>(sa_min(kMaxStages, fit(sa_min(block_bytes, sm_bytes / *blocks - reserved))));
    if (*stages >= 2) return sa_ok();
    return sa_status(SINKATTN_UNSUPPORTED, "a block may use %d bytes of shared memory; this kernel needs %d", block_bytes,
                     C::kQueryBytes + 2 * C::kStageBytes + static_cast<int>(sizeof(Smem)));
}

template <class C> sinkattn_status launch(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    if (problem.batch == 0 || problem.q_len == 0) return sa_ok();
    const bool balanced = sa_is_balanced(&problem, &plan);
    Schedule schedule = {};
    int32_t blocks = 1;
    sinkattn_status status = check_sizes(problem, plan);
    if (!status.code) status = choose_stages<C>(&schedule.stages, &blocks);
    if (!status.code) status = sa_cuda_error_word(&schedule.error_word);
    const int shared_bytes = C::kQueryBytes + schedule.stages * C::kStageBytes;
    if (!status.code)
        status = sa_cuda_status("cudaFuncSetAttribute",
                                cudaFuncSetAttribute(decode_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    if (status.code) return status;
    schedule.group = static_cast<int32_t>(problem.num_q_heads / problem.num_kv_heads);
    schedule.num_rows = static_cast<int32_t>(problem.q_len) * schedule.group;
    schedule.row_tiles = (schedule.num_rows + kTileQ - 1) / kTileQ;
    schedule.num_splits = balanced ? 0 : static_cast<int32_t>(plan.num_splits);
    schedule.workers = plan.workers;
    schedule.most_shares = static_cast<int32_t>(sa_min(blocks * static_cast<int64_t>(plan.workers), plan.num_items));
    schedule.num_streams = static_cast<int32_t>(problem.batch * problem.num_kv_heads * schedule.row_tiles);
    schedule.tag = next_tag();
    const uintptr_t workspace = (reinterpret_cast<uintptr_t>(context.workspace) + 15) / 16 * 16;
    schedule.counters = reinterpret_cast<unsigned long long *>(workspace);
    schedule.slots = reinterpret_cast<float *>(workspace + static_cast<uintptr_t>(counter_bytes(problem, plan)));
    schedule.slot_floats = rows_a_slot(problem) * C::kPartialRow;
    set_page_size(schedule, problem.page_size);
    schedule.scale_log2 = static_cast<float>(sa_softmax_scale(&problem)) * kLog2e;
    const unsigned grid = static_cast<unsigned>(balanced ? schedule.most_shares : plan.num_items);
    decode_kernel<C><<<grid, C::kThreads, shared_bytes, static_cast<cudaStream_t>(context.stream)>>>(args, schedule);
    return sa_cuda_status("sa_decode_cuda_sm80", cudaGetLastError());
}

template <int kHeadDim> sinkattn_status launch_dtype(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_decode_args *>(arguments);
    if (args.fwd.problem.dtype == SINKATTN_BF16) return launch<Config<Bf16, kHeadDim>>(args, *plan, *context);
    return launch<Config<Fp16, kHeadDim>>(args, *plan, *context);
}

} // namespace
} // namespace sa

extern "C" int64_t sa_cuda_decode_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan) {
    if (plan->num_splits == 1) return 0;
    const int64_t slots = sa_is_balanced(problem, plan) ? 2 * plan->num_items : plan->num_items;
    const int64_t row_bytes = (sinkattn_variant(plan->variant)->max_head_dim + 8) * static_cast<int64_t>(sizeof(float));
    return 16 + sa::counter_bytes(*problem, *plan) + slots * sa::rows_a_slot(*problem) * row_bytes;
}

#define SA_DECODE(head_dim)                                                                                                                \
    extern "C" sinkattn_status sa_decode_cuda_sm80_d##head_dim(const void *args, const sinkattn_plan *plan,                                \
                                                               const sinkattn_context *context) {                                          \
        return sa::launch_dtype<head_dim>(args, plan, context);                                                                            \
    }
SA_DECODE(64)
SA_DECODE(128)
SA_DECODE(256)
SA_DECODE(512)
