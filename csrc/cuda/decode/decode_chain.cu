// SPDX-License-Identifier: Apache-2.0
//
// Decode with invariant, in the order of sums of the forwards that fwd_sm90 has: a row's bits are those of the prefill's row.
//
//     warp w           S of 16 keys of a step | weights -> shared memory
//     block barrier    the step's weights are there; its values have landed
//     warp w           O += P V for its columns, over all keys of the step, in ascending order; the last warp adds the weights
//
// A stream is up to 8 rows of one kv head, in N of mma.sync; keys, or columns of O, are in M. A block has all keys of a chunk of a
// stream, or of the stream, one chunk after another, since the forward adds a chunk's keys in one run: O 16 keys at a time, weights in
// eight chains a key tile of the forward, key mod 8, which meet as pairs at the tile's end and as classes at the chunk's. So no sum crosses
// warps. Steps of O may be left out where nobody sees the keys. Chunks leave partials, which the stream's last block joins in order.
//
// The pivot is the maximum of the first key tile of the chunk that the row sees, and moves only where a sum of weights exceeds kLarge. So a
// block first assumes that all rows begin in one tile, and that no pivot moves; where that is wrong, it begins again, tile by tile.
//
// Shared memory: stages of K and V, 16 keys a warp, as many as fit; weights of two steps, rounded and not.
//
// Where streams are few, a cluster of another kernel has a chunk: see chain_cluster.cuh.

#include "cuda/decode/chain.cuh"
#include "cuda/decode/chain_cluster.cuh"
#include "cuda/decode/chain_scores.cuh"
#include "cuda/decode/column_chain.cuh"
#include "cuda/decode/finish.cuh"
#include "cuda/decode/load.cuh"
#include "cuda/decode/params.cuh"
#include "cuda/decode/work.cuh"
#include "cuda/host/launch.cuh"

