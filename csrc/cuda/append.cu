// SPDX-License-Identifier: Apache-2.0
//
// Copies new keys and values behind those in use: a block copies one new row of a sequence, a thread 16 bytes of K and, as far as its rows
// reach, of V. Lengths and pages are read on the device, so that a captured graph serves all of them. Rows past the capacity or in unmapped
// pages are left out and reported in the error word. Two sequences that write one slot leave a mixture of both. A second kernel writes
// packed rows to numbered slots.

#include "cuda/host/launch.cuh"
#include "cuda/ptx/sm80.cuh"
#include "cuda/work/items.cuh"

namespace sa {
namespace {

constexpr int kThreads = 128, kChunkBytes = 16;

struct Params {
    sinkattn_append_args args;
    uint32_t blocks;                                     // of a sequence: one for each new row, at least one
    uint32_t chunks_a_head, v_chunks_a_head, num_chunks; // num_chunks: of a row of k; no v_chunks_a_head: keys alone
    unsigned *error_word;
};

// 16 bytes of a row; offset counts elements.
template <class To> __device__ __forceinline__ To *chunk_at(const sinkattn_tensor &tensor, int64_t offset, int64_t bytes, uint32_t chunk) {
    return reinterpret_cast<To *>(static_cast<char *>(tensor.data) + offset * bytes + chunk * static_cast<int64_t>(kChunkBytes));
}

__global__ __launch_bounds__(kThreads) void append_kernel(const __grid_constant__ Params params) {
    const sinkattn_append_args &args = params.args;
    const sinkattn_decode_args &cache = args.cache;
    const sinkattn_problem &problem = cache.fwd.problem;
    const uint32_t b = blockIdx.x / params.blocks, row = blockIdx.x - b * params.blocks;
    const uint32_t x = blockIdx.y * kThreads + threadIdx.x, head = x / params.chunks_a_head, chunk = x - head * params.chunks_a_head;
    const int64_t bytes = sa_dtype_bytes(problem.dtype);
    const bool copies = x < params.num_chunks && row < problem.q_len, copies_v = copies && chunk < params.v_chunks_a_head;
    wait_for_previous_kernel();
    let_next_kernel_start();
    uint4 k = {}, v = {};
    // In flight while the length is read.
    if (copies) k = *chunk_at<const uint4>(args.k, sa_offset(&args.k, b, row, head), bytes, chunk);
    if (copies_v) v = *chunk_at<const uint4>(args.v, sa_offset(&args.v, b, row, head), bytes, chunk);
    const int32_t used = cache.cache_seqlens[b];
    const sa_range slots = sa_new_slots(&args, b);
    const int64_t slot = slots.begin + row;
    if (x == 0 && row == 0) {
        args.cache_seqlens[b] = static_cast<int32_t>(slots.end);
        if (slots.begin != used || slots.end - used != problem.q_len) atomicOr(params.error_word, kBadCacheSeqlens);
    }
    if (!copies || slot >= slots.end) return;
    const int64_t k_offset = sa_cache_offset(&cache, &cache.fwd.k, b, slot, head);
    if (k_offset < 0) {
        if (x == 0) atomicOr(params.error_word, kBadBlockTable);
        return;
    }
    *chunk_at<uint4>(cache.fwd.k, k_offset, bytes, chunk) = k;
    if (copies_v) *chunk_at<uint4>(cache.fwd.v, sa_cache_offset(&cache, &cache.fwd.v, b, slot, head), bytes, chunk) = v;
}

__global__ __launch_bounds__(kThreads) void append_slots_kernel(const __grid_constant__ Params params) {
    const sinkattn_append_args &args = params.args;
    const sinkattn_fwd_args &cache = args.cache.fwd;
    const sinkattn_problem &problem = cache.problem;
    const uint32_t row = blockIdx.x, x = blockIdx.y * kThreads + threadIdx.x, head = x / params.chunks_a_head;
    const uint32_t chunk = x - head * params.chunks_a_head;
    const int64_t bytes = sa_dtype_bytes(problem.dtype);
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int64_t slot = args.slot_mapping[row];
    if (slot < 0 || x >= params.num_chunks) return;
    if (slot >= sa_num_slots(&problem)) {
        if (x == 0) atomicOr(params.error_word, kBadSlotMapping);
        return;
    }
    *chunk_at<uint4>(cache.k, sa_slot_offset(&problem, &cache.k, slot, head), bytes, chunk) =
            *chunk_at<const uint4>(args.k, sa_offset(&args.k, 0, row, head), bytes, chunk);
    if (chunk >= params.v_chunks_a_head) return;
    *chunk_at<uint4>(cache.v, sa_slot_offset(&problem, &cache.v, slot, head), bytes, chunk) =
            *chunk_at<const uint4>(args.v, sa_offset(&args.v, 0, row, head), bytes, chunk);
}

} // namespace
} // namespace sa

extern "C" sinkattn_status sa_append_cuda(const sinkattn_append_args *args, const sinkattn_context *context) {
    const sinkattn_problem &problem = args->cache.fwd.problem;
    const int64_t batch = problem.packed ? 1 : problem.batch;
    if (batch == 0 || (problem.packed && problem.q_len == 0)) return sa_ok();
    const int64_t chunks_a_head = problem.head_dim * sa_dtype_bytes(problem.dtype) / sa::kChunkBytes;
    const int64_t rows = sa_max(1, problem.q_len), num_chunks = problem.num_kv_heads * chunks_a_head;
    const int64_t layers = sa_ceil_div(num_chunks, sa::kThreads);
    if (rows > INT32_MAX || batch > INT32_MAX / rows || layers > UINT16_MAX)
        return sa_status(SINKATTN_UNSUPPORTED,
                "batch * q_len is %lld * %lld, num_kv_heads %lld; a CUDA append takes less than 2^31 rows of at most 2^27 bytes",
                static_cast<long long>(batch), static_cast<long long>(rows), static_cast<long long>(problem.num_kv_heads));
    const int64_t v_chunks_a_head = args->v.data ? sa_head_dim_v(&problem) * sa_dtype_bytes(problem.dtype) / sa::kChunkBytes : 0;
    sa::Params params = {*args, static_cast<uint32_t>(rows), static_cast<uint32_t>(chunks_a_head), static_cast<uint32_t>(v_chunks_a_head),
            static_cast<uint32_t>(num_chunks), nullptr};
    SA_TRY(sa_cuda_error_word(&params.error_word));
    const dim3 grid(static_cast<unsigned>(batch * rows), static_cast<unsigned>(layers));
    if (problem.packed)
        return sa::launch_overlapping<sa::append_slots_kernel>("sa_append_cuda", grid, sa::kThreads, 0, context->stream, params);
    return sa::launch_overlapping<sa::append_kernel>("sa_append_cuda", grid, sa::kThreads, 0, context->stream, params);
}