namespace sa::decode {
namespace {

// Chunk `chunk` of stream `number`, at its sequence's length: the stream's tiles are those of the chunk. There is none where part.index is
// part.num_parts or more.
template <class C>
__device__ __forceinline__ void find_chunk(
        typename C::Smem &smem, const ChainArguments &params, uint32_t number, uint32_t chunk, int32_t length) {
    Part &part = smem.part;
    const uint32_t of_heads = sa_divide(number, params.by_heads);
    part.kv_head = static_cast<int32_t>(number - of_heads * params.num_heads);
    part.batch = static_cast<int32_t>(sa_divide(of_heads, params.by_row_tiles));
    Stream &stream = part.stream;
    stream.row_begin = (static_cast<int32_t>(of_heads) - part.batch * params.row_tiles) * C::kMostRows;
    stream.num_rows = min(C::kMostRows, params.num_rows - stream.row_begin);
    stream.band = sa_band_with_keys(params.band, max(0, min(length, params.band.k_len)));
    const sa_range tokens = {static_cast<int32_t>(sa_divide(stream.row_begin, params.by_group)),
            static_cast<int32_t>(sa_divide(stream.row_begin + stream.num_rows - 1, params.by_group)) + 1};
    stream.tiles = sa_key_tiles_of(&stream.band, tokens, C::kWalkKeys);
    part.index = chunk;
    part.num_parts = 1;
    part.slot = of_heads * params.chunk_slots;
    if (params.chunks > 1) {
        const int32_t size = params.chunk_keys / C::kWalkKeys;
        part.num_parts = static_cast<uint32_t>(max(1, (stream.tiles.end + size - 1) / size));
        sa_cut_key_tiles(&stream.tiles, static_cast<int32_t>(chunk) * size, (static_cast<int32_t>(chunk) + 1) * size);
    }
    stream.num_tiles = sa_key_tile_count(&stream.tiles);
    part.first = 0;
    part.last = static_cast<int32_t>(stream.num_tiles);
}

// Each warp writes the keys that the rows see, for itself. Returns the lane's row of Q.
template <class C> __device__ __forceinline__ const uint16_t *find_keys(typename C::Smem &smem, const ChainArguments &params) {
    const Part &part = smem.part;
    const int row = static_cast<int>(threadIdx.x) % 32;
    if (row < C::kMostRows) smem.rows[threadIdx.x / 32][row] = row < part.stream.num_rows ? keys_of_row(part, params, row) : Row{0, 0, 0};
    __syncwarp();
    return query_row(part, params, min(row / 4, part.stream.num_rows - 1));
}

// False, before anything is written, if the speculation was stale.
template <class C>
__device__ __forceinline__ bool attend_stream(
        unsigned char *shared, typename C::Smem &smem, const typename C::Arguments &params, Speculation &speculation) {
    const Part &part = smem.part;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    Chain<C> chain(smem, params, shared);
    Loader<C> loader(params, part, warp);
    const int32_t count = part.last, page_before = loader.page;
    const uint16_t *row = find_keys<C>(smem, params);
    const bool speculated = speculation.before_wait;
    int32_t length_now = 0;
    Requested requested = {};
#pragma unroll 1
    for (int stage = 0; stage < params.stages; stage++) {
        const int32_t n = warp + stage * C::kWarps;
        if (n < count) loader.template load<true>(chain.base + stage * C::kStageBytes + warp * C::kTeamBytes, n, speculation);
        cp_async_commit();
        if (stage > 0) continue;
        speculation.wait();
        let_next_kernel_start();
        length_now = read_length(params, speculation.batch);
        if (params.whole_tiles) loader.page = loader.find_page(warp);
        const auto *from = reinterpret_cast<const uint32_t *>(row) + threadIdx.x % 4;
#pragma unroll
        for (int x = 0; x < C::kHeadDim / 8; x++) chain.rows.q[x / 2][x % 2] = 8 * x < params.head_dim ? from[4 * x] : 0;
        requested = request_rows<C>(smem, params);
    }
    const bool wrong = (loader.check_first_pages(warp, page_before) | speculation.replace_length(params, length_now)) & speculated;
    if (static_cast<int>(threadIdx.x) < part.stream.num_rows) smem.s_aux[threadIdx.x] = s_aux_of(params, requested);
    if (threadIdx.x == 0 && part.num_parts > 1 && params.blocks > 1) open_counter(counter_of<C>(part, params), requested.count, params.tag);
    if (__syncthreads_or(wrong)) {
        cp_async_wait<0>();
        __syncthreads();
        return false;
    }
    chain.pivot[0] = chain.pivot[1] = -INFINITY;
    if (count > 0 && !(chain.find_pivots(loader, count) && chain.run(loader, count, speculation))) chain.run_carefully(loader, count);
    chain.write();
    if (loader.bad_page) atomicOr(params.error_word, kBadBlockTable);
    return true;
}

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kBlocks) void chain_decode_kernel(const __grid_constant__ typename C::Arguments params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ typename C::Smem smem;
    const uint32_t first = sa_divide(blockIdx.x, params.by_streams), number = blockIdx.x - first * params.streams;
    const auto batch = static_cast<int32_t>(sa_divide(sa_divide(number, params.by_heads), params.by_row_tiles));
    Speculation speculation = {batch, read_length(params, batch), may_start_early()};
    const Part &part = smem.part;
    uint32_t chunk = first;
    for (;;) {
        __syncthreads(); // no thread reads the previous part any more
        if (threadIdx.x == 0) find_chunk<C>(smem, params, number, chunk, speculation.length);
        __syncthreads();
        if (part.index < part.num_parts) {
            if (attend_stream<C>(shared, smem, params, speculation)) chunk += params.blocks;
            if (chunk >= params.chunks) break;
            continue;
        }
        const bool speculated = speculation.before_wait;
        speculation.wait();
        let_next_kernel_start();
        const bool stale = speculation.replace_length(params, read_length(params, batch));
        if (!__syncthreads_or(speculated && stale)) break;
    }
    if (part.num_parts > 1 && params.blocks > 1 && chunk != first) join_chunks<C>(smem, params, min(params.blocks, part.num_parts));
#else
    __trap();
#endif
}

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void cluster_chain_decode_kernel(const __grid_constant__ typename C::Arguments params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char cluster_shared[];
    auto &smem = *reinterpret_cast<typename C::Smem *>(cluster_shared);
    const uint32_t cluster = blockIdx.x / C::kCluster, chunk = sa_divide(cluster, params.by_streams),
                   number = cluster - chunk * params.streams;
    const auto batch = static_cast<int32_t>(sa_divide(sa_divide(number, params.by_heads), params.by_row_tiles));
    if (chunk > 0) { // most are past the sequence's end, and in the way of others
        wait_for_previous_kernel();
        if (wide(chunk) * params.chunk_keys >= read_length(params, batch)) return;
    }
    if (threadIdx.x == 0) ClusterStream<C>::init_barriers(smem, false);
    __syncwarp();
    if (C::kCluster > 1) cluster_arrive();
    const int warp = warp_uniform(threadIdx.x / 32);
    int32_t length = read_length(params, batch), pages[2];
    for (bool before_wait = true;; before_wait = false) { // once more where the preceding kernel has changed the length
        if (threadIdx.x == 0) find_chunk<C>(smem, params, number, chunk, length);
        __syncthreads();
        if (threadIdx.x < 32) describe_cluster_rows<C>(smem, params);
        if (before_wait) {
            wait_for_previous_kernel();
            let_next_kernel_start();
        }
        const int32_t now = read_length(params, batch);
        if (warp >= C::kFirstScorer) Scorer<C>::look_up(pages, ClusterStream<C>(smem, params), 0);
        if (static_cast<int>(threadIdx.x) < smem.part.stream.num_rows)
            smem.s_aux[threadIdx.x] = params.s_aux ? static_cast<float>(sa_load(params.s_aux, params.s_aux_dtype,
                                                             token_head(smem.part, params, static_cast<int>(threadIdx.x)).head))
                                                   : -INFINITY;
        if (!__syncthreads_or(now != length)) break; // the preceding kernel may write between the threads' first reads
        length = now;
    }
    if (threadIdx.x == 0) check_length(params, length);
    if (C::kCluster > 1) cluster_wait(); // the barriers of all blocks are there
    const Part &part = smem.part;
    if (part.index >= part.num_parts) return;
    const ClusterStream<C> stream(smem, params);
    if (warp >= C::kFirstScorer) {
        Scorer<C> scorer(stream);
        stream.in_runs([&](int32_t first, int32_t &) {
            if (params.whole_tiles)
                scorer.template run<true>(first, pages);
            else
                scorer.template run<false>(first, pages);
        });
        if (scorer.bad_page) atomicOr(params.error_word, kBadBlockTable);
    } else if (warp < C::kChainWarps) {
        ColumnChain<C> chain(stream);
        stream.in_runs([&](int32_t first, int32_t &stop) { chain.run(first, stop); });
        chain.write();
    } else if (warp == C::kAdder) {
        if (part.num_parts > 1 && threadIdx.x % 32 == 0) {
            unsigned long long *counter = counter_of<C>(part, params);
            open_counter(counter, __ldcg(counter), params.tag);
        }
        const Adder<C> adder(stream);
        stream.in_runs([&](int32_t first, int32_t &) { adder.run(first); });
    } else {
        const ValueLoader<C> loader(stream);
        stream.in_runs([&](int32_t first, int32_t &) { loader.run(first); });
    }
    if (part.num_parts > 1) join_chunks<C>(smem, params, part.num_parts * C::kCluster);
#else
    __trap();
#endif
}

template <class C>
sinkattn_status set_chain(
        ChainArguments &params, const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_variant_info *info = sinkattn_variant(plan.variant);
    SA_TRY(sa_cuda_error_word(&params.error_word));
    set_tensors(params, args, 1, C::kMostRows);
    set_extras(params, args);
    params.streams = static_cast<uint32_t>(plan.num_items);
    params.by_streams = divisor_of(plan.num_items);
    params.chunks = static_cast<uint32_t>(sa_num_chunks(&args.fwd.problem, info));
    params.chunk_keys = static_cast<int32_t>(sa_chunk_keys(info->tile_k));
    params.blocks = static_cast<uint32_t>(sa_chain_blocks(plan.num_items, params.chunks));
    params.chunk_slots = static_cast<uint32_t>(sa_chain_slots(plan.num_items, params.chunks));
    params.head_slots = static_cast<uint32_t>(params.batch * params.row_tiles) * params.chunk_slots;
    params.slots = reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(context.workspace) + 15) / 16 * 16);
    params.slot_floats = C::kMostRows * C::kPartialRow;
    params.tag = next_launch_tag();
    return sa_ok();
}

template <class C>
sinkattn_status launch_cluster_chain(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    ChainArguments params = {};
    SA_TRY(set_chain<C>(params, args, plan, context));
    constexpr int kBytes = sizeof(typename C::Smem);
    SA_TRY(allow_shared<cluster_chain_decode_kernel<C>>(kBytes));
    return launch_clusters<cluster_chain_decode_kernel<C>>("sa_decode_cuda_sm90_chain", params.streams * params.chunks * C::kCluster,
            C::kCluster, C::kThreads, kBytes, context.stream, params);
}

template <class C>
sinkattn_status launch_chain(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context, int sms) {
    ChainArguments params = {};
    SA_TRY(set_chain<C>(params, args, plan, context));
    SA_TRY(allow_shared<chain_decode_kernel<C>>(C::kMostStages * C::kStageBytes + C::kWeightBytes));
    const unsigned grid = params.streams * params.blocks;
    const int on_sm = static_cast<int>(sa_ceil_div(grid, sms));
    params.stages = C::kMostStages == 3 ? 3 : on_sm <= 2 ? 5 : on_sm == 3 ? 4 : 3;
    return launch_overlapping<chain_decode_kernel<C>>(
            "sa_decode_cuda_sm90_chain", grid, C::kThreads, params.stages * C::kStageBytes + C::kWeightBytes, context.stream, params);
}

sinkattn_status count_sms(int *sms) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device);
    return sa_cuda_status("cudaDeviceGetAttribute", error);
}

// Clusters past a sequence's end return at once, but each block of them takes an SM.
constexpr int64_t kMostClusters = 4096;

template <class Element, int kHeadDim>
sinkattn_status launch_warps(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    const int64_t streams = plan.num_items, chunks = sa_num_chunks(&problem, sinkattn_variant(plan.variant));
    const bool share_keys = streams > problem.batch * problem.num_kv_heads; // tiles of rows, in the L2 cache
    if (streams == 0) return sa_ok();
    SA_TRY(check_decode_strides(args, streams * sa_max(1, sa_chain_slots(streams, chunks))));
    int sms = 0;
    SA_TRY(count_sms(&sms));
    if (2 * streams > (share_keys ? 4 : 3) * sms || streams * chunks > kMostClusters)
        return launch_chain<ChainConfig<Element, kHeadDim>>(args, plan, context, sms);
    // Streams this few have a slot for each chunk, by sa_chain_slots. How many chunks there are depends on the lengths: at least the
    // streams, at most `chunks` times as many. The geometric mean of both decides.
    const int64_t square = streams * streams * chunks, all = int64_t{sms} * sms;
    if constexpr (kHeadDim == 64)
        if (100 * square <= all) return launch_cluster_chain<ClusterConfig<Element, 64, 4, 2, 16>>(args, plan, context);
    if (16 * square <= all)
        return launch_cluster_chain<ClusterConfig<Element, kHeadDim, kHeadDim / 32, 2, kHeadDim == 64 ? 8 : 16>>(args, plan, context);
    return launch_cluster_chain<ClusterConfig<Element, kHeadDim, kHeadDim / 64, 2, 8>>(args, plan, context);
}

template <int kHeadDim> sinkattn_status run_chain(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_decode_args *>(arguments);
    return args.fwd.problem.dtype == SINKATTN_BF16 ? launch_warps<Bf16, kHeadDim>(args, *plan, *context)
                                                   : launch_warps<Fp16, kHeadDim>(args, *plan, *context);
}

} // namespace
} // namespace sa::decode

extern "C" sinkattn_status sa_decode_cuda_sm90_chain_d64(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return sa::decode::run_chain<64>(args, plan, context);
}

extern "C" sinkattn_status sa_decode_cuda_sm90_chain_d128(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return sa::decode::run_chain<128>(args, plan, context);
}
